"""A layer in a model of torch: state dicts, copies, pickles; and reloading."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_core import (
    ConfigError,
    ExpertsLeftOutWarning,
    FusedMoEConfig,
    FusedMoEKernel,
    FusedMoELayer,
    KernelWeights,
    LoRAWeights,
    MoEWeights,
    RoutingConfig,
    TensorError,
    Workspace,
    experts_left_out,
    load_layer,
)
from moe_core_toys import toy_oracle, toy_weights
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

CONFIG = FusedMoEConfig(
    num_experts=6,
    top_k=2,
    hidden_size=16,
    intermediate_size=12,
    dtype=torch.float32,
    has_bias=True,
    routing=RoutingConfig.from_method("Renormalize"),
)
X = torch.randn(5, 16, generator=torch.Generator().manual_seed(2))
ROUTER = torch.randn(6, 16, generator=torch.Generator().manual_seed(3))


def make_layer(seed: int = 0, router: Tensor = ROUTER, config: FusedMoEConfig = CONFIG) -> FusedMoELayer:
    weights = toy_weights(config, seed)
    return FusedMoELayer.from_weights(toy_oracle(), config, weights, router_weight=router, copy=True)


class Model(nn.Module):
    """Experts beside something else."""

    def __init__(self, experts: FusedMoELayer) -> None:
        super().__init__()
        self.norm = nn.Linear(16, 16)
        self.experts = experts

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.norm(self.experts(x))
        return found


@torch.no_grad()
def run(model: nn.Module) -> Tensor:
    found: Tensor = model(X)
    return found


def test_a_state_dict_leaves_experts_out_with_one_warning() -> None:
    model = nn.Sequential(Model(make_layer()), Model(make_layer(seed=1)))
    for _ in range(2):
        with pytest.warns(ExpertsLeftOutWarning) as told:
            written = model.state_dict()
        assert len(told) == 1
        assert sorted(written) == [f"{i}.norm.{name}" for i in (0, 1) for name in ("bias", "weight")]
    with experts_left_out(model):
        assert list(model.state_dict()) == list(written)


@pytest.mark.parametrize(
    ("module", "function", "word"),
    [
        ("transformers.modeling_utils", "save_pretrained", "checkpoint"),
        ("transformers.trainer", "_save", "checkpoint"),
        ("safetensors.torch", "save_model", "checkpoint"),
        ("accelerate.big_modeling", "cpu_offload", "offload"),
        ("accelerate.big_modeling", "disk_offload", "offload"),
    ],
)
def test_what_needs_a_whole_model_is_refused(module: str, function: str, word: str) -> None:
    space: dict[str, Any] = {"__name__": module}
    exec(f"def {function}(model): return model.state_dict()", space)
    model = Model(make_layer())
    with pytest.raises(ConfigError, match=word):
        space[function](model)
    with experts_left_out(model):
        assert space[function](model)


def test_safetensors_does_not_write_a_model_without_its_experts(tmp_path: Path) -> None:
    from safetensors.torch import save_model

    with pytest.raises(ConfigError, match="save_model"):
        save_model(Model(make_layer()), str(tmp_path / "model.safetensors"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.half(),
        lambda model: model.bfloat16(),
        lambda model: model.double(),
        lambda model: model.to(torch.float16),
        lambda model: model.to("meta"),
        lambda model: model.to_empty(device="meta"),
    ],
)
def test_a_model_is_converted_whole_or_not_at_all(change: Callable[[nn.Module], object]) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.ModuleDict({"block": Model(make_layer())}))
    before = [(parameter.dtype, parameter.device) for parameter in model.parameters()]
    with pytest.raises(ConfigError, match="load"):
        change(model)
    assert [(parameter.dtype, parameter.device) for parameter in model.parameters()] == before
    # what changes nothing of the layer is done, also after a refusal
    model.to("cpu").float()
    for one in (nn.Linear(2, 2).half(), nn.Sequential(nn.Linear(2, 2)).half()):
        assert next(one.parameters()).dtype is torch.float16


@pytest.mark.parametrize("frozen", [False, True])
def test_reloading_leaves_the_routers_owner_alone(frozen: bool) -> None:
    with torch.inference_mode(frozen):
        mine = [torch.randn(6, 16), torch.randn(6), torch.randn(6)]
    layer = FusedMoELayer.from_weights(
        toy_oracle(),
        CONFIG,
        toy_weights(CONFIG),
        router_weight=mine[0],
        router_bias=mine[1],
        correction_bias=mine[2],
        copy=True,
    )
    before = [tensor.clone() for tensor in mine]
    for own in (layer.router_weight, layer.router_bias, layer.correction_bias):
        assert own is not None
        own.zero_()
    assert all(torch.equal(a, b) for a, b in zip(mine, before, strict=True))


def test_fake_tensors_have_the_shape_of_the_result() -> None:
    layer = make_layer()
    for x in (torch.empty(5, 16), torch.empty(2, 3, 16)):
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
            assert layer(mode.from_tensor(x)).shape == x.shape
            assert layer(x).shape == x.shape
            with pytest.raises(TensorError, match="hidden_states"):
                layer(mode.from_tensor(x)[..., 1:])
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, pytest.raises(TensorError, match="hidden_states"):
        layer.start(mode.from_tensor(X))
    with FakeTensorMode(), pytest.raises(TensorError, match="w13"):
        make_layer()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_hidden_states_and_back(dtype: torch.dtype) -> None:
    layer = make_layer()
    with pytest.raises(TensorError, match="hidden_states"):
        layer(X.to(dtype))
    with torch.autocast("cpu", dtype=dtype):
        found = layer(X.to(dtype))
        assert torch.equal(layer(X), layer(X))
    assert found.dtype is dtype
    assert torch.equal(found, layer(X.to(dtype).float()).to(dtype))


def test_a_router_that_is_a_parameter_is_part_of_the_state_dict() -> None:
    model = Model(make_layer(router=nn.Parameter(ROUTER.clone())))
    with experts_left_out(model):
        written = model.state_dict()
    assert "experts.router_weight" in written
    other = Model(make_layer(router=nn.Parameter(torch.zeros(6, 16))))
    other.load_state_dict(written)
    assert torch.equal(run(other), run(model))


def test_a_router_of_another_shape_leaves_the_experts_as_they_are() -> None:
    model = Model(make_layer(router=nn.Parameter(ROUTER.clone())))
    before = [tensor.clone() for _, tensor in model.experts.weights.tensors()]
    new = {f"experts.{name}": tensor + 1 for name, tensor in toy_weights(CONFIG).tensors()}
    with pytest.raises(RuntimeError, match="router_weight"):
        model.load_state_dict({**new, "experts.router_weight": ROUTER[1:]}, strict=False)
    found = [tensor for _, tensor in model.experts.weights.tensors()]
    assert all(torch.equal(one, other) for one, other in zip(found, before, strict=True))


def test_a_state_dict_without_experts_leaves_them_as_they_are() -> None:
    model, other = Model(make_layer()), Model(make_layer())
    with experts_left_out(model):
        written = model.state_dict()
    other.load_state_dict(written)
    assert torch.equal(run(other), run(model))


@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_and_pickles_keep_everything(again: Any) -> None:
    config = replace(CONFIG, is_lora_enabled=False)
    layer = make_layer(config=config)
    layer.kernel.workspace = Workspace("cpu")
    layer.reload(toy_weights(config, seed=7))
    model = Model(layer)
    other = again(model)
    assert torch.equal(run(other), run(model))
    assert other.experts.selection == layer.selection
    layer.reload(toy_weights(config, seed=8))
    assert not torch.equal(run(other), run(model))
    other.experts.reload(toy_weights(config, seed=8))
    assert torch.equal(run(other), run(model))


@pytest.mark.parametrize("kind", ["meta", "inference"])
def test_weights_are_replaced_whole_or_not_at_all(kind: str) -> None:
    first = make_layer().weights
    before = {name: tensor.clone() for name, tensor in first.tensors()}
    new = make_layer(seed=9).weights
    if kind == "meta":
        broken = KernelWeights(
            w13=new.w13, w2=new.w2, quant_config=new.quant_config.map(lambda tensor: tensor.to("meta"))
        )
        with pytest.raises(TensorError, match=r"\bmeta\b"):
            first.copy_(broken)
    else:
        with torch.inference_mode():
            made = first.quant_config.map(torch.clone)
        partly = KernelWeights(w13=first.w13, w2=first.w2, quant_config=made)
        with pytest.raises(TensorError, match=r"torch.inference_mode\(\)"):
            partly.copy_(new)
    assert all(torch.equal(tensor, before[name]) for name, tensor in first.tensors())


def test_meta_weights_are_refused_by_name() -> None:
    layer = make_layer()
    expected = layer(X)
    weights = toy_weights(CONFIG, seed=9)
    on_meta = MoEWeights(weight_key=None, activation_key=None, **{n: t.to("meta") for n, t in weights.tensors()})
    with pytest.raises(TensorError, match=r"\bw13\b"):
        layer.reload(on_meta)
    assert torch.equal(layer(X), expected)
    with pytest.raises(TensorError, match=r"\bw13\b"):
        FusedMoELayer.from_weights(toy_oracle(), CONFIG, on_meta)


def test_an_adapter_is_loaded_whole_or_not_at_all() -> None:
    config = replace(CONFIG, is_lora_enabled=True, max_loras=2, max_lora_rank=4)
    adapters = LoRAWeights.zeros(config, "cpu")
    adapters.w13_a.fill_(1.0)
    new = {
        "w13_a": torch.randn(6, 8, 16),
        "w13_b": torch.randn(6, 24, 4),
        "w2_a": torch.randn(6, 4, 12),
        "w2_b": torch.randn(6, 16, 4),
    }
    for change, error in (
        ({"w2_b": new["w2_b"].to("meta")}, "w2_b .*meta"),
        ({"w2_a": None}, "w2_a .*None"),
        ({"scaling": float("nan")}, "scaling .*nan"),
        ({"scaling": "2"}, "scaling is '2'"),
    ):
        with pytest.raises((TensorError, ConfigError), match=error):
            adapters.load(1, **new | change)  # type: ignore[arg-type]
        assert bool((adapters.w13_a == 1).all())
    for place in ("1", 1.0, -1, 2, True):
        with pytest.raises(TensorError, match="range"):
            adapters.load(place, **new)  # type: ignore[arg-type]


def test_more_adapters_than_memory_holds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before memory is asked for: a system that overcommits would grant it."""
    config = replace(CONFIG, is_lora_enabled=True, max_loras=10**9)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: pytest.fail("memory was asked for"))
    with pytest.raises(ConfigError, match="max_loras=1000000000"):
        LoRAWeights.zeros(config, "cpu")


