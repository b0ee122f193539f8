"""The functions that engines know the MXFP4 scheme by."""

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

#: the backend for a layer
select_mxfp4_moe_backend = _FUNCTIONS.select("mxfp4", __name__)
#: the experts classes of a backend
backend_to_kernel_cls = _FUNCTIONS.backend_to_kernel_cls
#: what an engine's option names, as a backend
map_mxfp4_backend = _FUNCTIONS.map_backend
#: every backend in order of preference for a request
get_priority_backends = _FUNCTIONS.get_priority_backends
#: prepare + the selected experts + finalize around converted weights
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
    """Canonical tensors of one layer in the layout of the selected backend.  Pure: the inputs stay as they are.

    - ``w13`` uint8 [E, 2N, ceil(K/2)] (gate rows first), ``w2`` uint8 [E, K, ceil(N/2)]: two e2m1 codes in a byte, even
      columns in the low four bits
    - ``w13_scale`` uint8 [E, 2N, ceil(K/32)], ``w2_scale`` uint8 [E, K, ceil(N/32)]: e8m0, 2**(s - 127)
    - ``w13_bias`` [E, 2N], ``w2_bias`` [E, K]
    - ``w13_input_scale``, ``w2_input_scale`` float32 [E], for static activations

    Interleaved gate and up rows (gpt-oss): see :func:`moe_mxfp4.layout.deinterleave`.
    Raises TensorError, which names the tensor, what was found and what was expected.
    """
    return _FUNCTIONS.convert(
        selection,
        w13=w13,
        w2=w2,
        w13_scale=w13_scale,
        w2_scale=w2_scale,
        w13_bias=w13_bias,
        w2_bias=w2_bias,
        w13_input_scale=w13_input_scale,
        w2_input_scale=w2_input_scale,
    )


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
    """Scales and biases of canonical weights, as :func:`convert_to_mxfp4_moe_kernel_format` takes them.  By keyword.

    ``activation_key`` None: 16-bit activations; ``a1_scale``, ``a2_scale`` float32 [E] for static ones.
    Raises ConfigError where the keys and the tensors contradict each other, TensorError for wrong shapes and dtypes.
    """
    return make_quant_config(
        weight_key=kMxfp4Static,
        activation_key=activation_key,
        w1_scale=w1_scale,
        w2_scale=w2_scale,
        w1_bias=w1_bias,
        w2_bias=w2_bias,
        a1_scale=a1_scale,
        a2_scale=a2_scale,
        canonical=True,
    )


def mxfp4_round_up_hidden_size_and_intermediate_size(
    backend: str | Mxfp4MoeBackend, hidden_size: int, intermediate_size: int
) -> tuple[int, int]:
    """(K, N) as ``backend`` holds them inside, at least ``hidden_size`` and ``intermediate_size``.

    For those who reckon memory: converted weights are padded by the backend itself, callers keep their sizes, and the
    output has ``hidden_size`` columns.  Raises ConfigError for a backend that is not installed and sizes below 1.
    """
    if hidden_size < 1 or intermediate_size < 1:
        raise ConfigError(f"sizes are positive, got hidden_size {hidden_size}, intermediate_size {intermediate_size}")
    sizes = [
        experts.padded_sizes(hidden_size, intermediate_size)
        for experts in backend_to_kernel_cls(backend)
        if issubclass(experts, PaddedExperts)
    ]
    hidden, inter = zip(*sizes, strict=True) if sizes else ((hidden_size,), (intermediate_size,))
    return max(hidden), max(inter)
