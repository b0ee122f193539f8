"""AutoRound's names of OCP MX data types."""

from __future__ import annotations

from typing import Any

import pytest
from moe_core import QuantKey
from moe_core.checkpoint.config.quant_args import QuantEntries
from moe_core.checkpoint.tools.auto_round import MX_ACTIVATIONS, AutoRoundSettings
from moe_core.spec.quant_key import kMxfp4Dynamic, kMxfp4DynamicDown, kMxfp8Dynamic, kMxfp8DynamicDown


def settings(**entries: Any) -> AutoRoundSettings:
    return AutoRoundSettings(QuantEntries(entries, "config.json"))


#: ``quant_mx`` of the tool takes the floor of log2, ``quant_mx_rceil`` the ceiling
NAMES: dict[tuple[int, str], QuantKey] = {
    (4, "mx_fp"): kMxfp4DynamicDown,
    (4, "mx_fp4"): kMxfp4DynamicDown,
    (4, "mx_fp4e2m1"): kMxfp4DynamicDown,
    (4, "mx_fp_rceil"): kMxfp4Dynamic,
    (4, "mx_fp4_rceil"): kMxfp4Dynamic,
    (4, "mx_fp4e2m1_rceil"): kMxfp4Dynamic,
    (8, "mx_fp"): kMxfp8DynamicDown,
    (8, "mx_fp8"): kMxfp8DynamicDown,
    (8, "mx_fp8e4m3"): kMxfp8DynamicDown,
    (8, "mx_fp_rceil"): kMxfp8Dynamic,
    (8, "mx_fp8_rceil"): kMxfp8Dynamic,
    (8, "mx_fp8e4m3_rceil"): kMxfp8Dynamic,
}


@pytest.mark.parametrize(("bits", "name"), NAMES, ids=str)
def test_names(bits: int, name: str) -> None:
    found = settings(data_type=name, bits=bits, act_bits=bits)
    assert found.mx_activation(4, 8) == NAMES[bits, name]
    assert found.not_mx_weights(bits) is None


def test_every_name_is_tested() -> None:
    assert NAMES.keys() == MX_ACTIVATIONS.keys()


@pytest.mark.parametrize("act_bits", [None, 16])
def test_activations_in_16_bits(act_bits: int | None) -> None:
    assert settings(data_type="mx_fp", bits=8, act_bits=act_bits).mx_activation(8) is None


@pytest.mark.parametrize(
    ("bits", "name"),
    [(8, "mx_fp8e5m2"), (8, "mx_fp4"), (4, "mx_fp8"), (6, "mx_fp"), (8, "mx_fp6"), (8, "nv_fp"), (4, "mx_int4")],
)
def test_other_types(bits: int, name: str) -> None:
    found = settings(data_type=name, bits=bits, act_bits=bits)
    assert found.mx_activation(4, 8) == f"act_data_type is {name!r} with {bits} bits, expected 'mx_fp' with 4, 8 or 16"
    assert f"data_type is {name!r} with {bits} bits, expected 'mx_fp' with" in (found.not_mx_weights(bits) or "")


def test_stored_scales_may_be_computed_otherwise() -> None:
    """A rounding of AutoRound's that no key has: weights come with their scales, activations do not."""
    found = settings(data_type="mx_fp4_rceil_v2", bits=4, act_bits=4)
    assert found.not_mx_weights(4) is None
    assert found.mx_activation(4) == "act_data_type is 'mx_fp4_rceil_v2' with 4 bits, expected 'mx_fp' with 4 or 16"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"act_group_size": 16}, "act_group_size is 16, expected 32"),
        ({"act_dynamic": False}, "act_dynamic is false, expected true"),
    ],
)
def test_other_groups_and_static_scales(change: dict[str, Any], reason: str) -> None:
    assert settings(data_type="mx_fp", bits=8, act_bits=8, **change).mx_activation(8) == reason