@pytest.mark.parametrize("path", [None, 3, ["DIR"], b"DIR"])
def test_a_path_is_a_path(path: Any) -> None:
    with pytest.raises(ConfigError, match=r"\bpath\b"):
        load_layer(path)
    with pytest.raises(ConfigError, match="weights .*Checkpoint"):
        make_layer().reload(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scheme": None}, "scheme .*None"),
        ({"weights": {}}, r"weights .*\bdict"),
        ({"weights": replace(toy_weights(CONFIG), w13=[1.0])}, "w13 .*list"),
        ({"weights": replace(toy_weights(CONFIG), w2=None)}, "w2 .*None"),
        ({"weights": replace(toy_weights(CONFIG), w2_bias=[[1.0]])}, "w2_bias .*list"),
    ],
)
def test_what_a_layer_is_made_from_is_checked(change: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"scheme": toy_oracle(), "config": CONFIG, "weights": toy_weights(CONFIG)}
    with pytest.raises((ConfigError, TensorError), match=message):
        FusedMoELayer.from_weights(**given | change)


def test_a_kernel_is_made_with_a_workspace() -> None:
    oracle, shared = toy_oracle(), Workspace("cpu")
    selection = oracle.select(CONFIG, weight_key=None, activation_key=None, device="cpu")
    weights = oracle.convert(selection, toy_weights(CONFIG))
    assert oracle.make_kernel(selection, weights, workspace=shared).workspace is shared


def test_a_kernel_is_made_of_its_parts() -> None:
    oracle = toy_oracle()
    selection = oracle.select(CONFIG, weight_key=None, activation_key=None, device="cpu")
    weights = oracle.convert(selection, toy_weights(CONFIG))
    with pytest.raises(ConfigError, match="weights .*MoEWeights"):
        oracle.make_kernel(selection, toy_weights(CONFIG))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="experts .*ToyExperts"):
        FusedMoEKernel(selection.experts, weights)  # type: ignore[arg-type]
    with pytest.raises(TensorError, match="workspace .*meta"):
        oracle.make_kernel(selection, weights, workspace=Workspace("meta"))
