from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from moe_core import (
    FusedMoEConfig,
    FusedMoEQuantDesc,
    GroupShape,
    MoEWeights,
    QuantKey,
    ScaleDesc,
    kFp8Static128BlockSym,
    kFp8StaticTensorSym,
    kInt4StaticAsym,
    kInt8StaticTensorAsym,
    kMxfp4Static,
)
from moe_core.spec.numerics import FP4_E2M1
from moe_core.spec.roles import BIAS, CODES, ROLES, Matrix, matrices, scale_shape

CONFIG = FusedMoEConfig(num_experts=3, top_k=1, hidden_size=256, intermediate_size=192, has_bias=True)
TWO_LEVELS = QuantKey(
    FP4_E2M1,
    ScaleDesc(torch.float8_e4m3fn, True, GroupShape(1, 16)),
    ScaleDesc(torch.float32, True, GroupShape(-1, -1)),
)
EVERYTHING = replace(kInt4StaticAsym, permuted=True, pre_scaled=True)


def shapes(matrix: Matrix) -> dict[str, tuple[int, ...]]:
    return {role.name: matrix.shape(role) for role in ROLES if matrix.has(role)}


def test_fields_of_weights_and_descriptions_are_the_roles() -> None:
    names = {matrix.field(role) for matrix in matrices(CONFIG, None, None) for role in ROLES}
    tensors = {field.name for field in fields(MoEWeights)} - {"weight_key", "activation_key", "shared"}
    assert names == tensors
    assert {role.field for role in ROLES if role is not CODES} | {"key"} == {f.name for f in fields(FusedMoEQuantDesc)}


@pytest.mark.parametrize(
    ("weight_key", "activation_key", "expected"),
    [
        (None, None, {"": (3, 384, 256), "bias": (3, 384)}),
        (kFp8Static128BlockSym, None, {"": (3, 384, 256), "scale": (3, 4, 2), "bias": (3, 384)}),
        (kMxfp4Static, None, {"": (3, 384, 128), "scale": (3, 384, 8), "bias": (3, 384)}),
        (TWO_LEVELS, None, {"": (3, 384, 128), "scale": (3, 384, 16), "scale2": (3, 2), "bias": (3, 384)}),
        (
            kFp8StaticTensorSym,
            kInt8StaticTensorAsym,
            {
                "": (3, 384, 256),
                "scale": (3, 2),
                "input_scale": (3,),
                "input_zero_point": (3,),
                "bias": (3, 384),
            },
        ),
        (
            EVERYTHING,
            replace(TWO_LEVELS, scale=replace(TWO_LEVELS.scale, static=False)),
            {
                "": (3, 384, 128),
                "scale": (3, 384, 2),
                "zero_point": (3, 384, 2),
                "input_scale2": (3,),
                "bias": (3, 384),
                "g_idx": (3, 256),
                "pre_scale": (3, 256),
            },
        ),
    ],
    ids=["16-bit", "block", "mxfp4", "two levels", "static", "everything"],
)
def test_shapes_of_w13(
    weight_key: QuantKey | None, activation_key: QuantKey | None, expected: dict[str, tuple[int, ...]]
) -> None:
    w13, _ = matrices(CONFIG, weight_key, activation_key)
    assert shapes(w13) == expected


def test_w2_has_one_part_and_the_intermediate_columns() -> None:
    _, w2 = matrices(CONFIG, TWO_LEVELS, None)
    assert shapes(w2) == {"": (3, 256, 96), "scale": (3, 256, 12), "scale2": (3, 1), "bias": (3, 256)}
    assert scale_shape(TWO_LEVELS, 3, 256, 192) == (3, 256, 12)
    w13, _ = matrices(replace(CONFIG, activation="relu2_no_mul"), TWO_LEVELS, None)
    assert shapes(w13)["scale2"] == (3, 1)


def test_dtypes_and_names() -> None:
    w13, w2 = matrices(CONFIG, EVERYTHING, kFp8StaticTensorSym)
    assert w13.dtypes(BIAS)[0] is CONFIG.dtype
    assert w13.dtypes(CODES) == (torch.uint8,)
    named = {role.name: role for role in ROLES}
    assert w13.dtypes(named["scale"]) == (torch.bfloat16,)
    assert w2.field(named["zero_point"]) == "w2_zero_point"
    assert named["zero_point"].argument(2) == "w2_zp"
    assert named["input_zero_point"].argument(1) == "a1_zp"
    assert "activation key" in w2.reason(named["input_scale"])
    assert "has_bias" in w2.reason(BIAS)
