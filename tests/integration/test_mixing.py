"""Steps are really mixed, draft lengths really differ, and drafting really reads no more than its budget."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("sglang")

from aspire_sglang.attention_backends.layout import RowKind
from aspire_sglang.config import SELECTORS
from tests.support.engine import running_engine

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("one_thread")]

PAGE = 16


def prompts(count: int = 8) -> list[list[int]]:
    draw = random.Random(5)
    return [[draw.randrange(300) for _ in range(draw.randrange(200, 700))] for _ in range(count)]


@pytest.mark.parametrize("policy", ["fsm", "fixed:5"])
def test_drafting_and_verifying_rows_share_most_steps(llama: str, policy: str) -> None:
    """In a batch of 8 at least half of the steps hold both kinds of rows, and held drafts differ between requests."""
    held_at_step: list[set[int]] = []
    options = {"aspire_policy": policy, "aspire_min_pages": 10}
    with running_engine(llama, speculative_algorithm="aspire", **options) as engine:
        plan_step = engine.step.plan

        def plan(requests: Any) -> Any:
            held_at_step.append({request.state.held_drafts for request in requests})
            return plan_step(requests)

        engine.step.plan = plan
        reqs = []
        for index, prompt in enumerate(prompts()):  # requests arrive one after another, as they do in a server
            reqs.append(engine.submit(prompt, {"max_new_tokens": 60, "ignore_eos": True}))
            for _ in range(index % 3):
                engine.iterate()
        engine.run()
        counts = engine.step.total_counts
        lengths = [req.spec_cap_lens_histogram for req in reqs]
    assert counts.mixed_steps >= counts.steps / 2, counts
    assert sum(len(held) > 1 for held in held_at_step) > len(held_at_step) / 2
    if policy == "fsm":
        assert sum(sum(count > 0 for count in histogram) > 2 for histogram in lengths) >= 4, lengths


@pytest.mark.parametrize("selector", SELECTORS)
def test_reads_stay_within_the_budget(llama: str, selector: str) -> None:
    """Counted in the backend: draft rows read their pages and the draft's own tokens, verify rows read everything."""
    ratio, min_pages, dense_layers = 0.1, 4, 1
    options = {
        "aspire_policy": "fixed:6",
        "aspire_selector": selector,
        "aspire_ratio": ratio,
        "aspire_min_pages": min_pages,
        "aspire_recent_pages": 2,
        "aspire_dense_layers": dense_layers,
    }
    num_steps = 0
    with running_engine(llama, speculative_algorithm="aspire", **options) as engine:
        commit = engine.step.commit

        def check(plan: Any, outcome: Any) -> Any:
            nonlocal num_steps
            num_steps += 1
            attention, spec = plan.attention, plan.attention.spec
            drafts = [row for row in attention.layout.rows if row.kind is RowKind.DRAFT]
            for row, lens in zip(drafts, attention.sparse_lens, strict=True):
                pages = -(-row.cycle_start // PAGE)
                budget = max(min_pages, -(-round(100 * ratio * pages) // 100))
                # The budget's pages, the draft's own tokens, and what a page boundary adds to the recent pages.
                assert all(read <= budget * PAGE + (row.kv_len - row.cycle_start) + PAGE for read in lens), (row, lens)
                assert all(read < row.kv_len for read in lens)
            sparse_layers = sum(spec.is_sparse_layer(layer) for layer in range(spec.num_layers))
            assert sparse_layers == spec.num_layers - dense_layers - (selector == "refresh")
            full = sum(row.kv_len for row in drafts)
            sparse = attention.kv_tokens_read_by_draft_rows - full * (spec.num_layers - sparse_layers)
            per_layer = [sum(lens[spec.set_of_layer(layer)] for lens in attention.sparse_lens) for layer in range(4)]
            assert sparse == sum(per_layer[layer] for layer in range(4) if spec.is_sparse_layer(layer))
            verifies = [row for row in attention.layout.rows if row.kind is RowKind.VERIFY]
            assert attention.kv_tokens_read_by_verify_rows == sum(row.kv_len for row in verifies) * spec.num_layers
            return commit(plan, outcome)

        engine.step.commit = check
        engine.generate(prompts(), {"max_new_tokens": 30, "ignore_eos": True})
        counts = engine.step.total_counts
    assert num_steps > 20
    assert counts.draft_kv_tokens_read < 0.7 * counts.draft_kv_tokens_full
