"""Canonical weights (made by format adapters) and kernel weights (read by backends)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moe_core.errors import TensorError, check_dtype, check_instance, check_shape, check_sign, check_tensor
from moe_core.spec.config import FusedMoEConfig
from moe_core.spec.device import as_torch_device
from moe_core.spec.numerics import NumberKind, QuantDtype, is_e8m0
from moe_core.spec.quant_config import FusedMoEQuantConfig, make_quant_config
from moe_core.spec.quant_key import QuantKey, as_quant_key
from moe_core.spec.roles import CODES, ROLES, Role, matrices
from moe_core.spec.tensor_record import TensorRecord


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
        w13_scale2: Second scale of w13, for keys with two levels of scales: ``[E, 2]`` float32 if per tensor.
        w2_scale2: Second scale of w2: ``[E, 1]`` float32 if per tensor.
        w13_zero_point: Zero points in the shape of ``w13_scale``.
        w2_zero_point: Zero points in the shape of ``w2_scale``.
        w13_input_scale: [E] float32, static activation scales.
        w2_input_scale: [E] float32, static activation scales.
        w13_input_scale2: [E] float32, static second activation scales, for keys with two levels of scales.
        w2_input_scale2: [E] float32, static second activation scales, for keys with two levels of scales.
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
    w13_scale2: Tensor | None = None
    w2_scale2: Tensor | None = None
    w13_zero_point: Tensor | None = None
    w2_zero_point: Tensor | None = None
    w13_input_scale: Tensor | None = None
    w2_input_scale: Tensor | None = None
    w13_input_scale2: Tensor | None = None
    w2_input_scale2: Tensor | None = None
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
            w13_scale2: Tensor | None = ...,
            w2_scale2: Tensor | None = ...,
            w13_zero_point: Tensor | None = ...,
            w2_zero_point: Tensor | None = ...,
            w13_input_scale: Tensor | None = ...,
            w2_input_scale: Tensor | None = ...,
            w13_input_scale2: Tensor | None = ...,
            w2_input_scale2: Tensor | None = ...,
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

    def of(self, name: str) -> dict[str, Tensor]:
        """Return the tensors of one matrix.

        Args:
            name: "w13" or "w2".

        Returns:
            The tensors that are set, by the name of their role (:mod:`moe_core.spec.roles`); "" is the codes.
        """
        found = {role.name: getattr(self, f"{name}_{role.name}".rstrip("_")) for role in ROLES}
        return {role: tensor for role, tensor in found.items() if tensor is not None}

    def quant_config(self, **converted: Tensor | None) -> FusedMoEQuantConfig:
        """Make the quant config of these weights.

        Args:
            converted: Tensors in a backend's layout in place of these weights' own, by the argument names of
                :func:`moe_core.make_quant_config`; None for those that the backend stores elsewhere.

        Returns:
            The config.

        Raises:
            ConfigError: A tensor that the weight key requires is missing, or a tensor is given that it does not have.
            TensorError: A tensor that the activation key requires is missing.
        """
        own: dict[str, Any] = {
            role.argument(number): self._operand(name, role)
            for number, name in ((1, "w13"), (2, "w2"))
            for role in ROLES[1:]
        }
        return make_quant_config(weight_key=self.weight_key, activation_key=self.activation_key, **(own | converted))

    def _operand(self, name: str, role: Role) -> Tensor | None:
        """Return a matrix's tensor of a role; those of activations in the dtype and layout that kernels read."""
        tensor = self.of(name).get(role.name)
        if not role.of_activations:
            return tensor
        if tensor is None:
            if role.needed(self.activation_key):
                raise TensorError(f"{name}_{role.name} is missing: the activations are {self.activation_key}")
            return None
        return tensor.to(role.dtypes(self.activation_key)[0]).contiguous()

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
                raise TensorError(f"{name} is on the meta device: it has no values to move to {where}")
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
        for matrix in matrices(config, self.weight_key, self.activation_key):
            scale: Tensor | None = getattr(self, f"{matrix.name}_scale")
            for role in ROLES:
                name = matrix.field(role)
                tensor: Any = getattr(self, name)
                if role is not CODES and (tensor is not None) != matrix.has(role):
                    if tensor is not None:
                        raise TensorError(f"{name} is given, but {matrix.reason(role)}")
                    shape = list(matrix.shape(role))
                    raise TensorError(f"{name} is missing, but {matrix.reason(role)}; expected {shape}")
                if role is not CODES and tensor is None:
                    continue
                check_tensor(name, tensor)
                expected = matrix.shape(role)
                if role.per_group and scale is not None and self.weight_key is not None:
                    expected = with_groups_of(scale, expected, self.weight_key)
                check_shape(name, tensor, expected)
                check_dtype(name, tensor, matrix.dtypes(role))
        for name, tensor in self.tensors():
            check_sign(name, tensor)
        places = {str(tensor.device): name for name, tensor in self.tensors()}
        if len(places) > 1:
            found = ", ".join(f"{name} on {place}" for place, name in sorted(places.items()))
            raise TensorError(f"the weights of one layer are on several devices: {found}")
        self._check_integers()
        if values:
            self._check_values()

    def _check_values(self) -> None:
        """Check floats, scales and integer codes that are stored in a wider type."""
        key = self.weight_key
        # Quantizers that map a group's largest weight to the lowest code write scales of either sign. Pre-scales are
        # factors of inputs, not scales of codes, and may be any finite number.
        signed = {"pre_scale"}
        if key is not None and key.dtype.kind is not NumberKind.FLOAT:
            signed.add("scale")
        # A zero scale of a whole matrix would lose every weight; a static activation scale is a divisor.
        positive = {"scale2", "input_scale", "input_scale2"}
        if key is not None and key.group_shape.is_per_tensor:
            positive.add("scale")
        for name, tensor in self.tensors():
            role = name.partition("_")[2]
            scale = role.removesuffix("2").endswith("scale") and role not in signed
            check_values(name, tensor, scale=scale, positive=role in positive)
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
    if scale and tensor.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        tensor = tensor.float()
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
                    f"{name} of the new weights has {found}, expected {expected}: the layer's buffers are allocated "
                    "for these; create a new layer from the weights"
                )
        mine, theirs = dict(self.tensors()), dict(other.tensors())
        if mine.keys() != theirs.keys():
            raise TensorError(
                f"the new weights have the tensors {sorted(theirs)}, expected {sorted(mine)} as in the layer"
            )
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
