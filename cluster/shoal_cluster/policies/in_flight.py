"""Prompts that were sent and are not computed yet."""

from __future__ import annotations

from collections.abc import Sequence

from shoal_replica.prefix_cache import BlockHash

PromptKey = str | tuple[str, str]
"""A request of this gateway's by its id, another gateway's with the replica that tells of it before that."""


class PromptsInFlight:
    """Where each is, and which blocks it brings there until it is computed. Owner: a ``ClusterView``."""

    def __init__(self) -> None:
        self._prompts: dict[PromptKey, tuple[str, Sequence[BlockHash]]] = {}

    def add(self, prompt: PromptKey, replica_id: str, block_hashes: Sequence[BlockHash]) -> None:
        """It is on its way there; it was not known before."""
        assert prompt not in self._prompts
        self._prompts[prompt] = replica_id, block_hashes

    def remove(self, prompt: PromptKey) -> tuple[str, Sequence[BlockHash]] | None:
        """It is computed, or will not be. Returns where it was and what it brought, None if it is not known."""
        return self._prompts.pop(prompt, None)

    def forget(self, replica_id: str) -> None:
        """A replica is gone."""
        self._prompts = {key: where for key, where in self._prompts.items() if where[0] != replica_id}

    def of_others(self, replica_id: str) -> list[PromptKey]:
        """The other gateways' at ``replica_id``."""
        return [key for key in self._prompts if isinstance(key, tuple) and key[0] == replica_id]

    def blocks_at(self, replica_id: str) -> set[BlockHash]:
        """All that is expected there."""
        return {h for where, block_hashes in self._prompts.values() if where == replica_id for h in block_hashes}
