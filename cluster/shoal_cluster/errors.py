"""How errors are reported to clients: the gRPC status, the HTTP status, OpenAI's type and code, Anthropic's type.

=================  ===================  ====  =====================  =======================  =====================
error              gRPC status          HTTP  OpenAI type            OpenAI code              Anthropic type
=================  ===================  ====  =====================  =======================  =====================
InvalidArgument    INVALID_ARGUMENT     400   invalid_request_error  invalid_value            invalid_request_error
PromptTooLong      INVALID_ARGUMENT     400   invalid_request_error  context_length_exceeded  invalid_request_error
Unauthenticated    UNAUTHENTICATED      401   invalid_request_error  invalid_api_key          authentication_error
PermissionDenied   PERMISSION_DENIED    403   invalid_request_error  permission_denied        permission_error
NotFound           NOT_FOUND            404   invalid_request_error  not_found                not_found_error
ModelNotFound      NOT_FOUND            404   invalid_request_error  model_not_found          not_found_error
ResourceExhausted  RESOURCE_EXHAUSTED   429   rate_limit_error       rate_limit_exceeded      rate_limit_error
DeadlineExceeded   DEADLINE_EXCEEDED    504   timeout_error          deadline_exceeded        timeout_error
Unavailable        UNAVAILABLE          503   server_error           unavailable              overloaded_error
EngineDead         UNAVAILABLE          503   server_error           unavailable              overloaded_error
ConfigError        FAILED_PRECONDITION  500   server_error           misconfigured            api_error
anything else      INTERNAL             500   server_error           internal_error           api_error
=================  ===================  ====  =====================  =======================  =====================
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shoal_cluster.shortened import shortened
from shoal_replica.errors import (
    ConfigError,
    DeadlineExceeded,
    EngineDead,
    InvalidArgument,
    ModelNotFound,
    NotFound,
    PermissionDenied,
    PromptTooLong,
    ResourceExhausted,
    ShoalError,
    Unauthenticated,
    Unavailable,
)


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """How one type of error is reported. ``grpc_status`` names a member of ``grpc.StatusCode``."""

    grpc_status: str
    http_status: int
    openai_type: str
    openai_code: str
    anthropic_type: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorReport:
    """An error as a client may see it: one line about what the client did wrong or can do, and nothing internal."""

    kind: ErrorKind
    message: str
    field: str | None = None
    retry_after_s: float | None = None

    def openai_body(self) -> dict[str, dict[str, str | None]]:
        """The body that OpenAI's clients parse."""
        error = {
            "message": self.message,
            "type": self.kind.openai_type,
            "param": self.field,
            "code": self.kind.openai_code,
        }
        return {"error": error}

    def anthropic_body(self, request_id: str) -> dict[str, Any]:
        """The body that Anthropic's clients parse."""
        error = {"type": self.kind.anthropic_type, "message": self.message}
        return {"type": "error", "error": error, "request_id": request_id}


INTERNAL = ErrorKind("INTERNAL", 500, "server_error", "internal_error", "api_error")
_INVALID = "invalid_request_error"
_UNAVAILABLE = ErrorKind("UNAVAILABLE", 503, "server_error", "unavailable", "overloaded_error")
ERROR_KINDS: dict[type[ShoalError], ErrorKind] = {
    InvalidArgument: ErrorKind("INVALID_ARGUMENT", 400, _INVALID, "invalid_value", _INVALID),
    PromptTooLong: ErrorKind("INVALID_ARGUMENT", 400, _INVALID, "context_length_exceeded", _INVALID),
    Unauthenticated: ErrorKind("UNAUTHENTICATED", 401, _INVALID, "invalid_api_key", "authentication_error"),
    PermissionDenied: ErrorKind("PERMISSION_DENIED", 403, _INVALID, "permission_denied", "permission_error"),
    NotFound: ErrorKind("NOT_FOUND", 404, _INVALID, "not_found", "not_found_error"),
    ModelNotFound: ErrorKind("NOT_FOUND", 404, _INVALID, "model_not_found", "not_found_error"),
    ResourceExhausted: ErrorKind(
        "RESOURCE_EXHAUSTED", 429, "rate_limit_error", "rate_limit_exceeded", "rate_limit_error"
    ),
    DeadlineExceeded: ErrorKind("DEADLINE_EXCEEDED", 504, "timeout_error", "deadline_exceeded", "timeout_error"),
    Unavailable: _UNAVAILABLE,
    EngineDead: _UNAVAILABLE,
    ConfigError: ErrorKind("FAILED_PRECONDITION", 500, "server_error", "misconfigured", "api_error"),
}


MAX_MESSAGE = 600  # characters: a gRPC status message travels in a header, and headers are limited in size


def _one_line(text: str) -> str:
    return shortened(" ".join(text.encode(errors="replace").decode().split()), MAX_MESSAGE)


def report_error(error: BaseException, request_id: str) -> ErrorReport:
    """What to tell the client about ``error``. The message of an error that is not a ShoalError stays in the log."""
    kind = next((ERROR_KINDS[base] for base in type(error).__mro__ if base in ERROR_KINDS), INTERNAL)
    if kind is INTERNAL:
        return ErrorReport(kind=INTERNAL, message=f"internal error (request id {request_id})")
    return ErrorReport(
        kind=kind,
        message=_one_line(str(error)),
        field=error.field if isinstance(error, InvalidArgument) else None,
        retry_after_s=error.retry_after_s if isinstance(error, ResourceExhausted) else None,
    )
