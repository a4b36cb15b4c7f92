"""Every way to configure the plugin, and everything it refuses: one line, before any weight is loaded.

Arguments are resolved inside the test process, by SGLang's own parser and ``ServerArgs``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

from aspire_sglang.config import AspireConfig, ConfigError

SELECT = ("--spec-algorithm", "aspire")
Parse = Callable[..., Any]
Refusal = Callable[..., str]


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    """SGLang's command line with the plugin loaded."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(prog="sglang serve")
    ServerArgs.add_cli_args(parser)
    return parser


@pytest.fixture(scope="module")
def parse(parser: argparse.ArgumentParser, llama: str) -> Parse:
    """``ServerArgs`` of a command line, resolved."""
    from sglang.srt.server_args import ServerArgs

    def resolve(*flags: str, model: str | Path = llama) -> Any:
        return ServerArgs.from_cli_args(parser.parse_args(["--model-path", str(model), *flags]))

    return resolve


@pytest.fixture(scope="module")
def refusal(parse: Parse) -> Refusal:
    """The one line with which a command line is refused."""

    def refuse(*flags: str, **kwargs: Any) -> str:
        with pytest.raises(SystemExit) as stop:
            parse(*flags, **kwargs)
        message = stop.value.code
        assert isinstance(message, str), message  # sys.exit(text): printed to stderr, exit status 1
        assert message.startswith("aspire: ")
        assert "\n" not in message
        return message

    return refuse


# --- the options ----------------------------------------------------------------------------------------------------


def test_help_lists_every_option_with_its_default_and_unit(parser: argparse.ArgumentParser) -> None:
    """The parser is that of launch_server (``sglang serve --help`` does not load plugins in 0.5.17)."""
    text = " ".join(parser.format_help().split())
    for spec in dataclasses.fields(AspireConfig):
        flag = f"--aspire-{spec.name.replace('_', '-')} {spec.metadata['unit'].upper()}"
        assert f"{flag} {spec.metadata['help']} (default: {spec.default})" in text
    assert "--spec-algorithm" in text
    assert "--aspire-config FILE" in text


def test_flags_keywords_and_files_give_the_same_record(parse: Parse, llama: str, tmp_path: Path) -> None:
    """Flags, ``ServerArgs``/``Engine`` keywords, YAML and JSON files end in equal records; flags win over a file."""
    from sglang.srt.server_args import ServerArgs

    values = {"policy": "fixed:4", "draft_max": 8, "ratio": 0.2, "selector": "verify", "refresh_layer": 1}
    expected = AspireConfig(**values)
    flags = [part for name, value in values.items() for part in (f"--aspire-{name.replace('_', '-')}", str(value))]
    assert parse(*SELECT, *flags)._aspire_config == expected
    assert parse("--speculative-algorithm", "ASPIRE", *flags)._aspire_config == expected
    keywords = {f"aspire_{name}": value for name, value in values.items()}
    args = ServerArgs(model_path=llama, speculative_algorithm="ASPIRE", **keywords)
    assert args._aspire_config == pickle.loads(pickle.dumps(args))._aspire_config == expected

    yaml_file, json_file = tmp_path / "options.yaml", tmp_path / "options.json"
    yaml_file.write_text("".join(f"{name.replace('_', '-')}: {value}\n" for name, value in values.items()))
    json_file.write_text(json.dumps(keywords))
    for path in (yaml_file, json_file):
        assert parse(*SELECT, "--aspire-config", str(path))._aspire_config == expected
        both = parse(*SELECT, "--aspire-config", str(path), "--aspire-ratio", "0.5")
        assert both._aspire_config == dataclasses.replace(expected, ratio=0.5)


def test_nothing_given_is_the_default_record(parse: Parse) -> None:
    """And the reserves of SGLang follow from it; without ASPIRE there is no record."""
    args = parse(*SELECT)
    assert args._aspire_config == AspireConfig()
    assert args.speculative_num_draft_tokens == AspireConfig().draft_max + 1
    assert args.disable_overlap_schedule
    assert parse()._aspire_config is None


