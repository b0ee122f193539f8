"""``moe run`` gives what the tools' files say: their weights exactly, activations quantized as their config has it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_core import fused_moe_reference, load_layer
from moe_core.checkpoint import Checkpoint, read_layer
from moe_core.reference.quantization import dequantize_weight
from moe_core.testing.checkpoints import Tensors
from moe_kit.changes import with_tensor
from moe_kit.commands import Moe
from moe_kit.tool_outputs import Cases, relative, routed, run, run_refuses
from safetensors.torch import load_file
from torch import Tensor

pytestmark = pytest.mark.usefixtures("no_gpu")

FILES = Cases(Path(__file__).parent / "data")
DATA, CASES = FILES.path, FILES.names
W8A8, W4A8 = "qwen3_ct_w8a8_int8", "qwen3_ct_w4a8_int"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def reference(folder: Path, tensors: Tensors, *, quantize_activations: bool = True) -> Tensor:
    """What the folder's config says, in float64."""
    found = read_layer(Checkpoint.open(folder), dtype=torch.float32)
    return fused_moe_reference(
        tensors["hidden_states"],
        found.weights(),
        found.config,
        topk_weights=tensors["topk_weights"],
        topk_ids=tensors["topk_ids"],
        quantize_activations=quantize_activations,
    )


@pytest.mark.parametrize("case", CASES)
def test_the_weights_are_the_tools(case: str) -> None:
    """The tool's own output with 16-bit activations."""
    tensors = load_file(DATA / case / "io.safetensors")
    found = reference(DATA / case, tensors, quantize_activations=False)
    assert relative(found, tensors["ref_experts_out"]) < FILES.bound(case, "ref_experts_out_f32")


@pytest.mark.parametrize("case", CASES)
def test_the_tools_own_reduction(case: str) -> None:
    """With its one scale for all tokens of an expert, the same weights give the tool's output."""
    tensors = load_file(DATA / case / "io.safetensors")
    weights = read_layer(Checkpoint.open(DATA / case), dtype=torch.float32).weights()
    assert weights.weight_key is not None
    assert weights.w13_scale is not None
    assert weights.w2_scale is not None
    w13 = dequantize_weight(weights.w13, weights.w13_scale, weights.weight_key, parts=2).double()
    w2 = dequantize_weight(weights.w2, weights.w2_scale, weights.weight_key).double()

    def quantized(x: Tensor) -> Tensor:
        scale = x.float().abs().amax() / 127.5
        return ((x.float() / scale).round().clamp(-128, 127) * scale).double()

    x, ids, router = tensors["hidden_states"], tensors["topk_ids"], tensors["topk_weights"].double()
    output = torch.zeros(x.shape, dtype=torch.float64)
    for expert in range(8):
        token, slot = (ids == expert).nonzero(as_tuple=True)
        if len(token):
            gate, up = (quantized(x[token]) @ w13[expert].T).chunk(2, dim=1)
            y = quantized(torch.nn.functional.silu(gate) * up) @ w2[expert].T
            output.index_add_(0, token, y * router[token, slot, None])
    assert relative(output, tensors["ref_experts_out_actq"]) < FILES.bound(case, "ref_experts_out_f32")


