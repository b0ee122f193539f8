"""Weights widened in registers: every code, every scale, launch parameters that the kit's small layers do not reach."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from moe_core import FusedMoEActivationFormat, FusedMoEConfig, QuantKey
from moe_core.device import DeviceInfo
from moe_core.gemm.launch import Routing
from moe_core.gemm.plan import TileConfig, TilePlan
from moe_core.ops.sort import sort_pairs
from moe_core.quant_key import kFp8Static128BlockSym, kFp8StaticChannelSym, kMxfp8Dynamic, kMxfp8Static
from moe_core.testing.cases import Case
from moe_core.testing.checks import check_values
from moe_core.testing.harness import Place
from moe_core.workspace import Workspace
from moe_fp8.experts.triton_mxfp8 import TritonMxfp8Experts
from moe_fp8.experts.triton_weight_only import TritonFp8WeightOnlyExperts
from moe_fp8.kernels.upcast import arrange_halves
from moe_fp8.kernels.upcast_moe import UpcastWeights, WeightScale, _down_product
from moe_fp8.kernels.upcast_rule import upcast_plan
from moe_fp8.kernels.upcast_workspaces import HALVES, stored_dtype, upcast_workspaces


@triton.jit
def _arrange_halves(x, out, AXIS: tl.constexpr):
    row, column = tl.program_id(0) * 16 + tl.arange(0, 16), tl.arange(0, 128)
    offsets = row[:, None] * 128 + column[None, :] if AXIS == 1 else column[:, None] + row[None, :] * 128
    values, _ = arrange_halves(tl.load(x + offsets), None, 0, AXIS)
    tl.store(out + offsets, values)


COLUMNS, ROWS = 256, 128
SMALL = TileConfig(16, 128, 4, 2, swap=True)


def arranged(x: torch.Tensor) -> torch.Tensor:
    """Columns in the order of `upcast.arrange`."""
    return x.unflatten(1, (-1, 16, 2)).transpose(2, 3).flatten(1)


def halves(x: torch.Tensor) -> torch.Tensor:
    """int32: arranged columns as two bfloat16 halves, the higher ones of 32 columns first."""
    high = x.bfloat16()
    both = torch.stack([high, (x - high.float()).bfloat16()]).unflatten(2, (-1, 32))
    return both.permute(1, 2, 0, 3).reshape(len(x), -1).contiguous().view(HALVES)


def widened(
    codes: torch.Tensor, scale: torch.Tensor, kind: WeightScale, dtype: torch.dtype, device, x: float = 1.0
) -> torch.Tensor:
    """float32 [ROWS, COLUMNS]: what the down product makes of w2 [ROWS, COLUMNS] and unit vectors times ``x``."""
    stored = stored_dtype(dtype, mxfp8_weights=kind is WeightScale.MXFP8, mxfp8_activations=False)
    specs = upcast_workspaces(COLUMNS, 1, 1, ROWS, COLUMNS, dtype=stored, output_dtype=torch.float32)
    workspace = Workspace(device).take(specs)
    rows = arranged(x * torch.eye(COLUMNS))
    workspace["h_values"].copy_(halves(rows) if stored is HALVES else rows.to(stored))
    ids = torch.zeros(COLUMNS, 1, dtype=torch.int32, device=device)
    order = sort_pairs(ids, 1, 16, workspace=workspace)
    weights = UpcastWeights(codes.to(device)[None], codes.to(device)[None], scale.to(device), scale.to(device), kind)
    routing = Routing(ids, torch.ones(COLUMNS, 1, device=device), 1)
    y = torch.empty(COLUMNS, ROWS, device=device)
    _down_product(weights, ROWS, SMALL, order, routing, workspace, y, by_pair=False, pdl=False)
    return y.cpu().T


def every_code() -> torch.Tensor:
    """e4m3 [ROWS, COLUMNS]: each row holds every code but NaN, each column another one in every row."""
    codes = (torch.arange(COLUMNS)[None, :] + 37 * torch.arange(ROWS)[:, None]) % 256
    return torch.where(codes % 128 == 127, 0, codes).to(torch.uint8).view(torch.float8_e4m3fn)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_code_is_exact(dtype: torch.dtype, device: torch.device) -> None:
    codes = every_code()
    found = widened(codes, torch.ones(1, 1), WeightScale.TENSOR, dtype, device)
    assert torch.equal(found, codes.float())


def as_words(exponents: torch.Tensor) -> torch.Tensor:
    """e8m0 bytes [ROWS, COLUMNS / 32] as the kernel reads them, [1, COLUMNS / 128, ROWS, 4]."""
    return exponents.to(torch.uint8).view(ROWS, -1, 4).permute(1, 0, 2).contiguous()[None]


def scaled(codes: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    return codes.double() * torch.exp2(exponents.double() - 127).repeat_interleave(32, 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_power_of_two_is_exact(dtype: torch.dtype, device: torch.device) -> None:
    codes = every_code()
    exponents = torch.tensor([0, 1, 100, 127, 134, 135, 200, 254]).expand(ROWS, -1).clone()
    exponents[1::2] = exponents[1::2].flip(1)
    # the largest codes times 2^127 pass what float32 can hold
    fits = (codes.float().abs() < 2) | (exponents < 240).repeat_interleave(32, 1)
    codes = torch.where(fits, codes.float(), 0.0).to(torch.float8_e4m3fn)
    # of as many bits as a number of the type has
    x = 1.0 + torch.finfo(dtype).eps
    found = widened(codes, as_words(exponents), WeightScale.MXFP8, dtype, device, x)
    expected = (scaled(codes, exponents) * x).float().double()
    error = (found - expected).abs()
    # below float32's normal numbers tensor cores may return 0
    tiny = torch.finfo(torch.float32).tiny
    assert float(error[expected.abs() >= tiny].max()) == 0.0
    assert float(error[expected.abs() < tiny].max()) < tiny


@pytest.mark.parametrize("axis", [0, 1])
def test_halves_of_float16_numbers_are_exact(axis: int, device: torch.device) -> None:
    """Every finite float16 number and the infinities."""
    x = torch.arange(1 << 16).to(torch.int16).view(torch.float16)
    x = torch.where(x.isnan(), 0.0, x.float()).view(-1, 128)
    found = torch.empty(x.shape, dtype=HALVES, device=device)
    _arrange_halves[(len(x) // 16,)](x.to(device), found, AXIS=axis)
    pairs = found.cpu().view(torch.bfloat16).float().view(len(x), 4, 2, 32)
    finite = x.isfinite()
    assert torch.equal(torch.where(finite, arranged(x), 0.0), torch.where(arranged(finite), pairs.sum(2).flatten(1), 0))
    assert torch.equal(found.cpu()[finite.all(1)], halves(arranged(x))[finite.all(1)])
    assert torch.equal(pairs[:, :, 0].flatten(1)[~arranged(finite)], arranged(x)[~arranged(finite)])
    assert not pairs[:, :, 1].flatten(1)[~arranged(finite)].any()


def test_a_scale_that_is_nan_shows(device: torch.device) -> None:
    exponents = torch.full((ROWS, COLUMNS // 32), 127)
    exponents[5, 0] = 255
    found = widened(every_code(), as_words(exponents), WeightScale.MXFP8, torch.bfloat16, device)
    assert found[5, :32].isnan().all()
    assert not found[:5].isnan().any()


PLANS = {
    "split": (TileConfig(16, 128, 4, 2, 1, True, True, 2), TileConfig(16, 128, 4, 2, 1, True, True, 4)),
    "split up": (TileConfig(16, 64, 4, 2, 1, True, False, 4), TileConfig(16, 128, 4, 2, 1, True)),
    "pieces": (TileConfig(64, 128, 8, 2, 8, True, True), TileConfig(16, 128, 4, 2, 1, True)),
}


@pytest.mark.parametrize(
    ("plan", "weight_key", "activation_key"),
    [
        ("split", kFp8StaticChannelSym, None),
        ("split", kMxfp8Static, kMxfp8Dynamic),
        ("split up", kFp8Static128BlockSym, None),
        ("pieces", kMxfp8Static, kMxfp8Dynamic),
    ],
    ids=str,
)
def test_plans(plan: str, weight_key: QuantKey, activation_key: QuantKey | None, device: torch.device) -> None:
    base = TritonFp8WeightOnlyExperts if activation_key is None else TritonMxfp8Experts

    class Planned(base):
        def plan(self, num_tokens: int, on_gpu: bool = True) -> TilePlan:
            return TilePlan(*PLANS[plan], pdl=on_gpu)

    config = FusedMoEConfig(num_experts=2, top_k=2, hidden_size=512, intermediate_size=256, has_bias=True)
    target = DeviceInfo.current() if device.type == "cuda" else DeviceInfo.parse("sm90")
    check_values(Planned, Case("values", config, weight_key, activation_key, tokens=3), Place(device, target))


@pytest.mark.parametrize("capability", [0, 80, 89, 90, 100, 120])
@pytest.mark.parametrize("tokens", [1, 8, 100, 1000, 10000, 100000])
@pytest.mark.parametrize("shape", [(8, 2, 4096, 14336), (256, 8, 7168, 256), (128, 8, 2048, 768), (1, 1, 128, 72)])
@pytest.mark.parametrize("kind", ["gated", "stepwise", "halves", "plain"])
def test_rule_keeps_its_promises(shape, tokens: int, capability: int, kind: str) -> None:
    experts, top_k, hidden, size = shape
    asked = {"stepwise": kind == "stepwise", "halves": kind == "halves", "gated": kind != "plain"}
    plan = upcast_plan(tokens, top_k, experts, hidden, size, **asked, capability=capability)
    specs = upcast_workspaces(tokens, top_k, experts, hidden, size, dtype=torch.bfloat16, output_dtype=torch.bfloat16)
    sizes = {spec.name: spec.shape for spec in specs}
    pairs = tokens * top_k
    assert plan.up.split == 1 or pairs * plan.up.split * 2 * size <= sizes["parts"][0]
    assert plan.down.split == 1 or pairs * plan.down.split * hidden <= sizes["parts"][0]
    # rows of h have room for whole tiles, and what the down product reads was written
    assert -(-size // plan.up.block_n) * plan.up.block_n == sizes["h_values"][1]
    for config, halves in ((plan.up, 2), (plan.down, 1)):
        assert config.swap
        assert plan.block_m % config.block_m == 0
        stage = config.block_m * (512 if kind == "halves" else 256) + halves * config.block_n * 128
        limit = 227 * 1024 if capability in (90, 100) else 99 * 1024
        buffers = config.num_stages if capability >= 90 else config.num_stages - 1
        assert stage * buffers <= limit
    batched = upcast_plan(tokens, top_k, experts, hidden, size, **asked, split=False, capability=capability)
    assert batched.up.split == batched.down.split == 1
    assert replace(batched.up, split=1).block_m >= 16


def test_sizes_that_are_no_multiples_are_padded_once() -> None:
    """Whole words stay where they are; others are copied into rows of a multiple of 16 bytes."""
    from moe_core import MoEWeights

    for hidden, copied in ((64, False), (70, True)):
        config = FusedMoEConfig(num_experts=2, top_k=1, hidden_size=hidden, intermediate_size=32)
        weights = MoEWeights(
            weight_key=kFp8StaticChannelSym,
            activation_key=None,
            w13=torch.zeros(2, 64, hidden).to(torch.float8_e4m3fn),
            w2=torch.zeros(2, hidden, 32).to(torch.float8_e4m3fn),
            w13_scale=torch.ones(2, 64, 1),
            w2_scale=torch.ones(2, hidden, 1),
        )
        experts = TritonFp8WeightOnlyExperts(
            config, weight_key=kFp8StaticChannelSym, activation_key=None, device=DeviceInfo.parse("sm80")
        )
        converted = experts.convert(weights)
        assert (converted.w13.data_ptr() != weights.w13.data_ptr()) is copied
        assert converted.w13.shape[2] == -(-hidden // 16) * 16
        assert converted.w2.data_ptr() == weights.w2.data_ptr()


def test_the_batched_format_needs_counts() -> None:
    from moe_core.errors import TensorError

    config = FusedMoEConfig(
        num_experts=2,
        top_k=1,
        hidden_size=32,
        intermediate_size=32,
        activation_format=FusedMoEActivationFormat.BATCHED,
        max_num_tokens=4,
    )
    experts = TritonMxfp8Experts(
        config, weight_key=kMxfp8Static, activation_key=kMxfp8Dynamic, device=DeviceInfo.parse("sm90")
    )
    from moe_core import MoEWeights

    weights = experts.convert(
        MoEWeights(
            weight_key=kMxfp8Static,
            activation_key=kMxfp8Dynamic,
            w13=torch.zeros(2, 64, 32).to(torch.float8_e4m3fn),
            w2=torch.zeros(2, 32, 32).to(torch.float8_e4m3fn),
            w13_scale=torch.full((2, 64, 1), 127, dtype=torch.uint8),
            w2_scale=torch.full((2, 32, 1), 127, dtype=torch.uint8),
        )
    )
    with pytest.raises(TensorError, match="expert_tokens is missing"):
        experts.apply(
            torch.empty(2, 4, 32),
            torch.zeros(2, 4, 32),
            weights,
            topk_weights=torch.ones(4, 1),
            topk_ids=torch.zeros(4, 1, dtype=torch.int32),
            workspace={},
        )