def test_options_in_sglangs_own_config_file(llama: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``--config`` of SGLang turns its keys into flags, ours included; flags of the command line win."""
    from sglang.srt.server_args import prepare_server_args

    monkeypatch.setattr(logging, "basicConfig", lambda **kwargs: None)
    path = tmp_path / "server.yaml"
    path.write_text(f"model-path: {llama}\nspec-algorithm: aspire\naspire-policy: sync:3\naspire-draft-max: 5\n")
    args = prepare_server_args(["--config", str(path), "--aspire-draft-max", "7"])
    assert args._aspire_config == AspireConfig(policy="sync:3", draft_max=7)


def test_sglang_serve_takes_the_flags(
    parser: argparse.ArgumentParser, llama: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``sglang serve MODEL --spec-algorithm aspire`` reaches the server start with our record."""
    import sglang.cli.serve
    import sglang.launch_server

    started: list[Any] = []
    monkeypatch.setattr(logging, "basicConfig", lambda **kwargs: None)
    monkeypatch.setattr(sglang.cli.serve, "kill_process_tree", lambda *args, **kwargs: None)
    monkeypatch.setattr(sglang.launch_server, "run_server", started.append)
    sglang.cli.serve.serve(None, [llama, *SELECT, "--aspire-policy", "off"])
    assert [args._aspire_config.policy for args in started] == ["off"]


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--aspire-policy sometimes", ("'sometimes'", "choose from aspire, aspire-paper, fsm, fixed:G")),
        ("--aspire-policy fixed:99", ("99", "0 to 16 (draft_max)")),
        ("--aspire-selector refesh", ("'refesh'", "did you mean 'refresh'")),
        ("--aspire-sampling cuppled", ("'cuppled'", "did you mean 'coupled'")),
        ("--aspire-ratio 0", ("ratio is 0.0", "above 0 and at most 1")),
        ("--aspire-ratio 1.5", ("ratio is 1.5", "above 0 and at most 1")),
        ("--aspire-ratio nan", ("ratio is nan", "above 0 and at most 1")),
        ("--aspire-ratio much", ("ratio is 'much'", "must be float")),
        ("--aspire-draft-max=-1", ("draft_max is -1", "1 to 64")),
        ("--aspire-draft-max many", ("draft_max is 'many'", "must be int")),
        ("--aspire-draft-init=-3", ("draft_init is -3", "0 to 16")),
        ("--aspire-min-pages=-1", ("min_pages is -1", "1 or more")),
        ("--aspire-recent-pages 0", ("recent_pages is 0", "1 or more")),
        ("--aspire-sink-pages=-1", ("sink_pages is -1", "0 or more")),
        ("--aspire-page-size 12", ("page_size is 12", "power of two")),
        ("--aspire-refresh-layer 4", ("refresh_layer is 4", "has 4 layers", "0..3, or -1..-4")),
        ("--aspire-refresh-layer=-5", ("refresh_layer is -5", "0..3, or -1..-4")),
        ("--aspire-dense-layers 4", ("dense_layers is 4", "at least one sparse")),
        ("--aspire-config /no/such.yaml", ("/no/such.yaml", "cannot read")),
    ],
)
def test_wrong_values_are_named_with_the_fix(refusal: Refusal, flags: str, words: tuple[str, ...]) -> None:
    """Ranges, names and types of every option, also against the model's number of layers."""
    message = refusal(*SELECT, *flags.split())
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("draft_maximum: 3", ("'draft_maximum'", "did you mean 'draft_max'")),
        ("speed: 3", ("'speed'", "known: draft_max")),
        ("ratio: 0.1\nratio", ("cannot read option file",)),
        ("- ratio", ("holds list", "must map option names")),
        ("draft_max: yes", ("draft_max is True (bool)", "must be int")),
        ("draft_max: 3.5", ("draft_max is 3.5 (float)", "must be int")),
        ("policy: 4", ("policy is 4 (int)", "must be str")),
        ("ratio:", ("ratio is None", "must be float")),
    ],
)
def test_a_wrong_option_file_is_refused(refusal: Refusal, tmp_path: Path, text: str, words: tuple[str, ...]) -> None:
    """Unknown names get the nearest one, wrong types are named; broken files say which file."""
    path = tmp_path / "options.yaml"
    path.write_text(text)
    message = refusal(*SELECT, "--aspire-config", str(path))
    assert all(word in message for word in words), message


