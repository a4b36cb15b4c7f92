"""The same engine on a GPU: eager mixed steps, PyTorch attention, bfloat16, against stock SGLang's Triton backend.

Batch shapes change bfloat16 rounding, so a path may part from stock's where two tokens are nearly tied; the float32
logits of the model decide whether that is what happened.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

pytest.importorskip("sglang")

from aspire_sglang.config import SELECTORS
from tests.support.engine import running_engine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.engine,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

GREEDY = {"temperature": 0.0, "max_new_tokens": 40, "ignore_eos": True}
EAGER = {"disable_overlap_schedule": True, "cuda_graph_backend_decode": "disabled"}
EAGER |= {"cuda_graph_backend_prefill": "disabled", "mem_fraction_static": 0.3, "dtype": "bfloat16"}
SMALL_BUDGET = {"aspire_min_pages": 3, "aspire_recent_pages": 1, "aspire_ratio": 0.01}


# Logits of the tiny models have a standard deviation of about 3; bfloat16 keeps 8 bits of each.
NEAR_TIE = 0.15


def assert_equal_up_to_a_near_tie(model: Any, prompt: list[int], output: list[int], expected: list[int]) -> int:
    """Length of the common prefix; where the outputs part, their two tokens' float32 logits must nearly tie."""
    for place, (token, wanted) in enumerate(zip(output, expected, strict=True)):
        if token != wanted:
            logits = model(torch.tensor([prompt + expected[:place]])).logits[0, -1]
            assert abs(float(logits[token] - logits[wanted])) < NEAR_TIE, (place, token, wanted)
            return place
    return len(output)


@torch.no_grad()
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("model", ["llama-gqa3", "qwen3-gqa4"])
def test_greedy_output_equals_stock(tiny_model: Callable[[str], Path], model: str, page_size: int) -> None:
    """Every selector and two policies, token for token; rejections happened and KV pools end empty."""
    draw = random.Random(1)
    prompts = [[draw.randrange(300) for _ in range(length)] for length in (3, 17, 130, 400, 900)]
    path = str(tiny_model(model))
    model_fp32 = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with running_engine(path, page_size=page_size, attention_backend="triton", **EAGER) as stock:
        expected = [output.output_ids for output in stock.generate(prompts, GREEDY)]
    options = {"speculative_algorithm": "aspire", "mem_fraction_static": 0.3, "dtype": "bfloat16", **SMALL_BUDGET}
    with running_engine(path, page_size=page_size, **options) as engine:
        for selector in SELECTORS:
            for policy in ("fixed:6", "fsm"):
                engine.reconfigure(selector=selector, policy=policy)
                outputs = engine.generate(prompts, GREEDY)
                common = [
                    assert_equal_up_to_a_near_tie(model_fp32, *each)
                    for each in zip(prompts, [output.output_ids for output in outputs], expected, strict=True)
                ]
                assert sum(common) > 0.3 * sum(map(len, expected)), (selector, policy, common)
                counts = engine.step.total_counts
                assert 0 < counts.drafts_accepted < counts.drafts_verified
