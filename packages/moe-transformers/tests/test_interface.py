"""``experts_implementation="moe_core"`` for FP8 experts that transformers filled."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import moe_core as mc
import moe_transformers
import pytest
import torch
from moe_core_replays import python_calls
from moe_transformers import ExpertsMemoryWarning, prepare_experts
from moe_transformers.blocks import experts_modules
from moe_transformers_models import FP8_KINDS, TOP_K, VOCABULARY, E, K, qwen3, save_fp8
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.finegrained_fp8 import FP8Experts
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

TOKENS = 9
STATIC = ("gate_up_proj_activation_scale", "down_proj_activation_scale")
Call = tuple[Tensor, Tensor, Tensor]


@pytest.fixture(autouse=True)
def fp8_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers dequantizes FP8 checkpoints where it sees no GPU that multiplies e4m3."""
    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda self, *_, **__: None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Checkpoints by kind and seed, each written once."""
    written: dict[tuple[str, int], Path] = {}

    def write(kind: str = "block", seed: int = 0) -> Path:
        if (kind, seed) not in written:
            model = qwen3(seed)
            for _, module in experts_modules(model):  # other exponents too
                for tensor in module.parameters():
                    tensor.data *= 1 + 3 * seed
            written[kind, seed] = save_fp8(tmp_path_factory.mktemp(kind), model, kind)
        return written[kind, seed]

    return write


def load(folder: Path) -> PreTrainedModel:
    """The model on the CPU, whatever the machine has."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="bfloat16", experts_implementation="moe_core")
    for name in STATIC:  # which transformers does not look for in such a checkpoint
        for _, module in experts_modules(model):
            if hasattr(module, name):
                module.get_parameter(name).data.copy_(0.01 + 0.001 * torch.arange(E))
    return model.eval()


def experts(model: nn.Module) -> nn.Module:
    return next(experts_modules(model))[1]


@pytest.fixture
def call() -> Call:
    """Hidden states, ids and weights as transformers' routers make them."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(TOKENS, K, generator=generator).bfloat16()
    weights, ids = torch.rand(TOKENS, E, generator=generator).topk(TOP_K)
    return x, ids, weights.bfloat16()


def run(module: nn.Module, call: Call) -> Tensor:
    with torch.no_grad():
        output: Tensor = module(*call)
    return output


@pytest.mark.parametrize("kind", FP8_KINDS)
def test_is_the_layer_of_the_checkpoint_in_the_modules_memory(
    folder: Callable[..., Path], call: Call, kind: str
) -> None:
    module = experts(load(folder(kind)))
    assert isinstance(module, FP8Experts)
    x, ids, weights = call
    output = run(module, call)
    ours = module._moe_core_held.layer
    theirs = mc.load_layer(folder(kind), layer=0, device="cpu")
    assert (ours.selection.weight_key, ours.selection.activation_key) == (
        theirs.selection.weight_key,
        theirs.selection.activation_key,
    )
    assert torch.equal(output, theirs(x, topk_weights=weights, topk_ids=ids))
    own = {tensor.data_ptr() for tensor in module.parameters()}
    outside = {name for name, tensor in ours.weights.tensors() if tensor.data_ptr() not in own}
    # exponents of blocks become float32, which no tensor of the module is
    assert outside == ({"w1_scale", "w2_scale"} if kind == "block_e8m0" else set())


def test_eager_comes_back(folder: Callable[..., Path], call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FP8Experts, "linear", dequantized_linear)
    model = load(folder())
    module = experts(model)
    model.set_experts_implementation("eager")
    expected = run(module, call)
    model.set_experts_implementation("moe_core")
    found = run(module, call)
    # moe-core quantizes x and h, each to four significant bits: by 2**-4 of a value at most
    assert 0 < (found - expected).float().norm() < 2 * 2**-4 * expected.float().norm()
    model.set_experts_implementation("eager")
    assert torch.equal(run(module, call), expected)


def dequantized_linear(module: Any, x: Tensor, weight: Tensor, scale: Tensor, activation_scale: None = None) -> Tensor:
    """A product of transformers' FP8 experts in blocks, which itself downloads a kernel."""
    full = weight.float() * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return nn.functional.linear(x, full.to(x.dtype))


