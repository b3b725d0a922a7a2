"""A replica as a gateway knows it from Serve."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_FEED, _MODEL, _BLOCKS, _REPORT = "shoal_feed", "shoal_model", "shoal_blocks", "shoal_start_report"


@dataclass(frozen=True, slots=True)
class Member:
    """A running replica as Serve names it, with its feed's address, the report of what its memory went to, and the
    address where it gives its cached blocks to others, None if it does not.
    """

    replica_id: str
    node_id: str
    feed_address: tuple[str, int]
    start_report: str = ""
    blocks_address: tuple[str, int] | None = None

    @classmethod
    def of(cls, replica_id: str, node_id: str, metadata: Mapping[str, Any], model: str) -> Member | None:
        """From what a replica has told Serve; None for one that is not Shoal's, or has another model: while an
        application gets another, gateways and replicas of both versions run.
        """
        if (feed := metadata.get(_FEED)) is None or metadata.get(_MODEL) != model:
            return None
        blocks = metadata.get(_BLOCKS)
        return cls(
            replica_id,
            node_id,
            (feed[0], feed[1]),
            metadata.get(_REPORT, ""),
            None if blocks is None else (blocks[0], blocks[1]),
        )


def member_metadata(
    feed_address: tuple[str, int], model: str, start_report: str, blocks_address: tuple[str, int] | None
) -> dict[str, Any]:
    """What a replica tells Serve, which passes it on to every router: ``Member.of`` reads it."""
    told: dict[str, Any] = {_FEED: list(feed_address), _MODEL: model, _REPORT: start_report}
    return told if blocks_address is None else told | {_BLOCKS: list(blocks_address)}
