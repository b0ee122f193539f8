"""Every way of storing block FP8 experts loads to exactly weight x scale, and nothing broken loads."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_core import CheckpointError, MoEActivation, kFp8Dynamic128Sym, kFp8Static128BlockSym
from moe_core.checkpoint import Checkpoint, LayerSource, read_layer
from moe_core.testing import checkpoints
from moe_core.testing.checkpoints import CONFIG, NAMES, PREFIX, E, Experts, K, N, Tensors, exponents, unchanged, write
from torch import Tensor

QUANTIZATION = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
STORED: dict[str, Any] = {**CONFIG, "quantization_config": QUANTIZATION}


def powers(grid: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Scales that every scale type holds exactly."""
    return torch.randint(-14, 15, grid, generator=generator).float().exp2()


def values(weight: Tensor, scale: Tensor, block: tuple[int, int] = (128, 128)) -> Tensor:
    """The definition: weight [n, k] x scale [n // rows, k // cols], in float64."""
    rows = torch.arange(weight.shape[0]) // block[0]
    cols = torch.arange(weight.shape[1]) // block[1]
    return weight.double() * scale.double()[rows][:, cols]


def refused(folder: Path, tensors: Tensors, *parts: str, **changes: Any) -> None:
    checkpoints.refused(folder, tensors, QUANTIZATION, *parts, **changes)


class Blocks(Experts):
    """Experts with partial blocks."""

    def __init__(self, block: tuple[int, int] = (128, 128), **arguments: Any) -> None:
        super().__init__(block, **arguments)

    def one_by_one(self, names: dict[str, str] = NAMES, scale_dtype: torch.dtype = torch.float32) -> Tensors:
        return self.tensors(lambda scale: stored(scale, scale_dtype), "weight_scale_inv", names)


def stored(scale: Tensor, dtype: torch.dtype) -> Tensor:
    return exponents(scale, dtype) if dtype in (torch.uint8, torch.float8_e8m0fnu) else scale.to(dtype)


def source(folder: Path, tensors: Tensors, **changes: Any) -> LayerSource:
    return checkpoints.source(folder, tensors, QUANTIZATION, **changes)


def check(found: LayerSource, experts: Blocks) -> None:
    assert found.weight_key is not None
    assert found.weights().w13_scale.dtype is torch.float32  # type: ignore[union-attr]
    checkpoints.check(found, experts, found.weight_key, found.activation_key)


SCALES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu]


@pytest.mark.parametrize("dtype", SCALES, ids=str)
def test_scale_types(tmp_path: Path, dtype: torch.dtype) -> None:
    experts = Blocks()
    found = source(tmp_path, experts.one_by_one(scale_dtype=dtype))
    assert found.scheme == "fp8"
    assert (found.weight_key, found.activation_key) == (kFp8Static128BlockSym, kFp8Dynamic128Sym)
    check(found, experts)


def test_e8m0_as_bytes_where_the_config_says_so(tmp_path: Path) -> None:
    experts = Blocks()
    tensors = experts.one_by_one(scale_dtype=torch.uint8)
    check(source(tmp_path / "a", tensors, quantization_config={**QUANTIZATION, "scale_fmt": "ue8m0"}), experts)
    refused(tmp_path / "b", tensors, "weight_scale_inv has dtype uint8, expected float32")


@pytest.mark.parametrize("shards", [0, 1, 4])
def test_shards(tmp_path: Path, shards: int) -> None:
    experts = Blocks()
    found = read_layer(Checkpoint.open(write(tmp_path, experts.one_by_one(), STORED, shards=shards)))
    check(found, experts)


def test_gate_and_up_own_their_partial_scale_rows(tmp_path: Path) -> None:
    experts = Blocks()
    found = source(tmp_path, experts.one_by_one()).weights()
    assert found.w13_scale is not None
    # 192 rows: one block and a half
    for mine, scales in zip(found.w13_scale, experts.scales, strict=True):
        assert torch.equal(mine[:2], scales["gate"])
        assert torch.equal(mine[2:], scales["up"])


@pytest.mark.parametrize("block", [(128, 128), (64, 128), (64, 64), (128, 64), (32, 96)])
def test_block_sizes(tmp_path: Path, block: tuple[int, int]) -> None:
    experts = Blocks(block)
    found = source(
        tmp_path, experts.one_by_one(), quantization_config={**QUANTIZATION, "weight_block_size": list(block)}
    )
    assert found.weight_key == kFp8Static128BlockSym.with_group(*block)
    assert found.activation_key == kFp8Dynamic128Sym.with_group(1, block[1])
    check(found, experts)


def test_other_names(tmp_path: Path) -> None:
    experts = Blocks()
    check(source(tmp_path, experts.one_by_one({"gate": "w1", "up": "w3", "down": "w2"})), experts)


