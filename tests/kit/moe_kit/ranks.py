"""Run a function in several ranks on this machine, on Gloo or NCCL, for tests."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import queue
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

#: modules imported once by the server that forks the ranks; importing torch takes seconds
_PRELOAD = ["torch", "torch.distributed", "moe_core", "moe_core.layer.layer", "moe_kit.ranks"]
#: seconds that a rank may take to exit after all ranks have returned their results
_EXIT_SECONDS = 10


class RankFailedError(AssertionError):
    """A rank raised, died or timed out; the message names the rank and has its traceback."""


def run_ranks(
    program: Callable[..., Any],
    *arguments: Any,
    ranks: int = 4,
    backend: str = "gloo",
    seconds: float = 60,
    may_die: bool = False,
) -> list[Any]:
    """Run ``program(rank, *arguments)`` in several processes that share a process group.

    Processes are forked from a server that has imported torch and this package, so a start takes a fraction of a
    second. Still, put many cases into one program.

    Args:
        program: Module-level function, called with the rank and the arguments.
        *arguments: Arguments; like the results, they must be picklable (CPU tensors are).
        ranks: Number of processes.
        backend: "gloo" or "nccl". Ranks on Gloo see no GPU.
        seconds: Timeout.
        may_die: Whether a rank may end without a result. Its result is then None.

    Returns:
        The result of each rank.

    Raises:
        RankFailedError: A rank raised, died or timed out.
    """
    # The ranks unpickle it, not the server: the program's modules are imported in a rank's environment.
    work = pickle.dumps((program, arguments))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    results, ended = context.Queue(), context.Event()
    with tempfile.TemporaryDirectory() as folder:
        started = [
            context.Process(
                target=_rank,
                args=(rank, ranks, backend, os.path.join(folder, "store"), seconds, results, ended, work),
                daemon=True,
            )
            for rank in range(ranks)
        ]
        for process in started:
            process.start()
        try:
            found = _collect(results, started, seconds, may_die)
            ended.set()
            for process in started:
                process.join(_EXIT_SECONDS)
            return found
        finally:
            for process in started:
                if process.is_alive():
                    process.kill()
                process.join()


def _collect(results: Any, started: list[Any], seconds: float, may_die: bool) -> list[Any]:
    found: dict[int, Any] = {}
    end = time.monotonic() + seconds
    while len(found) < len(started):
        # Check liveness before reading the queue: then the results of ranks that have ended are already in it.
        gone = {rank for rank, process in enumerate(started) if not process.is_alive()} - found.keys()
        try:
            rank, failure, content = results.get(timeout=0.05)
        except queue.Empty:
            if gone and not may_die:
                codes = {rank: started[rank].exitcode for rank in sorted(gone)}
                raise RankFailedError(f"ranks ended without a result, with exit codes {codes}") from None
            found |= dict.fromkeys(gone)
            if time.monotonic() > end:
                missing = sorted(set(range(len(started))) - found.keys())
                raise RankFailedError(f"ranks {missing} did not end within {seconds:g} s") from None
            continue
        if failure is not None:
            raise RankFailedError(f"rank {rank}:\n{failure}")
        found[rank] = pickle.loads(content)
    return [found[rank] for rank in range(len(started))]


def _rank(
    rank: int,
    ranks: int,
    backend: str,
    store: str,
    seconds: float,
    results: Any,
    ended: Any,
    work: bytes,
) -> None:
    if backend == "gloo":
        # Hide GPUs before anything asks for them. Otherwise code that uses a GPU if there is one would mix it with CPU
        # tensors.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        device = None
        if backend == "nccl":
            device = torch.device("cuda", rank)
            torch.cuda.set_device(device)
        dist.init_process_group(
            backend,
            init_method=f"file://{store}",
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=seconds),
            device_id=device,
        )
        program, arguments = pickle.loads(work)
        # Pickle here: a queue would pickle in a thread and lose the error.
        content = pickle.dumps(program(rank, *arguments))
    except BaseException:
        results.put((rank, traceback.format_exc(), None))
    else:
        results.put((rank, None, content))
    results.close()
    results.join_thread()
    # Other ranks may still connect to this one, or read what it has sent.
    ended.wait(seconds)
    # Process groups are not destroyed: ranks that failed would wait for each other.
    os._exit(0)
