"""Prompts that were sent and are not computed yet."""

from __future__ import annotations

from collections.abc import Sequence

from shoal_replica.prefix_cache import BlockHash

PromptKey = str | tuple[str, str]
"""The request's id; for a request of another gateway, the id of the replica that tells of it, and the request's id."""


class PromptsInFlight:
    """The replica of each prompt, and the blocks that it brings there. Owned by a ``ClusterView``."""

    def __init__(self) -> None:
        self._prompts: dict[PromptKey, tuple[str, Sequence[BlockHash]]] = {}

    def add(self, prompt: PromptKey, replica_id: str, block_hashes: Sequence[BlockHash]) -> None:
        """A prompt is on its way to ``replica_id``; it must not be known yet."""
        assert prompt not in self._prompts
        self._prompts[prompt] = replica_id, block_hashes

    def remove(self, prompt: PromptKey) -> tuple[str, Sequence[BlockHash]] | None:
        """A prompt is computed, or never will be. Returns its replica and blocks, None if it is not known."""
        return self._prompts.pop(prompt, None)

    def forget(self, replica_id: str) -> None:
        """A replica has left."""
        self._prompts = {key: where for key, where in self._prompts.items() if where[0] != replica_id}

    def of_others(self, replica_id: str) -> list[PromptKey]:
        """Other gateways' prompts at ``replica_id``."""
        return [key for key in self._prompts if isinstance(key, tuple) and key[0] == replica_id]

    def blocks_at(self, replica_id: str) -> set[BlockHash]:
        """All blocks that are expected at ``replica_id``."""
        return {h for where, block_hashes in self._prompts.values() if where == replica_id for h in block_hashes}
