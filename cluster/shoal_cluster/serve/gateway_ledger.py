"""A gateway's view of every replica, the feeds that keep it up to date, and the decisions taken on it."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from functools import partial

from shoal_cluster.policies.dispatch import Dispatch
from shoal_cluster.policies.named_placement import NamedPlacement, placement_by
from shoal_cluster.policies.prefix_index import DEFAULT_MAX_ENTRIES
from shoal_cluster.policies.route_decision import RouteDecision
from shoal_cluster.policies.route_query import RouteQuery, uncached_blocks, uncached_tokens
from shoal_cluster.policies.route_record import RouteRecord, decide
from shoal_cluster.policies.routing import OWN_RULE, RouteWeights
from shoal_cluster.policies.slowness import Slowness
from shoal_cluster.policies.view import ClusterView
from shoal_cluster.policies.wishes import Wish
from shoal_cluster.serve.block_sources import BlockSources
from shoal_cluster.serve.feed_client import FeedClient
from shoal_cluster.serve.feed_messages import BlockSource, Refused, Snapshot, Update
from shoal_cluster.serve.gateway_phases import Phases
from shoal_cluster.serve.journal import EventKind, Journal
from shoal_cluster.serve.member import Member
from shoal_cluster.serve.moves import Moves
from shoal_cluster.serve.recalls import Recalls
from shoal_cluster.serve.route_log import RouteLog
from shoal_cluster.serve.sent_requests import Follower, SentRequest, SentRequests
from shoal_cluster.serve.shared_credit import SharedCredit
from shoal_cluster.serve.view_tally import ViewTally
from shoal_replica.errors import NotFound, shown
from shoal_replica.request import Request

FEED_ANSWER_TIMEOUT_S = 3.0


class GatewayLedger:
    """One per gateway. Everything here happens on one event loop.

    Args:
        num_gateways: how many place requests on the same replicas; several tell each other what they promise and hold.
        max_index_entries: limit of known cached blocks, for all replicas together; see ``PrefixIndex``.
    """

    def __init__(
        self,
        gateway_id: str,
        weights: RouteWeights,
        num_gateways: int = 1,
        max_index_entries: int = DEFAULT_MAX_ENTRIES,
    ) -> None:
        self.gateway_id = gateway_id
        self.weights = weights
        self.named: NamedPlacement | None = None  # set while another system's rule places
        self.num_gateways = num_gateways
        self.view = ClusterView(max_index_entries)
        self.journal = Journal()
        self.on_decision: Callable[[RouteRecord], None] = lambda record: None
        self._seeds = random.Random()
        self._members: dict[str, Member] = {}
        self._feeds: dict[str, FeedClient] = {}
        self._credit = SharedCredit(self.view, self._feeds, num_gateways > 1)
        self._draining: set[str] = set()  # no longer members, but their last requests are followed
        self.sent = SentRequests()
        self.on_news: Callable[[], None] = lambda: None  # called when requests that wait may find a place
        self._slowness = Slowness(self.view)
        self.phases = Phases(self.view, num_gateways)
        self.sources = BlockSources()
        self.recalls = Recalls(self.view, self._feeds, self.sent, self.can_place, self.journal)
        self._moves = Moves(self.view, self._feeds, self.sent, self.sources)
        self.routes, self.view_tally = RouteLog(), ViewTally()
        self._changed = asyncio.Event()

    def use_rule(self, name: str) -> None:
        """Place by the rule of that name from now on. Raises ConfigError if there is none."""
        if name != (OWN_RULE if self.named is None else self.named.routing):
            self.named = placement_by(name)
            self.journal.note(EventKind.CHANGED, f"routing: by {name}")

    # Members and placements

    def set_members(self, members: list[Member]) -> None:
        """Route to exactly these replicas. The feed of one that leaves is followed until its last request has ended or
        moved on: Serve lets a replica that it stops finish what it runs.
        """
        wanted = {m.replica_id: m for m in members}
        for replica_id in [r for r in self._members if r not in wanted]:
            del self._members[replica_id]
            self._note_leaving(replica_id)
            self.view.leave(replica_id)
            self.recalls.recall(replica_id)
            if self.named is not None:
                self.named.forget(replica_id)
            self._close_unused_feed(replica_id)
        new = {replica_id: member for replica_id, member in wanted.items() if replica_id not in self._members}
        self.view.join_all({replica_id: member.node_id for replica_id, member in new.items()})
        for replica_id, member in new.items():
            self._members[replica_id] = member
            self._draining.discard(replica_id)
            self.sources.join(replica_id, member.blocks_address)
            if (older := self._feeds.pop(replica_id, None)) is not None:
                older.close()  # it left and came back: only a new feed begins with a snapshot
            self._feeds[replica_id] = self._feed(replica_id, member.feed_address)
        self.phases.roles.look(time.monotonic())
        self._changed.set()

    def ranks(self, request_id: str) -> tuple[str, ...]:
        """Where Serve's call for a request must go, best first. Serve asks until it is taken or withdrawn."""
        return self.sent.ranks(request_id, self._members, self.decide)

    def decide(self, query: RouteQuery) -> RouteDecision:
        """Route a request, reserve its blocks on the best replica and keep the record."""
        candidates = self.view.candidates(query.block_hashes, time.monotonic())
        rule = self.named.rule_for(query, candidates) if self.named is not None else None
        seed = self._seeds.getrandbits(32)
        record = decide(query, candidates, self.weights, seed=seed, time_s=time.time(), rule=rule)
        if self._commit(record) and self.named is not None:
            self.named.note(query, record.decision.best)
        return record.decision

    def commit(self, dispatch: Dispatch) -> None:
        """A held request's turn has come: reserve its blocks where it goes and keep the record."""
        query = dispatch.pending.query
        inputs = dispatch.candidates, self.weights, dispatch.seed, dispatch.decision, dispatch.rule
        record = RouteRecord(time.time(), query, *inputs)
        if (sent := self.sent.get(query.request_id)) is not None:
            sent.record = record
            if dispatch.look is not None:
                self.routes.add_look(query.request_id, dispatch.look)
        self._commit(record)

    def submit(self, request: Request, replica_id: str, source: BlockSource | None = None) -> Callable[[], None] | None:
        """Send a request on ``replica_id``'s feed. Returns how to abort it there, None if not sent."""
        feed, request_id = self._feeds.get(replica_id), request.request_id
        if feed is None or replica_id not in self._members or not feed.submit(request, source):
            return None
        if source is not None:
            self.view_tally.leave_out(request_id)
        if (sent := self._note_replica(request_id, replica_id)) is not None:
            sent.submitted_to = replica_id
            sent.follower.sent_to(replica_id)
        return lambda: feed.abort(request_id)

    def routed(self, request_id: str, replica_id: str) -> None:
        """Serve's call went to ``replica_id``, which need not be the first rank if the request was not submitted. Serve
        says so only when the call ends.
        """
        self._note_taken(request_id, replica_id)

    # Calls, and questions about them

    def follow(self, request_id: str, follower: Follower) -> None:
        """Notify ``follower`` of a request that is about to be placed.

        Raises:
            InvalidArgument: another call with that id is running.
        """
        self.sent.follow(request_id, follower)

    def knows_call(self, call_id: str) -> bool:
        """Whether ``has_used`` knows a request; of several prompts, its first call."""
        return self.has_used(call_id) or self.has_used(f"{call_id}-0")

    def has_used(self, call_id: str) -> bool:
        """Whether a call with that id runs, has ended lately, or is still on record."""
        return call_id in self.sent or self.sent.has_ended(call_id) or bool(self.routes.of_call(call_id))

    def unfollow(self, request_id: str) -> None:
        """The request is over for this gateway: drop its reservation. Unknown ids are ignored."""
        sent = self.sent.pop(request_id)
        self._credit.withdraw(request_id)
        self.view.release(request_id)
        self.view.computed(request_id)
        for part in (self.view_tally, self.recalls, self._moves, self.phases):
            part.forget(request_id)
        if sent is not None and sent.replica_id in self._members:
            self._credit.end(request_id, sent.replica_id)
        elif sent is not None and sent.replica_id:
            self._close_unused_feed(sent.replica_id)

    def wish(self, wishes: Mapping[str, tuple[Wish, ...]]) -> None:
        """Tell the other gateways what is held here and where it is planned to go, by replica."""
        self._credit.wish(wishes, time.monotonic())

    def abort(self, request_id: str, index: int) -> None:
        """End one sequence at its replica."""
        sent = self.sent.get(request_id)
        if sent is not None and (feed := self._feeds.get(sent.replica_id)) is not None:
            feed.abort(request_id, index)

    async def ask(self, replica_id: str, question: str, body: bytes = b"") -> bytes:
        """A replica's answer to one of the feed's questions.

        Raises:
            NotFound: no such replica.
            Unavailable: it does not answer now.
        """
        feed = self._feeds.get(replica_id)
        if feed is None:
            raise NotFound(f"replica_id: no replica {shown(replica_id)} is known")
        return await feed.ask(question, FEED_ANSWER_TIMEOUT_S, body)

    def start_report(self, replica_id: str) -> str:
        """What a member reported at its start; empty for a replica that is no member."""
        return member.start_report if (member := self._members.get(replica_id)) is not None else ""

    def can_place(self, excluded: Set[str]) -> bool:
        """Whether a replica other than the ``excluded`` takes requests now."""
        return self.view.present(time.monotonic()).has_open(excluded)

    def _commit(self, record: RouteRecord) -> bool:
        """Keep the record and reserve what it says. False if there is nothing to reserve."""
        self.routes.add(record)
        self.on_decision(record)
        query, candidates, best = record.query, record.replicas, record.decision.best
        if not best or query.request_id not in self.sent:  # its client has left
            return False
        place = candidates.place(best)
        num_matched = candidates.num_matched_blocks.item(place)
        num_blocks, num_tokens = uncached_blocks(query, num_matched), uncached_tokens(query, num_matched)
        self._credit.withdraw(query.request_id, best)
        self.view.reserve(query.request_id, best, num_blocks, num_tokens)
        self.view.expect(query.request_id, best, query.block_hashes, num_matched)
        self.view_tally.expect(query, candidates, place)
        self._credit.promise(query.request_id)
        return True

    async def wait_for_change(self, timeout_s: float) -> None:
        """Return when a replica has joined, left, connected or been lost, or after ``timeout_s``."""
        self._changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    def check_health(self) -> None:
        """Raise if a feed is no longer followed."""
        for feed in self._feeds.values():
            feed.check_health()

    async def close(self) -> None:
        """Stop following every feed."""
        self.recalls.close()
        await asyncio.gather(*(feed.close() for feed in self._feeds.values()))
        self._feeds.clear()

    # News from the feeds

    def _feed(self, replica_id: str, address: tuple[str, int]) -> FeedClient:
        on_message, on_tokens = partial(self.hear, replica_id), partial(self._hear_tokens, replica_id)
        on_lost, on_refused = partial(self._lost, replica_id), partial(self._refused, replica_id)
        return FeedClient(self.gateway_id, address, on_message, on_lost, on_tokens, on_refused)

    def _hear_tokens(self, replica_id: str, update: Update) -> None:
        """Pass tokens on before the books are updated (``hear``): clients wait for them."""
        for request_id in update.accepted:
            self._note_taken(request_id, replica_id)
        for delta in update.deltas:
            if (sent := self.sent.get(delta.request_id)) is not None:
                sent.follower.take(replica_id, delta)

    def hear(self, replica_id: str, message: Snapshot | Update) -> None:
        """Take one message of a replica's feed into the books. Its tokens have been passed on already."""
        now = time.monotonic()
        if isinstance(message, Snapshot):
            if replica_id in self.view:
                self.journal.note(EventKind.READY, "its feed is open: requests may go there", replica_id=replica_id)
            self.recalls.begin(replica_id, message.stats, now)
            self.view.apply_snapshot(replica_id, message.stats, message.hashes, now)
            self._credit.take(replica_id, message, now)
            self._changed.set()
            self.phases.roles.look(now)
            self.on_news()
            return
        self.recalls.hear(replica_id, message.stats, now)
        self.view.apply_update(replica_id, message.stats, message.stored, message.removed, now)
        self._slowness.look(now)
        self.phases.roles.look(now)
        self._credit.take(replica_id, message, now)
        if message.stats is not None and (message.stats.draining or self.view.is_stalled(replica_id)):
            self.recalls.recall(replica_id)
        self.recalls.look(now)
        self._moves.look(now)
        self.view.settle(message.accepted)
        for delta in message.deltas:
            self.view.computed(delta.request_id)
            self.view_tally.take(delta.request_id, replica_id, delta.num_cached_tokens)
        self.on_news()
        self.routes.trim()

    def _note_taken(self, request_id: str, replica_id: str) -> None:
        """``replica_id`` has taken a request."""
        if (sent := self._note_replica(request_id, replica_id)) is not None:
            sent.follower.taken_by(replica_id)

    def _note_replica(self, request_id: str, replica_id: str) -> SentRequest | None:
        """A request is at ``replica_id``, or on its way there: its reservation moves there, and later messages about it
        go there. None if its client has left meanwhile.
        """
        if (sent := self.sent.get(request_id)) is None:
            self._credit.withdraw(request_id, replica_id)
            self.view.release(request_id)
            return None
        sent.replica_id = replica_id
        reservation = self.view.reservation(request_id)
        if reservation is not None and reservation.replica_id != replica_id:
            self._credit.withdraw(request_id, replica_id)
            self.view.move(request_id, replica_id)
            self._credit.promise(request_id)
        return sent

    def _refused(self, replica_id: str, refused: Refused) -> None:
        if (sent := self.sent.get(refused.request_id)) is not None:
            sent.follower.refused(replica_id, refused)

    def _lost(self, replica_id: str) -> None:
        if self.view.is_connected(replica_id):
            text = "its feed broke: nothing goes there until it is back"
            self.journal.note(EventKind.LOST, text, replica_id=replica_id)
        there = [sent.follower for request_id, sent in self.sent if self._where(request_id, sent) == replica_id]
        self.view.disconnect(replica_id)
        self.phases.roles.look(time.monotonic())
        for follower in there:
            follower.lost(replica_id)
        self._changed.set()

    def _where(self, request_id: str, sent: SentRequest) -> str | None:
        """The replica that has a request, or that it is on its way to by Serve's call alone."""
        reservation = self.view.reservation(request_id)
        return sent.replica_id or (reservation.replica_id if reservation is not None else None)

    def _close_unused_feed(self, replica_id: str) -> None:
        if not self.sent.at(replica_id) and (feed := self._feeds.pop(replica_id, None)) is not None:
            feed.close()
            self.sources.leave(replica_id)
            if replica_id in self._draining:
                self._draining.discard(replica_id)
                self.journal.note(EventKind.STOPPED, "no request of this gateway is left there", replica_id=replica_id)

    def _note_leaving(self, replica_id: str) -> None:
        num_left = len(self.sent.at(replica_id))
        if self.view.is_connected(replica_id):
            text = f"it takes nothing new; {num_left} requests of this gateway are left there"
            self.journal.note(EventKind.DRAINING, text, replica_id=replica_id)
            self._draining.add(replica_id)
        else:
            text = f"Serve took it away after its feed had broken; {num_left} requests were there"
            self.journal.note(EventKind.DIED, text, replica_id=replica_id)
