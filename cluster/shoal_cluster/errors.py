"""How errors are reported to clients: the gRPC status, the HTTP status, and OpenAI's error type and code.

=================  ====================  ====  =======================  =======================
error              gRPC status           HTTP  OpenAI type              OpenAI code
=================  ====================  ====  =======================  =======================
InvalidArgument    INVALID_ARGUMENT      400   invalid_request_error    invalid_value
PromptTooLong      INVALID_ARGUMENT      400   invalid_request_error    context_length_exceeded
Unauthenticated    UNAUTHENTICATED       401   invalid_request_error    invalid_api_key
PermissionDenied   PERMISSION_DENIED     403   invalid_request_error    permission_denied
NotFound           NOT_FOUND             404   invalid_request_error    model_not_found
ResourceExhausted  RESOURCE_EXHAUSTED    429   rate_limit_error         rate_limit_exceeded
DeadlineExceeded   DEADLINE_EXCEEDED     504   timeout_error            deadline_exceeded
Unavailable        UNAVAILABLE           503   server_error             unavailable
EngineDead         UNAVAILABLE           503   server_error             unavailable
ConfigError        FAILED_PRECONDITION   500   server_error             misconfigured
anything else      INTERNAL              500   server_error             internal_error
=================  ====================  ====  =======================  =======================
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal_replica.errors import (
    ConfigError,
    DeadlineExceeded,
    EngineDead,
    InvalidArgument,
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


INTERNAL = ErrorKind("INTERNAL", 500, "server_error", "internal_error")
_UNAVAILABLE = ErrorKind("UNAVAILABLE", 503, "server_error", "unavailable")
ERROR_KINDS: dict[type[ShoalError], ErrorKind] = {
    InvalidArgument: ErrorKind("INVALID_ARGUMENT", 400, "invalid_request_error", "invalid_value"),
    PromptTooLong: ErrorKind("INVALID_ARGUMENT", 400, "invalid_request_error", "context_length_exceeded"),
    Unauthenticated: ErrorKind("UNAUTHENTICATED", 401, "invalid_request_error", "invalid_api_key"),
    PermissionDenied: ErrorKind("PERMISSION_DENIED", 403, "invalid_request_error", "permission_denied"),
    # Over HTTP, a model is the only thing that a client can name.
    NotFound: ErrorKind("NOT_FOUND", 404, "invalid_request_error", "model_not_found"),
    ResourceExhausted: ErrorKind("RESOURCE_EXHAUSTED", 429, "rate_limit_error", "rate_limit_exceeded"),
    DeadlineExceeded: ErrorKind("DEADLINE_EXCEEDED", 504, "timeout_error", "deadline_exceeded"),
    Unavailable: _UNAVAILABLE,
    EngineDead: _UNAVAILABLE,
    ConfigError: ErrorKind("FAILED_PRECONDITION", 500, "server_error", "misconfigured"),
}


MAX_MESSAGE = 600  # characters: a gRPC status message travels in a header, and headers are limited in size


def _one_line(text: str) -> str:
    line = " ".join(text.encode(errors="replace").decode().split())
    return line if len(line) <= MAX_MESSAGE else line[: MAX_MESSAGE - 1] + "…"


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
