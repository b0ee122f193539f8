"""Interpret Quark's ``quantization_config`` for one layer's experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from moe_core.checkpoint.config.patterns import NamePatterns
from moe_core.checkpoint.config.quant_args import QuantEntries
from moe_core.checkpoint.experts.layer_experts import LayerExperts
from moe_core.checkpoint.experts.matrices import expert_modules
from moe_core.checkpoint.tools.namings import is_experts_class, under_any_name
from moe_core.errors import CheckpointError
from moe_core.spec.quant_key import (
    QuantKey,
    kFp8Dynamic128Sym,
    kFp8DynamicTensorSym,
    kFp8DynamicTokenSym,
    kFp8StaticTensorSym,
    kInt8DynamicTensorSym,
    kInt8DynamicTokenAsym,
    kInt8DynamicTokenSym,
    kInt8StaticTensorAsym,
    kInt8StaticTensorSym,
    kMxfp4DynamicDown,
    kMxfp4DynamicEven,
    kMxfp8DynamicDown,
    kMxfp8DynamicEven,
)

#: Keys of activations without groups, by whether they are int8, granularity, whether they are dynamic and symmetric.
_ACTIVATIONS: Mapping[tuple[bool, str | None, bool, bool], QuantKey] = {
    (False, "per_tensor", False, True): kFp8StaticTensorSym,
    (False, "per_tensor", True, True): kFp8DynamicTensorSym,
    (False, "per_token", True, True): kFp8DynamicTokenSym,
    (True, "per_tensor", False, True): kInt8StaticTensorSym,
    (True, "per_tensor", False, False): kInt8StaticTensorAsym,
    (True, "per_tensor", True, True): kInt8DynamicTensorSym,
    (True, "per_token", True, True): kInt8DynamicTokenSym,
    (True, "per_token", True, False): kInt8DynamicTokenAsym,
}
#: Keys of (MXFP4, MXFP8) activations, in groups of 32 with e8m0 scales, by ``scale_calculation_mode``.
_MX_ACTIVATIONS = {
    "even": (kMxfp4DynamicEven, kMxfp8DynamicEven),
    "floor": (kMxfp4DynamicDown, kMxfp8DynamicDown),
}


@dataclass(frozen=True)
class QuarkArgs:
    """Quantization of one operand.

    Entries are validated on access; an invalid one raises CheckpointError.

    Attributes:
        entries: The settings of the operand.
    """

    entries: QuantEntries

    @property
    def where(self) -> str:
        """The location of the settings, for messages."""
        return self.entries.where

    @property
    def dtype(self) -> str | None:
        """The dtype as Quark spells it ("int8", "fp4", "fp8_e4m3" …)."""
        return self.entries.text("dtype")

    @property
    def is_e4m3(self) -> bool:
        """Whether the dtype is FP8 e4m3."""
        return self.dtype in ("fp8_e4m3", "fp8")

    @property
    def scheme(self) -> str | None:
        """The granularity of scales ("per_tensor", "per_channel", "per_group" …)."""
        return self.entries.text("qscheme")

    @property
    def dynamic(self) -> bool:
        """Whether scales are computed at run time."""
        return self.entries.boolean("is_dynamic")

    @property
    def symmetric(self) -> bool:
        """Whether there are no zero points."""
        return self.entries.boolean("symmetric", True)

    @property
    def group_size(self) -> int | None:
        """The number of elements per group along K."""
        return self.entries.integer("group_size")

    @property
    def block(self) -> tuple[int, int] | None:
        """[rows, columns] of a block."""
        return self.entries.block("block_size")

    @property
    def axis(self) -> int | None:
        """The dimension of the channels with separate scales; at least -2."""
        return self.entries.integer("ch_axis", least=-2)

    @property
    def exponents(self) -> bool:
        """Whether scales are e8m0 exponents."""
        return self.entries.text("scale_format") == "e8m0"

    @property
    def is_microscaling(self) -> bool:
        """Whether groups of 32 share an e8m0 exponent (OCP MX)."""
        return self.scheme == "per_group" and self.group_size == 32 and self.exponents

    @property
    def mx_activation(self) -> QuantKey | str | None:
        """The key of dynamic MXFP4 or MXFP8 activations; None for other types.

        A string states, as one clause, why the activations are not supported.
        """
        if not (self.dynamic and self.is_microscaling and (self.is_e4m3 or self.dtype == "fp4")):
            return None
        mode = self.entries.text("scale_calculation_mode", "even")
        if mode not in _MX_ACTIVATIONS:
            return f"{self.where}: scale_calculation_mode is {mode!r}, expected 'even' or 'floor'"
        return _MX_ACTIVATIONS[mode][self.is_e4m3]

    @property
    def activation_key(self) -> QuantKey | str | None:
        """The key of activations that are quantized in this way; None if there is none.

        A string states, as one clause, why the activations are not supported.
        """
        microscaling, is_int8 = self.mx_activation, self.dtype == "int8"
        if microscaling is not None or not (self.is_e4m3 or is_int8):
            return microscaling
        if self.scheme == "per_group" and self.group_size is not None:
            return kFp8Dynamic128Sym.with_group(1, self.group_size) if self.is_e4m3 and self.dynamic else None
        scheme = "per_token" if self.scheme == "per_channel" else self.scheme
        return _ACTIVATIONS.get((is_int8, scheme, self.dynamic, self.is_e4m3 or self.symmetric))

    def __str__(self) -> str:
        size = self.entries.integer("group_size", least=-1)
        of = "" if size is None else f" of {size}"
        scales = self.entries.text("scale_format")
        return f"{self.dtype} {self.scheme}{of}{'' if scales is None else f' with {scales} scales'}"


@dataclass(frozen=True)
class QuarkLayer:
    """Quantization of the experts' linear modules.

    Attributes:
        where: Location of the settings, for messages.
        weight: Quantization of the weights.
        inputs: Quantization of the input activations; None for 16 bits.
    """

    where: str
    weight: QuarkArgs
    inputs: QuarkArgs | None

    def activation(self, accepted: Callable[[QuantKey], bool], expected: str) -> QuantKey | str | None:
        """Return the quantization of the input activations.

        Args:
            accepted: Whether the scheme supports a key.
            expected: Description of the supported keys.

        Returns:
            The key, None for 16 bits, or, as one clause, why the activations are not supported.
        """
        inputs = self.inputs
        if inputs is None:
            return None
        key = inputs.activation_key
        if isinstance(key, str) or (key is not None and accepted(key)):
            return key
        kind = f"{'dynamic' if inputs.dynamic else 'static'} {'' if inputs.symmetric else 'asymmetric '}"
        return f"{inputs.where} is {kind}{inputs}, expected {expected}"


def quark_layer(quantization: Mapping[str, Any], layer: LayerExperts) -> QuarkLayer | str:
    """Find the settings of the experts' linear modules.

    ``layer_quant_config`` selects modules by name or pattern ("*", or a regular expression after "re:") in any naming
    of the model. It takes precedence over ``layer_type_quant_config`` (by class, classes of experts first) and
    ``global_quant_config``. ``exclude`` is not read, because Quark leaves experts unquantized without recording it. The
    tensors determine whether a layer is quantized.

    Args:
        quantization: Quantization settings of the checkpoint.
        layer: The layer's expert tensors.

    Returns:
        The settings, or, as one clause, why no format reads them: weights are not quantized, or outputs are.

    Raises:
        CheckpointError: Experts or projections have different settings, or the config is invalid.
    """
    return layer.understood(quantization, _quark_layer)


def _quark_layer(quantization: Mapping[str, Any], layer: LayerExperts) -> QuarkLayer | str:
    entries = QuantEntries(quantization, f"{layer.checkpoint.path / 'config.json'}: quantization_config")
    found: dict[int, QuantEntries] = {}
    choose = _chooser(entries, layer)
    for _, _, module in expert_modules(layer):
        part = choose(module)
        found.setdefault(id(part.entries), part)
    first, *others = found.values()
    for other in others:
        if other.entries != first.entries:
            raise CheckpointError(
                f"the experts of {layer.prefix} are quantized differently ({first.where} and {other.where}); "
                "all matrices of a layer's experts must be quantized alike"
            )
    weight, inputs = first.part("weight"), first.part("input_tensors")
    if weight is None:
        return f"{first.where}: weight is null"
    # Output scales of a linear layer (such as keys for an FP8 KV cache) do not affect its weight.
    if first.part("output_tensors") is not None and not layer.is_linear:
        return f"{first.where}: output_tensors are quantized, expected null"
    return QuarkLayer(first.where, QuarkArgs(weight), None if inputs is None else QuarkArgs(inputs))


def _chooser(entries: QuantEntries, layer: LayerExperts) -> Callable[[str], QuantEntries]:
    """Return a function that maps a module's name to the entries that apply to it.

    The exact name takes precedence over the first matching pattern or enclosing module. Both, in any naming of the
    model, take precedence over the class.
    """
    by_name, by_type = entries.part("layer_quant_config"), entries.part("layer_type_quant_config")
    kept = NamePatterns()
    keys: list[str] = [] if by_name is None else [key for key in by_name.entries if by_name.entries[key] is not None]
    where = f"{entries.where}.layer_quant_config: the key"
    patterns = [
        (key, kept.regular(key[3:], where) if key.startswith("re:") else kept.wildcard(key, where)) for key in keys
    ]
    known = set(keys)

    def matched(module: str) -> str | None:
        return next((k for k, pattern in patterns if module.startswith(f"{k}.") or pattern.match(module)), None)

    exact = under_any_name(lambda module: module if module in known else None, layer)
    listed = under_any_name(matched, layer)
    classes = {} if by_type is None else {key.rpartition(".")[2].removesuffix("'>"): key for key in by_type.entries}
    of_experts = () if layer.is_linear else tuple(name for name in classes if is_experts_class(name))
    by_class = next((classes[name] for name in (*of_experts, "Linear") if name in classes), None)

    def choose(module: str) -> QuantEntries:
        key = exact(module) or listed(module)
        part = None if by_name is None or key is None else by_name.part(key)
        if part is None and by_type is not None and by_class is not None:
            part = by_type.part(by_class)
        if part is None:
            part = entries.part("global_quant_config")
        if part is None:
            raise entries.error("global_quant_config", "an object")
        return part

    return choose
