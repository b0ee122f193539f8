"""The base of experts whose weights are dequantised in registers.  Importing this imports no Triton."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moe_core.errors import TensorError
from moe_core.gemm.heuristics import LayerProblem
from moe_core.gemm_experts.grouped import GroupedExperts
from moe_core.quant_config import make_quant_config
from moe_core.quant_key import QuantKey
from moe_core.weights import KernelWeights, MoEWeights

if TYPE_CHECKING:
    from moe_core.gemm.fused.scheme import ActivationScheme
    from moe_core.gemm.gemv import GemvLayer
    from moe_core.gemm.launch import GemmWeight
    from moe_core.gemm.marlin.convert import Converted
    from moe_core.gemm.marlin.gemv import GemvFunctions
    from moe_core.gemm.marlin.weight import Functions, MarlinMatrix, WordFunctions


class MarlinExperts(GroupedExperts):
    """Subclasses add claims, `converted` and the device functions of their element type."""

    family = "mixed_input"
    #: tile coordinates outside the k loop: 128 rows of activations leave no registers for them; masks of odd sizes;
    #: the warp-specialised kernel's scales in groups of 32, eight of this step and eight of the next
    accepted_spills = (224, 640)

    @property
    @abstractmethod
    def functions(self) -> Functions:
        """The element type's device functions."""

    @abstractmethod
    def converted(self, name: str, weights: MoEWeights, scale: Tensor) -> Converted:
        """``name``, w13 or w2, of canonical weights as the kernels read it; ``scale`` is its scale."""

    def convert(self, weights: MoEWeights) -> KernelWeights:
        w13_scale, w2_scale = weights.weight_scales
        w13, w2 = self.converted("w13", weights, w13_scale), self.converted("w2", weights, w2_scale)
        extra = {
            f"{name}_{kind}": getattr(made, kind)
            for kind in ("channel_scales", "index", "powers")
            for name, made in (("w13", w13), ("w2", w2))
        }
        return KernelWeights(
            w13=w13.words,
            w2=w2.words,
            quant_config=make_quant_config(
                weight_key=weights.weight_key,
                activation_key=self.activation_key,
                w1_scale=w13.scales,
                w2_scale=w2.scales,
                w1_pre_scale=weights.w13_pre_scale,
                w2_pre_scale=weights.w2_pre_scale,
                w1_bias=weights.w13_bias,
                w2_bias=weights.w2_bias,
            ),
            extra={name: tensor for name, tensor in extra.items() if tensor is not None},
        )

    @property
    def quantized_key(self) -> QuantKey:
        """Of the weights.  Raises TensorError for 16-bit ones."""
        if self.weight_key is None:
            raise TensorError("16-bit weights are not read here")
        return self.weight_key

    def matrix(self, name: str, weights: KernelWeights) -> MarlinMatrix:
        """What the kernels get of ``name``, w13 or w2."""
        from moe_core.gemm.columns import CHUNK
        from moe_core.gemm.marlin.weight import MarlinMatrix

        key, quant, first = self.quantized_key, weights.quant_config, name == "w13"
        (n, columns), (scales, bias) = self.sizes(name), self.scales(name, weights)
        index, size = weights.extra.get(f"{name}_index"), key.group_size
        if index is not None:
            columns = index.shape[1]
            # groups of other numbers of columns were filled up to smaller ones, whose scales are in no pairs
            size = size if scales.dim() == 4 or scales.shape[1] == -(-columns // size) else CHUNK
        return MarlinMatrix(
            getattr(weights, name),
            key.dtype.bits,
            n,
            columns,
            size,
            scales,
            channel_scales=weights.extra.get(f"{name}_channel_scales"),
            bias=bias,
            interleaved=first and self.config.is_gated,
            index=index,
            pre_scales=quant.w1_pre_scale if first else quant.w2_pre_scale,
            powers=weights.extra.get(f"{name}_powers"),
        )

    def gemv_functions(self, matrix: MarlinMatrix) -> GemvFunctions | None:
        """What one token's products take of the element type, or None where tensor cores are ahead."""
        return None

    def word_functions(self, matrix: MarlinMatrix) -> WordFunctions | None:
        """What the warp-specialised kernel takes of the element type, or None where it has none."""
        return None

    @property
    def operand_dtype(self) -> torch.dtype:
        """Of x and h as they are multiplied."""
        return self.config.dtype

    @property
    def gathers_columns(self) -> bool:
        """Whether columns of x or of h are gathered."""
        return False

    @cached_property
    def problem(self) -> LayerProblem:
        # activations that are gathered are by pair; batched rows lie by expert in any case
        permuted = self.gathers_columns and not self.batched
        return replace(super().problem, dtype_bytes=self.operand_dtype.itemsize, permuted=permuted)

    @property
    def takes_vectors(self) -> bool:
        # adapters read x and h between the launches
        plain = self.activation_key is None and not self.config.is_lora_enabled
        return plain and not self.batched and self.config.dtype.itemsize == 2

    def activation_scheme(self, weights: KernelWeights | None) -> ActivationScheme:
        from moe_core.gemm.columns import Columns
        from moe_core.gemm.fused.plain import PlainScheme

        config = self.config
        if weights is None:
            return PlainScheme(Columns(config.hidden_size), Columns(config.intermediate_size), self.gathers_columns)
        x, h = (self.matrix(name, weights).activation_columns for name in ("w13", "w2"))
        return PlainScheme(x, h, self.gathers_columns)

    def gemm_weight(self, name: str, weights: KernelWeights) -> GemmWeight:
        matrix = self.matrix(name, weights)
        return matrix.gemm_weight(self.functions, self.word_functions(matrix))

    def gemv_layer(self, weights: KernelWeights) -> GemvLayer | None:
        from moe_core.gemm.launch import Activation
        from moe_core.gemm.marlin.gemv import MarlinGemvLayer

        w13, w2 = (self.matrix(name, weights) for name in ("w13", "w2"))
        functions = self.gemv_functions(w13)
        return None if functions is None else MarlinGemvLayer(Activation.of(self.config), functions, w13, w2)


class MarlinIntegerExperts(MarlinExperts):
    """Experts of 4- and 8-bit integers, with scales of rows or of groups; subclasses add claims."""

    def converted(self, name: str, weights: MoEWeights, scale: Tensor) -> Converted:
        from moe_core.gemm.marlin.convert import convert_integers

        return convert_integers(
            getattr(weights, name),
            scale,
            self.quantized_key,
            self.sizes(name)[1],
            zero_point=getattr(weights, f"{name}_zero_point"),
            g_idx=getattr(weights, f"{name}_g_idx"),
            interleaved=name == "w13" and self.config.is_gated,
            dtype=self.config.dtype,
        )

    @property
    def functions(self) -> Any:
        from moe_core.gemm.marlin.integers import integer_functions

        return integer_functions

    def gemv_functions(self, matrix: MarlinMatrix) -> GemvFunctions | None:
        from moe_core.gemm.marlin.integers import integer_gemv

        return integer_gemv(matrix)

    def word_functions(self, matrix: MarlinMatrix) -> WordFunctions | None:
        from moe_core.gemm.marlin.integers import integer_words

        return integer_words(matrix)

    @property
    def gathers_columns(self) -> bool:
        return self.quantized_key.permuted or self.quantized_key.pre_scaled
