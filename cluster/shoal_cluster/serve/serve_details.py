"""Asks Serve's controller for the state of its applications, without blocking the caller's event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import RayError
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

from shoal_replica.errors import Unavailable


async def serve_details() -> Mapping[str, Any]:
    """What Ray's dashboard shows at ``/api/serve/applications/``.

    Raises:
        Unavailable: the controller does not exist or cannot answer now.
    """
    try:
        controller = await asyncio.to_thread(ray.get_actor, SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
        details: Mapping[str, Any] = await controller.get_serve_instance_details.remote()
    except (RayError, ValueError) as error:  # ValueError: no actor of that name
        raise Unavailable(f"Serve's controller does not answer: {error}") from None
    return details
