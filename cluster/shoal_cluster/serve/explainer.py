"""Explains why a request went where it did, waits or was refused, from this gateway's records or another's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Protocol

from shoal_cluster.serve.call import ANSWER_IDS
from shoal_cluster.serve.explanation import Explanation
from shoal_cluster.serve.explanation_codec import explanation_from_bytes, explanation_to_bytes
from shoal_replica.errors import NotFound, Unavailable, shown

GATEWAY_ANSWER_TIMEOUT_S = 3.0


class Gateways(Protocol):
    """All running gateways, including this one. Both methods raise Unavailable if they cannot list or reach them."""

    async def ask(self, request_id: str) -> Sequence[Coroutine[object, object, tuple[str, bytes]]]:
        """Ask each gateway what it has of a request. Returns one coroutine each, which gives its name and answer."""
        ...

    async def names(self) -> Sequence[str]:
        """The gateways' names."""
        ...


class Explainer:
    """Asks the other gateways, too, if this one has nothing or only a refusal: a client that retries may reach another
    gateway. One that does not answer in time is not waited for.

    Args:
        name: this gateway's name.
        known: returns what this gateway has of a request.
        gateways: None if there is only one gateway.
    """

    def __init__(self, name: str, known: Callable[[str], Explanation], gateways: Gateways | None) -> None:
        self._name = name
        self._known = known
        self._gateways = gateways

    async def explain(self, request_id: str) -> Explanation:
        """See GatewayCore. The ``id`` of an answer by HTTP does as well."""
        bare = next(
            (request_id.removeprefix(begin) for begin in ANSWER_IDS if request_id.startswith(begin)), request_id
        )
        if bare == request_id:
            return await self._explain(request_id)
        if not self._known(request_id) and self._known(bare):
            return await self._explain(bare)
        try:
            return await self._explain(request_id)
        except NotFound:
            return await self._explain(bare)

    async def _explain(self, request_id: str) -> Explanation:
        explanation = self._known(request_id)
        if not (explanation.records or explanation.held) and self._gateways is not None:
            try:
                explanation = await self._ask(request_id, self._gateways) or explanation
            except Unavailable:
                if not explanation:
                    raise
        if not explanation:
            raise NotFound(f"request_id: no routing decision is kept for {shown(request_id)}")
        return explanation

    def told(self, request_id: str) -> tuple[str, bytes]:
        """This gateway's name and what it has of a request, for another gateway."""
        return self._name, explanation_to_bytes(self._known(request_id))

    async def _ask(self, request_id: str, gateways: Gateways) -> Explanation:
        """What the gateways that answer have. Raises Unavailable if that is nothing and one of them is silent."""
        answering: list[asyncio.Task[tuple[str, bytes]]] = []
        failure: Exception | None = None
        try:
            async with asyncio.timeout(GATEWAY_ANSWER_TIMEOUT_S):
                answering += map(asyncio.create_task, await gateways.ask(request_id))
                if answering:
                    await asyncio.wait(answering)
        except (TimeoutError, Unavailable) as error:
            failure = error
        finally:
            for task in answering:
                task.cancel()
        outcomes = await asyncio.gather(*answering, return_exceptions=True)
        # Anything but a tuple is an error, or the answer of an older release.
        answers = dict(outcome for outcome in outcomes if isinstance(outcome, tuple))
        explanation = Explanation.of([explanation_from_bytes(told) for told in answers.values()])
        if explanation or (answers and len(answers) == len(outcomes)):
            return explanation
        who = await _silent(gateways, {self._name, *answers})
        raise Unavailable(f"request_id: {who} may know of {request_id!r} and does not answer now") from failure


async def _silent(gateways: Gateways, heard: set[str]) -> str:
    """The gateways that have not answered, by name where the names are known."""
    try:
        async with asyncio.timeout(GATEWAY_ANSWER_TIMEOUT_S):
            names = sorted(set(await gateways.names()) - heard)
    except (TimeoutError, Unavailable):
        names = []
    return f"gateway {' or '.join(names)}" if names else "another gateway"