def test_models_generate(folder: Callable[..., Path]) -> None:
    tokens = torch.arange(12).reshape(2, 6)
    output = load(folder()).generate(tokens, max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert output.shape == (2, 9)
    assert output.max() < VOCABULARY


@pytest.mark.parametrize("kind", ["block", "block_e8m0"])
class TestChangedWeights:
    """``block_e8m0``: the layer has scales of its own, made of the module's."""

    def test_written_in_place(self, folder: Callable[..., Path], call: Call, kind: str) -> None:
        module, other = experts(load(folder(kind))), experts(load(folder(kind, seed=1)))
        before, held = run(module, call), module._moe_core_held
        with torch.no_grad():
            for mine, theirs in zip(module.parameters(), other.parameters(), strict=True):
                mine.copy_(theirs)
        assert not torch.equal(run(module, call), before)
        assert torch.equal(run(module, call), run(other, call))
        assert module._moe_core_held.layer is held.layer

    def test_written_behind_torchs_back(self, folder: Callable[..., Path], call: Call, kind: str) -> None:
        model, other = load(folder(kind)), experts(load(folder(kind, seed=1)))
        module = experts(model)
        run(module, call)
        layer = module._moe_core_held.layer
        places = [tensor.data_ptr() for _, tensor in layer.weights.tensors()]
        for mine, theirs in zip(module.parameters(), other.parameters(), strict=True):
            mine.data.copy_(theirs.data)
        prepare_experts(model)
        assert torch.equal(run(module, call), run(other, call))
        # what a CUDA graph was captured with
        assert module._moe_core_held.layer is layer
        assert [tensor.data_ptr() for _, tensor in layer.weights.tensors()] == places

    def test_replaced(self, folder: Callable[..., Path], call: Call, kind: str) -> None:
        module, other = experts(load(folder(kind))), experts(load(folder(kind, seed=1)))
        run(module, call)
        for name, theirs in list(other.named_parameters()):
            setattr(module, name, theirs)
        assert torch.equal(run(module, call), run(other, call))

    def test_copied_with_the_module(self, folder: Callable[..., Path], call: Call, kind: str) -> None:
        module = experts(load(folder(kind)))
        expected = run(module, call)
        assert pickle.loads(pickle.dumps(module._moe_core_held)) is None
        other = copy.deepcopy(module)
        with torch.no_grad():
            other.down_proj.zero_()
        assert not run(other, call).any()
        assert torch.equal(run(module, call), expected)


def test_looking_for_changes_costs_microseconds(folder: Callable[..., Path], call: Call) -> None:
    module = experts(load(folder()))
    run(module, call)
    layer, (x, ids, weights) = module._moe_core_held.layer, call
    with torch.no_grad():
        of_layer = python_calls(lambda: layer(x, topk_weights=weights, topk_ids=ids))
        of_module = python_calls(lambda: module(*call))
    # transformers' dispatch and nn.Module's own among them
    assert of_module - of_layer < 30


def test_calls_of_another_kind_make_another_layer(folder: Callable[..., Path], call: Call) -> None:
    module = experts(load(folder()))
    x, ids, weights = call
    run(module, call)
    theirs = mc.load_layer(folder(), layer=0, dtype=torch.float16, device="cpu")
    expected = theirs(x.half(), topk_weights=weights, topk_ids=ids)
    assert torch.equal(run(module, (x.half(), ids, weights)), expected)
    # one expert of each token: the other one's weight is 0
    both = run(module, (x, ids, torch.stack((weights[:, 0], torch.zeros(TOKENS)), dim=1)))
    assert torch.equal(run(module, (x, ids[:, :1], weights[:, :1])), both)


class TestCompiled:
    @pytest.fixture(autouse=True)
    def nothing_compiled_yet(self) -> None:
        torch.compiler.reset()

    def test_after_preparation_in_one_graph(self, folder: Callable[..., Path], call: Call) -> None:
        model = load(folder())
        prepare_experts(model)
        module = experts(model)
        with torch.no_grad():
            output = torch.compile(module, backend="aot_eager", fullgraph=True)(*call)
        assert torch.equal(output, run(module, call))

    def test_without_it_the_first_call_breaks_the_graph(self, folder: Callable[..., Path], call: Call) -> None:
        module = experts(load(folder()))
        compiled = torch.compile(module, backend="aot_eager")
        expected = run(experts(load(folder())), call)
        with torch.no_grad():
            assert torch.equal(compiled(*call), expected)
            assert torch.equal(compiled(*call), expected)

    def test_one_graph_without_it_says_what_to_call(self, folder: Callable[..., Path], call: Call) -> None:
        module = experts(load(folder()))
        with (
            torch.no_grad(),
            pytest.raises(torch._dynamo.exc.Unsupported, match=r"moe_transformers\.prepare_experts\(model\) before"),
        ):
            torch.compile(module, backend="aot_eager", fullgraph=True)(*call)


def test_layers_are_for_the_dtype_of_the_embeddings(folder: Callable[..., Path]) -> None:
    model = load(folder())
    model.register_parameter("first", nn.Parameter(torch.ones(1)))
    prepare_experts(model)
    assert experts(model)._moe_core_held.layer.config.dtype is torch.bfloat16


class TestErrors:
    def test_gradients(self, folder: Callable[..., Path], call: Call) -> None:
        module = experts(load(folder()))
        x, ids, weights = call
        with pytest.raises(mc.TensorError, match=r"torch\.no_grad\(\).*model\.set_exp"):
            module(x.requires_grad_(), ids, weights)

    def test_sixteen_bits(self, call: Call) -> None:
        model = qwen3()
        model.set_experts_implementation("moe_core")
        with pytest.raises(mc.ConfigError, match=r"bfloat16.*quantize_experts\(model, \"fp8_"):
            run(experts(model), call)
        with pytest.raises(mc.ConfigError, match=r"model\.layers\.0\.mlp\.experts .*bfloat16"):
            prepare_experts(model)

    def test_static_scales_that_were_not_loaded(self, folder: Callable[..., Path], call: Call) -> None:
        module = experts(load(folder("tensor_static")))
        module.get_parameter(STATIC[1]).data[1] = 0
        with pytest.raises(mc.TensorError, match="down_proj_activation_scale"):
            run(module, call)

    def test_no_experts_to_prepare(self) -> None:
        with pytest.raises(mc.ConfigError, match="Linear"):
            prepare_experts(nn.Linear(2, 2))

    def test_backend_by_name(self, folder: Callable[..., Path]) -> None:
        model = load(folder())
        with pytest.raises(mc.UnknownBackendError, match="tritom"):
            prepare_experts(model, backend="tritom")
        prepare_experts(model, backend="torch")


def test_state_dict_stays_transformers(folder: Callable[..., Path], call: Call) -> None:
    model = load(folder())
    before = list(model.state_dict())
    run(experts(model), call)
    assert list(model.state_dict()) == before
    assert not [module for module in model.modules() if isinstance(module, mc.FusedMoELayer)]


def test_two_copies_in_memory_are_told(
    folder: Callable[..., Path], call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = mc.FusedMoELayer.from_weights
    monkeypatch.setattr(mc.FusedMoELayer, "from_weights", lambda *a, **k: original(*a, **k, copy=True))
    with pytest.warns(ExpertsMemoryWarning, match="torch"):
        run(experts(load(folder())), call)


def test_layers_made_in_inference_mode_can_be_renewed(folder: Callable[..., Path], call: Call) -> None:
    model = load(folder("block_e8m0"))
    module = experts(model)
    with torch.inference_mode():
        expected = module(*call)
    prepare_experts(model)
    assert torch.equal(run(module, call), expected)


@pytest.mark.gpu
def test_on_a_gpu(folder: Callable[..., Path], call: Call) -> None:
    """Shared memory, one compiled graph, and a CUDA graph that sees weights which are written afterwards."""
    model, other = load(folder()).cuda(), load(folder(seed=1)).cuda()
    module, changed = experts(model), experts(other)
    x, ids, weights = inputs = tuple(tensor.cuda() for tensor in call)
    prepare_experts(model)
    layer = module._moe_core_held.layer
    own = {tensor.data_ptr() for tensor in module.parameters()}
    assert {tensor.data_ptr() for _, tensor in layer.weights.tensors()} <= own
    expected = mc.load_layer(folder(), layer=0, device="cuda")(x, topk_weights=weights, topk_ids=ids)
    assert torch.equal(run(module, inputs), expected)
    with torch.no_grad():
        assert torch.equal(torch.compile(module, fullgraph=True)(*inputs), expected)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = module(*inputs)
        graph.replay()
        assert torch.equal(output, expected)
        for mine, theirs in zip(module.parameters(), changed.parameters(), strict=True):
            mine.copy_(theirs)
        workspace = layer.kernel.workspace
        prepare_experts(model)
        assert layer.kernel.workspace is workspace is not None
        graph.replay()
        assert torch.equal(output, run(changed, inputs))
    tokens = model.generate(torch.arange(6, device="cuda")[None], max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert tokens.shape == (1, 9)


def test_the_names_are_public() -> None:
    assert {"prepare_experts", "quantize_experts", "ExpertsMemoryWarning"} <= set(moe_transformers.__all__)