@pytest.mark.parametrize("flags", ["", "--speculative-algorithm EAGLE", "--speculative-algorithm NGRAM"])
def test_options_without_the_algorithm_are_refused(refusal: Refusal, flags: str) -> None:
    """They would be ignored silently otherwise; the flags given are named."""
    message = refusal(*flags.split(), "--aspire-ratio", "0.5", "--aspire-policy", "off")
    assert "--aspire-policy, --aspire-ratio: only used with --spec-algorithm aspire" in message


@pytest.mark.parametrize(
    "flags",
    [
        "--pp-size 2",
        "--dcp-size 2",
        "--attn-cp-size 2",
        "--disaggregation-mode prefill",
        "--enable-lora",
        "--lora-paths a=/some/adapter",
        "--enable-dp-attention",
        "--enable-two-batch-overlap",
        "--enable-pdmux",
        "--enable-mixed-chunk",
        "--enable-hierarchical-cache",
        "--enable-torch-compile",
        "--enable-deterministic-inference",
        "--enable-return-hidden-states",
        "--return-hidden-states-mode last",
        "--tokenizer-worker-num 2",
        "--is-embedding",
        "--use-ray",
        "--kv-cache-dtype fp8_e5m2",
        "--speculative-num-draft-tokens 4",
        "--speculative-eagle-topk 2",
        "--speculative-draft-model-path /some/model",
        "--speculative-adaptive",
        "--attention-backend flashinfer",
        "--prefill-attention-backend triton",
    ],
)
def test_unsupported_settings_are_refused(refusal: Refusal, flags: str) -> None:
    """The flag is named (lora paths by what they turn on) before SGLang acts on it or fails in its own words."""
    name = {"--lora-paths": "--enable-lora", "--return-hidden-states-mode": "--enable-return-hidden-states"}
    message = refusal(*SELECT, *flags.split())
    assert name.get(flags.split()[0], flags) in message
    assert "leave it out" in message or "--aspire-draft-max" in message


