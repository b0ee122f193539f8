"""A layer's function: moe-core's own results through SGLang's types, or SGLang's function with a reason."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from moe_core import as_quant_key
from moe_core.errors import MoEError
from moe_core.spec.device import DeviceInfo
from moe_core.testing.data import make_weights
from moe_sglang import fused
from moe_sglang.fused import FusedFunction
from moe_sglang.kinds import KINDS, kind_of
from moe_sglang.weights import canonical
from moe_sglang_layers import ROWS, E, config, dispatched, expected, info_of, row_name, runner, weights_of

BLOCK = ("use_fp8_w8a8", "block")
INT4 = ("use_int4_w4a16", "group")
INT8 = ("use_int8_w8a8", "channel")


class Own:
    """In the place of SGLang's own function; notes its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, *arguments: Any) -> str:
        self.calls.append(arguments)
        return "sglang"


@pytest.fixture
def own() -> Own:
    return Own()


@pytest.fixture
def function(sglang: types.SimpleNamespace, own: Own) -> FusedFunction:
    return FusedFunction(own, ("fp8", "int8", "wna16"))


@pytest.mark.parametrize("case", ROWS, ids=row_name)
def test_results_are_those_of_moe_cores_layer(
    sglang: types.SimpleNamespace, case: tuple[tuple[str, str], bool], said: list[str]
) -> None:
    """Through the function that SGLang's pool gives a runner."""
    row, static = case
    weights = weights_of(row, static, config())
    kind, info, tokens = KINDS[row], info_of(sglang, row, weights), dispatched(sglang)
    assert (kind_of(info).weight_key, kind_of(info).activation_key) == (weights.weight_key, weights.activation_key)
    found = sglang.FusedOpPool.get_fused_func("none", "triton")(tokens, info, runner(sglang))
    assert type(found) is sglang.StandardCombineInput
    assert torch.equal(found.hidden_states, expected(kind.scheme, config(), weights, tokens))
    assert found.hidden_states.any()
    assert len(said) == 1
    assert said[0].startswith(f"experts by moe-core: {kind.scheme} torch (")


def test_other_sizes_of_blocks_and_groups_and_other_dtypes(sglang: types.SimpleNamespace, own: Own) -> None:
    for row, name in ((BLOCK, "kFp8Static128BlockSym[64x64]"), (INT4, "kInt4Static[1x32,float16]")):
        activation = as_quant_key("kFp8Dynamic64Sym") if row == BLOCK else None
        layer = config(dtype=torch.float16)
        weights = make_weights(layer, as_quant_key(name), activation, seed=0)
        tokens = dispatched(sglang, dtype=torch.float16)
        found = FusedFunction(own, ("fp8", "wna16"))(tokens, info_of(sglang, row, weights), runner(sglang))
        assert torch.equal(found.hidden_states, expected(KINDS[row].scheme, layer, weights, tokens))
    assert not own.calls


def test_every_runner_gets_a_function_of_its_own_and_other_runners_keep_theirs(sglang: types.SimpleNamespace) -> None:
    get = sglang.FusedOpPool.get_fused_func
    first, second = get("none", "triton"), get("none", "triton")
    assert isinstance(first, FusedFunction)
    assert first is not second
    assert not isinstance(get("none", "marlin"), FusedFunction)
    assert get("none", "no such runner") is None


def test_experts_of_other_ranks_add_nothing(sglang: types.SimpleNamespace, function: FusedFunction) -> None:
    weights = weights_of(BLOCK, False, config())
    tokens = dispatched(sglang)
    topk = tokens.topk_output
    ids = topk.topk_ids.clone()
    ids[:, 1], ids[0] = -1, -1
    tokens = tokens._replace(topk_output=topk._replace(topk_ids=ids))
    found = function(tokens, info_of(sglang, BLOCK, weights), runner(sglang, num_experts=64))
    one = tokens._replace(topk_output=topk._replace(topk_ids=ids, topk_weights=topk.topk_weights * (ids >= 0)))
    assert torch.equal(found.hidden_states, expected("fp8", config(), weights, one))
    assert not found.hidden_states[0].any()
    assert found.hidden_states[1].any()


