"""Page selection, the rules it derives from the config, and the page sets of the slots."""

from __future__ import annotations

import dataclasses
import math
import random
from fractions import Fraction

import pytest
import torch

from aspire_sglang.attention_backends.base import PageSetStore, SelectedPages, SelectionSpec
from aspire_sglang.attention_backends.layout import RowKind
from aspire_sglang.attention_backends.selection import select_pages
from aspire_sglang.config import SELECTORS, AspireConfig, ConfigError

LAYERS = 6


def make_spec(*, max_tokens: int = 4096, **config: int | float | str) -> SelectionSpec:
    return SelectionSpec.from_config(AspireConfig.from_mapping(config), num_layers=LAYERS, max_tokens=max_tokens)


@pytest.fixture
def rng() -> random.Random:
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    torch.manual_seed(seed)
    return random.Random(seed)


def naive_select(scores: list[float], num_tokens: int, spec: SelectionSpec) -> tuple[list[int], int]:
    total = math.ceil(Fraction(num_tokens, spec.page_size))
    budget = min(total, max(spec.min_pages, math.ceil(Fraction(str(spec.ratio)) * total)))
    recent_start = max(0, total - spec.recent_pages)
    candidates = range(spec.sink_pages, min(recent_start, len(scores)))
    best = sorted(candidates, key=lambda page: (math.isfinite(scores[page]), scores[page]), reverse=True)
    return sorted(best[: max(0, budget - spec.sink_pages - spec.recent_pages)]), recent_start


def as_lists(selected: SelectedPages) -> list[list[int]]:
    """Listed pages of every row, after checking counts, order and padding."""
    listed = []
    for row, count in zip(selected.pages.tolist(), selected.counts.tolist(), strict=True):
        assert row[:count] == sorted(set(row[:count]))
        assert row[count:] == [-1] * (len(row) - count)
        listed.append(row[:count])
    return listed


@pytest.mark.parametrize("ratio", [0.03, 0.07, 0.29, 1.0])
def test_budgets_on_host_and_device_agree_at_every_page(ratio: float) -> None:
    spec = make_spec(ratio=ratio, min_pages=2, recent_pages=1, sink_pages=1)
    num_tokens = torch.arange(32, 16 * 256 + 1, 16)
    counts = select_pages(torch.zeros(num_tokens.numel(), 256), num_tokens, spec).counts
    assert counts.tolist() == [spec.budget_pages(n) - 2 for n in num_tokens.tolist()]


@pytest.mark.parametrize("ratio", [0.03, 0.07, 0.5, 1.0])
def test_matches_a_naive_selection(rng: random.Random, ratio: float) -> None:
    for _ in range(20):
        sizes = {"page_size": rng.choice((1, 4, 16)), "min_pages": rng.randint(1, 24)}
        spec = make_spec(ratio=ratio, recent_pages=rng.randint(1, 9), sink_pages=rng.randint(0, 3), **sizes)
        num_tokens = [rng.choice((0, 1, 15, 16, 17, rng.randint(1, 1500))) for _ in range(6)]
        width = spec.num_pages(max(num_tokens)) + rng.randint(0, 5)
        scores = torch.rand(6, width)
        selected = select_pages(scores, torch.tensor(num_tokens), spec)
        assert selected.pages.dtype == selected.counts.dtype == selected.recent_start.dtype == torch.int32
        assert selected.pages.shape == (6, spec.capacity)
        want = [naive_select(row, tokens, spec) for row, tokens in zip(scores.tolist(), num_tokens, strict=True)]
        assert as_lists(selected) == [pages for pages, _ in want]
        assert selected.recent_start.tolist() == [start for _, start in want]


def test_full_ratio_reads_every_page(rng: random.Random) -> None:
    spec = make_spec(ratio=1.0, min_pages=1, sink_pages=2, recent_pages=3)
    for num_tokens in (0, 1, 16, 79, 80, 81, 1000, 4096):
        total = spec.num_pages(num_tokens)
        selected = select_pages(torch.full((1, total), -1.0), torch.tensor([num_tokens]), spec)
        implicit = {*range(min(2, total)), *range(int(selected.recent_start), total)}
        assert implicit | set(as_lists(selected)[0]) == set(range(total))


