"""Public request traces: who came when, with how many tokens, and what prompts share."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Iterable, Iterator
from datetime import datetime
from itertools import islice
from pathlib import Path
from random import Random
from typing import IO, Any, Literal, cast, get_args

from shoal_cluster.sim.workload import FIRST_UNIQUE_TOKEN_ID, SimRequest
from shoal_replica.errors import ConfigError, NotFound

TraceFormat = Literal["mooncake", "azure", "lengths"]
TRACE_FORMATS: tuple[TraceFormat, ...] = get_args(TraceFormat)

MOONCAKE_BLOCK_TOKENS = 512
LENGTHS_SEED = 0


def read_trace(path: Path, trace_format: TraceFormat, limit: int | None = None) -> list[SimRequest]:
    """Read up to ``limit`` requests of a trace file, plain or ``.gz``, in order of arrival from 0 s.

    ``mooncake``: JSON lines with timestamp (ms), input_length, output_length and hash_ids, one id for each 512 tokens
    of prompt (Mooncake, FAST '25). ``azure``: CSV with TIMESTAMP, ContextTokens, GeneratedTokens (Splitwise, ISCA '24);
    it does not say what prompts share, so they share nothing. ``lengths``: CSV with num_prefill_tokens and
    num_decode_tokens (Vidur, MLSys '24); no arrival times either, so they are made up: one request a second, Poisson.

    Raises:
        NotFound: no such file.
        ConfigError: a line that is not of the format; names it.
    """
    if not path.is_file():
        raise NotFound(f"trace: no file {str(path)!r}")
    parse = _PARSERS[trace_format]
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


def _lengths(lines: Iterable[str]) -> Iterator[SimRequest]:
    """Arrivals are made up: one a second on average, at random (Poisson), the same in every run."""
    rng = Random(LENGTHS_SEED)
    now = 0.0
    for number, row in enumerate(csv.DictReader(lines)):
        now += rng.expovariate(1.0)
        runs = ((FIRST_UNIQUE_TOKEN_ID + number, max(1, int(row["num_prefill_tokens"]))),)
        yield SimRequest(f"request-{number}", now, runs, max(1, int(row["num_decode_tokens"])))


_PARSERS = {"mooncake": _mooncake, "azure": _azure, "lengths": _lengths}
