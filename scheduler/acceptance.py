"""How likely one more draft is accepted, learnt from verify results. Pure Python.

A verify of d drafts that accepts a of them is a run of Bernoulli trials cut at the first failure: it shows
min(a + 1, d) trials and a successes; the drafts after the first rejection say nothing. Discounted counts of these
give the estimate, shrunk towards a prior pooled over all requests (docs/architecture.md). Values depend on the sequence
of results alone, so that tensor-parallel ranks agree.
"""

from __future__ import annotations

from dataclasses import dataclass

from aspire_sglang.config import AspireConfig
from aspire_sglang.scheduler.records import INITIAL_ACCEPTANCE, RequestView

PRIOR_TRIALS = 16.0
"""Trials that the initial guess counts for in the pooled prior: a handful of verifies replaces it."""
PRIOR_DISCOUNT = 0.999
"""Kept share of the pooled counts a verify: a memory of about 1,000 verifies, seconds of a busy server."""
REQUEST_PRIOR_TRIALS = 8.0
"""Trials that the pooled prior counts for in one request. History predicts weakly (measured: AUC 0.52-0.62),
so about one full cycle of its own results is needed to move a request half of the way from the pool."""
REQUEST_DISCOUNT = 0.95
"""Kept share of a request's counts a verify: a memory of about 20 verifies, to follow drift within a text."""
EMA_KEEP = 0.8
"""Kept share of the paper's moving average a verify (arXiv 2609.17943)."""


def count_trials(num_drafts: int, num_accepted: int) -> int:
    """Bernoulli trials seen by one verify: min(a + 1, d). Raises ``ValueError`` unless 0 <= a <= d."""
    if not 0 <= num_accepted <= num_drafts:
        raise ValueError(f"accepted {num_accepted} of {num_drafts} drafts; expected 0 <= accepted <= drafts")
    return min(num_accepted + 1, num_drafts)


@dataclass(slots=True)
class AcceptancePrior:
    """Discounted success and trial counts over all requests of a server; one shared, mutable instance."""

    successes: float = INITIAL_ACCEPTANCE * PRIOR_TRIALS
    trials: float = PRIOR_TRIALS

    @property
    def mean(self) -> float:
        """Pooled probability that one more draft is accepted, in [0, 1]."""
        return self.successes / self.trials

    def record(self, num_drafts: int, num_accepted: int) -> None:
        """Add one verify result; a verify of zero drafts changes nothing."""
        trials = count_trials(num_drafts, num_accepted)
        if trials:
            self.successes = PRIOR_DISCOUNT * self.successes + num_accepted
            self.trials = PRIOR_DISCOUNT * self.trials + trials


@dataclass(slots=True)
class AcceptanceEstimate:
    """One request's discounted counts over the shared prior."""

    prior: AcceptancePrior
    successes: float = 0.0
    trials: float = 0.0

    @property
    def survival(self) -> float:
        """Probability that one more draft is accepted, in [0, 1]: own counts plus the prior's pseudo-counts."""
        weight = REQUEST_PRIOR_TRIALS
        return (self.successes + weight * self.prior.mean) / (self.trials + weight)

    def record(self, num_drafts: int, num_accepted: int) -> None:
        """Add one verify result to this request and to the pool; a verify of zero drafts changes nothing."""
        trials = count_trials(num_drafts, num_accepted)
        if trials:
            self.successes = REQUEST_DISCOUNT * self.successes + num_accepted
            self.trials = REQUEST_DISCOUNT * self.trials + trials
            self.prior.record(num_drafts, num_accepted)


def update_ema(acceptance_ema: float, num_drafts: int, num_accepted: int) -> float:
    """The paper's update: alpha <- 0.8 alpha + 0.2 a / min(a + 1, d); a verify of zero drafts changes nothing."""
    trials = count_trials(num_drafts, num_accepted)
    return EMA_KEEP * acceptance_ema + (1.0 - EMA_KEEP) * num_accepted / trials if trials else acceptance_ema


@dataclass(slots=True)
class RequestHistory:
    """What one request remembers of its verifies, whichever policy is in use. Owned and updated by the request.

    ``draft_max``  the server's longest draft, the ceiling of ``fsm_length`` (tokens)
    ``fsm_length`` drafts of the next cycle under ``fsm``; never below 1, where no result could raise it again
    ``cycles``     verifies so far, those of zero drafts included
    """

    estimate: AcceptanceEstimate
    draft_max: int
    fsm_length: int
    acceptance_ema: float = INITIAL_ACCEPTANCE
    cycles: int = 0

    @classmethod
    def start(cls, config: AspireConfig, prior: AcceptancePrior) -> RequestHistory:
        """History of a new request; ``prior`` is the server's one pool and is updated through it."""
        return cls(AcceptanceEstimate(prior), draft_max=config.draft_max, fsm_length=max(1, config.draft_init))

    def record(self, num_drafts: int, num_accepted: int) -> None:
        """Learn one verify result, once, in commit order. Raises ``ValueError`` unless 0 <= accepted <= drafts."""
        self.estimate.record(num_drafts, num_accepted)
        self.acceptance_ema = update_ema(self.acceptance_ema, num_drafts, num_accepted)
        if num_drafts:
            change = 1 if num_accepted == num_drafts else -1
            self.fsm_length = min(max(1, self.fsm_length + change), self.draft_max)
        self.cycles += 1

    def view(self, *, kv_tokens: int, held_drafts: int, draft_limit: int) -> RequestView:
        """What a policy sees of this request now; counts in tokens, see :class:`RequestView`."""
        return RequestView(
            kv_tokens=kv_tokens,
            held_drafts=held_drafts,
            draft_limit=draft_limit,
            cycles=self.cycles,
            acceptance=self.estimate.survival,
            acceptance_ema=self.acceptance_ema,
            fsm_length=self.fsm_length,
        )