def test_non_finite_scores_rank_last(rng: random.Random) -> None:
    spec = make_spec(ratio=0.01, min_pages=8, recent_pages=2, sink_pages=1)  # selects 5 of pages 1..37
    scores = torch.full((3, 40), float("nan"))
    scores[1] = float("inf")
    scores[2] = float("-inf")
    finite = sorted(rng.sample(range(1, 38), 5))
    scores[:, finite] = -torch.rand(3, 5)
    assert as_lists(select_pages(scores, torch.full((3,), 640), spec)) == [finite] * 3
    scores[:, finite[0]] = float("nan")
    for pages in as_lists(select_pages(scores, torch.full((3,), 640), spec)):
        assert set(finite[1:]) <= set(pages) <= set(range(1, 38))
        assert len(pages) == 5


def test_scores_of_sinks_recents_and_stale_columns_do_not_matter(rng: random.Random) -> None:
    spec = make_spec(min_pages=12, recent_pages=3, sink_pages=2)
    scores, num_tokens = torch.rand(4, 60), torch.tensor([640, 641, 655, 300])
    want = as_lists(select_pages(scores, num_tokens, spec))
    for row, tokens in enumerate(num_tokens.tolist()):
        scores[row, :2] = 1e9
        scores[row, spec.num_pages(tokens) - 3 :] = float("inf")
    assert as_lists(select_pages(scores, num_tokens, spec)) == want


def test_crossing_a_buffer_size_by_one_page_equals_a_larger_buffer(rng: random.Random) -> None:
    """Row 10 of the known faults: no stale -1, no stale page, whatever the width of scores and sets."""
    small, large = (make_spec(max_tokens=size, ratio=0.5, min_pages=4, recent_pages=2) for size in (16 * 64, 16 * 4096))
    for pages in (3, 4, 5, 7, 8, 9, 62, 63, 64):
        for num_tokens in (16 * pages - 1, 16 * pages):
            scores, tokens = torch.rand(1, pages), torch.tensor([num_tokens])
            wide = torch.cat((scores, torch.full((1, 999), float("nan"))), dim=1)
            got = as_lists(select_pages(scores, tokens, small))
            assert (
                got
                == as_lists(select_pages(wide, tokens, large))
                == [naive_select(scores[0].tolist(), num_tokens, small)[0]]
            )
    selected = select_pages(torch.rand(1, 70), torch.tensor([16 * 70]), small)
    assert len(as_lists(selected)[0]) <= small.capacity, "past max_tokens the set is cut, not overrun"


def test_several_sets_equal_one_selection_each(rng: random.Random) -> None:
    spec = make_spec(selector="verify-per-layer", min_pages=6, recent_pages=2)
    scores, num_tokens = torch.rand(LAYERS, 3, 50), torch.tensor([800, 17, 555])
    together = select_pages(scores, num_tokens, spec)
    for layer in range(LAYERS):
        alone = select_pages(scores[layer], num_tokens, spec)
        assert torch.equal(together.pages[layer], alone.pages)
        assert torch.equal(together.counts[layer], alone.counts)
    assert together.recent_start.tolist() == [48, 0, 33]


def test_no_rows() -> None:
    selected = select_pages(torch.empty(0, 0), torch.empty(0, dtype=torch.int64), make_spec())
    assert selected.pages.shape == (0, make_spec().capacity)
    assert selected.counts.shape == (0,)


def test_shapes_that_disagree_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(2, 5\).*\(3,\)"):
        select_pages(torch.zeros(2, 5), torch.zeros(3, dtype=torch.int64), make_spec())


def test_budget_is_exact_and_grows_with_the_context() -> None:
    spec = make_spec(ratio=0.07, min_pages=2)
    assert spec.budget_pages(1600) == 7, "0.07 * 100 pages is above 7 in float64 only"
    assert [spec.budget_pages(n) for n in (0, 1, 16, 17, 33)] == [0, 1, 1, 2, 2]
    budgets = [spec.budget_pages(n) for n in range(4097)]
    assert budgets == sorted(budgets)
    assert budgets[-1] == spec.capacity == 18
    with pytest.raises(ValueError, match="-1"):
        spec.budget_pages(-1)


