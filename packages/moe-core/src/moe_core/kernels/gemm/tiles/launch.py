"""Launch of the grouped GEMM: the host side of `tile_kernel`."""

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

#: Wrap a number or string as a Triton constant inside a tuple. Not for booleans, which compare equal to numbers.
constant = cache(tl.constexpr)
FLOAT32 = tl.constexpr(tl.float32)
#: Meaning of a tile row in an operand or in the result; "position" is the sorted order.
Rows = Literal["position", "token", "pair"]
#: Rows in use: IN_USE and row_args of `moe_core.kernels.gemm.tiles.quantize_rows.rows_in_use`.
InUse = tuple[str, tuple[Any, ...]]


@dataclass(frozen=True, eq=False)
class WarpSpecializedGemm:
    """How the warp-specialized kernel of `moe_core.kernels.gemm.sm90.kernel` computes a GEMM.

    Attributes:
        tensor: Weights with one-byte elements, row-major [E, rows, K] or block-major (`weight_strides`).
        functions: Returns the scheme's device functions (prefetch, mainloop); they are imported on use.
        weight_scales: Tuple of scales that both functions take.
        depth: Columns of a k-loop step.
        start: Launches another kernel instead (one of `moe_core.kernels.gemm.sm90.launch`) and defines what the other
            fields mean.
        rows: Tile heights that the schedule may have.
        gathers: Whether the kernel also reads rows by token.
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

    Attributes:
        arguments: The tuple `a_args` of the tile kernel's `open_a`.
        which: The row of A that a tile row refers to.
        load_a: Replaces the weight's `load_a` if given, for rows that are quantized on load.
        aligned: Whether every row starts at a multiple of 16 bytes.
        warp_specialized: The tuple `a_args` of the warp-specialized kernel; None if it cannot read these rows.
    """

    arguments: tuple[Any, ...]
    which: Rows
    load_a: Any = None
    aligned: bool = True
    warp_specialized: tuple[Any, ...] | None = None


def _same(config: TileConfig) -> TileConfig:
    return config


