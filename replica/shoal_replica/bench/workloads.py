"""The workloads that every engine is given, and the figures computed from its answers."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shoal_replica.bench.floor import Floor
from shoal_replica.errors import InvalidArgument
from shoal_replica.model_config import ModelConfig

BATCH, PROMPT_LEN, OUTPUT_LEN = 64, 256, 64
STREAM_PROMPT_LEN, STREAM_OUTPUT_LEN = 32, 128
FIRST_TOKEN_PROMPT_LEN = 1024
SHARERS, SHARED_LEN, OWN_LEN, SHARED_OUTPUT_LEN = 32, 768, 64, 32
FIRST_ORDINARY_TOKEN = 100
WARM_UP_PROMPTS, WARM_UP_TOKENS = 16, 4
DRAWN = {"temperature": 0.8, "top_p": 0.9}
BEAMS = {"beam_width": 4}
DEFAULT_WORKLOADS = "abcdefghi"
ALL_WORKLOADS = DEFAULT_WORKLOADS + "s"


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table: its title, its unit, and whether higher is better."""

    title: str
    unit: str
    more_is_better: bool = False


ROWS = {
    "a": Row("a  64 x (256 in, 64 out)", "tokens/s", more_is_better=True),
    "b": Row("b  1 x (32 in, 128 out)", "ms/token"),
    "c": Row("c  first token of 1024", "ms"),
    "d_cold": Row("d  32 x (768 shared + 64, 32 out), cold", "s"),
    "d_warm": Row("d  the same, warm", "s"),
    "e": Row("e  ready from a cold process", "s"),
    "f": Row("f  peak memory", "MB"),
    "f_beyond": Row("f  beyond weights and KV blocks used", "MB"),
    "g": Row("g  outside the forward, batch 64", "%"),
    "h": Row("h  as a, drawn with top-p", "tokens/s", more_is_better=True),
    "i": Row("i  4 beams of (256 in, 64 out)", "ms"),
}


@dataclass(frozen=True, slots=True)
class Request:
    """A batch of prompts, the number of tokens to generate for each, and how they are chosen: greedily, or as ``how``
    says (arguments of the adapters' ``generate``).
    """

    prompts: Sequence[Sequence[int]]
    max_tokens: int
    how: Mapping[str, float] = field(default_factory=dict)

    def message(self, *, steps: bool) -> dict[str, Any]:
        """The message to a worker; ``steps`` asks for step timings, too."""
        asked = {"op": "generate", "prompts": self.prompts, "max_tokens": self.max_tokens, "how": dict(self.how)}
        return asked | ({"steps": True} if steps else {})


