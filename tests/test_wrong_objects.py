"""Public functions in wrong hands: each argument replaced by each wrong object gives an error that names something.

A MoEError, or a TypeError with the argument's name, is right; so is an object that happens to fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import moe_core as mc
import pytest
import torch
from moe_core.checkpoint import Checkpoint
from moe_core.checkpoint.source import read_layer
from moe_core.parallel.distributed.cost import Machine
from moe_core.parallel.placement.load_recorder import ExpertLoadRecorder
from moe_core.parallel.placement.moves import placement_steps
from moe_core.parallel.placement.placement import ExpertPlacement, load_placements, save_placements
from moe_core.parallel.placement.planner import plan_placement, rank_loads
from moe_core.parallel.placement.tables import ReplicaTables

WRONG: dict[str, Any] = {
    "5": 5,
    "-3": -3,
    "text": "x",
    "None": None,
    "object": object(),
    "no list": [],
    "list of objects": [object()],
    "dict": {},
    "tuple": (1,),
    "nan": float("nan"),
    "fraction": 2.5,
    "huge": 10**30,
    "bytes": b"q",
    "no text": "",
    "True": True,
    "class": int,
    "module": torch,
    "tensor": torch.zeros(7, 5),
    "one integer": torch.zeros(1, dtype=torch.int64),
    "no elements": torch.empty(0),
    "nan in a tensor": torch.full((3, 32), float("nan")),
    "meta": torch.empty(3, 32, device="meta"),
}
KEY = mc.kInt8StaticChannelSym
CONFIG = mc.FusedMoEConfig(
    num_experts=4, top_k=2, hidden_size=32, intermediate_size=32, dtype=torch.float32, routing="Renormalize"
)  # type: ignore[arg-type]
ADAPTED = mc.FusedMoEConfig(
    num_experts=4, top_k=2, hidden_size=32, intermediate_size=32, is_lora_enabled=True, max_loras=1, max_lora_rank=4
)
Case = tuple[Callable[..., Any], dict[str, Any]]


def cases(folder: Path) -> Iterator[tuple[str, Callable[..., Any], dict[str, Any]]]:
    """(name, function, arguments that fit)."""
    weights = mc.MoEWeights(
        weight_key=KEY,
        activation_key=None,
        w13=torch.zeros(4, 64, 32, dtype=torch.int8),
        w2=torch.zeros(4, 32, 32, dtype=torch.int8),
        w13_scale=torch.ones(4, 64, 1),
        w2_scale=torch.ones(4, 32, 1),
    )
    layer = mc.FusedMoELayer.from_weights("int8", CONFIG, weights, copy=True)
    kernel, oracle, registry = layer.kernel, mc.oracle("int8"), mc.registry()
    selection = oracle.select(CONFIG, weight_key=KEY, activation_key=None)
    converted = oracle.convert(selection, weights)
    placement = ExpertPlacement.contiguous(4, 2)
    tables = ReplicaTables.of(placement, "cpu")
    recorder = ExpertLoadRecorder(2, 4, "cpu")
    adapters = mc.LoRAWeights.zeros(ADAPTED, "cpu")
    x, topk_weights, topk_ids = torch.randn(3, 32), torch.rand(3, 2), torch.zeros(3, 2, dtype=torch.int64)
    logits = torch.randn(3, 4)
    routed = {"topk_weights": topk_weights, "topk_ids": topk_ids}
    call = {"hidden_states": x, **routed, "adapter_ids": None, "tokens_per_rank": None}
    none = dict.fromkeys
    parallel = mc.FusedMoEParallelConfig.of_rank(0, tp_size=2)
    registry.scheme("int8").write_quickstart(folder)
    placements = folder / "placements.json"

    def set_to(name: str) -> Callable[[Any], None]:
        def set_value(value: Any) -> None:
            before = getattr(kernel, name)
            try:
                setattr(kernel, name, value)
            finally:
                setattr(kernel, name, before)

        return set_value

    yield "shard_layer", mc.shard_layer, {
        "config": CONFIG, "weights": weights, "parallel": parallel, **none(("experts", "plan"))
    }  # fmt: skip
    optional = ("layer", "experts", "parallel", "groups", "placement", "quantize", "max_num_tokens", "stack", "routing",
                "activation", "activation_params")  # fmt: skip
    yield "load_layer", mc.load_layer, {
        "path": folder, "device": "cpu", "backend": "auto", "dtype": torch.bfloat16, "activation_key": "checkpoint",
        "max_loras": 0, "max_lora_rank": 16, "assume": False, **none(optional),
    }  # fmt: skip
    yield "Checkpoint.open", Checkpoint.open, {"path": folder}
    yield "read_layer", read_layer, {"checkpoint": Checkpoint.open(folder), **none(("layer", "experts", "stack"))}
    optional = ("router_weight", "router_bias", "correction_bias", "expert_map", "quantize", "groups", "placement")
    yield "from_weights", mc.FusedMoELayer.from_weights, {
        "scheme": "int8", "config": CONFIG, "weights": weights, "backend": "auto", "copy": False, **none(optional)
    }  # fmt: skip
    optional = ("routing", "router_weight", "router_bias", "correction_bias", "expert_map")
    yield "FusedMoELayer", mc.FusedMoELayer, {"kernel": kernel, "selection": selection, **none(optional)}
    yield "reload", layer.reload, {"weights": weights, "layer": None}
    yield "layer()", layer, {**call, "router_logits": None}
    yield "layer.start", layer.start, {**call, "router_logits": None}
    yield "layer.route", layer.route, {"router_logits": logits}
    yield "layer.warm_up", layer.warm_up, {"max_tokens": 2}
    yield "kernel.apply", kernel.apply, {**call, "expert_map": None, "output": None}
    yield "kernel.start", kernel.start, {**call, "expert_map": None, "output": None}
    yield "kernel.workspaces", kernel.workspaces, {"num_tokens": 2}
    yield "kernel.workspace_nbytes", kernel.workspace_nbytes, {"num_tokens": 2}
    for name in ("lora", "weights", "workspace"):
        yield f"kernel.{name} =", set_to(name), {"value": getattr(kernel, name)}
    yield "FusedMoEKernel", mc.FusedMoEKernel, {
        "experts": kernel.experts, "weights": kernel.weights, "prepare_finalize": kernel.prepare_finalize,
        **none(("workspace", "lora")),
    }  # fmt: skip
    yield "share_workspace", mc.share_workspace, {"layers": [layer], "max_tokens": 4}
    yield "warm_up", mc.warm_up, {"layers": [layer], "max_tokens": 2}
    yield "layer_memory", mc.layer_memory, {"selection": selection, "num_tokens": 3}
    yield "experts_left_out", lambda model: mc.experts_left_out(model).__enter__(), {"model": torch.nn.Module()}
    yield "select", oracle.select, {
        "config": CONFIG, "weight_key": KEY, "moe_backend": "auto", **none(("activation_key", "device"))
    }  # fmt: skip
    yield "convert", oracle.convert, {"selection": selection, "weights": weights}
    yield "make_experts", oracle.make_experts, {"selection": selection}
    yield "make_kernel", oracle.make_kernel, {
        "selection": selection, "weights": converted, "layer": "",
        **none(("prepare_finalize", "groups", "placement", "workspace")),
    }  # fmt: skip
    for name in ("scheme", "oracle", "formats"):
        yield f"registry.{name}", getattr(registry, name), {"name": "int8"}
    yield "registry.online", registry.online, {"quantization": registry.online_names()[0]}
    yield "write_quickstart", registry.scheme("int8").write_quickstart, {"folder": folder}
    yield "FusedMoEConfig", mc.FusedMoEConfig, {
        **{name: getattr(ADAPTED, name) for name in ("num_experts", "top_k", "hidden_size", "intermediate_size")},
        **{name: getattr(ADAPTED, name) for name in ("dtype", "activation", "parallel", "activation_format")},
        **{name: getattr(ADAPTED, name) for name in ("is_lora_enabled", "max_loras", "max_lora_rank")},
        **none(("routing", "activation_params", "max_num_tokens", "num_local_experts")),
    }  # fmt: skip
    yield "of_rank", mc.FusedMoEParallelConfig.of_rank, {"rank": 0, "tp_size": 2, "ep_size": 1, "dp_size": 1}
    yield "QuantKey", mc.QuantKey, {"dtype": KEY.dtype, "scale": KEY.scale}
    yield "as_quant_key", mc.as_quant_key, {"key": "kInt8StaticChannelSym"}
    yield "GroupShape", mc.GroupShape, {"row": 1, "col": -1}
    fields = ("scoring_func", "renormalize", "score_selected_only", "has_correction_bias", "num_expert_group",
              "topk_group", "routed_scaling_factor", "custom")  # fmt: skip
    yield "RoutingConfig", mc.RoutingConfig, {name: getattr(mc.RoutingConfig(), name) for name in fields}
    yield "RoutingConfig.parse", mc.RoutingConfig.parse, {"text": "softmax,renormalize"}
    yield "RoutingConfig.from_method", mc.RoutingConfig.from_method, {
        "method": "Renormalize", **none(("num_expert_group", "topk_group"))
    }  # fmt: skip
    yield "RoutingConfig.check", mc.RoutingConfig().check, {"num_experts": 4, "top_k": 2}
    yield "route", mc.route, {
        "router_logits": logits, "top_k": 2, "config": CONFIG.routing, "correction_bias": None
    }  # fmt: skip
    yield "MoEActivation.parse", mc.MoEActivation.parse, {"name": "silu"}
    yield "apply_moe_activation", mc.apply_moe_activation, {
        "activation": mc.MoEActivation.SILU, "x": torch.randn(3, 8), "params": None
    }  # fmt: skip
    yield "ActivationParams", mc.ActivationParams, {"alpha": 1.0, "beta": 1.0, "limit": None}
    optional = ("zero_point", "g_idx")
    yield "dequantize_weight", mc.dequantize_weight, {
        "q": weights.w13, "scale": weights.w13_scale, "key": KEY, "parts": 2, **none(optional)
    }  # fmt: skip
    yield "quantize_weight", mc.quantize_weight, {
        "w": torch.randn(4, 32, 64), "key": KEY, "parts": 1, "scale": None, **none(optional)
    }  # fmt: skip
    yield "quantize_moe_weights", mc.quantize_moe_weights, {
        "w13": torch.randn(4, 64, 32), "w2": torch.randn(4, 32, 32), "gated": True, "weight_key": KEY,
        "activation_key": None,
    }  # fmt: skip
    yield "scale_shape", mc.scale_shape, {"key": KEY, "experts": 4, "rows": 64, "cols": 32, "parts": 2}
    yield "e8m0_to_float32", mc.e8m0_to_float32, {"codes": torch.ones(3, dtype=torch.uint8)}
    yield "fused_moe_reference", mc.fused_moe_reference, {
        "x": x, "weights": weights, "config": CONFIG, "dtype": torch.float64, **routed,
        **none(("expert_map", "lora", "compute_dtype")),
    }  # fmt: skip
    yield "local_expert_ids", mc.local_expert_ids, {
        "topk_ids": topk_ids, "num_experts": 4, "num_local": 4, "expert_map": None
    }  # fmt: skip
    yield "make_quant_config", mc.make_quant_config, {
        "weight_key": KEY, "w1_scale": weights.w13_scale, "w2_scale": weights.w2_scale,
        **none(("activation_key", "w1_zp", "w1_bias", "w1_g_idx")),
    }  # fmt: skip
    yield "Workspace", mc.Workspace, {"device": "cpu"}
    yield "Workspace.reserve", mc.Workspace("cpu").reserve, {"nbytes": 3}
    yield "LoRAWeights.zeros", mc.LoRAWeights.zeros, {"config": ADAPTED, "device": "cpu"}
    yield "LoRAWeights.load", adapters.load, {
        "adapter": 0, **{name: tensor[0].clone() for name, tensor in adapters.tensors()}
    }  # fmt: skip
    yield "LoRAWeights.clear", adapters.clear, {"adapter": 0}
    yield "LoRAWeights.validate", adapters.validate, {"config": ADAPTED, "device": torch.device("cpu")}
    yield "MoEWeights.validate", weights.validate, {"config": CONFIG}
    yield "KernelWeights.copy_", kernel.weights.copy_, {"other": kernel.weights}
    yield "check_dtype", mc.check_dtype, {"name": "x", "tensor": x, "expected": (torch.float32,)}
    yield "check_shape", mc.check_shape, {"name": "x", "tensor": x, "expected": (3, 32)}
    yield "ExpertPlacement", ExpertPlacement, {"num_experts": 4, "ranks": ((0, 1), (2, 3))}
    for name in ("contiguous", "round_robin"):
        yield f"ExpertPlacement.{name}", getattr(ExpertPlacement, name), {"num_experts": 4, "ep_size": 2}
    yield "expert_map", placement.expert_map, {"rank": 0, "device": "cpu"}
    yield "aligned", placement.aligned, {"current": placement}
    yield "ExpertPlacement.from_json", ExpertPlacement.from_json, {"value": placement.to_json()}
    yield "save_placements", save_placements, {"path": placements, "placements": {0: placement}}
    yield "load_placements", load_placements, {"path": placements}
    yield "placement_steps", placement_steps, {"current": placement, "new": placement, "max_staged": None}
    yield "plan_placement", plan_placement, {
        "counts": [1.0, 2.0, 3.0, 4.0], "ep_size": 2, "slots": None, "current": placement, "tolerance": 0.05
    }  # fmt: skip
    yield "rank_loads", rank_loads, {"placement": placement, "counts": [1.0, 2.0, 3.0, 4.0]}
    yield "ReplicaTables.of", ReplicaTables.of, {
        "placement": placement, "device": "cpu", **none(("max_replicas", "stride"))
    }  # fmt: skip
    yield "ReplicaTables.copy_", tables.copy_, {"placement": placement}
    yield "ReplicaTables.choose", tables.choose, {"topk_ids": topk_ids, "offset": 0}
    yield "ReplicaTables.local_ids", tables.local_ids, {"topk_ids": topk_ids, "rank": 0, "offset": 0}
    yield "ExpertLoadRecorder", ExpertLoadRecorder, {"num_layers": 2, "num_experts": 4, "device": "cpu"}
    yield "record", recorder.record, {"layer": 0, "topk_ids": topk_ids}
    yield "decay", recorder.decay, {"factor": 0.5}
    yield "Machine.load", Machine.load, {"name": "h200"}


def raw(function: Callable[..., Any], given: dict[str, Any], name: str) -> str | None:
    """What a call raises that is no error of ours and does not name the argument; None if it is fine."""
    try:
        function(**given)
    except mc.MoEError:
        return None
    except TypeError as error:
        return None if name in str(error) else f"TypeError: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:100]}"
    return None


def test_wrong_objects_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # "x" is a file's name too
    found, called = [], 0
    for name, function, good in cases(tmp_path):
        function(**good)
        for argument in good:
            for label, wrong in WRONG.items():
                called += 1
                what = raw(function, good | {argument: wrong}, argument)
                if what is not None:
                    found.append(f"{name}({argument}={label}): {what}")
    assert not found, "\n".join(found)
    assert called > 5000
