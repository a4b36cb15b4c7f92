"""Prompts and server options that several engine tests share."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

ASPIRE = {"speculative_algorithm": "aspire"}
# So small that most drafts are rejected: 3 of up to 38 pages.
REJECTING = {
    **ASPIRE,
    "aspire_policy": "fixed:6",
    "aspire_min_pages": 3,
    "aspire_recent_pages": 1,
    "aspire_ratio": 0.01,
}
# Drafts read everything, so every cycle commits eight drafts and one more token at once.
ACCEPTING = {**ASPIRE, "aspire_policy": "fixed:8", "aspire_ratio": 1.0}


def greedy(max_new_tokens: int, **params: Any) -> dict[str, Any]:
    """Sampling parameters of a greedy request that ends by its length unless told otherwise."""
    return {"temperature": 0.0, "max_new_tokens": max_new_tokens, "ignore_eos": True, **params}


def random_prompt(length: int, *, seed: int) -> list[int]:
    """Token ids of the tiny models' vocabulary without its special tokens."""
    draw = random.Random(f"{seed}/{length}")
    return [draw.randrange(300) for _ in range(length)]


def random_prompts(lengths: Iterable[int], *, seed: int) -> list[list[int]]:
    """One prompt a length, all different."""
    return [random_prompt(length, seed=seed + index) for index, length in enumerate(lengths)]


def results(outputs: Sequence[Any]) -> list[tuple[list[int], Any]]:
    """What a client sees of each output: token ids and finish reason."""
    return [(output.output_ids, output.reason) for output in outputs]
