from __future__ import annotations

import itertools
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from moe_core import (
    ConfigError,
    GroupShape,
    KeyPattern,
    QuantKey,
    ScaleDesc,
)
from moe_core.spec import numerics
from moe_core.spec import quant_key as qk
from moe_core.spec.numerics import FP8_E4M3, INT4_DTYPE, INT8_DTYPE


@pytest.mark.parametrize(
    ("shape", "rows", "cols", "grid"),
    [
        (GroupShape(-1, -1), 256, 384, (1, 1)),
        (GroupShape(1, -1), 256, 384, (256, 1)),
        (GroupShape(128, 128), 192, 257, (2, 3)),
        (GroupShape(1, 32), 3, 96, (3, 3)),
        (GroupShape(128, 128), 0, 128, (0, 1)),
    ],
)
def test_grid_counts_partial_groups(shape: GroupShape, rows: int, cols: int, grid: tuple[int, int]) -> None:
    assert shape.grid(rows, cols) == grid


def test_one_scale_per_row_is_a_row_and_all_of_its_columns() -> None:
    assert GroupShape(1, -1).is_per_row
    assert not any(GroupShape(*shape).is_per_row for shape in ((1, 128), (128, -1), (-1, -1)))


@pytest.mark.parametrize("extent", [0, -2])
def test_group_shape_refuses_impossible_extents(extent: int) -> None:
    with pytest.raises(ConfigError, match=f"{extent}x128"):
        GroupShape(extent, 128)


def test_mxfp8_is_not_plain_fp8() -> None:
    assert qk.kMxfp8Static != qk.kFp8Static128BlockSym.with_group(1, 32)
    assert qk.kMxfp8Static.scale.dtype is torch.uint8


def test_group_size_is_part_of_the_key() -> None:
    assert qk.kInt4Static != qk.kInt4Static32
    assert (qk.kInt4Static.group_size, qk.kInt4Static32.group_size) == (128, 32)


def test_equal_keys_hash_equal() -> None:
    built = QuantKey(FP8_E4M3, ScaleDesc(torch.float32, True, GroupShape(128, 128)))
    assert built == qk.kFp8Static128BlockSym
    assert hash(built) == hash(qk.kFp8Static128BlockSym)


@pytest.mark.parametrize("key", sorted(qk.NAMES, key=lambda key: qk.NAMES[key]), ids=lambda key: qk.NAMES[key])
def test_repr_evaluates_back_and_name_finds_the_key(key: QuantKey) -> None:
    names = vars(qk) | vars(numerics) | {"torch": torch}
    assert eval(repr(key), names) == key
    assert qk.key_by_name(qk.NAMES[key]) == key


@pytest.mark.parametrize(
    ("key", "name"),
    [
        (qk.kFp8Static128BlockSym.with_group(64, 128), "kFp8Static128BlockSym[64x128]"),
        (qk.kFp8Static128BlockE8M0Sym.with_group(64, 64), "kFp8Static128BlockE8M0Sym[64x64]"),
        (qk.kFp8Dynamic128Sym.with_group(1, 256), "kFp8Dynamic128Sym[1x256]"),
        (qk.kInt4Static.with_group(1, 64), "kInt4Static[1x64]"),
        (qk.kInt4Static.with_group(1, -1), "kInt4Static[per_row]"),
        (qk.kInt4StaticAsym.with_scale_dtype(torch.float16), "kInt4StaticAsym[float16]"),
        (replace(qk.kInt8Static, permuted=True, pre_scaled=True), "kInt8Static[permuted,pre_scaled]"),
        (
            replace(qk.kInt4Static.with_group(1, 64).with_scale_dtype(torch.float32), permuted=True),
            "kInt4Static[1x64,float32,permuted]",
        ),
        (qk.kInt4W4A8StaticGroup64Sym.with_scale_dtype(torch.float32), "kInt4W4A8StaticGroup64Sym[float32]"),
    ],
)
def test_other_groups_are_named_after_a_constant(key: QuantKey, name: str) -> None:
    assert qk.key_name(key) == name
    assert qk.key_by_name(name) == key
    assert qk.key_name(qk.kMxfp8Static) == "kMxfp8Static"
    assert qk.key_name(None) == "16-bit"
    assert str(key).startswith(f"{name} (")
    unnamed = replace(qk.kInt4Static, packing=None)
    assert qk.key_name(unnamed) == str(unnamed)


def test_words_in_brackets_come_in_any_order() -> None:
    key = qk.key_by_name("kInt4Static[pre_scaled, FLOAT16, 1x64]")
    assert qk.key_name(key) == "kInt4Static[1x64,float16,pre_scaled]"


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("[", "kMxfp8Static[64x128]"),
        ("[1x32", "bracket"),
        ("[]", "per_row"),
        ("[64]", "got '64'"),
        ("[1x]", "got '1x'"),
        ("[0x-1]", "got '0x-1'"),
        ("[0x1]", "extent"),
        ("[permutd]", "'permuted'"),
    ],
)
def test_words_that_say_nothing_are_refused(words: str, part: str) -> None:
    with pytest.raises(ConfigError, match=part.replace("[", r"\[")):
        qk.key_by_name(f"kMxfp8Static{words}")


def test_unknown_name_lists_the_known() -> None:
    with pytest.raises(ConfigError, match=r"kFp9.*\n.*kFp8Static128BlockSym"):
        qk.key_by_name("kFp9")


