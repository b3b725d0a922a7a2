"""How many tokens per second one gateway core can stream. Feed, gateway and clients run in a process each."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event
from typing import cast

from shoal_cluster.bench.stream_clients import Face, read_streams, stream_id
from shoal_cluster.gateway_settings import GatewaySettings
from shoal_cluster.policies.route_query import RouteQuery
from shoal_cluster.policies.routing import RouteWeights
from shoal_cluster.serve.call import Chunk, GenerateCall
from shoal_cluster.serve.call_observer import CallObserver
from shoal_cluster.serve.feed_messages import Snapshot, Update
from shoal_cluster.serve.gateway_core import GatewayCore
from shoal_cluster.serve.gateway_ledger import GatewayLedger
from shoal_cluster.serve.generation import Generation
from shoal_cluster.serve.ingress import Ingress
from shoal_cluster.serve.latency_window import LatencyTargets, LatencyWindow
from shoal_cluster.serve.member import Member
from shoal_cluster.serve.metrics.gateway import GatewayMetrics
from shoal_cluster.serve.outcome import Outcome
from shoal_cluster.serve.rows import ModelCard
from shoal_replica.checkpoint import ensure_checkpoint
from shoal_replica.frames import LENGTH_BYTES, frame
from shoal_replica.request import FinishReason, Request, TokenDelta
from shoal_replica.stats import ReplicaStats
from shoal_replica.tokenizer import Tokenizer

BLOCK_SIZE = 16
LONGEST_S = 600.0
BEAT_S = 0.5
TEXT = "Tokens of plain words, as a model would say them, one after another and at a steady pace. "


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamLoad:
    """``num_streams`` concurrent streams of ``num_tokens`` each; every step gives each stream one token."""

    num_streams: int = 256
    num_tokens: int = 400
    steps_per_s: float = 100.0
    model: str = "smollm2-135m-instruct"
    face: Face = "grpc"


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamCost:
    """What streaming cost. ``core_share`` is the gateway's CPU time per wall time; messages may hold several tokens."""

    face: Face
    num_streams: int
    offered_tokens_per_s: float
    tokens_per_s: float
    tokens_per_message: float
    core_share: float
    tokens_per_core_s: float
    token_us: float


def measure_streams(load: StreamLoad) -> StreamCost:
    """Stream ``load`` through a gateway in this process, and measure."""
    return asyncio.run(_measure(load))


