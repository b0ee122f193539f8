"""vLLM's own layers, whose experts are ours: equal to moe-core's own layer in every bit, and in one copy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import moe_core as mc
import pytest
import torch
from moe_vllm.experts import MoeCoreExperts
from moe_vllm.weights import adopt, bound
from vllm.model_executor.layers.fused_moe.modular_kernel import ExpertTokensMetadata
from vllm.model_executor.layers.fused_moe.oracle import fp8
from vllm.model_executor.layers.quantization.utils import quant_utils
from vllm.model_executor.model_loader.reload.layerwise import _copy_and_restore_kernel_tensors
from vllm.model_executor.model_loader.reload.meta import capture_layer_to_meta, materialize_layer, restore_layer_on_meta
from vllm.model_executor.model_loader.reload.types import LayerReloadingInfo
from vllm.model_executor.model_loader.reload.utils import get_layer_params_buffers
from vllm_formats import FORMATS, Loaded, own_layer
from vllm_layers import E, calls, copies, experts_of, fill, make_layer, moe_config, process, run

pytestmark = pytest.mark.usefixtures("brought")


@pytest.mark.parametrize("name", FORMATS)
def test_formats(name: str, device: str) -> None:
    form = FORMATS[name]
    layer = make_layer(form.config(), moe_config(**form.layer))
    assert issubclass(layer.quant_method.experts_cls, MoeCoreExperts)
    loaded = form.load()
    fill(layer, loaded.tensors)
    process(layer)
    x, topk_weights, topk_ids = calls(5)
    expected = own_layer(form, loaded, device).apply(x, topk_weights=topk_weights, topk_ids=topk_ids)
    assert torch.equal(run(layer, x, topk_weights, topk_ids), expected)
    assert not copies(layer)


def test_layers_of_several_formats(device: str) -> None:
    """A checkpoint may have another format in each layer; vLLM makes all layers, then fills them in any order."""
    forms = {name: FORMATS[name] for name in ("fp8_block", "int4_compressed", "int8_channel", "mxfp4_gpt_oss")}
    layers = {name: make_layer(form.config(), moe_config(**form.layer)) for name, form in forms.items()}
    loaded = {name: form.load() for name, form in forms.items()}
    for name in reversed(forms):
        fill(layers[name], loaded[name].tensors)
        process(layers[name])
    x, topk_weights, topk_ids = calls(3)
    for name, form in forms.items():
        expected = own_layer(form, loaded[name], device).apply(x, topk_weights=topk_weights, topk_ids=topk_ids)
        assert torch.equal(run(layers[name], x, topk_weights, topk_ids), expected)


def test_tokens_that_came_for_their_experts_are_told(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are chosen by the rows that experts have: of what an all-to-all brings more than tokens and top-k say."""
    form = FORMATS["fp8_block"]
    layer = make_layer(form.config(), moe_config(**form.layer))
    loaded = form.load()
    fill(layer, loaded.tensors)
    process(layer)
    x, topk_weights, topk_ids = calls(5)
    experts, told = experts_of(layer), []
    apply = mc.FusedMoEKernel.apply

    def listed(kernel: mc.FusedMoEKernel, *given: Any, **named: Any) -> torch.Tensor:
        told.append(named["tokens_per_rank"])
        return apply(kernel, *given, **named)

    monkeypatch.setattr(mc.FusedMoEKernel, "apply", listed)
    counts = [3] * E  # of 5 tokens only those pairs are local that vLLM counted: 24 of 8 experts, as of 12 tokens
    for meta in (None, ExpertTokensMetadata(None, None), ExpertTokensMetadata.make_from_list(counts, "cpu")):
        routed = torch.empty_like(x), x, layer.w13_weight, layer.w2_weight, topk_weights, topk_ids
        experts.apply(*routed, None, E, None, None, None, x[:0], x[:0], meta, False)
    assert told == [None, None, [12]]


