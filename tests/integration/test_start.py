"""Whole processes: the plugin installed but not selected, another SGLang, refusals at the command line, and Engine."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

from tests.support.server import ServerError, running_server

# Ports and the seed are drawn at random when not given.
FIXED = {"port": 31000, "nccl_port": 31001, "random_seed": 1}
GREEDY = {"temperature": 0.0, "max_new_tokens": 24, "ignore_eos": True}


def run_script(folder: Path, text: str, *args: str, seconds: float = 300.0) -> Any:
    """Run ``text`` as a script in a new process; returns the JSON of its last line."""
    script = folder / "script.py"
    script.write_text(text)
    command = [sys.executable, str(script), *args]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=seconds, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def settings_of(args: Any) -> dict[str, str]:
    """Every attribute as text, but our own record; the model's config is an object without a value of its own."""
    hidden = ("_aspire_config", "model_config")
    return {name: repr(value) for name, value in sorted(vars(args).items()) if name not in hidden}


# --- installed, not selected ------------------------------------------------------------------------------------------

# Without load_plugins() this is SGLang as if the plugin were not there (the CPU platform, which is chosen on import,
# excepted); then it is loaded on top of an SGLang that claims another version.
OTHER_VERSION_SCRIPT = """
import argparse, importlib.metadata, json, sys
from sglang.srt.server_args import ServerArgs

model, fixed = sys.argv[1], json.loads(sys.argv[2])
settings = lambda: {k: repr(v) for k, v in vars(ServerArgs(model_path=model, **fixed)).items() if k != "model_config"}
result = {"stock": settings()}
version = importlib.metadata.version
importlib.metadata.version = lambda name: "9.8.7" if name == "sglang" else version(name)
from sglang.srt.plugins import load_plugins
load_plugins()
result["other version"] = settings()

parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
from_flags = lambda *flags: ServerArgs.from_cli_args(parser.parse_args(["--model-path", model, *flags]))
attempts = {
    "--spec-algorithm": lambda: from_flags("--spec-algorithm", "aspire"),
    "--speculative-algorithm": lambda: from_flags("--speculative-algorithm", "ASPIRE", "--aspire-policy", "off"),
    "keywords": lambda: ServerArgs(model_path=model, speculative_algorithm="aspire", aspire_policy="off"),
}
for name, attempt in attempts.items():
    try:
        attempt()
    except (SystemExit, ValueError) as error:
        result[name] = [type(error).__name__, str(error)]
print(json.dumps(result))
"""


