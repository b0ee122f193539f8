"""The tensors of a layer, as one table.

A layer has two matrices per expert, w13 and w2. Each has codes, and further tensors that its quantization keys require:
the :data:`ROLES`. A :class:`Role` states when such a tensor is present, its dtype, and how many rows and columns of the
matrix share one of its elements. The latter determines its shape and how tensor-parallel ranks split it.

Canonical weights, their validation, quant configs, memory estimates and shards follow from this table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from moe_core.errors import ConfigError, check_instance
from moe_core.spec.config import FusedMoEConfig
from moe_core.spec.quant_key import GroupShape, QuantKey, ScaleDesc

#: Rows and columns that share one element of a tensor. -1: all of them; None: the tensor has no such dimension.
Extents = tuple[int | None, int | None]

#: Dtypes of unquantized weights and of biases.
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Role:
    """One kind of tensor of a matrix.

    Attributes:
        name: Suffix of the field of :class:`moe_core.MoEWeights`: "scale" is ``w13_scale``; empty for the codes.
        needs: Returns whether a quantization key requires the tensor; None if it does not depend on a key. This
            function, ``extents`` and ``dtypes`` take the activation key for roles of activations, otherwise the weight
            key.
        extents: Returns how many rows and columns of the matrix share an element.
        dtypes: Returns the valid dtypes, of which this project writes the first.
        per_group: There is one element per group of the weight key, so that ``g_idx`` refers to its columns.
        required: Every backend has the tensor in its quant config. Other tensors may be stored elsewhere.
    """

    name: str
    needs: Callable[[QuantKey], bool] | None
    extents: Callable[[Any], Extents]
    dtypes: Callable[[Any], tuple[torch.dtype, ...]]
    per_group: bool = False
    required: bool = False

    @property
    def of_activations(self) -> bool:
        """Whether the tensor describes the activations that enter the product."""
        return self.name.startswith("input_")

    @property
    def field(self) -> str:
        """Field of :class:`moe_core.FusedMoEQuantDesc`."""
        return self.name.removeprefix("input_")

    def argument(self, number: int) -> str:
        """Name the argument of :func:`moe_core.make_quant_config`.

        Args:
            number: 1 or 2, the number of the matrix product.

        Returns:
            E.g. "w1_zp", "a2_scale".
        """
        field = "zp" if self.field == "zero_point" else self.field
        return f"{'a' if self.of_activations else 'w'}{number}_{field}"

    def needed(self, key: QuantKey | None) -> bool:
        """Whether a quantization key requires the tensor.

        Args:
            key: The activation key for roles of activations, otherwise the weight key; None for 16 bits.

        Returns:
            True if it does; False for roles that do not depend on a key.
        """
        return key is not None and self.needs is not None and self.needs(key)


def _group(scale: ScaleDesc) -> Extents:
    """Extents of a scale; one of a whole matrix has no dimension of columns."""
    shape = scale.group_shape
    return (-1, None) if shape.is_per_tensor else (shape.row, shape.col)


def _word(key: QuantKey | None) -> Extents:
    """Extents of the codes."""
    packing = None if key is None else key.packing
    if packing is None:
        return (1, 1)
    return (packing.values_per_word, 1) if packing.axis == "n" else (1, packing.values_per_word)


def storage_dtypes(key: QuantKey | None) -> tuple[torch.dtype, ...]:
    """List the tensor dtypes that can hold weights of ``key``.

    Args:
        key: Quantization key; None: unquantized weights.

    Returns:
        The dtypes.
    """
    if key is None:
        return FLOATS
    return (key.dtype.storage if key.packing is None else key.packing.storage,)


CODES = Role("", None, _word, storage_dtypes)
BIAS = Role("bias", None, lambda key: (1, None), lambda key: FLOATS)
#: The codes come first.
ROLES = (
    CODES,
    Role(
        "scale",
        lambda key: True,
        lambda key: _group(key.scale),
        lambda key: (key.scale.dtype,),
        per_group=True,
        required=True,
    ),
    Role("scale2", lambda key: key.scale2 is not None, lambda key: _group(key.scale2), lambda key: (key.scale2.dtype,)),
    Role(
        "zero_point",
        lambda key: not key.symmetric,
        lambda key: _group(key.scale),
        lambda key: (torch.uint8, torch.int32),
        per_group=True,
    ),
    Role(
        "input_scale",
        lambda key: key.scale.static,
        lambda key: (None, None),
        lambda key: (torch.float32,),
        required=True,
    ),
    Role(
        "input_scale2",
        lambda key: key.scale2 is not None and key.scale2.static,
        lambda key: (None, None),
        lambda key: (torch.float32,),
        required=True,
    ),
    Role(
        "input_zero_point",
        lambda key: key.scale.static and not key.symmetric,
        lambda key: (None, None),
        lambda key: (torch.int32,),
        required=True,
    ),
    BIAS,
    Role("g_idx", lambda key: key.permuted, lambda key: (None, 1), lambda key: (torch.int32,)),
    Role("pre_scale", lambda key: key.pre_scaled, lambda key: (None, 1), lambda key: (torch.float32,)),
)


#: Fields of :class:`moe_core.MoEWeights` with static scales and zero points of activations.
INPUT_FIELDS = tuple(f"{name}_{role.name}" for name in ("w13", "w2") for role in ROLES if role.of_activations)


@dataclass(frozen=True)
class Matrix:
    """One of the two matrices of a layer's local experts.

    Attributes:
        name: "w13" or "w2".
        config: Config of the layer.
        weight_key: Quantization of weights; None for 16 bits.
        activation_key: Quantization of activations; None for 16 bits.
    """

    name: str
    config: FusedMoEConfig
    weight_key: QuantKey | None
    activation_key: QuantKey | None

    @property
    def parts(self) -> int:
        """Number of stacked matrices: 2 for gate and up."""
        return 2 if self.name == "w13" and self.config.is_gated else 1

    @property
    def rows(self) -> int:
        """Number of rows, of all stacked matrices together."""
        return self.config.w13_rows if self.name == "w13" else self.config.hidden_size

    @property
    def cols(self) -> int:
        """Number of columns."""
        return self.config.hidden_size if self.name == "w13" else self.config.intermediate_size

    def field(self, role: Role) -> str:
        """Name the field of :class:`moe_core.MoEWeights`.

        Args:
            role: A role.

        Returns:
            E.g. "w13", "w2_scale".
        """
        return f"{self.name}_{role.name}" if role.name else self.name

    def key(self, role: Role) -> QuantKey | None:
        """Return the quantization key that decides about a role.

        Args:
            role: A role.

        Returns:
            The activation key or the weight key; None for 16 bits.
        """
        return self.activation_key if role.of_activations else self.weight_key

    def has(self, role: Role) -> bool:
        """Whether the matrix has a tensor of this role.

        Args:
            role: A role.

        Returns:
            True if the config and the keys require it.
        """
        return role is CODES or (self.config.has_bias if role is BIAS else role.needed(self.key(role)))

    def reason(self, role: Role) -> str:
        """State what decides whether the matrix has a tensor of this role, for messages.

        Args:
            role: A role.

        Returns:
            E.g. "the weight key is kMxfp4Static (…)".
        """
        if role is BIAS:
            return f"config.has_bias={self.config.has_bias}"
        return f"the {'activation' if role.of_activations else 'weight'} key is {self.key(role) or '16-bit'}"

    def shape(self, role: Role) -> tuple[int, ...]:
        """Compute the shape of a tensor.

        Args:
            role: A role that the matrix has.

        Returns:
            ``[E]``, and the numbers of elements along rows and columns, if there are these dimensions.
        """
        return _shape(role.extents(self.key(role)), self.config.local_experts, self.rows, self.cols, self.parts)

    def dtypes(self, role: Role) -> tuple[torch.dtype, ...]:
        """List the valid dtypes of a tensor.

        Args:
            role: A role that the matrix has.

        Returns:
            The dtypes; for 16-bit tensors that of the config comes first.
        """
        found = role.dtypes(self.key(role))
        return tuple(dict.fromkeys((self.config.dtype, *found))) if found == FLOATS else found


def matrices(config: FusedMoEConfig, weight_key: QuantKey | None, activation_key: QuantKey | None) -> Iterator[Matrix]:
    """Iterate over the two matrices of a layer.

    Args:
        config: Config of the layer.
        weight_key: Quantization of weights; None for 16 bits.
        activation_key: Quantization of activations; None for 16 bits.

    Returns:
        w13, then w2.
    """
    return (Matrix(name, config, weight_key, activation_key) for name in ("w13", "w2"))


def scale_shape(key: QuantKey | ScaleDesc, experts: int, rows: int, cols: int, parts: int = 1) -> tuple[int, ...]:
    """Compute the shape of the canonical scale of ``[experts, rows, cols]`` weights.

    ``parts`` stacked matrices (2 for gate and up) have ``rows / parts`` rows each. Every part has separate scale
    rows, so a partial last block of the gate is not shared with the up rows.

    Args:
        key: Quantization key of the weights, or the description of one of its scales.
        experts: Number of experts E.
        rows: Number of rows of all parts together.
        cols: Number of columns.
        parts: Number of stacked matrices.

    Returns:
        ``[E, parts]`` for per-tensor scales, else ``[E, parts * grid_rows, grid_cols]``.

    Raises:
        ConfigError: An argument has the wrong type, or ``parts`` is not positive.
    """
    check_instance("key", key, QuantKey, ScaleDesc)
    for name, value in (("experts", experts), ("rows", rows), ("cols", cols), ("parts", parts)):
        check_instance(name, value, int, torch.SymInt)
    if parts < 1:
        raise ConfigError(f"parts is {parts}, expected 1 or 2 stacked matrices")
    return _shape(_group(key.scale if isinstance(key, QuantKey) else key), experts, rows, cols, parts)


def _shape(extents: Extents, experts: int, rows: int, cols: int, parts: int) -> tuple[int, ...]:
    row, col = extents
    if extents == (-1, None):
        return (experts, parts)
    grid = GroupShape(row or -1, col or -1).grid(rows // parts, cols)
    shape = (experts,) if row is None else (experts, parts * grid[0])
    return shape if col is None else (*shape, grid[1])
