"""Seconds of a step from what it does: base + seconds per token * tokens + seconds per KV token * KV tokens read.

Decisions depend only on ratios of the coefficients, so byte counts serve until they are measured on the machine.
Every function takes one request (int) or an array with one element a request, and returns the like.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from aspire_sglang.config import AspireConfig

FloatArray: TypeAlias = NDArray[np.float64]
Tokens: TypeAlias = int | FloatArray
"""Token counts: of one request, or one element a request."""
Amount: TypeAlias = np.float64 | FloatArray
"""A derived quantity (KV tokens or seconds), shaped like the counts it came from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CostModel:
    """Coefficients of a step's time, and the shape that says how much KV a drafting row reads.

    ``base_seconds``         one step whatever its rows: weight read, launches
    ``seconds_per_token``    one input token of any row: its matrix products
    ``seconds_per_kv_token`` one KV token read at all layers by one row
    ``num_layers``           attention layers of the model (N)
    ``full_read_layers``     layers where drafting rows too read the full context: refresh and dense layers, 0..N
    ``ratio``, ``min_pages``, ``page_size``  the sparse budget, as in :class:`AspireConfig`
    """

    base_seconds: float
    seconds_per_token: float
    seconds_per_kv_token: float
    num_layers: int
    full_read_layers: int
    ratio: float
    min_pages: int
    page_size: int

    def __post_init__(self) -> None:
        for name in ("base_seconds", "seconds_per_token", "seconds_per_kv_token"):
            if not 0.0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} is {getattr(self, name)}; it must be finite and 0 or more")
        if self.base_seconds + self.seconds_per_token + self.seconds_per_kv_token == 0.0:
            raise ValueError("all coefficients are 0; a step must take time")
        if not 0 <= self.full_read_layers <= self.num_layers or self.num_layers < 1:
            raise ValueError(f"full_read_layers is {self.full_read_layers} of num_layers {self.num_layers}; use 0..N")

    @classmethod
    def from_bytes(
        cls,
        config: AspireConfig,
        *,
        num_layers: int,
        full_read_layers: int | None = None,
        weight_bytes: float,
        kv_bytes_per_token: float,
        bytes_per_second: float,
        flops_per_token: float,
        flops_per_second: float,
    ) -> CostModel:
        """Coefficients of a memory-bound machine, before calibration measures them.

        ``weight_bytes`` are read once a step; ``kv_bytes_per_token`` are of K and V over all layers; both and the
        FLOPs (about 2 a parameter and token) are of one rank. ``full_read_layers`` follows from ``config`` when None.
        """
        if full_read_layers is None:
            full_read_layers = count_full_read_layers(config, num_layers)
        return cls(
            base_seconds=weight_bytes / bytes_per_second,
            seconds_per_token=flops_per_token / flops_per_second,
            seconds_per_kv_token=kv_bytes_per_token / bytes_per_second,
            num_layers=num_layers,
            full_read_layers=full_read_layers,
            ratio=config.ratio,
            min_pages=config.min_pages,
            page_size=config.page_size,
        )

    def draft_kv_tokens(self, kv_tokens: Tokens) -> Amount:
        """KV tokens that one drafting row reads, averaged over layers, of a context of ``kv_tokens``.

        (sparse layers * selected tokens + full-read layers * kv_tokens) / N, where max(min_pages, ceil(ratio * pages))
        pages are selected, never more than there are. The row's own few drafts are left out: verify reads them too.
        """
        pages = np.ceil(np.divide(kv_tokens, self.page_size))
        selected_pages = np.maximum(self.min_pages, np.ceil(self.ratio * pages))
        selected_tokens = np.minimum(kv_tokens, selected_pages * self.page_size)
        full_share = self.full_read_layers / self.num_layers
        read: Amount = (1.0 - full_share) * selected_tokens + full_share * np.asarray(kv_tokens, dtype=np.float64)
        return read

    def verify_kv_tokens(self, kv_tokens: Tokens) -> Amount:
        """KV tokens that one verifying row reads: the full context, once for all its queries."""
        return np.float64(kv_tokens) if isinstance(kv_tokens, int) else kv_tokens

    def draft_row_seconds(self, kv_tokens: Tokens) -> Amount:
        """Seconds that one drafting row adds to a step (cd)."""
        return self.seconds_per_token + self.seconds_per_kv_token * self.draft_kv_tokens(kv_tokens)

    def verify_row_seconds(self, kv_tokens: Tokens, num_drafts: Tokens) -> Amount:
        """Seconds that one row verifying ``num_drafts`` drafts adds to a step (cv); 0 drafts is plain decoding."""
        tokens = num_drafts + 1
        return self.seconds_per_token * tokens + self.seconds_per_kv_token * self.verify_kv_tokens(kv_tokens)

    def step_seconds(self, *, num_tokens: float, num_kv_tokens: float) -> float:
        """Seconds of a step with ``num_tokens`` input tokens that reads ``num_kv_tokens`` KV tokens over all rows."""
        return self.base_seconds + self.seconds_per_token * num_tokens + self.seconds_per_kv_token * num_kv_tokens


def count_full_read_layers(config: AspireConfig, num_layers: int) -> int:
    """Layers where drafting rows read the full context: the dense ones, and the refresh layer if it is in use."""
    refresh_layer = config.resolve_refresh_layer(num_layers)
    needs_refresh = config.selector == "refresh" and refresh_layer >= config.dense_layers
    return config.dense_layers + int(needs_refresh)
