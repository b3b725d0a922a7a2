"""One replica as a policy sees it."""

from __future__ import annotations

from dataclasses import dataclass

from shoal_cluster.policies.columns import Phase, ReplicaState
from shoal_replica.stats import ReplicaStats


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaView:
    """One replica as a policy sees it: a row of a snapshot. A field's owner is the part that knows its true value.

    Attributes:
        replica_id: owned by Ray Serve; as of its last replica set.
        stats: owned by the replica; ``age_s`` old. None until its feed has delivered any.
        age_s: seconds since the gateway received ``stats``; 0 while there are none.
        connected: owned by the gateway; whether the replica's feed is up now.
        stalled: owned by the gateway; the replica makes no progress or has fallen silent (see ``Stalls``), so nothing
            new is sent to it.
        slowness: owned by the gateway; how many times as long as the fastest replica it takes for a prompt, by what the
            replicas measure (see ``Slowness``).
        role: owned by the gateway; the phase of requests that it is for, "" for both (see ``Roles``).
        num_reserved, num_reserved_blocks, num_reserved_tokens: requests sent here that ``stats`` does not count yet,
            their blocks, and their prompt tokens to compute. Owned by the gateway and exact for its own requests; other
            gateways' are as the replica has heard from them.
        num_matched_blocks: leading blocks of the given prompt that the replica caches; owned by the replica's prefix
            cache, as old as ``age_s`` plus one feed message.
        node_id: owned by Ray; for display only.
    """

    replica_id: str
    stats: ReplicaStats | None = None
    age_s: float = 0.0
    connected: bool = False
    stalled: bool = False
    slowness: float = 1.0
    role: Phase = ""
    num_reserved: int = 0
    num_reserved_blocks: int = 0
    num_reserved_tokens: int = 0
    num_matched_blocks: int = 0
    node_id: str = ""

    @property
    def state(self) -> ReplicaState:
        return ReplicaState(self.connected, self.stalled, self.slowness, self.role)
