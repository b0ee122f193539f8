"""The part of core that packages may use inside kernels; imports Triton.

It adds to :mod:`moe_core.api.experts`. A scheme adds an element type: `@triton.jit` functions that load, dequantize and
scale the tiles of its weights. The docstring of `moe_core.kernels.gemm.tiles.tile_kernel` defines their signatures.
Import functions and constants by name: they are then globals of the functions that use them, which is how Triton finds
them. Names change meaning or are removed only with a new major version of :data:`moe_core.KERNEL_API`.

**Weights and activations of a layer**: a :class:`GemmWeight` is the operand that one GEMM gets for a weight, with its
device functions (:class:`TileFunctions`). An :class:`ActivationScheme` defines how x and h become operands; a
:class:`GroupScheme` quantizes them in groups of columns.

**scaled_mm**, 8-bit GEMMs with per-row scales: an element type is a :class:`ScaledMMFunctions`; ``E4M3`` is one.

**Marlin GEMMs** dequantize weights stored in the order of register fragments. A :class:`MarlinMatrix` is such a weight,
:class:`Converted` its tensors. A step of the mainloop has ``STEP`` columns. ``FEW`` is the largest number of activation
rows for which registers remain for the product of a step. An element type is a function that dequantizes packed words:
specialize ``multiply`` or ``multiply_group`` with it as ``dequantize``; ``LOAD_WORDS`` has the load functions.
:class:`GemvFunctions` is the element type of the GEMV kernels for one token, :class:`WordFunctions` that of the
warp-specialized kernel for sm_90.

**As-stored GEMMs** dequantize weights in the layout that checkpoints store.

**Plain or transposed products** (SWAP_AB): vectors over the rows and columns of the result, shaped to multiply it.

**Tiles of weights**: row pointers, and the tile itself, by pointers or a tensor descriptor.

**Rows with one scale each**: loading activations and weights, computing scales from magnitudes, and preserving NaN.

**Zero points** of int8 activations are packed with their scale in an int64.

**Copies of device functions** with other constants, or with another function in them, are made by ``specialize``.

**Casts and arithmetic** that are exact on every target and in the interpreter (``INTERPRET``). ``wait_for_mma`` is
needed where an MMA reads registers that the program has written.
"""

from __future__ import annotations

from moe_core.kernels.device.casts import INTERPRET, divide, downcast_e4m3, factor_e4m3, round_int8, scale_product
from moe_core.kernels.device.registers import join_last, split_last, unpack
from moe_core.kernels.device.specialize import specialize
from moe_core.kernels.device.wait import wait_for_mma
from moe_core.kernels.gemm.as_stored.scheme import (
    SHORT_STEP,
    STEP,
    activation_functions,
    as_stored_scheme,
    packed_weight,
)
from moe_core.kernels.gemm.as_stored.tiles import (
    in_order,
    load_blocks,
    open_blocks,
)
from moe_core.kernels.gemm.fragments.convert import Converted
from moe_core.kernels.gemm.fragments.dequant import asm_values, in_columns, pair
from moe_core.kernels.gemm.fragments.operand import (
    LOAD_WORDS,
    SCALE_ACC_TOKENS,
    exponent_pair,
    multiply,
    multiply_group,
    of_group,
    open_groups,
    open_rows,
    per_word,
    prefetch_group,
    scale_acc_channels,
    scale_acc_rows,
    step_bytes,
    step_e8m0,
    tile_words,
)
from moe_core.kernels.gemm.fused.groups import GroupScheme
from moe_core.kernels.gemm.fused.scaled_mm import E4M3, ScaledMMFunctions
from moe_core.kernels.gemm.fused.scheme import ActivationScheme
from moe_core.kernels.gemm.marlin.gemv import GemvFunctions
from moe_core.kernels.gemm.marlin.weight import MarlinMatrix, WordFunctions
from moe_core.kernels.gemm.tiles.launch import (
    GemmWeight,
    TileFunctions,
    WarpSpecializedGemm,
    weight_strides,
)
from moe_core.kernels.gemm.tiles.operands import open_plain, step_strides, weight_rows, weight_tile
from moe_core.kernels.gemm.tiles.scaled_mm import (
    LOAD_PARTS,
    load_unquantized,
    multiply_codes,
    open_weights,
    quantize_group,
    scale_acc,
    scale_acc_tokens,
    scale_of,
    shifted,
    with_zero,
)
from moe_core.kernels.gemm.tiles.swap_ab import FEW, as_column, as_row, swap_ab_dot
from moe_core.kernels.ops._quantize_kernels import is_finite

__all__ = [
    # Weights and activations of a layer.
    "ActivationScheme",
    "GemmWeight",
    "GroupScheme",
    "WarpSpecializedGemm",
    "TileFunctions",
    "weight_strides",
    # scaled_mm.
    "E4M3",
    "ScaledMMFunctions",
    # Marlin GEMMs.
    "FEW",
    "LOAD_WORDS",
    "SCALE_ACC_TOKENS",
    "STEP",
    "Converted",
    "GemvFunctions",
    "MarlinMatrix",
    "WordFunctions",
    "split_last",
    "asm_values",
    "exponent_pair",
    "in_columns",
    "multiply",
    "multiply_group",
    "of_group",
    "open_groups",
    "open_rows",
    "pair",
    "per_word",
    "prefetch_group",
    "scale_acc_channels",
    "scale_acc_rows",
    "step_bytes",
    "step_e8m0",
    "tile_words",
    "join_last",
    "unpack",
    # As-stored GEMMs.
    "SHORT_STEP",
    "activation_functions",
    "in_order",
    "load_blocks",
    "open_blocks",
    "open_plain",
    "packed_weight",
    "as_stored_scheme",
    "swap_ab_dot",
    # Plain or transposed products.
    "as_column",
    "as_row",
    # Tiles of weights.
    "step_strides",
    "weight_rows",
    "weight_tile",
    # Rows with one scale each.
    "LOAD_PARTS",
    "is_finite",
    "load_unquantized",
    "multiply_codes",
    "open_weights",
    "quantize_group",
    "scale_acc",
    "scale_acc_tokens",
    "scale_of",
    # Zero points.
    "shifted",
    "with_zero",
    # Casts and arithmetic.
    "INTERPRET",
    "divide",
    "factor_e4m3",
    "downcast_e4m3",
    "round_int8",
    "scale_product",
    "wait_for_mma",
    # Copies of device functions.
    "specialize",
]
