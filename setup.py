"""Builds the package's native parts: the CPU kernels, and placement. Without a C++ compiler the install continues:
torch and numpy serve instead.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

KERNELS, KERNEL_SOURCES = "shoal_kernels._native", Path("kernels/csrc")
PLACEMENT, PLACEMENT_SOURCES = "shoal_cluster.policies._native", Path("cluster/csrc")
WITHOUT = {
    KERNELS: "the native CPU kernels were not built, torch will serve instead",
    PLACEMENT: "native placement was not built, numpy will serve instead",
}
COMPILERS = ("c++", "g++")  # simd.h shuffles vectors with a GCC builtin that Clang lacks
AVX2 = ("-mavx2", "-mfma")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512")
AVX512BF16 = (*AVX512, "-mavx512bf16", "-mavx512vnni")
# The kernels are compiled once per set; dispatch.cpp chooses when the library is loaded.
X86_SETS = {
    "amx": (*AVX512BF16, "-mavx512vbmi", "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
    "avx512bf16": AVX512BF16,
    "avx512": AVX512,
    "avx2": AVX2,
    "portable": (),
}
ARM_SETS: dict[str, tuple[str, ...]] = {"neonbf16": ("-march=armv8.2-a+bf16",), "neon": ()}
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-Wall")
KERNEL_FLAGS = (*FLAGS, "-ffp-contract=fast", "-Wno-psabi", "-pthread")
PLACEMENT_FLAGS = (*FLAGS, "-ffp-contract=off")  # costs equal numpy's to the last bit


class BuildNative(build_ext):
    """Plain shared libraries behind C interfaces: no Python and no torch headers."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")).with_suffix(".so"))

    def copy_extensions_to_source(self) -> None:
        """Copy what was built; of what was not, a library from before must not be used: it may be of other sources."""
        super().copy_extensions_to_source()
        for ext in self.extensions:
            if not Path(self.build_lib, self.get_ext_filename(ext.name)).exists():
                Path(self.get_ext_fullpath(ext.name)).unlink(missing_ok=True)

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        objects = Path(self.build_temp) / ext.name
        target.parent.mkdir(parents=True, exist_ok=True)
        objects.mkdir(parents=True, exist_ok=True)
        build = self._build_kernels if ext.name == KERNELS else self._build_placement
        failures = []
        for compiler in _compilers():
            try:
                build(compiler, target, objects)
            except (OSError, subprocess.CalledProcessError) as error:
                failures.append(str(error))
                continue
            return
        target.unlink(missing_ok=True)  # a library built from other sources must not be used
        why = "; ".join(failures) or f"no C++ compiler found on {sys.platform}"
        warnings.warn(f"{WITHOUT[ext.name]}: {why}", stacklevel=1)

    def _build_placement(self, compiler: str, target: Path, objects: Path) -> None:
        linked = objects / target.name
        sources = sorted(map(str, PLACEMENT_SOURCES.glob("*.cpp")))
        subprocess.run([compiler, *PLACEMENT_FLAGS, "-shared", *sources, "-o", str(linked)], check=True)
        _put(linked, target)

    def _build_kernels(self, compiler: str, target: Path, objects: Path) -> None:
        """Build ``target`` without the instruction sets that the compiler does not know. The last set, which needs no
        flags, must compile.
        """

        def compile_one(source: str, output: Path, *flags: str) -> Path:
            command = [compiler, *KERNEL_FLAGS, *flags, "-c", str(KERNEL_SOURCES / source), "-o", str(output)]
            subprocess.run(command, check=True)
            return output

        sets = _instruction_sets(platform.machine().lower())
        *_, base = sets
        sources = sorted(
            path.name for path in KERNEL_SOURCES.glob("*.cpp") if path.name not in ("isa.cpp", "dispatch.cpp")
        )
        with ThreadPoolExecutor() as pool:
            kernels = {
                name: pool.submit(compile_one, "isa.cpp", objects / f"isa_{name}.o", f"-DSHOAL_ISA={name}", *flags)
                for name, flags in sets.items()
            }
            rest = [pool.submit(compile_one, source, (objects / source).with_suffix(".o")) for source in sources]
        left_out = [name for name, kernel in kernels.items() if name != base and kernel.exception() is not None]
        built = [name for name in sets if name not in left_out]
        has = [f"-DSHOAL_HAS_{name.upper()}" for name in built]
        # Of the standard library's templates the linker takes the first copy that it meets, for all sets: one that all
        # processors run.
        parts = [compile_one("dispatch.cpp", objects / "dispatch.o", *has), *(part.result() for part in rest)]
        parts += [kernels[name].result() for name in reversed(built)]
        linked = objects / target.name
        subprocess.run([compiler, "-shared", "-pthread", *map(str, parts), "-o", str(linked)], check=True)
        _put(linked, target)
        if left_out:
            warnings.warn(f"{compiler} does not compile the kernels for {', '.join(left_out)}", stacklevel=1)


def _put(linked: Path, target: Path) -> None:
    """Rename the library into place, so that a process that has the old one mapped keeps it intact."""
    fresh = target.with_suffix(".new")
    fresh.write_bytes(linked.read_bytes())
    fresh.replace(target)


def _instruction_sets(machine: str) -> dict[str, tuple[str, ...]]:
    """The instruction sets to build with their flags, best first."""
    if machine in ("x86_64", "amd64"):
        return X86_SETS
    if machine in ("aarch64", "arm64"):
        return ARM_SETS
    return {"portable": ()}


def _compilers() -> list[str]:
    """Paths of the installed compilers; one with two names is listed once."""
    found = [path for name in COMPILERS if (path := shutil.which(name)) is not None]
    return list({os.path.realpath(path): path for path in reversed(found)}.values())[::-1]


# Optional: an editable install would insist on copying a library that was not built.
setup(ext_modules=[Extension(name, [], optional=True) for name in WITHOUT], cmdclass={"build_ext": BuildNative})
