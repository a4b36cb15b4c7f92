"""The one configuration record, and its validation.

Every way of configuring the plugin (``--aspire-*`` flags, ``Engine`` keyword arguments, a YAML/JSON file)
ends in :class:`AspireConfig`; nothing downstream reads flags, files or the environment.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SELECTORS = ("refresh", "verify", "verify-per-layer", "window")
POLICIES = ("aspire", "aspire-paper", "fsm", "fixed:G", "sync:G", "off")
DRAFT_SAMPLING = ("coupled", "argmax")
MAX_DRAFT_MAX = 64

_POLICY_PATTERN = re.compile(r"(aspire|aspire-paper|fsm|off)|(fixed|sync):(\d+)")


class ConfigError(ValueError):
    """A value that cannot be served; the message names the value and the fix."""


def option(default: Any, unit: str, help: str) -> Any:
    """A config field with the text that ``--help`` and the docs show."""
    return field(default=default, metadata={"unit": unit, "help": help})


@dataclass(frozen=True, kw_only=True, slots=True)
class AspireConfig:
    """Validated settings of one server. Raises :class:`ConfigError` on any value out of range."""

    draft_max: int = option(16, "tokens", "longest draft of a request between two verifies")
    draft_init: int = option(3, "tokens", "drafts of a request's first cycle, before any acceptance is known")
    policy: str = option("aspire", "name", f"when a request verifies: {', '.join(POLICIES)} (G = drafts a cycle)")
    selector: str = option("refresh", "name", f"how the sparse context is chosen: {', '.join(SELECTORS)}")
    ratio: float = option(0.07, "share", "share of a request's pages that drafting reads, in (0, 1]")
    min_pages: int = option(32, "pages", "fewest pages that drafting reads, sink and recent pages included")
    recent_pages: int = option(8, "pages", "most recent pages, always read while drafting")
    sink_pages: int = option(1, "pages", "first pages, always read while drafting")
    page_size: int = option(16, "tokens", "tokens of a selection page (independent of SGLang's own page size)")
    refresh_layer: int = option(-2, "layer", "layer whose attention selects the context; negative counts from the end")
    dense_layers: int = option(0, "layers", "first layers that read the full context even while drafting")
    sampling: str = option(
        "coupled",
        "name",
        "how drafts are drawn at temperature > 0: coupled (the target's own noise, most accepted) or argmax",
    )

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):
            _check_type(spec.name, getattr(self, spec.name), spec.default)
        _check_range("draft_max", self.draft_max, 1, MAX_DRAFT_MAX)
        _check_range("draft_init", self.draft_init, 0, self.draft_max, "draft_max")
        _check_range("min_pages", self.min_pages, 1)
        _check_range("recent_pages", self.recent_pages, 1)
        _check_range("sink_pages", self.sink_pages, 0)
        _check_range("dense_layers", self.dense_layers, 0)
        if not 0.0 < self.ratio <= 1.0:
            raise ConfigError(f"ratio is {self.ratio}; it must be above 0 and at most 1 (1 reads every page)")
        if self.page_size < 1 or self.page_size & (self.page_size - 1):
            raise ConfigError(f"page_size is {self.page_size}; it must be a power of two, for example 16")
        _check_choice("selector", self.selector, SELECTORS)
        _check_choice("sampling", self.sampling, DRAFT_SAMPLING)
        match = _POLICY_PATTERN.fullmatch(self.policy)
        if match is None:
            raise ConfigError(f"unknown policy {self.policy!r}; choose from {', '.join(POLICIES)}")
        if match.group(3) is not None:
            _check_range(f"policy {self.policy!r}: drafts a cycle", int(match.group(3)), 0, self.draft_max, "draft_max")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> AspireConfig:
        """Build from plain values (a file, keyword arguments); unknown names are an error that suggests the nearest."""
        names = [spec.name for spec in dataclasses.fields(cls)]
        for name in values:
            if name not in names:
                near = difflib.get_close_matches(name, names, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(names)}"
                raise ConfigError(f"unknown aspire option {name!r}{hint}")
        return cls(**values)

    def resolve_refresh_layer(self, num_layers: int) -> int:
        """The refresh layer as 0..num_layers-1, checked against the model; also checks ``dense_layers``."""
        layer = self.refresh_layer + num_layers if self.refresh_layer < 0 else self.refresh_layer
        if not 0 <= layer < num_layers:
            raise ConfigError(
                f"refresh_layer is {self.refresh_layer}, but the model has {num_layers} layers: "
                f"use 0..{num_layers - 1}, or -1..-{num_layers} from the end"
            )
        if self.dense_layers >= num_layers:
            raise ConfigError(
                f"dense_layers is {self.dense_layers}, but the model has {num_layers} layers: leave at least one sparse"
            )
        return layer


def _check_type(name: str, value: Any, default: Any) -> None:
    wanted: tuple[type, ...] = (int, float) if isinstance(default, float) else (type(default),)
    if isinstance(value, bool) or not isinstance(value, wanted):
        raise ConfigError(f"{name} is {value!r} ({type(value).__name__}); it must be {wanted[-1].__name__}")


def _check_range(name: str, value: int, low: int, high: int | None = None, high_name: str = "") -> None:
    if value < low or (high is not None and value > high):
        limit = f"{low} or more" if high is None else f"{low} to {high}" + (f" ({high_name})" if high_name else "")
        raise ConfigError(f"{name} is {value}; it must be {limit}")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        near = difflib.get_close_matches(value, choices, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"unknown {name} {value!r}; choose from {', '.join(choices)}{hint}")
