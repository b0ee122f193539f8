"""Small checkpoints for tests of formats: experts with exact values, in a tool's layout.

experts = Experts((1, 32))                           # random codes, one scale for 32 columns of a row
tensors = experts.tensors(suffix="weight_scale")     # under the names that the tool gives them
check(source(tmp_path, tensors, {"quant_method": "mine"}), experts, weight_key, None)
refused(tmp_path, tensors, {"quant_method": "mine", "bits": 3}, "bits is 3, expected 4 or 8")
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_core.checkpoint import Checkpoint, CheckpointFormat, LayerSource, find_layer, read_layer
from moe_core.errors import CheckpointError
from moe_core.reference.quantization import dequantize_weight
from moe_core.spec.quant_key import QuantKey

#: experts, hidden and intermediate size: partial blocks everywhere, since 320 and 192 are 2.5 and 1.5 blocks of 128
E, K, N = 3, 320, 192
PREFIX = "model.layers.0.mlp.experts"
#: config.json of these experts, without its ``quantization_config``
CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_experts": E,
    "num_experts_per_tok": 2,
    "hidden_size": K,
    "moe_intermediate_size": N,
    "hidden_act": "silu",
    "norm_topk_prob": True,
}
NAMES = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
#: shapes of the groups that share a scale: (rows, columns), -1 for all of them
PER_TENSOR, PER_CHANNEL, MX = (-1, -1), (1, -1), (1, 32)

Group = tuple[int, int]
Tensors = dict[str, Tensor]


def float8_codes(rows: int, cols: int, generator: torch.Generator) -> Tensor:
    """Return random finite e4m3 values.

    Args:
        rows: Number of rows.
        cols: Number of columns.
        generator: Random generator.

    Returns:
        ``[rows, cols]`` float8_e4m3fn.
    """
    raw = torch.randint(0, 256, (rows, cols), generator=generator, dtype=torch.uint8)
    return torch.where((raw & 0x7F) == 0x7F, 0, raw).to(torch.uint8).view(torch.float8_e4m3fn)


def int8_codes(rows: int, cols: int, generator: torch.Generator) -> Tensor:
    """Return random int8 values, including -128.

    Args:
        rows: Number of rows.
        cols: Number of columns.
        generator: Random generator.

    Returns:
        ``[rows, cols]`` int8.
    """
    return torch.randint(-128, 128, (rows, cols), generator=generator, dtype=torch.int8)


def int4_codes(rows: int, cols: int, generator: torch.Generator) -> Tensor:
    """Return random int4 values, one per byte.

    Args:
        rows: Number of rows.
        cols: Number of columns.
        generator: Random generator.

    Returns:
        ``[rows, cols]`` int8.
    """
    return torch.randint(-8, 8, (rows, cols), generator=generator, dtype=torch.int8)


def _grid(rows: int, cols: int, group: Group) -> tuple[int, int]:
    row, col = (rows if group[0] == -1 else group[0]), (cols if group[1] == -1 else group[1])
    return -(-rows // row), -(-cols // col)


def exponents(scale: Tensor, dtype: torch.dtype = torch.uint8) -> Tensor:
    """Return the e8m0 codes of powers of two.

    Args:
        scale: Powers of two.
        dtype: torch.uint8, or anything else for torch.float8_e8m0fnu.

    Returns:
        The codes, in the shape of ``scale``.
    """
    found = (scale.log2() + 127).to(torch.uint8)
    return found if dtype is torch.uint8 else found.view(torch.float8_e8m0fnu)


def unchanged(scale: Tensor) -> Tensor:
    """Return scales unchanged.

    Args:
        scale: float32 ``[rows, cols]`` of the grid of groups.

    Returns:
        The same tensor.
    """
    return scale


class Experts:
    """Three experts whose scales are powers of two, which every scale dtype represents exactly.

    Args:
        group: (rows, columns) that share a scale; -1 for all of them.
        gated: Whether there is a gate projection.
        hidden: Hidden size.
        inter: Intermediate size.
        make: Returns the codes ``[rows, columns]`` of a matrix.
    """

    def __init__(
        self,
        group: Group,
        *,
        gated: bool = True,
        hidden: int = K,
        inter: int = N,
        make: Callable[[int, int, torch.Generator], Tensor] = float8_codes,
    ) -> None:
        generator = torch.Generator().manual_seed(1)
        self.group = group
        self.names = ("gate", "up", "down") if gated else ("up", "down")
        self.sizes = {"gate": (inter, hidden), "up": (inter, hidden), "down": (hidden, inter)}
        self.weights = [{n: make(*self.sizes[n], generator) for n in self.names} for _ in range(E)]
        self.scales = [
            {
                n: torch.randint(-14, 15, _grid(*self.sizes[n], group), generator=generator).float().exp2()
                for n in self.names
            }
            for _ in range(E)
        ]

    def values(self) -> tuple[Tensor, Tensor]:
        """Exact w13 and w2 in float64: weight [n, k] x scale [n // rows, k // cols]."""

        def one(expert: int, name: str) -> Tensor:
            weight, scale = self.weights[expert][name].double(), self.scales[expert][name].double()
            row = self.sizes[name][0] if self.group[0] == -1 else self.group[0]
            col = self.sizes[name][1] if self.group[1] == -1 else self.group[1]
            rows, cols = torch.arange(weight.shape[0]) // row, torch.arange(weight.shape[1]) // col
            return weight * scale[rows][:, cols]

        w13 = torch.stack([torch.cat([one(e, n) for n in self.names[:-1]]) for e in range(E)])
        return w13, torch.stack([one(e, "down") for e in range(E)])

    def tensors(
        self,
        store: Callable[[Tensor], Tensor] = unchanged,
        suffix: str = "weight_scale",
        names: dict[str, str] = NAMES,
        extra: dict[str, Tensor] | None = None,
    ) -> Tensors:
        """Return separate tensors per expert and projection.

        Args:
            store: Converts a ``[rows, cols]`` scale grid to the tool's form.
            suffix: Name of the scale tensors.
            names: The tool's names of gate, up and down.
            extra: Additional tensors of every projection.

        Returns:
            Tensors by name.
        """
        found = {}
        for expert in range(E):
            for n in self.names:
                base = f"{PREFIX}.{expert}.{names[n]}"
                found[f"{base}.weight"] = self.weights[expert][n]
                found[f"{base}.{suffix}"] = store(self.scales[expert][n])
                for name, tensor in (extra or {}).items():
                    found[f"{base}.{name}"] = tensor.clone()
        return found

    def stacked(self, store: Callable[[Tensor], Tensor], suffix: str, *, transposed: bool = False) -> Tensors:
        """Return stacked tensors: gate_up_proj and down_proj.

        With per-tensor scales, gate and up share the gate's scale.

        Args:
            store: Converts ``[E, rows, cols]`` scale grids to the tool's form.
            suffix: Suffix of the scale tensors' names.
            transposed: Whether matrices and scales are stored transposed.

        Returns:
            Tensors by name.
        """

        def every(kind: list[dict[str, Tensor]], *names: str) -> Tensor:
            return torch.stack([torch.cat([one[n] for n in names]) for one in kind])

        def flip(tensor: Tensor) -> Tensor:
            return tensor.mT.contiguous() if transposed else tensor

        dtype = self.weights[0]["down"].dtype
        weights = [{n: t.view(torch.uint8) for n, t in one.items()} for one in self.weights]
        both = ("gate",) if self.group == PER_TENSOR else ("gate", "up")
        return {
            f"{PREFIX}.gate_up_proj": flip(every(weights, "gate", "up")).view(dtype),
            f"{PREFIX}.gate_up_proj{suffix}": store(flip(every(self.scales, *both))),
            f"{PREFIX}.down_proj": flip(every(weights, "down")).view(dtype),
            f"{PREFIX}.down_proj{suffix}": store(flip(every(self.scales, "down"))),
        }


def write(
    folder: Path,
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    *,
    shards: int = 0,
    **changes: Any,
) -> Path:
    """Write a checkpoint folder.

    Args:
        folder: The folder, which is created if needed.
        tensors: Tensors by name.
        config: Content of config.json.
        shards: Number of shards, with an index; 0 for a single file.
        **changes: Entries of the config to replace; None removes one.

    Returns:
        ``folder``.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    content = {key: value for key, value in {**config, **changes}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(content))
    if not shards:
        save_file(dict(tensors), folder / "model.safetensors")
        return folder
    weight_map: dict[str, str] = {}
    names = list(tensors)
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        mine = names[shard::shards]
        save_file({name: tensors[name] for name in mine}, folder / file)
        weight_map |= dict.fromkeys(mine, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def source(folder: Path, tensors: Tensors, quantization: Mapping[str, Any], **changes: Any) -> LayerSource:
    """Write a folder with these tensors and return its layer.

    Args:
        folder: The folder to write.
        tensors: Tensors by name.
        quantization: ``quantization_config`` of config.json.
        **changes: Other entries of config.json to replace.

    Returns:
        The layer.
    """
    return read_layer(_opened(folder, tensors, quantization, **changes))


def _opened(folder: Path, tensors: Tensors, quantization: Mapping[str, Any], **changes: Any) -> Checkpoint:
    # Tensors that share memory cannot be saved.
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    return Checkpoint.open(write(folder, copies, {**CONFIG, "quantization_config": quantization}, **changes))


def check(found: LayerSource, experts: Experts, weight_key: QuantKey, activation_key: QuantKey | None) -> None:
    """Check that a layer loads with the given keys and exactly the experts' values.

    Args:
        found: The layer.
        experts: The experts that were written.
        weight_key: Expected weight key.
        activation_key: Expected activation key.

    Raises:
        AssertionError: A key or value differs.
    """
    weights = found.weights()
    weights.validate(found.config, values=True)
    asked = weight_key, activation_key
    for what, keys in (
        ("layer says", (found.weight_key, found.activation_key)),
        ("layer loads", (weights.weight_key, weights.activation_key)),
    ):
        if keys != asked:
            raise AssertionError(f"the {what} {keys[0]} with {keys[1]}, expected {asked[0]} with {asked[1]}")
    for name, expected in zip(("w13", "w2"), experts.values(), strict=True):
        parts = 2 if name == "w13" and found.config.is_gated else 1
        scale = getattr(weights, f"{name}_scale")
        values = dequantize_weight(getattr(weights, name), scale, weight_key, parts=parts).double()
        if not torch.equal(values, expected):
            count = int((values != expected).sum()) if values.shape == expected.shape else values.numel()
            raise AssertionError(f"{count} of {values.numel()} values of {name} are not those that were written")


def refused(folder: Path, tensors: Tensors, quantization: Mapping[str, Any], *parts: str, **changes: Any) -> None:
    """Check that finding or loading a layer raises CheckpointError.

    Args:
        folder: The folder to write.
        tensors: Tensors by name.
        quantization: ``quantization_config`` of config.json.
        *parts: Texts that the message must contain.
        **changes: Other entries of config.json to replace.

    Raises:
        AssertionError: The layer loads, or the message lacks a text.
    """
    try:
        source(folder, tensors, quantization, **changes).weights()
    except CheckpointError as error:
        missing = [part for part in parts if part not in str(error)]
        if missing:
            raise AssertionError(f"{missing} not in the error: {error}") from error
    else:
        raise AssertionError(f"the layer loads, expected a CheckpointError: {', '.join(parts)}")


def reason_against(adapter: CheckpointFormat, folder: Path, tensors: Tensors, quantization: Mapping[str, Any]) -> str:
    """Return why a format does not read a layer.

    Args:
        adapter: The format.
        folder: The folder to write.
        tensors: Tensors by name.
        quantization: ``quantization_config`` of config.json.

    Returns:
        The format's reason, or the error that a broken config raises.

    Raises:
        AssertionError: The format reads the layer.
    """
    checkpoint = _opened(folder, tensors, quantization)
    try:
        reason = adapter.resolve(checkpoint.quantization, find_layer(checkpoint))
    except CheckpointError as error:
        return str(error)
    if not isinstance(reason, str):
        raise AssertionError(f"{adapter.name} reads the layer, expected a reason against it")
    return reason
