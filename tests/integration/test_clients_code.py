"""What a client sends may fail, stop early or go on in a session: it ends or continues its own request only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("sglang")

import torch
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

from tests.support.engine import running_engine
from tests.support.workloads import ACCEPTING, ASPIRE, greedy, random_prompts

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("one_thread")]


class RaisesLater(CustomLogitProcessor):  # type: ignore[misc]
    """Fails once there are five output tokens."""

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        assert custom_param_list is not None
        if len(custom_param_list[0]["__req__"].output_ids) >= 5:
            raise KeyError("budget")
        return logits


class ReturnsLess(CustomLogitProcessor):  # type: ignore[misc]
    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        return logits[:, :3]


@pytest.mark.parametrize(
    ("processor", "words"),
    [
        (RaisesLater, "custom logit processor failed: KeyError: 'budget'"),
        (ReturnsLess, "returned logits of shape (1, 3)"),
        ("abc", "custom_logit_processor cannot be read"),
    ],
    ids=["raises", "wrong shape", "unreadable"],
)
def test_a_failing_logit_processor_ends_its_own_request(
    llama: str, stock_outputs: Callable[..., list[Any]], processor: Any, words: str
) -> None:
    """A 400 that says what failed; the neighbour in the same steps gets stock's tokens."""
    first, second = random_prompts((80, 120), seed=7)
    expected = stock_outputs([second], greedy(30))[0].output_ids
    with running_engine(llama, **ACCEPTING, enable_custom_logit_processor=True) as engine:
        text = processor if isinstance(processor, str) else processor.to_str()
        doomed = engine.submit(first, greedy(30), custom_logit_processor=text)
        neighbour = engine.submit(second, greedy(30))
        engine.run()
        assert engine.output_of(neighbour).output_ids == expected
        reason = doomed.finished_reason.to_json()
        assert (reason["type"], reason["status_code"]) == ("abort", 400)
        assert words in reason["message"]


def test_stop_tokens_outside_the_vocabulary_are_refused(llama: str) -> None:
    with running_engine(llama, **ASPIRE) as engine:
        for token in (-1, 10**6):
            req = engine.submit([1, 2, 3], greedy(8, stop_token_ids=[token], min_new_tokens=4))
            engine.run()
            assert f"stop_token_ids holds {token}" in req.finished_reason.to_json()["message"]


def test_nothing_after_a_stop_stays_in_the_request(llama: str) -> None:
    """A run of nine is cut at its stop: what a session's next turn reads, and the KV that is kept, end there too."""
    (prompt,) = random_prompts((60,), seed=2)
    with running_engine(llama, **ACCEPTING) as engine:
        free = engine.generate([prompt], greedy(20))[0].output_ids
        for place in range(1, 10):
            stop = free[place]
            want = free[: free.index(stop) + 1]
            req = engine.submit(prompt, {**greedy(20), "stop_token_ids": [stop], "ignore_eos": False})
            engine.run()
            assert list(req.output_ids) == want
            assert req.kv_committed_len == len(prompt) + max(len(want) - 1, 0)
