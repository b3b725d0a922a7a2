"""The HTTP front end: OpenAI's and Anthropic's routes over a gateway core, plus health and metrics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse

from shoal_cluster.gateway_settings import DEFAULT_MAX_REQUEST_BYTES, GatewaySettings
from shoal_cluster.serve.dashboard.page import dashboard_router
from shoal_cluster.serve.gateway_core import GatewayCore
from shoal_cluster.serve.http.access import KeyCheck
from shoal_cluster.serve.http.answers import Answers, B, GrowingAnswers
from shoal_cluster.serve.http.connection import PatientProtocol
from shoal_cluster.serve.http.encoding import encode
from shoal_cluster.serve.http.errors import MESSAGES_PATH, error_response, http_error, invalid_body, report_response
from shoal_cluster.serve.http.messages_answers import new_message
from shoal_cluster.serve.http.messages_types import MessagesRequest
from shoal_cluster.serve.http.openai_answers import ChoiceAnswers
from shoal_cluster.serve.http.openai_chat import ChatRequest
from shoal_cluster.serve.http.openai_shapes import ChatShape, CompletionShape
from shoal_cluster.serve.http.openai_tools import NamedChoice
from shoal_cluster.serve.http.openai_types import CompletionRequest
from shoal_cluster.serve.http.responses_answers import new_response
from shoal_cluster.serve.http.responses_types import NamedFunction, ResponsesRequest
from shoal_cluster.serve.http.stream import EventStream, RequestFrame, until_disconnect
from shoal_cluster.serve.http.tokens import tokens_router
from shoal_cluster.serve.metrics.exposition import CONTENT_TYPE, render
from shoal_cluster.serve.request_id import another_id
from shoal_cluster.serve.rows import ModelCard
from shoal_cluster.serve.trace_context import trace_context

CHAT_PATH, COMPLETION_PATH, RESPONSES_PATH = "/v1/chat/completions", "/v1/completions", "/v1/responses"
GENERATE_PATHS = (CHAT_PATH, COMPLETION_PATH, RESPONSES_PATH, MESSAGES_PATH)
TENANT_HEADER = "x-tenant"  # takes precedence over the body's `user`; an API key's tenant over both
KEEP_ALIVE_S = 75  # longer than most load balancers keep idle connections by default: theirs must be closed first
ALTERNATIVES = {"str", NamedChoice.__name__, NamedFunction.__name__}  # of unions, in the paths of their errors
CLIENT_CLOSED_REQUEST = 499  # nginx's code; nobody is left to read it


def build_http_app(
    core: GatewayCore, max_body_bytes: int = DEFAULT_MAX_REQUEST_BYTES, cors_origins: Sequence[str] = ()
) -> FastAPI:
    """The ASGI application. A body above ``max_body_bytes`` gets 413. Pages of ``cors_origins`` may call it."""
    app = FastAPI(title="Shoal", docs_url="/docs", redoc_url=None)

    def refuse_unread(path: str, request_id: str, error: str) -> None:
        if path in GENERATE_PATHS:
            core.refuse_unread(request_id, error)

    app.add_middleware(KeyCheck, core=core, refuse=refuse_unread)
    app.add_middleware(RequestFrame, max_body_bytes=max_body_bytes, refuse=refuse_unread)  # around the other
    if cors_origins:  # around both: a browser asks first, without a key
        exposed_headers = ("x-request-id", "request-id", "retry-after")
        allowed: Any = {"allow_origins": tuple(cors_origins), "allow_methods": ("GET", "POST"), "allow_headers": ("*",)}
        app.add_middleware(CORSMiddleware, **allowed, expose_headers=exposed_headers)

    async def refuse(request: Request, error: Exception) -> Response:
        request_id, path = request.state.request_id, request.url.path
        if request.method == "POST":
            refuse_unread(path, request_id, type(error).__name__)
        if isinstance(error, HTTPException):
            return report_response(http_error(error), request_id, path, error.headers)
        assert isinstance(error, RequestValidationError)
        return report_response(invalid_body(error, ALTERNATIVES), request_id, path)

    app.add_exception_handler(RequestValidationError, refuse)
    app.add_exception_handler(HTTPException, refuse)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.include_router(dashboard_router(core))
    app.include_router(tokens_router(core))
    shape = ChatShape(core.token_bytes)
    chats, completions = ChoiceAnswers(shape), ChoiceAnswers(CompletionShape(core.token_bytes))
    responses, messages = GrowingAnswers(partial(new_response, shape)), GrowingAnswers(new_message)

    @app.post(CHAT_PATH)
    async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
        return await _answer(core, body, request, chats)

    @app.post(COMPLETION_PATH)
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        return await _answer(core, body, request, completions)

    @app.post(RESPONSES_PATH)
    async def create_response(body: ResponsesRequest, request: Request) -> Response:
        return await _answer(core, body, request, responses)

    @app.post(MESSAGES_PATH)
    async def create_message(body: MessagesRequest, request: Request) -> Response:
        return await _answer(core, body, request, messages)

    @app.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        card = core.model_card()
        return {"object": "list", "data": [_model_body(each) for each in (card, *map(core.model_card, card.adapters))]}

    @app.get("/v1/models/{model_id:path}")
    async def get_model(model_id: str, request: Request) -> Response:
        try:
            return JSONResponse(_model_body(core.model_card(model_id)))
        except Exception as error:
            return error_response(error, request.state.request_id)

    @app.get("/healthz")
    @app.get("/health", include_in_schema=False)  # vLLM's, which probes written for it ask for
    async def health() -> Response:
        ready = core.is_ready()
        return JSONResponse({"status": "ok" if ready else "no replica is ready"}, status_code=200 if ready else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(render(await core.metrics()), headers={"content-type": CONTENT_TYPE})

    return app


def http_config(core: GatewayCore, settings: GatewaySettings, shutdown_s: float) -> uvicorn.Config:
    """The uvicorn configuration that serves the application; open requests have ``shutdown_s`` to end."""
    return uvicorn.Config(
        build_http_app(core, settings.max_request_bytes, settings.cors_origins),
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
        http=PatientProtocol,
        ws="none",
        log_config=None,
        access_log=False,
        lifespan="on",
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=math.ceil(shutdown_s),
    )


async def _answer(core: GatewayCore, body: B, request: Request, answers: Answers[B]) -> Response:
    """Run the body's calls. Whatever ends them early, a disconnect included, closes the core's streams."""
    request_id, path = str(request.state.request_id), request.url.path
    try:
        core.check_model(body.model)
        calls = body.to_calls(request_id)
        if any(map(core.knows_call, {request_id, *(call.request_id for call in calls)})):
            request_id = request.state.request_id = another_id(request_id)
            calls = body.to_calls(request_id)
        trace, tenant = trace_context(request.headers), request.state.tenant
        tenant = request.headers.get(TENANT_HEADER) if tenant is None else tenant
        calls = [replace(call, trace=trace, tenant=call.tenant if tenant is None else tenant) for call in calls]
        for call in calls:
            call.check_names()
    except Exception as error:
        core.refuse_unread(request_id, type(error).__name__)
        return error_response(body.in_its_words(error), request_id, path)
    try:
        model = core.model_card(body.model).name
        if body.stream:
            return EventStream(answers.events(core, calls, body, request_id, model), request_id, body.in_its_words)
        answer = answers.whole(core, calls, body, request_id, model)
        return Response(encode(await until_disconnect(request.receive, answer)), media_type="application/json")
    except ClientDisconnect:
        raise
    except Exception as error:
        return error_response(body.in_its_words(error), request_id, path)


def _model_body(card: ModelCard) -> dict[str, Any]:
    """OpenAI's model, with vLLM's ``max_model_len`` and, of an adapter, ``parent``."""
    return {
        "id": card.name,
        "object": "model",
        "created": card.created_s,
        "owned_by": "shoal",
        "max_model_len": card.max_model_len,
        "parent": card.parent or None,
    }


async def _on_disconnect(_: Request, __: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)
