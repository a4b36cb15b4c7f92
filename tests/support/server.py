"""A real SGLang server in its own process group: started, waited for, stopped without touching other processes."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

START_SECONDS = 300.0
STOP_SECONDS = 20.0
_POLL_SECONDS = 0.25
_LOG_TAIL_LINES = 40


class ServerError(RuntimeError):
    """The server did not become healthy; the message ends with the tail of its log."""


@dataclass
class Server:
    """One ``python -m sglang.launch_server`` and where to reach it."""

    process: subprocess.Popen[bytes]
    url: str
    log_path: Path

    def log(self) -> str:
        """Everything that the server and its children have written so far."""
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def get(self, path: str, **kwargs: Any) -> requests.Response:
        return requests.get(self.url + path, **{"timeout": 60, **kwargs})

    def post(self, path: str, payload: dict[str, Any] | None = None, **kwargs: Any) -> requests.Response:
        return requests.post(self.url + path, json=payload or {}, **{"timeout": 120, **kwargs})

    def generate(self, prompt: str | Sequence[int], sampling: dict[str, Any] | None = None, **fields: Any) -> Any:
        """``/generate`` with greedy defaults; returns the decoded answer and fails unless the status is 200."""
        answer = self.generate_raw(prompt, sampling, **fields)
        assert answer.status_code == 200, (answer.status_code, answer.text)
        return answer.json()

    def generate_raw(
        self, prompt: str | Sequence[int], sampling: dict[str, Any] | None = None, **fields: Any
    ) -> requests.Response:
        """``/generate`` with greedy defaults, whatever the status."""
        prompt_field = {"text": prompt} if isinstance(prompt, str) else {"input_ids": list(prompt)}
        params = {"temperature": 0.0, "max_new_tokens": 32, **(sampling or {})}
        return self.post("/generate", {**prompt_field, "sampling_params": params, **fields})

    def internal_state(self) -> dict[str, Any]:
        """The scheduler's own state as ``/server_info`` shows it."""
        state: dict[str, Any] = self.get("/server_info").json()["internal_states"][0]
        return state

    def metrics(self) -> dict[str, float]:
        """Prometheus samples by name; those of several label sets are added up."""
        samples: dict[str, float] = {}
        for line in self.get("/metrics").text.splitlines():
            if line and not line.startswith("#"):
                name, value = line.split("{")[0].split(" ")[0], float(line.rsplit(" ", 1)[1])
                samples[name] = samples.get(name, 0.0) + value
        return samples


@contextlib.contextmanager
def running_server(
    model_path: Path | str, log_path: Path, *options: str, env: dict[str, str] | None = None
) -> Iterator[Server]:
    """Start a server with ``options``, wait until ``/health`` answers, stop its process group at the end."""
    port = _free_port()
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model_path), "--port", str(port)]
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [*command, *options],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=log_path.parent,
            env={**os.environ, **(env or {})},
        )
    server = Server(process, f"http://127.0.0.1:{port}", log_path)
    try:
        _wait_until_healthy(server)
        yield server
    finally:
        _stop_group(process)


def _wait_until_healthy(server: Server) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            raise ServerError(f"the server ended with status {server.process.returncode}:\n{_tail(server)}")
        with contextlib.suppress(requests.RequestException):
            if server.get("/health", timeout=10).status_code == 200:
                return
        time.sleep(_POLL_SECONDS)
    raise ServerError(f"the server was not healthy after {START_SECONDS:.0f} s:\n{_tail(server)}")


def _stop_group(process: subprocess.Popen[bytes]) -> None:
    """End the group that ``start_new_session`` made: ask first, then insist."""
    for sign, seconds in ((signal.SIGTERM, STOP_SECONDS), (signal.SIGKILL, STOP_SECONDS)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)


def _tail(server: Server) -> str:
    return "\n".join(server.log().splitlines()[-_LOG_TAIL_LINES:])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
