"""Compares all placement rules on traffic and clusters drawn at random, to find where our own rule loses.

    python tests/benchmarks/random_traffic.py --count 100 --seed 0 > outcomes.jsonl

Each case is drawn from its number: one or two kinds of traffic (``KINDS``), how they arrive, a cluster, an objective,
and a load between 0.3 and 1.6 of what the cluster should carry. A line is printed for each case, or why it is left
out, and at the end how often our rule has more, as many and fewer requests in time than the best of the others: the
best of eight, after the fact.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from traffic_kinds import KINDS, mixed

from shoal_cluster.policies.baselines import OWN_RULE, ROUTINGS, Routing
from shoal_cluster.policies.hold_config import HoldConfig
from shoal_cluster.policies.objective import LatencyObjective, PrefillTime
from shoal_cluster.sim.config import SimConfig
from shoal_cluster.sim.latency import StepTime
from shoal_cluster.sim.report import SimReport
from shoal_cluster.sim.run import simulate
from shoal_cluster.sim.workload import SimRequest
from shoal_replica.config import CacheConfig, SchedulerConfig

MOST_OF_KV = 0.9  # of a replica's tokens, for one request: cases with longer ones are left out
LEVELS = (-5.0, -1.0, -0.25, 0.25, 1.0, 5.0)  # points of requests in time


@dataclass(frozen=True, slots=True)
class Case:
    """What is simulated. ``kinds`` are names of ``KINDS``; ``load`` is of what the cluster should carry."""

    number: int
    kinds: tuple[str, ...]
    load: float
    num_replicas: int
    kv_tokens: int
    block_size: int
    max_num_seqs: int
    step_tokens: int
    tokens_per_s: float
    pair_s: float
    decode_s: float
    ttft_s: float
    prefill_factor: float
    num_gateways: int

    @classmethod
    def draw(cls, number: int) -> Case:
        draw = random.Random(number)
        tokens_per_s, pair_s, decode_s = draw.choice(
            [(8000, 2.5e-9, 0.03)] * 2 + [(3000, 5e-9, 0.05), (25_000, 5e-10, 0.012), (60_000, 2e-10, 0.008)]
        )
        return cls(
            number=number,
            kinds=tuple(draw.sample(sorted(KINDS), draw.choice([1, 1, 2]))),
            load=draw.choice([0.3, 0.5, 0.7, 0.85, 1.0, 1.15, 1.3, 1.6]),
            num_replicas=draw.choice([2, 3, 4, 8, 8, 16, 32]),
            kv_tokens=draw.choice([40_000, 120_000, 512_000, 512_000, 2_000_000]),
            block_size=draw.choice([16, 64, 512, 512]),
            max_num_seqs=draw.choice([32, 256, 256]),
            step_tokens=draw.choice([512, 2048, 2048, 8192]),
            tokens_per_s=tokens_per_s,
            pair_s=pair_s,
            decode_s=decode_s,
            ttft_s=draw.choice([0.3, 0.5, 1, 2, 2, 5, 10]),
            prefill_factor=draw.choice([0, 1, 2, 2]),
            num_gateways=draw.choice([1, 1, 1, 4]),
        )

    def config(self, rule: Routing) -> SimConfig:
        objective = LatencyObjective(ttft_s=self.ttft_s, prefill_factor=self.prefill_factor)
        prefill, is_held = PrefillTime(tokens_per_s=self.tokens_per_s, pair_s=self.pair_s), rule == OWN_RULE
        return SimConfig(
            num_replicas=self.num_replicas,
            cache=CacheConfig(
                num_blocks=self.kv_tokens // self.block_size, block_size=self.block_size, enable_partial_reuse=False
            ),
            scheduler=SchedulerConfig(
                max_num_seqs=self.max_num_seqs,
                max_num_batched_tokens=self.step_tokens,
                policy="deadline" if is_held else "fcfs",
            ),
            step_time=StepTime(prefill=prefill, decode_s=self.decode_s),
            routing=rule,
            hold=HoldConfig(objective=objective, prefill=prefill) if is_held else None,
            num_gateways=self.num_gateways,
            objective=objective,
        )

    def requests(self) -> list[SimRequest]:
        """400 or more requests, at a rate that is ``load`` of an estimate: prefills one after the other with a cache
        that forgets nothing, decodes in batches of 0.7 of the room.
        """
        rate = 5.0
        for _ in range(2):
            rate = self.load * self._capacity(mixed(self.number, self.kinds, rate, 600))
        return mixed(self.number, self.kinds, rate, int(min(1200, max(400, 40 * rate))))

    def _capacity(self, requests: Sequence[SimRequest]) -> float:
        known: set[int] = set()
        prefill_s = tokens = outputs = 0.0
        for request in requests:
            num_cached, is_cached = 0, True
            for run in request.prompt_runs[:-1]:
                is_cached = is_cached and run[0] in known
                num_cached += run[1] * is_cached
                known.add(run[0])
            new = max(1, request.num_prompt_tokens - num_cached)
            prefill_s += new / self.tokens_per_s + self.pair_s * new * (num_cached + new / 2)
            tokens += request.num_prompt_tokens + request.num_output_tokens / 2
            outputs += request.num_output_tokens
        count = len(requests)
        batch = max(1.0, min(self.max_num_seqs, 0.7 * self.kv_tokens * count / tokens))
        return self.num_replicas / (prefill_s / count * 1.5 + outputs / count * self.decode_s / batch)


def why_left_out(case: Case, requests: Sequence[SimRequest]) -> str:
    """Why a case is not simulated: it has requests that fit no replica. Empty if it is."""
    longest, room = max(r.num_prompt_tokens + r.num_output_tokens for r in requests), int(MOST_OF_KV * case.kv_tokens)
    if longest <= room:
        return ""
    return f"its longest request has {longest} tokens, where one may have {room} of a replica's"


def compare(case: Case, requests: Sequence[SimRequest]) -> dict[str, SimReport]:
    """All rules on one case, our own first."""
    rules = (OWN_RULE, *(rule for rule in ROUTINGS if rule != OWN_RULE))
    return {rule: simulate(case.config(rule), requests) for rule in rules}


def level(points: float) -> str:
    """The interval of ``LEVELS`` that a difference lies in."""
    for bound in LEVELS:
        if points < bound:
            return f"below {bound:+g}"
    return f"{LEVELS[-1]:+g} and more"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="number of the first case")
    options = parser.parse_args()
    levels, num_left_out = Counter[str](), 0
    for number in range(options.seed, options.seed + options.count):
        case = Case.draw(number)
        requests = case.requests()
        if why := why_left_out(case, requests):
            print(f"case {number} is left out: {why}", file=sys.stderr)
            num_left_out += 1
            continue
        reports = compare(case, requests)
        best = max((rule for rule in reports if rule != OWN_RULE), key=lambda rule: reports[rule].goodput)
        points = 100 * (reports[OWN_RULE].goodput - reports[best].goodput)
        levels[level(points)] += 1
        means = {rule: report.ttft_s.mean for rule, report in reports.items()}
        in_time = {rule: report.goodput for rule, report in reports.items()}
        print(json.dumps({**asdict(case), "best": best, "points": points, "in_time": in_time, "mean_ttft_s": means}))
        sys.stdout.flush()
    print(f"points more in time than the best of the others: {dict(levels)}; left out: {num_left_out}", file=sys.stderr)


if __name__ == "__main__":
    main()
