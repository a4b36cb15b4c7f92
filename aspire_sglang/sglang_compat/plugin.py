"""Entry point ``sglang.srt.plugins``: loaded by SGLang in the main and the scheduler process, before arguments."""

from __future__ import annotations

from typing import Any

from aspire_sglang.sglang_compat.version import version_problem


def register() -> None:
    """Register the algorithm, the attention backend and the hooks. Called once a process by SGLang."""
    problem = version_problem()
    if problem is not None:
        _register_refusal(problem)
        return
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from aspire_sglang.sglang_compat import attention, hooks
    from aspire_sglang.sglang_compat.spec_algorithm import ALGORITHM, AspireSpecAlgorithm

    SpeculativeAlgorithm.register(ALGORITHM, spec_class=AspireSpecAlgorithm, validate_server_args=_check_hooks)(
        _worker_class
    )
    attention.register()
    hooks.register_hooks()


def _check_hooks(server_args: Any) -> None:
    """In the main process, while arguments are resolved: nothing has been started yet."""
    from aspire_sglang.sglang_compat.hooks import check_hooks

    check_hooks()


def _worker_class(server_args: Any) -> type:
    """The worker, once SGLang has chosen ASPIRE; hooks may also be missing in the scheduler process alone."""
    _check_hooks(server_args)
    from aspire_sglang.sglang_compat.worker import AspireWorker

    return AspireWorker


def _register_refusal(problem: str) -> None:
    """On another SGLang: leave it alone, but keep our flags known so that choosing ASPIRE says what is wrong."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from aspire_sglang.sglang_compat import options

    server_args = "sglang.srt.server_args.ServerArgs"
    HookRegistry.register(f"{server_args}.add_cli_args", options.add_cli_args, HookType.AFTER)
    HookRegistry.register(f"{server_args}.from_cli_args", options.around_from_cli_args, HookType.AROUND)
    HookRegistry.register(f"{server_args}.__init__", options.refusing_init(problem), HookType.AROUND)
