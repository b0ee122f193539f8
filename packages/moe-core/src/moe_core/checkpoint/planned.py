"""Plan the tensors of a checkpoint from config.json, before its weights are downloaded.

Sizes come from config.json. The storage of the experts is found by trial: one layer is laid out in each way in which
tools store experts, and the first layout that an installed format accepts is used.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_core._support.downloads import incomplete_hint
from moe_core._support.strict_json import MAX_INDEX_BYTES, load_object
from moe_core.checkpoint.config import keys as keys
from moe_core.checkpoint.config.families import family_of
from moe_core.checkpoint.config.keys import ConfigKeys
from moe_core.checkpoint.config.statements import read_quantization
from moe_core.checkpoint.experts.find_layer import find_layer
from moe_core.checkpoint.experts.matrices import ExpertMatrices
from moe_core.checkpoint.experts.quantized import QuantizedLayout
from moe_core.checkpoint.files.safetensors_file import Part, Span, TensorInfo
from moe_core.checkpoint.files.safetensors_header import DTYPES, Kind
from moe_core.checkpoint.files.shards import check_folder, index_file, pickled_files
from moe_core.checkpoint.files.staging import bytes_of
from moe_core.checkpoint.files.unsupported import unsupported_files
from moe_core.checkpoint.reader import Checkpoint
from moe_core.checkpoint.source import LayerSource
from moe_core.errors import CheckpointError, MoEError, SchemeNotInstalledError

_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")

#: Function of (rows, cols) that returns the kinds of the tensors that store such a matrix, by suffix.
Kit = Callable[[int, int], dict[str, Kind]]


def has_no_weights(folder: Path) -> bool:
    """Return whether a folder has config.json and no weight files.

    Weight files of any kind count, including partially downloaded ones.

    Args:
        folder: A checkpoint folder.

    Returns:
        True if the weights have to be planned.
    """
    if not (folder / "config.json").is_file() or incomplete_hint(folder):
        return False
    return not (any(folder.glob("*.safetensors")) or pickled_files(folder) or unsupported_files(folder.iterdir()))


class PlannedCheckpoint(Checkpoint):
    """Checkpoint whose tensors are implied by config.json.

    Tensors read as zeros, except ``g_idx``, which describes the layout of other tensors.

    Attributes:
        other_bytes: Estimated size in bytes of all tensors that are not planned.
    """

    def __init__(
        self, path: Path, config: Mapping[str, Any], quantization: Mapping[str, Any], kinds: Mapping[str, Kind]
    ) -> None:
        super().__init__(path, config, quantization, {})
        self._kinds = kinds
        self.other_bytes = 0

    @property
    def names(self) -> Iterable[str]:
        return self._kinds.keys()

    @property
    def nbytes(self) -> int:
        return self.other_bytes + sum(
            math.prod(shape) * DTYPES[dtype].itemsize for dtype, shape in self._kinds.values()
        )

    def __contains__(self, name: object) -> bool:
        return name in self._kinds

    def info(self, name: str) -> TensorInfo:
        dtype, shape = self._kinds[name]
        return TensorInfo(name, self.path / "config.json", DTYPES[dtype], shape, dtype)

    def first_unlike(self, names: Iterable[str]) -> str | None:
        return None

    def tensor(self, name: str, device: torch.device | str = "cpu") -> Tensor:
        info = self.info(name)
        if name.endswith(".g_idx"):
            # Columns in their original order, split into groups of equal size.
            groups = self._kinds[f"{name.removesuffix('.g_idx')}.scales"][1][0]
            return torch.arange(info.shape[0], dtype=info.dtype, device=device) // -(-info.shape[0] // groups)
        return torch.zeros(info.shape, dtype=info.dtype, device=device)

    def part(self, name: str, index: int) -> Tensor:
        return self.tensor(name)[index]

    def read_into(self, name: str, out: Tensor, index: int | None = None) -> None:
        out.copy_(self.tensor(name) if index is None else self.part(name, index))

    def read_all(self, parts: Iterable[Part]) -> None:
        for name, index, buffer in parts:
            found = self.tensor(name) if index is None else self.part(name, index)
            buffer[:] = bytes_of(found.contiguous())

    def read_spans(self, spans: Iterable[Span]) -> None:
        raise CheckpointError(f"{self.path} has config.json but no weights to read")


def plan(folder: Path, read: Callable[[Checkpoint], LayerSource]) -> PlannedCheckpoint:
    """Lay out the tensors of a model whose weights are not available.

    Args:
        folder: Folder with config.json, and with the index of the weights if it was downloaded.
        read: Reads the requested layer.

    Returns:
        The checkpoint in the first layout that ``read`` accepts.

    Raises:
        CheckpointError: config.json states too little, or no installed format reads what it states.
        SchemeNotInstalledError: The scheme that would read it is not installed.
    """
    check_folder(folder)
    config = load_object(folder / "config.json")
    quantization = read_quantization(folder, config)
    entries = ConfigKeys.of(config, folder / "config.json", 0)
    layers = moe_layers(entries)
    errors: list[MoEError] = []
    for tensors in _candidates(entries, quantization):
        kinds = {f"model.layers.{layer}.{name}": kind for layer in layers[:1] for name, kind in tensors.items()}
        trial = PlannedCheckpoint(folder, config, quantization, kinds)
        try:
            _check(read(trial), find_layer(trial).num_experts)
        except MoEError as error:
            errors.append(error)
            continue
        every = {f"model.layers.{layer}.{name}": kind for layer in layers for name, kind in tensors.items()}
        found = PlannedCheckpoint(folder, config, quantization, every)
        found.other_bytes = _other_bytes(folder, entries, len(layers), found.nbytes)
        return found
    telling = (one for one in errors if isinstance(one, SchemeNotInstalledError) or "not supported" in one.message)
    told = errors[0] if quantization.get("quant_method") is None else next(telling, None)
    if told is not None:
        raise told
    raise CheckpointError(
        f"{folder} has no weights, and config.json alone does not state how they are stored: {errors[0].message}",
        details="\n".join(dict.fromkeys(error.message for error in errors)),
    )


def _check(source: LayerSource, num_experts: int) -> None:
    """Raise CheckpointError unless names, shapes and dtypes are what the layout expects."""
    layout = source.layout
    if isinstance(layout, QuantizedLayout):
        for projection, size in ExpertMatrices.of(layout.layer, source.whole).sizes.items():
            layout.check(projection, size, range(num_experts), has_bias=source.whole.has_bias)


def moe_layers(entries: ConfigKeys) -> list[int]:
    """Find the layers with experts from the entries in which model families state them.

    Args:
        entries: config.json entries of the language model.

    Returns:
        Indices of the layers, ascending.

    Raises:
        CheckpointError: config.json does not state the number of layers, or no layer has experts.
    """
    stated = entries.entries
    kinds = stated.get("mlp_layer_types") or stated.get("layers_block_type")
    pattern = stated.get("hybrid_override_pattern")
    if isinstance(kinds, list):
        found = [at for at, kind in enumerate(kinds) if kind in ("sparse", "moe", "hash")]
    elif isinstance(pattern, str):
        found = [at for at, kind in enumerate(pattern) if kind == "E"]
    elif isinstance(stated.get("moe_layer_freq"), list):
        found = [at for at, is_moe in enumerate(stated["moe_layer_freq"]) if is_moe]
    elif isinstance(stated.get("moe_layers"), list):
        found = [at for at in stated["moe_layers"] if isinstance(at, int)]
    else:
        _, count = entries.integer(_LAYERS)
        dense = _whole(
            stated, ("first_k_dense_replace", "num_dense_layers", "n_dense_layers", "moe_layer_start_index"), 0
        )
        step = _whole(stated, ("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval"), 1)
        every = _whole(stated, ("moe_layer_freq",), 1)
        apart = stated.get("mlp_only_layers") or ()
        found = [
            at
            for at in range(count)
            if at >= dense and at not in apart and (at + 1) % max(step, 1) == 0 and at % max(every, 1) == 0
        ]
    if not found:
        raise entries.error("does not state a layer with experts")
    return found


def _whole(stated: Mapping[str, Any], names: Iterable[str], default: int) -> int:
    return next((value for name in names if isinstance(value := stated.get(name), int)), default)


def _candidates(entries: ConfigKeys, quantization: Mapping[str, Any]) -> Iterator[dict[str, Kind]]:
    """Yield possible layouts of a layer's experts and router: tensor kinds by name in the layer."""
    _, experts = entries.integer(keys.NUM_EXPERTS)
    _, hidden = entries.integer(keys.HIDDEN_SIZE)
    _, inter = entries.integer(keys.EXPERT_SIZE if entries.find(keys.EXPERT_SIZE) is not None else keys.DENSE_SIZE)
    width = entries.optional_integer(keys.LATENT_SIZE) or hidden
    family = family_of(entries.model_type)
    router: dict[str, Kind] = {"mlp.gate.weight": ("BF16", (experts, hidden))}
    if family is not None and family.router_bias:
        router = {"mlp.router.weight": ("BF16", (experts, hidden)), "mlp.router.bias": ("BF16", (experts,))}
    if family is not None and family.correction_bias:
        router["mlp.gate.e_score_correction_bias"] = ("F32", (experts,))
    biased = family is not None and family.expert_bias
    halves = "F16" if (entries.entries.get("dtype") or entries.entries.get("torch_dtype")) == "float16" else "BF16"
    kits = [*_quantized(quantization, halves), _plain] if quantization.get("quant_method") is not None else [_plain]
    # Only Nemotron's experts use this activation, and they have no gate.
    gates = (False, True) if (entries.stated(keys.ACTIVATION) or ("", ""))[1] == "relu2" else (True, False)
    for kit, gated in itertools.product(kits, gates):
        sizes = {"up_proj": (inter, width), "down_proj": (width, inter)}
        sizes |= {"gate_proj": (inter, width)} if gated else {}
        tensors = dict(router)
        for name, (rows, cols) in sizes.items():
            matrix = kit(rows, cols) | ({"bias": ("BF16", (rows,))} if biased else {})
            for expert, (suffix, kind) in itertools.product(range(experts), matrix.items()):
                tensors[f"mlp.experts.{expert}.{name}.{suffix}"] = kind
        yield tensors
    # gpt-oss stores all experts in one tensor, with interleaved gate and up rows.
    for kit in (_gpt_oss_mxfp4, _gpt_oss_plain):
        tensors = dict(router)
        for name, (rows, cols) in {"gate_up_proj": (2 * inter, width), "down_proj": (width, inter)}.items():
            for suffix, (dtype, shape) in kit(rows, cols).items():
                tensors[f"mlp.experts.{name}{suffix}"] = dtype, (experts, *shape)
        yield tensors


