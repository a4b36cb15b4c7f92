"""The ``aspire-sglang`` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from aspire_sglang import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit status."""
    args = _build_parser().parse_args(argv)
    command: str = args.command
    if command == "version":
        print(__version__)
        return 0
    if command == "model":
        return _model()
    from aspire_sglang import demo

    return demo.run(demo.DemoOptions.from_args(args))


def _build_parser() -> argparse.ArgumentParser:
    from aspire_sglang.demo import add_arguments

    parser = argparse.ArgumentParser(prog="aspire-sglang", description="Self-speculative decoding for SGLang.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    demo = commands.add_parser("demo", help="ask a real server two questions, with and without ASPIRE")
    add_arguments(demo)
    commands.add_parser("model", help="fetch the embedded default model if need be and print its folder")
    commands.add_parser("version", help="print the version")
    return parser


def _model() -> int:
    from aspire_sglang.models.default_model import default_model_path
    from aspire_sglang.models.store import ModelError

    try:
        print(default_model_path())
    except ModelError as error:
        print(f"aspire: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
