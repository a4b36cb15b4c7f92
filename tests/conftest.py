"""What unit and integration tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

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
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a tiny model by its name in ``tests.support.tiny_models.TINY_MODELS``, built once a session."""
    from tests.support.tiny_models import build_tiny_model

    root = tmp_path_factory.mktemp("tiny-models")
    return lambda name: build_tiny_model(name, root)


@pytest.fixture(scope="session")
def default_model() -> Path:
    """Folder of SmolLM2-135M-Instruct, fetched into the user's cache when absent."""
    from aspire_sglang.models.default_model import default_model_path

    return default_model_path()
