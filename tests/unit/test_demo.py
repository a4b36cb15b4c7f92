"""The demo against a stand-in server: what it prints, what it returns, and that it leaves no process behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from aspire_sglang import demo, demo_server
from aspire_sglang.demo_report import Answer, Report, render_report

FAKE = Path(__file__).parents[1] / "support" / "fake_sglang.py"
COUNTERS = {
    "steps": 50,
    "mixed_steps": 30,
    "verify_rows": 20,
    "drafts_verified": 100,
    "drafts_accepted": 80,
    "tokens_committed": 100,
    "draft_kv_tokens_read": 7,
    "draft_kv_tokens_full": 28,
}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The demo starts the stand-in, and keeps its logs in the returned folder."""
    monkeypatch.setattr(demo_server, "LAUNCH", (sys.executable, str(FAKE)))
    monkeypatch.setenv("ASPIRE_CACHE", str(tmp_path))
    monkeypatch.setattr(demo.torch.cuda, "is_available", lambda: False)
    previous = signal.getsignal(signal.SIGTERM)
    yield tmp_path / "demo"
    signal.signal(signal.SIGTERM, previous)


def run_demo(*args: str) -> int:
    return demo.main(["--model-path", "none", *args])


def assert_nothing_left(logs: Path) -> None:
    """The stand-ins' workers, named in their logs, are gone."""
    pids = [int(pid) for log in logs.glob("*.log") for pid in re.findall(r"worker (\d+)", log.read_text())]
    assert pids
    deadline = time.monotonic() + 5
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline, pids
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_good_run(fake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_demo() == 0
    out = capsys.readouterr().out
    assert f"A: Answer to  Question: {demo.DOCUMENT_QUESTION}" in out
    assert f"A: Answer to {demo.SHORT_QUESTION}" in out
    assert re.search(r"^tokens: +6 \(plain: 6\)$", out, re.M)
    assert re.search(r"^mixed steps: +8 of 8$", out, re.M)
    assert re.search(r"^output identical to plain decoding: yes$", out, re.M)
    assert_nothing_left(fake)


def test_different_answers_fail_in_float32(
    fake: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAKE_SGLANG", "differs")
    assert run_demo() == 1
    out = capsys.readouterr().out
    assert re.search(r"^output identical to plain decoding: no$", out, re.M)
    assert "first difference at character 10" in out
    assert_nothing_left(fake)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("dies", r"the aspire server ended with status 1; end of its log:\n(.*\n)*.*cannot serve: the reason is here"),
        ("hangs", r"the aspire server was not ready after 2 s \(raise --startup-timeout"),
        ("no-counters", r"the aspire server at http://127\.0\.0\.1:\d+ reports no ASPIRE counters"),
    ],
)
def test_a_server_that_fails(
    fake: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fault: str, message: str
) -> None:
    monkeypatch.setenv("FAKE_SGLANG", fault)
    assert run_demo("--startup-timeout", "2" if fault == "hangs" else "60") == 1
    assert re.search(message, capsys.readouterr().err)
    assert_nothing_left(fake)


def test_a_missing_document_starts_nothing(fake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_demo("--document", "missing.txt") == 1
    assert "cannot read missing.txt" in capsys.readouterr().err
    assert not fake.exists()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_the_servers(tmp_path: Path, number: signal.Signals, status: int) -> None:
    code = f"""
import sys
from aspire_sglang import demo, demo_server
demo_server.LAUNCH = (sys.executable, {str(FAKE)!r})
sys.exit(demo.main(["--model-path", "none"]))
"""
    env = {**os.environ, "ASPIRE_CACHE": str(tmp_path), "FAKE_SGLANG": "hangs"}
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    logs = tmp_path / "demo"
    while len([log for log in logs.glob("*.log") if "worker" in log.read_text()]) < 2:
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(number)
    assert process.wait(timeout=30) == status
    assert_nothing_left(logs)


def report(*texts: str, is_exact: bool = True, counters: dict[str, int] = COUNTERS) -> str:
    ours, plain = (Answer(text=text, finish_reason="stop", num_tokens=5) for text in texts)
    return render_report(
        Report(
            aspire_answers=(ours,),
            plain_answers=(plain,),
            aspire_seconds=2.0,
            plain_seconds=3.0,
            counters=counters,
            is_exact=is_exact,
        )
    )


def test_report_figures() -> None:
    text = report("same", "same")
    for pattern in (
        r"tokens per verify: +5\.00",
        r"acceptance: +80\.0% of verified drafts",
        r"KV read while drafting: +25\.0% of full attention",
        r"mixed steps: +30 of 50",
        r"seconds to answer both: +2\.0 \(plain: 3\.0\)",
        r"output identical to plain decoding: yes",
    ):
        assert re.search(pattern, text), pattern


def test_report_without_any_draft() -> None:
    text = report("same", "same", counters=dict.fromkeys(COUNTERS, 0))
    assert re.search(r"acceptance: +none", text)
    assert re.search(r"KV read while drafting: +none", text)


def test_report_explains_a_difference_on_a_gpu() -> None:
    assert "nearly tie" in report("the sea is", "the sky is", is_exact=False)
    assert "first difference at character 5: 'ea is', plain 'ky is'" in report(
        "the sea is", "the sky is", is_exact=False
    )
    assert "first difference at character 3: '', plain ' end'" in report("the", "the end")
