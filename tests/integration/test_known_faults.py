"""Kinds of fault that systems like this one have had: rows 1, 2, 7, 8 and 10 of docs/known-faults.md.

Rows 3, 4 and 5, about what a run of accepted tokens must look like, are in test_known_faults_of_runs.py. REF is stock
SGLang without speculation. Every engine checks at its end that all slots are free, and during its steps that none is
free and owned at once.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from aspire_sglang.attention_backends.base import PageSetStore, SelectionSpec
from aspire_sglang.attention_backends.layout import RaggedLayout, Row, RowKind
from aspire_sglang.attention_backends.selection import select_pages
from aspire_sglang.attention_backends.torch_reference import TorchAttentionBackend
from aspire_sglang.config import SELECTORS, AspireConfig
from tests.support.engine import SchedulerEngine, running_engine
from tests.support.workloads import ASPIRE, REJECTING, greedy, random_prompt, random_prompts, results

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("one_thread")]

RunStock = Callable[..., list[Any]]


class TestRow1SlotsAreNotLost:
    """Requests may end in any way at any phase: the reserve stays whole pages, and every slot comes back."""

    @pytest.mark.parametrize("page_size", [1, 16])
    def test_fifty_requests_twice(self, llama: str, page_size: int) -> None:
        server = {**REJECTING, "page_size": page_size, "max_total_tokens": 640, "schedule_conservativeness": 0.1}
        free_tokens = []
        with running_engine(llama, **server) as engine:
            for seed in (1, 2):
                reqs, num_forced = self.run_fifty(engine, page_size, seed)
                engine.check_empty()
                free_tokens.append(engine.free_tokens())
                ends = {req.finished_reason.to_json()["type"] for req in reqs if req.finished()}
                assert ends == {"length", "stop", "abort"}
                assert sum(req.retraction_count for req in reqs) > num_forced > 0
        assert free_tokens == [640, 640]

    def run_fifty(self, engine: SchedulerEngine, page_size: int, seed: int) -> tuple[list[Any], int]:
        """The requests, and how many retractions were not for want of memory."""
        draw = random.Random(seed)
        prompts = random_prompts((draw.randrange(20, 150) for _ in range(50)), seed=seed)
        params = [greedy(40), {"stop_token_ids": list(range(40)), "max_new_tokens": 40}, greedy(40), greedy(60)]
        reqs = [engine.submit(prompt, params[index % 4]) for index, prompt in enumerate(prompts)]
        doomed = {reqs[index].rid: draw.randrange(1, 20) for index in range(2, 50, 4)}
        num_steps = num_forced = 0

        def on_step(batch: Any) -> None:
            nonlocal num_steps, num_forced
            num_steps += 1
            if batch.forward_mode.is_decode():
                for req in batch.reqs:
                    if req.kv is not None:
                        assert req.kv.kv_allocated_len % page_size == 0
            for req in batch.reqs:
                if len(req.output_ids) >= doomed.get(req.rid, 10**6):
                    engine.abort(req)
            if num_steps == 60:
                num_forced = engine.retract_all()

        engine.run(on_step)
        return reqs, num_forced


class TestRow2ContextLimit:
    """A row of req_to_token holds the whole reserve of a request that reaches the context limit."""

    def test_neighbour_is_not_overwritten(self, llama: str, stock_outputs: RunStock) -> None:
        first, second = random_prompt(16, seed=1), random_prompt(40, seed=2)
        server = {"context_length": 128}
        expected = stock_outputs([first, second], [greedy(200), greedy(80)], server=server)
        with running_engine(llama, **ASPIRE, **server, aspire_policy="fixed:4", aspire_ratio=1.0) as engine:
            draft_max = engine.worker.config.draft_max
            assert engine.scheduler.req_to_token_pool.req_to_token.shape[1] >= 128 + 2 * (draft_max + 1)
            req = engine.submit(first, greedy(200))
            engine.run_until(lambda: len(req.output_ids) >= 60)
            neighbour = engine.submit(second, greedy(80))
            engine.run_until(lambda: len(neighbour.output_ids) > 0)
            assert neighbour.req_pool_idx == req.req_pool_idx + 1
            engine.run()
            outputs = [engine.output_of(req), engine.output_of(neighbour)]
        assert len(outputs[0].output_ids) == 110
        assert results(outputs) == results(expected)


class TestRow7LateResults:
    """A result that arrives after its request has ended changes nothing of the request."""

    @pytest.fixture
    def expected(self, stock_outputs: RunStock) -> list[Any]:
        return results(stock_outputs([random_prompt(60, seed=3)], greedy(40)))

    @pytest.fixture
    def engine(self, llama: str, expected: list[Any]) -> Iterator[SchedulerEngine]:
        with running_engine(llama, **ASPIRE, aspire_policy="fixed:4", aspire_ratio=1.0) as engine:
            yield engine

    def launch_verify(self, engine: SchedulerEngine) -> tuple[Any, Any, Any]:
        """A request whose verify is in flight, the batch and the result: five tokens, not yet delivered."""
        req = engine.submit(random_prompt(60, seed=3), greedy(40))
        engine.run_until(lambda: req.spec_verify_ct == 1 and engine.state_of(req).held_drafts == 4)
        batch, result = engine.launch()
        assert result.accept_lens.tolist() == [5]
        return req, batch, result

    def counters(self, req: Any) -> tuple[Any, ...]:
        histogram = list(req.spec_correct_drafts_histogram)
        return list(req.output_ids), req.kv_committed_len, req.spec_verify_ct, req.spec_num_correct_drafts, histogram

    def test_after_its_end(self, engine: SchedulerEngine) -> None:
        from sglang.srt.managers.schedule_batch import FINISH_LENGTH
        from sglang.srt.mem_cache.common import release_kv_cache

        req, batch, result = self.launch_verify(engine)
        late = batch.copy()
        req.finished_reason = FINISH_LENGTH(length=len(req.output_ids))
        release_kv_cache(req, engine.scheduler.tree_cache)
        before = self.counters(req)
        engine.deliver_late(late, result)
        assert self.counters(req) == before
        engine.run()

    def test_after_retraction(self, engine: SchedulerEngine, expected: list[Any]) -> None:
        req, batch, result = self.launch_verify(engine)
        late = batch.copy()
        engine.retract_all()
        before = self.counters(req)
        engine.deliver_late(late, result)
        assert self.counters(req) == before
        engine.run()
        assert results([engine.output_of(req)]) == expected

    def test_after_abort(self, engine: SchedulerEngine) -> None:
        req, batch, result = self.launch_verify(engine)
        engine.abort(req)
        before = self.counters(req)
        engine.deliver(batch, result)
        assert self.counters(req) == before
        assert req.finished_reason.to_json()["type"] == "abort"
        engine.run()


class TestRow8StateOfTheFormerRequest:
    """Nothing that a request leaves in its slot reaches the next one."""

    def test_row_of_a_retracted_request(self, llama: str, stock_outputs: RunStock) -> None:
        long, short = random_prompt(400, seed=4), random_prompt(70, seed=5)
        expected = stock_outputs([long, short], greedy(40))
        server = {**REJECTING, "aspire_policy": "fixed:6", "max_running_requests": 1, "chunked_prefill_size": 64}
        with running_engine(llama, **server) as engine:
            retracted = engine.submit(long, greedy(40))
            engine.run_until(lambda: retracted.spec_verify_ct == 2 and engine.state_of(retracted).held_drafts == 3)
            slot, generation = retracted.req_pool_idx, engine.state_of(retracted).generation
            sets = engine.step.attention.sets
            assert sets.pages[slot].max() >= 5  # a page that the next request does not have
            engine.retract_all()
            req = engine.submit(short, greedy(40))
            engine.scheduler.waiting_queue.reverse()
            engine.iterate()  # the first of two prompt chunks, which stores no page set
            assert req.req_pool_idx == slot
            assert (sets.pages[slot].max(), sets.counts[slot].max(), sets.recent_start[slot]) == (-1, 0, -1)
            engine.run_until(lambda: len(req.output_ids) == 1)
            state = engine.state_of(req)
            assert (state.generation, state.held_drafts, state.counts.num_tokens) == (generation + 1, 0, 0)
            assert sets.pages[slot].max() < 5
            engine.iterate()
            row = engine.step.attention._plan.layout.rows[0]
            assert row == Row(slot, RowKind.DRAFT, 70, 1, 70)
            engine.run()
            assert results([engine.output_of(retracted), engine.output_of(req)]) == results(expected)


class TestRow10SparseAttentionReadsTheDraftsOwnTokens:
    """However pages rank, a draft row reads the pages that hold its cycle's tokens; buffers have their final size."""

    NUM_TOKENS, NUM_DRAFTS, PAGE = 158, 4, 16  # 158 % 16 = 14: the drafts straddle two pages

    @pytest.mark.parametrize("selector", SELECTORS)
    def test_tail_that_ranks_last(self, selector: str) -> None:
        config = AspireConfig(selector=selector, ratio=0.01, min_pages=3, recent_pages=1)
        spec = SelectionSpec.from_config(config, num_layers=4, max_tokens=256)
        sets = PageSetStore(spec, num_slots=2, device="cpu")
        scores = torch.arange(10, 0, -1, dtype=torch.float32).expand(spec.num_sets, 1, 10)
        sets.store(torch.tensor([1]), select_pages(scores, torch.tensor([self.NUM_TOKENS]), spec))
        table = torch.arange(2 * 300).view(2, 300)
        kv = type("KV", (), {"req_to_token": table})
        for start in range(self.NUM_TOKENS, self.NUM_TOKENS + self.NUM_DRAFTS):
            layout = RaggedLayout((Row(1, RowKind.DRAFT, start, 1, self.NUM_TOKENS),))
            plan = TorchAttentionBackend().plan(layout, kv=kv, sets=sets, spec=spec)
            for index in plan.sparse_index[0]:
                assert index[-(start + 1 - 144) :].tolist() == table[1, 144 : start + 1].tolist()
                assert index.numel() <= (3 + 1) * self.PAGE

    @pytest.mark.parametrize("selector", SELECTORS)
    def test_whole_budget_equals_dense(self, llama: str, selector: str) -> None:
        options = {"aspire_policy": "fixed:4", "aspire_ratio": 1.0, "aspire_selector": selector}
        drafted: dict[int, torch.Tensor] = {}
        num_compared = 0
        with running_engine(llama, **ASPIRE, **options) as engine:
            verify = engine.step.verify

            def spy(plan: Any, logits: torch.Tensor) -> Any:
                nonlocal num_compared
                for token, position in enumerate(plan.positions.tolist()):
                    if token < plan.num_draft_rows:
                        drafted[position] = logits[token].clone()
                    elif position in drafted:
                        torch.testing.assert_close(drafted.pop(position), logits[token], atol=1e-4, rtol=1e-4)
                        num_compared += 1
                return verify(plan, logits)

            engine.step.verify = spy
            engine.generate([random_prompt(self.NUM_TOKENS, seed=6)], greedy(41))
        assert num_compared == 32

    def test_buffers_sized_for_a_longer_context(self, llama: str) -> None:
        """The budget crosses its last page (0.25 * 16 = 4 of 4) at a context of 240: as in larger buffers."""
        prompts = random_prompts((200, 223, 224, 225), seed=7)
        options = {**REJECTING, "aspire_ratio": 0.25, "aspire_policy": "fixed:4"}
        seen = []
        for context_length in (256, 2048):
            with running_engine(llama, **options, context_length=context_length) as engine:
                outputs = engine.generate(prompts, greedy(28))
                counts = engine.step.total_counts
                seen.append((engine.step.attention.spec.capacity, results(outputs), counts))
        small, large = seen
        assert (small[0], large[0]) == (5, 33)
        assert small[1:] == large[1:]
        assert small[2].drafts_accepted < small[2].drafts_verified
