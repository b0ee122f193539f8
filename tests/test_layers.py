"""What a layer of any scheme is to torch: pickled, copied, printed."""

from __future__ import annotations

import copy
import io
import pickle
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from moe_core import ConfigError, FusedMoELayer, KernelWeights, MoEWeights
from moe_core.spec.quant_key import key_name
from moe_core.testing.harness import same_bits
from moe_core_layers import Kind, all_kinds


def by_torch(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def by_pickle(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


WAYS: tuple[Callable[[Any], Any], ...] = (by_pickle, by_torch, copy.deepcopy)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("kind", all_kinds(), ids=str)
@pytest.mark.diagonal(2)
def test_a_layer_is_kept_whole(kind: Kind, way: Callable[[Any], Any]) -> None:
    layer = kind.layer()
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    other: FusedMoELayer = way(layer)
    assert torch.equal(other(x), layer(x))
    assert other.selection == layer.selection
    other.reload(kind.weights(layer.config, seed=1))
    assert not torch.equal(other(x), layer(x))


@pytest.mark.parametrize("package", ["moe_core", "moe_fp8"])
def test_a_file_of_another_version_is_refused(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layouts change between versions, and their tensors do not show it."""
    written = pickle.dumps(next(kind for kind in all_kinds() if kind.scheme == "fp8").layer())
    monkeypatch.setattr(sys.modules[package], "__version__", "9.9.9")
    with pytest.raises(ConfigError, match=rf"moe_core .*{package} 9\.9\.9"):
        pickle.loads(written)


@pytest.mark.parametrize("kind", all_kinds(), ids=str)
def test_weights_are_pickled_to_the_bit_and_printed_short(kind: Kind) -> None:
    weights = kind.weights(kind.config())
    for held in (weights, kind.layer().weights):
        again: MoEWeights | KernelWeights = by_pickle(held)
        for (name, tensor), (other, copied) in zip(held.tensors(), again.tensors(), strict=True):
            assert name == other
            assert same_bits(tensor, copied)
        assert len(repr(held)) < 1500
        assert "tensor(" not in repr(held)
        assert f"w13={list(held.w13.shape)} {str(held.w13.dtype).removeprefix('torch.')}" in repr(held)
    assert f"weight_key={key_name(weights.weight_key)}" in repr(weights)
