"""One position is processed as SGLang's own functions process it. Skipped where SGLang cannot be imported."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest
import torch

from aspire_sglang.sampling import (
    OutputHistory,
    RequestSampling,
    SampledRows,
    TokenCounts,
    process_logits,
    rank_candidates,
)
from aspire_sglang.sampling_records import TOP_K_ALL

VOCAB = 50


def make_logits(num_rows: int, vocab_size: int, *, seed: int) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def sglang_module(name: str) -> ModuleType:
    module: ModuleType = pytest.importorskip(f"sglang.srt.{name}", exc_type=ImportError)
    return module


class StockBatch:
    """The part of a ScheduleBatch that penalizers read."""

    def __init__(self, reqs: list[Any]) -> None:
        self.reqs = reqs
        self.device = "cpu"


class StockReq:
    def __init__(self, sampling_params: Any) -> None:
        self.sampling_params = sampling_params
        self.tokenizer = type("Tokenizer", (), {"additional_stop_token_ids": {5}, "eos_token_id": 2})()


STOCK_CASES: list[dict[str, Any]] = [
    {"frequency_penalty": 0.5},
    {"presence_penalty": -0.7},
    {"repetition_penalty": 1.5},
    {"frequency_penalty": 0.5, "presence_penalty": 0.25, "repetition_penalty": 0.8},
    {"frequency_penalty": -1.5, "repetition_penalty": 1.9, "logit_bias": {"3": 2.5, "9": -100.0}},
    {"min_new_tokens": 4, "stop_token_ids": {7}, "logit_bias": {"2": 50.0, "7": 50.0}, "repetition_penalty": 1.2},
    {"min_new_tokens": 3, "stop_token_ids": {7}},
    {},
]


def stock_processed(logits: torch.Tensor, output: Sequence[int]) -> torch.Tensor:
    """Rows of STOCK_CASES after the output, as the overlap scheduler's copy of the batch processes them."""
    params = sglang_module("sampling.sampling_params").SamplingParams
    info_module = sglang_module("sampling.sampling_batch_info")
    penalties = sglang_module("sampling.penaltylib")
    reqs = [StockReq(params(**case)) for case in STOCK_CASES]
    batch = StockBatch(reqs)
    kinds = {
        penalties.BatchedFrequencyPenalizer,
        penalties.BatchedMinNewTokensPenalizer,
        penalties.BatchedPresencePenalizer,
        penalties.BatchedRepetitionPenalizer,
    }
    orchestrator = penalties.BatchedPenalizerOrchestrator(vocab_size=VOCAB, batch=batch, penalizers=kinds)
    for token in output:
        orchestrator.cumulate_output_tokens(torch.full((len(reqs),), token))
    bias = torch.zeros(len(reqs), VOCAB)
    for row, case in enumerate(STOCK_CASES):
        for token, value in case.get("logit_bias", {}).items():
            bias[row, int(token)] = value
    ones = torch.ones(len(reqs))
    info = info_module.SamplingBatchInfo(
        temperatures=ones[:, None],
        top_ps=ones,
        top_ks=ones,
        min_ps=ones,
        is_all_greedy=False,
        is_any_greedy=False,
        need_top_p_sampling=False,
        need_top_k_sampling=False,
        need_min_p_sampling=False,
        vocab_size=VOCAB,
        penalizer_orchestrator=orchestrator,
        device="cpu",
        logit_bias=bias,
    )
    result = logits.clone()
    with torch.compiler.set_stance("force_eager"):
        info.copy_for_forward().apply_logits_bias(result)
    return result


@pytest.mark.parametrize("output", [[], [3], [3, 3, 9], [3, 9, 3, 11, 3, 40]], ids=len)
def test_penalties_and_bias_equal_sglang(output: list[int]) -> None:
    logits = make_logits(len(STOCK_CASES), VOCAB, seed=len(output))
    want = stock_processed(logits, output)
    ours = []
    for case in STOCK_CASES:
        values = {key: value for key, value in case.items() if key not in ("stop_token_ids", "logit_bias")}
        bias = {int(token): value for token, value in case.get("logit_bias", {}).items()}
        banned = tuple(case.get("stop_token_ids", set()) | {5, 2})
        ours.append(RequestSampling(**values, logit_bias=bias, banned_until_min=banned))
    drafts = len(output) // 2
    history = OutputHistory(
        committed=output[drafts:], drafts=output[:drafts], counts=TokenCounts(output[drafts:])
    )  # which of them are drafts does not matter
    rows = SampledRows(
        request_indices=range(len(ours)),
        positions=torch.arange(len(ours)),
        histories=dict.fromkeys(range(len(ours)), history),
    )
    got = process_logits(logits, requests=ours, rows=rows, picked=range(len(ours)))
    torch.testing.assert_close(got, want.clamp(min=-1e30), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("use_min_p", [False, True])
def test_filters_equal_sglang(monkeypatch: pytest.MonkeyPatch, use_min_p: bool) -> None:
    stock = sglang_module("layers.sampler")
    generator = torch.Generator().manual_seed(3)
    scaled = make_logits(400, 200, seed=0) * torch.rand(400, 1, generator=generator)
    requests = [
        RequestSampling(
            top_k=int(torch.randint(2, 60, (), generator=generator)) if i % 3 else TOP_K_ALL,
            top_p=float(torch.rand((), generator=generator)) * 0.98 + 0.01 if i % 4 else 1.0,
            min_p=float(torch.rand((), generator=generator)) * 0.3 if use_min_p and i % 5 else 0.0,
        )
        for i in range(400)
    ]
    kept: list[torch.Tensor] = []

    def capture(weights: torch.Tensor, num_samples: int) -> torch.Tensor:
        kept.append(weights.clone())
        return weights.argmax(dim=-1, keepdim=True)

    monkeypatch.setattr(torch, "multinomial", capture)
    probs = torch.softmax(scaled, dim=-1)
    stock.top_k_top_p_min_p_sampling_from_probs_torch(
        probs.clone(),
        torch.tensor([request.top_k for request in requests], dtype=torch.int32),
        torch.tensor([request.top_p for request in requests]),
        torch.tensor([request.min_p for request in requests]),
        use_min_p,
        None,
        torch.zeros(400, dtype=torch.int64),
    )
    want = torch.zeros_like(probs).scatter(1, probs.sort(dim=-1, descending=True).indices, kept[0])
    candidates, scores = rank_candidates(scaled, requests=requests, num_candidates=200)
    got = torch.full_like(scores, -math.inf).scatter(1, candidates, scores).softmax(dim=-1)
    torch.testing.assert_close(got, want / want.sum(dim=-1, keepdim=True), rtol=1e-5, atol=2e-7)
