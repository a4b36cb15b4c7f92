"""The torch backend against an independent per-query softmax in float64, on fresh random data."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch

from aspire_sglang.attention_backends.base import PageSetStore, SelectionSpec
from aspire_sglang.attention_backends.layout import RaggedLayout, Row, RowKind
from aspire_sglang.attention_backends.selection import select_pages
from aspire_sglang.attention_backends.torch_reference import QUERY_CHUNK, TorchAttentionBackend, TorchAttentionPlan
from aspire_sglang.config import SELECTORS, AspireConfig

LAYERS, PAGE, SLOTS = 3, 16, 12
BACKEND = TorchAttentionBackend()
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors: on shared cores a second OpenMP thread costs ten times what it saves."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture
def rng() -> random.Random:
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    torch.manual_seed(seed)
    return random.Random(seed)


def make_spec(**config: int | float | str) -> SelectionSpec:
    sizes = {"min_pages": 6, "recent_pages": 2, "page_size": PAGE} | config
    return SelectionSpec.from_config(AspireConfig.from_mapping(sizes), num_layers=LAYERS, max_tokens=2048)


def draft(slot: int, cycle_start: int, num_drafted: int = 0) -> Row:
    return Row(slot, RowKind.DRAFT, cycle_start + num_drafted, 1, cycle_start)


def verify(slot: int, start: int, num_queries: int) -> Row:
    return Row(slot, RowKind.VERIFY, start, num_queries, start)


def prefill(slot: int, start: int, num_queries: int) -> Row:
    return Row(slot, RowKind.PREFILL, start, num_queries, start)


@dataclass
class Cache:
    """A scattered pool: everything outside the rows' tokens is NaN, or an index far outside the pool."""

    req_to_token: torch.Tensor
    pools: list[tuple[torch.Tensor, torch.Tensor]]

    def key(self, layer: int) -> torch.Tensor:
        return self.pools[layer][0]

    def value(self, layer: int) -> torch.Tensor:
        return self.pools[layer][1]


