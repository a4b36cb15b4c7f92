"""The plain PyTorch backend: serves the CPU and is the oracle of every kernel test.

Eager only: there is nothing to capture. Rows are attended one by one, and keys and values are gathered once per row
and layer. On a GPU it is correct but slow, and ``plan`` synchronises once to read the page sets.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from aspire_sglang.attention_backends.base import (
    AttentionPlan,
    KVCacheView,
    PageScores,
    PageSetStore,
    SelectionSpec,
)
from aspire_sglang.attention_backends.layout import RaggedLayout, Row, RowKind

QUERY_CHUNK = 512  # queries per masked call: bounds the mask of a long prompt chunk to 512 x kv_len


@dataclass(frozen=True, kw_only=True)
class TorchAttentionPlan(AttentionPlan):
    """Pool indices of every row, on the cache's device.

    ``full_index[i]``       positions 0..kv_len-1 of row i; a view of ``req_to_token``, which must not change before run
    ``sparse_index[i][s]``  what draft row i reads at a sparse layer of set s; a copy, so later stores do not show
    """

    kv: KVCacheView
    full_index: tuple[torch.Tensor, ...]
    sparse_index: tuple[tuple[torch.Tensor, ...], ...]


class TorchAttentionBackend:
    """Implements ``AttentionBackend``; keeps no state between steps. float32, bfloat16 and float16."""

    def plan(
        self,
        layout: RaggedLayout,
        *,
        kv: KVCacheView,
        sets: PageSetStore,
        spec: SelectionSpec,
        scored_rows: frozenset[int] | None = None,
    ) -> TorchAttentionPlan:
        """See ``AttentionBackend.plan``. Reads the draft rows' page sets on the host: one synchronisation on a GPU."""
        table = kv.req_to_token
        _check_rows(layout, table, sets, scored_rows)
        drafts = layout.rows[: layout.num_draft_rows]
        reads = _draft_positions(drafts, sets, spec)
        lens = tuple(tuple(positions.numel() for positions in row) for row in reads)
        full_tokens = sum(row.kv_len for row in drafts) * spec.num_layers
        verify_tokens = sum(row.kv_len for row in layout.rows if row.kind is RowKind.VERIFY) * spec.num_layers
        return TorchAttentionPlan(
            layout=layout,
            spec=spec,
            scores=_score_buffers(layout, spec, scored_rows, table.device),
            sparse_lens=lens,
            kv_tokens_read_by_draft_rows=_tokens_read(drafts, lens, spec),
            kv_tokens_full_by_draft_rows=full_tokens,
            kv_tokens_read_by_verify_rows=verify_tokens,
            kv=kv,
            full_index=tuple(table[row.slot, : row.kv_len] for row in layout.rows),
            sparse_index=tuple(
                tuple(table[row.slot].index_select(0, positions.to(table.device)) for positions in row_reads)
                for row, row_reads in zip(drafts, reads, strict=True)
            ),
        )

    def run(self, q: torch.Tensor, layer: int, plan: AttentionPlan, *, scale: float) -> torch.Tensor:
        """See ``AttentionBackend.run``. ``q`` has exactly ``layout.num_tokens`` tokens: no padding in eager mode."""
        if not isinstance(plan, TorchAttentionPlan):
            raise TypeError(f"plan is {type(plan).__name__}; it must come from TorchAttentionBackend.plan")
        if q.dim() != 3 or q.shape[0] != plan.layout.num_tokens:
            raise ValueError(f"q is {tuple(q.shape)}; wanted [{plan.layout.num_tokens}, num_q_heads, head_dim]")
        key, value = plan.kv.key(layer), plan.kv.value(layer)
        if q.shape[1] % key.shape[1]:
            raise ValueError(f"{q.shape[1]} query heads do not divide into {key.shape[1]} kv heads")
        out = q.new_empty((*q.shape[:2], value.shape[-1]))
        offsets = plan.layout.query_offsets()
        score_place = {row: place for place, row in enumerate(plan.scores.rows)}
        page_set = plan.spec.set_of_layer(layer)
        sparse = plan.spec.is_sparse_layer(layer)
        for i, row in enumerate(plan.layout.rows):
            is_sparse = sparse and row.kind is RowKind.DRAFT
            index = plan.sparse_index[i][page_set] if is_sparse else plan.full_index[i]
            row_key, row_value = (pool.index_select(0, index).to(q.dtype) for pool in (key, value))
            tokens = slice(offsets[i], offsets[i + 1])
            out[tokens] = _attend(q[tokens], row_key, row_value, scale=scale)
            if i in score_place and plan.spec.scores_layer(layer, row.kind):
                scores = _page_scores(q[tokens], row_key, row, page_size=plan.spec.page_size, scale=scale)
                plan.scores.values[page_set, score_place[i], : scores.numel()] = scores
        return out


def _check_rows(
    layout: RaggedLayout, table: torch.Tensor, sets: PageSetStore, scored_rows: frozenset[int] | None
) -> None:
    num_slots = min(table.shape[0], sets.pages.shape[0])
    for row in layout.rows:
        if row.slot >= num_slots:
            raise ValueError(f"{row} has slot {row.slot}, but req_to_token or the page store has {num_slots} slots")
        if row.kv_len > table.shape[1]:
            raise ValueError(f"{row} reaches position {row.kv_len - 1}, but req_to_token is {table.shape[1]} wide")
    for i in scored_rows or ():
        if not 0 <= i < len(layout.rows):
            raise ValueError(f"scored row {i} is out of range; the layout has {len(layout.rows)} rows")