@pytest.mark.parametrize("given", ["topk", "logits"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_outputs_of_the_tools_own_files(case: str, dtype: str, given: str, tmp_path: Path) -> None:
    """One activation scale per token, as the config says."""
    tensors = load_file(DATA / case / "io.safetensors")
    output = run(DATA / case, routed(tensors, given), tmp_path, dtype)
    allowed = FILES.bound(case, "ref_experts_out_f32" if dtype == "fp32" else "ref_experts_out_actq_kernel")
    assert relative(output, reference(DATA / case, tensors)) < allowed
    # not further from the tool's than quantized activations are from others
    distance = json.loads((DATA / case / "manifest.json").read_text())["actq_vs_weightonly_rel"]
    assert relative(output, tensors["ref_experts_out_actq"]) < distance


# ------------------------------------------------------------------ the same experts, written otherwise


def check(case: str, folder: Path, scratch: Path, *, weight_only: bool = False) -> None:
    """``moe run`` on ``folder`` gives the outputs of ``case``: exactly in fp32, within the bound in bf16."""
    tensors = load_file(DATA / case / "io.safetensors")
    inputs = routed(tensors)
    expected = tensors["ref_experts_out"] if weight_only else reference(DATA / case, tensors)
    in_bf16 = FILES.bound(case, "ref_experts_out_bf16_kernel" if weight_only else "ref_experts_out_actq_kernel")
    assert relative(run(folder, inputs, scratch), expected) < FILES.bound(case, "ref_experts_out_f32")
    assert relative(run(folder, inputs, scratch, "bf16"), expected) < in_bf16


def fixture_group(case: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DATA / case / "config.json").read_text())["quantization_config"]
    return found


def test_weight_only(tmp_path: Path) -> None:
    """input_activations null: activations stay in 16 bits, and the output is the tool's own."""
    quantization = fixture_group(W8A8)
    quantization["config_groups"]["group_0"]["input_activations"] = None
    check(W8A8, FILES.rewritten(W8A8, tmp_path / "w", quantization), tmp_path, weight_only=True)


def test_modelopt_weight_only(tmp_path: Path) -> None:
    def flat(tensors: Tensors) -> Tensors:
        return {n: t.float().flatten() if n.endswith("weight_scale") else t for n, t in tensors.items()}

    quantization = {"quant_method": "modelopt", "quant_algo": "W8A16"}
    check(W8A8, FILES.rewritten(W8A8, tmp_path / "w", quantization, flat), tmp_path, weight_only=True)


def test_quark(tmp_path: Path) -> None:
    int8 = {"dtype": "int8", "symmetric": True, "qscheme": "per_channel"}
    parts = {"weight": {**int8, "is_dynamic": False}, "input_tensors": {**int8, "is_dynamic": True}}
    quantization = {"quant_method": "quark", "global_quant_config": parts}

    def zeros(tensors: Tensors) -> Tensors:
        scales = {n: t for n, t in tensors.items() if n.endswith("weight_scale")}
        return tensors | {
            n.removesuffix("scale") + "zero_point": torch.zeros(t.shape[0]).char() for n, t in scales.items()
        }

    check(W8A8, FILES.rewritten(W8A8, tmp_path / "w", quantization, zeros), tmp_path)


def words(tensors: Tensors) -> Tensors:
    """Eight codes of four bits in each int32, the first in the lowest bits."""
    found = {}
    for name, tensor in tensors.items():
        if not name.endswith(".weight") or tensor.dtype is not torch.int8:
            found[name] = tensor
            continue
        fields = (tensor.long() + 8).view(tensor.shape[0], -1, 8)
        packed = (fields << (4 * torch.arange(8))).sum(dim=2)
        found[f"{name}_packed"] = torch.where(packed >= 2**31, packed - 2**32, packed).int()
        found[f"{name}_shape"] = torch.tensor(tensor.shape)
    return found


def test_packed_w4a8(tmp_path: Path) -> None:
    quantization = fixture_group(W4A8)
    quantization["format"] = quantization["config_groups"]["group_0"]["format"] = "pack-quantized"
    check(W4A8, FILES.rewritten(W4A8, tmp_path / "w", quantization, words), tmp_path)


@pytest.mark.parametrize("block", ["block_sparse_moe", "mlp"])
def test_names_of_mixtral(block: str, tmp_path: Path) -> None:
    names = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"} if block == "block_sparse_moe" else {}

    def rename(tensors: Tensors) -> Tensors:
        found = {}
        for name, tensor in tensors.items():
            for old, new in names.items():
                name = name.replace(old, new)
            found[name.replace(".mlp.", f".{block}.")] = tensor
        return found

    check(W8A8, FILES.rewritten(W8A8, tmp_path / "w", change=rename), tmp_path)


def test_stacked_experts(tmp_path: Path) -> None:
    """One tensor for all experts, as transformers holds them."""

    def stack(tensors: Tensors) -> Tensors:
        prefix = "model.layers.0.mlp.experts"
        found = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}

        def every(projection: str, suffix: str) -> Tensor:
            return torch.stack([tensors[f"{prefix}.{e}.{projection}.{suffix}"] for e in range(8)])

        for suffix, end in (("weight", ""), ("weight_scale", "_scale")):
            found[f"{prefix}.gate_up_proj{end}"] = torch.cat([every("gate_proj", suffix), every("up_proj", suffix)], 1)
            found[f"{prefix}.down_proj{end}"] = every("down_proj", suffix)
        return found

    check(W8A8, FILES.rewritten(W8A8, tmp_path / "w", change=stack), tmp_path)


