"""MOE_CHECK=1: calls refuse values that otherwise are made harmless without a word."""

from __future__ import annotations

import pytest
import torch
from moe_core import ConfigError, FusedMoELayer, TensorError
from moe_core.spec.environment import checks_values
from moe_core_layers import some_kinds

KIND = some_kinds()[0]


def routing(layer: FusedMoELayer) -> dict[str, torch.Tensor]:
    ids = torch.tensor([[0, 1], [2, layer.config.num_experts - 1], [-1, 3]], dtype=torch.int32)
    return {"topk_weights": torch.full(ids.shape, 0.5), "topk_ids": ids}


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(3, KIND.config().hidden_size).to(KIND.config().dtype)


@pytest.fixture
def layer(monkeypatch: pytest.MonkeyPatch) -> FusedMoELayer:
    monkeypatch.setenv("MOE_CHECK", "1")
    return KIND.layer()


def test_good_values_change_nothing(layer: FusedMoELayer, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOE_CHECK")
    given = routing(layer)
    given["topk_weights"][2, 0] = float("nan")  # of no expert
    assert torch.equal(layer(x, **given), KIND.layer()(x, **given))


@pytest.mark.parametrize("wrong", [-2, 6, 2**31 - 1])
def test_ids_out_of_range_are_counted(layer: FusedMoELayer, x: torch.Tensor, wrong: int) -> None:
    given = routing(layer)
    given["topk_ids"][1] = wrong
    with pytest.raises(TensorError, match=rf"topk_ids .*{wrong} at \[1, 0\]"):
        layer(x, **given)
    with pytest.raises(TensorError, match="topk_ids"):
        layer.kernel.start(x, **given)


def test_weights_that_are_nan_are_counted(layer: FusedMoELayer, x: torch.Tensor) -> None:
    given = routing(layer)
    given["topk_weights"][0, 1] = float("nan")
    with pytest.raises(TensorError, match=r"topk_weights .*\[0, 1\]"):
        layer(x, **given)


@pytest.mark.parametrize("value", ["", "0", None])
def test_without_the_switch_no_value_is_read(
    value: str | None, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MOE_CHECK", raising=False)
    if value is not None:
        monkeypatch.setenv("MOE_CHECK", value)
    layer = KIND.layer()
    given = routing(layer)
    given["topk_ids"][1] = 6
    assert not layer(x, **given)[1].any()


def test_another_value_of_the_switch_is_refused() -> None:
    with pytest.raises(ConfigError, match="MOE_CHECK"):
        checks_values({"MOE_CHECK": "yes"})
