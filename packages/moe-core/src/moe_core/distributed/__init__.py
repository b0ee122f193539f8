"""The ranks of a layer on torch.distributed: process groups, time-outs, what they agree about at the start."""

from moe_core.distributed.groups import DEFAULT_TIMEOUT, ParallelGroups

__all__ = ["DEFAULT_TIMEOUT", "ParallelGroups"]
