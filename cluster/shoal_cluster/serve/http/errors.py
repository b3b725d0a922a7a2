"""Errors as the responses of HTTP routes."""

from __future__ import annotations

import logging
import math

from starlette.responses import JSONResponse, Response

from shoal_cluster.errors import INTERNAL, ErrorReport, report_error
from shoal_cluster.serve.logs import error_fields, fields

_log = logging.getLogger(__name__)


def report(error: Exception, request_id: str) -> ErrorReport:
    """What the client may know of ``error``; an internal error is logged."""
    told = report_error(error, request_id)
    if told.kind is INTERNAL:
        _log.error("request failed", extra=fields(request_id=request_id, **error_fields(error)))
    return told


def error_response(error: Exception, request_id: str) -> Response:
    """The error response in OpenAI's format."""
    return report_response(report(error, request_id))


def report_response(told: ErrorReport) -> Response:
    """The same, of what may be known."""
    headers = {}
    if told.retry_after_s is not None:
        headers["retry-after"] = str(math.ceil(told.retry_after_s))
    return JSONResponse(told.openai_body(), status_code=told.kind.http_status, headers=headers)
