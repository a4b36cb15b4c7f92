"""``make demo``: two questions to a real server with ASPIRE, the same to one without, and what the difference was."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from types import FrameType
from typing import NoReturn

import torch

from aspire_sglang.demo_report import Answer, Report, render_report
from aspire_sglang.demo_server import Server, ServerError, running_servers, wait_until_ready
from aspire_sglang.models.default_model import NAME, default_model_path
from aspire_sglang.models.store import ModelError, cache_root

_DEFAULT_DOCUMENT = Path(__file__).resolve().parent.parent / "examples" / "document.txt"
DOCUMENT_QUESTION = "What advice is given to new keepers?"
SHORT_QUESTION = "What does a lighthouse keeper do? Answer in a few sentences."
# Small pools, because two servers share the machine; the idle one must leave the processor to the other.
_SERVER_ARGS = ("--context-length", "8192", "--max-total-tokens", "16384", "--sleep-on-idle", "--skip-server-warmup")

# For a model of 135M parameters the weights cost more than the KV that speculation saves, and the default policy
# rightly decodes plainly; a fixed length and a small budget show the machinery at work.
SHOWN_ARGS = ("--aspire-policy", "fixed:6", "--aspire-min-pages", "16", "--aspire-recent-pages", "4")


class DemoError(RuntimeError):
    """Something the caller gave that cannot work; the message names it and the fix."""


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """What the command line chose."""

    document: Path = _DEFAULT_DOCUMENT
    model_path: Path | None = None
    max_tokens: int = 128
    startup_timeout_seconds: float = 300.0
    aspire_args: tuple[str, ...] = SHOWN_ARGS

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> DemoOptions:
        """From the options of :func:`add_arguments`."""
        return cls(
            document=args.document,
            model_path=args.model_path,
            max_tokens=args.max_tokens,
            startup_timeout_seconds=args.startup_timeout,
            aspire_args=tuple(args.aspire_args) or SHOWN_ARGS,
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The demo's options."""
    defaults = DemoOptions()
    parser.add_argument(
        "--document", type=Path, default=defaults.document, help="text that the first question is about"
    )
    parser.add_argument("--model-path", type=Path, help=f"folder of a model (default: the embedded {NAME})")
    parser.add_argument(
        "--max-tokens", type=int, default=defaults.max_tokens, help="longest answer (default: %(default)s)"
    )
    parser.add_argument(
        "--startup-timeout",
        type=float,
        metavar="SECONDS",
        default=defaults.startup_timeout_seconds,
        help="how long a server may take to start (default: %(default)s)",
    )
    parser.add_argument(
        "aspire_args",
        nargs="*",
        metavar="-- ARG",
        help=f"arguments of the ASPIRE server (default: {' '.join(SHOWN_ARGS)}; the server's own default policy "
        "would decode this small model plainly)",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m aspire_sglang.demo", description=__doc__)
    add_arguments(parser)
    return run(DemoOptions.from_args(parser.parse_args(argv)))


def run(options: DemoOptions) -> int:
    """Run the demo. Returns 0, or 1 when it failed or when float32 answers differ; stops every server it started."""
    signal.signal(signal.SIGTERM, _exit_on_signal)
    try:
        report = _compare(options)
    except (DemoError, ModelError, ServerError) as error:
        print(f"aspire: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\naspire: interrupted; the servers are stopped", file=sys.stderr)
        return 130
    print(render_report(report))
    return 0 if report.is_identical or not report.is_exact else 1


def _compare(options: DemoOptions) -> Report:
    questions = _questions(options.document)
    model = options.model_path or default_model_path()
    is_exact = not torch.cuda.is_available()
    common = ["--model-path", str(model), "--served-model-name", NAME, *_SERVER_ARGS]
    common += ["--dtype", "float32"] if is_exact else []
    commands = {"aspire": [*common, "--spec-algorithm", "aspire", *options.aspire_args], "plain": common}
    log_dir = cache_root() / "demo"
    log_dir.mkdir(parents=True, exist_ok=True)
    where = "the CPU, in float32" if is_exact else torch.cuda.get_device_name()
    print(f"Starting two SGLang servers on {where}, one of them with --spec-algorithm aspire; logs in {log_dir}")
    with running_servers(commands, log_dir=log_dir) as (aspire, plain):
        for server in (aspire, plain):
            wait_until_ready(server, timeout_seconds=options.startup_timeout_seconds, on_wait=_progress(server.name))
            print(f"  {server.name} server ready at {server.url}")
        print("\nAsking both questions, the second while the first is answered, with ASPIRE:")
        before = aspire.counters()
        aspire_answers, aspire_seconds = _ask_all(aspire, questions, options.max_tokens, is_shown=True)
        after = aspire.counters()
        print("\nAsking the same of the plain server ...")
        plain_answers, plain_seconds = _ask_all(plain, questions, options.max_tokens, is_shown=False)
    return Report(
        aspire_answers=aspire_answers,
        plain_answers=plain_answers,
        aspire_seconds=aspire_seconds,
        plain_seconds=plain_seconds,
        counters={name: after[name] - before[name] for name in after if isinstance(after[name], int)},
        is_exact=is_exact,
    )


def _questions(document: Path) -> dict[str, str]:
    """Shown text -> prompt."""
    try:
        text = document.read_text(encoding="utf-8")
    except OSError as error:
        raise DemoError(f"cannot read {document}: {error.strerror}; name a text file with --document") from error
    about = f"{DOCUMENT_QUESTION} (about {document.name}, {len(text.split())} words)"
    return {about: f"{text}\n Question: {DOCUMENT_QUESTION}", SHORT_QUESTION: SHORT_QUESTION}


def _ask_all(
    server: Server, questions: dict[str, str], max_tokens: int, *, is_shown: bool
) -> tuple[tuple[Answer, ...], float]:
    """Ask the first, and the others once its answer has begun, so that requests in different phases share the steps.

    The first answer is streamed to the screen. Returns the answers in order and the seconds until the last one ended.
    """
    start = time.monotonic()
    (shown, first_prompt), *others = questions.items()
    has_begun = Event()

    def on_text(text: str) -> None:
        if text:
            has_begun.set()
        if is_shown:
            print(text, end="", flush=True)

    if is_shown:
        print(f"\nQ: {shown}\nA: ", end="", flush=True)
    with ThreadPoolExecutor(max_workers=len(questions)) as threads:
        first = threads.submit(_ask, server, first_prompt, max_tokens, on_text)
        first.add_done_callback(lambda _future: has_begun.set())  # an error must not keep the others waiting
        has_begun.wait()
        futures = {title: threads.submit(_ask, server, prompt, max_tokens, _ignore) for title, prompt in others}
        answers = {shown: first.result(), **{title: future.result() for title, future in futures.items()}}
    seconds = time.monotonic() - start
    if is_shown:
        print()
        for title in list(questions)[1:]:
            print(f"\nQ: {title}\nA: {answers[title].text}")
    return tuple(answers.values()), seconds


def _ask(server: Server, prompt: str, max_tokens: int, on_text: Callable[[str], None]) -> Answer:
    """One streamed chat completion at temperature 0."""
    try:
        import httpx
        import openai
    except ImportError as error:
        raise DemoError(f"the demo needs {error.name}: pip install 'aspire-sglang[demo]'") from error
    text, reason, num_tokens = "", "", 0
    try:
        # trust_env=False: a proxy in the environment must not see requests to this machine.
        with httpx.Client(trust_env=False, timeout=600) as http:
            client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", http_client=http, max_retries=0)
            stream = client.chat.completions.create(
                model=NAME,
                messages=[{"role": "user", "content": prompt}],
                temperature=0,
                max_tokens=max_tokens,
                stream=True,
                stream_options={"include_usage": True},
            )
            for chunk in stream:
                for choice in chunk.choices:
                    piece = choice.delta.content or ""
                    on_text(piece)
                    text += piece
                    reason = choice.finish_reason or reason
                num_tokens = chunk.usage.completion_tokens if chunk.usage else num_tokens
    except openai.OpenAIError as error:
        raise ServerError(f"the {server.name} server did not answer: {error}; log: {server.log}") from error
    return Answer(text=text, finish_reason=reason, num_tokens=num_tokens)


def _ignore(text: str) -> None:
    pass


def _progress(name: str) -> Callable[[float], None]:
    """Say every ten seconds that we are still waiting."""
    said = 0

    def on_wait(waited_seconds: float) -> None:
        nonlocal said
        if int(waited_seconds // 10) > said:
            said = int(waited_seconds // 10)
            print(f"  waiting for the {name} server ({waited_seconds:.0f} s)", flush=True)

    return on_wait


def _exit_on_signal(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
