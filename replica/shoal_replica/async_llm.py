"""The engine for async programs: one stream of token deltas per request."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator

from shoal_replica.build import build_engine, build_executor
from shoal_replica.config import EngineConfig
from shoal_replica.engine import Engine
from shoal_replica.errors import InvalidArgument
from shoal_replica.grammars import Grammars
from shoal_replica.reports import StepReport
from shoal_replica.request import FinishReason, Request, TokenDelta
from shoal_replica.request_checks import check_adapter, prepared
from shoal_replica.sampling_params import SamplingParams
from shoal_replica.text_stream import TextStream
from shoal_replica.tokenizer import Tokenizer


class AsyncLLM:
    """A streaming engine on the running event loop. Made by ``start``, ended by ``stop``."""

    def __init__(self, config: EngineConfig, engine: Engine, tokenizer: Tokenizer) -> None:
        self.config = config
        self.engine = engine
        self.tokenizer = tokenizer
        self._grammars = Grammars(config.model)
        self._queues: dict[str, asyncio.Queue[TokenDelta]] = {}

    @classmethod
    async def start(cls, config: EngineConfig) -> AsyncLLM:
        """Load the model in a thread and start the engine's loop."""
        tokenizer = Tokenizer.from_folder(config.model.folder)  # first: it is what most often cannot be read
        executor = await asyncio.to_thread(build_executor, config)
        try:
            engine = build_engine(config, executor)
            llm = cls(config, engine, tokenizer)
        except BaseException:
            await asyncio.to_thread(executor.close)
            raise
        engine.subscribe(llm._dispatch)
        engine.start()
        try:
            await asyncio.to_thread(llm._grammars.load)
        except BaseException:
            await engine.stop()
            raise
        return llm

    async def generate(
        self, prompt: str | tuple[int, ...], params: SamplingParams, request_id: str | None = None, adapter: str = ""
    ) -> AsyncIterator[TokenDelta]:
        """Stream a prompt's tokens. Closing the iterator frees the request's blocks. ``adapter`` names a LoRA adapter.

        A sequence whose text meets a stop string ends with the token that completed it. A beam search gives a delta
        without tokens when its prompt is computed, and at its end one for each answer.

        Raises:
            InvalidArgument, ResourceExhausted, EngineDead, Unavailable.
        """
        model = self.config.model
        token_ids, params = prepared(prompt, params, self.tokenizer, model.max_model_len, model.vocab_size)
        check_adapter(adapter, self.engine.adapters.names)
        if params.structured_output is not None:
            await asyncio.to_thread(self._grammars.check, params.structured_output)
        request = Request(
            request_id=request_id or uuid.uuid4().hex,
            prompt_token_ids=token_ids,
            sampling_params=params,
            arrival_s=time.monotonic(),
            adapter=adapter,
        )
        if request.request_id in self._queues:
            raise InvalidArgument("request_id", request.request_id, "must not be that of a running request")
        texts = [TextStream.of(self.tokenizer, params, token_ids) for _ in range(params.n)] if params.stop else []
        queue: asyncio.Queue[TokenDelta] = asyncio.Queue()
        self._queues[request.request_id] = queue
        try:
            self.engine.add(request)
            running = set(range(params.n))
            while running:
                delta = await queue.get()
                if delta.index not in running:
                    continue  # generated after its stop string
                if delta.finish_reason is FinishReason.ERROR:
                    self.engine.check_health()
                if texts:
                    _, delta = texts[delta.index].take(delta)
                    if texts[delta.index].stopped:
                        self.engine.abort(request.request_id, delta.index)
                if delta.finish_reason is not None:
                    running.remove(delta.index)
                yield delta
        finally:
            del self._queues[request.request_id]
            self.engine.abort(request.request_id)

    async def stop(self) -> None:
        """End all requests and release the model."""
        await self.engine.stop()

    def _dispatch(self, report: StepReport) -> None:
        for delta in report.deltas:
            queue = self._queues.get(delta.request_id)
            if queue is not None:
                queue.put_nowait(delta)
