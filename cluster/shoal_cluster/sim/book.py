"""The outcome of every request of a run."""

from __future__ import annotations

from dataclasses import dataclass

from shoal_cluster.policies.autoscaling_view import Demand
from shoal_cluster.sim.config import SimConfig
from shoal_cluster.sim.workload import SimRequest
from shoal_replica.prefix_cache import BlockHash
from shoal_replica.request import FinishReason, TokenDelta


@dataclass(slots=True)
class SimOutcome:
    """What happened to one request, filled in during the run. Times are in simulated seconds; None: not (yet)."""

    arrival_s: float
    num_prompt_tokens: int
    gateway_id: str = ""
    replica_id: str | None = None  # where it is, or was last; None while it is held at a gateway
    num_predicted_tokens: int = 0  # prompt tokens that the gateway expected to be cached at the chosen replica
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    first_token_s: float | None = None
    finished_s: float | None = None
    objective_s: float = 0.0  # TTFT up to which the request counts as good
    refusal: str | None = None
    num_resumes: int = 0
    num_moves: int = 0  # moves to another replica before it had started

    @property
    def is_open(self) -> bool:
        return self.finished_s is None and self.refusal is None

    @property
    def inter_token_s(self) -> float:
        """Mean time between its tokens, of which a finished one has several."""
        assert self.finished_s is not None
        assert self.first_token_s is not None
        return (self.finished_s - self.first_token_s) / (self.num_output_tokens - 1)

    @property
    def is_late(self) -> bool:
        """Whether its first token came later than the objective allows."""
        return self.first_token_s is not None and self.first_token_s - self.arrival_s > self.objective_s

    @property
    def is_good(self) -> bool:
        """Whether it finished and its first token met the objective."""
        return self.finished_s is not None and self.first_token_s is not None and not self.is_late


class Book:
    """The requests of a run and their outcomes, by request id.

    ``num_open`` counts requests that have yet to arrive or to end; ``demand`` sums up what has arrived.
    """

    def __init__(self, config: SimConfig) -> None:
        self._config = config
        self.requests: dict[str, SimRequest] = {}
        self.outcomes: dict[str, SimOutcome] = {}
        self.num_open = 0
        self.num_decisions = 0
        self.num_missed = 0  # requests that were refused, or whose first token came too late
        self._hashes: dict[str, tuple[BlockHash, ...]] = {}  # of open requests
        self.demand = Demand()

    def expect(self, request: SimRequest) -> None:
        """Register a request that will arrive. Raises ValueError if its id is taken."""
        if request.request_id in self.requests:
            raise ValueError(f"request {request.request_id!r} comes twice")
        self.requests[request.request_id] = request
        self.num_open += 1

    def arrive(self, request_id: str, gateway_id: str, now: float) -> None:
        outcome = SimOutcome(now, self.requests[request_id].num_prompt_tokens, gateway_id)
        self.demand += Demand(num_requests=1, num_prompt_tokens=outcome.num_prompt_tokens)
        self.outcomes[request_id] = outcome

    def block_hashes(self, request_id: str) -> tuple[BlockHash, ...]:
        """Hashes of the prompt's full blocks, computed once; none without prefix caching."""
        if not self._config.cache.enable_prefix_caching:
            return ()
        if (hashes := self._hashes.get(request_id)) is None:
            hashes = self.requests[request_id].block_hashes(self._config.cache.block_size)
            self._hashes[request_id] = hashes
        return hashes

    def open_at(self, replica_id: str) -> list[str]:
        """Requests that are at this replica and have not ended."""
        return [r for r, outcome in self.outcomes.items() if outcome.replica_id == replica_id and outcome.is_open]

    def refuse(self, request_id: str, reason: str) -> None:
        outcome = self.outcomes[request_id]
        outcome.refusal = reason
        self.num_missed += not outcome.is_late
        self.demand += Demand(num_shed=1)
        self._end(request_id)

    def take(self, delta: TokenDelta, now: float) -> None:
        """Record tokens that have reached the gateway."""
        outcome = self.outcomes[delta.request_id]
        assert delta.position == outcome.num_output_tokens, f"{delta.request_id}: tokens repeated or lost"
        outcome.num_output_tokens += len(delta.token_ids)
        if outcome.first_token_s is None:
            outcome.first_token_s = now
            outcome.num_cached_tokens = delta.num_cached_tokens
            uncached = outcome.num_prompt_tokens - delta.num_cached_tokens
            own_s = self._config.step_time.prefill.seconds(delta.num_cached_tokens, uncached)
            outcome.objective_s = self._config.objective.due_in_s(own_s)
            self.num_missed += outcome.is_late
        if delta.finish_reason not in (None, FinishReason.PREFILLED):
            outcome.finished_s = now
            self._end(delta.request_id)

    def _end(self, request_id: str) -> None:
        self.num_open -= 1
        self._hashes.pop(request_id, None)
