"""Makes requests of calls: checks them, applies the chat template, tokenises once."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from shoal_cluster.chat.answer_reader import AnswerReader
from shoal_cluster.chat.chats import Chats
from shoal_cluster.chat.message import Message
from shoal_cluster.serve.answer_readers import AnswerReaders
from shoal_cluster.serve.call import GenerateCall, Prompt
from shoal_cluster.serve.long_texts import in_turn
from shoal_replica.errors import InvalidArgument
from shoal_replica.grammars import Grammars
from shoal_replica.model_config import ModelConfig
from shoal_replica.request import Request
from shoal_replica.request_checks import prepared
from shoal_replica.sampling_defaults import with_defaults
from shoal_replica.sampling_params import SamplingParams
from shoal_replica.structured_output import FIELD, StructuredOutput
from shoal_replica.tokenizer import Tokenizer

LONG_TEXT = 10_000  # characters, a few milliseconds' work: longer texts are tokenised in a thread


class Made(NamedTuple):
    """A request, and how its answer is to be read. ``shown`` are special tokens that belong to its text."""

    request: Request
    readers: AnswerReaders
    shown: frozenset[int]

    def with_adapter(self, version: str) -> Made:
        """For an adapter, by what replicas call it; "" for the model alone."""
        return self._replace(request=replace(self.request, adapter=version)) if version else self


def _enforced(params: SamplingParams, structure: StructuredOutput | None) -> SamplingParams:
    """``params`` for an answer that must match. Raises InvalidArgument where these contradict that."""
    try:
        return replace(params, structured_output=structure)
    except InvalidArgument as error:
        if error.field == FIELD:
            raise InvalidArgument("tools", "calls that must match their schemas", error.limit) from None
        raise InvalidArgument.retold(error.field, f"{error}, where calls must match their schemas") from None


def _check_messages(messages: Sequence[Message]) -> None:
    if not messages:
        raise InvalidArgument("messages", [], "must have at least one message")


class RequestMaker:
    """For one model and its adapters. ``defaults`` are the parameters that the model recommends."""

    def __init__(
        self, model: ModelConfig, tokenizer: Tokenizer, grammars: Grammars, defaults: Mapping[str, Any] | None = None
    ) -> None:
        self._defaults = defaults or {}
        self._model = model
        self._tokenizer = tokenizer
        self._grammars = grammars
        self._chats = Chats(tokenizer, grammars)

    def tokenize(self, prompt: Prompt, *, add_special_tokens: bool) -> tuple[int, ...]:
        """See GatewayCore. Raises InvalidArgument."""
        if prompt.messages is not None:
            _check_messages(prompt.messages)
            text = self._chats.prompt(prompt.messages, prompt.tools, prompt.template_options, prompt.end)
            return self._tokenizer.encode(text, add_special_tokens=False)
        return self._tokenizer.encode(prompt.text or "", add_special_tokens=add_special_tokens)

    async def make(self, call: GenerateCall, arrived_s: float, max_model_len: int) -> Made:
        """The request for ``call``, to the model alone. Raises InvalidArgument for what cannot be served."""
        if call.messages is not None:
            _check_messages(call.messages)
        read = partial(self._read, call, max_model_len)
        prompt, token_ids, params = await in_turn(read) if call.length > LONG_TEXT else read()
        if (answer := params.structured_output) is not None:
            await asyncio.to_thread(self._grammars.check, answer)
        readers: list[AnswerReader] = []
        if call.messages is not None:
            is_reasoning = self._chats.is_reasoning(prompt, call.messages, call.prompt_end)
            if call.tools is not None or answer is not None:
                work = partial(self._chats.structure, call.tools, answer, is_reasoning=is_reasoning)
                structure = await asyncio.to_thread(work)
                params = params if structure is answer else _enforced(params, structure)
            found = [self._chats.reader(call.tools, answer, is_reasoning=is_reasoning) for _ in range(params.n)]
            readers = [reader for reader in found if reader is not None]
        request = Request(
            request_id=call.request_id,
            prompt_token_ids=token_ids,
            sampling_params=params,
            priority=call.priority,
            arrival_s=arrived_s,
            cache_salt=call.cache_salt,
            tenant=call.tenant,
        )
        return Made(request, AnswerReaders(readers), self._chats.shown(call.tools) if readers else frozenset())

    def _read(self, call: GenerateCall, max_model_len: int) -> tuple[str, tuple[int, ...], SamplingParams]:
        """The prompt, as text where it is a chat, and its tokens; and the parameters, in tokens as well."""
        params = with_defaults(call.sampling_params, call.left_out, self._defaults)
        vocab_size = self._model.vocab_size
        if call.messages is None:
            given = call.text or "" if call.token_ids is None else call.token_ids
            return "", *prepared(given, params, self._tokenizer, max_model_len, vocab_size)
        text = self._chats.prompt(call.messages, call.tools, call.template_options, call.prompt_end)
        given = self._tokenizer.encode(text, add_special_tokens=False)
        return text, *prepared(given, params, self._tokenizer, max_model_len, vocab_size, "messages")
