"""Memory that processes of one host share without a name in any file system: nothing can be left of it.

One process makes it and says where it is; the others open it through ``/proc`` and know it by a key that lies in it. So
they need not ask whether they are on one host, in one container, and of one user: who can open it, is.
"""

from __future__ import annotations

import mmap
import os
import secrets
from dataclasses import dataclass
from typing import Any, Protocol

KEY_BYTES = 16


class Store(Protocol):
    """What all ranks read and write: ``get`` waits for the key."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> Any: ...


@dataclass(slots=True)
class Shared:
    """``memory`` is the whole of it, zeroed, or None where it cannot be reached from here."""

    memory: memoryview | None
    descriptor: int | None

    def settle(self) -> None:
        """Close the way in: everyone who could come has come."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


def share(store: Store, name: str, is_maker: bool, size: int) -> Shared:
    """``size`` bytes under ``name``, which one process makes and the others open. The maker's ``settle`` comes last."""
    if is_maker:
        shared, place = _make(size)
        store.set(name, place)
        return shared
    place = bytes(store.get(name)).decode()
    return Shared(_open(place, size) if place else None, None)


def _make(size: int) -> tuple[Shared, str]:
    if not hasattr(os, "memfd_create"):
        return Shared(None, None), ""  # no Linux
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
    except (OSError, ValueError):  # another host or container, or a file of another size there
        return None
    return memory[:size] if memory[size:] == bytes.fromhex(key) else None
