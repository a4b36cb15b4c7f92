"""The CPU platform class. SGLang instantiates it while it is itself being imported: only its platform modules may be
imported at the top of this file."""

from __future__ import annotations

from typing import Any

from sglang.srt.platforms.cpu import CpuSRTPlatform
from sglang.srt.platforms.device_mixin import PlatformEnum

from aspire_sglang.sglang_compat.platform import CPU_ATTENTION_BACKEND, apply_cpu_defaults


class AspireCpuPlatform(CpuSRTPlatform):  # type: ignore[misc]
    """SGLang's CPU platform, marked out-of-tree so that native PyTorch implementations are chosen everywhere."""

    _enum = PlatformEnum.OOT

    def get_device(self, local_rank: int = 0) -> str:
        return "cpu"  # the in-tree class returns a torch.device, which argument resolution cannot take

    def apply_server_args_defaults(self, server_args: Any) -> None:
        apply_cpu_defaults(server_args)

    def get_default_attention_backend(self) -> str:
        return CPU_ATTENTION_BACKEND

    def get_mha_kv_pool_cls(self) -> type:
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        return MHATokenToKVPool  # type: ignore[no-any-return]

    def get_paged_allocator_cls(self) -> Any:
        from aspire_sglang.sglang_compat.cpu_pools import make_allocator

        return make_allocator

    def get_compile_backend(self, mode: str | None = None) -> str:
        return "eager"
