"""Which rank holds which experts: placements, tables for dispatch, measured loads, planning, moving weights."""

from moe_core.expert_parallel.load_recorder import ExpertLoadRecorder
from moe_core.expert_parallel.placement import ExpertPlacement, load_placements, save_placements
from moe_core.expert_parallel.planner import PlacementPlan, plan_placement, rank_loads
from moe_core.expert_parallel.tables import ReplicaTables

__all__ = [
    "ExpertLoadRecorder",
    "ExpertPlacement",
    "PlacementPlan",
    "ReplicaTables",
    "load_placements",
    "plan_placement",
    "rank_loads",
    "save_placements",
]
