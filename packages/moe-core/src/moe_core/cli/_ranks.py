"""The processes of torchrun that run one command together: each is a rank of the layer, and the first one prints."""

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

    from moe_core.parallel.distributed import ParallelGroups
    from moe_core.parallel.shard_plan import ColumnCut
    from moe_core.selection.prepare_finalize_choice import PrepareFinalizeCandidate, PrepareFinalizeSelection
    from moe_core.spec.config import FusedMoEConfig, FusedMoEParallelConfig


@dataclass(frozen=True)
class Ranks:
    """This process among ``size``, and the ``device`` that it runs on; ``parallel``: its place in the layer."""

    size: int
    rank: int
    device: torch.device
    parallel: FusedMoEParallelConfig

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def sizes(self) -> dict[str, int]:
        """JSON-ready form of what the layer is spread over."""
        parallel = self.parallel
        return {"tp_size": parallel.tp_size, "ep_size": parallel.ep_size, "dp_size": parallel.dp_size}

    def choose(
        self, args: argparse.Namespace, scheme: str, config: FusedMoEConfig, cuts: Sequence[ColumnCut], tokens: int
    ) -> tuple[PrepareFinalizeSelection, PrepareFinalizeCandidate, ColumnCut]:
        """(all prepare/finalize classes, the chosen one, the shares of columns) for ``tokens`` per rank at most.

        All ranks come to the same.  Raises NoBackendError with the reasons where none fits.
        """
        found, cut = select_over_ranks(args, scheme, config, cuts, tokens, self.device)
        if found.chosen is not None:
            return found, found.chosen, cut
        asked = [one for one in found.candidates if found.requested in ("auto", one.name)]
        why = "; ".join(f"{one.name}: {'; '.join(one.reasons or _closest(one))}" for one in asked)
        raise NoBackendError(f"no prepare/finalize fits {self.size} ranks: {why}", asked[0].report)

    def groups(self, chosen: PrepareFinalizeCandidate) -> ParallelGroups:
        """The process groups of a layer with that prepare/finalize; all ranks call it."""
        from moe_core.parallel.distributed import ParallelGroups

        parallel = chosen.report.config.parallel
        return ParallelGroups.create(
            tp_size=parallel.tp_size,
            ep_size=parallel.ep_size,
            dp_size=parallel.dp_size,
            all2all_backend=parallel.all2all_backend,
        )

    def slowest(self, seconds: float) -> float:
        """The most that any rank gives; all ranks call it."""
        import torch
        import torch.distributed as dist

        value = torch.tensor([seconds], dtype=torch.float64, device=self.device)
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return float(value)

    def share(self, count: int) -> slice:
        """Of ``count`` tokens those of this rank's batch."""
        from moe_core.parallel.shard_plan import share

        return slice(*share(count, self.parallel.dp_size, self.parallel.dp_rank))

    def gathered(self, output: Tensor, *, shared_out: bool) -> Tensor:
        """The outputs of all batches [M, K], on the CPU, one after the other; all ranks call it.

        ``shared_out``: each rank has that of a part of the tokens.
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
    """The ranks that the arguments and torchrun's environment say; None for one process and one rank.

    Within it torch.distributed has a process group, and others than the first rank print nothing.
    Raises ConfigError where there are not as many processes as ranks, and where this host's have fewer GPUs: on each
    of them, before one waits for another.
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
            f"--tp {parallel.tp_size} and --ep {parallel.ep_size} are {parallel.world_size} ranks, each of which is a "
            f"process, and there {'is 1' if size == 1 else f'are {size}'}: torchrun --nproc-per-node "
            f"{parallel.world_size} -m moe_core {args.command} …"
        )
    import torch.distributed as dist

    on_gpu = torch.cuda.is_available() if args.device is None else args.device.partition(":")[0] == "cuda"
    ranks, gpus = numbers["LOCAL_WORLD_SIZE"] or 1, torch.cuda.device_count() if on_gpu else 0
    if 0 < gpus < ranks:
        raise ConfigError(
            f"{ranks} ranks on this host have {gpus} GPU{'s' * (gpus > 1)}, and each needs one: give --device cpu, or "
            f"fewer ranks (--nproc-per-node {gpus}, on more hosts where the layer needs them)"
        )
    device = _arguments.device_of(f"cuda:{numbers['LOCAL_RANK'] or 0}" if on_gpu else args.device or "cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    made = not dist.is_initialized()
    if made:
        missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
        if missing:
            raise ConfigError(
                f"the environment has WORLD_SIZE {size} and no {', '.join(missing)}, which torchrun sets: torchrun "
                f"--nproc-per-node {size} -m moe_core {args.command} …"
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
    """An integer of the environment, which torchrun sets; None where it is not there."""
    text = os.environ.get(name)
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"the environment's {name} is {text!r}, expected an integer as torchrun sets it") from None
