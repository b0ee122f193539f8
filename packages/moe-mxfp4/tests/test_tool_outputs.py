"""``moe run`` gives the tools' own outputs: of their files, and of the same experts as other tools write them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_core import (
    QuantKey,
    fused_moe_reference,
    kFp8Dynamic128Sym,
    kFp8DynamicTokenSym,
    kFp8StaticTensorSym,
    kMxfp4Dynamic,
    kMxfp4DynamicDown,
    kMxfp4DynamicEven,
    kMxfp8Dynamic,
    load_layer,
)
from moe_core.checkpoint import Checkpoint, read_layer
from moe_core.testing.checkpoints import Tensors
from moe_kit.changes import truncated, with_config, with_quantization, with_tensor, with_tensors
from moe_kit.tool_outputs import Cases, relative, routed, run, run_refuses
from safetensors.torch import load_file
from torch import Tensor

pytestmark = pytest.mark.usefixtures("no_gpu")

FILES = Cases(Path(__file__).parent / "data")
DATA, CASES = FILES.path, FILES.names
GPT_OSS, COMPRESSED = "gptoss_hf_mxfp4", "qwen3_ct_mxfp4a16"
PREFIX = "model.layers.0.mlp.experts"
E, N = 8, 128
DTYPES = ("fp32", "bf16", "fp16")


def wanted(tensors: Tensors) -> Tensor:
    """The tool's output, with inputs quantized where its file says so."""
    return tensors.get("ref_experts_out_actq", tensors["ref_experts_out"])


def test_there_are_cases() -> None:
    assert len(CASES) == 5
    assert {GPT_OSS, COMPRESSED} <= set(CASES)


