"""The SGLang that this code was written against, and the check that it is the one installed."""

from __future__ import annotations

import importlib.metadata

SUPPORTED_SGLANG = "0.5.17"


def version_problem() -> str | None:
    """One line that says what is wrong with the installed SGLang, or None when it is the supported one."""
    installed = importlib.metadata.version("sglang")
    if installed == SUPPORTED_SGLANG:
        return None
    return (
        f"aspire-sglang supports SGLang {SUPPORTED_SGLANG}, but {installed} is installed: "
        f"pip install sglang=={SUPPORTED_SGLANG}"
    )
