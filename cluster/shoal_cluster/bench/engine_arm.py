"""The bare engine in a process of its own, as one arm of a comparison."""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import statistics
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection

from shoal_cluster.bench.closed_loop import BATCH_TIMEOUT_S, Arm, Batch, Prompt, Sample, run_batch
from shoal_replica.async_llm import AsyncLLM
from shoal_replica.config import EngineConfig
from shoal_replica.errors import ShoalError, Unavailable
from shoal_replica.request import StartTimes
from shoal_replica.sampling_params import SamplingParams

ENGINE_TIMEOUT_S = BATCH_TIMEOUT_S + 10  # later, so that the engine's own error comes first
END_S = 30.0


@contextmanager
def engine_alone(config: EngineConfig) -> Iterator[Arm]:
    """Run the engine in a process of its own, as a replica does; its clients are in the same process. Errors of Shoal's
    are raised here as they were there.
    """
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_run_engine, args=(config, theirs), daemon=True)
    process.start()
    theirs.close()

    def measure(batch: Batch) -> Sample:
        ours.send(batch)
        return _receive(ours)

    try:
        _receive(ours)
        yield measure
    finally:
        ours.close()
        process.join(END_S)
        process.terminate()


def _receive(connection: Connection) -> Sample:
    try:
        if not connection.poll(ENGINE_TIMEOUT_S):
            raise Unavailable(f"the engine did not answer within {ENGINE_TIMEOUT_S:g} s")
        answer: Sample | ShoalError = connection.recv()
    except EOFError:
        raise Unavailable("the engine's process has ended") from None
    if isinstance(answer, ShoalError):
        raise answer
    return answer


def _run_engine(config: EngineConfig, connection: Connection) -> None:
    """Answer each batch with a sample until the other end closes, or an error has been sent in place of one; an empty
    first sample says that the engine is up.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process by closing its end

    async def main() -> None:
        llm = await AsyncLLM.start(config)
        try:
            connection.send(Sample((), 0.0))
            await answer_all(llm)
        finally:
            await llm.stop()

    async def answer_all(llm: AsyncLLM) -> None:
        while True:
            try:
                batch: Batch = await asyncio.to_thread(connection.recv)
            except EOFError:
                break
            params, starts = batch.sampling_params, list[StartTimes]()

            async def stream(
                prompt: Prompt, params: SamplingParams = params, starts: list[StartTimes] = starts
            ) -> AsyncIterator[int]:
                async for delta in llm.generate(prompt, params):
                    yield len(delta.token_ids)
                    if delta.start is not None:
                        starts.append(delta.start)

            sample = await run_batch(stream, batch)
            connection.send(replace(sample, in_engine_s=statistics.mean(map(sum, starts))))

    with suppress(ConnectionError):  # the other end closed during a batch
        try:
            asyncio.run(main())
        except ShoalError as error:
            connection.send(error)
