"""Start the kernels of the grouped matrix product; the host side of `tile_kernel` and `combine_kernel`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from moe_core.gemm.combine_kernel import combine_kernel
from moe_core.gemm.plan import TileConfig, max_tiles
from moe_core.gemm.schedule import sorted_locate, sorted_tiles
from moe_core.gemm.specimen import launch
from moe_core.gemm.tile_kernel import PAIR, POSITION, TOKEN, grouped_tile_kernel
from moe_core.ops.sort import SortedPairs


@dataclass(frozen=True, eq=False)
class Operand:
    """The weights of one product: what the scheme's device functions get, and how many rows and columns there are.

    ``device`` is the tuple `B` of the kernels; ``descriptor`` makes the host-side tensor descriptor for a tile of so
    many rows, or is None where the weights must be read through pointers.  ``rows`` counts one half when gated.
    ``aligned``: every row starts at a multiple of 16 bytes.
    """

    device: tuple[Any, ...]
    rows: int
    columns: int
    bias: Tensor | None = None
    descriptor: Any = None
    aligned: bool = True


@dataclass(frozen=True, eq=False)
class Activation:
    """The activation between the two products: a `MoEActivation` value and its parameters."""

    name: str
    alpha: float = 1.0
    beta: float = 0.0
    limit: float | None = None

    @property
    def gated(self) -> bool:
        return not self.name.endswith("_no_mul")

    @property
    def kind(self) -> str:
        return self.name.removesuffix("_no_mul")


@dataclass(frozen=True, eq=False)
class Routing:
    """``ids`` [M, k] int32 or int64, ``weights`` [M, k] float32, both contiguous; ``expert_map`` [E] int32 or None."""

    ids: Tensor
    weights: Tensor
    num_experts: int
    expert_map: Tensor | None = None
    weight_on_input: bool = False

    @property
    def top_k(self) -> int:
        return self.ids.shape[1]

    @property
    def num_ids(self) -> int:
        return self.num_experts if self.expert_map is None else self.expert_map.numel()


@dataclass(frozen=True, eq=False)
class TileFunctions:
    """A scheme's `@triton.jit` functions; see `moe_core.gemm.tile_kernel`."""

    open_a: Any
    load_a: Any
    open_b: Any
    load_b: Any
    multiply: Any
    quantize: Any
    prefetch_b: Any = None


def grouped_product(
    functions: TileFunctions,
    config: TileConfig,
    *,
    a: tuple[Any, ...],
    b: Operand,
    out: Tensor,
    out_scale: Tensor | None,
    pairs: SortedPairs,
    routing: Routing,
    activation: Activation | None,
    block_k: int,
    pdl: bool,
    a_by_pair: bool = False,
) -> None:
    """One product over sorted pairs: the up product with an ``activation``, the down product without.

    The up product reads A by token and writes sorted rows, quantised when ``out_scale`` is given; the down product
    reads sorted rows and writes by pair.  An up product with ``config.split`` > 1 writes its parts by pair instead,
    [pairs * split, 2N] float32, which `combine_parts` finishes; ``a_by_pair`` says that A of the down product is
    in that order.  A split down product writes [pairs * split, K] float32.
    """
    up = activation is not None
    weight = 0 if up != routing.weight_on_input else (1 if up else 2)
    pieces = pairs.block_m // config.block_m
    tiles = max_tiles(routing.ids.numel(), routing.num_experts, pairs.block_m) * pieces
    limit = activation.limit if activation is not None else None
    launch(
        grouped_tile_kernel,
        (tiles * triton.cdiv(b.rows, config.block_n) * config.split,),
        out,
        out_scale,
        a,
        b.device,
        b.descriptor(config.block_n, block_k) if config.tma and b.descriptor is not None else None,
        (pairs.tiles, pairs.offsets, pairs.pairs),
        b.bias,
        routing.weights,
        b.rows,
        b.columns,
        out.stride(0),
        0 if out_scale is None else out_scale.stride(0),
        0 if b.bias is None else b.bias.stride(0),
        routing.top_k,
        activation.alpha if activation is not None else 0.0,
        activation.beta if activation is not None else 0.0,
        limit if limit is not None else 0.0,
        tiles_of=sorted_tiles,
        locate=sorted_locate,
        open_a=functions.open_a,
        load_a=functions.load_a,
        open_b=functions.open_b,
        load_b=functions.load_b,
        prefetch_b=functions.prefetch_b if pdl and not up else None,
        multiply=functions.multiply,
        quantize=functions.quantize if out_scale is not None else None,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=block_k,
        GROUP_M=config.group_m,
        EVEN_N=b.rows % config.block_n == 0,
        EVEN_K=b.columns % block_k == 0,
        SWAP=config.swap,
        GATED=activation is not None and activation.gated,
        ACTIVATION=activation.kind if activation is not None else "",
        HAS_LIMIT=limit is not None,
        HAS_BIAS=b.bias is not None,
        WEIGHT=weight,
        A_ROWS=TOKEN if up else (PAIR if a_by_pair else POSITION),
        OUT_ROWS=POSITION if up and config.split == 1 else PAIR,
        SPLIT=config.split,
        PIECES=pieces,
        # the up product before it has waited for the sort, and whatever that depended on
        EARLY=pdl and not up,
        pdl=pdl,
        # rows that 16-byte copies cannot reach go through registers: share them among more threads
        num_warps=config.num_warps if b.aligned else 8,
        num_stages=config.num_stages,
    )


