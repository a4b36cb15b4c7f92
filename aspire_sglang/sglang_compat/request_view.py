"""SGLang's requests and batches as the records of :mod:`aspire_sglang.records`."""

from __future__ import annotations

import copy
import hashlib
from array import array
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

from aspire_sglang.records import PrefillRequest, StepRequest
from aspire_sglang.sampling_records import RequestSampling, TokenCounts
from aspire_sglang.scheduler.acceptance import RequestHistory
from aspire_sglang.sglang_compat import support
from aspire_sglang.state import RequestState
from aspire_sglang.step import MixedStep


def prefill_requests(batch: Any, step: MixedStep, pool: Any, random_seed: int) -> list[PrefillRequest]:
    """The chunks of a prefill batch; a request seen for the first time in its slot gets its record here."""
    requests = []
    for req, start, num_tokens in zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True):
        requests.append(
            PrefillRequest(
                state=_state_of(req, step, pool, random_seed),
                start=start,
                num_tokens=num_tokens,
                is_last_chunk=req.inflight_middle_chunks <= 0,
                output_ids=req.output_ids,
            )
        )
    return requests


def step_requests(batch: Any, step: MixedStep, pool: Any, random_seed: int) -> list[StepRequest]:
    """The decoding requests of a batch, in its order."""
    return [
        StepRequest(
            state=_state_of(req, step, pool, random_seed),
            committed=int(length),
            tokens_left=max(1, req.sampling_params.max_new_tokens - len(req.output_ids)),
            output_ids=req.output_ids,
        )
        for req, length in zip(batch.reqs, batch.seq_lens_cpu.tolist(), strict=True)
    ]


def _state_of(req: Any, step: MixedStep, pool: Any, random_seed: int) -> RequestState:
    """The request's record, opened when its slot is new to it."""
    slot = req.req_pool_idx
    generation = int(pool.req_generation[slot])
    state = step.states.find(slot, generation)
    if state is not None:
        return state
    return step.states.open(
        RequestState(
            request_id=req.rid,
            slot=slot,
            generation=generation,
            draft_max=support.request_draft_max(req.sampling_params.custom_params, step.config),
            sampling=request_sampling(req, random_seed),
            counts=TokenCounts(),
            history=RequestHistory.start(step.config, step.prior),
        )
    )


def request_sampling(req: Any, random_seed: int) -> RequestSampling:
    """Sampling parameters of a request.

    Without a seed of its own it gets one from the server's seed and its request id: equal on all tensor-parallel
    ranks, and unchanged when it is retracted and comes back.
    """
    params = req.sampling_params
    seed = params.sampling_seed
    if seed is None:
        digest = hashlib.blake2b(f"{random_seed}:{req.rid}".encode(), digest_size=8).digest()
        seed = int.from_bytes(digest, "little") >> 1
    banned: Sequence[int] = ()
    if params.min_new_tokens > 0:
        banned = _stop_tokens(req)
    return RequestSampling(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        repetition_penalty=params.repetition_penalty,
        min_new_tokens=params.min_new_tokens,
        banned_until_min=tuple(banned),
        logit_bias={int(token): float(bias) for token, bias in (params.logit_bias or {}).items()} or None,
        processor=_processor_of(req),
        seed=seed,
    )


def _stop_tokens(req: Any) -> list[int]:
    """Tokens that end a request, as SGLang bans them below min_new_tokens."""
    tokens = set(req.sampling_params.stop_token_ids or ())
    tokens |= set(req.tokenizer.additional_stop_token_ids or ())
    if req.tokenizer.eos_token_id is not None:
        tokens.add(req.tokenizer.eos_token_id)
    return sorted(tokens)


def _processor_of(req: Any) -> Callable[[torch.Tensor, Sequence[int]], torch.Tensor] | None:
    """The request's custom logit processor, called for one position at a time.

    SGLang's processors find the request under ``__req__`` and read its output there; each position is shown a copy
    whose output ends with the drafts before that position.
    """
    if not req.custom_logit_processor:
        return None
    processor = CustomLogitProcessor.from_str(req.custom_logit_processor)
    params = dict(req.sampling_params.custom_params or {})

    def apply(logits: torch.Tensor, output_ids: Sequence[int]) -> torch.Tensor:
        if req.to_finish is not None:
            return logits
        seen = copy.copy(req)
        seen.output_ids = array("q", output_ids)  # as SGLang keeps it
        try:
            processed: torch.Tensor = processor(logits, [{**params, "__req__": seen}])
            if processed.shape != logits.shape:
                raise ValueError(f"it returned logits of shape {tuple(processed.shape)}, not {tuple(logits.shape)}")
        except Exception as error:  # a client's code must end its own request, not the server
            message = f"the custom logit processor failed: {type(error).__name__}: {error}"
            req.to_finish = FINISH_ABORT(message, HTTPStatus.BAD_REQUEST, "BadRequestError")
            return logits
        return processed

    return apply
