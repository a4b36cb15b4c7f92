"""What the documentation lists is what the code has."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

pytest.importorskip("sglang")

from aspire_sglang.config import AspireConfig
from aspire_sglang.sglang_compat.hooks import HOOKS

ROOT = Path(__file__).parents[2]


def test_architecture_lists_every_hook_with_its_reason() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    for hook in HOOKS:
        assert f"| `{hook.target.removeprefix('sglang.srt.')}` | {hook.kind.value} | {hook.reason} |" in text
    assert text.count("| around |") + text.count("| before |") + text.count("| after |") == len(HOOKS)


def test_readme_lists_every_option_with_its_default() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for spec in dataclasses.fields(AspireConfig):
        flag = f"--aspire-{spec.name.replace('_', '-')}"
        assert f"| `{flag}` | {spec.default} | {spec.metadata['help']} ({spec.metadata['unit']}) |" in text
