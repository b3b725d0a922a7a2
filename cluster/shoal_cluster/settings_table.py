"""The tables of all settings, in ``deploy/SETTINGS.md``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from shoal_cluster.config import ClusterConfig
from shoal_cluster.settings import Settings
from shoal_cluster.user_config import RoutingSettings

VLLM = {  # vLLM's options for the same
    "model": "--model",
    "served_model_name": "--served-model-name",
    "generation_config": "--generation-config",
    "adapters": "--lora-modules",
    "replica.dtype": "--dtype",
    "replica.max_model_len": "--max-model-len",
    "replica.block_size": "--block-size",
    "replica.num_blocks": "--num-gpu-blocks-override",
    "replica.enable_prefix_caching": "--enable-prefix-caching",
    "replica.max_num_seqs": "--max-num-seqs",
    "replica.max_num_batched_tokens": "--max-num-batched-tokens",
    "replica.policy": "--scheduling-policy",
    "replica.num_speculative_tokens": "--speculative-config",
    "replica.tensor_parallel_size": "--tensor-parallel-size",
    "replica.pipeline_parallel_size": "--pipeline-parallel-size",
    "gateway.http_address": "--host, --port",
    "gateway.api_keys": "--api-key",
    "gateway.cors_origins": "--allowed-origins",
    "gateway.tls_cert": "--ssl-certfile",
    "gateway.tls_key": "--ssl-keyfile",
    "traces.otlp_endpoint": "--otlp-traces-endpoint",
}


def fields_of(model: type[Settings], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """All keys with their fields, those of sections by dotted names."""
    for name, field in model.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, Settings):
            yield from fields_of(section, f"{prefix}{name}.")
        else:
            yield prefix + name, field


def markdown_tables() -> tuple[str, str]:
    """The keys under ``args``, and those of the Gateway's ``user_config.routing``."""
    lines = ["| key | default | meaning | vLLM |", "|---|---|---|---|"]
    for key, field in fields_of(ClusterConfig):
        vllm = f"`{VLLM[key]}`" if key in VLLM else ""
        lines.append(f"| `{key}` | {_default(field)} | {_meaning(field)} | {vllm} |")
    own = ["| key | default | meaning |", "|---|---|---|"]
    for key, field in fields_of(RoutingSettings, "routing."):
        own.append(f"| `{key}` | {_default(field)} | {_meaning(field)} |")
    return "\n".join(lines) + "\n", "\n".join(own) + "\n"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return "" if value is None or value is PydanticUndefined else f"`{json.dumps(value, default=str)}`"


def _meaning(field: FieldInfo) -> str:
    choices = _choices(field.annotation)
    told = f"{' or '.join(f'`{choice}`' for choice in choices)}: " if choices else ""
    return (told + (field.description or "")).replace("|", "\\|")


def _choices(annotation: Any) -> tuple[str, ...]:
    return get_args(annotation) if get_origin(annotation) is Literal else ()


if __name__ == "__main__":
    print(*markdown_tables(), sep="\n", end="")
