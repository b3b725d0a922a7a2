"""The kernels for tile registers (Intel AMX) against the float32 oracle, on processors that have none: the library is
built once more, with the registers in software.
"""

from __future__ import annotations

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from fixtures.native_models import (
    FAMILIES,
    INTEGERS,
    Part,
    check_sequence,
    make_shape,
    make_weights,
    rotary_table,
    round_matrices,
    run,
    tokens,
)

from shoal_kernels import native_library
from shoal_kernels.native import NativeDecoder

SOURCES = Path(__file__).parents[2] / "kernels" / "csrc"
TILES = Path(__file__).parents[1] / "fixtures" / "software_tiles.h"
FLAGS = ("-std=c++17", "-O1", "-fPIC", "-fvisibility=hidden", "-ffp-contract=fast", "-w", "-pthread")
VECTORS = (
    "-mavx2", "-mfma", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512bf16", "-mavx512vnni",
    "-mavx512vbmi", "-mprefer-vector-width=512",
)  # fmt: skip
SOFTWARE = ("-D__AMX_TILE__", "-D__AMX_BF16__", "-D__AMX_INT8__", "-include", str(TILES))
SET = "portable"  # takes the place of the set that every processor runs, for no other may


def _can_run() -> bool:
    cpuinfo = Path("/proc/cpuinfo")
    has_vectors = "avx512bf16" in native_library.supported_kernels() and "avx512_vbmi" in cpuinfo.read_text()
    return has_vectors and shutil.which("g++") is not None


pytestmark = pytest.mark.skipif(not _can_run(), reason="needs g++, AVX-512 BF16 and VBMI")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiles")

    def compile_one(source: Path) -> Path:
        own: tuple[str, ...] = {
            "isa.cpp": (f"-DSHOAL_ISA={SET}", *VECTORS, *SOFTWARE),
            "dispatch.cpp": (f"-DSHOAL_HAS_{SET.upper()}",),
        }.get(source.name, ())
        target = folder / f"{source.stem}.o"
        subprocess.run(["g++", *FLAGS, *own, "-c", str(source), "-o", str(target)], check=True, timeout=300)
        return target

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, sorted(SOURCES.glob("*.cpp"))))
    library = folder / "tiles.so"
    subprocess.run(["g++", "-shared", "-pthread", *map(str, objects), "-o", str(library)], check=True, timeout=300)
    return library


@pytest.fixture(autouse=True)
def software_tiles(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_library, "_LIBRARY", native_library._load(built))
    assert native_library.supported_kernels() == (SET,)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_bf16(num_threads: int) -> None:
    """Rows for a part of a register, one, several and many; decodes; attention over several pages."""
    shape = make_shape(dtype=torch.bfloat16, num_threads=num_threads)
    check_sequence(
        shape, make_weights(shape, qk_norm=True, biases=True), [1, 130, 17, 1, 1, 33, 200, 1], SET, num_checked=1
    )


@pytest.mark.parametrize("family", list(FAMILIES))
def test_families(family: str) -> None:
    shape = make_shape(dtype=torch.bfloat16, num_threads=2, **FAMILIES[family])
    check_sequence(shape, make_weights(shape, qk_norm=True), [1, 130, 17, 1, 1, 33, 200, 1], SET, num_checked=1)


@pytest.mark.parametrize(("bits", "activation_bits"), INTEGERS)
def test_integers(bits: int, activation_bits: int) -> None:
    shape = make_shape(dtype=torch.bfloat16, intermediate_size=160, num_threads=2)
    weights = round_matrices(make_weights(shape, biases=True), bits, activation_bits)
    check_sequence(shape, weights, [1, 130, 17, 1, 6, 7, 33, 1], SET, num_checked=1)


@pytest.mark.parametrize("bits", [None, *INTEGERS])
def test_a_row_does_not_depend_on_its_company(bits: tuple[int, int] | None) -> None:
    shape = make_shape(dtype=torch.bfloat16, num_blocks=60, intermediate_size=1216, num_layers=1)
    plain = make_weights(shape)
    weights = plain if bits is None else round_matrices(plain, *bits)
    parts, first = [], 0
    for length in (2, 3, 17, 33, 70, 300):
        held = list(range(first, first + length // 16 + 1))
        parts.append(Part(tokens(shape, length, seed=length), 0, held))
        first += len(held)
    decoder = NativeDecoder(shape, weights.items(), rotary_table(shape), kernels=SET)
    alone = torch.cat([run(decoder, part) for part in parts])
    assert torch.equal(run(decoder, *parts), alone)
