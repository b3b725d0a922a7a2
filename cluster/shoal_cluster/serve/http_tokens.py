"""vLLM's routes between texts and tokens: `/tokenize` and `/detokenize`."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from starlette.responses import JSONResponse

from shoal_cluster.serve.call import GatewayCore, Prompt
from shoal_cluster.serve.http_stream import error_response
from shoal_cluster.serve.openai_chat import ChatTurn, prompt_end
from shoal_cluster.serve.openai_fields import Body, Text, TextOrNull, Unsupported, instead_of_null
from shoal_cluster.serve.openai_shapes import token_text
from shoal_cluster.serve.openai_tools import ToolBody, tool_use
from shoal_replica.errors import InvalidArgument


class TokenizeBody(Body):
    """`POST /tokenize`: a text, or a chat as the model's template renders it."""

    model: TextOrNull = ""
    prompt: Text | None = None
    messages: list[ChatTurn] | None = None
    tools: list[ToolBody] | None = None
    chat_template_kwargs: dict[Text, Any] | None = None
    add_special_tokens: Annotated[bool, instead_of_null(True)] = True  # of a text: templates write their own
    return_token_strs: Annotated[bool, instead_of_null(False)] = False
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: Unsupported = None

    def to_prompt(self) -> Prompt:
        """Raises InvalidArgument."""
        if (self.prompt is None) == (self.messages is None):
            raise InvalidArgument("prompt", None, "one of prompt and messages must be set")
        if self.messages is None:
            return Prompt(self.prompt)
        if not self.messages:
            raise InvalidArgument("messages", [], "must have at least one message")
        messages = tuple(turn.to_message(position) for position, turn in enumerate(self.messages))
        end = prompt_end(self.add_generation_prompt, self.continue_final_message)
        return Prompt(None, messages, tool_use(self.tools, None, None), self.chat_template_kwargs or {}, end)


class DetokenizeBody(Body):
    """`POST /detokenize`."""

    model: TextOrNull = ""
    tokens: list[int]


def tokens_router(core: GatewayCore) -> APIRouter:
    """The routes, over a gateway core. Long texts are worked on in threads, so that streams go on."""
    router = APIRouter()

    @router.post("/tokenize")
    async def tokenize(body: TokenizeBody, request: Request) -> Response:
        try:
            card = core.model_card(body.model)
            asked = body.to_prompt()
            token_ids = await asyncio.to_thread(core.tokenize, asked, add_special_tokens=body.add_special_tokens)
            texts = None
            if body.return_token_strs:
                texts = await asyncio.to_thread(lambda: [token_text(core.token_bytes(each)) for each in token_ids])
            told = {"count": len(token_ids), "max_model_len": card.max_model_len, "tokens": token_ids}
            return JSONResponse(told | {"token_strs": texts})
        except Exception as error:
            return error_response(error, request.state.request_id)

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeBody, request: Request) -> Response:
        try:
            vocab_size = core.model_card(body.model).vocab_size
            for token_id in body.tokens:
                if not 0 <= token_id < vocab_size:
                    raise InvalidArgument("tokens", token_id, f"token ids must be in [0, {vocab_size})")
            return JSONResponse({"prompt": await asyncio.to_thread(core.detokenize, body.tokens)})
        except Exception as error:
            return error_response(error, request.state.request_id)

    return router
