"""The ranks of a layer on torch.distributed: process groups, timeouts, agreement checks."""

from moe_core.parallel.distributed.agreement import check_agreement
from moe_core.parallel.distributed.communication import Communicator
from moe_core.parallel.distributed.groups import DEFAULT_TIMEOUT, ParallelGroups

__all__ = ["DEFAULT_TIMEOUT", "Communicator", "ParallelGroups", "check_agreement"]
