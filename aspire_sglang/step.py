"""One iteration of the engine: plan -> forward -> verify -> commit.

Every decoding request is one row of one ragged batch. A row that drafts has one token and reads its sparse context; a
row that verifies has its last committed token and all its drafts, and reads everything. Both share one forward of the
target model. Data flows one way, and only ``commit`` changes the state of a request.

A request's cycle: its KV is exact for positions 0..n-1 and x0 is its last committed token. Draft step j feeds x_j at
position n+j and yields x_{j+1}; nothing is committed, and the KV it writes is approximate. A verify step feeds
x_0..x_d at n..n+d, overwrites their KV with exact values and yields target tokens y_0..y_d; the longest prefix with
x_{j+1} = y_j is accepted and committed with the target token that follows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch

from aspire_sglang.attention_backends.base import AttentionPlan, KVCacheView, PageSetStore, SelectionSpec
from aspire_sglang.attention_backends.layout import RaggedLayout, Row, RowKind
from aspire_sglang.attention_backends.selection import select_pages
from aspire_sglang.config import AspireConfig
from aspire_sglang.counters import StepCounts
from aspire_sglang.records import PrefillPlan, PrefillRequest, StepOutcome, StepPlan, StepRequest, StepResult
from aspire_sglang.sampling import OutputHistory, SampledRows, sample
from aspire_sglang.scheduler.acceptance import AcceptancePrior
from aspire_sglang.scheduler.records import Policy
from aspire_sglang.state import StateTable
from aspire_sglang.verification import accept_drafts, pad_targets

__all__ = ["AttentionPlanner", "MixedStep", "PrefillPlan", "StepPlan"]


class AttentionPlanner(Protocol):
    """The host's attention backend, as far as a step needs it."""

    spec: SelectionSpec
    sets: PageSetStore

    @property
    def kv(self) -> KVCacheView: ...

    def prepare(self, layout: RaggedLayout, *, scored_rows: frozenset[int] | None = None) -> AttentionPlan:
        """Plan the next forward; its page scores are filled when that forward has run."""
        ...


