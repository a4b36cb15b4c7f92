"""What is refused, for a server and for a request: one line that names the value and the way out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, get_type_hints

import msgspec
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor
from sglang.srt.sampling.sampling_params import SamplingParams

from aspire_sglang.config import AspireConfig, ConfigError
from aspire_sglang.sglang_compat import options
from aspire_sglang.sglang_compat.platform import is_cpu_platform

REQUEST_OPTIONS = ("draft_max", "enabled")
# Speculative settings that SGLang's own resolution may fill in for any algorithm.
_NEUTRAL_SPECULATIVE_FIELDS = frozenset(
    {"speculative_algorithm", "speculative_moe_runner_backend", "speculative_attention_mode"}
)
_LEAVE_OUT = "not supported with --spec-algorithm aspire; leave it out"
# Types on the wire to the scheduler process.
_SAMPLING_TYPES = get_type_hints(SamplingParams)


def check_settings(server_args: Any) -> None:
    """BEFORE ``ServerArgs.__post_init__``: raise :class:`ConfigError` for a setting that ASPIRE cannot serve exactly.

    Called again on the resolved arguments, since SGLang's resolution may turn settings on.
    """
    if options.is_selected(server_args):
        for name, message in _unsupported_settings(server_args).items():
            raise ConfigError(f"{name}: {message}")


def check_graphs(server_args: Any) -> None:
    """Raise :class:`ConfigError` when resolution left CUDA graphs on: mixed steps run eagerly."""
    for phase in ("decode", "prefill"):
        backend = getattr(server_args.cuda_graph_config, phase).backend
        if backend != "disabled":
            raise ConfigError(f"CUDA graph backend {backend!r} for {phase}: {_LEAVE_OUT}")


def check_model(server_args: Any) -> None:
    """BEFORE ``ServerArgs._handle_model_specific_adjustments``: the same for the model, and the layers it must have."""
    if not options.is_selected(server_args):
        return
    model = server_args.get_model_config()
    problem = _unsupported_model(model)
    if problem is not None:
        raise ConfigError(f"model {server_args.model_path}: {problem}; serve it without --spec-algorithm aspire")
    options.config_of(server_args).resolve_refresh_layer(int(model.num_hidden_layers))


def _unsupported_settings(server_args: Any) -> dict[str, str]:
    """Flag -> why it cannot be combined with ASPIRE, for every one that is set."""
    on_device = server_args.device in (None, "cuda") or is_cpu_platform()  # None: not resolved yet
    conditions = {
        f"--device {server_args.device}": not on_device,
        f"--pp-size {server_args.pp_size}": server_args.pp_size != 1,
        f"--dcp-size {server_args.dcp_size}": server_args.dcp_size != 1,
        f"--attn-cp-size {server_args.attn_cp_size}": server_args.attn_cp_size != 1,
        f"--disaggregation-mode {server_args.disaggregation_mode}": server_args.disaggregation_mode != "null",
        "--use-ray": server_args.use_ray,
        "--encoder-only": server_args.encoder_only,
        f"--weight-cache-mode {server_args.weight_cache_mode}": server_args.weight_cache_mode != "off",
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
        "--enable-return-hidden-states": server_args.enable_return_hidden_states
        or server_args.return_hidden_states_mode is not None,
        "--enable-return-routed-experts": server_args.enable_return_routed_experts,
        "--enable-torch-compile": server_args.enable_torch_compile,
        "--enable-deterministic-inference": server_args.enable_deterministic_inference,
        "--enable-mis": server_args.enable_mis,
        "--dllm-algorithm": server_args.dllm_algorithm is not None,
        "--is-embedding": server_args.is_embedding,
        f"--kv-cache-dtype {server_args.kv_cache_dtype}": server_args.kv_cache_dtype
        not in ("auto", "bf16", "bfloat16", "float16"),
        f"--tokenizer-worker-num {server_args.tokenizer_worker_num}": server_args.tokenizer_worker_num != 1,
    }
    problems = {name: _LEAVE_OUT for name, is_set in conditions.items() if is_set}
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
    if mambaish_config(model) is not None:
        return "hybrid (Mamba or linear attention) models are not supported"
    other = _other_attention(model)
    if other is not None:
        return f"{other} is not supported (only full attention)"
    if model.is_multimodal:
        return "multimodal models are not supported"
    if model.is_encoder_decoder:
        return "encoder-decoder models are not supported"
    return None


def _other_attention(model: Any) -> str | None:
    """What some layers do instead of full attention, or None."""
    text = model.hf_text_config
    if getattr(text, "use_sliding_window", None) is False:
        return None
    others = sorted(set(getattr(text, "layer_types", None) or ()) - {"full_attention", "attention"})
    if others:
        return " and ".join(others)
    if model.is_hybrid_swa or (getattr(text, "layer_types", None) is None and getattr(text, "sliding_window", None)):
        return "sliding_attention"
    return None


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
    if req.custom_logit_processor:
        try:
            CustomLogitProcessor.from_str(req.custom_logit_processor)
        except Exception as error:  # whatever a pickled callable may raise must not end the server
            return f"custom_logit_processor cannot be read ({error}); send the text that to_str() gives"
    unknown = [token for token in params.stop_token_ids or () if not 0 <= token < req.vocab_size]
    if unknown and params.min_new_tokens > 0:
        return f"stop_token_ids holds {unknown[0]}; the model's token ids are 0 to {req.vocab_size - 1}"
    return request_options_problem(params.custom_params)


def sampling_params_problem(values: Any) -> str | None:
    """What is wrong with a request's sampling parameters before SGLang has read them, or None.

    Checked are the types that have to survive the way to the scheduler process; ranges are left to SGLang.
    """
    if not isinstance(values, dict):
        return None
    problem = request_options_problem(values.get("custom_params"))
    if problem is not None:
        return problem
    for name, value in values.items():
        if name not in _SAMPLING_TYPES:
            return f"unknown sampling parameter {name!r}; known: {', '.join(_SAMPLING_TYPES)}"
        if value is None:  # SGLang fills in the default
            continue
        try:
            msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=_SAMPLING_TYPES[name])
        except (msgspec.ValidationError, OverflowError, TypeError) as error:
            return f"sampling parameter {name} is {value!r}: {error}"
    return None


def input_ids_problem(input_ids: Sequence[int], vocab_size: int) -> str | None:
    """What is wrong with token ids that a client sent, or None."""
    for token in (min(input_ids, default=0), max(input_ids, default=0)):
        if not 0 <= token < vocab_size:
            return f"input_ids holds {token}; the model's token ids are 0 to {vocab_size - 1}"
    return None


def request_options_problem(custom_params: Any) -> str | None:
    """What is wrong with ``custom_params["aspire"]``, or None."""
    values = (custom_params or {}).get("aspire") if isinstance(custom_params, dict) else None
    if values is None:
        return None
    if not isinstance(values, dict):
        return f"custom_params['aspire'] is {values!r}; it must be an object with {_known()}"
    for name, value in values.items():
        if name not in REQUEST_OPTIONS:
            return f"unknown custom_params['aspire'] option {name!r}; known: {_known()}"
        if name == "enabled" and not isinstance(value, bool):
            return f"custom_params['aspire']['enabled'] is {value!r}; it must be true or false"
        if name == "draft_max" and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            return f"custom_params['aspire']['draft_max'] is {value!r}; it must be a whole number, 0 or more"
    return None


def request_draft_max(custom_params: Any, config: AspireConfig) -> int:
    """Most drafts of this request: it may lower the server's ``draft_max``, never raise it; 0 decodes plainly."""
    values = (custom_params or {}).get("aspire") or {}
    if not values.get("enabled", True):
        return 0
    draft_max: int = values.get("draft_max", config.draft_max)
    return min(config.draft_max, draft_max)


def _known() -> str:
    return ", ".join(REQUEST_OPTIONS)
