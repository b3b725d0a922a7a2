"""A whole cluster in simulated time: arrivals, admission, routing, replicas, feeds, autoscaling."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from random import Random

from shoal_cluster.policies.admission import admit
from shoal_cluster.policies.autoscaling import ScaleState, ScaleView, desired_replicas
from shoal_cluster.policies.baselines import place
from shoal_cluster.policies.routing import RouteQuery, uncached_blocks, uncached_tokens
from shoal_cluster.policies.view import ClusterView
from shoal_cluster.sim.config import SimConfig
from shoal_cluster.sim.event_loop import EventLoop
from shoal_cluster.sim.replica import FeedMessage, SimReplica
from shoal_cluster.sim.report import Distribution, Outcome, SimReport
from shoal_cluster.sim.workload import SimRequest
from shoal_replica.errors import ResourceExhausted
from shoal_replica.prefix_cache import hash_blocks
from shoal_replica.request import Request
from shoal_replica.sampling_params import SamplingParams


def simulate(config: SimConfig, requests: Sequence[SimRequest]) -> SimReport:
    """Run ``requests`` through the cluster to the last token, check conservation, and report.

    Equal arguments give equal reports.
    """
    cluster = SimCluster(config)
    for request in requests:
        cluster.arrive(request)
    cluster.loop.run()
    cluster.check_conservation()
    return cluster.report()


class SimCluster:
    """One gateway and its replicas, on one simulated clock."""

    def __init__(self, config: SimConfig) -> None:
        self.config = config
        self.loop = EventLoop()
        self.view = ClusterView()
        self.outcomes: dict[str, Outcome] = {}
        self._replicas: dict[str, SimReplica] = {}
        self._retired: list[SimReplica] = []
        self._numbers = itertools.count()
        self._rng = Random(config.seed)
        self._num_decisions = 0
        self._num_open = 0  # requests that are to arrive, or are not done
        self._num_target = config.num_replicas
        self._num_starting = 0
        self._num_peak = 0
        self._scale_state = ScaleState()
        self._requests: dict[str, SimRequest] = {}
        for _ in range(config.num_replicas):
            self._start_replica()
        self.loop.after(config.heartbeat_s, self._beat)
        if config.scaling is not None:
            self.loop.after(config.scaling.interval_s, self._scale)

    # Requests

    def arrive(self, request: SimRequest) -> None:
        """Let a request come at its ``arrival_s``."""
        self._num_open += 1
        self.loop.at(request.arrival_s, lambda: self._take(request))

    def _take(self, request: SimRequest) -> None:
        config = self.config
        outcome = Outcome(self.loop.now, request.num_prompt_tokens)
        self.outcomes[request.request_id] = outcome
        token_ids = request.prompt_token_ids()
        block_size = config.cache.block_size
        query = RouteQuery(
            request_id=request.request_id,
            block_hashes=tuple(hash_blocks(token_ids, block_size)),
            num_prompt_tokens=len(token_ids),
            num_blocks_needed=-(-(len(token_ids) + 1) // block_size),
            block_size=block_size,
        )
        now = self.loop.now
        candidates = self.view.candidates(query.block_hashes, now)
        admission = admit(query, candidates, config.limits, now)
        if not admission.admitted:
            self._refuse(outcome, admission.reason)
            return
        decision = place(config.routing, query, candidates, config.weights, self._rng, self._num_decisions)
        self._num_decisions += 1
        engine_request = Request(
            request_id=request.request_id,
            prompt_token_ids=token_ids,
            sampling_params=SamplingParams(
                max_tokens=request.num_output_tokens, temperature=0.0, seed=0, ignore_eos=True
            ),
            arrival_s=now,
        )
        for replica_id in decision.ranked:
            replica = self._replicas[replica_id]
            if replica.draining:
                continue
            try:
                replica.add(engine_request)
            except ResourceExhausted:
                continue
            num_matched = candidates.view(replica_id).num_matched_blocks
            outcome.replica_id = replica_id
            outcome.num_predicted_tokens = min(num_matched * block_size, len(token_ids) - 1)
            self._requests[request.request_id] = request
            blocks, tokens = uncached_blocks(query, num_matched), uncached_tokens(query, num_matched)
            self.view.reserve(request.request_id, replica_id, blocks, tokens, now, query.block_hashes)
            return
        self._refuse(outcome, decision.reason if not decision.ranked else "every replica refused")

    def _refuse(self, outcome: Outcome, reason: str) -> None:
        outcome.refusal = reason
        self._num_open -= 1

    # Feeds

    def _publish(self, replica: SimReplica, message: FeedMessage) -> None:
        self.loop.after(self.config.feed_delay_s, lambda: self._hear(replica, message))

    def _hear(self, replica: SimReplica, message: FeedMessage) -> None:
        now = self.loop.now
        self.view.apply_update(replica.replica_id, message.stats, message.stored, message.removed, now)
        self.view.settle(message.added)
        for delta in message.deltas:
            outcome = self.outcomes[delta.request_id]
            outcome.num_output_tokens += len(delta.token_ids)
            if outcome.first_token_s is None:
                outcome.first_token_s = now
                outcome.num_cached_tokens = delta.num_cached_tokens
                uncached = outcome.num_prompt_tokens - delta.num_cached_tokens
                own_s = self.config.step_time.prefill_s(delta.num_cached_tokens, uncached)
                outcome.objective_s = self.config.objective_s + self.config.objective_prefills * own_s
            if delta.finish_reason is not None:
                outcome.finished_s = now
                self._num_open -= 1
        if replica.draining and not replica.scheduler.has_work:
            self._retire(replica)

    def _beat(self) -> None:
        if not self._num_open:
            return
        for replica in self._replicas.values():
            if replica.is_idle:
                replica.tell(())
        self.loop.after(self.config.heartbeat_s, self._beat)

    # Replicas

    def _start_replica(self) -> None:
        replica = SimReplica(
            f"replica-{next(self._numbers):04d}",
            self.loop,
            self.config.scheduler,
            self.config.cache,
            self.config.step_time,
            self._publish,
        )
        self._replicas[replica.replica_id] = replica
        self._num_peak = max(self._num_peak, len(self._replicas))
        self.view.join(replica.replica_id)
        self.view.apply_snapshot(replica.replica_id, replica.scheduler.stats(self.loop.now), (), self.loop.now)

    def _retire(self, replica: SimReplica) -> None:
        if self._replicas.pop(replica.replica_id, None) is not None:
            self.view.leave(replica.replica_id)
            self._retired.append(replica)

    def _scale(self) -> None:
        plan = self.config.scaling
        if plan is None or not self._num_open:
            return
        now = self.loop.now
        view = ScaleView(
            replicas=self.view.replicas_for((), now),
            num_target=self._num_target,
            min_replicas=plan.min_replicas,
            max_replicas=plan.max_replicas,
        )
        decision = desired_replicas(view, self._scale_state, plan.config, now)
        self._scale_state = decision.state
        self._num_target = decision.num_replicas
        serving = [r for r in self._replicas.values() if not r.draining]
        for _ in range(self._num_target - len(serving) - self._num_starting):
            self._num_starting += 1
            self.loop.after(plan.startup_s, self._finish_starting)
        by_load = sorted(serving, key=lambda r: (r.scheduler.stats(now).num_allocated_blocks, r.replica_id))
        for replica in by_load[: max(0, len(serving) - self._num_target)]:
            replica.drain()
        self.loop.after(plan.interval_s, self._scale)

    def _finish_starting(self) -> None:
        self._num_starting -= 1
        if len([r for r in self._replicas.values() if not r.draining]) < self._num_target:
            self._start_replica()

    # The end

    def check_conservation(self) -> None:
        """Every request ended once, every token is accounted for, nothing is held, the gateway's copy is true."""
        assert self._num_open == 0
        self.view.check_invariants()
        for request_id, outcome in self.outcomes.items():
            assert (outcome.finished_s is None) != (outcome.refusal is None), request_id
            if outcome.finished_s is not None:
                room = self.config.cache.num_blocks * self.config.cache.block_size - outcome.num_prompt_tokens
                expected = min(self._requests[request_id].num_output_tokens, room)
                assert outcome.num_output_tokens == expected, (request_id, outcome.num_output_tokens, expected)
            assert self.view.reservation(request_id) is None, request_id
        everyone = [*self._replicas.values(), *self._retired]
        num_generated = 0
        for replica in everyone:
            replica.scheduler.check_invariants()
            assert not replica.scheduler.has_work
            stats = replica.scheduler.stats(self.loop.now)
            assert stats.num_allocated_blocks == 0
            num_generated += stats.num_generated_tokens
        assert num_generated == sum(o.num_output_tokens for o in self.outcomes.values())
        for replica in self._replicas.values():
            held = list(replica.scheduler.cache_hashes())
            known = self.view.index.num_held(replica.replica_id)
            assert known == len(held) or self.view.index.num_evicted

    def report(self) -> SimReport:
        """Of a run that has ended."""
        everyone = [*self._replicas.values(), *self._retired]
        finished = [o for o in self.outcomes.values() if o.finished_s is not None]
        stats = [r.scheduler.stats(self.loop.now) for r in everyone]
        first_s = min((o.arrival_s for o in self.outcomes.values()), default=0.0)
        last_s = max((o.finished_s or 0.0 for o in finished), default=first_s)
        num_prompt = sum(o.num_prompt_tokens for o in finished)
        num_output = sum(o.num_output_tokens for o in finished)
        busy_s = {r.replica_id: r.busy_s for r in sorted(everyone, key=lambda r: r.replica_id)}
        mean_busy_s = sum(busy_s.values()) / max(1, len(busy_s))
        lives_s = [(r.busy_s, last_s - r.started_s) for r in everyone]
        return SimReport(
            routing=self.config.routing,
            num_requests=len(self.outcomes),
            num_finished=len(finished),
            num_shed=len(self.outcomes) - len(finished),
            num_prompt_tokens=num_prompt,
            num_output_tokens=num_output,
            num_preemptions=sum(s.num_preemptions for s in stats),
            num_replicas_peak=self._num_peak,
            ttft_s=Distribution.of([o.first_token_s - o.arrival_s for o in finished if o.first_token_s is not None]),
            latency_s=Distribution.of([o.finished_s - o.arrival_s for o in finished if o.finished_s is not None]),
            goodput=sum(o.is_good for o in finished) / max(1, len(self.outcomes)),
            hit_rate=sum(o.num_cached_tokens for o in finished) / max(1, num_prompt),
            predicted_hit_rate=sum(o.num_predicted_tokens for o in finished) / max(1, num_prompt),
            imbalance=max(busy_s.values()) / mean_busy_s if mean_busy_s else 1.0,
            utilization=sum(b / life for b, life in lives_s if life > 0) / max(1, len(lives_s)),
            duration_s=last_s - first_s,
            output_tokens_per_s=num_output / (last_s - first_s) if last_s > first_s else 0.0,
            busy_s=busy_s,
        )
