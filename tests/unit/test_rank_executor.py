"""Ranks in processes, without a model: steps reach all of them; a rank that fails is named, and all end with it."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator

import psutil
import pytest
from fixtures.fake_rank import CULPRIT, DIE, DIE_LAST, FREEZE, LINGER, LINGER_S, RAISE, STALL
from fixtures.model_configs import make_model
from fixtures.waiting import DEADLINE_S, until

from shoal_replica.adapter import AdapterConfig
from shoal_replica.config import CacheConfig, EngineConfig, ParallelConfig
from shoal_replica.engine import Engine
from shoal_replica.errors import ConfigError, EngineDead
from shoal_replica.executor import NewSequence, ScheduledSequence, SchedulerOutput, finish
from shoal_replica.frames import frame
from shoal_replica.ranks import executor as executor_module
from shoal_replica.ranks.channel import MAX_FRAME_BYTES, FromRank, Hello, Ready
from shoal_replica.ranks.executor import RankExecutor
from shoal_replica.ranks.launcher import LocalRanks, RankProcess
from shoal_replica.request import FinishReason, Request
from shoal_replica.sampling_params import SamplingParams
from shoal_replica.testing import expected_tokens, make_request, make_scheduler

FAKE_RANK = (sys.executable, "-m", "fixtures.fake_rank")
CACHE = CacheConfig(num_blocks=64, block_size=4)
TIMEOUT_S = 1.5


def config(
    folder: str = "", num_ranks: int = 2, num_stages: int = 1, rank_timeout_s: float = TIMEOUT_S
) -> EngineConfig:
    model = make_model(
        folder=folder,
        max_model_len=128,
        rope_scaling={"rope_type": "linear", "factor": 2.0},
        eos_token_ids=(2,),
        dtype="float32",
    )
    parallel = ParallelConfig(
        tensor_parallel_size=num_ranks, pipeline_parallel_size=num_stages, rank_timeout_s=rank_timeout_s
    )
    return EngineConfig(model=model, cache=CACHE, parallel=parallel)


def start(folder: str = "", **changes: float) -> RankExecutor:
    settings = config(folder, **changes)  # type: ignore[arg-type]
    return RankExecutor(settings, LocalRanks(settings.parallel, FAKE_RANK), start_timeout_s=DEADLINE_S)


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """No child process and no file descriptor."""
    this = psutil.Process()
    before = this.num_fds()
    yield
    assert this.children(recursive=True) == []
    assert this.num_fds() <= before


def generate(executor: RankExecutor, *requests: Request) -> dict[str, list[int]]:
    scheduler, _ = make_scheduler(num_blocks=CACHE.num_blocks, block_size=CACHE.block_size)
    tokens: dict[str, list[int]] = {r.request_id: [] for r in requests}
    for request in requests:
        scheduler.add(request)
    while (output := scheduler.schedule(0.0)) is not None:
        for delta in scheduler.update(output, executor.execute(output)):
            tokens[delta.request_id].extend(delta.token_ids)
    return tokens


def first_step(token_id: int) -> SchedulerOutput:
    new = NewSequence(0, (token_id, 5), 2, 0, (0,), SamplingParams(), 0)
    return SchedulerOutput(1, (ScheduledSequence(0, 0, 2, True),), (new,))


def test_steps_reach_all_ranks_and_one_answers() -> None:
    executor = start(num_ranks=3)
    executor.check_health()
    requests = [make_request(str(i), range(i, i + 9 * i + 1), max_tokens=9) for i in range(5)]
    expected = {r.request_id: expected_tokens(r.prompt_token_ids, 9) for r in requests}
    assert generate(executor, *requests) == expected
    executor.check_health()
    executor.close()
    executor.close()
    with pytest.raises(EngineDead, match="have been stopped"):
        executor.execute(first_step(4))
    with pytest.raises(EngineDead, match="have been stopped"):
        finish(executor.load_adapter(AdapterConfig(name="a", folder="", factors=(), num_values=0)))


def test_ranks_answer_where_file_descriptors_have_large_numbers() -> None:
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limit, 2048), most))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        executor = start()
        assert generate(executor, make_request("r", range(5))) == {"r": expected_tokens(range(5), 4)}
        executor.close()
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))


def test_ranks_that_were_launched_end_if_another_cannot_be() -> None:
    settings = config(num_ranks=2)
    ranks, launch = LocalRanks(settings.parallel, FAKE_RANK), LocalRanks.launch

    def launch_one(rank: int, port: int, key: str) -> RankProcess:
        if rank:
            raise OSError("no more processes")
        return launch(ranks, rank, port, key)

    ranks.launch = launch_one  # type: ignore[method-assign]
    with pytest.raises(OSError, match="no more"):
        RankExecutor(settings, ranks, start_timeout_s=DEADLINE_S)


@pytest.fixture
def interrupts() -> Iterator[Callable[[int], None]]:
    """Sends this process so many interrupts, as Ctrl-C does, half a second apart; where they are ignored, too."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timers: list[threading.Timer] = []

    def send(count: int) -> None:
        timers.extend(threading.Timer(0.5 * (n + 1), os.kill, (os.getpid(), signal.SIGINT)) for n in range(count))
        for timer in timers:
            timer.start()

    yield send
    for timer in timers:
        timer.join()
    signal.signal(signal.SIGINT, before)


