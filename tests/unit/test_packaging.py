"""What a wheel contains, where SGLang is imported, and that files name no machine."""

from __future__ import annotations

import ast
import configparser
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Folder of the repository -> package that it is installed as.
PACKAGES = {
    "aspire_sglang": "aspire_sglang",
    "scheduler": "aspire_sglang.scheduler",
    "attention_backends": "aspire_sglang.attention_backends",
}
COMPAT = "aspire_sglang.sglang_compat"
# Home and workspace folders; the checkout's own path is added when the test runs.
MACHINE_PATH = re.compile(r"(?<![\w.~])/(?:home|root|Users|workspace|work)/\w")


def module_files() -> dict[str, Path]:
    """Installed module name -> file, for every module of the project."""
    found = {}
    for folder, package in PACKAGES.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = [package, *path.relative_to(ROOT / folder).with_suffix("").parts]
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the sources, so that no earlier build can leak into it."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for folder in PACKAGES:
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", "dist"]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = (copy / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel unpacked into an empty folder, as pip would."""
    target = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    return target


def run_python(code: str, *, cwd: Path, path: Path | None = None) -> str:
    """Output of ``code`` in a new interpreter, with ``path`` before the installed packages."""
    env = {**os.environ, "PYTHONPATH": str(path) if path else ""}
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_wheel_holds_every_module_and_nothing_else_at_the_top(installed: Path) -> None:
    top = {path.name for path in installed.iterdir()}
    assert top == {"aspire_sglang", next(name for name in top if name.endswith(".dist-info"))}
    for name, source in module_files().items():
        suffix = "/__init__.py" if source.name == "__init__.py" else ".py"
        target = installed / (name.replace(".", "/") + suffix)
        assert target.is_file(), f"{name} is missing: name its package in [tool.setuptools] packages"
    assert (installed / "aspire_sglang" / "py.typed").is_file()


def test_bare_names_are_not_importable_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    code = """
import importlib.util as u
print(u.find_spec("scheduler"), u.find_spec("attention_backends"))
print(u.find_spec("aspire_sglang.scheduler").origin)
print(u.find_spec("aspire_sglang.attention_backends").origin)
"""
    bare, scheduler, backends = run_python(code, cwd=tmp_path, path=installed).splitlines()
    assert bare == "None None"
    assert scheduler == str(installed / "aspire_sglang" / "scheduler" / "__init__.py")
    assert backends == str(installed / "aspire_sglang" / "attention_backends" / "__init__.py")


def test_entry_points_and_licence(installed: Path) -> None:
    (info,) = installed.glob("*.dist-info")
    parser = configparser.ConfigParser(delimiters="=")
    parser.read(info / "entry_points.txt")
    assert {section: dict(parser[section]) for section in parser.sections()} == {
        "console_scripts": {"aspire-sglang": "aspire_sglang.cli:main"},
        "sglang.srt.platforms": {"aspire": "aspire_sglang.sglang_compat.platform:activate"},
        "sglang.srt.plugins": {"aspire": "aspire_sglang.sglang_compat.plugin:register"},
    }
    assert (info / "licenses" / "LICENSE").is_file()
    assert "Requires-Dist: sglang==0.5.17" in (info / "METADATA").read_text(encoding="utf-8")


def test_versions_are_stated_once(tmp_path: Path) -> None:
    import tomllib

    import aspire_sglang
    from aspire_sglang.sglang_compat.version import SUPPORTED_SGLANG

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == aspire_sglang.__version__
    assert f"sglang=={SUPPORTED_SGLANG}" in project["dependencies"]
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    for requirement in (entry for entry in project["dependencies"] if "==" in entry):
        assert requirement in pinned


def test_only_sglang_compat_imports_sglang() -> None:
    offenders = []
    for name, path in module_files().items():
        if name.startswith(COMPAT):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            imported = []
            if isinstance(node, ast.Import):
                imported = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                imported = [node.module or ""]
            offenders += [
                f"{path.relative_to(ROOT)}:{node.lineno}" for module in imported if module.split(".")[0] == "sglang"
            ]
    assert offenders == []


def test_the_rest_imports_without_sglang(tmp_path: Path) -> None:
    names = [name for name in module_files() if not name.startswith(COMPAT) and not name.endswith("__main__")]
    assert len(names) > 10
    code = f"""
import importlib, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "sglang":
            raise ImportError(f"{{name}} is blocked in this test")

sys.meta_path.insert(0, Blocker())
for name in {names!r}:
    importlib.import_module(name)
assert not any(name.partition(".")[0] == "sglang" for name in sys.modules)
"""
    run_python(code, cwd=tmp_path)


def test_importing_the_package_has_no_side_effects(tmp_path: Path) -> None:
    code = "import sys; before = set(sys.modules); import aspire_sglang; print(sorted(set(sys.modules) - before))"
    assert run_python(code, cwd=tmp_path) == "['aspire_sglang']"


def test_no_file_names_a_machine() -> None:
    own = [str(path) for path in (ROOT, Path.home()) if len(path.parts) > 2]
    offenders = []
    for path in tracked_files():
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, FileNotFoundError):
            continue
        for number, line in enumerate(text.splitlines(), start=1):
            if MACHINE_PATH.search(line) or any(name in line for name in own):
                offenders.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}")
    assert offenders == []


def tracked_files() -> list[Path]:
    """Files of the project: those git knows or would add; without git, everything outside hidden folders."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode == 0:
        return [ROOT / name for name in listed.stdout.splitlines()]
    generated = {"build", "dist", "__pycache__"}
    return [
        path
        for path in ROOT.rglob("*")
        if path.is_file()
        and not any(part.startswith(".") or part in generated for part in path.relative_to(ROOT).parts[:-1])
    ]
