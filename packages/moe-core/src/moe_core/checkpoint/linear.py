"""Dequantize the quantized linear layers outside the experts to 16-bit weights.

A checkpoint format describes how a tool stores a matrix, in attention as well as in experts. Each linear layer is
therefore passed to the formats as a layer of one expert with one projection. Its weight is then dequantized from the
canonical weights that the format returns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moe_core.checkpoint.detect import detect_format
from moe_core.checkpoint.experts.layer_experts import LayerExperts
from moe_core.checkpoint.experts.matrices import PLAIN_DTYPES, ExpertMatrices
from moe_core.checkpoint.experts.quantized import QuantizedLayout
from moe_core.checkpoint.experts.values import Values, has_bad_values
from moe_core.checkpoint.reader import Checkpoint
from moe_core.errors import CheckpointError
from moe_core.reference.quantization import dequantize_weight

#: Suffixes of the tensor that holds a linear layer's weight, most common first.
_WEIGHTS = ("weight", "weight_packed", "qweight")
#: Suffixes of KV-cache scales stored with the projections (ModelOpt, AutoFP8, compressed-tensors).
_CACHE_SCALES = frozenset({"k_scale", "v_scale", "kv_scale", "output_scale"})
#: Projections that may have KV-cache scales, including the queries, which Quark quantizes in the same way.
_CACHED = frozenset({"q_proj", "k_proj", "v_proj", "qkv_proj", "kv_b_proj"})
#: Suffix of the per-column input factors (ModelOpt's AWQ and SmoothQuant), which are multiplied into the weight here.
_PRE_SCALE = "pre_quant_scale"
#: Projection under which a linear layer is presented to the formats.
_ONLY = "down"


@dataclass(frozen=True, eq=False)
class QuantizedLinear:
    """A linear layer whose 16-bit weight must be computed from what is stored.

    Attributes:
        name: Name of the module ("model.layers.0.self_attn.q_proj").
        tensors: Names of all tensors of the module except its bias.
        shape: [rows, cols] of the weight.
        checkpoint: The checkpoint that stores the tensors.
        layout: Layout of a quantized weight; None for a plain one with ``factors``.
        factors: Name of the tensor with the per-column input factors; None if there is none.
    """

    name: str
    tensors: tuple[str, ...]
    shape: tuple[int, int]
    checkpoint: Checkpoint
    layout: QuantizedLayout | None
    factors: str | None = None

    def dequantize(self, dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cpu") -> Tensor:
        """Read and dequantize the weight.

        Per-column input factors (AWQ's and SmoothQuant's smoothing) are multiplied into it.

        Args:
            dtype: dtype of the result.
            device: Where the weight is computed.

        Returns:
            The weight [rows, cols].

        Raises:
            CheckpointError: A tensor holds invalid values; the message names it.
        """
        if self.factors is None:
            return self._weight(dtype, device)
        factors = self.checkpoint.tensor(self.factors, device)
        if bool(has_bad_values(factors, Values.FINITE)):
            raise CheckpointError(f"{self.factors} holds NaN or Inf, expected finite factors")
        return self._weight(torch.float32, device).mul_(factors.float()).to(dtype)

    def _weight(self, dtype: torch.dtype, device: torch.device | str) -> Tensor:
        """Return the weight without its factors."""
        if self.layout is None:
            return self.checkpoint.tensor(f"{self.name}.weight", device).to(dtype)
        matrices = _matrices(self.shape)
        found = self.layout.stacked([("w2", (_ONLY,))], matrices, (0,), device, has_bias=False)
        return dequantize_weight(
            found["w2"],
            found["w2_scale"],
            self.layout.weight_key,
            zero_point=found.get("w2_zero_point"),
            g_idx=found.get("w2_g_idx"),
            cols=self.shape[1],
            dtype=dtype,
        )[0]


def quantized_linears(checkpoint: Checkpoint, names: Iterable[str]) -> Iterator[QuantizedLinear]:
    """Find the linear layers whose weights are quantized.

    Reads only headers and small tensors that describe the layout of others.

    Args:
        checkpoint: The open checkpoint.
        names: Names of tensors outside the experts.

    Yields:
        Each linear layer whose weight is quantized or has per-column input factors.

    Raises:
        CheckpointError: No installed format reads a weight.
        SchemeNotInstalledError: The scheme that would read a weight is not installed.
    """
    modules: dict[str, dict[str, str]] = {}
    for name in names:
        module, _, suffix = name.rpartition(".")
        modules.setdefault(module, {})[suffix] = name
    for module, found in modules.items():
        weight = next((found[suffix] for suffix in _WEIGHTS if suffix in found), None)
        if weight is None or (_PRE_SCALE not in found and checkpoint.info(weight).dtype in PLAIN_DTYPES):
            continue
        found.pop("bias", None)
        # KV-cache scales do not describe the weight.
        cached = module.rpartition(".")[2] in _CACHED
        of_weight = {suffix: name for suffix, name in found.items() if not cached or suffix not in _CACHE_SCALES}
        yield _resolve(checkpoint, module, of_weight, tuple(found.values()))


def _resolve(checkpoint: Checkpoint, module: str, found: dict[str, str], tensors: tuple[str, ...]) -> QuantizedLinear:
    factors = found.pop(_PRE_SCALE, None)
    layout: QuantizedLayout | None = None
    if found.keys() != {"weight"} or checkpoint.info(found["weight"]).dtype not in PLAIN_DTYPES:
        # Inputs stay in 16 bits, so that static activation scales are not required.
        layout = replace(_layout(checkpoint, module, found), activation_key=None)
    shape = checkpoint.info(found["weight"]).shape if layout is None else _shape(layout)
    if len(shape) != 2 or (factors is not None and checkpoint.info(factors).shape != shape[1:]):
        named = factors or found["weight"]
        raise CheckpointError(
            f"{named} has shape {list(checkpoint.info(named).shape)}, expected one factor for each input of the weight "
            f"{list(shape)}"
        )
    return QuantizedLinear(module, tensors, (shape[0], shape[1]), checkpoint, layout, factors)


def _layout(checkpoint: Checkpoint, module: str, found: Mapping[str, str]) -> QuantizedLayout:
    indices = [int(part) for part in module.split(".") if part.isdecimal()]
    layer = LayerExperts(
        checkpoint,
        prefix=module,
        block=module.rpartition(".")[0],
        index=indices[-1] if indices else 0,
        num_experts=1,
        stacked_names=False,
        _names={(_ONLY, suffix): (name,) for suffix, name in found.items()},
        _infos={(_ONLY, suffix): checkpoint.info(name) for suffix, name in found.items()},
    )
    detected = detect_format(checkpoint, layer)
    if not isinstance(detected.layout, QuantizedLayout):
        raise CheckpointError(
            f"{checkpoint.path}: {module} is a linear layer of the format {detected.format.name}, which "
            "supports experts only"
        )
    return detected.layout


def _shape(layout: QuantizedLayout) -> tuple[int, int]:
    """Find the [rows, cols] that fits all tensors of the weight; raise if there is none."""
    layer = layout.layer
    refusals: list[CheckpointError] = []
    for shape in _candidates(layer):
        try:
            layout.check(_ONLY, shape, (0,), has_bias=False)
        except CheckpointError as error:
            refusals.append(error)
        else:
            return shape
    details = "\n".join(error.message for error in refusals)
    raise CheckpointError(
        f"{layer.checkpoint.path}: the tensors of {layer.prefix} do not form a linear layer: {refusals[0].message}",
        details=details,
    )


def _candidates(layer: LayerExperts) -> Iterator[tuple[int, int]]:
    """Yield the shapes that the weight may have, depending on how codes are packed."""
    if layer.has(_ONLY, "weight_shape"):
        rows, cols = layer.tensor(0, _ONLY, "weight_shape").flatten().tolist()
        yield int(rows), int(cols)
        return
    suffix = next(suffix for suffix in _WEIGHTS if layer.has(_ONLY, suffix))
    stored: Sequence[int] = layer.shape(_ONLY, suffix)
    if len(stored) != 2:
        raise CheckpointError(f"{layer.name(0, _ONLY, suffix)} has shape {list(stored)}, expected a matrix")
    rows, cols = stored
    dtype: Any = layer.dtype(_ONLY, suffix)
    # Bits of a stored element, which holds 4-bit or 8-bit codes.
    width = 8 * (dtype.itemsize if dtype is not None else 1)
    for per_word in dict.fromkeys((width // 8, width // 4)):
        yield rows, cols * per_word  # packed along rows
        if width > 8:
            yield cols, rows * per_word  # GPTQ: stored [in, out], packed along inputs
            yield cols * per_word, rows  # AWQ: stored [in, out], packed along outputs


def _matrices(shape: tuple[int, int]) -> ExpertMatrices:
    return ExpertMatrices((), {_ONLY: shape})
