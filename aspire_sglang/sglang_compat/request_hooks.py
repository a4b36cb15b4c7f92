"""Hooks on a request's way through SGLang's scheduler: admission, commit, finish, streaming.

A step result holds, for every row, a run of committed tokens: empty while the request drafts, 1 to draft_max+1
tokens when it verified. SGLang's own code assumes that every row of every step verified.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode
from sglang.srt.runtime_context import get_server_args
from sglang.srt.sampling.sampling_params import SamplingParams

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


def send_request(original: Callable[..., None], manager: Any, tokenized: Any) -> None:
    """AROUND ``TokenizerManager._send_one_request``: choices of one request (``n`` > 1) get seeds of their own.

    They share one record of sampling parameters, and equal seeds would give equal texts: choice k gets seed + k. The
    request without output that SGLang sends ahead to fill the prefix cache is no choice.
    """
    params: Any = getattr(tokenized, "sampling_params", None)
    is_seeded = params is not None and params.sampling_seed is not None
    if is_seeded and params.n > 1 and params.max_new_tokens != 0 and aspire_selected(manager.server_args):
        tokenized.sampling_params = copy.copy(params)
        params.sampling_seed += 1
    original(manager, tokenized)


def add_request_to_queue(original: Callable[..., None], scheduler: Any, req: Any, *args: Any, **kwargs: Any) -> None:
    """AROUND ``Scheduler._add_request_to_queue``: a request we cannot serve exactly ends with a 400 that says why."""
    if aspire_selected(scheduler.server_args) and req.to_finish is None:
        problem = support.request_problem(req)
        if problem is not None:
            req.set_finish_with_abort(problem)
            # SGLang still prefills one token of it, and must not trip over the parameters just refused.
            req.sampling_params = SamplingParams(temperature=0.0, max_new_tokens=1)
            req.sampling_params.normalize(None)
            req.custom_logit_processor = None
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
    string may lie outside the scanned tail. What follows a stop was never asked for: it leaves the output and the
    committed length, so that neither a session's next turn nor the prefix cache sees it, and its slots are released
    with the rest of the decode reserve.
    """
    if req.to_finish is not None or not aspire_selected():
        original(req, new_accepted_len)
        return
    if new_accepted_len == 0:  # a drafting step; stock would rescan the whole output
        return
    run = req.output_ids[len(req.output_ids) - new_accepted_len :]
    del req.output_ids[len(req.output_ids) - new_accepted_len :]
    for num_judged, token in enumerate(run, start=1):
        req.output_ids.append(token)
        original(req, 1)
        if req.finished():
            req.kv_committed_len -= len(run) - num_judged
            return


def stream_accept(original: Callable[..., None], accumulator: Any, *, req: Any) -> None:
    """AROUND ``_GenerationStreamAccumulator.accept``: send when enough is new; stock expects one token a step.

    With a stream interval it tests ``len(output_ids) % interval``, which runs of several tokens may step over for long.
    """
    if not aspire_selected() or req.finished():
        original(accumulator, req=req)
        return
    num_new = len(req.output_ids) - req.send_token_offset
    params = req.sampling_params
    interval = params.stream_interval or accumulator.default_stream_interval
    if num_new == 0 or (req.stream and req.send_token_offset > 0 and num_new < interval):
        return
    own_interval = params.stream_interval
    params.stream_interval = 1 if req.stream else own_interval
    try:
        original(accumulator, req=req)
    finally:
        params.stream_interval = own_interval