@dataclass(frozen=True, eq=False)
class GemmWeight:
    """Weight of one GEMM, built once per layer: kernel arguments and sizes.

    Attributes:
        arguments: The tuple `b_args` of the tile kernel's `open_b`. Its first element is the weight tensor [E, rows,
            columns], or block-major (`weight_strides`), in which an element holds ``packed`` columns.
        n: Rows, of one half (gate or up) if gated.
        k: Columns.
        functions: Returns the device functions for a launch configuration.
        block_k: Columns of a k-loop step.
        bias: [E, rows of all halves], any float dtype, or None.
        packed: Columns per element.
        interleaved: Whether gate and up rows are interleaved in blocks of 8, see the tile kernel.
        whole_steps: Whether rows are padded to a multiple of ``block_k``.
        warp_specialized: How the warp-specialized kernel multiplies the weight, or None.
        tile_config: Returns the tile kernel's configuration for a call that the warp-specialized kernel was chosen for
            but cannot compute.
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
    warp_specialized: WarpSpecializedGemm | None = None
    tile_config: Callable[[TileConfig], TileConfig] = _same

    @cached_property
    def aligned(self) -> bool:
        """Whether the weights satisfy `has_aligned_rows`."""
        return has_aligned_rows(self.arguments[0])

    @cached_property
    def matrix(self) -> Tensor | None:
        """The weights as `rows_of_experts`, if tensor descriptors can read them.

        That requires aligned rows and contiguous experts; otherwise None.
        """
        weights = self.arguments[0]
        if weights.dim() == 4:
            flat = weights.is_contiguous()
        else:
            flat = weights.stride(2) == 1 and weights.stride(0) == weights.shape[1] * weights.stride(1)
        return rows_of_experts(weights) if self.aligned and flat and weights.numel() else None

    def descriptor(self, block_rows: int, block_columns: int) -> Any:
        """Return a host-side tensor descriptor for a tile, or None without a `matrix`.

        The descriptor of block-major weights covers `lines_of_experts`, so that its block has other sizes than the
        tile.

        Args:
            block_rows: Rows of the tile.
            block_columns: Columns of the tile.

        Returns:
            The tensor descriptor, or None.
        """
        found = self._descriptors.get((block_rows, block_columns))
        if found is None and self.matrix is not None:
            found = self._new_descriptor(self.matrix, block_rows, block_columns)
            self._descriptors[block_rows, block_columns] = found
        return found

    @cached_property
    def _descriptors(self) -> dict[tuple[int, int], Any]:
        return {}

    def _new_descriptor(self, matrix: Tensor, block_rows: int, block_columns: int) -> Any:
        from triton.tools.tensor_descriptor import TensorDescriptor

        weights, columns = self.arguments[0], block_columns // self.packed
        # The up half of an odd number of rows starts in the middle of a line.
        if weights.dim() == 4 and (self.interleaved or self.n % 2 == 0):
            lines = lines_of_experts(weights)
            return TensorDescriptor.from_tensor(lines, [block_rows * columns // lines.shape[1], lines.shape[1]])
        return TensorDescriptor.from_tensor(matrix, [block_rows, columns])


@dataclass(frozen=True, eq=False)
class Activation:
    """Activation between the two GEMMs.

    Attributes:
        name: A `MoEActivation` value, or "" for gemm2.
        alpha: Parameter of the activation.
        beta: Parameter of the activation.
        limit: Clamp limit, or None.
    """

    name: str = ""
    alpha: float = 1.0
    beta: float = 0.0
    limit: float | None = None

    @staticmethod
    def of(config: FusedMoEConfig) -> Activation:
        """Return the activation of a layer.

        Args:
            config: Configuration of the layer.

        Returns:
            The activation; parameters that it does not have are neutral.
        """
        params = config.params
        alpha = 1.0 if params.alpha is None else params.alpha
        beta = 0.0 if params.beta is None else params.beta
        return Activation(config.activation.value, alpha, beta, params.limit)

    @property
    def gated(self) -> bool:
        """Whether the activation joins gate and up halves."""
        return bool(self.name) and not self.name.endswith("_no_mul")

    @cached_property
    def arguments(self) -> tuple[Any, ...]:
        """The last fields of `Epilogue`."""
        return constant(self.name.removesuffix("_no_mul")), tl.constexpr(self.gated), self.alpha, self.beta, self.limit


@dataclass(frozen=True, eq=False)
class Routing:
    """Routing of a call.

    Attributes:
        ids: [M, k] int32 or int64, contiguous expert ids.
        weights: [M, k] float32, contiguous router weights; None if they are already applied.
        num_experts: Number of local experts.
        expert_map: [E] int32, the local expert of each id, or None.
        weight_on_input: Whether router weights apply to the input of the layer.
    """

    ids: Tensor
    weights: Tensor | None
    num_experts: int
    expert_map: Tensor | None = None
    weight_on_input: bool = False

    @property
    def top_k(self) -> int:
        """Experts per token."""
        return self.ids.shape[1]

    @property
    def num_ids(self) -> int:
        """Number of valid expert ids."""
        return self.num_experts if self.expert_map is None else self.expert_map.numel()

    @property
    def num_pairs(self) -> int:
        """Number of (token, expert) pairs."""
        return self.ids.numel()

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Kernel arguments that locate the expert of a pair.

        See `moe_core.kernels.gemm.tiles.schedule.expert_of`.
        """
        return self.ids, self.expert_map, self.top_k, self.num_ids, self.num_experts

    @property
    def in_use(self) -> InUse:
        """Selector of the pairs that have a local expert."""
        return "pairs", self.arguments

    def max_tiles(self, block_m: int) -> int:
        """Return the largest possible number of tiles.

        Args:
            block_m: Rows of a tile.

        Returns:
            Upper bound of the number of tiles.
        """
        return max_tiles(self.ids.numel(), self.num_experts, block_m)


