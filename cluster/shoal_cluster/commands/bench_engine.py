"""``shoal bench engine``: Shoal's engine, the machine's floor and other engines on the same workloads, in one run."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from shoal_cluster.commands.signals import exit_on_signals
from shoal_replica.bench.contender import Entries, make_contenders
from shoal_replica.bench.processor import describe_machine
from shoal_replica.bench.report import as_json, table
from shoal_replica.bench.runner import Plan, Runner
from shoal_replica.bench.workloads import DEFAULT_WORKLOADS, check_workloads
from shoal_replica.checkpoint import DEMO_MODEL, ensure_checkpoint
from shoal_replica.errors import ConfigError

MAX_WIDTH = 250

Texts = list[str] | None


def engine(
    model: Annotated[str, typer.Option(help="Hugging Face folder, hub id, or the demo model.")] = DEMO_MODEL,
    threads: Annotated[int, typer.Option(min=1, help="Threads per engine, kept to as many cores.")] = 1,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds; in each, the engines take turns.")] = 5,
    workloads: Annotated[
        str, typer.Option(help="Workloads, one letter each; s measures single steps.")
    ] = DEFAULT_WORKLOADS,
    engine_option: Annotated[Texts, typer.Option(metavar="KEY=VALUE", help="Argument of Shoal's LLM.")] = None,
    variant: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME:KEY=VALUE", help="Measure Shoal again with this argument, too."),
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=PYTHON[:MODEL]",
            help="Engine to compare with.",
        ),
    ] = None,
    peer_env: Annotated[Texts, typer.Option(metavar="NAME:KEY=VALUE", help="Environment variable of a peer.")] = None,
    peer_option: Annotated[list[str] | None, typer.Option(metavar="NAME:KEY=VALUE", help="Option of a peer.")] = None,
    only: Annotated[
        list[str] | None, typer.Option(metavar="NAME:LETTERS", help="Run only these workloads on a peer or variant.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Timeout of an engine's answer (s).")] = 600.0,
    start_timeout: Annotated[float, typer.Option(min=1, help="Timeout of loading an engine (s).")] = 900.0,
    seed: Annotated[int, typer.Option(help="Random seed of the prompts.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")] = None,
) -> None:
    """Time the engine on fixed workloads, beside the machine's floor and any peers, and print the ratios.

    A peer is vllm, openvino, llamacpp or transformers under an interpreter that has it; a label may follow its name, as
    in llamacpp-q8_0. A variant is called shoal-NAME.
    """
    if json_file is not None:
        _check_writable(json_file)
    plan = Plan(
        workloads=check_workloads(workloads),
        repeats=repeats,
        seed=seed,
        timeout_s=timeout,
        start_timeout_s=start_timeout,
    )
    contenders = make_contenders(
        str(ensure_checkpoint(model)),
        threads,
        Entries(
            engine_options=engine_option or (),
            variants=variant or (),
            peers=peer or (),
            environment=peer_env or (),
            options=peer_option or (),
            only=only or (),
        ),
    )
    exit_on_signals()
    errors = Console(stderr=True, highlight=False)
    with errors.status("starting") as status:
        outcome = asyncio.run(Runner(plan, contenders, status.update).run())
    if json_file is not None:
        about = {
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": sys.argv,
            "machine": describe_machine(),
            "num_threads": threads,
            "model": model,
        }
        json_file.write_text(json.dumps(about | as_json(outcome, contenders), indent=1) + "\n", encoding="utf-8")
    shown = table(outcome, contenders, f"{Path(model).name}, {threads} thread(s), {repeats} round(s)")
    console = Console(highlight=False)
    wide = console.options.update(max_width=MAX_WIDTH)
    console.width = max(console.width, console.measure(shown, options=wide).maximum)  # wrapped figures cannot be read
    console.print(shown)
    for name, reason in outcome.failures.items():
        errors.print(f"{name} fell out: {reason}", markup=False)
    if outcome.failures:
        raise typer.Exit(1)


def _check_writable(path: Path) -> None:
    """Raise ConfigError, before a run of many minutes, if its figures could not be written."""
    if not os.access(path if path.exists() else path.parent, os.W_OK) or path.is_dir():
        raise ConfigError(f"json: got {str(path)!r}; no such file can be written")
