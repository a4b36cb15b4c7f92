"""The attention backend that SGLang sees: it writes K and V and hands the rest to ``aspire_sglang.attention_backends``.

The worker decides rows and page sets before each forward and leaves the plan here; SGLang's runner then calls
``init_forward_metadata`` once and ``forward_*`` once per layer. Forwards that the worker did not plan (warm-up) are
dense. Nothing here keeps per-request state except the page sets, which the worker clears with the request's record.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.server_args import add_attention_backend_choices

from aspire_sglang.attention_backends.base import AttentionPlan, PageSetStore, SelectionSpec
from aspire_sglang.attention_backends.layout import RaggedLayout, Row, RowKind
from aspire_sglang.attention_backends.torch_reference import TorchAttentionBackend, TorchAttentionPlan
from aspire_sglang.config import ConfigError
from aspire_sglang.sglang_compat import options
from aspire_sglang.sglang_compat.platform import CPU_ATTENTION_BACKEND, GPU_ATTENTION_BACKEND, is_cpu_platform
from aspire_sglang.sglang_compat.request_hooks import aspire_selected


def register() -> None:
    """Register the backend: under its own name, and on a CPU under the name that SGLang's allocation code expects."""
    register_attention_backend(GPU_ATTENTION_BACKEND)(AspireAttentionBackend)
    add_attention_backend_choices([GPU_ATTENTION_BACKEND])
    stock = ATTENTION_BACKENDS[CPU_ATTENTION_BACKEND]

    def choose(model_runner: Any) -> Any:
        if is_cpu_platform() and aspire_selected(model_runner.server_args):
            return AspireAttentionBackend(model_runner)
        return stock(model_runner)

    register_attention_backend(CPU_ATTENTION_BACKEND)(choose)


@dataclass(frozen=True, slots=True)
class PoolView:
    """SGLang's pools as the ``KVCacheView`` of the attention backends."""

    request_pool: Any
    token_pool: Any

    @property
    def req_to_token(self) -> torch.Tensor:
        """int32 ``[max_reqs + 1, width]``; row 0 is SGLang's padding row."""
        table: torch.Tensor = self.request_pool.req_to_token
        return table

    def key(self, layer: int) -> torch.Tensor:
        """``[pool_tokens, num_kv_heads, head_dim]``."""
        buffer: torch.Tensor = self.token_pool.get_key_buffer(layer)
        return buffer

    def value(self, layer: int) -> torch.Tensor:
        """``[pool_tokens, num_kv_heads, head_dim]``."""
        buffer: torch.Tensor = self.token_pool.get_value_buffer(layer)
        return buffer


class AspireAttentionBackend(AttentionBackend):  # type: ignore[misc]
    """Adapter between SGLang's forward and the plan/run backends of this project."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        _check_model(model_runner)
        config = options.config_of(model_runner.server_args)
        model = model_runner.model_config
        self.spec = SelectionSpec.from_config(
            config,
            num_layers=model.num_hidden_layers,
            max_tokens=model.context_len + config.draft_max + 1,
        )
        self.kv = PoolView(model_runner.req_to_token_pool, model_runner.token_to_kv_pool)
        self.sets = PageSetStore(self.spec, num_slots=self.kv.req_to_token.shape[0], device=self.kv.req_to_token.device)
        self.backend = TorchAttentionBackend()
        self._next_plan: TorchAttentionPlan | None = None
        self._plan: TorchAttentionPlan | None = None

    def prepare(self, layout: RaggedLayout, *, scored_rows: frozenset[int] | None = None) -> AttentionPlan:
        """Plan the next forward. The plan's scores are filled once that forward has run."""
        self._next_plan = self.backend.plan(layout, kv=self.kv, sets=self.sets, spec=self.spec, scored_rows=scored_rows)
        return self._next_plan

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Take up the worker's plan, or make a dense one for a forward that SGLang runs on its own."""
        plan, self._next_plan = self._next_plan, None
        if plan is None:
            layout = _dense_layout(forward_batch)
            plan = self.backend.plan(layout, kv=self.kv, sets=self.sets, spec=self.spec, scored_rows=frozenset())
        if plan.layout.num_tokens != forward_batch.input_ids.shape[0]:
            raise RuntimeError(
                f"planned {plan.layout.num_tokens} tokens, but SGLang runs {forward_batch.input_ids.shape[0]}"
            )
        self._plan = plan

    def forward_extend(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **kwargs: Any
    ) -> torch.Tensor:
        """Prefill and mixed steps (SGLang's TARGET_VERIFY): ``[num_tokens, num_q_heads * head_dim]``."""
        if any(value is not None for value in kwargs.values()):
            raise NotImplementedError(f"attention options {sorted(kwargs)} are not supported by ASPIRE")
        if save_kv_cache and k is not None:
            self.kv.token_pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v)
        assert self._plan is not None  # SGLang calls init_forward_metadata before the first layer
        out = self.backend.run(
            q.view(-1, layer.tp_q_head_num, layer.qk_head_dim), layer.layer_id, self._plan, scale=layer.scaling
        )
        return out.reshape(-1, layer.tp_q_head_num * layer.v_head_dim)

    forward_decode = forward_extend

    def support_triton(self) -> bool:
        """SGLang asks before it launches Triton helpers beside the backend."""
        return not is_cpu_platform()


def _check_model(model_runner: Any) -> None:
    """Raise :class:`ConfigError` for attention that the backends would compute wrongly, once the model is loaded."""
    if model_runner.kv_cache_dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ConfigError(f"KV cache in {model_runner.kv_cache_dtype}: not supported; use --kv-cache-dtype bfloat16")
    for layer in model_runner.model.modules():
        if not isinstance(layer, RadixAttention):
            continue
        special = {
            "a logit cap": layer.logit_cap > 0,
            "a sliding window": layer.sliding_window_size > 0,
            "cross attention": layer.is_cross_attention,
            "other than decoder attention": layer.attn_type != AttentionType.DECODER,
            "a temperature by length": layer.xai_temperature_len > 0,
        }
        for what, is_set in special.items():
            if is_set:
                raise ConfigError(f"layer {layer.layer_id} of the model has {what}: not supported by ASPIRE")


def _dense_layout(forward_batch: Any) -> RaggedLayout:
    """Every request of the batch as a prefill row."""
    if forward_batch.forward_mode.is_decode():
        starts = [length - 1 for length in forward_batch.seq_lens.tolist()]
        lens = [1] * len(starts)
    else:
        starts, lens = list(forward_batch.extend_prefix_lens_cpu), list(forward_batch.extend_seq_lens_cpu)
    slots = forward_batch.req_pool_indices.tolist()
    return RaggedLayout(
        tuple(
            Row(slot, RowKind.PREFILL, start, length, start)
            for slot, start, length in zip(slots, starts, lens, strict=True)
            if length > 0
        )
    )
