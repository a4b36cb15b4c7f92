"""What is remembered of a request between steps, keyed so that a reused slot can never show it to another.

SGLang's ``req_pool_idx`` names a request's row of req_to_token and is handed to the next request as soon as this one
finishes, is aborted or is retracted, without telling anyone. ``ReqToTokenPool.req_generation`` counts those handovers:
a record belongs to (slot, generation), and one of another generation is replaced, never read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from aspire_sglang.sampling_records import RequestSampling, TokenCounts
from aspire_sglang.scheduler.acceptance import RequestHistory


@dataclass(slots=True, kw_only=True)
class RequestState:
    """One request's record.

    ``request_id``  the host's name of the request
    ``draft_max``   most drafts this request allows itself
    ``sampling``    its sampling parameters and seed
    ``counts``      its committed output, counted for penalties when they need it
    ``history``     acceptance of its verifies
    ``held_drafts`` drafts made since the last verify: columns 1..held_drafts of its row of the draft buffer
    """

    request_id: str
    slot: int
    generation: int
    draft_max: int
    sampling: RequestSampling
    counts: TokenCounts
    history: RequestHistory
    held_drafts: int = 0


class StateTable:
    """Records by slot."""

    def __init__(self, on_open: Callable[[int], None]) -> None:
        """``on_open(slot)`` clears whatever else is kept by slot (page sets) when a new request takes it."""
        self._by_slot: dict[int, RequestState] = {}
        self._on_open = on_open

    def find(self, slot: int, generation: int) -> RequestState | None:
        """The record of this request, or None when the slot's record belongs to an earlier one."""
        state = self._by_slot.get(slot)
        return state if state is not None and state.generation == generation else None

    def open(self, state: RequestState) -> RequestState:
        """Start a request in its slot; whatever the slot held before is forgotten."""
        self._on_open(state.slot)
        self._by_slot[state.slot] = state
        return state

    def drop(self, request_id: str) -> None:
        """Forget a finished request, so that what it holds (token counts of a vocabulary's size) does not stay.

        Only memory depends on this call: hosts may end requests without it, and ``open`` replaces what is left.
        """
        for slot, state in self._by_slot.items():
            if state.request_id == request_id:
                self._on_open(slot)
                del self._by_slot[slot]
                return

    def clear(self) -> None:
        """Forget all records."""
        for slot in self._by_slot:
            self._on_open(slot)
        self._by_slot.clear()

    def __len__(self) -> int:
        """Records kept: at most one a slot."""
        return len(self._by_slot)