def _plain(rows: int, cols: int) -> dict[str, Kind]:
    return {"weight": ("BF16", (rows, cols))}


def _gpt_oss_plain(rows: int, cols: int) -> dict[str, Kind]:
    return {"": ("BF16", (cols, rows)), "_bias": ("BF16", (rows,))}


def _gpt_oss_mxfp4(rows: int, cols: int) -> dict[str, Kind]:
    blocks = ("U8", (rows, cols // 32, 16))
    return {"_blocks": blocks, "_scales": ("U8", (rows, cols // 32)), "_bias": ("BF16", (rows,))}


def _quantized(quantization: Mapping[str, Any], halves: str) -> list[Kit]:
    """List the kits that tools write, most specific first, with the group sizes of config.json.

    ``halves`` is the model's 16-bit dtype as safetensors spells it.
    """
    text = json.dumps(quantization)
    static = '"dynamic": false' in text.partition("input_activations")[2].partition("}")[0] or (
        '"activation_scheme": "static"' in text
    )
    found: list[Kit] = []
    for block in _sizes(quantization, "weight_block_size") or [(128, 128)]:
        for suffix in ("weight_scale_inv", "weight_scale"):
            found.append(_scaled("F8_E4M3", suffix, "F32", lambda r, c, b=block: (-(-r // b[0]), -(-c // b[1]))))  # type: ignore[misc]
    inputs: dict[str, Kind] = {"input_scale": ("F32", ())} if static else {}
    for dtype in ("F8_E4M3", "I8"):
        found.append(_scaled(dtype, "weight_scale", "F32", lambda r, c: (r, 1), inputs))
        found.append(_scaled(dtype, "weight_scale", "F32", lambda r, c: (), inputs))
        if not static:
            found.append(_scaled(dtype, "weight_scale", "F32", lambda r, c: (), {"input_scale": ("F32", ())}))
    found.append(_scaled("F8_E4M3", "weight_scale", "U8", lambda r, c: (r, c // 32)))
    found.append(_scaled("F8_E4M3", "weight_scale_inv", "U8", lambda r, c: (r, c // 32)))
    for weight, scale in itertools.product(("weight_packed", "weight"), ("weight_scale", "weight_scale_inv")):
        found.append(_mxfp4(weight, scale))
    for group in [size for size in _sizes(quantization, "group_size") if isinstance(size, int)] or [128, 32, 64]:
        found += [kit for bits in (4, 8) for kit in _words(bits, group, halves)]
    if any(name in text.lower() for name in ("nvfp4", "nv_fp", "tensor_group")):
        # No scheme reads NVFP4; this kit lets detection name the format in its error.
        scales: dict[str, Kind] = {"weight_global_scale": ("F32", (1,))}
        found.append(
            lambda r, c: {"weight_packed": ("U8", (r, c // 2)), "weight_scale": ("F8_E4M3", (r, c // 16)), **scales}
        )
    return found


def _scaled(
    dtype: str,
    suffix: str,
    scale: str,
    shape: Callable[[int, int], tuple[int, ...]],
    more: Mapping[str, Kind] | None = None,
) -> Kit:
    return lambda rows, cols: {"weight": (dtype, (rows, cols)), suffix: (scale, shape(rows, cols)), **(more or {})}


def _mxfp4(weight: str, scale: str) -> Kit:
    return lambda rows, cols: {weight: ("U8", (rows, cols // 2)), scale: ("U8", (rows, cols // 32))}


def _words(bits: int, group: int, halves: str) -> Iterator[Kit]:
    """Yield the kits of integer codes in words: GPTQ's, AWQ's, and compressed-tensors' without and with zero points."""

    def groups(cols: int) -> int:
        return 1 if group == -1 else -(-cols // group)

    def columns(rows: int, cols: int, scales: str) -> dict[str, Kind]:
        return {"qzeros": ("I32", (groups(cols), rows * bits // 32)), "scales": (scales, (groups(cols), rows))}

    def packed(rows: int, cols: int) -> dict[str, Kind]:
        words = (rows, -(-cols * bits // 32))
        return {"weight_packed": ("I32", words), "weight_scale": ("BF16", (rows, groups(cols)))}

    yield lambda r, c: {"qweight": ("I32", (c * bits // 32, r)), **columns(r, c, "F16"), "g_idx": ("I32", (c,))}
    yield lambda r, c: {"qweight": ("I32", (c, r * bits // 32)), **columns(r, c, halves)}
    yield packed
    yield lambda r, c: packed(r, c) | {"weight_zero_point": ("I32", (-(-r * bits // 32), groups(c)))}


def _sizes(value: object, name: str) -> list[Any]:
    """Collect the distinct values of all entries called ``name`` at any depth."""
    found: list[Any] = []
    if isinstance(value, Mapping):
        for key, one in value.items():
            found += [one] if key == name and isinstance(one, (int, list)) else _sizes(one, name)
    elif isinstance(value, list):
        found += [one for part in value for one in _sizes(part, name)]
    return [one for at, one in enumerate(found) if one not in found[:at]]


def _other_bytes(folder: Path, entries: ConfigKeys, layers: int, experts: int) -> int:
    """Return the size in bytes of all tensors that are not planned.

    It follows from the index if there is one. Otherwise it is an estimate for 16-bit embeddings, attention, shared
    experts and dense MLPs.
    """
    index = index_file(folder)
    if index is not None:
        metadata = load_object(index, most=MAX_INDEX_BYTES).get("metadata")
        total = metadata.get("total_size") if isinstance(metadata, dict) else None
        if isinstance(total, int):
            return max(total - experts, 0)
    stated = entries.entries

    def number(*names: str) -> int:
        return _whole(stated, names, 0)

    hidden, count = number(*keys.HIDDEN_SIZE), number(*_LAYERS) or layers
    heads = number("num_attention_heads") or 1
    if number("kv_lora_rank"):
        query = heads * (number("qk_nope_head_dim") + number("qk_rope_head_dim"))
        low = number("q_lora_rank")
        attention = low * (hidden + query) if low else hidden * query
        attention += hidden * (number("kv_lora_rank") + number("qk_rope_head_dim"))
        attention += number("kv_lora_rank") * heads * (number("qk_nope_head_dim") + number("v_head_dim"))
        attention += heads * number("v_head_dim") * hidden
    else:
        head = number("head_dim") or hidden // heads
        attention = 2 * hidden * head * (heads + (number("num_key_value_heads") or heads))
    shared = number("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size")
    shared = shared or number("n_shared_experts", "num_shared_experts") * number(*keys.EXPERT_SIZE)
    dense = (count - layers) * number(*keys.DENSE_SIZE) if count > layers else 0
    embeddings = number("vocab_size") * hidden * (1 if stated.get("tie_word_embeddings") else 2)
    return 2 * (embeddings + count * attention + 3 * hidden * (layers * shared + dense))
