"""Memory that processes on one host share. It has no name in any file system, so nothing is left behind.

One process creates it and publishes its place; the others open it through ``/proc`` and recognise it by a key stored in
it. No process needs to know whether it is on the same host, in the same container and run by the same user: if it can
open the memory, it is.
"""

from __future__ import annotations

import mmap
import os
import secrets
from dataclasses import dataclass
from typing import Any, Protocol

KEY_BYTES = 16


class Store(Protocol):
    """A key-value store that all ranks read and write; ``get`` waits for the key."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> Any: ...


@dataclass(slots=True)
class Shared:
    """``memory`` is the shared memory, initially zero, or None if it cannot be reached from here."""

    memory: memoryview | None
    descriptor: int | None

    def settle(self) -> None:
        """Close the descriptor: every process that can open the memory has done so."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


def share(store: Store, name: str, is_maker: bool, size: int) -> Shared:
    """Share ``size`` bytes under ``name``: one process creates them, the others open them. The maker calls ``settle``
    after all others have opened them.
    """
    if is_maker:
        shared, place = _make(size)
        store.set(name, place)
        return shared
    place = bytes(store.get(name)).decode()
    return Shared(_open(place, size) if place else None, None)


def _make(size: int) -> tuple[Shared, str]:
    if not hasattr(os, "memfd_create"):
        return Shared(None, None), ""  # not Linux
    descriptor = os.memfd_create("shoal-ranks", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, size + KEY_BYTES)
    memory = memoryview(mmap.mmap(descriptor, size + KEY_BYTES))
    key = secrets.token_bytes(KEY_BYTES)
    memory[size:] = key
    return Shared(memory[:size], descriptor), f"/proc/{os.getpid()}/fd/{descriptor} {key.hex()}"


def _open(place: str, size: int) -> memoryview | None:
    path, key = place.split()
    try:
        with open(path, "r+b") as file:
            memory = memoryview(mmap.mmap(file.fileno(), size + KEY_BYTES))
    except (OSError, ValueError):  # another host or container, or a file of another size at that path
        return None
    return memory[:size] if memory[size:] == bytes.fromhex(key) else None
