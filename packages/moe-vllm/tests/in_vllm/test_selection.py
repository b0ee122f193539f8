"""Which layers are taken, which are left to vLLM, and what its log says of either."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import moe_core as mc
import pytest
import torch
import vllm.plugins
from compressed_tensors.quantization import QuantizationArgs
from moe_vllm import needs, oracles, plugin
from moe_vllm.experts import MoeCoreExperts
from vllm import envs
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig, FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEExpertsModular
from vllm.model_executor.layers.fused_moe.oracle import fp8, int8, int_wna16, mxfp4
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.quantization import auto_gptq
from vllm.model_executor.layers.quantization import fp8 as fp8_method
from vllm.model_executor.layers.quantization.auto_awq import AutoAWQConfig
from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQConfig
from vllm.model_executor.layers.quantization.utils import quant_utils
from vllm_formats import FORMATS, GPTQ, int_args
from vllm_layers import make_layer, moe_config

SCHEMES = ("fp8", "int8", "mxfp4", "wna16")
BLOCKS = (quant_utils.kFp8Static128BlockSym, quant_utils.kFp8Dynamic128Sym)


def said(brought: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in brought.records if record.name == "vllm.moe_vllm"]


def is_ours(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, MoeCoreExperts)


# ------------------------------------------------------------------ taken


@pytest.mark.parametrize("moe_backend", ["auto", "triton"])
def test_by_default_and_by_name(device: str, brought: pytest.LogCaptureFixture, moe_backend: str) -> None:
    for _ in range(2):  # every layer asks; the log says it once
        slot, kind = fp8.select_fp8_moe_backend(moe_config(moe_backend=moe_backend), *BLOCKS)
        assert slot is fp8.Fp8MoeBackend.TRITON
        assert is_ours(kind)
    backend = {"cpu": "torch (TorchFp8Experts) on cpu", "h200": "triton (TritonFp8BlockExperts) on h200 (sm90)"}[device]
    (line,) = said(brought)
    assert line == (
        "moe-vllm runs fp8 experts (kFp8Static128BlockSym (e4m3, static float32 128x128) x "
        f"kFp8Dynamic128Sym (e4m3, dynamic float32 1x128)) by {backend}"
    )


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("device", ["h200"], indirect=True)
def test_every_format(device: str, brought: pytest.LogCaptureFixture, name: str) -> None:
    form = FORMATS[name]
    layer = make_layer(form.config(), moe_config(**form.layer))
    kind = layer.quant_method.experts_cls
    assert kind.scheme == form.scheme
    assert kind.layer() is layer
    loaded = form.load().weights
    assert kind.keys == (loaded.weight_key, loaded.activation_key)


@pytest.mark.parametrize(
    ("activation", "numbers", "expected"),
    [
        ("silu", {}, ("silu", None, None, None)),
        ("silu", {"swiglu_limit": 10.0}, ("silu", None, None, 10.0)),
        ("gelu", {}, ("gelu", None, None, None)),
        ("gelu_tanh", {}, ("gelu_tanh", None, None, None)),
        ("swiglustep", {}, ("swiglustep", None, None, 7.0)),
        (
            "swigluoai_uninterleave",
            {"swiglu_limit": 5.0, "swiglu_alpha": 1.5, "swiglu_beta": 1.0},
            ("swigluoai", 1.5, 1.0, 5.0),
        ),
        ("swigluoai_uninterleave", {"swiglu_limit": 5.0}, ("swigluoai", 1.0, 0.0, 5.0)),
        ("situ", {"activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0}, ("situ", None, 4.0, 25.0)),
        ("situ", {"activation_situ_beta": 4.0}, ("situ", None, 4.0, None)),
    ],
)
@pytest.mark.usefixtures("brought")
def test_activations(device: str, activation: str, numbers: dict[str, float], expected: tuple[Any, ...]) -> None:
    _, kind = fp8.select_fp8_moe_backend(moe_config(activation=activation, **numbers), *BLOCKS)
    assert is_ours(kind)
    config = kind.selection.config
    assert (config.activation.value, config.params.alpha, config.params.beta, config.params.limit) == expected


# ------------------------------------------------------------------ left to vLLM


def lora(config: Any) -> Any:
    config.is_lora_enabled = True
    return config


def all2all(config: Any, backend: str = "mori_high_throughput") -> Any:
    parallel = config.moe_parallel_config
    parallel.dp_size, parallel.all2all_backend, parallel.use_ep = 2, backend, True
    return config


def passthrough(config: Any) -> Any:
    config.moe_parallel_config.all2all_backend = "passthrough"
    return config


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "another backend": (lambda: moe_config(moe_backend="marlin"), "--moe-backend marlin asks for vLLM's"),
    "LoRA": (lambda: lora(moe_config()), "kernel does not support LoRA"),
    "tokens moved by others": (lambda: all2all(moe_config()), "kernel does not support parallel config"),
    "tokens moved by the experts": (
        lambda: passthrough(moe_config()),
        "kernel does not support parallel config",
    ),
    "batched tokens": (
        lambda: all2all(moe_config(), "deepep_low_latency"),
        "kernel does not support parallel config",
    ),
    "alternating rows": (lambda: moe_config(activation="swigluoai"), "kernel does not support MoEActivation.SWIGLUOAI"),
    "no such activation": (lambda: moe_config(activation="relu2"), "activation relu2 is not supported"),
    "a limit that means nothing": (
        lambda: moe_config(activation="gelu", swiglu_limit=3.0),
        "activation gelu has the clamp limit 3.0",
    ),
    "no limit": (
        lambda: moe_config(activation="swigluoai_uninterleave"),
        "activation swigluoai_uninterleave needs a clamp limit",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_left_to_vllm(device: str, brought: pytest.LogCaptureFixture, case: str) -> None:
    make, reason = REFUSED[case]
    _refused(lambda: fp8.select_fp8_moe_backend(make(), *BLOCKS))
    (line,) = said(brought)
    assert line.startswith(f"moe-vllm leaves fp8 experts to vLLM: {reason}")


def test_elastic_ep_is_left_to_vllm(
    device: str, brought: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = types.SimpleNamespace(parallel_config=types.SimpleNamespace(enable_elastic_ep=True))
    monkeypatch.setattr("moe_vllm.experts.get_current_vllm_config_or_none", lambda: engine)
    _refused(lambda: fp8.select_fp8_moe_backend(moe_config(), *BLOCKS))
    (line,) = said(brought)
    assert line.startswith("moe-vllm leaves fp8 experts to vLLM: Elastic EP makes experts anew")


def _refused(select: Callable[[], Any]) -> None:
    """What vLLM then does on this machine, where it has few kernels: another class, none, or its own error."""
    try:
        with set_current_vllm_config(VllmConfig()):
            _, kind = select()
    except (ValueError, NotImplementedError):
        return
    assert not is_ours(kind)


def test_gpus_alone(brought: pytest.LogCaptureFixture) -> None:
    """vLLM has kernels for CPUs; ours would be a loop."""
    _refused(lambda: fp8.select_fp8_moe_backend(moe_config(), *BLOCKS))
    (line,) = said(brought)
    assert line.startswith("moe-vllm leaves fp8 experts to vLLM: kernel does not support current device")


def test_keys_that_are_not_known(device: str, brought: pytest.LogCaptureFixture) -> None:
    """Blocks that vLLM has cut for a rank's shard, say."""
    cut = quant_utils.create_fp8_quant_key(static=True, group_shape=quant_utils.GroupShape(64, 64))
    _refused(lambda: fp8.select_fp8_moe_backend(moe_config(), cut, quant_utils.kFp8Dynamic128Sym))
    (line,) = said(brought)
    assert "unknown quant key" in line


