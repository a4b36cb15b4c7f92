"""Hooks that keep SGLang's own figures true when draft lengths vary and most steps verify only some rows."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from sglang.srt.managers.scheduler_components import metrics_reporter

from aspire_sglang.sglang_compat.request_hooks import aspire_selected


def update_spec_metrics(
    original: Callable[..., None], reporter: Any, bs: int, num_correct_drafts: int, **kwargs: Any
) -> None:
    """AROUND ``update_spec_metrics``: count the rows that verified, not all ``bs`` rows of the step.

    ``num_correct_drafts`` is the sum of committed tokens less ``bs`` (what SGLang's throughput counters expect).
    """
    if not aspire_selected():
        original(reporter, bs, num_correct_drafts, **kwargs)
        return
    committed, verify_rows = num_correct_drafts + bs, reporter.aspire_verify_rows
    original(reporter, verify_rows, committed - verify_rows, **kwargs)
    # The original has just added the accepted drafts, its caller one token a row: make the sum what was committed.
    reporter.num_generated_tokens += verify_rows - bs


def report_decode_stats(original: Callable[..., None], reporter: Any, *args: Any, **kwargs: Any) -> None:
    """AROUND ``report_decode_stats``: acceptance over the drafts really verified in the interval.

    The original divides by the number of verifies (there may be none) and takes the draft length from the server's
    arguments; while it runs, its module sees the interval's mean length instead.
    """
    if not aspire_selected():
        original(reporter, *args, **kwargs)
        return
    verifies = reporter.spec_num_forward_ct
    stock_get_spec = metrics_reporter.get_spec
    mean_drafts = reporter.spec_num_cap_tokens / max(verifies, 1)
    metrics_reporter.get_spec = lambda: SimpleNamespace(speculative_num_draft_tokens=1 + mean_drafts)
    reporter.spec_num_forward_ct = max(verifies, 1)
    try:
        original(reporter, *args, **kwargs)
    finally:
        metrics_reporter.get_spec = stock_get_spec
        interval_ended = reporter.spec_num_forward_ct == 0
        if verifies == 0 and interval_ended:
            reporter.spec_total_num_forward_ct -= 1
        elif verifies == 0:
            reporter.spec_num_forward_ct = 0


def get_internal_state(original: Callable[..., Any], scheduler: Any, recv_req: Any) -> Any:
    """AROUND ``Scheduler.get_internal_state``: our counters under ``aspire`` in /server_info."""
    output = original(scheduler, recv_req)
    if aspire_selected(scheduler.server_args):
        output.internal_state["aspire"] = scheduler.draft_worker.describe()
    return output


def request_metrics(
    original: Callable[..., None], manager: Any, meta_info: dict[str, Any], recv_obj: Any, i: int
) -> None:
    """AROUND ``_calculate_spec_decoding_metrics``: acceptance over the drafts that were really verified."""
    original(manager, meta_info, recv_obj, i)
    if not aspire_selected(manager.server_args) or "spec_verify_ct" not in meta_info:
        return
    proposed = recv_obj.spec_num_cap_tokens[i]
    for name in ("spec_num_proposed_drafts", "spec_proposed_drafts"):
        meta_info[name] = proposed
    if proposed > 0:
        meta_info["spec_accept_rate"] = recv_obj.spec_num_correct_drafts[i] / proposed
    else:
        meta_info.pop("spec_accept_rate", None)
