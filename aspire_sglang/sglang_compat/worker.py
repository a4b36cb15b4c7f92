"""The worker that SGLang's scheduler calls once an iteration: batches in, committed tokens out.

It translates between SGLang's batch and :mod:`aspire_sglang.step`, which holds the algorithm. There is no draft model:
drafting and verifying rows share one forward of the target model.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker

from aspire_sglang.config import AspireConfig
from aspire_sglang.counters import StepCounts
from aspire_sglang.scheduler.cost_model import CostModel
from aspire_sglang.scheduler.policies import make_policy
from aspire_sglang.sglang_compat import options, request_view
from aspire_sglang.sglang_compat.attention import AspireAttentionBackend
from aspire_sglang.sglang_compat.spec_algorithm import AspireCarry, AspireStepInput
from aspire_sglang.step import MixedStep, PrefillPlan, StepPlan

# Bytes and FLOPs per second that the cost model assumes until calibration measures the machine; only their ratio
# matters for decisions. H200: copy bandwidth 4.27 TB/s and about 790 bf16 TFLOP/s as measured; CPU: one socket's share.
_ASSUMED_RATES = {"cuda": (4.27e12, 7.9e14), "cpu": (2.0e10, 1.0e11)}


class AspireWorker(BaseSpecWorker):  # type: ignore[misc]
    """Runs prefill and mixed steps of the target model for SGLang's scheduler."""

    def __init__(self, server_args: Any, gpu_id: int, ps: Any, nccl_port: int, target_worker: Any) -> None:
        super().__init__()
        self.server_args = server_args
        self.config: AspireConfig = options.config_of(server_args)
        self._target_worker = target_worker
        # What SGLang's metrics reporter reads from a speculative worker.
        self.speculative_num_steps = server_args.speculative_num_steps
        self.speculative_num_draft_tokens = server_args.speculative_num_draft_tokens
        self._step: MixedStep | None = None

    # --- life cycle -------------------------------------------------------------------------------------------

    @property
    def draft_worker(self) -> Any:
        """SGLang asks every speculative worker for a draft model's pools, runners and memory: there are none."""
        return SimpleNamespace(
            draft_runner=SimpleNamespace(token_to_kv_pool=None),
            draft_runners=[],
            graph_memory_usage={},
            graph_time_usage={},
            weight_load_time=0.0,
        )

    @property
    def model_runner(self) -> Any:
        return self._target_worker.model_runner

    def alloc_memory_pool(
        self, memory_pool_config: Any = None, req_to_token_pool: Any = None, token_to_kv_pool_allocator: Any = None
    ) -> None:
        """Called once the target's pools exist."""
        self.req_to_token_pool = req_to_token_pool
        self.token_to_kv_pool_allocator = token_to_kv_pool_allocator

    def init_attention_backends(self) -> None:
        """Called once the target's attention backend exists: everything a step needs is there now."""
        backend = self.model_runner.attn_backend
        if not isinstance(backend, AspireAttentionBackend):
            raise RuntimeError(f"ASPIRE needs its own attention backend, but SGLang built {type(backend).__name__}")
        self._step = MixedStep(
            config=self.config,
            policy=make_policy(self.config, _cost_model(self.config, self.model_runner)),
            attention=backend,
            num_slots=self.req_to_token_pool.req_to_token.shape[0],
            device=self.model_runner.device,
        )

    def init_cuda_graphs(self) -> None:
        """Mixed steps run eagerly."""

    def clear_cache_pool(self) -> None:
        """After ``flush_cache`` no request is left: forget all records."""
        self.step.states.clear()

    def note_request_finished(self, *, rid: str, natural_stop: bool) -> None:
        """Called when a decoding request has finished."""
        self.step.states.drop(rid)

    def update_weights_from_tensor(self, recv_req: Any) -> Any:
        return self.target_worker.update_weights_from_tensor(recv_req)

    @property
    def step(self) -> MixedStep:
        """The algorithm. Raises when SGLang runs a batch before the worker is initialised."""
        if self._step is None:
            raise RuntimeError("the ASPIRE worker was asked to run before its attention backend existed")
        return self._step

    def describe(self) -> dict[str, Any]:
        """Settings and counters for /server_info."""
        counts: StepCounts = self.step.total_counts
        return {"policy": self.config.policy, "selector": self.config.selector, **counts.as_dict()}

    # --- one iteration ----------------------------------------------------------------------------------------

    def forward_batch_generation(self, batch: Any, on_publish: Any = None) -> GenerationBatchResult:
        """One scheduler iteration: a prefill batch, or a mixed step over all decoding requests."""
        if batch.forward_mode.is_decode():
            return self._mixed_step(batch)
        if batch.forward_mode.is_extend():
            return self._prefill(batch)
        return self._target_worker.forward_batch_generation(batch)  # idle

    def _prefill(self, batch: Any) -> GenerationBatchResult:
        rows = request_view.prefill_requests(batch, self.step, self.req_to_token_pool, self.server_args.random_seed)
        host: list[GenerationBatchResult] = []

        def forward(plan: PrefillPlan) -> torch.Tensor:
            host.append(self._target_worker.forward_batch_generation(batch, is_verify=True))
            logits: torch.Tensor = host[0].logits_output.next_token_logits
            return logits

        tokens = self.step.prefill(rows, forward)
        result = host[0]
        result.next_token_ids = tokens
        result.new_seq_lens = batch.seq_lens.clone()
        result.next_draft_input = AspireCarry(tokens, result.new_seq_lens)
        return result

    def _mixed_step(self, batch: Any) -> GenerationBatchResult:
        requests = request_view.step_requests(batch, self.step, self.req_to_token_pool, self.server_args.random_seed)
        host: list[GenerationBatchResult] = []

        def forward(plan: StepPlan) -> torch.Tensor:
            batch.forward_mode = ForwardMode.TARGET_VERIFY
            batch.input_ids, batch.out_cache_loc = plan.input_ids, plan.cache_locs
            batch.spec_info = AspireStepInput(plan.positions)
            host.append(self._target_worker.forward_batch_generation(batch, is_verify=True))
            logits: torch.Tensor = host[0].logits_output.next_token_logits
            return logits

        step = self.step.run(requests, forward)
        result = host[0]
        result.next_token_ids = step.token_ids.flatten()
        result.accept_lens, result.cap_lens = step.num_committed, step.num_verified_drafts
        result.new_seq_lens = batch.seq_lens + step.num_committed
        result.next_draft_input = AspireCarry(step.last_tokens, result.new_seq_lens)
        result.speculative_num_draft_tokens = self.config.draft_max + 1
        return result


def _cost_model(config: AspireConfig, model_runner: Any) -> CostModel:
    """Costs from the bytes that a step moves and the FLOPs it does, on one rank."""
    bytes_per_second, flops_per_second = _ASSUMED_RATES.get(model_runner.device, _ASSUMED_RATES["cuda"])
    parameters = list(model_runner.model.parameters())
    pool = model_runner.token_to_kv_pool
    layer = pool.start_layer
    row_bytes = sum(buffer[0].numel() * buffer.element_size() for buffer in pool.get_kv_buffer(layer))
    num_layers = model_runner.model_config.num_hidden_layers
    return CostModel.from_bytes(
        config,
        num_layers=num_layers,
        weight_bytes=float(sum(p.numel() * p.element_size() for p in parameters)),
        kv_bytes_per_token=float(row_bytes * num_layers),
        bytes_per_second=bytes_per_second,
        flops_per_token=2.0 * sum(p.numel() for p in parameters),
        flops_per_second=flops_per_second,
    )
