"""Canonical weights (made by format adapters) and kernel weights (read by backends)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moe_core.errors import ConfigError, TensorError, check_dtype, check_instance, check_shape, check_sign, check_tensor
from moe_core.spec.config import FusedMoEConfig
from moe_core.spec.device import as_torch_device
from moe_core.spec.numerics import NumberKind, QuantDtype, is_e8m0
from moe_core.spec.quant_config import FusedMoEQuantConfig
from moe_core.spec.quant_key import QuantKey, as_quant_key, check_one_level
from moe_core.spec.tensor_record import TensorRecord


def scale_shape(key: QuantKey, experts: int, rows: int, cols: int, parts: int = 1) -> tuple[int, ...]:
    """Compute the shape of the canonical scale of ``[experts, rows, cols]`` weights.

    ``parts`` stacked matrices (2 for gate and up) have ``rows / parts`` rows each. Every part has separate scale
    rows, so a partial last block of the gate is not shared with the up rows.

    Args:
        key: Quantization key of the weights.
        experts: Number of experts E.
        rows: Number of rows of all parts together.
        cols: Number of columns.
        parts: Number of stacked matrices.

    Returns:
        ``[E, parts]`` for per-tensor scales, else ``[E, parts * grid_rows, grid_cols]``.

    Raises:
        ConfigError: ``key`` has two levels of scales.
    """
    check_instance("key", key, QuantKey)
    check_one_level(key)
    for name, value in (("experts", experts), ("rows", rows), ("cols", cols), ("parts", parts)):
        check_instance(name, value, int, torch.SymInt)
    if parts < 1:
        raise ConfigError(f"parts is {parts}, expected 1 or 2 stacked matrices")
    if key.group_shape.is_per_tensor:
        return (experts, parts)
    grid_rows, grid_cols = key.group_shape.grid(rows // parts, cols)
    return (experts, parts * grid_rows, grid_cols)


def with_groups_of(scale: Tensor, expected: tuple[int, ...], key: QuantKey) -> tuple[int, ...]:
    """Adapt the expected scale shape of a permuted key to the number of groups in ``scale``.

    With permuted keys ``g_idx`` gives the group of every column, and a shard of a row can refer to groups of the
    whole row. Keys with one scale per row are exempt: each of their rows has one group.

    Args:
        scale: The scale tensor.
        expected: Scale shape that follows from the size of the weights.
        key: Quantization key of the weights.

    Returns:
        ``expected``, with the number of groups of ``scale`` as last dimension for permuted keys with groups.
    """
    if not key.permuted or key.group_size == -1 or scale.dim() != len(expected) or not scale.shape[-1]:
        return expected
    return (*expected[:-1], scale.shape[-1])


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class MoEWeights(TensorRecord):
    """Canonical weights of the local experts of one layer.

    Packed dtypes divide the last dimension of w13 and w2 by ``weight_key.packing.values_per_word``.

    Attributes:
        weight_key: Quantization key of the weights, or its name; None: 16-bit weights without scales.
        activation_key: Quantization key of the activations, or its name; None: 16-bit activations.
        w13: [E, 2N, K]: gate rows, then up rows; [E, N, K] without a gate.
        w2: [E, K, N].
        w13_scale: Scale of w13, see :func:`scale_shape`.
        w2_scale: Scale of w2, see :func:`scale_shape`.
        w13_zero_point: Zero points in the shape of ``w13_scale``.
        w2_zero_point: Zero points in the shape of ``w2_scale``.
        w13_input_scale: [E] float32, static activation scales.
        w2_input_scale: [E] float32, static activation scales.
        w13_input_zero_point: [E] int32, zero points of ``w13_input_scale``, for keys that have them.
        w2_input_zero_point: [E] int32, zero points of ``w2_input_scale``, for keys that have them.
        w13_bias: [E, 2N].
        w2_bias: [E, K].
        w13_g_idx: [E, K] int32, the group of each column, for permuted keys. A group may have any number of columns.
            There may be more groups than these columns would fill: a shard of a row refers to the groups of the whole
            row.
        w2_g_idx: [E, N] int32, as ``w13_g_idx``.
        w13_pre_scale: [E, K] float32, factors of the columns of x, for pre-scaled keys.
        w2_pre_scale: [E, N] float32, factors of the activated values, for pre-scaled keys.
        shared: Whether someone else also holds the tensors, e.g. a model its parameters. Backends that can read them
            as they are then do so even if another layout would be faster, because a second copy would double the
            memory.
    """

    weight_key: QuantKey | None
    activation_key: QuantKey | None
    w13: Tensor
    w2: Tensor
    w13_scale: Tensor | None = None
    w2_scale: Tensor | None = None
    w13_zero_point: Tensor | None = None
    w2_zero_point: Tensor | None = None
    w13_input_scale: Tensor | None = None
    w2_input_scale: Tensor | None = None
    w13_input_zero_point: Tensor | None = None
    w2_input_zero_point: Tensor | None = None
    w13_bias: Tensor | None = None
    w2_bias: Tensor | None = None
    w13_g_idx: Tensor | None = None
    w2_g_idx: Tensor | None = None
    w13_pre_scale: Tensor | None = None
    w2_pre_scale: Tensor | None = None
    shared: bool = False

    if TYPE_CHECKING:  # Declares the fields, of which keys accept names.

        def __init__(
            self,
            *,
            weight_key: QuantKey | str | None,
            activation_key: QuantKey | str | None,
            w13: Tensor,
            w2: Tensor,
            w13_scale: Tensor | None = ...,
            w2_scale: Tensor | None = ...,
            w13_zero_point: Tensor | None = ...,
            w2_zero_point: Tensor | None = ...,
            w13_input_scale: Tensor | None = ...,
            w2_input_scale: Tensor | None = ...,
            w13_input_zero_point: Tensor | None = ...,
            w2_input_zero_point: Tensor | None = ...,
            w13_bias: Tensor | None = ...,
            w2_bias: Tensor | None = ...,
            w13_g_idx: Tensor | None = ...,
            w2_g_idx: Tensor | None = ...,
            w13_pre_scale: Tensor | None = ...,
            w2_pre_scale: Tensor | None = ...,
            shared: bool = ...,
        ) -> None: ...

    def __post_init__(self) -> None:
        for name in ("weight_key", "activation_key"):
            object.__setattr__(self, name, as_quant_key(getattr(self, name), name))

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate over the tensors that are set, as ``(name, tensor)``."""
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, Tensor):
                yield item.name, value

    @property
    def nbytes(self) -> int:
        """Total size of the tensors in bytes."""
        return sum(t.numel() * t.element_size() for _, t in self.tensors())

    @property
    def weight_scales(self) -> tuple[Tensor, Tensor]:
        """``(w13_scale, w2_scale)``.

        Raises:
            TensorError: One of the two is missing.
        """
        if self.w13_scale is None or self.w2_scale is None:
            raise TensorError(f"w13_scale and w2_scale are missing: the weights are {self.weight_key}")
        return self.w13_scale, self.w2_scale

    def to(self, device: torch.device | str) -> MoEWeights:
        """Copy the weights to another device.

        Args:
            device: The target device.

        Returns:
            The weights on ``device``.

        Raises:
            TensorError: A tensor is on the meta device and has no values to copy.
        """
        where = as_torch_device(device)
        for name, tensor in self.tensors():
            if tensor.is_meta and where.type != "meta":
                raise TensorError(f"{name} is on the meta device: it has no values to bring to {where}")
        moved: dict[str, Any] = {name: tensor.to(where) for name, tensor in self.tensors()}
        return replace(self, **moved)

    def detached(self) -> MoEWeights:
        """Return the weights as plain tensors without gradients, in the same memory.

        Assigning to a parameter's ``data`` later does not change them.
        """
        moved: dict[str, Any] = {
            name: tensor.detach()
            for name, tensor in self.tensors()
            if tensor.requires_grad or isinstance(tensor, torch.nn.Parameter)
        }
        return replace(self, **moved) if moved else self

    def row_major(self) -> MoEWeights:
        """Return the weights with contiguous last dimensions, which backends rely on.

        Only tensors that are not contiguous there are copied.
        """
        moved: dict[str, Any] = {
            name: tensor.contiguous() for name, tensor in self.tensors() if tensor.dim() and tensor.stride(-1) != 1
        }
        return replace(self, **moved) if moved else self

    def validate(self, config: FusedMoEConfig, *, values: bool = False) -> None:
        """Check that every tensor fits ``config`` and the keys.

        The check includes column groups and zero points that are out of range. If a tensor of that kind is on a
        device, the check synchronizes with the device.

        Args:
            config: Configuration of the layer.
            values: Also check values, which reads every byte and synchronizes. Scales must not be NaN or Inf; nor
                negative, except those of integer codes; nor 0 where one scale covers a whole matrix or is a divisor.
                Biases must not be NaN or Inf, and codes not NaN. 4-bit codes stored in bytes must be in range.

        Raises:
            TensorError: A tensor does not fit.
        """
        check_instance("config", config, FusedMoEConfig)
        experts, hidden, inter = config.local_experts, config.hidden_size, config.intermediate_size
        parts = 2 if config.is_gated else 1
        per_word = self.weight_key.packing.values_per_word if self.weight_key and self.weight_key.packing else 1
        for name, rows, cols, stacked in (("w13", parts * inter, hidden, parts), ("w2", hidden, inter, 1)):
            weight: Tensor = getattr(self, name)
            check_shape(name, weight, (experts, rows, -(-cols // per_word)))
            check_dtype(name, weight, storage_dtypes(self.weight_key))
            scale, zero_point = getattr(self, f"{name}_scale"), getattr(self, f"{name}_zero_point")
            if self.weight_key is None:
                if scale is not None:
                    raise TensorError(f"{name}_scale is given, but the weights are not quantized")
            else:
                expected = scale_shape(self.weight_key, experts, rows, cols, stacked)
                if scale is None:
                    raise TensorError(f"{name}_scale is missing, expected {list(expected)} for {self.weight_key}")
                check_tensor(f"{name}_scale", scale)
                expected = with_groups_of(scale, expected, self.weight_key)
                check_shape(f"{name}_scale", scale, expected)
                check_dtype(f"{name}_scale", scale, (self.weight_key.scale.dtype,))
                if (zero_point is None) != self.weight_key.symmetric:
                    state = "missing" if zero_point is None else "given"
                    raise TensorError(f"{name}_zero_point is {state}, the weight key is {self.weight_key}")
                if zero_point is not None:
                    check_shape(f"{name}_zero_point", zero_point, expected)
                    check_dtype(f"{name}_zero_point", zero_point, (torch.uint8, torch.int32))
            self._validate_extras(name, config, rows, cols)
        for name, tensor in self.tensors():
            check_sign(name, tensor)
        places = {str(tensor.device): name for name, tensor in self.tensors()}
        if len(places) > 1:
            found = ", ".join(f"{name} on {place}" for place, name in sorted(places.items()))
            raise TensorError(f"the weights of one layer are on several devices: {found}")
        self._check_integers()
        if values:
            # Quantizers that map a group's largest weight to the lowest code write scales of either sign. Pre-scales
            # are factors of inputs, not scales of codes, and may be any finite number.
            key = self.weight_key
            integers = key is not None and key.dtype.kind in (NumberKind.INT, NumberKind.UINT)
            signed = {"w13_scale", "w2_scale"} if integers else set()
            signed |= {"w13_pre_scale", "w2_pre_scale"}
            for name, tensor in self.tensors():
                scale = name.endswith("_scale") and name not in signed
                check_values(name, tensor, scale=scale, positive=name in self._never_zero())
            self._check_codes()

    def _never_zero(self) -> set[str]:
        """Names of scales that must not be 0.

        A zero scale of a whole matrix would lose every weight; a static activation scale is a divisor.
        """
        names = {"w13_input_scale", "w2_input_scale"}
        if self.weight_key is not None and self.weight_key.group_shape.is_per_tensor:
            names |= {"w13_scale", "w2_scale"}
        return names

    def _check_codes(self) -> None:
        """Check integer codes that are stored in a wider type."""
        key = self.weight_key
        if key is not None and key.packing is None and key.dtype.kind is NumberKind.INT and key.dtype.bits < 8:
            for name in ("w13", "w2"):
                check_range(name, getattr(self, name), key.dtype)

    def _check_integers(self) -> None:
        """Check integers that kernels use unchecked: column groups and zero points."""
        key, activation = self.weight_key, self.activation_key
        for name in ("w13", "w2"):
            g_idx, scale = getattr(self, f"{name}_g_idx"), getattr(self, f"{name}_scale")
            if g_idx is not None and scale is not None:
                groups = scale.shape[-1]
                check_integers(f"{name}_g_idx", g_idx, 0, groups - 1, f"{name}_scale has {groups} groups")
            zero_point: Tensor | None = getattr(self, f"{name}_zero_point")
            if zero_point is not None and key is not None:
                # The bound is one above the largest code because some tools store zero points minus one.
                low, high = (int(bound) + key.dtype.offset for bound in (key.dtype.min_value, key.dtype.max_value))
                check_integers(f"{name}_zero_point", zero_point, low, high + 1, f"zero points of {key.dtype.name}")
            zero_point = getattr(self, f"{name}_input_zero_point")
            if zero_point is not None and activation is not None:
                check_range(f"{name}_input_zero_point", zero_point, activation.dtype)

    def _validate_extras(self, name: str, config: FusedMoEConfig, rows: int, cols: int) -> None:
        """Check bias, static activation scale, column groups and pre-scale of one matrix."""
        experts, key, activation = config.local_experts, self.weight_key, self.activation_key
        wanted = {
            "bias": (config.has_bias, f"config.has_bias={config.has_bias}", (experts, rows)),
            "input_scale": (
                activation is not None and activation.is_static,
                f"the activation key is {activation or '16-bit'}",
                (experts,),
            ),
            "input_zero_point": (
                activation is not None and activation.is_static and not activation.symmetric,
                f"the activation key is {activation or '16-bit'}",
                (experts,),
            ),
            "g_idx": (key is not None and key.permuted, f"the weight key is {key or '16-bit'}", (experts, cols)),
            "pre_scale": (key is not None and key.pre_scaled, f"the weight key is {key or '16-bit'}", (experts, cols)),
        }
        for suffix, (needed, because, shape) in wanted.items():
            tensor: Tensor | None = getattr(self, f"{name}_{suffix}")
            if (tensor is not None) != needed:
                raise TensorError(f"{name}_{suffix} is {'missing' if needed else 'given'}, but {because}")
            if tensor is not None:
                check_shape(f"{name}_{suffix}", tensor, shape)
                dtypes: dict[str, tuple[torch.dtype, ...]] = {
                    "g_idx": (torch.int32,),
                    "pre_scale": (torch.float32,),
                    "input_scale": (torch.float32,),
                    "input_zero_point": (torch.int32,),
                    "bias": (torch.float32, torch.bfloat16, torch.float16),
                }
                check_dtype(f"{name}_{suffix}", tensor, dtypes[suffix])


def storage_dtypes(key: QuantKey | None) -> tuple[torch.dtype, ...]:
    """List the tensor dtypes that can hold weights of ``key``.

    Args:
        key: Quantization key; None: unquantized weights.

    Returns:
        The dtypes.

    Raises:
        ConfigError: ``key`` has two levels of scales.
    """
    check_one_level(key)
    if key is None:
        return (torch.bfloat16, torch.float16, torch.float32)
    if key.packing is not None:
        return (key.packing.storage,)
    if key.dtype.kind is NumberKind.FLOAT:
        return {"e4m3": (torch.float8_e4m3fn,), "e5m2": (torch.float8_e5m2,)}[key.dtype.name]
    return (torch.int8,) if key.dtype.kind is NumberKind.INT else (torch.uint8,)


def check_range(name: str, tensor: Tensor, dtype: QuantDtype) -> None:
    """Raise TensorError for integers that are not valid codes of ``dtype``.

    Args:
        name: Name of the tensor, for the message.
        tensor: Integer tensor.
        dtype: Element type whose range is valid.

    Raises:
        TensorError: A value is out of range.
    """
    check_integers(name, tensor, int(dtype.min_value), int(dtype.max_value), f"codes of {dtype.name}")


def check_integers(name: str, tensor: Tensor, low: int, high: int, what: str) -> None:
    """Raise TensorError for integers outside ``low`` to ``high``.

    Args:
        name: Name of the tensor, for the message.
        tensor: Integer tensor.
        low: Smallest valid value.
        high: Largest valid value.
        what: Description of the valid values, for the message.

    Raises:
        TensorError: A value is out of range.
    """
    # A bound outside the range of the tensor's dtype would wrap around.
    holds = torch.iinfo(tensor.dtype)
    bad = (tensor < max(low, holds.min)) | (tensor > min(high, holds.max))
    if bool(bad.any()):
        at = [int(i) for i in bad.nonzero()[0]]
        raise TensorError(f"{name} is {int(tensor[tuple(at)])} at {at}, expected {low} to {high}: {what}")


def check_values(name: str, tensor: Tensor, *, scale: bool, positive: bool = False) -> None:
    """Raise TensorError for NaN or Inf in ``tensor``.

    Args:
        name: Name of the tensor, for the message.
        tensor: The tensor to check; integer tensors other than e8m0 scales pass.
        scale: The tensor is a scale: also reject negative values.
        positive: Also reject zero.

    Raises:
        TensorError: A value is invalid.
    """
    if tensor.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        codes = tensor.view(torch.uint8) & 0x7F
        bad = codes == 0x7F if tensor.dtype is torch.float8_e4m3fn else codes >= 0x7C
        what = "NaN" if tensor.dtype is torch.float8_e4m3fn else "NaN or Inf"
    elif is_e8m0(tensor.dtype) and scale:
        bad, what = tensor.view(torch.uint8) == 255, "NaN (e8m0 code 255)"
    elif tensor.dtype.is_floating_point:
        bad, what = ~torch.isfinite(tensor), "NaN or Inf"
        if scale:
            bad, what = bad | (tensor < 0), "NaN, Inf or negative"
        if positive:
            bad, what = bad | (tensor == 0), "NaN, Inf, negative or zero"
    else:
        return
    count = int(bad.sum())
    if count:
        where = [int(i) for i in bad.nonzero()[0]]
        raise TensorError(f"{name} has {count} {what} value{'s' * (count > 1)} of {tensor.numel()}, first at {where}")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class KernelWeights(TensorRecord):
    """Weights in the layout of one backend, with the quant config that describes them.

    Attributes:
        w13: First matrix of each expert, in the backend's layout.
        w2: Second matrix of each expert, in the backend's layout.
        quant_config: Scales, zero points and biases.
        extra: Other tensors that the backend keeps per layer (permutations, locks …).
        arrangement: Per matrix ("w13", "w2"), a description of whatever determines tensor sizes in addition to the
            layer and its keys. Matrices without such a dependency have no entry.
    """

    w13: Tensor
    w2: Tensor
    quant_config: FusedMoEQuantConfig
    extra: Mapping[str, Tensor] = field(default_factory=dict)
    arrangement: Mapping[str, str] = field(default_factory=dict)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate over all tensors as ``(name, tensor)``."""
        yield "w13", self.w13
        yield "w2", self.w2
        yield from self.quant_config.tensors()
        yield from self.extra.items()

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.w13.device

    @property
    def nbytes(self) -> int:
        """Total size of the tensors in bytes."""
        return sum(t.numel() * t.element_size() for _, t in self.tensors())

    def apart_from(self, weights: MoEWeights) -> KernelWeights:
        """Clone the tensors that share storage with ``weights``; keep the others.

        Args:
            weights: Canonical weights whose memory must not be shared.

        Returns:
            Kernel weights that share no storage with ``weights``.
        """
        shared = {tensor.untyped_storage().data_ptr() for _, tensor in weights.tensors()}

        def own(tensor: Tensor) -> Tensor:
            return tensor.clone() if tensor.untyped_storage().data_ptr() in shared else tensor

        return KernelWeights(
            w13=own(self.w13),
            w2=own(self.w2),
            quant_config=self.quant_config.map(own),
            extra={name: own(tensor) for name, tensor in self.extra.items()},
            arrangement=self.arrangement,
        )

    def copy_(self, other: KernelWeights) -> None:
        """Overwrite every tensor in place, so that captured CUDA graphs see the new weights.

        The copy is all or nothing: errors are raised before anything is written.

        Args:
            other: The new weights.

        Raises:
            TensorError: Arrangements, names, shapes or dtypes differ, or a tensor cannot be read or written.
        """
        check_instance("other", other, KernelWeights)
        for name in sorted({*self.arrangement, *other.arrangement}):
            expected, found = (kept.arrangement.get(name, "columns as they come") for kept in (self, other))
            if found != expected:
                raise TensorError(
                    f"{name} of the new weights has {found}, expected {expected}: the layer's memory is for these; "
                    "make a new layer of the weights"
                )
        mine, theirs = dict(self.tensors()), dict(other.tensors())
        if mine.keys() != theirs.keys():
            raise TensorError(f"new weights hold {sorted(theirs)}, the layer holds {sorted(mine)}")
        for name, tensor in mine.items():
            check_shape(name, theirs[name], tuple(tensor.shape))
            check_dtype(name, theirs[name], (tensor.dtype,))
            check_writable(name, tensor)
            if theirs[name].is_meta:
                raise TensorError(f"{name} is on the meta device: it has no values to copy")
        # The transfer to the device is the last step that can fail, so it is done before the first write.
        here = {name: theirs[name].to(tensor.device) for name, tensor in mine.items()}
        with torch.no_grad():
            for name, tensor in mine.items():
                tensor.copy_(here[name])


class TensorPlaces:
    """Snapshot of the storage addresses of tensors.

    Anything that holds their addresses, or views of them, is valid only while the tensors are :meth:`unmoved`. An
    engine may free the memory of a layer and later allocate other memory for the same tensors.

    Args:
        tensors: The tensors to track. Only the tensors are kept, not their memory.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.tensors = list(tensors)
        # New memory at the same address may be contiguous where the old memory was not, e.g. that of an expanded
        # scale.
        self.strided = [tensor for tensor in self.tensors if not tensor.is_contiguous()]
        self.known = [*map(Tensor.data_ptr, self.tensors), *map(Tensor.stride, self.strided)]

    def unmoved(self) -> bool:
        """Whether all tensors are still stored where they were."""
        return [*map(Tensor.data_ptr, self.tensors), *map(Tensor.stride, self.strided)] == self.known


def check_writable(name: str, tensor: Tensor) -> None:
    """Raise TensorError for a layer tensor that cannot be written in place.

    Args:
        name: Name of the tensor, for the message.
        tensor: The tensor to check.

    Raises:
        TensorError: ``tensor`` is an inference tensor outside of inference mode, or several of its elements share
            memory.
    """
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise TensorError(
            f"{name} was made in torch.inference_mode() and can be overwritten there only: reload within it, "
            "or load layers under torch.no_grad()"
        )
    if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        raise TensorError(f"{name} has strides {tensor.stride()}: several of its elements share memory")
