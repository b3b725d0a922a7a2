"""``shoal generate`` and ``shoal chat``: send a prompt and stream the answer."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from shoal_cluster.addresses import DEFAULT_GRPC_ADDRESS
from shoal_replica.errors import ShoalError

if TYPE_CHECKING:  # gRPC and its dependencies are imported only when a command runs
    from shoal_cluster.chat.message import Message
    from shoal_cluster.serve.call import GenerateCall, Usage

Address = Annotated[str, typer.Option(help="The gateway's gRPC address.")]
Model = Annotated[str, typer.Option(help="Served model or LoRA adapter. Default: the model.")]
MaxTokens = Annotated[int | None, typer.Option(help="Maximum tokens to generate. Default: as many as fit.")]
Temperature = Annotated[float, typer.Option(help="Sampling temperature; 0 picks the likeliest token.")]
Seed = Annotated[int | None, typer.Option(help="Seed, for a repeatable answer.")]
Stats = Annotated[bool, typer.Option("--stats/--no-stats", help="Print replica, token counts and speed to stderr.")]


def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt.")],
    address: Address = DEFAULT_GRPC_ADDRESS,
    model: Model = "",
    max_tokens: MaxTokens = None,
    temperature: Temperature = 0.2,
    seed: Seed = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as plain text, not as a chat.")] = False,
    stats: Stats = True,
) -> None:
    """Send one prompt and stream the answer."""
    from shoal_cluster.chat.message import Message

    messages = None if raw else (Message("user", prompt),)
    call = _call(prompt if raw else None, messages, model, max_tokens, temperature, seed)
    answer = asyncio.run(_stream(address, call))
    if stats:
        typer.echo(answer.stats_line(), err=True)


def chat(
    address: Address = DEFAULT_GRPC_ADDRESS,
    model: Model = "",
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = 0.2,
    seed: Seed = None,
    stats: Stats = True,
) -> None:
    """Talk with the model; it remembers the conversation. Ctrl-C stops an answer, Ctrl-D ends the chat."""
    from shoal_cluster.chat.message import Message

    history = [] if system is None else [Message("system", system)]
    while True:
        try:
            said = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            typer.echo()
            return
        if not said:
            continue
        history.append(Message("user", said))
        try:
            call = _call(None, tuple(history), model, max_tokens, temperature, seed)
            answer = asyncio.run(_stream(address, call))
        except KeyboardInterrupt:
            history.pop()  # an interrupted answer is not part of the conversation
            typer.echo()
            continue
        except ShoalError as error:
            history.pop()  # the conversation can go on without this turn
            typer.echo(str(error), err=True)
            continue
        history.append(Message("assistant", answer.text))
        if stats:
            typer.echo(answer.stats_line(), err=True)


@dataclass(frozen=True, slots=True)
class _Answer:
    """A finished stream. ``seconds`` is its total duration as the client saw it."""

    request_id: str
    text: str
    usage: Usage | None
    seconds: float

    def stats_line(self) -> str:
        usage = self.usage
        if usage is None:
            return f"[{self.request_id}]"
        parts = [
            self.request_id,
            f"replica {usage.replica_id}",
            f"{usage.num_prompt_tokens} prompt tokens",
            f"{usage.num_cached_tokens} cached",
            f"{usage.num_output_tokens} output",
            f"TTFT {usage.ttft_s * 1000:.0f} ms",
            f"{usage.tokens_per_s(self.seconds):.1f} tok/s",
        ]
        return f"[{' · '.join(parts)}]"


def _call(
    text: str | None,
    messages: tuple[Message, ...] | None,
    model: str,
    max_tokens: int | None,
    temperature: float,
    seed: int | None,
) -> GenerateCall:
    from shoal_cluster.serve.call import GenerateCall
    from shoal_cluster.serve.request_id import new_request_id
    from shoal_replica.sampling_defaults import DEFAULTED
    from shoal_replica.sampling_params import SamplingParams

    return GenerateCall(
        request_id=new_request_id(),
        model=model,
        sampling_params=SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed),
        left_out=DEFAULTED - {"temperature"},
        text=text,
        messages=messages,
    )


async def _stream(address: str, call: GenerateCall) -> _Answer:
    """Print the answer as it arrives, and return it."""
    from shoal_cluster.commands.client import GatewayClient

    started = time.monotonic()
    texts: list[str] = []
    usage: Usage | None = None
    is_reasoning = False
    async with GatewayClient(address) as client:
        async for chunk in client.generate(call):
            if chunk.reasoning:
                typer.secho(chunk.reasoning, nl=False, dim=True)
                is_reasoning = True
            if chunk.text and is_reasoning:
                typer.echo("\n")
                is_reasoning = False
            typer.echo(chunk.text, nl=False)
            texts.append(chunk.text)
            usage = chunk.usage or usage
    typer.echo()
    return _Answer(call.request_id, "".join(texts), usage, time.monotonic() - started)