@pytest.mark.parametrize("spelling", ["float8_e4m3fn", "e4m3fn", "E4M3"])
def test_spellings_of_the_weights_type(tmp_path: Path, spelling: str) -> None:
    experts = Blocks()
    check(source(tmp_path, experts.one_by_one(), quantization_config={**QUANTIZATION, "fmt": spelling}), experts)


def test_without_a_gate(tmp_path: Path) -> None:
    experts = Blocks(gated=False)
    found = source(tmp_path, experts.one_by_one(), hidden_act="relu2")
    assert found.config.activation is MoEActivation.RELU2_NO_MUL
    check(found, experts)


def test_biases(tmp_path: Path) -> None:
    experts = Blocks()
    tensors = experts.one_by_one()
    biases = {
        f"{PREFIX}.{e}.{p}_proj.bias": torch.randn(K if p == "down" else N).bfloat16()
        for e in range(E)
        for p in experts.names
    }
    found = source(tmp_path / "a", {**tensors, **biases})
    assert found.config.has_bias
    check(found, experts)
    weights = found.weights()
    assert weights.w13_bias is not None
    assert weights.w2_bias is not None
    assert torch.equal(weights.w13_bias[1, :N], biases[f"{PREFIX}.1.gate_proj.bias"].float())
    assert torch.equal(weights.w13_bias[1, N:], biases[f"{PREFIX}.1.up_proj.bias"].float())
    assert torch.equal(weights.w2_bias[2], biases[f"{PREFIX}.2.down_proj.bias"].float())
    short = {name: bias[:-1].clone() for name, bias in biases.items()}
    refused(tmp_path / "b", {**tensors, **short}, f"{PREFIX}.0.gate_proj.bias has shape [{N - 1}], expected [{N}]")


# ------------------------------------------------------------------ gate and up in one tensor


def stack(experts: Blocks, *, scale: str, transposed: bool = False) -> Tensors:
    return experts.stacked(unchanged, scale, transposed=transposed)


@pytest.mark.parametrize("scale", ["_scale_inv", ".weight_scale_inv", "_weight_scale_inv", "_scales_inv"])
@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
def test_stacked(tmp_path: Path, scale: str, transposed: bool) -> None:
    experts = Blocks()
    found = source(tmp_path, stack(experts, scale=scale, transposed=transposed))
    assert found.weight_key == kFp8Static128BlockSym
    check(found, experts)


