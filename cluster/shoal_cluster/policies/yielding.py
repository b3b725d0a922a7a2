"""Prompts that wait at replicas and yield to requests of tenants that have had less service."""

from __future__ import annotations

from shoal_cluster.policies.columns import due_column
from shoal_cluster.policies.reservation import Reservation
from shoal_cluster.policies.view import ClusterView

MAX_SENT = 256  # with so many noted, those that are no longer on their way are dropped


class Yielding:
    """Requests that this gateway has sent to yield to others and that their replicas do not count yet. What replicas
    count they report themselves, by due date.
    """

    def __init__(self) -> None:
        self._sent: set[str] = set()

    def note(self, request_id: str, view: ClusterView) -> None:
        """A request that yields is about to be promised to a replica."""
        if len(self._sent) >= MAX_SENT:
            self._promised(view)
        self._sent.add(request_id)

    def passed(self, view: ClusterView, now: float, due_in_s: float) -> tuple[tuple[str, int], ...]:
        """Waiting prompt tokens that a request goes before, by replica, if it does not yield and is due in ``due_in_s``
        seconds; replicas where it goes before none are left out.
        """
        candidates = view.present(now)
        # Cached tokens count among those that are due, and not among those that wait: the difference may be negative.
        later = candidates.told["num_waiting_tokens"] - candidates.told[due_column(due_in_s)]
        passed = {candidates.replica_ids[place]: later.item(place) for place in (later > 0).nonzero()[0].tolist()}
        for promised in self._promised(view):
            passed[promised.replica_id] = passed.get(promised.replica_id, 0) + promised.num_tokens
        return tuple(sorted(passed.items()))

    def _promised(self, view: ClusterView) -> list[Reservation]:
        """The promises that they still have; requests without one are forgotten."""
        promised = {i: reservation for i in self._sent if (reservation := view.reservation(i)) is not None}
        self._sent = set(promised)
        return list(promised.values())