Answers = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests of a workload, made from fresh prompts and sent one after the other; how to compute figures from the
    answers, by row; and the floors of these figures.
    """

    requests: Callable[[Prompts], list[Request]]
    figures: Callable[[Answers], dict[str, float]]
    floors: Callable[[Floor, ModelConfig], dict[str, float]]

    def warm_up(self, prompts: Prompts) -> list[Request]:
        """The same requests with fewer prompts and tokens."""
        return [
            replace(
                request, prompts=request.prompts[:WARM_UP_PROMPTS], max_tokens=min(request.max_tokens, WARM_UP_TOKENS)
            )
            for request in self.requests(prompts)
        ]


class Prompts:
    """Prompts of random ordinary tokens. Equal seeds give equal prompts, so all engines of a round get the same."""

    def __init__(self, vocab_size: int, seed: str) -> None:
        self._high = vocab_size - 1
        self._random = random.Random(seed)

    def batch(self, count: int, length: int) -> list[list[int]]:
        return [[self._random.randint(FIRST_ORDINARY_TOKEN, self._high) for _ in range(length)] for _ in range(count)]


def throughput() -> Workload:
    """(a) Throughput of a large batch; (g) is computed from its steps, where the engine reports them."""

    def figures(answers: Answers) -> dict[str, float]:
        (answer,) = answers
        steps = [s for s in answer.get("steps", ()) if s["num_seqs"] == s["num_new_tokens"] == BATCH]
        seconds, forward = sum(s["seconds"] for s in steps), sum(s["forward_s"] for s in steps)
        found = {"a": BATCH * OUTPUT_LEN / answer["seconds"]}
        return found | ({"g": 100 * (1 - forward / seconds)} if steps else {})

    return Workload(
        lambda prompts: [Request(prompts.batch(BATCH, PROMPT_LEN), OUTPUT_LEN)],
        figures,
        lambda floor, model: {"a": BATCH * OUTPUT_LEN / floor.batch_s(model, BATCH, PROMPT_LEN, OUTPUT_LEN)},
    )


def stream() -> Workload:
    """(b) A single sequence: milliseconds per token after the first, whose time is measured by a request of its own."""

    def requests(prompts: Prompts) -> list[Request]:
        return [Request(prompts.batch(1, STREAM_PROMPT_LEN), n) for n in (1, STREAM_OUTPUT_LEN)]

    def figures(answers: Answers) -> dict[str, float]:
        first, whole = (answer["seconds"] for answer in answers)
        return {"b": 1e3 * (whole - first) / (STREAM_OUTPUT_LEN - 1)}

    return Workload(
        requests,
        figures,
        lambda floor, model: {"b": 1e3 * floor.decode_s(model, 1, STREAM_PROMPT_LEN + STREAM_OUTPUT_LEN // 2)},
    )


def first_token() -> Workload:
    """(c) Milliseconds to the first token of a long prompt."""
    return Workload(
        lambda prompts: [Request(prompts.batch(1, FIRST_TOKEN_PROMPT_LEN), 1)],
        lambda answers: {"c": 1e3 * answers[0]["seconds"]},
        lambda floor, model: {"c": 1e3 * floor.prefill_s(model, FIRST_TOKEN_PROMPT_LEN)},
    )


def shared_prefix() -> Workload:
    """(d) Prompts with a shared prefix: first cold, then again with the prefix cached by the batch before."""

    def requests(prompts: Prompts) -> list[Request]:
        (shared,) = prompts.batch(1, SHARED_LEN)
        return [Request([shared + own for own in prompts.batch(SHARERS, OWN_LEN)], SHARED_OUTPUT_LEN) for _ in range(2)]

    def floors(floor: Floor, model: ModelConfig) -> dict[str, float]:
        warm = floor.batch_s(model, SHARERS, SHARED_LEN + OWN_LEN, SHARED_OUTPUT_LEN, shared=SHARED_LEN)
        return {"d_cold": floor.prefill_s(model, SHARED_LEN) + warm, "d_warm": warm}

    return Workload(
        requests,
        lambda answers: {"d_cold": answers[0]["seconds"], "d_warm": answers[1]["seconds"]},
        floors,
    )


def drawn() -> Workload:
    """(h) Throughput of a large batch whose tokens are drawn, as most clients ask for."""
    return Workload(
        lambda prompts: [Request(prompts.batch(BATCH, PROMPT_LEN), OUTPUT_LEN, DRAWN)],
        lambda answers: {"h": BATCH * OUTPUT_LEN / answers[0]["seconds"]},
        lambda floor, model: {"h": BATCH * OUTPUT_LEN / floor.batch_s(model, BATCH, PROMPT_LEN, OUTPUT_LEN)},
    )


def beams() -> Workload:
    """(i) Milliseconds of a beam search."""
    width = BEAMS["beam_width"]

    def floors(floor: Floor, model: ModelConfig) -> dict[str, float]:
        decode_s = (OUTPUT_LEN - 1) * floor.decode_s(model, width, PROMPT_LEN + OUTPUT_LEN // 2, PROMPT_LEN)
        return {"i": 1e3 * (floor.prefill_s(model, PROMPT_LEN) + decode_s)}

    return Workload(
        lambda prompts: [Request(prompts.batch(1, PROMPT_LEN), OUTPUT_LEN, BEAMS)],
        lambda answers: {"i": 1e3 * answers[0]["seconds"]},
        floors,
    )


GENERATED = {
    "a": throughput(), "b": stream(), "c": first_token(), "d": shared_prefix(), "h": drawn(), "i": beams(),
}  # fmt: skip


def check_workloads(letters: str, field: str = "--workloads") -> str:
    """The letters in canonical order without repeats; (g) implies (a).

    Raises:
        InvalidArgument: a letter is not a workload, or there is none.
    """
    if not letters or set(letters) - set(ALL_WORKLOADS):
        raise InvalidArgument(field, letters, f"must be letters of {ALL_WORKLOADS!r}")
    chosen = letters + ("a" if "g" in letters else "")
    return "".join(letter for letter in ALL_WORKLOADS if letter in chosen)
