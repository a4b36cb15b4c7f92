"""ASPIRE as a member of SGLang's speculative algorithms, and the inputs that ride its batches."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.managers.overlap_utils import FutureMap
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from aspire_sglang.sglang_compat import options, support

ALGORITHM = "ASPIRE"


class AspireSpecAlgorithm(CustomSpecAlgo):  # type: ignore[misc]
    """What SGLang asks a speculative algorithm; see docs/architecture.md for the answers that are not defaults."""

    def handle_server_args(self, server_args: Any) -> None:
        """Last stage of argument resolution: set the sizes that SGLang derives its reserves from, refuse the rest."""
        config = options.config_of(server_args)
        support.check_settings(server_args)
        support.check_graphs(server_args)
        server_args.speculative_num_draft_tokens = config.draft_max + 1
        server_args.speculative_num_steps = 1
        server_args.speculative_eagle_topk = 1

    def create_worker(self, server_args: Any) -> type:
        # The base class warns that a worker without overlap is deprecated; ours gains overlap with the GPU path.
        return self.factory(server_args)  # type: ignore[no-any-return]

    def has_draft_kv(self) -> bool:
        return False

    def carries_draft_hidden_states(self) -> bool:
        return False

    def need_topk(self) -> bool:
        return False

    def create_future_map(
        self, device: Any, req_to_token_pool: Any, *, needs_cpu_seq_lens: bool, needs_confidence_relay: bool
    ) -> FutureMap:
        return FutureMap(
            device,
            self,
            req_to_token_pool,
            needs_cpu_seq_lens=needs_cpu_seq_lens,
            needs_confidence_relay=needs_confidence_relay,
        )


class AspireCarry(SpecInput):  # type: ignore[misc]
    """Rides a batch from one step to the next.

    It carries only what SGLang's relay demands: drafts, page sets and estimates live in worker-owned records keyed
    by request slot, because retraction and merging reorder the rows of a batch.
    """

    def __init__(self, bonus_tokens: torch.Tensor, new_seq_lens: torch.Tensor) -> None:
        super().__init__(SpecInputType.NGRAM_VERIFY)
        self.bonus_tokens = bonus_tokens
        self.new_seq_lens = new_seq_lens
        self.topk_p: torch.Tensor | None = None
        self.topk_index: torch.Tensor | None = None
        self.hidden_states: torch.Tensor | None = None
        self.future_indices: torch.Tensor | None = None

    def filter_batch(self, new_indices: torch.Tensor, new_indices_cpu: Any = None) -> None:
        """Keep the rows in ``new_indices`` (int64, device)."""
        if self.future_indices is not None:
            self.future_indices = self.future_indices[new_indices]
            return
        self.bonus_tokens = self.bonus_tokens[new_indices]
        self.new_seq_lens = self.new_seq_lens[new_indices]

    def merge_batch(self, other: AspireCarry) -> None:
        """Append the rows of ``other``."""
        if self.future_indices is not None and other.future_indices is not None:
            self.future_indices = torch.cat([self.future_indices, other.future_indices])
            return
        self.bonus_tokens = torch.cat([self.bonus_tokens, other.bonus_tokens])
        self.new_seq_lens = torch.cat([self.new_seq_lens, other.new_seq_lens])


class AspireStepInput(SpecInput):  # type: ignore[misc]
    """Marks one forward as a mixed step and gives it its positions (int64 ``[num_tokens]``, device)."""

    def __init__(self, positions: torch.Tensor) -> None:
        super().__init__(SpecInputType.NGRAM_VERIFY)
        self.positions = positions
        self.custom_mask: torch.Tensor | None = None
