"""Plain decoding and every way of speculating, side by side on this machine's CPU: make bench-cpu.

Absolute times on a shared CPU are noise; the table gives ratios to stock SGLang measured in the same run, and beside
them the ratio of bytes moved (weights once a step, KV as counted in the backend), which bounds what a memory-bound
machine could gain. A CPU is bound by arithmetic, so its times lie above that floor.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DOCUMENT = Path(__file__).parents[1] / "examples" / "document.txt"
QUESTIONS = (
    "Summarise the text.",
    "List the names in the text.",
    "What happens first?",
    "What is said about the light?",
)
BUDGET = {"aspire_ratio": 0.07, "aspire_min_pages": 16, "aspire_recent_pages": 4}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "stock SGLang": {},
    "aspire off": {"aspire_policy": "off"},
    "window sync:8": {"aspire_policy": "sync:8", "aspire_selector": "window"},
    "verify sync:8": {"aspire_policy": "sync:8", "aspire_selector": "verify"},
    "refresh fixed:8": {"aspire_policy": "fixed:8"},
    "per-layer fixed:8": {"aspire_policy": "fixed:8", "aspire_selector": "verify-per-layer"},
    "aspire": {},
}


@dataclass(frozen=True, slots=True)
class Measurement:
    """One configuration: seconds of decoding, output tokens, and the worker's counters (empty for stock)."""

    name: str
    seconds: float
    outputs: list[list[int]]
    counts: dict[str, int]


def measure(name: str, options: dict[str, Any], *, model: str, prompts: list[list[int]], tokens: int) -> Measurement:
    """Start an engine, prefill once untimed, then time the decoding of all prompts together."""
    import sglang as sgl

    server = {"dtype": "float32", "max_total_tokens": 20_000, "max_running_requests": len(prompts), "random_seed": 1}
    if name != "stock SGLang":
        server |= {"speculative_algorithm": "ASPIRE", **BUDGET, **options}
    engine = sgl.Engine(model_path=model, **server)
    try:
        greedy = {"temperature": 0.0, "ignore_eos": True}
        engine.generate(input_ids=prompts, sampling_params={**greedy, "max_new_tokens": 2})
        before = counters(engine)
        start = time.perf_counter()
        results = engine.generate(input_ids=prompts, sampling_params={**greedy, "max_new_tokens": tokens})
        seconds = time.perf_counter() - start
        counts = {key: value - before[key] for key, value in counters(engine).items()}
    finally:
        engine.shutdown()
    return Measurement(name, seconds, [result["output_ids"] for result in results], counts)


def counters(engine: Any) -> dict[str, int]:
    """The worker's integer counters; empty for a stock engine."""
    state = engine.get_server_info()["internal_states"][0]
    return {key: value for key, value in state.get("aspire", {}).items() if isinstance(value, int)}


def bytes_moved(counts: dict[str, int], *, weight_bytes: float, kv_bytes_per_token_layer: float) -> float:
    """Bytes of weights and KV that the counted steps had to read."""
    kv_tokens = counts["draft_kv_tokens_read"] + counts["verify_kv_tokens_read"]
    return counts["steps"] * weight_bytes + kv_tokens * kv_bytes_per_token_layer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="folder of the model (default: SmolLM2-135M-Instruct, fetched once)")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of each request (default: 64)")
    parser.add_argument("--requests", type=int, default=4, help="requests in the batch (default: 4)")
    args = parser.parse_args()
    if args.tokens < 2 or args.requests < 1:
        parser.error(f"--tokens is {args.tokens} (2 or more: the first comes from prefill), --requests {args.requests}")

    from transformers import AutoConfig, AutoTokenizer

    from aspire_sglang.models.default_model import default_model_path

    model = args.model or str(default_model_path())
    tokenizer, shape = AutoTokenizer.from_pretrained(model), AutoConfig.from_pretrained(model)
    text = DOCUMENT.read_text(encoding="utf-8")
    prompts = [tokenizer.encode(f"{text}\n\n{QUESTIONS[i % len(QUESTIONS)]}\n") for i in range(args.requests)]
    measured = []
    for number, (name, options) in enumerate(CONFIGURATIONS.items(), start=1):
        print(f"[{number}/{len(CONFIGURATIONS)}] {name} ...", flush=True)
        measured.append(measure(name, options, model=model, prompts=prompts, tokens=args.tokens))
    weight_bytes = sum(f.stat().st_size for f in Path(model).glob("*.safetensors")) * 2.0  # stored bf16, run float32
    kv_bytes = 2.0 * shape.num_key_value_heads * shape.head_dim * 4.0
    report(measured, weight_bytes=weight_bytes, kv_bytes_per_token_layer=kv_bytes, context=len(prompts[0]))


def report(measured: list[Measurement], *, context: int, **sizes: float) -> None:
    """Print the table; every ratio is to stock SGLang in the same run."""
    stock, plain = measured[0], measured[1]
    floor_of_plain = bytes_moved(plain.counts, **sizes)
    print(
        f"\n{len(stock.outputs)} requests, about {context} tokens of context, {len(stock.outputs[0])} new tokens each"
    )
    print(
        f"{'':18s} {'time':>6s} {'bytes':>6s} {'tok/verify':>10s} {'accepted':>9s} {'KV read':>8s} {'mixed':>6s}"
        "  same output"
    )
    for run in measured:
        line = f"{run.name:18s} {run.seconds / stock.seconds:6.2f}"
        if counts := run.counts:
            drafted, full = counts["drafts_verified"], counts["draft_kv_tokens_full"]
            line += f" {bytes_moved(counts, **sizes) / floor_of_plain:6.2f}"
            line += f" {counts['tokens_committed'] / counts['verify_rows']:10.2f}"
            line += f" {counts['drafts_accepted'] / drafted:9.1%}" if drafted else f" {'-':>9s}"
            line += f" {counts['draft_kv_tokens_read'] / full:8.1%}" if full else f" {'-':>8s}"
            line += f" {counts['mixed_steps'] / counts['steps']:6.0%}"
        else:
            line += f" {'1.00':>6s} {'1.00':>10s} {'-':>9s} {'-':>8s} {'-':>6s}"
        print(f"{line}  {'yes' if run.outputs == stock.outputs else 'NO'}")


if __name__ == "__main__":
    main()
