"""Policies: who verifies in this step and who drafts on. Deterministic, the same on every rank.

Every policy but ``sync`` answers with a draft length d* for each request, which verifies once it holds that many
drafts. ``make_policy`` builds the one that the configuration names.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aspire_sglang.config import AspireConfig
from aspire_sglang.scheduler.cost_model import CostModel, FloatArray
from aspire_sglang.scheduler.records import INITIAL_ACCEPTANCE, Policy, RequestView

MAX_ITERATIONS = 2
"""Dinkelbach iterations a step. The first from a stale throughput (a batch that grew or shrank) never lands above the
optimum, and from there convergence is superlinear: from nothing, mixed fleets (Qwen3-8B byte costs)
are 0.2-9 % below the optimum after one step and at it, within 0.1 %, after two."""
THROUGHPUT_TOLERANCE = 1e-4
"""Relative change of the throughput below which a step's second iteration is saved; far below what moves a d*."""
PROBE_CYCLES = 128
"""Cycles after which a request is drafted for again as if it were new. Without drafts nothing is learnt, so one bad
stretch would otherwise end speculation for good. Costs at most draft_init steps in that many (3 of 131: 2.3 %)."""
ACCEPTANCE_RANGE = (1e-12, 1.0 - 1e-9)
"""Keeps log(alpha) and 1 / (1 - alpha) finite; the error in expected tokens stays below 1e-6."""


def make_policy(config: AspireConfig, cost: CostModel) -> Policy:
    """The policy named by ``config.policy``; a new instance has no history. ``off`` is ``fixed`` with no drafts."""
    name, _, length = config.policy.partition(":")
    match name:
        case "aspire":
            return AspirePolicy(config, cost)
        case "aspire-paper":
            return PaperPolicy(config, cost)
        case "fsm":
            return FsmPolicy()
        case "fixed":
            return FixedPolicy(int(length))
        case "sync":
            return SyncPolicy(int(length))
        case "off":
            return FixedPolicy(0)
    raise ValueError(f"policy {config.policy!r} is valid but not built here; add it to make_policy")


def expected_tokens(acceptance: FloatArray, draft_max: int) -> FloatArray:
    """G: tokens that a cycle of d drafts commits, 1 + alpha + ... + alpha^d, for alpha of shape (requests,).

    Returns shape (requests, draft_max + 1), column d for d drafts. Source: docs/architecture.md, The scheduler.
    """
    alpha = np.minimum(np.maximum(acceptance, ACCEPTANCE_RANGE[0]), ACCEPTANCE_RANGE[1])
    powers = np.exp(np.log(alpha)[:, None] * np.arange(1.0, draft_max + 2.0))
    tokens: FloatArray = (1.0 - powers) / (1.0 - alpha)[:, None]
    return tokens


@dataclass(frozen=True, slots=True)
class CycleTable:
    """Each request's cycle by its draft length d, per step that it takes (a cycle takes d + 1 steps).

    ``tokens``  expected tokens committed a step, shape (requests, draft lengths), float64
    ``seconds`` row seconds a step beyond the shared base, same shape
    ``limits``  most drafts of each request, shape (requests,)
    """

    tokens: FloatArray
    seconds: FloatArray
    limits: NDArray[np.intp]

    @classmethod
    def build(
        cls, acceptance: FloatArray, plain_seconds: FloatArray, draft_seconds: FloatArray, limits: NDArray[np.intp]
    ) -> CycleTable:
        """Table of requests whose cycle takes ``plain_seconds + d * draft_seconds`` of row time; all (requests,)."""
        drafts = np.arange(int(limits.max()) + 1.0)
        per_step = 1.0 / (drafts + 1.0)
        tokens = expected_tokens(acceptance, len(drafts) - 1)
        seconds = plain_seconds[:, None] + draft_seconds[:, None] * drafts
        return cls(tokens * per_step, seconds * per_step, limits)

    def best_lengths(self, throughput: float) -> NDArray[np.intp]:
        """d* of each request when a second is worth ``throughput`` tokens (lambda); shape (requests,).

        G is concave in d and the cost linear, so the value a step rises to one peak and falls: cutting the peak at a
        request's limit is the best within it.
        """
        peaks: NDArray[np.intp] = (self.tokens - throughput * self.seconds).argmax(axis=1)
        return np.minimum(peaks, self.limits)

    def throughput(self, lengths: NDArray[np.intp], base_seconds: float) -> float:
        """Tokens per second of the whole batch when its requests cycle with these draft lengths."""
        rows = np.arange(len(lengths))
        seconds = base_seconds + self.seconds[rows, lengths].sum()
        return float(self.tokens[rows, lengths].sum() / seconds)


