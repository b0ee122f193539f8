"""The whole layer, block FP8, against float64 over the same quantized values.

Tolerance (relative, Frobenius).  Hopper's tensor cores truncate e4m3 products to about 2^-13 of the largest of a sum,
which is about 2^-10 of the sum of 128 random ones.  An intermediate value that is off by d = 2^-10 comes out of the
quantization one step s further with probability d / s, so that the root mean square of that error is sqrt(d s), with
steps of e4m3 between 2^-4 and 2^-3 of the value: 2^-6.5 to 2^-7, of gate and up together sqrt(2) more.  The two
roundings to 16 bits, 2^-9 each, disappear beside that.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from moe_core.kernels.gemm.fused.layer import FusedLayer
from moe_core.kernels.gemm.fused.scheme import CallShape
from moe_core.kernels.gemm.heuristics import LayerProblem, launch_plan
from moe_core.kernels.gemm.plan import TileConfig, TilePlan
from moe_core.kernels.gemm.tiles.launch import Activation, Routing
from moe_core.kernels.launch.launch import record
from moe_core.kernels.ops.batch import Batch
from moe_core.spec.activation import MoEActivation, apply_moe_activation
from moe_core.spec.config import FusedMoEActivationFormat, FusedMoEConfig
from moe_core.spec.device import DeviceInfo
from moe_core.spec.quant_key import GroupShape, kFp8Dynamic64Sym, kFp8Dynamic128Sym, kFp8Static128BlockSym
from moe_core.spec.workspace import Workspace, workspace_nbytes
from moe_core.testing.meta_layers import call_on_meta
from moe_fp8.experts.triton import TritonFp8BlockExperts
from moe_fp8.kernels.block import block_scheme, block_weight

TOLERANCE = 2**-6
SILU = Activation("silu")


def quantize_rows(x, group):
    """x as e4m3 x float32 scales by rows and groups of columns, back in float64."""
    rows, columns = x.shape
    groups = -(-columns // group)
    tiles = torch.nn.functional.pad(x.float(), (0, groups * group - columns)).view(rows, groups, group)
    scale = tiles.abs().amax(-1, keepdim=True).clamp_min(1e-10) / 448.0
    return ((tiles / scale).to(torch.float8_e4m3fn).double() * scale.double()).view(rows, -1)[:, :columns]


def quantize_blocks(w, block, parts):
    """w [E, parts * n, k] -> e4m3, float32 scales [E, parts * ceil(n / block_n), ceil(k / block_k)], float64 values."""
    values, scales, exact = [], [], []
    for part in w.chunk(parts, dim=1):
        experts, n, k = part.shape
        rows, columns = -(-n // block[0]), -(-k // block[1])
        padded = torch.nn.functional.pad(part, (0, columns * block[1] - k, 0, rows * block[0] - n))
        tiles = padded.view(experts, rows, block[0], columns, block[1])
        scale = tiles.abs().amax((2, 4)) / 448.0
        q = (tiles / scale[:, :, None, :, None]).to(torch.float8_e4m3fn)
        dequantized = q.double() * scale.double()[:, :, None, :, None]
        shape = (experts, rows * block[0], columns * block[1])
        values.append(q.view(torch.uint8).view(shape)[:, :n, :k])
        scales.append(scale)
        exact.append(dequantized.view(shape)[:, :n, :k])
    e4m3 = torch.cat(values, 1).contiguous().view(torch.float8_e4m3fn)
    return e4m3, torch.cat(scales, 1).contiguous(), torch.cat(exact, 1)


def fused_layer(w13, w2, s13, s2, b13=None, b2=None, *, block=(128, 128), activation=SILU):
    """The layer's two weights and its scheme."""
    hidden, size = w13.shape[2], w2.shape[2]
    up, down = block_weight(w13, s13, b13, size, block), block_weight(w2, s2, b2, hidden, block)
    return FusedLayer(up, down, block_scheme(block[1]), activation)


def workspace_specs(tokens, top_k, experts, hidden, size, dtype=torch.bfloat16, block=(128, 128), batched=False):
    form = FusedMoEActivationFormat.BATCHED if batched else FusedMoEActivationFormat.STANDARD
    shape = CallShape(FusedMoEConfig(experts, top_k, hidden, size, dtype=dtype, activation_format=form), tokens)
    return block_scheme(block[1]).workspaces(shape, not batched)


def plan_for(tokens, top_k, experts, hidden, size, **options):
    return launch_plan(LayerProblem("scaled_mm", "e4m3", experts, top_k, hidden, size, **options), tokens)


