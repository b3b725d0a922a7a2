"""Ray's key-value store, on the cluster's head node. Ray keeps its own state there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ray.exceptions import RayError
from ray.experimental import internal_kv

from shoal_replica.errors import Unavailable

NAMESPACE = "shoal"


class RayStore:
    """Implements ``scaling_board.Store``. Each call blocks for about half a millisecond."""

    def put(self, key: str, value: bytes) -> None:
        with _reaching():
            internal_kv._internal_kv_put(key, value, True, namespace=NAMESPACE)

    def get(self, key: str) -> bytes | None:
        with _reaching():
            value: bytes | None = internal_kv._internal_kv_get(key, namespace=NAMESPACE)
        return value

    def delete(self, key: str) -> None:
        with _reaching():
            internal_kv._internal_kv_del(key, namespace=NAMESPACE)

    def keys(self, prefix: str) -> list[str]:
        with _reaching():
            return [key.decode() for key in internal_kv._internal_kv_list(prefix, namespace=NAMESPACE)]


@contextmanager
def _reaching() -> Iterator[None]:
    try:
        yield
    except RayError as error:
        raise Unavailable(f"Ray's head does not answer: {error}") from error