@pytest.mark.parametrize("inter", [K // 2, K, 2 * K], ids=["2N = K", "N = K", "N = 2K"])
@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
def test_orientation_of_square_matrices(tmp_path: Path, inter: int, transposed: bool) -> None:
    """Where one of the two matrices is square, the other one tells."""
    experts = Blocks(hidden=256, inter=inter * 256 // K)
    tensors = stack(experts, scale="_scale_inv", transposed=transposed)
    check(source(tmp_path, tensors, hidden_size=256, moe_intermediate_size=inter * 256 // K), experts)


@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
def test_block_across_gate_and_up(tmp_path: Path, transposed: bool) -> None:
    """384 rows in three blocks: the middle one is half gate and half up."""
    experts = Blocks()
    generator = torch.Generator().manual_seed(2)
    shared = [powers((3, 3), generator) for _ in range(E)]
    tensors = stack(experts, scale="_scale_inv", transposed=transposed)
    stacked = torch.stack(shared)
    tensors[f"{PREFIX}.gate_up_proj_scale_inv"] = stacked.mT if transposed else stacked
    found = source(tmp_path, {name: tensor.contiguous() for name, tensor in tensors.items()})
    assert found.weight_key == kFp8Static128BlockSym.with_group(64, 128)
    for weights, scales, both in zip(experts.weights, experts.scales, shared, strict=True):
        whole = torch.cat([weights[n].view(torch.uint8) for n in ("gate", "up")]).view(torch.float8_e4m3fn)
        together = values(whole, both)
        # the same values with scales of 64 rows, gate and up apart
        fine = both.repeat_interleave(2, dim=0)
        assert torch.equal(together[:N], values(weights["gate"], fine[:3], (64, 128)))
        scales["gate"], scales["up"] = fine[:3], fine[3:6]
        scales["down"] = scales["down"].repeat_interleave(2, dim=0)[: K // 64]
    experts.group = (64, 128)
    check(found, experts)


def test_blocks_that_can_be_read_both_ways(tmp_path: Path) -> None:
    inter = 224  # 448 rows: four blocks together, and two twice
    tensors = stack(Blocks(inter=inter), scale="_scale_inv")
    refused(tmp_path, tensors, "4 rows of 128-row blocks over 224 gate and 224 up rows", moe_intermediate_size=inter)


def test_transposed_oblong_blocks_are_refused(tmp_path: Path) -> None:
    tensors = stack(Blocks((64, 128)), scale="_scale_inv", transposed=True)
    changes = {"quantization_config": {**QUANTIZATION, "weight_block_size": [64, 128]}}
    refused(tmp_path, tensors, "is stored transposed with blocks of 64x128", **changes)


# ------------------------------------------------------------------ what is another format


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"activation_scheme": "fixed"}, "activation_scheme is 'fixed', expected 'dynamic' or 'static'"),
        ({"activation_scheme": "static"}, f"{PREFIX}.0.gate_proj.input_scale is missing"),
        ({"weight_block_size": None}, "gate_proj.weight_scale_inv has shape [2, 3], expected [] (one scale per tensor"),
        ({"fmt": "e5m2"}, "fmt is 'e5m2', expected 'e4m3'"),
        ({"quant_method": "fp9"}, "quant_method is 'fp9', expected 'fp8'"),
    ],
)
def test_other_formats_are_refused_by_name(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    refused(tmp_path, Blocks().one_by_one(), reason, quantization_config={**QUANTIZATION, **change})


def test_config_that_says_fp8_of_16_bit_experts(tmp_path: Path) -> None:
    tensors = {name: t.to(torch.bfloat16) for name, t in Blocks().one_by_one().items() if name.endswith("weight")}
    message = (
        f"{PREFIX} is not quantized: its weights are BF16 without scales, although config.json specifies quant_method"
    )
    refused(tmp_path, tensors, message)


def test_one_projection_in_16_bits(tmp_path: Path) -> None:
    """transformers leaves alone what is no multiple of the block."""
    tensors = Blocks().one_by_one()
    for expert in range(E):
        del tensors[f"{PREFIX}.{expert}.down_proj.weight_scale_inv"]
        tensors[f"{PREFIX}.{expert}.down_proj.weight"] = torch.zeros(K, N, dtype=torch.bfloat16)
    refused(
        tmp_path,
        tensors,
        f"{PREFIX}.0.down_proj.weight has dtype bfloat16, expected float8_e4m3fn as {PREFIX}.0.gate_proj.weight",
    )


def test_one_expert_in_16_bits(tmp_path: Path) -> None:
    tensors = Blocks().one_by_one()
    name = f"{PREFIX}.1.up_proj.weight"
    tensors[name] = tensors[name].to(torch.bfloat16)
    refused(tmp_path, tensors, f"{name} is BF16 [{N}, {K}], expected F8_E4M3 [{N}, {K}] as {PREFIX}.0.up_proj.weight")


@pytest.mark.parametrize(
    "block", [128, [128], [128, 128, 128], [0, 128], [True, 128], ["128", 128], [1 << 20, 128], {}]
)
def test_block_size_that_is_none(tmp_path: Path, block: object) -> None:
    message = f"weight_block_size is {block}, expected [rows, columns]"
    refused(tmp_path, Blocks().one_by_one(), message, quantization_config={**QUANTIZATION, "weight_block_size": block})


# ------------------------------------------------------------------ what is broken


PROJECTIONS = ["gate_proj", "up_proj", "down_proj"]


@pytest.mark.parametrize("projection", PROJECTIONS)
def test_scale_of_the_wrong_shape(tmp_path: Path, projection: str) -> None:
    tensors = Blocks().one_by_one()
    rows, cols = tensors[f"{PREFIX}.0.{projection}.weight_scale_inv"].shape
    for shape in ((rows, cols + 1), (cols + 5, rows), (rows * cols,), (), (rows, cols, 1)):
        changed = dict(tensors)
        for expert in range(E):
            changed[f"{PREFIX}.{expert}.{projection}.weight_scale_inv"] = torch.ones(shape)
        name = f"{PREFIX}.0.{projection}.weight_scale_inv"
        message = f"{name} has shape {list(shape)}, expected [{rows}, {cols}] (one scale per block of 128x128"
        refused(tmp_path, changed, message)


@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scale_values(tmp_path: Path, projection: str, value: float, dtype: torch.dtype) -> None:
    tensors = Blocks().one_by_one(scale_dtype=dtype)
    name = f"{PREFIX}.2.{projection}.weight_scale_inv"
    tensors[name][1, 0] = value
    refused(tmp_path, tensors, f"{name} has 1 NaN, Inf or negative value of", "first at [1, 0]")


def test_e8m0_nan(tmp_path: Path) -> None:
    tensors = Blocks().one_by_one(scale_dtype=torch.float8_e8m0fnu)
    name = f"{PREFIX}.1.up_proj.weight_scale_inv"
    tensors[name].view(torch.uint8)[0, 2] = 255
    refused(tmp_path, tensors, f"{name} has 1 NaN", "[0, 2]")


@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_nan_codes_in_weights(tmp_path: Path, projection: str, code: int) -> None:
    tensors = Blocks().one_by_one()
    name = f"{PREFIX}.1.{projection}.weight"
    tensors[name].view(torch.uint8)[7, 5] = code
    refused(tmp_path, tensors, f"{name} has 1 NaN value of {K * N}, first at [7, 5]")


def test_nan_in_stacked_experts(tmp_path: Path) -> None:
    tensors = stack(Blocks(), scale="_scale_inv")
    tensors[f"{PREFIX}.gate_up_proj"].view(torch.uint8)[2, 200, 5] = 0x7F
    refused(tmp_path, tensors, f"{PREFIX}.gate_up_proj has 1 NaN value", "first at [2, 200, 5]")


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.bfloat16, torch.int8], ids=str)
def test_weights_of_another_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = Blocks().one_by_one()
    for expert in range(E):
        name = f"{PREFIX}.{expert}.down_proj.weight"
        tensors[name] = tensors[name].float().to(dtype)
    kind = str(dtype).removeprefix("torch.")
    refused(tmp_path, tensors, f"{PREFIX}.0.down_proj.weight has dtype {kind}, expected float8_e4m3fn")


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.uint8], ids=str)
def test_scales_of_another_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {
        n: t if n.endswith("weight") else torch.ones(t.shape).to(dtype) for n, t in Blocks().one_by_one().items()
    }
    refused(tmp_path, tensors, f"{PREFIX}.0.gate_proj.weight_scale_inv has dtype {str(dtype).removeprefix('torch.')}")


