"""Every defined metric is exported, every exported series is defined, and the number of series is bounded."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from random import Random

import pytest
from fixtures.fake_gateway import CLUSTER, STATS, example_record
from fixtures.fake_serve import ask, serving
from msgspec import structs
from prometheus_client.parser import text_string_to_metric_families

from shoal_cluster.policies.candidates import Candidates
from shoal_cluster.policies.prefix_index import PrefixIndex
from shoal_cluster.policies.replica_view import ReplicaView
from shoal_cluster.policies.route_decision import RouteDecision
from shoal_cluster.policies.route_record import RouteRecord
from shoal_cluster.serve.call import GenerateCall, Usage
from shoal_cluster.serve.call_observer import CallObserver
from shoal_cluster.serve.call_record import CallRecord, RequestOutcome
from shoal_cluster.serve.call_times import LegTimes
from shoal_cluster.serve.journal import Journal
from shoal_cluster.serve.latency_window import LatencyTargets, LatencyWindow
from shoal_cluster.serve.metrics import definitions as d
from shoal_cluster.serve.metrics.autoscaler import AutoscalerMetrics
from shoal_cluster.serve.metrics.exposition import render
from shoal_cluster.serve.metrics.gateway import GatewayMetrics, decision_reason
from shoal_cluster.serve.metrics.gathered import decode_points, encode_points, replica_points
from shoal_cluster.serve.metrics.model_tally import MAX_MODELS
from shoal_cluster.serve.metrics.replica import ReplicaMetrics
from shoal_cluster.serve.metrics.tally import Histogram, Point, Tally
from shoal_cluster.serve.rows import ReplicaRow
from shoal_cluster.serve.view_tally import ViewQuality
from shoal_replica.errors import DeadlineExceeded, EngineDead, InvalidArgument, NotFound, ResourceExhausted, Unavailable
from shoal_replica.prefix_cache import DIGEST_BYTES, BlockHash
from shoal_replica.reports import StepReport
from shoal_replica.sampling_params import SamplingParams

MAX_SERIES_PER_GATEWAY, MAX_SERIES_PER_REPLICA = 200, 100

USAGE = Usage(num_prompt_tokens=1, num_cached_tokens=0, num_output_tokens=1, replica_id="", ttft_s=0.1, num_resumes=1)


def gateway_metrics() -> GatewayMetrics:
    return GatewayMetrics("g0", ("tiny", "french"), LatencyWindow(LatencyTargets(ttft_s=1.0, inter_token_s=0.1)))


def replica_metrics() -> ReplicaMetrics:
    return ReplicaMetrics("r0", {"weights": 100, "kv_blocks": 200})


def series(points: Iterable[Point]) -> dict[tuple[str, tuple[str, ...]], float]:
    """Every sample as Prometheus parses it, by name and label values."""
    return {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(render(points).decode())
        for sample in family.samples
    }


def test_names_follow_the_rules() -> None:
    names = [family.name for family in d.FAMILIES]
    assert len(set(names)) == len(names) >= 30
    for family in d.FAMILIES:
        assert family.name.startswith(f"shoal_{family.source}_")
        assert family.name.endswith("_total") == (family.kind is d.Kind.COUNTER), family.name
        assert family.name.endswith("_seconds") == (family.unit == "seconds"), family.name
        assert family.name.endswith("_bytes") == (family.unit == "bytes"), family.name
        assert (family.buckets == ()) == (family.kind is not d.Kind.HISTOGRAM), family.name
        assert list(family.buckets) == sorted(set(family.buckets)), family.name
        ids = [label.values is None for label in family.labels]
        assert ids == sorted(ids, reverse=True), "ids come first"


def test_every_definition_is_told_with_its_labels() -> None:
    told = [
        *gateway_metrics().points(CLUSTER.replicas, ViewQuality(), PrefixIndex()),
        *replica_metrics().points(STATS),
        *AutoscalerMetrics().points(),
    ]
    assert {point.family for point in told} == set(d.FAMILIES)
    keys = [(point.family, point.labels) for point in told]
    assert len(set(keys)) == len(keys), "a series is told twice"
    for point in told:
        assert isinstance(point.value, Histogram) == (point.family.kind is d.Kind.HISTOGRAM)
        for label, value in zip(point.family.labels, point.labels, strict=True):
            assert label.values is None or value in label.values


async def test_a_gateways_page_has_every_metric_with_its_type() -> None:
    replica = replica_metrics()
    replica.take(StepReport((), (), (), STATS, step_s=0.02))

    async def ask(replica_id: str) -> bytes:
        assert replica_id == "r0", "the other is not connected"
        return encode_points(replica.own_points())

    told = await replica_points(CLUSTER.replicas, ask)
    assert _still(series(told)) == _still(series(replica.points(STATS)))
    page = [
        *gateway_metrics().points(CLUSTER.replicas, ViewQuality(), PrefixIndex()),
        *told,
        *AutoscalerMetrics().points(),
    ]
    types = {family.name: family.type for family in text_string_to_metric_families(render(page).decode())}
    assert types == {f.name.removesuffix("_total"): f.kind for f in d.FAMILIES}


def _still(told: dict[tuple[str, tuple[str, ...]], float]) -> dict[tuple[str, tuple[str, ...]], float]:
    """All but the resident memory of this process, which changes by itself."""
    return {key: value for key, value in told.items() if "resident" not in key[1]}


async def test_a_replica_that_does_not_answer_leaves_its_stats() -> None:
    async def ask(replica_id: str) -> bytes:
        raise Unavailable(f"{replica_id} does not answer")

    told = await replica_points(CLUSTER.replicas, ask)
    assert {point.labels[0] for point in told} == {"r0"}
    assert d.STEP_TIME not in {point.family for point in told}


def test_points_of_another_version_are_left_out() -> None:
    odd = Histogram((1.0,))
    odd.observe(2.0)
    mine = Point(d.REPLICA_MEMORY, ("r0", "weights"), 5.0)
    kept = [mine, Point(d.STEP_TIME, ("r0",), odd), Point(replace(d.STEPS, name="shoal_replica_new"), ("r0",), 1.0)]
    assert decode_points(encode_points(kept)) == [mine]


def test_what_the_view_predicted_and_its_age_are_told() -> None:
    metrics = gateway_metrics()
    metrics.add_decision(example_record())
    quality = ViewQuality(num_requests=2, num_prompt_tokens=90, num_predicted_tokens=48, num_cached_tokens=32)
    index = PrefixIndex(max_entries=4096)
    index.store("r0", [BlockHash(Random(number).randbytes(DIGEST_BYTES)) for number in range(19_999)])
    told = series(metrics.points((), quality, index))
    assert told["shoal_gateway_index_entries", ("g0",)] == len(index) == 4096
    assert told["shoal_gateway_index_evicted_total", ("g0",)] == index.num_evicted == 19_999 - 4096
    assert told["shoal_gateway_view_age_seconds_count", ("g0",)] == 1
    age_s = example_record().replicas.age_s[0]
    assert told["shoal_gateway_view_age_seconds_sum", ("g0",)] == pytest.approx(age_s)
    names = ("placed_prompt", "predicted_cached", "found_cached")
    assert [told[f"shoal_gateway_{name}_tokens_total", ("g0",)] for name in names] == [90, 48, 32]


def test_blocks_add_up_to_the_pool_and_to_the_hosts() -> None:
    stats = structs.replace(STATS, num_host_blocks=12, num_host_cached_blocks=5, num_blocks_out=9, num_blocks_in=4)
    points = list(replica_metrics().points(stats))
    for tier, total in zip(d.TIERS, (stats.num_total_blocks, 12), strict=True):
        assert sum(p.value for p in points if p.family is d.BLOCKS and tier in p.labels) == total
    assert [p.value for p in points if p.family is d.MOVED_BLOCKS] == [9, 4]


def test_series_are_bounded_whatever_clients_and_replicas_do() -> None:
    """A thousand calls with random names, a thousand replicas that came and went: only live replicas have series."""
    rng = Random(7)
    metrics = gateway_metrics()
    for number in range(1000):
        metrics.add_decision(example_record(f"request-{rng.random()}"))
        metrics.add_call(
            CallRecord(
                request_id=f"{rng.random()}",
                outcome=rng.choice(list(RequestOutcome)),
                time_s=0.0,
                arrived_s=0.0,
                ended_s=rng.random(),
                error=f"Error{rng.random()}",
                usage=replace(USAGE, replica_id=f"gone-{number}"),
            )
        )
        living = [ReplicaRow(replica_id=f"replica-{number}-{i}", stats=STATS) for i in range(3)]
        if number % 100 == 0:
            assert len(series(metrics.points(living, ViewQuality(), PrefixIndex()))) <= MAX_SERIES_PER_GATEWAY
    assert len(series(replica_metrics().points(STATS))) <= MAX_SERIES_PER_REPLICA


def _add_call(metrics: GatewayMetrics, model: str, usage: Usage | None) -> None:
    outcome = RequestOutcome.INVALID if usage is None else RequestOutcome.FINISHED
    metrics.add_call(
        CallRecord(request_id="r", outcome=outcome, time_s=0.0, arrived_s=0.0, ended_s=1.0, model=model, usage=usage)
    )


def test_placements_that_others_go_on_from_are_counted_by_why() -> None:
    metrics = gateway_metrics()
    legs = tuple(LegTimes(0.0, end=end) for end in ("refused", "prefilled", "moved", "moved", "lost", ""))
    metrics.add_call(
        CallRecord(
            request_id="r",
            outcome=RequestOutcome.FINISHED,
            time_s=0.0,
            arrived_s=0.0,
            ended_s=1.0,
            usage=USAGE,
            legs=legs,
        )
    )
    points = [p for p in metrics.points((), ViewQuality(), PrefixIndex()) if p.family is d.HANDOVERS]
    assert {point.labels[1]: point.value for point in points} == {"prefilled": 1, "moved": 2}


def test_a_placement_lasts_until_a_replica_has_taken_the_request() -> None:
    metrics = gateway_metrics()
    for legs in ((LegTimes(0.0, end="refused"), LegTimes(0.5, routed_s=3.0), LegTimes(4.0, routed_s=5.0)), ()):
        record = CallRecord(
            request_id="r", outcome=RequestOutcome.FINISHED, time_s=0.0, arrived_s=1.0, ended_s=6.0, legs=legs
        )
        metrics.add_call(record)
        assert record.placement_s == (2.0 if legs else None)
    points = [p for p in metrics.points((), ViewQuality(), PrefixIndex()) if p.family is d.PLACEMENT]
    (told,) = [point.value for point in points]
    assert isinstance(told, Histogram)
    assert (sum(told.counts), told.sum) == (1, 2.0)


def test_requests_and_tokens_count_for_the_model_or_adapter_that_served_them() -> None:
    metrics = gateway_metrics()
    usage = replace(USAGE, num_prompt_tokens=10, num_cached_tokens=4, num_output_tokens=7)
    for model, used in (("", usage), ("tiny", USAGE), ("late", usage), ("late", usage), ("anything at all", None)):
        _add_call(metrics, model, used)
    points = list(metrics.points((), ViewQuality(), PrefixIndex()))
    requests = {point.labels[1]: point.value for point in points if point.family is d.MODEL_REQUESTS}
    assert requests == {"tiny": 2, "french": 0, "late": 2}
    tokens = {name: [0, 0, 0] for name in requests}
    for point in points:
        if point.family is d.MODEL_TOKENS:
            _, name, kind = point.labels
            tokens[name][d.TOKEN_KINDS.index(kind)] += point.value
    assert tokens == {"tiny": [11, 4, 8], "french": [0, 0, 0], "late": [20, 8, 14]}


def test_the_name_not_asked_for_the_longest_makes_room() -> None:
    metrics = gateway_metrics()
    for number in range(MAX_MODELS):
        _add_call(metrics, f"adapter-{number}", USAGE)
        _add_call(metrics, "french", USAGE)
    points = metrics.points((), ViewQuality(), PrefixIndex())
    names = [point.labels[1] for point in points if point.family is d.MODEL_REQUESTS]
    assert len(names) == MAX_MODELS
    assert {"adapter-0", "tiny"}.isdisjoint(names)
    assert names[-2:] == [f"adapter-{MAX_MODELS - 1}", "french"]


def test_a_label_value_that_is_not_defined_is_refused() -> None:
    with pytest.raises(KeyError):
        Tally((d.REQUESTS,), "g0").inc(d.REQUESTS, "anything a client says")


def test_a_histogram_counts_as_a_sorted_list_does() -> None:
    rng = Random(11)
    bounds = (0.1, 0.5, 1.0, 2.0)
    histogram = Histogram(bounds)
    values = [rng.choice([*bounds, rng.expovariate(1.0)]) for _ in range(500)]
    for value in values:
        histogram.observe(value)
    histogram.observe(0.3, 7)
    values += [0.3] * 7
    expected = [(str(bound), sum(value <= bound for value in values)) for bound in bounds]
    assert histogram.buckets() == [*expected, ("+Inf", len(values))]
    assert histogram.sum == pytest.approx(sum(values))
    assert histogram.num == len(values)


@pytest.mark.parametrize(
    ("matched", "ranked", "reason"),
    [
        ({}, (), d.DecisionReason.UNPLACED),
        ({"a": 5, "b": 9}, ("a",), d.DecisionReason.ONLY),
        ({"a": 5, "b": 2}, ("a", "b"), d.DecisionReason.PREFIX),
        ({"a": 5, "b": 0, "c": 5}, ("a", "b", "c"), d.DecisionReason.PREFIX),
        ({"a": 2, "b": 5}, ("a", "b"), d.DecisionReason.LOAD),
        ({"a": 5, "b": 5}, ("a", "b"), d.DecisionReason.LOAD),
        ({"a": 0, "b": 0}, ("b", "a"), d.DecisionReason.LOAD),
    ],
)
def test_a_decision_has_one_word(matched: dict[str, int], ranked: tuple[str, ...], reason: d.DecisionReason) -> None:
    like = example_record()
    views = Candidates.of(ReplicaView(replica_id=name, num_matched_blocks=num) for name, num in matched.items())
    decision = RouteDecision(ranked, "", ())
    record = RouteRecord(like.time_s, like.query, views, like.weights, like.seed, decision)
    assert decision_reason(record) is reason


ENDINGS = [
    (None, RequestOutcome.FINISHED),
    (ResourceExhausted("full"), RequestOutcome.SHED),
    (DeadlineExceeded("late"), RequestOutcome.DEADLINE),
    (InvalidArgument("top_p", 2, "wrong"), RequestOutcome.INVALID),
    (NotFound("no model"), RequestOutcome.INVALID),
    (EngineDead("gone"), RequestOutcome.FAILED),
    (RuntimeError("a bug"), RequestOutcome.FAILED),
    (asyncio.CancelledError(), RequestOutcome.CANCELLED),
    (GeneratorExit(), RequestOutcome.CANCELLED),
]


@pytest.mark.parametrize(
    ("timeout_s", "outcome"),
    [(None, RequestOutcome.CANCELLED), (60.0, RequestOutcome.CANCELLED), (1e-9, RequestOutcome.DEADLINE)],
)
def test_a_call_that_is_cancelled_at_its_deadline_has_missed_it(
    timeout_s: float | None, outcome: RequestOutcome
) -> None:
    """gRPC cancels it then, often before the gateway's own timer has passed."""
    metrics, journal, records = gateway_metrics(), Journal(), list[CallRecord]()
    call = GenerateCall(request_id="call", sampling_params=SamplingParams(), timeout_s=timeout_s)
    with (
        pytest.raises(asyncio.CancelledError),
        CallObserver(metrics, journal, (records.append,)).observe(call),
    ):
        raise asyncio.CancelledError
    assert [record.outcome for record in records] == [outcome]
    is_late = outcome is RequestOutcome.DEADLINE
    assert metrics.num_failed == len(journal.last(9)) == is_late
    assert records[0].error == ("DeadlineExceeded" if is_late else "CancelledError")


