"""A mixed step is lossless: exact law by enumeration, and token for token under a request's own seed."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter

import pytest
import torch
from scipy import stats

from aspire_sglang.config import SELECTORS, AspireConfig
from aspire_sglang.sampling_records import RequestSampling
from aspire_sglang.scheduler.policies import FixedPolicy, FsmPolicy
from tests.support.torch_host import TorchHost

VOCAB = 6
PROMPT = [1, 5, 2, 2, 0, 3, 4, 4, 1, 0, 5, 3, 2, 1, 3, 0, 5, 5, 2, 4, 1, 2, 0, 3, 3, 1]
# Two-token pages and a budget of 2 of 13 of them: drafts are often wrong.
CONFIG = AspireConfig(draft_max=3, draft_init=1, page_size=2, min_pages=2, recent_pages=1, ratio=0.01)
NUM_SAMPLES, BATCH = 20_000, 500


pytestmark = pytest.mark.usefixtures("one_thread")


def host(config: AspireConfig = CONFIG, policy: object = None, num_slots: int = BATCH) -> TorchHost:
    chosen = policy if policy is not None else FixedPolicy(2)
    return TorchHost(config, chosen, vocab=VOCAB, num_slots=num_slots, max_tokens=64)  # type: ignore[arg-type]


def law_of(logits: torch.Tensor, params: RequestSampling, output: list[int]) -> torch.Tensor:
    """Probabilities of the next token, written down from the definition of each parameter."""
    scores = logits.double().clone()
    for token in range(VOCAB):
        count = output.count(token)
        scores[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
        if count:
            scores[token] *= params.repetition_penalty if scores[token] < 0 else 1 / params.repetition_penalty
        scores[token] += (params.logit_bias or {}).get(token, 0.0)
    probs = (scores / params.temperature).softmax(0)
    order = probs.argsort(descending=True)
    keep = torch.zeros(VOCAB, dtype=torch.bool)
    before = 0.0
    for rank, token in enumerate(order.tolist()):
        keep[token] = (
            (params.top_k < 1 or rank < params.top_k)
            and before <= params.top_p
            and probs[token] >= probs.max() * params.min_p
        )
        before += float(probs[token])
    kept = torch.where(keep, probs, 0.0)
    return kept / kept.sum()


@pytest.mark.parametrize(
    "params",
    [
        RequestSampling(temperature=0.9),
        RequestSampling(temperature=1.3, top_k=5, top_p=0.93, min_p=0.03, logit_bias={2: 0.5}),
        RequestSampling(temperature=1.0, frequency_penalty=0.8, presence_penalty=0.3, repetition_penalty=1.2),
    ],
    ids=["temperature", "filters-and-bias", "penalties"],
)
def test_joint_law_of_the_first_three_tokens(params: RequestSampling) -> None:
    """20,000 samples against exact enumeration from the model's own logits; drafts were both accepted and rejected."""
    engine = host()
    seen: Counter[tuple[int, ...]] = Counter()
    for first in range(0, NUM_SAMPLES, BATCH):
        records = [dataclasses.replace(params, seed=7_000_003 + first + index) for index in range(BATCH)]
        # Four tokens, so that drafts are made before the third is committed.
        seen.update(tuple(output[:3]) for output in engine.generate(PROMPT, records, num_tokens=4))
    expected = {}
    for run in itertools.product(range(VOCAB), repeat=3):
        probability = 1.0
        for place in range(3):
            output = list(run[:place])
            probability *= float(law_of(engine.next_logits(PROMPT + output), params, output)[run[place]])
        expected[run] = probability * NUM_SAMPLES
    assert not [run for run in seen if expected[run] == 0], "tokens that the target cannot produce"
    rare = {run for run, count in expected.items() if count < 5}
    observed = [seen[run] for run in expected if run not in rare] + [sum(seen[run] for run in rare)]
    wanted = [expected[run] for run in expected if run not in rare] + [sum(expected[run] for run in rare)]
    if wanted[-1] < 5:
        observed, wanted = observed[:-1], wanted[:-1]
        wanted = [value * sum(observed) / sum(wanted) for value in wanted]
    assert stats.chisquare(observed, wanted).pvalue > 1e-4
    counts = engine.step.total_counts
    assert 0.05 < counts.drafts_accepted / counts.drafts_verified < 0.95


@pytest.mark.parametrize("draft_sampling", ["coupled", "argmax"])
@pytest.mark.parametrize("selector", SELECTORS)
def test_a_seed_gives_the_same_text_however_it_is_speculated(selector: str, draft_sampling: str) -> None:
    """Token-exact equality with plain decoding for greedy, filtered, penalised and biased requests side by side."""
    records = [
        RequestSampling(temperature=0.0),
        RequestSampling(temperature=0.8, seed=1),
        RequestSampling(temperature=1.0, top_k=3, seed=2),
        RequestSampling(temperature=1.0, top_p=0.7, seed=3),
        RequestSampling(temperature=1.5, min_p=0.2, seed=4),
        RequestSampling(temperature=0.0, frequency_penalty=1.0, repetition_penalty=1.3),
        RequestSampling(temperature=1.0, presence_penalty=0.7, seed=5, min_new_tokens=9, banned_until_min=(0, 4)),
        RequestSampling(temperature=1.0, logit_bias={1: -100.0}, seed=6),
        RequestSampling(temperature=1.0, min_p=1.0, seed=7),
    ]
    config = dataclasses.replace(CONFIG, selector=selector, sampling=draft_sampling)
    plain = host(config, FixedPolicy(0), len(records)).generate(PROMPT, records, num_tokens=30)
    for policy in (FixedPolicy(1), FixedPolicy(3), FsmPolicy()):
        engine = host(config, policy, len(records))
        assert engine.generate(PROMPT, records, num_tokens=30) == plain
        assert engine.step.total_counts.drafts_accepted < engine.step.total_counts.drafts_verified
    assert plain[8] == host(config, FixedPolicy(2), 1).generate(PROMPT, records[:1], num_tokens=30)[0]
