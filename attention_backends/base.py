"""Contracts of the attention backends: KV view, page sets, selection rules, plan and run.

A step goes ``plan`` (host work, once) -> ``run`` (device work, once per layer) -> ``select_pages`` on the scores that
``run`` left in the plan -> ``PageSetStore.store``; the stored sets take effect from the next ``plan`` on.
Pages here are *selection* pages: ``page_size`` consecutive positions of one request, numbered from 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch

from aspire_sglang.attention_backends.layout import RaggedLayout, RowKind
from aspire_sglang.config import AspireConfig

CEIL_SLACK = 1e-9  # 0.07 * 100 is 7.000000000000001 in float64: without it the budget would be a page too large


class KVCacheView(Protocol):
    """What a backend may see of the host's KV cache. All tensors live on one device."""

    @property
    def req_to_token(self) -> torch.Tensor:
        """int32 or int64 ``[max_reqs, width]``: pool index of each slot's positions; garbage past its length."""
        ...

    def key(self, layer: int) -> torch.Tensor:
        """``[pool_tokens, num_kv_heads, head_dim]`` keys of a layer, indexed by pool index."""
        ...

    def value(self, layer: int) -> torch.Tensor:
        """``[pool_tokens, num_kv_heads, head_dim]`` values of a layer, indexed by pool index."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class SelectionSpec:
    """How sparse contexts are chosen and read, resolved against one model. Layers count from 0, sizes are in pages.

    ``refresh_layer`` is the layer that scores for the shared-set selectors, ``max_tokens`` the longest context served.
    A draft row reads at least its sinks and its recent pages, so a budget below ``sink_pages + recent_pages`` acts as
    that sum.
    """

    page_size: int
    ratio: float
    min_pages: int
    recent_pages: int
    sink_pages: int
    selector: str
    refresh_layer: int
    dense_layers: int
    num_layers: int
    max_tokens: int

    @classmethod
    def from_config(cls, config: AspireConfig, *, num_layers: int, max_tokens: int) -> SelectionSpec:
        """Resolve a validated config against a model.

        Raises ``ConfigError`` for layers that the model lacks, ``ValueError`` for ``max_tokens`` below 1.
        """
        if max_tokens < 1:
            raise ValueError(f"max_tokens is {max_tokens}; it must be the longest context in tokens, 1 or more")
        return cls(
            page_size=config.page_size,
            ratio=config.ratio,
            min_pages=config.min_pages,
            recent_pages=config.recent_pages,
            sink_pages=config.sink_pages,
            selector=config.selector,
            refresh_layer=config.resolve_refresh_layer(num_layers),
            dense_layers=config.dense_layers,
            num_layers=num_layers,
            max_tokens=max_tokens,
        )

    @property
    def num_sets(self) -> int:
        """Page sets per request: one shared set, or one per layer (sets of dense layers exist but are never read)."""
        return self.num_layers if self.selector == "verify-per-layer" else 1

    @property
    def capacity(self) -> int:
        """Most pages a stored set can hold: the budget of the longest context. Fixed, so buffers never grow."""
        return self.budget_pages(self.max_tokens)

    def num_pages(self, num_tokens: int) -> int:
        """Pages that ``num_tokens`` tokens occupy, the last one possibly in part."""
        if num_tokens < 0:
            raise ValueError(f"num_tokens is {num_tokens}; it must be 0 or more")
        return -(-num_tokens // self.page_size)

    def budget_pages(self, num_tokens: int) -> int:
        """k: pages a draft row reads of ``num_tokens`` committed tokens, sinks and recent pages included."""
        total = self.num_pages(num_tokens)
        return min(total, max(self.min_pages, math.ceil(self.ratio * total - CEIL_SLACK)))

    def window_pages(self, num_tokens: int) -> int:
        """Recent pages that the ``window`` selector reads beside the sinks: the same budget, never below recent."""
        return max(self.budget_pages(num_tokens) - self.sink_pages, self.recent_pages)

    def set_of_layer(self, layer: int) -> int:
        """Index of the page set that ``layer`` reads and scores for. Raises ``ValueError`` for an unknown layer."""
        self._check_layer(layer)
        return layer if self.selector == "verify-per-layer" else 0

    def is_sparse_layer(self, layer: int) -> bool:
        """Whether draft rows read only their sparse context at ``layer``; all other rows always read everything."""
        self._check_layer(layer)
        return layer >= self.dense_layers and not (self.selector == "refresh" and layer == self.refresh_layer)

    def scores_layer(self, layer: int, kind: RowKind) -> bool:
        """Whether rows of ``kind`` produce page scores at ``layer``."""
        self._check_layer(layer)
        if self.selector == "window" or (kind is RowKind.DRAFT and self.selector != "refresh"):
            return False
        if self.selector == "verify-per-layer":
            return self.is_sparse_layer(layer)
        return layer == self.refresh_layer

    def scores_kind(self, kind: RowKind) -> bool:
        """Whether rows of ``kind`` produce page scores at any layer."""
        return self.selector == "refresh" or (self.selector != "window" and kind is not RowKind.DRAFT)

    def _check_layer(self, layer: int) -> None:
        if not 0 <= layer < self.num_layers:
            raise ValueError(f"layer {layer} is out of range; the model has layers 0..{self.num_layers - 1}")


@dataclass(frozen=True, slots=True)
class SelectedPages:
    """Page sets of R requests, on one device. A leading ``[num_sets]`` is there when there is more than one set.

    ``pages``         int32 ``[(num_sets,) R, capacity]``, ascending, padded with -1
    ``counts``        int32 ``[(num_sets,) R]``
    ``recent_start``  int32 ``[R]``: first page of the always-read tail as of the selection

    The implicit pages, sinks and those from ``recent_start`` on, need not be listed; they count towards the budget.
    """

    pages: torch.Tensor
    counts: torch.Tensor
    recent_start: torch.Tensor


class PageSetStore:
    """Selected pages of every request slot: logical page numbers only, as the host may move a request's KV.

    ``pages``         int32 ``[num_slots, num_sets, capacity]``, ascending, padded with -1
    ``counts``        int32 ``[num_slots, num_sets]``
    ``recent_start``  int32 ``[num_slots]``, -1 where no set is stored: such a slot reads sinks and recent pages only

    Tensors keep their address for life, so captured graphs may read them. Clear a slot whenever its row goes to
    another request: nothing else stands between one request's pages and the next.
    """

    def __init__(self, spec: SelectionSpec, *, num_slots: int, device: torch.device | str) -> None:
        if num_slots < 1:
            raise ValueError(f"num_slots is {num_slots}; it must be the rows of req_to_token, 1 or more")
        shape = (num_slots, spec.num_sets, spec.capacity)
        self.pages = torch.full(shape, -1, dtype=torch.int32, device=device)
        self.counts = torch.zeros(shape[:2], dtype=torch.int32, device=device)
        self.recent_start = torch.full((num_slots,), -1, dtype=torch.int32, device=device)

    def store(self, slots: torch.Tensor, selected: SelectedPages) -> None:
        """Replace all sets of some slots, in place.

        ``slots``: int64 ``[R]`` on the store's device, distinct (with duplicates one of the writes wins).
        ``selected``: as ``select_pages`` returns it for these R requests, all ``num_sets`` of them.
        No host synchronisation; capturable. Raises ``ValueError`` when shapes disagree.
        """
        num_sets, capacity = self.pages.shape[1:]
        pages = selected.pages if selected.pages.dim() == 3 else selected.pages[None]
        counts = selected.counts if selected.counts.dim() == 2 else selected.counts[None]
        num_rows = slots.numel()
        if pages.shape != (num_sets, num_rows, capacity) or counts.shape != (num_sets, num_rows):
            raise ValueError(
                f"pages {tuple(pages.shape)} and counts {tuple(counts.shape)} do not fit {num_rows} slots: "
                f"wanted {(num_sets, num_rows, capacity)} and {(num_sets, num_rows)}"
            )
        if selected.recent_start.shape != (num_rows,):
            raise ValueError(f"recent_start {tuple(selected.recent_start.shape)} does not fit {num_rows} slots")
        self.pages[slots] = pages.transpose(0, 1)
        self.counts[slots] = counts.transpose(0, 1)
        self.recent_start[slots] = selected.recent_start

    def clear(self, slot: int) -> None:
        """Forget a slot's pages, in place, without host synchronisation. Raises ``ValueError`` for an unknown slot."""
        if not 0 <= slot < self.pages.shape[0]:
            raise ValueError(f"slot {slot} is out of range; the store has slots 0..{self.pages.shape[0] - 1}")
        self.pages[slot].fill_(-1)
        self.counts[slot].fill_(0)
        self.recent_start[slot].fill_(-1)


