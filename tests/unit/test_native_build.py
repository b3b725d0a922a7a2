"""Building the native libraries where the compiler is missing or lacks instruction sets. The compilers are scripts."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOT_BUILT = (
    "the native CPU kernels were not built, torch will serve instead",
    "native placement was not built, numpy will serve instead",
)
LIBRARIES = ("shoal_kernels/_native.so", "shoal_cluster/policies/_native.so")
# Appends its arguments to a log and writes its output file; fails if ``refused`` is one of its arguments.
COMPILER = """#!{python} -S
import sys
arguments = sys.argv[1:]
with open({log!r}, "a") as log:
    log.write(" ".join(arguments) + "\\n")
if {refused!r} in arguments:
    sys.exit("unknown argument")
open(arguments[arguments.index("-o") + 1], "w").write("an object")
"""
pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the sets of other machines")


def build(folder: Path, **compilers: str) -> tuple[list[str], list[bool], list[str]]:
    """Build with only ``compilers`` on PATH, given by name with the argument that each refuses. Returns the warnings,
    which of ``LIBRARIES`` exist, and all command lines.
    """
    log, bin_folder = folder / "log", folder / "bin"
    bin_folder.mkdir()
    log.touch()
    for name, refused in compilers.items():
        script = bin_folder / name.replace("cxx", "c++").replace("gxx", "g++")
        script.write_text(COMPILER.format(python=sys.executable, log=str(log), refused=refused))
        script.chmod(0o755)
    warned = build_ext(ROOT, bin_folder, "-b", str(folder / "lib"), "-t", str(folder))
    return warned, [(folder / "lib" / path).exists() for path in LIBRARIES], log.read_text().splitlines()


def build_ext(root: Path, path: Path, *options: str) -> list[str]:
    """Run ``build_ext`` in ``root`` with only ``path`` on PATH. Returns the warnings."""
    command = [sys.executable, "-W", "always", "setup.py", "build_ext", *options]
    environment = {**os.environ, "PATH": str(path)}
    run = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    return [line for line in run.stderr.splitlines() if "UserWarning: " in line]


def test_without_a_compiler_there_is_one_warning_each_and_no_library(tmp_path: Path) -> None:
    warned, are_built, _ = build(tmp_path)
    assert [why in line for why, line in zip(NOT_BUILT, warned, strict=True)] == [True, True]
    assert all("no C++ compiler found" in line for line in warned)
    assert are_built == [False, False]


def test_what_was_built_before_is_gone_where_no_build_took_its_place(tmp_path: Path) -> None:
    """The old library may be of other sources."""
    for path in LIBRARIES:
        (tmp_path / "lib" / path).parent.mkdir(parents=True)
        (tmp_path / "lib" / path).touch()
    assert build(tmp_path)[1] == [False, False]


def test_an_install_in_place_goes_on_without_a_compiler_and_without_what_was_built_before(tmp_path: Path) -> None:
    """As `pip install -e` builds."""
    root = tmp_path / "sources"
    root.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, root)
    for package in ("kernels/shoal_kernels", "cluster/shoal_cluster", "replica/shoal_replica", "protos/shoal_protos"):
        (root / package).mkdir(parents=True)
    libraries = [root / "kernels" / LIBRARIES[0], root / "cluster" / LIBRARIES[1]]
    for library in libraries:
        library.parent.mkdir(exist_ok=True)
        library.touch()
    warned = build_ext(root, tmp_path / "nothing", "--inplace")
    assert [why in line for why, line in zip(NOT_BUILT, warned, strict=True)] == [True, True]
    assert [library.exists() for library in libraries] == [False, False]


def test_an_instruction_set_that_the_compiler_does_not_know_is_left_out(tmp_path: Path) -> None:
    warned, are_built, commands = build(tmp_path, cxx="-mamx-bf16")
    assert are_built == [True, True]
    (line,) = warned
    assert line.endswith("does not compile the kernels for amx")
    (dispatch,) = [c for c in commands if "dispatch.cpp" in c]
    (linked,) = [c for c in commands if "-shared" in c and "dispatch.o" in c]
    for name in ("amx", "avx512bf16", "avx512", "avx2", "portable"):
        is_built = name != "amx"
        assert (f"-DSHOAL_HAS_{name.upper()}" in dispatch.split()) == is_built
        assert (f"isa_{name}.o" in linked) == is_built


def test_what_all_sets_share_is_linked_from_code_that_every_processor_runs(tmp_path: Path) -> None:
    _, _, commands = build(tmp_path, cxx="nothing")
    (linked,) = [c.split() for c in commands if "-shared" in c and "dispatch.o" in c]
    objects = [Path(part).name for part in linked if part.endswith(".o")]
    sets = ["isa_portable.o", "isa_avx2.o", "isa_avx512.o", "isa_avx512bf16.o", "isa_amx.o"]
    assert objects[-len(sets) :] == sets
    assert "dispatch.o" in objects


def test_costs_are_compiled_as_numpy_computes_them(tmp_path: Path) -> None:
    _, _, commands = build(tmp_path, cxx="nothing")
    (placement,) = [c for c in commands if "least_cost.cpp" in c]
    assert "-ffp-contract=off" in placement.split()


def test_the_next_compiler_is_tried_and_all_are_named_that_fail(tmp_path: Path) -> None:
    (tmp_path / "both").mkdir()
    warned, are_built, _ = build(tmp_path, cxx="-DSHOAL_ISA=portable", gxx="nothing")
    assert (warned, are_built) == ([], [True, True])
    warned, are_built, _ = build(tmp_path / "both", cxx="-fPIC", gxx="-shared")
    assert are_built == [False, False]
    for why, line in zip(NOT_BUILT, warned, strict=True):
        assert why in line
        assert line.count("returned non-zero exit status") == 2
