"""Where an output ends and how it is sent: limits and stops inside accepted runs, streaming, and reported counters."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("sglang")

from tests.support.engine import running_engine
from tests.support.workloads import ACCEPTING, REJECTING, greedy, random_prompt, random_prompts, results

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("one_thread")]

RunStock = Callable[..., list[Any]]


def test_max_new_tokens_at_every_place_of_a_run(llama: str, stock_outputs: RunStock) -> None:
    """No run commits past the limit: its cycle drafts no more than the limit has room for."""
    limits = range(1, 21)
    prompts, params = [random_prompt(40, seed=91)] * len(limits), [greedy(limit) for limit in limits]
    expected = stock_outputs(prompts, params)
    with running_engine(llama, **ACCEPTING) as engine:
        outputs = engine.generate(prompts, params)
    assert results(outputs) == results(expected)
    assert [len(output.req.output_ids) for output in outputs] == list(limits)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("server", [ACCEPTING, REJECTING], ids=["accepting", "rejecting"])
def test_context_limit(llama: str, stock_outputs: RunStock, server: dict[str, Any], page_size: int) -> None:
    """Prompts that leave 110 to 5 tokens of context; and two that SGLang refuses as too long."""
    context = {"context_length": 128, "page_size": page_size}
    prompts = random_prompts((16, 100, 111, 112, 113, 118, 119, 120, 121, 122, 200), seed=92)
    expected = stock_outputs(prompts, greedy(200), server=context)
    with running_engine(llama, **server, **context) as engine:
        outputs = engine.generate(prompts, greedy(200))
    assert results(outputs[:9]) == results(expected[:9])
    assert [output.reason for output in outputs[9:]] == [output.reason for output in expected[9:]]
    assert [len(output.output_ids) for output in outputs[:9]] == [126 - len(prompt) for prompt in prompts[:9]]
    assert [output.reason["type"] for output in outputs] == ["length"] * 9 + ["abort"] * 2


@pytest.mark.parametrize("server", [ACCEPTING, REJECTING], ids=["accepting", "rejecting"])
@pytest.mark.parametrize("interval", [1, 4])
def test_streaming(llama: str, stock_outputs: RunStock, server: dict[str, Any], interval: int) -> None:
    """Drafting steps send nothing; the chunks of a request, in order, are its output, and the last one says why."""
    prompts = random_prompts((30, 90, 200), seed=93)
    params = [greedy(40), greedy(41), {"max_new_tokens": 60, "stop_token_ids": list(range(0, 300, 9))}]
    expected = stock_outputs(prompts, params)
    chunks: dict[str, list[list[int]]] = {}
    reasons: dict[str, list[Any]] = {}
    with running_engine(llama, **server, stream_interval=interval) as engine:
        outputs = engine.generate(prompts, params, stream=True)
        for message in engine.sent:
            for index, rid in enumerate(message.rids):
                chunks.setdefault(rid, []).append(list(message.output_ids[index]))
                reasons.setdefault(rid, []).append(message.finished_reasons[index])
                assert message.completion_tokens[index] == sum(map(len, chunks[rid]))
    for output, want in zip(outputs, expected, strict=True):
        assert all(chunks[output.rid])
        assert list(itertools.chain(*chunks[output.rid])) == want.output_ids
        assert reasons[output.rid] == [None] * (len(chunks[output.rid]) - 1) + [want.reason]
        if interval == 1:
            assert len(chunks[output.rid]) == 1 + output.req.spec_verify_ct
        # No run is longer than 9 tokens: a chunk is sent as soon as the interval has passed.
        assert all(len(chunk) < interval + 9 for chunk in chunks[output.rid])


@pytest.mark.parametrize("server", [ACCEPTING, REJECTING], ids=["accepting", "rejecting"])
def test_counters_of_requests(llama: str, server: dict[str, Any]) -> None:
    """Verifies are counted, drafting steps are not, and every committed token is accounted for once."""
    verifies: Counter[str] = Counter()
    drafts: Counter[str] = Counter()
    with running_engine(llama, **server) as engine:

        def on_step(batch: Any) -> None:
            if not batch.forward_mode.is_decode():
                return
            rid_of = {row: req.rid for row, req in slots.items() if req.req_pool_idx in (row, None)}
            for row in engine.step.attention._plan.layout.rows:
                (verifies if row.kind.value == "verify" else drafts)[rid_of[row.slot]] += 1

        reqs = [engine.submit(prompt, greedy(40)) for prompt in random_prompts((25, 60, 140, 300), seed=94)]
        engine.iterate()
        slots = {req.req_pool_idx: req for req in reqs}
        assert len(slots) == 4
        engine.run(on_step)
        total = engine.step.total_counts
        last = engine.sent[-1]
        reported = {rid: last.spec_verify_ct[index] for index, rid in enumerate(last.rids)}
    for req in reqs:
        histogram = req.spec_correct_drafts_histogram
        assert req.spec_verify_ct == verifies[req.rid] == sum(histogram) == sum(req.spec_cap_lens_histogram)
        assert req.spec_num_correct_drafts == sum(length * count for length, count in enumerate(histogram))
        assert req.spec_num_cap_tokens == drafts[req.rid]
        assert len(req.output_ids) == 1 + req.spec_verify_ct + req.spec_num_correct_drafts == 40
        assert reported.get(req.rid, req.spec_verify_ct) == req.spec_verify_ct
    assert reported
    assert total.verify_rows == sum(verifies.values())
    assert total.draft_rows == sum(drafts.values()) == total.drafts_verified
    assert total.drafts_accepted == sum(req.spec_num_correct_drafts for req in reqs)
    assert (total.drafts_accepted == total.drafts_verified) == (server is ACCEPTING)
