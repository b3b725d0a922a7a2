"""What a call goes through before it is placed: it is read, counted, and gets the version of its adapter."""

from __future__ import annotations

import asyncio
import time

from shoal_cluster.serve.call import GenerateCall
from shoal_cluster.serve.gateway_ledger import GatewayLedger
from shoal_cluster.serve.request_maker import Made, RequestMaker
from shoal_cluster.serve.scaling_desk import ScalingDesk
from shoal_cluster.serve.served_adapters import ServedAdapters
from shoal_replica.errors import DeadlineExceeded, InvalidArgument


class Intake:
    """Owner: the gateway.

    Args:
        patience_s: how long a call waits for its adapter where no replica has it and none is starting.
    """

    def __init__(
        self,
        requests: RequestMaker,
        ledger: GatewayLedger,
        scaling: ScalingDesk,
        adapters: ServedAdapters,
        patience_s: float,
    ) -> None:
        self._requests = requests
        self._ledger = ledger
        self._scaling = scaling
        self._adapters = adapters
        self._patience_s = patience_s

    async def take(
        self, call: GenerateCall, adapter: str, arrived_s: float, timeout_s: float, max_model_len: int
    ) -> Made:
        """The request for a call for ``adapter``, "" for the model alone, which arrived at ``arrived_s``.

        Raises:
            InvalidArgument: it cannot be served, or its id is that of a call on record.
            Unavailable: no replica has the adapter, and none will have it soon.
            DeadlineExceeded: ``timeout_s`` after its arrival it was not ready.
        """
        try:
            async with asyncio.timeout(arrived_s + timeout_s - time.monotonic()):
                made = await self._requests.make(call, arrived_s, max_model_len)
                if self._ledger.routes.of_call(call.request_id):
                    raise InvalidArgument("request_id", call.request_id, "must not have been used before")
                num_tokens = made.request.num_prompt_tokens
                self._scaling.meter.arrive(num_tokens)
                return made.with_adapter(await self._version(adapter, num_tokens) if adapter else "")
        except TimeoutError:
            raise DeadlineExceeded(f"the request was not finished after {timeout_s:g} s") from None

    async def _version(self, adapter: str, num_tokens: int) -> str:
        """What replicas call it. Where they are yet to say so, the call is held: that starts a first replica."""
        if self._adapters.is_known(adapter):
            return self._adapters.version(adapter)
        with self._scaling.holding(num_tokens):
            return await self._adapters.until_known(adapter, self._patience_s, self._scaling.is_growing)
