"""Start the kernels of the grouped matrix product; the host side of `tile_kernel` and `vector_kernel`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from moe_core.gemm.plan import TileConfig, VectorConfig, max_tiles
from moe_core.gemm.schedule import sorted_locate, sorted_tiles
from moe_core.gemm.specimen import launch
from moe_core.gemm.tile_kernel import grouped_tile_kernel
from moe_core.gemm.vector_kernel import vector_down_kernel, vector_up_kernel
from moe_core.ops.sort import SortedPairs


@dataclass(frozen=True, eq=False)
class Operand:
    """The weights of one product: what the scheme's device functions get, and how many rows and columns there are.

    ``device`` is the tuple `B` of the kernels; ``descriptor`` makes the host-side tensor descriptor for a tile of so
    many rows, or is None where the weights must be read through pointers.  ``rows`` counts one half when gated.
    """

    device: tuple[Any, ...]
    rows: int
    columns: int
    bias: Tensor | None = None
    descriptor: Any = None


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

    load_a: Any
    load_b: Any
    multiply: Any
    quantize: Any


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
) -> None:
    """One product over sorted pairs: the up product with an ``activation``, the down product without.

    The up product reads A by token and writes sorted rows, quantised when ``out_scale`` is given; the down product
    reads sorted rows and writes by pair.
    """
    up = activation is not None
    weight = 0 if up != routing.weight_on_input else (1 if up else 2)
    tiles = max_tiles(routing.ids.numel(), routing.num_experts, pairs.block_m)
    limit = activation.limit if activation is not None else None
    launch(
        grouped_tile_kernel,
        (tiles * triton.cdiv(b.rows, config.block_n),),
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
        load_a=functions.load_a,
        load_b=functions.load_b,
        multiply=functions.multiply,
        quantize=functions.quantize if out_scale is not None else None,
        BLOCK_M=pairs.block_m,
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
        A_BY_TOKEN=up,
        OUT_BY_PAIR=not up,
        pdl=pdl,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def vector_up(
    quantize: Any,
    products: Any,
    config: VectorConfig,
    *,
    x: Tensor,
    b: Operand,
    out: Tensor,
    routing: Routing,
    activation: Activation,
    group: int,
    pdl: bool,
) -> None:
    """out[pair] = act(w13 x), float32, one program per pair and ``config.rows`` columns."""
    launch(
        vector_up_kernel,
        (routing.ids.numel(), triton.cdiv(b.rows, config.rows)),
        x,
        b.device,
        routing.ids,
        routing.expert_map,
        b.bias,
        routing.weights,
        out,
        b.rows,
        b.columns,
        routing.top_k,
        routing.num_ids,
        routing.num_experts,
        x.stride(0),
        out.stride(0),
        0 if b.bias is None else b.bias.stride(0),
        activation.alpha,
        activation.beta,
        activation.limit if activation.limit is not None else 0.0,
        quantize=quantize,
        products=products,
        ROWS=config.rows,
        G=config.groups,
        GROUP=group,
        STAGES=config.num_stages,
        GATED=activation.gated,
        ACTIVATION=activation.kind,
        HAS_LIMIT=activation.limit is not None,
        HAS_BIAS=b.bias is not None,
        HAS_MAP=routing.expert_map is not None,
        WEIGHT=routing.weight_on_input,
        pdl=pdl,
        num_warps=config.num_warps,
    )


def vector_down(
    quantize: Any,
    products: Any,
    config: VectorConfig,
    *,
    h: Tensor,
    b: Operand,
    out: Tensor,
    routing: Routing,
    group: int,
    pdl: bool,
) -> None:
    """out[token] = sum over slots of weight * (w2 h), one program per token and ``config.rows`` columns."""
    launch(
        vector_down_kernel,
        (routing.ids.shape[0], triton.cdiv(b.rows, config.rows)),
        h,
        b.device,
        routing.ids,
        routing.expert_map,
        b.bias,
        routing.weights,
        out,
        b.rows,
        b.columns,
        routing.num_ids,
        routing.num_experts,
        h.stride(0),
        out.stride(0),
        0 if b.bias is None else b.bias.stride(0),
        quantize=quantize,
        products=products,
        TOP_K=routing.top_k,
        ROWS=config.rows,
        G=config.groups,
        GROUP=group,
        STAGES=config.num_stages,
        HAS_BIAS=b.bias is not None,
        HAS_MAP=routing.expert_map is not None,
        WEIGHT=not routing.weight_on_input,
        pdl=pdl,
        num_warps=config.num_warps,
    )


def weight_descriptor(weights: Tensor) -> Any:
    """Maker of host-side tensor descriptors over ``weights`` [E, rows, columns], flattened to [E * rows, columns].

    None where the hardware's rules for such descriptors are not met (16-byte alignment, contiguous experts).
    """
    experts, rows, columns = weights.shape
    aligned = weights.data_ptr() % 16 == 0 and (weights.stride(1) * weights.element_size()) % 16 == 0
    flat = weights.stride(2) == 1 and weights.stride(0) == rows * weights.stride(1)
    if not (aligned and flat and weights.numel()):
        return None
    matrix = torch.as_strided(weights, (experts * rows, columns), (weights.stride(1), 1))

    def make(block_rows: int, block_columns: int) -> Any:
        from triton.tools.tensor_descriptor import TensorDescriptor

        return TensorDescriptor.from_tensor(matrix, [block_rows, block_columns])

    return make
