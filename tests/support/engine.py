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
        }
        self.args = ServerArgs(model_path=model_path, **{**defaults, **server_args})
        publish(self.args, role="scheduler")
        self.scheduler = Scheduler(self.args, PortArgs.init_new(self.args), 0, 0, 0, 0, 0, 0, None)
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
        scheduler = self.scheduler
        plan = scheduler.get_next_batch_to_run(running_batch=scheduler.running_batch, last_batch=scheduler.last_batch)
        scheduler.running_batch = plan.running_batch
        batch = plan.batch_to_run
        if batch:
            result = scheduler.run_batch(batch)
            scheduler.process_batch_result(batch, result)
        else:
            scheduler.on_idle()
        scheduler.last_batch = batch
        scheduler.invariant_checker.self_check_during_busy()
        return batch

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
        with torch.no_grad():
            self.run(on_step)
        return [self.output_of(req) for req in reqs]

    def output_of(self, req: Any) -> Output:
        assert req.finished(), req
        return Output(req.rid, list(req.output_ids_through_stop), req.finished_reason.to_json(), req)

    def abort(self, req: Any) -> None:
        """Abort as the HTTP server does when a client goes away."""
        from sglang.srt.managers.io_struct import AbortReq

        self.scheduler.abort_request(AbortReq(rid=req.rid))

    def free_tokens(self) -> int:
        return int(self.scheduler.token_to_kv_pool_allocator.available_size())

    def flush(self) -> None:
        """Empty the prefix cache; every KV slot and every request slot must be free again."""
        from sglang.srt.managers.io_struct import FlushCacheReqInput

        assert self.scheduler.flush_cache() if not hasattr(self.scheduler, "flush_cache_wrapped") else FlushCacheReqInput
        assert self.free_tokens() == self._empty_free, (self.free_tokens(), self._empty_free)
        pool = self.scheduler.req_to_token_pool
        assert pool.available_size() == pool.size

    def close(self) -> None:
        from sglang.srt.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

        destroy_model_parallel()
        destroy_distributed_environment()


@contextlib.contextmanager
def running_engine(model_path: str, **server_args: Any) -> Iterator[SchedulerEngine]:
    """An engine that is checked to be empty and torn down at the end."""
    engine = SchedulerEngine(model_path, **server_args)
    try:
        yield engine
        engine.flush()
    finally:
        engine.close()
