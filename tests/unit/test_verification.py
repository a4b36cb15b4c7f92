"""The acceptance rule, and what it is for: a speculated text is the plain one, in law and token for token."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence

import pytest
import torch
from scipy import stats

from aspire_sglang.sampling import OutputHistory, RequestSampling, SampledRows, TokenCounts, sample
from aspire_sglang.verification import PAD_TOKEN_ID, accept_drafts, pad_targets

VOCAB = 6
DRAFT_MAX = 3
PROMPT_LEN = 5
NUM_SAMPLES = 20_000
LAW_TOKENS = 3
MIN_P_VALUE = 1e-4


pytestmark = pytest.mark.usefixtures("one_thread")


# The rule itself


def accept_by_hand(drafts: Sequence[int], targets: Sequence[int]) -> list[int]:
    committed = []
    for draft, target in zip(drafts, targets, strict=False):
        if draft != target:
            break
        committed.append(draft)
    return [*committed, targets[len(committed)]]


def test_equals_the_rule_row_by_row() -> None:
    generator = torch.Generator().manual_seed(0)
    drafts = torch.randint(2, (500, 7), generator=generator)
    targets = torch.randint(2, (500, 8), generator=generator)
    num_drafts = torch.randint(8, (500,), generator=generator)
    before = drafts.clone(), targets.clone()
    result = accept_drafts(drafts, num_drafts=num_drafts, targets=targets)
    assert torch.equal(drafts, before[0])
    assert torch.equal(targets, before[1])
    for row in range(500):
        d = int(num_drafts[row])
        want = accept_by_hand(drafts[row, :d].tolist(), targets[row, : d + 1].tolist())
        count = int(result.counts[row])
        assert result.committed[row, :count].tolist() == want
        assert (result.committed[row, count:] == PAD_TOKEN_ID).all()
        assert int(result.accepted[row]) == count - 1
        assert int(result.last[row]) == want[-1]


@pytest.mark.parametrize(
    ("drafts", "num_drafts", "targets", "want"),
    [
        ([9, 9, 9], 0, [4, 9, 9, 9], [4]),  # no drafts: plain decoding, whatever the padding holds
        ([4, 5, 6], 3, [4, 5, 6, 7], [4, 5, 6, 7]),
        ([4, 5, 6], 2, [4, 5, 6, 7], [4, 5, 6]),  # an equal token past num_drafts is not accepted
        ([4, 1, 6], 3, [4, 5, 6, 7], [4, 5]),  # equality after the first difference is not accepted
        ([1, 5, 6], 3, [4, 5, 6, 7], [4]),
    ],
)
def test_cases(drafts: list[int], num_drafts: int, targets: list[int], want: list[int]) -> None:
    result = accept_drafts(
        torch.tensor([drafts]), num_drafts=torch.tensor([num_drafts]), targets=torch.tensor([targets])
    )
    assert result.committed[0, : int(result.counts[0])].tolist() == want


def test_widths_of_zero() -> None:
    none = accept_drafts(
        torch.empty(2, 0, dtype=torch.int64),
        num_drafts=torch.zeros(2, dtype=torch.int64),
        targets=torch.tensor([[3], [4]]),
    )
    assert none.committed.tolist() == [[3], [4]]
    assert none.counts.tolist() == [1, 1]
    empty = torch.empty(0, dtype=torch.int64)
    nobody = accept_drafts(empty.view(0, 2), num_drafts=empty, targets=empty.view(0, 3))
    assert nobody.committed.shape == (0, 3)
    assert pad_targets(empty, offsets=empty, num_drafts=empty, width=3).shape == (0, 3)


def test_ragged_targets() -> None:
    targets = torch.tensor([10, 11, 12, 20, 30, 31])
    padded = pad_targets(targets, offsets=torch.tensor([0, 3, 4]), num_drafts=torch.tensor([2, 0, 1]), width=4)
    assert padded.tolist() == [[10, 11, 12, 0], [20, 0, 0, 0], [30, 31, 0, 0]]


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="wanted"):
        accept_drafts(torch.zeros(2, 3), num_drafts=torch.zeros(2), targets=torch.zeros(2, 3))
    with pytest.raises(ValueError, match="wanted"):
        pad_targets(torch.zeros(2, 3), offsets=torch.zeros(2), num_drafts=torch.zeros(2), width=3)


# A tiny target and a different draft model: logits by the last two tokens (VOCAB stands for "before the output")


def make_tables() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    target = torch.randn(VOCAB + 1, VOCAB + 1, VOCAB, generator=generator) * 1.5
    draft = target + torch.randn(target.shape, generator=generator) * 0.7
    return target, draft


TARGET, DRAFT = make_tables()


class Decoder:
    """Draft, verify and commit for many requests at once, on the functions under test."""

    def __init__(self, requests: Sequence[RequestSampling], num_tokens: int, *, draft_argmax: bool) -> None:
        self.requests = requests
        self.num_tokens = num_tokens
        self.draft_argmax = draft_argmax
        self.lens = torch.zeros(len(requests), dtype=torch.int64)
        self.text = torch.full((len(requests), 2 + num_tokens + 2 * DRAFT_MAX), VOCAB)
        self.outputs: list[list[int]] = [[] for _ in requests]
        self.counts = [TokenCounts() for _ in requests]
        self.num_accepted = 0

    def run(self, draft_lengths: Callable[[int], torch.Tensor]) -> torch.Tensor:
        """Decode until every request has its tokens; ``draft_lengths(n)`` draws the next cycle's lengths."""
        while True:
            active = (self.lens < self.num_tokens).nonzero().squeeze(1)
            if len(active) == 0:
                return self.text[:, 2 : 2 + self.num_tokens]
            self.cycle(active, draft_lengths(len(active)))

    def cycle(self, active: torch.Tensor, num_drafts: torch.Tensor) -> None:
        drafts = torch.full((len(active), DRAFT_MAX), PAD_TOKEN_ID)
        for step in range(int(num_drafts.max())):
            drafting = (num_drafts > step).nonzero().squeeze(1)
            members = active[drafting]
            ids = self.produce(members, [step] * len(members), drafts[drafting], DRAFT, self.draft_argmax)
            drafts[drafting, step] = ids
            self.text[members, 2 + self.lens[members] + step] = ids
        widths = num_drafts + 1
        of_row = torch.arange(len(active)).repeat_interleave(widths)
        offsets = widths.cumsum(0) - widths
        places = (torch.arange(len(of_row)) - offsets[of_row]).tolist()
        ragged = self.produce(active[of_row], places, drafts[of_row], TARGET, False)
        targets = pad_targets(ragged, offsets=offsets, num_drafts=num_drafts, width=DRAFT_MAX + 1)
        result = accept_drafts(drafts, num_drafts=num_drafts, targets=targets)
        self.commit(active, result.committed, result.counts)

    def produce(
        self, members: torch.Tensor, places: list[int], drafts: torch.Tensor, table: torch.Tensor, argmax: bool
    ) -> torch.Tensor:
        """Tokens of rows at output index len + place, after ``place`` drafts."""
        index = self.lens[members] + torch.tensor(places)
        logits = table[self.text[members, index], self.text[members, index + 1]]
        histories = {}
        for row, (member, place) in enumerate(zip(members.tolist(), places, strict=True)):
            if self.requests[member].needs_history:
                histories[row] = OutputHistory(
                    committed=self.outputs[member],
                    drafts=drafts[row, :place].tolist(),
                    counts=self.counts[member],
                )
        rows = SampledRows(request_indices=members.tolist(), positions=PROMPT_LEN + index, histories=histories)
        return sample(logits, requests=self.requests, rows=rows, draft_argmax=argmax)

    def commit(self, members: torch.Tensor, committed: torch.Tensor, counts: torch.Tensor) -> None:
        columns = 2 + self.lens[members][:, None] + torch.arange(committed.shape[1])
        self.text[members[:, None], columns] = committed  # what lies past the counts is overwritten before it is read
        self.lens[members] += counts
        self.num_accepted += int(counts.sum()) - len(counts)
        for row, member in enumerate(members.tolist()):
            if self.requests[member].needs_history:
                self.outputs[member].extend(committed[row, : int(counts[row])].tolist())
                self.counts[member].catch_up(self.outputs[member])


