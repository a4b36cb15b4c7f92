"""From page scores to page sets: top pages beside the sinks and the recent pages."""

from __future__ import annotations

import torch

from aspire_sglang.attention_backends.base import CEIL_SLACK, SelectedPages, SelectionSpec

__all__ = ["SelectedPages", "select_pages"]


def select_pages(scores: torch.Tensor, num_tokens: torch.Tensor, spec: SelectionSpec) -> SelectedPages:
    """Best pages of each request within its budget (docs/architecture.md, Selection).

    ``scores``: float32 ``[R, P]`` or, for several sets, ``[num_sets, R, P]``; columns past a request's pages are
    ignored, so P may be any padded width. ``num_tokens``: int64 ``[R]``, the committed KV tokens that the sets will be
    used after: the new committed length for verify rows, ``cycle_start`` for draft rows, ``kv_len`` for the last
    prompt chunk. Both on one device.

    The budget ``spec.budget_pages(num_tokens)`` includes the sinks and the recent pages, which draft rows read anyway;
    the returned sets list only the others. Candidates are pages from ``sink_pages`` up to ``recent_start``.
    A non-finite score ranks below every finite one; ties break either way.
    Mutates nothing; fixed shapes and no host synchronisation, so it may be captured. Raises ``ValueError`` on shapes.
    """
    if scores.dim() not in (2, 3) or num_tokens.shape != scores.shape[-2:-1]:
        raise ValueError(
            f"scores {tuple(scores.shape)} and num_tokens {tuple(num_tokens.shape)} disagree; "
            "wanted [R, P] or [num_sets, R, P] and [R]"
        )
    total = (num_tokens + spec.page_size - 1) // spec.page_size
    recent_start = (total - spec.recent_pages).clamp(min=0)
    num_wanted = _num_selected(total, spec)

    page = torch.arange(scores.shape[-1], device=scores.device)
    is_candidate = (page >= spec.sink_pages) & (page < recent_start[:, None])
    lowest = torch.finfo(torch.float32).min
    rank = torch.where(torch.isfinite(scores), scores.float(), lowest)
    rank = torch.where(is_candidate, rank, float("-inf"))
    best, chosen = rank.topk(min(spec.capacity, scores.shape[-1]), dim=-1)

    place = torch.arange(best.shape[-1], device=scores.device)
    is_kept = (place < num_wanted[:, None]) & (best > float("-inf"))
    past_end = scores.shape[-1]
    ordered = torch.where(is_kept, chosen, past_end).sort(dim=-1).values
    pages = torch.where(ordered < past_end, ordered, -1).to(torch.int32)
    pages = torch.nn.functional.pad(pages, (0, spec.capacity - pages.shape[-1]), value=-1)
    return SelectedPages(pages, is_kept.sum(dim=-1, dtype=torch.int32), recent_start.to(torch.int32))


def _num_selected(total: torch.Tensor, spec: SelectionSpec) -> torch.Tensor:
    """int64 ``[R]``: pages left of each budget after sinks and recents; ``budget_pages`` of the spec as tensor code."""
    share = torch.ceil(total.double() * spec.ratio - CEIL_SLACK).to(torch.int64)
    budget = torch.minimum(share.clamp(min=spec.min_pages), total)
    return (budget - spec.sink_pages - spec.recent_pages).clamp(min=0)
