"""KV slots, request slots and cached prefixes: whatever happens to requests, nothing is lost, leaked or approximate.

Every engine checks at its end that all slots are free, and during its steps that none is free and owned at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from aspire_sglang.attention_backends.layout import RowKind
from tests.support.engine import SchedulerEngine, running_engine
from tests.support.workloads import ACCEPTING, ASPIRE, REJECTING, greedy, random_prompt, random_prompts, results

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("one_thread")]

RunStock = Callable[..., list[Any]]


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("server", [ACCEPTING, REJECTING], ids=["accepting", "rejecting"])
def test_retraction_for_want_of_memory(
    llama: str, stock_outputs: RunStock, server: dict[str, Any], page_size: int
) -> None:
    """A retracted request comes back and ends as if it had never left; so do those that stayed."""
    prompts = random_prompts((20, 33, 48, 60, 75, 90), seed=31)
    expected = stock_outputs(prompts, greedy(90), server={"page_size": page_size})
    small = {"page_size": page_size, "max_total_tokens": 512, "schedule_conservativeness": 0.1}
    with running_engine(llama, **server, **small) as engine:
        outputs = engine.generate(prompts, greedy(90))
    assert sum(output.req.retraction_count for output in outputs) >= 2
    assert results(outputs) == results(expected)


@pytest.mark.parametrize("held_drafts", range(6))
def test_retraction_while_drafting(llama: str, stock_outputs: RunStock, held_drafts: int) -> None:
    """Held drafts are lost with the slot and nothing else: also right after prefill, and right before a verify."""
    prompts = random_prompts((50, 180), seed=32)
    expected = stock_outputs(prompts, greedy(30))
    with running_engine(llama, **{**REJECTING, "aspire_policy": "fixed:5"}) as engine:
        reqs = [engine.submit(prompt, greedy(30)) for prompt in prompts]
        for num_verifies in (0, 2):
            engine.run_until(
                lambda n=num_verifies: reqs[0].spec_verify_ct >= n and held(engine, reqs[0]) == held_drafts
            )
            assert engine.retract_all() == 2
        engine.run()
        assert results([engine.output_of(req) for req in reqs]) == results(expected)


def held(engine: SchedulerEngine, req: Any) -> int | None:
    """Drafts that a request holds; None before its first token."""
    return engine.state_of(req).held_drafts if len(req.output_ids) > 0 else None


class TestAbort:
    """An aborted request leaves at once whatever it was doing, and its neighbour does not notice."""

    NEIGHBOUR, DOOMED = random_prompt(80, seed=41), random_prompt(200, seed=42)

    @pytest.fixture
    def expected(self, stock_outputs: RunStock) -> list[list[int]]:
        return [output.output_ids for output in stock_outputs([self.NEIGHBOUR, self.DOOMED], greedy(30))]

    def run(self, llama: str, expected: list[list[int]], is_reached: Callable[..., bool], **options: Any) -> Any:
        """Abort the second of two requests when the condition holds; its ``Req``."""
        server = {**REJECTING, "aspire_policy": "fixed:6", "chunked_prefill_size": 64, **options}
        with running_engine(llama, **server) as engine:
            neighbour, doomed = (engine.submit(prompt, greedy(30)) for prompt in (self.NEIGHBOUR, self.DOOMED))
            engine.run_until(lambda: is_reached(engine, doomed))
            engine.abort(doomed)
            engine.run()
            assert engine.output_of(neighbour).output_ids == expected[0]
            assert list(doomed.output_ids) == expected[1][: len(doomed.output_ids)]
            reported = [each.rid for each in engine.sent if type(each).__name__ == "AbortReq"]
            assert doomed.finished() or reported == [doomed.rid]  # either way the client hears of it
        return doomed

    def test_queued(self, llama: str, expected: list[list[int]]) -> None:
        doomed = self.run(llama, expected, lambda engine, req: True)
        assert len(doomed.output_ids) == 0

    def test_waiting_for_a_slot(self, llama: str, expected: list[list[int]]) -> None:
        def first_runs(engine: SchedulerEngine, req: Any) -> bool:
            return engine.step.total_counts.verify_rows == 2

        doomed = self.run(llama, expected, first_runs, max_running_requests=1)
        assert len(doomed.output_ids) == 0

    @pytest.mark.parametrize("num_tokens", [64, 128])
    def test_between_prompt_chunks(self, llama: str, expected: list[list[int]], num_tokens: int) -> None:
        def is_cut(engine: SchedulerEngine, req: Any) -> bool:
            return engine.scheduler.chunked_req is req and req.extend_range.end >= num_tokens

        doomed = self.run(llama, expected, is_cut)
        assert len(doomed.output_ids) == 0

    @pytest.mark.parametrize("held_drafts", range(7))
    def test_drafting(self, llama: str, expected: list[list[int]], held_drafts: int) -> None:
        """With no draft, some, and right before the verify of all six; in its second cycle."""

        def is_reached(engine: SchedulerEngine, req: Any) -> bool:
            return req.spec_verify_ct == 1 and held(engine, req) == held_drafts

        doomed = self.run(llama, expected, is_reached)
        assert doomed.finished_reason.to_json()["type"] == "abort"
        assert doomed.spec_verify_ct == 1
        assert len(doomed.output_ids) == 2 + doomed.spec_num_correct_drafts

    def test_retracted(self, llama: str, expected: list[list[int]]) -> None:
        def is_reached(engine: SchedulerEngine, req: Any) -> bool:
            if req.spec_verify_ct < 2:
                return False
            engine.retract_all()
            return True

        doomed = self.run(llama, expected, is_reached)
        assert doomed.retraction_count == 1


@pytest.mark.parametrize("page_size", [1, 16])
def test_request_as_large_as_the_pool(llama: str, stock_outputs: RunStock, page_size: int) -> None:
    """Its drafts' reserve may not fit towards the end: then the client hears of it, and the engine serves on."""
    large, next_one = random_prompt(300, seed=45), random_prompt(60, seed=46)
    expected = stock_outputs([large, next_one], greedy(210), server={"page_size": page_size})
    with running_engine(llama, **ACCEPTING, page_size=page_size, max_total_tokens=512) as engine:
        req = engine.submit(large, greedy(400))
        engine.run()
        reported = [each.rid for each in engine.sent if type(each).__name__ == "AbortReq"]
        assert req.finished() or reported == [req.rid]
        num_tokens = len(req.output_ids)
        assert num_tokens >= 181  # 512 less the prompt and the reserve
        assert list(req.output_ids) == expected[0].output_ids[:num_tokens]
        assert results(engine.generate([next_one], greedy(210))) == results(expected[1:])