def combine_parts(
    quantize: Any,
    *,
    parts: Tensor,
    split: int,
    bias: Tensor | None,
    out: Tensor,
    out_scale: Tensor,
    routing: Routing,
    activation: Activation,
    columns: int,
    group: int,
    pdl: bool,
) -> None:
    """Finish a split up product: out[pair] = quantize(act(sum of parts + bias)); ``columns`` N of the result."""
    groups = triton.cdiv(columns, group)
    launch(
        combine_kernel,
        (routing.ids.numel(), groups),
        parts,
        routing.ids,
        routing.expert_map,
        bias,
        out,
        out_scale,
        columns,
        routing.num_ids,
        routing.num_experts,
        parts.stride(0),
        out.stride(0),
        out_scale.stride(0),
        0 if bias is None else bias.stride(0),
        activation.alpha,
        activation.beta,
        activation.limit if activation.limit is not None else 0.0,
        quantize=quantize,
        SPLIT=split,
        GROUP=group,
        GATED=activation.gated,
        ACTIVATION=activation.kind,
        HAS_LIMIT=activation.limit is not None,
        HAS_BIAS=bias is not None,
        HAS_MAP=routing.expert_map is not None,
        pdl=pdl,
        num_warps=1,
    )


def is_aligned(weights: Tensor) -> bool:
    """Whether every row of ``weights`` [E, rows, columns] starts at a multiple of 16 bytes."""
    sizes = (weights.data_ptr(), *(stride * weights.element_size() for stride in weights.stride()[:2]))
    return all(size % 16 == 0 for size in sizes)


def weight_descriptor(weights: Tensor) -> Any:
    """Maker of host-side tensor descriptors over ``weights`` [E, rows, columns], flattened to [E * rows, columns].

    None where the hardware's rules for such descriptors are not met (16-byte alignment, contiguous experts).
    """
    experts, rows, columns = weights.shape
    flat = weights.stride(2) == 1 and weights.stride(0) == rows * weights.stride(1)
    if not (is_aligned(weights) and flat and weights.numel()):
        return None
    matrix = torch.as_strided(weights, (experts * rows, columns), (weights.stride(1), 1))

    def make(block_rows: int, block_columns: int) -> Any:
        from triton.tools.tensor_descriptor import TensorDescriptor

        return TensorDescriptor.from_tensor(matrix, [block_rows, block_columns])

    return make
