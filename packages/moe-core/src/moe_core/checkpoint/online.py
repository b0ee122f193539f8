"""Quantize the 16-bit experts of a checkpoint while they are loaded."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from moe_core.checkpoint.detect import Detected, detect_format
from moe_core.checkpoint.experts.layer_experts import LayerExperts
from moe_core.checkpoint.experts.matrices import unquantized_reason
from moe_core.checkpoint.experts.unquantized import UnquantizedFormat
from moe_core.checkpoint.reader import Checkpoint
from moe_core.errors import CheckpointError
from moe_core.interface.checkpoint_format import CheckpointFormat, ExpertLayout
from moe_core.kernels.ops.online import OnlineQuantization
from moe_core.selection.registry import Registry, registry
from moe_core.spec.config import FusedMoEConfig
from moe_core.spec.quant_key import QuantKey
from moe_core.spec.weights import MoEWeights

#: Maximum bytes of 16-bit weights held at a time, unless one expert is larger.
CHUNK_BYTES = 256 << 20
#: Maximum number of quantizations listed in an error message; the details list all.
MOST_NAMES = 8


@dataclass(frozen=True, eq=False)
class OnlineLayout(ExpertLayout):
    """Layout of 16-bit experts that are quantized at load.

    Experts are converted in chunks: at most :data:`CHUNK_BYTES` (or one expert) of 16-bit weights exist at a time in
    addition to the result.

    Attributes:
        weight_key: Quantization of the result.
        stored: Layout that loads the 16-bit weights.
        online: The quantization to apply.
    """

    weight_key: QuantKey
    stored: ExpertLayout
    online: OnlineQuantization

    def load(self, config: FusedMoEConfig, *, experts: Sequence[int], device: torch.device | str = "cpu") -> MoEWeights:
        return self._load(self.stored.load, config, experts, device)

    @property
    def column_unit(self) -> int | None:
        """Number of columns that form whole quantization groups; None if all columns share scales.

        A shard of whole groups has the same scales as the whole layer.
        """
        group, stored = self.weight_key.group_shape, self.stored.column_unit
        if stored is None or group.col == -1:
            return None
        return math.lcm(stored, group.col, max(group.row, 1))

    def load_columns(
        self,
        config: FusedMoEConfig,
        begin: int,
        end: int,
        *,
        experts: Sequence[int],
        device: torch.device | str = "cpu",
    ) -> MoEWeights:
        def load(here: FusedMoEConfig, *, experts: Sequence[int], device: torch.device | str) -> MoEWeights:
            return self.stored.load_columns(here, begin, end, experts=experts, device=device)

        return self._load(load, config, experts, device)

    def _load(
        self,
        load: Callable[..., MoEWeights],
        config: FusedMoEConfig,
        experts: Sequence[int],
        device: torch.device | str,
    ) -> MoEWeights:
        one = 4 * (config.w13_rows * config.hidden_size + config.hidden_size * config.intermediate_size)
        step = max(1, CHUNK_BYTES // one)
        whole: dict[str, Any] = {}
        for start in range(0, len(experts), step):
            chosen = experts[start : start + step]
            here = replace(config, num_local_experts=len(chosen))
            quantized = self.online.quantize(load(here, experts=chosen, device=device))
            for name, tensor in quantized.tensors():
                if name not in whole:
                    shape = (len(experts), *tensor.shape[1:])
                    whole[name] = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
                whole[name][start : start + len(chosen)].copy_(tensor)
        if not whole:
            raise CheckpointError(f"{self.layer.prefix}: experts is empty, expected at least one")
        return MoEWeights(weight_key=self.weight_key, activation_key=self.activation_key, **whole)


class OnlineFormat(CheckpointFormat):
    """Format that quantizes 16-bit experts at load.

    Args:
        online: The quantization to apply.
        stored: Format that reads the 16-bit experts; default :class:`UnquantizedFormat`.
    """

    def __init__(self, online: OnlineQuantization, stored: CheckpointFormat | None = None) -> None:
        self.online = online
        self.stored = stored or UnquantizedFormat()
        self.name = f"{self.stored.name}, quantized at load: {online.name}"  # type: ignore[misc]

    def resolve(self, quantization: Mapping[str, Any], layer: LayerExperts) -> OnlineLayout | str:
        found = self.stored.resolve(quantization, layer)
        if isinstance(found, str):
            return found
        return OnlineLayout(layer, self.online.weight_key, self.online.activation_key, found, self.online)


def detect(
    checkpoint: Checkpoint,
    layer: LayerExperts,
    quantize: str | OnlineQuantization | None = None,
    plugins: Registry | None = None,
) -> Detected:
    """Find the format that reads a layer as stored or quantizes its 16-bit experts at load.

    See also :func:`moe_core.checkpoint.detect.detect_format`.

    Args:
        checkpoint: The open checkpoint.
        layer: The layer's expert tensors.
        quantize: Online quantization or its name; None reads the layer as stored.
        plugins: Registry of schemes and formats; default the installed ones.

    Returns:
        The scheme, the format and the layout.

    Raises:
        CheckpointError: No format reads the layer, or ``quantize`` is given and the experts are not in 16 bits.
        ConfigError: ``quantize`` is unknown.
        SchemeNotInstalledError: The scheme that would read the layer is not installed.
    """
    plugins = plugins or registry()
    if quantize is not None:
        online = plugins.online(quantize)
        adapter = OnlineFormat(online)
        found = adapter.resolve(checkpoint.quantization, layer)
        if isinstance(found, str):
            raise CheckpointError(
                f"{checkpoint.path}: {online.name} quantizes 16-bit experts, but those of {layer.prefix} "
                f"are not read as such: {found}"
            )
        return Detected(online.scheme, adapter, found)
    try:
        return detect_format(checkpoint, layer, plugins)
    except CheckpointError as error:
        names = plugins.online_names()
        if not names or isinstance(UnquantizedFormat().resolve(checkpoint.quantization, layer), str):
            raise
        listed, details = ", ".join(names), error.details
        if len(names) > MOST_NAMES:
            details = f"{details}\nquantize (--quantize): {listed}".lstrip("\n")
            firsts = (
                next((one.name for one in scheme.online if one.name in names), None) for scheme in plugins.schemes()
            )
            listed = f"{', '.join(name for name in firsts if name is not None)} … ({len(names)} in all)"
        reason = error.message
        if checkpoint.quantization.get("quant_method") is None:
            reason = f"{checkpoint.path}: {layer.prefix} is not quantized: {unquantized_reason(layer)}"
        raise CheckpointError(
            f"{reason}; as 16-bit experts they can be quantized at load: quantize (--quantize) is one of {listed}",
            details=details,
        ) from None
