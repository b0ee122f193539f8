"""16-bit weights in the place of a quantized layer's: quantized by the keys of the layer, whatever it came from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from moe_core import ConfigError, FusedMoELayer, MoEError, MoEWeights, quantize_weight, registry
from moe_core.interface.claims import expand_key
from moe_core.testing.data import make_weights
from moe_core.testing.harness import same_bits
from moe_core_layers import Kind, all_kinds, some_kinds


def special_kinds() -> list[Kind]:
    """Of every scheme, a key with permuted columns and one with smoothing factors, where it has such."""
    found = []
    for scheme in registry().scheme_names():
        torch_backend = next(backend for backend in registry().oracle(scheme).table() if backend.name == "torch")
        pairs = [pair for experts in torch_backend.load() for pair in experts.claims.keys]
        keys = [(key, expand_key(a)[0]) for w, a in pairs for key in expand_key(w) if key is not None]
        for word in ("permuted", "pre_scaled"):
            found += [Kind(scheme, key, other) for key, other in keys if getattr(key, word)][:1]
    return found


KINDS = [kind for kind in dict.fromkeys([*all_kinds(), *special_kinds()]) if kind.weight_key is not None]
SCALED = [kind for kind in KINDS if kind.weight_key is not None and kind.weight_key.pre_scaled]
PLAIN = [kind for kind in KINDS if kind not in SCALED]


def sixteen_bit(kind: Kind, seed: int) -> MoEWeights:
    return make_weights(kind.config(), None, None, seed=seed)


def canonical(kind: Kind, plain: MoEWeights) -> MoEWeights:
    """What the keys of ``kind`` make of 16-bit weights, each of the stacked matrices alone."""
    assert kind.weight_key is not None
    key = replace(kind.weight_key, permuted=False)
    found: dict[str, Any] = {}
    for name, weight, parts in (("w13", plain.w13, 2), ("w2", plain.w2, 1)):
        made = [quantize_weight(piece.float(), key) for piece in weight.chunk(parts, dim=1)]
        for suffix, tensors in zip(("", "_scale", "_zero_point", "_scale2"), zip(*made, strict=True), strict=True):
            if tensors[0] is not None:
                found[f"{name}{suffix}"] = torch.cat(tensors, dim=1)
        if kind.weight_key.permuted:
            columns = torch.arange(weight.shape[2], dtype=torch.int32) // key.group_size
            found[f"{name}_g_idx"] = columns.repeat(len(weight), 1)
    # scales of activations stay
    return replace(kind.weights(kind.config()), **found)


@pytest.mark.parametrize("kind", PLAIN, ids=str)
def test_16_bit_weights_are_quantized_by_the_keys_of_the_layer(kind: Kind) -> None:
    # groups of permuted columns are of equal size here, as in checkpoints
    old, new = canonical(kind, sixteen_bit(kind, seed=0)), sixteen_bit(kind, seed=7)
    layer, other, before = (FusedMoELayer.from_weights(kind.scheme, kind.config(), old, copy=True) for _ in range(3))
    pointers = [tensor.data_ptr() for _, tensor in layer.weights.tensors()]
    layer.reload(new)
    other.reload(canonical(kind, new))
    for (name, tensor), (_, expected) in zip(layer.weights.tensors(), other.weights.tensors(), strict=True):
        assert same_bits(tensor, expected), name
    assert [tensor.data_ptr() for _, tensor in layer.weights.tensors()] == pointers
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(3)).to(layer.config.dtype)
    top, ids = torch.rand(5, 6).topk(2)
    results = [each(x, topk_weights=top, topk_ids=ids) for each in (layer, other, before)]
    assert same_bits(results[0], results[1])
    assert not same_bits(results[0], results[2])


@pytest.mark.parametrize("kind", SCALED, ids=str)
def test_smoothing_factors_come_from_a_checkpoint(kind: Kind) -> None:
    layer = kind.layer()
    before = {name: tensor.clone() for name, tensor in layer.weights.tensors()}
    with pytest.raises(ConfigError, match="quantized as"):
        layer.reload(sixteen_bit(kind, seed=7))
    assert all(same_bits(tensor, before[name]) for name, tensor in layer.weights.tensors())


@pytest.mark.parametrize("kind", [kind for kind in some_kinds(2) if kind in PLAIN], ids=str)
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.diagonal(1)
def test_a_state_dict_replaces_experts(kind: Kind, strict: bool) -> None:
    layer, other, new = kind.layer(), kind.layer(), sixteen_bit(kind, seed=7)
    other.reload(new)
    model = torch.nn.ModuleDict({"experts": layer})
    inter = layer.config.intermediate_size
    one_by_one = {
        f"experts.{expert}.{name}.weight": tensor[expert]
        for expert in range(layer.config.num_experts)
        for name, tensor in (
            ("gate_proj", new.w13[:, :inter]),
            ("up_proj", new.w13[:, inter:]),
            ("down_proj", new.w2),
        )
    }
    stacked = {"experts.gate_up_proj": new.w13, "experts.down_proj": new.w2}
    stored = {f"experts.{name}": t for name, t in kind.weights(layer.config, seed=9).tensors()}
    for tensors in ({"experts.w13": new.w13, "experts.w2": new.w2}, one_by_one, stacked):
        layer.reload(kind.weights(layer.config, seed=1))
        model.load_state_dict(tensors, strict=strict)
        for (name, found), (_, expected) in zip(layer.weights.tensors(), other.weights.tensors(), strict=True):
            assert name.startswith(("a1_", "a2_")) or same_bits(found, expected), name
    other.reload(kind.weights(layer.config, seed=9))
    model.load_state_dict(stored, strict=strict)
    for (name, found), (_, expected) in zip(layer.weights.tensors(), other.weights.tensors(), strict=True):
        assert same_bits(found, expected), name


@pytest.mark.parametrize("kind", some_kinds(1), ids=str)
@pytest.mark.parametrize("strict", [True, False])
def test_experts_that_do_not_fit_are_refused(kind: Kind, strict: bool) -> None:
    layer, new = kind.layer(), sixteen_bit(kind, seed=7)
    model = torch.nn.ModuleDict({"experts": layer})
    before = {name: tensor.clone() for name, tensor in layer.weights.tensors()}
    for tensors in (
        {"gate_up_proj": new.w13},
        {"gate_up_proj": new.w13[:, 1:], "down_proj": new.w2},
        {"gate_up_proj": new.w13, "down_proj": new.w2.to(torch.float8_e4m3fn)},
        {"0.gate_proj.weight": new.w13[0], "0.up_proj.weight": new.w13[0], "0.down_proj.weight": new.w2[0]},
        {"gate_up_proj": new.w13, "down_proj": new.w2, "gate_up_proj_bias": new.w13[..., 0]},
        {"gate_up_proj": new.w13, "down_proj": new.w2, "other": new.w2},
        {"0.gate_proj.weight_scale_inv": new.w13[0]},
        {"w13": new.w13},
        {"lora_A.default.weight": new.w2[0]},
    ):
        with pytest.raises(ConfigError, match="experts"):
            model.load_state_dict({f"experts.{name}": tensor for name, tensor in tensors.items()}, strict=strict)
    assert all(same_bits(tensor, before[name]) for name, tensor in layer.weights.tensors())


@pytest.mark.parametrize("kind", some_kinds(1), ids=str)
@pytest.mark.parametrize("strict", [True, False])
def test_a_refused_state_dict_changes_no_module(kind: Kind, strict: bool) -> None:
    """Also none before the one that fails."""
    layers, new = [kind.layer(), kind.layer()], sixteen_bit(kind, seed=7)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), *layers)
    before = [tensor.clone() for layer in layers for _, tensor in layer.weights.tensors()]
    linear = {name: tensor.clone() for name, tensor in model[0].state_dict().items()}
    tensors = {f"0.{name}": tensor + 1 for name, tensor in linear.items()}
    tensors |= {"1.w13": new.w13, "1.w2": new.w2, "2.w13": new.w13, "2.w2": new.w2[:, 1:]}
    with pytest.raises(ConfigError, match="2.w13"):
        model.load_state_dict(tensors, strict=strict)
    found = [tensor for layer in layers for _, tensor in layer.weights.tensors()]
    assert all(same_bits(one, other) for one, other in zip(found, before, strict=True))
    assert all(same_bits(tensor, linear[name]) for name, tensor in model[0].state_dict().items())


def test_keys_are_named_where_weights_do_not_fit() -> None:
    first, second = all_kinds()[:2]
    with pytest.raises(MoEError) as raised:
        first.layer().reload(second.weights(second.config()))
    assert "None" not in str(raised.value)
