"""Plain torch: any device, and the production path on CPUs.

Codes are multiplied as stored, with exact int32 sums (:mod:`moe_int8.exact`): nothing is dequantized if activations are
int8. With zero points, ``(q - z) w = q w - z sum(w)``; the row sums of the codes are computed once, at conversion.
Scales are applied to the products, in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from moe_core import (
    GATED,
    NON_GATED,
    Claims,
    FusedMoEActivationFormat,
    FusedMoEQuantDesc,
    GroupShape,
    KernelWeights,
    KeyPattern,
    MoEWeights,
    TensorError,
    TorchExperts,
    any_device,
    apply_moe_activation,
    kInt4W4A8StaticChannelSym,
    kInt4W4A8StaticGroup128Sym,
    kInt8DynamicTensorSym,
    kInt8DynamicTokenAsym,
    kInt8DynamicTokenSym,
    kInt8StaticChannelSym,
    kInt8StaticTensorAsym,
    kInt8StaticTensorSym,
)
from moe_core.api.experts import Adapters, expert_slices, integer_row_scales, of_expert, quantize_tensor
from torch import Tensor

from moe_int8.exact import scaled_product

_INT8_ACTIVATIONS = (
    kInt8DynamicTokenSym,
    kInt8DynamicTokenAsym,
    kInt8StaticTensorSym,
    kInt8StaticTensorAsym,
    kInt8DynamicTensorSym,
    None,
)
_INT4_GROUPS = KeyPattern(
    kInt4W4A8StaticGroup128Sym,
    (GroupShape(1, 128), GroupShape(1, 64), GroupShape(1, 32)),
    (torch.bfloat16, torch.float32),
)
#: names in ``KernelWeights.extra``
_SUMS = {"w13": "w13_code_sums", "w2": "w2_code_sums"}


@dataclass(frozen=True, eq=False)
class Codes:
    """Quantized activations ``(values - zero_point) * scale``.

    Attributes:
        values: int8 [R, K].
        scale: float32 [R, 1].
        zero_point: int32 [R, 1], or None.
    """

    values: Tensor
    scale: Tensor
    zero_point: Tensor | None

    @staticmethod
    def of(x: Tensor, desc: FusedMoEQuantDesc) -> Codes:
        """Quantize activations.

        Args:
            x: float32 [R, K].
            desc: how to quantize; if static, the scales of one expert.

        Returns:
            The codes with scales and zero points per row.

        Raises:
            TensorError: ``desc`` describes 16-bit activations.
        """
        if desc.key is None:
            raise TensorError("activation_key is None: 16-bit activations are not quantized")
        found = quantize_tensor(x, desc.key, scale=desc.scale, zero_point=desc.zero_point)

        zero_point = found.zero_point
        if zero_point is not None:
            zero_point = zero_point.reshape(-1, 1).expand(len(x), 1).int()
        return Codes(found.values, integer_row_scales(found.scale, x, desc.key), zero_point)

    def __getitem__(self, rows: Tensor | slice) -> Codes:
        zero_point = self.zero_point
        return Codes(self.values[rows], self.scale[rows], None if zero_point is None else zero_point[rows])


class TorchInt8Experts(TorchExperts):
    """int8 weights with int8 or 16-bit activations, int4 weights with int8 activations."""

    claims = Claims(
        devices=(any_device(),),
        keys=(
            *((kInt8StaticChannelSym, activation) for activation in _INT8_ACTIVATIONS),
            *(
                (weight, activation)
                for weight in (kInt4W4A8StaticChannelSym, _INT4_GROUPS)
                for activation in (kInt8DynamicTokenSym, kInt8DynamicTokenAsym)
            ),
        ),
        activations=GATED | NON_GATED,
        dtypes=frozenset({torch.bfloat16, torch.float16, torch.float32}),
        bias=True,
        expert_map=True,
        apply_router_weight_on_input=True,
        lora=True,
        batch_invariant=True,
        formats=frozenset({FusedMoEActivationFormat.STANDARD, FusedMoEActivationFormat.BATCHED}),
        whole_groups=True,
        cuda_graph=False,
        takes_quantized=True,
        verified_on=("cpu", "NVIDIA H100 (sm90)", "NVIDIA H200 (sm90)"),
        notes="reads token counts on the host: no CUDA graphs",
    )

    def convert(self, weights: MoEWeights) -> KernelWeights:
        converted = super().convert(weights)
        if weights.activation_key is None or weights.activation_key.symmetric:
            return converted
        sums = {
            _SUMS[name]: _code_sums(getattr(weights, name), getattr(weights, f"{name}_scale")) for name in ("w13", "w2")
        }
        return replace(converted, extra=sums)

    def results(
        self,
        x: Tensor,
        rows: Tensor,
        counts: list[int],
        weights: KernelWeights,
        adapters: Adapters | None,
        scale: Tensor | None = None,
    ) -> Iterator[tuple[slice, Tensor]]:
        quant = weights.quant_config
        key = quant.a1.key
        if key is None:
            yield from super().results(x, rows, counts, weights, adapters, scale)
            return

        def hidden(expert: int, place: slice, codes: Codes | None) -> Tensor:
            """Compute the activated values [R, N] of one expert's rows."""
            own = Codes.of(x[rows[place]], of_expert(quant.a1, expert)) if codes is None else codes[rows[place]]
            z = _product(own, weights, "w13", expert)
            if quant.w1_bias is not None:
                z += quant.w1_bias[expert].float()
            if adapters is not None:
                z += adapters.product("w13", expert, x[rows[place]], place)
            return apply_moe_activation(self.config.activation, z, self.config.activation_params)

        def result(expert: int, place: slice, h: Tensor, codes: Codes) -> Tensor:
            """Compute the unweighted results [R, K] of one expert's hidden values."""
            y = _product(codes, weights, "w2", expert)
            if quant.w2_bias is not None:
                y += quant.w2_bias[expert].float()
            if adapters is not None:
                y += adapters.product("w2", expert, h, place)
            return y

        groups = expert_slices(counts)
        if key.is_static:
            for expert, place in groups:
                h = hidden(expert, place, None)
                yield place, result(expert, place, h, Codes.of(h, of_expert(quant.a2, expert)))
        elif groups:
            first = Codes.of(x, quant.a1) if scale is None else Codes(x, scale, None)
            # compute all experts' hidden values first, to quantize them in one call
            shape = (len(rows), self.config.intermediate_size)
            together = torch.empty(shape, dtype=torch.float32, device=x.device)
            for expert, place in groups:
                together[place] = hidden(expert, place, first)
            second = Codes.of(together, quant.a2)
            for expert, place in groups:
                yield place, result(expert, place, together[place], second[place])


def _product(x: Codes, weights: KernelWeights, name: str, expert: int) -> Tensor:
    """Multiply activations by one expert's w13 or w2; float32 [R, rows]."""
    first = name == "w13"
    w = (weights.w13 if first else weights.w2)[expert]
    scale = weights.quant_config.w1_scale if first else weights.quant_config.w2_scale
    if scale is None:
        raise TensorError(f"{name}_scale is missing")
    sums = weights.extra[_SUMS[name]][expert] if x.zero_point is not None else None
    y = scaled_product(x.values, w, scale[expert].float(), zero_point=x.zero_point, code_sums=sums)
    return y.mul_(x.scale)


def _code_sums(weights: Tensor, scale: Tensor | None) -> Tensor:
    """Sum the codes of ``weights`` [E, rows, K] that share a scale: int32 [E, rows, groups]."""
    if scale is None:
        raise TensorError("scale is missing, but the weights are quantized")
    experts, rows, groups = scale.shape
    return weights.reshape(experts, rows, groups, -1).sum(dim=3, dtype=torch.int32)
