"""``shoal bench serving``: what a gateway adds to the bare engine."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal_cluster.commands.signals import exit_on_signals
from shoal_replica.errors import ConfigError

if TYPE_CHECKING:
    from shoal_cluster.bench.serving import ServingCost, Spread

HEADER = (
    "clients  ttft p50: engine    served  added (quartiles)         not in the engine: added  "
    "tokens/s: engine   served  ratio"
)


def serving(
    config: Annotated[Path | None, typer.Option(help="Serve YAML. Default: deploy/serve/local.yaml.")] = None,
    concurrency: Annotated[str, typer.Option(help="Client counts, comma-separated.")] = "1,4,16,64",
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens per prompt; no two prompts are alike.")] = 64,
    output_tokens: Annotated[int, typer.Option(min=1, help="Tokens per answer.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="Minimum turns of engine and cluster per client count.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print a line of JSON per client count.")] = False,
) -> None:
    """Compare one replica behind a gateway with the bare engine, in turns: time to first token, tokens per second."""
    from shoal_cluster.bench.serving import ServingLoad, measure_serving
    from shoal_cluster.commands.demo import local_yaml

    load = ServingLoad(
        path=config or local_yaml(),
        concurrencies=_numbers(concurrency),
        num_prompt_tokens=prompt_tokens,
        num_output_tokens=output_tokens,
        num_rounds=rounds,
    )
    exit_on_signals()
    if not as_json:
        typer.echo(HEADER)
    for cost in measure_serving(load, lambda progress: typer.echo(progress, err=True)):
        typer.echo(json.dumps(asdict(cost)) if as_json else _line(cost))


def _numbers(text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise ConfigError(f"concurrency: got {text!r}; must be numbers of at least 1 with commas, such as 1,8,64")
    return numbers


def _line(cost: ServingCost) -> str:
    return (
        f"{cost.concurrency:7} {cost.engine_ttft_p50_ms:14.1f} ms {cost.served_ttft_p50_ms:6.1f} ms "
        f"{_spread(cost.added_ttft_ms)} {_spread(cost.added_hops_ms):>30} {cost.engine_tokens_per_s:17.1f} "
        f"{cost.served_tokens_per_s:8.1f} {cost.throughput_ratio:6.3f}"
    )


def _spread(spread: Spread) -> str:
    low, middle, high = spread
    return f"{middle:+6.1f} ms ({low:+.1f} to {high:+.1f})"