def test_which_layers_are_sparse_and_score() -> None:
    both = {RowKind.VERIFY, RowKind.PREFILL}
    table = {
        "refresh": ([2, 3, 5], {4: set(RowKind)}),
        "verify": ([2, 3, 4, 5], {4: both}),
        "verify-per-layer": ([2, 3, 4, 5], {2: both, 3: both, 4: both, 5: both}),
        "window": ([2, 3, 4, 5], {}),
    }
    assert set(table) == set(SELECTORS)
    for selector, (sparse, scoring) in table.items():
        spec = make_spec(selector=selector, dense_layers=2)
        assert [layer for layer in range(LAYERS) if spec.is_sparse_layer(layer)] == sparse
        for layer in range(LAYERS):
            assert {kind for kind in RowKind if spec.scores_layer(layer, kind)} == scoring.get(layer, set())
            assert spec.set_of_layer(layer) == (layer if selector == "verify-per-layer" else 0)
        for kind in RowKind:
            assert spec.scores_kind(kind) == any(spec.scores_layer(layer, kind) for layer in range(LAYERS))
        with pytest.raises(ValueError, match="layer 6"):
            spec.is_sparse_layer(6)
        with pytest.raises(ValueError, match="layer -1"):
            spec.set_of_layer(-1)


def test_spec_is_checked_against_the_model() -> None:
    with pytest.raises(ConfigError, match="refresh_layer is 6"):
        make_spec(refresh_layer=6)
    with pytest.raises(ValueError, match="max_tokens is 0"):
        make_spec(max_tokens=0)


@pytest.mark.parametrize("selector", SELECTORS)
def test_store_and_clear_touch_only_their_slots(rng: random.Random, selector: str) -> None:
    """Row 8 of the known faults: nothing of a slot's former request is left, nothing of its neighbours is lost."""
    spec = make_spec(selector=selector, min_pages=6, recent_pages=2)
    store = PageSetStore(spec, num_slots=5, device="cpu")
    address = store.pages.data_ptr()
    num_tokens = torch.tensor([900, 450])
    scores = torch.rand(spec.num_sets, 2, 60)
    selected = select_pages(scores if spec.num_sets > 1 else scores[0], num_tokens, spec)
    store.store(torch.tensor([3, 1]), selected)
    want = selected.pages.view(spec.num_sets, 2, -1)
    assert torch.equal(store.pages[3], want[:, 0])
    assert torch.equal(store.pages[1], want[:, 1])
    assert store.recent_start.tolist() == [-1, 27, -1, 55, -1]
    store.clear(3)
    assert (store.pages[3] == -1).all()
    assert (store.counts[3] == 0).all()
    assert store.recent_start.tolist() == [-1, 27, -1, -1, -1]
    assert torch.equal(store.pages[1], want[:, 1])
    assert (store.counts[1] == 3).all()
    assert store.pages.data_ptr() == address, "captured graphs keep reading the same buffer"


def test_a_smaller_set_replaces_a_larger_one_entirely(rng: random.Random) -> None:
    spec = make_spec(ratio=0.5, min_pages=1, recent_pages=1)
    store = PageSetStore(spec, num_slots=1, device="cpu")
    for num_tokens in (4000, 100):
        selected = select_pages(torch.rand(1, 250), torch.tensor([num_tokens]), spec)
        store.store(torch.tensor([0]), selected)
    assert store.pages[0, 0, :2].min() >= 1
    assert (store.pages[0, 0, 2:] == -1).all()
    assert int(store.counts) == 2


def test_store_refuses_what_does_not_fit() -> None:
    store = PageSetStore(make_spec(), num_slots=2, device="cpu")
    selected = select_pages(torch.rand(1, 9), torch.tensor([99]), make_spec())
    with pytest.raises(ValueError, match="2 slots"):
        store.store(torch.tensor([0, 1]), selected)
    with pytest.raises(ValueError, match="recent_start"):
        store.store(torch.tensor([0]), dataclasses.replace(selected, recent_start=torch.zeros(2)))
    with pytest.raises(ValueError, match="slot 2"):
        store.clear(2)
    with pytest.raises(ValueError, match="num_slots is 0"):
        PageSetStore(make_spec(), num_slots=0, device="cpu")