@dataclass
class Case:
    """One step: a layout, its cache and queries, and the page sets of its draft slots."""

    layout: RaggedLayout
    spec: SelectionSpec
    heads: tuple[int, int] = (9, 3)
    head_dim: int = 64
    dtype: torch.dtype = torch.float32
    cache: Cache = field(init=False)
    sets: PageSetStore = field(init=False)
    q: list[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        width = max((row.kv_len for row in self.layout.rows), default=0) + 40
        num_tokens = sum(row.kv_len for row in self.layout.rows)
        index_type = (torch.int32, torch.int64)[int(torch.randint(2, ()))]
        table = torch.full((SLOTS, width), 10**9, dtype=index_type)
        free = torch.randperm(num_tokens + 50)
        used = free[:num_tokens]
        parts = torch.split_with_sizes(used, [row.kv_len for row in self.layout.rows])
        for row, part in zip(self.layout.rows, parts, strict=True):
            table[row.slot, : row.kv_len] = part.to(index_type)
        pools = []
        for _ in range(LAYERS):
            pool = torch.full((2, num_tokens + 50, self.heads[1], self.head_dim), float("nan"), dtype=self.dtype)
            pool[:, used] = torch.randn(2, num_tokens, *pool.shape[2:]).to(self.dtype)
            pools.append((pool[0], pool[1]))
        self.cache = Cache(table, pools)
        self.sets = PageSetStore(self.spec, num_slots=SLOTS, device="cpu")
        self.q = [
            torch.randn(self.layout.num_tokens, self.heads[0], self.head_dim).to(self.dtype) for _ in range(LAYERS)
        ]

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    def select(self, row: Row, scores: torch.Tensor | None = None) -> None:
        """Store sets for a row, from random scores ``[num_sets, P]`` unless given."""
        width = self.spec.num_pages(row.kv_len)
        given = torch.rand(self.spec.num_sets, width) if scores is None else scores
        stacked = given[:, None] if self.spec.num_sets > 1 else given
        self.sets.store(torch.tensor([row.slot]), select_pages(stacked, torch.tensor([row.cycle_start]), self.spec))

    def plan(self, scored_rows: frozenset[int] | None = None) -> TorchAttentionPlan:
        return BACKEND.plan(self.layout, kv=self.cache, sets=self.sets, spec=self.spec, scored_rows=scored_rows)

    def run(self, plan: TorchAttentionPlan) -> list[torch.Tensor]:
        return [BACKEND.run(q, layer, plan, scale=self.scale) for layer, q in enumerate(self.q)]

    def check(self) -> TorchAttentionPlan:
        """Every output and every page score equals the oracle's."""
        plan = self.plan()
        for layer, out in enumerate(self.run(plan)):
            assert out.shape == self.q[layer].shape
            assert out.dtype == self.dtype
            tolerance = TOLERANCE[self.dtype]
            torch.testing.assert_close(out.double(), naive_run(self, layer), atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(plan.scores.values.double(), naive_scores(self, plan), atol=1e-5, rtol=1e-4)
        return plan


def visible(case: Case, row: Row, position: int, layer: int) -> list[int]:
    """Positions that the query at ``position`` may see, one by one from the definition."""
    spec = case.spec
    if row.kind is not RowKind.DRAFT or not spec.is_sparse_layer(layer):
        return list(range(position + 1))
    num_pages = -(-row.cycle_start // PAGE)
    recent = int(case.sets.recent_start[row.slot])
    listed = set(case.sets.pages[row.slot, spec.set_of_layer(layer)].tolist())
    if spec.selector == "window":
        budget = min(num_pages, max(spec.min_pages, -(-num_pages * round(spec.ratio * 100) // 100)))
        recent, listed = num_pages - max(budget - spec.sink_pages, spec.recent_pages), set()
    elif recent < 0:
        recent, listed = num_pages - spec.recent_pages, set()

    def is_read(token: int) -> bool:
        page = token // PAGE
        return page < spec.sink_pages or page in listed or page >= recent or page >= row.cycle_start // PAGE

    return [token for token in range(position + 1) if is_read(token)]


def probabilities(case: Case, row: Row, query: torch.Tensor, tokens: list[int], layer: int) -> torch.Tensor:
    """float64 ``[query heads, tokens]``."""
    key = case.cache.key(layer)[case.cache.req_to_token[row.slot].long()[tokens]].double()
    key = key.repeat_interleave(query.shape[0] // key.shape[1], dim=1)
    return torch.softmax(torch.einsum("hd,thd->ht", query.double(), key) * case.scale, dim=-1)


def naive_run(case: Case, layer: int) -> torch.Tensor:
    outs, offsets = [], case.layout.query_offsets()
    for i, row in enumerate(case.layout.rows):
        for j in range(row.num_queries):
            tokens = visible(case, row, row.start + j, layer)
            probability = probabilities(case, row, case.q[layer][offsets[i] + j], tokens, layer)
            value = case.cache.value(layer)[case.cache.req_to_token[row.slot].long()[tokens]].double()
            value = value.repeat_interleave(case.heads[0] // case.heads[1], dim=1)
            outs.append(torch.einsum("ht,thd->hd", probability, value))
    return torch.stack(outs) if outs else torch.empty(case.q[layer].shape, dtype=torch.float64)


def naive_scores(case: Case, plan: TorchAttentionPlan) -> torch.Tensor:
    scores, offsets = torch.zeros(plan.scores.values.shape, dtype=torch.float64), case.layout.query_offsets()
    for layer in range(LAYERS):
        for place, i in enumerate(plan.scores.rows):
            row = case.layout.rows[i]
            if not case.spec.scores_layer(layer, row.kind):
                continue
            last = row.num_queries - 1
            for j in (0, last) if row.kind is RowKind.VERIFY else (last,):
                tokens = list(range(row.start + j + 1))
                best = probabilities(case, row, case.q[layer][offsets[i] + j], tokens, layer).amax(dim=0)
                for token, share in enumerate(best.tolist()):
                    weight = 0.5 if row.kind is RowKind.VERIFY else 1.0
                    scores[case.spec.set_of_layer(layer), place, token // PAGE] += weight * share
    return scores


def mixed_layout() -> RaggedLayout:
    drafts = (draft(3, 200, 5), draft(0, 0), draft(7, 159, 2), draft(1, 160), draft(5, 161, 16))
    others = (verify(2, 150, 4), verify(8, 0, 3), verify(9, 47, 1), prefill(4, 0, 20), prefill(11, 33, 15))
    return RaggedLayout((*drafts, *others))


@pytest.mark.parametrize(("heads", "head_dim"), [((4, 4), 64), ((9, 3), 128), ((8, 2), 64), ((8, 1), 128)])
@pytest.mark.parametrize("selector", SELECTORS)
def test_mixed_rows_match_the_oracle(rng: random.Random, selector: str, heads: tuple[int, int], head_dim: int) -> None:
    case = Case(mixed_layout(), make_spec(selector=selector, dense_layers=1), heads, head_dim)
    for row in case.layout.rows[:4]:  # the fifth draft row has no set; a window ignores them all
        case.select(row)
    case.check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(rng: random.Random, dtype: torch.dtype) -> None:
    case = Case(mixed_layout(), make_spec(), dtype=dtype)
    case.select(case.layout.rows[0])
    case.check()


@pytest.mark.parametrize("start", [0, 1, 15, 16, 17, 31, 32, 33, 127, 128, 129])
def test_page_boundaries(rng: random.Random, start: int) -> None:
    case = Case(
        RaggedLayout((draft(6, start), draft(5, start, 1), verify(4, start, 1), prefill(3, start, 16))), make_spec()
    )
    case.select(case.layout.rows[0])
    case.check()


def test_one_to_seventeen_verify_queries(rng: random.Random) -> None:
    for first in (1, 9):
        rows = tuple(verify(i, rng.randrange(60), first + i) for i in range(9))
        case = Case(RaggedLayout(rows), make_spec(selector="verify"), (6, 2))
        case.check()


@pytest.mark.parametrize("selector", SELECTORS)
def test_empty_layout(rng: random.Random, selector: str) -> None:
    plan = Case(RaggedLayout(()), make_spec(selector=selector)).check()
    assert plan.sparse_lens == ()
    assert plan.scores.rows == ()
    assert plan.kv_tokens_read_by_draft_rows == plan.kv_tokens_read_by_verify_rows == 0


@pytest.mark.parametrize(
    ("start", "num_queries"),
    [(0, QUERY_CHUNK + 60), (37, QUERY_CHUNK), (37, QUERY_CHUNK + 1), (5, 2 * QUERY_CHUNK + 7)],
)
def test_long_prompt_chunks(rng: random.Random, start: int, num_queries: int) -> None:
    case = Case(RaggedLayout((prefill(2, start, num_queries),)), make_spec())
    out = BACKEND.run(case.q[0], 0, case.plan(), scale=case.scale)
    index = case.cache.req_to_token[2, : start + num_queries].long()
    key, value = (pool[index].double().repeat_interleave(3, dim=1) for pool in case.cache.pools[0])
    logits = torch.einsum("qhd,thd->hqt", case.q[0].double(), key) * case.scale
    hidden = torch.ones(logits.shape[1:], dtype=torch.bool).triu(start + 1)
    want = torch.einsum("hqt,thd->qhd", logits.masked_fill(hidden, float("-inf")).softmax(dim=-1), value)
    torch.testing.assert_close(out.double(), want, atol=2e-5, rtol=2e-5)


def test_the_drafts_own_pages_are_read_even_when_ranked_last(rng: random.Random) -> None:
    """Row 10 of the known faults: n % 16 == 14, four drafts straddle two pages."""
    spec = make_spec(min_pages=3, recent_pages=1)
    n = 16 * 20 + 14
    for num_drafted in range(4):
        case = Case(RaggedLayout((draft(0, n, num_drafted),)), spec)
        case.select(case.layout.rows[0], torch.arange(21, 0, -1).float()[None])
        plan = case.check()
        read = visible(case, case.layout.rows[0], n + num_drafted, 0)
        assert set(range(320, n + num_drafted + 1)) <= set(read)
        assert plan.sparse_lens == ((len(read),),) == ((16 + 16 + 14 + num_drafted + 1,),), "sink, best page, tail"
        index = case.cache.req_to_token[0].long()
        assert plan.sparse_index[0][0].tolist() == index[read].tolist()


@pytest.mark.parametrize("selector", ["refresh", "verify", "verify-per-layer", "window"])
def test_full_budget_equals_dense(rng: random.Random, selector: str) -> None:
    rows = tuple(draft(slot, cycle_start, slot) for slot, cycle_start in enumerate((0, 1, 15, 16, 17, 334, 335, 336)))
    sparse = Case(RaggedLayout(rows), make_spec(selector=selector, ratio=1.0))
    for row in rows:
        sparse.select(row)
    dense = RaggedLayout(tuple(verify(row.slot, row.start, 1) for row in rows))
    reference = BACKEND.plan(dense, kv=sparse.cache, sets=sparse.sets, spec=sparse.spec)
    plan = sparse.plan()
    assert plan.kv_tokens_read_by_draft_rows == plan.kv_tokens_full_by_draft_rows
    for layer, out in enumerate(sparse.run(plan)):
        assert torch.equal(out, BACKEND.run(sparse.q[layer], layer, reference, scale=sparse.scale))


def test_stale_set_still_joins_the_tail(rng: random.Random) -> None:
    """A set of an earlier, longer or shorter context never opens a gap before the draft's own tokens."""
    for stored_at in (40, 150, 210, 400):
        case = Case(RaggedLayout((draft(1, 205, 3),)), make_spec())
        selected = select_pages(torch.rand(1, 30), torch.tensor([stored_at]), case.spec)
        case.sets.store(torch.tensor([1]), selected)
        plan = case.check()
        assert plan.sparse_lens[0][0] == len(visible(case, case.layout.rows[0], 208, 0))


def test_a_cleared_slot_reads_sinks_and_recents_only(rng: random.Random) -> None:
    """Row 8 of the known faults: the next request of a slot sees nothing of the last one's pages."""
    case = Case(RaggedLayout((draft(4, 500),)), make_spec(min_pages=12, recent_pages=2, sink_pages=2))
    fresh = case.plan().sparse_lens
    case.select(case.layout.rows[0])
    assert case.plan().sparse_lens[0][0] == 11 * PAGE + 4 + 1
    case.sets.clear(4)
    assert case.plan().sparse_lens == fresh == ((2 * PAGE + PAGE + 4 + 1,),)
    case.check()


@pytest.mark.parametrize("selector", SELECTORS)
def test_reads_stay_within_the_budget(rng: random.Random, selector: str) -> None:
    spec = make_spec(selector=selector)
    rows = tuple(draft(slot, rng.randrange(900), rng.randrange(17)) for slot in range(SLOTS))
    others = (verify(0, 300, 5), verify(1, 7, 17), prefill(2, 50, 9))
    layout = RaggedLayout(rows)
    case = Case(layout, spec)
    for row in rows:
        case.select(row)
    plan = case.plan()
    for row, lens in zip(rows, plan.sparse_lens, strict=True):
        budget = spec.budget_pages(row.cycle_start)
        new = row.kv_len - row.cycle_start
        assert len(lens) == spec.num_sets
        assert all(lens[0] == length for length in lens)
        partial = -row.cycle_start % PAGE
        assert lens[0] == budget * PAGE - partial + new, "exactly the budget: the same bytes for every selector"
    dense = sum(not spec.is_sparse_layer(layer) for layer in range(LAYERS))
    sparse = sum(lens[0] for lens in plan.sparse_lens) * (LAYERS - dense)
    full = sum(row.kv_len for row in rows)
    assert plan.kv_tokens_read_by_draft_rows == sparse + full * dense
    assert plan.kv_tokens_full_by_draft_rows == full * LAYERS
    plan = Case(RaggedLayout(others), spec).plan()
    assert plan.kv_tokens_read_by_verify_rows == (305 + 24) * LAYERS
    assert plan.kv_tokens_read_by_draft_rows == 0


def test_scored_rows_limit_what_is_scored(rng: random.Random) -> None:
    case = Case(mixed_layout(), make_spec())
    plan = case.plan(frozenset({0, 5, 9}))
    case.run(plan)
    assert plan.scores.rows == (0, 5, 9)
    assert plan.scores.slots.tolist() == [3, 2, 11]
    torch.testing.assert_close(plan.scores.values.double(), naive_scores(case, plan), atol=1e-5, rtol=1e-4)
    assert case.plan(frozenset()).scores.values.shape == (1, 0, 0)
    kinds = {
        s: {case.layout.rows[i].kind for i in Case(case.layout, make_spec(selector=s)).plan().scores.rows}
        for s in SELECTORS
    }
    both = {RowKind.VERIFY, RowKind.PREFILL}
    assert kinds == {"refresh": set(RowKind), "verify": both, "verify-per-layer": both, "window": set()}


def test_scores_select_the_next_step(rng: random.Random) -> None:
    """Plan, run, select, store, plan again: the pages that the verify row attends to are the ones drafting reads."""
    case = Case(RaggedLayout((verify(0, 600, 4),)), make_spec())
    plan = case.plan()
    case.run(plan)
    committed = torch.tensor([602])
    selected = select_pages(plan.scores.values[0], committed, case.spec)
    case.sets.store(plan.scores.slots, selected)
    best = set(plan.scores.values[0, 0, 1:36].topk(3).indices.add(1).tolist())
    assert set(selected.pages[0, :3].tolist()) == best
    layout = RaggedLayout((draft(0, 602),))
    after = BACKEND.plan(layout, kv=case.cache, sets=case.sets, spec=case.spec)
    pages = {0, *best, 36, 37}
    want = [token for token in range(603) if token // PAGE in pages]
    assert after.sparse_index[0][0].tolist() == case.cache.req_to_token[0].long()[want].tolist()
    case.sets.clear(0)
    assert after.sparse_lens == ((len(want),),), "a plan keeps the sets of its time"


def test_errors_name_the_value(rng: random.Random) -> None:
    case = Case(RaggedLayout((verify(0, 10, 2),)), make_spec())
    for rows, match in (((verify(SLOTS, 1, 1),), f"slot {SLOTS}"), ((verify(0, 10_000, 1),), "10000")):
        with pytest.raises(ValueError, match=match):
            BACKEND.plan(RaggedLayout(rows), kv=case.cache, sets=case.sets, spec=case.spec)
    with pytest.raises(ValueError, match="scored row 1"):
        case.plan(frozenset({1}))
    plan = case.plan()
    with pytest.raises(ValueError, match=r"\[2, num_q_heads"):
        BACKEND.run(case.q[0][:1], 0, plan, scale=1.0)
    with pytest.raises(ValueError, match="8 query heads"):
        BACKEND.run(case.q[0][:, :8], 0, plan, scale=1.0)
    case.cache.pools.append(case.cache.pools[0])
    with pytest.raises(ValueError, match="layer 3"):
        BACKEND.run(case.q[0], 3, plan, scale=1.0)