def speculated(
    requests: Sequence[RequestSampling],
    num_tokens: int,
    *,
    draft_argmax: bool = False,
    draft_max: int = DRAFT_MAX,
    seed: int = 0,
) -> torch.Tensor:
    """Every cycle of every request drafts 0..draft_max tokens, at random."""
    generator = torch.Generator().manual_seed(seed)
    decoder = Decoder(requests, num_tokens, draft_argmax=draft_argmax)
    tokens = decoder.run(lambda n: torch.randint(draft_max + 1, (n,), generator=generator))
    assert decoder.num_accepted > 0
    return tokens


def plain(requests: Sequence[RequestSampling], num_tokens: int) -> torch.Tensor:
    return Decoder(requests, num_tokens, draft_argmax=False).run(lambda n: torch.zeros(n, dtype=torch.int64))


# In law


def reference_law(logits: list[float], request: RequestSampling, output: Sequence[int]) -> list[float]:
    """Probabilities of the next token, from the definitions, in Python floats."""
    values = list(logits)
    for token in set(output):
        values[token] -= request.frequency_penalty * output.count(token) + request.presence_penalty
        scale = request.repetition_penalty
        values[token] = values[token] * scale if values[token] < 0 else values[token] / scale
    if len(output) < request.min_new_tokens:
        for token in request.banned_until_min:
            values[token] = -math.inf
    for token, bias in (request.logit_bias or {}).items():
        values[token] += bias
    weights = [math.exp((value - max(values)) / request.temperature) for value in values]
    probs = [weight / sum(weights) for weight in weights]
    order = sorted(range(VOCAB), key=lambda token: -probs[token])
    kept, before = [0.0] * VOCAB, 0.0
    for rank, token in enumerate(order):
        is_kept = rank < request.top_k
        if is_kept and before <= request.top_p and probs[token] >= request.min_p * probs[order[0]]:
            kept[token] = probs[token]
        before += probs[token]
    return [prob / sum(kept) for prob in kept]


