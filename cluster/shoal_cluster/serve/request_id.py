"""The name of a request: in headers, logs and routing records."""

from __future__ import annotations

import os
import re

from shoal_replica.errors import InvalidArgument

LEG_MARK = "#"
_REQUEST_ID = re.compile(r"[\x21\x22\x24-\x7e]{1,128}")  # without LEG_MARK


def new_request_id() -> str:
    """A new, unique id."""
    return os.urandom(16).hex()


def another_id(request_id: str) -> str:
    """A new id that tells which one its client gave. Proxies send an id again, and services pass theirs on."""
    return f"{request_id}~{new_request_id()[:8]}"


def check_request_id(request_id: str) -> str:
    """``request_id`` itself. Raises InvalidArgument unless it can travel in a header."""
    if not _REQUEST_ID.fullmatch(request_id):
        raise InvalidArgument("request_id", request_id, "must be 1 to 128 printable ASCII characters other than '#'")
    return request_id


def leg_id(call_id: str, number: int) -> str:
    """The id under which a call goes to its ``number``-th replica, from 2 on; no client may use ``LEG_MARK``."""
    return f"{call_id}{LEG_MARK}{number}"


def call_of(request_id: str) -> str:
    """The call that a request is a leg of."""
    return request_id.partition(LEG_MARK)[0]


def is_later_leg(request_id: str) -> bool:
    """Whether its call has been placed before."""
    return LEG_MARK in request_id
