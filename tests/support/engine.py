"""SGLang's real scheduler, driven one iteration at a time inside the test process.

Starting a server costs half a minute; building a scheduler costs seconds, and between two iterations a test can look
at pools, requests and page sets, abort or retract, or change the policy. Memory checks of SGLang run after every
iteration and when the engine is idle.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any

os.environ.setdefault("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY", "1")
os.environ.setdefault("SGLANG_CHECK_KV_PAGE_INVARIANTS", "1")
os.environ.setdefault("SGLANG_ENABLE_LOGITS_PROCESSER_CHUNK", "0")

import torch
from sglang.srt.plugins import load_plugins

MAX_STEPS = 20_000


@dataclasses.dataclass
class Output:
    """What a request ended with."""

    rid: str
    output_ids: list[int]
    reason: dict[str, Any]
    req: Any


class SchedulerEngine:
    """One scheduler and its model. Use :func:`running_engine`; two of them cannot live at once in a process."""

    def __init__(self, model_path: str, **server_args: Any) -> None:
        load_plugins()
        from sglang.srt.managers.scheduler import Scheduler
        from sglang.srt.runtime_context import publish
        from sglang.srt.server_args import PortArgs, ServerArgs

        defaults: dict[str, Any] = {
            "dtype": "float32",
            "max_total_tokens": 8192,
            "max_running_requests": 8,
            "random_seed": 7,
            "log_level": "error",
            "skip_server_warmup": True,
            "disable_overlap_schedule": True,  # iterate() is SGLang's loop without overlap
        }
        assert not torch.distributed.is_initialized(), "another engine is alive in this process"
        self.args = ServerArgs(model_path=model_path, **{**defaults, **server_args})
        publish(self.args, role="scheduler")
        self.scheduler = Scheduler(self.args, PortArgs.init_new(self.args), 0, 0, 0, 0, 0, 0, None)
        self.scheduler.idle_sleeper = None  # would wait a second for requests by socket
        self.sent: list[Any] = []
        channels = self.scheduler.ipc_channels
        channels.send_to_detokenizer.send_output = self._collect
        channels.send_to_tokenizer.send_output = self._collect
        self._counter = itertools.count()
        self._empty_free = self.free_tokens()

    @property
    def worker(self) -> Any:
        return self.scheduler.draft_worker

    @property
    def step(self) -> Any:
        return self.worker.step

    def reconfigure(self, **options: Any) -> None:
        """Continue with other ASPIRE options, model and prefix cache kept; only while idle, ``draft_max`` unchanged."""
        from aspire_sglang.attention_backends.base import PageSetStore

        config = dataclasses.replace(self.worker.config, **options)
        assert config.draft_max == self.worker.config.draft_max, "draft_max sizes SGLang's reserves"
        backend = self.worker.model_runner.attn_backend
        backend.spec = backend.spec.from_config(
            config, num_layers=backend.spec.num_layers, max_tokens=backend.spec.max_tokens
        )
        pages = backend.sets.pages
        backend.sets = PageSetStore(backend.spec, num_slots=pages.shape[0], device=pages.device)
        self.worker.config = config
        self.worker.init_attention_backends()

    def _collect(self, output: Any, recv_obj: Any = None) -> None:
        self.sent.append(output)

    def submit(
        self, input_ids: Sequence[int], sampling: dict[str, Any] | None = None, *, stream: bool = False, **fields: Any
    ) -> Any:
        """Queue a request; returns SGLang's own ``Req``."""
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.sampling.sampling_params import SamplingParams

        params = SamplingParams(**{"temperature": 0.0, "max_new_tokens": 32, **(sampling or {})})
        params.normalize(self.scheduler.tokenizer)
        params.verify(self.scheduler.model_config.vocab_size)
        request = TokenizedGenerateReqInput(
            rid=fields.pop("rid", f"r{next(self._counter)}"),
            input_text=None,
            input_ids=array("q", input_ids),
            input_embeds=None,
            mm_inputs=None,
            token_type_ids=None,
            sampling_params=params,
            return_logprob=fields.pop("return_logprob", False),
            logprob_start_len=-1,
            top_logprobs_num=0,
            token_ids_logprob=None,
            stream=stream,
            **fields,
        )
        from sglang.srt.observability.req_time_stats import SchedulerReqTimeStats

        if request.time_stats is None:
            request.time_stats = SchedulerReqTimeStats()
        self.scheduler.process_input_requests([request])
        return self.scheduler.waiting_queue[-1]

    def iterate(self) -> Any:
        """One scheduler iteration, as SGLang's own loop runs it; returns the batch that ran, or None when idle."""
        batch, result = self.launch()
        self.deliver(batch, result)
        return batch

    @torch.no_grad()
    def launch(self) -> tuple[Any, Any]:
        """The first half of an iteration: choose a batch and run its forward; (batch or None, its result)."""
        scheduler = self.scheduler
        plan = scheduler.get_next_batch_to_run(running_batch=scheduler.running_batch, last_batch=scheduler.last_batch)
        scheduler.running_batch = plan.running_batch
        batch = plan.batch_to_run
        return (batch, scheduler.run_batch(batch)) if batch else (None, None)

    def deliver(self, batch: Any, result: Any) -> None:
        """The second half: commit the result (or do idle work without one), then SGLang's checks of a busy engine."""
        if batch:
            self.scheduler.process_batch_result(batch, result)
        else:
            self.scheduler.on_idle()
        self.scheduler.last_batch = batch
        self.scheduler.invariant_checker.self_check_during_busy()

    def deliver_late(self, batch: Any, result: Any) -> None:
        """Hand over a result whose requests may have ended meanwhile, as SGLang's overlapped loop does."""
        scheduler, processor = self.scheduler, self.scheduler.batch_result_processor
        scheduler.batch_result_processor = dataclasses.replace(processor, enable_overlap=True)
        scheduler.process_batch_result(batch, result)
        scheduler.batch_result_processor = processor

    def run_until(self, is_reached: Callable[[], bool]) -> None:
        """Iterate until the condition holds."""
        for _ in range(MAX_STEPS):
            if is_reached():
                return
            self.iterate()
        raise AssertionError(f"not reached after {MAX_STEPS} iterations")

    def run(self, on_step: Callable[[Any], None] | None = None) -> int:
        """Iterate until nothing is left to do; returns the number of iterations."""
        for count in range(MAX_STEPS):
            batch = self.iterate()
            if batch is None and not self.scheduler.waiting_queue:
                return count
            if on_step is not None and batch is not None:
                on_step(batch)
        raise AssertionError(f"still busy after {MAX_STEPS} iterations")

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: dict[str, Any] | Sequence[dict[str, Any]] | None = None,
        on_step: Callable[[Any], None] | None = None,
        **fields: Any,
    ) -> list[Output]:
        """Submit all prompts at once and run to the end."""
        each = list(sampling) if isinstance(sampling, (list, tuple)) else [sampling] * len(prompts)
        reqs = [self.submit(ids, params, **fields) for ids, params in zip(prompts, each, strict=True)]
        self.run(on_step)
        return [self.output_of(req) for req in reqs]

    def state_of(self, req: Any) -> Any:
        """The plugin's record of a running request."""
        pool = self.scheduler.req_to_token_pool
        return self.step.states.find(req.req_pool_idx, int(pool.req_generation[req.req_pool_idx]))

    def output_of(self, req: Any) -> Output:
        assert req.finished(), req
        return Output(req.rid, list(req.output_ids_through_stop), req.finished_reason.to_json(), req)

    def abort(self, req: Any) -> None:
        """Abort as the HTTP server does when a client goes away."""
        from sglang.srt.managers.io_struct import AbortReq

        self.scheduler.abort_request(AbortReq(rid=req.rid))

    def retract_all(self) -> int:
        """Retract all running requests to the queue, as a pause for new weights does; returns their number."""
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

        num_queued = len(self.scheduler.waiting_queue)
        self.scheduler.pause_generation(PauseGenerationReqInput(mode="retract"))
        self.scheduler.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))
        return len(self.scheduler.waiting_queue) - num_queued

    def cached_prefixes(self) -> list[tuple[list[int], torch.Tensor]]:
        """Each leaf of the prefix cache: the token ids from the root and their KV slots (int64)."""
        found = []

        def visit(node: Any, tokens: list[int], slots: list[torch.Tensor]) -> None:
            for child in node.children.values():
                path, path_slots = tokens + list(child.key.token_ids), [*slots, child.value]
                visit(child, path, path_slots)
                if not child.children:
                    found.append((path, torch.cat(path_slots)))

        visit(self.scheduler.tree_cache.root_node, [], [])
        return found

    def kv_at(self, slots: torch.Tensor) -> torch.Tensor:
        """A copy of K and V of all layers at KV slots: ``[2 * layers, slots, kv_heads, head_dim]``."""
        pool = self.scheduler.token_to_kv_pool_allocator.get_kvcache()
        layers = range(pool.start_layer, pool.start_layer + pool.layer_num)
        return torch.stack([buffer[slots] for layer in layers for buffer in pool.get_kv_buffer(layer)])

    def free_tokens(self) -> int:
        return int(self.scheduler.token_to_kv_pool_allocator.available_size())

    def check_empty(self) -> None:
        """SGLang's idle check; then, with the prefix cache evicted, every KV slot is free, and free once."""
        from sglang.srt.mem_cache.common import evict_from_tree_cache

        scheduler, allocator = self.scheduler, self.scheduler.token_to_kv_pool_allocator
        assert scheduler.is_fully_idle()
        checker = scheduler.invariant_checker
        has_leak, messages = checker._check_all_pools(scheduler.pool_stats_observer.get_pool_stats())
        assert not has_leak, messages
        assert scheduler.tree_cache.protected_size() == 0
        evict_from_tree_cache(scheduler.tree_cache, allocator.size)
        assert self.free_tokens() == self._empty_free, (self.free_tokens(), self._empty_free)
        free_pages = torch.cat([allocator.free_pages, allocator.release_pages])
        assert free_pages.unique().numel() == free_pages.numel()
        pool = scheduler.req_to_token_pool
        assert sorted(pool.free_slots) == list(range(1, pool.size + 1))

    def flush(self) -> None:
        """Check that nothing is held, then flush the prefix cache as ``/flush_cache`` does."""
        self.check_empty()
        assert self.scheduler.flush_cache(), "SGLang refused to flush: requests are left"

    def close(self) -> None:
        from sglang.srt.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

        destroy_model_parallel()
        destroy_distributed_environment()
        # Else the collector does it whenever it likes, and waits for ever for messages that nobody reads.
        self.scheduler.ipc_channels.recv_from_tokenizer.context.destroy(linger=0)


@contextlib.contextmanager
def running_engine(model_path: str, **server_args: Any) -> Iterator[SchedulerEngine]:
    """An engine that is checked to be empty and torn down at the end."""
    engine = SchedulerEngine(model_path, **server_args)
    try:
        yield engine
        engine.flush()
    finally:
        engine.close()
