"""Linear layers that a checkpoint has quantised beside its experts, as 16-bit weights.

A format knows how a tool's tensors lie; whether the matrix is an expert's or an attention's makes no difference to it.
So each linear layer is given to the formats as a layer of one expert with one projection, and is dequantised from the
canonical weights that come back.
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

#: what holds a linear layer's weight, usual ones first
_WEIGHTS = ("weight", "weight_packed", "qweight")
#: scales of the cache of keys and values, beside the weights of what is cached (ModelOpt, AutoFP8, compressed-tensors)
_CACHE_SCALES = frozenset({"k_scale", "v_scale", "kv_scale", "output_scale"})
#: and queries, which Quark quantises with what is cached
_CACHED = frozenset({"q_proj", "k_proj", "v_proj", "qkv_proj", "kv_b_proj"})
#: factors of the inputs' columns (ModelOpt's AWQ and SmoothQuant), which become part of the weight here
_PRE_SCALE = "pre_quant_scale"
#: the projection under which a linear layer is shown to formats
_ONLY = "down"


@dataclass(frozen=True, eq=False)
class QuantizedLinear:
    """A linear layer whose weight in 16 bits is not stored as such.

    - ``name`` of the module ("model.layers.0.self_attn.q_proj"), ``tensors``: names of all it has but its bias
    - ``shape`` [rows, cols] of the weight
    - ``layout`` of a quantized weight, None for one in 16 bits; ``factors``: name of the factors of its inputs' columns
    """

    name: str
    tensors: tuple[str, ...]
    shape: tuple[int, int]
    checkpoint: Checkpoint
    layout: QuantizedLayout | None
    factors: str | None = None

    def dequantize(self, dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cpu") -> Tensor:
        """The weight [rows, cols] in ``dtype`` on ``device``; CheckpointError names a tensor that is broken.

        Factors of the input's columns (AWQ's and SmoothQuant's smoothing) are multiplied into it.
        """
        if self.factors is None:
            return self._weight(dtype, device)
        factors = self.checkpoint.tensor(self.factors, device)
        if bool(has_bad_values(factors, Values.FINITE)):
            raise CheckpointError(f"{self.factors} holds NaN or Inf, expected finite factors")
        return self._weight(torch.float32, device).mul_(factors.float()).to(dtype)

    def _weight(self, dtype: torch.dtype, device: torch.device | str) -> Tensor:
        """The weight without its factors."""
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
    """The linear layers among the tensors ``names`` whose weights are quantised.

    Reads headers, and small tensors that say how others lie.  Raises CheckpointError for a weight that no installed
    format reads, SchemeNotInstalledError where a scheme is missing.
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
        # the cache is quantised by its own scales, or not at all: they say nothing of the weight
        cached = module.rpartition(".")[2] in _CACHED
        of_weight = {suffix: name for suffix, name in found.items() if not cached or suffix not in _CACHE_SCALES}
        yield _resolve(checkpoint, module, of_weight, tuple(found.values()))


def _resolve(checkpoint: Checkpoint, module: str, found: dict[str, str], tensors: tuple[str, ...]) -> QuantizedLinear:
    factors = found.pop(_PRE_SCALE, None)
    layout: QuantizedLayout | None = None
    if found.keys() != {"weight"} or checkpoint.info(found["weight"]).dtype not in PLAIN_DTYPES:
        # inputs stay in 16 bits, whose static scales need not be there
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
            f"{checkpoint.path}: {module} is a linear layer of the format {detected.format.name}, "
            "which reads experts alone"
        )
    return detected.layout


def _shape(layout: QuantizedLayout) -> tuple[int, int]:
    """[rows, cols] of the weight: the shape that all of its tensors fit; CheckpointError where there is none."""
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
        f"{layer.checkpoint.path}: the tensors of {layer.prefix} fit no shape of a linear layer; the nearest: "
        f"{refusals[0].message}",
        details=details,
    )


def _candidates(layer: LayerExperts) -> Iterator[tuple[int, int]]:
    """Shapes that the weight may have, by what several codes are packed into."""
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
    # bits of a stored number: 4-bit and 8-bit codes fill it
    width = 8 * (dtype.itemsize if dtype is not None else 1)
    for per_word in dict.fromkeys((width // 8, width // 4)):
        yield rows, cols * per_word  # words of a row
        if width > 8:
            yield cols, rows * per_word  # GPTQ: words of a column's inputs, outputs beside one another
            yield cols * per_word, rows  # AWQ: words of outputs, inputs below one another


def _matrices(shape: tuple[int, int]) -> ExpertMatrices:
    return ExpertMatrices((), {_ONLY: shape})