def test_what_an_unexpected_error_says_is_not_shown() -> None:
    """It may quote the prompt, and the journal is for everybody who may see the dashboard."""
    journal, call = Journal(), GenerateCall(request_id="call", sampling_params=SamplingParams())
    for error, told in ((KeyError("a secret"), "KeyError"), (Unavailable("no replica"), "Unavailable: no replica")):
        with pytest.raises(type(error)), CallObserver(gateway_metrics(), journal).observe(call):
            raise error
        assert journal.last(1)[0].text == told


def test_a_call_that_a_replica_finds_invalid_is_none_of_its_models() -> None:
    metrics = gateway_metrics()
    usage = Usage(num_prompt_tokens=9, num_cached_tokens=0, num_output_tokens=0, replica_id="", ttft_s=0.0)
    call = GenerateCall(request_id="call", sampling_params=SamplingParams())

    def run() -> None:
        with CallObserver(metrics, Journal()).observe(call) as watch:
            watch.usage = lambda: usage
            raise InvalidArgument("prompt", "x", "must fit a replica")

    with pytest.raises(InvalidArgument):
        run()
    assert not [point for point in metrics.by_model.points() if point.value]


@pytest.mark.parametrize(("error", "outcome"), ENDINGS)
def test_each_end_of_a_call_is_counted_once(error: BaseException | None, outcome: RequestOutcome) -> None:
    metrics, journal, records = gateway_metrics(), Journal(), list[CallRecord]()
    observer = CallObserver(metrics, journal, (records.append,))
    call = GenerateCall(request_id="call", sampling_params=SamplingParams())

    def run() -> None:
        with observer.observe(call) as watch:
            assert metrics.num_active == metrics.num_requests == 1
            watch.times.take(0, 1, watch.times.arrived_s + 0.5)
            if error is not None:
                raise error

    if error is None:
        run()
    else:
        with pytest.raises(type(error)):
            run()
    counted = series(metrics.points((), ViewQuality(), PrefixIndex()))
    assert counted["shoal_gateway_requests_total", ("g0", outcome)] == 1
    assert metrics.tally.count(d.REQUESTS) == metrics.num_requests == 1
    assert metrics.num_active == 0
    finished = outcome is RequestOutcome.FINISHED
    assert counted["shoal_gateway_requests_within_objective_total", ("g0",)] == finished
    assert counted["shoal_gateway_request_seconds_count", ("g0",)] == finished
    judged = outcome not in (RequestOutcome.INVALID, RequestOutcome.CANCELLED)
    assert metrics.window.summary(records[0].ended_s).num_requests == judged
    assert [(record.outcome, record.error) for record in records] == [(outcome, type(error).__name__ if error else "")]
    assert len(journal.last(9)) == (outcome in ("shed", "deadline", "failed"))


