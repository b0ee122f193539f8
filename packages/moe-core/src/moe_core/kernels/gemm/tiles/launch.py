"""Launches the grouped GEMM; the host side of `tile_kernel`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Literal, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from moe_core.errors import TensorError
from moe_core.kernels.gemm.plan import TileConfig
from moe_core.kernels.gemm.tiles.swap_ab import uniform
from moe_core.kernels.gemm.tiles.tile_kernel import grouped_gemm_kernel, split_k_reduce_kernel
from moe_core.kernels.launch.launch import launch
from moe_core.kernels.ops._sizes import max_tiles
from moe_core.kernels.ops.batch import Batch
from moe_core.kernels.ops.sort import Schedule
from moe_core.spec.config import FusedMoEConfig

#: as Triton takes numbers and texts inside a tuple, if constant; not truth values, which equal numbers
constant = cache(tl.constexpr)
FLOAT32 = tl.constexpr(tl.float32)
#: the row of an operand or of the result that a row of a tile is; "position": in the sorted order
Rows = Literal["position", "token", "pair"]
#: which rows are in use: IN_USE and row_args of `moe_core.kernels.gemm.tiles.quantize_rows.rows_in_use`
InUse = tuple[str, tuple[Any, ...]]


@dataclass(frozen=True, eq=False)
class WarpSpecialisedGemm:
    """How the warp-specialised kernel of `moe_core.kernels.gemm.sm90.kernel` computes a GEMM.

    ``tensor`` of one byte, row-major [E, rows, K] or block-major (`weight_strides`); ``functions`` gives the scheme's
    device functions, (prefetch, k loop), imported on use; ``weight_scales``: the tuple of scales that both take;
    ``depth`` columns of a step.
    ``start`` starts another kernel instead (one of `moe_core.kernels.gemm.sm90.launch`), and says what the others are.
    ``rows`` that the schedule's tiles may have; ``gathers``: it reads the rows of tokens too.
    """

    tensor: Tensor
    functions: Callable[[], Any]
    weight_scales: tuple[Any, ...]
    depth: int = 128
    start: Callable[[Gemm], None] | None = None
    rows: tuple[int, ...] = (128,)
    gathers: bool = False


@dataclass(frozen=True, eq=False)
class OperandA:
    """Operand A of a GEMM.

    - ``arguments``: the tuple `a_args` of the tile kernel's `open_a`
    - ``which``: the row of A that a row of a tile is
    - ``load_a`` reads it in place of the weight's, if given: what is quantised while it is loaded
    - ``aligned``: every row starts at a multiple of 16 bytes
    - ``warp_specialised``: the tuple `a_args` of the warp-specialised kernel; None: it can't read these rows
    """

    arguments: tuple[Any, ...]
    which: Rows
    load_a: Any = None
    aligned: bool = True
    warp_specialised: tuple[Any, ...] | None = None


def _same(config: TileConfig) -> TileConfig:
    return config


@dataclass(frozen=True, eq=False)
class GemmWeight:
    """The weight of one GEMM, made once per layer: what kernels get of it, and how many rows and columns there are.

    - ``arguments``: the tuple `b_args` of the tile kernel's `open_b`; the first is the tensor of weights [E, rows,
      columns], or block-major (`weight_strides`), in which an element holds ``packed`` columns
    - ``n`` rows, of one half (gate or up) where gated, and ``k`` columns; ``bias`` [E, rows of all halves], any float
      dtype
    - ``functions``: the device functions for a launch configuration
    - ``block_k``: columns of a step of the k loop; ``whole_steps``: rows are filled up to a multiple of it
    - ``interleaved``: gate and up rows are interleaved in blocks of 8, see the tile kernel
    - ``warp_specialised``: how the warp-specialised kernel multiplies it, if it can; ``tile_config``: the launch
      configuration of the tile kernel where that one was chosen and can't
    """

    arguments: tuple[Any, ...]
    n: int
    k: int
    functions: Callable[[TileConfig], TileFunctions]
    block_k: int = 128
    bias: Tensor | None = None
    packed: int = 1
    interleaved: bool = False
    whole_steps: bool = False
    warp_specialised: WarpSpecialisedGemm | None = None
    tile_config: Callable[[TileConfig], TileConfig] = _same

    @cached_property
    def aligned(self) -> bool:
        """`has_aligned_rows` of the weights."""
        return has_aligned_rows(self.arguments[0])

    @cached_property
    def matrix(self) -> Tensor | None:
        """The weights as `rows_of_experts` has them, where tensor descriptors can: aligned, experts contiguous."""
        weights = self.arguments[0]
        if weights.dim() == 4:
            flat = weights.is_contiguous()
        else:
            flat = weights.stride(2) == 1 and weights.stride(0) == weights.shape[1] * weights.stride(1)
        return rows_of_experts(weights) if self.aligned and flat and weights.numel() else None

    def descriptor(self, block_rows: int, block_columns: int) -> Any:
        """Host-side tensor descriptor for a tile of so many rows and columns, where there is a matrix.

        Over `lines_of_experts` of block-major weights, so that a block of it is a tile of other sizes.
        """
        from triton.tools.tensor_descriptor import TensorDescriptor

        if self.matrix is None:
            return None
        weights, columns = self.arguments[0], block_columns // self.packed
        # the up half of an odd number of rows starts in the middle of a line
        if weights.dim() == 4 and (self.interleaved or self.n % 2 == 0):
            matrix = lines_of_experts(weights)
            return TensorDescriptor.from_tensor(matrix, [block_rows * columns // matrix.shape[1], matrix.shape[1]])
        return TensorDescriptor.from_tensor(self.matrix, [block_rows, columns])


@dataclass(frozen=True, eq=False)
class Activation:
    """The activation between the two products: a `MoEActivation` value and its parameters; "" behind gemm2."""

    name: str = ""
    alpha: float = 1.0
    beta: float = 0.0
    limit: float | None = None

    @staticmethod
    def of(config: FusedMoEConfig) -> Activation:
        """The activation of a layer; parameters that it does not have stand at values that change nothing."""
        params = config.params
        alpha = 1.0 if params.alpha is None else params.alpha
        beta = 0.0 if params.beta is None else params.beta
        return Activation(config.activation.value, alpha, beta, params.limit)

    @property
    def gated(self) -> bool:
        return bool(self.name) and not self.name.endswith("_no_mul")

    @cached_property
    def arguments(self) -> tuple[Any, ...]:
        """The last fields of `Epilogue`."""
        return constant(self.name.removesuffix("_no_mul")), tl.constexpr(self.gated), self.alpha, self.beta, self.limit


@dataclass(frozen=True, eq=False)
class Routing:
    """``ids`` [M, k] int32 or int64, ``weights`` [M, k] float32, both contiguous; ``expert_map`` [E] int32 or None.

    ``weights`` None: they are applied already.
    """

    ids: Tensor
    weights: Tensor | None
    num_experts: int
    expert_map: Tensor | None = None
    weight_on_input: bool = False

    @property
    def top_k(self) -> int:
        return self.ids.shape[1]

    @property
    def num_ids(self) -> int:
        return self.num_experts if self.expert_map is None else self.expert_map.numel()

    @property
    def num_pairs(self) -> int:
        return self.ids.numel()

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What kernels get to find the experts of pairs, see `moe_core.kernels.gemm.tiles.schedule.expert_of`."""
        return self.ids, self.expert_map, self.top_k, self.num_ids, self.num_experts

    @property
    def in_use(self) -> InUse:
        """Pairs that have a local expert."""
        return "pairs", self.arguments

    def max_tiles(self, block_m: int) -> int:
        """Most tiles of so many rows."""
        return max_tiles(self.ids.numel(), self.num_experts, block_m)


