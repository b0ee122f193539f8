from __future__ import annotations

import numpy as np
import pytest
import torch
from moe_core import (
    ActivationParams,
    ConfigError,
    FusedMoEActivationFormat,
    FusedMoEConfig,
    FusedMoEParallelConfig,
    MoEActivation,
    RoutingConfig,
    RoutingMethodType,
)


def make(**changes: object) -> FusedMoEConfig:
    return FusedMoEConfig(**{"num_experts": 8, "top_k": 2, "hidden_size": 64, "intermediate_size": 32, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 0}, "num_experts .*0"),
        ({"hidden_size": 2.5}, "hidden_size .*2.5"),
        ({"top_k": 9}, "top_k 9 "),
        ({"dtype": torch.float64}, "dtype .*float64"),
        ({"num_local_experts": 9}, "num_local_experts 9 "),
        ({"parallel": FusedMoEParallelConfig(ep_size=3)}, "num_experts 8 .*ep_size"),
        ({"apply_router_weight_on_input": True}, "top_k .*2"),
        ({"activation": "tanhish"}, "tanhish"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**changes)


def test_defaults() -> None:
    config = make(parallel=FusedMoEParallelConfig(ep_size=4, ep_rank=1))
    assert config.local_experts == 2
    assert config.w13_rows == 64
    assert make(activation=MoEActivation.RELU2_NO_MUL).w13_rows == 32
    assert make(activation="gelu_pytorch_tanh").activation is MoEActivation.GELU_TANH
    assert make(activation=MoEActivation.SWIGLUOAI).params == ActivationParams(alpha=1.702, beta=1.0, limit=7.0)


def test_config_is_a_value_whose_repr_evaluates_back() -> None:
    import moe_core

    config = make(activation=MoEActivation.SWIGLUOAI, has_bias=True, dtype=torch.float16)
    names = {name: getattr(moe_core, name) for name in moe_core.__all__}
    again = eval(repr(config), names | {"torch": torch})
    assert again == config
    assert hash(again) == hash(config)


def test_a_rank_outside_its_group_is_refused() -> None:
    with pytest.raises(ConfigError, match="ep_rank 4 "):
        FusedMoEParallelConfig(ep_size=4, ep_rank=4)


def test_all_to_all_is_needed_only_when_ranks_bring_own_tokens() -> None:
    assert not FusedMoEParallelConfig(ep_size=8).use_all2all_kernels
    assert FusedMoEParallelConfig(ep_size=8, dp_size=8).use_all2all_kernels
    # columns of every expert are on all ranks, and each token needs them all
    assert FusedMoEParallelConfig(tp_size=8, dp_size=8).use_all2all_kernels
    assert not FusedMoEParallelConfig(tp_size=8).use_all2all_kernels
    assert not FusedMoEParallelConfig.make_no_parallel().use_ep


@pytest.mark.parametrize(
    ("given", "name", "meant"),
    [
        ("bfloat16", "dtype", torch.bfloat16),
        ("fp16", "dtype", torch.float16),
        ("torch.float32", "dtype", torch.float32),
        ("batched", "activation_format", FusedMoEActivationFormat.BATCHED),
        ("Renormalize", "routing", RoutingConfig.from_method("Renormalize")),
        (RoutingMethodType.Sigmoid, "routing", RoutingConfig.from_method("Sigmoid")),
        ("swiglu", "activation", MoEActivation.SILU),
        (np.int64(16), "num_experts", 16),
    ],
)
def test_names_are_taken(given: object, name: str, meant: object) -> None:
    config = make(**{name: given})
    assert getattr(config, name) == meant
    assert type(getattr(config, name)) is type(meant)
    assert config == make(**{name: meant})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "bfloat17"}, "dtype .*'bfloat17'"),
        ({"dtype": None}, "dtype .*None"),
        ({"dtype": 16}, r"\bdtype\b"),
        ({"activation_format": "batch"}, "activation_format .*'batched'"),
        ({"activation_format": None}, "activation_format .*None"),
        ({"routing": "renorm"}, "'renorm'.*Renormalize"),
        ({"routing": 3}, "routing .*3"),
        ({"activation_params": {"alpha": 1}}, "activation_params"),
        ({"parallel": None}, "parallel .*None"),
        ({"has_bias": "yes"}, "has_bias .*'yes'"),
        ({"num_experts": True}, "num_experts .*True"),
        ({"num_experts": 10**30}, r"num_experts .*2147483647"),
        ({"max_loras": 2**31}, r"max_loras .*\d+"),
        ({"max_num_tokens": 0}, "max_num_tokens .*0"),
        ({"num_local_experts": "4"}, "num_local_experts .*'4'"),
        ({"top_k": [2]}, r"top_k .*\[2\]"),
    ],
)
def test_other_values_are_refused_with_the_choices(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**changes)


@pytest.mark.parametrize(("name", "value"), [("tp_size", "2"), ("ep_rank", -1), ("dp_size", None), ("tp_size", 0)])
def test_parallel_sizes_are_numbers(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be"):
        FusedMoEParallelConfig(**{name: value})  # type: ignore[arg-type]
