"""Rows 3, 4 and 5 of docs/known-faults.md: tokens accepted at once must act as if they had come one by one.

REF is stock SGLang without speculation. Runs of nine tokens are forced by drafts that read everything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

from tests.support.engine import running_engine
from tests.support.tiny_models import VOCAB_SIZE
from tests.support.workloads import ACCEPTING, ASPIRE, REJECTING, greedy, random_prompt, random_prompts, results

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("one_thread")]

RunStock = Callable[..., list[Any]]
RUN = 9
# Every token of the output is one printable ASCII character, so that each has a text of its own.
PRINTABLE = {"logit_bias": {str(token): -100.0 for token in range(94, VOCAB_SIZE)}}


class TestRow3StopInsideARun:
    """The first stop ends the request, wherever it falls in a run and whatever else the run reaches."""

    @pytest.mark.parametrize("kind", ["token", "string"])
    def test_stop_wins_over_the_length_cap(self, llama: str, kind: str) -> None:
        with running_engine(llama, **ASPIRE) as engine:
            text = engine.scheduler.tokenizer.decode([12])
            stop = {"stop_token_ids": [12]} if kind == "token" else {"stop": [text]}
            req = engine.submit([1, 2, 3], {"max_new_tokens": 5, **stop})
            req.output_ids.extend([10, 11, 12, 20, 21, 22])
            req.update_finish_state(6)
            assert req.finished_reason.to_json() == {"type": "stop", "matched": 12 if kind == "token" else text}
            assert list(req.output_ids_through_stop) == [10, 11, 12]
            assert list(req.output_ids) == [10, 11, 12]  # nothing after the stop stays
            engine.abort(req)  # it never ran

    @pytest.mark.parametrize("max_new_tokens", [RUN + 1, 30])
    def test_every_place_of_a_run(self, llama: str, max_new_tokens: int) -> None:
        """Stop at token k of the first run, k = 1..9, as token, EOS, string and string over two tokens.

        The run may end at the length cap; there the cap, which plain decoding checks first, is the reason.
        """
        prompt, text_of, free = self.find_prompt(llama)
        stops: list[tuple[dict[str, Any], int | None]] = []
        for k in range(1, RUN + 1):
            token = free[k]
            stops += [
                ({"stop_token_ids": [token], "ignore_eos": False}, None),
                ({"ignore_eos": False}, token),
                ({"stop": [text_of[token]]}, None),
                ({"stop": [text_of[free[k - 1]] + text_of[token]]}, None),
            ]
        params = [greedy(max_new_tokens, **PRINTABLE, **stop) for stop, _ in stops]
        seen = []
        for server in ({}, ACCEPTING):
            with running_engine(llama, **server) as engine:
                reqs = [engine.submit(prompt, each) for each in params]
                for req, (_, eos) in zip(reqs, stops, strict=True):
                    req.eos_token_ids = set() if eos is None else {eos}
                engine.run()
                seen.append(results([engine.output_of(req) for req in reqs]))
        expected, got = seen
        assert got == expected
        assert [len(ids) for ids, _ in expected] == [k + 1 for k in range(1, RUN + 1) for _ in range(4)]
        last = ["stop" if max_new_tokens > RUN + 1 else "length"] * 4
        assert [reason["type"] for _, reason in expected] == ["stop"] * 4 * (RUN - 1) + last
        for req in reqs:
            assert req.spec_correct_drafts_histogram[RUN - 1] == req.spec_verify_ct == 1

    def find_prompt(self, llama: str) -> tuple[list[int], list[str], list[int]]:
        """A prompt whose first ten tokens differ, the text of each token, and its output."""
        with running_engine(llama) as engine:
            text_of = [engine.scheduler.tokenizer.decode([token]) for token in range(VOCAB_SIZE)]
            prompts = random_prompts([50] * 30, seed=11)
            for output in engine.generate(prompts, greedy(10, **PRINTABLE)):
                if len(set(output.output_ids)) == 10:
                    return list(output.req.origin_input_ids), text_of, output.output_ids
        raise AssertionError("no prompt gives ten different tokens")


class TestRow4PenaltiesInsideARun:
    """Every position of a verify is penalised by the output before it, drafts included; drafting alone counts nothing.

    Stock counts one token a step.
    """

    def test_counts_follow_the_committed_output(self, llama: str) -> None:
        """Three tokens at once leave the same counts as three single steps; a step that only drafts changes nothing."""
        prompt, counts_at = [5, 6, 7, 8] * 10, []
        for policy in ("fixed:2", "off"):
            seen: dict[int, dict[int, int]] = {}
            with running_engine(llama, **ASPIRE, aspire_policy=policy, aspire_ratio=1.0) as engine:
                req = engine.submit(prompt, greedy(40, frequency_penalty=0.2))

                def on_step(batch: Any, engine: Any = engine, req: Any = req, seen: Any = seen) -> None:
                    if not batch.forward_mode.is_decode() or req.finished():
                        return
                    counts, ids = engine.state_of(req).counts, list(req.output_ids)
                    if engine.step.last_counts.verify_rows == 0:
                        assert counts.num_tokens == len(ids)
                    assert counts.as_dict() == Counter(ids[: counts.num_tokens])
                    assert counts.dense(VOCAB_SIZE, torch.device("cpu")).sum() == counts.num_tokens
                    seen[counts.num_tokens] = counts.as_dict()

                engine.run(on_step)
            counts_at.append(seen)
        together, singly = counts_at
        assert max(req.spec_correct_drafts_histogram) > 0
        assert len(together) >= 13
        assert {length: singly[length] for length in together} == together

    @pytest.mark.parametrize("server", [ACCEPTING, REJECTING], ids=["accepting", "rejecting"])
    def test_repeating_prompt(self, llama: str, stock_outputs: RunStock, server: dict[str, Any]) -> None:
        prompts = [[5, 6, 7, 8] * 20, [9] * 100, random_prompt(60, seed=1) * 4, [30, 31] * 60]
        penalties = [
            {"frequency_penalty": 1.0},
            {"presence_penalty": 1.0},
            {"repetition_penalty": 1.3},
            # Not with repetition_penalty: stock keeps its penalties in a set, so their order is that of its hashes.
            {"frequency_penalty": 0.5, "presence_penalty": 0.5},
        ]
        cases = [(prompt, greedy(64, **penalty)) for prompt in prompts for penalty in penalties]
        given = [list(part) for part in zip(*cases, strict=True)]
        expected = stock_outputs(*given)
        without = stock_outputs(prompts, greedy(64))
        assert [output.output_ids for output in expected[::4]] != [output.output_ids for output in without]
        with running_engine(llama, **server) as engine:
            outputs = engine.generate(*given)
            assert engine.step.total_counts.drafts_accepted > 100
        assert results(outputs) == results(expected)

    @pytest.mark.parametrize("server", [ACCEPTING, REJECTING], ids=["accepting", "rejecting"])
    def test_min_new_tokens(self, llama: str, stock_outputs: RunStock, server: dict[str, Any]) -> None:
        """EOS biased by +100 is drawn as soon as it may be: as the 21st token."""
        with running_engine(llama, **server) as engine:
            eos = engine.scheduler.tokenizer.eos_token_id
            params = {"max_new_tokens": 64, "min_new_tokens": 20, "logit_bias": {str(eos): 100.0}}
            prompts = random_prompts((30, 200), seed=12)
            outputs = engine.generate(prompts, params)
        assert results(outputs) == results(stock_outputs(prompts, params))
        for output in outputs:
            assert output.output_ids.index(eos) == 20
            assert output.reason == {"type": "stop", "matched": eos}


class SevenEveryFifth(CustomLogitProcessor):
    """Forces token 7 at output positions 4, 9, 14, ..."""

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        for row, params in enumerate(custom_param_list or []):
            if len(params["__req__"].output_ids) % 5 == 4:
                logits[row] = -float("inf")
                logits[row, 7] = 0.0
        return logits


@pytest.mark.parametrize("server", [ACCEPTING, REJECTING], ids=["accepting", "rejecting"])
class TestRow5EveryPositionIsProcessed:
    """logit_bias, min_p and processors act on every token of a run, not on its first alone."""

    PROMPTS = random_prompts((40, 120, 300), seed=21)

    def test_banned_token(self, llama: str, stock_outputs: RunStock, server: dict[str, Any]) -> None:
        """REF's most frequent token of each prompt, banned."""
        free = stock_outputs(self.PROMPTS, greedy(64))
        banned = [Counter(output.output_ids).most_common(1)[0][0] for output in free]
        params = [greedy(64, logit_bias={str(token): -100.0}) for token in banned]
        with running_engine(llama, **server) as engine:
            outputs = engine.generate(self.PROMPTS, params)
            assert engine.step.total_counts.drafts_accepted > 30
        assert results(outputs) == results(stock_outputs(self.PROMPTS, params))
        for output, token in zip(outputs, banned, strict=True):
            assert len(output.output_ids) == 64
            assert token not in output.output_ids

    def test_min_p_of_one_is_greedy(self, llama: str, stock_outputs: RunStock, server: dict[str, Any]) -> None:
        with running_engine(llama, **server) as engine:
            outputs = engine.generate(self.PROMPTS, greedy(64, temperature=1.0, min_p=1.0))
            assert engine.step.total_counts.drafts_accepted > 30
        assert results(outputs) == results(stock_outputs(self.PROMPTS, greedy(64)))

    def test_custom_processor(self, llama: str, stock_outputs: RunStock, server: dict[str, Any]) -> None:
        fields = {"custom_logit_processor": SevenEveryFifth.to_str()}
        allowed = {"enable_custom_logit_processor": True}
        params = greedy(64, custom_params={})
        with running_engine(llama, **server, **allowed) as engine:
            outputs = engine.generate(self.PROMPTS, params, **fields)
            assert engine.step.total_counts.drafts_accepted > 30
        for output in outputs:
            assert output.output_ids[4::5] == [7] * 12
        expected = stock_outputs(self.PROMPTS, params, server=allowed, **fields)
        assert results(outputs) == results(expected)
