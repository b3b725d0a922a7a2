"""Native placement by ctypes: what ``cluster/csrc/shoal_placement.h`` declares."""

from __future__ import annotations

import ctypes
from pathlib import Path

LIBRARY = Path(__file__).with_name("_native.so")
REBUILD = "python setup.py build_ext --inplace, or install the package again"
TABLE, COUNT, ADDRESS, BYTES = ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_char_p
SIGNATURES = {
    "shoal_table_create": (TABLE, COUNT, COUNT),
    "shoal_table_destroy": (None, TABLE),
    "shoal_table_counts": (ADDRESS, TABLE),
    "shoal_table_num_bytes": (COUNT, TABLE),
    "shoal_table_num_slots": (COUNT, TABLE),
    "shoal_table_num_held": (COUNT, TABLE, COUNT),
    "shoal_table_add_slots": (ctypes.c_int, TABLE),
    "shoal_table_hold": (ctypes.c_int, TABLE, COUNT, BYTES, COUNT),
    "shoal_table_release": (ctypes.c_int, TABLE, COUNT, BYTES, COUNT),
    "shoal_table_release_all": (ctypes.c_int, TABLE, COUNT),
    "shoal_table_use": (None, TABLE, BYTES, COUNT),
    "shoal_table_lengths": (ctypes.c_int, TABLE, BYTES, COUNT, BYTES, ADDRESS),
    "shoal_table_fault": (BYTES, TABLE),
    "shoal_struct_bytes": (ADDRESS,),
    "shoal_outlook": (None, ADDRESS, ADDRESS, ctypes.c_double, ADDRESS),
    "shoal_plan": (COUNT, ADDRESS, ADDRESS, BYTES, COUNT, ctypes.c_int, *[ADDRESS] * 2),
    "shoal_least_cost": (COUNT, ADDRESS, COUNT, ADDRESS, *[COUNT] * 4, *[ctypes.c_double] * 3, ADDRESS),
}


class CCounts(ctypes.Structure):
    _fields_ = (("num_entries", COUNT), ("num_evicted", COUNT))


def check_structs(*structs: type[ctypes.Structure]) -> None:
    """Raise RuntimeError if the library was built with others than these, in the order of ``shoal_struct_bytes``."""
    if library is None:
        return
    there = (COUNT * len(structs)).from_address(library.shoal_struct_bytes())
    if (found := list(there)) != (here := list(map(ctypes.sizeof, structs))):
        raise RuntimeError(f"{LIBRARY} was built from other sources (structs of {found} bytes, not {here}): {REBUILD}")


def _load() -> ctypes.PyDLL | None:
    if not LIBRARY.is_file():
        return None
    try:
        library = ctypes.PyDLL(str(LIBRARY))  # calls take microseconds and so keep the GIL
    except OSError as error:
        raise RuntimeError(f"{LIBRARY} cannot be loaded on this machine ({error}): {REBUILD}") from error
    for name, (result, *arguments) in SIGNATURES.items():
        try:
            function = getattr(library, name)
        except AttributeError as error:
            raise RuntimeError(f"{LIBRARY} was built from other sources ({error}): {REBUILD}") from error
        function.restype, function.argtypes = result, arguments
    return library


library = _load()
"""The native library; None where it was not built."""
