"""Quantization keys: a comparable description of how a tensor is quantized.

A :class:`QuantKey` specifies everything that a kernel needs to read a quantized weight or to produce a quantized
activation: element type, scale type, which elements share a scale, zero points, packing and order. Nothing is
inferred from a tensor's shape.

Conventions: a weight is one expert's ``[N, K]`` (rows are output features), an activation is ``[M, K]``.
``GroupShape(row, col)`` is the number of rows and columns that share one scale; ``-1`` is the full extent. Per token
and per output channel are therefore both ``(1, -1)``, per tensor is ``(-1, -1)``, a DeepSeek weight block is ``(128,
128)`` and its activation group ``(1, 128)``.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from moe_core.errors import ConfigError, check_instance, did_you_mean
from moe_core.spec.numerics import FP4_E2M1, FP8_E4M3, INT4, INT8, UINT4, UINT4B8, UINT8, UINT8B128, QuantDtype


@dataclass(frozen=True)
class GroupShape:
    """Number of rows and columns that share one scale; ``-1`` is the full extent.

    Attributes:
        row: Number of rows.
        col: Number of columns.
    """

    row: int
    col: int

    def __post_init__(self) -> None:
        for name, value in (("row", self.row), ("col", self.col)):
            check_instance(name, value, int)
            if value != -1 and value < 1:
                raise ConfigError(f"group extents must be positive or -1 (all), got {self.row}x{self.col}")

    @property
    def is_per_tensor(self) -> bool:
        """Whether one scale covers the whole matrix."""
        return self.row == -1 and self.col == -1

    @property
    def is_per_row(self) -> bool:
        """Whether there is one scale per token (activation) or output channel (weight)."""
        return self.row == 1 and self.col == -1

    def grid(self, rows: int, cols: int) -> tuple[int, int]:
        """Compute the shape of the scale of a [rows, cols] matrix; edge groups may be partial.

        Args:
            rows: Number of rows.
            cols: Number of columns.

        Returns:
            Number of groups along rows and columns.
        """
        row = rows if self.row == -1 else self.row
        col = cols if self.col == -1 else self.col
        return (-(-rows // row) if rows else 0, -(-cols // col) if cols else 0)

    def __str__(self) -> str:
        names = {(-1, -1): "per tensor", (1, -1): "per row"}
        return names.get((self.row, self.col), f"{self.row}x{self.col}")


PER_TENSOR = GroupShape(-1, -1)
PER_TOKEN = GroupShape(1, -1)
PER_CHANNEL = GroupShape(1, -1)


@dataclass(frozen=True)
class ScaleDesc:
    """Scale of a quantized tensor.

    Attributes:
        dtype: Dtype of the stored scale; ``torch.uint8`` holds e8m0 exponents with value 2**(s-127).
        static: Static scales come with the checkpoint; dynamic ones are computed from the values at run time.
        group_shape: Rows and columns that share one scale.
        rounding: Rounding of computed e8m0 scales: "up", "even" or "down", see
            :mod:`moe_core.reference.quantization`.
    """

    dtype: torch.dtype
    static: bool
    group_shape: GroupShape
    rounding: str = "up"

    def __post_init__(self) -> None:
        if self.rounding not in ("up", "even", "down"):
            raise ConfigError(f"rounding must be 'up', 'even' or 'down', got {self.rounding!r}")

    def __str__(self) -> str:
        dtype = "e8m0" if self.dtype is torch.uint8 else str(self.dtype).removeprefix("torch.")
        dtype = dtype if self.rounding == "up" else f"{dtype} rounded {self.rounding}"
        return f"{'static' if self.static else 'dynamic'} {dtype} {self.group_shape}"


@dataclass(frozen=True)
class Packing:
    """How sub-byte elements are stored in words, in canonical weights.

    Element ``i`` of a word starts ``bits * i`` above the lowest bit.

    Attributes:
        storage: Dtype of a word.
        values_per_word: Number of consecutive elements per word.
        axis: Axis along which they are consecutive, "k" or "n".
    """

    storage: torch.dtype
    values_per_word: int
    axis: str = "k"

    def __post_init__(self) -> None:
        if self.axis not in ("k", "n"):
            raise ConfigError(f"axis of the packing must be 'k' or 'n', got {self.axis!r}")

    def __str__(self) -> str:
        return f"{self.values_per_word} per {str(self.storage).removeprefix('torch.')} along {self.axis}"


#: Two 4-bit elements per byte, even k in the low four bits.
PACKED_4BIT = Packing(torch.uint8, 2)
_NOT_SAID = Packing(torch.uint8, 0)


@dataclass(frozen=True)
class QuantKey:
    """How a tensor is quantized; see the module docstring.

    A value is its code, less the zero point or offset, times its scale, times its second scale if there is one.

    Attributes:
        dtype: Element type.
        scale: The scale.
        scale2: Second level of scales, usually one float32 number per matrix of an expert (NVFP4).
        symmetric: False if there are zero points, in the group shape of the scale.
        packing: None: one element per storage element. Default: :data:`PACKED_4BIT` for 4-bit codes without sign
            extension (e2m1, unsigned), else None.
        permuted: Whether a per-layer permutation ``g_idx`` assigns columns to groups (activation order).
        pre_scaled: Whether a factor per column multiplies the activations before the product (input smoothing).
    """

    dtype: QuantDtype
    scale: ScaleDesc
    scale2: ScaleDesc | None = None
    symmetric: bool = True
    packing: Packing | None = _NOT_SAID
    permuted: bool = False
    pre_scaled: bool = False

    def __post_init__(self) -> None:
        check_instance("dtype", self.dtype, QuantDtype)
        if self.packing == _NOT_SAID:
            object.__setattr__(self, "packing", self._usual_packing)

    @property
    def _usual_packing(self) -> Packing | None:
        return PACKED_4BIT if self.dtype.bits == 4 and self.dtype.storage is torch.uint8 else None

    @property
    def scales(self) -> tuple[ScaleDesc, ...]:
        """The levels of scales: one or two."""
        return (self.scale,) if self.scale2 is None else (self.scale, self.scale2)

    @property
    def group_shape(self) -> GroupShape:
        """Group shape of the scale."""
        return self.scale.group_shape

    @property
    def is_static(self) -> bool:
        """Whether a scale comes with the checkpoint."""
        return self.scale.static or (self.scale2 is not None and self.scale2.static)

    @property
    def spans_tokens(self) -> bool:
        """Whether a dynamic scale of activations covers all tokens."""
        return any(not scale.static and scale.group_shape.is_per_tensor for scale in self.scales)

    @property
    def group_size(self) -> int:
        """Number of elements along K that share a scale; -1 for all of them."""
        return self.scale.group_shape.col

    def with_group(self, row: int, col: int) -> QuantKey:
        """Return this key with another group shape.

        Args:
            row: Number of rows that share a scale.
            col: Number of columns that share a scale.

        Returns:
            The new key.
        """
        return replace(self, scale=replace(self.scale, group_shape=GroupShape(row, col)))

    def with_scale_dtype(self, dtype: torch.dtype) -> QuantKey:
        """Return this key with another scale dtype.

        Args:
            dtype: Dtype of the stored scale.

        Returns:
            The new key.
        """
        return replace(self, scale=replace(self.scale, dtype=dtype))

    @property
    def is_token_wise(self) -> bool:
        """Whether an activation key has byte codes and separate scales per token.

        A token can have one scale, or one per group. Such tokens can be quantized on any rank before dispatch,
        exactly as the experts would do it: :func:`moe_core.kernels.ops.quantize.quantize_activation`.
        """
        shape = self.group_shape
        return (
            not self.is_static
            and (shape.is_per_row or (shape.row == 1 and shape.col > 0))
            and self.symmetric
            and self.packing is None
            and self.scale2 is None
            and not (self.permuted or self.pre_scaled)
            and self.scale.rounding == "up"
        )

    def with_rounding(self, rounding: str) -> QuantKey:
        """Return this key with another rounding of its e8m0 scales.

        Args:
            rounding: "up", "even" or "down".

        Returns:
            The new key.
        """
        return replace(self, scale=replace(self.scale, rounding=rounding))

    def __str__(self) -> str:
        parts = [self.dtype.name, str(self.scale)]
        if self.scale2 is not None:
            parts.append(f"second scale {self.scale2}")
        if not self.symmetric:
            parts.append("zero points")
        if self.packing != self._usual_packing:
            parts.append("not packed" if self.packing is None else f"packed as {self.packing}")
        if self.permuted:
            parts.append("activation order")
        if self.pre_scaled:
            parts.append("scaled inputs")
        name = _name_of(self)
        return ", ".join(parts) if name is None else f"{name} ({', '.join(parts)})"


def _scale(dtype: torch.dtype, static: bool, row: int, col: int) -> ScaleDesc:
    return ScaleDesc(dtype, static, GroupShape(row, col))


_F32 = torch.float32
_BF16 = torch.bfloat16
_E8M0 = torch.uint8

kFp8StaticTensorSym = QuantKey(FP8_E4M3, _scale(_F32, True, -1, -1))
kFp8DynamicTensorSym = QuantKey(FP8_E4M3, _scale(_F32, False, -1, -1))
#: One scale per output channel; one per token is the same grouping.
kFp8StaticChannelSym = QuantKey(FP8_E4M3, _scale(_F32, True, 1, -1))
kFp8StaticTokenSym = kFp8StaticChannelSym
kFp8DynamicTokenSym = QuantKey(FP8_E4M3, _scale(_F32, False, 1, -1))
kFp8Static128BlockSym = QuantKey(FP8_E4M3, _scale(_F32, True, 128, 128))
kFp8Static128BlockE8M0Sym = QuantKey(FP8_E4M3, _scale(_E8M0, True, 128, 128))
kFp8Dynamic128Sym = QuantKey(FP8_E4M3, _scale(_F32, False, 1, 128))
kFp8Dynamic64Sym = QuantKey(FP8_E4M3, _scale(_F32, False, 1, 64))
kMxfp8Static = QuantKey(FP8_E4M3, _scale(_E8M0, True, 1, 32))
kMxfp8Dynamic = QuantKey(FP8_E4M3, _scale(_E8M0, False, 1, 32))
kMxfp4Static = QuantKey(FP4_E2M1, _scale(_E8M0, True, 1, 32), packing=PACKED_4BIT)
kMxfp4Dynamic = QuantKey(FP4_E2M1, _scale(_E8M0, False, 1, 32), packing=PACKED_4BIT)
#: The largest values of a group may saturate, as with other tools' quantizers. Compared with "up", "even" ("down")
#: changes the scales of every fifth (third) group; with e4m3 of every fifteenth (ninth).
kMxfp8DynamicEven = kMxfp8Dynamic.with_rounding("even")
kMxfp8DynamicDown = kMxfp8Dynamic.with_rounding("down")
kMxfp4DynamicEven = kMxfp4Dynamic.with_rounding("even")
kMxfp4DynamicDown = kMxfp4Dynamic.with_rounding("down")

kInt8StaticChannelSym = QuantKey(INT8, _scale(_F32, True, 1, -1))
kInt8StaticTensorSym = QuantKey(INT8, _scale(_F32, True, -1, -1))
kInt8StaticTensorAsym = QuantKey(INT8, _scale(_F32, True, -1, -1), symmetric=False)
kInt8DynamicTokenSym = QuantKey(INT8, _scale(_F32, False, 1, -1))
kInt8DynamicTokenAsym = QuantKey(INT8, _scale(_F32, False, 1, -1), symmetric=False)
kInt8DynamicTensorSym = QuantKey(INT8, _scale(_F32, False, -1, -1))

#: Integer weights for 16-bit activations: group 128, bf16 scales. ``with_group`` and ``with_scale_dtype`` give other
#: variants; claims describe the range with a KeyPattern.
kInt4StaticGroupScale = _scale(_BF16, True, 1, 128)
kInt8StaticGroupScale = _scale(_BF16, True, 1, 128)
kInt4Static = QuantKey(UINT4B8, kInt4StaticGroupScale, packing=PACKED_4BIT)
kInt4StaticAsym = QuantKey(UINT4, kInt4StaticGroupScale, symmetric=False, packing=PACKED_4BIT)
kInt4Static32 = kInt4Static.with_group(1, 32)
kInt4Static32Asym = kInt4StaticAsym.with_group(1, 32)
kInt8Static = QuantKey(UINT8B128, kInt8StaticGroupScale)
kInt8StaticAsym = QuantKey(UINT8, kInt8StaticGroupScale, symmetric=False)
#: int4 weights for int8 activations.
kInt4W4A8StaticChannelSym = QuantKey(INT4, _scale(_F32, True, 1, -1))
kInt4W4A8StaticGroup128Sym = QuantKey(INT4, _scale(_BF16, True, 1, 128))
kInt4W4A8StaticGroup64Sym = kInt4W4A8StaticGroup128Sym.with_group(1, 64)
kInt4W4A8StaticGroup32Sym = kInt4W4A8StaticGroup128Sym.with_group(1, 32)

#: Quantization keys, keyed by name, and the first name of each key.
_KEYS: dict[str, QuantKey] = {}
NAMES: dict[QuantKey, str] = {}


def name_quant_keys(keys: Mapping[str, QuantKey]) -> None:
    """Give quantization keys names, which :func:`key_by_name` and the command line then accept.

    Args:
        keys: Keys by name, e.g. ``{"kMyInt6Static": ...}``.

    Raises:
        ConfigError: A name is not an identifier or is that of another key.
    """
    for name, key in keys.items():
        check_instance(name, key, QuantKey)
        if not name.isidentifier() or _KEYS.get(name, key) != key:
            raise ConfigError(f"quant key name {name!r} must be an identifier that names no other key")
    _KEYS.update(keys)
    for name, key in keys.items():
        NAMES.setdefault(key, name)
    _name_of.cache_clear()


def as_quant_key(key: QuantKey | str | None, what: str = "quant key") -> QuantKey | None:
    """Convert a key argument, given as key or by name, to a key.

    Args:
        key: A key or its name; None, "none" or "16-bit" if the tensor is not quantized.
        what: Name of the argument, for the message.

    Returns:
        The key, or None.

    Raises:
        ConfigError: ``key`` is unknown or invalid.
    """
    if key is None or isinstance(key, QuantKey):
        return key
    if not isinstance(key, str):
        raise ConfigError(
            f"{what} is {key!r}, expected a QuantKey, its name (kFp8Static128BlockSym), or None for 16 bits"
        )
    return None if key.lower() in ("none", "16-bit") else key_by_name(key)


#: Names of scale dtypes in a key's name.
_SCALE_DTYPES = {
    "float32": _F32,
    "bfloat16": _BF16,
    "float16": torch.float16,
    "e4m3": torch.float8_e4m3fn,
    "e8m0": _E8M0,
}
_GROUPS = {"per_row": PER_CHANNEL, "per_tensor": PER_TENSOR}


def key_by_name(name: str) -> QuantKey:
    """Look up a key by name, e.g. ``"kFp8Static128BlockSym"``.

    Brackets modify the named constant: ``"kInt4Static[1x64,float16,permuted,pre_scaled]"``. They can contain, in any
    order, the group as rows x columns (or ``per_row``, ``per_tensor``), the scale dtype (float32, bfloat16, float16,
    e4m3, e8m0), activation order and scaled inputs.

    Args:
        name: The name.

    Returns:
        The key.

    Raises:
        ConfigError: The name is unknown or malformed.
    """
    constant, bracket, rest = name.partition("[")
    value = _KEYS.get(constant)
    if value is None:
        known = sorted(NAMES.values())
        raise ConfigError(
            f"unknown quant key {name!r}{did_you_mean(constant, known)}", details=f"known: {', '.join(known)}"
        )
    if bracket and not rest.endswith("]"):
        raise ConfigError(f"quant key {name!r}: the closing bracket is missing, e.g. {constant}[64x128]")
    for part in rest.removesuffix("]").split(",") if bracket else ():
        changed = _changed(value, part.strip().lower())
        if changed is None:
            words = [*_GROUPS, *_SCALE_DTYPES, "permuted", "pre_scaled"]
            raise ConfigError(
                f"quant key {name!r}: expected a group of rows x columns or {', '.join(words)} in brackets, "
                f"got {part.strip()!r}{did_you_mean(part.strip(), words)}"
            )
        value = changed
    return value


def _changed(key: QuantKey, part: str) -> QuantKey | None:
    """Apply one word in brackets to a key; None for an unknown word."""
    rows, cross, cols = part.partition("x")
    if part in _GROUPS:
        return replace(key, scale=replace(key.scale, group_shape=_GROUPS[part]))
    if cross and rows.isdecimal() and cols.isdecimal():
        return key.with_group(int(rows), int(cols))
    if part in _SCALE_DTYPES:
        return key.with_scale_dtype(_SCALE_DTYPES[part])
    if part == "permuted":
        return replace(key, permuted=True)
    return replace(key, pre_scaled=True) if part == "pre_scaled" else None


def key_name(key: QuantKey | None) -> str:
    """Name a key so that :func:`key_by_name` can read it.

    Args:
        key: The key; None: 16 bits.

    Returns:
        The name, or the full description if brackets cannot express the key.
    """
    return "16-bit" if key is None else (_name_of(key) or str(key))


@functools.cache
def _name_of(key: QuantKey) -> str | None:
    """Shortest name of a key: a constant, or the constant with the fewest modifications."""
    if key in NAMES:
        return NAMES[key]
    found = [like for constant in NAMES if (like := _named_like(constant, key)) is not None]
    return min(found, key=lambda like: like[:2])[2] if found else None


def _named_like(constant: QuantKey, key: QuantKey) -> tuple[int, bool, str] | None:
    """``key`` as a modified ``constant``.

    Returns the number of words, whether the groups are of another kind, and the name; None if brackets cannot express
    it.
    """
    shape, like = key.group_shape, constant.group_shape
    scale = replace(constant.scale, group_shape=shape, dtype=key.scale.dtype)
    if replace(constant, scale=scale, permuted=key.permuted, pre_scaled=key.pre_scaled) != key:
        return None
    words = []
    if shape != like:
        words.append(_group_word(shape))
    if key.scale.dtype != constant.scale.dtype:
        words.append(_dtype_word(key.scale.dtype))
    for word in ("permuted", "pre_scaled"):
        if getattr(key, word) != getattr(constant, word):
            words.append(word)
    alike = (like.col > 0) == (shape.col > 0) and (like.row > 1) == (shape.row > 1)
    return len(words), not alike, f"{NAMES[constant]}[{','.join(words)}]"


def _group_word(shape: GroupShape) -> str:
    """Group shape in a key's name."""
    return next((word for word, group in _GROUPS.items() if group == shape), str(shape))


