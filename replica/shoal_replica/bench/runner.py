"""A benchmark run: load every worker once, then do rounds in which the contenders take turns at each workload."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from shoal_replica.bench import steps
from shoal_replica.bench.contender import FLOOR, SHOAL, Contender
from shoal_replica.bench.floor import Floor
from shoal_replica.bench.processor import ForeignShare
from shoal_replica.bench.worker_process import WorkerProcess, running
from shoal_replica.bench.workloads import BATCH, GENERATED, PROMPT_LEN, Prompts, Request
from shoal_replica.errors import ConfigError, ShoalError, Unavailable
from shoal_replica.model_config import ModelConfig

MB = 1e6
MAX_READ_BYTES = 1 << 30  # the floor meter reads no more, even if the weights are larger


@dataclass(frozen=True, slots=True)
class Sample:
    """One figure of a row and contender, in one round.

    Attributes:
        foreign: share of a core that other processes used meanwhile.
        floor: the better of the floors measured just before and just after; None if the row has no floor.
    """

    row: str
    contender: str
    round: int
    value: float
    foreign: float
    floor: Floor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to run. ``timeout_s`` limits one answer of a worker, ``start_timeout_s`` its loading."""

    workloads: str
    repeats: int
    seed: int
    timeout_s: float
    start_timeout_s: float


@dataclass(slots=True)
class Outcome:
    """The results of a run. ``failures`` says which peers and variants dropped out, and why; their earlier figures are
    kept.
    """

    samples: list[Sample] = field(default_factory=list)
    floors: list[Floor] = field(default_factory=list)
    hellos: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    steps: steps.StepTable = field(default_factory=steps.StepTable)

    def model(self, name: str) -> ModelConfig:
        """The model as one of Shoal's engines resolved it."""
        return msgspec.convert(self.hellos[name]["info"]["model"], ModelConfig)