def test_the_scaling_factor_multiplies_the_sum(sglang: types.SimpleNamespace, function: FusedFunction) -> None:
    weights = weights_of(BLOCK, False, config())
    info, tokens = info_of(sglang, BLOCK, weights), dispatched(sglang)
    plain = function(tokens, info, runner(sglang)).hidden_states
    # a power of two: exact wherever it is multiplied
    assert torch.equal(function(tokens, info, runner(sglang, routed_scaling_factor=4.0)).hidden_states, plain * 4)
    assert torch.equal(function(tokens, info, runner(sglang, routed_scaling_factor=1.0)).hidden_states, plain)


def test_biases_and_router_weights_on_the_input(sglang: types.SimpleNamespace, function: FusedFunction) -> None:
    layer = config(has_bias=True, top_k=1, apply_router_weight_on_input=True)
    weights = weights_of(BLOCK, False, layer)
    tokens = dispatched(sglang)
    topk = tokens.topk_output
    topk = topk._replace(topk_weights=topk.topk_weights[:, :1], topk_ids=topk.topk_ids[:, :1])
    tokens = tokens._replace(topk_output=topk)
    found = function(tokens, info_of(sglang, BLOCK, weights), runner(sglang, apply_router_weight_on_input=True))
    assert torch.equal(found.hidden_states, expected("fp8", layer, weights, tokens))


