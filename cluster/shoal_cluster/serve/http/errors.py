"""Errors as HTTP clients are told: in OpenAI's words, and on the routes of Anthropic's API in its words."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from shoal_cluster.errors import INTERNAL, ErrorKind, ErrorReport, report_error
from shoal_cluster.serve.logs import error_fields, fields
from shoal_replica.errors import shown

MESSAGES_PATH = "/v1/messages"  # and below it: the routes of Anthropic's API
_ANTHROPIC_TYPES = {404: "not_found_error", 413: "request_too_large"}

logger = logging.getLogger(__name__)


def is_anthropic(path: str) -> bool:
    """Whether a path is one of Anthropic's API."""
    return path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/")


def logged_report(error: Exception, request_id: str) -> ErrorReport:
    """What the client may know of ``error``; an internal error is logged."""
    told = report_error(error, request_id)
    if told.kind is INTERNAL:
        logger.error("request failed", extra=fields(request_id=request_id, **error_fields(error)))
    return told


def error_response(error: Exception, request_id: str, path: str = "") -> Response:
    """The error response on a path."""
    return report_response(logged_report(error, request_id), request_id, path)


def report_response(
    told: ErrorReport, request_id: str, path: str, headers: Mapping[str, str] | None = None
) -> Response:
    """The same, of what may be known, with ``headers`` besides its own."""
    headers = dict(headers or {})
    if told.retry_after_s is not None:
        headers["retry-after"] = str(math.ceil(told.retry_after_s))
    body: dict[str, Any] = told.anthropic_body(request_id) if is_anthropic(path) else told.openai_body()
    return JSONResponse(body, status_code=told.kind.http_status, headers=headers)


def invalid_body(error: RequestValidationError, alternatives: set[str]) -> ErrorReport:
    """One line about the first invalid field, named by its path in the body.

    Args:
        alternatives: names of unions' alternatives, which are no part of that path.
    """
    errors = error.errors()
    if errors[0]["type"] == "json_invalid":  # its location is an offset in the text
        message = f"body: {errors[0]['msg']}: {errors[0]['ctx']['error']}"
        return refusal(400, "invalid_value", message, "body")
    if isinstance(error.body, bytes):
        return refusal(400, "invalid_value", "body: send it as JSON, with content-type: application/json", "body")
    paths = [_path(each["loc"], alternatives) for each in errors]
    within = [path for path in paths if path == paths[0] or path.startswith(f"{paths[0]}.")]
    # A union complains once per alternative: the one that got furthest was meant, and all that got as far.
    field = max(within, key=lambda path: path.count("."))
    same = [each for each, path in zip(errors, paths, strict=True) if path == field]
    words = (each["msg"].removeprefix("Value error, ") for each in same)
    limits = dict.fromkeys(line[0].lower() + line[1:] for line in words)
    told = "" if same[0]["type"] == "missing" else f"got {shown(same[0].get('input'))}; "
    return refusal(400, "invalid_value", f"{field}: {told}{', or '.join(limits)}", field)


def http_error(error: HTTPException) -> ErrorReport:
    """What the router itself refuses: unknown paths, wrong methods, bodies that are too large."""
    return refusal(error.status_code, f"http_{error.status_code}", str(error.detail), None)


def refusal(status: int, code: str, message: str, field: str | None) -> ErrorReport:
    """A report with an HTTP status of its own."""
    invalid = "invalid_request_error"
    kind = ErrorKind("INVALID_ARGUMENT", status, invalid, code, _ANTHROPIC_TYPES.get(status, invalid))
    return ErrorReport(kind=kind, message=message, field=field)


def _path(location: Sequence[int | str], alternatives: set[str]) -> str:
    """``messages.0.content`` from pydantic's location."""
    parts = [str(part) for part in location[1:]] if location[:1] == ("body",) else [str(part) for part in location]
    return ".".join(part for part in parts if "[" not in part and part not in alternatives) or "body"