class AspirePolicy:
    """Our default: draft lengths that maximise the batch's tokens per second, exact for a mixed batch.

    Throughput is a ratio of sums over requests, a fractional programme; Dinkelbach's method separates it given the
    throughput lambda, which is carried over from step to step (docs/architecture.md). A request's first cycle drafts at
    least ``draft_init``, unless drafting loses both by its own estimate and at the initial acceptance.
    """

    def __init__(self, config: AspireConfig, cost: CostModel) -> None:
        self._config = config
        self._cost = cost
        self._throughput = 0.0

    def decide(self, requests: tuple[RequestView, ...]) -> tuple[bool, ...]:
        return _reached(requests, self.draft_lengths(requests)) if requests else ()

    def draft_lengths(self, requests: tuple[RequestView, ...]) -> NDArray[np.intp]:
        """d* of each request (one or more) in this step, within its limit; moves the carried throughput."""
        kv_tokens = np.array([request.kv_tokens for request in requests], dtype=np.float64)
        limits = _read_limits(requests, self._config.draft_max)
        acceptance = np.array([request.acceptance for request in requests])
        plain_seconds = np.asarray(self._cost.verify_row_seconds(kv_tokens, 0))
        # One more draft is one more drafting row, and one more token in the verify.
        draft_seconds = self._cost.draft_row_seconds(kv_tokens) + self._cost.seconds_per_token
        table = CycleTable.build(acceptance, plain_seconds, np.asarray(draft_seconds), limits)
        lengths = self._iterate(table)
        explores = np.array([request.cycles % PROBE_CYCLES == 0 for request in requests])
        if explores.any():
            # Value a step at d = 1 above that at d = 0, with the initial acceptance for alpha.
            could_win = self._throughput * (plain_seconds - draft_seconds) > 1.0 - INITIAL_ACCEPTANCE
            explores &= could_win | (lengths > 0)
            lengths[explores] = np.minimum(np.maximum(lengths, self._config.draft_init), limits)[explores]
        return lengths

    def _iterate(self, table: CycleTable) -> NDArray[np.intp]:
        for _ in range(MAX_ITERATIONS):
            lengths = table.best_lengths(self._throughput)
            previous, self._throughput = self._throughput, table.throughput(lengths, self._cost.base_seconds)
            if abs(self._throughput - previous) <= THROUGHPUT_TOLERANCE * previous:
                break
        return lengths


class PaperPolicy:
    """The paper's rule: gamma* = argmax over g of G(g) / (1 + c g), as if the batch were copies of this request.

    c = T_draft / T_verify of a step whose rows all draft, or all verify. T_verify is taken at one token a row: c is a
    constant of the formula, and memory-bound verifies hardly depend on g. Source: arXiv 2609.17943.
    """

    def __init__(self, config: AspireConfig, cost: CostModel) -> None:
        self._config = config
        self._cost = cost

    def decide(self, requests: tuple[RequestView, ...]) -> tuple[bool, ...]:
        return _reached(requests, self.draft_lengths(requests)) if requests else ()

    def draft_lengths(self, requests: tuple[RequestView, ...]) -> NDArray[np.intp]:
        """gamma* of each request (one or more), within its limit; the first cycle drafts ``draft_init`` or more."""
        kv_tokens = np.array([request.kv_tokens for request in requests], dtype=np.float64)
        limits = _read_limits(requests, self._config.draft_max)
        acceptance = np.array([request.acceptance_ema for request in requests])
        draft_step_seconds = self._cost.base_seconds + len(requests) * self._cost.draft_row_seconds(kv_tokens)
        verify_step_seconds = self._cost.base_seconds + len(requests) * self._cost.verify_row_seconds(kv_tokens, 0)
        cost_ratio = np.asarray(draft_step_seconds / verify_step_seconds)
        draft_max = int(limits.max())
        cycle_cost = 1.0 + cost_ratio[:, None] * np.arange(draft_max + 1.0)
        lengths: NDArray[np.intp] = (expected_tokens(acceptance, draft_max) / cycle_cost).argmax(axis=1)
        first = np.array([request.cycles == 0 for request in requests])
        lengths[first] = np.maximum(lengths, self._config.draft_init)[first]
        return np.minimum(lengths, limits)


@dataclass(frozen=True, slots=True)
class FixedPolicy:
    """``fixed:G``: every request verifies once it holds ``length`` drafts."""

    length: int

    def decide(self, requests: tuple[RequestView, ...]) -> tuple[bool, ...]:
        return tuple(request.held_drafts >= min(self.length, request.draft_limit) for request in requests)


@dataclass(frozen=True, slots=True)
class FsmPolicy:
    """``fsm``: one draft more after a full acceptance, one fewer otherwise; the request's history keeps the length."""

    def decide(self, requests: tuple[RequestView, ...]) -> tuple[bool, ...]:
        return tuple(request.held_drafts >= min(request.fsm_length, request.draft_limit) for request in requests)


@dataclass(frozen=True, slots=True)
class SyncPolicy:
    """``sync:G``: the batch drafts in lock step, and all verify in the step in which any request holds G drafts.

    A request that joins in mid-cycle drafts along and verifies what it holds with the others. One whose limit is
    below G verifies by itself when it reaches that limit, forces nobody, and drafts along again.
    """

    length: int

    def decide(self, requests: tuple[RequestView, ...]) -> tuple[bool, ...]:
        all_verify = any(request.held_drafts >= self.length for request in requests)
        return tuple(all_verify or request.held_drafts >= request.draft_limit for request in requests)


def _reached(requests: tuple[RequestView, ...], lengths: NDArray[np.intp]) -> tuple[bool, ...]:
    """Whether each request holds its draft length, as plain bools."""
    return tuple((np.array([request.held_drafts for request in requests]) >= lengths).tolist())


def _read_limits(requests: tuple[RequestView, ...], draft_max: int) -> NDArray[np.intp]:
    """Most drafts of each request, shape (requests,); the server's maximum bounds the tables' width."""
    return np.minimum(np.array([request.draft_limit for request in requests], dtype=np.intp), draft_max)
