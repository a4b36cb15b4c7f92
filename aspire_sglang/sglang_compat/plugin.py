"""Entry point ``sglang.srt.plugins``: loaded by SGLang in the main and the scheduler process, before arguments."""

from __future__ import annotations

from typing import Any

from aspire_sglang.config import ConfigError
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

    SpeculativeAlgorithm.register(ALGORITHM, spec_class=AspireSpecAlgorithm)(_worker_class)
    attention.register()
    hooks.register_hooks()


def _worker_class(server_args: Any) -> type:
    """The worker, once SGLang has chosen ASPIRE; the last moment to find out that a hook did not take."""
    check_hooks()
    from aspire_sglang.sglang_compat.worker import AspireWorker

    return AspireWorker


def check_hooks() -> None:
    """Raise :class:`ConfigError` that names the hooks SGLang did not apply in this process."""
    from aspire_sglang.sglang_compat.hooks import missing_hooks

    missing = missing_hooks()
    if missing:
        raise ConfigError(
            f"SGLang did not apply {len(missing)} hook(s) of aspire-sglang ({', '.join(missing)}); output could be "
            "wrong, so the server stops. Reinstall SGLang and aspire-sglang, and unset SGLANG_PLUGINS"
        )


def _register_refusal(problem: str) -> None:
    """On another SGLang: leave it alone, but make ``--speculative-algorithm aspire`` say what is wrong."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    def refuse(server_args: Any) -> None:
        raise ConfigError(problem)

    SpeculativeAlgorithm.register("ASPIRE", validate_server_args=refuse)(refuse)
