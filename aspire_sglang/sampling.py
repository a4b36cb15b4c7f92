"""From logits to tokens, position by position, with SGLang's order and meaning of every sampling parameter.

The token at a position is ``argmax(processed logits / temperature + noise(seed, position))`` over the tokens that
top-k, top-p and min-p leave, or the plain argmax for a greedy request. Order as in SGLang 0.5.17
(``ModelRunner.sample``, then ``Sampler.forward`` with its PyTorch backend):

1. frequency and presence penalties subtracted, ``min_new_tokens`` bans, then the repetition penalty: output tokens only
2. grammar mask: not here; apply it to the logits beforehand (-inf survives every later step)
3. ``logit_bias`` added
4. custom processor
5. non-finite logits clamped (SGLang does so under SGLANG_SANITIZE_NAN_LOGITS only)
6. temperature, softmax, then top-k, top-p and min-p, all judged on these same probabilities, never renormalised

A row of a verify counts as output what was committed and the drafts before it, so each position of a run is treated as
if the run had been produced one token at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum, auto

import torch

from aspire_sglang.noise import gumbel_noise, gumbel_noise_at
from aspire_sglang.sampling_records import (
    TOP_K_ALL,
    OutputHistory,
    RequestSampling,
    SampledRows,
    TokenCounts,
    host_to_device,
)

__all__ = [
    "OutputHistory",
    "RequestSampling",
    "SampledRows",
    "TokenCounts",
    "process_logits",
    "rank_candidates",
    "sample",
]

FEW_CANDIDATES = 1024
"""Requests with a ``top_k`` up to this are ranked by a partial selection, others by a full sort of the vocabulary."""
_CLAMP = 1e30


def sample(
    logits: torch.Tensor,
    *,
    requests: Sequence[RequestSampling],
    rows: SampledRows,
    draft_argmax: Sequence[bool] | bool = False,
) -> torch.Tensor:
    """The token of every row: int64 ``[T]`` on the logits' device.

    ``logits``: ``[T, V]``, any float dtype (adjusted rows are computed in float32). Not modified. ``draft_argmax``: per
    row or for all, True = the argmax of the processed logits, without noise (drafts under ``sampling="argmax"``).

    When every row is plain this is one argmax over ``logits`` without a copy. Otherwise only the other rows are copied
    and processed; a row's token never depends on the other rows. A NaN in a plain row counts as its largest value, as
    in ``torch.argmax``; in other rows as its smallest. No host synchronisation of its own (host lists go through pinned
    memory); a custom processor may add some. Raises ``ValueError`` on shapes or on a missing or stale history.
    """
    flags = [draft_argmax] * len(rows.request_indices) if isinstance(draft_argmax, bool) else draft_argmax
    _check_shapes(logits, rows, flags)
    of_row = [requests[index] for index in rows.request_indices]
    is_drawn = [not (flag or request.is_greedy) for flag, request in zip(flags, of_row, strict=True)]
    picked = [row for row, request in enumerate(of_row) if is_drawn[row] or request.is_adjusted]
    if not picked:
        return torch.argmax(logits, dim=-1)
    scores = process_logits(logits, requests=requests, rows=rows, picked=picked)
    index = host_to_device(picked, dtype=torch.int64, device=logits.device)
    drawn = [place for place, row in enumerate(picked) if is_drawn[row]]
    chosen = _choose(
        scores, requests=[of_row[row] for row in picked], positions=rows.positions.index_select(0, index), drawn=drawn
    )
    if len(picked) == len(of_row):
        return chosen
    return torch.argmax(logits, dim=-1).index_copy_(0, index, chosen)


def _check_shapes(logits: torch.Tensor, rows: SampledRows, flags: Sequence[bool]) -> None:
    num_rows = len(rows.request_indices)
    if logits.dim() != 2 or logits.shape[0] != num_rows or rows.positions.shape != (num_rows,):
        raise ValueError(
            f"logits {tuple(logits.shape)}, {num_rows} request indices, positions {tuple(rows.positions.shape)}: "
            "wanted [T, V], T and [T]"
        )
    if len(flags) != num_rows:
        raise ValueError(f"draft_argmax has {len(flags)} flags for {num_rows} rows")


def process_logits(
    logits: torch.Tensor, *, requests: Sequence[RequestSampling], rows: SampledRows, picked: Sequence[int]
) -> torch.Tensor:
    """Steps 1 and 3 to 5 of the module's list for the rows in ``picked``: new float32 ``[len(picked), V]``.

    The log-softmax of the result over the temperature is what SGLang reports as log-probabilities.
    ``logits`` is not modified. Raises ``ValueError`` on a missing or stale history.
    """
    device = logits.device
    index = host_to_device(picked, dtype=torch.int64, device=device)
    scores = logits.index_select(0, index).to(torch.float32)
    of_row = [requests[rows.request_indices[row]] for row in picked]
    histories = [_history_of(row, request, rows) for row, request in zip(picked, of_row, strict=True)]
    _apply_penalties(scores, of_row, histories)
    _ban_until_min(scores, of_row, histories)
    _add_logit_bias(scores, of_row)
    for place, (request, history) in enumerate(zip(of_row, histories, strict=True)):
        if request.processor is not None:
            output_ids = [*history.committed, *history.drafts]
            scores[place : place + 1] = request.processor(scores[place : place + 1].clone(), output_ids)
    return scores.nan_to_num_(nan=-_CLAMP, posinf=_CLAMP, neginf=-_CLAMP)


_NO_HISTORY = OutputHistory(committed=())


def _history_of(row: int, request: RequestSampling, rows: SampledRows) -> OutputHistory:
    """The row's history, checked against what its request needs."""
    if not request.needs_history:
        return _NO_HISTORY
    history = rows.histories.get(row)
    if history is None:
        raise ValueError(f"row {row} has no output history; its request has penalties, min_new_tokens or a processor")
    if request.has_penalties:
        counted = None if history.counts is None else history.counts.num_tokens
        if counted != len(history.committed):
            raise ValueError(
                f"row {row}: {counted} tokens counted for penalties, {len(history.committed)} committed; "
                "call TokenCounts.catch_up with the committed output first"
            )
    return history


