"""Name well-known checkpoint formats that are not supported, for error messages only.

No package of this project reads them. A third-party format may read any of them, so installed formats are tried first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

INSTEAD = (
    "read are safetensors in FP8, MXFP8, INT8, MXFP4, and INT4 or INT8 in groups (GPTQ, AWQ, AutoRound, "
    "compressed-tensors): take such a checkpoint of the model, or its 16-bit one, to be quantized at load (--quantize)"
)

#: Formats by file suffix.
_FILES = {
    ".gguf": "GGUF (llama.cpp)",
    ".ggml": "GGML (llama.cpp)",
    ".nemo": "NeMo",
    ".onnx": "ONNX",
    ".engine": "TensorRT engines",
    ".mlpackage": "Core ML",
}

NVFP4 = "NVFP4"
_BITSANDBYTES = "bitsandbytes (NF4, FP4 or LLM.int8)"
_EXL2, _EXL3 = "EXL2 (ExLlamaV2)", "EXL3 (ExLlamaV3)"

_INT4_FP8 = "INT4 weights with static FP8 activations"
_W4AFP8 = f"W4AFP8 (SGLang: {_INT4_FP8})"

#: Formats by ``quant_method``.
_METHODS = {
    "aqlm": "AQLM",
    "bitnet": "BitNet",
    "bitsandbytes": _BITSANDBYTES,
    "eetq": "EETQ",
    "exl2": _EXL2,
    "exl3": _EXL3,
    "fbgemm_fp8": "FBGEMM FP8",
    "fp_quant": "FP-Quant (FP4 after Hadamard rotations)",
    "gguf": "GGUF (llama.cpp)",
    "higgs": "HIGGS",
    "hqq": "HQQ",
    "modelopt_fp4": NVFP4,
    "nvfp4": NVFP4,
    "petit_nvfp4": NVFP4,
    "quanto": "Quanto",
    "quip": "QuIP#",
    "quip_sharp": "QuIP#",
    "sinq": "SINQ",
    "spqr": "SpQR",
    "squeezellm": "SqueezeLLM",
    "torchao": "torchao",
    "vptq": "VPTQ",
    "w4afp8": _W4AFP8,
}

#: Formats, keyed by the suffixes of an expert's tensors; all suffixes of a row must be present.
_SUFFIXES: tuple[tuple[tuple[str, ...], str], ...] = (
    (("weight_packed", "weight_global_scale"), NVFP4),
    (("trellis",), _EXL3),
    (("q_weight", "q_scale"), _EXL2),
    (("weight.absmax",), _BITSANDBYTES),
    (("SCB",), _BITSANDBYTES),
    (("W_q",), "HQQ"),
    (("codebooks",), "AQLM"),
    (("forward_hadamard_matrix",), "FP-Quant (FP4 after Hadamard rotations)"),
)


def unsupported_quantization(quantization: Mapping[str, Any], stored: Mapping[str, str]) -> str | None:
    """Recognize a known but unsupported quantization of experts.

    Args:
        quantization: Quantization settings of the checkpoint.
        stored: dtypes of one projection's tensors as safetensors spells them, by suffix.

    Returns:
        Name of the quantization, or None if it is not recognized.
    """
    for row, what in _SUFFIXES:
        if stored.keys() >= set(row):
            return what
    codes = next((kind for suffix, kind in stored.items() if suffix in ("weight", "weight_packed")), None)
    if stored.keys() >= {"weight_scale", "weight_scale_2"} and codes in ("U8", "I8"):
        # ModelOpt's W4A8_AWQ has the same tensors, with 16-bit or 32-bit floating-point scales.
        return NVFP4 if stored["weight_scale"] == "F8_E4M3" else f"W4A8_AWQ ({_INT4_FP8})"
    method = str(quantization.get("quant_method", "")).lower()
    if method == "auto-round" and str(quantization.get("data_type", "")).startswith("nv_fp"):
        return NVFP4
    if method == "modelopt" and str(quantization.get("quant_algo", "")).upper() == "W4A8_AWQ":
        return f"W4A8_AWQ ({_INT4_FP8})"
    if codes in ("I8", "U8", "I32") and "input_scale" in stored:
        if stored.get("weight_scale_inv") in ("F32", "BF16", "F16"):
            return _W4AFP8
        if any(map(_is_int4_fp8, _groups(quantization))):
            return _INT4_FP8
    return _METHODS.get(method)


def _groups(quantization: Mapping[str, Any]) -> Iterable[Any]:
    """Return the config groups of compressed-tensors."""
    groups = quantization.get("config_groups")
    return groups.values() if isinstance(groups, dict) else ()


def _is_int4_fp8(group: Any) -> bool:
    """Return whether a compressed-tensors group has int4 weights and static FP8 activations."""
    parts = [group.get(name) if isinstance(group, dict) else None for name in ("weights", "input_activations")]
    kinds = [
        (part.get("type", "int"), part.get("num_bits", 8), part.get("dynamic", False))
        if isinstance(part, dict)
        else None
        for part in parts
    ]
    return kinds == [("int", 4, False), ("float", 8, False)]


def unsupported_files(paths: Iterable[Path]) -> str | None:
    """Recognize a file in a known but unsupported format.

    Args:
        paths: Files.

    Returns:
        A clause for a message ("m.gguf is GGUF …"), or None if there is no such file.
    """
    for path in sorted(paths):
        what = _FILES.get(path.suffix.lower())
        if what is not None:
            return f"{path.name} is {what}, which is not supported; {INSTEAD}"
    return None


def unsupported_names(names: Iterable[str]) -> str | None:
    """Recognize tensor names of known but unsupported formats.

    This is used for checkpoints without experts under the names of transformers.

    Args:
        names: Names of all tensors.

    Returns:
        A clause for a message, or None if no name is recognized.
    """
    for name in names:
        if ".switch_mlp." in name:
            return f"{name} is MLX's, whose layout is not supported; {INSTEAD}"
        if ".mlp.mlp1_weight" in name:
            return f"{name} has OpenAI's original tensor names of gpt-oss; expected the files for transformers"
    return None
