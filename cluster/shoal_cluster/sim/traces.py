"""Public request traces: arrival times, lengths, and shared prefixes."""

from __future__ import annotations

import csv
import gzip
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
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
MAX_TOKENS = 2**24  # per prompt, and per answer


def read_trace(path: Path, trace_format: TraceFormat, limit: int | None = None) -> list[SimRequest]:
    """Read up to ``limit`` requests of a trace file, plain or ``.gz``. Returned in order of arrival, the first at 0 s.

    ``mooncake``: JSON lines with timestamp (ms since any epoch), input_length, output_length and hash_ids, one id
    (number or string) per 512 prompt tokens (Mooncake, FAST '25). ``azure``: CSV with TIMESTAMP, ContextTokens and
    GeneratedTokens (Splitwise, ISCA '24); it does not say which prompts share prefixes, so none do. ``lengths``: CSV
    with num_prefill_tokens and num_decode_tokens (Vidur, MLSys '24); it has no arrival times either, so they are
    synthetic: Poisson, one request per second.

    Raises:
        NotFound: no such file.
        ConfigError: the file cannot be read, has no requests, or has one that is not of the format; the message says
            which.
    """
    if not path.is_file():
        raise NotFound(f"trace: no file {str(path)!r}")
    parse = _PARSERS[trace_format]
    requests: list[SimRequest] = []
    try:
        opened = _open(path)
    except OSError as error:
        raise ConfigError(f"trace: {path.name} cannot be read ({error.strerror})") from None
    with opened as lines:
        try:
            for request in islice(parse(lines), limit):
                requests.append(request)
        except (
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            ArithmeticError,
            RecursionError,
            csv.Error,
        ) as error:
            reason = str(error) if type(error) is ValueError else repr(error)
            where = f"{path.name}: request {len(requests) + 1}"
            raise ConfigError(f"trace: {where} is not of format {trace_format!r} ({reason})") from None
        except (OSError, EOFError, zlib.error) as error:
            raise ConfigError(f"trace: {path.name} cannot be read after {len(requests)} requests ({error})") from None
    if not requests:
        raise ConfigError(f"trace: {path.name} has no requests")
    first_s = min(request.arrival_s for request in requests)
    if first_s:
        requests = [replace(request, arrival_s=request.arrival_s - first_s) for request in requests]
    requests.sort(key=lambda r: r.arrival_s)
    return requests


def _open(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return cast(IO[str], gzip.open(path, "rt", encoding="utf-8-sig"))
    return path.open(encoding="utf-8-sig")


def _mooncake(lines: Iterable[str]) -> Iterator[SimRequest]:
    number_of: dict[float | str, int] = {}  # ids may be hashes
    for number, line in enumerate(line for line in lines if not line.isspace()):
        row: dict[str, Any] = json.loads(line)
        if not isinstance(row, dict):
            raise ValueError(f"got {row!r:.80}; must be an object")
        timestamp = row["timestamp"]
        if isinstance(timestamp, bool) or not isinstance(timestamp, int | float) or not math.isfinite(timestamp):
            raise ValueError(f"timestamp: got {timestamp!r:.80}; must be a finite number of milliseconds")
        arrival_s = timestamp / 1000
        left = _count(row, "input_length", least=1)
        runs = []
        if not isinstance(row["hash_ids"], list):
            raise ValueError(f"hash_ids: got {row['hash_ids']!r:.80}; must be a list")
        for hash_id in row["hash_ids"]:
            if isinstance(hash_id, bool) or not isinstance(hash_id, int | float | str) or hash_id != hash_id:
                raise ValueError(f"hash_ids: got {hash_id!r:.80}; must be numbers or strings")
            count = min(left, MOONCAKE_BLOCK_TOKENS)
            if count <= 0:
                raise ValueError("more hash_ids than input_length has blocks")
            runs.append((number_of.setdefault(hash_id, len(number_of)), count))
            left -= count
        if left > 0:
            raise ValueError("fewer hash_ids than input_length has blocks")
        yield SimRequest(f"request-{number}", arrival_s, tuple(runs), max(1, _count(row, "output_length")))


def _azure(lines: Iterable[str]) -> Iterator[SimRequest]:
    start: datetime | None = None
    for number, row in enumerate(csv.DictReader(lines)):
        try:
            time = datetime.fromisoformat(row.get("TIMESTAMP") or "")
            start = start or time
            seconds = (time - start).total_seconds()
        except (TypeError, ValueError) as error:  # with a time zone in one row, and none in another
            raise ValueError(f"TIMESTAMP: got {row.get('TIMESTAMP')!r}; {error}") from None
        runs = ((FIRST_UNIQUE_TOKEN_ID + number, max(1, _count(row, "ContextTokens"))),)
        yield SimRequest(f"request-{number}", seconds, runs, max(1, _count(row, "GeneratedTokens")))


def _lengths(lines: Iterable[str]) -> Iterator[SimRequest]:
    """Arrival times are synthetic: Poisson, one request per second, the same in every run."""
    rng = Random(LENGTHS_SEED)
    now = 0.0
    for number, row in enumerate(csv.DictReader(lines)):
        now += rng.expovariate(1.0)
        runs = ((FIRST_UNIQUE_TOKEN_ID + number, max(1, _count(row, "num_prefill_tokens"))),)
        yield SimRequest(f"request-{number}", now, runs, max(1, _count(row, "num_decode_tokens")))


def _count(row: Mapping[str, Any], name: str, least: int = 0) -> int:
    """The token count in ``row[name]``. Raises ValueError: not a whole number of at least ``least``, or too large."""
    told = row.get(name)
    try:
        count = int(told)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise ValueError(f"{name}: got {told!r:.80}; must be a whole number") from None
    if isinstance(told, bool) or (isinstance(told, float) and told != count):
        raise ValueError(f"{name}: got {told}; must be a whole number")
    if not least <= count <= MAX_TOKENS:
        raise ValueError(f"{name}: got {count}; must be {least} to {MAX_TOKENS}")
    return count


_PARSERS = {"mooncake": _mooncake, "azure": _azure, "lengths": _lengths}
