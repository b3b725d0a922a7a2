"""The errors that Shoal raises. The cluster maps each to a gRPC status and an HTTP code.

ShoalError
├── InvalidArgument    the request is invalid: names the field, the value and the limit
│   └── PromptTooLong  the prompt leaves no room in the model's context
├── Unauthenticated    the caller has presented no key that is known
├── PermissionDenied   the caller may not do this: a control without the admin key
├── NotFound           no such file or request
│   └── ModelNotFound  no such model or adapter
├── ResourceExhausted  no room now; may carry ``retry_after_s``
├── DeadlineExceeded   the caller's deadline passed
├── Unavailable        the replica or the cluster cannot answer; trying again may help
├── ConfigError        the deployment is misconfigured: one line, before anything starts
└── EngineDead         the engine failed and cannot go on
"""

from __future__ import annotations

MAX_SHOWN_VALUE = 80


class ShoalError(Exception):
    """Root of every error that Shoal raises on purpose. ``str(error)`` is one line fit for a client."""


def shown(value: object) -> str:
    """A value as messages show it: cut if it is long, and only its kind if it is nested too deeply."""
    try:
        whole = repr(value)
    except RecursionError:
        return f"a nested {type(value).__name__}"
    return whole if len(whole) <= MAX_SHOWN_VALUE else whole[: MAX_SHOWN_VALUE - 1] + "…"


class InvalidArgument(ShoalError):
    """A request field is outside its limits.

    Args:
        field: name of the field as the caller spells it.
        value: what was given (long values are shown truncated).
        limit: what is allowed, in words.
    """

    def __init__(self, field: str, value: object, limit: str) -> None:
        super().__init__(f"{field}: got {shown(value)}; {limit}")
        self.field = field
        self.limit = limit

    @classmethod
    def retold(cls, field: str, message: str) -> InvalidArgument:
        """Rebuild an error of another process of which only ``message`` was transmitted; the message has the limit."""
        error = cls.__new__(cls)
        Exception.__init__(error, message)
        error.field, error.limit = field, message
        return error

    def renamed(self, field: str) -> InvalidArgument:
        """The same of a field that the caller spells otherwise."""
        error = type(self).retold(field, field + str(self).removeprefix(self.field))
        error.limit = self.limit
        return error

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), str(self), {"field": self.field, "limit": self.limit})


class PromptTooLong(InvalidArgument):
    """The prompt leaves no room to generate in the model's context. A type of its own: clients shorten and retry."""


class Unauthenticated(ShoalError):
    """The caller has not presented a key that is known."""


class PermissionDenied(ShoalError):
    """The caller has not presented the key that the call needs."""


class NotFound(ShoalError):
    """Something named in the request does not exist."""


class ModelNotFound(NotFound):
    """No such model is served. A type of its own: clients know it by its code."""


class ResourceExhausted(ShoalError):
    """There is no room for the request now. ``retry_after_s`` is a hint, or None when waiting will not help."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), str(self), {"retry_after_s": self.retry_after_s})


class DeadlineExceeded(ShoalError):
    """The caller's deadline passed before the request finished."""


class Unavailable(ShoalError):
    """The service cannot answer now; the same call may succeed later."""


class ConfigError(ShoalError):
    """The configuration is impossible."""


class EngineDead(ShoalError):
    """The engine stopped because a step failed; the replica must be replaced."""


def _rebuild(kind: type[ShoalError], message: str, attributes: dict[str, object]) -> ShoalError:
    """Unpickle an error. By default, pickle would call ``__init__`` with the message alone."""
    error = kind.__new__(kind)
    Exception.__init__(error, message)
    error.__dict__.update(attributes)
    return error
