"""Modular mixture-of-experts layers: what every quantisation scheme shares.

Schemes are packages of their own (``moe-fp8``, ``moe-mxfp4``, ``moe-int8``, ``moe-wna16``, or a third
party's) that are found through entry points.  Importing this package imports neither them nor
Triton; what is costly loads on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from moe_core.activation import ActivationParams, MoEActivation, apply_moe_activation
from moe_core.backend import Backend
from moe_core.claims import GATED, NON_GATED, Claims, Verified
from moe_core.config import FusedMoEActivationFormat, FusedMoEConfig, FusedMoEParallelConfig
from moe_core.device import DeviceInfo, DeviceRange, any_device, cpu, cuda, hip
from moe_core.environment import TRITON, Environment, Requirement
from moe_core.errors import (
    CheckpointError,
    CheckpointWarning,
    ConfigError,
    ExpertsLeftOutWarning,
    FallbackWarning,
    MoEError,
    PluginWarning,
    ProtocolVersionError,
    RegistryError,
    SchemeNotInstalledError,
    TensorError,
    UnsupportedDeviceError,
    check_dtype,
    check_shape,
)
from moe_core.experts import (
    PROTOCOL_VERSION,
    ExpertTokensMetadata,
    FusedMoEExperts,
    FusedMoEExpertsModular,
    FusedMoEExpertsMonolithic,
)
from moe_core.functions import SchemeFunctions
from moe_core.kernel import FusedMoEKernel
from moe_core.lora import LoRA, LoRAWeights
from moe_core.numerics import (
    E2M1_VALUES,
    INT4,
    INT4_DTYPE,
    INT8,
    INT8_DTYPE,
    UINT4,
    UINT4B8,
    UINT8,
    UINT8B128,
    QuantDtype,
    e8m0_to_float32,
    is_e8m0,
)
from moe_core.oracle import Oracle
from moe_core.placement import Placement
from moe_core.plugins import PluginFault
from moe_core.prepare_finalize import (
    FusedMoEPrepareAndFinalizeModular,
    Prepared,
    TokenRouting,
    TopKWeightAndReduce,
)
from moe_core.quant_config import (
    FUSED_MOE_UNQUANTIZED_CONFIG,
    FusedMoEQuantConfig,
    FusedMoEQuantDesc,
    biased_moe_quant_config,
    fp8_w8a8_moe_quant_config,
    fp8_w8a16_moe_quant_config,
    int8_w8a8_moe_quant_config,
    int8_w8a16_moe_quant_config,
    make_quant_config,
    mxfp4_w4a16_moe_quant_config,
    mxfp8_moe_quant_config,
    wna16_moe_quant_config,
)
from moe_core.quant_key import (
    PER_CHANNEL,
    PER_TENSOR,
    GroupShape,
    KeyPattern,
    Packing,
    QuantKey,
    ScaleDesc,
    as_quant_key,
    kFp8Dynamic64Sym,
    kFp8Dynamic128Sym,
    kFp8DynamicTensorSym,
    kFp8DynamicTokenSym,
    kFp8Static128BlockE8M0Sym,
    kFp8Static128BlockSym,
    kFp8StaticChannelSym,
    kFp8StaticTensorSym,
    kFp8StaticTokenSym,
    kInt4Static,
    kInt4Static32,
    kInt4Static32Asym,
    kInt4StaticAsym,
    kInt4StaticGroupScale,
    kInt4W4A8StaticChannelSym,
    kInt4W4A8StaticGroup32Sym,
    kInt4W4A8StaticGroup64Sym,
    kInt4W4A8StaticGroup128Sym,
    kInt8DynamicTensorSym,
    kInt8DynamicTokenAsym,
    kInt8DynamicTokenSym,
    kInt8Static,
    kInt8StaticAsym,
    kInt8StaticChannelSym,
    kInt8StaticGroupScale,
    kInt8StaticTensorAsym,
    kInt8StaticTensorSym,
    kMxfp4Dynamic,
    kMxfp4DynamicDown,
    kMxfp4DynamicEven,
    kMxfp4Static,
    kMxfp8Dynamic,
    kMxfp8DynamicDown,
    kMxfp8DynamicEven,
    kMxfp8Static,
)
from moe_core.registry import Registry, oracle, registry
from moe_core.routing import RoutingConfig, RoutingMethodType, route
from moe_core.scheme import SchemeSpec, WeightKind
from moe_core.selection import (
    Alternative,
    BackendRefusedError,
    Candidate,
    NoBackendError,
    Selection,
    SelectionError,
    SelectionReport,
    UnknownBackendError,
)
from moe_core.weights import KernelWeights, MoEWeights, scale_shape
from moe_core.workspace import Workspace, WorkspaceSpec

if TYPE_CHECKING:
    from moe_core.checkpoint import Checkpoint
    from moe_core.distributed import ParallelGroups
    from moe_core.expert_parallel import ExpertPlacement
    from moe_core.layer import FusedMoELayer, experts_left_out
    from moe_core.layer_loading import load_layer
    from moe_core.memory import LayerMemory, layer_memory
    from moe_core.model_setup import share_workspace, warm_up
    from moe_core.online import OnlineQuantization
    from moe_core.quantization import dequantize_weight, quantize_moe_weights, quantize_weight
    from moe_core.reference import fused_moe_reference
    from moe_core.shard import LayerShard, shard_layer
    from moe_core.torch_experts import TorchExperts, local_expert_ids

__version__ = "0.1.0"

_LAZY = {
    "Checkpoint": "moe_core.checkpoint",
    "ParallelGroups": "moe_core.distributed",
    "ExpertPlacement": "moe_core.expert_parallel",
    "FusedMoELayer": "moe_core.layer",
    "experts_left_out": "moe_core.layer",
    "load_layer": "moe_core.layer_loading",
    "LayerMemory": "moe_core.memory",
    "layer_memory": "moe_core.memory",
    "share_workspace": "moe_core.model_setup",
    "warm_up": "moe_core.model_setup",
    "LayerShard": "moe_core.shard",
    "shard_layer": "moe_core.shard",
    "fused_moe_reference": "moe_core.reference",
    "OnlineQuantization": "moe_core.online",
    "dequantize_weight": "moe_core.quantization",
    "quantize_moe_weights": "moe_core.quantization",
    "quantize_weight": "moe_core.quantization",
    "TorchExperts": "moe_core.torch_experts",
    "local_expert_ids": "moe_core.torch_experts",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "ActivationParams",
    "Alternative",
    "Backend",
    "BackendRefusedError",
    "Candidate",
    "Checkpoint",
    "CheckpointError",
    "CheckpointWarning",
    "Claims",
    "ConfigError",
    "DeviceInfo",
    "DeviceRange",
    "E2M1_VALUES",
    "Environment",
    "ExpertPlacement",
    "ParallelGroups",
    "ExpertTokensMetadata",
    "ExpertsLeftOutWarning",
    "FUSED_MOE_UNQUANTIZED_CONFIG",
    "FallbackWarning",
    "FusedMoEActivationFormat",
    "FusedMoEConfig",
    "FusedMoEExperts",
    "FusedMoEExpertsModular",
    "FusedMoEExpertsMonolithic",
    "FusedMoEKernel",
    "FusedMoELayer",
    "FusedMoEParallelConfig",
    "FusedMoEPrepareAndFinalizeModular",
    "FusedMoEQuantConfig",
    "FusedMoEQuantDesc",
    "GATED",
    "GroupShape",
    "INT4",
    "INT4_DTYPE",
    "INT8",
    "INT8_DTYPE",
    "KernelWeights",
    "KeyPattern",
    "LayerMemory",
    "LayerShard",
    "LoRA",
    "LoRAWeights",
    "MoEActivation",
    "MoEError",
    "MoEWeights",
    "NON_GATED",
    "NoBackendError",
    "OnlineQuantization",
    "Oracle",
    "PER_CHANNEL",
    "PER_TENSOR",
    "PROTOCOL_VERSION",
    "Packing",
    "Placement",
    "PluginFault",
    "PluginWarning",
    "Prepared",
    "ProtocolVersionError",
    "QuantDtype",
    "QuantKey",
    "Registry",
    "RegistryError",
    "Requirement",
    "RoutingConfig",
    "RoutingMethodType",
    "ScaleDesc",
    "SchemeSpec",
    "WeightKind",
    "SchemeFunctions",
    "SchemeNotInstalledError",
    "Selection",
    "SelectionError",
    "SelectionReport",
    "TRITON",
    "TensorError",
    "TokenRouting",
    "TopKWeightAndReduce",
    "TorchExperts",
    "UINT4",
    "UINT4B8",
    "UINT8",
    "UINT8B128",
    "UnknownBackendError",
    "UnsupportedDeviceError",
    "Verified",
    "Workspace",
    "WorkspaceSpec",
    "any_device",
    "apply_moe_activation",
    "as_quant_key",
    "biased_moe_quant_config",
    "check_dtype",
    "check_shape",
    "cpu",
    "cuda",
    "dequantize_weight",
    "e8m0_to_float32",
    "experts_left_out",
    "fp8_w8a16_moe_quant_config",
    "fp8_w8a8_moe_quant_config",
    "fused_moe_reference",
    "hip",
    "int8_w8a16_moe_quant_config",
    "int8_w8a8_moe_quant_config",
    "is_e8m0",
    "kFp8Dynamic128Sym",
    "kFp8Dynamic64Sym",
    "kFp8DynamicTensorSym",
    "kFp8DynamicTokenSym",
    "kFp8Static128BlockE8M0Sym",
    "kFp8Static128BlockSym",
    "kFp8StaticChannelSym",
    "kFp8StaticTensorSym",
    "kFp8StaticTokenSym",
    "kInt4Static",
    "kInt4Static32",
    "kInt4Static32Asym",
    "kInt4StaticAsym",
    "kInt4StaticGroupScale",
    "kInt4W4A8StaticChannelSym",
    "kInt4W4A8StaticGroup128Sym",
    "kInt4W4A8StaticGroup32Sym",
    "kInt4W4A8StaticGroup64Sym",
    "kInt8DynamicTensorSym",
    "kInt8DynamicTokenAsym",
    "kInt8DynamicTokenSym",
    "kInt8Static",
    "kInt8StaticAsym",
    "kInt8StaticChannelSym",
    "kInt8StaticGroupScale",
    "kInt8StaticTensorAsym",
    "kInt8StaticTensorSym",
    "kMxfp4Dynamic",
    "kMxfp4DynamicDown",
    "kMxfp4DynamicEven",
    "kMxfp4Static",
    "kMxfp8Dynamic",
    "kMxfp8DynamicDown",
    "kMxfp8DynamicEven",
    "kMxfp8Static",
    "layer_memory",
    "load_layer",
    "local_expert_ids",
    "make_quant_config",
    "mxfp4_w4a16_moe_quant_config",
    "mxfp8_moe_quant_config",
    "oracle",
    "quantize_moe_weights",
    "quantize_weight",
    "registry",
    "route",
    "scale_shape",
    "shard_layer",
    "share_workspace",
    "warm_up",
    "wna16_moe_quant_config",
]
