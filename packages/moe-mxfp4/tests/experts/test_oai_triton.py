"""OpenAI's triton_kernels: its adapter around a double, how it is found, and the library where it and a GPU are there.

The double reads codes and scales from the places in which the library's kernels look for them, written down here one by
one.  Layouts are compared with the library's own in tests/libraries.
"""

from __future__ import annotations

import importlib
import itertools
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from moe_core import (
    TRITON,
    ActivationParams,
    ConfigError,
    Environment,
    FusedMoEConfig,
    FusedMoEKernel,
    MoEActivation,
    kMxfp4Static,
    kMxfp8Dynamic,
)
from moe_core.parallel.prepare_finalize.by_name import default_prepare_finalize
from moe_core.reference.tolerance import expected_output
from moe_core.spec.activation import apply_moe_activation
from moe_core.spec.device import DeviceInfo
from moe_core.spec.numerics import E2M1_VALUES, e8m0_to_float32
from moe_core.testing import ConformanceTests
from moe_core.testing.data import make_inputs, make_weights
from moe_mxfp4 import Mxfp4MoeBackend, mxfp4_round_up_hidden_size_and_intermediate_size
from moe_mxfp4.experts.oai_triton import OAITritonExperts
from moe_mxfp4.libraries import TRITON_KERNELS
from moe_mxfp4.libraries.hopper_layout import swizzled_scales, swizzled_weights
from moe_mxfp4.libraries.oai_triton import load_triton_kernels

MISSING = Environment.current().reason_against(TRITON_KERNELS)
needs_the_library = pytest.mark.skipif(MISSING is not None, reason="OpenAI's triton_kernels is not installed")
on_a_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton does not interpret where there is a GPU")
LAYER = FusedMoEConfig(
    num_experts=4, top_k=2, hidden_size=128, intermediate_size=96, activation=MoEActivation.SWIGLUOAI, has_bias=True
)
PARAMS = (
    None,
    ActivationParams(alpha=1.25, limit=0.75),
    ActivationParams(alpha=0.5, limit=3.0),
    ActivationParams(limit=math.inf),
    ActivationParams(alpha=1.25, beta=0.5, limit=3.0),
)


@pytest.mark.gpu
@needs_the_library
class TestOAITriton(ConformanceTests):
    experts = OAITritonExperts


# ------------------------------------------------------------------ layouts

#: lowest bit of each of a code's four bits within half a word, by the code's number
BITS = ((6, 7, 8, 15), (3, 4, 5, 12), (0, 1, 2, 9), (13, 10, 11, 14))


def grid(rows, columns):
    return torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")


