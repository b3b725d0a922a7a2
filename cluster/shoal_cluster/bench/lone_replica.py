"""A Serve document cut down to what ``shoal bench serving`` measures: one replica behind a gateway on loopback."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from shoal_cluster.commands.deploy import GATEWAY, arguments_of
from shoal_cluster.gateway_settings import API_KEYS_VARIABLE

GUARDS = ("api_keys", "api_keys_file", "tls_cert", "tls_key")  # the benchmark's clients have no keys and speak no TLS
MOVING = ("scaling", "routing")  # of the gateway's ``user_config``: these would bring back what ``args`` is rid of


def make_lone_replica(
    document: dict[str, Any], grpc_address: str, http_address: str, environment: MutableMapping[str, str]
) -> dict[str, Any]:
    """Leave, in place, only the first Shoal application of a ``document`` that was checked by ``read_config``, with one
    replica, and a gateway on these addresses that anyone may call; and no API keys in ``environment``, of which
    gateways take theirs. Returns its ``args``.
    """
    args = arguments_of(document)
    assert args is not None  # or the file would have been refused
    (application,) = (one for one in document["applications"] if one.get("args") is args)
    document["applications"] = [application]
    args["scaling"] = {"min_replicas": 1, "max_replicas": 1}
    kept = {key: value for key, value in args.get("gateway", {}).items() if key not in GUARDS}
    args["gateway"] = kept | {"grpc_address": grpc_address, "http_address": http_address}
    for deployment in application.get("deployments") or []:
        if deployment["name"] == GATEWAY:
            for key in MOVING:
                deployment.get("user_config", {}).pop(key, None)
    environment.pop(API_KEYS_VARIABLE, None)
    return args
