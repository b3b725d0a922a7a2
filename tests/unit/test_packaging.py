"""What is installed is all that there is: an editable install would hide a package that is left out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Each package and its folder, as in pyproject.toml. Native sources are compiled, not installed.
FOLDERS = {
    "shoal_kernels": "kernels/shoal_kernels",
    "shoal_replica": "replica/shoal_replica",
    "shoal_cluster": "cluster/shoal_cluster",
    "shoal_protos": "protos/shoal_protos",
    "shoal_deploy": "deploy/serve",
}
LEFT_OUT = {".so", ".pyc"}  # built in place, and caches


def files(folder: Path) -> set[Path]:
    return {path.relative_to(folder) for path in folder.rglob("*") if path.is_file() and path.suffix not in LEFT_OUT}


def test_every_file_of_every_package_is_installed(tmp_path: Path) -> None:
    command = [sys.executable, "setup.py", "-q", "build_py", "-d", str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(FOLDERS)
    for package, folder in FOLDERS.items():
        assert files(tmp_path / package) == files(ROOT / folder), package