def test_other_devices_are_refused(refusal: Refusal, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU without our platform (SGLANG_USE_CPU_ENGINE=1), an NPU, an XPU: nothing would run there."""
    from aspire_sglang.sglang_compat import support

    monkeypatch.setattr(support, "is_cpu_platform", lambda: False)
    assert "--device cpu: not supported with --spec-algorithm aspire" in refusal(*SELECT)


SMALL = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "torch_dtype": "float32"}
MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "MistralForCausalLM": ({"model_type": "mistral", "sliding_window": 64}, "sliding_attention"),
    "Qwen2ForCausalLM": (
        {"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1},
        "sliding_attention",
    ),
    "Gemma2ForCausalLM": ({"model_type": "gemma2", "sliding_window": 64}, "sliding_attention"),
    "GptOssForCausalLM": (
        {"model_type": "gpt_oss", "sliding_window": 64, "num_local_experts": 2, "num_experts_per_tok": 1},
        "sliding_attention",
    ),
    "DeepseekV2ForCausalLM": (
        {"model_type": "deepseek_v2", "kv_lora_rank": 16, "q_lora_rank": None, "qk_rope_head_dim": 8}
        | {"qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2}
        | {"n_shared_experts": 1, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1},
        "MLA",
    ),
    "JambaForCausalLM": ({"model_type": "jamba", "attn_layer_period": 2, "attn_layer_offset": 1}, "mamba"),
    "FalconH1ForCausalLM": (
        {"model_type": "falcon_h1", "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16},
        "hybrid",
    ),
    "Qwen3NextForCausalLM": (
        {"model_type": "qwen3_next", "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32},
        "hybrid",
    ),
    "BertModel": ({"model_type": "bert"}, "does not generate text"),
}


@pytest.mark.parametrize("architecture", sorted(MODELS))
def test_unsupported_models_are_refused_by_their_config(refusal: Refusal, tmp_path: Path, architecture: str) -> None:
    """Only a config.json is there: the refusal comes before weights or tokenizer, and says what to do."""
    special, words = MODELS[architecture]
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture], **SMALL, **special}))
    message = refusal(*SELECT, model=tmp_path)
    assert str(tmp_path) in message
    assert words in message
    assert "serve it without --spec-algorithm aspire" in message


def test_full_attention_models_are_accepted(parse: Parse, tmp_path: Path) -> None:
    """The same small config with the window switched off passes: the refusals above are not for other reasons."""
    special = {**MODELS["Qwen2ForCausalLM"][0], "use_sliding_window": False}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen2ForCausalLM"], **SMALL, **special}))
    assert parse(*SELECT, model=tmp_path)._aspire_config == AspireConfig()


def test_a_hook_that_did_not_take_stops_the_server(refusal: Refusal, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang only logs a hook that failed; the refusal names it."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    target = "sglang.srt.managers.schedule_batch.Req.update_finish_state"
    monkeypatch.setattr(HookRegistry, "_patched", HookRegistry._patched - {target})
    assert f"did not apply 1 hook(s) of aspire-sglang ({target})" in refusal(*SELECT)


# --- choices on a GPU, on a stand-in for the arguments ---------------------------------------------------------------


def gpu_args(*, selected: bool = True, **values: Any) -> SimpleNamespace:
    names = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
    names += ("cuda_graph_backend_decode", "cuda_graph_backend_prefill")
    fields = {**dict.fromkeys(names), "disable_overlap_schedule": False, **values}
    return SimpleNamespace(_aspire_config=AspireConfig() if selected else None, **fields)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """``apply_gpu_defaults`` as on a machine with a GPU."""
    from aspire_sglang.sglang_compat import platform

    monkeypatch.setattr(platform, "is_cpu_platform", lambda: False)
    return platform.apply_gpu_defaults


def test_on_a_gpu_aspire_brings_its_attention_and_runs_eagerly(gpu: Callable[[Any], None]) -> None:
    """Own attention backend, no CUDA graphs, no overlap; without ASPIRE nothing is touched."""
    args = gpu_args()
    gpu(args)
    assert args.attention_backend == "aspire"
    assert args.cuda_graph_backend_decode == args.cuda_graph_backend_prefill == "disabled"
    assert args.disable_overlap_schedule
    stock = gpu_args(selected=False, attention_backend="fa3")
    gpu(stock)
    assert stock == gpu_args(selected=False, attention_backend="fa3")


@pytest.mark.parametrize("option", ["attention_backend", "prefill_attention_backend", "decode_attention_backend"])
def test_on_a_gpu_other_attention_backends_are_refused(gpu: Callable[[Any], None], option: str) -> None:
    """Named with its value; and our backend without the algorithm is refused too."""
    with pytest.raises(ConfigError, match=f"--{option.replace('_', '-')} fa3: .*leave it out"):
        gpu(gpu_args(**{option: "fa3"}))
    with pytest.raises(ConfigError, match="attention backend aspire: add --spec-algorithm aspire"):
        gpu(gpu_args(selected=False, **{option: "aspire"}))


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_cuda_graphs_that_survived_resolution_are_refused(gpu: Callable[[Any], None], phase: str) -> None:
    """An explicit choice is not overwritten in silence: it is refused once SGLang has resolved it."""
    from aspire_sglang.sglang_compat import support

    args = gpu_args(**{f"cuda_graph_backend_{phase}": "full"})
    gpu(args)
    backends = {name: getattr(args, f"cuda_graph_backend_{name}") for name in ("decode", "prefill")}
    args.cuda_graph_config = SimpleNamespace(**{name: SimpleNamespace(backend=backends[name]) for name in backends})
    with pytest.raises(ConfigError, match=f"CUDA graph backend 'full' for {phase}: .*leave it out"):
        support.check_graphs(args)
