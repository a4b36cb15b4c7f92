"""Settings: what is accepted, and that every refusal names the value and the way out."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from aspire_sglang.config import MAX_DRAFT_MAX, AspireConfig, ConfigError


def test_defaults_are_valid_and_described() -> None:
    config = AspireConfig()
    for spec in dataclasses.fields(config):
        assert spec.metadata["unit"], spec.name
        assert spec.metadata["help"], spec.name


@pytest.mark.parametrize(
    "policy", ["aspire", "aspire-paper", "fsm", "off", "fixed:0", "fixed:16", "sync:4"], ids=lambda policy: policy
)
def test_policies(policy: str) -> None:
    assert AspireConfig(policy=policy).policy == policy


@pytest.mark.parametrize("selector", ["refresh", "verify", "verify-per-layer", "window"])
def test_selectors(selector: str) -> None:
    assert AspireConfig(selector=selector).selector == selector


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"policy": "aspre"}, r"unknown policy 'aspre'; choose from aspire,"),
        ({"policy": ""}, r"unknown policy ''"),
        ({"policy": "fixed"}, r"unknown policy 'fixed'"),
        ({"policy": "fixed:-1"}, r"unknown policy 'fixed:-1'"),
        ({"policy": "sync:two"}, r"unknown policy 'sync:two'"),
        ({"policy": "fixed:17"}, r"is 17; it must be 0 to 16 \(draft_max\)"),
        ({"selector": "windw"}, r"unknown selector 'windw'.*did you mean 'window'\?"),
        ({"selector": "quest"}, r"unknown selector 'quest'; choose from refresh"),
        ({"sampling": "greedy"}, r"unknown sampling 'greedy'; choose from coupled, argmax"),
        ({"ratio": 0.0}, r"ratio is 0\.0; it must be above 0 and at most 1"),
        ({"ratio": -0.1}, r"ratio is -0\.1"),
        ({"ratio": 1.5}, r"ratio is 1\.5"),
        ({"ratio": float("nan")}, r"ratio is nan"),
        ({"draft_max": 0}, r"draft_max is 0; it must be 1 to 64"),
        ({"draft_max": MAX_DRAFT_MAX + 1}, r"draft_max is 65"),
        ({"draft_max": -3}, r"draft_max is -3"),
        ({"draft_max": 4, "draft_init": 5}, r"draft_init is 5; it must be 0 to 4 \(draft_max\)"),
        ({"draft_init": -1}, r"draft_init is -1"),
        ({"min_pages": 0}, r"min_pages is 0; it must be 1 or more"),
        ({"recent_pages": 0}, r"recent_pages is 0"),
        ({"recent_pages": -8}, r"recent_pages is -8"),
        ({"sink_pages": -1}, r"sink_pages is -1; it must be 0 or more"),
        ({"dense_layers": -1}, r"dense_layers is -1"),
        ({"page_size": 0}, r"page_size is 0; it must be a power of two"),
        ({"page_size": -16}, r"page_size is -16"),
        ({"page_size": 24}, r"page_size is 24; it must be a power of two, for example 16"),
    ],
)
def test_bad_values_name_the_value_and_the_fix(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AspireConfig(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"draft_max": "16"}, r"draft_max is '16' \(str\); it must be int"),
        ({"draft_max": 16.0}, r"draft_max is 16\.0 \(float\); it must be int"),
        ({"draft_max": True}, r"draft_max is True \(bool\); it must be int"),
        ({"draft_max": None}, r"draft_max is None"),
        ({"ratio": "7%"}, r"ratio is '7%' \(str\); it must be float"),
        ({"ratio": False}, r"ratio is False \(bool\)"),
        ({"policy": 5}, r"policy is 5 \(int\); it must be str"),
        ({"selector": ["refresh"]}, r"selector is \['refresh'\] \(list\); it must be str"),
    ],
)
def test_wrong_types(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AspireConfig(**values)


def test_a_whole_number_is_a_ratio() -> None:
    assert AspireConfig(ratio=1).ratio == 1


def test_mapping_with_known_names() -> None:
    assert AspireConfig.from_mapping({"draft_max": 8, "policy": "fixed:8"}) == AspireConfig(
        draft_max=8, policy="fixed:8"
    )


def test_unknown_names_suggest_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"unknown aspire option 'draft_maximum'; did you mean 'draft_max'\?"):
        AspireConfig.from_mapping({"draft_maximum": 8})
    with pytest.raises(ConfigError, match=r"unknown aspire option 'zzz'; known: draft_max, draft_init"):
        AspireConfig.from_mapping({"zzz": 8})


@pytest.mark.parametrize(("layer", "resolved"), [(-2, 28), (-30, 0), (0, 0), (29, 29), (-1, 29)])
def test_refresh_layer_counts_from_either_end(layer: int, resolved: int) -> None:
    assert AspireConfig(refresh_layer=layer).resolve_refresh_layer(30) == resolved


@pytest.mark.parametrize("layer", [30, -31, 1000])
def test_refresh_layer_out_of_range(layer: int) -> None:
    with pytest.raises(ConfigError, match=rf"refresh_layer is {layer}, but the model has 30 layers: use 0\.\.29"):
        AspireConfig(refresh_layer=layer).resolve_refresh_layer(30)


def test_dense_layers_must_leave_one_sparse() -> None:
    assert AspireConfig(dense_layers=3).resolve_refresh_layer(4) == 2
    with pytest.raises(ConfigError, match=r"dense_layers is 4, but the model has 4 layers: leave at least one sparse"):
        AspireConfig(dense_layers=4).resolve_refresh_layer(4)


def test_the_record_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        AspireConfig().draft_max = 3  # type: ignore[misc]