def _dtype_word(dtype: torch.dtype) -> str:
    """Scale dtype in a key's name."""
    return next((word for word, known in _SCALE_DTYPES.items() if known == dtype), str(dtype))


@dataclass(frozen=True)
class KeyPattern:
    """Set of quantization keys, for claims.

    A key matches if it equals ``base``, except for the fields that have a list of choices.

    Attributes:
        base: Defines all fields without choices.
        group_shapes: Choices of the group shape.
        scale_dtypes: Choices of the scale dtype.
        permuted: Choices of ``permuted``.
        pre_scaled: Choices of ``pre_scaled``.
    """

    base: QuantKey
    group_shapes: tuple[GroupShape, ...] | None = None
    scale_dtypes: tuple[torch.dtype, ...] | None = None
    permuted: tuple[bool, ...] | None = None
    pre_scaled: tuple[bool, ...] | None = None

    def matches(self, key: QuantKey) -> bool:
        """Whether a key is in the set.

        Args:
            key: The key.

        Returns:
            True if it is.
        """
        shapes = self.group_shapes or (self.base.scale.group_shape,)
        dtypes = self.scale_dtypes or (self.base.scale.dtype,)
        permuted = self.permuted or (self.base.permuted,)
        if key.group_shape not in shapes or key.scale.dtype not in dtypes or key.permuted not in permuted:
            return False
        if key.pre_scaled not in (self.pre_scaled or (self.base.pre_scaled,)):
            return False
        base = self.base
        # Field by field for speed: a selection evaluates this for every claim of every class.
        return (key.dtype, key.scale.static, key.scale.rounding, key.scale2, key.symmetric, key.packing) == (
            base.dtype,
            base.scale.static,
            base.scale.rounding,
            base.scale2,
            base.symmetric,
            base.packing,
        )

    def expand(self) -> tuple[QuantKey, ...]:
        """List every key of the set, which is finite so that each can be tested."""
        return tuple(
            self.key(shape, dtype, permuted, pre_scaled)
            for shape, dtype, permuted, pre_scaled in itertools.product(*self.choices)
        )

    @property
    def choices(
        self,
    ) -> tuple[tuple[GroupShape, ...], tuple[torch.dtype, ...], tuple[bool, ...], tuple[bool, ...]]:
        """Choices per variable field: group shapes, scale dtypes, ``permuted``, ``pre_scaled``."""
        return (
            self.group_shapes or (self.base.scale.group_shape,),
            self.scale_dtypes or (self.base.scale.dtype,),
            self.permuted or (self.base.permuted,),
            self.pre_scaled or (self.base.pre_scaled,),
        )

    def key(self, shape: GroupShape, dtype: torch.dtype, permuted: bool, pre_scaled: bool) -> QuantKey:
        """Make the key with the given values of the variable fields.

        Args:
            shape: Group shape.
            dtype: Scale dtype.
            permuted: Whether the key is permuted.
            pre_scaled: Whether the key is pre-scaled.

        Returns:
            The key.
        """
        scale = replace(self.base.scale, group_shape=shape, dtype=dtype)
        return replace(self.base, scale=scale, permuted=permuted, pre_scaled=pre_scaled)

    def __str__(self) -> str:
        """Key name with all choices: ``kInt4Static[1x64|per_row,bfloat16|float16,permuted?]``.

        "|" separates choices, "?" marks an optional word.
        """
        name = _name_of(self.base)
        if name is None:
            return " | ".join(map(key_name, self.expand()))
        constant = name.partition("[")[0]
        like = _KEYS[constant]
        shapes, dtypes, permuted, pre_scaled = self.choices
        words = []
        if shapes != (like.group_shape,):
            words.append("|".join(dict.fromkeys(map(_group_word, shapes))))
        if dtypes != (like.scale.dtype,):
            words.append("|".join(dict.fromkeys(map(_dtype_word, dtypes))))
        for word, values in (("permuted", permuted), ("pre_scaled", pre_scaled)):
            if True in values:
                words.append(f"{word}?" if False in values else word)
        return f"{constant}[{','.join(words)}]" if words else constant


_constants = {name: value for name, value in globals().items() if name.startswith("k")}
name_quant_keys({name: value for name, value in _constants.items() if isinstance(value, QuantKey)})
