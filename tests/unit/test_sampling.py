"""One position at a time: SGLang's order and meaning of every parameter, and the contracts of ``sample``."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from aspire_sglang import sampling
from aspire_sglang.noise import gumbel_noise
from aspire_sglang.sampling import (
    OutputHistory,
    RequestSampling,
    SampledRows,
    TokenCounts,
    process_logits,
    rank_candidates,
    sample,
)

VOCAB = 50
PENALISED = RequestSampling(temperature=0.0, frequency_penalty=0.7, presence_penalty=0.4, repetition_penalty=1.3)


def make_logits(num_rows: int, vocab_size: int = VOCAB, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def rows_of(num_rows: int, histories: dict[int, OutputHistory] | None = None, first: int = 10) -> SampledRows:
    """Row i belongs to request i."""
    return SampledRows(
        request_indices=range(num_rows), positions=torch.arange(first, first + num_rows), histories=histories or {}
    )


def processed(logits: torch.Tensor, request: RequestSampling, output: Sequence[int] = (), drafts: int = 0) -> Any:
    """Processed logits of one row; the last ``drafts`` tokens of the output are drafts."""
    committed = list(output[: len(output) - drafts])
    history = OutputHistory(
        committed=committed, drafts=tuple(output[len(output) - drafts :]), counts=TokenCounts(committed)
    )
    return process_logits(logits, requests=[request], rows=rows_of(1, {0: history}), picked=[0])


# Contracts of sample()


def test_all_plain_rows_are_one_argmax_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "process_logits", lambda *_args, **_kwargs: pytest.fail("a plain row was processed"))
    logits = make_logits(4)
    requests = [RequestSampling(temperature=0.0), RequestSampling(top_k=1), RequestSampling(temperature=1e-7)]
    rows = SampledRows(request_indices=[0, 1, 2, 2], positions=torch.arange(4))
    assert torch.equal(sample(logits, requests=requests, rows=rows), logits.argmax(dim=1))


def test_argmax_drafts_of_unadjusted_requests_are_plain_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "process_logits", lambda *_args, **_kwargs: pytest.fail("a plain row was processed"))
    logits = make_logits(2)
    tokens = sample(logits, requests=[RequestSampling(top_p=0.5)] * 2, rows=rows_of(2), draft_argmax=[True, True])
    assert torch.equal(tokens, logits.argmax(dim=1))


def mixed_requests() -> list[RequestSampling]:
    return [
        RequestSampling(temperature=0.0),
        RequestSampling(temperature=0.8, seed=3),
        RequestSampling(temperature=1.2, top_p=0.7, seed=-4),
        RequestSampling(temperature=1.2, top_k=5, seed=2**64 - 1),
        RequestSampling(temperature=1.2, top_k=9, top_p=0.9, min_p=0.1, seed=5),
        RequestSampling(temperature=1.2, min_p=0.3, seed=6),
        RequestSampling(temperature=0.0, logit_bias={7: 100.0}),
        dataclasses.replace(PENALISED, temperature=0.9, seed=8),
        RequestSampling(temperature=1.0, seed=9, min_new_tokens=9, banned_until_min=(1, 2)),
    ]


def test_a_row_depends_on_itself_alone() -> None:
    requests = mixed_requests()
    logits = make_logits(len(requests))
    untouched = logits.clone()
    output = [3, 3, 8]
    history = OutputHistory(committed=output, drafts=(8, 1), counts=TokenCounts(output))
    histories = dict.fromkeys(range(len(requests)), history)
    together = sample(logits, requests=requests, rows=rows_of(len(requests), histories))
    assert torch.equal(logits, untouched)
    for row, request in enumerate(requests):
        alone = sample(
            logits[row : row + 1], requests=[request], rows=rows_of(1, {0: history}, first=10 + row), draft_argmax=False
        )
        assert int(alone) == int(together[row]), request
    backwards = SampledRows(
        request_indices=list(reversed(range(len(requests)))),
        positions=torch.arange(len(requests)).flip(0) + 10,
        histories=histories,
    )
    assert torch.equal(sample(logits.flip(0), requests=requests, rows=backwards).flip(0), together)


def test_half_precision_logits_are_processed_in_float32() -> None:
    logits = make_logits(1).to(torch.bfloat16)
    request = RequestSampling(temperature=0.7, logit_bias={0: 0.001}, seed=1)
    want = sample(logits.float(), requests=[request], rows=rows_of(1))
    assert torch.equal(sample(logits, requests=[request], rows=rows_of(1)), want)
    assert processed(logits, request).dtype == torch.float32


def test_draft_argmax_ignores_noise_but_not_adjustments() -> None:
    logits = make_logits(2)
    best = int(logits[0].argmax())
    request = RequestSampling(temperature=5.0, logit_bias={best: -100.0}, seed=1)
    rows = SampledRows(request_indices=[0, 0], positions=torch.tensor([4, 4]))
    tokens = sample(logits[:1].repeat(2, 1), requests=[request], rows=rows, draft_argmax=[True, False])
    assert int(tokens[0]) == int(logits[0].argsort(descending=True)[1])
    assert int(tokens[1]) != best


def test_a_drawn_token_is_the_argmax_of_scaled_logits_plus_noise() -> None:
    logits = make_logits(200)
    requests = [RequestSampling(temperature=0.6, seed=i * 31) for i in range(200)]
    rows = rows_of(200)
    noise = gumbel_noise(torch.arange(200) * 31, positions=rows.positions, vocab_size=VOCAB)
    assert torch.equal(sample(logits, requests=requests, rows=rows), (logits / 0.6 + noise).argmax(dim=1))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("request_index", range(9))
def test_non_finite_logits_give_a_token_of_the_vocabulary(bad: float, request_index: int) -> None:
    request = mixed_requests()[request_index]
    history = OutputHistory(committed=[1], counts=TokenCounts([1]))
    for logits in (make_logits(1).index_fill(1, torch.tensor([1, 4]), bad), torch.full((1, VOCAB), bad)):
        token = int(sample(logits, requests=[request], rows=rows_of(1, {0: history})))
        assert 0 <= token < VOCAB
    if bad == math.inf:
        some = make_logits(1).index_fill(1, torch.tensor([30]), bad)
        assert int(sample(some, requests=[request], rows=rows_of(1, {0: history}))) == 30


def test_errors_name_the_row_and_the_fix() -> None:
    logits = make_logits(1)
    with pytest.raises(ValueError, match="row 0 has no output history"):
        sample(logits, requests=[PENALISED], rows=rows_of(1))
    stale = OutputHistory(committed=[1, 2], counts=TokenCounts([1]))
    with pytest.raises(ValueError, match=r"1 tokens counted.*2 committed.*catch_up"):
        sample(logits, requests=[PENALISED], rows=rows_of(1, {0: stale}))
    with pytest.raises(ValueError, match="wanted"):
        sample(logits, requests=[PENALISED], rows=rows_of(2))
    with pytest.raises(ValueError, match="2 flags"):
        sample(logits, requests=[PENALISED], rows=rows_of(1), draft_argmax=[True, True])


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": -1.0},
        {"temperature": math.nan},
        {"top_k": 0},
        {"top_p": 0.0},
        {"min_p": 1.5},
        {"repetition_penalty": 0.0},
        {"min_new_tokens": -1},
    ],
)
def test_values_out_of_range_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(values))):
        RequestSampling(**values)


# Penalties, bans, bias, processors


def test_three_tokens_at_once_count_as_three_steps() -> None:
    at_once, singly = TokenCounts(), TokenCounts()
    output = [4, 9, 4]
    at_once.catch_up(output)
    for end in (1, 2, 3):
        singly.catch_up(output[:end])
        singly.dense(VOCAB, torch.device("cpu"))
        singly.catch_up(output[:end])  # a draft-only step: nothing new
    assert at_once.as_dict() == singly.as_dict() == {4: 2, 9: 1}
    assert at_once.num_tokens == singly.num_tokens == 3
    assert torch.equal(at_once.dense(VOCAB, torch.device("cpu")), singly.dense(VOCAB, torch.device("cpu")))
    with pytest.raises(ValueError, match="cut back"):
        at_once.catch_up([4])


def test_dense_counts_survive_another_width() -> None:
    counts = TokenCounts([1, 1, 2])
    assert counts.dense(4, torch.device("cpu")).tolist() == [0, 2, 1, 0]
    assert counts.dense(6, torch.device("cpu")).tolist() == [0, 2, 1, 0, 0, 0]


def test_position_j_counts_the_drafts_before_it() -> None:
    logits = make_logits(1)
    output = [5, 6, 5, 7, 5]
    request = dataclasses.replace(PENALISED, min_new_tokens=5, banned_until_min=(0, 3))
    for num_drafts in range(6):
        assert torch.equal(processed(logits, request, output, drafts=num_drafts), processed(logits, request, output))
    committed = [5, 6]
    shared = TokenCounts(committed)
    histories = {
        j: OutputHistory(committed=committed, drafts=tuple(output[2 : 2 + j]), counts=shared) for j in range(4)
    }
    rows = SampledRows(request_indices=[0] * 4, positions=torch.arange(4), histories=histories)
    run = process_logits(logits.repeat(4, 1), requests=[request], rows=rows, picked=range(4))
    for j in range(4):
        assert torch.equal(run[j], processed(logits, request, output[: 2 + j])[0])
    assert shared.as_dict() == {5: 1, 6: 1}
    assert shared.dense(VOCAB, torch.device("cpu"))[5] == 1  # drafts were counted in the rows only


def test_penalties_by_hand() -> None:
    logits = torch.tensor([[2.0, -1.0, 0.5, 3.0]])
    request = RequestSampling(frequency_penalty=0.5, presence_penalty=0.25, repetition_penalty=2.0)
    got = processed(logits, request, [0, 0, 1, 2])
    # 2 - 2 * 0.5 - 0.25 = 0.75, halved; -1 - 0.75 = -1.75, doubled; 0.5 - 0.75 < 0, so doubled after the subtraction
    torch.testing.assert_close(got, torch.tensor([[0.375, -3.5, -0.5, 3.0]]))


def test_min_new_tokens_bans_until_so_many_tokens_precede() -> None:
    request = RequestSampling(min_new_tokens=3, banned_until_min=(1, 999), logit_bias={1: 100.0})
    logits = make_logits(1)
    for num_tokens in range(5):
        is_banned = bool(processed(logits, request, [0] * num_tokens, drafts=num_tokens // 2)[0, 1] < -1e29)
        assert is_banned == (num_tokens < 3)


def test_processor_sees_penalised_biased_logits_and_the_output_and_may_write_in_place() -> None:
    seen: list[tuple[torch.Tensor, list[int]]] = []

    def processor(logits: torch.Tensor, output_ids: Sequence[int]) -> torch.Tensor:
        seen.append((logits.clone(), list(output_ids)))
        return logits.fill_(0.0).index_fill_(1, torch.tensor([7]), 1.0)

    logits = make_logits(2)
    plain = dataclasses.replace(PENALISED, logit_bias={3: 2.0})
    output = [3, 4, 4]
    history = OutputHistory(committed=output[:1], drafts=output[1:], counts=TokenCounts(output[:1]))
    requests = [RequestSampling(temperature=0.0), dataclasses.replace(plain, processor=processor)]
    untouched = logits.clone()
    tokens = sample(logits, requests=requests, rows=rows_of(2, {1: history}))
    assert tokens.tolist() == [int(logits[0].argmax()), 7]
    assert torch.equal(logits, untouched)
    assert seen[0][1] == output
    assert torch.equal(seen[0][0], processed(logits[1:], plain, output))


# top-k, top-p, min-p


def kept_tokens(probs: list[float], **values: Any) -> set[int]:
    request = RequestSampling(**values)
    scaled = torch.tensor([probs]).log()
    candidates, scores = rank_candidates(scaled, requests=[request], num_candidates=len(probs))
    return set(candidates[0][scores[0] > -math.inf].tolist())


@pytest.mark.parametrize(
    ("values", "want"),
    [
        ({"top_p": 0.49}, {2}),
        ({"top_p": 0.51}, {2, 0}),  # the token that crosses the threshold stays
        ({"top_p": 0.79}, {2, 0}),
        ({"top_p": 1.0}, {0, 1, 2, 3}),
        ({"top_k": 3}, {2, 0, 3}),
        ({"top_k": 3, "top_p": 0.6}, {2, 0}),  # judged on raw probabilities, not on those that top-k leaves
        ({"top_k": 2, "top_p": 0.55}, {2, 0}),  # renormalised after top-k, 0.5 / 0.8 = 0.625 would have dropped token 0
        ({"top_p": 0.99, "min_p": 0.25}, {2, 0, 3}),
        ({"top_p": 0.99, "min_p": 1.0}, {2}),
    ],
)
def test_filters_by_hand(values: dict[str, Any], want: set[int]) -> None:
    assert kept_tokens([0.3, 0.05, 0.5, 0.15], **values) == want


def test_ties_rank_by_token_id_in_both_selections() -> None:
    scaled = torch.tensor([[0.0, 1.0, -0.0, 1.0, 0.0, -2.0, 1.0]])
    few, _ = rank_candidates(scaled, requests=[RequestSampling(top_k=5)], num_candidates=5)
    full, _ = rank_candidates(scaled, requests=[RequestSampling(top_k=5)], num_candidates=7)
    assert few.tolist() == [[1, 3, 6, 0, 2]]
    assert full[:, :5].tolist() == few.tolist()


def test_partial_selection_equals_the_full_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = (make_logits(300) * 4).round() / 4  # many ties
    requests = [RequestSampling(temperature=1.5, top_k=1 + i % 40 + 1, top_p=0.9, seed=i) for i in range(300)]
    few = sample(logits, requests=requests, rows=rows_of(300))
    monkeypatch.setattr(sampling, "FEW_CANDIDATES", 0)
    assert torch.equal(sample(logits, requests=requests, rows=rows_of(300)), few)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_draws_the_cpu_tokens_without_host_synchronisation() -> None:
    requests = mixed_requests()
    logits = make_logits(len(requests), vocab_size=5000)
    output = [3, 3, 8]
    tokens = []
    for device in ("cpu", "cuda"):
        history = OutputHistory(committed=output, drafts=(8, 1), counts=TokenCounts(output))
        rows = SampledRows(
            request_indices=range(len(requests)),
            positions=torch.arange(len(requests), device=device),
            histories=dict.fromkeys(range(len(requests)), history),
        )
        on_device = logits.to(device)
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        try:
            tokens.append(sample(on_device, requests=requests, rows=rows))
        finally:
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(tokens[1].cpu(), tokens[0])
