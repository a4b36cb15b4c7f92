"""Out-of-tree SGLang platform: the real engine on a CPU, in plain PyTorch.

SGLang's own CPU path needs kernels built for AMX. This platform keeps its device handling and swaps the parts that
would launch Triton or AMX kernels. On a machine with a GPU :func:`activate` returns None and SGLang chooses as usual.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from aspire_sglang.config import ConfigError
from aspire_sglang.sglang_compat import options
from aspire_sglang.sglang_compat.version import version_problem

CPU_ATTENTION_BACKEND = "torch_native"
GPU_ATTENTION_BACKEND = "aspire"
_ATTENTION_OPTIONS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
_GRAPH_OPTIONS = ("cuda_graph_backend_decode", "cuda_graph_backend_prefill")


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
    for name in _ATTENTION_OPTIONS:  # SGLang itself has filled in intel_amx by now
        value = getattr(server_args, name)
        if value not in (None, CPU_ATTENTION_BACKEND, "intel_amx"):
            raise ConfigError(
                f"--{name.replace('_', '-')} {value} needs a GPU; on this machine leave it out "
                f"or use {CPU_ATTENTION_BACKEND}"
            )
    server_args.attention_backend = CPU_ATTENTION_BACKEND
    server_args.sampling_backend = "pytorch"
    server_args.disable_overlap_schedule = True
    server_args.sleep_on_idle = True  # an idle scheduler would keep a core busy that tokenizers and models need


def apply_gpu_defaults(server_args: Any) -> None:
    """BEFORE ``ServerArgs.__post_init__``: what ASPIRE needs on a GPU, chosen before SGLang resolves anything.

    Mixed steps run eagerly: CUDA graphs are off unless the user asks for them, which ``support`` refuses.
    """
    if is_cpu_platform():
        return  # see apply_cpu_defaults
    chosen = {name: getattr(server_args, name) for name in _ATTENTION_OPTIONS}
    if not options.is_selected(server_args):
        if GPU_ATTENTION_BACKEND in chosen.values():
            raise ConfigError(f"attention backend {GPU_ATTENTION_BACKEND}: add --spec-algorithm aspire or leave it out")
        return
    for name, value in chosen.items():
        if value not in (None, GPU_ATTENTION_BACKEND):
            raise ConfigError(
                f"--{name.replace('_', '-')} {value}: --spec-algorithm aspire brings its own attention; leave it out"
            )
    server_args.attention_backend = GPU_ATTENTION_BACKEND
    server_args.disable_overlap_schedule = True
    for name in _GRAPH_OPTIONS:
        if getattr(server_args, name) is None:
            setattr(server_args, name, "disabled")