def _apply_penalties(
    scores: torch.Tensor, requests: Sequence[RequestSampling], histories: Sequence[OutputHistory]
) -> None:
    """In place on float32 ``[P, V]``: frequency and presence subtracted, then repetition scales towards -inf."""
    places = [place for place, request in enumerate(requests) if request.has_penalties]
    if not places:
        return
    device = scores.device
    counts = _count_tokens([histories[place] for place in places], vocab_size=scores.shape[1], device=device)
    settings = host_to_device(
        [
            [requests[place].frequency_penalty, requests[place].presence_penalty, requests[place].repetition_penalty]
            for place in places
        ],
        dtype=torch.float32,
        device=device,
    )
    frequency, presence, repetition = settings.unsqueeze(2).unbind(1)
    is_present = counts > 0
    index = host_to_device(places, dtype=torch.int64, device=device)
    penalised = scores.index_select(0, index)
    penalised -= counts * frequency
    penalised -= is_present * presence
    scale = torch.where(is_present, repetition, 1.0)
    scores.index_copy_(0, index, torch.where(penalised < 0, penalised * scale, penalised / scale))


def _count_tokens(histories: Sequence[OutputHistory], *, vocab_size: int, device: torch.device) -> torch.Tensor:
    """int32 ``[P, V]``: committed occurrences, one row per history, plus its drafts."""
    slots: dict[int, int] = {}
    tables: list[torch.Tensor] = []
    of_row: list[int] = []
    for history in histories:
        assert history.counts is not None  # checked by _history_of
        if id(history.counts) not in slots:
            slots[id(history.counts)] = len(tables)
            tables.append(history.counts.dense(vocab_size, device))
        of_row.append(slots[id(history.counts)])
    counts = torch.stack(tables).index_select(0, host_to_device(of_row, dtype=torch.int64, device=device))
    flat = [place * vocab_size + token for place, history in enumerate(histories) for token in history.drafts]
    if flat:
        index = host_to_device(flat, dtype=torch.int64, device=device)
        counts.view(-1).index_add_(0, index, torch.ones_like(index, dtype=torch.int32))
    return counts


def _ban_until_min(
    scores: torch.Tensor, requests: Sequence[RequestSampling], histories: Sequence[OutputHistory]
) -> None:
    """In place: stop tokens become -inf in rows that have fewer than ``min_new_tokens`` output tokens before them."""
    vocab_size = scores.shape[1]
    flat = [
        place * vocab_size + token
        for place, (request, history) in enumerate(zip(requests, histories, strict=True))
        if history.num_tokens < request.min_new_tokens
        for token in request.banned_until_min
        if 0 <= token < vocab_size
    ]
    if flat:
        scores.view(-1).index_fill_(0, host_to_device(flat, dtype=torch.int64, device=scores.device), -math.inf)


def _add_logit_bias(scores: torch.Tensor, requests: Sequence[RequestSampling]) -> None:
    """In place: each request's bias on its own rows."""
    vocab_size = scores.shape[1]
    entries = [
        (place * vocab_size + token, bias)
        for place, request in enumerate(requests)
        for token, bias in (request.logit_bias or {}).items()
    ]
    if entries:
        index = host_to_device([place for place, _ in entries], dtype=torch.int64, device=scores.device)
        values = host_to_device([bias for _, bias in entries], dtype=torch.float32, device=scores.device)
        scores.view(-1).index_add_(0, index, values)


