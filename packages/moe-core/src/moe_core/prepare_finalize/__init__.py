"""Prepare/finalize, which brings tokens to the experts and results back: one file per class."""

from moe_core.pending import Pending
from moe_core.prepare_finalize.base import (
    FusedMoEPrepareAndFinalizeModular,
    Prepared,
    TokenRouting,
    TopKWeightAndReduce,
    TopKWeightAndReduceContiguous,
    TopKWeightAndReduceNoOP,
)
from moe_core.prepare_finalize.batched import BatchedPrepareAndFinalize
from moe_core.prepare_finalize.claims import PrepareFinalizeClaims
from moe_core.prepare_finalize.no_parallel import PrepareAndFinalizeNoParallel

__all__ = [
    "BatchedPrepareAndFinalize",
    "FusedMoEPrepareAndFinalizeModular",
    "Pending",
    "PrepareAndFinalizeNoParallel",
    "PrepareFinalizeClaims",
    "Prepared",
    "TokenRouting",
    "TopKWeightAndReduce",
    "TopKWeightAndReduceContiguous",
    "TopKWeightAndReduceNoOP",
]
