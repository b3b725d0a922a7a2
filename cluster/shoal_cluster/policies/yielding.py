"""What waits at replicas and yields to a tenant that had less."""

from __future__ import annotations

from shoal_cluster.policies.columns import due_column
from shoal_cluster.policies.view import ClusterView, Reservation

MAX_SENT = 256  # after so many it is looked who is still on the way


class Yielding:
    """Requests that this gateway has sent to yield and that their replicas do not count yet: what replicas count they
    tell themselves, by when it is due.
    """

    def __init__(self) -> None:
        self._sent: set[str] = set()

    def note(self, request_id: str, view: ClusterView) -> None:
        """It is about to be promised to a replica."""
        if len(self._sent) >= MAX_SENT:
            self._promised(view)
        self._sent.add(request_id)

    def passed(self, view: ClusterView, now: float, due_in_s: float) -> tuple[tuple[str, int], ...]:
        """Tokens that a request goes before, by replica, if it yields to nobody and is due in so many seconds; replicas
        where it goes before none are left out.
        """
        candidates = view.present(now)
        later = candidates.told["num_waiting_tokens"] - candidates.told[due_column(due_in_s)]
        passed = {candidates.replica_ids[place]: later.item(place) for place in later.nonzero()[0].tolist()}
        for held in self._promised(view):
            passed[held.replica_id] = passed.get(held.replica_id, 0) + held.num_tokens
        return tuple(sorted(passed.items()))

    def _promised(self, view: ClusterView) -> list[Reservation]:
        """What is still promised to them; the others are forgotten."""
        promised = {i: held for i in self._sent if (held := view.reservation(i)) is not None}
        self._sent = set(promised)
        return list(promised.values())