def joint_law(request: RequestSampling) -> torch.Tensor:
    """Exact probability of every first LAW_TOKENS tokens: float64 ``[VOCAB ** LAW_TOKENS]``."""
    law = []
    for tokens in itertools.product(range(VOCAB), repeat=LAW_TOKENS):
        prob, context = 1.0, [VOCAB, VOCAB, *tokens]
        for index, token in enumerate(tokens):
            logits = TARGET[context[index], context[index + 1]].tolist()
            prob *= reference_law(logits, request, tokens[:index])[token]
        law.append(prob)
    return torch.tensor(law, dtype=torch.float64)


def p_value(tokens: torch.Tensor, law: torch.Tensor) -> float:
    """Chi-square of the observed first tokens; rare outcomes are pooled, impossible ones must not occur."""
    cells = (tokens[:, :LAW_TOKENS] * torch.tensor([VOCAB**2, VOCAB, 1])).sum(dim=1)
    observed = torch.bincount(cells, minlength=VOCAB**LAW_TOKENS).double()
    assert (observed[law == 0] == 0).all()
    expected = law * len(tokens)
    is_common = expected >= 5
    observed = torch.cat([observed[is_common], observed[~is_common].sum()[None]])
    expected = torch.cat([expected[is_common], expected[~is_common].sum()[None]])
    if expected[-1] < 1:  # too rare to test, and not to be divided by
        assert observed[-1] <= 10
        observed, expected = observed[:-1], expected[:-1] * observed[:-1].sum() / expected[:-1].sum()
    return float(stats.chisquare(observed.numpy(), expected.numpy()).pvalue)


LAWS = {
    "temperature": RequestSampling(temperature=0.7),
    "top_k": RequestSampling(temperature=0.9, top_k=3),
    "top_p": RequestSampling(temperature=1.1, top_p=0.8),
    "min_p": RequestSampling(temperature=1.2, min_p=0.15),
    "bias": RequestSampling(temperature=1.0, logit_bias={0: -100.0, 3: 1.5}),
    "additive": RequestSampling(temperature=0.8, frequency_penalty=1.2, presence_penalty=0.6),
    "everything": RequestSampling(
        temperature=1.1,
        top_k=5,
        top_p=0.95,
        min_p=0.02,
        repetition_penalty=1.8,
        frequency_penalty=-0.5,
        min_new_tokens=2,
        banned_until_min=(1, 4),
        logit_bias={2: 0.7},
    ),
}


def with_seeds(request: RequestSampling, count: int) -> list[RequestSampling]:
    return [dataclasses.replace(request, seed=seed) for seed in range(count)]


@pytest.mark.parametrize("name", LAWS)
def test_speculated_text_has_the_targets_law(name: str) -> None:
    tokens = speculated(with_seeds(LAWS[name], NUM_SAMPLES), LAW_TOKENS, draft_max=LAW_TOKENS - 1)
    assert p_value(tokens, joint_law(LAWS[name])) > MIN_P_VALUE


