"""Conversion of SGLang's tensors to canonical weights that share their memory.

Only small tensors with another layout are copied.
"""

from __future__ import annotations

from typing import Any

from moe_core import MoEWeights, TensorError
from moe_core.api.engines import unpack_row_pairs
from torch import Tensor

from moe_sglang.kinds import Kind


def canonical(info: Any, kind: Kind, parts: int) -> MoEWeights:
    """Return canonical weights of a ``TritonMoeQuantInfo``.

    Codes and block, channel or group scales are SGLang's tensors themselves.

    Args:
        info: SGLang's description of the weights.
        kind: scheme and keys of the experts.
        parts: 2 if w13 holds gate and up, else 1.

    Raises:
        TensorError: a tensor has a shape that none of SGLang's kernels reads.
    """
    per_tensor = kind.weight_key.group_shape.is_per_tensor
    packed = kind.weight_key.packing is not None
    experts = info.w13_weight.shape[0]
    tensors: dict[str, Tensor | None] = {
        "w13": info.w13_weight,
        "w2": info.w2_weight,
        "w13_scale": _per_part("w13_scale", info.w13_scale, experts, parts) if per_tensor else info.w13_scale,
        "w2_scale": _per_part("w2_scale", info.w2_scale, experts, 1) if per_tensor else info.w2_scale,
        "w13_bias": info.b13,
        "w2_bias": info.b2,
    }
    if not kind.weight_key.symmetric:
        tensors["w13_zero_point"] = unpack_row_pairs(info.w13_zp) if packed else info.w13_zp
        tensors["w2_zero_point"] = unpack_row_pairs(info.w2_zp) if packed else info.w2_zp
    if kind.activation_key is not None and kind.activation_key.is_static:
        tensors["w13_input_scale"] = _per_expert("a13_scale", info.a13_scale, experts)
        tensors["w2_input_scale"] = _per_expert("a2_scale", info.a2_scale, experts)
    given: dict[str, Any] = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    keys: dict[str, Any] = {"weight_key": kind.weight_key, "activation_key": kind.activation_key}
    # SGLang keeps its tensors and has left no memory for others
    return MoEWeights(**keys, **given, shared=True).detached()


def _per_part(name: str, scale: Tensor, experts: int, parts: int) -> Tensor:
    """Expand one scale per expert, [E] or [E, 1], or per part, to [E, parts]."""
    scale = scale.reshape(scale.shape[0], -1) if scale.dim() > 1 else scale[:, None]
    if tuple(scale.shape) not in ((experts, 1), (experts, parts)):
        raise TensorError(f"{name} has shape {list(scale.shape)}, expected one scale for each of {experts} experts")
    return scale.expand(experts, parts)


def _per_expert(name: str, scale: Tensor | None, experts: int) -> Tensor:
    """Expand one static scale, or one per expert, to [E]."""
    if scale is None or scale.numel() not in (1, experts):
        found = None if scale is None else list(scale.shape)
        raise TensorError(f"{name} has shape {found}, expected one scale, or one for each of {experts} experts")
    return scale.reshape(-1).float().expand(experts)
