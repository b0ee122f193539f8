"""One product of the warp-specialized kernel, and what float64 makes of the same e4m3 values."""

from __future__ import annotations

from dataclasses import replace

import torch
import triton.language as tl
from moe_core.kernels.gemm.plan import TileConfig
from moe_core.kernels.gemm.sm90 import launch as hopper_launch
from moe_core.kernels.gemm.sm90.launch import TILE
from moe_core.kernels.gemm.tiles.launch import (
    Activation,
    Gemm,
    GemmWeight,
    OperandA,
    Result,
    Routing,
    WarpSpecializedGemm,
    constant,
)
from moe_core.kernels.gemm.tiles.scaled_mm import quantize_group, quantize_static
from moe_core.kernels.ops._sizes import max_tiles
from moe_core.kernels.ops.batch import Batch
from moe_core.kernels.ops.sort import Schedule
from moe_core.spec.activation import MoEActivation, apply_moe_activation

E4M3 = torch.float8_e4m3fn
#: rows per expert: none, a tail of one row, half tiles, more than two tiles
COUNTS = (129, 0, 300, 64, 200)
CONFIG = TileConfig(128, 128, 4, 4, 8, warp_specialized=True)
SHORT = replace(CONFIG, short_tiles=True)


def no_tiles(config):
    raise AssertionError("the tile kernel is not asked for")


def e4m3(generator, *shape):
    return (torch.randn(shape, generator=generator) * 100).clamp(-448, 448).to(E4M3)


