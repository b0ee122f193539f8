"""Base of experts whose weights are dequantized in registers; imports no Triton."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moe_core.errors import TensorError
from moe_core.kernels.experts.grouped import GroupedExperts
from moe_core.kernels.gemm.heuristics import LayerProblem
from moe_core.spec.quant_key import QuantKey
from moe_core.spec.weights import KernelWeights, MoEWeights

if TYPE_CHECKING:
    from moe_core.kernels.gemm.fragments.convert import Converted
    from moe_core.kernels.gemm.fused.plain import RowQuantizer
    from moe_core.kernels.gemm.fused.scheme import ActivationScheme
    from moe_core.kernels.gemm.gemv.plan import GemvLayer
    from moe_core.kernels.gemm.marlin.gemv import GemvFunctions
    from moe_core.kernels.gemm.marlin.weight import Functions, MarlinMatrix, WordFunctions
    from moe_core.kernels.gemm.tiles.launch import GemmWeight


class MarlinExperts(GroupedExperts):
    """Experts with weights dequantized in registers.

    Subclasses add claims, `converted` and the device functions of their element type.
    """

    family = "mixed_input"
    #: spilled values: tile coordinates outside the mainloop, for which 128 rows of activations leave no registers;
    #: masks of odd sizes; scales in groups of 32 in the warp-specialized kernel, eight of this step and eight of the
    #: next
    accepted_spills = (224, 640)

    @property
    @abstractmethod
    def functions(self) -> Functions:
        """Device functions of the element type."""

    @abstractmethod
    def converted(self, name: str, weights: MoEWeights, scale: Tensor) -> Converted:
        """Convert one canonical weight to the layout of the kernels.

        Args:
            name: "w13" or "w2".
            weights: Canonical weights.
            scale: Scale of the weight.

        Returns:
            The converted weight.
        """

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
            quant_config=weights.quant_config(
                w1_scale=w13.scales, w2_scale=w2.scales, w1_zp=None, w2_zp=None, w1_g_idx=None, w2_g_idx=None
            ),
            extra={name: tensor for name, tensor in extra.items() if tensor is not None},
            arrangement={
                name: self._activation_order(name, made.index)
                for name, made in (("w13", w13), ("w2", w2))
                if made.index is not None
            },
        )

    def _activation_order(self, name: str, index: Tensor) -> str:
        """Describe how the columns of ``name``, w13 or w2, are ordered by group.

        ``index`` is [E, columns].
        """
        size, places = self.quantized_key.group_size, index.shape[1]
        order = "columns in an activation order (g_idx)"
        if places == self.sizes(name)[1]:
            return f"{order} of whole groups of {size}"
        return f"{order} of groups that are not all of {size} columns, filled up to {places} columns"

    @property
    def quantized_key(self) -> QuantKey:
        """Quantization of the weights; raises TensorError for 16-bit weights."""
        if self.weight_key is None:
            raise TensorError("weight_key is None (16-bit weights), expected a quantized weight key")
        return self.weight_key

    def matrix(self, name: str, weights: KernelWeights) -> MarlinMatrix:
        """Return one weight as the kernels take it.

        Args:
            name: "w13" or "w2".
            weights: Weights of the layer.

        Returns:
            The weight with its scales, bias and column order.
        """
        from moe_core.kernels.gemm.marlin.weight import MarlinMatrix
        from moe_core.kernels.gemm.tiles.columns import CHUNK

        key, quant, first = self.quantized_key, weights.quant_config, name == "w13"
        (n, columns), (scales, bias) = self.sizes(name), self.scales(name, weights)
        index, size = weights.extra.get(f"{name}_index"), key.group_size
        if index is not None:
            columns = index.shape[1]
            # groups of unequal sizes were padded to multiples of a smaller group size, whose scales are not paired
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
        """Return the device functions of the element type for a single token.

        Args:
            matrix: The first weight.

        Returns:
            The functions, or None if tensor cores are faster.
        """
        return None

    def word_functions(self, matrix: MarlinMatrix) -> WordFunctions | None:
        """Return the device functions of the element type for the warp-specialized kernel.

        Args:
            matrix: The weight.

        Returns:
            The functions, or None if it has none.
        """
        return None

    @property
    def operand_dtype(self) -> torch.dtype:
        """Dtype of x and h as GEMM operands; quantized activations are multiplied as bfloat16."""
        return self.config.dtype if self.activation_key is None else torch.bfloat16

    @property
    def gathers_columns(self) -> bool:
        """Whether columns of x or of h are gathered."""
        return False

    @property
    def has_static_scales(self) -> bool:
        """Whether x and h are quantized by static scales of their experts."""
        return self.activation_key is not None and self.activation_key.is_static

    @cached_property
    def problem(self) -> LayerProblem:
        # activations that are gathered, or quantized by per-expert scales, are stored by pair, which the
        # warp-specialized kernel cannot write; batched rows are grouped by expert in any case
        by_pair = (self.gathers_columns or self.has_static_scales) and not self.batched
        return replace(super().problem, dtype_bytes=self.operand_dtype.itemsize, permuted=by_pair)

    @property
    def takes_vectors(self) -> bool:
        # LoRA reads x and h between the launches; rows of x that depend on the expert are stored by pair
        if self.has_static_scales or self.batched or self.config.is_lora_enabled or self.operand_dtype.itemsize != 2:
            return False
        # the router weight is applied to gemm1's output, which equals weighting x before it is quantized only if the
        # scale is proportional to x
        key, on_input = self.activation_key, self.config.apply_router_weight_on_input
        return key is None or not on_input or key.scale.dtype is torch.float32

    def row_quantizer(self, weights: KernelWeights | None) -> RowQuantizer | None:
        """Return how x and h are quantized.

        Args:
            weights: Weights of the layer; None if only the workspaces are needed.

        Returns:
            The quantizer, or None for 16-bit activations.
        """
        if self.activation_key is None:
            return None
        from moe_core.kernels.gemm.as_stored.qdq import qdq

        if weights is None:
            return qdq(self.activation_key)
        quant = weights.quant_config
        return qdq(self.activation_key, weights.w13.device, (quant.a1_scale, quant.a2_scale))

    def activation_scheme(self, weights: KernelWeights | None) -> ActivationScheme:
        from moe_core.kernels.gemm.fused.plain import PlainScheme
        from moe_core.kernels.gemm.tiles.columns import Columns

        config = self.config
        x, h = Columns(config.hidden_size), Columns(config.intermediate_size)
        if weights is not None:
            x, h = (self.matrix(name, weights).activation_columns for name in ("w13", "w2"))
        return PlainScheme(x, h, self.gathers_columns, self.row_quantizer(weights))

    def gemm_weight(self, name: str, weights: KernelWeights) -> GemmWeight:
        matrix = self.matrix(name, weights)
        return matrix.gemm_weight(self.functions, self.word_functions(matrix))

    def gemv_layer(self, weights: KernelWeights) -> GemvLayer | None:
        from moe_core.kernels.gemm.marlin.gemv import MarlinGemvLayer
        from moe_core.kernels.gemm.tiles.launch import Activation

        w13, w2 = (self.matrix(name, weights) for name in ("w13", "w2"))
        functions = self.gemv_functions(w13)
        if functions is None:
            return None
        return MarlinGemvLayer(Activation.of(self.config), functions, w13, w2, self.row_quantizer(weights))


class MarlinIntegerExperts(MarlinExperts):
    """Experts of 4- and 8-bit integers, with scales of rows or of groups; subclasses add claims."""

    def converted(self, name: str, weights: MoEWeights, scale: Tensor) -> Converted:
        from moe_core.kernels.gemm.fragments.convert import convert_integers

        return convert_integers(
            getattr(weights, name),
            scale,
            self.quantized_key,
            self.sizes(name)[1],
            zero_point=getattr(weights, f"{name}_zero_point"),
            g_idx=getattr(weights, f"{name}_g_idx"),
            interleaved=name == "w13" and self.config.is_gated,
            dtype=self.operand_dtype,
        )

    @property
    def functions(self) -> Any:
        from moe_core.kernels.gemm.marlin.integers import integer_functions

        return integer_functions

    def gemv_functions(self, matrix: MarlinMatrix) -> GemvFunctions | None:
        from moe_core.kernels.gemm.marlin.integers import integer_gemv

        return integer_gemv(matrix)

    def word_functions(self, matrix: MarlinMatrix) -> WordFunctions | None:
        from moe_core.kernels.gemm.marlin.integers import integer_words

        return integer_words(matrix)

    @property
    def gathers_columns(self) -> bool:
        return self.quantized_key.permuted or self.quantized_key.pre_scaled
