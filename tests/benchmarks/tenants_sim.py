"""Fairness between tenants, in simulated time. By default two tenants, one of which sends ten times as many requests as
the other, more in all than the cluster can serve: the latency of the light one.
--alike, --zipf, --beside-tiny: many tenants with equal load, with load falling from one to the next, or with equal load
beside a tenant with next to none: what fairness among them costs.
--flood: nine tenants that need less than half of the capacity, beside one that floods the cluster: the latency of the
nine.

python tests/benchmarks/tenants_sim.py
python tests/benchmarks/tenants_sim.py --alike 5 20 500
python tests/benchmarks/tenants_sim.py --zipf 5 20 200
python tests/benchmarks/tenants_sim.py --beside-tiny 2 5
python tests/benchmarks/tenants_sim.py --flood 8 20 40
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from functools import lru_cache
from random import Random

from shoal_cluster.policies.hold_config import HoldConfig
from shoal_cluster.sim.cluster import SimCluster
from shoal_cluster.sim.config import SimConfig
from shoal_cluster.sim.report import Distribution
from shoal_cluster.sim.run import report, run, simulate
from shoal_cluster.sim.workload import SimRequest, poisson
from shoal_replica.config import CacheConfig, SchedulerConfig

LIGHT_RATE, HEAVY_RATE = 1.3, 13.0  # requests/s; four replicas serve 14.0
CONFIG = SimConfig(
    num_replicas=4,
    cache=CacheConfig(num_blocks=1000, block_size=512, enable_partial_reuse=False),
    scheduler=SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=2048, policy="deadline"),
    hold=HoldConfig(),
)


@dataclass(frozen=True)
class Felt:
    """Times to first token of each tenant, and the duration of the run with both."""

    alone: Distribution
    light: Distribution
    heavy: Distribution
    duration_s: float

    @property
    def p99_ratio(self) -> float:
        return self.light.p99 / self.alone.p99


def tenant(name: str, requests_per_s: float, duration_s: float, seed: int) -> list[SimRequest]:
    """Poisson arrivals of requests with 2 000 prompt tokens and 16 output tokens."""
    requests = poisson(
        requests_per_s=requests_per_s,
        num_requests=round(requests_per_s * duration_s),
        num_prompt_tokens=2000,
        num_output_tokens=16,
        seed=seed,
    )
    first = 10**6 * seed  # distinct token ids per tenant: no shared prefixes
    return [
        replace(
            r,
            request_id=f"{name}-{r.request_id}",
            tenant=name,
            prompt_runs=tuple((first + t, n) for t, n in r.prompt_runs),
        )
        for r in requests
    ]


def felt(duration_s: float, seed: int) -> Felt:
    """Run the light tenant alone on the cluster, then both tenants."""
    light = tenant("light", LIGHT_RATE, duration_s, 2 * seed + 1)
    heavy = tenant("heavy", HEAVY_RATE, duration_s, 2 * seed + 2)
    alone = run(SimCluster(CONFIG), light)
    both = run(SimCluster(CONFIG), sorted(light + heavy, key=lambda r: r.arrival_s))
    return Felt(
        first_tokens(alone, "light"), first_tokens(both, "light"), first_tokens(both, "heavy"), report(both).duration_s
    )


def first_tokens(cluster: SimCluster, name: str) -> Distribution:
    outcomes = [o for request_id, o in cluster.book.outcomes.items() if request_id.startswith(name)]
    return Distribution.of([o.first_token_s - o.arrival_s for o in outcomes if o.first_token_s is not None])


def many(
    num_tenants: int,
    requests_per_s: float,
    num_requests: int,
    seed: int,
    exponent: float = 0.0,
    is_beside_tiny: bool = False,
) -> tuple[float, float]:
    """Goodput of the same requests, with lengths as in chats, as one tenant's and as those of ``num_tenants`` tenants.

    The k-th tenant asks ``k ** -exponent`` times as often as the first. ``is_beside_tiny`` adds a tenant that sends a
    prompt of 40 tokens every 3 s.
    """
    rng, now = Random(seed), 0.0
    weights = [number**-exponent for number in range(1, num_tenants + 1)]
    requests = []
    for number in range(num_requests):
        now += rng.expovariate(requests_per_s)
        num_tokens = int(min(12_000, max(64, rng.lognormvariate(7.2, 0.9))))
        (number_of_tenant,) = rng.choices(range(num_tenants), weights)
        requests.append(
            SimRequest(f"r{number}", now, ((2**30 + number, num_tokens),), 20, tenant=f"tenant-{number_of_tenant}")
        )
    if is_beside_tiny:
        tiny = [SimRequest(f"t{n}", 3.0 * n, ((2**29 + n, 40),), 20, tenant="tiny") for n in range(int(now / 3))]
        requests = sorted(requests + tiny, key=lambda r: r.arrival_s)
    return goodput_as_one(tuple(replace(r, tenant="") for r in requests)), simulate(CONFIG, requests).goodput


@lru_cache(maxsize=4)  # whatever the tenants are, they send the same
def goodput_as_one(requests: tuple[SimRequest, ...]) -> float:
    return simulate(CONFIG, requests).goodput


def flood(requests_per_s: float, duration_s: float, seed: int) -> tuple[Distribution, Distribution]:
    """Times to first token of nine tenants that need 45 % of the capacity, and of one that floods the cluster."""
    modest = [r for n in range(9) for r in tenant(f"modest-{n}", 0.7, duration_s, 10 * seed + n + 1)]
    flooding = tenant("flood", requests_per_s, duration_s, 10 * seed + 10)
    cluster = run(SimCluster(CONFIG), sorted(modest + flooding, key=lambda r: r.arrival_s))
    return first_tokens(cluster, "modest"), first_tokens(cluster, "flood")


def show_many(numbers: list[int], seeds: list[int], exponent: float, is_beside_tiny: bool) -> None:
    for num_tenants in numbers:
        for rate in (12.0, 14.0, 16.0):
            shares = [many(num_tenants, rate, 800, seed, exponent, is_beside_tiny) for seed in seeds]
            text = "; ".join(f"{as_one:.3f} and {as_many:.3f}" for as_one, as_many in shares)
            print(
                f"{num_tenants} tenants, {rate:g} requests/s: in the objective as one tenant and as many {text}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=200.0, help="of arrivals")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--alike", type=int, nargs="+", metavar="N", help="so many tenants that ask alike")
    parser.add_argument(
        "--zipf", type=int, nargs="+", metavar="N", help="so many, the k-th a k-th as often as the first"
    )
    parser.add_argument("--beside-tiny", type=int, nargs="+", metavar="N", help="so many alike beside a tiny one")
    parser.add_argument(
        "--flood", type=float, nargs="+", metavar="RATE", help="of one beside nine modest ones, for 60 s"
    )
    options = parser.parse_args()
    if numbers := options.alike or options.zipf or options.beside_tiny:
        show_many(numbers, options.seeds, 1.0 if options.zipf else 0.0, bool(options.beside_tiny))
    elif options.flood:
        show_flood(options.flood, options.seeds)
    else:
        show_two(options.seconds, options.seeds)


def show_flood(rates: list[float], seeds: list[int]) -> None:
    for rate in rates:
        for seed in seeds:
            modest, flooding = flood(rate, 60.0, seed)
            print(
                f"{rate:g} requests/s, seed {seed}: modest p50 {modest.p50:.2f} p99 {modest.p99:.2f} s; "
                f"the other p50 {flooding.p50:.1f} max {flooding.max:.1f} s",
                flush=True,
            )


def show_two(duration_s: float, seeds: list[int]) -> None:
    for seed in seeds:
        result = felt(duration_s, seed)
        light, heavy = result.light, result.heavy
        print(
            f"seed {seed}: light p50 {light.p50:.3f} p99 {light.p99:.3f} s, alone p99 {result.alone.p99:.3f} s "
            f"({result.p99_ratio:.2f} times); heavy p50 {heavy.p50:.2f} p99 {heavy.p99:.2f} max {heavy.max:.1f} s; "
            f"all done after {result.duration_s:.1f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
