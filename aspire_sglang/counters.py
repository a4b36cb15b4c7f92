"""What steps did, counted on the host."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass(slots=True)
class StepCounts:
    """Sums over one or many mixed steps; KV tokens count positions read by one row at one layer."""

    steps: int = 0
    mixed_steps: int = 0  # steps that held both drafting and verifying rows
    draft_rows: int = 0
    verify_rows: int = 0
    drafts_verified: int = 0
    drafts_accepted: int = 0
    tokens_committed: int = 0
    draft_kv_tokens_read: int = 0
    draft_kv_tokens_full: int = 0  # what drafting rows would have read with full attention
    verify_kv_tokens_read: int = 0

    def add(self, other: StepCounts) -> None:
        """Add another's sums to this one's."""
        for spec in dataclasses.fields(self):
            setattr(self, spec.name, getattr(self, spec.name) + getattr(other, spec.name))

    def as_dict(self) -> dict[str, int]:
        """Plain values, by name."""
        return dataclasses.asdict(self)
