"""What is refused, for a server and for a request: one line that names the value and the way out."""

from __future__ import annotations

import dataclasses
from typing import Any

from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.configs.model_config import AttentionArch

from aspire_sglang.config import AspireConfig, ConfigError

REQUEST_OPTIONS = ("draft_max", "enabled")
# Speculative settings that SGLang's own resolution may fill in for any algorithm.
_NEUTRAL_SPECULATIVE_FIELDS = frozenset(
    {"speculative_algorithm", "speculative_moe_runner_backend", "speculative_attention_mode"}
)


def check_server_args(server_args: Any) -> None:
    """Raise :class:`ConfigError` when ASPIRE cannot serve this configuration exactly."""
    for name, message in _unsupported_settings(server_args).items():
        raise ConfigError(f"{name}: {message}")
    model = server_args.get_model_config()
    problem = _unsupported_model(model)
    if problem is not None:
        raise ConfigError(f"model {server_args.model_path}: {problem}; serve it without --spec-algorithm aspire")
    num_layers = int(model.num_hidden_layers)
    server_args._aspire_config.resolve_refresh_layer(num_layers)


def _unsupported_settings(server_args: Any) -> dict[str, str]:
    """Flag -> why it cannot be combined with ASPIRE, for every one that is set."""
    leave_out = "not supported with --spec-algorithm aspire; leave it out"
    conditions = {
        f"--pp-size {server_args.pp_size}": server_args.pp_size != 1,
        f"--dcp-size {server_args.dcp_size}": server_args.dcp_size != 1,
        f"--attn-cp-size {server_args.attn_cp_size}": server_args.attn_cp_size != 1,
        f"--disaggregation-mode {server_args.disaggregation_mode}": server_args.disaggregation_mode != "null",
        "--enable-lora": bool(server_args.enable_lora or server_args.lora_paths),
        "--enable-dp-attention": server_args.enable_dp_attention,
        "--enable-two-batch-overlap": server_args.enable_two_batch_overlap,
        "--enable-pdmux": server_args.enable_pdmux,
        "--enable-mixed-chunk": server_args.enable_mixed_chunk,
        "--enable-hierarchical-cache": server_args.enable_hierarchical_cache,
        "--enable-hisparse": server_args.enable_hisparse,
        "--enable-lmcache": server_args.enable_lmcache,
        "--enable-unified-memory": server_args.enable_unified_memory,
        "--enable-streaming-session": server_args.enable_streaming_session,
        "--enable-return-hidden-states": server_args.enable_return_hidden_states,
        "--enable-return-routed-experts": server_args.enable_return_routed_experts,
        "--enable-torch-compile": server_args.enable_torch_compile,
        "--dllm-algorithm": server_args.dllm_algorithm is not None,
        "--is-embedding": server_args.is_embedding,
        f"--kv-cache-dtype {server_args.kv_cache_dtype}": server_args.kv_cache_dtype
        not in ("auto", "bf16", "bfloat16", "float16"),
        f"--tokenizer-worker-num {server_args.tokenizer_worker_num}": server_args.tokenizer_worker_num != 1,
    }
    problems = {name: leave_out for name, is_set in conditions.items() if is_set}
    for spec in dataclasses.fields(server_args):
        if spec.name.startswith("speculative_") and spec.name not in _NEUTRAL_SPECULATIVE_FIELDS:
            value = getattr(server_args, spec.name)
            if value != spec.default:
                problems[f"--{spec.name.replace('_', '-')} {value}"] = (
                    "belongs to another speculative algorithm; aspire is configured by --aspire-* "
                    "(drafts: --aspire-draft-max)"
                )
    return problems


def _unsupported_model(model: Any) -> str | None:
    if not model.is_generation:
        return "it does not generate text"
    if model.attention_arch != AttentionArch.MHA:
        return f"{model.attention_arch.name} attention is not supported (only MHA and GQA)"
    if model.is_hybrid_swa or _uses_sliding_window(model):
        return "sliding-window attention is not supported"
    if mambaish_config(model) is not None:
        return "hybrid (Mamba or linear attention) models are not supported"
    if model.is_encoder_decoder:
        return "encoder-decoder models are not supported"
    return None


def _uses_sliding_window(model: Any) -> bool:
    text = model.hf_text_config
    if getattr(text, "use_sliding_window", None) is False:
        return False
    layer_types = getattr(text, "layer_types", None)
    if layer_types is not None:
        return any("full" not in kind for kind in layer_types)
    return bool(getattr(text, "sliding_window", None))


def request_problem(req: Any) -> str | None:
    """Why this request cannot be served exactly, or None."""
    params = req.sampling_params
    if req.return_logprob:
        return "logprobs are not supported with --spec-algorithm aspire; leave return_logprob (logprobs) out"
    if any(getattr(params, name) for name in ("json_schema", "regex", "ebnf", "structural_tag")):
        return "structured output is not supported with --spec-algorithm aspire; leave the schema or grammar out"
    if req.return_hidden_states:
        return "return_hidden_states is not supported with --spec-algorithm aspire; leave it out"
    if req.input_embeds is not None:
        return "input_embeds are not supported with --spec-algorithm aspire; send token ids or text"
    return request_options_problem(params.custom_params)


def request_options_problem(custom_params: Any) -> str | None:
    """What is wrong with ``custom_params["aspire"]``, or None."""
    options = (custom_params or {}).get("aspire") if isinstance(custom_params, dict) else None
    if options is None:
        return None
    if not isinstance(options, dict):
        return f"custom_params['aspire'] is {options!r}; it must be an object with {_known()}"
    for name, value in options.items():
        if name not in REQUEST_OPTIONS:
            return f"unknown custom_params['aspire'] option {name!r}; known: {_known()}"
        if name == "enabled" and not isinstance(value, bool):
            return f"custom_params['aspire']['enabled'] is {value!r}; it must be true or false"
        if name == "draft_max" and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            return f"custom_params['aspire']['draft_max'] is {value!r}; it must be a whole number, 0 or more"
    return None


def request_draft_max(custom_params: Any, config: AspireConfig) -> int:
    """Most drafts of this request: it may lower the server's ``draft_max``, never raise it; 0 decodes plainly."""
    options = (custom_params or {}).get("aspire") or {}
    if not options.get("enabled", True):
        return 0
    return min(config.draft_max, options.get("draft_max", config.draft_max))


def _known() -> str:
    return ", ".join(REQUEST_OPTIONS)