@dataclass(frozen=True, slots=True)
class PageScores:
    """Plan-owned buffers that ``run`` fills, on the device of q.

    ``rows``    R indices into ``layout.rows``, ascending: the rows that are scored this step
    ``slots``   int64 ``[R]``: their slots, as ``PageSetStore.store`` wants them
    ``values``  float32 ``[num_sets, R, max_pages]``; zero past a row's last page and in sets that no layer scores

    Score of a token: maximum over query heads of its attention probability; of a page: the sum over its tokens.
    Verify rows: mean of their first and last query, each under its own causal limit; prefill rows: the last query.
    """

    rows: tuple[int, ...]
    slots: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class AttentionPlan:
    """What one step's ``run`` calls share; backends extend it with their own indices and buffers.

    ``sparse_lens[i][s]``  KV tokens that draft row i reads at a sparse layer of page set s
    ``kv_tokens_*``        KV tokens (positions, not bytes) summed over rows and all layers; ``full`` is what dense
                           draft reads would have been; prefill rows are in none
    """

    layout: RaggedLayout
    spec: SelectionSpec
    scores: PageScores
    sparse_lens: tuple[tuple[int, ...], ...]
    kv_tokens_read_by_draft_rows: int
    kv_tokens_full_by_draft_rows: int
    kv_tokens_read_by_verify_rows: int