def _score_buffers(
    layout: RaggedLayout, spec: SelectionSpec, scored_rows: frozenset[int] | None, device: torch.device
) -> PageScores:
    rows = tuple(
        i
        for i, row in enumerate(layout.rows)
        if spec.scores_kind(row.kind) and (scored_rows is None or i in scored_rows)
    )
    max_pages = max((spec.num_pages(layout.rows[i].kv_len) for i in rows), default=0)
    slots = torch.tensor([layout.rows[i].slot for i in rows], dtype=torch.int64, device=device)
    values = torch.zeros((spec.num_sets, len(rows), max_pages), dtype=torch.float32, device=device)
    return PageScores(rows, slots, values)


def _draft_positions(
    drafts: tuple[Row, ...], sets: PageSetStore, spec: SelectionSpec
) -> list[tuple[torch.Tensor, ...]]:
    """Per draft row and set: int64 CPU positions that it reads at sparse layers, ascending and distinct."""
    slots = torch.tensor([row.slot for row in drafts], dtype=torch.int64, device=sets.pages.device)
    pages, counts = sets.pages[slots].tolist(), sets.counts[slots].tolist()
    recent_starts = sets.recent_start[slots].tolist()
    return [
        tuple(
            _positions_of(row, pages[i][s][: counts[i][s]], _tail_start(row, recent_starts[i], spec), spec)
            for s in range(spec.num_sets)
        )
        for i, row in enumerate(drafts)
    ]


def _tail_start(row: Row, recent_start: int, spec: SelectionSpec) -> int:
    """First page of the tail that a draft row reads without a gap; ``recent_start`` is -1 where no set is stored.

    Never past the page of ``cycle_start``: the draft's own tokens are always read, whatever the selection says.
    """
    if spec.selector == "window":
        recent_start = max(0, spec.num_pages(row.cycle_start) - spec.window_pages(row.cycle_start))
    elif recent_start < 0:
        recent_start = max(0, spec.num_pages(row.cycle_start) - spec.recent_pages)
    return min(recent_start, row.cycle_start // spec.page_size)


def _positions_of(row: Row, selected: list[int], tail_start: int, spec: SelectionSpec) -> torch.Tensor:
    if spec.selector == "window":
        selected = []  # whatever the store holds
    pages = {page for page in (*range(spec.sink_pages), *selected) if page < tail_start}
    first = torch.tensor(sorted(pages), dtype=torch.int64) * spec.page_size
    positions = first[:, None] + torch.arange(spec.page_size)  # whole pages: the tail, and so the row's own, is later
    tail = torch.arange(tail_start * spec.page_size, row.kv_len, dtype=torch.int64)
    return torch.cat((positions.flatten(), tail))


def _tokens_read(drafts: tuple[Row, ...], lens: tuple[tuple[int, ...], ...], spec: SelectionSpec) -> int:
    return sum(
        row_lens[spec.set_of_layer(layer)] if spec.is_sparse_layer(layer) else row.kv_len
        for row, row_lens in zip(drafts, lens, strict=True)
        for layer in range(spec.num_layers)
    )


def _attend(q: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scale: float) -> torch.Tensor:
    """Causal attention of the last ``q.shape[0]`` of ``key.shape[0]`` tokens: all ``[tokens, heads, head_dim]``."""
    num_queries, kv_len = q.shape[0], key.shape[0]
    if num_queries == 1:
        return _attend_one(q, key, value, scale=scale)
    query, keys, values = (x.transpose(0, 1)[None] for x in (q, key, value))
    if num_queries == kv_len:
        out = scaled_dot_product_attention(query, keys, values, is_causal=True, scale=scale, enable_gqa=True)
        return out[0].transpose(0, 1)
    parts = []
    position = torch.arange(kv_len, device=q.device)
    for first in range(0, num_queries, QUERY_CHUNK):
        last = min(first + QUERY_CHUNK, num_queries)
        visible = kv_len - num_queries + last
        mask = position[:visible] <= position[visible - (last - first) : visible, None]
        part = scaled_dot_product_attention(
            query[:, :, first:last],
            keys[:, :, :visible],
            values[:, :, :visible],
            attn_mask=mask,
            scale=scale,
            enable_gqa=True,
        )
        parts.append(part[0].transpose(0, 1))
    return torch.cat(parts)


def _attend_one(q: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scale: float) -> torch.Tensor:
    """One query: its head groups become queries of their kv head, so that each key is read once, not once per group.

    32 q / 8 kv heads, 8192 tokens, 2 CPU cores: 8.4 ms against 20.9 ms with ``enable_gqa`` (float32).
    """
    _, num_heads, head_dim = q.shape
    grouped = q.reshape(1, key.shape[1], num_heads // key.shape[1], head_dim)
    keys, values = (x.transpose(0, 1)[None] for x in (key, value))
    out = scaled_dot_product_attention(grouped, keys, values, scale=scale)
    return out.reshape(1, num_heads, value.shape[-1])


def _page_scores(q: torch.Tensor, key: torch.Tensor, row: Row, *, page_size: int, scale: float) -> torch.Tensor:
    """float32 ``[pages of kv_len]``: page scores of a row that reads all of its ``key`` ``[kv_len, kv heads, dim]``."""
    num_queries = q.shape[0]
    scored = (0, num_queries - 1) if row.kind is RowKind.VERIFY and num_queries > 1 else (num_queries - 1,)
    keys = key.float()
    token_scores = torch.zeros(row.kv_len, dtype=torch.float32, device=q.device)
    for i in scored:
        visible = row.start + i + 1
        grouped = q[i].float().reshape(keys.shape[1], -1, q.shape[-1])
        logits = grouped @ keys[:visible].permute(1, 2, 0) * scale
        token_scores[:visible] += torch.softmax(logits, dim=-1).amax(dim=(0, 1))
    token_scores /= len(scored)
    return pad(token_scores, (0, -row.kv_len % page_size)).view(-1, page_size).sum(dim=1)
