"""The gateway: checks a call, tokenises it once, admits it, and streams what the replicas generate."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, cast

from ray import serve
from ray.serve.handle import DeploymentHandle, DeploymentResponse

from shoal_cluster.config import ClusterConfig
from shoal_cluster.policies.autoscaling_config import tunable
from shoal_cluster.policies.hold_config import HoldConfig
from shoal_cluster.policies.objective import LatencyObjective
from shoal_cluster.policies.pending_request import RESUMED_PRIORITY, PendingRequest
from shoal_cluster.policies.route_query import RouteQuery
from shoal_cluster.policies.route_record import RouteRecord
from shoal_cluster.policies.routing import RouteWeights
from shoal_cluster.serve.access import Access
from shoal_cluster.serve.admin import check_admin_key
from shoal_cluster.serve.admission_desk import limits_of
from shoal_cluster.serve.after_calls import AfterCalls
from shoal_cluster.serve.block_map import BlockMap, decode_block_map
from shoal_cluster.serve.call import Chunk, GenerateCall, Prompt
from shoal_cluster.serve.call_observer import CallObserver, open_tracer
from shoal_cluster.serve.deployment_watch import DeploymentRow, DeploymentWatch
from shoal_cluster.serve.dispatcher import Dispatcher
from shoal_cluster.serve.explainer import Explainer
from shoal_cluster.serve.explanation import Explanation
from shoal_cluster.serve.feed_messages import BLOCKS, DRAIN, METRICS, PAST, BlockSource
from shoal_cluster.serve.gateway_ledger import GatewayLedger
from shoal_cluster.serve.generation import Generation
from shoal_cluster.serve.ingress import Ingress
from shoal_cluster.serve.installed_ledger import install
from shoal_cluster.serve.intake import Intake
from shoal_cluster.serve.journal import Event, EventKind
from shoal_cluster.serve.latency_window import LatencyTargets, LatencyWindow
from shoal_cluster.serve.logs import error_log, log_call, log_unread, set_up_logs
from shoal_cluster.serve.metrics.gateway import GatewayMetrics
from shoal_cluster.serve.metrics.gathered import replica_points
from shoal_cluster.serve.metrics.ray_export import RayExport
from shoal_cluster.serve.metrics.tally import Point
from shoal_cluster.serve.model_rows import model_rows
from shoal_cluster.serve.past_sample import PastSample, decode_past
from shoal_cluster.serve.ray_store import RayStore
from shoal_cluster.serve.request_id import is_later_leg
from shoal_cluster.serve.rows import ClusterRow, ModelCard, ReplicaRow, ScalingRow
from shoal_cluster.serve.scaling_board import ScalingBoard
from shoal_cluster.serve.scaling_desk import ScalingDesk
from shoal_cluster.serve.serve_details import serve_details
from shoal_cluster.serve.serve_gateways import ServeGateways
from shoal_cluster.serve.serve_placement import ServePlacement
from shoal_cluster.serve.served_adapters import ServedAdapters
from shoal_cluster.serve.served_model import read_model
from shoal_cluster.serve.shared_port import is_other_gateway
from shoal_cluster.serve.standstill import end_at_standstill
from shoal_cluster.user_config import UserConfig
from shoal_replica.errors import ModelNotFound, shown
from shoal_replica.request import Request

UNTOLD_S = 5.0
"""Serve tells a gateway its ``user_config`` right after its start, but not where a document has null for it."""

logger = logging.getLogger(__name__)


class Gateway:
    """A Serve deployment that implements GatewayCore and serves it over gRPC and HTTP on its own sockets."""

    async def __init__(self, replicas: DeploymentHandle, config: ClusterConfig) -> None:  # type: ignore[misc]
        set_up_logs(config.logs.format, config.logs.level, process="gateway")
        self._config, self._settings = config, config.gateway
        self._model, self._tokenizer, self._requests = await read_model(config)
        self._access = Access(self._settings.api_secrets(), self._settings.admin_secret)
        if self._access.is_open and not self._settings.is_local:
            logger.warning("there are no API keys: everybody who reaches this gateway may call it")
        self._created_s = int(time.time())
        self._is_closing = False
        num_gateways, max_entries = self._settings.num_replicas, self._settings.max_index_entries
        self._ledger = GatewayLedger(uuid.uuid4().hex, RouteWeights(), num_gateways, max_entries)
        install(self._ledger, config.model)
        self._adapters = ServedAdapters(self._ledger, tuple(config.adapters))
        self._replicas = replicas
        own = serve.get_replica_context()
        if not replicas.is_initialized:
            replicas._init()  # builds the router now, so that feeds are up before the first call
        self._count(config)
        self._watch = DeploymentWatch(serve_details, own.app_name, replicas.deployment_name, self._ledger.journal)
        board = ScalingBoard(own.app_name, RayStore())
        self._scaling = ScalingDesk(board, self._ledger, num_gateways, config.scale_config())
        patience_s, max_ongoing = self._settings.placement_timeout_s, config.replica.max_ongoing
        self._intake = Intake(
            self._requests, self._ledger, self._scaling, self._adapters, self._watch, patience_s, max_ongoing
        )
        self._tracer = open_tracer(config.traces, config.name, self._ledger.gateway_id)
        self._after_calls = AfterCalls(log_call, *([self._tracer.take] if self._tracer is not None else ()))
        listeners = (self._scaling.meter.take, self._after_calls.take)
        self._observer = CallObserver(self._metrics, self._ledger.journal, listeners)
        self._tasks = self._start_tasks()
        hold = HoldConfig(objective=LatencyObjective(ttft_s=config.objective.ttft_s))
        holding, is_growing = self._scaling.holding, self._scaling.is_growing
        self._dispatcher = Dispatcher(
            self._ledger, hold, limits_of(config, hold), holding, patience_s, is_growing, self._watch.start_failure
        )
        gateways = ServeGateways(own.app_name, own.deployment) if num_gateways > 1 else None
        self._explainer = Explainer(own.replica_id.unique_id, self._dispatcher.explain, gateways)
        is_peer = is_other_gateway(own.app_name, own.deployment)
        self._ingress = await Ingress.open(self, self._settings, is_peer)
        asyncio.get_running_loop().call_later(UNTOLD_S, self._scaling.start)
        gc.freeze()  # modules and tokenizer stay; a full collection that visits them would stall all streams
        bounds = f"{config.scaling.min_replicas} to {config.scaling.max_replicas} replicas"
        self._ledger.journal.note(EventKind.DEPLOYED, f"this gateway has started: {config.name} on {bounds}")

    def _count(self, config: ClusterConfig) -> None:
        """Begin to count what calls and decisions come to."""
        targets = LatencyTargets(ttft_s=config.objective.ttft_s, inter_token_s=config.objective.inter_token_s)
        models = config.name, *config.adapters
        self._metrics = GatewayMetrics(self._ledger.gateway_id, models, LatencyWindow(targets))
        self._ledger.on_decision = self._metrics.add_decision
        self._ledger.recalls.on_stall = self._metrics.add_stall

    def _start_tasks(self) -> tuple[asyncio.Task[None], ...]:
        """What goes on beside the calls, for as long as the gateway lives: that of the adapters, then others."""
        return (
            asyncio.create_task(self._adapters.run(), name="shoal-adapters"),
            asyncio.create_task(self._watch.run(), name="shoal-watch"),
            asyncio.create_task(end_at_standstill(error_log()), name="shoal-standstill"),
            asyncio.create_task(RayExport().run(lambda: self._own_points(self._rows())), name="shoal-metrics"),
        )

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Serve passes ``user_config`` without replacing the gateway. Raises ConfigError, and then nothing changes; but
        Serve stops this gateway and starts others, which fail alike: so ``shoal deploy`` checks it first.
        """
        settings = UserConfig.from_dict(user_config, self._config)
        self._scaling.rebase(self._config.with_scaling(settings.scaling).scale_config())
        self._adapters.want(settings.adapters)
        self._ledger.use_rule(settings.routing.rule)
        weights = settings.routing.weights
        if weights != self._ledger.weights:
            self._ledger.journal.note(EventKind.CHANGED, f"routing: {weights}")
        self._ledger.weights = weights
        if (share := settings.routing.prefill_share) != self._ledger.phases.roles.share:
            self._ledger.journal.note(EventKind.CHANGED, f"routing: {share:g} of the replicas only compute prompts")
        self._ledger.phases.roles.share = share

    async def record_replica_metadata(self) -> dict[str, Any]:
        """The ports that the servers listen on, which matter where free ones were asked for."""
        return {"shoal_grpc_port": self._ingress.grpc_port, "shoal_http_port": self._ingress.http_port}

    # GatewayCore

    async def generate(self, call: GenerateCall) -> AsyncIterator[Chunk]:
        """Stream a call; see GatewayCore. Raises ShoalError subclasses."""
        with self._observer.observe(call) as watch:
            limit_s = self._settings.request_timeout_s
            timeout_s = limit_s if call.timeout_s is None else min(call.timeout_s, limit_s)
            self.check_model(call.model)
            adapter = "" if call.model == self._config.name else call.model
            made = await self._intake.take(watch, adapter, timeout_s, self._max_model_len())
            generation = Generation(
                made.request,
                make_query=self._make_query,
                ledger=self._ledger,
                place=self._place,
                tokenizer=self._tokenizer,
                placement_timeout_s=self._settings.placement_timeout_s,
                times=watch.times,
                adapters=self._adapters,
                shown=made.shown,
            )
            watch.usage, watch.fail = generation.usage, generation.fail
            stream = cast("AsyncGenerator[Chunk, None]", generation.chunks(timeout_s))
            async with aclosing(stream) as chunks:
                with self._adapters.using(made.request.adapter):
                    async for chunk in chunks:
                        watch.take(chunk)
                        for each in made.readers.read(chunk):
                            yield each

    def tokenize(self, prompt: Prompt, *, add_special_tokens: bool) -> tuple[int, ...]:
        return self._requests.tokenize(prompt, add_special_tokens=add_special_tokens)

    def detokenize(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def check_model(self, name: str) -> None:
        served = [self._config.name, *self._adapters.names]
        if name and name not in served:
            known = f"{', '.join(map(repr, served))} {'is' if len(served) == 1 else 'are'}"
            raise ModelNotFound(f"model: {shown(name)} is not served here; {known}")

    def model_card(self, name: str = "") -> ModelCard:
        self.check_model(name)
        is_adapter = name in self._adapters.names
        return ModelCard(
            name=name or self._config.name,
            max_model_len=self._max_model_len(),
            vocab_size=self._model.vocab_size,
            block_size=self._config.replica.block_size,
            dtype=self._model.dtype,
            eos_token_ids=self._model.eos_token_ids,
            has_chat_template=self._tokenizer.chat_template is not None,
            created_s=self._created_s,
            parent=self._config.name if is_adapter else "",
            adapters=() if is_adapter else self._adapters.names,
        )

    def cluster(self) -> ClusterRow:
        metrics = self._metrics
        return ClusterRow(
            model=self._config.name,
            replicas=self._rows(),
            num_requests=metrics.num_requests,
            num_active=metrics.num_active,
            num_shed=metrics.num_shed,
            num_failed=metrics.num_failed,
            num_resumes=metrics.num_resumes,
            recent_ttft_s=tuple(metrics.recent_ttft_s),
            latency=metrics.window.summary(time.monotonic()),
            devices=self._config.replica.devices,
            quality=self._ledger.view_tally.quality(),
            models=model_rows(self._config.name, self._adapters, metrics.by_model),
        )

    def _rows(self) -> tuple[ReplicaRow, ...]:
        views = self._ledger.view.replicas_for((), time.monotonic())
        return tuple(ReplicaRow.of(view, self._ledger.start_report(view.replica_id)) for view in views)

    async def metrics(self) -> Iterable[Point]:
        rows = self._rows()
        of_replicas = await replica_points(rows, lambda replica_id: self._ledger.ask(replica_id, METRICS))
        return [*self._own_points(rows), *of_replicas, *self._scaling.points()]

    def _own_points(self, rows: tuple[ReplicaRow, ...]) -> Iterator[Point]:
        return self._metrics.points(rows, self._ledger.view_tally.quality(), self._ledger.view.index)

    def refuse_unread(self, request_id: str, error: str) -> None:
        self._metrics.add_unread()
        log_unread(request_id, error)

    def token_bytes(self, token_id: int) -> bytes:
        return self._tokenizer.token_bytes(token_id)

    async def explain(self, request_id: str) -> Explanation:
        return await self._explainer.explain(request_id)

    async def told_of_request(self, request_id: str) -> tuple[str, bytes]:
        """Another gateway asks; see ServeGateways."""
        return self._explainer.told(request_id)

    def recent_routes(self, limit: int) -> Sequence[RouteRecord]:
        return self._ledger.routes.recent(limit)

    def events(self, limit: int) -> Sequence[Event]:
        return self._ledger.journal.last(limit)

    def deployment(self) -> DeploymentRow | None:
        return self._watch.latest

    async def block_map(self, replica_id: str) -> BlockMap:
        return decode_block_map(await self._ledger.ask(replica_id, BLOCKS))

    async def replica_past(self, replica_id: str) -> Sequence[PastSample]:
        return decode_past(await self._ledger.ask(replica_id, PAST))

    def scaling(self) -> ScalingRow:
        return self._scaling.row()

    async def tune(self, changes: Mapping[str, float], *, reset: bool) -> ScalingRow:
        row = await self._scaling.tune(changes, reset=reset)
        told = ", ".join(f"{name} = {tunable(row.config)[name]:g}" for name in row.tuned)
        self._ledger.journal.note(EventKind.CHANGED, f"scaling: {told or 'as deployed'}")
        return row

    def authenticate(self, authorization: str | None) -> str | None:
        return self._access.tenant_of(authorization)

    def check_admin(self, key: str | None) -> None:
        check_admin_key(self._settings.admin_secret, key)

    async def drain(self, replica_id: str) -> None:
        await self._ledger.ask(replica_id, DRAIN)
        self._ledger.journal.note(EventKind.DRAINING, "an administrator has asked for it", replica_id=replica_id)

    def knows_call(self, request_id: str) -> bool:
        return self._ledger.knows_call(request_id)

    def is_ready(self) -> bool:
        if self._is_closing:
            return False
        if any(state.connected for state in self._ledger.view.present(time.monotonic()).states):
            return True
        return self._scaling.row().config.min_replicas == 0 and not self._watch.start_failure()

    # Helpers, and Serve's hooks: async, as it runs others in threads beside the event loop

    def _max_model_len(self) -> int:
        """The model's limit, or that of the largest block pool if smaller; known once a replica has sent its stats."""
        stats = self._ledger.view.present(time.monotonic()).stats
        pools = [each.num_total_blocks * each.block_size for each in stats if each is not None]
        return min(self._model.max_model_len, max(pools)) if pools else self._model.max_model_len

    def _make_query(self, request: Request) -> RouteQuery:
        settings = self._config.replica
        return RouteQuery.for_request(request, settings.block_size, settings.enable_prefix_caching)

    def _place(self, request: Request, query: RouteQuery, deadline_s: float) -> ServePlacement:
        pending = PendingRequest(
            query=self._ledger.phases.of(request, query),
            arrival_s=request.arrival_s,
            deadline_s=deadline_s,
            tenant=request.tenant,
            priority=RESUMED_PRIORITY if request.output_token_ids else request.priority,
            is_admitted=is_later_leg(request.request_id),
        )
        return ServePlacement(self._ledger, self._dispatcher, request, pending, self._send)

    def _send(self, request: Request, source: BlockSource | None) -> DeploymentResponse:
        return self._replicas.generate.remote(request, gateway_id=self._ledger.gateway_id, source=source)

    async def check_health(self) -> None:
        """Serve replaces the gateway when this raises."""
        self._ingress.check_health()
        for task in self._tasks:
            if task.done() and not self._is_closing:
                raise RuntimeError(f"the gateway's {task.get_name()} has ended: {task}")
        self._ledger.check_health()
        self._scaling.check_health()

    async def __del__(self) -> None:
        """Serve awaits this after its own drain: let answers finish, then close."""
        if hasattr(self, "_ingress"):
            self._is_closing = True
            adapters, *others = self._tasks
            adapters.cancel()  # a successor says what is wanted
            await self._ingress.close(self._observer.drain(self._settings.drain_timeout_s))
            self._after_calls.finish()
            for task in others:
                task.cancel()
            await self._scaling.close()
            await self._ledger.close()
            if self._tracer is not None:
                await asyncio.to_thread(self._tracer.close)
