"""Silent faults that fused MoE layers have had elsewhere, as tests of every backend of this scheme.

Each says the fault in its name; each fails where a backend has it.  Backends run where they can: on this machine's GPU,
else on the CPU, kernels for GPUs in Triton's interpreter.
"""

from __future__ import annotations

import itertools
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
    Oracle,
    QuantKey,
    TensorError,
    kFp8DynamicTokenSym,
    kInt4Static,
    kInt4Static32,
    kInt4StaticAsym,
    kInt8Static,
    kInt8StaticAsym,
)
from moe_core.reference.quantization import dequantize_weight
from moe_core.spec.quant_key import key_name
from moe_core.testing.cases import Case
from moe_core.testing.conformance import place_for
from moe_core.testing.data import make_weights
from moe_core.testing.harness import Place, Problem, call, make_kernel, make_problem
from moe_core.testing.mistakes import compare
from moe_kit.known_faults import KnownFaultTests
from moe_wna16.scheme import SCHEME

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
CLASSES = [experts for backend in Oracle(SCHEME).table() for experts in backend.load()]
EVERYTHING = Environment({item.distribution: "99.0" for c in CLASSES for item in c.claims.requires})
BASE = FusedMoEConfig(num_experts=4, top_k=2, hidden_size=256, intermediate_size=128)


def runs(*keys: QuantKey) -> pytest.MarkDecorator:
    """The classes that run in this process, kernels for GPUs in Triton's interpreter, and the keys that they take."""
    here, found = Environment.current(), []
    for experts, key in itertools.product(CLASSES, keys):
        place = place_for(experts.claims)
        missing = any(here.reason_against(item) for item in experts.claims.requires)
        # what routes by itself is the conformance kit's
        if place is None or experts.is_monolithic or missing:
            continue
        if not experts.unsupported_reasons(BASE, key, None, place.target, here):
            found.append(pytest.param(experts, place, key, id=f"{experts.__name__}-{key_name(key)}"))
    return pytest.mark.parametrize(("experts", "place", "key"), found)


def check(experts: type[FusedMoEExperts], place: Place, problem: Problem) -> None:
    """The layer gives what the reference gives."""
    compare(experts, problem, call(make_kernel(experts, problem, place), problem), place)


@runs(kInt4Static, kInt8Static)
def test_unsigned_codes_are_read_as_such(experts: type[FusedMoEExperts], place: Place, key: QuantKey) -> None:
    """Bytes of unsigned codes reached a kernel that reads two's complement: only words had been converted.

    One expert has only the lowest code, others those around 0 and the largest one.
    """
    problem = make_problem(Case("values", BASE, key, None, 5), place.device)
    zero = key.dtype.offset
    codes = torch.tensor([0, zero - 1, zero + 1, 2 * zero - 1], dtype=torch.uint8, device=place.device)
    stored = codes | codes << 4 if key.packing is not None else codes
    weights = replace(
        problem.weights,
        w13=stored[:, None, None].expand_as(problem.weights.w13).contiguous(),
        w2=stored[:, None, None].expand_as(problem.weights.w2).contiguous(),
    )
    assert weights.w2_scale is not None
    values = dequantize_weight(weights.w2, weights.w2_scale, key, cols=128) / weights.w2_scale.float()
    assert torch.equal(values.amax(dim=(1, 2)), (codes.int() - zero).float())
    check(experts, place, replace(problem, weights=weights))


@runs(kInt4StaticAsym, kInt8StaticAsym)
def test_zero_points_one_beyond_the_codes(experts: type[FusedMoEExperts], place: Place, key: QuantKey) -> None:
    """Stored less one, 15 becomes 16: added in packed words, it ran over into the next zero point."""
    problem = make_problem(Case("values", BASE, key, None, 5), place.device)
    weights = problem.weights
    assert weights.w13_zero_point is not None
    assert weights.w2_zero_point is not None
    most = int(key.dtype.max_value) + 1
    weights = replace(
        weights,
        w13_zero_point=torch.full_like(weights.w13_zero_point, most, dtype=torch.int32),
        w2_zero_point=torch.full_like(weights.w2_zero_point, most, dtype=torch.int32),
    )
    check(experts, place, replace(problem, weights=weights))


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
    with pytest.raises(TensorError, match="w13_zero_point .*kInt4Static"):
        moe_wna16.convert_to_wna16_moe_kernel_format(selection, **given, w13_zero_point=stored)
    with pytest.raises(ConfigError, match="w1_zp"):
        moe_wna16.make_wna16_moe_quant_config(
            weight_key=kInt4Static, w1_scale=weights.w13_scale, w2_scale=weights.w2_scale, w1_zp=stored
        )