class Product:
    """One product: operands, schedule and poisoned output on ``device``, and what float64 makes of them on the CPU.

    ``scales``: "blocks" (of ``block``), "rows" (per row and column) or "tensor" (per expert and half).  The activation
    None makes it a down product.  ``capacity``: rows of each expert's buffer in the batched format.
    """

    def __init__(
        self,
        device,
        scales,
        name,
        *,
        out="values",
        dtype=torch.bfloat16,
        columns=400,
        depth=528,
        width=None,
        amax=False,
        weight=0,
        bias=False,
        capacity=None,
        block=(TILE, TILE),
        seed=0,
    ):
        generator = torch.Generator().manual_seed(seed)
        self.device, self.scales, self.out, self.columns, self.weight = device, scales, out, columns, weight
        self.block = block
        self.activation = None if name is None else MoEActivation(name)
        gated = self.activation is not None and self.activation.is_gated
        experts, self.parts = len(COUNTS), 2 if gated else 1
        self.starts = [sum(COUNTS[:e]) for e in range(experts)]
        rows = sum(COUNTS) + 7  # pairs without an expert lie behind the others
        if capacity is not None:
            self.starts, rows = [e * capacity for e in range(experts)], experts * capacity
        self.w = e4m3(generator, experts, self.parts * columns, depth)
        self.given_w: torch.Tensor | None = None  # where the kernel is to read `w`, if not from a copy on the device
        self.a = e4m3(generator, rows, depth)

        def scale(*shape):
            return torch.rand(shape, generator=generator) / 100 + 0.001

        if scales == "blocks":
            self.a_scale, self.w_scale = (
                scale(rows, -(-depth // block[1])),
                scale(experts, self.parts * -(-columns // block[0]), -(-depth // block[1])),
            )
        else:
            self.a_scale = scale(rows if scales == "rows" else experts)
            self.w_scale = scale(experts, self.parts * (columns if scales == "rows" else 1))
        self.bias = torch.randn(experts, self.parts * columns, generator=generator).bfloat16() if bias else None
        self.router = torch.rand(rows, 1, generator=generator)
        self.pairs = torch.randperm(rows, generator=generator) if capacity is None else torch.arange(rows)
        if capacity is None:
            self.pairs = self.pairs[: sum(COUNTS)]
        self.given = scale(experts) * 10 if out == "static" else None

        tiles = [(e, self.starts[e] + r) for e, count in enumerate(COUNTS) for r in range(0, count, TILE)]
        most = max_tiles(rows, experts, TILE) if capacity is None else experts * -(-capacity // TILE)
        listed = torch.full((2 + 2 * most,), -7777, dtype=torch.int32)
        listed[0], listed[1] = len(tiles), 0
        listed[2 : 2 + 2 * len(tiles)] = torch.tensor(tiles, dtype=torch.int32).flatten()
        ends = torch.tensor([0] + [s + c for s, c in zip(self.starts, COUNTS, strict=True)], dtype=torch.int32)
        self.routing: Routing | Batch
        self.order: Schedule
        if capacity is None:
            found = torch.full((rows,), -7777, dtype=torch.int32)
            found[: len(self.pairs)] = self.pairs.int()
            self.order = Schedule(listed.to(device), ends.to(device), found.to(device), TILE)
            ids = torch.zeros(rows, 1, dtype=torch.int32, device=device)
            on_input = (weight != 0) == (self.activation is not None)
            self.routing = Routing(ids, self.router.to(device), experts, None, on_input)
        else:
            self.order = Schedule(listed.to(device), ends.to(device), None, TILE)
            self.routing = Batch(torch.tensor(COUNTS, dtype=torch.int32, device=device), capacity)

        e4m3_out = out != "values"
        values = torch.full((rows, width or columns), float("nan"), device=device).to(E4M3 if e4m3_out else dtype)
        group = {"groups": TILE, "groups_64": 64}.get(out)
        made = None if group is None else torch.full((rows, -(-columns // group)), float("nan"), device=device)
        given = () if self.given is None else (self.given.to(device),)
        bits = torch.zeros(1, dtype=torch.int32, device=device) if amax else None
        quantize = quantize_static if out == "static" else None if group is None else quantize_group
        self.result = Result.of(
            values,
            made,
            quantize=quantize,
            quant_args=(values, *given),
            amax=bits,
            amax_kind=constant("tensor" if amax else ""),
            block=constant(group or TILE),
        )

    def run(self, config=CONFIG):
        from moe_core.kernels.gemm.sm90 import scaled_mm as hopper_scaled_mm
        from moe_fp8.kernels import hopper_blockwise

        on = {name: getattr(self, name).to(self.device) for name in ("a", "a_scale", "w_scale")}
        on["w"] = self.w.to(self.device) if self.given_w is None else self.given_w
        a_scale, w_scale = on["a_scale"], on["w_scale"]
        if self.scales == "blocks":
            rows = tl.constexpr(self.block[0])
            arguments = (a_scale, a_scale.stride(0)), (w_scale, w_scale.stride(0), w_scale.stride(1), rows)
        elif self.scales == "rows":
            arguments = (a_scale, 1, None), (w_scale, w_scale.stride(0), self.columns, 1)
        else:
            arguments = (a_scale, None, None), (w_scale, w_scale.stride(0), 1, 0)
        k_loop = hopper_scaled_mm.prefetch, hopper_scaled_mm.scaled_mm
        if self.scales == "blocks":
            k_loop = hopper_blockwise.prefetch, hopper_blockwise.scaled_mm_blockwise
        bias = None if self.bias is None else self.bias.to(self.device)
        special = WarpSpecializedGemm(on["w"], lambda: k_loop, arguments[1], self.block[1])
        kind = self.activation
        params = None if kind is None else kind.resolve_params(None)
        activation = None
        if kind is not None and params is not None:
            activation = Activation(kind.value, params.alpha or 1.0, params.beta or 0.0, params.limit)
        weight = GemmWeight((), self.columns, self.w.shape[2], no_tiles, bias=bias, warp_specialized=special)
        a = OperandA((on["a"],), "position", warp_specialized=arguments[0])
        hopper_launch.hopper_gemm(Gemm(config, weight, a, self.result, self.order, self.routing, activation))

    def exact(self, expert):
        """float64 [rows of the expert, columns]."""
        rows = slice(self.starts[expert], self.starts[expert] + COUNTS[expert])
        a, w = self.a[rows].double(), self.w[expert].double()
        if self.scales == "blocks":
            n, k = self.block
            a = a * self.a_scale[rows].double().repeat_interleave(k, 1)[:, : a.shape[1]]
            halves = [h.repeat_interleave(n, 0)[: self.columns] for h in self.w_scale[expert].chunk(self.parts)]
            w = w * torch.cat(halves).double().repeat_interleave(k, 1)[:, : w.shape[1]]
            z = a @ w.T
        else:
            w_scale = self.w_scale[expert].double()
            if self.scales == "tensor":
                w_scale = w_scale.repeat_interleave(self.columns)
            a_scale = self.a_scale[rows, None] if self.scales == "rows" else self.a_scale[expert]
            z = a @ w.T * w_scale * a_scale.double()
        weight = self.router[self.pairs[rows]].double() if self.weight else None
        if self.weight == 1:
            z = z * weight
        if self.bias is not None:
            z = z + self.bias[expert].double()
        if self.activation is not None:
            z = apply_moe_activation(self.activation, z)
        return z * weight if self.weight == 2 else z

    def found(self, expert):
        """float64 of the stored rows."""
        rows = slice(self.starts[expert], self.starts[expert] + COUNTS[expert])
        values = self.result.out.cpu()[rows if self.activation is not None else self.pairs[rows]].double()
        values, padding = values[:, : self.columns], values[:, self.columns :]
        assert bool((padding == 0).all())
        if self.out.startswith("groups"):
            scales = self.result.scales.cpu()[rows].double()
            values = values * scales.repeat_interleave(TILE if self.out == "groups" else 64, 1)[:, : self.columns]
        return values if self.given is None else values * self.given[expert].double()

    def check(self, tolerance):
        self.run()
        assert int(self.order.tiles[1]) == 0
        error = norm = 0.0
        for expert, count in enumerate(COUNTS):
            if not count:
                continue
            exact, found = self.exact(expert), self.found(expert)
            if self.given is not None:
                largest = 448 * float(self.given[expert])
                exact = exact.clamp(-largest, largest)
            error += float((found - exact).square().sum())
            norm += float(exact.square().sum())
        assert (error / norm) ** 0.5 < tolerance
        written = torch.zeros(len(self.a), dtype=torch.bool)
        for expert, count in enumerate(COUNTS):
            rows = slice(self.starts[expert], self.starts[expert] + count)
            written[rows if self.activation is not None else self.pairs[rows]] = True
        assert bool(self.result.out.cpu()[~written].float().isnan().all())
