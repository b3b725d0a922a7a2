"""``shoal top``: the dashboard in a terminal, from the same stream of updates."""

from __future__ import annotations

import http
import http.client
import ssl
import time
import urllib.error
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Annotated, TypeVar

import msgspec
import typer
from rich.console import Console
from rich.live import Live

from shoal_cluster.addresses import DEFAULT_HTTP_ADDRESS, no_gateway
from shoal_cluster.commands.gateway_access import API_KEY_VARIABLE, TLS_CA_VARIABLE, GatewayAccess, http_url
from shoal_cluster.commands.top_screen import Past, screen
from shoal_cluster.serve.dashboard.history import FINE_S, Sample
from shoal_cluster.serve.dashboard.update import Update
from shoal_replica.errors import Unauthenticated, Unavailable

SILENCE_S = 4.0
REDIAL_S = 1.0
DATA = b"data: "

T = TypeVar("T")


def top(
    address: Annotated[str, typer.Option(help="The gateway's HTTP address.")] = DEFAULT_HTTP_ADDRESS,
    once: Annotated[bool, typer.Option("--once", help="Print one screen and exit.")] = False,
) -> None:
    """Show the cluster as the dashboard does, live, until Ctrl-C."""
    url, access = f"{http_url(address)}/dashboard", GatewayAccess.from_environment()
    console = Console(highlight=False)
    past = _past(url, access)
    if once:
        told = _decoded(_get(f"{url}/data", access), Update, url)
        past.add(told.sample)
        console.print(screen(told, past, "", console.width, None))
        return
    with suppress(KeyboardInterrupt), Live(console=console, screen=True, auto_refresh=False) as live:
        update: Update | None = None
        for news in _updates(f"{url}/stream", access):
            trouble = ""
            if isinstance(news, Update):
                update = news
                past.add(update.sample)
            else:
                trouble = news
            if update is not None:
                live.update(screen(update, past, trouble, console.width, console.height), refresh=True)


def _past(url: str, access: GatewayAccess) -> Past:
    """The samples of the last ten minutes."""
    told = _get(f"{url}/history?seconds={FINE_S:g}", access)
    columns = _decoded(told, dict[str, list[float | None]], url)
    rows = zip(*columns.values(), strict=True)
    samples = (msgspec.convert(dict(zip(columns, row, strict=True)), Sample) for row in rows)
    return Past(deque(samples, maxlen=int(FINE_S)))


def _decoded(body: bytes, kind: type[T], url: str) -> T:
    """Raises Unavailable if ``body`` is no such thing."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError:
        raise Unavailable(f"{url} answers something else: is it a Shoal gateway?") from None


def _updates(url: str, access: GatewayAccess) -> Iterator[Update | str]:
    """Yield updates as they arrive, or a message whenever the stream has broken and is being reconnected."""
    while True:
        try:
            with access.open(url, SILENCE_S) as stream:
                for line in stream:
                    if line.startswith(DATA):
                        yield msgspec.json.decode(line.removeprefix(DATA), type=Update)
            trouble = "the gateway has ended the stream"
        except (OSError, http.client.HTTPException, msgspec.DecodeError) as error:
            trouble = f"the stream is broken: {error}"
        yield f"{trouble}; reconnecting"
        time.sleep(REDIAL_S)


def _get(url: str, access: GatewayAccess) -> bytes:
    """The body of a GET response.

    Raises:
        Unauthenticated: it needs another key.
        Unavailable: no gateway answers at ``url``.
    """
    try:
        with access.open(url, SILENCE_S) as answer:
            body = answer.read()
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == http.HTTPStatus.UNAUTHORIZED:
            raise Unauthenticated(f"the API key is missing or unknown; put it into {API_KEY_VARIABLE}") from None
        raise Unavailable(f"{url} answers {error.code} {error.reason}: is it a Shoal gateway?") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        if isinstance(getattr(error, "reason", error), ssl.SSLError):
            raise Unavailable(f"no connection to {url}: {error} ({TLS_CA_VARIABLE} names authorities)") from None
        where = url.partition("/dashboard")[0]
        raise Unavailable(no_gateway(where.partition("://")[2], where)) from None
    return body