def test_tensors_that_do_not_fit(device: str) -> None:
    """Loading stops with what is wrong, and what to do: vLLM's own experts were passed over by then."""
    form = FORMATS["fp8_block"]
    layer = make_layer(form.config(), moe_config(**form.layer))
    fill(layer, form.load().tensors)
    layer.w13_weight_scale_inv.data = torch.ones(E, 3, 2)
    with pytest.raises(mc.ConfigError) as caught:
        process(layer)
    assert caught.value.message == (
        "fp8 experts: w13_scale has shape [8, 3, 2], expected [8, 2, 2]. MOE_VLLM=off leaves them to vLLM"
    )


@pytest.mark.parametrize("device", ["h200"], indirect=True)
def test_what_is_chosen_at_load_is_logged(device: str, brought: pytest.LogCaptureFixture) -> None:
    """Groups that vLLM has split for a rank's shard, say: another key than the layer was asked for with."""
    form = FORMATS["int4_moe_wna16"]
    layer = make_layer(form.config(), moe_config(**form.layer))
    brought.clear()
    for name in ("w13_scales", "w2_scales"):
        split = getattr(layer, name).repeat_interleave(2, -1)
        setattr(layer, name, torch.nn.Parameter(split, requires_grad=False))
    process(layer)
    (line,) = (record.getMessage() for record in brought.records if record.name == "vllm.moe_vllm")
    assert "1x32" in line
    assert line.startswith("moe-vllm runs wna16 experts (kInt4Static")


#: what runs each format on an H200
BACKENDS = {
    "fp8_block": "triton",
    "fp8_tensor_static": "triton",
    "fp8_tensor_dynamic": "triton",
    "fp8_channel": "triton",
    "mxfp8": "triton",
    "int8_channel": "triton",
    "mxfp4_gpt_oss": "marlin",
} | {name: "marlin" for name, form in FORMATS.items() if form.scheme == "wna16"}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("device", ["h200"], indirect=True)
def test_memory(name: str, device: str) -> None:
    """The kernels' tensors take the place of the checkpoint's, and nothing is kept besides."""
    form = FORMATS[name]
    layer = make_layer(form.config(), moe_config(**form.layer))
    loaded = form.load()
    fill(layer, loaded.tensors)
    process(layer)
    weights, backend = experts_of(layer)._kernel.weights, experts_of(layer).selection.backend
    assert backend == BACKENDS[name]
    pieces = {parameter.untyped_storage().data_ptr(): parameter.nbytes for parameter in layer.parameters()}
    assert {tensor.untyped_storage().data_ptr() for _, tensor in weights.tensors()} <= pieces.keys()
    own = own_layer(form, loaded, device).weights
    # beside the kernel's: shapes that compressed-tensors' checkpoints state, GPTQ's unused zero points
    assert sum(pieces.values()) <= own.nbytes + 4 * E * 4 + loaded.weights.nbytes // 50
    assert not copies(layer)


@pytest.mark.parametrize(
    "name", ["fp8_block", "fp8_tensor_static", "fp8_tensor_dynamic", "fp8_channel", "int8_channel"]
)
@pytest.mark.parametrize("device", ["l40s"], indirect=True)
def test_tensors_that_kernels_read_as_they_are(name: str, device: str) -> None:
    """They stay where the checkpoint was loaded."""
    form = FORMATS[name]
    layer = make_layer(form.config(), moe_config(**form.layer))
    fill(layer, form.load().tensors)
    before = layer.w13_weight.data_ptr(), layer.w2_weight.data_ptr()
    process(layer)
    assert experts_of(layer).selection.backend == "triton"
    weights = experts_of(layer)._kernel.weights
    assert (weights.w13.data_ptr(), weights.w2.data_ptr()) == before


