"""Routes between texts and tokens: vLLM's `/tokenize` and `/detokenize`, Anthropic's `/v1/messages/count_tokens`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Request, Response

from shoal_cluster.chat.tool import MAX_TOOLS
from shoal_cluster.serve.call import Prompt
from shoal_cluster.serve.gateway_core import GatewayCore
from shoal_cluster.serve.http.encoding import encode
from shoal_cluster.serve.http.errors import MESSAGES_PATH, error_response
from shoal_cluster.serve.http.fields import (
    ListOf,
    TemplateOptions,
    Text,
    TextOrNull,
    Unsupported,
    WholeBody,
    at_most,
    instead_of_null,
    renamed,
)
from shoal_cluster.serve.http.messages_types import Conversation
from shoal_cluster.serve.http.openai_chat import ChatTurn, prompt_end
from shoal_cluster.serve.http.openai_shapes import token_text
from shoal_cluster.serve.http.openai_tools import ToolBody, tool_use
from shoal_cluster.serve.long_texts import in_turn
from shoal_replica.errors import InvalidArgument


class TokenizeBody(WholeBody):
    """`POST /tokenize`: a text, or a chat as the model's template renders it."""

    model: TextOrNull = ""
    prompt: Text | None = None
    messages: ListOf[ChatTurn] | None = None
    tools: Annotated[ListOf[ToolBody], at_most(MAX_TOOLS)] | None = None
    chat_template_kwargs: TemplateOptions | None = None
    add_special_tokens: Annotated[bool, instead_of_null(True)] = True  # of a text: templates write their own
    return_token_strs: Annotated[bool, instead_of_null(False)] = False
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: Unsupported = None

    def to_prompt(self) -> Prompt:
        """Raises InvalidArgument."""
        if (self.prompt is None) == (self.messages is None):
            given = "both" if self.messages is not None else None
            raise InvalidArgument("prompt", given, "one of prompt and messages must be set")
        if self.messages is None:
            return Prompt(self.prompt)
        if not self.messages:
            raise InvalidArgument("messages", [], "must have at least one message")
        messages = tuple(turn.to_message(position) for position, turn in enumerate(self.messages))
        end = prompt_end(self.add_generation_prompt, self.continue_final_message)
        return Prompt(None, messages, tool_use(self.tools, None, None), self.chat_template_kwargs or {}, end)


class DetokenizeBody(WholeBody):
    """`POST /detokenize`."""

    model: TextOrNull = ""
    tokens: ListOf[int]


def tokens_router(core: GatewayCore) -> APIRouter:
    """The routes, over a gateway core. Texts may be long: they are worked on in threads, so that streams go on."""
    router = APIRouter()

    @router.post("/tokenize")
    async def tokenize(body: TokenizeBody, request: Request) -> Response:
        try:
            max_model_len, asked = core.model_card(body.model).max_model_len, body.to_prompt()
            return _json(await in_turn(_tokenized, core, body, asked, max_model_len))
        except Exception as error:
            words = {"text": "prompt" if body.messages is None else "messages"}
            return error_response(renamed(error, words), request.state.request_id)

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeBody, request: Request) -> Response:
        try:
            vocab_size = core.model_card(body.model).vocab_size
            return _json(await in_turn(_detokenized, core, body.tokens, vocab_size))
        except Exception as error:
            return error_response(error, request.state.request_id)

    @router.post(f"{MESSAGES_PATH}/count_tokens")
    async def count_tokens(body: Conversation, request: Request) -> Response:
        try:
            core.check_model(body.model)
            asked = body.to_prompt()
            token_ids = await in_turn(core.tokenize, asked, add_special_tokens=False)
            return _json(encode({"input_tokens": len(token_ids)}))
        except Exception as error:
            return error_response(body.in_its_words(error), request.state.request_id, request.url.path)

    return router


def _tokenized(core: GatewayCore, body: TokenizeBody, asked: Prompt, max_model_len: int) -> bytes:
    token_ids = core.tokenize(asked, add_special_tokens=body.add_special_tokens)
    texts = [token_text(core.token_bytes(each)) for each in token_ids] if body.return_token_strs else None
    answer = {"count": len(token_ids), "max_model_len": max_model_len, "tokens": token_ids, "token_strs": texts}
    return encode(answer)


def _detokenized(core: GatewayCore, token_ids: Sequence[int], vocab_size: int) -> bytes:
    """Raises InvalidArgument."""
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidArgument("tokens", token_id, f"token ids must be in [0, {vocab_size})")
    return encode({"prompt": core.detokenize(token_ids)})


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