class Layer:
    """Random weights and routing, and what float64 makes of them."""

    def __init__(self, tokens, hidden, size, experts, top_k, *, name="silu", block=(128, 128), bias=False, mapped=False,
                 on_input=False, dtype=torch.bfloat16, seed=0):  # fmt: skip
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape):
            return torch.randn(shape, generator=generator)

        self.activation, self.block, self.on_input = MoEActivation(name), block, on_input
        parts = 2 if self.activation.is_gated else 1
        self.w13, self.s13, self.exact13 = quantize_blocks(
            normal(experts, parts * size, hidden) * hidden**-0.5, block, parts
        )
        self.w2, self.s2, self.exact2 = quantize_blocks(normal(experts, hidden, size) * size**-0.5, block, 1)
        self.x = normal(tokens, hidden).to(dtype)
        self.b13 = normal(experts, parts * size).to(dtype) if bias else None
        self.b2 = normal(experts, hidden).to(dtype) if bias else None
        ids = experts
        self.expert_map = None
        if mapped:
            ids = 2 * experts + 1
            self.expert_map = torch.full((ids,), -1, dtype=torch.int32)
            places = torch.randperm(ids, generator=generator)[:experts]
            self.expert_map[places] = torch.arange(experts, dtype=torch.int32)
        self.ids = torch.rand(tokens, ids, generator=generator).topk(top_k, 1).indices.int()
        if tokens > 2:
            self.ids[1, 0], self.ids[2, -1] = -1, ids + 5
        self.weights = torch.rand(tokens, top_k, generator=generator)

    def run(self, device, plan):
        """The kernels over poisoned memory, twice: the second call sees what the first left."""
        hidden, experts, size = self.x.shape[1], self.w13.shape[0], self.w2.shape[2]
        tokens, top_k = self.ids.shape
        specs = workspace_specs(tokens, top_k, experts, hidden, size, self.x.dtype, self.block)
        buffer = torch.full((workspace_nbytes(specs),), 0xFF, dtype=torch.uint8, device=device)
        workspace = Workspace(device, buffer).take(specs)
        out = torch.full(self.x.shape, float("nan"), dtype=self.x.dtype, device=device)
        params = self.activation.resolve_params(None)

        def on(tensor):
            return None if tensor is None else tensor.to(device)

        # a row stride that is not the width
        x = torch.nn.functional.pad(on(self.x), (0, 3))[:, :hidden]
        given = (on(tensor) for tensor in (self.w13, self.w2, self.s13, self.s2, self.b13, self.b2))
        activation = Activation(self.activation.value, params.alpha or 1.0, params.beta or 0.0, params.limit)
        layer = fused_layer(*given, block=self.block, activation=activation)
        routing = Routing(on(self.ids), on(self.weights), experts, on(self.expert_map), self.on_input)
        if plan is None:
            major, minor = torch.cuda.get_device_capability() if out.is_cuda else (0, 0)
            rows, capability = self.block[1], 10 * major + minor
            ids = experts if self.expert_map is None else len(self.expert_map)
            plan = plan_for(tokens, top_k, ids, hidden, size, group_size=rows, capability=capability)
        plan = plan if out.is_cuda else replace(plan, pdl=False)
        results = []
        for _ in range(2):
            layer(x, out, routing=routing, plan=plan, workspace=workspace)
            results.append(out.cpu().clone())
        assert torch.equal(*results)
        return results[0]

    def exact(self):
        x = quantize_rows(self.x, self.block[1])
        out = torch.zeros(x.shape, dtype=torch.float64)
        for token, slots in enumerate(self.ids.tolist()):
            for slot, expert in enumerate(slots):
                if self.expert_map is not None and 0 <= expert < self.expert_map.numel():
                    expert = int(self.expert_map[expert])
                elif self.expert_map is not None:
                    expert = -1
                if not 0 <= expert < self.w13.shape[0]:
                    continue
                weight = float(self.weights[token, slot])
                h = self.exact13[expert] @ x[token] * (weight if self.on_input else 1.0)
                h = h if self.b13 is None else h + self.b13[expert].double()
                h = quantize_rows(apply_moe_activation(self.activation, h[None]), self.block[1])[0]
                y = self.exact2[expert] @ h
                y = y if self.b2 is None else y + self.b2[expert].double()
                out[token] += y * (1.0 if self.on_input else weight)
        return out

    def check(self, device, plan=None):
        found, expected = self.run(device, plan).double(), self.exact()
        assert torch.isfinite(found).all()
        error = float((found - expected).norm() / expected.norm())
        assert error < TOLERANCE, f"relative error {error:.2e}, allowed {TOLERANCE:.2e}"


def plan_of(block_m, *, block_n=128, swap=False, tma=False, group_m=1, splits=(1, 1), down_m=None, warps=4, **more):
    up = TileConfig(block_m, block_n, warps, 2, group_m, swap, tma, splits[0], **more)
    down = TileConfig(down_m or block_m, block_n, warps, 2, group_m, swap, tma, splits[1], **more)
    return TilePlan(up, down, pdl=True)


