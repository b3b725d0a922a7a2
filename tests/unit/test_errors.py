"""Every error type is mapped to a status and a message, and an unforeseen error reveals nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from shoal_cluster.errors import ERROR_KINDS, INTERNAL, MAX_MESSAGE, report_error
from shoal_replica import errors
from shoal_replica.errors import InvalidArgument, NotFound, ResourceExhausted, ShoalError, Unavailable

ERROR_TYPES = [t for t in vars(errors).values() if isinstance(t, type) and issubclass(t, ShoalError)]


@pytest.mark.parametrize("error_type", [t for t in ERROR_TYPES if t is not ShoalError])
def test_every_error_type_is_mapped(error_type: type[ShoalError]) -> None:
    assert error_type in ERROR_KINDS


def test_statuses_exist_in_grpc_and_http() -> None:
    from http import HTTPStatus

    grpc_statuses = {
        "INVALID_ARGUMENT",
        "NOT_FOUND",
        "PERMISSION_DENIED",
        "UNAUTHENTICATED",
        "RESOURCE_EXHAUSTED",
        "DEADLINE_EXCEEDED",
        "UNAVAILABLE",
        "FAILED_PRECONDITION",
        "INTERNAL",
    }
    for kind in [*ERROR_KINDS.values(), INTERNAL]:
        assert kind.grpc_status in grpc_statuses
        assert HTTPStatus(kind.http_status)


def test_what_travels_in_a_header_is_not_long() -> None:
    for long in ("x" * 30_000, "日" * 30_000):
        message = report_error(NotFound(f"model: {long!r} is not served here"), "id").message
        assert message.startswith("model: '")
        assert message.endswith("…")
        assert len(message) == MAX_MESSAGE


def test_invalid_argument_names_its_field() -> None:
    report = report_error(InvalidArgument("temperature", -1, "must be at least 0"), "r1")
    assert report.openai_body() == {
        "error": {
            "message": "temperature: got -1; must be at least 0",
            "type": "invalid_request_error",
            "param": "temperature",
            "code": "invalid_value",
        }
    }


def test_what_is_nested_too_deeply_to_be_shown_is_called_so() -> None:
    value: object = "x"
    for _ in range(100_000):
        value = [value]
    assert str(InvalidArgument("prompt", value, "must be text")) == "prompt: got a nested list; must be text"
    while isinstance(value, list):  # its end would nest as deeply
        value = value.pop()


def test_a_subclass_speaks_as_its_base() -> None:
    class NoSuchAdapter(NotFound):
        pass

    assert report_error(NoSuchAdapter("adapter: no 'x'"), "r1").kind.http_status == 404


def test_retry_hint_is_kept() -> None:
    assert report_error(ResourceExhausted("full", retry_after_s=2.5), "r1").retry_after_s == 2.5


def test_message_is_one_line() -> None:
    assert report_error(Unavailable("first\n  second"), "r1").message == "first second"


def test_the_unforeseen_tells_only_the_request_id() -> None:
    report = report_error(KeyError("secret"), "r1")
    assert report.kind is INTERNAL
    assert report.message == "internal error (request id r1)"


def test_module_does_not_import_grpc() -> None:
    code = "import shoal_cluster.errors, sys; sys.exit('grpc' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], check=False, env={"PYTHONPATH": ":".join(sys.path)}).returncode
        == 0
    )
