"""Greedy output equals plain decoding, token for token, in float32: every policy, selector, page size, draft length."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("sglang")

from aspire_sglang.config import SELECTORS
from tests.support.engine import running_engine
from tests.support.tiny_models import TINY_MODELS

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("one_thread")]

POLICIES = ("aspire", "aspire-paper", "fsm", "fixed:{d}", "sync:{d}", "off")
# So small that drafts are rejected: 3 of up to 27 pages.
SMALL_BUDGET = {"aspire_min_pages": 3, "aspire_recent_pages": 1, "aspire_ratio": 0.01}
PROMPT_LENS = (3, 17, 64, 130, 257, 400)
GREEDY = {"temperature": 0.0, "max_new_tokens": 24, "ignore_eos": True}


def random_prompts(seed: int, vocab: int = 300) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(vocab) for _ in range(length)] for length in PROMPT_LENS]


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("model", sorted(TINY_MODELS))
def test_every_policy_and_selector_equals_plain_decoding(
    tiny_model: Callable[[str], Path], model: str, page_size: int
) -> None:
    """The whole cross product on one model and page size; rejections and partial acceptances must have happened."""
    path, prompts = str(tiny_model(model)), random_prompts(seed=page_size)
    with running_engine(path, page_size=page_size) as stock:
        expected = [output.output_ids for output in stock.generate(prompts, GREEDY)]
    rejected = partial = 0
    for draft_max in (1, 4, 16):
        options = {**SMALL_BUDGET, "aspire_draft_max": draft_max, "aspire_draft_init": 1}
        with running_engine(path, page_size=page_size, speculative_algorithm="aspire", **options) as engine:
            for selector in SELECTORS:
                for policy in POLICIES:
                    engine.reconfigure(selector=selector, policy=policy.format(d=draft_max))
                    outputs = engine.generate(prompts, GREEDY)
                    combination = (selector, policy, draft_max)
                    assert [output.output_ids for output in outputs] == expected, combination
                    counts = engine.step.total_counts
                    rejected += counts.drafts_verified - counts.drafts_accepted
                    partial += sum(sum(output.req.spec_correct_drafts_histogram[1:draft_max]) for output in outputs)
    assert rejected > 100
    assert partial > 10


def document_prompts(model_path: Path) -> list[list[int]]:
    """16 prompts of 20 to 4,000 tokens out of the study's documents and questions."""
    import json

    study = json.loads((Path(__file__).parents[1] / "data" / "acceptance_prompts.json").read_text())
    whole = [prompt["prompt_ids"] for prompt in study["prompts"]]
    lengths = (20, 24, 33, 40, 47, 56, 64, 80, 100, 128, 160, 200, 256, 400, 1000, 4000)
    return [whole[index % len(whole)][-length:] for index, length in enumerate(lengths)]


def test_smollm2_equals_plain_decoding_with_every_selector(default_model: Path) -> None:
    """The real model in batches of 8 with mixed lengths, 64 new tokens, budgets that do get drafts rejected."""
    torch.set_num_threads(2)  # restored by one_thread
    prompts = document_prompts(default_model)
    params = {**GREEDY, "max_new_tokens": 64}
    server = {"max_total_tokens": 40_000, "max_running_requests": 8, "chunked_prefill_size": 2048}
    with running_engine(str(default_model), **server) as stock:
        expected = [output.output_ids for output in stock.generate(prompts, params)]
    with running_engine(str(default_model), speculative_algorithm="aspire", **server) as engine:
        outputs = engine.generate(prompts, params)
        assert [output.output_ids for output in outputs] == expected, "defaults"
        for selector in SELECTORS:
            engine.reconfigure(selector=selector, policy="fixed:8", min_pages=4, recent_pages=2, ratio=0.03)
            outputs = engine.generate(prompts, params)
            assert [output.output_ids for output in outputs] == expected, selector
            counts = engine.step.total_counts
            assert 0 < counts.drafts_accepted < counts.drafts_verified, selector
