"""The ranks of a layer on torch.distributed: process groups, time-outs, what they agree about at the start."""

from moe_core.distributed.agreement import check_agreement
from moe_core.distributed.communication import Communicator
from moe_core.distributed.groups import DEFAULT_TIMEOUT, ParallelGroups

__all__ = ["DEFAULT_TIMEOUT", "Communicator", "ParallelGroups", "check_agreement"]
