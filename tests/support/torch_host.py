"""The smallest host of a mixed step: a tiny transformer with its own KV pool, no SGLang.

It does what SGLang does around :class:`aspire_sglang.step.MixedStep`: gives requests slots and KV rows, runs the model
over the planned tokens, and extends outputs by what a step commits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

from aspire_sglang.attention_backends.base import AttentionPlan, PageSetStore, SelectionSpec
from aspire_sglang.attention_backends.layout import RaggedLayout
from aspire_sglang.attention_backends.torch_reference import TorchAttentionBackend, TorchAttentionPlan
from aspire_sglang.config import AspireConfig
from aspire_sglang.records import PrefillPlan, PrefillRequest, StepPlan, StepRequest, StepResult
from aspire_sglang.sampling_records import RequestSampling, TokenCounts
from aspire_sglang.scheduler.acceptance import RequestHistory
from aspire_sglang.scheduler.records import Policy
from aspire_sglang.state import RequestState
from aspire_sglang.step import MixedStep

NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 2, 2, 1, 8
WIDTH = NUM_HEADS * HEAD_DIM


@dataclasses.dataclass
class KVPool:
    """``req_to_token`` and the keys and values of both layers; positions are scattered over the pool."""

    req_to_token: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor

    @classmethod
    def make(cls, num_slots: int, width: int) -> KVPool:
        order = torch.randperm(num_slots * width, generator=torch.Generator().manual_seed(3))
        shape = (NUM_LAYERS, num_slots * width, NUM_KV_HEADS, HEAD_DIM)
        return cls(order.view(num_slots, width), torch.full(shape, 1e3), torch.full(shape, 1e3))

    def key(self, layer: int) -> torch.Tensor:
        return self.keys[layer]

    def value(self, layer: int) -> torch.Tensor:
        return self.values[layer]


class Planner:
    """The attention planner that a step expects of its host."""

    def __init__(self, spec: SelectionSpec, kv: KVPool) -> None:
        self.spec, self.kv = spec, kv
        self.sets = PageSetStore(spec, num_slots=kv.req_to_token.shape[0], device="cpu")
        self.backend = TorchAttentionBackend()

    def prepare(self, layout: RaggedLayout, *, scored_rows: frozenset[int] | None = None) -> TorchAttentionPlan:
        return self.backend.plan(layout, kv=self.kv, sets=self.sets, spec=self.spec, scored_rows=scored_rows)


class TorchHost:
    """Requests of equal prompts decoded in one batch, under any config and policy."""

    def __init__(self, config: AspireConfig, policy: Policy, *, vocab: int, num_slots: int, max_tokens: int) -> None:
        draw = torch.Generator().manual_seed(11)

        def random(*shape: int, gain: float = 1.0) -> torch.Tensor:
            return torch.randn(*shape, generator=draw) * gain / shape[-1] ** 0.5

        self.embed, self.place = random(vocab, WIDTH, gain=4.0), random(max_tokens, WIDTH, gain=2.0)
        self.project = [random(WIDTH + 2 * NUM_KV_HEADS * HEAD_DIM, WIDTH, gain=2.5) for _ in range(NUM_LAYERS)]
        self.mix = [random(WIDTH, WIDTH, gain=1.5) for _ in range(NUM_LAYERS)]
        self.head = random(vocab, WIDTH, gain=0.15)
        self.config = config
        self.kv = KVPool.make(num_slots, max_tokens)
        spec = SelectionSpec.from_config(config, num_layers=NUM_LAYERS, max_tokens=max_tokens)
        self.planner = Planner(spec, self.kv)
        self.step = MixedStep(config=config, policy=policy, attention=self.planner, num_slots=num_slots, device="cpu")

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, locs: torch.Tensor, plan: AttentionPlan
    ) -> torch.Tensor:
        """Hidden states ``[num_tokens, WIDTH]``; writes K and V of the window first, as a host does."""
        hidden = self.embed[ids] + self.place[positions]
        for layer in range(NUM_LAYERS):
            q, k, v = (hidden @ self.project[layer].T).split([WIDTH, HEAD_DIM, HEAD_DIM], dim=1)
            self.kv.keys[layer][locs] = k.view(-1, NUM_KV_HEADS, HEAD_DIM)
            self.kv.values[layer][locs] = v.view(-1, NUM_KV_HEADS, HEAD_DIM)
            assert isinstance(plan, TorchAttentionPlan)
            out = self.planner.backend.run(q.reshape(-1, NUM_HEADS, HEAD_DIM), layer, plan, scale=HEAD_DIM**-0.5)
            hidden = hidden + out.reshape(-1, WIDTH) @ self.mix[layer].T
        return hidden

    def _prefill(self, prompt: Sequence[int]) -> Callable[[PrefillPlan], torch.Tensor]:
        def forward(plan: PrefillPlan) -> torch.Tensor:
            rows = plan.attention.layout.rows
            ids = torch.tensor(list(prompt) * len(rows))
            positions = plan.attention.layout.positions()
            slots = torch.tensor([row.slot for row in rows]).repeat_interleave(len(prompt))
            hidden = self.forward(ids, positions, self.kv.req_to_token[slots, positions], plan.attention)
            return hidden.view(len(rows), len(prompt), WIDTH)[:, -1] @ self.head.T

        return forward

    def _decode(self, plan: StepPlan) -> torch.Tensor:
        return self.forward(plan.input_ids, plan.positions, plan.cache_locs, plan.attention) @ self.head.T

    def generate(
        self,
        prompt: Sequence[int],
        sampling: Sequence[RequestSampling],
        *,
        num_tokens: int,
        on_step: Callable[[StepResult], None] | None = None,
    ) -> list[list[int]]:
        """``num_tokens`` tokens for each sampling record; one slot each."""
        states = [
            self.step.states.open(
                RequestState(
                    request_id=str(slot),
                    slot=slot,
                    generation=id(sampling) + slot,
                    draft_max=self.config.draft_max,
                    sampling=record,
                    counts=TokenCounts(),
                    history=RequestHistory.start(self.config, self.step.prior),
                )
            )
            for slot, record in enumerate(sampling)
        ]
        chunks = [
            PrefillRequest(state=state, start=0, num_tokens=len(prompt), is_last_chunk=True, output_ids=())
            for state in states
        ]
        outputs = [[token] for token in self.step.prefill(chunks, self._prefill(prompt)).tolist()]
        while running := [slot for slot, output in enumerate(outputs) if len(output) < num_tokens]:
            requests = [
                StepRequest(
                    state=states[slot],
                    committed=len(prompt) + len(outputs[slot]) - 1,
                    tokens_left=num_tokens - len(outputs[slot]),
                    output_ids=outputs[slot],
                )
                for slot in running
            ]
            result = self.step.run(requests, self._decode)
            if on_step is not None:
                on_step(result)
            for slot, run, count in zip(running, result.token_ids.tolist(), result.num_committed.tolist(), strict=True):
                outputs[slot] += run[:count]
        return outputs

    def next_logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """The target's own logits ``[vocab]`` after ``tokens``: a dense forward without any of this project's code."""
        ids = torch.tensor(tokens)
        hidden = self.embed[ids] + self.place[: len(tokens)]
        mask = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()
        for layer in range(NUM_LAYERS):
            q, k, v = (hidden @ self.project[layer].T).split([WIDTH, HEAD_DIM, HEAD_DIM], dim=1)
            q = q.view(-1, NUM_HEADS, HEAD_DIM).transpose(0, 1)
            logits = (q @ k.T * HEAD_DIM**-0.5).masked_fill(~mask, float("-inf"))
            out = (logits.softmax(-1) @ v).transpose(0, 1).reshape(-1, WIDTH)
            hidden = hidden + out @ self.mix[layer].T
        return hidden[-1] @ self.head.T
