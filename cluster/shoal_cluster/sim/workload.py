"""Requests to simulate: made up, or read from public traces."""

from __future__ import annotations

import csv
import gzip
import json
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from random import Random
from typing import IO, Any, Literal, cast

from shoal_replica.errors import ConfigError, NotFound
from shoal_replica.prefix_cache import DIGEST_BYTES, BlockHash

TraceFormat = Literal["mooncake", "azure"]

MOONCAKE_BLOCK_TOKENS = 512
_PIECE = struct.Struct("<QI")
FIRST_UNIQUE_TOKEN_ID = 2**30  # above the block ids of a trace


@dataclass(frozen=True, slots=True)
class SimRequest:
    """One arrival.

    ``prompt_runs`` is the prompt as (token id, count) runs: prompts that begin with the same runs share a prefix. A
    trace's prompts are never all in memory at once.
    """

    request_id: str
    arrival_s: float
    prompt_runs: tuple[tuple[int, int], ...]
    num_output_tokens: int
    tenant: str = ""

    @property
    def num_prompt_tokens(self) -> int:
        return sum(count for _, count in self.prompt_runs)

    def prompt_token_ids(self) -> tuple[int, ...]:
        token_ids: list[int] = []
        for token_id, count in self.prompt_runs:
            token_ids += [token_id] * count
        return tuple(token_ids)

    def block_hashes(self, block_size: int) -> tuple[BlockHash, ...]:
        """One for each full block, chained: equal exactly where prompts are. Made of the runs, not of every token."""
        hashes: list[BlockHash] = []
        parent, pieces, room = b"", b"", block_size
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
    """Independent arrivals of prompts that share nothing."""
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
    """Independent arrivals; each belongs to a random group, whose prompts begin with the same tokens."""
    rng = Random(seed)
    now = 0.0
    requests = []
    for number in range(num_requests):
        now += rng.expovariate(requests_per_s)
        prefix = ((rng.randrange(num_groups), num_prefix_tokens),) if num_prefix_tokens else ()
        runs = (*prefix, (FIRST_UNIQUE_TOKEN_ID + number, num_own_tokens))
        requests.append(SimRequest(f"request-{number}", now, runs, num_output_tokens))
    return requests


def read_trace(path: Path, trace_format: TraceFormat, limit: int | None = None) -> list[SimRequest]:
    """Read up to ``limit`` requests of a trace file, plain or ``.gz``, in order of arrival from 0 s.

    ``mooncake``: JSON lines with timestamp (ms), input_length, output_length and hash_ids, one id for each 512 tokens
    of prompt (Mooncake, FAST '25). ``azure``: CSV with TIMESTAMP, ContextTokens, GeneratedTokens (Splitwise, ISCA '24);
    it does not say what prompts share, so they share nothing.

    Raises:
        NotFound: no such file.
        ConfigError: a line that is not of the format; names it.
    """
    if not path.is_file():
        raise NotFound(f"trace: no file {str(path)!r}")
    parse = _mooncake if trace_format == "mooncake" else _azure
    requests: list[SimRequest] = []
    with _open(path) as lines:
        try:
            for request in islice(parse(lines), limit):
                requests.append(request)
        except (ValueError, KeyError, TypeError, AttributeError, OSError, EOFError) as error:
            where = f"{path.name}: request {len(requests) + 1}"
            raise ConfigError(f"trace: {where} is not of format {trace_format!r} ({error!r})") from None
    requests.sort(key=lambda r: r.arrival_s)
    return requests


def speed_up(requests: Iterable[SimRequest], speed: float) -> list[SimRequest]:
    """The same requests, arriving ``speed`` times as fast."""
    if not speed > 0:
        raise ConfigError(f"speed: got {speed!r}; must be above 0")
    return [replace(r, arrival_s=r.arrival_s / speed) for r in requests]


def _open(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return cast(IO[str], gzip.open(path, "rt", encoding="utf-8"))
    return path.open(encoding="utf-8")


def _mooncake(lines: Iterable[str]) -> Iterator[SimRequest]:
    for number, line in enumerate(lines):
        row: dict[str, Any] = json.loads(line)
        left = int(row["input_length"])
        runs = []
        for hash_id in row["hash_ids"]:
            count = min(left, MOONCAKE_BLOCK_TOKENS)
            if count <= 0:
                raise ValueError("more hash_ids than input_length has blocks")
            runs.append((int(hash_id), count))
            left -= count
        if left > 0:
            raise ValueError("fewer hash_ids than input_length has blocks")
        yield SimRequest(f"request-{number}", row["timestamp"] / 1000, tuple(runs), max(1, int(row["output_length"])))


def _azure(lines: Iterable[str]) -> Iterator[SimRequest]:
    start: datetime | None = None
    for number, row in enumerate(csv.DictReader(lines)):
        time = datetime.fromisoformat(row["TIMESTAMP"])
        start = start or time
        runs = ((FIRST_UNIQUE_TOKEN_ID + number, max(1, int(row["ContextTokens"]))),)
        seconds = max(0.0, (time - start).total_seconds())
        yield SimRequest(f"request-{number}", seconds, runs, max(1, int(row["GeneratedTokens"])))
