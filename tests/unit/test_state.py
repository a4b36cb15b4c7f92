"""A record belongs to (slot, generation): a slot is taken anew, whether or not its predecessor said goodbye."""

from __future__ import annotations

from aspire_sglang.config import AspireConfig
from aspire_sglang.sampling_records import RequestSampling, TokenCounts
from aspire_sglang.scheduler.acceptance import AcceptancePrior, RequestHistory
from aspire_sglang.state import RequestState, StateTable


def make(slot: int, generation: int, request_id: str = "r") -> RequestState:
    history = RequestHistory.start(AspireConfig(), AcceptancePrior())
    return RequestState(
        request_id=request_id,
        slot=slot,
        generation=generation,
        draft_max=4,
        sampling=RequestSampling(),
        counts=TokenCounts(),
        history=history,
    )


def test_a_record_of_another_generation_is_never_found() -> None:
    table = StateTable(on_open=lambda slot: None)
    state = table.open(make(3, 7))
    assert table.find(3, 7) is state
    assert table.find(3, 8) is None
    assert table.find(4, 7) is None


def test_opening_a_slot_clears_what_else_is_kept_by_slot_and_replaces_the_record() -> None:
    cleared: list[int] = []
    table = StateTable(on_open=cleared.append)
    table.open(make(3, 7))
    successor = table.open(make(3, 8, "s"))
    assert cleared == [3, 3]
    assert table.find(3, 7) is None
    assert table.find(3, 8) is successor


def test_dropping_and_clearing_forget_records_and_page_sets() -> None:
    cleared: list[int] = []
    table = StateTable(on_open=cleared.append)
    for slot in (1, 2, 3):
        table.open(make(slot, 1, f"r{slot}"))
    table.drop("r2")
    table.drop("unknown")
    assert cleared == [1, 2, 3, 2]
    assert table.find(2, 1) is None
    table.clear()
    assert table.find(1, 1) is None
    assert sorted(cleared) == [1, 1, 2, 2, 3, 3]