@pytest.mark.parametrize("device", ["h200"], indirect=True)
def test_every_reason_of_the_selection(device: str, brought: pytest.LogCaptureFixture) -> None:
    config = moe_config()
    config.in_dtype = torch.float32
    keys = (quant_utils.kFp8Static128BlockSym, quant_utils.kMxfp8Dynamic)
    _refused(lambda: fp8.select_fp8_moe_backend(config, *keys))
    (line,) = said(brought)
    keys_taken = "fp8: no backend takes kFp8Static128BlockSym weights with kMxfp8Dynamic activations: with 16-bit"
    assert line.startswith(f"moe-vllm leaves fp8 experts to vLLM: {keys_taken}")


def test_an_environment_that_asks_for_a_library(
    device: str, brought: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM", "1")
    assert envs.VLLM_MOE_USE_DEEP_GEMM
    _refused(lambda: fp8.select_fp8_moe_backend(moe_config(), *BLOCKS))
    (line,) = said(brought)
    assert line.endswith("VLLM_USE_DEEP_GEMM and VLLM_MOE_USE_DEEP_GEMM select DeepGEMM")
    monkeypatch.setenv("VLLM_MOE_USE_DEEP_GEMM", "0")
    assert is_ours(fp8.select_fp8_moe_backend(moe_config(), *BLOCKS)[1])


def awq() -> AutoAWQConfig:
    return AutoAWQConfig.from_config({"w_bit": 4, "q_group_size": 64, "zero_point": True, "quant_method": "awq"})


@pytest.mark.parametrize(
    ("stored", "zero_points", "reason"),
    [
        (awq, True, "AutoAWQConfig is not supported"),
        (lambda: AutoGPTQConfig.from_config(GPTQ), True, "GPTQ weights with zero points are not supported"),
        (
            lambda: QuantizationArgs(**int_args(4, actorder="group")),
            False,
            "activation order is not supported",
        ),
        (
            lambda: QuantizationArgs(**int_args(4, strategy="channel", group_size=None)),
            False,
            "strategy channel is not supported",
        ),
    ],
    ids=["awq", "gptq zero points", "activation order", "channels"],
)
def test_integers_that_are_left(
    device: str, brought: pytest.LogCaptureFixture, stored: Callable[[], Any], zero_points: bool, reason: str
) -> None:
    key = quant_utils.kInt4Static
    _refused(lambda: int_wna16.select_wna16_moe_backend(moe_config(), key, stored(), zero_points, may_have_bias=False))
    (line,) = said(brought)
    assert line.startswith(f"moe-vllm leaves wna16 experts to vLLM: {reason}")


def test_mxfp4_of_other_checkpoints(device: str, brought: pytest.LogCaptureFixture) -> None:
    """Their methods prepare the weights by themselves."""
    token = oracles._layer.set(make_layer(FORMATS["fp8_block"].config()))
    brought.clear()
    try:
        _refused(lambda: mxfp4.select_mxfp4_moe_backend(moe_config()))
    finally:
        oracles._layer.reset(token)
    (line,) = said(brought)
    assert "MXFP4 weights of fp8 checkpoints are not supported" in line


# ------------------------------------------------------------------ bringing it


@pytest.mark.usefixtures("brought")
def test_what_vllm_had_imported_is_replaced() -> None:
    assert fp8_method.select_fp8_moe_backend is fp8.select_fp8_moe_backend
    assert auto_gptq.make_wna16_moe_kernel is int_wna16.make_wna16_moe_kernel


def test_undoing() -> None:
    before = (fp8_method.select_fp8_moe_backend, int8.select_int8_moe_backend, RoutedExperts._get_quant_method)
    changes = oracles.install(SCHEMES)
    assert fp8_method.select_fp8_moe_backend is not before[0]
    oracles.undo(changes)
    assert before == (
        fp8_method.select_fp8_moe_backend,
        int8.select_int8_moe_backend,
        RoutedExperts._get_quant_method,
    )


def test_schemes_that_are_switched_off() -> None:
    before = (fp8.select_fp8_moe_backend, int8.select_int8_moe_backend, mxfp4.select_mxfp4_moe_backend)
    changes = oracles.install(("int8",))
    assert fp8.select_fp8_moe_backend is before[0]
    assert int8.select_int8_moe_backend is not before[1]
    assert mxfp4.select_mxfp4_moe_backend is before[2]
    oracles.undo(changes)


def more(self: Any, num_tokens: int) -> None:
    """A method of vLLM's that takes something else."""


#: what another vLLM may have changed: (its place, its name, what stands there then; None: it went), what is said
CHANGED: dict[str, tuple[Any, str, Any, str]] = {
    "no such function": (fp8, "select_fp8_moe_backend", None, "has no attribute 'select_fp8_moe_backend'"),
    "other parameters": (
        fp8,
        "select_fp8_moe_backend",
        lambda layer: None,
        "takes no config, weight_key, activation_key",
    ),
    "a field of a layer": (needs, "FusedMoEConfig", type("Config", (), {}), "Config has no num_experts, "),
    "how tokens move": (FusedMoEParallelConfig, "use_deepep_v2_kernels", None, "has no use_deepep_v2_kernels"),
    "a tensor": (FusedMoEQuantConfig, "w2_zp", None, "FusedMoEQuantConfig has no w2_zp"),
    "a call": (FusedMoEExpertsModular, "apply", more, "apply takes self, num_tokens, expected self, output, "),
    "a question": (
        FusedMoEExpertsModular,
        "_supports_parallel_config",
        staticmethod(lambda config: True),
        "_supports_parallel_config takes config, expected moe_parallel_config",
    ),
    "one more method": (MoeCoreExperts, "__abstractmethods__", frozenset({"more"}), "Modular requires more"),
    "a variable": (envs, "environment_variables", {}, "has no attribute 'VLLM_USE_DEEP_GEMM'"),
}


@pytest.mark.parametrize("case", CHANGED)
def test_a_vllm_that_changed(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, case: str) -> None:
    """Nothing is replaced, and one line says why."""
    owner, name, changed, reason = CHANGED[case]
    monkeypatch.setattr(plugin, "_brought", ())
    before = (int8.select_int8_moe_backend, RoutedExperts._get_quant_method)
    if changed is None:
        monkeypatch.delattr(owner, name)
    else:
        monkeypatch.setattr(owner, name, changed)
    caplog.set_level("INFO", "vllm.moe_vllm")
    plugin.register()
    (line,) = said(caplog)
    assert line.startswith("moe-vllm is off: vllm 0.33.0 lacks what it needs: ")
    assert reason in line
    assert before == (int8.select_int8_moe_backend, RoutedExperts._get_quant_method)


def test_vllm_loads_it(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """By its own function for plug-ins, once per process."""
    monkeypatch.setattr(plugin, "_brought", ())
    monkeypatch.setattr(vllm.plugins, "plugins_loaded", False)
    monkeypatch.setenv("VLLM_PLUGINS", "moe_vllm")
    monkeypatch.setenv("MOE_VLLM", "fp8")
    made: list[tuple[oracles.Change, ...]] = []
    install = oracles.install

    def installing(schemes: tuple[str, ...]) -> tuple[oracles.Change, ...]:
        made.append(install(schemes))
        return made[-1]

    monkeypatch.setattr(oracles, "install", installing)
    caplog.set_level("INFO", "vllm.moe_vllm")
    vllm.plugins.load_general_plugins()
    plugin.register()
    assert said(caplog) == ["moe-vllm is on for fp8 (MOE_VLLM=off turns it off)"]
    assert len(made) == 1
    oracles.undo(made[0])


def test_a_refused_layout_of_load_balancing(device: str, brought: pytest.LogCaptureFixture) -> None:
    """EPLB moves experts within tensors: all of them must have one part per expert."""
    config = moe_config()
    config.moe_parallel_config.enable_eplb = True
    kind = fp8.select_fp8_moe_backend(config, *BLOCKS)[1]
    instance = object.__new__(kind)
    instance.moe_config = config
    whole = mc.KernelWeights(
        w13=torch.zeros(8, 4, 4), w2=torch.zeros(8, 4, 4), quant_config=mc.FUSED_MOE_UNQUANTIZED_CONFIG
    )
    instance._check_rearranging(whole)
    shared = mc.KernelWeights(
        w13=whole.w13, w2=whole.w2, quant_config=whole.quant_config, extra={"locks": torch.zeros(3)}
    )
    with pytest.raises(mc.ConfigError, match=r"locks \[3\] .*MOE_VLLM=off"):
        instance._check_rearranging(shared)