def test_pattern_widens_only_what_it_names() -> None:
    pattern = KeyPattern(
        qk.kInt4Static,
        group_shapes=(GroupShape(1, 32), GroupShape(1, 128)),
        scale_dtypes=(torch.bfloat16, torch.float16),
    )
    assert pattern.matches(qk.kInt4Static)
    assert pattern.matches(qk.kInt4Static32.with_scale_dtype(torch.float16))
    assert not pattern.matches(qk.kInt4Static.with_group(1, 64))
    assert not pattern.matches(qk.kInt4StaticAsym)
    assert not pattern.matches(qk.kInt8Static)


def test_roundings_of_scales() -> None:
    assert qk.kMxfp4Dynamic.with_rounding("even") == qk.kMxfp4DynamicEven != qk.kMxfp4Dynamic
    assert qk.kMxfp4DynamicEven.with_rounding("up") == qk.kMxfp4Dynamic
    assert str(qk.kMxfp4DynamicDown) == "kMxfp4DynamicDown (e2m1, dynamic e8m0 rounded down 1x32)"
    assert qk.key_by_name(qk.key_name(qk.kMxfp4DynamicEven)) == qk.kMxfp4DynamicEven
    assert not KeyPattern(qk.kMxfp4Dynamic).matches(qk.kMxfp4DynamicEven)
    with pytest.raises(ConfigError, match="'nearest'"):
        qk.kMxfp4Dynamic.with_rounding("nearest")


def test_pattern_expands_to_exactly_what_it_matches() -> None:
    pattern = KeyPattern(
        qk.kInt4Static,
        group_shapes=(GroupShape(1, 32), GroupShape(1, -1)),
        permuted=(False, True),
        pre_scaled=(False, True),
    )
    expanded = pattern.expand()
    assert len(set(expanded)) == 8
    assert all(pattern.matches(key) for key in expanded)


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        (KeyPattern(qk.kFp8StaticTensorSym), "kFp8StaticTensorSym"),
        (KeyPattern(replace(qk.kInt4Static, permuted=True)), "kInt4Static[permuted]"),
        (KeyPattern(qk.kInt4Static, group_shapes=(GroupShape(1, 64),)), "kInt4Static[1x64]"),
        (
            KeyPattern(
                qk.kInt4StaticAsym.with_group(1, 64),
                group_shapes=(GroupShape(1, 64), GroupShape(1, 128), GroupShape(1, -1)),
                scale_dtypes=(torch.bfloat16, torch.float16),
                permuted=(False, True),
                pre_scaled=(True,),
            ),
            "kInt4StaticAsym[1x64|1x128|per_row,bfloat16|float16,permuted?,pre_scaled]",
        ),
        (
            KeyPattern(qk.kFp8Static128BlockSym, scale_dtypes=(torch.float32, torch.uint8)),
            "kFp8Static128BlockSym[float32|e8m0]",
        ),
    ],
)
def test_the_name_of_a_pattern_holds_every_choice_of_its_keys(pattern: KeyPattern, name: str) -> None:
    assert str(pattern) == name
    constant, _, brackets = name.removesuffix("]").partition("[")
    choices = [
        ["", word.removesuffix("?")] if word.endswith("?") else word.split("|") for word in brackets.split(",") if word
    ]
    named = [[word for word in words if word] for words in itertools.product(*choices)]
    keys = [qk.key_by_name(f"{constant}[{','.join(words)}]" if words else constant) for words in named]
    assert set(keys) == set(pattern.expand())
    assert len(keys) == len(set(keys))


def test_a_pattern_without_a_named_constant_names_its_keys() -> None:
    base = replace(qk.kInt4Static, packing=None)
    pattern = KeyPattern(base, permuted=(False, True))
    assert str(pattern) == f"{base} | {replace(base, permuted=True)}"


def test_a_pattern_looks_at_every_field_of_a_key() -> None:
    pattern = KeyPattern(qk.kFp8Static128BlockSym, group_shapes=(GroupShape(128, 128), GroupShape(64, 64)))
    key = qk.kFp8Static128BlockSym.with_group(64, 64)
    changes: dict[str, Any] = {
        "dtype": qk.kInt8StaticChannelSym.dtype,
        "scale": replace(key.scale, static=False),
        "scale2": key.scale,
        "symmetric": False,
        "packing": qk.kMxfp4Static.packing,
        "permuted": True,
        "pre_scaled": True,
    }
    assert changes.keys() == {field.name for field in fields(key)}
    assert pattern.matches(key)
    assert not any(pattern.matches(replace(key, **{name: value})) for name, value in changes.items())


def test_packing_is_what_is_usual_for_the_type_or_told() -> None:
    # as engines write it
    assert QuantKey(INT4_DTYPE, qk.kInt4StaticGroupScale) == qk.kInt4Static
    assert QuantKey(qk.kMxfp4Static.dtype, qk.kMxfp4Static.scale) == qk.kMxfp4Static
    assert QuantKey(INT8_DTYPE, qk.kInt8StaticGroupScale).packing is None
    assert qk.kInt4W4A8StaticChannelSym.packing is None
    bytes_each = replace(qk.kInt4Static, packing=None)
    words = replace(qk.kInt4Static, packing=qk.Packing(torch.int32, 8, "n"))
    assert len({bytes_each, words, qk.kInt4Static}) == 3
    assert str(bytes_each) == "uint4b8, static bfloat16 1x128, not packed"
    assert str(words) == "uint4b8, static bfloat16 1x128, packed as 8 per int32 along n"
    names = vars(qk) | vars(numerics) | {"torch": torch}
    assert eval(repr(bytes_each), names) == bytes_each