class TileFunctions(NamedTuple):
    """A scheme's `@triton.jit` functions, see `moe_core.kernels.gemm.tiles.tile_kernel`.

    Attributes:
        open_a: Returns the state of a row tile.
        load_a: Loads a tile of operand A and its scale.
        open_b: Returns the state of a weight tile.
        load_b: Loads a tile of weights and its scale.
        multiply: Adds the product of two tiles to the accumulator.
        scale_acc: Scales the accumulator after the loop, or None.
        accumulate: Dtype of the accumulator.
    """

    open_a: Any
    load_a: Any
    open_b: Any
    load_b: Any
    multiply: Any
    scale_acc: Any = None
    accumulate: tl.constexpr = FLOAT32


class Result(NamedTuple):
    """Destination and quantization of a GEMM result, as kernels take it.

    `Result.of` builds it.

    Attributes:
        out: [rows, width]; rows of h have space for whole tiles.
        stride: Row stride of ``out``.
        scales: [rows, groups of a row], or None for static scales.
        stride_scales: Row stride of ``scales``.
        amax: int32, zeroed, [rows] or [1], receives what ``amax_kind`` selects; or None.
        quant_args: Arguments of ``quantize``, or None.
        quantize: Device function, see `moe_core.kernels.gemm.tiles.tile_kernel`; None stores values unchanged.
        groups: Scales per tile and row.
        amax_kind: What goes to ``amax``, see `moe_core.kernels.gemm.tiles.tile_kernel`; "" for nothing.
        width: Columns of ``out``.
        block: Columns of a tile of the split-K reduction.
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
        """Build a result with the sizes of ``out`` and ``scales``.

        Args:
            out: [rows, width].
            scales: [rows, groups of a row], or None.
            others: Values of the remaining fields.

        Returns:
            The result.
        """
        stride_scales = 0 if scales is None else scales.stride(0)
        return Result(out, out.stride(0), scales, stride_scales, width=out.shape[1], **others)


class LoRADelta(NamedTuple):
    """LoRA deltas of a GEMM, which are added before bias and activation.

    Attributes:
        values: [pairs, columns] (gemm1: of both halves).
        stride: Row stride of ``values``.
        ids: [pairs] int32; negative where there is no delta and the row of ``values`` is undefined.
    """

    values: Tensor
    stride: int
    ids: Tensor


class Epilogue(NamedTuple):
    """What a kernel does with a finished tile: LoRA, router weights, bias and activation.

    Attributes:
        bias: [E, rows of all halves], or None.
        stride_bias: Expert stride of ``bias``.
        weights: Router weights by pair, or None. They multiply gemm1's output before bias and activation, or gemm2's
            result.
        lora: LoRA deltas, or None.
        activation: Name, see `moe_core.kernels.device.activation`; "" for gemm2.
        gated: Whether there are gate and up halves.
        alpha: Parameter of the activation.
        beta: Parameter of the activation.
        limit: Clamp limit of the activation, or None.
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
    """Return the epilogue of gemm1 (with an ``activation``) or of gemm2.

    Args:
        bias: [E, rows of all halves], or None.
        routing: Routing, or the batch.
        activation: Activation of gemm1; None for gemm2.
        lora: LoRA deltas, or None.

    Returns:
        The epilogue.
    """
    weights = routing.weights if routing.weight_on_input == (activation is not None) else None
    stride = 0 if bias is None else bias.stride(0)
    return Epilogue(bias, stride, weights, lora, *(activation or _NO_ACTIVATION).arguments)


