"""``shoal sim``: replay a trace on a simulated cluster."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from shoal_cluster.commands.sim_run import find_fewest, find_speed, run_once
from shoal_cluster.policies.admission import AdmissionLimits
from shoal_cluster.policies.autoscaling_config import LIMITS, ScaleConfig
from shoal_cluster.policies.baselines import OWN_RULE, ROUTINGS
from shoal_cluster.policies.hold_config import HoldConfig
from shoal_cluster.policies.objective import LatencyObjective, PrefillTime
from shoal_cluster.policies.routing import RouteWeights
from shoal_cluster.sim.capacity import DEFAULT_GOODPUT, MAX_REPLICAS
from shoal_cluster.sim.config import ScalingPlan, SimConfig
from shoal_cluster.sim.faults import parse_faults
from shoal_cluster.sim.fit import fit_step_time
from shoal_cluster.sim.latency import StepTime
from shoal_cluster.sim.plot import check_plot
from shoal_cluster.sim.traces import TRACE_FORMATS, read_trace
from shoal_cluster.sim.workload import SimRequest, repeat, speed_up
from shoal_replica.config import SCHEDULING_POLICIES, CacheConfig, SchedulerConfig
from shoal_replica.errors import ConfigError

WEIGHTS = RouteWeights()
NUM_REPLICAS = 8
STARTUP_S = 30.0
MAX_STARTUP_S = 86_400.0
HOST_TOKENS_PER_S = 200_000.0  # 25 GB/s at 128 KB per token
MAX_GATEWAYS = 256

Name = TypeVar("Name", bound=str)

CLASHES = (
    ("find_replicas", "find_capacity", "choose one"),
    ("replicas", "find_replicas", "the search sets the number of replicas"),
    ("fault", "find_capacity", "at another speed a fault would hit another part of the trace"),
    ("scale", "find_capacity", "the search keeps the number of replicas"),
    ("scale", "find_replicas", "the search sets the number of replicas"),
    ("plot", "find_capacity", "only a single run can be plotted"),
    ("plot", "find_replicas", "only a single run can be plotted"),
    ("shared_pool", "scale", "the shared cache is as large as those of the first replicas"),
    ("host_blocks", "shared_pool", "the shared pool shows what placement could achieve with device memory alone"),
    ("transfer_rate", "shared_pool", "in the shared pool transfers are free"),
)
"""Options that do not go together, and why."""

NEEDS = (
    ("startup", ("scale",), "otherwise no replica is started"),
    ("host_rate", ("host_blocks",), "otherwise nothing moves to host memory"),
    ("prefill_share", ("transfer_rate",), "the replica that decodes copies the prompt's blocks"),
    ("shed_late", ("hold",), "only held requests are refused later"),
    ("goodput", ("find_capacity", "find_replicas"), "a single run has no goal; it reports its goodput"),
)
"""Options that mean nothing without one of others, and why."""

MAX_BLOCKS, MAX_BLOCK_SIZE, MAX_STEP_TOKENS = 10**7, 2**20, 2**24


def sim(
    trace: Annotated[Path, typer.Option(help="Trace file, plain or .gz.")],
    trace_format: Annotated[str, typer.Option("--format", help=", ".join(TRACE_FORMATS))] = "mooncake",
    replicas: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_REPLICAS, help=f"Number of replicas. Default: {NUM_REPLICAS}."),
    ] = None,
    blocks_per_replica: Annotated[int, typer.Option(min=1, max=MAX_BLOCKS, help="KV blocks per replica.")] = 1000,
    block_size: Annotated[int, typer.Option(min=1, max=MAX_BLOCK_SIZE, help="Tokens per block.")] = 512,
    host_blocks: Annotated[
        int, typer.Option(min=0, max=MAX_BLOCKS, help="KV blocks per replica in host memory, for evicted prefixes.")
    ] = 0,
    host_rate: Annotated[
        float | None,
        typer.Option(min=1.0, help=f"Rate (tokens/s) of KV to and from host memory. Default: {HOST_TOKENS_PER_S:g}."),
    ] = None,
    transfer_rate: Annotated[
        float | None,
        typer.Option(
            min=1.0, help="Rate (tokens/s) at which replicas copy cached KV from one another. Default: no copying."
        ),
    ] = None,
    prefill_share: Annotated[
        float, typer.Option(min=0.0, max=0.99, help="Share of replicas that only prefill; the rest decode.")
    ] = 0.0,
    routing: Annotated[str, typer.Option(help=f"Placement rule: {', '.join(ROUTINGS)}.")] = OWN_RULE,
    hold: Annotated[
        bool | None,
        typer.Option(help="Hold requests at gateways until they can start. Default: on for predicted_ttft, else off."),
    ] = None,
    order: Annotated[
        str | None,
        typer.Option(help=f"Queue order: {', '.join(SCHEDULING_POLICIES)}. Default: deadline with --hold, else fcfs."),
    ] = None,
    gateways: Annotated[int, typer.Option(min=1, max=MAX_GATEWAYS, help="Number of gateways, each with a queue.")] = 1,
    shared_pool: Annotated[bool, typer.Option(help="One prefix cache for all replicas: an upper bound.")] = False,
    speed: Annotated[float, typer.Option(help="Speed up arrivals by this factor.")] = 1.0,
    requests: Annotated[int | None, typer.Option(min=1, help="Use only the first N requests.")] = None,
    seconds: Annotated[float | None, typer.Option(min=0.0, help="Use only the first N seconds.")] = None,
    rounds: Annotated[
        int, typer.Option("--repeat", min=1, help="Repeat the trace N times with distinct prefixes.")
    ] = 1,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Running sequences per replica, at most.")] = 256,
    max_num_batched_tokens: Annotated[int, typer.Option(min=1, max=MAX_STEP_TOKENS, help="Tokens per step.")] = 2048,
    model_rate: Annotated[
        str | None,
        typer.Option(help="Prefill tokens/s, seconds per token pair, seconds per decode step: '8000,2.5e-9,0.03'."),
    ] = None,
    model_from: Annotated[
        Path | None, typer.Option(help="Fit step times to a file of 'shoal bench engine --workloads s --json FILE'.")
    ] = None,
    prefill_price: Annotated[
        float | None,
        typer.Option(help=f"predicted_ttft's price per uncached token. Default: {WEIGHTS.prefill_price:g}."),
    ] = None,
    decode_price: Annotated[
        float | None,
        typer.Option(help=f"predicted_ttft's price per sequence on a replica. Default: {WEIGHTS.decode_price:g}."),
    ] = None,
    shed_late: Annotated[
        bool, typer.Option("--shed-late", help="Refuse requests whose first token cannot come within the objective.")
    ] = False,
    scale: Annotated[
        str | None, typer.Option(help="Autoscale between MIN:MAX replicas, e.g. 2:16, starting at --replicas.")
    ] = None,
    startup: Annotated[
        float | None,
        typer.Option(min=0.0, max=MAX_STARTUP_S, help=f"Seconds until a new replica serves. Default: {STARTUP_S:g}."),
    ] = None,
    fault: Annotated[
        list[str] | None,
        typer.Option(
            help="KIND:REPLICA@START+SECONDS, repeatable: crash:3@600+30, stall:3@600+5, slow:3@600+300x2 (half speed)."
        ),
    ] = None,
    ttft: Annotated[
        float, typer.Option(help="Objective: base seconds to the first token, to which --prefills adds.")
    ] = 2.0,
    prefills: Annotated[
        float, typer.Option(help="Objective: multiple of the request's uncached prefill time added to --ttft.")
    ] = 2.0,
    goodput: Annotated[
        float | None,
        typer.Option(help=f"Required share of requests within the objective. Default: {DEFAULT_GOODPUT:g}."),
    ] = None,
    capacity: Annotated[
        bool, typer.Option("--find-capacity", help="Find the highest speed at which --goodput is reached.")
    ] = False,
    least: Annotated[
        bool, typer.Option("--find-replicas", help="Find the fewest replicas that reach --goodput.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="Folder for PNGs of latency and load.")] = None,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole report as JSON.")] = False,
) -> None:
    """Replay a request trace on a simulated cluster: times to first token, goodput, hits, balance; or plan capacity."""
    rule = _one_of("routing", routing, ROUTINGS)
    is_held = rule == OWN_RULE if hold is None else hold
    _check_together(
        find_replicas=least,
        find_capacity=capacity,
        replicas=replicas is not None,
        goodput=goodput is not None,
        scale=scale is not None,
        startup=startup is not None,
        fault=bool(fault),
        plot=plot is not None,
        shared_pool=shared_pool,
        host_blocks=bool(host_blocks),
        host_rate=host_rate is not None,
        transfer_rate=transfer_rate is not None,
        prefill_share=bool(prefill_share),
        hold=is_held,
        shed_late=shed_late,
    )
    num_replicas, goal = replicas or NUM_REPLICAS, DEFAULT_GOODPUT if goodput is None else goodput
    if not 0 < goal <= 1:
        raise ConfigError(f"goodput: got {goodput!r}; must be above 0 and at most 1")
    if is_held and rule != OWN_RULE:
        raise ConfigError(f"--hold cannot be combined with --routing {rule}: only predicted_ttft places held requests")
    weights = _weights(rule, prefill_price=prefill_price, decode_price=decode_price)
    if plot is not None:
        check_plot(plot)
    step_time = replace(_step_time(model_rate, model_from), move_s=block_size / (host_rate or HOST_TOKENS_PER_S))
    objective = LatencyObjective(ttft_s=ttft, prefill_factor=prefills)
    config = SimConfig(
        num_replicas=num_replicas,
        # No partial reuse: traces tell prompts apart by whole blocks only.
        cache=CacheConfig(
            num_blocks=blocks_per_replica,
            block_size=block_size,
            num_host_blocks=host_blocks,
            enable_partial_reuse=False,
        ),
        scheduler=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            policy=_one_of("order", order or ("deadline" if is_held else "fcfs"), SCHEDULING_POLICIES),
        ),
        step_time=step_time,
        routing=rule,
        weights=weights,
        limits=AdmissionLimits(objective=objective if shed_late else None, pair_s=step_time.prefill.pair_s),
        hold=HoldConfig(objective=objective, prefill=step_time.prefill) if is_held else None,
        scaling=_scaling(scale, STARTUP_S if startup is None else startup, ttft),
        num_gateways=gateways,
        has_shared_pool=shared_pool,
        transfer_s=None if transfer_rate is None else block_size / _finite("transfer_rate", transfer_rate),
        prefill_share=prefill_share,
        objective=objective,
        faults=parse_faults(fault or (), 1 if least else num_replicas),  # --find-replicas starts with one replica
        seed=seed,
    )
    arrivals = _arrivals(trace, trace_format, requests, seconds, rounds, speed)
    settings = {
        **asdict(config),
        "trace": trace.name,
        "format": trace_format,
        "requests": requests,
        "seconds": seconds,
        "repeat": rounds,
        "speed": speed,
        "faults": fault or [],
    }
    told = settings if as_json else None
    if least:
        del settings["num_replicas"]  # that is what the search looks for
        find_fewest(config, arrivals, goal, told)
    elif capacity:
        find_speed(config, arrivals, goal, speed, told)
    else:
        run_once(config, arrivals, plot, told)


def _check_together(**given: bool) -> None:
    """Raise ConfigError for options that do not go together, as CLASHES and NEEDS say."""
    for name, other, why in CLASHES:
        if given[name] and given[other]:
            raise ConfigError(f"{_option(name)} cannot be combined with {_option(other)}: {why}")
    for name, needed, why in NEEDS:
        if given[name] and not any(given[other] for other in needed):
            raise ConfigError(f"{_option(name)} requires {' or '.join(map(_option, needed))}: {why}")


def _option(name: str) -> str:
    """An option as it is spelt on the command line."""
    return f"--{name.replace('_', '-')}"


def _one_of(field: str, value: str, names: tuple[Name, ...]) -> Name:
    for name in names:
        if name == value:
            return name
    raise ConfigError(f"{field}: got {value!r}; must be one of {', '.join(names)}")


def _finite(field: str, value: float) -> float:
    if value == math.inf:
        raise ConfigError(f"{field}: got {value!r}; must be finite")
    return value


def _weights(rule: str, **prices: float | None) -> RouteWeights:
    """With the prices that are given, which only our own rule has."""
    given = {name: price for name, price in prices.items() if price is not None}
    if given and rule != OWN_RULE:
        option = _option(min(given))
        raise ConfigError(f"{option} cannot be combined with --routing {rule}: only predicted_ttft has prices")
    return RouteWeights(**given)


def _arrivals(
    trace: Path, trace_format: str, requests: int | None, seconds: float | None, rounds: int, speed: float
) -> list[SimRequest]:
    """The part of the trace that is asked for, repeated and sped up."""
    limit_s = None if seconds is None else _finite("seconds", seconds)
    arrivals = read_trace(trace, _one_of("format", trace_format, TRACE_FORMATS), requests)
    return speed_up(repeat([r for r in arrivals if limit_s is None or r.arrival_s <= limit_s], rounds), speed)


def _scaling(text: str | None, startup_s: float, ttft_s: float) -> ScalingPlan | None:
    """As in a deployment, queues are scaled by the objective's ``ttft_s``."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d{1,6}):(\d{1,6})", text)
    if found is None:
        raise ConfigError(f"scale: got {text!r}; must be such as 2:16")
    try:
        config = ScaleConfig(min_replicas=int(found[1]), max_replicas=int(found[2]))
    except ConfigError as error:
        raise ConfigError(f"scale: got {text!r}; {error}") from None
    least_s, most_s = LIMITS["ttft_objective_s"]
    if not least_s <= ttft_s <= most_s:
        raise ConfigError(f"ttft: got {ttft_s!r}; must be from {least_s:g} to {most_s:g} with --scale")
    return ScalingPlan(config=replace(config, ttft_objective_s=ttft_s), startup_s=startup_s)


def _step_time(rate: str | None, path: Path | None) -> StepTime:
    if rate is not None and path is not None:
        raise ConfigError("--model-from cannot be combined with --model-rate: choose one")
    if path is not None:
        return fit_step_time(path)
    if rate is None:
        return StepTime()
    try:
        tokens_per_s, pair_s, decode_s = (float(part) for part in rate.split(","))
    except ValueError:
        raise ConfigError(f"model_rate: got {rate!r}; must be three numbers such as 8000,2.5e-9,0.03") from None
    return StepTime(prefill=PrefillTime(tokens_per_s=tokens_per_s, pair_s=pair_s), decode_s=decode_s)
