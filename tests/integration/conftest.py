"""Fixtures of the tests that drive SGLang's real scheduler inside the test process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def llama(tiny_model: Callable[[str], Path]) -> str:
    """Folder of a tiny Llama with three query heads a KV head."""
    return str(tiny_model("llama-gqa3"))


@pytest.fixture(scope="session")
def stock_outputs(llama: str) -> Callable[..., list[Any]]:
    """REF of docs/known-faults.md: outputs of stock SGLang without speculation, in an engine with a large pool.

    Kept for the session. Not while another engine runs: there is room for one in a process.
    """
    from tests.support.engine import running_engine

    known: dict[str, list[Any]] = {}

    def run(
        prompts: Sequence[Sequence[int]], sampling: Any, *, server: dict[str, Any] | None = None, **fields: Any
    ) -> list[Any]:
        key = repr((prompts, sampling, server, fields))
        if key not in known:
            with running_engine(llama, **(server or {})) as engine:
                outputs = engine.generate(prompts, sampling, **fields)
            known[key] = [dataclasses.replace(output, req=None) for output in outputs]
        return known[key]

    return run
