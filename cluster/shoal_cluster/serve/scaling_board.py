"""Where gateways and the autoscaler exchange news: a few keys of Ray's own key-value store.

The policy runs in Serve's controller, which gateways cannot call and which must not wait for them. Gateways leave a
report each second; the policy leaves its last decision and its last RECORDS_KEPT changes of the count. What is stored
there outlives a restart of either. Every call blocks for about half a millisecond, as long as Ray's head node answers.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Protocol, TypeVar

import msgspec

from shoal_cluster.policies.autoscaling_config import ScaleConfig
from shoal_cluster.policies.autoscaling_view import Demand, ScaleRecord
from shoal_replica.errors import ConfigError, InvalidArgument

RECORDS_KEPT = 256

T = TypeVar("T")


class GatewayReport(msgspec.Struct, frozen=True):
    """What one gateway tells the autoscaler.

    Attributes:
        time_s: Unix time of the report.
        reserved_tokens: by replica id, prompt tokens sent there that its stats do not count yet.
        base: the settings of the deployment, before any tuning.
        base_since_s: Unix time since when it has them. While gateways are updated one after another some have older
            ones: the newest hold.
        num_gateways: how many gateways there should be.
    """

    gateway_id: str
    time_s: float
    demand: Demand
    reserved_tokens: dict[str, int]
    base: ScaleConfig
    num_gateways: int
    base_since_s: float = 0.0


class Tuning(msgspec.Struct, frozen=True):
    """Settings changed at run time. They hold only for the ``base`` they were made on: a new one starts afresh."""

    base: ScaleConfig
    changes: dict[str, float]

    def on(self, base: ScaleConfig) -> ScaleConfig:
        """The settings in force where those of the deployment are ``base``."""
        return base.tuned(self.changes) if base == self.base else base


class Store(Protocol):
    """A key-value store that all processes of the cluster share. Raises Unavailable when it cannot be reached."""

    def put(self, key: str, value: bytes) -> None: ...

    def get(self, key: str) -> bytes | None: ...

    def delete(self, key: str) -> None: ...

    def keys(self, prefix: str) -> list[str]: ...


class ScalingBoard:
    """The keys of one application, typed. A value that cannot be read, as of another version, counts as absent."""

    def __init__(self, app_name: str, store: Store) -> None:
        self._prefix = f"scaling/{app_name}/"
        self._store = store

    def put_report(self, report: GatewayReport) -> None:
        self._put(f"gateway/{report.gateway_id}", report)

    def drop_report(self, gateway_id: str) -> None:
        self._store.delete(f"{self._prefix}gateway/{gateway_id}")

    def reports(self) -> list[GatewayReport]:
        keys = self._store.keys(f"{self._prefix}gateway/")
        found = (self._get(key.removeprefix(self._prefix), GatewayReport) for key in keys)
        return [report for report in found if report is not None]

    def put_tuning(self, tuning: Tuning) -> None:
        self._put("tuning", tuning)

    def drop_tuning(self) -> None:
        self._store.delete(f"{self._prefix}tuning")

    def tuning(self) -> Tuning | None:
        tuning = self._get("tuning", Tuning)
        try:
            return tuning if tuning is not None and tuning.base.tuned(tuning.changes) else None
        except InvalidArgument:
            return None

    def put_current(self, record: ScaleRecord) -> None:
        """Store the policy's last decision, whether or not it changed the count."""
        self._put("current", record)

    def current(self) -> ScaleRecord | None:
        return self._get("current", ScaleRecord)

    def put_record(self, record: ScaleRecord) -> None:
        """Store a decision that changed the count, in place of the oldest of RECORDS_KEPT."""
        self._put(f"record/{record.seq % RECORDS_KEPT}", record)

    def records(self, after_seq: int, until_seq: int) -> list[ScaleRecord]:
        """Kept records with ``after_seq < seq <= until_seq``, oldest first."""
        first = max(after_seq + 1, until_seq - RECORDS_KEPT + 1, 1)
        found = (self._get(f"record/{seq % RECORDS_KEPT}", ScaleRecord) for seq in range(first, until_seq + 1))
        return [record for record in found if record is not None and after_seq < record.seq <= until_seq]

    def _put(self, key: str, value: object) -> None:
        self._store.put(self._prefix + key, msgspec.msgpack.encode(value, enc_hook=_plain))

    def _get(self, key: str, kind: type[T]) -> T | None:
        raw = self._store.get(self._prefix + key)
        if raw is None:
            return None
        try:
            return msgspec.msgpack.decode(raw, type=kind)
        except (msgspec.DecodeError, ConfigError):
            return None


def _plain(value: object) -> object:
    """Encodes what a record's ``state`` holds that msgpack lacks."""
    if isinstance(value, MappingProxyType):
        return dict(value)
    raise NotImplementedError(f"a {type(value).__name__} cannot be kept at the board")