def static_quantized(x: Tensor, scale: float, zero_point: int) -> Tensor:
    """By the definition: codes of -128 to 127."""
    codes = ((x.float() / torch.tensor(scale)).round() + zero_point).clamp(-128, 127)
    return (codes - zero_point).double() * torch.tensor(scale).double()


STATIC: dict[str, tuple[dict[str, Any], int]] = {
    "ModelOpt": ({"quant_method": "modelopt", "quant_algo": "W8A8_SQ_PER_CHANNEL"}, 0),
    "Quark with zero points": (
        {
            "quant_method": "quark",
            "global_quant_config": {
                "weight": {"dtype": "int8", "symmetric": True, "qscheme": "per_channel", "is_dynamic": False},
                "input_tensors": {"dtype": "int8", "symmetric": False, "qscheme": "per_tensor", "is_dynamic": False},
            },
        },
        -23,
    ),
}


@pytest.mark.parametrize("name", STATIC)
def test_static_activations(name: str, tmp_path: Path) -> None:
    """Each expert's own scale and zero point, saturating."""
    quantization, zero_point = STATIC[name]
    tensors = load_file(DATA / W8A8 / "io.safetensors")
    x = tensors["hidden_states"]
    scale13, scale2 = float(x.abs().max()) / 140, 1e-3

    def extend(given: Tensors) -> Tensors:
        found = dict(given)
        for weight in [n for n in given if n.endswith("_proj.weight")]:
            base = weight.removesuffix(".weight")
            expert = int(base.split(".experts.")[1].split(".")[0])
            scale = scale2 if "down" in base else scale13
            found[f"{base}.input_scale"] = torch.tensor(scale * (1 + expert / 4))
            if zero_point:
                found[f"{base}.input_zero_point"] = torch.tensor(zero_point + expert)
            found[f"{base}.weight_scale"] = given[f"{base}.weight_scale"].float().flatten()
        return found

    folder = FILES.rewritten(W8A8, tmp_path / "w", quantization, extend)
    weights = read_layer(Checkpoint.open(DATA / W8A8), dtype=torch.float32).weights()
    assert weights.w13_scale is not None
    assert weights.w2_scale is not None
    w13, w2 = weights.w13.double() * weights.w13_scale, weights.w2.double() * weights.w2_scale
    expected = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(len(x)):
        for slot in range(3):
            expert = int(tensors["topk_ids"][token, slot])
            more, zero = 1 + expert / 4, zero_point + expert if zero_point else 0
            gate, up = (w13[expert] @ static_quantized(x[token], scale13 * more, zero)).chunk(2)
            h = static_quantized(torch.nn.functional.silu(gate) * up, scale2 * more, zero)
            expected[token] += (w2[expert] @ h) * tensors["topk_weights"][token, slot]
    inputs = routed(tensors)
    # a hidden value in some thousand falls on the other side of a rounding boundary in float32
    assert relative(run(folder, inputs, tmp_path), expected) < 2e-3