class AttentionBackend(Protocol):
    """Attention of one model's layers over one mixed batch per step."""

    def plan(
        self,
        layout: RaggedLayout,
        *,
        kv: KVCacheView,
        sets: PageSetStore,
        spec: SelectionSpec,
        scored_rows: frozenset[int] | None = None,
    ) -> AttentionPlan:
        """Do all host work of a step: validate rows, snapshot page sets, build indices, allocate score buffers.

        ``kv.req_to_token`` must already hold the pool indices of every row up to its ``kv_len``. ``scored_rows`` are
        the rows that may be scored (indices into ``layout.rows``, None for all): leave out prompt chunks before the
        last. Mutates nothing; may synchronise with the device. Under graphs: called outside, before capture and
        before each replay. Raises ``ValueError`` for rows that the table or the store cannot hold.
        """
        ...

    def run(self, q: torch.Tensor, layer: int, plan: AttentionPlan, *, scale: float) -> torch.Tensor:
        """Attention of all rows at one layer, and its page scores where ``plan.spec`` wants them.

        ``q``: ``[num_tokens, num_q_heads, head_dim]`` in layout order, on the cache's device; returns
        ``[num_tokens, num_q_heads, head_dim]`` of q's dtype. ``scale`` multiplies the logits (1 / sqrt(head_dim)).
        The caller has already written this layer's K and V of the window into the pool. Overwrites
        ``plan.scores.values`` of this layer's set; does no host work and no host synchronisation, so graph backends
        are captured once per token tier and replayed over re-planned buffers.
        """
        ...
