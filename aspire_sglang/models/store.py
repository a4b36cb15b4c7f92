"""A folder of converted models in the user's cache: built once, complete or absent, checked when used again."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

MANIFEST_NAME = "aspire_manifest.json"


class ModelError(RuntimeError):
    """A model that cannot be provided; the message names what failed and the fix."""


def cache_root() -> Path:
    """``$ASPIRE_CACHE``, else ``$XDG_CACHE_HOME/aspire-sglang``, else ``~/.cache/aspire-sglang``."""
    override = os.environ.get("ASPIRE_CACHE")
    if override:
        return Path(override).expanduser()
    xdg = os.environ.get("XDG_CACHE_HOME")
    return (Path(xdg) if xdg else Path.home() / ".cache") / "aspire-sglang"


def sha256_of(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def ensure_built(target: Path, *, recipe: dict[str, str], build: Callable[[Path], None]) -> Path:
    """Return ``target``, filled by ``build`` when absent, damaged or made by another recipe.

    ``build`` gets an empty folder beside ``target``, which takes its place in one rename: a reader never sees half a
    model. A file lock makes concurrent processes wait for the first and use its result. Every file is compared with
    the manifest's sha256 (about 0.3 s for 270 MB). Raises :class:`ModelError` when the folder cannot be written.
    """
    if problem_with(target, recipe=recipe) is None:
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.parent / f".{target.name}.lock"):
            if problem_with(target, recipe=recipe) is not None:
                _build_and_swap(target, recipe=recipe, build=build)
    except OSError as error:
        raise ModelError(f"cannot write {target}: {error}; set ASPIRE_CACHE to a writable folder") from error
    return target


def problem_with(target: Path, *, recipe: dict[str, str]) -> str | None:
    """Why ``target`` is not a complete model of this recipe, or None."""
    try:
        manifest = json.loads((target / MANIFEST_NAME).read_text(encoding="utf-8"))
        files: dict[str, str] = manifest["files"]
        if manifest["recipe"] != recipe:
            return "made by another version of the conversion"
        for name, digest in files.items():
            if sha256_of(target / name) != digest:
                return f"{name} differs from its checksum"
    except (FileNotFoundError, NotADirectoryError) as error:
        return f"{error.filename} is missing"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST_NAME} cannot be read"
    return None


def _build_and_swap(target: Path, *, recipe: dict[str, str], build: Callable[[Path], None]) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
        fresh = Path(scratch) / "model"
        fresh.mkdir()
        build(fresh)
        files = {path.name: sha256_of(path) for path in sorted(fresh.iterdir())}
        manifest = json.dumps({"recipe": recipe, "files": files}, indent=2)
        (fresh / MANIFEST_NAME).write_text(manifest + "\n", encoding="utf-8")
        if target.exists():
            shutil.rmtree(target)
        fresh.rename(target)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on ``path`` (released by the system if the process dies)."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
