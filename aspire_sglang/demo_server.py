"""A real SGLang server as a child process: started on a free port, watched, and stopped by its own process group."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LAUNCH = (sys.executable, "-m", "sglang.launch_server")
_POLL_SECONDS = 0.5
_STOP_SECONDS = 15.0
_LOG_TAIL_LINES = 25
# No proxy: requests to this machine must not leave it.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ServerError(RuntimeError):
    """A server that did not start or did not answer; the message holds the end of its log."""


@dataclass(frozen=True)
class Server:
    """One running ``sglang.launch_server``, leader of a process group of its own."""

    name: str
    port: int
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def counters(self) -> dict[str, float]:
        """ASPIRE's counters since the server started. Raises :class:`ServerError` when it reports none."""
        for path in ("/server_info", "/get_server_info"):
            with contextlib.suppress(OSError, ValueError):
                info = _get_json(self.url + path)
                found: dict[str, float] | None = info["internal_states"][0].get("aspire")
                if found is not None:
                    return found
        raise ServerError(f"the {self.name} server at {self.url} reports no ASPIRE counters; log: {self.log}")


@contextlib.contextmanager
def running_servers(commands: Mapping[str, Sequence[str]], *, log_dir: Path) -> Iterator[list[Server]]:
    """Start one server for each name -> extra arguments, at once; stop all of them on the way out, whatever happens.

    They may not answer yet: call :func:`wait_until_ready`. Logs go to ``log_dir``, which is also their working
    directory, so that no folder of the caller's can be mistaken for a module.
    """
    servers: list[Server] = []
    try:
        for name, args in commands.items():
            servers.append(_start(name, args, port=free_port(), log=log_dir / f"{name}-server.log"))
        yield servers
    finally:
        stop([server.process for server in servers])


def wait_until_ready(server: Server, *, timeout_seconds: float, on_wait: Callable[[float], None]) -> None:
    """Return when ``/health`` answers 200; ``on_wait`` gets the seconds waited, twice a second.

    Raises :class:`ServerError` with the end of the log as soon as the process dies, or after ``timeout_seconds``.
    """
    start = time.monotonic()
    while (waited := time.monotonic() - start) < timeout_seconds:
        status = server.process.poll()
        if status is not None:
            raise ServerError(
                f"the {server.name} server ended with status {status}; end of its log:\n{_tail(server.log)}"
            )
        if _is_healthy(server.url):
            return
        on_wait(waited)
        time.sleep(_POLL_SECONDS)
    raise ServerError(
        f"the {server.name} server was not ready after {timeout_seconds:.0f} s (raise --startup-timeout on a slow "
        f"machine); end of its log:\n{_tail(server.log)}"
    )


def stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End the process groups led by ``processes``: ask all, wait for them together, then kill what is left."""
    for process in processes:
        _signal_group(process, signal.SIGTERM)
    deadline = time.monotonic() + _STOP_SECONDS
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=max(0.0, deadline - time.monotonic()))
        # The leader may be gone while its workers are not.
        _signal_group(process, signal.SIGKILL)
        process.wait()


def free_port() -> int:
    """A TCP port that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _start(name: str, args: Sequence[str], *, port: int, log: Path) -> Server:
    # Waiting OpenMP threads sleep: on a machine with few cores, spinning ones keep the working ones from running.
    env = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*LAUNCH, "--host", "127.0.0.1", "--port", str(port), *args],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=log.parent,
            env=env,
            start_new_session=True,
        )
    return Server(name=name, port=port, process=process, log=log)


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _is_healthy(url: str) -> bool:
    try:
        with _OPENER.open(url + "/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _get_json(url: str) -> dict[str, Any]:
    with _OPENER.open(url, timeout=30) as answer:
        content: dict[str, Any] = json.load(answer)
        return content


def _tail(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(lines[-_LOG_TAIL_LINES:])