def test_who_interrupts_a_step_twice_ends_all_ranks(interrupts: Callable[[int], None]) -> None:
    executor = start()
    interrupts(2)
    with pytest.raises(KeyboardInterrupt):
        executor.execute(first_step(LINGER))
    with pytest.raises(EngineDead, match="was at a step when this process was interrupted"):
        executor.execute(first_step(7))
    executor.close()


def test_an_interrupted_step_leaves_no_answer_for_the_next(interrupts: Callable[[int], None]) -> None:
    """As Ctrl-C interrupts ``LLM.generate``: the step's number comes again."""
    executor = start()
    interrupts(1)
    with pytest.raises(KeyboardInterrupt):
        executor.execute(first_step(LINGER))
    new = NewSequence(1, (7, 5), 2, 0, (1,), SamplingParams(), 0)
    again = SchedulerOutput(1, (ScheduledSequence(1, 0, 2, True),), (new,), dropped_seq_ids=(0,))
    assert [token.seq_id for token in executor.execute(again).sampled] == [1]
    executor.check_health()
    executor.close()


def test_adapters_are_on_all_ranks_or_on_none() -> None:
    executor = start(num_ranks=3)
    odd, good = (AdapterConfig(name="a", folder=folder, factors=(), num_values=0) for folder in ("refuse_one", ""))
    for _ in range(2):
        with pytest.raises(ConfigError, match=f"rank {CULPRIT}: its shard is odd"):
            finish(executor.load_adapter(odd))
    finish(executor.load_adapter(good))
    requests = [make_request("0", range(9), max_tokens=4)]
    assert generate(executor, *requests) == {"0": expected_tokens(requests[0].prompt_token_ids, 4)}
    executor.unload_adapter("a")
    with pytest.raises(EngineDead, match="KeyError: 'a'"):
        executor.unload_adapter("a")
    executor.close()


@pytest.mark.parametrize(
    ("trouble", "words", "limit_s"),
    [
        (DIE, "died: signal 9", 2.0),
        (RAISE, "ValueError: the matrix is on fire", 2.0),
        (STALL, "hangs: no progress for 1.5 s", TIMEOUT_S + 2.5),
        (FREEZE, "hangs: no sign of life for 1.5 s", TIMEOUT_S + 2.5),
    ],
)
def test_the_rank_at_fault_is_named_and_all_are_gone(trouble: int, words: str, limit_s: float) -> None:
    executor = start()
    culprit = psutil.Process().children()[CULPRIT].pid
    started = time.monotonic()
    with pytest.raises(EngineDead) as caught:
        executor.execute(first_step(trouble))
    assert time.monotonic() - started < limit_s
    assert f"rank {CULPRIT} (pid {culprit} on 127.0.0.1) " in str(caught.value)
    assert words in str(caught.value)
    assert psutil.Process().children() == []
    for call in (executor.check_health, lambda: executor.execute(first_step(0))):
        with pytest.raises(EngineDead, match=f"rank {CULPRIT}"):
            call()
    executor.close()


