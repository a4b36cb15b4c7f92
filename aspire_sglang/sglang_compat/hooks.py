"""Every place where SGLang is changed, in one table, each with its reason.

All hooks do nothing for a server that does not use ASPIRE (``ServerArgs`` hooks excepted, which only add options).
SGLang logs a plugin's failures and goes on; :func:`check_hooks` finds out and refuses to serve instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from aspire_sglang.config import ConfigError
from aspire_sglang.sglang_compat import metrics_hooks, options, request_hooks, support
from aspire_sglang.sglang_compat.platform import apply_gpu_defaults, is_cpu_platform


@dataclass(frozen=True, slots=True)
class Hook:
    """One change of SGLang: dotted target, how our function combines with it, and why it is needed."""

    target: str
    kind: HookType
    function: Callable[..., Any]
    reason: str


_SRT = "sglang.srt"
_BATCH_RESULT = f"{_SRT}.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
_METRICS = f"{_SRT}.managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter"
_STREAMER = f"{_SRT}.managers.scheduler_components.output_streamer._GenerationStreamAccumulator"


def assign_req_to_token_pool(
    original: Callable[..., None],
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    batch_size: int,
) -> None:
    """AROUND ``assign_req_to_token_pool_func``: on a CPU write the slots of positions start..end with PyTorch."""
    if not is_cpu_platform():
        original(req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, batch_size)
        return
    taken = 0
    for slot, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        req_to_token[slot, start:end] = out_cache_loc[taken : taken + end - start].to(req_to_token.dtype)
        taken += end - start


HOOKS: tuple[Hook, ...] = (
    Hook(
        f"{_SRT}.server_args.ServerArgs.add_cli_args",
        HookType.AFTER,
        options.add_cli_args,
        "--spec-algorithm and the --aspire-* flags",
    ),
    Hook(
        f"{_SRT}.server_args.ServerArgs.from_cli_args",
        HookType.AROUND,
        options.around_from_cli_args,
        "the original keeps dataclass fields only and would drop our flags",
    ),
    Hook(
        f"{_SRT}.server_args.ServerArgs.__init__",
        HookType.AROUND,
        options.around_init,
        "keyword arguments of Engine; attaches the validated config record",
    ),
    Hook(
        f"{_SRT}.server_args.ServerArgs.__post_init__",
        HookType.BEFORE,
        apply_gpu_defaults,
        "SGLang must resolve page sizes, graphs and pools for our attention backend, so it is chosen first",
    ),
    Hook(
        f"{_SRT}.server_args.ServerArgs.__post_init__",
        HookType.BEFORE,
        support.check_settings,
        "refuse unsupported settings before SGLang acts on them or fails on them in its own words",
    ),
    Hook(
        f"{_SRT}.server_args.ServerArgs._handle_model_specific_adjustments",
        HookType.BEFORE,
        support.check_model,
        "refuse unsupported models before SGLang asks them for other attention backends",
    ),
    Hook(
        f"{_SRT}.mem_cache.allocation.assign_req_to_token_pool_func",
        HookType.AROUND,
        assign_req_to_token_pool,
        "launches Triton, which a CPU does not have",
    ),
    Hook(
        f"{_SRT}.mem_cache.allocation_sizing.get_req_to_token_extra_context_len",
        HookType.AROUND,
        request_hooks.extra_context_len,
        "a row of req_to_token must hold the whole decode reserve at the context limit (too narrow in stock)",
    ),
    Hook(
        f"{_SRT}.managers.tokenizer_manager.TokenizerManager._validate_one_request",
        HookType.AROUND,
        request_hooks.validate_request,
        "a value of the wrong type passes stock's checks and ends the scheduler process when it decodes the request",
    ),
    Hook(
        f"{_SRT}.managers.tokenizer_manager.TokenizerManager._send_one_request",
        HookType.AROUND,
        request_hooks.send_request,
        "the choices of one request share a seed, which fixes the text here (stock ignores it)",
    ),
    Hook(
        f"{_SRT}.managers.scheduler.Scheduler._add_request_to_queue",
        HookType.AROUND,
        request_hooks.add_request_to_queue,
        "refuse with a clear error what we cannot serve exactly",
    ),
    Hook(
        f"{_SRT}.managers.schedule_batch.ScheduleBatch.cumulate_penalty_output_tokens",
        HookType.AROUND,
        request_hooks.cumulate_penalties,
        "stock counts one token a step; our sampler counts every committed token itself",
    ),
    Hook(
        f"{_SRT}.managers.schedule_batch.Req.update_finish_state",
        HookType.AROUND,
        request_hooks.update_finish_state,
        "a stop inside an accepted run must act as if its tokens had come one by one; drafting steps add none",
    ),
    Hook(
        f"{_STREAMER}.accept",
        HookType.AROUND,
        request_hooks.stream_accept,
        "a drafting step has nothing to send; stock's interval test steps over runs of several tokens",
    ),
    Hook(
        f"{_BATCH_RESULT}._resolve_spec_v2_tokens",
        HookType.AROUND,
        request_hooks.resolve_tokens,
        "stock counts every row of every step as a verify; drafting rows commit nothing",
    ),
    Hook(
        f"{_METRICS}.update_spec_metrics",
        HookType.AROUND,
        metrics_hooks.update_spec_metrics,
        "count verifying rows only",
    ),
    Hook(
        f"{_METRICS}.report_decode_stats",
        HookType.AROUND,
        metrics_hooks.report_decode_stats,
        "an interval without any verify divides by zero; the acceptance rate assumes a fixed draft length",
    ),
    Hook(
        f"{_SRT}.managers.scheduler.Scheduler.get_internal_state",
        HookType.AROUND,
        metrics_hooks.get_internal_state,
        "adds our counters to /server_info",
    ),
    Hook(
        f"{_SRT}.managers.tokenizer_manager.TokenizerManager._calculate_spec_decoding_metrics",
        HookType.AROUND,
        metrics_hooks.request_metrics,
        "meta_info assumes a fixed draft length",
    ),
)


def register_hooks() -> None:
    """Hand the table to SGLang, which applies it after all plugins are loaded."""
    for hook in HOOKS:
        HookRegistry.register(hook.target, hook.function, hook.kind)


def missing_hooks() -> list[str]:
    """Targets of the table that SGLang did not patch in this process."""
    return sorted({hook.target for hook in HOOKS} - HookRegistry._patched)


def check_hooks() -> None:
    """Raise :class:`ConfigError` that names the hooks SGLang did not apply in this process."""
    missing = missing_hooks()
    if missing:
        raise ConfigError(
            f"SGLang did not apply {len(missing)} hook(s) of aspire-sglang ({', '.join(missing)}); output could be "
            "wrong, so the server stops. Reinstall SGLang and aspire-sglang, and unset SGLANG_PLUGINS"
        )
