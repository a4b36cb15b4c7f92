"""The cost model: what a row reads and what a step takes."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aspire_sglang.config import AspireConfig
from aspire_sglang.scheduler.cost_model import CostModel, count_full_read_layers


def make_cost(config: AspireConfig | None = None) -> CostModel:
    """Qwen3-8B in bf16 on an H200, by byte counts."""
    return CostModel.from_bytes(
        config or AspireConfig(),
        num_layers=36,
        weight_bytes=16.4e9,
        kv_bytes_per_token=147_456,
        bytes_per_second=4.27e12,
        flops_per_token=16.4e9,
        flops_per_second=7e14,
    )


def test_coefficients_from_bytes() -> None:
    cost = make_cost()
    assert cost.base_seconds == pytest.approx(3.84e-3, rel=1e-2)
    assert cost.seconds_per_token == pytest.approx(23.4e-6, rel=1e-2)
    assert cost.seconds_per_kv_token == pytest.approx(34.5e-9, rel=1e-2)
    # 16 x 32k plain decoding: stock SGLang was measured at 23.7 ms on an H200.
    seconds = cost.step_seconds(num_tokens=16, num_kv_tokens=16 * 32_768)
    assert seconds == pytest.approx(22.3e-3, rel=0.02)


def test_step_seconds_is_base_plus_rows() -> None:
    cost = make_cost()
    drafting, verifying = 20_000, 30_000
    tokens = 1 + 6
    kv_read = float(cost.draft_kv_tokens(drafting) + cost.verify_kv_tokens(verifying))
    rows = float(cost.draft_row_seconds(drafting) + cost.verify_row_seconds(verifying, 5))
    assert cost.step_seconds(num_tokens=tokens, num_kv_tokens=kv_read) == pytest.approx(cost.base_seconds + rows)


def test_draft_reads_sparse_and_full_layers() -> None:
    # 32,000 tokens are 2,000 pages: 7 % are 140 pages, 2,240 tokens at 35 sparse layers; one layer reads all.
    assert make_cost().draft_kv_tokens(32_000) == pytest.approx((35 * 2_240 + 32_000) / 36)
    # 1,600 tokens are 100 pages: the minimum of 32 pages is 512 tokens.
    assert make_cost().draft_kv_tokens(1_600) == pytest.approx((35 * 512 + 1_600) / 36)


@pytest.mark.parametrize("kv_tokens", [0, 1, 15, 16, 500, 512])
def test_short_contexts_are_read_in_full(kv_tokens: int) -> None:
    assert make_cost().draft_kv_tokens(kv_tokens) == pytest.approx(kv_tokens)


def test_full_ratio_reads_everything() -> None:
    assert make_cost(AspireConfig(ratio=1.0)).draft_kv_tokens(12_345) == pytest.approx(12_345)


@given(st.integers(0, 200_000), st.floats(0.01, 1.0), st.integers(1, 64), st.integers(0, 36))
def test_draft_reads_between_the_budget_and_the_context(kv: int, ratio: float, min_pages: int, full: int) -> None:
    cost = dataclasses.replace(make_cost(), ratio=ratio, min_pages=min_pages, full_read_layers=full)
    read = float(cost.draft_kv_tokens(kv))
    pages = math.ceil(kv / 16)
    selected = min(kv, 16 * max(min_pages, math.ceil(ratio * pages)))
    assert read == pytest.approx(((36 - full) * selected + full * kv) / 36)
    assert read <= kv * (1 + 1e-12)
    assert float(cost.draft_row_seconds(kv)) <= float(cost.verify_row_seconds(kv, 0)) * (1 + 1e-12)


def test_arrays_give_what_single_requests_give() -> None:
    cost = make_cost()
    kv_tokens = np.array([0.0, 700.0, 5_000.0, 90_000.0])
    singles = [float(cost.draft_row_seconds(int(kv))) for kv in kv_tokens]
    assert np.asarray(cost.draft_row_seconds(kv_tokens)) == pytest.approx(singles)
    singles = [float(cost.verify_row_seconds(int(kv), 4)) for kv in kv_tokens]
    assert np.asarray(cost.verify_row_seconds(kv_tokens, 4)) == pytest.approx(singles)


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        (AspireConfig(), 1),
        (AspireConfig(dense_layers=2), 3),
        (AspireConfig(selector="window"), 0),
        (AspireConfig(selector="verify", dense_layers=2), 2),
        (AspireConfig(dense_layers=2, refresh_layer=1), 2),
    ],
)
def test_full_read_layers(config: AspireConfig, layers: int) -> None:
    assert count_full_read_layers(config, 36) == layers
    assert make_cost(config).full_read_layers == layers


@pytest.mark.parametrize(
    "change",
    [
        {"base_seconds": -1.0},
        {"seconds_per_token": math.nan},
        {"seconds_per_kv_token": math.inf},
        {"full_read_layers": 37},
        {"num_layers": 0, "full_read_layers": 0},
        {"base_seconds": 0.0, "seconds_per_token": 0.0, "seconds_per_kv_token": 0.0},
    ],
)
def test_bad_coefficients_are_refused(change: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"it must be|must take time|use 0\.\.N"):
        dataclasses.replace(make_cost(), **change)  # type: ignore[arg-type]