def _choose(
    scores: torch.Tensor, *, requests: Sequence[RequestSampling], positions: torch.Tensor, drawn: Sequence[int]
) -> torch.Tensor:
    """int64 ``[P]``: argmax of each row of ``scores``; rows in ``drawn`` with temperature, filters and noise."""
    vocab_size = scores.shape[1]
    if len(drawn) < len(requests):
        chosen = torch.argmax(scores, dim=-1)
    else:
        chosen = torch.empty(len(requests), dtype=torch.int64, device=scores.device)
    groups: dict[_Ranking, list[int]] = {}
    for place in drawn:
        groups.setdefault(_ranking_of(requests[place], vocab_size), []).append(place)
    for ranking, places in groups.items():
        index = host_to_device(places, dtype=torch.int64, device=scores.device)
        members = [requests[place] for place in places]
        scaled = _scale(scores.index_select(0, index), members)
        seeds = host_to_device([_signed64(member.seed) for member in members], dtype=torch.int64, device=scores.device)
        where = positions.index_select(0, index)
        if ranking is _Ranking.NONE:
            scaled = _filter_min_p(scaled, members)
            tokens = (scaled + gumbel_noise(seeds, positions=where, vocab_size=vocab_size)).argmax(dim=-1)
        else:
            num_best = vocab_size if ranking is _Ranking.ALL else max(member.top_k for member in members)
            candidates, scaled = rank_candidates(scaled, requests=members, num_candidates=num_best)
            best = (scaled + gumbel_noise_at(seeds, positions=where, token_ids=candidates)).argmax(dim=-1)
            tokens = candidates.gather(1, best[:, None]).squeeze(1)
        chosen.index_copy_(0, index, tokens)
    return chosen


class _Ranking(Enum):
    """How much of the vocabulary a request's filters need in order; its own parameters alone decide."""

    NONE = auto()
    BEST = auto()
    ALL = auto()


def _ranking_of(request: RequestSampling, vocab_size: int) -> _Ranking:
    if 0 < request.top_k < vocab_size:
        return _Ranking.BEST if request.top_k <= FEW_CANDIDATES else _Ranking.ALL
    return _Ranking.NONE if request.top_p >= 1.0 else _Ranking.ALL


def _scale(scores: torch.Tensor, requests: Sequence[RequestSampling]) -> torch.Tensor:
    """Over the temperature. The maximum is taken off first, so that float32 resolves the likely tokens best."""
    values = [request.temperature for request in requests]
    temperatures = host_to_device(values, dtype=torch.float32, device=scores.device)
    return (scores - scores.amax(dim=-1, keepdim=True)) / temperatures[:, None]


def _filter_min_p(scaled: torch.Tensor, requests: Sequence[RequestSampling]) -> torch.Tensor:
    """-inf where the probability is below ``min_p`` times the largest one."""
    if all(request.min_p == 0.0 for request in requests):
        return scaled
    min_p = host_to_device([request.min_p for request in requests], dtype=torch.float32, device=scaled.device)
    probs = torch.softmax(scaled, dim=-1)
    return scaled.masked_fill(probs < probs.amax(dim=-1, keepdim=True) * min_p[:, None], -math.inf)


def rank_candidates(
    scaled: torch.Tensor, *, requests: Sequence[RequestSampling], num_candidates: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The best K tokens of each row and their scaled logits, -inf where top-k, top-p or min-p drops them: ``[P, K]``.

    ``scaled``: float32 ``[P, V]``, finite. ``num_candidates``: K, V or at least every row's ``top_k``. Ties rank by id.
    A token is kept if its rank is below top_k, the sum of the probabilities ranked before it is at most top_p, and its
    probability is at least min_p times the largest; the first is always kept. Sums are float64, so that they do not
    depend on how a device splits a scan. Mutates nothing; no host synchronisation.
    """
    vocab_size, device = scaled.shape[1], scaled.device
    if num_candidates < vocab_size:
        ids = torch.arange(vocab_size, device=device)
        candidates = torch.topk(_sort_keys(scaled) - ids, num_candidates, dim=-1).indices
    else:
        candidates = torch.sort(scaled, dim=-1, descending=True, stable=True).indices
    probs = torch.softmax(scaled, dim=-1).gather(1, candidates)
    before = probs.to(torch.float64).cumsum(dim=-1) - probs
    settings = [[float(r.top_k if r.top_k > 0 else TOP_K_ALL), r.top_p, r.min_p] for r in requests]
    top_k, top_p, min_p = host_to_device(settings, dtype=torch.float32, device=device).unsqueeze(2).unbind(1)
    is_dropped = torch.arange(candidates.shape[1], device=device) >= top_k
    is_dropped |= (before > top_p) & (top_p < 1.0)
    is_dropped |= probs < probs[:, :1] * min_p
    return candidates, scaled.gather(1, candidates).masked_fill(is_dropped, -math.inf)


def _sort_keys(values: torch.Tensor) -> torch.Tensor:
    """int64, ordered as the float32 values and 2^32 apart, so that less than that may be taken off to break ties."""
    bits = (values + 0.0).view(torch.int32).to(torch.int64)  # + 0.0 turns -0.0 into 0.0
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits) << 32


def _signed64(seed: int) -> int:
    """The seed's low 64 bits as int64 holds them."""
    low = seed & ((1 << 64) - 1)
    return low - (1 << 64) if low >= 1 << 63 else low
