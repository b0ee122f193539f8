"""Measured launch configurations (``moe tune``), which replace the built-in ones.

    plans.py       plans as JSON, validated when read
    profile.py     the file: GPU, versions, layers, and for each token range the best plan and its times
    places.py      location of files: given (``MOE_TUNING``, ``tuning=``) or the user's own for a GPU
    limits.py      valid configurations, for the search and for files
    candidates.py  neighbors of a configuration that are worth trying
    choice.py      what a profile contains for one selected layer, or why it is not used
    search.py      the search for the best configurations within a time budget

A profile never changes which backend is selected, nor how numbers are rounded: only launch configurations change.
Importing this package does not import Triton.
"""

from moe_core.kernels.tuning.choice import TuningChoice
from moe_core.kernels.tuning.profile import TunedLayer, TuningProfile

__all__ = ["TunedLayer", "TuningChoice", "TuningProfile"]
