"""Check the inputs and weights that a backend uses in place of the given ones.

See :mod:`moe_core.interface.effective`.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from moe_core.interface.effective import effective_input, effective_weights
from moe_core.interface.experts import FusedMoEExperts
from moe_core.reference.fused_moe import Steps
from moe_core.reference.quantization import scale_values
from moe_core.spec.quant_key import QuantKey
from moe_core.spec.weights import MoEWeights
from moe_core.testing.cases import Case
from moe_core.testing.harness import Place, Problem, make_instance


def computed_with(experts: type[FusedMoEExperts], problem: Problem, place: Place) -> Problem:
    """Return the problem with the weights and hidden states that the backend computes with.

    Args:
        experts: Experts class.
        problem: The case's tensors.
        place: Where it runs.

    Returns:
        The problem; its tensors differ from the given ones by at most one rounding.

    Raises:
        AssertionError: They differ by more.
    """
    case, given = problem.case, problem.inputs
    instance = make_instance(experts, case, place)
    x = effective_input(instance, given.x)
    if not bool(((x.double() - given.x.double()).abs() <= 2.0**-20 * given.x.double().abs()).all()):
        raise AssertionError("break_ties moves hidden states by more than 2**-20 of themselves")
    weights = effective_weights(instance, problem.weights)
    check_requantized(weights, problem.weights, case)
    return replace(problem, weights=weights, inputs=replace(given, x=x))


def check_requantized(new: MoEWeights, old: MoEWeights, case: Case) -> None:
    """Check that requantized weights are the given weights, rounded at most once more.

    - With scales up to twice the expert's largest (the next power of two), an element moves by at most half a unit in
      its last place.
    - Biases are rounded to the layer's dtype at most.
    - Activations keep their element type and groups. Static scales increase up to the largest.

    Args:
        new: Weights that the backend computes with.
        old: Given weights.
        case: The case.

    Raises:
        AssertionError: A tensor is outside of these bounds.
    """
    if new is old:
        return
    mine, asked = new.activation_key, old.activation_key
    if (mine is None) != (asked is None) or (
        mine is not None
        and asked is not None
        and (mine.dtype, mine.group_shape, mine.is_static) != (asked.dtype, asked.group_shape, asked.is_static)
    ):
        raise AssertionError(f"requantized activations are {mine}, asked for was {asked}")
    one = replace(case.config, apply_router_weight_on_input=False)
    steps = [Steps(weights, one, torch.float64, None, None) for weights in (new, old)]
    for name in ("w13", "w2"):
        before = getattr(old, f"{name}_scale")
        for expert in range(one.local_experts):
            changed_to, given = (step.weight(name, expert) for step in steps)
            if new.weight_key is None or old.weight_key is None or before is None:
                allowed = torch.zeros_like(given)
            else:
                largest = scale_values(before[expert]).amax().double()
                eps, smallest = _places(new.weight_key)
                allowed = torch.maximum(given.abs() * eps / 2, largest * smallest)
            if not bool(((changed_to - given).abs() <= allowed).all()):
                raise AssertionError(f"requantized {name} of expert {expert} is further off than one rounding explains")
        biases = getattr(new, f"{name}_bias"), getattr(old, f"{name}_bias")
        if biases[1] is not None:
            bits = torch.finfo(one.dtype)
            allowed = (biases[1].double().abs() * bits.eps / 2).clamp_min(bits.smallest_normal * bits.eps)
            if not bool(((biases[0].double() - biases[1].double()).abs() <= allowed).all()):
                raise AssertionError(f"requantized {name}_bias is further off than rounding to {one.dtype} explains")
        scales = getattr(new, f"{name}_input_scale"), getattr(old, f"{name}_input_scale")
        if scales[1] is not None and not bool(((scales[0] >= scales[1]) & (scales[0] <= scales[1].amax())).all()):
            raise AssertionError(f"requantized {name}_input_scale leaves the range of the scales given")


def _places(key: QuantKey) -> tuple[float, float]:
    """The spacing at 1 of a key's float elements, and their smallest positive value."""
    return 2.0**-key.dtype.mantissa_bits, key.dtype.magnitudes[1]
