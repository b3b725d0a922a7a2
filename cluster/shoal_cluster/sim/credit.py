"""What simulated gateways tell each other through the replicas; see ``serve.shared_credit``."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Protocol

from shoal_cluster.policies.view import ClusterView
from shoal_cluster.policies.wishes import Wish
from shoal_cluster.sim.book import Book
from shoal_cluster.sim.replica import FeedMessage


class Told(Protocol):
    """A replica that passes on what a gateway tells."""

    def wish(self, gateway_id: str, wishes: tuple[Wish, ...]) -> None: ...


class Credit:
    """One gateway's part of that.

    Args:
        replicas: those that live, by id; the cluster's own mapping, not a copy.
    """

    def __init__(self, gateway_id: str, view: ClusterView, book: Book, replicas: Mapping[str, Told]) -> None:
        self._gateway_id = gateway_id
        self._view = view
        self._book = book
        self._replicas = replicas
        self._told: dict[str, tuple[Wish, ...]] = {}  # wishes last sent, by replica
        self._in_flight: dict[str, str] = {}  # other gateways' requests before their first token, and their replicas

    def hear(self, replica_id: str, message: FeedMessage) -> None:
        """Take in what a replica tells of the other gateways."""
        others = [p for p in message.promised if p.gateway_id != self._gateway_id]
        self._hear_of_prompts(replica_id, message, {promise.request_id for promise in others})
        num_blocks, num_tokens = sum(p.num_blocks for p in others), sum(p.num_tokens for p in others)
        self._view.set_foreign(replica_id, len(others), num_blocks, num_tokens)
        wishes = [wish for of, wish in message.wishes if of != self._gateway_id]
        self._view.set_wishes(replica_id, wishes)

    def computed(self, request_id: str) -> None:
        """A request has its first token."""
        self._in_flight.pop(request_id, None)

    def lose(self, replica_id: str) -> None:
        """A replica is gone, and with it all prompts in flight there."""
        self._in_flight = {prompt: where for prompt, where in self._in_flight.items() if where != replica_id}

    def wish(self, wishes: dict[str, tuple[Wish, ...]]) -> None:
        """Tell each replica what this gateway means to send it, where that has changed."""
        for replica_id in {**self._told, **wishes}:
            of_it = wishes.get(replica_id, ())
            if of_it != self._told.get(replica_id, ()) and (replica := self._replicas.get(replica_id)) is not None:
                replica.wish(self._gateway_id, of_it)
        self._told = wishes

    def _hear_of_prompts(self, replica_id: str, message: FeedMessage, others: Set[str]) -> None:
        """Note other gateways' prompts that have come to a replica or have left it."""
        for request_id in message.landed:
            if self._in_flight.get(request_id) == replica_id:
                del self._in_flight[request_id]
                self._view.computed(request_id)
        for request_id, num_cached_blocks in message.in_flight:
            if request_id in others:
                self._in_flight[request_id] = replica_id
                self._view.expect(request_id, replica_id, self._book.block_hashes(request_id)[num_cached_blocks:])
