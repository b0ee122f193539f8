"""``moe run`` gives the tools' own outputs: of their files, and of the same experts as other tools write them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_core import fused_moe_reference, kFp8DynamicTokenSym, load_layer
from moe_core.checkpoint import Checkpoint, read_layer
from moe_core.testing.checkpoints import Tensors
from moe_kit.changes import truncated, with_quantization, with_tensor, with_tensors
from moe_kit.tool_outputs import Cases, relative, routed, run, run_refuses
from moe_wna16_words import (
    Matrix,
    auto_round,
    awq,
    gptq,
    gptq_2,
    row_pairs,
    signed_bytes,
    signed_bytes_and_zeros,
    words,
    words_and_zeros,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

pytestmark = pytest.mark.usefixtures("no_gpu")

FILES = Cases(Path(__file__).parent / "data")
DATA, CASES = FILES.path, FILES.names
GPTQ, AWQ, COMPRESSED = "qwen3_gptq4_sym_g128", "qwen3_awq4_g64", "qwen3_ct_w4a16_asym_g128"
PREFIX = "model.layers.0.mlp.experts"
E, N = 8, 128
DTYPES = ("fp32", "bf16", "fp16")


def test_there_are_cases() -> None:
    assert len(CASES) == 5


@pytest.mark.parametrize("given", ["topk", "logits"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_outputs_of_the_tools_own_files(case: str, dtype: str, given: str, tmp_path: Path) -> None:
    tensors = load_file(DATA / case / "io.safetensors")
    output = run(DATA / case, routed(tensors, given), tmp_path, dtype)
    assert relative(output, tensors["ref_experts_out"]) < FILES.bound_of_weights(case, dtype)


@pytest.mark.parametrize("case", CASES)
def test_ranks_of_expert_parallelism(case: str) -> None:
    """Each loads some experts by their global ids; their outputs add up to the tool's."""
    tensors = load_file(DATA / case / "io.safetensors")
    output = torch.zeros_like(tensors["ref_experts_out"])
    for experts in ([5, 0, 3], [7, 1], [2, 4, 6]):
        layer = load_layer(DATA / case, dtype=torch.float32, device="cpu", experts=experts)
        output += layer(
            tensors["hidden_states"], topk_weights=tensors["topk_weights"], topk_ids=tensors["topk_ids"].int()
        )
    assert relative(output, tensors["ref_experts_out"]) < FILES.bound_of_weights(case, "fp32")


# ------------------------------------------------------------------ the same experts, written otherwise


def matrices(case: str) -> dict[str, Matrix]:
    """The experts' codes, one per element, by module."""
    weights = read_layer(Checkpoint.open(DATA / case), dtype=torch.float32).weights()
    assert weights.w13_scale is not None
    assert weights.w2_scale is not None
    found = {}
    for expert in range(E):
        for name, rows, packed, scale, zero in (
            ("gate_proj", slice(0, N), weights.w13, weights.w13_scale, weights.w13_zero_point),
            ("up_proj", slice(N, 2 * N), weights.w13, weights.w13_scale, weights.w13_zero_point),
            ("down_proj", slice(None), weights.w2, weights.w2_scale, weights.w2_zero_point),
        ):
            packed_rows = packed[expert, rows]
            q = torch.stack((packed_rows & 15, packed_rows >> 4), dim=2).flatten(1).long()
            s = scale[expert, rows]
            z = torch.full(s.shape, 8) if zero is None else zero[expert, rows].long()
            g_idx = torch.arange(q.shape[1], dtype=torch.int32) // (q.shape[1] // s.shape[1])
            found[f"{PREFIX}.{expert}.{name}"] = Matrix(q, z, s, g_idx)
    return found