PLANS = {
    "swapped": plan_of(16, swap=True),
    "descriptors": plan_of(16, swap=True, tma=True),
    "plain": plan_of(16, group_m=3),
    "rows 64": plan_of(64, group_m=2, warps=8),
    "pieces": plan_of(64, down_m=16, tma=True),
    "split": plan_of(16, swap=True, splits=(2, 4)),
    "split up": plan_of(16, swap=True, splits=(4, 1)),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_plans(plan, device):
    Layer(11, 512, 256, 3, 2, seed=1).check(device, plan)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_sizes_that_are_no_multiples(plan, device):
    Layer(18, 336, 208, 3, 2, bias=True, mapped=True, dtype=torch.float16, seed=2).check(device, plan)


@pytest.mark.diagonal(2)
@pytest.mark.parametrize("name", [a.value for a in MoEActivation])
@pytest.mark.parametrize("split", [1, 2])
def test_activations(name, split, device):
    plan = plan_of(16, swap=True, splits=(split, 1))
    Layer(5, 256, 160, 2, 2, name=name, bias=True, seed=3).check(device, plan)


@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.parametrize("name", ["silu", "relu2_no_mul"])
def test_router_weight_on_input(name, split, device):
    plan = plan_of(16, swap=True, splits=(split, split))
    Layer(6, 256, 160, 3, 1, name=name, bias=True, on_input=True, seed=4).check(device, plan)


@pytest.mark.parametrize("block", [(64, 64), (128, 64), (64, 128)])
def test_other_blocks(block, device):
    Layer(9, 320, 200, 3, 2, block=block, seed=5).check(device, plan_of(16, block_n=block[1], swap=True))


def with_zeros_of_the_largest_scale(layer):
    """In each matrix a block of zeros with the largest power of two as its scale; activations with scales over 2."""
    for values, scales, exact in ((layer.w13, layer.s13, layer.exact13), (layer.w2, layer.s2, layer.exact2)):
        rows, columns = layer.block
        scales[:, 0, 1] = 2.0**127
        values.view(torch.uint8)[:, :rows, columns : 2 * columns] = 0
        exact[:, :rows, columns : 2 * columns] = 0.0
    layer.x *= 2.0**16
    return layer


@pytest.mark.parametrize("plan", [PLANS["swapped"], PLANS["plain"], PLANS["split"]], ids=["swapped", "plain", "split"])
def test_zeros_have_any_scale(plan, device):
    with_zeros_of_the_largest_scale(Layer(9, 256, 256, 3, 2, seed=10)).check(device, plan)


@pytest.mark.parametrize("tokens", [1, 2, 17, 64])
def test_rule(tokens, device):
    Layer(tokens, 256, 128, 8, 2, dtype=torch.float32, seed=6).check(device)


@pytest.mark.parametrize("plan", [PLANS["swapped"], PLANS["rows 64"]], ids=["swapped", "rows 64"])
def test_batched(plan, device):
    """Buffers in which one expert has no row and one all, NaN in rows that are not in use; the rest is not written."""
    layer = Layer(20, 160, 144, 3, 1, bias=True, seed=9)
    counts = torch.tensor([17, 0, 20], dtype=torch.int32)
    x = torch.full((3, 20, 160), float("nan"), dtype=layer.x.dtype)
    expected = torch.full((3, 20, 160), 7.0, dtype=torch.float64)
    layer.weights[:] = 1.0
    for expert, count in enumerate(counts.tolist()):
        layer.ids[:] = expert
        x[expert, :count] = layer.x[:count]
        expected[expert, :count] = layer.exact()[:count]
    specs = workspace_specs(20, 1, 3, 160, 144, batched=True)
    buffer = torch.full((workspace_nbytes(specs),), 0xFF, dtype=torch.uint8, device=device)
    out = torch.full(x.shape, 7.0, dtype=x.dtype, device=device)
    given = (tensor.to(device) for tensor in (layer.w13, layer.w2, layer.s13, layer.s2, layer.b13, layer.b2))
    plan = plan if out.is_cuda else replace(plan, pdl=False)
    workspace = Workspace(device, buffer).take(specs)
    fused_layer(*given)(x.to(device), out, routing=Batch(counts.to(device), 20), plan=plan, workspace=workspace)
    found = out.cpu().double()
    assert torch.equal(found == 7.0, expected == 7.0)
    assert float((found - expected).norm() / (expected - 7.0).norm()) < TOLERANCE


def test_one_expert_takes_all(device):
    layer = Layer(40, 256, 128, 4, 1, seed=7)
    layer.ids[:] = 2
    layer.check(device, plan_of(16, swap=True))


def test_no_tokens(device):
    layer = Layer(0, 256, 128, 4, 2)
    assert layer.run(device, None).shape == (0, 256)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [300, 1500])
