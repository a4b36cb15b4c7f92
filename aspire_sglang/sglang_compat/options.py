"""From flags, keyword arguments and files to one :class:`AspireConfig` on ``ServerArgs``.

``ServerArgs`` is a dataclass without room for foreign fields, so the record travels as the private attribute
``_aspire_config``: it survives pickling to the scheduler process and deep copies, and SGLang lets only underscore
names be written after resolution.
"""

from __future__ import annotations

import argparse
import contextlib
import contextvars
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from aspire_sglang.config import AspireConfig, ConfigError

PREFIX = "aspire_"
_FILE_OPTION = "config"
_pending: contextvars.ContextVar[dict[str, Any] | None] = contextvars.ContextVar("aspire_options", default=None)


def config_of(server_args: Any) -> AspireConfig:
    """The record attached by :func:`around_init`."""
    config: AspireConfig = server_args._aspire_config
    return config


def is_selected(server_args: Any) -> bool:
    """True when these arguments select ASPIRE, at any stage of their resolution."""
    return getattr(server_args, "_aspire_config", None) is not None


def add_cli_args(result: None, parser: argparse.ArgumentParser) -> None:
    """AFTER ``ServerArgs.add_cli_args``: ``--spec-algorithm`` and the ``--aspire-*`` group."""
    parser.add_argument(
        "--spec-algorithm",
        dest="speculative_algorithm",
        type=str,
        default=argparse.SUPPRESS,
        help="Same as --speculative-algorithm; 'aspire' selects aspire-sglang.",
    )
    group = parser.add_argument_group("aspire", "Self-speculative decoding; used with --spec-algorithm aspire.")
    for spec in dataclasses.fields(AspireConfig):
        group.add_argument(
            f"--aspire-{spec.name.replace('_', '-')}",
            dest=PREFIX + spec.name,
            type=_value_parser(type(spec.default)),
            default=argparse.SUPPRESS,
            metavar=spec.metadata["unit"].upper(),
            help=f"{spec.metadata['help']} (default: {spec.default})".replace("%", "%%"),
        )
    group.add_argument(
        "--aspire-config",
        dest=PREFIX + _FILE_OPTION,
        type=str,
        default=argparse.SUPPRESS,
        metavar="FILE",
        help="YAML or JSON file with the options above (names without the prefix); flags win over it",
    )


def _value_parser(kind: type) -> Callable[[str], Any]:
    """Text that is no ``kind`` stays text: the config record then says in one line what is wrong with it."""

    def parse(text: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            return text

    return parse


def around_from_cli_args(original: Callable[..., Any], cls: type, args: argparse.Namespace) -> Any:
    """AROUND ``ServerArgs.from_cli_args``: hand the flags on, since the original keeps dataclass fields only."""
    values = {name: value for name, value in vars(args).items() if name.startswith(PREFIX)}
    try:
        with _handing_on(values):
            return original(cls, args)
    except ConfigError as error:
        sys.exit(f"aspire: {error}")


def around_init(original: Callable[..., None], server_args: Any, *args: Any, **kwargs: Any) -> None:
    """AROUND ``ServerArgs.__init__``: take our keyword arguments out and attach the validated record."""
    values, selected = _take_options(kwargs)
    if values and not selected:
        raise ConfigError(
            f"{', '.join(sorted('--' + name.replace('_', '-') for name in values))}: only used with "
            "--spec-algorithm aspire; add it or leave these out"
        )
    object.__setattr__(server_args, "_aspire_config", load_config(values) if selected else None)
    original(server_args, *args, **kwargs)


def refusing_init(problem: str) -> Callable[..., None]:
    """An AROUND hook for ``ServerArgs.__init__`` that refuses ASPIRE with ``problem`` and passes all else on."""

    def around(original: Callable[..., None], server_args: Any, *args: Any, **kwargs: Any) -> None:
        values, selected = _take_options(kwargs)
        if values or selected:
            raise ConfigError(problem)
        original(server_args, *args, **kwargs)

    return around


def _take_options(kwargs: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """Our options out of ``kwargs`` (mutated) and out of the flags, and whether ASPIRE is selected."""
    values = {name: kwargs.pop(name) for name in list(kwargs) if name.startswith(PREFIX)}
    selected = str(kwargs.get("speculative_algorithm") or "").upper() == "ASPIRE"
    return {**(_pending.get() or {}), **values}, selected


def load_config(values: dict[str, Any]) -> AspireConfig:
    """Build the record from prefixed option values; a ``config`` file supplies those not given otherwise."""
    given = {name.removeprefix(PREFIX): value for name, value in values.items()}
    path = given.pop(_FILE_OPTION, None)
    base = read_options_file(Path(path)) if path is not None else {}
    return AspireConfig.from_mapping({**base, **given})


def read_options_file(path: Path) -> dict[str, Any]:
    """Options from a YAML or JSON file. Raises :class:`ConfigError` that names the file and what is wrong."""
    try:
        text = path.read_text(encoding="utf-8")
        data = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())  # YAML's own messages have several lines
        raise ConfigError(f"cannot read option file {path}: {reason}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"option file {path} holds {type(data).__name__}; it must map option names to values")
    return {str(name).replace("-", "_").removeprefix(PREFIX): value for name, value in data.items()}


@contextlib.contextmanager
def _handing_on(values: dict[str, Any]) -> Iterator[None]:
    token = _pending.set(values)
    try:
        yield
    finally:
        _pending.reset(token)
