"""Hooks on a request's way through SGLang's scheduler: admission, commit, finish, streaming.

A step result holds, for every row, a run of committed tokens: empty while the request drafts, 1 to draft_max+1
tokens when it verified. SGLang's own code assumes that every row of every step verified.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode
from sglang.srt.runtime_context import get_server_args

from aspire_sglang.sglang_compat import support
from aspire_sglang.sglang_compat.spec_algorithm import ALGORITHM


def aspire_selected(server_args: Any = None) -> bool:
    """True when the server of this process uses ASPIRE."""
    args = server_args if server_args is not None else get_server_args()
    return args is not None and args.speculative_algorithm == ALGORITHM


def extra_context_len(original: Callable[..., int], server_args: Any) -> int:
    """AROUND ``get_req_to_token_extra_context_len``: columns of req_to_token beyond the context length.

    Decode preparation rounds committed + reserve up to a page. Stock leaves room for one draft run only, so near the
    context limit the write runs into the next request's row.
    """
    stock = original(server_args)
    if not aspire_selected(server_args):
        return stock
    needed: int = get_alloc_reserve_per_decode(server_args) + server_args.page_size
    return max(stock, needed)


def validate_request(original: Callable[..., None], manager: Any, obj: Any, input_ids: Any) -> None:
    """AROUND ``TokenizerManager._validate_one_request`` (main process): what would end the scheduler is a 400.

    Stock sends parameters of a wrong type and unknown token ids on, and the scheduler process ends on them.
    """
    if aspire_selected(manager.server_args):
        problem = support.sampling_params_problem(obj.sampling_params)
        if problem is None and obj.input_ids is not None:
            problem = support.input_ids_problem(input_ids, manager.model_config.vocab_size)
        if problem is not None:
            raise ValueError(problem)
    original(manager, obj, input_ids)


def add_request_to_queue(original: Callable[..., None], scheduler: Any, req: Any, *args: Any, **kwargs: Any) -> None:
    """AROUND ``Scheduler._add_request_to_queue``: a request we cannot serve exactly ends with a 400 that says why."""
    if aspire_selected(scheduler.server_args) and req.to_finish is None:
        problem = support.request_problem(req)
        if problem is not None:
            req.set_finish_with_abort(problem)
    original(scheduler, req, *args, **kwargs)


def cumulate_penalties(original: Callable[..., None], batch: Any) -> None:
    """AROUND ``ScheduleBatch.cumulate_penalty_output_tokens``: the sampler keeps its own counts."""
    if not aspire_selected():
        original(batch)


def resolve_tokens(original: Callable[..., list[list[int]]], processor: Any, result: Any, batch: Any) -> Any:
    """AROUND ``_resolve_spec_v2_tokens``: commit each row's run and count as verifies only the rows that verified.

    ``accept_lens`` is 0 for a row that drafted. Requests that finished, were retracted or are to be aborted
    (``to_finish``) keep their output and counters: a late result changes nothing.
    """
    if not aspire_selected():
        return original(processor, result, batch)
    stride = result.speculative_num_draft_tokens
    token_ids, accept_lens = result.next_token_ids.tolist(), result.accept_lens.tolist()
    draft_lens = result.cap_lens.tolist()
    # SGLang adds one token a request on its own; with this the sums of its throughput counters stay exact.
    result.num_correct_drafts = sum(accept_lens) - len(batch.reqs)
    result.num_correct_drafts_per_req_cpu = [max(count - 1, 0) for count in accept_lens]
    result.num_cap_tokens = sum(draft_lens)
    processor.metrics_reporter.aspire_verify_rows = sum(count > 0 for count in accept_lens)
    runs: list[list[int]] = []
    for row, req in enumerate(batch.reqs):
        run = token_ids[row * stride : row * stride + accept_lens[row]]
        if req.is_retracted or req.finished() or req.to_finish is not None:
            run = []
        elif run:
            _commit(req, num_committed=len(run), num_drafts=draft_lens[row])
        runs.append(run)
    return runs


def _commit(req: Any, *, num_committed: int, num_drafts: int) -> None:
    req.kv_committed_len += num_committed
    req.spec_verify_ct += 1
    req.spec_num_correct_drafts += num_committed - 1
    req.update_spec_correct_drafts_histogram(num_committed - 1)
    req.spec_num_cap_tokens += num_drafts
    req.update_spec_cap_lens_histogram(num_drafts)


def update_finish_state(original: Callable[..., None], req: Any, new_accepted_len: int = 1) -> None:
    """AROUND ``Req.update_finish_state``: judge an accepted run token by token, as plain decoding would.

    Stock looks at the whole run at once: the length cap is checked first and hides a stop before it, and a stop
    string may lie outside the scanned tail. ``output_ids`` keeps the whole run (its KV is exact and goes into the
    prefix cache with its tokens); ``finished_len`` marks where the text ends.
    """
    if req.to_finish is not None or not aspire_selected():
        original(req, new_accepted_len)
        return
    if new_accepted_len == 0:  # a drafting step; stock would rescan the whole output
        return
    run = req.output_ids[len(req.output_ids) - new_accepted_len :]
    del req.output_ids[len(req.output_ids) - new_accepted_len :]
    for index, token in enumerate(run):
        req.output_ids.append(token)
        original(req, 1)
        if req.finished():
            if req.finished_len is None:
                req.finished_len = len(req.output_ids)
            req.output_ids.extend(run[index + 1 :])
            return


def stream_accept(original: Callable[..., None], accumulator: Any, *, req: Any) -> None:
    """AROUND ``_GenerationStreamAccumulator.accept``: nothing new to send means nothing is sent."""
    if aspire_selected() and not req.finished() and len(req.output_ids) == req.send_token_offset:
        return
    original(accumulator, req=req)
