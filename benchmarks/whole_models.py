"""Whole models in transformers: loading time, memory, and tokens per second.

    python benchmarks/whole_models.py all DIR --json FILE             # every model, by moe-core and in bfloat16
    python benchmarks/whole_models.py make qwen3-30b-a3b-fp8 DIR      # random weights in a model's real shapes
    python benchmarks/whole_models.py run DIR --by moe-core           # within moe_transformers.loading()
    python benchmarks/whole_models.py run DIR --by transformers       # experts dequantized by transformers, grouped_mm
    python benchmarks/whole_models.py run DIR --by bf16               # the same on random weights: nothing is loaded

`all` keeps one checkpoint at a time on disk, at most 31 GB. A checkpoint that was just written is loaded from the page
cache. `read_s` is the corresponding lower bound: the time to read the same bytes with the same number of threads
and to copy them to the device. Prefill is one call of the model, `generate` has a prompt of 16 tokens. A decode step is
also timed in a CUDA graph with a static cache.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import resource
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import moe_transformers
import torch
import transformers
from moe_core.checkpoint.files.reading_threads import READERS_AHEAD
from moe_transformers.plan import Plan
from safetensors.torch import save, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, StaticCache

Tensors = dict[str, Tensor]
DEVICE = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


# ------------------------------------------------------------------ checkpoints of random weights


def fp8(name: str, rows: int, cols: int) -> Tensors:
    """FP8 in 128 x 128 blocks, as published by DeepSeek and Qwen."""
    weight = torch.randn(rows, cols, device=DEVICE).to(torch.float8_e4m3fn)
    scale = torch.full((-(-rows // 128), -(-cols // 128)), cols**-0.5)
    return {f"{name}.weight": weight, f"{name}.weight_scale_inv": scale}


def gptq(name: str, rows: int, cols: int) -> Tensors:
    """GPTQ, 4 bits in groups of 128."""
    return {
        f"{name}.qweight": _words(cols // 8, rows),
        f"{name}.qzeros": torch.full((cols // 128, rows // 8), 0x77777777, dtype=torch.int32),
        f"{name}.scales": torch.full((cols // 128, rows), cols**-0.5 / 4, dtype=torch.float16),
        f"{name}.g_idx": torch.arange(cols, dtype=torch.int32) // 128,
    }


def packed(name: str, rows: int, cols: int) -> Tensors:
    """compressed-tensors, 4 bits in groups of 128."""
    return {
        f"{name}.weight_packed": _words(rows, cols // 8),
        f"{name}.weight_scale": torch.full((rows, cols // 128), cols**-0.5 / 4, dtype=torch.bfloat16),
        f"{name}.weight_shape": torch.tensor([rows, cols]),
    }


def plain(name: str, rows: int, cols: int) -> Tensors:
    """bfloat16, not quantized."""
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
    """One layer of gpt-oss: stacked experts in MXFP4, the rest in bfloat16."""
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
#: transformers' defaults are those of gpt-oss-120b
GPT_OSS = {"num_hidden_layers": 24, "num_local_experts": 32, "tie_word_embeddings": False}
#: sizes for trial runs on a CPU
TINY = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 4,
    "vocab_size": 1024,
}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
INT4_GROUPS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
PACKED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": INT4_GROUPS}},
}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
#: Small matrices in the number of a real model, so that the host's work per tensor dominates loading.
SMALL = {
    name: size for name, size in TINY.items() if name not in ("num_hidden_layers", "num_experts", "num_local_experts")
}
SIZES: dict[str, dict[str, Any]] = {"real": {}, "small": SMALL, "tiny": TINY}
#: model: configuration class, its entries, quantization_config, one layer's tensors, storage of a linear layer
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any], Callable[..., Tensors], Callable[..., Tensors]]] = {
    "qwen3-30b-a3b-fp8": ("Qwen3Moe", QWEN3, FP8, qwen3, fp8),
    "qwen3-30b-a3b-int4": ("Qwen3Moe", QWEN3, GPTQ, qwen3, gptq),
    "qwen3-30b-a3b-int4-packed": ("Qwen3Moe", QWEN3, PACKED, qwen3, packed),
    "gpt-oss-20b-mxfp4": ("GptOss", GPT_OSS, MXFP4, gpt_oss, plain),
}


def make(model: str, folder: Path, sizes: str) -> None:
    """Write the checkpoint, one file per layer; all layers have the first layer's values."""
    family, entries, quantization, layer, linear = MODELS[model]
    kind = getattr(transformers, f"{family}Config")
    known = kind().to_dict()
    entries = {**entries, **{name: value for name, value in SIZES[sizes].items() if name in known}}
    config = kind(**entries)
    content = {**config.to_dict(), "architectures": [f"{family}ForCausalLM"], "quantization_config": quantization}
    content["torch_dtype"] = content["dtype"] = "bfloat16"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(content))
    first = {name: tensor.cpu().contiguous() for name, tensor in layer(config, 0, linear).items()}
    data = save(first, metadata={"format": "pt"})
    size = 8 + int.from_bytes(data[:8], "little")
    weight_map: dict[str, str] = {}

    def write(index: int) -> None:
        """Write the first layer's file with another layer's names, which changes the header's size."""
        header = data[8:size].replace(b"model.layers.0.", f"model.layers.{index}.".encode())
        header += b" " * (-len(header) % 8)
        file = f"model-{index + 1:05d}.safetensors"
        with (folder / file).open("wb", buffering=0) as out:
            for part in (len(header).to_bytes(8, "little") + header, memoryview(data)[size:]):
                while part:
                    part = part[out.write(part) :]
        names = (name.replace("model.layers.0.", f"model.layers.{index}.") for name in first)
        weight_map.update(dict.fromkeys(names, file))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(config.num_hidden_layers)))
    ends = plain("model.embed_tokens", config.vocab_size, config.hidden_size)
    ends |= plain("lm_head", config.vocab_size, config.hidden_size)
    ends = {name: tensor.cpu() for name, tensor in ends.items()} | {"model.norm.weight": ones(config.hidden_size)}
    save_file(ends, folder / "model-ends.safetensors", metadata={"format": "pt"})
    weight_map.update(dict.fromkeys(ends, "model-ends.safetensors"))
    index_file = folder / "model.safetensors.index.json"
    index_file.write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map}))


