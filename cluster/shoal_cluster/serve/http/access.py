"""Lets only callers with a key through to the HTTP routes."""

from __future__ import annotations

from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from shoal_cluster.serve.admin import BEARER
from shoal_cluster.serve.gateway_core import GatewayCore
from shoal_cluster.serve.http.errors import error_response, is_anthropic
from shoal_replica.errors import Unauthenticated

OPEN_PATHS = frozenset({"/healthz", "/health"})  # probes have no keys
BEARER_CHALLENGE = "Bearer"
BASIC_CHALLENGE = 'Basic realm="Shoal: any name, and an API key as password"'  # a browser then asks its user


def all_of(headers: Headers, name: str) -> str | None:
    """A header's value; of several all together, which is no key: a proxy may have looked at another one than we."""
    return ", ".join(headers.getlist(name)) or None


class KeyCheck:
    """ASGI middleware. The caller's tenant is at ``request.state.tenant``, None where no key is needed.

    Args:
        refuse: called with path and id of each request that is refused, and the type of its error.
    """

    def __init__(self, app: ASGIApp, core: GatewayCore, refuse: Callable[[str, str, str], None]) -> None:
        self._app = app
        self._core = core
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            tenant = None
            if scope["path"] not in OPEN_PATHS:
                headers = Headers(scope=scope)
                given, key = all_of(headers, "authorization"), all_of(headers, "x-api-key")
                if key is not None and (given is None or is_anthropic(scope["path"])):  # whose clients send it so
                    given = BEARER + key
                try:
                    tenant = self._core.authenticate(given)
                except Unauthenticated as error:
                    path, request_id = scope["path"], scope["state"]["request_id"]
                    self._refuse(path, request_id, type(error).__name__)
                    response = error_response(error, request_id, path)
                    # Two lines: browsers take one challenge from each.
                    response.headers.append("www-authenticate", BEARER_CHALLENGE)
                    if given is None or given.lower().startswith("basic"):  # else a script of the page has asked
                        response.headers.append("www-authenticate", BASIC_CHALLENGE)
                    await response(scope, receive, send)
                    return
            scope["state"]["tenant"] = tenant
        await self._app(scope, receive, send)
