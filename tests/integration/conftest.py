"""Fixtures of the tests that drive SGLang's real scheduler inside the test process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tiny models: on shared cores a second OpenMP thread costs ten times what it saves."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="session")
def llama(tiny_model: Callable[[str], Path]) -> str:
    """Folder of a tiny Llama with three query heads a KV head."""
    return str(tiny_model("llama-gqa3"))


@pytest.fixture(scope="session")
def stock_outputs(llama: str) -> Callable[..., list[Any]]:
    """REF of docs/known-faults.md: outputs of stock SGLang without speculation, in an engine with a large pool."""
    from tests.support.engine import running_engine

    def run(prompts: Sequence[Sequence[int]], sampling: Any, *, server: dict[str, Any] | None = None, **fields: Any):
        with running_engine(llama, **(server or {})) as engine:
            return engine.generate(prompts, sampling, **fields)

    return run
