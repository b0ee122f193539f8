"""torchrun processes that run one command together: one per rank, and the first one prints."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moe_core.cli import _arguments
from moe_core.cli._select import select_over_ranks
from moe_core.errors import ConfigError
from moe_core.selection.report import NoBackendError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from moe_core.cli._prepare_finalize import PrepareFinalizeCandidate, PrepareFinalizeSelection
    from moe_core.parallel.distributed import ParallelGroups
    from moe_core.parallel.shard_plan import ShardPlan
    from moe_core.spec.config import FusedMoEConfig, FusedMoEParallelConfig


@dataclass(frozen=True)
class Ranks:
    """This process among the ranks of a layer.

    Attributes:
        size: Number of processes.
        rank: Rank of this process.
        device: Device that it runs on.
        parallel: Its position in the layer.
    """

    size: int
    rank: int
    device: torch.device
    parallel: FusedMoEParallelConfig

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def sizes(self) -> dict[str, int]:
        """JSON-ready sizes of the parallel groups."""
        parallel = self.parallel
        return {"tp_size": parallel.tp_size, "ep_size": parallel.ep_size, "dp_size": parallel.dp_size}

    def choose(
        self, args: argparse.Namespace, scheme: str, config: FusedMoEConfig, plans: Sequence[ShardPlan], tokens: int
    ) -> tuple[PrepareFinalizeSelection, PrepareFinalizeCandidate, ShardPlan]:
        """Choose a prepare/finalize class for at most ``tokens`` per rank, the same on all ranks.

        Returns:
            (selection among all classes, chosen class, column split).

        Raises:
            NoBackendError: No class fits; the message has the reasons.
        """
        found, plan = select_over_ranks(args, scheme, config, plans, tokens, self.device)
        if found.chosen is not None:
            return found, found.chosen, plan
        asked = [one for one in found.candidates if found.requested in ("auto", one.name)]
        why = "; ".join(f"{one.name}: {'; '.join(one.reasons or _closest(one))}" for one in asked)
        raise NoBackendError(f"no prepare/finalize fits {self.size} ranks: {why}", asked[0].report)

    def groups(self, chosen: PrepareFinalizeCandidate) -> ParallelGroups:
        """Create the process groups of a layer with that class; a collective call."""
        from moe_core.parallel.distributed import ParallelGroups

        parallel = chosen.report.config.parallel
        return ParallelGroups.create(
            tp_size=parallel.tp_size,
            ep_size=parallel.ep_size,
            dp_size=parallel.dp_size,
            all2all_backend=parallel.all2all_backend,
        )

    def slowest(self, seconds: float) -> float:
        """Return the largest value of all ranks; a collective call."""
        import torch
        import torch.distributed as dist

        value = torch.tensor([seconds], dtype=torch.float64, device=self.device)
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return float(value)

    def share(self, count: int) -> slice:
        """Return the slice of ``count`` tokens that forms this rank's batch."""
        from moe_core.parallel.shard_plan import share

        return slice(*share(count, self.parallel.dp_size, self.parallel.dp_rank))

    def gathered(self, output: Tensor, *, shared_out: bool) -> Tensor:
        """Concatenate the outputs of all batches ``[M, K]`` on the CPU; a collective call.

        Args:
            output: This rank's output, on the CPU.
            shared_out: Whether each rank holds the output of a slice of the tokens.
        """
        import torch
        import torch.distributed as dist

        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, (self.rank if shared_out else self.parallel.dp_rank, output))
        parts: dict[int, Tensor] = dict(reversed(found))
        return torch.cat([parts[place] for place in sorted(parts)])


def _closest(candidate: PrepareFinalizeCandidate) -> list[str]:
    return [f"{c.backend} {', '.join(c.reasons)}" for c in candidate.report.closest[:2]]


@contextlib.contextmanager
def ranks_of(args: argparse.Namespace) -> Iterator[Ranks | None]:
    """Yield the rank that the arguments and torchrun's environment specify.

    Inside the context, torch.distributed has a process group, and only the first rank prints.

    Yields:
        The rank; None for a single process with a single rank.

    Raises:
        ConfigError: The number of processes differs from the number of ranks, or this host has fewer GPUs than
            processes. Every rank raises it before it waits for another.
    """
    import torch

    numbers = {name: _number(name) for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    size, rank = numbers["WORLD_SIZE"] or 1, numbers["RANK"] or 0
    parallel = _arguments.parallel_of(args, size, rank if size > 1 else 0)
    if parallel is None or (size == 1 and parallel.world_size == 1):
        if args.all2all is not None or args.machine is not None:
            raise ConfigError("--all2all and --machine are for several ranks: give --tp, --ep or --dp")
        yield None
        return
    if parallel.world_size != size:
        raise ConfigError(
            f"--tp {parallel.tp_size} and --ep {parallel.ep_size} need {parallel.world_size} processes, got {size}: "
            f"torchrun --nproc-per-node {parallel.world_size} -m moe_core {args.command} …"
        )
    import torch.distributed as dist

    on_gpu = torch.cuda.is_available() if args.device is None else args.device.partition(":")[0] == "cuda"
    ranks, gpus = numbers["LOCAL_WORLD_SIZE"] or 1, torch.cuda.device_count() if on_gpu else 0
    if 0 < gpus < ranks:
        raise ConfigError(
            f"{ranks} ranks on this host need a GPU each, found {gpus}: give --device cpu, or fewer ranks per host "
            f"(--nproc-per-node {gpus})"
        )
    device = _arguments.device_of(f"cuda:{numbers['LOCAL_RANK'] or 0}" if on_gpu else args.device or "cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    made = not dist.is_initialized()
    if made:
        missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
        if missing:
            raise ConfigError(
                f"the environment has WORLD_SIZE {size}, but no {', '.join(missing)}; start with torchrun: "
                f"torchrun --nproc-per-node {size} -m moe_core {args.command} …"
            )
        _number("MASTER_PORT")
        dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    try:
        with contextlib.nullcontext() if rank == 0 else contextlib.redirect_stdout(io.StringIO()):
            yield Ranks(size, rank, device, parallel)
    finally:
        if made:
            dist.destroy_process_group()


def _number(name: str) -> int | None:
    """Return an integer from the environment as torchrun sets it; None if it is not set."""
    text = os.environ.get(name)
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"the environment's {name} is {text!r}, expected an integer as torchrun sets it") from None
