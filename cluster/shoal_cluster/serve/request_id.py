"""The name of a request: in headers, logs and routing records."""

from __future__ import annotations

import os
import re

from shoal_replica.errors import InvalidArgument

_REQUEST_ID = re.compile(r"[\x21\x22\x24-\x7e]{1,128}")  # without '#': the gateway appends it with a leg's number


def new_request_id() -> str:
    """A new, unique id."""
    return os.urandom(16).hex()


def check_request_id(request_id: str) -> str:
    """``request_id`` itself. Raises InvalidArgument unless it can travel in a header."""
    if not _REQUEST_ID.fullmatch(request_id):
        raise InvalidArgument("request_id", request_id, "must be 1 to 128 printable ASCII characters other than '#'")
    return request_id
