"""Synthetic arrivals at a changing rate: a ramp, a square wave, bursts."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import Literal

from shoal_cluster.sim.workload import FIRST_UNIQUE_TOKEN_ID, SimRequest

Shape = Literal["ramp", "square", "bursts"]
SHAPES: tuple[Shape, ...] = ("ramp", "square", "bursts")

# Lengths as a chat service sees them: log-normal prompts, exponential outputs.
PROMPT_MEDIAN, PROMPT_SIGMA, MAX_PROMPT = 900.0, 0.7, 8000
OUTPUT_MEAN, MAX_OUTPUT = 200.0, 1000

RAMP_S, RAMP_LOW, RAMP_HIGH = 480.0, 1.0, 15.0
SQUARE_HALF_S, SQUARE_LOW, SQUARE_HIGH, NUM_WAVES = 600.0, 2.0, 12.0, 2
BURST_RATE, BURST_S, CALM_RATE, CALM_S, BURSTS_S = 15.0, 60.0, 0.02, 300.0, 3600.0


def arrivals(shape: Shape, seed: int) -> list[SimRequest]:
    """Poisson arrivals whose rate follows ``shape``; prompts share no prefix.

    ramp: from 1 to 15 requests/s over 480 s, back down over the next 480 s, then 240 s at 1. square: two waves of 600 s
    at 2 requests/s followed by 600 s at 12. bursts: for an hour, bursts at 15 requests/s that last 60 s on average and
    are 300 s apart on average.
    """
    rng = Random(seed)
    if shape == "ramp":
        return _varying(_ramp, RAMP_HIGH, 2 * RAMP_S + 240, rng)
    if shape == "square":
        return _varying(_square, SQUARE_HIGH, 2 * NUM_WAVES * SQUARE_HALF_S, rng)
    return _varying(_bursts(rng), BURST_RATE, BURSTS_S, rng)


def _varying(rate: Callable[[float], float], highest: float, duration_s: float, rng: Random) -> list[SimRequest]:
    """A Poisson process of varying rate, made by thinning one that has the ``highest`` rate."""
    requests: list[SimRequest] = []
    now = rng.expovariate(highest)
    while now < duration_s:
        if rng.random() * highest < rate(now):
            prompt = min(MAX_PROMPT, max(1, round(rng.lognormvariate(math.log(PROMPT_MEDIAN), PROMPT_SIGMA))))
            output = min(MAX_OUTPUT, max(1, round(rng.expovariate(1 / OUTPUT_MEAN))))
            number = len(requests)
            runs = ((FIRST_UNIQUE_TOKEN_ID + number, prompt),)
            requests.append(SimRequest(f"request-{number}", now, runs, output))
        now += rng.expovariate(highest)
    return requests


def _ramp(now: float) -> float:
    distance = abs(now - RAMP_S) / RAMP_S
    return RAMP_LOW + (RAMP_HIGH - RAMP_LOW) * max(0.0, 1 - distance)


def _square(now: float) -> float:
    return SQUARE_HIGH if int(now / SQUARE_HALF_S) % 2 else SQUARE_LOW


def _bursts(rng: Random) -> Callable[[float], float]:
    """Alternates between calm and burst, each of random length."""
    edges = [rng.expovariate(1 / CALM_S)]
    while edges[-1] < BURSTS_S:
        edges.append(edges[-1] + rng.expovariate(1 / (BURST_S if len(edges) % 2 else CALM_S)))

    def rate(now: float) -> float:
        return BURST_RATE if sum(edge <= now for edge in edges) % 2 else CALM_RATE

    return rate