@pytest.mark.parametrize("name", ["fp8_block", "int4_compressed", "mxfp4_gpt_oss"])
def test_expert_parallel(name: str, device: str) -> None:
    """Each of two ranks adds its experts' part, which its map names."""
    form, parts = FORMATS[name], []
    x, topk_weights, topk_ids = calls(5)
    loaded = form.load()
    for rank in range(2):
        layer = make_layer(form.config(), moe_config(ep=(2, rank), **form.layer))
        mine = slice(rank * E // 2, (rank + 1) * E // 2)
        fill(layer, {name: tensor[mine] for name, tensor in loaded.tensors.items()})
        process(layer)
        local = {name: tensor[mine] for name, tensor in loaded.weights.tensors()}
        keys = {"weight_key": loaded.weights.weight_key, "activation_key": loaded.weights.activation_key}
        own = own_layer(form, Loaded({}, mc.MoEWeights(**keys, **local)), device, num_local_experts=E // 2)
        expected = own.apply(x, topk_weights=topk_weights, topk_ids=topk_ids, expert_map=layer.expert_map)
        parts.append(run(layer, x, topk_weights, topk_ids))
        assert torch.equal(parts[-1], expected)
    whole = own_layer(form, loaded, device).apply(x, topk_weights=topk_weights, topk_ids=topk_ids)
    # two roundings to bfloat16 instead of one
    torch.testing.assert_close(parts[0] + parts[1], whole, rtol=2**-6, atol=2**-6 * float(whole.abs().max()))


@pytest.mark.parametrize("name", ["fp8_block", "fp8_tensor_static", "int4_gptq", "mxfp4_gpt_oss"])
def test_new_weights_are_loaded_in_place(name: str, device: str) -> None:
    """As vLLM reloads: new parameters are processed, and copied to where graphs have read the old ones."""
    form = FORMATS[name]
    layer = make_layer(form.config(), moe_config(**form.layer))
    info = LayerReloadingInfo(restore_metadata=capture_layer_to_meta(layer), restore_device=torch.device("cpu"))
    loaded = form.load()
    fill(layer, {name: torch.zeros_like(tensor) for name, tensor in loaded.tensors.items()})
    process(layer)
    x, topk_weights, topk_ids = calls(5)
    run(layer, x, topk_weights, topk_ids)
    places = {name: parameter.data_ptr() for name, parameter in layer.named_parameters()}

    info.kernel_tensors = get_layer_params_buffers(layer)
    info.kernel_non_persistent_buffers = set(layer._non_persistent_buffers_set)
    restore_layer_on_meta(layer, info)
    materialize_layer(layer, info)
    fill(layer, loaded.tensors)
    process(layer)
    _copy_and_restore_kernel_tensors(layer, info)

    expected = own_layer(form, loaded, device).apply(x, topk_weights=topk_weights, topk_ids=topk_ids)
    assert torch.equal(run(layer, x, topk_weights, topk_ids), expected)
    assert {name: parameter.data_ptr() for name, parameter in layer.named_parameters()} == places
    assert not copies(layer)


@pytest.mark.parametrize("moved", ["w13_weight", "w2_weight"])
def test_a_parameter_that_moves_alone_is_followed(moved: str, device: str) -> None:
    """As offloading of some parameters does; the former memory may hold anything from then on."""
    form = FORMATS["fp8_channel"]
    layer = make_layer(form.config(), moe_config(**form.layer))
    fill(layer, form.load().tensors)
    process(layer)
    x, topk_weights, topk_ids = calls(5)
    expected = run(layer, x, topk_weights, topk_ids).clone()
    parameter = getattr(layer, moved)
    former = parameter.data
    parameter.data = former.clone()
    former.zero_()
    assert torch.equal(run(layer, x, topk_weights, topk_ids), expected)


def test_router_weights_on_the_input(device: str) -> None:
    """vLLM multiplies the hidden states; the experts must not weight again."""
    form = FORMATS["fp8_channel"]
    layer = make_layer(form.config(), moe_config(experts_per_token=1))
    loaded = form.load()
    fill(layer, loaded.tensors)
    process(layer)
    x, topk_weights, topk_ids = calls(5)
    topk_weights, topk_ids = topk_weights[:, :1].contiguous(), topk_ids[:, :1].contiguous()
    layer.apply_router_weight_on_input = True
    weighted = x * topk_weights.to(x.dtype)
    own = own_layer(form, loaded, device, top_k=1)
    expected = own.apply(weighted, topk_weights=torch.ones_like(topk_weights), topk_ids=topk_ids)
    assert torch.equal(run(layer, x, topk_weights, topk_ids), expected)


def test_a_limit_that_the_layer_states(device: str) -> None:
    """Some models give it to the layer alone: known when the weights are there, not when experts are selected."""
    form = FORMATS["fp8_block"]
    layer = make_layer(form.config())
    loaded = form.load()
    fill(layer, loaded.tensors)
    layer.swiglu_limit = 0.25
    process(layer)
    x, topk_weights, topk_ids = calls(5)
    output = run(layer, x, topk_weights, topk_ids)
    call = {"topk_weights": topk_weights, "topk_ids": topk_ids}
    limited = own_layer(form, loaded, device, activation_params=mc.ActivationParams(limit=0.25))
    assert torch.equal(output, limited.apply(x, **call))
    assert not torch.equal(output, own_layer(form, loaded, device).apply(x, **call))


def test_what_was_folded_is_released() -> None:
    """A parameter whose contents the kernel has in others keeps no memory."""
    layer = torch.nn.Module()
    for name in ("w13_weight", "w2_weight", "w13_scales", "w13_qzeros"):
        layer.register_parameter(name, torch.nn.Parameter(torch.ones(E, 4), requires_grad=False))
    held = SimpleNamespace(
        **dict.fromkeys(("w2_scale", "w2_zp", "w1_bias", "w2_bias", "a1_scale", "a2_scale")),
        w1_scale=layer.w13_scales,
        w1_zp=layer.w13_qzeros,
    )
    packed, scales, sums = torch.zeros(E, 2), torch.full((E, 4), 3.0), torch.ones(E)
    weights = mc.KernelWeights(
        w13=packed,
        w2=layer.w2_weight.detach(),
        quant_config=mc.FusedMoEQuantConfig(w1=mc.FusedMoEQuantDesc(scale=scales)),
        extra={"sums": sums},
    )
    names = adopt(layer, weights, held)
    assert names == {"w13": "w13_weight", "w2": "w2_weight", "w1_scale": "w13_scales", "sums": "moe_core_sums"}
    assert layer.w13_qzeros.numel() == 0
    assert torch.equal(layer.w13_scales, scales)
    assert layer.w13_weight.data_ptr() == packed.data_ptr()
    assert layer.moe_core_sums.data_ptr() == sums.data_ptr()
    present = bound(layer, weights, names)
    assert dict(present.tensors())["w1_scale"].data_ptr() == layer.w13_scales.data_ptr()


def test_a_kernel_without_a_layer(device: str) -> None:
    """Experts that are made outside of vLLM's loading take the weights of their first call."""
    form = FORMATS["fp8_block"]
    weights = form.load().weights
    keys = (quant_utils.kFp8Static128BlockSym, quant_utils.kFp8Dynamic128Sym)
    config = moe_config()
    backend, kind = fp8.select_fp8_moe_backend(config, *keys)
    scales = fp8.make_fp8_moe_quant_config(
        backend, weights.w13_scale, weights.w2_scale, None, None, block_shape=[128, 128]
    )
    kernel = fp8.make_fp8_moe_kernel(scales, config, kind, backend)
    x, topk_weights, topk_ids = calls(3)
    for _ in range(2):
        output = kernel.apply(
            x,
            weights.w13,
            weights.w2,
            topk_weights,
            topk_ids,
            activation=config.activation,
            global_num_experts=E,
            expert_map=None,
            apply_router_weight_on_input=False,
        )
        own = own_layer(form, Loaded({}, weights), device)
        assert torch.equal(output, own.apply(x, topk_weights=topk_weights, topk_ids=topk_ids))
