"""Names instead of objects, in every scheme's functions."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from moe_core import ConfigError, FusedMoEConfig, MoEWeights, Selection, make_quant_config, oracle, registry
from moe_core.spec.quant_key import key_name
from moe_core_layers import Kind, all_kinds, some_kinds

CONFIG = FusedMoEConfig(num_experts=6, top_k=2, hidden_size=256, intermediate_size=128)


@pytest.mark.parametrize("kind", all_kinds(), ids=str)
def test_selection_takes_names_of_keys(kind: Kind) -> None:
    names: dict[str, Any] = {"weight_key": key_name(kind.weight_key), "activation_key": key_name(kind.activation_key)}
    keys: dict[str, Any] = {"weight_key": kind.weight_key, "activation_key": kind.activation_key}
    for device in ("cpu", "sm90"):
        assert oracle(kind.scheme).select(CONFIG, **names, device=device) == oracle(kind.scheme).select(
            CONFIG, **keys, device=device
        )
    tensors = dict(kind.weights(CONFIG).tensors())
    again = MoEWeights(**names, **tensors)
    assert (again.weight_key, again.activation_key) == (kind.weight_key, kind.activation_key)
    again.validate(CONFIG)


def named_functions() -> list[Any]:
    """Functions of the schemes that select a backend for a key."""
    return [
        pytest.param(getattr(importlib.import_module(spec.package.replace("-", "_")), kind.functions[0]), id=kind.name)
        for spec in registry().schemes()
        for kind in spec.kinds
    ]


@pytest.mark.parametrize("select", named_functions())
def test_named_functions_take_names_of_keys(select: Callable[..., Selection]) -> None:
    parameters = inspect.signature(select).parameters
    given = {
        name: parameters[name].default
        for name in ("weight_key", "activation_key")
        if name in parameters and parameters[name].default is not inspect.Parameter.empty
    }
    expected = select(CONFIG, device="sm90", **given)
    names = {name: key if isinstance(key, str) else key_name(key) for name, key in given.items()}
    assert select(CONFIG, device="sm90", **names) == expected
    with pytest.raises(ConfigError, match="'kFp9'"):
        select(CONFIG, device="sm90", **given | {"weight_key": "kFp9"})
    with pytest.raises(ConfigError, match="weight_key .*8"):
        select(CONFIG, device="sm90", **given | {"weight_key": 8})


@pytest.mark.parametrize("kind", some_kinds(), ids=str)
def test_what_is_no_name_is_refused(kind: Kind) -> None:
    keys: dict[str, Any] = {"weight_key": kind.weight_key, "activation_key": kind.activation_key}
    select = oracle(kind.scheme).select
    for change, message in (
        ({"weight_key": torch.float8_e4m3fn}, "weight_key .*torch.float8_e4m3fn"),
        ({"activation_key": "kInt9"}, "'kInt9'"),
        ({"device": "nonsense"}, "'nonsense'"),
        ({"device": 9.0}, "device .*9.0"),
        ({"moe_backend": "trition"}, "'trition'.*triton"),
        ({"moe_backend": None}, "backend '?None'?"),
        ({"moe_backend": ["triton"]}, r"backend .*\['triton'\]"),
    ):
        with pytest.raises(ConfigError, match=message):
            select(CONFIG, **{"device": "cpu", **keys, **change})
    for config in (None, {"num_experts": 8}):
        with pytest.raises(ConfigError, match=r"\bconfig\b"):
            select(config, **keys, device="cpu")


def test_quant_configs_take_names_of_keys() -> None:
    scales = {"w1_scale": torch.ones(6, 2), "w2_scale": torch.ones(6, 1)}
    made = make_quant_config(weight_key="kFp8StaticTensorSym", activation_key="16-bit", **scales)
    assert key_name(made.weight_key) == "kFp8StaticTensorSym"
    assert made.activation_key is None
