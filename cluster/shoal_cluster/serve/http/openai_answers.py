"""Turns chunks into OpenAI's answers: whole bodies and server-sent events, for chats and for completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence

from shoal_cluster.serve.call import GenerateCall
from shoal_cluster.serve.chunks import open_merged_chunks
from shoal_cluster.serve.gateway_core import GatewayCore
from shoal_cluster.serve.http.encoding import Json
from shoal_cluster.serve.http.openai_echo import Echo
from shoal_cluster.serve.http.openai_events import ChoiceEvents
from shoal_cluster.serve.http.openai_shapes import AnswerShape
from shoal_cluster.serve.http.openai_types import RequestBody
from shoal_cluster.serve.http.openai_whole import WholeChoices


class ChoiceAnswers:
    """Answers chats, or completions, by choices."""

    def __init__(self, shape: AnswerShape) -> None:
        self._shape = shape

    async def whole(
        self, core: GatewayCore, calls: Sequence[GenerateCall], body: RequestBody, request_id: str, model: str
    ) -> Json:
        """Run ``calls`` to their end and return one body.

        Raises:
            InvalidArgument: see ``WholeChoices.take``.
        """
        choices = WholeChoices(self._shape, body, calls[0].sampling_params, len(calls))
        async with open_merged_chunks(core, calls) as chunks:
            async for number, chunk in chunks:
                choices.take(number, chunk)
        echoes = [await Echo.of(core, call, body.is_all_prompt) for call in calls] if body.echoes else []
        return await choices.complete(self._head(self._shape.whole_object, request_id, model), echoes)

    async def events(
        self, core: GatewayCore, calls: Sequence[GenerateCall], body: RequestBody, request_id: str, model: str
    ) -> AsyncGenerator[bytes, None]:
        """Run ``calls``; yields server-sent events as chunks come. Closing the generator cancels the calls."""
        head, n = self._head(self._shape.event_object, request_id, model), calls[0].sampling_params.n
        choices = ChoiceEvents(
            self._shape, body, head, n, lambda number: Echo.of(core, calls[number], body.is_all_prompt)
        )
        async with open_merged_chunks(core, calls) as chunks:
            async for number, chunk in chunks:
                if events := await choices.take(number, chunk):
                    yield events
        yield choices.end()

    def _head(self, kind: str, request_id: str, model: str) -> Json:
        return {"id": self._shape.id_prefix + request_id, "object": kind, "created": int(time.time()), "model": model}
