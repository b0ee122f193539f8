"""Marlin-class kernels: INT4 and INT8 codes in groups, repacked at load, with 16-bit activations.

Codes are put into the order in which the registers of the tensor cores hold them, and widened there: see
``moe_core.gemm.marlin``.  With an activation order, columns are put in the order of their groups at load, and
activations are gathered to match.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from moe_core import (
    GATED,
    NON_GATED,
    TRITON,
    Claims,
    FusedMoEActivationFormat,
    KernelWeights,
    MoEWeights,
    cuda,
    make_quant_config,
)
from moe_core.errors import TensorError
from moe_core.gemm.marlin.experts import MarlinExperts
from torch import Tensor

from moe_wna16.keys import BASES, every_key

if TYPE_CHECKING:
    from moe_core.gemm.marlin.convert import Converted
    from moe_core.gemm.marlin.layer import MarlinMatrix
    from moe_core.gemm.marlin.vector import VectorFunctions

_KEYS = tuple((every_key(base), None) for base in BASES)
_DTYPES = frozenset({torch.bfloat16, torch.float16})


class _MarlinWNA16Experts(MarlinExperts):
    """The computation, in both formats."""

    def convert(self, weights: MoEWeights) -> KernelWeights:
        from moe_core.gemm.marlin.convert import convert_integers

        key, scales = weights.weight_key, (weights.w13_scale, weights.w2_scale)
        if key is None or scales[0] is None or scales[1] is None:
            raise TensorError("codes come with w13_scale and w2_scale")
        config = self.config
        w13 = convert_integers(
            weights.w13,
            scales[0],
            key,
            config.hidden_size,
            zero_point=weights.w13_zero_point,
            g_idx=weights.w13_g_idx,
            interleaved=config.is_gated,
            dtype=config.dtype,
        )
        w2 = convert_integers(
            weights.w2,
            scales[1],
            key,
            config.intermediate_size,
            zero_point=weights.w2_zero_point,
            g_idx=weights.w2_g_idx,
            dtype=config.dtype,
        )
        return KernelWeights(
            w13=w13.words,
            w2=w2.words,
            quant_config=make_quant_config(
                weight_key=key,
                activation_key=None,
                w1_scale=w13.scales,
                w2_scale=w2.scales,
                w1_pre_scale=weights.w13_pre_scale,
                w2_pre_scale=weights.w2_pre_scale,
                w1_bias=weights.w13_bias,
                w2_bias=weights.w2_bias,
            ),
            extra={**_extra("w13", w13), **_extra("w2", w2)},
        )

    @property
    def functions(self) -> Any:
        from moe_core.gemm.marlin.functions import integer_functions

        return integer_functions

    def vectors(self, matrix: MarlinMatrix) -> VectorFunctions | None:
        from moe_core.gemm.marlin.functions import integer_vectors

        return integer_vectors(matrix)

    @property
    def gathered_columns(self) -> tuple[int, int]:
        key, config = self.weight_key, self.config
        if key is None or not (key.permuted or key.pre_scaled):
            return 0, 0
        return config.hidden_size, config.intermediate_size

    def matrix(self, name: str, weights: KernelWeights, scales: Tensor, bias: Tensor | None) -> MarlinMatrix:
        from moe_core.gemm.marlin.columns import CHUNK
        from moe_core.gemm.marlin.layer import MarlinMatrix

        key, config, quant = self.weight_key, self.config, weights.quant_config
        if key is None:
            raise TensorError("16-bit weights are not read here")
        first = name == "w13"
        index = weights.extra.get(f"{name}_index")
        columns, size = config.hidden_size if first else config.intermediate_size, key.group_size
        if index is not None:
            columns = index.shape[1]
            # groups of other numbers of columns were filled up to smaller ones
            size = size if scales.shape[1] == -(-columns // size) else CHUNK
        return MarlinMatrix(
            weights.w13 if first else weights.w2,
            key.dtype.bits,
            config.intermediate_size if first else config.hidden_size,
            columns,
            size,
            scales,
            factors=weights.extra.get(f"{name}_factors"),
            bias=bias,
            interleaved=first and config.is_gated,
            index=index,
            column_factors=quant.w1_pre_scale if first else quant.w2_pre_scale,
        )


def _extra(name: str, converted: Converted) -> dict[str, Tensor]:
    tensors = {"factors": converted.factors, "index": converted.index}
    return {f"{name}_{suffix}": tensor for suffix, tensor in tensors.items() if tensor is not None}


class MarlinWNA16Experts(_MarlinWNA16Experts):
    """Standard format."""

    claims = Claims(
        devices=(cuda(min=80),),
        keys=_KEYS,
        activations=GATED | NON_GATED,
        dtypes=_DTYPES,
        bias=True,
        expert_map=True,
        apply_router_weight_on_input=True,
        requires=(TRITON,),
        verified_on=("NVIDIA H200 (sm90)",),
    )


class BatchedMarlinWNA16Experts(_MarlinWNA16Experts):
    """Batched format."""

    claims = Claims(
        devices=(cuda(min=80),),
        keys=_KEYS,
        activations=GATED | NON_GATED,
        dtypes=_DTYPES,
        bias=True,
        formats=frozenset({FusedMoEActivationFormat.BATCHED}),
        requires=(TRITON,),
        verified_on=("NVIDIA H200 (sm90)",),
    )
