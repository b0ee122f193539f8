"""Whole models in transformers: how long they take to load, what memory, and how many tokens a second.

    python benchmarks/whole_models.py make qwen3-30b-a3b-fp8 DIR      # random weights in a model's real shapes
    python benchmarks/whole_models.py run DIR --by moe-core           # within moe_transformers.loading()
    python benchmarks/whole_models.py run DIR --by transformers       # experts dequantised by transformers, grouped_mm

One JSON object per run.  Loading is timed a second time too, from the page cache.  Decoding is what `generate` does
with a static cache, which it compiles for; prefill is one call of the model.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import moe_transformers
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig

Tensors = dict[str, Tensor]
DEVICE = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


# ------------------------------------------------------------------ checkpoints of random weights


def fp8(name: str, rows: int, cols: int) -> Tensors:
    """128 x 128 blocks, as DeepSeek and Qwen publish them."""
    weight = torch.randn(rows, cols, device=DEVICE).to(torch.float8_e4m3fn)
    scale = torch.full((-(-rows // 128), -(-cols // 128)), cols**-0.5)
    return {f"{name}.weight": weight, f"{name}.weight_scale_inv": scale}


def gptq(name: str, rows: int, cols: int) -> Tensors:
    """4 bits, groups of 128."""
    return {
        f"{name}.qweight": _words(cols // 8, rows),
        f"{name}.qzeros": torch.full((cols // 128, rows // 8), 0x77777777, dtype=torch.int32),
        f"{name}.scales": torch.full((cols // 128, rows), cols**-0.5 / 4, dtype=torch.float16),
        f"{name}.g_idx": torch.arange(cols, dtype=torch.int32) // 128,
    }


def plain(name: str, rows: int, cols: int) -> Tensors:
    """bfloat16."""
    return {f"{name}.weight": (torch.randn(rows, cols, device=DEVICE) * cols**-0.5).bfloat16()}


def _words(*shape: int) -> Tensor:
    return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, device=DEVICE)


def attention(config: Any, prefix: str, linear: Callable[[str, int, int], Tensors], bias: bool) -> Tensors:
    """Attention and the norms around it."""
    hidden = config.hidden_size
    heads, few = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    found = {f"{prefix}.{name}.weight": ones(hidden) for name in ("input_layernorm", "post_attention_layernorm")}
    for name, rows, cols in (("q", heads, hidden), ("k", few, hidden), ("v", few, hidden), ("o", hidden, heads)):
        found |= linear(f"{prefix}.self_attn.{name}_proj", rows, cols)
        if bias:
            found[f"{prefix}.self_attn.{name}_proj.bias"] = 0 * ones(rows)
    return found


def qwen3(config: Any, layer: int, linear: Callable[[str, int, int], Tensors]) -> Tensors:
    """One layer of Qwen3-MoE."""
    prefix, hidden, inter = f"model.layers.{layer}", config.hidden_size, config.moe_intermediate_size
    found = attention(config, prefix, linear, bias=False)
    found |= {f"{prefix}.self_attn.{name}.weight": ones(config.head_dim) for name in ("q_norm", "k_norm")}
    found |= plain(f"{prefix}.mlp.gate", config.num_experts, hidden)
    for expert in range(config.num_experts):
        for name, rows, cols in (("gate", inter, hidden), ("up", inter, hidden), ("down", hidden, inter)):
            found |= linear(f"{prefix}.mlp.experts.{expert}.{name}_proj", rows, cols)
    return found


def gpt_oss(config: Any, layer: int, linear: Callable[[str, int, int], Tensors]) -> Tensors:
    """One layer of gpt-oss: stacked experts in MXFP4, all else in bfloat16."""
    prefix, hidden, inter = f"model.layers.{layer}", config.hidden_size, config.intermediate_size
    count = config.num_local_experts
    found = attention(config, prefix, linear, bias=True)
    found[f"{prefix}.self_attn.sinks"] = 0 * ones(config.num_attention_heads)
    found |= plain(f"{prefix}.mlp.router", count, hidden)
    found[f"{prefix}.mlp.router.bias"] = 0 * ones(count)
    for name, rows, cols in (("gate_up", 2 * inter, hidden), ("down", hidden, inter)):
        base = f"{prefix}.mlp.experts.{name}_proj"
        found[f"{base}_blocks"] = _words(count, rows, cols // 32, 4).view(torch.uint8)
        found[f"{base}_scales"] = torch.full((count, rows, cols // 32), 121, dtype=torch.uint8)
        found[f"{base}_bias"] = torch.zeros(count, rows, dtype=torch.bfloat16)
    return found


def ones(size: int) -> Tensor:
    return torch.ones(size, dtype=torch.bfloat16)


QWEN3 = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}
#: transformers' defaults are gpt-oss-120b's
GPT_OSS = {"num_hidden_layers": 24, "num_local_experts": 32, "tie_word_embeddings": False}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
#: model: configuration class, its entries, quantization_config, one layer's tensors, how a linear layer is stored
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any], Callable[..., Tensors], Callable[..., Tensors]]] = {
    "qwen3-30b-a3b-fp8": ("Qwen3Moe", QWEN3, FP8, qwen3, fp8),
    "qwen3-30b-a3b-int4": ("Qwen3Moe", QWEN3, GPTQ, qwen3, gptq),
    "gpt-oss-20b-mxfp4": ("GptOss", GPT_OSS, MXFP4, gpt_oss, plain),
}


def make(model: str, folder: Path, layers: int | None) -> None:
    """Writes the checkpoint, a file for each layer."""
    family, entries, quantization, layer, linear = MODELS[model]
    if layers is not None:
        entries = {**entries, "num_hidden_layers": layers}
    config = getattr(transformers, f"{family}Config")(**entries)
    content = {**config.to_dict(), "architectures": [f"{family}ForCausalLM"], "quantization_config": quantization}
    content["torch_dtype"] = content["dtype"] = "bfloat16"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(content))
    weight_map: dict[str, str] = {}

    def write(file: str, tensors: Tensors) -> None:
        here = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        save_file(here, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(here, file))

    count = config.num_hidden_layers + 1
    for index in range(config.num_hidden_layers):
        write(f"model-{index + 1:05d}-of-{count:05d}.safetensors", layer(config, index, linear))
    ends = plain("model.embed_tokens", config.vocab_size, config.hidden_size)
    ends |= plain("lm_head", config.vocab_size, config.hidden_size)
    write(f"model-{count:05d}-of-{count:05d}.safetensors", {**ends, "model.norm.weight": ones(config.hidden_size)})
    index_file = folder / "model.safetensors.index.json"
    index_file.write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map}))


# ------------------------------------------------------------------ measurements


def load(folder: Path, by: str) -> Any:
    arguments = {"dtype": torch.bfloat16, "device_map": DEVICE.type}
    if by == "moe-core":
        with moe_transformers.loading():
            return AutoModelForCausalLM.from_pretrained(folder, **arguments)
    method = json.loads((folder / "config.json").read_text())["quantization_config"]["quant_method"]
    kinds = {"fp8": "FineGrainedFP8Config", "mxfp4": "Mxfp4Config"}
    if method not in kinds:
        raise SystemExit(f"transformers does not load experts of quant_method {method!r} by itself")
    dequantize = getattr(transformers, kinds[method])(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(folder, **arguments, quantization_config=dequantize)


def synchronized() -> float:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def seconds(call: Callable[[], object], repeats: int = 5) -> float:
    """The median of ``repeats`` calls after one that is not counted."""
    call()
    times = []
    for _ in range(repeats):
        start = synchronized()
        call()
        times.append(synchronized() - start)
    return sorted(times)[repeats // 2]


def generation(model: Any, batch: int, count: int) -> Callable[[], object]:
    settings = GenerationConfig(
        max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0, cache_implementation="static"
    )
    prompt = torch.randint(0, model.config.vocab_size, (batch, 128), device=DEVICE)
    return lambda: model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=settings)


def measure(folder: Path, by: str, count: int) -> Iterator[tuple[str, object]]:
    yield "versions", {"transformers": transformers.__version__, "torch": torch.__version__}
    yield "by", by
    yield "device", torch.cuda.get_device_name() if DEVICE.type == "cuda" else "cpu"
    yield "disk_free", shutil.disk_usage(folder).free
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    yield "checkpoint_bytes", size
    model: Any = None
    for name in ("load_s", "load_again_s"):
        model = None
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        start = synchronized()
        model = load(folder, by)
        yield name, synchronized() - start
    yield "host_peak_bytes", 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if DEVICE.type == "cuda":
        yield "device_bytes", torch.cuda.memory_allocated()
        yield "device_peak_bytes", torch.cuda.max_memory_allocated()
    with torch.no_grad():
        for tokens in (128, 2048):
            ids = torch.randint(0, model.config.vocab_size, (1, tokens), device=DEVICE)
            took = seconds(lambda ids=ids: model(ids, use_cache=False, logits_to_keep=1))  # type: ignore[misc]
            yield f"prefill_{tokens}_tokens_per_s", tokens / took
        for batch in (1, 8, 32):
            few, many = (seconds(generation(model, batch, n), 3) for n in (1, count + 1))
            yield f"decode_batch_{batch}_tokens_per_s", batch * count / (many - few)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    making = actions.add_parser("make")
    making.add_argument("model", choices=MODELS)
    making.add_argument("folder", type=Path)
    making.add_argument("--layers", type=int)
    running = actions.add_parser("run")
    running.add_argument("folder", type=Path)
    running.add_argument("--by", choices=("moe-core", "transformers"), default="moe-core")
    running.add_argument("--tokens", type=int, default=64, help="tokens that are decoded")
    running.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.action == "make":
        make(given.model, given.folder, given.layers)
        return
    found: dict[str, object] = {}
    for name, value in measure(given.folder, given.by, given.tokens):
        found[name] = value
        print(f"{name}: {value}", flush=True)
        if given.json is not None:
            given.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
