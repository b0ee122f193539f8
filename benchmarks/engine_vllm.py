"""A layer inside vLLM, three ways: vLLM's own experts, ours through moe-vllm, and moe-core's layer without vLLM.

    python benchmarks/engine_vllm.py [--tokens 1,32,1024] [--only fp8_block,mxfp4] [--vllm FOLDER] [--json FILE]

vLLM's RoutedExperts, its quantisation method and its modular kernel; sizes of Qwen3-30B-A3B, random weights.
The second and the third must be equal in every bit, and the second must hold no weights beside vLLM's parameters:
the script exits with 1 where that is not so, and says which outputs differ: of eager calls, of those that start
recorded launches, or of a graph.  Times are medians of CUDA graphs of several calls, each on other tokens.

It needs vLLM 0.33.  `--vllm` names a folder with vLLM's Python files in its place (tools/unpack_python.py): what they
import and is not installed is stood in for.  vLLM's own experts need its compiled operators in that folder; where
these are not there, they are left out.  `--dry`: without a GPU, everything up to the first call, of a small layer.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import platform
import statistics
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from graph_time import captured, heat_up, replay_times
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
# vLLM's layers, its formats and the stand-ins are those of the tests
sys.path += [str(ROOT / "packages" / name / "tests" / "support") for name in ("moe-vllm", "moe-core")]

KINDS = ("fp8_block", "fp8_channel", "int8_channel", "int4_g128", "mxfp4")
Call = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Ready:
    """A peer's layer: a call of it, and what runs its experts."""

    run: Callable[[Tensor, Tensor, Tensor], Tensor]
    experts: str


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, help="folder with vLLM's Python files, not installed")
    parser.add_argument("--tokens", default="1,32,1024")
    parser.add_argument("--only", default=",".join(KINDS), help="kinds of weights, of " + ", ".join(KINDS))
    parser.add_argument(
        "--replays", type=int, default=20, help="of each graph in each round; a round for each order of the peers"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--dry", action="store_true", help="without a GPU: everything up to the first call")
    found = parser.parse_args()
    if unknown := set(found.only.split(",")) - set(KINDS):
        parser.error(f"--only names {', '.join(sorted(unknown))}, expected some of {', '.join(KINDS)}")
    return found


def bring_vllm(folder: Path | None, dry: bool) -> bool:
    """vLLM from where it is, on a GPU's platform; returns whether its compiled operators are there."""
    import vllm_gpu
    import vllm_stand_ins

    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if folder is not None:
        sys.path.insert(0, str(folder.resolve()))
        vllm_stand_ins.install()
    compiled = vllm_gpu.bring(pretend=dry)
    logger = logging.getLogger("vllm.moe_vllm")
    logger.setLevel(logging.INFO)
    logger.addHandler(logging.StreamHandler(sys.stdout))
    return compiled


def formats() -> dict[str, Any]:
    """Of the tests; the integers in groups of 128."""
    from vllm_formats import FORMATS, int4_in_groups

    return {name: FORMATS[name] for name in ("fp8_block", "fp8_channel", "int8_channel")} | {
        "int4_g128": int4_in_groups(128),
        "mxfp4": FORMATS["mxfp4_gpt_oss"],
    }


def batches(sizes: Any, tokens: int) -> list[Call]:
    """Other tokens for each call of a graph; of one token, calls in a row go to different experts."""
    from vllm_layers import calls

    count = 16 if tokens <= 32 else 8 if tokens <= 512 else 2
    found = [calls(tokens, sizes, "cuda", seed=seed) for seed in range(count)]
    if tokens > 1:
        return found
    generator = torch.Generator("cuda").manual_seed(0)
    rounds = -(-count * sizes.top_k // sizes.experts)
    order = torch.cat([torch.randperm(sizes.experts, generator=generator, device="cuda") for _ in range(rounds)])
    ids = order.to(torch.int32)[: count * sizes.top_k].view(count, 1, sizes.top_k)
    return [(x, weights, ids[i].contiguous()) for i, (x, weights, _) in enumerate(found)]


def layers(form: Any, sizes: Any, most: int, dry: bool, compiled: bool) -> tuple[dict[str, Ready], list[str]]:
    """Each peer's layer on the same weights, and the tensors of ours that are not vLLM's own."""
    import moe_core as mc
    import vllm_layers
    from moe_vllm import oracles
    from vllm_formats import own_layer

    device = "cpu" if dry else "cuda"
    loaded = form.load(sizes, device)

    def in_vllm(**others: Any) -> Any:
        config = vllm_layers.moe_config(sizes, device="cuda", max_num_tokens=most, **form.layer, **others)
        layer = vllm_layers.make_layer(form.config(), config, device)
        vllm_layers.fill(layer, loaded.tensors)
        vllm_layers.process(layer)
        return layer

    changes = oracles.install((form.scheme,))
    try:
        ours = in_vllm()
    finally:
        oracles.undo(changes)
    selection = vllm_layers.experts_of(ours).selection
    found = {"moe_vllm": Ready(partial(vllm_layers.run, ours), f"{selection.backend} ({selection.experts.__name__})")}
    if compiled:
        default = in_vllm()
        if default.quant_method.is_monolithic:  # it routes by itself: what vLLM has beside it
            default = in_vllm(moe_backend="marlin")
        name = type(vllm_layers.experts_of(default)).__name__
        found["vllm_default"] = Ready(partial(vllm_layers.run, default), name)
    own = own_layer(form, loaded, "h200" if dry else "cuda", sizes)
    own.workspace = mc.Workspace(own.weights.device)

    def run(x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        return own.apply(x, topk_weights=topk_weights, topk_ids=topk_ids)

    found["moe_core"] = Ready(run, found["moe_vllm"].experts)
    return found, vllm_layers.copies(ours)


def difference(outputs: list[Tensor], expected: list[Tensor]) -> dict[str, Any] | None:
    """Between two peers' outputs [M, K] of the same calls: None where all bits are equal.

    Else how many rows of each call's output differ, and by how much at most (NaN where one of them has it).
    """
    one, two = torch.stack(outputs), torch.stack(expected)
    rows = (one.view(torch.int16) != two.view(torch.int16)).any(dim=-1).sum(dim=-1)  # as integers: NaN equals itself
    return {"rows": rows.tolist(), "max_abs": float((one.float() - two.float()).abs().max())} if rows.any() else None


def measure(
    peers: dict[str, Ready], found: list[Call], replays: int
) -> tuple[dict[str, float], dict[str, Any], float | None]:
    """Microseconds of each peer; which outputs are not those of moe-core's first calls; how far vLLM's own are.

    Names of outputs are a peer's and how its calls ran: eager, recorded (second and later eager ones) or captured.
    """
    outputs = {f"{name} eager": [peer.run(*call) for call in found] for name, peer in peers.items()}
    for name, peer in peers.items():
        outputs[f"{name} recorded"] = [peer.run(*call) for call in found]
    graphs = {}
    for name, peer in peers.items():
        graphs[name], outputs[f"{name} captured"] = captured([partial(peer.run, *call) for call in found])
        graphs[name].replay()
    expected = outputs["moe_core eager"]
    differs = {
        name: apart
        for name, tensors in outputs.items()
        # whose kernels may add in any order
        if not name.startswith("vllm_default") and (apart := difference(tensors, expected)) is not None
    }
    heat_up()
    times: dict[str, list[float]] = {name: [] for name in peers}
    # in every order: clocks drift, and what ran before has heated the GPU
    for names in itertools.permutations(peers):
        for name in names:
            times[name].append(statistics.median(replay_times(graphs[name], len(found), replays)))
    distance = None
    if "vllm_default" in peers:
        one, two = outputs["vllm_default eager"][0].float(), expected[0].float()
        distance = float((one - two).norm() / two.norm())
    return {name: statistics.median(of) for name, of in times.items()}, differs, distance


def benchmark(kind: str, sizes: Any, tokens: list[int], chosen: argparse.Namespace, compiled: bool) -> list[Any]:
    """The results of one kind of weights, a row for each peer."""
    with torch.inference_mode():
        peers, copies = layers(formats()[kind], sizes, max(tokens), chosen.dry, compiled)
        rows = {
            name: {"shape": "qwen3-30b-a3b", "scheme": kind, "peer": name, "experts": peer.experts, "points": []}
            for name, peer in peers.items()
        }
        rows["moe_vllm"]["copies"] = copies
        print(f"{kind}: " + ", ".join(f"{name} {peer.experts}" for name, peer in peers.items()), flush=True)
        # the largest first: vLLM's scratch memory grows before graphs are captured
        for count in [] if chosen.dry else sorted(tokens, reverse=True):
            times, differs, distance = measure(peers, batches(sizes, count), chosen.replays)
            for name, us in times.items():
                rows[name]["points"].append({"M": count, "us": us})
            rows["moe_vllm"]["points"][-1] |= {"equal": not differs} | ({"differs": differs} if differs else {})
            text = "  ".join(f"{name} {us:8.2f} us" for name, us in times.items())
            apart = "" if distance is None else f", vLLM's own differs by {distance:.2%}"
            print(f"{kind:13} {count:6} tokens  {text}  {'DIFFERS' if differs else 'equal'}{apart}", flush=True)
            for name, by in differs.items():
                print(f"  DIFFERS: {name}, in {by['rows']} rows of {count}, by at most {by['max_abs']:.3g}", flush=True)
    return list(rows.values())


def main() -> int:
    chosen = options()
    compiled = bring_vllm(chosen.vllm, chosen.dry)
    import vllm_gpu
    from vllm_layers import Sizes

    sizes = Sizes(8, 8, 256, 256) if chosen.dry else Sizes(128, 8, 2048, 768)
    tokens = [int(text) for text in chosen.tokens.split(",")]
    if not chosen.dry:
        vllm_gpu.get_ready()
    versions = {name: version(name) for name in ("torch", "triton", "vllm")}
    meta = {
        "started": datetime.now().isoformat(timespec="seconds"),
        "gpu": torch.cuda.get_device_name(),
        "python": platform.python_version(),
        "versions": versions,
    }
    results: list[Any] = []
    failed = []
    for kind in chosen.only.split(","):
        try:
            found = benchmark(kind, sizes, tokens, chosen, compiled)
        except Exception as error:  # the others go on
            traceback.print_exc()
            failed.append(f"{kind}: {type(error).__name__}")
            continue
        results += found
        ours = found[0]
        if ours["copies"] or not all(point["equal"] for point in ours["points"]):
            failed.append(kind)
        if chosen.json:
            chosen.json.write_text(json.dumps({"meta": meta, "results": results}, indent=1) + "\n")
        if not chosen.dry:
            torch.cuda.empty_cache()
    print(
        f"failed: {', '.join(failed)}" if failed else "equal in every bit, without copies" if not chosen.dry else "dry"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
