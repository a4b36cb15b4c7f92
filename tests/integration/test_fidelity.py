"""Acceptance and greedy output against an independent study of the same model (``tests/data/acceptance_prompts.json``).

The study simulated fixed drafts of 10 in plain PyTorch and recorded, for 13 prompts of 2,000 to 7,000 tokens, the exact
greedy continuation and the mean accepted drafts of each selector and budget. Takes many minutes: ``make fidelity``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang")

from tests.support.engine import SchedulerEngine, running_engine

pytestmark = [pytest.mark.fidelity, pytest.mark.engine, pytest.mark.timeout(3600)]

STUDY = json.loads((Path(__file__).parents[1] / "data" / "acceptance_prompts.json").read_text())
SELECTORS = {
    "refresh": "refresh",
    "verify": "verify",
    "verify-per-layer": "verify_per_layer",
    "window": "window",
}
# The study's round counts (141 for BIG/refresh = 13 prompts x 80 tokens / 7.39 a round) show how far its rounds went.
COUNTED_TOKENS = 80
NUM_TOKENS = 108  # every counted round may draft 10, far from the end
TOLERANCE = 0.4


def accepted_per_round(engine: SchedulerEngine, num_tokens: int) -> tuple[list[list[int]], list[int]]:
    """Outputs of all prompts, and the accepted drafts of every round that began before ``COUNTED_TOKENS`` tokens."""
    rounds: dict[int, list[int]] = {}
    original = engine.step.commit

    def commit(plan: Any, outcome: Any) -> Any:
        for row, accepted in enumerate(outcome.num_accepted.tolist(), start=plan.num_draft_rows):
            rounds.setdefault(plan.request_of_row(row).state.slot, []).append(accepted)
        return original(plan, outcome)

    engine.step.commit = commit
    prompts = [prompt["prompt_ids"] for prompt in STUDY["prompts"]]
    outputs = engine.generate(prompts, {"max_new_tokens": num_tokens, "ignore_eos": True})
    counted = []
    for of_request in rounds.values():
        committed = 0
        for accepted in of_request:
            if committed >= COUNTED_TOKENS:
                break
            counted.append(accepted)
            committed += accepted + 1
    return [output.output_ids for output in outputs], counted


def test_acceptance_and_output_match_the_study(default_model: Path) -> None:
    """One engine: the prompts are prefilled once, each selector and budget continues from the prefix cache."""
    truth = [prompt["greedy_ids"] for prompt in STUDY["prompts"]]
    misses = []
    server = {"max_total_tokens": 66_000, "max_running_requests": 13, "chunked_prefill_size": 2048}
    options = {"aspire_draft_max": 10, "aspire_policy": "fixed:10"}
    with running_engine(str(default_model), speculative_algorithm="aspire", **server, **options) as engine:
        for budget in ("BIG", "SEL"):
            for selector, study_name in SELECTORS.items():
                engine.reconfigure(selector=selector, **STUDY["budgets"][budget])
                outputs, accepted = accepted_per_round(engine, num_tokens=NUM_TOKENS)
                assert outputs == truth, (budget, selector)
                mean = sum(accepted) / len(accepted)
                name = f"{budget}/{study_name}"
                reference = STUDY["reference"].get(name) or STUDY["reference"]["MID/window"]
                expected = reference["mean_accepted_of_10"]
                counts = engine.step.total_counts
                read = counts.draft_kv_tokens_read / counts.draft_kv_tokens_full
                per_verify = counts.tokens_committed / counts.verify_rows
                study = f"study {expected} in {reference['rounds']}"
                print(
                    f"{name:24s} {mean:.2f} of 10 accepted in {len(accepted)} rounds ({study}); "
                    f"{per_verify:.2f} tokens a verify, drafts read {read:.1%} of the KV",
                    flush=True,
                )
                if abs(mean - expected) > TOLERANCE:
                    misses.append((name, mean, expected))
    assert not misses, misses
