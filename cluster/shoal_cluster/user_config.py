"""The gateway's ``user_config``: what Serve hands over to a running gateway, without a new version of it."""

from __future__ import annotations

from typing import Any

from pydantic import Field, ValidationError, field_validator

from shoal_cluster.config import MAX_ADAPTERS, AdapterName, AdapterSource, ClusterConfig, error_line
from shoal_cluster.policies.baselines import OWN_RULE, ROUTINGS
from shoal_cluster.policies.routing import MAX_PRICE, RouteWeights
from shoal_cluster.settings import Settings
from shoal_replica.errors import ConfigError

_DEFAULTS = RouteWeights()


class RoutingSettings(Settings):
    """How requests are placed: RouteWeights' fields, another rule than Shoal's own, and the roles of replicas."""

    rule: str = Field(OWN_RULE, description="placement rule; others are for comparison, see deploy/README.md")
    prefill_share: float = Field(0.0, ge=0, lt=1, description="share of replicas that only compute prompts")
    prefill_price: float = Field(
        _DEFAULTS.prefill_price,
        ge=0,
        le=MAX_PRICE,
        description="price of an uncached prompt token, in prompt tokens' compute",
    )
    decode_price: float = Field(
        _DEFAULTS.decode_price,
        ge=0,
        le=MAX_PRICE,
        description="price of a sequence on a replica, in prompt tokens' compute",
    )

    @field_validator("rule")
    @classmethod
    def _is_a_rule(cls, value: str) -> str:
        if value not in ROUTINGS:
            raise ValueError(f"got {value!r}; must be one of {', '.join(ROUTINGS)}")
        return value

    @property
    def weights(self) -> RouteWeights:
        return RouteWeights(prefill_price=self.prefill_price, decode_price=self.decode_price)


class UserConfig(Settings):
    """``scaling`` holds keys of ``args.scaling`` that differ, ``adapters`` those that ``args.adapters`` lacks."""

    routing: RoutingSettings = RoutingSettings()
    scaling: dict[str, Any] = Field(default_factory=dict)
    adapters: dict[AdapterName, AdapterSource] = Field(default_factory=dict, max_length=MAX_ADAPTERS)

    @classmethod
    def from_dict(cls, user_config: dict[str, Any], config: ClusterConfig) -> UserConfig:
        """Validate it beside the application's ``config``.

        Raises:
            ConfigError: one line that names each wrong key, its value and the limit.
        """
        try:
            told = cls.model_validate(user_config)
            config.with_scaling(told.scaling)
            if told.routing.prefill_share and not (config.replica.kv_transfer and config.replica.enable_prefix_caching):
                share = f"got {told.routing.prefill_share!r}; above 0 it needs kv_transfer and enable_prefix_caching"
                raise ConfigError(f"routing.prefill_share: {share}")
            for name in told.adapters:
                if name in (config.name, *config.adapters):
                    raise ConfigError(f"adapters.{name}: is the name of the model, or of an adapter under args")
        except ValidationError as error:
            raise ConfigError("; ".join(error_line(e, "user_config") for e in error.errors())) from None
        except ConfigError as error:
            raise ConfigError(f"user_config.{error}") from None
        return told