@pytest.fixture(scope="module")
def other_version(llama: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("other-version")
    result: dict[str, Any] = run_script(folder, OTHER_VERSION_SCRIPT, llama, json.dumps(FIXED))
    return result


def test_arguments_without_aspire_are_stocks(llama: str, other_version: dict[str, Any]) -> None:
    """With the plugin loaded, ``ServerArgs`` resolves to exactly what a process without it resolves to."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    assert settings_of(ServerArgs(model_path=llama, **FIXED)) == other_version["stock"]


def test_another_sglang_is_left_alone_and_named(other_version: dict[str, Any]) -> None:
    """Stock arguments resolve as before; choosing ASPIRE ends with the version and the command that helps."""
    assert other_version["other version"] == other_version["stock"]
    line = "aspire-sglang supports SGLang 0.5.17, but 9.8.7 is installed: pip install sglang==0.5.17"
    assert other_version["--spec-algorithm"] == other_version["--speculative-algorithm"]
    assert other_version["--spec-algorithm"] == ["SystemExit", f"aspire: {line}"]
    assert other_version["keywords"] == ["ConfigError", line]


def test_the_platform_stays_out_of_the_way_of_another_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    """No CPU platform on a version it was not written for."""
    from aspire_sglang.sglang_compat import platform

    monkeypatch.setattr(platform, "version_problem", lambda: "another version")
    assert platform.activate() is None


def around_hooks() -> list[Any]:
    """AROUND hooks whose behaviour depends on the server's algorithm.

    Not here: those of ``ServerArgs`` (compared as a whole above) and the CPU's allocation, which is its platform's.
    """
    from sglang.srt.plugins.hook_registry import HookType

    from aspire_sglang.sglang_compat.hooks import HOOKS

    return [
        hook
        for hook in HOOKS
        if hook.kind is HookType.AROUND and "ServerArgs" not in hook.target and "assign_req" not in hook.target
    ]


def test_hooks_pass_everything_through_when_not_selected(llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each calls SGLang's function once with the very arguments it got, and changes none of them."""
    from sglang.srt.server_args import ServerArgs

    from aspire_sglang.sglang_compat import request_hooks

    args = ServerArgs(model_path=llama)
    monkeypatch.setattr(request_hooks, "get_server_args", lambda: args)
    assert len(around_hooks()) >= 10
    for hook in around_hooks():
        host = SimpleNamespace(server_args=args, speculative_algorithm=None, to_finish=None)
        untouched = dict(vars(host))
        parameters = list(inspect.signature(hook.function).parameters.values())[1:]
        positional = [host for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
        keywords = {each.name: host for each in parameters if each.kind is each.KEYWORD_ONLY}
        calls: list[Any] = []

        def original(*args: Any, calls: list[Any] = calls, **kwargs: Any) -> str:
            calls.append((list(args), kwargs))
            return "result"

        returned = hook.function(original, *positional, **keywords)
        assert calls == [(positional, keywords)], hook.target
        assert returned in ("result", None), hook.target
        if inspect.signature(hook.function).return_annotation != "None":
            assert returned == "result", hook.target
        assert vars(host) == untouched, hook.target


# --- refusals of real processes ---------------------------------------------------------------------------------------


def test_a_wrong_flag_ends_the_command_with_one_line(llama: str, tmp_path: Path) -> None:
    """``python -m sglang.launch_server``: exit status 1, our line, no traceback, no process started."""
    with (
        pytest.raises(ServerError) as error,
        running_server(llama, tmp_path / "log", "--spec-algorithm", "aspire", "--aspire-ratio", "1.5"),
    ):
        pass
    assert "the server ended with status 1" in str(error.value)
    lines = (tmp_path / "log").read_text().splitlines()
    assert [line for line in lines if "ratio" in line] == [
        "aspire: ratio is 1.5; it must be above 0 and at most 1 (1 reads every page)"
    ]
    assert not [line for line in lines if "Traceback" in line]


BREAK_SCHEDULER = """
import sys
if "--multiprocessing-fork" in sys.orig_argv:
    from aspire_sglang.sglang_compat import plugin

    register = plugin.register

    def register_without_one_hook():
        register()
        from sglang.srt.plugins.hook_registry import HookRegistry
        del HookRegistry._hooks["sglang.srt.managers.schedule_batch.Req.update_finish_state"]

    plugin.register = register_without_one_hook
"""


@pytest.mark.engine
def test_a_hook_missing_in_the_scheduler_process_ends_the_server(llama: str, tmp_path: Path) -> None:
    """The main process has all hooks, its scheduler lacks one: nothing is served, and the log says which."""
    (tmp_path / "sitecustomize.py").write_text(BREAK_SCHEDULER)
    started = time.monotonic()
    options = ("--spec-algorithm", "aspire", "--dtype", "float32", "--max-total-tokens", "1024")
    with (
        pytest.raises(ServerError) as error,
        running_server(llama, tmp_path / "log", *options, env={"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}),
    ):
        pass
    assert "the server ended with status" in str(error.value)
    assert "ended with status 0" not in str(error.value)
    log = (tmp_path / "log").read_text()
    assert "did not apply 1 hook(s) of aspire-sglang" in log
    assert "Req.update_finish_state); output could be wrong, so the server stops" in log
    assert "The server is fired up" not in log
    assert time.monotonic() - started < 240


# --- Engine -----------------------------------------------------------------------------------------------------------

ENGINE_SCRIPT = """
import json, sys
import sglang

if __name__ == "__main__":
    model, prompts, sampling = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
    options = dict(model_path=model, speculative_algorithm="ASPIRE", dtype="float32", max_total_tokens=4096,
                   aspire_min_pages=3, aspire_recent_pages=1, aspire_ratio=0.01, log_level="error")
    try:
        sglang.Engine(**options, aspire_policy="sometimes")
    except ValueError as error:
        refusal = [type(error).__name__, str(error)]
    with sglang.Engine(**options, aspire_policy="fixed:3", aspire_draft_max=5) as engine:
        outputs = engine.generate(input_ids=prompts, sampling_params=sampling)
        counters = engine.get_server_info()["internal_states"][0]["aspire"]
    print(json.dumps({"refusal": refusal, "outputs": outputs, "counters": counters}))
"""


@pytest.mark.engine
@pytest.mark.usefixtures("one_thread")
def test_engine_with_keyword_arguments(llama: str, tmp_path: Path, stock_outputs: Callable[..., list[Any]]) -> None:
    """``sgl.Engine(speculative_algorithm="ASPIRE", aspire_policy=…)``: refuses, then drafts and answers as stock."""
    prompts = [[(7 * place + start) % 300 for place in range(150)] for start in (3, 50)]
    result = run_script(tmp_path, ENGINE_SCRIPT, llama, json.dumps(prompts), json.dumps(GREEDY))
    assert result["refusal"][0] == "ConfigError"
    assert "unknown policy 'sometimes'" in result["refusal"][1]
    expected = [output.output_ids for output in stock_outputs(prompts, GREEDY)]
    assert [output["output_ids"] for output in result["outputs"]] == expected
    for output in result["outputs"]:
        assert len(output["meta_info"]["spec_cap_lens_histogram"]) == 3 + 1
    assert result["counters"]["draft_rows"] > 0