class Runner:
    """One run over ``contenders``, the floor meter and Shoal first.

    All workers except the one whose turn it is are stopped, so that their spinning threads take no CPU time from it.
    """

    def __init__(
        self, plan: Plan, contenders: Sequence[Contender], on_progress: Callable[[str], None] = lambda text: None
    ) -> None:
        """Raises ConfigError for a contender that has none of the plan's workloads."""
        self._plan = plan
        self._contenders = contenders
        self._on_progress = on_progress
        self.outcome = Outcome()
        self._workers: dict[str, WorkerProcess] = {}
        self._last_floor = Floor(0.0, 0.0)
        for contender in contenders:
            if contender.name != FLOOR and not self._chosen(contender):
                raise ConfigError(
                    f"--workloads: got {plan.workloads!r}; {contender.name} has only {contender.workloads!r}, "
                    f"so nothing of it would be measured"
                )

    async def run(self) -> Outcome:
        """Start all workers, warm them up, do the rounds, and end them.

        Raises:
            ConfigError: a worker cannot be loaded.
            Unavailable, DeadlineExceeded: Shoal's worker or the floor meter failed, or any worker while loading.
        """
        async with contextlib.AsyncExitStack() as stack:
            for contender in self._contenders:
                await self._start(contender, stack)
            for contender in self._contenders:
                await self._guarded(contender, self._warm_up(contender), "warming up")
            for number in range(self._plan.repeats):
                await self._round(number)
            for contender in self._contenders:
                if "f" in self._chosen(contender):
                    await self._guarded(contender, self._memory(contender), "memory")
        return self.outcome

    async def _start(self, contender: Contender, stack: contextlib.AsyncExitStack) -> None:
        self._on_progress(f"loading {contender.name}")
        worker = await stack.enter_async_context(running(contender, self._plan.start_timeout_s))
        worker.pause()
        self._workers[contender.name] = worker
        self.outcome.hellos[contender.name] = worker.hello
        if "e" in self._chosen(contender) and not contender.is_shoal:
            # Peers may take minutes to load, so this start is their only sample; Shoal is started again in each round.
            self.outcome.samples.append(Sample("e", contender.name, 0, worker.ready_s, worker.ready_foreign))

    async def _round(self, number: int) -> None:
        for letter in self._plan.workloads:
            if letter in GENERATED:
                await self._measure_floor()
            for contender in self._contenders:
                if letter in self._chosen(contender) and self._is_repeated(letter, contender):
                    self._on_progress(f"round {number + 1} of {self._plan.repeats}: {contender.name} ({letter})")
                    await self._guarded(contender, self._repetition(contender, letter, number), f"({letter})")

    @staticmethod
    def _is_repeated(letter: str, contender: Contender) -> bool:
        """Whether a workload runs in every round: (f) is read once at the end, (g) is a by-product of (a), and peers
        are loaded only once.
        """
        return letter not in "fg" and (letter != "e" or contender.is_shoal)

    async def _guarded(self, contender: Contender, work: Any, what: str) -> None:
        """Do ``work``. A peer or variant that fails drops out, and the run goes on; without Shoal or the floor meter
        there is nothing to compare, so their errors are raised.
        """
        if contender.name in self.outcome.failures:
            work.close()
            return
        try:
            await work
        except ShoalError as error:
            if contender.name in (SHOAL, FLOOR):
                raise
            self.outcome.failures[contender.name] = f"{what}: {error}"
            self._workers[contender.name].kill()

    async def _warm_up(self, contender: Contender) -> None:
        self._on_progress(f"warming up {contender.name}")
        prompts = self._prompts("warm-up", 0)
        for letter, workload in GENERATED.items():
            if letter in self._chosen(contender):
                for request in workload.warm_up(prompts):
                    await self._turn(contender.name, request.message(steps=False))

    async def _repetition(self, contender: Contender, letter: str, number: int) -> None:
        name, prompts = contender.name, self._prompts(letter, number)
        worker = self._workers[name]
        if letter == "e" and contender.is_shoal:
            async with running(contender, self._plan.start_timeout_s):
                pass  # an unmeasured start, since peers push its files out of the page cache between rounds
            async with running(contender, self._plan.start_timeout_s) as fresh:
                self._note({"e": fresh.ready_s}, name, number, fresh.ready_foreign)
        elif letter == "s":
            budget = self.outcome.hellos[name]["info"]["scheduler"]["max_num_batched_tokens"]
            requests = steps.requests(prompts, budget)
            self.outcome.steps.left_out = steps.left_out(budget)
            self.outcome.steps.add(requests, [await self._generate(name, request, steps=True) for request in requests])
        elif letter in GENERATED:
            workload = GENERATED[letter]
            foreign = ForeignShare(worker.cpu_s)
            answers = [
                await self._generate(name, request, steps=contender.is_shoal) for request in workload.requests(prompts)
            ]
            share, before = foreign.read(), self._last_floor
            floor = Floor.best((before, await self._measure_floor()))
            self._note(workload.figures(answers), name, number, share, floor)

    async def _measure_floor(self) -> Floor:
        """Measure the floor now, and keep it as the one before the next repetition."""
        read_bytes = min(self.outcome.hellos[SHOAL]["info"]["weight_bytes"], MAX_READ_BYTES)
        answer = await self._turn(FLOOR, {"op": "floor", "read_bytes": read_bytes})
        self._last_floor = Floor(answer["read_bytes_s"], answer["gemm_flops_s"])
        self.outcome.floors.append(self._last_floor)
        return self._last_floor

    async def _memory(self, contender: Contender) -> None:
        """Note the peak memory of the whole run, which includes at least one batch of (a); for Shoal also the part
        beyond the weights and the KV blocks used.
        """
        name = contender.name
        if "a" not in self._chosen(contender):
            await self._generate(name, Request(self._prompts("f", 0).batch(BATCH, PROMPT_LEN), 2), steps=False)
        peak = self._workers[name].peak_bytes()
        figures = {"f": peak / MB}
        if contender.is_shoal:
            kv_bytes = (await self._turn(name, {"op": "kv_bytes"}))["kv_bytes"]
            figures["f_beyond"] = (peak - self.outcome.hellos[name]["info"]["weight_bytes"] - kv_bytes) / MB
        self._note(figures, name, 0, 0.0)

    async def _generate(self, name: str, request: Request, *, steps: bool) -> dict[str, Any]:
        answer = await self._turn(name, request.message(steps=steps))
        expected = [request.max_tokens] * len(request.prompts)
        if answer.get("num_tokens") != expected:
            raise Unavailable(
                f"{name}: gave {answer.get('num_tokens')} tokens where {request.max_tokens} each were asked"
            )
        return answer

    async def _turn(self, name: str, message: dict[str, Any]) -> dict[str, Any]:
        worker = self._workers[name]
        worker.resume()
        try:
            return await worker.ask(message, self._plan.timeout_s)
        finally:
            worker.pause()

    def _note(
        self, figures: Mapping[str, float], name: str, number: int, foreign: float, floor: Floor | None = None
    ) -> None:
        self.outcome.samples.extend(Sample(row, name, number, value, foreign, floor) for row, value in figures.items())

    def _prompts(self, letter: str, number: int) -> Prompts:
        return Prompts(self.outcome.model(SHOAL).vocab_size, f"{self._plan.seed}/{letter}/{number}")

    def _chosen(self, contender: Contender) -> str:
        return "".join(letter for letter in self._plan.workloads if letter in contender.workloads)
