"""The oracle of the MXFP4 scheme, and the functions that engines know it by."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from moe_core import (
    Backend,
    BackendRefusedError,
    ConfigError,
    FusedMoEConfig,
    FusedMoEQuantConfig,
    KernelWeights,
    Oracle,
    QuantKey,
    SchemeFunctions,
    Selection,
    kMxfp4Static,
    make_quant_config,
)

from moe_mxfp4.keys import ACTIVATIONS
from moe_mxfp4.padding import PaddedExperts

if TYPE_CHECKING:
    import torch
    from moe_core import DeviceInfo, Environment
    from torch import Tensor


class Mxfp4MoeBackend(StrEnum):
    """Backends of this package; other packages' backends are named by their entry points."""

    FLASHINFER_TRTLLM = "flashinfer_trtllm"
    MARLIN = "marlin"
    BATCHED_MARLIN = "batched_marlin"
    FLASHINFER_CUTLASS = "flashinfer_cutlass"
    TRITON = "triton"
    TRITON_KERNELS = "triton_kernels"
    TORCH = "torch"


class Mxfp4Oracle(Oracle):
    """e2m1 weights with one e8m0 scale for 32 columns of a row."""

    scheme = "mxfp4"
    backend_enum = Mxfp4MoeBackend
    weight_only = True
    backends = (
        Backend(
            Mxfp4MoeBackend.FLASHINFER_TRTLLM.value,
            (
                "moe_mxfp4.experts.flashinfer_trtllm:TrtLlmMxfp4ExpertsMonolithic",
                "moe_mxfp4.experts.flashinfer_trtllm:TrtLlmMxfp4ExpertsModular",
            ),
            "moe-mxfp4",
        ),
        Backend(
            Mxfp4MoeBackend.MARLIN.value,
            ("moe_mxfp4.experts.marlin:MarlinMxfp4Experts", "moe_mxfp4.experts.marlin_fp8:MarlinMxfp4Fp8Experts"),
            "moe-mxfp4",
        ),
        Backend(
            Mxfp4MoeBackend.BATCHED_MARLIN.value,
            ("moe_mxfp4.experts.marlin:BatchedMarlinMxfp4Experts",),
            "moe-mxfp4",
        ),
        Backend(
            Mxfp4MoeBackend.FLASHINFER_CUTLASS.value,
            (
                "moe_mxfp4.experts.flashinfer_cutlass:FlashInferCutlassMxfp4Bf16Experts",
                "moe_mxfp4.experts.flashinfer_cutlass:FlashInferCutlassMxfp4Mxfp8Experts",
            ),
            "moe-mxfp4",
        ),
        Backend(Mxfp4MoeBackend.TRITON.value, ("moe_mxfp4.experts.triton:TritonMxfp4Experts",), "moe-mxfp4"),
        Backend(Mxfp4MoeBackend.TRITON_KERNELS.value, ("moe_mxfp4.experts.oai_triton:OAITritonExperts",), "moe-mxfp4"),
        Backend(Mxfp4MoeBackend.TORCH.value, ("moe_mxfp4.experts.torch:TorchMxfp4Experts",), "moe-mxfp4"),
    )

    def order(
        self,
        table: tuple[Backend, ...],
        device: DeviceInfo,
        config: FusedMoEConfig,
        weight_key: QuantKey | None,
        activation_key: QuantKey | None,
    ) -> tuple[Backend, ...]:
        """Backends that take the activations first, so that a report begins with what was asked for."""

        def takes(backend: Backend) -> bool:
            return any(experts.claims.takes_keys(weight_key, activation_key) for experts in backend.load())

        return tuple(sorted(table, key=lambda backend: not takes(backend)))

    def check_request(
        self, config: FusedMoEConfig, weight_key: QuantKey | None, activation_key: QuantKey | None
    ) -> None:
        if weight_key != kMxfp4Static:
            raise ConfigError(f"the mxfp4 scheme reads {kMxfp4Static}, asked for {weight_key or '16-bit weights'}")
        if activation_key is not None and activation_key not in ACTIVATIONS:
            known = ", ".join(map(str, ACTIVATIONS))
            raise ConfigError(
                f"the mxfp4 scheme multiplies with 16-bit activations or {known}; asked for {activation_key}"
            )


_FUNCTIONS = SchemeFunctions("mxfp4", Mxfp4MoeBackend)

#: the experts classes of a backend
backend_to_kernel_cls = _FUNCTIONS.backend_to_kernel_cls
#: what an engine's option names, as a backend
map_mxfp4_backend = _FUNCTIONS.map_backend
#: every backend in order of preference for a request
get_priority_backends = _FUNCTIONS.get_priority_backends
#: prepare + the selected experts + finalize around converted weights
make_mxfp4_moe_kernel = _FUNCTIONS.make_kernel


def select_mxfp4_moe_backend(
    config: FusedMoEConfig,
    *,
    weight_key: QuantKey | str = kMxfp4Static,
    activation_key: QuantKey | str | None = "auto",
    moe_backend: str | Mxfp4MoeBackend = "auto",
    device: DeviceInfo | str | torch.device | None = None,
    environment: Environment | None = None,
) -> Selection:
    """The backend for ``config``: ``.backend``, ``.experts`` (the class) and ``.report`` (every candidate's reasons).

    ``activation_key``: ``kMxfp8Dynamic``, ``kFp8DynamicTokenSym``, ... ask for quantised activations, None for 16-bit
    ones; neither is ever replaced.  ``"auto"`` asks for nothing: activations stay in 16 bits, unless ``moe_backend``
    names a backend that cannot run so on the device but can with others; ``.activation_key`` then says which.
    A named backend is used or refused, never replaced.  Raises SelectionError, ConfigError.
    """

    def select(key: QuantKey | str | None) -> Selection:
        return _FUNCTIONS.select(
            config,
            weight_key=weight_key,
            activation_key=key,
            moe_backend=moe_backend,
            device=device,
            environment=environment,
        )

    if activation_key != "auto":
        return select(activation_key)
    try:
        return select(None)
    except BackendRefusedError:
        for key in ACTIVATIONS:
            try:
                return select(key)
            except BackendRefusedError:
                continue
        raise


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
      columns in the low nibble
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
