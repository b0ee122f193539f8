"""A layer in vLLM with vLLM's experts, with moe-vllm's, and moe-core's layer without vLLM.

    python benchmarks/engine_vllm.py [--tokens 1,32,1024] [--only fp8_block,mxfp4] [--vllm FOLDER] [--json FILE]

It uses vLLM's RoutedExperts, quantization method and modular kernel, with sizes of Qwen3-30B-A3B and random weights.
The second and the third must agree bit for bit, and the second must hold no weights outside of vLLM's parameters.
Otherwise the exit code is 1, and the output names the differing results: of eager calls, of calls that replay recorded
launches, or of a graph. Times are medians of CUDA graphs of several calls, each with different tokens.

It needs vLLM 0.33. `--vllm` names a folder with vLLM's Python files to use instead of an installation
(tools/unpack_python.py); missing imports are replaced by stubs. vLLM's own experts need its compiled operators in that
folder and are omitted without them. `--dry` runs without a GPU: everything up to the first call, of a small layer.
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
# vLLM's layers, formats and stubs are those of the tests
sys.path += [str(ROOT / "packages" / name / "tests" / "support") for name in ("moe-vllm", "moe-core")]

KINDS = ("fp8_block", "fp8_channel", "int8_channel", "int4_g128", "mxfp4")
Call = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Ready:
    """A peer's layer: its call, and the name of its experts."""

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
    """Import vLLM on a GPU's platform; returns whether its compiled operators are available."""
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
    """Return the tests' formats; integers are in groups of 128."""
    from vllm_formats import FORMATS, int4_in_groups

    return {name: FORMATS[name] for name in ("fp8_block", "fp8_channel", "int8_channel")} | {
        "int4_g128": int4_in_groups(128),
        "mxfp4": FORMATS["mxfp4_gpt_oss"],
    }


def batches(sizes: Any, tokens: int) -> list[Call]:
    """Generate different tokens per call of a graph; single tokens also get different experts."""
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
    """Build each peer's layer with the same weights; also returns our tensors outside of vLLM's."""
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
        if default.quant_method.is_monolithic:  # it routes internally: use vLLM's next choice
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
    """Compare two peers' outputs [M, K] of the same calls; None if all bits agree.

    Else returns the number of differing rows of each call, and the largest difference (NaN if one has NaN).
    """
    one, two = torch.stack(outputs), torch.stack(expected)
    # compared as integers, so that NaN equals itself
    rows = (one.view(torch.int16) != two.view(torch.int16)).any(dim=-1).sum(dim=-1)
    return {"rows": rows.tolist(), "max_abs": float((one.float() - two.float()).abs().max())} if rows.any() else None


def measure(
    peers: dict[str, Ready], found: list[Call], replays: int
) -> tuple[dict[str, float], dict[str, Any], float | None]:
    """Measure peers' microseconds, outputs that differ from moe-core's, and vLLM's distance.

    Outputs are named by peer and by how the calls ran: eager, recorded (second and later eager calls) or captured.
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
        # vLLM's kernels may add in any order
        if not name.startswith("vllm_default") and (apart := difference(tensors, expected)) is not None
    }
    heat_up()
    times: dict[str, list[float]] = {name: [] for name in peers}
    # in every order, since clocks drift and previous work has heated the GPU
    for names in itertools.permutations(peers):
        for name in names:
            times[name].append(statistics.median(replay_times(graphs[name], len(found), replays)))
    distance = None
    if "vllm_default" in peers:
        one, two = outputs["vllm_default eager"][0].float(), expected[0].float()
        distance = float((one - two).norm() / two.norm())
    return {name: statistics.median(of) for name, of in times.items()}, differs, distance


def benchmark(kind: str, sizes: Any, tokens: list[int], chosen: argparse.Namespace, compiled: bool) -> list[Any]:
    """Return the results of one type of weights, one row per peer."""
    with torch.inference_mode():
        peers, copies = layers(formats()[kind], sizes, max(tokens), chosen.dry, compiled)
        rows = {
            name: {"shape": "qwen3-30b-a3b", "scheme": kind, "peer": name, "experts": peer.experts, "points": []}
            for name, peer in peers.items()
        }
        rows["moe_vllm"]["copies"] = copies
        print(f"{kind}: " + ", ".join(f"{name} {peer.experts}" for name, peer in peers.items()), flush=True)
        # largest first: vLLM's workspace grows before graphs are captured
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
        except Exception as error:  # continue with the others
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
