"""The few lines by which an inference engine runs an MoE layer over several GPUs, each with tokens of its own.

torchrun --nproc-per-node 4 examples/several-ranks/engine.py     (on a machine without GPUs: on the CPU)
"""

from __future__ import annotations

import moe_core as mc
import torch
import torch.distributed as dist

E, k, K, N = 8, 2, 256, 512  # experts, top-k, hidden size, intermediate size
KEYS = {"weight_key": "kFp8Static128BlockSym", "activation_key": "kFp8Dynamic128Sym"}


def tensors(device: torch.device) -> mc.MoEWeights:
    """What an engine's loader has of the whole layer; from a checkpoint: mc.load_layer(DIR, groups=groups)."""
    generator = torch.Generator().manual_seed(0)
    w13, w2 = (torch.randn(shape, generator=generator).div(16) for shape in ((E, 2 * N, K), (E, K, N)))
    scales = [torch.rand(E, rows // 128, columns // 128, generator=generator) for rows, columns in ((2 * N, K), (K, N))]
    made = {"w13": w13.to(torch.float8_e4m3fn), "w2": w2.to(torch.float8_e4m3fn)}
    made |= {"w13_scale": scales[0], "w2_scale": scales[1]}
    return mc.MoEWeights(**KEYS, **{name: tensor.to(device) for name, tensor in made.items()})


def main() -> float:
    """One step of a layer; returns how far the result is from that of the whole layer on this GPU alone."""
    if not dist.is_initialized():
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = (
        torch.device("cuda", rank % torch.cuda.device_count()) if torch.cuda.is_available() else torch.device("cpu")
    )
    if device.type == "cuda":
        torch.cuda.set_device(device)

    # once per model: the ranks, and how tokens travel between them
    groups = mc.ParallelGroups.create(ep_size=ranks, dp_size=ranks, all2all_backend="allgather_reducescatter")

    # once per layer: this rank's part, and the layer over all ranks
    config = mc.FusedMoEConfig(num_experts=E, top_k=k, hidden_size=K, intermediate_size=N)
    whole = tensors(device)
    part = mc.shard_layer(config, whole, groups.parallel)
    layer = mc.FusedMoELayer.from_weights("fp8", part.config, part.weights, groups=groups)

    # each step: tokens of this rank's own; ranks may have different numbers of them, and none
    tokens = 3 + rank
    x = torch.randn(tokens, K, device=device, dtype=torch.bfloat16)
    topk_weights, topk_ids = torch.rand(tokens, E, device=device).topk(k)
    call = layer.kernel.start(x, topk_weights=topk_weights, topk_ids=topk_ids)
    shared = x @ torch.ones(K, K, device=device, dtype=torch.bfloat16).div(K)  # shared experts, while tokens travel
    call.run_experts()
    routed = call.result()  # [M, K], of all ranks' experts
    output = routed + shared

    alone = mc.FusedMoELayer.from_weights("fp8", config, whole)(x, topk_weights=topk_weights, topk_ids=topk_ids)
    expected = alone + shared
    return float((output - expected).norm() / expected.norm())


if __name__ == "__main__":
    error = main()
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks; the relative difference from one rank is {error:.1e}")
    dist.destroy_process_group()
