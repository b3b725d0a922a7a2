"""Step times fitted to measurements: single steps of ``shoal bench engine --json``, or replica stats of a live run."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal_cluster.policies.objective import PrefillTime
from shoal_cluster.sim.latency import StepTime
from shoal_replica.errors import ConfigError, NotFound
from shoal_replica.stats import ReplicaStats

MAX_TOKENS_PER_S = 1e12
MIN_INTERVALS = 10
HOW = "`shoal bench engine --workloads s --json FILE` writes them"


def fit_step_time(path: Path) -> StepTime:
    """Fit a StepTime to the steps in a benchmark's JSON: least squares on relative errors, no coefficient negative.

    Raises:
        NotFound: no such file.
        ConfigError: the file has no steps.
    """
    if not path.is_file():
        raise NotFound(f"model_from: no file {str(path)!r}")
    try:
        steps: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["steps"]
        prefill = [
            (_number(p, "num_new_tokens", 1), _number(p, "num_computed_tokens", 0), _median(p))
            for p in steps["prefill"]
        ]
        decode = [(_number(d, "num_seqs", 1), _number(d, "context", 0), _median(d)) for d in steps["decode"]]
        return _fit(prefill, decode)
    except OSError as error:
        raise ConfigError(f"model_from: {path.name} cannot be read ({error.strerror})") from None
    except (ArithmeticError, IndexError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise ConfigError(f"model_from: {path.name} holds no steps ({error!r}); {HOW}") from None


def fit_live(told: Sequence[tuple[ReplicaStats, ReplicaStats]]) -> StepTime:
    """Fit a StepTime to pairs of stats, an earlier and a later one of the same replica: least squares of the busy time
    between them on the number of steps, of prompt tokens computed and of tokens generated.

    The fit therefore holds for replicas that share a machine, with whatever else runs there, at about the measured
    load. The totals count a whole prompt when it starts, but time only when a step ends, so prompt tokens still to be
    computed are subtracted. Pairs with waiting requests are skipped: their prompts are not in the totals yet.

    Simulated steps decode one token of each sequence. Where guessed tokens (``num_speculative_tokens``) were right,
    live steps have decoded more, so a step, also one of a prompt alone, is taken to be shorter by their share.

    Raises:
        ConfigError: too few pairs, or pairs too alike to separate the cost of a step, a prompt token and an output
            token.
    """
    used = [
        (before, after)
        for before, after in told
        if after.num_steps > before.num_steps and not before.num_waiting + after.num_waiting
    ]
    rows = [
        (
            after.num_steps - before.num_steps,
            _num_computed(after) - _num_computed(before),
            after.num_generated_tokens - before.num_generated_tokens,
            after.busy_s - before.busy_s,
        )
        for before, after in used
    ]
    if len(rows) < MIN_INTERVALS:
        raise ConfigError(f"live: {len(rows)} intervals with steps in them; must be at least {MIN_INTERVALS}")
    steps, new, generated, busy_s = np.array(rows, np.float64).T
    if np.linalg.matrix_rank(np.stack([steps, new, generated], axis=1)) < 3:
        raise ConfigError("live: the intervals are too alike to tell steps, prompts and outputs apart")
    step_s, token_s, sequence_s = _least_squares([steps, new, generated], busy_s, relative=False)
    num_right = sum(after.num_accepted_tokens - before.num_accepted_tokens for before, after in used)
    return StepTime(
        prefill=PrefillTime(tokens_per_s=1 / max(token_s, 1 / MAX_TOKENS_PER_S), pair_s=0.0),
        step_s=step_s * (1 - num_right / float(generated.sum())),
        decode_s=0.0,
        decode_sequence_s=sequence_s,
    )


def _num_computed(stats: ReplicaStats) -> int:
    """Prompt tokens computed in the steps so far, less one token for each decoding sequence."""
    return stats.num_prompt_tokens - stats.num_cached_tokens - stats.num_waiting_tokens


def _number(step: dict[str, Any], name: str, least: float) -> float:
    """Raises ValueError unless it is a finite number of at least ``least``."""
    number = float(step[name])
    if not least <= number < math.inf:
        raise ValueError(f"{name}: got {number:g}; must be at least {least:g}")
    return number


def _median(step: dict[str, Any]) -> float:
    seconds = float(statistics.median(step["seconds"]))
    if not 0 < seconds < math.inf:
        raise ValueError(f"seconds: got {seconds:g}; must be above 0")
    return seconds


def _fit(prefill: list[tuple[float, float, float]], decode: list[tuple[float, float, float]]) -> StepTime:
    new, computed, prefill_s = np.array(prefill, np.float64).T
    base_s, token_s, pair_s = _least_squares([np.ones_like(new), new, new * computed + new * (new + 1) / 2], prefill_s)
    num_seqs, context, step_s = np.array(decode, np.float64).T
    decode_s, sequence_s, context_s = _least_squares([np.ones_like(num_seqs), num_seqs, num_seqs * context], step_s)
    return StepTime(
        prefill=PrefillTime(tokens_per_s=1 / max(token_s, 1 / MAX_TOKENS_PER_S), pair_s=pair_s),
        step_s=min(base_s, decode_s),
        prefill_s=max(0.0, base_s - decode_s),
        decode_s=max(0.0, decode_s - base_s),
        decode_sequence_s=sequence_s,
        decode_context_s=context_s,
    )


def _least_squares(
    columns: list[NDArray[np.float64]], seconds: NDArray[np.float64], relative: bool = True
) -> list[float]:
    """Non-negative coefficients: the most negative one is dropped (0) and the rest fitted again, until none is left."""
    kept = list(range(len(columns)))
    weights = 1 / seconds if relative else np.ones_like(seconds)
    while kept:
        matrix = np.stack([columns[i] * weights for i in kept], axis=1)
        found = np.linalg.lstsq(matrix, seconds * weights, rcond=None)[0]
        if found.min() >= 0:
            coefficients = dict(zip(kept, found.tolist(), strict=True))
            return [coefficients.get(i, 0.0) for i in range(len(columns))]
        del kept[int(found.argmin())]
    return [0.0] * len(columns)