@dataclass(frozen=True, eq=False)
class Gemm:
    """Grouped GEMM over sorted pairs or batched rows.

    gemm1 has an ``activation``, gemm2 has none. With ``config.split_k`` > 1, ``result`` receives float32 partial sums
    by pair, [pairs * split_k, columns of all halves]. For gemm1, `reduce_split_k` reduces them.

    Attributes:
        config: Launch configuration.
        weight: The weight.
        a: Operand A [rows, K].
        result: Destination.
        order: Sorted order of the pairs, or the tile list of the batch.
        routing: Routing, or the batch.
        activation: Activation of gemm1; None for gemm2.
        out_rows: Meaning of the rows of ``result``. All meanings agree for batched rows, [E * T_max, columns].
        lora: LoRA deltas, or None.
        pdl: Whether the launch overlaps with its neighbors.
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
        """Epilogue of the GEMM, as kernels take it."""
        return epilogue_of(self.weight.bias, self.routing, self.activation, self.lora)


def grouped_gemm(gemm: Gemm) -> None:
    """Run a GEMM with the tile kernel.

    Args:
        gemm: The GEMM.

    Raises:
        TensorError: Rows of h have no space for whole tiles.
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
        # Rows that 16-byte copies cannot reach go through registers: distribute them over more threads.
        num_warps=config.num_warps if aligned else 8,
        num_stages=config.num_stages,
        **({"maxnreg": config.max_registers} if config.max_registers and aligned else {}),
    )


def reduce_split_k(gemm: Gemm, result: Result) -> None:
    """Reduce the split-K partial sums of gemm1: out[pair] = act(sum of partial sums + bias).

    Args:
        gemm: gemm1, whose result holds the partial sums.
        result: Destination, which also defines the quantization.

    Raises:
        TypeError: The GEMM is not gemm1, or its rows are batched.
    """
    routing, partials, columns = gemm.routing, gemm.result.out, gemm.weight.n
    if not isinstance(routing, Routing) or gemm.activation is None:
        raise TypeError("split-K with a separate reduction is supported for gemm1 in the standard format only")
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
    """Whether every row starts at a multiple of 16 bytes.

    Args:
        tensor: Tensor with contiguous rows.

    Returns:
        True if the data pointer and all strides but the last are multiples of 16 bytes.
    """
    starts = (tensor.data_ptr(), *(stride * tensor.element_size() for stride in tensor.stride()[:-1]))
    return all(start % 16 == 0 for start in starts)


def rows_of_experts(weights: Tensor) -> Tensor:
    """Return a 2-D view of the weights, with the expert dimension flattened into the rows.

    Args:
        weights: [E, rows, K], or block-major [E, K / block, rows, block].

    Returns:
        [E * rows, K]; of block-major weights [E * K / block * rows, block].
    """
    if weights.dim() == 4:
        return weights.flatten(0, 2)
    experts, rows, columns = weights.shape
    return torch.as_strided(weights, (experts * rows, columns), (weights.stride(1), 1))


def lines_of_experts(weights: Tensor) -> Tensor:
    """Return `rows_of_experts` with two block-major rows of 64 bytes joined into one of 128.

    Requests of the memory system have 128 bytes.

    Args:
        weights: [E, rows, K], or block-major [E, K / block, rows, block].

    Returns:
        The matrix, unchanged where rows are not 64 bytes or their number is odd.
    """
    matrix = rows_of_experts(weights)
    half = weights.dim() == 4 and matrix.shape[1] * matrix.element_size() == 64 and weights.shape[2] % 2 == 0
    return matrix.view(-1, 2 * matrix.shape[1]) if half else matrix


def weight_strides(weights: Tensor, depth: int) -> tuple[int, int, int]:
    """Return the strides between experts, rows and k-loop steps, in elements.

    In block-major weights, the data that a program reads at a time is contiguous.

    Args:
        weights: Row-major [E, rows, K], or block-major [E, K / depth, rows, depth], contiguous.
        depth: Columns of a k-loop step.

    Returns:
        Strides of expert, row and step.
    """
    if weights.dim() == 4:
        return weights.stride(0), weights.stride(2), weights.stride(1)
    return weights.stride(0), weights.stride(1), depth
