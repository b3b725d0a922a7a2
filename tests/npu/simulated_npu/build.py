"""Compiles the libraries that torch_npu expects from CANN, once per wheel and source, in about a second."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = {"libascendcl.so": "runtime.c", "libhccl.so": "collectives.c"}
EMPTY = ("libacl_op_compiler.so", "libge_runner.so", "libgraph.so", "libacl_tdt_channel.so")
ATB = "libatb.so"
LIBRARIES = (*SOURCES, *EMPTY, ATB)  # in the order in which they are loaded
RUNTIME_SYMBOL = re.compile(r"(acl|rt[A-Z]|Hccl|Msprof)\w*")
GCC = ("gcc", "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror")


def build(wheel: Path, cache: Path) -> Path:
    """Folder with the libraries for the unpacked package ``wheel`` (…/torch_npu), under ``cache``.

    Raises:
        FileNotFoundError: gcc or nm is not installed.
    """
    for tool in ("gcc", "nm"):
        if shutil.which(tool) is None:
            raise FileNotFoundError(tool)
    inputs = [*(HERE / name for name in SOURCES.values()), Path(__file__), wheel / "version.py"]
    key = hashlib.blake2b(b"".join(path.read_bytes() for path in inputs), digest_size=8).hexdigest()
    folder = cache / key
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(dir=cache))
        _compile(wheel, unfinished)
        try:
            unfinished.rename(folder)
        except OSError:  # another process was faster
            shutil.rmtree(unfinished)
    return folder


def _compile(wheel: Path, out: Path) -> None:
    binaries = [*sorted((wheel / "lib").glob("*.so")), *wheel.glob("_C*.so")]
    wanted = set().union(*(_undefined(path) for path in binaries))
    defined = set().union(*(_functions((HERE / name).read_text()) for name in SOURCES.values()))
    stubs = sorted(s for s in wanted - defined if RUNTIME_SYMBOL.fullmatch(s))
    _library(out, "libascendcl.so", [HERE / "runtime.c", _stubs(out, "rest.c", stubs)])
    _library(out, "libhccl.so", [HERE / "collectives.c"])
    for name in EMPTY:
        _library(out, name, [_stubs(out, "empty.c", [])])
    # C++ names, each a C identifier as it stands. They are resolved when torch_npu is loaded, so none may be missing.
    _library(out, ATB, [_stubs(out, "atb.c", sorted(s for s in wanted if s.startswith("_ZN3atb")))])


def _library(out: Path, name: str, sources: list[Path]) -> None:
    # Linked even where nothing of it is used: torch_npu looks up some of the runtime through the other libraries.
    runtime = ["-Wl,--no-as-needed", f"-L{out}", "-lascendcl", "-lrt", "-Wl,-rpath,$ORIGIN"]
    needs = [] if name in ("libascendcl.so", ATB) else runtime
    command = [*GCC, "-o", str(out / name), *map(str, sources), f"-Wl,-soname,{name}", *needs]
    subprocess.run(command, check=True, timeout=120)


def _stubs(out: Path, name: str, symbols: list[str]) -> Path:
    source = out / name
    source.write_text(
        "".join(f"int {symbol}(void);\nint {symbol}(void) {{ return 0; }}\n" for symbol in symbols) + "\n"
    )
    return source


def _undefined(binary: Path) -> set[str]:
    command = ["nm", "-D", "--undefined-only", str(binary)]
    listing = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    return {line.split()[-1].split("@")[0] for line in listing.splitlines() if line.strip()}


def _functions(source: str) -> set[str]:
    return set(re.findall(r"^[\w ]+[ *](\w+)\([^;{]*\) *\{", source, re.MULTILINE))
