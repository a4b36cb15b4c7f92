"""The ragged layout: order, offsets, positions, and what it refuses."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from aspire_sglang.attention_backends.layout import RaggedLayout, Row, RowKind


def draft(start: int, *, slot: int = 0, cycle_start: int | None = None) -> Row:
    return Row(slot, RowKind.DRAFT, start, 1, start if cycle_start is None else cycle_start)


def verify(start: int, num_queries: int, *, slot: int = 0) -> Row:
    return Row(slot, RowKind.VERIFY, start, num_queries, start)


def prefill(start: int, num_queries: int, *, slot: int = 0) -> Row:
    return Row(slot, RowKind.PREFILL, start, num_queries, start)


@pytest.fixture
def rng() -> random.Random:
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    return random.Random(seed)


def test_empty_layout() -> None:
    layout = RaggedLayout(())
    assert layout.num_tokens == layout.num_draft_rows == 0
    assert layout.query_offsets() == [0]
    assert layout.positions().dtype == torch.int64
    assert layout.positions().shape == (0,)


def test_mixed_rows_are_contiguous_groups() -> None:
    layout = RaggedLayout((draft(17, cycle_start=15), draft(0), verify(31, 2), prefill(0, 3)))
    assert layout.num_draft_rows == 2
    assert layout.num_tokens == 7
    assert layout.query_offsets() == [0, 1, 2, 4, 7]
    assert layout.positions().tolist() == [17, 0, 31, 32, 0, 1, 2]
    assert [row.kv_len for row in layout.rows] == [18, 1, 33, 3]


def test_random_layouts_agree_with_themselves(rng: random.Random) -> None:
    for _ in range(50):
        drafts = [draft(rng.randrange(100)) for _ in range(rng.randrange(5))]
        others = [
            rng.choice((verify, prefill))(rng.randrange(100), rng.randint(1, 17)) for _ in range(rng.randrange(5))
        ]
        layout = RaggedLayout((*drafts, *others))
        offsets, positions = layout.query_offsets(), layout.positions().tolist()
        assert offsets[-1] == layout.num_tokens == len(positions)
        assert offsets[: len(drafts) + 1] == list(range(len(drafts) + 1)), "drafts are the first tokens, one each"
        for i, row in enumerate(layout.rows):
            assert positions[offsets[i] : offsets[i + 1]] == list(range(row.start, row.kv_len))


@pytest.mark.parametrize("late", [draft(3)])
@pytest.mark.parametrize("early", [verify(3, 1), prefill(0, 4)])
def test_drafts_must_come_first(early: Row, late: Row) -> None:
    with pytest.raises(ValueError, match="drafts first"):
        RaggedLayout((early, late))


@pytest.mark.parametrize(
    "change",
    [{"slot": -1}, {"start": -1, "cycle_start": -1}, {"num_queries": 0}, {"cycle_start": 6}, {"cycle_start": -1}],
)
def test_malformed_rows_are_refused(change: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="malformed row"):
        dataclasses.replace(verify(5, 2), **change)  # type: ignore[arg-type]


def test_a_draft_row_has_one_query() -> None:
    with pytest.raises(ValueError, match="one query"):
        Row(0, RowKind.DRAFT, 5, 2, 5)


def test_layout_and_rows_are_immutable() -> None:
    row = draft(1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        row.start = 2  # type: ignore[misc]
