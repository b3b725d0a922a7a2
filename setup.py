"""Builds the native CPU kernels with the package. Without a C++ compiler the install goes on: torch serves instead."""

from __future__ import annotations

import platform
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCES = Path("kernels/csrc")
AVX2 = ("-mavx2", "-mfma")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512")
# The kernels are compiled once per set; dispatch.cpp chooses when the library is loaded.
X86_SETS = {
    "avx512bf16": (*AVX512, "-mavx512bf16", "-mavx512vnni"),
    "avx512": AVX512,
    "avx2": AVX2,
    "portable": (),
}
ARM_SETS: dict[str, tuple[str, ...]] = {"neonbf16": ("-march=armv8.2-a+bf16",), "neon": ()}
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=fast", "-Wall", "-Wno-psabi", "-pthread")


class BuildNative(build_ext):
    """A plain shared library behind a C interface: no Python and no torch headers."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")).with_suffix(".so"))

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        objects = Path(self.build_temp)
        target.parent.mkdir(parents=True, exist_ok=True)
        objects.mkdir(parents=True, exist_ok=True)
        try:
            self._build(target, objects)
        except (OSError, subprocess.CalledProcessError) as error:
            warnings.warn(f"the native CPU kernels were not built, torch will serve instead: {error}", stacklevel=1)

    def _build(self, target: Path, objects: Path) -> None:
        compiler = _compiler()
        sets, family = _instruction_sets(platform.machine().lower())
        jobs = [
            (SOURCES / "isa.cpp", objects / f"isa_{name}.o", (f"-DSHOAL_ISA={name}", *flags))
            for name, flags in sets.items()
        ]
        for source in sorted(SOURCES.glob("*.cpp")):
            if source.name != "isa.cpp":
                jobs.append((source, objects / f"{source.stem}.o", family))

        def compile_one(job: tuple[Path, Path, tuple[str, ...]]) -> None:
            source, output, flags = job
            subprocess.run([*compiler, *FLAGS, *flags, "-c", str(source), "-o", str(output)], check=True)

        with ThreadPoolExecutor() as pool:
            list(pool.map(compile_one, jobs))
        linked = objects / target.name
        subprocess.run([*compiler, "-shared", "-pthread", *(str(o) for _, o, _ in jobs), "-o", str(linked)], check=True)
        # Renamed into place: a process that has the old library mapped keeps it whole.
        fresh = target.with_suffix(".new")
        fresh.write_bytes(linked.read_bytes())
        fresh.replace(target)


def _instruction_sets(machine: str) -> tuple[dict[str, tuple[str, ...]], tuple[str, ...]]:
    """Sets to build with their flags, and what tells dispatch.cpp of them."""
    if machine in ("x86_64", "amd64"):
        return X86_SETS, ("-DSHOAL_X86",)
    if machine in ("aarch64", "arm64"):
        return ARM_SETS, ("-DSHOAL_ARM",)
    return {"portable": ()}, ()


def _compiler() -> list[str]:
    for candidate in ("c++", "g++", "clang++"):
        try:
            subprocess.run([candidate, "--version"], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            continue
        return [candidate]
    raise OSError(f"no C++ compiler found on {sys.platform}")


setup(ext_modules=[Extension("shoal_kernels._native", [])], cmdclass={"build_ext": BuildNative})