def test_a_hang_takes_the_group_down_in_five_seconds_by_default() -> None:
    executor = start(rank_timeout_s=ParallelConfig().rank_timeout_s)
    started = time.monotonic()
    with pytest.raises(EngineDead, match=rf"^rank {CULPRIT} .* hangs: no progress for 3.5 s"):
        executor.execute(first_step(STALL))
    assert time.monotonic() - started < 5.0
    assert psutil.Process().children() == []


@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_long_step_is_no_hang(num_stages: int) -> None:
    """Say a prefill between two collectives, or on the only rank of a stage, which has no collectives."""
    assert LINGER_S > TIMEOUT_S + 1
    executor = start(num_ranks=1, num_stages=num_stages)
    assert len(executor.execute(first_step(LINGER)).sampled) == 1
    executor.close()


@pytest.mark.parametrize(("trouble", "words"), [(STALL, "no progress"), (DIE, "died: signal 9")])
def test_a_rank_of_an_earlier_stage_is_named_not_those_that_wait_for_its_hand_over(trouble: int, words: str) -> None:
    executor = start(num_stages=2)
    with pytest.raises(EngineDead, match=rf"^rank {CULPRIT} \(pid \d+ on 127.0.0.1\) .*{words}"):
        executor.execute(first_step(trouble))