async def test_a_replica_counts_its_steps_and_its_queue() -> None:
    """With a real engine: as many steps as it ran, as many waits as requests; aborts and heartbeats do not count."""
    async with serving("a") as serve:
        metrics, reports = replica_metrics(), list[StepReport]()
        engine = serve.replicas["a"].engine
        engine.subscribe(metrics.take)
        engine.subscribe(reports.append)
        await asyncio.gather(*(ask(serve, f"call-{i}", max_tokens=5, n=1 + i % 2) for i in range(6)))
        engine.abort("nobody")
        told = series(metrics.points(engine.stats()))
    assert told["shoal_replica_step_seconds_count", ("r0",)] == engine.stats().num_steps > 0
    assert told["shoal_replica_step_seconds_sum", ("r0",)] == pytest.approx(sum(r.step_s or 0.0 for r in reports))
    starts = [delta.start for report in reports for delta in report.deltas if delta.start is not None]
    assert told["shoal_replica_queue_seconds_count", ("r0",)] == len(starts) == 6
    assert told["shoal_replica_prefill_seconds_sum", ("r0",)] == pytest.approx(sum(s.prefill_s for s in starts))
    assert told["shoal_replica_memory_bytes", ("kv_blocks", "r0")] == 200
    assert told["shoal_replica_memory_bytes", ("resident", "r0")] > 1e6


