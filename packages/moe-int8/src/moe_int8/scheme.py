"""The INT8 schemes as data, registered with moe-core (entry point ``moe_core.schemes``)."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from moe_core import (
    INT4,
    INT8,
    Backend,
    QuantDtype,
    QuantKey,
    SchemeSpec,
    WeightKind,
    kInt4W4A8StaticGroup128Sym,
    kInt8DynamicTokenSym,
    kInt8StaticChannelSym,
)

from moe_int8.online import ONLINE

if TYPE_CHECKING:
    from collections.abc import Callable

    from moe_core import DeviceInfo, FusedMoEConfig


class Int8MoeBackend(StrEnum):
    """Backends of this package; the entry points of other packages name theirs."""

    TRITON = "triton"
    MARLIN = "marlin"
    TORCH = "torch"


def _order(
    table: tuple[Backend, ...],
    device: DeviceInfo,
    config: FusedMoEConfig,
    weight_key: QuantKey | None,
    activation_key: QuantKey | None,
) -> tuple[Backend, ...]:
    """Order backends: Marlin-class first on sm_90, where it was faster at every token count."""
    triton, marlin, *others = table
    return (marlin, triton, *others) if device.capability == 90 else table


def _reason_against(config: FusedMoEConfig, weight_key: QuantKey | None, activation_key: QuantKey | None) -> str | None:
    if weight_key is None or weight_key.dtype not in (INT8, INT4) or not weight_key.symmetric:
        return f"the int8 scheme reads symmetric int8 and int4 weights, asked for {weight_key or '16-bit weights'}"
    if weight_key.dtype == INT4 and activation_key is None:
        return (
            "the int8 scheme multiplies int4 weights with int8 activations, asked for 16-bit ones: "
            "those are the scheme wna16's"
        )
    return None


def of_type(dtype: QuantDtype, other: str) -> Callable[[QuantKey | None], str | None]:
    """Return a check that a weight key has a dtype.

    Args:
        dtype: dtype that the function accepts.
        other: name of the function to use for other weights.

    Returns:
        A function that returns the reason against a key, or None.
    """

    def reason(key: QuantKey | None) -> str | None:
        if key is None or key.dtype != dtype:
            return f"this function is for {dtype.name} weights, asked for {key}: use {other}"
        return None

    return reason


#: Scheme of int8 weights, and of int4 weights with int8 activations.
SCHEME = SchemeSpec(
    name="int8",
    interface_api=(1, 0),
    format_api=(1, 0),
    kernel_api=(1, 0),
    package="moe-int8",
    backend_enum=Int8MoeBackend,
    order=_order,
    reason_against=_reason_against,
    backends=(
        Backend(
            Int8MoeBackend.TRITON.value,
            (
                "moe_int8.experts.triton:TritonInt8Experts",
                "moe_int8.experts.triton_weight_only:TritonInt8WeightOnlyExperts",
                "moe_int8.experts.triton_w4a8:TritonW4A8Int8Experts",
            ),
        ),
        Backend(Int8MoeBackend.MARLIN.value, ("moe_int8.experts.marlin_w4a8:MarlinW4A8Int8Experts",)),
        Backend(Int8MoeBackend.TORCH.value, ("moe_int8.experts.torch:TorchInt8Experts",)),
    ),
    formats=(
        "moe_int8.formats.compressed_tensors:CompressedTensorsInt8Format",
        "moe_int8.formats.modelopt:ModelOptInt8Format",
        "moe_int8.formats.quark:QuarkInt8Format",
        "moe_int8.formats.w8a8_int8:SglangInt8Format",
    ),
    quant_methods=("compressed-tensors", "modelopt", "quark", "w8a8_int8"),
    quickstart="moe_int8.quickstart:MODEL.write",
    online=ONLINE,
    kinds=(
        WeightKind(
            "int8",
            kInt8StaticChannelSym,
            kInt8DynamicTokenSym,
            reason_against=of_type(INT8, "select_w4a8_int8_moe_backend"),
            doc="``activation_key`` None asks for 16-bit activations (W8A16).",
        ),
        WeightKind(
            "w4a8_int8",
            kInt4W4A8StaticGroup128Sym,
            kInt8DynamicTokenSym,
            reason_against=of_type(INT4, "select_int8_moe_backend"),
            doc="For int4 weights: by channel, or in groups of 128, 64 or 32 columns.",
        ),
    ),
)