def test_ranks_that_ended_together_for_want_of_another_are_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine looks when they have all reported and exited, but the rank that they lost has not yet."""
    executor = start(num_stages=2)
    poll = executor._poll

    def look_late(timeout_s: float) -> list[tuple[int, FromRank]]:
        for rank, process in enumerate(executor._processes):
            if rank != CULPRIT:
                process.exit_reason(DEADLINE_S)
        return poll(timeout_s)

    monkeypatch.setattr(executor, "_poll", look_late)
    monkeypatch.setattr("shoal_replica.ranks.executor.BLAME_S", DEADLINE_S)
    with pytest.raises(EngineDead, match=rf"^rank {CULPRIT} \(pid \d+ on 127.0.0.1\) died: signal 9"):
        executor.execute(first_step(DIE_LAST))


@pytest.mark.parametrize(
    ("folder", "error", "words"),
    [
        ("refuse", ConfigError, f"rank {CULPRIT} .*: model: tensor 'x' is missing"),
        ("exit", EngineDead, f"rank {CULPRIT} .*died: exit status 3"),
    ],
)
def test_a_rank_that_cannot_start_is_named(folder: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        start(folder)


def test_a_rank_that_never_calls_is_named() -> None:
    settings = config()
    script = "import json, sys, time; exit(7) if json.loads(sys.stdin.readline())['rank'] == 1 else time.sleep(60)"
    with pytest.raises(EngineDead, match=r"rank 1 ended before it was ready: exit status 7"):
        RankExecutor(settings, LocalRanks(settings.parallel, (sys.executable, "-c", script)), DEADLINE_S)
    sleeper = (sys.executable, "-c", "import time; time.sleep(60)")
    with pytest.raises(EngineDead, match="rank 0 did not call in time"):
        RankExecutor(settings, LocalRanks(settings.parallel, sleeper), 0.5)


class Intruder(LocalRanks):
    """Connects to the engine before any rank does, with greetings that no rank sends."""

    GREETINGS = (
        b"GET / HTTP/1.1\r\n\r\n",
        (MAX_FRAME_BYTES + 9).to_bytes(4, "big"),
        b"\x00\x00\x00\x01\xc0",
        b"",
        frame(Hello(0, "guessed", 1, "127.0.0.1", 1)),
        frame(Ready()),
    )

    def launch(self, rank: int, port: int, key: str) -> RankProcess:
        for greeting in self.GREETINGS:
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(greeting)
        return super().launch(rank, port, key)


def test_a_stranger_is_turned_away() -> None:
    settings = config()
    executor = RankExecutor(settings, Intruder(settings.parallel, FAKE_RANK), DEADLINE_S)
    request = make_request(max_tokens=3)
    assert generate(executor, request)[request.request_id] == expected_tokens(request.prompt_token_ids, 3)
    executor.close()


class Dawdler(LocalRanks):
    """Before any rank does, something connects that takes its time to say who it is: a byte now and then."""

    def launch(self, rank: int, port: int, key: str) -> RankProcess:
        if rank == 0:
            connection = socket.create_connection(("127.0.0.1", port))
            connection.sendall((2**10).to_bytes(4, "big"))
            threading.Thread(target=self._dawdle, args=(connection,)).start()
        return super().launch(rank, port, key)

    @staticmethod
    def _dawdle(connection: socket.socket) -> None:
        with connection:
            try:
                for _ in range(1200):
                    connection.sendall(b"\0")
                    time.sleep(0.05)
            except OSError:
                pass


def test_a_stranger_that_takes_its_time_keeps_ranks_waiting_only_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_module, "HELLO_S", 0.5)
    settings, began_s = config(), time.monotonic()
    executor = RankExecutor(settings, Dawdler(settings.parallel, FAKE_RANK), DEADLINE_S)
    assert time.monotonic() - began_s < 30.0, "it goes on for a minute"
    request = make_request(max_tokens=3)
    assert generate(executor, request)[request.request_id] == expected_tokens(request.prompt_token_ids, 3)
    executor.close()


def test_ranks_end_when_their_engine_is_gone() -> None:
    """As after a SIGKILL of the engine: its sockets close, and nothing tells the ranks to end."""
    executor = start()
    children = psutil.Process().children()
    for link in executor._links:
        link.close()
    _, alive = psutil.wait_procs(children, timeout=DEADLINE_S)
    assert alive == []
    executor.close()


async def test_a_rank_that_dies_in_an_idle_engine_is_noticed() -> None:
    executor = await asyncio.to_thread(start)
    scheduler, _ = make_scheduler()
    engine = Engine(scheduler, executor, heartbeat_s=0.1)
    engine.start()
    os.kill(psutil.Process().children()[CULPRIT].pid, signal.SIGKILL)
    await until(lambda: _raises(engine.check_health))
    with pytest.raises(EngineDead, match=f"rank {CULPRIT} .*died: signal 9"):
        engine.add(make_request())
    await engine.stop()


async def test_a_rank_that_dies_in_a_step_ends_the_requests() -> None:
    executor = await asyncio.to_thread(start)
    scheduler, _ = make_scheduler()
    engine = Engine(scheduler, executor)
    reasons: list[FinishReason | None] = []
    engine.subscribe(lambda report: reasons.extend(delta.finish_reason for delta in report.deltas))
    engine.start()
    async with asyncio.timeout(DEADLINE_S):
        await engine.add(make_request("r", (DIE, 5)))
    assert reasons == [FinishReason.ERROR]
    with pytest.raises(EngineDead, match=f"rank {CULPRIT}"):
        engine.check_health()
    await engine.stop()


def _raises(call: Callable[[], None]) -> bool:
    try:
        call()
    except EngineDead:
        return True
    return False


def test_too_few_visible_devices_are_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "3")
    ranks = LocalRanks(ParallelConfig(device="npu", tensor_parallel_size=2))
    assert ranks._environment(0)["ASCEND_RT_VISIBLE_DEVICES"] == "3"
    with pytest.raises(ConfigError, match="ASCEND_RT_VISIBLE_DEVICES: got '3'; must name 2 devices"):
        ranks._environment(1)
