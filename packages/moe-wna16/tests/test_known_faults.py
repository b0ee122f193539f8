"""Silent faults that fused MoE layers have had elsewhere, as tests of every backend of this scheme.

Each says the fault in its name; each fails where a backend has it.  Backends run where they can: on this machine's GPU,
else on the CPU, kernels for GPUs in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import moe_wna16
import pytest
import torch
from moe_core import (
    ConfigError,
    Environment,
    FusedMoEConfig,
    FusedMoEExperts,
    FusedMoEKernel,
    MoEActivation,
    MoEWeights,
    QuantKey,
    TensorError,
    kFp8DynamicTokenSym,
    kInt4Static,
    kInt4Static32,
    kInt4StaticAsym,
    kInt8Static,
    kInt8StaticAsym,
)
from moe_core.lora import LoRA
from moe_core.oracle import default_prepare_finalize
from moe_core.quantization import dequantize_weight
from moe_core.testing.conformance import place_for
from moe_core.testing.data import make_inputs, make_lora, make_weights
from moe_core.testing.harness import Place, one_thread
from moe_core.testing.scheme import KnownFaultTests
from moe_core.testing.tolerance import expected_output
from moe_wna16 import WNA16Oracle
from torch import Tensor

PERMUTED = replace(kInt4StaticAsym.with_group(1, 32), permuted=True)
PRE_SCALED = replace(kInt4Static, pre_scaled=True)
PAIRS: tuple[tuple[QuantKey, QuantKey | None], ...] = (
    (kInt4Static, None),
    (kInt4Static32, None),
    (kInt4StaticAsym, None),
    (kInt8Static, None),
    (kInt8StaticAsym, None),
    (kInt4Static.with_group(1, -1), None),
    (PERMUTED, None),
    (PRE_SCALED, None),
    (kInt4Static, kFp8DynamicTokenSym),
)
DEVICES = ("cpu", "sm80", "sm89", "sm90", "sm100", "sm120", "gfx942")
CLASSES = [experts for backend in WNA16Oracle().table() for experts in backend.load()]
EVERYTHING = Environment({item.distribution: "99.0" for c in CLASSES for item in c.claims.requires})
HERE = Environment.current()
BASE = FusedMoEConfig(num_experts=4, top_k=2, hidden_size=256, intermediate_size=128)
RELU2 = MoEActivation.RELU2_NO_MUL


def places() -> Iterator[tuple[type[FusedMoEExperts], Place]]:
    """The classes that run in this process, and where."""
    for experts in CLASSES:
        place = place_for(experts.claims)
        missing = any(HERE.reason_against(item) for item in experts.claims.requires)
        # what routes by itself is the conformance kit's
        if place is not None and not experts.is_monolithic and not missing:
            yield experts, place


PLACES = list(places())
RUNS = pytest.mark.parametrize(("experts", "place"), PLACES, ids=[experts.__name__ for experts, _ in PLACES])


def pairs_of(
    experts: type[FusedMoEExperts], place: Place, config: FusedMoEConfig
) -> list[tuple[QuantKey, QuantKey | None]]:
    """The keys under which the class takes the layer; some of them in Triton's interpreter, which takes its time."""
    pairs = PAIRS[::4] if place.interpreted else PAIRS
    return [pair for pair in pairs if not experts.unsupported_reasons(config, *pair, place.target, HERE)]


