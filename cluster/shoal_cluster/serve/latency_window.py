"""Latency as clients saw it lately: quantiles and the share of requests within the objective, over a sliding window.

Times are counted in buckets whose bounds grow by a factor of ``GROWTH``, so memory and the cost of an entry do not
depend on the load, and a quantile is off by at most 2 %. The window moves in ``NUM_SLICES`` steps. Nothing here reads a
clock: ``now`` is in seconds on any monotonic one.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field

WINDOW_S = 60.0
NUM_SLICES = 12
GROWTH = 1.04
MIN_S = 1e-5  # shorter times count as this
_BUCKETS_PER_E = 1.0 / math.log(GROWTH)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyTargets:
    """The longest that a client should have to wait: for the first token, and for each further one on average."""

    ttft_s: float = 2.0
    inter_token_s: float = 0.2

    def is_met(self, ttft_s: float | None, inter_token_s: float) -> bool:
        """Whether a request was served in time. ``ttft_s`` is None when no token came."""
        return ttft_s is not None and ttft_s <= self.ttft_s and inter_token_s <= self.inter_token_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantiles:
    """Seconds within which 50 %, 95 % and 99 % of ``num`` times stayed."""

    num: int
    p50_s: float
    p95_s: float
    p99_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencySummary:
    """The last ``window_s`` seconds. Quantiles are None when nothing was timed.

    Attributes:
        num_requests: requests that ended, including those that failed or were refused for want of room. Clients' own
            mistakes and requests that clients abandoned do not count.
        num_met: how many of them met the objective.
        ttft: seconds from a request's arrival to its first token.
        inter_token: seconds between the tokens of a sequence; a chunk of several tokens counts as that many.
    """

    window_s: float
    objective: LatencyTargets
    num_requests: int
    num_met: int
    ttft: Quantiles | None
    inter_token: Quantiles | None

    @property
    def attainment(self) -> float | None:
        """Share of requests within the objective, in [0, 1]; None without requests."""
        return self.num_met / self.num_requests if self.num_requests else None


@dataclass(slots=True)
class _Slice:
    number: int
    ttft: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    inter_token: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    num_requests: int = 0
    num_met: int = 0


class LatencyWindow:
    """Takes times as they happen and summarises the last ``window_s`` seconds, to within one slice."""

    def __init__(self, objective: LatencyTargets, window_s: float = WINDOW_S) -> None:
        self.objective = objective
        self._window_s = window_s
        self._slice_s = window_s / NUM_SLICES
        self._newest, self._end_s = _Slice(0), self._slice_s
        self._slices: deque[_Slice] = deque([self._newest], maxlen=NUM_SLICES)

    def add_first_token(self, seconds: float, now: float) -> None:
        current = self._slice(now)
        current.ttft[_bucket(seconds)] += 1

    def add_tokens(self, seconds: float, num_tokens: int, now: float) -> None:
        """Count ``num_tokens`` tokens that came, each ``seconds`` after the one before it."""
        self._slice(now).inter_token[_bucket(seconds)] += num_tokens

    def add_request(self, met: bool, now: float) -> None:
        """Count a request that has ended, within the objective or not."""
        current = self._slice(now)
        current.num_requests += 1
        current.num_met += met

    def summary(self, now: float) -> LatencySummary:
        self._slice(now)
        ttft: Counter[int] = Counter()
        inter_token: Counter[int] = Counter()
        for each in self._slices:
            ttft.update(each.ttft)
            inter_token.update(each.inter_token)
        return LatencySummary(
            window_s=self._window_s,
            objective=self.objective,
            num_requests=sum(each.num_requests for each in self._slices),
            num_met=sum(each.num_met for each in self._slices),
            ttft=_quantiles(ttft),
            inter_token=_quantiles(inter_token),
        )

    def _slice(self, now: float) -> _Slice:
        """The slice of ``now``; drops those that have left the window. Time does not run backwards."""
        if now < self._end_s:
            return self._newest
        number = int(now / self._slice_s)
        while self._slices and self._slices[0].number <= number - NUM_SLICES:
            self._slices.popleft()
        self._newest, self._end_s = _Slice(number), (number + 1) * self._slice_s
        self._slices.append(self._newest)
        return self._newest


def _bucket(seconds: float) -> int:
    return math.floor(math.log(seconds if seconds > MIN_S else MIN_S) * _BUCKETS_PER_E)


def _middle(bucket: int) -> float:
    """The geometric middle of a bucket: off by the same factor from both of its ends."""
    return float(GROWTH ** (bucket + 0.5))


def _quantiles(counts: Counter[int]) -> Quantiles | None:
    if not counts:
        return None
    num = counts.total()
    ranks = [math.ceil(share * num) for share in (0.5, 0.95, 0.99)]
    values: list[float] = []
    seen = 0
    for bucket in sorted(counts):
        seen += counts[bucket]
        while len(values) < len(ranks) and seen >= ranks[len(values)]:
            values.append(_middle(bucket))
    return Quantiles(num=num, p50_s=values[0], p95_s=values[1], p99_s=values[2])
