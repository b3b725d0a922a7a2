"""Which due dates can be met together, and which requests are put off where not all can.

Each date may be within reach by itself while all of them together are not. In due-date order every prompt is then
computed just too late. The fewest are late if, wherever one would be, the longest prompt up to there is put off (Moore,
"An n job, one machine sequencing algorithm for minimizing the number of late jobs", Management Science 15, 1968). Here
all replicas that take requests are one machine: each prompt begins when the first of them gets to it, and takes as long
as on one replica.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

from shoal_cluster.policies.candidates import Candidates
from shoal_cluster.policies.columns import CAPACITY, DUE, PER_CENT, SLOWER
from shoal_cluster.policies.objective import RENEWAL
from shoal_replica.stats import DUE_WITHIN_S

MOST_LENGTHS = RENEWAL**4  # times its objective: a request that was put off so far gives way to no other any more
EPSILON_S = 1e-6

Group = tuple[int, int]
_Order = tuple[bool, float, float, int]
"""The order in which claims are put off: those over their tenant's share first, then the longest; among equals the
one whose objective ends last, so that several gateways choose the same.
"""


class Claim(NamedTuple):
    """What one request wants: ``takes_s`` seconds of a replica, and its first token by ``due_s``, the earliest date
    that it can meet by itself. Lower groups go first, and a claim is put off only for the sake of its own ``group``.
    ``length_s`` is its objective's. A claim that ``is_over`` its tenant's share is put off before others.
    """

    group: Group
    due_s: float
    takes_s: float
    arrival_s: float
    length_s: float
    is_over: bool = False


class Level(NamedTuple):
    """The replicas, sorted by when each becomes free.

    Attributes:
        works_s: the work, in seconds of the fastest replica, that the earlier ones finish before each becomes free.
        speeds: the speed of each and all earlier ones together, as a multiple of the fastest.
        waits_s: the sum of speed times wait over each and all earlier ones.
    """

    works_s: list[float]
    speeds: list[float]
    waits_s: list[float]


@dataclass(frozen=True, slots=True)
class Backlog:
    """What the replicas that take requests have to do before a newcomer.

    Attributes:
        now: when this was so.
        step_s: length of a full step. Where other prompts wait, a prompt begins and ends anywhere within a step (a
            shorter one if that takes all that waits), and its first token comes at the step's end: on average half a
            step later.
        levels: for a newcomer that is due within each of ``DUE_WITHIN_S``; empty where no replica takes requests.
    """

    now: float
    step_s: float
    levels: tuple[Level, ...]

    @classmethod
    def of(cls, replicas: Candidates, token_s: float) -> Backlog:
        """``token_s``: seconds per prompt token on the fastest replica."""
        told, columns = replicas.told, replicas.columns
        takes = columns[CAPACITY] >= 0  # one without a free slot now will have one
        if not takes.any():
            return cls(replicas.now, 0.0, ())
        times = 1.0 + columns[SLOWER][takes] * PER_CENT
        steps_s = (told["step_s"] * (told["num_running"] > 0))[takes]
        num_promised = replicas.num_reserved_tokens[takes]
        levels: list[Level] = []
        for due in DUE:
            waits_s = steps_s + (told[due][takes] + num_promised) * times * token_s
            order = waits_s.argsort(kind="stable")
            waits_s, speeds = waits_s[order], 1.0 / times[order]
            speed, weighed_s = speeds.cumsum(), (speeds * waits_s).cumsum()
            levels.append(Level((speed * waits_s - weighed_s).tolist(), speed.tolist(), weighed_s.tolist()))
        step_s = float(told["max_num_batched_tokens"][takes].max()) * token_s
        return cls(replicas.now, step_s, tuple(levels))

    def first_token_s(self, due_s: float, takes_s: float, before_s: float) -> float:
        """When the first token comes of a prompt that is due at ``due_s`` and takes ``takes_s``, behind others that
        take ``before_s`` of the fastest replica's time.
        """
        level = self.levels[bisect_left(DUE_WITHIN_S, due_s - self.now)]
        place = max(0, bisect_right(level.works_s, before_s) - 1)
        wait_s = (before_s + level.waits_s[place]) / level.speeds[place]
        last_step_s = min(self.step_s, wait_s + takes_s) if wait_s > 0 else 0.0
        return self.now + wait_s + takes_s + last_step_s / 2


def met_together(claims: Sequence[Claim], backlog: Backlog) -> list[float]:
    """A date for each claim such that all can be met: its own, or a later one as in ``LatencyObjective.next_due_s``.
    Claims that already miss their objective are put off before others, until ``MOST_LENGTHS`` of it are over.
    """
    dates = [claim.due_s for claim in claims]
    left = sorted([(claim.group, claim.due_s, number) for number, claim in enumerate(claims)])  # a heap
    if _are_met(claims, left, backlog):
        return dates
    group: Group | None = None
    lost: list[_Order] = []  # of the present group, taken so far: those that miss their objective
    others: list[_Order] = []
    work_s = 0.0
    while left:
        its_group, due_s, number = heappop(left)
        if its_group != group:
            group, lost, others = its_group, [], []
        _, _, its_takes_s, its_arrival_s, its_length_s, is_over = claims[number]
        age_s = due_s - its_arrival_s
        if age_s < its_length_s * MOST_LENGTHS - EPSILON_S:
            is_lost = age_s > its_length_s + EPSILON_S
            heappush(lost if is_lost else others, (not is_over, -its_takes_s, -its_arrival_s - its_length_s, -number))
        before_s, work_s = work_s, work_s + its_takes_s
        while (lost or others) and backlog.first_token_s(due_s, its_takes_s, before_s) > due_s + EPSILON_S:
            _, takes_s, _, longest = heappop(lost or others)
            longest = -longest
            arrival_s = claims[longest].arrival_s
            dates[longest] = arrival_s + max(EPSILON_S, dates[longest] - arrival_s) * RENEWAL  # always later
            heappush(left, (its_group, dates[longest], longest))
            work_s += takes_s
            if longest == number:
                break
            before_s += takes_s
    return dates


def _are_met(claims: Sequence[Claim], order: Sequence[tuple[Group, float, int]], backlog: Backlog) -> bool:
    before_s = 0.0
    for _, due_s, number in order:
        takes_s = claims[number].takes_s
        if backlog.first_token_s(due_s, takes_s, before_s) > due_s + EPSILON_S:
            return False
        before_s += takes_s
    return True
