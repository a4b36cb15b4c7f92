"""Sampling in the real engine: a seed fixes the text however it is speculated, and requests without one differ."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("sglang")

from tests.support.engine import running_engine
from tests.support.workloads import REJECTING, random_prompts

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("one_thread")]

PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.8, "sampling_seed": 1},
    {"temperature": 1.0, "top_k": 5, "sampling_seed": 2},
    {"temperature": 1.2, "top_p": 0.8, "sampling_seed": 3},
    {"temperature": 1.0, "min_p": 0.1, "sampling_seed": 4},
    {"temperature": 0.9, "frequency_penalty": 0.8, "presence_penalty": 0.2, "sampling_seed": 5},
    {"temperature": 0.9, "repetition_penalty": 1.3, "logit_bias": {"7": 2.0}, "sampling_seed": 6},
    {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "min_new_tokens": 20, "sampling_seed": 7},
]


def test_a_seed_gives_the_same_text_under_every_policy(llama: str) -> None:
    """Plain decoding (policy off) is the reference; both draft kinds, alone and in a batch, must give its tokens."""
    prompts = random_prompts((300, 60, 400, 90, 250, 30, 500), seed=3)
    params = [{"max_new_tokens": 30, "ignore_eos": True, **each} for each in PARAMS]
    with running_engine(llama, **REJECTING) as engine:
        engine.reconfigure(policy="off")
        plain = [output.output_ids for output in engine.generate(prompts, params)]
        for policy, sampling in (("fixed:6", "coupled"), ("fsm", "coupled"), ("fixed:3", "argmax")):
            engine.reconfigure(policy=policy, sampling=sampling)
            assert [output.output_ids for output in engine.generate(prompts, params)] == plain, (policy, sampling)
            counts = engine.step.total_counts
            assert 0 < counts.drafts_accepted < counts.drafts_verified
        alone = engine.generate(prompts[:1], params[:1])
        assert alone[0].output_ids == plain[0]


def test_requests_without_a_seed_differ_and_survive_retraction(llama: str) -> None:
    """Equal prompts get different texts; a retracted request goes on with its own noise."""
    prompt = random_prompts((120,), seed=9)[0]
    params = {"temperature": 1.0, "max_new_tokens": 40, "ignore_eos": True}
    with running_engine(llama, **REJECTING) as engine:
        reqs = [engine.submit(prompt, params, rid=f"same-{index}") for index in range(4)]
        engine.run()
        undisturbed = [engine.output_of(req).output_ids for req in reqs]
    assert len({tuple(ids) for ids in undisturbed}) == 4
    with running_engine(llama, **REJECTING) as engine:
        reqs = [engine.submit(prompt, params, rid=f"same-{index}") for index in range(4)]
        for _ in range(30):
            engine.iterate()
        assert engine.retract_all() > 0
        engine.run()
        assert [engine.output_of(req).output_ids for req in reqs] == undisturbed
