"""Asks Serve's controller for the state of its applications: what Ray's dashboard shows at ``/api/serve/applications``.

Each raises Unavailable if the controller does not exist or cannot answer now.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import RayError
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

from shoal_cluster.serve.deployment_watch import CONTROLLER_TIMEOUT_S
from shoal_replica.errors import Unavailable


async def serve_details() -> Mapping[str, Any]:
    """Without blocking the caller's event loop. Waits as long as its caller does."""
    with _asking():
        controller = await asyncio.to_thread(_controller)
        details: Mapping[str, Any] = await controller.get_serve_instance_details.remote()
    return details


def serve_details_now() -> Mapping[str, Any]:
    """For where no event loop runs. Waits for ``CONTROLLER_TIMEOUT_S`` at most."""
    with _asking():
        asked = _controller().get_serve_instance_details.remote()
        details: Mapping[str, Any] = ray.get(asked, timeout=CONTROLLER_TIMEOUT_S)
    return details


def _controller() -> Any:
    return ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)


@contextmanager
def _asking() -> Iterator[None]:
    try:
        yield
    except (RayError, ValueError) as error:  # ValueError: no actor of that name
        raise Unavailable(f"Serve's controller does not answer: {error}") from None