async def test_a_call_leaves_its_legs_and_decisions() -> None:
    async with serving("a", "b") as serve:
        serve.ledger.on_decision = (decisions := list[RouteRecord]()).append
        answer = await ask(serve, "call", max_tokens=6)
        assert answer.usage is not None
        (times,) = serve.times
        (leg,) = times.legs
    assert [record.query.request_id for record in decisions] == ["call"]
    assert (leg.replica_id, leg.end) == (answer.usage.replica_id, "")
    assert leg.routed_s is not None
    assert leg.last_token_s is not None
    assert leg.first_token_s == times.first_token_s
    assert times.arrived_s <= leg.placed_s <= leg.routed_s <= times.first_token_s < leg.last_token_s
    assert leg.queue_s is not None
    assert leg.prefill_s is not None
    assert leg.queue_s >= 0
    assert leg.prefill_s > 0
    assert leg.queue_s + leg.prefill_s <= leg.first_token_s - leg.placed_s


def test_an_autoscaler_counts_changes_by_direction() -> None:
    metrics = AutoscalerMetrics()
    for target, desired, running in [(1, 1, 1), (1, 3, 1), (3, 3, 2), (3, 2, 3)]:
        metrics.take(target, desired, running)
    told = series(metrics.points())
    assert told["shoal_autoscaler_desired_replicas", ()] == 2
    assert told["shoal_autoscaler_running_replicas", ()] == 3
    assert told["shoal_autoscaler_decisions_total", ("up",)] == 1
    assert told["shoal_autoscaler_decisions_total", ("down",)] == 1