def rewritten(
    case: str,
    folder: Path,
    quantization: dict[str, Any],
    write: Callable[[Matrix, int], Tensors],
    rename: Callable[[str], str] = str,
) -> Path:
    """A copy of ``case`` under another config, its experts as ``write`` keeps them; the router stays."""
    config = json.loads((DATA / case / "config.json").read_text())
    config["quantization_config"] = quantization
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    kept = {n: t for n, t in load_file(DATA / case / "model.safetensors").items() if ".experts." not in n}
    for module, matrix in matrices(case).items():
        kept |= {f"{module}.{suffix}": tensor for suffix, tensor in write(matrix, 4).items()}
    tensors = {rename(name): tensor.contiguous().clone() for name, tensor in kept.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def check(case: str, folder: Path, scratch: Path) -> None:
    """``moe run`` on ``folder`` gives the tool's output of ``case``."""
    tensors = load_file(DATA / case / "io.safetensors")
    for dtype in ("fp32", "bf16"):
        output = run(folder, routed(tensors), scratch, dtype)
        assert relative(output, tensors["ref_experts_out"]) < FILES.bound_of_weights(case, dtype)


def compressed(symmetric: bool, group: int, layout: str, inputs: Any = None) -> dict[str, Any]:
    weights = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": group, "symmetric": symmetric}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "format": layout}}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups}


PLAIN = {"bits": 4, "group_size": 128, "sym": True}
ZERO = {"bits": 4, "group_size": 64, "sym": False}
ROUND = {"quant_method": "auto-round", "data_type": "int"}
WRITTEN: dict[str, tuple[str, dict[str, Any], Callable[[Matrix, int], Tensors]]] = {
    "GPTQ v2": (GPTQ, {"quant_method": "gptq", "checkpoint_format": "gptq_v2", **PLAIN}, gptq_2),
    "AutoRound": (GPTQ, {**ROUND, "packing_format": "auto_round:auto_gptq", **PLAIN}, auto_round),
    "AutoRound as AWQ": (GPTQ, {**ROUND, "packing_format": "auto_round:auto_awq", **PLAIN}, awq),
    "packed": (GPTQ, compressed(True, 128, "pack-quantized"), words),
    "in bytes": (GPTQ, compressed(True, 128, "int-quantized"), signed_bytes),
    "ModelOpt": (GPTQ, {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "group_size": 128}, row_pairs),
    "GPTQ v2 asym": (AWQ, {"quant_method": "gptq", "checkpoint_format": "gptq_v2", **ZERO}, gptq_2),
    "GPTQ v1 asym": (AWQ, {"quant_method": "gptq", **ZERO}, gptq),
    "AutoRound asym": (AWQ, {**ROUND, "packing_format": "auto_round:auto_gptq", **ZERO}, auto_round),
    "packed asym": (AWQ, compressed(False, 64, "pack-quantized"), words_and_zeros),
    "in bytes asym": (AWQ, compressed(False, 64, "int-quantized"), signed_bytes_and_zeros),
    "AWQ of 128": (COMPRESSED, {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}, awq),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_as_other_tools_write_them(name: str, tmp_path: Path) -> None:
    case, quantization, write = WRITTEN[name]
    check(case, rewritten(case, tmp_path / "w", quantization, write), tmp_path)


MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


@pytest.mark.parametrize(
    ("block", "names"), [("block_sparse_moe", MIXTRAL), ("block_sparse_moe", {}), ("mlp", MIXTRAL)]
)
def test_names_of_mixtral(block: str, names: dict[str, str], tmp_path: Path) -> None:
    def rename(name: str) -> str:
        for old, new in names.items():
            name = name.replace(old, new)
        return name.replace(".mlp.", f".{block}.")

    quantization = json.loads((DATA / GPTQ / "config.json").read_text())["quantization_config"]
    check(GPTQ, rewritten(GPTQ, tmp_path / "w", quantization, gptq, rename), tmp_path)


def test_names_of_multi_modal_models(tmp_path: Path) -> None:
    quantization = json.loads((DATA / AWQ / "config.json").read_text())["quantization_config"]
    folder = rewritten(AWQ, tmp_path / "w", quantization, awq, lambda n: n.replace("model.", "model.language_model."))
    config = json.loads((folder / "config.json").read_text())
    quantization = config.pop("quantization_config")
    nested = {"model_type": "qwen3_vl_moe", "text_config": config, "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(nested))
    check(AWQ, folder, tmp_path)


def test_activation_order(tmp_path: Path) -> None:
    """Groups under other numbers, each with its columns: the same weights."""
    order = {256: torch.tensor([1, 0]), 128: torch.tensor([0])}

    def write(matrix: Matrix, bits: int) -> Tensors:
        new = order[matrix.q.shape[1]]
        return gptq(Matrix(matrix.q, matrix.z[:, new], matrix.s[:, new], new.argsort()[matrix.g_idx].int()), bits)

    quantization = {"quant_method": "gptq", "desc_act": True, **PLAIN}
    folder = rewritten(GPTQ, tmp_path / "w", quantization, write)
    key = read_layer(Checkpoint.open(folder)).weight_key
    assert key is not None
    assert key.permuted
    check(GPTQ, folder, tmp_path)


def test_factors_of_inputs(tmp_path: Path) -> None:
    """Inputs times a power of two per group, scales divided by it: the same output."""

    def write(matrix: Matrix, bits: int) -> Tensors:
        factors = torch.tensor([4.0, -0.5])[: matrix.s.shape[1]]
        smaller = Matrix(matrix.q, matrix.z, matrix.s.float() / factors, matrix.g_idx)
        return {**row_pairs(smaller, bits), "pre_quant_scale": factors[matrix.g_idx.long()].bfloat16()}

    quantization = {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "group_size": 128, "pre_quant_scale": True}
    check(GPTQ, rewritten(GPTQ, tmp_path / "w", quantization, write), tmp_path)


def test_fp8_activations(tmp_path: Path) -> None:
    """Packed and in bytes, the same layer; it is the tool's up to the activations' rounding."""
    inputs = {"type": "float", "num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": True}
    tensors = load_file(DATA / GPTQ / "io.safetensors")
    outputs = []
    for layout, write in (("pack-quantized", words), ("int-quantized", signed_bytes)):
        quantization = compressed(True, 128, layout, inputs)
        folder = rewritten(GPTQ, tmp_path / layout, quantization, write)
        source = read_layer(Checkpoint.open(folder), dtype=torch.float32)
        assert source.activation_key == kFp8DynamicTokenSym
        outputs.append(run(folder, routed(tensors), tmp_path))
        exact = fused_moe_reference(
            tensors["hidden_states"],
            source.weights(),
            source.config,
            topk_weights=tensors["topk_weights"],
            topk_ids=tensors["topk_ids"],
        )
        # its quantizer sees float64 sums, the layer's float32 ones: a code in a few thousand differs by one step
        assert relative(outputs[-1], exact) < 2e-3
    assert torch.equal(outputs[0], outputs[1])
    # e4m3 keeps three bits after the leading one: a relative error of at most 2**-4 for each input
    assert 1e-3 < relative(outputs[0], tensors["ref_experts_out"]) < 2**-4


# ------------------------------------------------------------------ bad input


def other_groups(suffix: str) -> Callable[[Path], None]:
    """Of all experts: a file whose groups are alike, but not those of its weights."""
    return with_tensors(lambda name, tensor: tensor[:1] if name.endswith(suffix) else tensor)


def nan(tensor: Tensor) -> Tensor:
    tensor[1, 3] = float("nan")
    return tensor


DOWN = f"{PREFIX}.4.down_proj"
BROKEN: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "3 bits": (GPTQ, with_quantization(bits=3), "GPTQ (wna16): bits is 3, expected 4 or 8"),
    "marlin": (
        GPTQ,
        with_quantization(checkpoint_format="marlin", format=None),
        "checkpoint_format is 'marlin', expected 'gptq' or",
    ),
    "gemv": (
        AWQ,
        with_quantization(version="gemv", format=None, checkpoint_format=None),
        "AWQ (wna16): version is 'gemv', expected 'gemm'",
    ),
    "group size": (
        GPTQ,
        with_quantization(group_size=64),
        f"{PREFIX}.0.gate_proj.scales has shape [2, 128], expected [4, 128] (4 bits in groups of 64",
    ),
    "groups of zero points": (
        AWQ,
        other_groups("qzeros"),
        f"{PREFIX}.0.gate_proj.qzeros has shape [1, 16], expected [4, 16]",
    ),
    "groups of scales": (
        AWQ,
        other_groups("gate_proj.scales"),
        f"{PREFIX}.0.gate_proj.scales has shape [1, 128], expected [4, 128]",
    ),
    "asymmetric": (AWQ, with_quantization(zero_point=False), "expected 8 everywhere: weights are symmetric"),
    "no scales": (GPTQ, with_tensor(f"{DOWN}.scales", lambda _: None), f"{DOWN}.scales is missing in"),
    "no codes": (
        COMPRESSED,
        with_tensor(f"{DOWN}.weight_packed", lambda _: None),
        f"{DOWN}.weight_packed is missing in",
    ),
    "type": (COMPRESSED, with_tensor(f"{DOWN}.weight_packed", Tensor.long), f"{DOWN}.weight_packed is I64 [256, 16]"),
    "NaN": (AWQ, with_tensor(f"{DOWN}.scales", nan), f"{DOWN}.scales has 1 NaN or Inf value of 512, first at [1, 3]"),
    "order": (
        GPTQ,
        with_tensor(f"{PREFIX}.4.up_proj.g_idx", lambda t: t + 1),
        f"{PREFIX}.4.up_proj.g_idx is 2 at [128], expected 0 to 1: {PREFIX}.4.up_proj.scales has 2 groups",
    ),
    "truncated": (COMPRESSED, truncated, "model.safetensors is truncated"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_bad_input(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, and one paragraph that names the tensor, what was found and what was expected."""
    case, change, message = BROKEN[name]
    run_refuses(FILES.changed(case, tmp_path / "w", change), capsys, message)
