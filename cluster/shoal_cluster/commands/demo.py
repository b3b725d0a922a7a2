"""``shoal demo``: start a whole cluster on this machine, run eight chats at once, and keep it up until Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import signal
import sys
import time
import uuid
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.status import Status
from rich.table import Table
from rich.text import Text

from shoal_cluster.addresses import DEFAULT_GRPC_ADDRESS, DEFAULT_HTTP_ADDRESS
from shoal_cluster.chat.message import Message
from shoal_cluster.commands.deploy import arguments_of, deploy, read_config
from shoal_cluster.commands.gateway_access import API_KEY_VARIABLE, TLS, GatewayAccess, http_url
from shoal_cluster.commands.local_ray import LocalRay
from shoal_cluster.commands.signals import ENDING, exit_on_signals
from shoal_cluster.config import ClusterConfig
from shoal_cluster.gateway_settings import ADMIN_KEY_VARIABLE, GatewaySettings, with_keys
from shoal_cluster.serve.call import GenerateCall, Usage
from shoal_replica.checkpoint import ensure_checkpoint
from shoal_replica.sampling_params import SamplingParams

NUM_RAY_CPUS = 4.0  # logical: the demo's actors share the cores that there are
CHAT_TIMEOUT_S = 120.0
LOOK_S = 1.0  # how often it is looked whether Ray is still there
SYSTEM = (
    "You are Shoal, a patient guide to the sea. You answer every question in two or three short sentences, in plain "
    "words that a curious child would follow. You never list sources, you never apologise, and when you are not sure "
    "you say so and suggest how one could find out."
)
QUESTIONS = (
    "Why do fish swim in schools?",
    "How deep is the ocean?",
    "What do whales eat?",
    "Why is the sea salty?",
    "How do dolphins sleep?",
    "What makes the tides?",
    "Can fish hear sounds?",
    "What is a coral reef?",
)


@dataclass(slots=True)
class Chat:
    """One question and the answer so far."""

    question: str
    request_id: str
    answer: str = ""
    usage: Usage | None = None
    seconds: float = 0.0


def demo(
    config: Annotated[Path | None, typer.Option(help="Serve YAML. Default: deploy/serve/local.yaml.")] = None,
    once: Annotated[bool, typer.Option("--once", help="Stop after the answers.")] = False,
) -> None:
    """Start Ray, apply the YAML, ask eight questions that share one system prompt, and stay up until Ctrl-C."""
    exit_on_signals()
    console = Console(highlight=False)
    path = config or local_yaml()
    document, _ = read_config(path)
    settings = ClusterConfig.from_args(with_keys(arguments_of(document) or {}))
    new_key = None if settings.gateway.admin_key else secrets.token_hex(4)
    if new_key is not None:  # else the dashboard's controls and `shoal tune` would be off
        arguments = arguments_of(document) or {}
        arguments["gateway"] = arguments.get("gateway", {}) | {"admin_key": new_key}
    with console.status(f"model [b]{settings.model}[/b]: fetching and converting, once") as status:
        ensure_checkpoint(settings.model)
        status.update("starting Ray")
        with LocalRay(NUM_RAY_CPUS) as ray:
            ray.wait_until_up()
            os.environ.update(ray.environment)
            status.update("deploying")
            _deploy(document, ray, status)
            status.stop()
            console.print(f"[green]✓[/green] {path.name}: {settings.scaling.min_replicas} replicas are ready\n")
            chats = [Chat(question, f"demo-{uuid.uuid4().hex[:4]}") for question in QUESTIONS]
            asyncio.run(_ask_all(settings.gateway, chats, console))
            console.print(_summary(chats))
            console.print(_addresses(settings.gateway, chats[0], new_key))
            if not once:
                _wait_for_interrupt(ray)
            console.print("stopping")


def local_yaml() -> Path:
    """The path of ``deploy/serve/local.yaml``, in the checkout or as installed."""
    return Path(str(resources.files("shoal_deploy").joinpath("local.yaml")))


def _deploy(document: dict[str, object], ray: LocalRay, status: Status) -> None:
    started = time.monotonic()
    deploy(
        document,
        ray.dashboard_url,
        lambda progress: status.update(f"deploying: {progress} ({time.monotonic() - started:.0f} s)"),
    )


async def _ask_all(gateway: GatewaySettings, chats: list[Chat], console: Console) -> None:
    from shoal_cluster.commands.client import GatewayClient

    access = GatewayAccess.from_environment()
    if access.api_key is None:
        access = replace(access, api_key=next(iter(gateway.api_secrets().values()), None))
    async with GatewayClient(_tls(gateway) + gateway.grpc_address, access) as client:
        with Live(_answers(chats), console=console, refresh_per_second=12, transient=False) as live:
            tasks = [asyncio.create_task(_ask(client, chat)) for chat in chats]
            while not all(task.done() for task in tasks):
                await asyncio.wait(tasks, timeout=0.08)
                live.update(_answers(chats))
            await asyncio.gather(*tasks)  # the first error, if any; no other is left to be told of by asyncio


async def _ask(client: object, chat: Chat) -> None:
    call = GenerateCall(
        request_id=chat.request_id,
        messages=(Message("system", SYSTEM), Message("user", chat.question)),
        sampling_params=SamplingParams(max_tokens=64, temperature=0.0),
        timeout_s=CHAT_TIMEOUT_S,
    )
    started = time.monotonic()
    async for chunk in client.generate(call):  # type: ignore[attr-defined]
        chat.answer += chunk.text
        chat.usage = chunk.usage or chat.usage
    chat.seconds = time.monotonic() - started


def _answers(chats: list[Chat]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column()
    for chat in chats:
        table.add_row(chat.question, Text(" ".join(chat.answer.split())))
    return table


def _summary(chats: list[Chat]) -> Table:
    table = Table(title="\neight chats, one system prompt (token counts)", title_justify="left")
    for name in ("request", "replica"):
        table.add_column(name, no_wrap=True)
    for name in ("prompt", "cached", "output", "TTFT ms", "tokens/s"):
        table.add_column(name, justify="right")
    for chat in chats:
        usage = chat.usage
        if usage is None:
            raise RuntimeError(f"{chat.request_id} ended without its usage")
        table.add_row(
            chat.request_id,
            usage.replica_id,
            str(usage.num_prompt_tokens),
            str(usage.num_cached_tokens),
            str(usage.num_output_tokens),
            f"{usage.ttft_s * 1000:.0f}",
            f"{usage.tokens_per_s(chat.seconds):.1f}",
        )
    return table


def _tls(gateway: GatewaySettings) -> str:
    return "" if gateway.tls_cert is None else TLS


def _addresses(gateway: GatewaySettings, chat: Chat, new_key: str | None) -> str:
    grpc_address, http_address = _tls(gateway) + gateway.grpc_address, _tls(gateway) + gateway.http_address
    shoal = "shoal" if shutil.which("shoal") else sys.argv[0]  # as the user can call it: `make` does not change PATH
    grpcurl = "-plaintext" if gateway.tls_cert is None else "-cacert CA.pem"
    at = "" if grpc_address == DEFAULT_GRPC_ADDRESS else f" --address {grpc_address}"
    top_at = "" if http_address == DEFAULT_HTTP_ADDRESS else f" --address {http_address}"
    url = http_url(http_address)
    keys = (
        f"\nkeys       {API_KEY_VARIABLE} must be one of the gateway's, for all of these"
        if gateway.api_secrets()
        else ""
    )
    tune = f"{shoal} tune --max-replicas 3{at}"
    controls = (
        f"{ADMIN_KEY_VARIABLE}={new_key} {tune}\n           {new_key} is this demo's admin key" if new_key else tune
    )
    return f"""
gRPC       {grpc_address}     {shoal} generate "Why is the sky blue?"{at}
                              {shoal} chat{at}
                              {shoal} status{at}
                              {shoal} top{top_at}
                              grpcurl {grpcurl} {gateway.grpc_address} list
HTTP       {url}/v1   any OpenAI client
dashboard  {url}/dashboard
why there  {shoal} explain {chat.request_id}{at}
controls   {controls}{keys}
"""


def _wait_for_interrupt(ray: LocalRay) -> None:
    """Return at Ctrl-C, SIGTERM or SIGHUP. The signals are blocked first, so that their handlers do not run.

    Raises:
        Unavailable: Ray has ended meanwhile.
    """
    stopping = {signal.SIGINT, *ENDING}
    signal.pthread_sigmask(signal.SIG_BLOCK, stopping)
    typer.echo("up; Ctrl-C stops everything")
    sys.stdout.flush()
    while signal.sigtimedwait(stopping, LOOK_S) is None:
        ray.check()
