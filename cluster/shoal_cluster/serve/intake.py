"""What a call goes through before it is placed: it is read, counted, and gets the version of its adapter."""

from __future__ import annotations

import asyncio
import time
from contextlib import nullcontext

from shoal_cluster.serve.call_observer import CallWatch
from shoal_cluster.serve.deployment_watch import DeploymentWatch
from shoal_cluster.serve.explanation import Refusal
from shoal_cluster.serve.gateway_ledger import GatewayLedger
from shoal_cluster.serve.request_maker import Made, RequestMaker
from shoal_cluster.serve.scaling_desk import ScalingDesk
from shoal_cluster.serve.served_adapters import ServedAdapters
from shoal_replica.errors import DeadlineExceeded, InvalidArgument, ResourceExhausted, ShoalError, Unavailable

LOOK_S = 0.1


class Intake:
    """Owner: the gateway.

    Args:
        deployment: knows why replicas fail to start.
        patience_s: how long a call waits for its adapter where no replica has it and none is starting.
        max_waiting: how many calls may wait so.
    """

    def __init__(
        self,
        requests: RequestMaker,
        ledger: GatewayLedger,
        scaling: ScalingDesk,
        adapters: ServedAdapters,
        deployment: DeploymentWatch,
        patience_s: float,
        max_waiting: int,
    ) -> None:
        self._requests = requests
        self._ledger = ledger
        self._scaling = scaling
        self._adapters = adapters
        self._deployment = deployment
        self._patience_s = patience_s
        self._max_waiting = max_waiting
        self._num_waiting = 0

    async def take(self, watch: CallWatch, adapter: str, timeout_s: float, max_model_len: int) -> Made:
        """The request for a call for ``adapter``, "" for the model alone. Meanwhile ``watch.fail`` ends it.

        Raises:
            InvalidArgument: it cannot be served, or its id is that of a call on record.
            Unavailable: no replica has the adapter, and none will have it soon.
            ResourceExhausted: too many calls wait for an adapter.
            DeadlineExceeded: ``timeout_s`` after its arrival it was not ready.
        """
        call, arrived_s = watch.call, watch.times.arrived_s
        failure: BaseException = DeadlineExceeded(f"the request was not finished after {timeout_s:g} s")
        if adapter:
            self._adapters.check(adapter)
        try:
            async with asyncio.timeout(arrived_s + timeout_s - time.monotonic()) as limit:

                def fail(error: BaseException) -> None:
                    nonlocal failure
                    if not limit.expired():  # else it is ending
                        failure = error
                        limit.reschedule(asyncio.get_running_loop().time())

                watch.fail = fail
                made = await self._requests.make(call, arrived_s, max_model_len)
                if self._ledger.has_used(call.request_id):
                    raise InvalidArgument("request_id", call.request_id, "must not have been used before")
                self._scaling.meter.arrive(made.request.num_prompt_tokens)
                return made.with_adapter(await self._version(adapter, made) if adapter else "")
        except TimeoutError:
            raise failure from None
        finally:
            watch.fail = None

    async def _version(self, adapter: str, made: Made) -> str:
        """What replicas call it. Where there is none to say so, the call is held: that starts one."""
        if self._adapters.is_known(adapter):
            return self._adapters.version(adapter)
        try:
            if self._num_waiting >= self._max_waiting:
                text = f"{self._num_waiting} requests wait for an adapter; {self._max_waiting} may"
                raise ResourceExhausted(text, retry_after_s=1.0)
            has_replicas = self._ledger.can_place(frozenset())
            num_tokens = made.request.num_prompt_tokens
            self._num_waiting += 1
            try:
                with nullcontext() if has_replicas else self._scaling.holding(num_tokens):
                    return await self._until_known(adapter)
            finally:
                self._num_waiting -= 1
        except ShoalError as error:
            self._ledger.routes.refuse(Refusal.of(error, time.time(), made.request.request_id, ()))
            raise

    async def _until_known(self, adapter: str) -> str:
        """Its version, once some replica has loaded it, for which one may have to start first."""
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + self._patience_s
        while not self._adapters.is_known(adapter):
            self._adapters.check(adapter)
            if (failure := self._deployment.start_failure()) and not self._ledger.can_place(frozenset()):
                raise Unavailable(f"no replica could be started: {failure}")
            if self._scaling.is_growing():
                ends_s = loop.time() + self._patience_s
            elif loop.time() >= ends_s:
                break
            await asyncio.sleep(LOOK_S)
        return self._adapters.version(adapter)
