"""Engine-facing functions of the MXFP4 scheme, under the names that engines use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moe_core import (
    ConfigError,
    FusedMoEQuantConfig,
    KernelWeights,
    QuantKey,
    SchemeFunctions,
    Selection,
    kMxfp4Static,
    make_quant_config,
)

from moe_mxfp4.padding import PaddedExperts
from moe_mxfp4.scheme import SCHEME, Mxfp4MoeBackend

if TYPE_CHECKING:
    from torch import Tensor


_FUNCTIONS = SchemeFunctions(SCHEME)

#: Select the backend of a layer.
select_mxfp4_moe_backend = _FUNCTIONS.select("mxfp4", __name__)
#: Return the experts classes of a backend.
backend_to_kernel_cls = _FUNCTIONS.backend_to_kernel_cls
#: Map an engine's option to a backend.
map_mxfp4_backend = _FUNCTIONS.map_backend
#: List all backends in order of preference for a request.
get_priority_backends = _FUNCTIONS.get_priority_backends
#: Build a kernel from converted weights: prepare, the selected experts, finalize.
make_mxfp4_moe_kernel = _FUNCTIONS.make_kernel


def convert_to_mxfp4_moe_kernel_format(
    selection: Selection,
    *,
    w13: Tensor,
    w2: Tensor,
    w13_scale: Tensor,
    w2_scale: Tensor,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    w13_input_scale: Tensor | None = None,
    w2_input_scale: Tensor | None = None,
) -> KernelWeights:
    """Convert a layer's canonical tensors to the backend's layout; inputs are unchanged.

    For interleaved gate and up rows (gpt-oss), see :func:`moe_mxfp4.layout.deinterleave`. Codes are two e2m1 values per
    byte, even columns in the low four bits.

    Args:
        selection: result of a select function.
        w13: uint8 [E, 2N, ceil(K/2)], gate rows first.
        w2: uint8 [E, K, ceil(N/2)].
        w13_scale: uint8 [E, 2N, ceil(K/32)], e8m0: 2**(s - 127).
        w2_scale: uint8 [E, K, ceil(N/32)], e8m0.
        w13_bias: [E, 2N].
        w2_bias: [E, K].
        w13_input_scale: float32 [E], for static activations.
        w2_input_scale: float32 [E], for static activations.

    Returns:
        Weights in the backend's layout.

    Raises:
        TensorError: names the tensor, the value found and what was expected.
    """
    return _FUNCTIONS.convert(**locals())


def make_mxfp4_moe_quant_config(
    *,
    w1_scale: Tensor,
    w2_scale: Tensor,
    w1_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    a1_scale: Tensor | None = None,
    a2_scale: Tensor | None = None,
    activation_key: QuantKey | str | None = None,
) -> FusedMoEQuantConfig:
    """Build the quant config of canonical MXFP4 weights.

    Args:
        w1_scale: scales of ``w13``, as in :func:`convert_to_mxfp4_moe_kernel_format`.
        w2_scale: scales of ``w2``.
        w1_bias: [E, 2N].
        w2_bias: [E, K].
        a1_scale: float32 [E], for static activations.
        a2_scale: float32 [E], for static activations.
        activation_key: quantization of the activations; None for 16-bit activations.

    Returns:
        Scales and biases with their quant keys.

    Raises:
        ConfigError: keys and tensors contradict each other.
        TensorError: a shape or dtype is wrong.
    """
    return make_quant_config(weight_key=kMxfp4Static, canonical=True, **locals())


def mxfp4_round_up_hidden_size_and_intermediate_size(
    backend: str | Mxfp4MoeBackend, hidden_size: int, intermediate_size: int
) -> tuple[int, int]:
    """Return the padded (hidden size, intermediate size) that a backend uses internally.

    Use it to estimate memory. The backend pads converted weights itself; callers keep their sizes, and the output has
    ``hidden_size`` columns.

    Args:
        backend: name of the backend.
        hidden_size: K of the layer.
        intermediate_size: N of the layer.

    Raises:
        ConfigError: the backend is not installed, or a size is below 1.
    """
    if hidden_size < 1 or intermediate_size < 1:
        raise ConfigError(
            f"hidden_size and intermediate_size must be positive, got {hidden_size} and {intermediate_size}"
        )
    sizes = [
        experts.padded_sizes(hidden_size, intermediate_size)
        for experts in backend_to_kernel_cls(backend)
        if issubclass(experts, PaddedExperts)
    ]
    hidden, inter = zip(*sizes, strict=True) if sizes else ((hidden_size,), (intermediate_size,))
    return max(hidden), max(inter)
