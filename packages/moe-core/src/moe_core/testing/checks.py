"""Checks of the conformance kit.

There is one function per value of :attr:`moe_core.testing.cases.Case.check`.

Each takes the experts class, the case and the place. It raises AssertionError with the finding.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from moe_core.interface.experts import FusedMoEExperts
from moe_core.reference.fused_moe import route_pairs
from moe_core.runtime.kernel import FusedMoEKernel
from moe_core.spec.activation import ActivationParams
from moe_core.spec.config import FusedMoEActivationFormat, FusedMoEConfig
from moe_core.spec.device import DeviceInfo
from moe_core.spec.environment import Environment
from moe_core.spec.quant_key import QuantKey
from moe_core.spec.routing import RoutingMethodType
from moe_core.spec.weights import KernelWeights
from moe_core.spec.workspace import Workspace, workspace_nbytes
from moe_core.testing.cases import Case, routing_of
from moe_core.testing.harness import (
    PRETENDED,
    Place,
    Problem,
    call,
    changed,
    make_instance,
    make_kernel,
    make_problem,
    same_bits,
    snapshot,
    watched_call,
)
from moe_core.testing.mistakes import compare
from moe_core.testing.requantized import computed_with

Check = Callable[[type[FusedMoEExperts], Case, Place], None]

#: larger results are compared by norm only, see `moe_core.reference.tolerance.Expected.compare`
_MOST_ELEMENTS = 2**20


def check_values(experts: type[FusedMoEExperts], case: Case, place: Place) -> None:
    """Check that the result is right and depends on the arguments alone.

    It must not depend on the contents of the workspace, on the previous output or on earlier calls.
    """
    problem = make_problem(case, place.device)
    kernel = make_kernel(experts, problem, place)
    held: dict[str, Tensor | None] = {"hidden_states": problem.inputs.x, **problem.arguments()}
    held.update(kernel.weights.tensors())
    before = snapshot(held)
    watched, result = watched_call(kernel, problem), call(kernel, problem)
    altered = changed(held, before)
    if altered:
        raise AssertionError(f"apply changed {', '.join(altered)}")
    if not same_bits(watched, result):
        # If a second watched call repeats the first, calls are deterministic and depend on the buffers' contents.
        again = same_bits(watched_call(kernel, problem), watched)
        cause = "the result depends on what output or workspace held before" if again else "repeated calls differ"
        raise AssertionError(f"{cause}: {int((watched != result).sum())} of {result.numel()} elements")
    compare(experts, problem, result, place, elements=result.numel() <= _MOST_ELEMENTS)
    if problem.router_logits is None and case.routing in ("invalid", "nothing"):
        _drop_weights(kernel, problem, result)


def _drop_weights(kernel: FusedMoEKernel, problem: Problem, result: Tensor) -> None:
    """Check that router weights of pairs without a local expert do not affect the result."""
    inputs = problem.inputs
    known = route_pairs(problem.case.config, inputs.topk_ids, inputs.expert_map)
    weights = torch.full_like(inputs.topk_weights, float("nan"))
    weights[known.token, known.slot] = inputs.topk_weights[known.token, known.slot]
    if not same_bits(call(kernel, replace(problem, inputs=replace(inputs, topk_weights=weights))), result):
        raise AssertionError("the result depends on router weights of pairs that have no expert here")


def check_convert(experts: type[FusedMoEExperts], case: Case, place: Place) -> None:
    """Check that conversion keeps its input, is deterministic, and describes its result."""
    problem = make_problem(case, place.device)
    given: dict[str, Tensor | None] = dict(problem.weights.tensors())
    before = snapshot(given)
    instance = make_instance(experts, case, place)
    first = instance.convert(problem.weights)
    altered = changed(given, before)
    if altered:
        raise AssertionError(f"convert changed its input: {', '.join(altered)}")
    # A later call must not change what an earlier call returned, so the first result is kept as a copy.
    kept = snapshot(dict(first.tensors()))
    second = dict(instance.convert(problem.weights).tensors())
    differing = [name for name, tensor in kept.items() if name not in second or not same_bits(second[name], tensor)]
    if differing or second.keys() != kept.keys():
        raise AssertionError(f"converting twice gives other weights: {', '.join(differing) or sorted(second)}")
    keys = (first.quant_config.weight_key, first.quant_config.activation_key)
    if keys != (case.weight_key, case.activation_key):
        raise AssertionError(f"the quant config of the converted weights says {keys[0]} with {keys[1]}")
    call(make_kernel(experts, problem, place), problem)
    altered = changed(given, before)
    if altered:
        raise AssertionError(f"apply changed the canonical weights: {', '.join(altered)}")
    _convert_elsewhere(experts, case, place)


def _convert_elsewhere(experts: type[FusedMoEExperts], case: Case, place: Place) -> None:
    """Check that CPU weights convert for a claimed but absent device, and stay on the CPU."""
    for other in map(DeviceInfo.parse, PRETENDED):
        if (
            other.arch != place.target.arch
            and experts.is_supported_config(
                case.config, case.weight_key, case.activation_key, device=other, environment=Environment.current()
            )[0]
        ):
            break
    else:
        return
    there = Place(torch.device("cpu"), other)
    try:
        converted = make_instance(experts, case, there).convert(make_problem(case, there.device).weights)
    except Exception as error:
        raise AssertionError(
            f"weights can't be converted for {other}, which is not here: {type(error).__name__}: {error}"
        ) from error
    moved = [f"{name} ({tensor.device})" for name, tensor in converted.tensors() if tensor.device != there.device]
    if moved:
        raise AssertionError(f"weights on the CPU, converted for {other}, leave it: {', '.join(moved)}")


def check_reload(experts: type[FusedMoEExperts], case: Case, place: Place) -> None:
    """Check that weights copied in place give a fresh kernel's result and that no tensor moves."""
    old = make_problem(case, place.device)
    other = make_problem(case, place.device, variant=1)
    kept = {name: getattr(old, name) for name in ("inputs", "router_logits", "correction_bias", "lora")}
    new = replace(other, **kept)
    kernel = make_kernel(experts, old, place)
    kernel.weights = _own(kernel.weights)
    first = call(kernel, old)
    pointers = [tensor.data_ptr() for _, tensor in kernel.weights.tensors()]
    fresh = make_kernel(experts, new, place)
    kernel.weights.copy_(fresh.weights)
    result, expected = call(kernel, new), call(fresh, new)
    if [tensor.data_ptr() for _, tensor in kernel.weights.tensors()] != pointers:
        raise AssertionError("reloading moved a tensor: captured graphs would read the old memory")
    if not same_bits(result, expected):
        raise AssertionError("after reloading, the result is not that of a fresh kernel")
    # The result is all zeros if no token selects an expert of this rank; then other weights change nothing.
    if same_bits(first, result) and bool(result.any()):
        raise AssertionError("after reloading, the result is still that of the old weights")


