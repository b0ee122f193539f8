"""Which rank holds which experts: placements, tables for dispatch, measured loads, planning, moving weights."""

from moe_core.expert_parallel.placement import ExpertPlacement, load_placements, save_placements
from moe_core.expert_parallel.tables import ReplicaTables

__all__ = [
    "ExpertPlacement",
    "ReplicaTables",
    "load_placements",
    "save_placements",
]
