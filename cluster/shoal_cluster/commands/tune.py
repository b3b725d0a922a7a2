"""``shoal tune``: show and change the autoscaler's settings while the cluster runs."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from shoal_cluster.addresses import DEFAULT_GRPC_ADDRESS
from shoal_cluster.policies.autoscaling_config import MAX_REPLICAS
from shoal_replica.errors import ConfigError

if TYPE_CHECKING:
    from shoal_cluster.serve.rows import ScalingRow


def tune(
    address: Annotated[str, typer.Option(help="The gateway's gRPC address.")] = DEFAULT_GRPC_ADDRESS,
    admin_key: Annotated[str | None, typer.Option(envvar="SHOAL_ADMIN_KEY", help="The cluster's admin key.")] = None,
    min_replicas: Annotated[
        int | None, typer.Option(min=0, max=MAX_REPLICAS, help="Minimum; 0 allows scaling to zero when idle.")
    ] = None,
    max_replicas: Annotated[int | None, typer.Option(min=1, max=MAX_REPLICAS, help="Maximum.")] = None,
    target_utilization: Annotated[float | None, typer.Option(help="Share of a replica that load may take.")] = None,
    ttft_objective_s: Annotated[
        float | None, typer.Option(help="Longest wait for a first token (s), for scaling alone.")
    ] = None,
    burst_window_s: Annotated[float | None, typer.Option(help="Window for averaging bursts of arrivals (s).")] = None,
    downscale_delay_s: Annotated[
        float | None, typer.Option(help="How long a lower count must suffice before scaling down (s).")
    ] = None,
    headroom: Annotated[
        float | None,
        typer.Option(help="Spare replicas: this times the square root of the replicas the load fills."),
    ] = None,
    burst_memory_s: Annotated[float | None, typer.Option(help="How long to stay ready for a past peak (s).")] = None,
    reset: Annotated[bool, typer.Option("--reset", help="Return to the deployment's settings first.")] = False,
) -> None:
    """Change the autoscaler's settings in place, or show them if no change is given."""
    given: dict[str, float | None] = {
        "min_replicas": min_replicas,
        "max_replicas": max_replicas,
        "target_utilization": target_utilization,
        "ttft_objective_s": ttft_objective_s,
        "burst_window_s": burst_window_s,
        "downscale_delay_s": downscale_delay_s,
        "headroom": headroom,
        "burst_memory_s": burst_memory_s,
    }
    if admin_key is not None and not (admin_key.isascii() and admin_key.isprintable()):
        raise ConfigError("admin_key: must be printable ASCII, for it travels in a header")
    changes = {name: value for name, value in given.items() if value is not None}
    row = asyncio.run(_tune(address, changes, reset, admin_key))
    typer.echo("\n".join(_lines(row)))


async def _tune(address: str, changes: dict[str, float], reset: bool, admin_key: str | None) -> ScalingRow:
    from shoal_cluster.commands.client import GatewayClient
    from shoal_cluster.commands.gateway_access import GatewayAccess

    access = GatewayAccess.from_environment()
    if access.api_key is None:
        access = replace(access, api_key=admin_key)  # which lets in, too
    async with GatewayClient(address, access) as client:
        if not changes and not reset:
            return await client.scaling()
        return await client.tune(changes, reset=reset, admin_key=admin_key)


def _lines(row: ScalingRow) -> list[str]:
    from shoal_cluster.policies.autoscaling_config import tunable

    settings = tunable(row.config)
    return [f"{name:18} {value:g}{'  (tuned)' if name in row.tuned else ''}" for name, value in settings.items()]
