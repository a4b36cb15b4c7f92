"""The ragged batch of one step: which rows, in which order, over which positions."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch


class RowKind(Enum):
    DRAFT = "draft"  # 1 query, sparse context
    VERIFY = "verify"  # drafts + 1 queries, full context
    PREFILL = "prefill"  # a prompt chunk, full context


@dataclass(frozen=True, slots=True)
class Row:
    """One request's part of the batch.

    ``slot``         its row of ``req_to_token``
    ``kind``         draft, verify or prefill
    ``start``        position of its first query = KV tokens before the window
    ``num_queries``  tokens of the window: positions start .. start+num_queries-1
    ``cycle_start``  committed length n when the cycle began: a draft row always reads n..start in full
                     (equals ``start`` for verify and prefill rows)
    """

    slot: int
    kind: RowKind
    start: int
    num_queries: int
    cycle_start: int

    def __post_init__(self) -> None:
        if self.slot < 0 or self.start < 0 or self.num_queries < 1 or not 0 <= self.cycle_start <= self.start:
            raise ValueError(f"malformed row {self}")
        if self.kind is RowKind.DRAFT and self.num_queries != 1:
            raise ValueError(f"a draft row has one query: {self}")

    @property
    def kv_len(self) -> int:
        """KV tokens that the row's last query may see, its own included."""
        return self.start + self.num_queries


@dataclass(frozen=True, slots=True)
class RaggedLayout:
    """Rows ordered drafts first, so that each kind is one contiguous token range of q and out."""

    rows: tuple[Row, ...]

    def __post_init__(self) -> None:
        kinds = [row.kind is RowKind.DRAFT for row in self.rows]
        if kinds != sorted(kinds, reverse=True):
            raise ValueError("rows must be ordered drafts first")

    @property
    def num_draft_rows(self) -> int:
        """Draft rows, which are also the first so many tokens."""
        return sum(row.kind is RowKind.DRAFT for row in self.rows)

    @property
    def num_tokens(self) -> int:
        return sum(row.num_queries for row in self.rows)

    def query_offsets(self) -> list[int]:
        """First token of each row, and the total: ``len(rows) + 1`` values."""
        offsets = [0]
        for row in self.rows:
            offsets.append(offsets[-1] + row.num_queries)
        return offsets

    def positions(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """int64 ``[num_tokens]``: absolute position of every token."""
        parts = [torch.arange(row.start, row.kv_len, dtype=torch.int64) for row in self.rows]
        return torch.cat(parts).to(device) if parts else torch.empty(0, dtype=torch.int64, device=device)
