"""Policies: limits, determinism, optimality of the fractional programme, and each rule's own semantics."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aspire_sglang.config import AspireConfig, ConfigError
from aspire_sglang.scheduler.acceptance import AcceptancePrior, RequestHistory
from aspire_sglang.scheduler.cost_model import CostModel
from aspire_sglang.scheduler.policies import PROBE_CYCLES, AspirePolicy, PaperPolicy, make_policy
from aspire_sglang.scheduler.records import RequestView

# Qwen3-8B in bf16 on an H200, by byte counts: a step's base is worth 111,000 KV tokens, a token 680.
COST = CostModel.from_bytes(
    AspireConfig(),
    num_layers=36,
    weight_bytes=16.4e9,
    kv_bytes_per_token=147_456,
    bytes_per_second=4.27e12,
    flops_per_token=16.4e9,
    flops_per_second=7e14,
)
POLICY_NAMES = ["aspire", "aspire-paper", "fsm", "fixed:0", "fixed:5", "sync:0", "sync:5", "off"]
SETTLE_STEPS = 8

VIEWS = st.builds(
    RequestView,
    kv_tokens=st.integers(0, 200_000),
    held_drafts=st.integers(0, 16),
    draft_limit=st.integers(0, 16),
    cycles=st.sampled_from([0, 1, 2, PROBE_CYCLES]),
    acceptance=st.floats(0.0, 1.0),
    acceptance_ema=st.floats(0.0, 1.0),
    fsm_length=st.integers(1, 16),
)
BATCHES = st.lists(VIEWS, max_size=12).map(tuple)


def view(**changes: float) -> RequestView:
    base = RequestView(kv_tokens=32_000, held_drafts=0, draft_limit=16, cycles=1, acceptance=0.9)
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def settled_lengths(requests: tuple[RequestView, ...], config: AspireConfig | None = None) -> list[int]:
    """Draft lengths of ``aspire`` once the carried throughput stands still."""
    policy = AspirePolicy(config or AspireConfig(), COST)
    for _ in range(SETTLE_STEPS):
        lengths = policy.draft_lengths(requests)
    return [int(length) for length in lengths]


def throughput(requests: tuple[RequestView, ...], lengths: tuple[int, ...]) -> float:
    """Tokens per second of the batch, straight from the definition in docs/architecture.md."""
    tokens, seconds = 0.0, COST.base_seconds
    for request, d in zip(requests, lengths, strict=True):
        tokens += sum(request.acceptance**j for j in range(d + 1)) / (d + 1)
        row = d * COST.draft_row_seconds(request.kv_tokens) + COST.verify_row_seconds(request.kv_tokens, d)
        seconds += float(row) / (d + 1)
    return tokens / seconds


@pytest.mark.parametrize("name", POLICY_NAMES)
@given(batches=st.lists(BATCHES, min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_limits_shape_and_determinism(name: str, batches: list[tuple[RequestView, ...]]) -> None:
    config = AspireConfig(policy=name)
    policy, twin = make_policy(config, COST), make_policy(config, COST)
    for requests in batches:
        decisions = policy.decide(requests)
        assert decisions == twin.decide(requests)
        assert len(decisions) == len(requests)
        for request, verifies in zip(requests, decisions, strict=True):
            assert type(verifies) is bool
            assert verifies or request.held_drafts < request.draft_limit


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_no_request_ever_holds_more_than_its_limit(name: str) -> None:
    rng = random.Random(3)
    config = AspireConfig(policy=name, draft_max=8)
    policy, prior = make_policy(config, COST), AcceptancePrior()
    histories = [RequestHistory.start(config, prior) for _ in range(6)]
    limits, held = [0, 1, 3, 8, 8, 8], [0] * 6
    for _ in range(200):
        decisions = policy.decide(
            tuple(
                history.view(kv_tokens=20_000, held_drafts=d, draft_limit=limit)
                for history, d, limit in zip(histories, held, limits, strict=True)
            )
        )
        for i, verifies in enumerate(decisions):
            if verifies:
                histories[i].record(held[i], rng.randint(0, held[i]))
            held[i] = 0 if verifies else held[i] + 1
            assert held[i] <= limits[i]


# --- aspire: the fractional programme


@pytest.mark.parametrize("seed", range(12))
def test_aspire_matches_exhaustive_search(seed: int) -> None:
    rng = random.Random(seed)
    config = AspireConfig(draft_max=6)
    requests = tuple(
        view(kv_tokens=int(4_000 * 50 ** rng.random()), draft_limit=rng.choice([2, 6, 6]), acceptance=rng.random())
        for _ in range(4)
    )
    options = [range(request.draft_limit + 1) for request in requests]
    best = max(throughput(requests, lengths) for lengths in itertools.product(*options))
    found = throughput(requests, tuple(settled_lengths(requests, config)))
    assert best * 0.99 <= found <= best * (1 + 1e-9)


@given(
    st.floats(0.0, 1.0),
    st.floats(0.0, 1.0),
    st.integers(100, 200_000),
    st.integers(1, 64),
)
@settings(max_examples=100, deadline=None)
def test_aspire_never_drafts_less_for_higher_acceptance(one: float, other: float, kv: int, batch: int) -> None:
    low, high = sorted((one, other))
    shorter = settled_lengths((view(kv_tokens=kv, acceptance=low),) * batch)
    longer = settled_lengths((view(kv_tokens=kv, acceptance=high),) * batch)
    assert len(set(shorter)) == 1
    assert shorter[0] <= longer[0]


def test_aspire_does_not_draft_where_it_cannot_win() -> None:
    # One short context: the weights dominate each step, so a step that commits nothing is a step lost.
    for cycles in (0, 1, PROBE_CYCLES):
        lone = (view(kv_tokens=1_000, acceptance=0.999, cycles=cycles),)
        assert settled_lengths(lone) == [0]
        assert AspirePolicy(AspireConfig(), COST).decide(lone) == (True,)
    # Nor can a context whose pages are all selected, at any batch size.
    assert settled_lengths((view(kv_tokens=500, acceptance=0.999),) * 256) == [0] * 256


def test_aspire_gives_mixed_contexts_different_lengths() -> None:
    contexts = (500, 8_000, 32_000, 100_000)
    lengths = settled_lengths(tuple(view(kv_tokens=kv) for kv in contexts) * 8)[:4]
    assert lengths == sorted(lengths)
    assert lengths[0] == 0 < lengths[1] < lengths[3]


def test_aspire_recovers_from_a_batch_that_shrinks_and_grows() -> None:
    large, small = (view(),) * 64, (view(kv_tokens=60_000),) * 2
    policy = AspirePolicy(AspireConfig(), COST)
    for requests in (large, small, large):
        for _ in range(3):
            lengths = policy.draft_lengths(requests)
        assert lengths.tolist() == settled_lengths(requests)


def test_aspire_first_cycle_drafts_at_least_draft_init() -> None:
    config = AspireConfig(draft_init=3)
    hopeless, short = view(acceptance=0.05), view(acceptance=0.05, draft_limit=2)
    assert settled_lengths((hopeless, short) * 16, config)[:2] == [0, 0]
    first = tuple(dataclasses.replace(request, cycles=0) for request in (hopeless, short))
    assert settled_lengths(first * 16, config)[:2] == [3, 2]


def test_aspire_learns_again_after_a_bad_stretch() -> None:
    """Zero drafts teach nothing, so without probes one hopeless stretch would end speculation for good."""
    config = AspireConfig()
    policy, prior = make_policy(config, COST), AcceptancePrior()
    histories = [RequestHistory.start(config, prior) for _ in range(16)]
    held = [0] * 16
    drafted = dict.fromkeys(("bad", "good"), 0)
    for step in range(4_000):
        mood = "bad" if step < 1_000 else "good"
        decisions = policy.decide(
            tuple(
                history.view(kv_tokens=32_000, held_drafts=d, draft_limit=16)
                for history, d in zip(histories, held, strict=True)
            )
        )
        for i, verifies in enumerate(decisions):
            if verifies:
                histories[i].record(held[i], held[i] if mood == "good" else 0)
            drafted[mood] += not verifies
            held[i] = 0 if verifies else held[i] + 1
    assert drafted["bad"] < 0.10 * 16 * 1_000
    assert drafted["good"] > 0.5 * 16 * 3_000


# --- aspire-paper


@given(st.floats(0.01, 0.99), st.integers(100, 150_000), st.integers(1, 64))
@settings(max_examples=60, deadline=None)
def test_paper_rule_is_its_formula(alpha: float, kv: int, batch: int) -> None:
    base, rows = COST.base_seconds, float(batch)
    c = (base + rows * COST.draft_row_seconds(kv)) / (base + rows * COST.verify_row_seconds(kv, 0))

    def rate(g: int) -> float:
        return (1 - alpha ** (g + 1)) / (1 - alpha) / (1 + float(c) * g)

    lengths = PaperPolicy(AspireConfig(), COST).draft_lengths((view(kv_tokens=kv, acceptance_ema=alpha),) * batch)
    assert len(set(lengths.tolist())) == 1
    assert rate(int(lengths[0])) == pytest.approx(max(rate(g) for g in range(17)), rel=1e-9)


def test_paper_rule_first_cycle_and_ema() -> None:
    policy = PaperPolicy(AspireConfig(draft_init=3), COST)
    hopeless = view(acceptance=1.0, acceptance_ema=0.01)
    requests = (hopeless, dataclasses.replace(hopeless, cycles=0), view(cycles=0, acceptance_ema=0.01, draft_limit=1))
    assert policy.draft_lengths(requests).tolist() == [0, 3, 1]


# --- fixed, sync, fsm, off


def test_fixed_verifies_at_its_length() -> None:
    policy = make_policy(AspireConfig(policy="fixed:4"), COST)
    held = (0, 3, 4, 9)
    assert policy.decide(tuple(view(held_drafts=d) for d in held)) == (False, False, True, True)
    assert policy.decide((view(held_drafts=2, draft_limit=2),)) == (True,)


def test_off_always_verifies() -> None:
    policy = make_policy(AspireConfig(policy="off"), COST)
    assert policy.decide((view(cycles=0), view(held_drafts=3))) == (True, True)


def test_sync_verifies_in_lock_step() -> None:
    policy = make_policy(AspireConfig(policy="sync:4"), COST)
    leader, joiner = view(held_drafts=3), view(held_drafts=1)
    assert policy.decide((leader, joiner)) == (False, False)
    assert policy.decide((view(held_drafts=4), view(held_drafts=2), view(held_drafts=0))) == (True, True, True)
    # At its own limit a request verifies alone.
    assert policy.decide((leader, view(held_drafts=2, draft_limit=2), view(draft_limit=0))) == (False, True, True)


def test_fsm_lengthens_after_full_acceptance_and_shortens_otherwise() -> None:
    config = AspireConfig(policy="fsm", draft_init=3, draft_max=5)
    policy = make_policy(config, COST)
    history = RequestHistory.start(config, AcceptancePrior())

    def cycle(rejected: int) -> int:
        """Drafts of one cycle, of which the last ``rejected`` are not accepted."""
        held = 0
        while not policy.decide((history.view(kv_tokens=100, held_drafts=held, draft_limit=5),))[0]:
            held += 1
        history.record(held, held - rejected)
        return held

    assert [cycle(0) for _ in range(4)] == [3, 4, 5, 5]
    assert [cycle(1) for _ in range(6)] == [5, 4, 3, 2, 1, 1]
    assert [cycle(0) for _ in range(2)] == [1, 2]


def test_unknown_policies_never_reach_the_factory() -> None:
    with pytest.raises(ConfigError):
        make_policy(AspireConfig(policy="fastest"), COST)
