"""Launch configurations that were measured on a GPU (``moe tune``), kept in a file, and used in place of the built-in
ones.

    plans.py     plans as JSON, checked on the way back
    profile.py   the file: GPU, versions, layers, for each range of tokens the best plan and the figures
    places.py    where files are: given (``MOE_TUNING``, ``tuning=``) or the user's own for a GPU
    limits.py    what a configuration may be, one from a file too
    choice.py    what a profile has for one selected layer, or why it is not used
    search.py    which configurations are tried, in which order, until the time is up

A profile never changes which backend is selected, nor how numbers are rounded: only how kernels are launched.
Importing this imports no Triton.
"""

from moe_core.kernels.tuning.choice import TuningChoice
from moe_core.kernels.tuning.profile import TunedLayer, TuningProfile

__all__ = ["TunedLayer", "TuningChoice", "TuningProfile"]
