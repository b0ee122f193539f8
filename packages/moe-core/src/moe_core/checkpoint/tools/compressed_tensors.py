"""Interpret compressed-tensors' ``quantization_config`` for one layer's experts.

A config has groups. Each group lists its targets (modules by name, ``re:`` pattern or class) and how their weights and
input activations are quantized. ``ignore`` is not read, because tools write lists that do not match their files. The
tensors determine whether a layer is quantized.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from moe_core.checkpoint.config.patterns import NamePatterns
from moe_core.checkpoint.config.quant_args import QuantEntries, one_of, short
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
    kInt8DynamicTokenAsym,
    kInt8DynamicTokenSym,
    kMxfp4DynamicEven,
    kMxfp8Dynamic,
)

_TYPES = ("int", "float")
#: Classes of a linear module, most specific first.
_LINEAR_CLASSES = ("Linear", "Module")
#: Keys of activations without groups, by type, bits, strategy, whether they are dynamic and whether symmetric.
_ACTIVATIONS: Mapping[tuple[str, int, str, bool | str, bool], QuantKey] = {
    ("float", 8, "tensor", False, True): kFp8StaticTensorSym,
    ("float", 8, "tensor", True, True): kFp8DynamicTensorSym,
    ("float", 8, "token", True, True): kFp8DynamicTokenSym,
    ("int", 8, "token", True, True): kInt8DynamicTokenSym,
    ("int", 8, "token", True, False): kInt8DynamicTokenAsym,
}
#: Strategies with a group size.
_GROUPED = ("group", "tensor_group")
#: Activation orders. "group" and "dynamic" store a group index per column; "weight" and "static" are undone before the
#: file is written.
_ORDERS = ("group", "dynamic", "weight", "static")


@dataclass(frozen=True)
class QuantArgs:
    """Quantization of one operand.

    Attributes:
        type: "int" or "float".
        num_bits: Number of bits.
        strategy: tensor, channel, group, block, token, or any other value in the file.
        group_size: Size of a group along K, or None.
        block: [rows, columns] of a block, or None.
        symmetric: Whether there are no zero points.
        dynamic: Whether scales are computed at run time (True), stored in the file (False), or both ("local").
        actorder: Activation order ("group", "weight" …); None if columns keep their order.
        scale_dtype: dtype of the scales as written ("torch.uint8" for e8m0), or None.
        where: Location of the settings, for messages.
    """

    type: str
    num_bits: int
    strategy: str
    group_size: int | None
    block: tuple[int, int] | None
    symmetric: bool
    dynamic: bool | str
    actorder: str | None
    scale_dtype: str | None
    where: str = field(compare=False)

    @property
    def unusual(self) -> str | None:
        """Why the weights are not symmetric and static, as one clause; None if they are."""
        if self.symmetric and self.dynamic is False:
            return None
        found = "asymmetric" if self.dynamic is False else "dynamic"
        return f"{self.where} is {found}, expected symmetric and static"

    def is_microscaling(self, layout: str | None) -> bool:
        """Return whether groups of 32 share an e8m0 exponent (OCP MX).

        Args:
            layout: ``format`` of the group.

        Returns:
            True if they do.
        """
        implied = self.scale_dtype is None and (self.num_bits == 4 or layout == "mxfp8-quantized")
        exponents = self.scale_dtype == "torch.uint8" or implied
        return self.type == "float" and self.strategy == "group" and self.group_size == 32 and exponents

    def activation_key(self, layout: str | None) -> QuantKey | None:
        """Return the key of activations that are quantized in this way.

        Args:
            layout: ``format`` of the group.

        Returns:
            The key, or None if there is none.
        """
        if self.strategy == "group" and self.type == "float" and self.symmetric and self.dynamic is True:
            if self.is_microscaling(layout):
                return {4: kMxfp4DynamicEven, 8: kMxfp8Dynamic}.get(self.num_bits)
            size = self.group_size or 0
            return kFp8Dynamic128Sym.with_group(1, size) if self.num_bits == 8 and size > 0 else None
        return _ACTIVATIONS.get((self.type, self.num_bits, self.strategy, self.dynamic, self.symmetric))

    def __str__(self) -> str:
        size = self.block or self.group_size
        kind = {False: "static", True: "dynamic"}.get(self.dynamic is True or self.dynamic == "local")
        return f"{kind} {self.type}{self.num_bits} by {self.strategy}{'' if size is None else f' {size}'}"


@dataclass(frozen=True)
class QuantGroup:
    """One of the ``config_groups``.

    Attributes:
        name: Name of the group.
        weights: Quantization of the weights.
        inputs: Quantization of the input activations; None for 16 bits.
        format: Name of the tensors' layout.
    """

    name: str
    weights: QuantArgs
    inputs: QuantArgs | None
    format: str | None

    @property
    def where(self) -> str:
        """The location of the group, for messages."""
        return f"config_groups.{self.name}"

    def reason_against(self, kind: str, bits: Sequence[int], formats: Sequence[str | None]) -> str | None:
        """Return why the weights do not have one of the given types and formats.

        Args:
            kind: Expected type, "int" or "float".
            bits: Accepted numbers of bits.
            formats: Accepted formats; None stands for a group without a format. Messages omit the old name
                "naive-quantized".

        Returns:
            The reason as one clause, or None if the weights are accepted.
        """
        weights = self.weights
        if weights.type != kind or weights.num_bits not in bits:
            expected = " or ".join(f"{kind}{count}" for count in bits)
            return f"{self.where} has {weights.type}{weights.num_bits} weights, expected {expected}"
        if self.format not in formats:
            expected = one_of([repr(name) for name in formats if name not in (None, "naive-quantized")])
            return f"format is {self.format!r}, expected {expected}"
        return None

    def activation(self, accepted: Callable[[QuantKey], bool], expected: str) -> QuantKey | str | None:
        """Return the quantization of the input activations.

        Args:
            accepted: Whether the scheme supports a key.
            expected: Description of the supported keys.

        Returns:
            The key, None for 16 bits, or, as one clause, why the activations are not supported.
        """
        if self.inputs is None:
            return None
        key = self.inputs.activation_key(self.format)
        return (
            key if key is not None and accepted(key) else f"{self.inputs.where} is {self.inputs}, expected {expected}"
        )

    @property
    def summary(self) -> str:
        """A description of the weights and activations with the location of the group."""
        inputs = "16-bit activations" if self.inputs is None else f"{self.inputs} activations"
        return f"{self.weights} weights with {inputs}: {self.where}"


def quant_group(quantization: Mapping[str, Any], layer: LayerExperts) -> QuantGroup:
    """Find the group whose targets match the layer's expert modules.

    Exact names take precedence over patterns, and patterns over classes. If no target matches a module's name in the
    file, its names in other namings of the model (:mod:`moe_core.checkpoint.tools.namings`) are tried before classes.

    Args:
        quantization: Quantization settings of the checkpoint.
        layer: The layer's expert tensors.

    Returns:
        The group.

    Raises:
        CheckpointError: No group matches, a group is malformed, experts or projections have different settings, or
            the experts' inputs or outputs are transformed.
    """
    return layer.understood(quantization, _quant_group)


def _quant_group(quantization: Mapping[str, Any], layer: LayerExperts) -> QuantGroup:
    file = str(layer.checkpoint.path / "config.json")
    groups = quantization.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise CheckpointError(f"{file}: config_groups is {short(groups)}, expected an object with groups")
    entries = {name: group for name, group in groups.items() if isinstance(group, dict) and group.get("weights")}
    if not entries:
        raise CheckpointError(f"{file}: no group of config_groups has weights")
    modules = [module for _, _, module in expert_modules(layer)]
    _refuse_transforms(QuantEntries(quantization, file), modules, layer)
    owners = _owners({name: _listed(group) for name, group in entries.items()}, f"{file}: config_groups", layer)
    chosen: dict[str, str] = {}
    for module in modules:
        names = owners(module)
        if not names:
            raise CheckpointError(f"{file}: no target of config_groups matches {module}")
        for name in names:
            chosen.setdefault(name, module)
    parsed = [_group(name, entries[name], file, quantization) for name in chosen]
    for name in () if layer.is_linear else chosen:
        group = QuantEntries(entries[name], f"{file}: config_groups.{name}")
        if group.part("output_activations") is not None:
            raise group.error("output_activations", "null: quantized outputs of experts are not supported")
    first = parsed[0]
    for other in parsed[1:]:
        if (other.weights, other.inputs, other.format) != (first.weights, first.inputs, first.format):
            raise CheckpointError(
                f"{file}: {chosen[first.name]} has {first.weights} weights ({first.where}), {chosen[other.name]} has "
                f"{other.weights} ({other.where}): {_difference(first, other)}; all matrices of a layer's experts must "
                "be quantized alike"
            )
    return first


def _difference(one: QuantGroup, other: QuantGroup) -> str:
    """Describe the first difference between two groups."""
    for name, mine, theirs in (
        ("weights", one.weights, other.weights),
        ("input_activations", one.inputs, other.inputs),
    ):
        if mine is None or theirs is None or mine == theirs:
            if mine != theirs:
                return f"{name} are {mine or 'not quantized'} and {theirs or 'not quantized'}"
            continue
        key = next(part.name for part in fields(mine) if getattr(mine, part.name) != getattr(theirs, part.name))
        return f"{key} of {name} is {getattr(mine, key)!r} and {getattr(theirs, key)!r}"
    return f"format is {one.format!r} and {other.format!r}"


def _group(name: str, group: Mapping[str, Any], file: str, quantization: Mapping[str, Any]) -> QuantGroup:
    entries = QuantEntries(group, f"{file}: config_groups.{name}")
    weights, inputs = entries.part("weights"), entries.part("input_activations")
    if weights is None:
        raise entries.error("weights", "an object")
    own, top = entries.text("format"), QuantEntries(quantization, file).text("format")
    if own is not None and top not in (None, own, "mixed-precision"):
        raise CheckpointError(
            f"{entries.where}.format is {own!r}, but the top-level format is {top!r}: these contradict each "
            "other, expected the same or 'mixed-precision'"
        )
    return QuantGroup(name, _args(weights), None if inputs is None else _args(inputs), own or top)


def _args(entries: QuantEntries) -> QuantArgs:
    # The tool itself refuses null for these entries; only absent ones have defaults.
    for name in ("type", "num_bits", "symmetric", "dynamic"):
        entries.required(name)
    kind, group_size = entries.text("type", "int"), entries.integer("group_size", least=-1)
    if kind is None or kind.lower() not in _TYPES:
        raise entries.error("type", " or ".join(map(repr, _TYPES)))
    strategy, block = entries.text("strategy") or _implied_strategy(group_size), entries.block("block_structure")
    if strategy == "block" and block is None:
        raise CheckpointError(f"{entries.where}: block_structure is missing for strategy 'block'")
    for size, fits in (("block_structure", strategy == "block"), ("group_size", strategy in _GROUPED)):
        if not fits and entries.entries.get(size) not in (None, -1, 0):
            raise entries.error(size, f"none with strategy {strategy!r}")
    dynamic = entries.entries.get("dynamic", False)
    if not isinstance(dynamic, bool) and dynamic != "local":
        raise entries.error("dynamic", "true, false or 'local'")
    return QuantArgs(
        type=kind.lower(),
        num_bits=entries.integer("num_bits", 8) or 8,
        strategy=strategy.lower(),
        group_size=group_size,
        block=block,
        symmetric=entries.boolean("symmetric", True),
        dynamic=dynamic,
        actorder=_actorder(entries),
        scale_dtype=entries.text("scale_dtype"),
        where=entries.where,
    )


def _actorder(entries: QuantEntries) -> str | None:
    """Return the activation order ("group", or true for short, "weight" …), or None."""
    found = entries.entries.get("actorder")
    if isinstance(found, bool):
        return "group" if found else None
    name = entries.text("actorder")
    if name is not None and name.lower() not in _ORDERS:
        raise entries.error("actorder", " or ".join(map(repr, _ORDERS)))
    return None if name is None else name.lower()


def _implied_strategy(group_size: int | None) -> str:
    """Return the default strategy for a group size."""
    if group_size is None:
        return "tensor"
    return "channel" if group_size == -1 else "group"


def _listed(group: Mapping[str, Any], name: str = "targets") -> Sequence[str]:
    """Return the names, patterns and classes of modules that a group lists under ``name``."""
    found = group.get(name)
    return [target for target in found if isinstance(target, str)] if isinstance(found, list) else []


def _owners(targets: Mapping[str, Sequence[str]], where: str, layer: LayerExperts) -> Callable[[str], tuple[str, ...]]:
    """Return a function that maps a module's name to its groups, () if no target matches.

    Precedence is that of compressed-tensors: the exact name, then a pattern, then the class. Among several patterns the
    first in alphabetical order is used. A target of several groups belongs to the last group. Experts are either one
    module that holds them all or linear modules; classes of the former take precedence. Several groups may target such
    classes; their settings must agree.
    """
    kept = NamePatterns()
    groups = {target: group for group, listed in targets.items() for target in listed}
    patterns = [
        (groups[target], kept.regular(target.removeprefix("re:"), f"{where}.{groups[target]}: the target"))
        for target in sorted(groups)
        if target.startswith("re:")
    ]
    exact = under_any_name(groups.get, layer)
    matched = under_any_name(lambda name: next((g for g, pattern in patterns if pattern.match(name)), None), layer)
    of_class = () if layer.is_linear else tuple(dict.fromkeys(groups[t] for t in groups if is_experts_class(t)))
    of_class = of_class or tuple(groups[name] for name in _LINEAR_CLASSES if name in groups)[:1]

    def choose(module: str) -> tuple[str, ...]:
        named = exact(module) or matched(module)
        return of_class if named is None else (named,)

    return choose


def _refuse_transforms(entries: QuantEntries, modules: Sequence[str], layer: LayerExperts) -> None:
    """Refuse transforms (rotations) of the experts' inputs or outputs at run time."""
    transforms = entries.part("transform_config")
    groups = None if transforms is None else transforms.part("config_groups")
    for name in () if groups is None else groups.entries:
        group = groups.part(name) if groups is not None else None
        applied = None if group is None else group.entries.get("apply")
        for place in applied if isinstance(applied, list) else []:
            if not isinstance(place, dict) or place.get("location") not in ("input", "output"):
                continue
            where = f"{entries.where}: transform_config"
            owners = _owners({name: _listed(place, "targets")}, where, layer)
            ignored = _owners({name: _listed(place, "ignore")}, where, layer)
            found = next((module for module in modules if owners(module) and not ignored(module)), None)
            if found is not None:
                raise CheckpointError(
                    f"{entries.where}: transform_config.config_groups.{name} transforms the {place['location']} of "
                    f"{found} at run time, which is not supported for experts"
                )
