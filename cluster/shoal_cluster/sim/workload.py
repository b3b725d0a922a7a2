"""Requests to simulate: arrivals, and prompts whose shared prefixes are known."""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from random import Random

import numpy as np

from shoal_replica.errors import ConfigError
from shoal_replica.prefix_cache import DIGEST_BYTES, BlockHash

_PIECE, _ROUND = struct.Struct("<QI"), struct.Struct("<Q")
FIRST_UNIQUE_TOKEN_ID = 2**30  # above the block ids of a trace
MAX_REQUESTS = 10_000_000
MAX_ARRIVAL_S = 366 * 86_400.0  # simulated time is not free without requests: idle replicas send heartbeats


@dataclass(frozen=True, slots=True)
class SimRequest:
    """One arrival.

    ``prompt_runs`` is the prompt as (token id, count) runs: prompts that begin with the same runs share a prefix. The
    prompts of a trace are thus never all in memory token by token. ``max_tokens`` is the client's limit, where that is
    known. Requests of different ``round`` share no prefix, whatever their prompts.

    Raises:
        ConfigError: the prompt or the output has no token.
    """

    request_id: str
    arrival_s: float
    prompt_runs: tuple[tuple[int, int], ...]
    num_output_tokens: int
    tenant: str = ""
    max_tokens: int | None = None
    round: int = 0

    def __post_init__(self) -> None:
        for name, count in (("prompt_runs", self.num_prompt_tokens), ("num_output_tokens", self.num_output_tokens)):
            if count < 1:
                raise ConfigError(f"{name}: got {count} tokens in request {self.request_id!r}; must be at least 1")

    @property
    def num_prompt_tokens(self) -> int:
        return sum(count for _, count in self.prompt_runs)

    def prompt_token_ids(self) -> array[int]:
        token_ids, counts = zip(*self.prompt_runs, strict=True)
        return array("I", np.repeat(np.array(token_ids, np.uint32), counts).tobytes())

    def block_hashes(self, block_size: int) -> tuple[BlockHash, ...]:
        """Chained hashes of the full blocks, equal exactly where prefixes are. Computed from the runs, not tokens."""
        hashes: list[BlockHash] = []
        parent, pieces, room = _ROUND.pack(self.round) if self.round else b"", b"", block_size
        for token_id, count in self.prompt_runs:
            while count >= room:
                parent = blake2b(parent + pieces + _PIECE.pack(token_id, room), digest_size=DIGEST_BYTES).digest()
                hashes.append(BlockHash(parent))
                count, pieces, room = count - room, b"", block_size
            if count:
                pieces += _PIECE.pack(token_id, count)
                room -= count
        return tuple(hashes)


def poisson(
    *, requests_per_s: float, num_requests: int, num_prompt_tokens: int, num_output_tokens: int, seed: int
) -> list[SimRequest]:
    """Poisson arrivals of prompts that share no prefix."""
    return shared_prefixes(
        requests_per_s=requests_per_s,
        num_requests=num_requests,
        num_groups=1,
        num_prefix_tokens=0,
        num_own_tokens=num_prompt_tokens,
        num_output_tokens=num_output_tokens,
        seed=seed,
    )


def shared_prefixes(
    *,
    requests_per_s: float,
    num_requests: int,
    num_groups: int,
    num_prefix_tokens: int,
    num_own_tokens: int,
    num_output_tokens: int,
    seed: int,
) -> list[SimRequest]:
    """Poisson arrivals; each belongs to a random group, whose prompts share a prefix."""
    rng = Random(seed)
    now = 0.0
    requests = []
    for number in range(num_requests):
        now += rng.expovariate(requests_per_s)
        prefix = ((rng.randrange(num_groups), num_prefix_tokens),) if num_prefix_tokens else ()
        runs = (*prefix, (FIRST_UNIQUE_TOKEN_ID + number, num_own_tokens))
        requests.append(SimRequest(f"request-{number}", now, runs, num_output_tokens))
    return requests


def speed_up(requests: Iterable[SimRequest], speed: float) -> list[SimRequest]:
    """The same requests, arriving ``speed`` times as fast.

    Raises:
        ConfigError: ``speed`` is not a finite number above 0, or the last request would arrive after ``MAX_ARRIVAL_S``.
    """
    if not 0 < speed < math.inf:
        raise ConfigError(f"speed: got {speed!r}; must be a finite number above 0")
    faster = [replace(r, arrival_s=r.arrival_s / speed) for r in requests]
    last_s = max((r.arrival_s for r in faster), default=0.0)
    if last_s > MAX_ARRIVAL_S:
        raise ConfigError(f"trace: its last request comes after {last_s:g} s; must be at most {MAX_ARRIVAL_S:g}")
    return faster


def repeat(requests: Sequence[SimRequest], times: int) -> list[SimRequest]:
    """``requests`` (in order of arrival from 0 s) ``times`` over, one round after the other at the same rate. Rounds
    share no prefixes, as if each had other users.

    Raises:
        ConfigError: more than ``MAX_REQUESTS`` in all.
    """
    if not requests:
        return []
    if len(requests) * times > MAX_REQUESTS:
        raise ConfigError(f"repeat: got {times} times {len(requests)} requests; must be at most {MAX_REQUESTS} in all")
    length_s = requests[-1].arrival_s * (1 + 1 / len(requests))  # rounds are one mean gap between requests apart
    return [
        replace(r, request_id=f"{r.request_id}-{number}", arrival_s=r.arrival_s + number * length_s, round=number)
        if number
        else r
        for number in range(times)
        for r in requests
    ]
