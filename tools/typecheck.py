"""Run mypy on the package as it is installed: ``scheduler/`` as ``aspire_sglang.scheduler`` and so on.

mypy does not know setuptools' package-dir, so this builds a tree of links under build/typecheck/ and reports
messages under the real paths. Arguments are handed to mypy.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TREE = ROOT / "build" / "typecheck"


def main() -> int:
    """Stage the links, run mypy, print its messages; returns its exit status."""
    prefixes = stage(TREE)
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), *sys.argv[1:]]
    done = subprocess.run(
        [*command, "--cache-dir", str(ROOT / ".mypy_cache"), "-p", "aspire_sglang"],
        cwd=TREE,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    for line in done.stdout.splitlines():
        staged, real = next(((s, r) for s, r in prefixes if line.startswith(s)), ("", ""))
        print(real + line[len(staged) :])
    return done.returncode


def stage(tree: Path) -> list[tuple[str, str]]:
    """Fill ``tree`` with links to the modules; returns (staged prefix, real prefix) pairs, longest first."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    folders: dict[str, str] = project["tool"]["setuptools"]["package-dir"]
    shutil.rmtree(tree, ignore_errors=True)
    for package in sorted(folders):
        target = tree / package.replace(".", "/")
        if "." in package:
            target.symlink_to(ROOT / folders[package])
            continue
        target.mkdir(parents=True)
        for entry in (ROOT / folders[package]).iterdir():
            (target / entry.name).symlink_to(entry)
    prefixes = [(package.replace(".", "/") + "/", folder + "/") for package, folder in folders.items()]
    return sorted(prefixes, key=lambda pair: -len(pair[0]))


if __name__ == "__main__":
    sys.exit(main())
