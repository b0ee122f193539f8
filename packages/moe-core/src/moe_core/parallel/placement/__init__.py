"""Expert placement on ranks: placements, dispatch tables, measured loads, planning.

Moving weights to a new placement is in :mod:`moe_core.runtime.expert_mover`, which imports torch.distributed.
"""

from moe_core.parallel.placement.load_recorder import ExpertLoadRecorder
from moe_core.parallel.placement.moves import placement_steps
from moe_core.parallel.placement.placement import ExpertPlacement, load_placements, save_placements
from moe_core.parallel.placement.planner import PlacementPlan, plan_placement, rank_loads
from moe_core.parallel.placement.tables import ReplicaTables

__all__ = [
    "ExpertLoadRecorder",
    "ExpertPlacement",
    "PlacementPlan",
    "ReplicaTables",
    "load_placements",
    "placement_steps",
    "plan_placement",
    "rank_loads",
    "save_placements",
]