class TileFunctions(NamedTuple):
    """A scheme's `@triton.jit` functions, and the type of the sum that ``multiply`` adds to; see the tile kernel."""

    open_a: Any
    load_a: Any
    open_b: Any
    load_b: Any
    multiply: Any
    scale_acc: Any = None
    accumulate: tl.constexpr = FLOAT32


class Result(NamedTuple):
    """Where the result of a GEMM goes, and how it is quantised, as kernels get it; `Result.of` makes it.

    ``out`` [rows, ``width``], rows ``stride`` apart: of gemm1 with room for whole tiles.  ``quantize`` None stores
    values as they are, see `moe_core.kernels.gemm.tiles.tile_kernel`; else ``quant_args`` are its own, and ``scales``
    [rows, groups of a row] hold ``groups`` scales per tile, or are None for static ones.  ``amax`` int32, zeroed,
    [rows] or [1], receives what ``amax_kind`` says ("" nothing), see there.  ``block`` columns are a tile of the
    split-K reduction.
    """

    out: Tensor
    stride: int
    scales: Tensor | None
    stride_scales: int
    amax: Tensor | None = None
    quant_args: tuple[Any, ...] | None = None
    quantize: Any = None
    groups: tl.constexpr = constant(1)
    amax_kind: tl.constexpr = constant("")
    width: int = 0
    block: tl.constexpr = constant(128)

    @staticmethod
    def of(out: Tensor, scales: Tensor | None = None, **others: Any) -> Result:
        """With the sizes of ``out`` and ``scales``; ``others`` of the fields."""
        stride_scales = 0 if scales is None else scales.stride(0)
        return Result(out, out.stride(0), scales, stride_scales, width=out.shape[1], **others)