def test_the_kernel_is_made_once_and_again_for_other_tensors(
    sglang: types.SimpleNamespace, function: FusedFunction, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    select = fused.select_kernel
    monkeypatch.setattr(fused, "select_kernel", lambda *a, **k: made.append(a) or select(*a, **k))
    weights = weights_of(BLOCK, False, config())
    info, tokens = info_of(sglang, BLOCK, weights), dispatched(sglang)
    function(tokens, info, runner(sglang))
    # SGLang describes the same tensors anew in every call
    function(dispatched(sglang, 7), info_of(sglang, BLOCK, weights), runner(sglang))
    assert len(made) == 1
    assert function.kernel is not None
    assert function.kernel.weights.w13.data_ptr() == weights.w13.data_ptr()
    other = weights_of(BLOCK, False, config(), seed=1)
    found = function(tokens, info_of(sglang, BLOCK, other), runner(sglang))
    assert len(made) == 2
    assert torch.equal(found.hidden_states, expected("fp8", config(), other, tokens))


def test_new_values_in_the_same_tensors_are_used(sglang: types.SimpleNamespace, function: FusedFunction) -> None:
    weights, new = (weights_of(BLOCK, False, config(), seed=seed) for seed in (0, 1))
    info, tokens = info_of(sglang, BLOCK, weights), dispatched(sglang)
    function(tokens, info, runner(sglang))
    for (_, mine), (_, theirs) in zip(weights.tensors(), new.tensors(), strict=True):
        mine.copy_(theirs)
    found = function(tokens, info, runner(sglang))
    assert torch.equal(found.hidden_states, expected("fp8", config(), new, tokens))


def test_a_kernel_is_made_anew_for_tensors_with_other_memory(
    sglang: types.SimpleNamespace, function: FusedFunction
) -> None:
    weights, new = (weights_of(BLOCK, False, config(), seed=seed) for seed in (0, 1))
    info, tokens = info_of(sglang, BLOCK, weights), dispatched(sglang)
    function(tokens, info, runner(sglang))
    former = function.kernel
    for (_, mine), (_, theirs) in zip(weights.tensors(), new.tensors(), strict=True):
        mine.data = theirs
    found = function(tokens, info, runner(sglang))
    assert function.kernel is not former
    assert torch.equal(found.hidden_states, expected("fp8", config(), new, tokens))


@pytest.mark.parametrize(("row", "static"), [(BLOCK, False), (INT8, False), (("use_fp8_w8a8", "tensor"), False)])
def test_sglang_refuses_new_weights_where_tensors_are_derived(
    sglang: types.SimpleNamespace, function: FusedFunction, row: tuple[str, str], static: bool
) -> None:
    module = torch.nn.Module()
    info = info_of(sglang, row, weights_of(row, static, config()))
    function(dispatched(sglang), info, runner(sglang, layer=module))
    reason = getattr(module, "_derived_weight_cache_error", None)
    if row[1] == "tensor":
        assert reason is not None
        assert "it holds w1_scale in a layout of its own. Restart with MOE_SGLANG=off" in reason
    else:
        assert reason is None


@pytest.mark.parametrize("state", ["compiling", "capturing"])
def test_no_kernel_is_made_while_a_graph_is_made(
    sglang: types.SimpleNamespace, function: FusedFunction, own: Own, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    info, tokens = info_of(sglang, BLOCK, weights_of(BLOCK, False, config())), dispatched(sglang)
    with monkeypatch.context() as patched:
        if state == "compiling":
            patched.setattr(torch.compiler, "is_compiling", lambda: True)
        else:
            patched.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            patched.setattr(torch.Tensor, "is_cuda", True)
        assert function(tokens, info, runner(sglang)) == "sglang"
    assert function.kernel is None
    assert function(tokens, info, runner(sglang)) != "sglang"
    assert len(own.calls) == 1


# ----------------------------------------------------------------- left to SGLang


def plain(sglang: types.SimpleNamespace) -> Any:
    weights = weights_of(BLOCK, False, config())
    return sglang.TritonMoeQuantInfo(weights.w13.bfloat16(), weights.w2.bfloat16())


def changed(row: tuple[str, str], **changes: Any) -> Callable[[types.SimpleNamespace], Any]:
    def make(sglang: types.SimpleNamespace) -> Any:
        info = info_of(sglang, row, weights_of(row, False, config()))
        for name, value in changes.items():
            setattr(info, name, value)
        return info

    return make


@pytest.mark.parametrize(
    ("info", "settings", "reason"),
    [
        (plain, {}, "the experts are not quantized"),
        (changed(BLOCK, use_mxfp8=True), {}, "the experts are use_mxfp8 and use_fp8_w8a8"),
        (changed(INT8, block_shape=[128, 128]), {}, "use_int8_w8a8 with scales per block"),
        (changed(INT8, per_channel_quant=False), {}, "use_int8_w8a8 with scales per tensor"),
        (changed(BLOCK, w13_scale=torch.ones(E, 3, 2)), {}, "w13_scale has shape [4, 3, 2], expected [4, 2, 2]"),
        (changed(BLOCK, b13=torch.zeros(E, 256)), {}, "w13 and w2 must both have biases"),
        (
            changed(("use_fp8_w8a8", "tensor"), w13_scale=torch.ones(E, 3)),
            {},
            "w13_scale has shape [4, 3], expected one scale for each of 4 experts",
        ),
        (
            changed(("use_fp8_w8a8", "tensor"), a13_scale=torch.ones(1)),
            {},
            "a2_scale has shape None, expected one scale, or one for each of 4 experts",
        ),
        (changed(BLOCK), {"no_combine": True}, "no_combine"),
        (changed(BLOCK), {"activation": "silu_rounded"}, "activation silu_rounded is not supported"),
        (changed(BLOCK), {"gemm1_alpha": 1.7, "gemm1_clamp_limit": 7.0}, "gate_up_interleaved"),
        (
            changed(BLOCK),
            {"apply_router_weight_on_input": True, "routed_scaling_factor": 2.0},
            "routed_scaling_factor is not supported",
        ),
    ],
)
def test_what_no_kernel_claims_is_left_to_sglang_with_the_reason(
    sglang: types.SimpleNamespace,
    function: FusedFunction,
    own: Own,
    said: list[str],
    info: Callable[[types.SimpleNamespace], Any],
    settings: dict[str, Any],
    reason: str,
) -> None:
    arguments = dispatched(sglang), info(sglang), runner(sglang, **settings)
    for _ in range(2):
        assert function(*arguments) == "sglang"
    assert own.calls == [arguments] * 2
    assert len(said) == 1
    assert reason in said[0]
    assert said[0].startswith("experts by SGLang's own function: ")


def test_schemes_that_are_off_and_memory_that_is_sglangs(
    sglang: types.SimpleNamespace, own: Own, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    info = info_of(sglang, BLOCK, weights_of(BLOCK, False, config()))
    assert FusedFunction(own, ("int8",))(dispatched(sglang), info, runner(sglang)) == "sglang"
    function = FusedFunction(own, ("fp8",))
    monkeypatch.setattr(function._names, "is_symmetric_memory_enabled", lambda: True)
    assert function(dispatched(sglang), info, runner(sglang)) == "sglang"
    assert [message.partition(": ")[2] for message in said] == [
        "MOE_SGLANG leaves fp8 off, or its package is not installed",
        "outputs in NCCL symmetric memory (--enable-symm-mem) are not supported",
    ]


@pytest.mark.parametrize(("row", "stays"), [(BLOCK, True), (("use_fp8_w8a8", "tensor"), False)])
def test_experts_that_sglang_moves_are_in_tensors_of_its_own(
    sglang: types.SimpleNamespace,
    function: FusedFunction,
    own: Own,
    said: list[str],
    monkeypatch: pytest.MonkeyPatch,
    row: tuple[str, str],
    stays: bool,
) -> None:
    published = types.SimpleNamespace(moe=types.SimpleNamespace(enable_eplb=True))
    monkeypatch.setattr(function._names, "get_exec", lambda: published)
    info = info_of(sglang, row, weights_of(row, False, config()))
    function(dispatched(sglang), info, runner(sglang))
    assert (function.kernel is not None, len(own.calls)) == (stays, int(not stays))
    if not stays:
        assert "w1_scale have a separate layout" in said[0]
    published.moe.enable_eplb = False
    other = FusedFunction(own, ("fp8",))
    monkeypatch.setattr(other._names, "get_exec", lambda: published)
    other(dispatched(sglang), info, runner(sglang))
    assert other.kernel is not None


def test_rows_that_sglang_has_interleaved_are_left_to_it(
    sglang: types.SimpleNamespace, function: FusedFunction, said: list[str]
) -> None:
    info = info_of(sglang, BLOCK, weights_of(BLOCK, False, config()))
    info.fuse_swiglu_interleaved = True
    assert function(dispatched(sglang), info, runner(sglang)) == "sglang"
    assert "(fuse_swiglu_interleaved)" in said[0]


def test_a_batch_invariant_engine_gets_batch_invariant_kernels_or_its_own(
    sglang: types.SimpleNamespace, function: FusedFunction, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(function._names, "is_batch_invariant_mode_enabled", lambda: True)
    function(dispatched(sglang), info_of(sglang, BLOCK, weights_of(BLOCK, False, config())), runner(sglang))
    assert function.kernel is None or function.kernel.config.batch_invariant


@pytest.mark.parametrize(
    ("row", "device", "backend"),
    [(BLOCK, "h200", "triton"), (INT8, "sm80", "triton"), (INT4, "h200", "triton"), (INT4, "sm80", "triton")],
)
def test_kernels_of_gpus_read_the_codes_where_they_lie(
    sglang: types.SimpleNamespace, row: tuple[str, str], device: str, backend: str
) -> None:
    """Marlin, which is preferred for INT4, would lay them out anew, and so would the others on sm_90 by default."""
    weights = canonical(info_of(sglang, row, weights_of(row, False, config())), KINDS[row], 2)
    selection = fused.choose(KINDS[row], config(), weights, DeviceInfo.parse(device))
    assert (selection.backend, selection.report.device.is_gpu) == (backend, True)
    assert fused.keeps_codes(selection, weights)


def test_a_gpu_without_such_a_kernel_is_left_to_sglang() -> None:
    row = ("use_int8_w8a16", "channel")
    with pytest.raises(MoEError, match="int8: triton"):
        fused.choose(KINDS[row], config(), weights_of(row, False, config()), DeviceInfo.parse("h200"))
    with pytest.raises(MoEError, match="sm75"):
        fused.choose(KINDS[BLOCK], config(), weights_of(BLOCK, False, config()), DeviceInfo.parse("sm75"))


def test_a_made_kernel_takes_part_in_torch_compile(
    sglang: types.SimpleNamespace, function: FusedFunction, own: Own
) -> None:
    info, tokens = info_of(sglang, BLOCK, weights_of(BLOCK, False, config())), dispatched(sglang)
    expected_ = function(tokens, info, runner(sglang)).hidden_states

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(x: torch.Tensor) -> torch.Tensor:
        return 2 * function(tokens._replace(hidden_states=x), info, runner(sglang)).hidden_states

    assert torch.equal(step(tokens.hidden_states), 2 * expected_)
    assert not own.calls