@pytest.mark.parametrize("missing", PROJECTIONS)
def test_projection_without_scales(tmp_path: Path, missing: str) -> None:
    tensors = {n: t for n, t in Blocks().one_by_one().items() if f"{missing}.weight_scale_inv" not in n}
    refused(tmp_path, tensors, f"{PREFIX}.0.{missing}.weight_scale_inv is missing")


def test_one_missing_scale(tmp_path: Path) -> None:
    tensors = Blocks().one_by_one()
    name = f"{PREFIX}.1.up_proj.weight_scale_inv"
    del tensors[name]
    refused(tmp_path, tensors, f"{name} is missing")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": K + 64}, f"gate_proj.weight has shape [{N}, {K}], expected [{N}, {K + 64}]"),
        ({"moe_intermediate_size": N + 64}, f"gate_proj.weight has shape [{N}, {K}], expected [{N + 64}, {K}]"),
    ],
)
def test_sizes_that_do_not_match_the_config(tmp_path: Path, changes: dict[str, int], message: str) -> None:
    refused(tmp_path, Blocks().one_by_one(), f"{PREFIX}.0.{message}", "config.json", **changes)


def test_weight_that_is_no_matrix(tmp_path: Path) -> None:
    tensors = {n: t.reshape(-1) if n.endswith("down_proj.weight") else t for n, t in Blocks().one_by_one().items()}
    refused(tmp_path, tensors, f"{PREFIX}.0.down_proj.weight has shape [{K * N}], expected [{K}, {N}]")
    stacked = stack(Blocks(), scale="_scale_inv")
    stacked[f"{PREFIX}.down_proj"] = stacked[f"{PREFIX}.down_proj"].reshape(E, -1)
    refused(tmp_path, stacked, "expected a matrix per expert")


def test_only_the_asked_experts_are_read(tmp_path: Path) -> None:
    """A broken expert of another rank is not this rank's matter."""
    tensors = Blocks().one_by_one()
    tensors[f"{PREFIX}.1.up_proj.weight"].view(torch.uint8)[0, 0] = 0x7F
    write(tmp_path, {n: t.clone() for n, t in tensors.items()}, STORED)
    checkpoint = Checkpoint.open(tmp_path)
    found = read_layer(checkpoint, experts=[0, 2]).weights().w13.view(torch.uint8)
    for mine, expert in zip(found, (0, 2), strict=True):
        assert torch.equal(mine[:N], tensors[f"{PREFIX}.{expert}.gate_proj.weight"].view(torch.uint8))
    with pytest.raises(CheckpointError, match=re.escape(f"{PREFIX}.1.up_proj.weight")):
        read_layer(checkpoint, experts=[1]).weights()


def test_loading_holds_no_second_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Peak memory while loading: the layer itself and the experts that are read at a time, here one."""
    monkeypatch.setattr("moe_core.checkpoint.experts.stacks.GROUP_BYTES", 1)
    sizes = {"hidden": 512, "inter": 512}
    found = source(tmp_path, Blocks(**sizes).one_by_one(), hidden_size=512, moe_intermediate_size=512)
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        extra = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and not func.is_view and func is not torch.ops.aten.empty.memory_format:
                self.extra = max(self.extra, out.nbytes)
            return out

    with Largest() as watch:
        weights = found.weights()
    expert = 2 * 512 * 512
    assert weights.w13.nbytes == E * expert
    assert watch.extra <= expert