def _own(weights: KernelWeights) -> KernelWeights:
    """Return the same weights in memory they own; conversion may pass tensors through."""
    return replace(
        weights,
        w13=weights.w13.clone(),
        w2=weights.w2.clone(),
        quant_config=weights.quant_config.map(Tensor.clone),
        extra={name: tensor.clone() for name, tensor in weights.extra.items()},
    )


def check_invariance(experts: type[FusedMoEExperts], case: Case, place: Place) -> None:
    """Check that a token's result has the same bits alone and anywhere in batches of any size."""
    problem = make_problem(case, place.device)
    kernel = make_kernel(experts, problem, place)
    generator = torch.Generator().manual_seed(case.tokens)
    for token in (case.tokens // 2,) if place.interpreted else (0, case.tokens // 2):
        alone = call(kernel, problem.only([token]))
        for count in (2, 7, 33, 300):
            if count > case.tokens:
                break
            order = torch.randperm(case.tokens, generator=generator).tolist()
            among = [other for other in order if other != token][: count - 1]
            at = (token + count) % count
            among.insert(at, token)
            found = call(kernel, problem.only(among))[at : at + 1]
            if not same_bits(found, alone):
                raise AssertionError(
                    f"{int((found != alone).sum())} of {alone.numel()} elements of token {token} are others alone "
                    f"than among {count} tokens, at place {at}"
                )


def check_nan(experts: type[FusedMoEExperts], case: Case, place: Place) -> None:
    """Check that a NaN makes its token's result NaN and changes no other token.

    The token is also tested alone.

    - An infinity does the same where scales are computed from the activations. With a static scale, it saturates to the
      largest representable number.
    - A NaN router weight makes its token's result NaN, whatever the expert's result is.
    """
    problem = make_problem(case, place.device)
    kernel = make_kernel(experts, problem, place)
    inputs, key = problem.inputs, case.activation_key
    pairs = route_pairs(case.config, inputs.topk_ids, inputs.expert_map)
    routed = torch.unique(pairs.token).tolist()
    if not routed:
        return
    bad = [routed[-1], routed[0]] if len(routed) > 2 else routed[-1:]
    column = case.config.hidden_size // 2 + 1

    def with_values(*values: float) -> Problem:
        x = inputs.x.clone()
        # Zero the rest of these tokens, so that they do not affect scales shared with other tokens.
        x[bad] = 0
        for token, value in zip(bad, values, strict=False):
            x[token, column] = value
        return replace(problem, inputs=replace(inputs, x=x))

    def whole(result: Tensor, what: str) -> None:
        if not bool(result.isnan().all()):
            raise AssertionError(f"{int((~result.isnan()).sum())} of {result.numel()} elements of {what} are no NaN")

    def computed(problem: Problem) -> Tensor:
        with warnings.catch_warnings():
            if place.interpreted:
                warnings.simplefilter("ignore", RuntimeWarning)  # NumPy warns about NaN.
            return call(kernel, problem)

    poisoned = with_values(float("nan"), float("-inf"))
    result = computed(poisoned)
    whole(result[bad[0]], "the result of a token with a NaN")
    if case.config.activation_format is FusedMoEActivationFormat.STANDARD:
        # A single token may use dedicated kernels.
        whole(computed(poisoned.only(bad[:1])), "the result of a token with a NaN, alone")
    if len(bad) > 1 and key is not None and not key.is_static:
        whole(result[bad[1]], "the result of a token with an infinity")
    elif len(bad) > 1 and key is not None and not case.config.is_lora_enabled:
        largest = computed(with_values(float("nan"), torch.finfo(inputs.x.dtype).min))
        if not same_bits(result[bad[1]], largest[bad[1]]):
            raise AssertionError("a static scale does not saturate an infinity")
    if problem.router_logits is None:
        weights = inputs.topk_weights.clone()
        weights[bad[0], pairs.slot[pairs.token == bad[0]][0]] = float("nan")
        weighted = replace(problem, inputs=replace(inputs, topk_weights=weights))
        whole(computed(weighted)[bad[0]], "the result of a token whose router weight is NaN")
    others = [token for token in range(case.tokens) if token not in bad]
    rest = computed_with(experts, problem.only(others), place)
    rest.expected(place, experts.claims).compare(result[others], "the result of tokens beside one with a NaN")


def check_many_rows(experts: type[FusedMoEExperts], case: Case, place: Place) -> None:
    """Check that the result of hundreds of rows per expert is right in norm and reproducible.

    It must not depend on the contents of the workspace either: the last two calls are those of `check_values`.
    """
    problem = make_problem(case, place.device)
    kernel = make_kernel(experts, problem, place)
    # The interpreter runs CTAs one after the other, so repeated calls cannot differ.
    results = [call(kernel, problem) for _ in range(1 if place.interpreted else 3)]
    if not all(same_bits(result, results[0]) for result in results):
        raise AssertionError("repeated calls differ")
    if not same_bits(watched_call(kernel, problem), results[0]):
        raise AssertionError("the result depends on what output or workspace held before")
    compare(experts, problem, results[0], place, elements=False)


def check_compile(experts: type[FusedMoEExperts], case: Case, place: Place) -> None:
    """Check that ``torch.compile(fullgraph=True)`` takes two token counts and changes no bit."""
    with warnings.catch_warnings():
        # Importing some of torch's own modules raises this warning.
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.compiler.reset()
    problems = [
        make_problem(replace(case, tokens=tokens), place.device) for tokens in (case.tokens, max(case.tokens - 1, 1))
    ]
    kernel = make_kernel(experts, problems[0], place)

    def layer(problem: Problem) -> Tensor:
        # Operations before and after the call make a graph that could break.
        scaled = replace(problem, inputs=replace(problem.inputs, x=problem.inputs.x * 0.5))
        return call(kernel, scaled) + 1

    def plain(x: Tensor, arguments: dict[str, Tensor | None]) -> Tensor:
        x = x * 0.5
        if case.config.routing is not None and experts.is_monolithic:
            return kernel.apply_monolithic(x, **arguments) + 1  # type: ignore[arg-type]
        return kernel.apply(x, **arguments) + 1  # type: ignore[arg-type]

    compiled = torch.compile(plain, fullgraph=True, backend="aot_eager")
    for problem in problems:
        # All problems use the weights of the first problem.
        result = compiled(problem.inputs.x, problem.arguments())
        if not same_bits(result, layer(problem)):
            raise AssertionError(f"the compiled call differs from the eager one for {len(problem.inputs.x)} tokens")
    torch.compiler.reset()


def check_opcheck(experts: type[FusedMoEExperts], case: Case, place: Place) -> None:
    """Run ``torch.library.opcheck`` on the operator that a compiled call uses."""
    problem = make_problem(case, place.device)
    kernel = make_kernel(experts, problem, place)
    x, inputs = problem.inputs.x, problem.inputs
    output = torch.zeros_like(x)
    if problem.router_logits is not None:
        arguments = (output, x, problem.router_logits, problem.correction_bias, inputs.expert_map, kernel._handle)
        torch.library.opcheck(torch.ops.moe_core.fused_moe_monolithic.default, arguments)
    else:
        routed = (
            output,
            x,
            inputs.topk_weights,
            inputs.topk_ids,
            inputs.expert_map,
            kernel._handle,
            inputs.adapter_ids,
        )
        torch.library.opcheck(torch.ops.moe_core.fused_moe.default, routed)


def check_refusals(experts: type[FusedMoEExperts], case: Case, place: Place) -> None:
    """Check that the case's layer is accepted and unclaimed layers are refused with a reason."""
    environment = Environment.current()

    def answer(config: FusedMoEConfig) -> tuple[bool, str | None]:
        return experts.is_supported_config(
            config, case.weight_key, case.activation_key, device=place.target, environment=environment
        )

    accepted, reason = answer(case.config)
    if not accepted or reason is not None:
        raise AssertionError(f"a supported layer must be answered (True, None), got {(accepted, reason)}")
    for what, config in unclaimed(experts, case.config, case.weight_key):
        accepted, reason = answer(config)
        if accepted or not reason:
            raise AssertionError(f"{what} is not claimed and must be refused with a reason, got {(accepted, reason)}")


def unclaimed(
    experts: type[FusedMoEExperts], config: FusedMoEConfig, weight_key: QuantKey | None
) -> Iterator[tuple[str, FusedMoEConfig]]:
    """Yield variants of a layer that each differ by one unclaimed property.

    Args:
        experts: Experts class.
        config: A layer that the class supports.
        weight_key: Weight key of the layer; it determines the required size multiples.

    Returns:
        Pairs of the property's name and the layer.
    """
    claims = experts.claims
    if not claims.bias:
        yield "bias", replace(config, has_bias=True)
    if not claims.expert_map:
        yield "an expert map", replace(config, num_experts=2 * config.num_experts, num_local_experts=config.num_experts)
    if not claims.apply_router_weight_on_input:
        yield "the router weight on the input", replace(config, top_k=1, apply_router_weight_on_input=True)
    if not claims.lora:
        yield "LoRA", replace(config, is_lora_enabled=True)
    if not claims.batch_invariant:
        yield "batch invariance", replace(config, batch_invariant=True)
    if not claims.limits(config.activation):
        yield "a clamp limit", replace(config, activation_params=ActivationParams(limit=0.75))
    for activation in type(config.activation):
        if activation not in claims.activations:
            yield f"the activation {activation.value}", replace(config, activation=activation, activation_params=None)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        if dtype not in claims.dtypes:
            yield f"hidden states of {dtype}", replace(config, dtype=dtype)
    for layout in FusedMoEActivationFormat:
        if layout not in claims.formats:
            yield f"the {layout.value} format", replace(config, activation_format=layout, max_num_tokens=64)
    hidden_multiple, intermediate_multiple = claims.multiples(weight_key)
    if hidden_multiple > 1:
        yield "the hidden size", replace(config, hidden_size=config.hidden_size + 1)
    if intermediate_multiple > 1:
        yield "the intermediate size", replace(config, intermediate_size=config.intermediate_size + 1)
    if claims.max_top_k:
        many = max(config.num_experts, claims.max_top_k + 1)
        more = replace(config, num_experts=many, num_local_experts=many, apply_router_weight_on_input=False)
        yield "the top-k", replace(more, top_k=claims.max_top_k + 1)
    if claims.max_experts:
        many = claims.max_experts + 1
        yield "the number of experts", replace(config, num_experts=many, num_local_experts=many)
    if claims.routing_methods is not None:
        yield "no routing", replace(config, routing=None)
        for method in RoutingMethodType:
            computed = method not in (RoutingMethodType.Unspecified, RoutingMethodType.Simulated)
            if computed and method not in claims.routing_methods:
                yield f"the routing method {method.name}", replace(config, routing=routing_of(method))


def check_graph(experts: type[FusedMoEExperts], case: Case, place: Place) -> None:
    """Check that a CUDA graph replayed with other inputs gives the bits of eager calls."""
    problem = make_problem(case, place.device)
    others = [make_problem(case, place.device, variant=v) for v in (1, 2)]
    kernel = make_kernel(experts, problem, place)
    output = torch.empty_like(problem.inputs.x)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # Warm-up calls compile kernels and allocate memory before the capture.
            call(kernel, problem, output)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(kernel, problem, output)
    static: dict[str, Tensor | None] = {"hidden_states": problem.inputs.x, **problem.arguments()}
    for number, other in enumerate([problem, *others]):
        fresh: dict[str, Tensor | None] = {"hidden_states": other.inputs.x, **other.arguments()}
        expected = call(kernel, other)
        for name, tensor in static.items():
            source = fresh[name]
            if tensor is not None and source is not None:
                tensor.copy_(source)
        output.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        if not same_bits(output, expected):
            raise AssertionError(f"replay {number} of the captured graph differs from the eager call")


def check_sync(experts: type[FusedMoEExperts], case: Case, place: Place) -> None:
    """Check that a call never synchronizes with the device."""
    problem = make_problem(case, place.device)
    kernel = make_kernel(experts, problem, place)
    call(kernel, problem)  # Compilation may synchronize.
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns that the mode is a prototype.
        torch.cuda.set_sync_debug_mode("error")
    try:
        call(kernel, problem)
    except RuntimeError as error:
        raise AssertionError(f"a call synchronizes with the host: {error}") from error
    finally:
        torch.cuda.set_sync_debug_mode("default")


def check_memory(experts: type[FusedMoEExperts], case: Case, place: Place) -> None:
    """Check that a standard-format call with a caller's workspace and output allocates nothing."""
    claims = experts.claims
    if claims.allocates:
        return
    if case.config.activation_format is not FusedMoEActivationFormat.STANDARD or not claims.reduces:
        return  # Prepare and finalize own buffers in these cases.
    if not claims.expects_unquantized_inputs and case.activation_key is not None:
        return
    problem = make_problem(case, place.device)
    kernel = make_kernel(experts, problem, place)
    watched_call(kernel, problem)
    needed = workspace_nbytes(kernel.workspaces(case.tokens))
    kernel.workspace = Workspace(place.device, torch.empty(needed, dtype=torch.uint8, device=place.device))
    output = torch.empty_like(problem.inputs.x)
    before = torch.cuda.memory_stats(place.device)["allocation.all.allocated"]
    call(kernel, problem, output)
    count = torch.cuda.memory_stats(place.device)["allocation.all.allocated"] - before
    if count:
        raise AssertionError(f"a call with a caller's workspace and output makes {count} allocations")


def check_large(experts: type[FusedMoEExperts], case: Case, place: Place) -> None:
    """Check the result of a layer that is large in one dimension."""
    problem = make_problem(case, place.device)
    compare(experts, problem, watched_call(make_kernel(experts, problem, place), problem), place)


def check_range(experts: type[FusedMoEExperts], case: Case, place: Place) -> None:
    """Check the activation on inputs from 1e-12 to 1e4, in one batch and for single tokens.

    The bounds of a token follow its own magnitude, so a small token shows a difference that cancels. Beyond a clamp
    limit, many values of h are equal and share one rounding error. Elements of such tokens are therefore not bounded
    one by one.
    """
    problem = make_problem(case, place.device)
    inputs = problem.inputs
    sizes = torch.logspace(-12, 4, case.tokens, dtype=torch.float64, device=place.device)
    x = (inputs.x.double() * sizes[:, None]).to(inputs.x.dtype)
    problem = replace(problem, inputs=replace(inputs, x=x))
    kernel = make_kernel(experts, problem, place)
    result = call(kernel, problem)
    # A single token may use dedicated kernels.
    some = list(range(0, case.tokens, 4))
    singles = torch.cat([call(kernel, problem.only([token])) for token in some])
    limit = case.config.params.limit
    unlimited = [token for token, size in enumerate(sizes.tolist()) if limit is None or size < limit / 100]
    for tokens, found in ((list(range(case.tokens)), result), (some, singles)):
        compare(experts, problem.only(tokens), found, place, elements=limit is None)
        small = [row for row, token in enumerate(tokens) if token in unlimited]
        if limit is not None and small:
            compare(experts, problem.only([tokens[row] for row in small]), found[small], place)


def check_claims(experts: type[FusedMoEExperts], case: Case, place: Place) -> None:
    """Fail because a claimed property has no supported configuration."""
    raise AssertionError(case.reason)


CHECKS: dict[str, Check] = {
    "values": check_values,
    "convert": check_convert,
    "reload": check_reload,
    "invariance": check_invariance,
    "nan": check_nan,
    "many_rows": check_many_rows,
    "large": check_large,
    "range": check_range,
    "compile": check_compile,
    "opcheck": check_opcheck,
    "refusals": check_refusals,
    "graph": check_graph,
    "sync": check_sync,
    "memory": check_memory,
    "claims": check_claims,
}