def read_codes(w):
    """[rows, columns] of one expert's swizzled bytes [rows / 4, 2 columns]."""
    row, column = grid(4 * w.shape[0], w.shape[1] // 2)
    words, byte = w.contiguous().view(torch.int32).long(), column // 2
    place = row // 16 * 4 + row % 8 // 2
    word = ((byte // 32 * 2 + row % 2) * 4 + byte % 4) * 4 + byte // 8 % 4
    number = byte // 4 % 2 * 2 + row // 8 % 2
    bits = torch.tensor(BITS)[number] + 16 * (column % 2)[..., None]
    found = (words[place, word][..., None] >> bits) & 1
    return (found << torch.arange(4)).sum(-1)


def read_scales(scale, warps):
    """[rows, groups] of one expert's swizzled scales [rows / 32, 32 groups]."""
    row, group = grid(32 * scale.shape[0], scale.shape[1] // 32)
    place = row // (32 * warps) * warps + row // 16 % warps
    half = row // (16 * warps) % 2
    column = (((group // 2 * 2 + half) * 8 + row % 8) * 2 + group % 2) * 2 + row // 8 % 2
    return scale[place, column]


def canonical_codes(w):
    return torch.stack((w & 15, w >> 4), dim=-1).flatten(-2).long()


@pytest.mark.parametrize(("rows", "columns"), [(16, 64), (48, 192), (256, 128)])
def test_every_code_has_its_place(rows, columns):
    w = torch.randint(0, 256, (3, rows, columns // 2), dtype=torch.uint8)
    swizzled = swizzled_weights(w)
    assert swizzled.shape == (3, rows // 4, 2 * columns)
    for mine, given in zip(swizzled, w, strict=True):
        assert torch.equal(read_codes(mine), canonical_codes(given))


@pytest.mark.parametrize("warps", [4, 8])
def test_every_scale_has_its_place(warps):
    scale = torch.randint(0, 256, (3, 512, 6), dtype=torch.uint8)
    for mine, given in zip(swizzled_scales(scale, warps), scale, strict=True):
        assert torch.equal(read_scales(mine, warps), given)


# ------------------------------------------------------------------- double


def matmul_ogs(
    *, x, w, bias, routing_data, precision_config, y, gather_indx=None, fused_activation=None
):  # fmt: skip
    experts, cols, rows = w.shape
    scale = precision_config.weight_scale.storage
    assert w.dtype == "FP4"
    assert w.storage.layout.mx_axis == scale.layout.mx_axis == 1
    # columns first, and contiguous along them
    assert w.storage.data.shape == (experts, 2 * cols, rows // 4)
    assert w.storage.data.stride(1) == scale.data.stride(1) == 1
    warps = scale.layout.num_warps
    # a tile of rows is 32 of each warp
    assert warps == (8 if rows > 128 else 4)
    assert scale.data.shape == (experts, -(-cols // 128) * 128, -(-rows // (32 * warps)) * warps)
    assert cols % 64 == 0
    assert x.dtype is y.dtype is torch.bfloat16
    assert x.shape[1] == cols
    reduction = 1 if fused_activation is None else fused_activation.reduction_n
    total = len(x) if gather_indx is None else len(gather_indx.src_indx)
    assert y.shape == (1, total, rows // reduction)
    assert bias is None or (bias.dtype is torch.float32 and bias.shape == (experts, rows))
    counts = routing_data.expt_hist
    assert counts is routing_data.expt_data.hist
    assert routing_data.expt_data.pairs == total
    start = 0
    for expert, count in enumerate(counts.tolist()):
        own = slice(start, start + count)
        start += count
        if not count:
            continue
        source = x[own] if gather_indx is None else x[gather_indx.src_indx[own].long() // routing_data.n_expts_act]
        codes = read_codes(w.storage.data[expert].t())
        exponents = read_scales(scale.data[expert].t(), warps)[:rows, : cols // 32]
        values = torch.tensor(E2M1_VALUES)[codes] * e8m0_to_float32(exponents).repeat_interleave(32, 1)
        z = source.float() @ values.t() + (0 if bias is None else bias[expert])
        if fused_activation is not None:
            alpha, limit = fused_activation.fn_args
            assert fused_activation.specs.fn_arg_names == ("alpha", "limit")
            params = ActivationParams(alpha=alpha, beta=1.0, limit=math.inf if limit is None else limit)
            z = apply_moe_activation(MoEActivation.SWIGLUOAI, torch.cat((z[:, 0::2], z[:, 1::2]), 1), params)
        y[0, own] = z.bfloat16()


def record(*names):
    """A class of these fields."""

    def make(*values, **keywords):
        return SimpleNamespace(**dict(zip(names, values, strict=False)), **keywords)

    return make


DOUBLE = SimpleNamespace(
    FP4="FP4",
    FnSpecs=record("name", "fn", "fn_arg_names"),
    FusedActivation=record("specs", "fn_args", "reduction_n"),
    GatherIndx=record("src_indx", "dst_indx"),
    HopperMXScaleLayout=record("shape"),
    HopperMXValueLayout=record("shape"),
    PrecisionConfig=record(),
    RoutingData=record("gate_scal", "expt_hist", "n_expts_tot", "n_expts_act"),
    Storage=record("data", "layout"),
    Tensor=record("storage"),
    compute_expt_data=record("hist", "experts", "pairs"),
    matmul_ogs=matmul_ogs,
    swiglu_fn=None,
)


class Double(OAITritonExperts):
    claims = replace(OAITritonExperts.claims, requires=(TRITON,))

    @staticmethod
    def library():
        return DOUBLE


class TestDouble(ConformanceTests):
    experts = Double
    device = "cpu"


def run(experts, config, device="cpu", tokens=3):
    """One call, compared with the reference."""
    weights = make_weights(config, kMxfp4Static, None, seed=0).to(device)
    instance = experts(config, weight_key=kMxfp4Static, activation_key=None, device=DeviceInfo.parse("sm90"))
    kernel = FusedMoEKernel(instance, instance.convert(weights), default_prepare_finalize(config))
    inputs = make_inputs(config, tokens, seed=0).to(device)
    given = {"topk_weights": inputs.topk_weights, "topk_ids": inputs.topk_ids}
    output = kernel.apply(inputs.x, **given)
    assert output.shape == (tokens, config.hidden_size)
    expected_output(inputs.x, weights, config, **given).compare(output, "result")


@on_a_cpu
@pytest.mark.parametrize("params", PARAMS)
def test_alpha_and_limit_are_the_config_s(params):
    run(Double, replace(LAYER, activation_params=params))


@on_a_cpu
@pytest.mark.parametrize(("hidden", "inter"), [(2880, 96), (64, 2912)])
def test_padding_shows_neither_in_the_output_nor_in_its_shape(hidden, inter):
    # gpt-oss's size, and one of which columns are padded
    assert OAITritonExperts.padded_sizes(hidden, inter) == (hidden, -(-inter // 64) * 64)
    run(Double, replace(LAYER, hidden_size=hidden, intermediate_size=inter))


@pytest.mark.gpu
@needs_the_library
@pytest.mark.parametrize("params", PARAMS)
def test_alpha_and_limit_reach_the_library(params):
    run(OAITritonExperts, replace(LAYER, activation_params=params), "cuda")


@pytest.mark.gpu
@needs_the_library
@pytest.mark.parametrize("tokens", [1, 3, 300])
@pytest.mark.parametrize(("hidden", "inter"), [(2880, 2880), (64, 32), (192, 2912)])
def test_sizes_that_are_no_whole_steps(hidden, inter, tokens):
    run(OAITritonExperts, replace(LAYER, hidden_size=hidden, intermediate_size=inter), "cuda", tokens)


def test_what_the_backend_holds_is_stated():
    sizes = mxfp4_round_up_hidden_size_and_intermediate_size(Mxfp4MoeBackend.TRITON_KERNELS, 2880, 2912)
    assert sizes == (2880, 2944)


def test_only_what_the_library_computes_is_taken():
    environment = Environment({"triton_kernels": "1.0.0", "triton": "3.6.0"})

    def reasons(config=LAYER, activation_key=None, device="sm90", environment=environment):
        return "; ".join(
            OAITritonExperts.unsupported_reasons(
                config, kMxfp4Static, activation_key, DeviceInfo.parse(device), environment=environment
            )
        )

    assert reasons() == ""
    assert "hidden states in float16, takes bfloat16" in reasons(replace(LAYER, dtype=torch.float16))
    assert "does not take activations quantized as kMxfp8Dynamic" in reasons(activation_key=kMxfp8Dynamic)
    assert "multiple of 64, got 96" in reasons(replace(LAYER, hidden_size=96))
    assert "needs sm90" in reasons(device="sm100")
    assert "needs triton_kernels, which is not installed" in reasons(environment=Environment({"triton": "3.6.0"}))
    unrelated = Environment({"triton_kernels": "0.1.0", "triton": "3.6.0"})
    assert "needs triton_kernels >= 1.0, found 0.1.0" in reasons(environment=unrelated)


# --------------------------------------------------------------- where it is


@pytest.fixture
def places(tmp_path, monkeypatch) -> Iterator[object]:
    """A folder on the path in which packages can be made; what they loaded is forgotten."""
    names = ("triton_kernels", "vllm")
    kept = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in names}
    for name in kept:
        del sys.modules[name]
    others = [place for place in sys.path if not any(Path(place, name).exists() for name in names)]
    monkeypatch.setattr(sys, "path", [str(tmp_path), *others])

    def make(package: str, *files: str) -> None:
        folder = tmp_path.joinpath(*package.split("."))
        folder.mkdir(parents=True)
        for path in (folder, *list(folder.parents)[: package.count(".")]):
            (path / "__init__.py").touch()
        for name in files:
            (folder / name).write_text("WHERE = __file__\n")
        importlib.invalidate_caches()

    yield make
    for name in [name for name in sys.modules if name.partition(".")[0] in names]:
        del sys.modules[name]
    sys.modules.update(kept)


asked = itertools.count()


def reason_against() -> str | None:
    """Why the library is missing now: requirements are looked up once, so that each question is another's."""
    return Environment.current().reason_against(replace(TRITON_KERNELS, install=f"question {next(asked)}"))


def test_a_package_of_the_same_name_is_not_taken_for_it(places):
    places("triton_kernels", "kernels.py")
    assert "needs triton_kernels, which is not installed" in reason_against()
    with pytest.raises(ConfigError, match="triton_kernels .*git"):
        load_triton_kernels()


def test_vllm_s_copy_is_found_without_importing_vllm(places):
    places("vllm.third_party.triton_kernels", "routing.py")
    assert reason_against() is None
    # the rest of the copy is not there
    with pytest.raises(ModuleNotFoundError, match="triton_kernels.matmul_ogs"):
        load_triton_kernels()
    assert "vllm" not in sys.modules
    assert importlib.import_module("triton_kernels.routing").WHERE.endswith("third_party/triton_kernels/routing.py")


def test_vllm_s_copy_is_not_mixed_with_another_package(places):
    places("vllm.third_party.triton_kernels", "routing.py")
    places("triton_kernels", "kernels.py")
    assert reason_against() is None
    other = importlib.import_module("triton_kernels")
    with pytest.raises(ConfigError, match="triton_kernels.*third_party"):
        load_triton_kernels()
    assert sys.modules["triton_kernels"] is other