# ------------------------------------------------------------------ measurements


def load(folder: Path, by: str) -> Any:
    arguments = {"dtype": torch.bfloat16, "device_map": DEVICE.type}
    if by == "moe-core":
        with moe_transformers.loading():
            return AutoModelForCausalLM.from_pretrained(folder, **arguments)
    config = AutoConfig.from_pretrained(folder)
    method = config.quantization_config["quant_method"]
    if by == "bf16":
        del config.quantization_config
        with DEVICE:
            return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    kinds = {"fp8": "FineGrainedFP8Config", "mxfp4": "Mxfp4Config"}
    if method not in kinds:
        raise SystemExit(f"transformers does not load experts of quant_method {method!r} by itself: --by bf16")
    dequantize = getattr(transformers, kinds[method])(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(folder, **arguments, quantization_config=dequantize)


@contextlib.contextmanager
def parts_of_loading() -> Iterator[dict[str, float]]:
    """Measure the seconds of `moe_transformers.loading()` itself; the rest is transformers'."""
    parts: dict[str, float] = {}

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            start = synchronized()
            try:
                return call(*arguments)
            finally:
                parts[name] = parts.get(name, 0.0) + synchronized() - start

        return run

    of, load_experts = Plan.of, Plan.load
    with (
        mock.patch.object(Plan, "of", staticmethod(timed("headers and choice of backends", of))),
        mock.patch.object(Plan, "load", timed("experts", load_experts)),
    ):
        yield parts


def read_seconds(folder: Path) -> float:
    """Measure how long it takes to copy all bytes of the checkpoint to the device."""
    piece, gpu = 64 << 20, DEVICE.type == "cuda"
    files = {file: file.stat().st_size for file in folder.glob("*.safetensors")}
    pieces = [(file, at, min(piece, size - at)) for file, size in files.items() for at in range(0, size, piece)]
    own = threading.local()

    def begin() -> None:
        own.host = torch.empty(piece, dtype=torch.uint8, pin_memory=gpu)
        own.device = torch.empty_like(own.host, device=DEVICE) if gpu else own.host
        ready.wait()

    def bring(one: tuple[Path, int, int]) -> None:
        file, at, size = one
        with file.open("rb", buffering=0) as source:
            source.seek(at)
            left = memoryview(own.host.numpy())[:size]
            while left:
                left = left[source.readinto(left) :]
        if gpu:
            own.device[:size].copy_(own.host[:size])

    ready = threading.Barrier(READERS_AHEAD)
    with ThreadPoolExecutor(READERS_AHEAD, initializer=begin) as pool:
        # allocate memory first: every thread's initializer waits for the others
        list(pool.map(lambda _: None, range(READERS_AHEAD)))
        start = synchronized()
        list(pool.map(bring, pieces))
        return synchronized() - start


def synchronized() -> float:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def seconds(call: Callable[[], object], repeats: int) -> float:
    """Return the mean seconds of ``repeats`` calls, after a warm-up call."""
    call()
    start = synchronized()
    for _ in range(repeats):
        call()
    return (synchronized() - start) / repeats


#: Prompt tokens before decoding; the sliding window must not fill up, since full windows cannot be captured.
PROMPT, CACHE = 16, 128


def generation(model: Any, batch: int, count: int) -> Callable[[], object]:
    settings = GenerationConfig(max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0)
    prompt = torch.randint(0, model.config.vocab_size, (batch, PROMPT), device=DEVICE)
    return lambda: model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=settings)