class LoRADelta(NamedTuple):
    """LoRA deltas of a GEMM, which are added before bias and activation.

    ``values`` [pairs, columns] (of gemm1: of both halves), rows ``stride`` apart; ``ids`` [pairs] int32: negative where
    there is none, and the row of ``values`` is undefined.
    """

    values: Tensor
    stride: int
    ids: Tensor


class Epilogue(NamedTuple):
    """What a kernel does with a finished tile: bias, activation (see `moe_core.kernels.device.activation`), router
    weights, LoRA.

    ``bias`` [E, rows of all halves]; router ``weights`` by pair, which multiply gemm1's product before bias and
    activation, or gemm2's result.  gemm2 has the activation "".
    """

    bias: Tensor | None
    stride_bias: int
    weights: Tensor | None
    lora: LoRADelta | None
    activation: tl.constexpr
    gated: tl.constexpr
    alpha: float
    beta: float
    limit: float | None


_NO_ACTIVATION = Activation()


def epilogue_of(
    bias: Tensor | None, routing: Routing | Batch, activation: Activation | None, lora: LoRADelta | None = None
) -> Epilogue:
    """The epilogue of gemm1 (with an ``activation``) or gemm2."""
    weights = routing.weights if routing.weight_on_input == (activation is not None) else None
    stride = 0 if bias is None else bias.stride(0)
    return Epilogue(bias, stride, weights, lora, *(activation or _NO_ACTIVATION).arguments)


@dataclass(frozen=True, eq=False)
class Gemm:
    """A grouped GEMM over sorted pairs, or over batched rows: gemm1 with an ``activation``, gemm2 without.

    ``a`` [rows, K] times ``weight``, to ``result``, whose rows are ``out_rows``; batched rows, [E * T_max, columns],
    are all the same.  With ``config.split_k`` > 1 ``result`` gets float32 partial sums by pair, [pairs * split_k,
    columns of all halves]; gemm1's `reduce_split_k` reduces.
    """

    config: TileConfig
    weight: GemmWeight
    a: OperandA
    result: Result
    order: Schedule
    routing: Routing | Batch
    activation: Activation | None = None
    out_rows: Rows = "pair"
    lora: LoRADelta | None = None
    pdl: bool = False

    @property
    def epilogue(self) -> Epilogue:
        return epilogue_of(self.weight.bias, self.routing, self.activation, self.lora)