class MixedStep:
    """The algorithm over one model's requests. Not thread-safe; one per engine.

    ``tokens``  int64 ``[num_slots, draft_max + 1]``, device: column 0 is a request's last committed token x0, columns
                1..held_drafts its drafts. The plan needs their number only, never their values.
    """

    def __init__(
        self,
        *,
        config: AspireConfig,
        policy: Policy,
        attention: AttentionPlanner,
        num_slots: int,
        device: torch.device | str,
    ) -> None:
        self.config = config
        self.policy = policy
        self.attention = attention
        self.prior = AcceptancePrior()
        self.tokens = torch.zeros((num_slots, config.draft_max + 1), dtype=torch.int64, device=device)
        self.states = StateTable(on_open=attention.sets.clear)
        self.last_counts = StepCounts()
        self.total_counts = StepCounts()

    def run(self, requests: Sequence[StepRequest], forward: Callable[[StepPlan], torch.Tensor]) -> StepResult:
        """One mixed step. ``forward`` returns float logits ``[num_tokens, vocab]`` in the plan's token order."""
        plan = self.plan(requests)
        logits = forward(plan)
        outcome = self.verify(plan, logits)
        return self.commit(plan, outcome)

    # --- plan: all host decisions; needs no token values ------------------------------------------------------

    def plan(self, requests: Sequence[StepRequest]) -> StepPlan:
        """Let every request choose to draft or to verify, lay out the rows and plan their attention."""
        views = tuple(
            request.state.history.view(
                kv_tokens=request.committed,
                held_drafts=request.state.held_drafts,
                draft_limit=draft_limit(request),
            )
            for request in requests
        )
        verifies = self.policy.decide(views)
        order = tuple(sorted(range(len(requests)), key=verifies.__getitem__))  # stable: drafts first
        rows = tuple(_decode_row(requests[place], verifies=verifies[place]) for place in order)
        layout = RaggedLayout(rows)
        positions = layout.positions(self.tokens.device)
        slots = _per_token((row.slot for row in rows), rows, self.tokens.device)
        columns = positions - _per_token((row.cycle_start for row in rows), rows, self.tokens.device)
        return StepPlan(
            requests=tuple(requests),
            order=order,
            num_drafts=tuple(requests[place].state.held_drafts for place in order),
            attention=self.attention.prepare(layout),
            input_ids=self.tokens[slots, columns],
            positions=positions,
            cache_locs=self.attention.kv.req_to_token[slots, positions].to(torch.int64),
        )

    # --- verify: from logits to drafts and accepted runs; changes nothing -------------------------------------

    def verify(self, plan: StepPlan, logits: torch.Tensor) -> StepOutcome:
        """Draw a token from every row's logits and find each verifying row's accepted run."""
        drafting = plan.num_draft_rows
        drawn = self._draw(plan, logits)
        layout, device = plan.attention.layout, drawn.device
        slots = torch.tensor([row.slot for row in layout.rows[drafting:]], dtype=torch.int64, device=device)
        num_drafts = torch.tensor(plan.num_drafts[drafting:], dtype=torch.int64, device=device)
        offsets = torch.tensor(layout.query_offsets()[drafting:-1], dtype=torch.int64, device=device)
        targets = pad_targets(drawn, offsets=offsets, num_drafts=num_drafts, width=self.config.draft_max + 1)
        verdict = accept_drafts(self.tokens[slots, 1:], num_drafts=num_drafts, targets=targets)
        return StepOutcome(
            new_drafts=drawn[:drafting],
            committed_ids=verdict.committed,
            num_accepted=verdict.accepted,
            last_ids=verdict.last,
        )

    def _draw(self, plan: StepPlan, logits: torch.Tensor) -> torch.Tensor:
        """int64 ``[num_tokens]``: each token drawn under its request's own sampling parameters and noise."""
        indices: list[int] = []
        histories: dict[int, OutputHistory] = {}
        for row_index, row in enumerate(plan.attention.layout.rows):
            request = plan.request_of_row(row_index)
            if request.state.sampling.needs_history:
                histories.update(self._histories(request, row, first_token=len(indices)))
            indices += [plan.order[row_index]] * row.num_queries
        num_drafting = plan.num_draft_rows if self.config.sampling == "argmax" else 0
        return sample(
            logits,
            requests=[request.state.sampling for request in plan.requests],
            rows=SampledRows(request_indices=indices, positions=plan.positions + 1, histories=histories),
            draft_argmax=[token < num_drafting for token in range(len(indices))],
        )

    def _histories(self, request: StepRequest, row: Row, *, first_token: int) -> dict[int, OutputHistory]:
        """The output before each of the row's tokens: what is committed, and the drafts up to the token's input.

        The one place where draft values reach the host before the commit; only for requests that depend on them.
        """
        state = request.state
        state.counts.catch_up(request.output_ids)
        drafts = self.tokens[state.slot, 1 : 1 + state.held_drafts].tolist()
        num_before = row.start - row.cycle_start
        return {
            first_token + offset: OutputHistory(
                committed=request.output_ids, drafts=drafts[: num_before + offset], counts=state.counts
            )
            for offset in range(row.num_queries)
        }

    # --- commit: the only stage that changes the state of a request -------------------------------------------

    def commit(self, plan: StepPlan, outcome: StepOutcome) -> StepResult:
        """Record drafts and accepted runs, learn from the verifies, and choose the next page sets."""
        rows, drafting = plan.attention.layout.rows, plan.num_draft_rows
        device = self.tokens.device
        num_accepted = outcome.num_accepted.tolist()
        slots = torch.tensor([row.slot for row in rows], dtype=torch.int64, device=device)
        held = torch.tensor(plan.num_drafts, dtype=torch.int64, device=device)
        self.tokens[slots[:drafting], held[:drafting] + 1] = outcome.new_drafts
        self.tokens[slots[drafting:], 0] = outcome.last_ids
        new_committed = [row.cycle_start for row in rows[:drafting]]
        for index in range(drafting):
            plan.request_of_row(index).state.held_drafts += 1
        for index, accepted in enumerate(num_accepted, start=drafting):
            state = plan.request_of_row(index).state
            state.history.record(plan.num_drafts[index], accepted)
            state.held_drafts = 0
            new_committed.append(rows[index].cycle_start + accepted + 1)
        self._reselect(plan.attention, new_committed)
        self._count(plan, num_accepted)
        return self._result(plan, outcome)

    def _reselect(self, attention: AttentionPlan, num_tokens: Sequence[int]) -> None:
        """Replace the page sets of every scored row; they take effect from the next plan on.

        ``num_tokens``: for each row of the layout, the exact KV tokens that its next drafts will follow.
        """
        scores = attention.scores
        if not scores.rows:
            return
        lengths = torch.tensor([num_tokens[row] for row in scores.rows], dtype=torch.int64, device=self.tokens.device)
        self.attention.sets.store(scores.slots, select_pages(scores.values, lengths, attention.spec))

    def _result(self, plan: StepPlan, outcome: StepOutcome) -> StepResult:
        drafting, device = plan.num_draft_rows, self.tokens.device
        places = torch.tensor(plan.order, dtype=torch.int64, device=device)
        num_requests, width = len(plan.requests), self.config.draft_max + 1
        token_ids = torch.zeros((num_requests, width), dtype=torch.int64, device=device)
        num_committed = torch.zeros(num_requests, dtype=torch.int32, device=device)
        num_verified = torch.zeros(num_requests, dtype=torch.int32, device=device)
        token_ids[places[drafting:]] = outcome.committed_ids
        num_committed[places[drafting:]] = (outcome.num_accepted + 1).to(torch.int32)
        num_verified[places[drafting:]] = torch.tensor(plan.num_drafts[drafting:], dtype=torch.int32, device=device)
        slots = torch.tensor([request.state.slot for request in plan.requests], dtype=torch.int64, device=device)
        return StepResult(
            token_ids=token_ids,
            num_committed=num_committed,
            num_verified_drafts=num_verified,
            last_tokens=self.tokens[slots, 0],
        )

    def _count(self, plan: StepPlan, num_accepted: Sequence[int]) -> None:
        drafting, verifying = plan.num_draft_rows, len(num_accepted)
        self.last_counts = StepCounts(
            steps=1,
            mixed_steps=int(drafting > 0 and verifying > 0),
            draft_rows=drafting,
            verify_rows=verifying,
            drafts_verified=sum(plan.num_drafts[drafting:]),
            drafts_accepted=sum(num_accepted),
            tokens_committed=sum(num_accepted) + verifying,
            draft_kv_tokens_read=plan.attention.kv_tokens_read_by_draft_rows,
            draft_kv_tokens_full=plan.attention.kv_tokens_full_by_draft_rows,
            verify_kv_tokens_read=plan.attention.kv_tokens_read_by_verify_rows,
        )
        self.total_counts.add(self.last_counts)

    # --- prefill: the same stages over prompt chunks ----------------------------------------------------------

    def prefill(
        self, requests: Sequence[PrefillRequest], forward: Callable[[PrefillPlan], torch.Tensor]
    ) -> torch.Tensor:
        """Run prompt chunks; returns int64 ``[num_requests]`` first tokens (0 where the prompt goes on).

        ``forward`` returns float logits ``[num_requests, vocab]`` of each chunk's last token.
        """
        rows = tuple(
            Row(request.state.slot, RowKind.PREFILL, request.start, request.num_tokens, request.start)
            for request in requests
        )
        ending = [index for index, request in enumerate(requests) if request.is_last_chunk]
        attention = self.attention.prepare(RaggedLayout(rows), scored_rows=frozenset(ending))
        logits = forward(PrefillPlan(requests=tuple(requests), attention=attention))
        tokens = torch.zeros(len(requests), dtype=torch.int64, device=self.tokens.device)
        if ending:
            first = self._draw_first([requests[index] for index in ending], logits[ending])
            tokens[ending] = first
            slots = torch.tensor([rows[index].slot for index in ending], dtype=torch.int64, device=tokens.device)
            self.tokens[slots, 0] = first
        self._reselect(attention, [row.kv_len for row in rows])
        return tokens

    def _draw_first(self, requests: Sequence[PrefillRequest], logits: torch.Tensor) -> torch.Tensor:
        """int64 ``[num_requests]``: the first token of each; a retracted request comes back with output before it."""
        histories = {}
        for index, request in enumerate(requests):
            request.state.counts.catch_up(request.output_ids)
            histories[index] = OutputHistory(committed=request.output_ids, counts=request.state.counts)
        positions = [request.start + request.num_tokens for request in requests]
        return sample(
            logits,
            requests=[request.state.sampling for request in requests],
            rows=SampledRows(
                request_indices=range(len(requests)),
                positions=torch.tensor(positions, dtype=torch.int64, device=logits.device),
                histories=histories,
            ),
        )


def draft_limit(request: StepRequest) -> int:
    """Most drafts the request may hold: a verify of d drafts commits up to d + 1 tokens, and that many must be left."""
    return max(0, min(request.state.draft_max, request.tokens_left - 1))


def _decode_row(request: StepRequest, *, verifies: bool) -> Row:
    state, start = request.state, request.committed
    if verifies:
        return Row(state.slot, RowKind.VERIFY, start, state.held_drafts + 1, start)
    return Row(state.slot, RowKind.DRAFT, start + state.held_drafts, 1, start)


def _per_token(values: Iterable[int], rows: Sequence[Row], device: torch.device) -> torch.Tensor:
    """int64 ``[num_tokens]``: each row's value, repeated for its tokens."""
    repeats = torch.tensor([row.num_queries for row in rows], dtype=torch.int64)
    return torch.tensor(list(values), dtype=torch.int64).repeat_interleave(repeats).to(device)
