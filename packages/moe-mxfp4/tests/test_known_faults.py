"""Silent faults that MXFP4 layers have had elsewhere, as tests of every backend of this scheme."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import moe_core as mc
import pytest
import torch
from moe_core import (
    ConfigError,
    DeviceInfo,
    Environment,
    FusedMoEConfig,
    FusedMoEExperts,
    MoEActivation,
    Oracle,
    QuantKey,
    SelectionError,
    kFp8StaticChannelSym,
    kInt4Static32,
    kMxfp4Static,
    kMxfp8Dynamic,
)
from moe_core.testing.checkpoints import CONFIG, source, write
from moe_core.testing.data import make_weights
from moe_kit.known_faults import KnownFaultTests
from moe_mxfp4 import Mxfp4MoeBackend, select_mxfp4_moe_backend
from moe_mxfp4.keys import ACTIVATIONS
from moe_mxfp4.scheme import SCHEME
from moe_mxfp4_pairs import GPT_OSS, Experts, packed, plain

DEVICES = ("cpu", "sm80", "sm89", "sm90", "sm100", "sm120", "gfx942", "gfx950")
CLASSES = [experts for backend in Oracle(SCHEME).table() for experts in backend.load()]
EVERY_CLASS = pytest.mark.parametrize("experts", CLASSES, ids=lambda experts: experts.__name__)
EVERYTHING = Environment({item.distribution: "99.0" for c in CLASSES for item in c.claims.requires})
HERE = Environment.current()
BASE = FusedMoEConfig(
    num_experts=4, top_k=2, hidden_size=256, intermediate_size=256, activation=MoEActivation.SWIGLUOAI
)
ROUTING = mc.RoutingConfig(scoring_func="softmax", renormalize=True, score_selected_only=True)
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "format": "mxfp4-pack-quantized",
            "input_activations": None,
            "weights": {
                "type": "float",
                "num_bits": 4,
                "symmetric": True,
                "dynamic": False,
                "strategy": "group",
                "group_size": 32,
                "scale_dtype": "torch.uint8",
            },
        }
    },
}
QUARK = {
    "quant_method": "quark",
    "global_quant_config": {
        "weight": {
            "dtype": "fp4",
            "qscheme": "per_group",
            "group_size": 32,
            "scale_format": "e8m0",
            "is_dynamic": False,
            "ch_axis": -1,
            "symmetric": None,
        },
        "input_tensors": None,
        "output_tensors": None,
        "bias": None,
    },
    "layer_quant_config": {},
    "layer_type_quant_config": {},
    "exclude": ["lm_head"],
    "export": {"pack_method": "reorder"},
}


class TestKnownFaults(KnownFaultTests):
    scheme = "mxfp4"
    keys = tuple((kMxfp4Static, key) for key in (None, *ACTIVATIONS))
    layer = BASE


def test_quark_rows_are_not_taken_for_interleaved_ones(tmp_path: Path) -> None:
    """Gate and up rows apart, as most models have them, and in turns, as gpt-oss has them: one layer."""
    experts = Experts(bias=True)
    in_turns = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    found = [
        source(tmp_path / "turns", experts.gpt_oss(), in_turns, **GPT_OSS),
        source(tmp_path / "quark", experts.tensors(plain), QUARK, **GPT_OSS),
        source(tmp_path / "compressed", experts.tensors(packed), COMPRESSED, **GPT_OSS),
    ]
    first, *others = [dict(one.weights().tensors()) for one in found]
    for other in others:
        assert other.keys() == first.keys()
        for name, tensor in first.items():
            assert torch.equal(other[name], tensor), name


@EVERY_CLASS
@pytest.mark.parametrize("has_bias", [True, False], ids=["biases", "no biases"])
def test_layers_convert_with_and_without_biases(experts: type[FusedMoEExperts], has_bias: bool) -> None:
    """A layer has biases or not: both convert, and what the kernel gets has as many."""
    claims = experts.claims
    config = replace(BASE, has_bias=has_bias, activation_format=min(claims.formats, key=str))
    config = replace(config, routing=ROUTING)
    device = next(
        DeviceInfo.parse(name) for name in DEVICES if claims.devices[0].reason_against(DeviceInfo.parse(name)) is None
    )
    key = claims.keys[0][1]
    assert isinstance(key, QuantKey | None)
    assert experts.unsupported_reasons(config, kMxfp4Static, key, device, EVERYTHING) == []
    made = experts(config, weight_key=kMxfp4Static, activation_key=key, device=device)
    quant = made.convert(make_weights(config, kMxfp4Static, key, seed=1)).quant_config
    assert (quant.w1_bias is not None, quant.w2_bias is not None) == (has_bias, has_bias)


def checkpoint(folder: Path, **changes: Any) -> Path:
    tensors = Experts(low=120, bias=changes.get("model_type") == "gpt_oss").tensors(packed)
    return write(folder, tensors, {**CONFIG, "quantization_config": COMPRESSED, "hidden_size": 96, **changes})


@pytest.mark.parametrize("backend", [b.value for b in Mxfp4MoeBackend])
def test_a_named_backend_holds_for_checkpoints_of_other_tools(tmp_path: Path, backend: str) -> None:
    path = checkpoint(tmp_path, moe_intermediate_size=64)
    if backend == "torch":
        assert mc.load_layer(path, device="cpu", backend=backend).selection.backend == backend
        return
    with pytest.raises(SelectionError, match=f"backend '{backend}'"):
        mc.load_layer(path, device="cpu", backend=backend)


def test_the_clamp_limit_of_the_config_reaches_the_layer(tmp_path: Path) -> None:
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(1)).bfloat16()
    logits = torch.randn(5, 3, generator=torch.Generator().manual_seed(2))
    outputs = []
    for limit in (0.25, 7.0):
        path = checkpoint(tmp_path / str(limit), model_type="gpt_oss", moe_intermediate_size=64, swiglu_limit=limit)
        layer = mc.load_layer(path, device="cpu")
        assert layer.config.params.limit == limit
        outputs.append(layer(x, router_logits=logits))
    assert not torch.equal(*outputs)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", [b.value for b in Mxfp4MoeBackend])
def test_a_named_backend_is_resolved_to_a_variant_that_runs(backend: str, device: str) -> None:
    """With nothing asked for, the first variant that the device supports; an error only where none does."""
    config = replace(BASE, routing=ROUTING)

    def fits(key: QuantKey | None) -> bool:
        try:
            select_mxfp4_moe_backend(
                config, activation_key=key, moe_backend=backend, device=device, environment=EVERYTHING
            )
        except SelectionError:
            return False
        return True

    possible = [key for key in (None, *ACTIVATIONS) if fits(key)]
    if not possible:
        with pytest.raises(SelectionError, match="never replaced"):
            select_mxfp4_moe_backend(config, moe_backend=backend, device=device, environment=EVERYTHING)
        return
    found = select_mxfp4_moe_backend(config, moe_backend=backend, device=device, environment=EVERYTHING)
    assert (found.backend, found.activation_key) == (backend, possible[0])


def test_flashinfer_cutlass_is_what_the_device_has() -> None:
    def found(device: str) -> QuantKey | None:
        named = Mxfp4MoeBackend.FLASHINFER_CUTLASS
        return select_mxfp4_moe_backend(BASE, moe_backend=named, device=device, environment=EVERYTHING).activation_key

    assert found("sm90") is None
    assert found("sm100") == kMxfp8Dynamic


@pytest.mark.parametrize("weight_key", [kFp8StaticChannelSym, kInt4Static32, None], ids=str)
def test_the_scheme_refuses_other_weights(weight_key: QuantKey | None) -> None:
    with pytest.raises(ConfigError, match="mxfp4"):
        Oracle(SCHEME).select(BASE, weight_key=weight_key, activation_key=None, device="sm90")
