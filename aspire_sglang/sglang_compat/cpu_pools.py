"""KV pool allocators for CPUs (imported only on machines without a GPU, once SGLang itself is imported)."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator, alloc_extend_naive
from sglang.srt.utils import get_num_new_pages


class CpuPagedAllocator(PagedTokenToKVPoolAllocator):  # type: ignore[misc]
    """SGLang's paged allocator with its two Triton kernels written in PyTorch."""

    free_pages: torch.Tensor

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        num_new_pages: int | None = None,
    ) -> torch.Tensor | None:
        """Slots for positions ``prefix_lens .. seq_lens`` of each request, or None when pages run out."""
        needed = num_new_pages
        if needed is None:
            needed = get_num_new_pages(seq_lens=seq_lens_cpu, page_size=self.page_size, prefix_lens=prefix_lens_cpu)
        if needed > len(self.free_pages):
            self.merge_and_sort_free()
        if needed > len(self.free_pages):
            return None
        out = torch.empty((extend_num_tokens,), dtype=torch.int64, device=self.device)
        alloc_extend_naive(prefix_lens, seq_lens, last_loc, self.free_pages, out, self.page_size, self.device)
        self.free_pages = self.free_pages[needed:]
        return out

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        """One slot a request for position ``seq_lens - 1``, or None when pages run out."""
        starts_page = (seq_lens - 1) % self.page_size == 0
        needed = int(starts_page.sum())
        if needed > len(self.free_pages):
            self.merge_and_sort_free()
        if needed > len(self.free_pages):
            return None
        out = last_loc.to(torch.int64) + 1
        out[starts_page] = self.free_pages[:needed].to(torch.int64) * self.page_size
        self.free_pages = self.free_pages[needed:]
        return out


def make_allocator(size: int, *, page_size: int, **kwargs: Any) -> Any:
    """The allocator that SGLang itself would build for this page size."""
    if page_size == 1:
        return TokenToKVPoolAllocator(size, **kwargs)
    return CpuPagedAllocator(size, page_size=page_size, **kwargs)