@pytest.mark.parametrize("name", ["silu", "swigluoai"])
def test_specialized(rows, name, device):
    config = TileConfig(128, 128, 4, 4, 8, warp_specialized=True)
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel is Hopper's own")
    for pdl in (False, True):
        Layer(rows, 528, 400, 3, 2, name=name, bias=True, mapped=True, seed=8).check(
            device, TilePlan(config, config, pdl)
        )


OTHER_BLOCKS = pytest.mark.parametrize("block", [(64, 64), (128, 64), (64, 128)], ids="{0[0]}x{0[1]}".format)


@pytest.mark.gpu
@OTHER_BLOCKS
def test_specialized_for_other_blocks(block, device):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel is Hopper's own")
    plan = plan_for(300, 2, 3, 464, 336, group_size=block[1])
    for name in ("silu", "relu2_no_mul"):
        Layer(300, 464, 336, 3, 2, name=name, block=block, bias=True, mapped=True, seed=8).check(device, plan)
    # rows that descriptors cannot reach
    Layer(300, 328, 200, 3, 2, block=block, seed=8).check(device, plan)


@pytest.mark.gpu
@pytest.mark.parametrize("block", [(128, 128), (64, 64), (128, 64), (64, 128)], ids="{0[0]}x{0[1]}".format)
def test_zeros_have_any_scale_specialized(block, device):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel is Hopper's own")
    config = TileConfig(128, block[1], 4, 4, 8, warp_specialized=True)
    layer = with_zeros_of_the_largest_scale(Layer(300, 256, 256, 3, 2, block=block, seed=10))
    layer.check(device, TilePlan(config, config, pdl=True))


@OTHER_BLOCKS
def test_many_rows_without_the_specialized_kernel(block, device):
    """Rows of no whole 16 bytes: tiles of 128 rows, or of 64 where scales differ among the columns of a tile."""
    plan = plan_for(300, 2, 3, 72, 136, group_size=block[1])
    assert plan.block_m == 128
    assert plan.gemm1.warp_specialized
    Layer(70, 72, 136, 3, 2, block=block, seed=5).check(device, plan)


@pytest.mark.parametrize("block", [(128, 128), (64, 64), (128, 64), (64, 128)], ids="{0[0]}x{0[1]}".format)
@pytest.mark.parametrize(("tokens", "kernel"), [(2, "scaled_gemv"), (40, "grouped_gemm"), (2000, "hopper")])
def test_which_kernel_multiplies(block, tokens, kernel):
    config = FusedMoEConfig(6, 2, 1024, 512)
    base = kFp8Static128BlockSym
    key = replace(base, scale=replace(base.scale, group_shape=GroupShape(*block)))
    activation_key = kFp8Dynamic128Sym if block[1] == 128 else kFp8Dynamic64Sym
    made = TritonFp8BlockExperts(config, weight_key=key, activation_key=activation_key, device=DeviceInfo.parse("sm90"))
    with record() as launches:
        call_on_meta(made, tokens)
    names = [launch.name for launch in launches]
    kernels = ("scaled_gemv", "grouped_gemm", "hopper")
    assert [names.count(f"{name}_kernel") for name in kernels] == [2 * (name == kernel) for name in kernels]


@pytest.mark.parametrize("capability", [0, 89, 90, 100, 120])
@pytest.mark.parametrize("tokens", [1, 8, 100, 1000, 10000, 100000])
@pytest.mark.parametrize("shape", [(8, 2, 4096, 14336), (256, 8, 7168, 256), (128, 8, 2048, 768), (1, 1, 128, 128)])
def test_rule_keeps_its_promises(shape, tokens, capability):
    experts, top_k, hidden, size = shape
    plan = plan_for(tokens, top_k, experts, hidden, size, capability=capability)
    assert plan.block_m % plan.gemm1.block_m == 0
    assert plan.block_m % plan.gemm2.block_m == 0
    specs = {s.name: s for s in workspace_specs(tokens, top_k, experts, hidden, size)}
    pairs = tokens * top_k
    assert plan.gemm1.split_k == 1 or pairs * plan.gemm1.split_k * 2 * size <= specs["partials"].shape[0]
    assert plan.gemm2.split_k == 1 or pairs * plan.gemm2.split_k * hidden <= specs["partials"].shape[0]
    for config, halves in ((plan.gemm1, 2), (plan.gemm2, 1)):
        stage = (config.block_m + halves * config.block_n) * 128
        limit = 227 * 1024 if capability in (90, 100) else 99 * 1024
        # two-stage loops of the older tensor cores keep one buffer in registers
        buffers = config.num_stages if capability >= 90 else config.num_stages - 1
        assert config.warp_specialized or stage * buffers <= limit
    assert capability >= 90 or not plan.pdl