@pytest.mark.parametrize("given", ["topk", "logits"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_outputs_of_the_tools_own_files(case: str, dtype: str, given: str, tmp_path: Path) -> None:
    tensors = load_file(DATA / case / "io.safetensors")
    output = run(DATA / case, routed(tensors, given), tmp_path, dtype)
    assert relative(output, wanted(tensors)) < FILES.bound_of_weights(case, dtype)


@pytest.mark.parametrize("case", CASES)
def test_the_checkpoints_own_router(case: str) -> None:
    """gpt-oss's has a bias; logits of float32 weights and inputs, as the tool computed them."""
    tensors = load_file(DATA / case / "io.safetensors")
    source = read_layer(Checkpoint.open(DATA / case), dtype=torch.float32)
    assert source.router_weight is not None
    assert (source.router_bias is not None) == case.startswith("gptoss")
    logits = tensors["hidden_states"] @ source.router_weight.float().T
    if source.router_bias is not None:
        logits += source.router_bias
    assert relative(logits, tensors["router_logits"]) < 1e-6


@pytest.mark.parametrize(
    ("case", "key"),
    [
        ("gptoss_ar_mxfp4", kMxfp4DynamicDown),
        ("gptoss_qk_mxfp4_fp8", kFp8StaticTensorSym),
        ("qwen3_qk_mxfp4", kMxfp4DynamicEven),
    ],
)
def test_the_rounding_of_activations_is_the_tools(case: str, key: QuantKey) -> None:
    """Another rounding of their scales, or none, gives another output."""
    tensors = load_file(DATA / case / "io.safetensors")
    source = read_layer(Checkpoint.open(DATA / case), dtype=torch.float32)
    assert source.activation_key == key
    weights = source.weights()
    for other in (None, kMxfp4Dynamic):
        changed = replace(weights, activation_key=other, w13_input_scale=None, w2_input_scale=None)
        output = fused_moe_reference(
            tensors["hidden_states"],
            changed,
            source.config,
            topk_weights=tensors["topk_weights"],
            topk_ids=tensors["topk_ids"],
        )
        assert relative(output, wanted(tensors)) > 100 * FILES.bound_of_weights(case, "fp32")


@pytest.mark.parametrize("case", CASES)
def test_ranks_of_expert_parallelism(case: str) -> None:
    """Each loads some experts by their global ids; their outputs add up to the tool's."""
    tensors = load_file(DATA / case / "io.safetensors")
    output = torch.zeros_like(wanted(tensors))
    for experts in ([5, 0, 3], [7, 1], [2, 4, 6]):
        layer = load_layer(DATA / case, dtype=torch.float32, device="cpu", experts=experts)
        output += layer(
            tensors["hidden_states"], topk_weights=tensors["topk_weights"], topk_ids=tensors["topk_ids"].int()
        )
    assert relative(output, wanted(tensors)) < FILES.bound_of_weights(case, "fp32")


# ------------------------------------------------------------------ the same experts, written otherwise


def one_by_one(tensors: Tensors, weight: str, *, separate: bool) -> Tensors:
    """gpt-oss's tensors expert by expert, gate and up ``separate`` or, as Quark has them, interleaved."""
    found = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    ends = {"blocks": weight, "scales": "weight_scale", "bias": "bias"}
    for name, tensor in tensors.items():
        if name in found:
            continue
        projection, _, end = name.rpartition(".")[2].rpartition("_")
        for expert, one in enumerate(tensor):
            rows = one.flatten(1) if end == "blocks" else one
            parts = {projection: rows}
            if separate and projection == "gate_up_proj":
                parts = {"gate_proj": rows[0::2], "up_proj": rows[1::2]}
            for part, own in parts.items():
                found[f"{PREFIX}.{expert}.{part}.{ends[end]}"] = own
    return found


def renamed(tensors: Tensors, **names: str) -> Tensors:
    """Suffixes under other names."""
    found = {}
    for name, tensor in tensors.items():
        base, _, suffix = name.rpartition(".")
        found[f"{base}.{names.get(suffix, suffix) if '.experts.' in name else suffix}"] = tensor
    return found


def with_input_scales(tensors: Tensors) -> Tensors:
    """Static scales that no input exceeds 448 times, larger ones of activated values; few become subnormal."""
    modules = {name.rpartition(".")[0] for name in tensors if ".experts." in name}
    scales = {f"{module}.input_scale": torch.tensor(4.0 if "down" in module else 0.0625) for module in modules}
    return {**tensors, **scales}


def args(bits: int, strategy: str, **changes: Any) -> dict[str, Any]:
    return {"type": "float", "num_bits": bits, "symmetric": True, "dynamic": True, "strategy": strategy, **changes}


EXPONENTS = {"group_size": 32, "scale_dtype": "torch.uint8"}


def compressed(inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    weights = args(4, "group", **{**EXPONENTS, "dynamic": False})
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "format": "mxfp4-pack-quantized"}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


def quark(inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    weight = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0", "is_dynamic": False}
    layer = {"weight": weight, "input_tensors": inputs, "output_tensors": None}
    return {"quant_method": "quark", "global_quant_config": layer, "exclude": ["lm_head"]}


def plain(tensors: Tensors) -> Tensors:
    return renamed(tensors, weight_packed="weight")


def same(tensors: Tensors) -> Tensors:
    return tensors


ROUND = {"quant_method": "auto-round", "data_type": "mx_fp", "bits": 4, "group_size": 32, "act_bits": 16}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "W4A16_MXFP4"}
WRITTEN: dict[str, tuple[str, dict[str, Any], Callable[[Tensors], Tensors]]] = {
    "compressed-tensors of gpt-oss": (GPT_OSS, compressed(), lambda t: one_by_one(t, "weight_packed", separate=True)),
    "AutoRound of gpt-oss": (GPT_OSS, ROUND, lambda t: one_by_one(t, "weight_packed", separate=True)),
    "Quark of gpt-oss": (GPT_OSS, quark(), lambda t: one_by_one(t, "weight", separate=False)),
    "gpt-oss by its own name": (GPT_OSS, {"quant_method": "mxfp4"}, lambda t: one_by_one(t, "weight", separate=False)),
    "AutoRound": (COMPRESSED, ROUND, same),
    "Quark": (COMPRESSED, quark(), plain),
    "ModelOpt": (COMPRESSED, MODELOPT, plain),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_as_other_tools_write_them(name: str, tmp_path: Path) -> None:
    case, quantization, change = WRITTEN[name]
    folder = FILES.rewritten(case, tmp_path / "w", quantization, change)
    tensors = load_file(DATA / case / "io.safetensors")
    for dtype in ("fp32", "bf16"):
        output = run(folder, routed(tensors), tmp_path, dtype)
        assert relative(output, tensors["ref_experts_out"]) < FILES.bound_of_weights(case, dtype)


def test_names_of_multi_modal_models(tmp_path: Path) -> None:
    def rename(tensors: Tensors) -> Tensors:
        return {name.replace("model.", "model.language_model."): tensor for name, tensor in tensors.items()}

    folder = FILES.rewritten(GPT_OSS, tmp_path / "w", {"quant_method": "mxfp4"}, rename)
    config = json.loads((folder / "config.json").read_text())
    quantization = config.pop("quantization_config")
    nested = {"model_type": "some_vl", "text_config": config, "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(nested))
    tensors = load_file(DATA / GPT_OSS / "io.safetensors")
    output = run(folder, routed(tensors), tmp_path)
    assert relative(output, tensors["ref_experts_out"]) < FILES.bound_of_weights(GPT_OSS, "fp32")


MX = {"qscheme": "per_group", "group_size": 32, "scale_format": "e8m0", "is_dynamic": True}
TENSOR = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}
ACTIVATIONS: dict[str, tuple[dict[str, Any], Callable[[Tensors], Tensors], QuantKey]] = {
    "mxfp8": (compressed(args(8, "group", **EXPONENTS)), same, kMxfp8Dynamic),
    "groups of 128": (compressed(args(8, "group", group_size=128)), same, kFp8Dynamic128Sym),
    "token": (compressed(args(8, "token")), same, kFp8DynamicTokenSym),
    "static": (quark(TENSOR), lambda t: with_input_scales(plain(t)), kFp8StaticTensorSym),
    "mxfp4": ({"quant_method": "modelopt", "quant_algo": "mxfp4"}, plain, kMxfp4Dynamic),
    "mxfp4 even": (compressed(args(4, "group", **EXPONENTS)), same, kMxfp4DynamicEven),
    "mxfp4 down": ({**ROUND, "act_bits": 4}, same, kMxfp4DynamicDown),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_quantized_activations(name: str, tmp_path: Path) -> None:
    """The reference's output, and the tool's up to the activations' rounding."""
    quantization, change, key = ACTIVATIONS[name]
    folder = FILES.rewritten(COMPRESSED, tmp_path / "w", quantization, change)
    source = read_layer(Checkpoint.open(folder), dtype=torch.float32)
    assert source.activation_key == key
    tensors = load_file(DATA / COMPRESSED / "io.safetensors")
    output = run(folder, routed(tensors), tmp_path)
    exact = fused_moe_reference(
        tensors["hidden_states"],
        source.weights(),
        source.config,
        topk_weights=tensors["topk_weights"],
        topk_ids=tensors["topk_ids"],
    )
    # its quantizer sees float64 sums, the layer's float32 ones: a code in a few thousand differs by one step
    in_4_bits = key in (kMxfp4Dynamic, kMxfp4DynamicEven, kMxfp4DynamicDown)
    step = 2.0**-3 if in_4_bits else 2.0**-4
    assert relative(output, exact) < step / 16
    # a code keeps one bit after the leading one (e4m3: three): a relative error of at most 2**-2 (2**-4) per input
    assert step / 64 < relative(output, tensors["ref_experts_out"]) < (2.0**-2 if in_4_bits else 2.0**-4)


def test_gate_and_up_in_turns_are_not_taken_for_halves(tmp_path: Path) -> None:
    """The same tensors under another model's name: other values."""
    tensors = load_file(DATA / GPT_OSS / "io.safetensors")
    folder = FILES.rewritten(GPT_OSS, tmp_path / "w", quark(), lambda t: one_by_one(t, "weight", separate=False))
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "openai_privacy_filter"}
    (folder / "config.json").write_text(json.dumps(config))
    assert relative(run(folder, routed(tensors), tmp_path), tensors["ref_experts_out"]) > 0.5


@pytest.mark.parametrize(("change", "same"), [({"swiglu_limit": 7.0}, True), ({"swiglu_limit": 0.5}, False)])
def test_the_limit_is_config_jsons(change: dict[str, Any], same: bool, tmp_path: Path) -> None:
    """7 is what the tool computed with; half a unit clamps many of its values."""
    tensors = load_file(DATA / GPT_OSS / "io.safetensors")
    folder = FILES.rewritten(GPT_OSS, tmp_path / "w", {"quant_method": "mxfp4"}, lambda t: t)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    distance = relative(run(folder, routed(tensors), tmp_path), tensors["ref_experts_out"])
    assert distance < FILES.bound_of_weights(GPT_OSS, "fp32") if same else distance > 0.01


# ------------------------------------------------------------------ bad input


def other_groups(name: str, tensor: Tensor) -> Tensor:
    """Of all experts: a file whose groups are alike, but not those of its weights."""
    return tensor[:, ::2] if name.endswith("up_proj.weight_scale") else tensor


def nan(*at: int) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        tensor[at] = 255
        return tensor

    return change


DOWN = f"{PREFIX}.4.down_proj"
BROKEN: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "group size": (
        COMPRESSED,
        with_quantization(
            config_groups={"group_0": {"targets": ["Linear"], "weights": args(4, "group", group_size=16)}},
        ),
        "dynamic float4 by group 16, expected groups of 32 with torch.uint8 scales",
    ),
    "method": (GPT_OSS, with_quantization(quant_method="mxfp5"), "quant_method 'mxfp5'"),
    "hidden size": (
        GPT_OSS,
        with_config(hidden_size=288),
        "mlp.router.weight is BF16 [8, 256], expected [8, 288] (hidden size of",
    ),
    "intermediate size": (
        COMPRESSED,
        with_config(moe_intermediate_size=96),
        f"{PREFIX}.0.gate_proj.weight_packed has shape [128, 128], expected [96, 128]",
    ),
    "half a block": (
        GPT_OSS,
        with_config(intermediate_size=144),
        f"{PREFIX}.gate_up_proj_blocks has shape [256, 8, 16], expected [288, 8, 16]",
    ),
    "experts": (GPT_OSS, with_config(num_local_experts=9), "num_local_experts is 9, but"),
    "limit": (GPT_OSS, with_config(swiglu_limit=-1), "activation limit must be positive, got -1"),
    "limit by name": (GPT_OSS, with_config(swiglu_limit="7"), "swiglu_limit is '7', expected a number"),
    "groups": (
        COMPRESSED,
        with_tensors(other_groups),
        f"{PREFIX}.0.up_proj.weight_scale has shape [128, 4], expected [128, 8] (one e8m0 scale per 32 columns",
    ),
    "no scales": (COMPRESSED, with_tensor(f"{DOWN}.weight_scale", lambda _: None), f"{DOWN}.weight_scale is missing"),
    "no codes": (COMPRESSED, with_tensor(f"{DOWN}.weight_packed", lambda _: None), f"{DOWN}.weight_packed is missing"),
    "no blocks": (
        GPT_OSS,
        with_tensor(f"{PREFIX}.down_proj_blocks", lambda _: None),
        f"{PREFIX}.down_proj_blocks is missing in",
    ),
    "no bias": (
        GPT_OSS,
        with_tensor(f"{PREFIX}.gate_up_proj_bias", lambda _: None),
        f"{PREFIX}.gate_up_proj_bias is missing in",
    ),
    "an odd row": (
        GPT_OSS,
        with_tensor(f"{PREFIX}.gate_up_proj_scales", lambda t: t[:, 1:]),
        f"{PREFIX}.gate_up_proj_scales has shape [255, 8], expected [256, 8]",
    ),
    "type": (COMPRESSED, with_tensor(f"{DOWN}.weight_packed", Tensor.long), f"{DOWN}.weight_packed is I64 [256, 64]"),
    "NaN": (
        COMPRESSED,
        with_tensor(f"{DOWN}.weight_scale", nan(1, 3)),
        f"{DOWN}.weight_scale has 1 NaN (e8m0 code 255) value of 1024, first at [1, 3]",
    ),
    "NaN in turns": (
        GPT_OSS,
        with_tensor(f"{PREFIX}.gate_up_proj_scales", nan(5, 7, 2)),
        f"{PREFIX}.gate_up_proj_scales has 1 NaN (e8m0 code 255) value of 16384, first at [5, 7, 2]",
    ),
    "NaN in a bias": (
        GPT_OSS,
        with_tensor(f"{PREFIX}.down_proj_bias", lambda t: t * float("nan")),
        f"{PREFIX}.down_proj_bias has 2048 NaN or Inf values of 2048, first at [0, 0]",
    ),
    "truncated": (GPT_OSS, truncated, "model.safetensors is truncated"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_bad_input(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, and one paragraph that names the tensor, what was found and what was expected."""
    case, change, message = BROKEN[name]
    run_refuses(FILES.changed(case, tmp_path / "w", change), capsys, message)
