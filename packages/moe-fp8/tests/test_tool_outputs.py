"""``moe run`` gives what the tools give: their own files, and the same experts under other tools' names."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_core import kFp8DynamicTensorSym, load_layer
from moe_core.checkpoint import Checkpoint, read_layer
from moe_core.testing.checkpoints import CONFIG, Experts, Tensors, write
from moe_kit.changes import with_tensor
from moe_kit.tool_outputs import Cases, relative, routed, run, run_refuses
from safetensors.torch import load_file
from torch import Tensor

pytestmark = pytest.mark.usefixtures("no_gpu")

FILES = Cases(Path(__file__).parent / "data")
DATA, CASES = FILES.path, FILES.names
#: compressed-tensors reduces an expert's input [T, K] as a whole where its config says one scale per token
REDUCES_ALL = ("qwen3_ct_fp8_dynamic",)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def test_there_are_cases() -> None:
    assert len(CASES) == 6


@pytest.mark.parametrize("given", ["topk", "logits"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_outputs_of_the_tools_own_files(case: str, dtype: str, given: str, tmp_path: Path) -> None:
    tensors = load_file(DATA / case / "io.safetensors")
    output = run(DATA / case, routed(tensors, given), tmp_path, dtype)
    exact = dtype == "fp32" and case not in REDUCES_ALL
    allowed = FILES.bound(case, "ref_experts_out_f32" if exact else "ref_experts_out_actq_kernel")
    assert relative(output, tensors["ref_experts_out_actq"]) < allowed


# ------------------------------------------------------------------ the same experts, written otherwise


def check(case: str, folder: Path, scratch: Path, *, weight_only: bool = False) -> None:
    """``moe run`` on ``folder`` gives the outputs of ``case``: exactly in fp32, within the bound in bf16."""
    tensors = load_file(DATA / case / "io.safetensors")
    inputs = routed(tensors)
    reference = tensors["ref_experts_out" if weight_only else "ref_experts_out_actq"]
    in_bf16 = "ref_experts_out_bf16_kernel" if weight_only else "ref_experts_out_actq_kernel"
    assert relative(run(folder, inputs, scratch), reference) < FILES.bound(case, "ref_experts_out_f32")
    assert relative(run(folder, inputs, scratch, "bf16"), reference) < FILES.bound(case, in_bf16)


def args(**changes: Any) -> dict[str, Any]:
    return {"type": "float", "num_bits": 8, "symmetric": True, "dynamic": False, **changes}


def group(weights: dict[str, Any], inputs: dict[str, Any] | None, layout: str = "float-quantized") -> dict[str, Any]:
    one = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "format": layout}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": one}}


MX = args(strategy="group", group_size=32, scale_dtype="torch.uint8")


def fixture_group(case: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DATA / case / "config.json").read_text())["quantization_config"]
    return found


@pytest.mark.parametrize("case", ["qwen3_ct_fp8_dynamic", "nemotron_ct_mxfp8"])
def test_weight_only(case: str, tmp_path: Path) -> None:
    """input_activations null: activations stay in 16 bits."""
    quantization = fixture_group(case)
    quantization["config_groups"]["group_0"]["input_activations"] = None
    check(case, FILES.rewritten(case, tmp_path / "w", quantization), tmp_path, weight_only=True)


def replaced(old: str, new: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name.replace(old, new): tensor for name, tensor in tensors.items()}


def four_dimensional(tensors: Tensors) -> Tensors:
    found = {}
    for name, tensor in tensors.items():
        is_scale = name.endswith("weight_scale_inv")
        found[name.removesuffix("_inv") if is_scale else name] = tensor[:, None, :, None] if is_scale else tensor
    return found


AUTO_ROUND = {
    "quant_method": "auto-round",
    "packing_format": "auto_round:llm_compressor",
    "data_type": "mx_fp",
    "bits": 8,
    "group_size": 32,
    "sym": True,
}
QUARK_BLOCK = {
    "weight": {"dtype": "fp8_e4m3", "qscheme": "per_block", "block_size": [128, 128], "is_dynamic": False},
    "input_tensors": {"dtype": "fp8_e4m3", "qscheme": "per_group", "group_size": 128, "is_dynamic": True},
}
QUARK_TENSOR = {
    "weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False},
    "input_tensors": {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False},
}

SAME: dict[str, tuple[str, dict[str, Any], Callable[[Tensors], Tensors]]] = {
    "compressed-tensors block": (
        "deepseek_hf_fp8_block",
        group(args(strategy="block", block_structure=[128, 128]), args(strategy="group", group_size=128, dynamic=True)),
        replaced("weight_scale_inv", "weight_scale"),
    ),
    "compressed-tensors tensor x static": (
        "mixtral_mo_fp8",
        group(args(strategy="tensor"), args(strategy="tensor")),
        lambda tensors: {name: t.reshape(1) if t.dim() == 0 else t for name, t in tensors.items()},
    ),
    "AutoFP8 static": ("mixtral_mo_fp8", {"quant_method": "fp8", "activation_scheme": "static"}, dict),
    "transformers static": (
        "mixtral_mo_fp8",
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
        lambda tensors: replaced("input_scale", "activation_scale")(
            replaced("weight_scale", "weight_scale_inv")(tensors)
        ),
    ),
    "MiniMax": ("qwen3_mo_mxfp8", {"quant_method": "mxfp8"}, replaced("weight_scale", "weight_scale_inv")),
    "AutoRound": ("nemotron_ct_mxfp8", {**AUTO_ROUND, "act_bits": 8, "act_data_type": "mx_fp_rceil"}, dict),
    "e8m0 under quant_method fp8": (
        "qwen3_mo_mxfp8",
        {"quant_method": "fp8", "weight_block_size": [1, 32], "scale_fmt": "ue8m0"},
        replaced("weight_scale", "weight_scale_inv"),
    ),
    "ModelOpt in lower case": ("qwen3_mo_mxfp8", {"quant_method": "modelopt", "quant_algo": "mxfp8"}, dict),
    "Quark block": (
        "deepseek_hf_fp8_block",
        {"quant_method": "quark", "global_quant_config": QUARK_BLOCK},
        replaced("weight_scale_inv", "weight_scale"),
    ),
    "Quark tensor x static": ("mixtral_mo_fp8", {"quant_method": "quark", "global_quant_config": QUARK_TENSOR}, dict),
}


@pytest.mark.parametrize("name", SAME)
def test_other_tools(name: str, tmp_path: Path) -> None:
    case, quantization, rename = SAME[name]
    check(case, FILES.rewritten(case, tmp_path / "w", quantization, rename), tmp_path)


WEIGHT_ONLY: dict[str, tuple[str, dict[str, Any], Callable[[Tensors], Tensors]]] = {
    "ModelOpt per block": (
        "deepseek_hf_fp8_block",
        {"quant_method": "modelopt", "quant_algo": "fp8_pb_wo"},
        four_dimensional,
    ),
    "AutoRound": ("nemotron_ct_mxfp8", AUTO_ROUND, dict),
    "Quark per channel": (
        "qwen3_ct_fp8_dynamic",
        {
            "quant_method": "quark",
            "global_quant_config": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_channel"}, "input_tensors": None},
        },
        lambda tensors: {n: t.float().flatten() if n.endswith("weight_scale") else t for n, t in tensors.items()},
    ),
    "compressed-tensors block": (
        "deepseek_hf_fp8_block",
        group(args(strategy="block", block_structure=[128, 128]), None),
        replaced("weight_scale_inv", "weight_scale"),
    ),
    "compressed-tensors tensor": (
        "mixtral_mo_fp8",
        group(args(strategy="tensor"), None),
        lambda tensors: {name: t for name, t in tensors.items() if not name.endswith("input_scale")},
    ),
}


@pytest.mark.parametrize("name", WEIGHT_ONLY)
def test_other_tools_weight_only(name: str, tmp_path: Path) -> None:
    case, quantization, rename = WEIGHT_ONLY[name]
    check(case, FILES.rewritten(case, tmp_path / "w", quantization, rename), tmp_path, weight_only=True)


MIXTRAL_NAMES = {
    "block_sparse_moe.experts.0.w1": ("block_sparse_moe", ("w1", "w3", "w2")),
    "block_sparse_moe.experts.0.gate_proj": ("block_sparse_moe", ("gate_proj", "up_proj", "down_proj")),
    "mlp.experts.0.gate_proj": ("mlp", ("gate_proj", "up_proj", "down_proj")),
}


@pytest.mark.parametrize("naming", MIXTRAL_NAMES)
def test_names_of_mixtral(naming: str, tmp_path: Path) -> None:
    block, (gate, up, down) = MIXTRAL_NAMES[naming]

    def rename(tensors: Tensors) -> Tensors:
        found = {}
        for name, tensor in tensors.items():
            new = name.replace("block_sparse_moe", block)
            for old, other in ((".w1.", gate), (".w3.", up), (".w2.", down)):
                new = new.replace(old, f".{other}.")
            found[new] = tensor
        return found

    folder = FILES.rewritten("mixtral_mo_fp8", tmp_path / "w", change=rename)
    assert f"model.layers.0.{naming}.weight" in Checkpoint.open(folder)
    assert read_layer(Checkpoint.open(folder)).router_weight is not None
    check("mixtral_mo_fp8", folder, tmp_path)


@pytest.mark.parametrize("scale", ["_scale_inv", ".weight_scale_inv"])
def test_stacked_experts_of_transformers(scale: str, tmp_path: Path) -> None:
    case = "deepseek_hf_fp8_block"

    def stack(tensors: Tensors) -> Tensors:
        prefix = "model.layers.0.mlp.experts"
        found = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}

        def every(projection: str, suffix: str) -> Tensor:
            return torch.stack([tensors[f"{prefix}.{e}.{projection}.{suffix}"].view(torch.uint8) for e in range(8)])

        for suffix, end in (("weight", ""), ("weight_scale_inv", scale)):
            dtype = torch.float8_e4m3fn if suffix == "weight" else torch.float32
            both = torch.cat([every("gate_proj", suffix), every("up_proj", suffix)], dim=1)
            found[f"{prefix}.gate_up_proj{end}"] = both.view(dtype)
            found[f"{prefix}.down_proj{end}"] = every("down_proj", suffix).view(dtype)
        return found

    check(case, FILES.rewritten(case, tmp_path / "w", change=stack), tmp_path)


def test_dynamic_per_tensor_is_one_scale(tmp_path: Path) -> None:
    """The tool's quantizer, which takes one scale for all tokens of an expert: the dynamic per-tensor key, by expert.

    A key of groups of 128, or of tokens, would be 1e-2 away.
    """
    case = "qwen3_ct_fp8_dynamic"
    quantization = fixture_group(case)
    quantization["config_groups"]["group_0"]["input_activations"]["strategy"] = "tensor"
    folder = FILES.rewritten(case, tmp_path / "w", quantization)
    layer = load_layer(folder, device="cpu", dtype=torch.float32)
    assert layer.selection.activation_key == kFp8DynamicTensorSym
    tensors = load_file(DATA / case / "io.safetensors")
    x, ids, weights = tensors["hidden_states"], tensors["topk_ids"], tensors["topk_weights"]
    output = torch.zeros_like(x)
    for expert in range(8):
        tokens, slots = (ids == expert).nonzero(as_tuple=True)
        only = torch.full((len(tokens), ids.shape[1]), -1)
        only[:, 0] = expert
        router = torch.zeros(len(tokens), ids.shape[1])
        router[:, 0] = weights[tokens, slots]
        output[tokens] += layer(x[tokens], topk_weights=router, topk_ids=only)
    assert relative(output, tensors["ref_experts_out_actq"]) < FILES.bound(case, "ref_experts_out_f32")


def groups_of_128(x: Tensor) -> Tensor:
    """``x`` in float64 as e4m3 with one scale per token and 128 columns, the last of which may be fewer."""
    parts = []
    for part in x.split(128, dim=1):
        scale = part.abs().amax(dim=1, keepdim=True).float() / 448
        parts.append((part / scale.double()).float().to(torch.float8_e4m3fn).double() * scale.double())
    return torch.cat(parts, dim=1)


def test_partial_blocks(tmp_path: Path) -> None:
    """192 rows are one and a half blocks: gate and up each have a half-empty scale row of their own."""
    experts = Experts((128, 128), hidden=256, inter=192)
    inputs = args(strategy="group", group_size=128, dynamic=True)
    quantization = group(args(strategy="block", block_structure=[128, 128]), inputs)
    tensors = experts.tensors(lambda scale: scale.div(4096).bfloat16())
    sizes = {"hidden_size": 256, "moe_intermediate_size": 192}
    write(tmp_path / "w", tensors, {**CONFIG, **sizes, "quantization_config": quantization})
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(9, 256, generator=generator) / 1024
    router, ids = torch.rand(9, 3, generator=generator).topk(2, dim=1)
    w13, w2 = (values / 4096 for values in experts.values())
    reference = torch.zeros(9, 256, dtype=torch.float64)
    for token, slot in torch.cartesian_prod(torch.arange(9), torch.arange(2)).tolist():
        expert = ids[token, slot]
        gate, up = (groups_of_128(x[token : token + 1].double()) @ w13[expert].T).split(192, dim=1)
        hidden = groups_of_128(torch.nn.functional.silu(gate) * up)
        reference[token] += (hidden @ w2[expert].T)[0] * router[token, slot]
    output = run(tmp_path / "w", {"hidden_states": x, "topk_weights": router, "topk_ids": ids}, tmp_path)
    # the layer's sums are float32: a code in some thousand falls on the other side of a rounding boundary
    assert relative(output, reference) < 2e-3


# ------------------------------------------------------------------ bad input


def with_code(code: int) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        tensor.view(torch.uint8)[2, 3] = code
        return tensor

    return change


MIXTRAL = "model.layers.0.block_sparse_moe.experts.1.w3"
NEMOTRON = "backbone.layers.0.mixer.experts.7.up_proj"
QWEN = "model.layers.0.mlp.experts.4.down_proj"
BROKEN: dict[str, tuple[str, str, Callable[[Tensor], Tensor | None], str]] = {
    "NaN code": ("mixtral_mo_fp8", f"{MIXTRAL}.weight", with_code(0x7F), "has 1 NaN value of 131072, first at [2, 3]"),
    "scale of zero": ("mixtral_mo_fp8", f"{MIXTRAL}.weight_scale", torch.zeros_like, "has 1 zero, negative, NaN or"),
    "input scale": ("mixtral_mo_fp8", f"{MIXTRAL}.input_scale", torch.neg, "has 1 zero, negative, NaN or Inf value"),
    "no scale": ("mixtral_mo_fp8", f"{MIXTRAL}.weight_scale", lambda _: None, "is missing in"),
    "e8m0 255": ("nemotron_ct_mxfp8", f"{NEMOTRON}.weight_scale", with_code(255), "has 1 NaN (e8m0 code 255) value of"),
    "grid": (
        "nemotron_ct_mxfp8",
        f"{NEMOTRON}.weight_scale",
        lambda t: t[:, :4],
        "is U8 [128, 4], expected U8 [128, 8]",
    ),
    "type": ("qwen3_ct_fp8_dynamic", f"{QWEN}.weight", torch.Tensor.bfloat16, "is BF16 [256, 128], expected F8_E4M3"),
    "negative": (
        "qwen3_ct_fp8_dynamic",
        f"{QWEN}.weight_scale",
        torch.neg,
        "has 256 NaN, Inf or negative values of 256",
    ),
    "no weight": ("qwen3_mo_mxfp8", f"{QWEN}.weight", lambda _: None, "is missing in"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_bad_input(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, and one paragraph that names the tensor, what was found and what was expected."""
    case, tensor, change, message = BROKEN[name]
    folder = FILES.changed(case, tmp_path / "w", with_tensor(tensor, change))
    run_refuses(folder, capsys, f"{tensor} {message}")


@pytest.mark.parametrize(
    ("case", "quantization", "message"),
    [
        (
            "qwen3_ct_fp8_dynamic",
            group(args(strategy="fancy"), None),
            "strategy is 'fancy', expected 'tensor', 'channel'",
        ),
        ("mixtral_mo_fp8", {"quant_method": "modelopt", "quant_algo": "FP9"}, "quant_algo is 'FP9', expected FP8"),
        ("mixtral_mo_fp8", {"quant_method": "mxfp8"}, "w1.weight_scale has dtype float32, expected uint8"),
        ("qwen3_mo_mxfp8", {"quant_method": "fp8"}, "gate_proj.weight_scale has dtype uint8, expected float32"),
    ],
)
def test_configs_that_say_something_else(
    case: str, quantization: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_refuses(FILES.rewritten(case, tmp_path / "w", quantization), capsys, message)
