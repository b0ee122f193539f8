"""Read one MoE layer from a checkpoint folder.

``Checkpoint.open(path)`` opens the folder; its ``moe_layers`` lists the layers with experts. ``read_layer(checkpoint,
index)`` finds the layer's tensors, config and format. ``LayerSource.weights()`` loads the canonical weights.

:mod:`moe_core.api.formats` declares the part of this package that checkpoint formats may use.
"""

from moe_core.checkpoint.detect import detect_format
from moe_core.checkpoint.experts.checks import check_expert_tensor
from moe_core.checkpoint.experts.find_layer import find_layer
from moe_core.checkpoint.experts.layer_experts import LayerExperts
from moe_core.checkpoint.experts.stacks import BadValuesError, load_stacked
from moe_core.checkpoint.files.safetensors_file import TensorInfo
from moe_core.checkpoint.model import PER_CALL, LayerModel, ModelSettings, read_model
from moe_core.checkpoint.reader import Checkpoint
from moe_core.checkpoint.source import LayerSource, read_layer
from moe_core.interface.checkpoint_format import CheckpointFormat, ExpertLayout

__all__ = [
    "BadValuesError",
    "Checkpoint",
    "CheckpointFormat",
    "ExpertLayout",
    "ModelSettings",
    "LayerExperts",
    "LayerModel",
    "LayerSource",
    "PER_CALL",
    "TensorInfo",
    "check_expert_tensor",
    "detect_format",
    "find_layer",
    "load_stacked",
    "read_layer",
    "read_model",
]