def result(
    experts: type[FusedMoEExperts],
    place: Place,
    config: FusedMoEConfig,
    weights: MoEWeights,
    *,
    lora: bool = False,
) -> Tensor:
    """Run a layer and compare it with the reference; its output."""
    instance = experts(
        config, weight_key=weights.weight_key, activation_key=weights.activation_key, device=place.target
    )
    given, inputs = weights.to(place.device), make_inputs(config, 5, seed=3).to(place.device)
    adapters = make_lora(config, seed=1).to(place.device) if lora else None
    kernel = FusedMoEKernel(instance, instance.convert(given), default_prepare_finalize(config), lora=adapters)
    routed = {"topk_weights": inputs.topk_weights, "topk_ids": inputs.topk_ids, "expert_map": inputs.expert_map}
    y = kernel.apply(inputs.x, **routed, adapter_ids=inputs.adapter_ids)
    applied = None
    if adapters is not None and inputs.adapter_ids is not None:
        applied = LoRA(adapters, inputs.adapter_ids)
    with one_thread():
        expected = expected_output(
            inputs.x,
            given,
            config,
            **routed,
            truncates=place.interpreted,
            lora=applied,
        )
    expected.compare(y, f"{experts.__name__} {weights.weight_key} with {weights.activation_key}")
    return y


@RUNS
@pytest.mark.parametrize("key", [kInt4Static, kInt8Static], ids=str)
def test_unsigned_codes_are_read_as_such(experts: type[FusedMoEExperts], place: Place, key: QuantKey) -> None:
    """Bytes of unsigned codes reached a kernel that reads two's complement: only words had been converted.

    One expert has only the lowest code, others those around 0 and the largest one.
    """
    if (key, None) not in pairs_of(experts, place, BASE):
        return
    weights = make_weights(BASE, key, None, seed=0)
    zero = key.dtype.offset
    codes = torch.tensor([0, zero - 1, zero + 1, 2 * zero - 1], dtype=torch.uint8)
    stored = codes | codes << 4 if key.packing is not None else codes
    weights = replace(
        weights,
        w13=stored[:, None, None].expand_as(weights.w13).contiguous(),
        w2=stored[:, None, None].expand_as(weights.w2).contiguous(),
    )
    assert weights.w2_scale is not None
    values = dequantize_weight(weights.w2, weights.w2_scale, key, cols=128) / weights.w2_scale.float()
    assert torch.equal(values.amax(dim=(1, 2)), (codes.int() - zero).float())
    result(experts, place, BASE, weights)


@RUNS
@pytest.mark.parametrize("key", [kInt4StaticAsym, kInt8StaticAsym], ids=str)
def test_zero_points_one_beyond_the_codes(experts: type[FusedMoEExperts], place: Place, key: QuantKey) -> None:
    """Stored less one, 15 becomes 16: added in packed words, it ran over into the next zero point."""
    if (key, None) not in pairs_of(experts, place, BASE):
        return
    weights = make_weights(BASE, key, None, seed=0)
    assert weights.w13_zero_point is not None
    assert weights.w2_zero_point is not None
    most = int(key.dtype.max_value) + 1
    weights = replace(
        weights,
        w13_zero_point=torch.full_like(weights.w13_zero_point, most),
        w2_zero_point=torch.full_like(weights.w2_zero_point, most, dtype=torch.int32),
    )
    result(experts, place, BASE, weights)


class TestKnownFaults(KnownFaultTests):
    scheme = "wna16"
    keys = PAIRS


# ------------------------------------------------------------------ at the named functions


def test_zero_points_of_symmetric_weights_are_refused() -> None:
    """GPTQ files hold zero points of symmetric weights too, less one: subtracted, every weight was off by a scale."""
    weights = make_weights(BASE, kInt4Static, None, seed=0)
    selection = moe_wna16.select_wna16_moe_backend(BASE, moe_backend="torch", device="cpu")
    given: dict[str, Any] = dict(weights.tensors())
    assert weights.w13_scale is not None
    assert weights.w2_scale is not None
    stored = torch.full_like(weights.w13_scale, 7, dtype=torch.int32)
    with pytest.raises(TensorError, match="w13_zero_point is given, the weight key is kInt4Static"):
        moe_wna16.convert_to_wna16_moe_kernel_format(selection, **given, w13_zero_point=stored)
    with pytest.raises(ConfigError, match="w1_zp is given, but the weight key kInt4Static .* is symmetric"):
        moe_wna16.make_wna16_moe_quant_config(
            weight_key=kInt4Static, w1_scale=weights.w13_scale, w2_scale=weights.w2_scale, w1_zp=stored
        )
