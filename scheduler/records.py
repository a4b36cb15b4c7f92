"""What a policy sees and what it answers: plain values, the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

INITIAL_ACCEPTANCE = 0.9
"""Acceptance a token assumed before any verify: the low end of what is reported for 7 % budgets."""


@dataclass(frozen=True, slots=True)
class RequestView:
    """One decoding request at the moment of planning a step.

    ``kv_tokens``      exact KV tokens (committed length n), before any held draft
    ``held_drafts``    drafts made since the last verify (d); this step either adds one or verifies these
    ``draft_limit``    most drafts this request may hold before it must verify: the server's ``draft_max``, the
                       request's own cap, and what is left of max_new_tokens and of the context; 0 = plain decoding
    ``cycles``         verifies so far (0 = its first cycle)
    ``acceptance``     estimated probability that one more draft is accepted, in [0, 1]
    ``acceptance_ema`` the paper's moving average of acceptance, in [0, 1]; read by ``aspire-paper`` only
    ``fsm_length``     drafts a cycle by the +-1 state machine, at least 1; read by ``fsm`` only
    """

    kv_tokens: int
    held_drafts: int
    draft_limit: int
    cycles: int
    acceptance: float
    acceptance_ema: float = INITIAL_ACCEPTANCE
    fsm_length: int = 1


class Policy(Protocol):
    """Decides, for every request of the batch and every step, whether it verifies now or drafts on."""

    def decide(self, requests: tuple[RequestView, ...]) -> tuple[bool, ...]:
        """One flag a request: True = verify now, False = draft on.

        Deterministic in its arguments and its own history; a request at its ``draft_limit`` always verifies.
        """
        ...
