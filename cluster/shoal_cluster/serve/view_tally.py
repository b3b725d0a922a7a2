"""How accurate the view was that requests were placed by: its age, and its predicted against actual cache hits."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from shoal_cluster.policies.candidates import Candidates
from shoal_cluster.policies.route_query import RouteQuery

NUM_AGES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewQuality:
    """The accuracy of one gateway's view.

    Attributes:
        num_requests, num_prompt_tokens: placements whose first token has come, and the tokens of their prompts.
        num_predicted_tokens, num_cached_tokens: how many of those tokens were predicted to be cached when the request
            was placed, and found cached when it was started; both in whole blocks.
        age_p50_s, age_p99_s: age of the chosen replica's stats, over the last decisions.
    """

    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_predicted_tokens: int = 0
    num_cached_tokens: int = 0
    age_p50_s: float = 0.0
    age_p99_s: float = 0.0

    @property
    def predicted_rate(self) -> float:
        """Share of prompt tokens predicted to be cached, in [0, 1]."""
        return self.num_predicted_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0

    @property
    def actual_rate(self) -> float:
        """Share of prompt tokens that were cached, in [0, 1]."""
        return self.num_cached_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0


class ViewTally:
    """Remembers what a placement was decided on until its first token shows how accurate that was."""

    def __init__(self) -> None:
        self._pending: dict[str, tuple[RouteQuery, Candidates] | None] = {}
        self._sums = [0, 0, 0, 0]
        self._ages_s: deque[float] = deque(maxlen=NUM_AGES)

    def expect(self, query: RouteQuery, replicas: Candidates, place: int) -> None:
        """Note that ``query`` was placed on element ``place`` of ``replicas``, in place of any earlier placement."""
        self._pending[query.request_id] = (query, replicas)
        self._ages_s.append(max(0.0, replicas.now - replicas.updated_s.item(place)))

    def take(self, request_id: str, replica_id: str, num_cached_tokens: int) -> None:
        """A token has come. Only the first one of a noted placement counts."""
        if (pending := self._pending.pop(request_id, None)) is None:
            return
        query, replicas = pending
        if replica_id in replicas.replica_ids:
            predicted = predicted_tokens(query, replicas.matched_by(replica_id))
            found = num_cached_tokens - num_cached_tokens % query.block_size
            for place, amount in enumerate((1, query.num_prompt_tokens, predicted, found)):
                self._sums[place] += amount

    def leave_out(self, request_id: str) -> None:
        """A placed request may be given blocks by another replica: what it finds cached says nothing of the view."""
        if request_id in self._pending:
            self._pending[request_id] = None

    def forget(self, request_id: str) -> None:
        """Forget a request that goes elsewhere or has ended. Unknown ids are ignored."""
        self._pending.pop(request_id, None)

    def quality(self) -> ViewQuality:
        """The accuracy so far."""
        num_requests, num_prompt, num_predicted, num_cached = self._sums
        age_p50_s, age_p99_s = np.percentile(self._ages_s, (50, 99)).tolist() if self._ages_s else (0.0, 0.0)
        return ViewQuality(
            num_requests=num_requests,
            num_prompt_tokens=num_prompt,
            num_predicted_tokens=num_predicted,
            num_cached_tokens=num_cached,
            age_p50_s=age_p50_s,
            age_p99_s=age_p99_s,
        )


def predicted_tokens(query: RouteQuery, num_matched_blocks: int) -> int:
    """Tokens that the replica will find cached, in whole blocks before the last token: that one's logits are needed."""
    return min(num_matched_blocks, (query.num_prompt_tokens - 1) // query.block_size) * query.block_size