class TestSlotReuse:
    """Every request of a slot starts with a record, page sets and a cycle of its own, however the former one ended."""

    def test_one_slot(self, llama: str, stock_outputs: RunStock) -> None:
        prompts = random_prompts((300, 40, 250, 30, 120, 20), seed=51)
        expected = stock_outputs(prompts, greedy(25))
        opened: list[tuple[int, int]] = []
        with running_engine(llama, **REJECTING, max_running_requests=1) as engine:
            open_state, sets = engine.step.states.open, engine.step.attention.sets

            def spy(state: Any) -> Any:
                state = open_state(state)
                assert (state.held_drafts, state.counts.num_tokens, state.history.cycles) == (0, 0, 0)
                assert sets.recent_start[state.slot] == -1
                assert sets.pages[state.slot].unique().tolist() == [-1]
                opened.append((state.slot, state.generation))
                return state

            engine.step.states.open = spy
            reqs = [engine.submit(prompt, greedy(25)) for prompt in prompts]
            aborted, retracted = reqs[0], reqs[2]
            engine.run_until(lambda: aborted.spec_verify_ct == 1 and held(engine, aborted) == 3)
            engine.abort(aborted)
            engine.run_until(lambda: retracted.spec_verify_ct == 1 and held(engine, retracted) == 2)
            engine.retract_all()
            engine.run()
            outputs = [engine.output_of(req) for req in reqs[1:]]
            assert len(engine.step.states) == 0  # and what it keeps of a request goes when the request ends
        assert results(outputs) == results(expected[1:])
        assert opened == [(1, generation) for generation in range(1, 8)]

    def test_flush_restarts_generations(self, llama: str, stock_outputs: RunStock) -> None:
        """SGLang counts handovers from zero again after a flush: the records of before must be gone by then."""
        first, second = random_prompt(300, seed=52), random_prompt(40, seed=53)
        expected = stock_outputs([second], greedy(25))
        with running_engine(llama, **REJECTING) as engine:
            req = engine.submit(first, greedy(25))
            engine.run_until(lambda: req.spec_verify_ct == 1)
            engine.retract_all()
            engine.abort(req)  # while queued, when SGLang does not tell of its end
            assert len(engine.step.states) == 1
            engine.run()
            engine.flush()
            assert len(engine.step.states) == 0
            assert engine.step.attention.sets.pages.unique().tolist() == [-1]
            outputs = engine.generate([second], greedy(25))
        assert results(outputs) == results(expected)


