"""Acceptance estimates: what a verify result teaches, and what it must not."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aspire_sglang.config import AspireConfig
from aspire_sglang.scheduler.acceptance import (
    AcceptanceEstimate,
    AcceptancePrior,
    RequestHistory,
    count_trials,
    update_ema,
)
from aspire_sglang.scheduler.records import INITIAL_ACCEPTANCE

RESULTS = st.lists(st.integers(0, 16).flatmap(lambda d: st.tuples(st.just(d), st.integers(0, d))), max_size=60)


def draw_accepted(rng: random.Random, alpha: float, num_drafts: int) -> int:
    accepted = 0
    while accepted < num_drafts and rng.random() < alpha:
        accepted += 1
    return accepted


@pytest.mark.parametrize(("drafts", "accepted", "trials"), [(0, 0, 0), (5, 0, 1), (5, 3, 4), (5, 4, 5), (5, 5, 5)])
def test_trials_stop_at_the_first_rejection(drafts: int, accepted: int, trials: int) -> None:
    assert count_trials(drafts, accepted) == trials


@pytest.mark.parametrize(("drafts", "accepted"), [(3, 4), (3, -1), (0, 1)])
def test_impossible_results_are_refused(drafts: int, accepted: int) -> None:
    with pytest.raises(ValueError, match="accepted"):
        RequestHistory.start(AspireConfig(), AcceptancePrior()).record(drafts, accepted)


@given(RESULTS)
def test_estimates_stay_probabilities(results: list[tuple[int, int]]) -> None:
    prior = AcceptancePrior()
    history = RequestHistory.start(AspireConfig(), prior)
    for drafts, accepted in results:
        history.record(drafts, accepted)
        assert 0.0 <= prior.mean <= 1.0
        assert 0.0 <= history.estimate.survival <= 1.0
        assert 0.0 <= history.acceptance_ema <= 1.0
        assert 1 <= history.fsm_length <= AspireConfig().draft_max
    assert history.cycles == len(results)


def test_zero_draft_verifies_change_nothing_but_the_count() -> None:
    prior = AcceptancePrior()
    history = RequestHistory.start(AspireConfig(), prior)
    history.record(5, 2)
    before = (prior.mean, history.estimate.survival, history.acceptance_ema, history.fsm_length)
    history.record(0, 0)
    assert (prior.mean, history.estimate.survival, history.acceptance_ema, history.fsm_length) == before
    assert history.cycles == 2


@pytest.mark.parametrize("alpha", [0.5, 0.8, 0.95])
@pytest.mark.parametrize("num_drafts", [2, 10])
def test_estimate_is_unbiased_whatever_the_draft_length(alpha: float, num_drafts: int) -> None:
    rng = random.Random(7)
    prior = AcceptancePrior()
    for _ in range(200):
        estimate = AcceptanceEstimate(prior)
        for _ in range(20):
            estimate.record(num_drafts, draw_accepted(rng, alpha, num_drafts))
    # About 1,000 verifies are remembered: a standard error of at most 0.012.
    assert prior.mean == pytest.approx(alpha, abs=0.04)


def test_new_request_starts_at_the_pool_and_leaves_it_with_its_own_results() -> None:
    prior = AcceptancePrior()
    assert AcceptanceEstimate(prior).survival == pytest.approx(INITIAL_ACCEPTANCE)
    for _ in range(300):
        AcceptanceEstimate(prior).record(10, 10)
    bad = AcceptanceEstimate(prior)
    assert bad.survival > 0.98
    for _ in range(30):
        bad.record(10, 0)
    assert bad.survival < 0.5 < prior.mean


def test_request_follows_drift() -> None:
    estimate = AcceptanceEstimate(AcceptancePrior())
    for _ in range(100):
        estimate.record(8, 8)
    assert estimate.survival > 0.98
    for _ in range(80):
        estimate.record(8, 1)  # one success in two trials
    # What is left above 0.5 is the pull of the pool.
    assert estimate.survival == pytest.approx(0.55, abs=0.1)


def test_ema_is_the_papers() -> None:
    assert update_ema(0.9, 10, 4) == pytest.approx(0.8 * 0.9 + 0.2 * 4 / 5)
    assert update_ema(0.9, 4, 4) == pytest.approx(0.8 * 0.9 + 0.2)
    assert update_ema(0.9, 0, 0) == 0.9


def test_view_carries_the_history() -> None:
    history = RequestHistory.start(AspireConfig(draft_init=3), AcceptancePrior())
    history.record(3, 3)
    view = history.view(kv_tokens=100, held_drafts=2, draft_limit=7)
    assert (view.kv_tokens, view.held_drafts, view.draft_limit, view.cycles) == (100, 2, 7, 1)
    assert view.acceptance == history.estimate.survival
    assert view.acceptance_ema == history.acceptance_ema
    assert view.fsm_length == 4