# ------------------------------------------------------------------ bad input


def with_code(tensor: Tensor) -> Tensor:
    tensor[2, 3] = -9
    return tensor


QWEN = "model.layers.0.mlp.experts.4.down_proj"
BROKEN: dict[str, tuple[str, str, Callable[[Tensor], Tensor | None], str]] = {
    "type": (W8A8, f"{QWEN}.weight", Tensor.bfloat16, "is BF16 [256, 128], expected I8 [256, 128]"),
    "no scale": (W8A8, f"{QWEN}.weight_scale", lambda _: None, "is missing in"),
    "no weight": (W8A8, f"{QWEN}.weight", lambda _: None, "is missing in"),
    "infinite": (W8A8, f"{QWEN}.weight_scale", lambda t: t / 0, "has 256 NaN or Inf values of 256"),
    "orientation": (W8A8, f"{QWEN}.weight_scale", lambda t: t.mT, "is BF16 [1, 256], expected BF16 [256, 1]"),
    "code": (
        W4A8,
        f"{QWEN}.weight",
        with_code,
        "has 1 out-of-range (expected -8 to 7) value of 32768",
    ),
}


@pytest.mark.parametrize("name", ["type", "no scale", "no weight", "orientation"])
def test_explain_refuses_what_cannot_be_read(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case, tensor, change, message = BROKEN[name]
    folder = FILES.changed(case, tmp_path / "w", with_tensor(tensor, change))
    Moe(capsys).refuses("explain", folder, "--device", "cpu", parts=(f"{tensor} {message}",))


@pytest.mark.parametrize("name", BROKEN)
def test_bad_input(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, and one paragraph that names the tensor, what was found and what was expected."""
    case, tensor, change, message = BROKEN[name]
    folder = FILES.changed(case, tmp_path / "w", with_tensor(tensor, change))
    run_refuses(folder, capsys, f"{tensor} {message}")


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        (W8A8, {"weights": {"strategy": "tensor"}}, "int8 weights have strategy 'tensor', expected 'channel'"),
        (
            W8A8,
            {"input_activations": {"dynamic": False, "strategy": "tensor"}},
            "is static int8 by tensor, expected dynamic int8 by token",
        ),
        (W8A8, {"weights": {"num_bits": 4}}, "gate_proj.weight has"),
        (W4A8, {"weights": {"num_bits": 8}}, "int8 weights have strategy 'group', expected 'channel'"),
        (W4A8, {"weights": {"group_size": 64}}, "weight_scale has shape [128, 2], expected [128, 4]"),
        (
            W4A8,
            {"weights": {"strategy": "channel", "group_size": None}},
            "weight_scale has shape [128, 2], expected [128, 1]",
        ),
    ],
)
def test_configs_that_say_something_else(
    case: str, change: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quantization = fixture_group(case)
    for part, entries in change.items():
        quantization["config_groups"]["group_0"][part].update(entries)
    run_refuses(FILES.rewritten(case, tmp_path / "w", quantization), capsys, message)


def test_the_lowest_code_is_a_code(tmp_path: Path) -> None:
    """-128 under a symmetric scale: allowed, and worth -128 scales."""
    name = "model.layers.0.mlp.experts.0.down_proj"

    def lowest(tensors: Tensors) -> Tensors:
        tensors[f"{name}.weight"][:] = -128
        return tensors

    layer = load_layer(FILES.rewritten(W8A8, tmp_path / "w", change=lowest), device="cpu", dtype=torch.float32)
    tensors = load_file(DATA / W8A8 / "io.safetensors")
    router, ids = torch.ones(37, 3), torch.tensor([0, -1, -1]).expand(37, 3)
    expected = reference(tmp_path / "w", {**tensors, "topk_ids": ids, "topk_weights": router})
    assert relative(layer(tensors["hidden_states"], topk_weights=router, topk_ids=ids), expected) < 1e-6