class TestPrefixCache:
    """What the prefix cache holds was written by prefill or by a verify, never by a draft."""

    @pytest.mark.parametrize("page_size", [1, 16])
    def test_kv_equals_dense_recomputation(self, llama: str, page_size: int) -> None:
        system = random_prompt(40, seed=60)
        prompts = [system + prompt for prompt in random_prompts((20, 57, 88, 104, 200, 333), seed=61)]
        drafted: dict[int, torch.Tensor] = {}  # by KV slot: what a draft wrote there
        num_approximate = 0
        with running_engine(llama, **REJECTING, page_size=page_size, max_running_requests=4) as engine:

            def on_step(batch: Any) -> None:
                nonlocal num_approximate
                if not batch.forward_mode.is_decode():
                    return
                table = engine.scheduler.req_to_token_pool.req_to_token
                for row in engine.step.attention._plan.layout.rows:
                    slots = table[row.slot, row.start : row.kv_len].long()
                    for slot, kv in zip(slots.tolist(), engine.kv_at(slots).unbind(1), strict=True):
                        if row.kind is RowKind.DRAFT:
                            drafted[slot] = kv
                        elif slot in drafted:
                            num_approximate += int((drafted.pop(slot) - kv).abs().max() > 1e-2)

            outputs = engine.generate(prompts, greedy(48), on_step)
            turns = [list(output.req.origin_input_ids) + output.output_ids for output in outputs]
            followers = engine.generate([turn + random_prompt(20, seed=62) for turn in turns[:3]], greedy(20), on_step)
            for turn, follower in zip(turns, followers, strict=False):
                assert follower.req.cached_tokens >= (len(turn) - 1) // page_size * page_size
            counts = engine.step.total_counts
            assert min(counts.drafts_verified - counts.drafts_accepted, counts.drafts_accepted) > 100
            cached = [(tokens, engine.kv_at(slots)) for tokens, slots in engine.cached_prefixes()]
        assert num_approximate > 100  # what drafts wrote would not pass for the exact KV of the same token
        assert sum(len(tokens) for tokens, _ in cached) > sum(map(len, prompts)) + 6 * 32
        with running_engine(llama, page_size=page_size) as stock:
            for tokens, kv in cached:
                stock.generate([[*tokens, 0]], greedy(1))
                ((_, slots),) = stock.cached_prefixes()
                torch.testing.assert_close(kv, stock.kv_at(slots[: len(tokens)]), atol=1e-4, rtol=1e-4)
                stock.flush()

    def test_stop_inside_a_run(self, llama: str, stock_outputs: RunStock) -> None:
        """Tokens past a stop were verified with it, but belong to nobody: the cache ends where stock's ends."""
        prompt = random_prompt(50, seed=63)
        (free,) = stock_outputs([prompt], greedy(30))
        stop = free.output_ids[4]
        params = greedy(30, ignore_eos=False, stop_token_ids=[stop])
        follower = prompt + free.output_ids[:9]
        expected = stock_outputs([follower], greedy(20))
        with running_engine(llama, **ACCEPTING) as engine:
            (output,) = engine.generate([prompt], params)
            kept = free.output_ids[: free.output_ids.index(stop) + 1]
            assert output.output_ids == kept
            outputs = engine.generate([follower], greedy(20))
            assert outputs[0].req.cached_tokens == len(prompt) + len(kept) - 1
        assert results(outputs) == results(expected)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("chunk", [16, 48, 128])
def test_chunked_prefill(llama: str, stock_outputs: RunStock, chunk: int, page_size: int) -> None:
    """Prompts cut into chunks, while other requests draft, give what uncut prompts give."""
    prompts = random_prompts((10, 47, 48, 49, 130, 300), seed=71)
    expected = stock_outputs(prompts, greedy(20), server={"page_size": page_size})
    with running_engine(llama, **REJECTING, chunked_prefill_size=chunk, page_size=page_size) as engine:
        outputs = engine.generate(prompts, greedy(20))
    assert results(outputs) == results(expected)


class TestEqualPrompts:
    """Requests for n answers to one prompt share its pages and nothing else."""

    @pytest.mark.parametrize("server", [ACCEPTING, REJECTING], ids=["accepting", "rejecting"])
    def test_greedy(self, llama: str, stock_outputs: RunStock, server: dict[str, Any]) -> None:
        prompts = [random_prompt(150, seed=81)] * 6
        expected = stock_outputs(prompts, greedy(30))
        with running_engine(llama, **server) as engine:
            first = engine.generate(prompts, greedy(30))
            second = engine.generate(prompts, greedy(30))
        assert results(first) == results(second) == results(expected)

    def test_sampled(self, llama: str) -> None:
        """Without a seed each request draws its own text; with one, its text depends on nothing else."""
        prompts = [random_prompt(150, seed=82)] * 6
        with running_engine(llama, **ACCEPTING) as engine:
            free = engine.generate(prompts, greedy(30, temperature=1.0))
            seeded = engine.generate(prompts, greedy(30, temperature=1.0, sampling_seed=5))
        with running_engine(llama, **ASPIRE, aspire_policy="off") as engine:
            alone = engine.generate(prompts[:1], greedy(30, temperature=1.0, sampling_seed=5))
        assert len({tuple(output.output_ids) for output in free}) == 6
        assert {tuple(output.output_ids) for output in seeded} == {tuple(alone[0].output_ids)}
