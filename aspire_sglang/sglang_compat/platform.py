"""Out-of-tree SGLang platform: the real engine on a CPU, in plain PyTorch.

SGLang's own CPU path needs kernels built for AMX. This platform keeps its device handling and swaps the parts that
would launch Triton or AMX kernels. On a machine with a GPU :func:`activate` returns None and SGLang chooses as usual.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from aspire_sglang.sglang_compat.version import version_problem

CPU_ATTENTION_BACKEND = "torch_native"


def activate() -> str | None:
    """Entry point ``sglang.srt.platforms``: the platform class to use, or None to stay out of the way."""
    if version_problem() is not None or os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        return None
    has_accelerator = torch.cuda.is_available() or (hasattr(torch, "xpu") and torch.xpu.is_available())
    return None if has_accelerator else "aspire_sglang.sglang_compat.cpu_platform.AspireCpuPlatform"


def is_cpu_platform() -> bool:
    """True when this process runs on the platform of this project."""
    from sglang.srt.platforms import current_platform

    return type(current_platform).__name__ == "AspireCpuPlatform"


def apply_cpu_defaults(server_args: Any) -> None:
    """Fill in what a plain CPU needs; an explicit choice of the user that cannot work is an error."""
    if server_args.attention_backend not in (None, CPU_ATTENTION_BACKEND, "intel_amx"):
        raise ValueError(
            f"--attention-backend {server_args.attention_backend} needs a GPU; "
            f"on this machine leave it out or use {CPU_ATTENTION_BACKEND}"
        )
    server_args.attention_backend = CPU_ATTENTION_BACKEND
    server_args.sampling_backend = "pytorch"
    server_args.disable_overlap_schedule = True