async def _measure(load: StreamLoad) -> StreamCost:
    spawn = multiprocessing.get_context("spawn")
    tokenizer = Tokenizer.from_folder(ensure_checkpoint(load.model))
    text_ids = tokenizer.encode(TEXT * (1 + load.num_tokens // 16))[: load.num_tokens]
    addresses, results, start = spawn.Queue(), spawn.Queue(), spawn.Event()
    replica = spawn.Process(target=_run_replica, args=(load, text_ids, addresses, start), daemon=True)
    replica.start()
    ledger = GatewayLedger("bench", RouteWeights())
    ledger.set_members([Member("replica", "node", await asyncio.to_thread(addresses.get, timeout=60))])
    core = _Core(ledger, tokenizer, load.num_tokens)
    async with _open(core, load.face) as port:
        asked = (load.face, port, load.num_streams, load.num_tokens, results)
        spawn.Process(target=read_streams, args=asked, daemon=True).start()
        async with asyncio.timeout(60):
            while len(core.outcomes) < load.num_streams or not ledger.view.is_connected("replica"):
                await ledger.wait_for_change(0.05)
        started_s, started_cpu_s = time.perf_counter(), time.process_time()
        start.set()
        num_tokens, num_messages = await asyncio.to_thread(results.get, timeout=LONGEST_S)
        wall_s, cpu_s = time.perf_counter() - started_s, time.process_time() - started_cpu_s
    await ledger.close()
    replica.terminate()
    return StreamCost(
        face=load.face,
        num_streams=load.num_streams,
        offered_tokens_per_s=load.num_streams * load.steps_per_s,
        tokens_per_s=num_tokens / wall_s,
        tokens_per_message=num_tokens / num_messages,
        core_share=cpu_s / wall_s,
        tokens_per_core_s=num_tokens / cpu_s,
        token_us=1e6 * cpu_s / num_tokens,
    )


@asynccontextmanager
async def _open(core: _Core, face: Face) -> AsyncIterator[int]:
    """Serve ``core`` and yield the port of one face, gRPC or HTTP."""
    free = GatewaySettings(grpc_address="127.0.0.1:0", http_address="127.0.0.1:0")
    ingress = await Ingress.open(cast("GatewayCore", core), free)
    yield ingress.grpc_port if face == "grpc" else ingress.http_port
    await ingress.close(core.observer.drain(LONGEST_S))


_query = partial(RouteQuery.for_request, block_size=BLOCK_SIZE)


class _Core:
    """A gateway without Ray Serve: calls go straight to the one replica; everything else is the real code."""

    def __init__(self, ledger: GatewayLedger, tokenizer: Tokenizer, num_tokens: int) -> None:
        self._ledger = ledger
        self._num_tokens = num_tokens
        self._tokenizer = tokenizer
        metrics = GatewayMetrics("bench", ("bench",), LatencyWindow(LatencyTargets()))
        self.observer = CallObserver(metrics, ledger.journal)
        self.outcomes: list[asyncio.Future[Outcome]] = []

    async def generate(self, call: GenerateCall) -> AsyncIterator[Chunk]:
        with self.observer.observe(call) as watch:
            request = Request(
                request_id=call.request_id,
                prompt_token_ids=call.token_ids or (),
                sampling_params=call.sampling_params,
            )
            generation = Generation(request, _query, self._ledger, self._place, self._tokenizer, LONGEST_S, watch.times)
            watch.usage = generation.usage
            async with aclosing(cast("AsyncGenerator[Chunk, None]", generation.chunks(LONGEST_S))) as chunks:
                async for chunk in chunks:
                    watch.take(chunk)
                    yield chunk

    def knows_call(self, request_id: str) -> bool:
        return self._ledger.knows_call(request_id)

    def is_ready(self) -> bool:
        return True

    def check_model(self, name: str) -> None:
        """Accepts every name."""

    def authenticate(self, authorization: str | None) -> str | None:
        return None

    def token_bytes(self, token_id: int) -> bytes:
        return self._tokenizer.token_bytes(token_id)

    def model_card(self, name: str = "") -> ModelCard:
        return ModelCard(
            name="bench",
            max_model_len=self._num_tokens + BLOCK_SIZE,
            vocab_size=2**16,
            block_size=BLOCK_SIZE,
            dtype="bfloat16",
            eos_token_ids=(),
            has_chat_template=False,
            created_s=0,
        )

    def _place(self, request: Request, query: RouteQuery, deadline_s: float) -> _Placement:
        placement = _Placement()
        self._ledger.decide(query)
        self._ledger.routed(request.request_id, "replica")
        self.outcomes.append(placement.ended)
        return placement


class _Placement:
    """A Serve call that stays open: streams end by their last token."""

    is_called = True

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.sent: asyncio.Future[None] = loop.create_future()
        self.sent.set_result(None)
        self.ended: asyncio.Future[Outcome] = loop.create_future()

    def start(self) -> asyncio.Future[Outcome]:
        asyncio.get_running_loop().call_later(LONGEST_S, self.cancel)
        return self.ended

    def cancel(self, *, has_ended: bool = False) -> None:
        self.ended.cancel()


def _run_replica(load: StreamLoad, text_ids: tuple[int, ...], addresses: Queue[tuple[str, int]], start: Event) -> None:
    """A replica that consists of its feed only: each step sends a token to every stream."""
    stats = ReplicaStats(
        time_s=0.0,
        block_size=BLOCK_SIZE,
        num_total_blocks=1_000_000,
        num_free_blocks=1_000_000,
        num_allocated_blocks=0,
        num_cached_blocks=0,
        num_running=0,
        num_waiting=0,
        num_waiting_tokens=0,
        max_num_seqs=2 * load.num_streams,
        max_num_batched_tokens=2 * load.num_streams,
    )

    def step(seq: int, position: int) -> bytes:
        reason = FinishReason.LENGTH if position == load.num_tokens - 1 else None
        deltas = tuple(
            TokenDelta(
                request_id=stream_id(number),
                index=0,
                position=position,
                token_ids=(text_ids[position],),
                num_cached_tokens=0,
                finish_reason=reason,
            )
            for number in range(load.num_streams)
        )
        return frame(Update(seq, stats, deltas=deltas))

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big"))
        writer.write(frame(Snapshot(0, stats, ())))
        seq = 0
        while not await asyncio.to_thread(start.wait, BEAT_S):  # a silent feed would be taken for a dead replica
            seq += 1
            writer.write(frame(Update(seq, stats)))
        started_s = time.perf_counter()
        for position in range(load.num_tokens):
            await asyncio.sleep(max(0.0, started_s + position / load.steps_per_s - time.perf_counter()))
            writer.write(step(seq + 1 + position, position))
            await writer.drain()
        await reader.read()

    async def main() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        addresses.put(server.sockets[0].getsockname()[:2])
        await server.serve_forever()

    asyncio.run(main())
