"""The records that cross the stages of a step. Tensors live on the model's device unless a name ends in ``_cpu``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from aspire_sglang.attention_backends.base import AttentionPlan
from aspire_sglang.state import RequestState


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRequest:
    """A decoding request as the host hands it to a step.

    ``committed``    n: exact KV tokens; the last committed token x0 has none yet
    ``tokens_left``  output tokens it may still produce (max_new_tokens and context limit), at least 1
    ``output_ids``   its output so far, the host's own list: read, never kept
    """

    state: RequestState
    committed: int
    tokens_left: int
    output_ids: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillRequest:
    """A prompt chunk: positions ``start .. start + num_tokens - 1``; only the last chunk yields a token."""

    state: RequestState
    start: int
    num_tokens: int
    is_last_chunk: bool
    output_ids: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """All host decisions of one mixed step. Rows are ordered drafts first; ``order[row]`` is the request's place.

    ``num_drafts``  held drafts of each row's request before the step
    ``input_ids``   int64 ``[num_tokens]``; ``positions`` and ``cache_locs`` (KV pool indices) likewise
    """

    requests: tuple[StepRequest, ...]
    order: tuple[int, ...]
    num_drafts: tuple[int, ...]
    attention: AttentionPlan
    input_ids: torch.Tensor
    positions: torch.Tensor
    cache_locs: torch.Tensor

    @property
    def num_draft_rows(self) -> int:
        """Rows that draft, which are also the first so many tokens."""
        return self.attention.layout.num_draft_rows

    def request_of_row(self, row: int) -> StepRequest:
        """The request that a row belongs to."""
        return self.requests[self.order[row]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillPlan:
    """All host decisions of one prefill batch, rows in batch order."""

    requests: tuple[PrefillRequest, ...]
    attention: AttentionPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """What the forward decided, before any state changes.

    ``new_drafts``     int64 ``[num_draft_rows]``
    ``committed_ids``  int64 ``[num_verify_rows, draft_max + 1]``: accepted drafts, then the target's own token; rest 0
    ``num_accepted``   int64 ``[num_verify_rows]``
    ``last_ids``       int64 ``[num_verify_rows]``: the target's own token, x0 of the next cycle
    """

    new_drafts: torch.Tensor
    committed_ids: torch.Tensor
    num_accepted: torch.Tensor
    last_ids: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What the host learns, in its own batch order (B requests, W = draft_max + 1).

    ``token_ids``            int64 ``[B, W]``: the committed run of each request, rest 0
    ``num_committed``        int32 ``[B]``: 0 for a request that drafted
    ``num_verified_drafts``  int32 ``[B]``
    ``last_tokens``          int64 ``[B]``: last committed token of each request
    """

    token_ids: torch.Tensor
    num_committed: torch.Tensor
    num_verified_drafts: torch.Tensor
    last_tokens: torch.Tensor