def captured_step(model: Any, batch: int) -> Callable[[], object]:
    """Return a decode step of ``batch`` sequences with a static cache; on a GPU in a CUDA graph."""
    cache = StaticCache(config=model.config, max_cache_len=CACHE)
    prompt = torch.randint(0, model.config.vocab_size, (batch, PROMPT), device=DEVICE)
    model(prompt, past_key_values=cache, use_cache=True, logits_to_keep=1)
    token, position = prompt[:, :1].clone(), torch.full((batch, 1), PROMPT, device=DEVICE)

    def step() -> object:
        return model(token, past_key_values=cache, use_cache=True, position_ids=position, logits_to_keep=1).logits

    if DEVICE.type != "cuda":
        return step
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = step()

    def replay() -> object:
        graph.replay()
        return logits

    return replay


def measure(folder: Path, by: str, count: int) -> Iterator[tuple[str, object]]:
    yield "versions", {"transformers": transformers.__version__, "torch": torch.__version__}
    yield "by", by
    yield "device", torch.cuda.get_device_name() if DEVICE.type == "cuda" else "cpu"
    yield "checkpoint_bytes", sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    read_s = 0.0
    if by != "bf16":
        read_s = read_seconds(folder)
        yield "read_s", read_s
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with parts_of_loading() as parts:
        start, cpu = synchronized(), time.process_time()
        model = load(folder, by)
        took, cpu = synchronized() - start, time.process_time() - cpu
    if by != "bf16":
        yield "load_s", took
        yield "load_cpu_s", cpu
        yield "load_parts_s", parts
        yield "load_s / read_s", took / read_s
    yield "host_peak_bytes", 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if DEVICE.type == "cuda":
        yield "device_bytes", torch.cuda.memory_allocated()
        yield "load_device_peak_bytes", torch.cuda.max_memory_allocated()
    yield "experts", _experts(model)
    with torch.inference_mode():
        for tokens in (128, 4096):
            ids = torch.randint(0, model.config.vocab_size, (1, tokens), device=DEVICE)
            took = seconds(lambda ids=ids: model(ids, use_cache=False, logits_to_keep=1), 3)  # type: ignore[misc]
            yield f"prefill_{tokens}_tokens_per_s", tokens / took
        for batch in (1, 32):
            yield f"generate_batch_{batch}_tokens_per_s", batch * count / seconds(generation(model, batch, count), 1)
            try:
                took = seconds(captured_step(model, batch), 20)
            except RuntimeError as error:
                yield f"graph_batch_{batch}_error", str(error)
            else:
                yield f"graph_batch_{batch}_tokens_per_s", batch / took
    if DEVICE.type == "cuda":
        yield "device_peak_bytes", torch.cuda.max_memory_allocated()


def _experts(model: Any) -> str:
    """Return what runs the experts."""
    for module in model.modules():
        if isinstance(module, moe_transformers.MoeCoreExperts) and module.layer is not None:
            selection = module.layer.selection
            return f"{selection.report.scheme} by {selection.backend}"
    return f"transformers: {model.config._experts_implementation}"


class Results(list[dict[str, object]]):
    """Measurements, one dict per run; ``file`` is updated after every measurement."""

    def __init__(self, file: Path | None) -> None:
        super().__init__()
        self.file = file

    def measure(self, folder: Path, by: str, tokens: int) -> None:
        found: dict[str, object] = {"checkpoint": folder.name}
        self.append(found)
        for name, value in measure(folder, by, tokens):
            found[name] = value
            print(f"{name}: {value}", flush=True)
            if self.file is not None:
                self.file.write_text(json.dumps(self, indent=1))


def run_all(folder: Path, tokens: int, sizes: str, results: Results) -> None:
    """Measure every model with moe-core, and each architecture in bfloat16."""
    seen = set()
    for model, (family, *_) in MODELS.items():
        start = time.perf_counter()
        make(model, folder / model, sizes)
        print(f"{model}: made in {time.perf_counter() - start:.1f} s", flush=True)
        try:
            for by in ("moe-core",) if family in seen else ("moe-core", "bf16"):
                gc.collect()
                results.measure(folder / model, by, tokens)
        finally:
            shutil.rmtree(folder / model)
        seen.add(family)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    making, running, whole = (actions.add_parser(name) for name in ("make", "run", "all"))
    making.add_argument("model", choices=MODELS)
    for action in (making, running, whole):
        action.add_argument("folder", type=Path)
    for action in (making, whole):
        action.add_argument(
            "--sizes",
            choices=SIZES,
            default="real",
            help="tiny: tries everything out on a CPU; small: as many layers and experts as the model has",
        )
    for action in (running, whole):
        action.add_argument("--tokens", type=int, default=32, help="tokens that are decoded")
        action.add_argument("--json", type=Path)
    running.add_argument("--by", choices=("moe-core", "transformers", "bf16"), default="moe-core")
    given = parser.parse_args()
    if given.action == "make":
        make(given.model, given.folder, given.sizes)
        return
    results = Results(given.json)
    if given.action == "run":
        results.measure(given.folder, given.by, given.tokens)
    else:
        run_all(given.folder, given.tokens, given.sizes, results)


if __name__ == "__main__":
    main()
