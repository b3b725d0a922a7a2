"""Workload (s): durations of single steps, to fit step-time models such as the simulator's. Only Shoal runs it.

``steps`` in the result holds

* ``prefill``: steps with one prompt chunk, of ``num_new_tokens`` tokens after ``num_computed_tokens`` computed ones;
* ``decode``: steps with one token for each of ``num_seqs`` sequences, at ``context`` computed tokens each on average.

``seconds`` has the duration of the whole step (scheduling, forward, sampling and update), a value per repetition;
``forward_s`` that of the forward alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shoal_replica.bench.workloads import Answers, Prompts, Request

PREFILL_LENS = (16, 64, 256, 512, 1024, 1536)
DECODE_SHAPES = ((1, 64), (1, 1024), (8, 64), (8, 512), (32, 64), (32, 256), (64, 64), (64, 256))  # sequences, context
DECODE_STEPS = 16


def requests(prompts: Prompts, max_num_batched_tokens: int) -> list[Request]:
    """The prompts whose chunks are measured, then the batches whose decode steps are measured.

    While the prompts of a batch are being computed, the first ones already decode; outputs are long enough for
    DECODE_STEPS steps with all sequences after that.
    """
    found = [Request(prompts.batch(1, length), 1) for length in PREFILL_LENS]
    for num_seqs, context in DECODE_SHAPES:
        if num_seqs < max_num_batched_tokens:
            num_prefills = num_seqs * context // (max_num_batched_tokens - num_seqs) + 1
            found.append(Request(prompts.batch(num_seqs, context), num_prefills + DECODE_STEPS + 1))
    return found


def left_out(max_num_batched_tokens: int) -> list[str]:
    """The batches that are not measured, in words: decodes of all their sequences would leave no room in a step for the
    prompt of the last.
    """
    return [f"decode of {n} at {context}" for n, context in DECODE_SHAPES if n >= max_num_batched_tokens]


class StepTable:
    """Collects the step times of all repetitions. ``left_out``: what was not measured, in words."""

    def __init__(self) -> None:
        self.left_out: list[str] = []
        self._prefill: dict[tuple[int, int], list[Mapping[str, float]]] = {}
        self._decode: dict[tuple[int, float], list[Mapping[str, float]]] = {}

    def add(self, requests: Sequence[Request], answers: Answers) -> None:
        """Add one repetition. A batch whose sequences never decoded all together is left out."""
        for request, answer in zip(requests, answers, strict=True):
            num_seqs = len(request.prompts)
            if request.max_tokens == 1:
                for step in answer["steps"]:
                    self._prefill.setdefault((step["num_new_tokens"], step["num_computed_tokens"]), []).append(step)
            elif steps := [s for s in answer["steps"] if s["num_seqs"] == s["num_new_tokens"] == num_seqs]:
                context = statistics.mean(s["num_computed_tokens"] / num_seqs for s in steps)
                medians = {key: statistics.median(s[key] for s in steps) for key in ("seconds", "forward_s")}
                self._decode.setdefault((num_seqs, context), []).append(medians)

    def shapes(self) -> Iterator[tuple[str, list[float]]]:
        """Each shape of a step in words, and the seconds of its steps."""
        for (new, computed), steps in self._prefill.items():
            yield f"{new} prompt tokens after {computed}", _times(steps)["seconds"]
        for (num_seqs, context), steps in self._decode.items():
            yield f"decode of {num_seqs} at {context:.0f}", _times(steps)["seconds"]

    def as_json(self) -> dict[str, list[Any]]:
        return {
            "prefill": [
                {"num_new_tokens": new, "num_computed_tokens": computed} | _times(steps)
                for (new, computed), steps in self._prefill.items()
            ],
            "decode": [
                {"num_seqs": num_seqs, "context": context} | _times(steps)
                for (num_seqs, context), steps in self._decode.items()
            ],
            "left_out": self.left_out,
        }


def _times(steps: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    return {key: [step[key] for step in steps] for key in ("seconds", "forward_s")}