def test_argmax_drafts_keep_the_law() -> None:
    request = RequestSampling(temperature=1.3, min_p=0.05)
    tokens = speculated(with_seeds(request, NUM_SAMPLES), LAW_TOKENS, draft_argmax=True, draft_max=LAW_TOKENS - 1)
    assert p_value(tokens, joint_law(request)) > MIN_P_VALUE


def test_the_law_test_has_power() -> None:
    tokens = plain(with_seeds(RequestSampling(temperature=0.75), NUM_SAMPLES), LAW_TOKENS)
    assert p_value(tokens, joint_law(RequestSampling(temperature=0.7))) < 1e-6


# Token for token


def force_every_fifth(logits: torch.Tensor, output_ids: Sequence[int]) -> torch.Tensor:
    """A processor that looks at the output only: token 5 at output positions 4, 9, 14, ..."""
    if len(output_ids) % 5 == 4:
        logits[:, torch.arange(logits.shape[1]) != 5] = -math.inf
    return logits


EXACT = [
    *LAWS.values(),
    RequestSampling(temperature=0.0),
    RequestSampling(top_k=1, frequency_penalty=1.0),
    RequestSampling(temperature=0.0, repetition_penalty=1.5, presence_penalty=-0.3),
    RequestSampling(temperature=0.0, min_new_tokens=11, banned_until_min=(2,), logit_bias={2: 100.0}),
    RequestSampling(temperature=1.0, processor=force_every_fifth),
    RequestSampling(temperature=0.0, processor=force_every_fifth, frequency_penalty=0.4),
]


@pytest.mark.parametrize("draft_argmax", [False, True], ids=["coupled", "argmax"])
def test_the_seed_alone_determines_the_text(draft_argmax: bool) -> None:
    requests = [dataclasses.replace(request, seed=1000 + i) for i in range(4) for request in EXACT]
    want = plain(requests, 18)
    for schedule in range(2):
        assert torch.equal(speculated(requests, 18, draft_argmax=draft_argmax, seed=schedule), want)


def test_coupled_drafts_are_accepted_more_often_than_argmax_drafts() -> None:
    requests = with_seeds(RequestSampling(temperature=1.0), 500)
    accepted = []
    for draft_argmax in (False, True):
        decoder = Decoder(requests, 20, draft_argmax=draft_argmax)
        decoder.run(lambda n: torch.full((n,), DRAFT_MAX))
        accepted.append(decoder.num_accepted)
    assert accepted[0] > accepted[1]


def test_a_ban_holds_at_every_position_of_a_run() -> None:
    tokens = speculated(with_seeds(RequestSampling(temperature=1.0, logit_bias={1: -100.0, 4: -100.0}), 50), 64)
    assert not torch.isin(tokens, torch.tensor([1, 4])).any()


def test_min_p_of_one_is_greedy() -> None:
    greedy = plain([RequestSampling(temperature=0.0)], 40)
    tokens = speculated(with_seeds(RequestSampling(temperature=1.0, min_p=1.0), 50), 40)
    assert torch.equal(tokens, greedy.expand_as(tokens))


def test_a_processor_acts_on_exact_positions() -> None:
    requests = with_seeds(RequestSampling(temperature=1.0, processor=force_every_fifth, logit_bias={5: -8.0}), 50)
    tokens = speculated(requests, 40)
    assert (tokens[:, 4::5] == 5).all()
    others = torch.ones(40, dtype=torch.bool)
    others[4::5] = False
    assert (tokens[:, others] == 5).float().mean() < 0.01


def test_min_new_tokens_counts_tokens() -> None:
    request = RequestSampling(temperature=0.0, min_new_tokens=20, banned_until_min=(2,), logit_bias={2: 100.0})
    for schedule in range(5):
        tokens = speculated([request] * 10, 30, seed=schedule)
        assert (tokens[:, :20] != 2).all()
        assert (tokens[:, 20:] == 2).all()


def test_frequency_penalty_at_temperature_zero() -> None:
    requests = [RequestSampling(temperature=0.0, frequency_penalty=1.0)] * 20
    tokens = speculated(requests, 40)
    assert torch.equal(tokens, plain(requests, 40))
    assert not torch.equal(tokens[0], plain([RequestSampling(temperature=0.0)], 40)[0])
