"""The settings that may be changed in a running gateway; mistakes in them are named before they reach it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from shoal_cluster.commands.deploy import APP_IMPORT_PATH, read_config
from shoal_cluster.config import ClusterConfig
from shoal_cluster.policies.routing import RouteWeights
from shoal_cluster.user_config import UserConfig
from shoal_replica.errors import ConfigError

ARGS = {"model": "m", "adapters": {"lora": "y"}, "scaling": {"min_replicas": 2, "max_replicas": 4}}
CONFIG = ClusterConfig.from_args(ARGS)
MISTAKES = [
    ({"routing": {"rule": "roundrobin"}}, "user_config.routing.rule: got 'roundrobin'; must be one of"),
    ({"routing": {"prefil_price": 8}}, "user_config.routing.prefil_price: unknown key"),
    ({"routing": {"prefill_price": "much"}}, "user_config.routing.prefill_price: got 'much'; input should be"),
    ({"routing": {"decode_price": -1}}, "user_config.routing.decode_price: got -1; input should be"),
    ({"routing": {"decode_price": float("nan")}}, "user_config.routing.decode_price: got nan; input should be"),
    ({"routing": {"prefill_share": 1}}, "user_config.routing.prefill_share: got 1; input should be less than 1"),
    ({"routing": None}, "user_config.routing: got None; input should be"),
    ({"routingg": {}}, "user_config.routingg: unknown key"),
    ({"scaling": {"max_replica": 4}}, "user_config.scaling.max_replica: unknown key"),
    ({"scaling": {"max_replicas": 1}}, "user_config.scaling.min_replicas: got 2; must be at most max_replicas"),
    ({"adapters": {"a b": "x"}}, "user_config.adapters.a b"),
    ({"adapters": {"m": "x"}}, "user_config.adapters.m: is the name of the model, or of an adapter under args"),
    ({"adapters": {"lora": "x"}}, "user_config.adapters.lora: is the name of the model"),
    ([], "user_config: got []; input should be"),
]


def test_what_is_not_said_is_as_deployed() -> None:
    told = UserConfig.from_dict({}, CONFIG)
    assert (told.routing.rule, told.routing.weights, told.scaling) == ("predicted_ttft", RouteWeights(), {})
    told = UserConfig.from_dict({"routing": {"rule": "round_robin", "prefill_price": 8}}, CONFIG)
    assert (told.routing.rule, told.routing.weights) == ("round_robin", RouteWeights(prefill_price=8.0))


@pytest.mark.parametrize("lacking", ["kv_transfer", "enable_prefix_caching"])
def test_replicas_that_share_out_phases_must_hand_blocks_over(lacking: str) -> None:
    config = ClusterConfig.from_args({"model": "m", "replica": {lacking: False}})
    UserConfig.from_dict({}, config)
    with pytest.raises(ConfigError, match=r"^user_config.routing.prefill_share: got 0.5; above 0 it needs kv_transfer"):
        UserConfig.from_dict({"routing": {"prefill_share": 0.5}}, config)


@pytest.mark.parametrize(("user_config", "words"), MISTAKES)
def test_mistakes_are_named(user_config: Any, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        UserConfig.from_dict(user_config, CONFIG)
    assert str(refused.value).startswith(words)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("user_config", "words"), MISTAKES[:-1])
def test_mistakes_in_a_file_are_found_before_it_is_applied(user_config: Any, words: str, tmp_path: Path) -> None:
    application = {
        "import_path": APP_IMPORT_PATH,
        "args": ARGS,
        "deployments": [{"name": "Gateway", "user_config": user_config}],
    }
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump({"applications": [application]}), encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        read_config(path)
    assert str(refused.value).startswith(words)


@pytest.mark.parametrize("deployments", [3, {"Gateway": {}}, "Gateway"])
def test_deployments_are_a_list(deployments: Any, tmp_path: Path) -> None:
    application = {"import_path": APP_IMPORT_PATH, "args": {"model": "m"}, "deployments": deployments}
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump({"applications": [application]}), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"deployments: got .* must be a list"):
        read_config(path)
