"""Small modifications of a checkpoint folder: JSON files, safetensors headers and data.

A folder is a dict from file names to bytes. All randomness comes from one ``random.Random``, so a seed identifies a
change.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Mapping
from typing import Any

Files = Mapping[str, bytes]

#: values that few entries expect
ODD: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 2, 3, 7, 16, 32, 64, 128, 4096, 2**31, 2**63, 2**70, 10**400, -(2**40)),
    *(
        1.5,
        4.0,
        -0.0,
        1e308,
        float("nan"),
        float("inf"),
        "",
        " ",
        "\0",
        "\x1b[31m",
        "é",
        "a" * 3000,
        "(.*.*)*#",
        "re:(",
    ),
    *([], {}, [None], [128, 128], [1, 32], [0, 0], {"a": 1}),
)
#: names and words that some tool uses, so that a change may be meaningful
WORDS: tuple[Any, ...] = (
    *("fp8", "mxfp8", "mxfp4", "gptq", "awq", "auto-round", "modelopt", "compressed-tensors", "quark", "FP8", "MXFP8"),
    *("W4A16_AWQ", "MXFP4", "W4A16_MXFP4", "MIXED_PRECISION", "gptq_v2", "gemm", "gemv", "marlin", "int", "float"),
    *("tensor", "channel", "group", "block", "token", "per_tensor", "per_channel", "per_token", "per_group", "e4m3"),
    *("static", "dynamic", "ue8m0", "e8m0", "torch.uint8", "fp4", "fp8_e4m3", "int8", "even", "floor", "mx_fp"),
    *("Linear", "re:.*experts.*", "re:.*", "silu", "gelu", "sigmoid", "softmax", "qwen3_moe", "mixtral", "gpt_oss"),
    *("deepseek_v3", "pack-quantized", "int-quantized", "float-quantized", "mxfp4-pack-quantized", 4, 8, 16, 32, 64),
)
KEYS: tuple[str, ...] = (
    *("quant_method", "method", "bits", "w_bit", "group_size", "q_group_size", "sym", "symmetric", "zero_point"),
    *("desc_act", "checkpoint_format", "format", "version", "packing_format", "backend", "data_type", "act_bits"),
    *("act_data_type", "quant_algo", "quantized_layers", "config_groups", "weight_block_size", "activation_scheme"),
    *("fmt", "scale_fmt", "expert_dtype", "dynamic", "extra_config", "global_quant_config", "layer_quant_config"),
    *("targets", "weights", "input_activations", "output_activations", "num_bits", "type", "strategy", "actorder"),
    *("scale_dtype", "block_structure", "is_dynamic", "qscheme", "dtype", "scale_format", "input_tensors", "ignore"),
    *("transform_config", "quantization_config", "compression_config", "text_config", "is_marlin_format", "meta"),
    *("num_experts", "num_local_experts", "num_experts_per_tok", "hidden_size", "intermediate_size", "swiglu_limit"),
    *("moe_intermediate_size", "hidden_act", "norm_topk_prob", "model_type", "n_group", "topk_group", "scoring_func"),
    *("routed_scaling_factor", "topk_method", "swiglu_alpha"),
)
#: plausible values of some entries
ALTERNATIVES: Mapping[str, tuple[Any, ...]] = {
    "quant_method": ("fp8", "mxfp8", "mxfp4", "gptq", "awq", "auto-round", "modelopt", "compressed-tensors", "quark"),
    "quant_algo": ("FP8", "FP8_PB_WO", "FP8_PER_CHANNEL_PER_TOKEN", "MXFP8", "MXFP4", "W4A16_MXFP4", "W4A8_MXFP4_FP8"),
    **dict.fromkeys(("checkpoint_format", "format"), ("gptq", "gptq_v2", "gemm", "pack-quantized", "int-quantized")),
    **dict.fromkeys(("bits", "w_bit", "num_bits", "act_bits"), (4, 8, 16)),
    **dict.fromkeys(("group_size", "q_group_size"), (-1, 16, 32, 64, 128)),
    **dict.fromkeys(("sym", "symmetric", "zero_point", "desc_act", "is_dynamic", "dynamic"), (True, False)),
    "activation_scheme": ("static", "dynamic"),
    "strategy": ("tensor", "channel", "group", "block", "token"),
    "qscheme": ("per_tensor", "per_channel", "per_group", "per_token"),
    "type": ("int", "float"),
    "dtype": ("fp4", "fp8_e4m3", "int8"),
    "scale_dtype": ("torch.uint8", None),
    "scale_format": ("e8m0", None),
    "weight_block_size": ([128, 128], [64, 128], [1, 32], None),
}
#: files that some tools write next to config.json
BESIDE = ("quantize_config.json", "quant_config.json", "hf_quant_config.json", "quantization_config.json")
DTYPES = (
    *("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "U16", "I16", "F16", "BF16", "U32", "I32", "F32", "I64"),
    *("F64", "F4", "F6_E2M3", "x", "", 3, None),
)
HEADER = 8


def mutated(files: Files, rng: random.Random) -> tuple[dict[str, bytes], str]:
    """Modify one thing in a folder.

    Args:
        files: Content by file name.
        rng: Source of randomness.

    Returns:
        (new files, description of the change).
    """
    names = sorted(files)
    tensors = [name for name in names if name.endswith(".safetensors")]
    texts = [name for name in names if name.endswith(".json")]
    kind = rng.random()
    found = dict(files)
    if kind < 0.5 or not tensors:
        name = rng.choice(texts)
        found[name], what = mutated_json(files[name], rng)
    elif kind < 0.56:
        name, found[name], what = _another_file(files, rng)
    elif kind < 0.6:
        name = rng.choice(names)
        found[name], what = _cut(files[name], rng)
    elif kind < 0.9:
        name = rng.choice(tensors)
        found[name], what = mutated_header(files[name], rng)
    else:
        name = rng.choice(tensors)
        found[name], what = _mutated_data(files[name], rng)
    return found, f"{name}: {what}"


# ------------------------------------------------------------------ JSON


def mutated_json(content: bytes, rng: random.Random) -> tuple[bytes, str]:
    """Change, remove, add, rename or nest an entry of a JSON text, or change bytes of the text.

    Args:
        content: The text.
        rng: Source of randomness.

    Returns:
        (new text, description of the change).
    """
    if rng.random() < 0.15:
        return _mutated_bytes(content, 0, len(content), rng)
    value = json.loads(content)
    holders = list(_holders(value, ""))
    # Deeply nested entries outnumber the others, so pick the top level more often.
    where, holder = rng.choice(holders) if rng.random() < 0.7 else holders[0]
    what = rng.choice(_JSON_CHANGES)(holder, rng)
    return json.dumps(value).encode(), f"{where or 'top'}: {what}"


def _holders(value: Any, where: str) -> Any:
    if isinstance(value, (dict, list)):
        yield where, value
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _holders(inner, f"{where}.{key}" if where else str(key))


def _keys(holder: Any) -> list[Any]:
    return list(holder) if isinstance(holder, dict) else list(range(len(holder)))


def _replace(holder: Any, rng: random.Random) -> str:
    keys = _keys(holder)
    if not keys:
        return _add(holder, rng)
    key = rng.choice(keys)
    old, new = holder[key], _alternative(key, rng) or _other(holder[key], rng)
    holder[key] = new
    return f"{key}: {_text(old)} becomes {_text(new)}"


def _alternative(key: Any, rng: random.Random) -> Any:
    """Sometimes return a plausible value of the entry."""
    known = ALTERNATIVES.get(key) if isinstance(key, str) else None
    return copy.deepcopy(rng.choice(known)) if known is not None and rng.random() < 0.4 else None


def _other(value: Any, rng: random.Random) -> Any:
    """Return another value: a near one, a tool's word, an odd one, or the value nested."""
    kind = rng.random()
    if kind < 0.3:
        if isinstance(value, bool):
            return not value
        if isinstance(value, (int, float)):
            return rng.choice((value + 1, value - 1, value * 2, value // 2, -value, float(value), str(value)))
        if isinstance(value, str) and value:
            return rng.choice((value.upper(), value[:-1], value + "x", value.replace("-", "_"), [value]))
        if isinstance(value, list) and value:
            return rng.choice((value[1:], value + value, value[::-1], value[0]))
    if kind < 0.6:
        return rng.choice(WORDS)
    if kind < 0.65:
        return _deep(value, rng)
    if kind < 0.75:
        return rng.choice(([value], {"a": value}, {"weights": value}, [[value]]))
    return copy.deepcopy(rng.choice(ODD))


def _deep(value: Any, rng: random.Random) -> Any:
    for _ in range(rng.choice((10, 40, 500))):
        value = [value] if rng.random() < 0.5 else {"a": value}
    return value


def _remove(holder: Any, rng: random.Random) -> str:
    keys = _keys(holder)
    if not keys:
        return _add(holder, rng)
    key = rng.choice(keys)
    return f"{key}: {_text(holder.pop(key))} is removed"


def _add(holder: Any, rng: random.Random) -> str:
    key = rng.choice(KEYS)
    new = _alternative(key, rng) or copy.deepcopy(rng.choice(WORDS if rng.random() < 0.6 else ODD))
    if isinstance(holder, list):
        holder.insert(rng.randrange(len(holder) + 1), new)
        return f"{_text(new)} is added"
    old = f"{_text(holder[key])} becomes " if key in holder else ""
    holder[key] = new
    return f"{key}: {old}{_text(new)}"


def _rename(holder: Any, rng: random.Random) -> str:
    if not isinstance(holder, dict) or not holder:
        return _replace(holder, rng)
    key = rng.choice(list(holder))
    new = rng.choice((key + "_", key.upper(), key[1:], rng.choice(KEYS), "", "\0", ".*", "*", "(.*.*)*#", "["))
    holder[new] = holder.pop(key)
    return f"{key} becomes the key {new!r}"


def _swap(holder: Any, rng: random.Random) -> str:
    keys = _keys(holder)
    if len(keys) < 2:
        return _replace(holder, rng)
    one, other = rng.sample(keys, 2)
    holder[one], holder[other] = holder[other], holder[one]
    return f"{one} and {other} change places"


_JSON_CHANGES: tuple[Callable[[Any, random.Random], str], ...] = (
    *(_replace, _replace, _replace, _replace, _remove, _remove, _add, _add, _rename, _swap),
)


def _another_file(files: Files, rng: random.Random) -> tuple[str, bytes, str]:
    """Add a tool's file that repeats config.json, mostly with a change."""
    name = rng.choice(BESIDE)
    try:
        entries = json.loads(files["config.json"]).get("quantization_config", {})
    except (ValueError, AttributeError):
        entries = {}
    entries = {} if not isinstance(entries, dict) else entries
    kept = {key: value for key, value in entries.items() if rng.random() < 0.7}
    what = _replace(kept, rng) if rng.random() < 0.8 else "as it is"
    content: Any = {"quantization": kept} if name == "hf_quant_config.json" else kept
    return name, json.dumps(content).encode(), f"is added, {_text(content)} ({what})"


# ------------------------------------------------------------------ safetensors


def mutated_header(content: bytes, rng: random.Random) -> tuple[bytes, str]:
    """Change or break the header of a safetensors file.

    Args:
        content: The file.
        rng: Source of randomness.

    Returns:
        (new file, description of the change).
    """
    length = int.from_bytes(content[:HEADER], "little")
    kind = rng.random()
    if kind < 0.1:
        size = rng.choice((0, 1, length - 1, length + 1, len(content), len(content) - 8, 10**8, 2**63, 2**64 - 1))
        return size.to_bytes(HEADER, "little") + content[HEADER:], f"header of {size} bytes"
    if kind < 0.3:
        return _mutated_bytes(content, HEADER, HEADER + length, rng)
    header = json.loads(content[HEADER : HEADER + length])
    names = [name for name in header if name != "__metadata__"]
    one, other = rng.choice(names), rng.choice(names)
    part = rng.choice(("dtype", "shape", "data_offsets"))
    if kind < 0.4:
        header[one], header[other] = header[other], header[one]
        what = f"{one} and {other} change places"
    elif kind < 0.5:
        header[one][part], header[other][part] = header[other][part], header[one][part]
        what = f"{part} of {one} and {other} change places"
    elif kind < 0.6:
        new = _renamed(one, rng)
        header[new] = header.pop(one)
        what = f"{one} becomes {_text(new)}"
    elif kind < 0.65:
        del header[one]
        what = f"{one} is removed"
    elif kind < 0.7:
        new = _renamed(one, rng)
        header[new] = copy.deepcopy(header[one])
        what = f"{one} is also {_text(new)}"
    elif kind < 0.75:
        header[one] = _other(header[one], rng)
        what = f"{one} is {_text(header[one])}"
    else:
        what = f"{one}: {_mutated_entry(header[one], part, rng)}"
    text = json.dumps(header).encode()
    return len(text).to_bytes(HEADER, "little") + text + content[HEADER + length :], what


def _renamed(name: str, rng: random.Random) -> str:
    old, new = rng.choice(
        (
            *((".0.", ".1."), (".1.", ".0."), (".experts.", ".expert."), ("gate_proj", "up_proj"), ("up_proj", "w3")),
            *(("gate_proj", "w1"), ("_scale", "_scale_inv"), ("weight", "weight_packed"), (".weight", ".bias")),
            *(
                ("model.", "model.layers.0."),
                ("weight_scale", "input_scale"),
                ("qzeros", "g_idx"),
                ("layers.0", "layers.1"),
            ),
            *(
                (".0.", ".99999."),
                (".0.", ".-1."),
                ("down", "\x1b[2J"),
                ("model", ""),
                ("model", "mtp.model"),
                ("m", "m" * 900),
            ),
        )
    )
    return name.replace(old, new, rng.choice((1, -1)))


def _mutated_entry(entry: dict[str, Any], part: str, rng: random.Random) -> str:
    old = copy.deepcopy(entry[part])
    if part == "dtype":
        entry[part] = rng.choice(DTYPES)
    elif part == "shape":
        shape = list(old)
        at = rng.randrange(len(shape)) if shape else 0
        entry[part] = rng.choice(
            (
                *(shape[::-1], [*shape, 1], [1, *shape], shape[1:], [], [0, *shape], _with(shape, at, 2**62)),
                *(_with(shape, at, -1), _with(shape, at, "4"), _with(shape, at, 1.0), _with(shape, at, True), None),
                *([_product(shape)], _halved(shape), _halved(shape[::-1])[::-1], _with(shape, at, 10**30)),
            )
        )
    else:
        begin, end = old
        entry[part] = rng.choice(
            (
                *([begin + 1, end], [begin, end + 1], [begin - 1, end - 1], [end, begin], [begin], [0, end - begin]),
                *(
                    [begin, 2**63],
                    [-1, end],
                    [begin, begin],
                    [float(begin), end],
                    [begin, 10**25],
                    None,
                    [begin, end, 0],
                ),
            )
        )
    return f"{part} {_text(old)} becomes {_text(entry[part])}"


def _with(shape: list[Any], at: int, value: Any) -> list[Any]:
    return [*shape[:at], value, *shape[at + 1 :]]


def _product(shape: list[int]) -> int:
    count = 1
    for extent in shape:
        count *= extent
    return count


def _halved(shape: list[int]) -> list[int]:
    """Return the same number of elements in rows of half the length."""
    if len(shape) < 2 or shape[-1] % 2:
        return [*shape, 1]
    return [*shape[:-2], shape[-2] * 2, shape[-1] // 2]


def _mutated_data(content: bytes, rng: random.Random) -> tuple[bytes, str]:
    """Change bytes of the tensors' data."""
    start = HEADER + int.from_bytes(content[:HEADER], "little")
    if start >= len(content):
        return _cut(content, rng)
    at, data = rng.randrange(start, len(content)), bytearray(content)
    if rng.random() < 0.6:
        bit = rng.randrange(8)
        data[at] ^= 1 << bit
        return bytes(data), f"bit {bit} of byte {at - start} of the data changes"
    count = min(rng.choice((1, 2, 4, 64, 1000)), len(content) - at)
    fill = rng.choice((0x00, 0xFF, 0x7F, 0x80))
    data[at : at + count] = bytes([fill]) * count
    return bytes(data), f"{count} bytes from {at - start} of the data become {fill:#x}"


def _cut(content: bytes, rng: random.Random) -> tuple[bytes, str]:
    """Truncate, extend or empty a file."""
    kind = rng.randrange(4)
    if kind == 0:
        size = rng.randrange(len(content)) if content else 0
        return content[:size], f"is cut to {size} of {len(content)} bytes"
    if kind == 1:
        extra = bytes(rng.randrange(256) for _ in range(rng.choice((1, 8, 100))))
        return content + extra, f"has {len(extra)} more bytes"
    if kind == 2:
        return b"", "is empty"
    return content[: -rng.choice((1, 2, 8))], "lacks its last bytes"


def _mutated_bytes(content: bytes, first: int, last: int, rng: random.Random) -> tuple[bytes, str]:
    """Change, remove, duplicate or add a few bytes of the text between ``first`` and ``last``."""
    data, what = bytearray(content), []
    for _ in range(rng.choice((1, 1, 1, 4))):
        last = min(last, len(data))
        at = rng.randrange(first, max(last, first + 1))
        kind = rng.randrange(5)
        if at >= len(data):
            break
        if kind == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif kind in (1, 2):
            data[at] = rng.choice(b'"0123456789[]{},:.-eE\\/ntfu\x00\xff')
        elif kind == 3:
            del data[at : at + rng.randrange(1, 40)]
        else:
            data[at:at] = data[at : at + rng.randrange(1, 40)]
        what.append(f"{('bit', 'byte', 'byte', 'removed', 'doubled')[kind]} at {at}")
    return bytes(data), f"text: {', '.join(what)}"


def _text(value: object) -> str:
    try:
        text = repr(value)
    except RecursionError:
        return "something deep"
    return text if len(text) <= 120 else f"{text[:120]}…"
