"""Logs of gateway and replica: one line per event, as JSON or text, to standard error, which Ray keeps.

Of what a client said, only the names that a request gives are logged: its id, model and tenant. An error in a request
is logged by its type and stack, not by its message, which may quote the request.
"""

from __future__ import annotations

import logging
import sys
import traceback
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from shoal_cluster.serve.call_record import CallRecord, RequestOutcome

ROOTS = ("shoal_cluster", "shoal_replica")
LEVELS = {
    RequestOutcome.FINISHED: logging.INFO,
    RequestOutcome.CANCELLED: logging.INFO,
    RequestOutcome.INVALID: logging.INFO,
    RequestOutcome.SHED: logging.INFO,  # they come in large numbers, and metrics count them
    RequestOutcome.DEADLINE: logging.WARNING,
    RequestOutcome.FAILED: logging.ERROR,
}

_requests = logging.getLogger("shoal_cluster.requests")


def fields(**values: object) -> dict[str, dict[str, object]]:
    """For ``extra=``: the fields that a line has beside its message."""
    return {"fields": values}


def error_fields(error: BaseException) -> dict[str, object]:
    """An error without its message: its type, and the stack frames it came through, innermost last."""
    frames = traceback.extract_tb(error.__traceback__)
    return {"error": type(error).__name__, "stack": [f"{f.filename}:{f.lineno} {f.name}" for f in frames]}


def error_log() -> Path:
    """The file in which Ray keeps this process's standard error."""
    from ray._private.worker import global_worker

    return Path(global_worker.get_err_file_path())


def log_call(record: CallRecord) -> None:
    """Write the one line for a request that is over."""
    level = LEVELS[record.outcome]
    if _requests.isEnabledFor(level):
        _requests.log(level, "request %s", record.outcome.value, extra={"fields": call_fields(record)})


def log_unread(request_id: str, error: str) -> None:
    """Write the one line for a request that was refused before more than that could be known of it."""
    outcome = RequestOutcome.INVALID
    told = fields(request_id=request_id, outcome=outcome.value, error=error)
    _requests.log(LEVELS[outcome], "request %s", outcome.value, extra=told)


def call_fields(record: CallRecord) -> dict[str, object]:
    """The fields of a request's line, without those that are not known. Times are in seconds; the line's own is that of
    the request's end, because it is written later.
    """
    usage = record.usage
    leg = record.legs[-1] if record.legs else None
    values: dict[str, object] = {
        "time": _iso(record.time_s + record.duration_s),
        "request_id": record.request_id,
        "trace_id": record.trace.trace_id if record.trace is not None else None,
        "tenant": record.tenant or None,
        "model": record.model or None,
        "outcome": record.outcome.value,
        "error": record.error or None,
        "finish_reasons": [reason.value for reason in record.finish_reasons] or None,
        "replica_id": leg.replica_id or None if leg is not None else None,
        "num_prompt_tokens": usage.num_prompt_tokens if usage is not None else None,
        "num_cached_tokens": usage.num_cached_tokens if usage is not None else None,
        "num_output_tokens": usage.num_output_tokens if usage is not None else None,
        "num_resumes": usage.num_resumes if usage is not None else None,
        "placement_s": record.placement_s,
        "queue_s": leg.queue_s if leg is not None else None,
        "ttft_s": record.ttft_s,
        "inter_token_s": record.inter_token_s or None,
        "duration_s": record.duration_s,
    }
    return {k: round(v, 6) if isinstance(v, float) else v for k, v in values.items() if v is not None}


def _iso(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).isoformat(timespec="milliseconds")


class LineFormatter(logging.Formatter):
    """One line per record: a JSON object, or text followed by ``name=value`` pairs.

    Args:
        constant: fields that every line of the process has.
    """

    def __init__(self, form: str, constant: dict[str, object]) -> None:
        super().__init__()
        self._is_json = form == "json"
        self._constant = constant

    def format(self, record: logging.LogRecord) -> str:
        values: dict[str, Any] = {
            "time": _iso(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._constant,
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            values["exception"] = self.formatException(record.exc_info)
        if self._is_json:
            return msgspec.json.encode(values, enc_hook=str).decode()
        first = [str(values.pop(name)) for name in ("time", "level", "logger", "message")]
        line = " ".join([*first, *(f"{name}={value!r}" for name, value in values.items())])
        return line.replace("\n", "\\n")


def set_up_logs(form: str, level: str, **constant: object) -> None:
    """Send the output of Shoal's loggers in this process to standard error. A later call replaces an earlier one."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(form, constant))
    for name in ROOTS:
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(level.upper())
        logger.propagate = False