def grouped_gemm(gemm: Gemm) -> None:
    """The GEMM by the tile kernel.

    Raises TensorError where rows of h have no room for whole tiles.
    """
    a, b, order = gemm.a, gemm.weight, gemm.order
    config = b.tile_config(gemm.config)
    functions = b.functions(config)
    if a.load_a is not None:
        functions = functions._replace(load_a=a.load_a)
    if config.uniform:
        functions = functions._replace(multiply=uniform(functions.multiply))
    subtiles, block_k = order.block_m // config.block_m, b.block_k
    tiles = gemm.routing.max_tiles(order.block_m) * subtiles
    rows = -(-b.n // 8) * 16 if b.interleaved else b.n
    blocks = -(-rows // config.block_n)
    written = blocks * config.block_n // (2 if b.interleaved else 1)
    if gemm.activation is not None and config.split_k == 1 and gemm.result.stride < written:
        raise TensorError(f"rows of h are {gemm.result.stride} columns apart, expected room for {written}: whole tiles")
    aligned = a.aligned and b.aligned
    launch(
        grouped_gemm_kernel,
        (tiles * blocks * config.split_k,),
        gemm.result,
        a.arguments,
        b.arguments,
        b.descriptor(config.block_n, block_k) if config.tma else None,
        order.for_kernels,
        gemm.epilogue,
        functions,
        b.n,
        b.k,
        gemm.routing.top_k,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=block_k,
        GROUP_M=config.group_m,
        EVEN_N=rows % config.block_n == 0,
        EVEN_K=b.whole_steps or b.k % block_k == 0,
        SWAP_AB=config.swap_ab,
        INTERLEAVED=b.interleaved,
        A_ROWS=a.which,
        OUT_ROWS=gemm.out_rows,
        SPLIT_K=config.split_k,
        SUBTILES=subtiles,
        pdl=gemm.pdl,
        # rows that 16-byte copies cannot reach go through registers: share them among more threads
        num_warps=config.num_warps if aligned else 8,
        num_stages=config.num_stages,
        **({"maxnreg": config.max_registers} if config.max_registers and aligned else {}),
    )


def reduce_split_k(gemm: Gemm, result: Result) -> None:
    """The split-K reduction of gemm1: out[pair] = act(sum of the partial sums + bias), quantised as ``result`` says."""
    routing, partials, columns = gemm.routing, gemm.result.out, gemm.weight.n
    if not isinstance(routing, Routing) or gemm.activation is None:
        raise TypeError("the k loop of gemm1 alone is split so, and not over batched rows")
    launch(
        split_k_reduce_kernel,
        (routing.ids.numel(), -(-columns // result.block.value)),
        partials,
        routing.arguments,
        gemm.epilogue,
        result,
        columns,
        gemm.result.stride,
        SPLIT_K=gemm.config.split_k,
        pdl=gemm.pdl,
        num_warps=1,
    )


def has_aligned_rows(tensor: Tensor) -> bool:
    """Whether every row starts at a multiple of 16 bytes."""
    starts = (tensor.data_ptr(), *(stride * tensor.element_size() for stride in tensor.stride()[:-1]))
    return all(start % 16 == 0 for start in starts)


def rows_of_experts(weights: Tensor) -> Tensor:
    """``weights``, experts one after the other, as a matrix [E * rows, columns]; of block-major ones with a block of
    columns: [E * K / block * rows, block].
    """
    if weights.dim() == 4:
        return weights.flatten(0, 2)
    experts, rows, columns = weights.shape
    return torch.as_strided(weights, (experts * rows, columns), (weights.stride(1), 1))


def lines_of_experts(weights: Tensor) -> Tensor:
    """`rows_of_experts` of block-major weights, two rows of 64 bytes in one: the memory system's requests are 128."""
    matrix = rows_of_experts(weights)
    half = weights.dim() == 4 and matrix.shape[1] * matrix.element_size() == 64 and weights.shape[2] % 2 == 0
    return matrix.view(-1, 2 * matrix.shape[1]) if half else matrix


def weight_strides(weights: Tensor, depth: int) -> tuple[int, int, int]:
    """Elements from an expert, a row and a step of the k loop of ``depth`` columns to the next.

    ``weights`` row-major [E, rows, K], or block-major [E, K / depth, rows, depth], contiguous: what a program reads at
    a time lies together.
    """
    if weights.dim() == 4:
        return weights.stride(0), weights.stride(2), weights.stride(1)
    return weights.stride(0), weights.stride(1), depth
