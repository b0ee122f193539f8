"""Online quantization: quantize 16-bit experts while they are loaded.

A scheme registers its online quantizations (:attr:`moe_core.plugins.scheme.SchemeSpec.online`). Users select one by
name in :func:`moe_core.load_layer`, :meth:`moe_core.FusedMoELayer.from_weights` and ``moe run --quantize``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from moe_core._support.autocast import without_autocast
from moe_core.errors import ConfigError, TensorError, check_shape
from moe_core.kernels.ops.quantize_weights import quantize_weights
from moe_core.reference.quantization import Quantized
from moe_core.spec.quant_key import QuantKey
from moe_core.spec.weights import MoEWeights

#: quantizes ``w`` [E, rows, K]; the second argument is the number of stacked matrices
Quantizer = Callable[[Tensor, int], Quantized]


@dataclass(frozen=True)
class OnlineQuantization:
    """One way in which a scheme quantizes 16-bit experts.

    Attributes:
        name: Name that users pass, such as "fp8_per_channel".
        scheme: Scheme whose canonical weights result.
        weight_key: Quantization of the resulting weights.
        activation_key: Quantization of the activations; None means 16-bit activations.
        quantizer: Replaces :func:`moe_core.kernels.ops.quantize_weights.quantize_weights` with ``weight_key``.
    """

    name: str
    scheme: str
    weight_key: QuantKey
    activation_key: QuantKey | None
    quantizer: Quantizer | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.activation_key is not None and self.activation_key.is_static:
            raise ConfigError(
                f"{self.name}: activation_key must be dynamic, since 16-bit checkpoints have no activation scales; got "
                f"{self.activation_key}"
            )

    @without_autocast
    @torch.no_grad()
    def quantize(self, weights: MoEWeights) -> MoEWeights:
        """Quantize canonical 16-bit weights; biases are kept and the input is not modified.

        Args:
            weights: Canonical 16-bit weights.

        Returns:
            Canonical weights of :attr:`scheme`.

        Raises:
            TensorError: If the weights are already quantized, or their shapes contradict each other.
        """
        if weights.weight_key is not None:
            raise TensorError(f"{self.name} quantizes 16-bit weights, but weight_key is {weights.weight_key}")
        check_shape("w13", weights.w13, ("E", "2N or N", "K"))
        check_shape("w2", weights.w2, (weights.w13.shape[0], weights.w13.shape[2], "N"))
        rows, inter = weights.w13.shape[1], weights.w2.shape[2]
        if rows not in (inter, 2 * inter):
            raise TensorError(
                f"w13 has shape {list(weights.w13.shape)}, expected {inter} rows, or {2 * inter} with a gate, "
                f"for w2 of shape {list(weights.w2.shape)}"
            )
        w13 = self._quantize(weights.w13, 1 if rows == inter else 2)
        w2 = self._quantize(weights.w2, 1)
        return replace(
            weights.detached(),
            weight_key=self.weight_key,
            activation_key=self.activation_key,
            w13=w13.values,
            w2=w2.values,
            w13_scale=w13.scale,
            w2_scale=w2.scale,
            w13_scale2=w13.scale2,
            w2_scale2=w2.scale2,
            w13_zero_point=w13.zero_point,
            w2_zero_point=w2.zero_point,
        )

    def _quantize(self, w: Tensor, parts: int) -> Quantized:
        if self.quantizer is not None:
            return self.quantizer(w, parts)
        return quantize_weights(w, self.weight_key, parts=parts)

    def __str__(self) -> str:
        return self.name
