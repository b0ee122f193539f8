"""Modular mixture-of-experts layers: interface, backend selection, loading and kernels.

Everything here is shared by all quantization schemes. The schemes are separate packages (``moe-fp8``, ``moe-mxfp4``,
``moe-int8``, ``moe-wna16``, or third-party ones) and are found through entry points. Importing this package imports
nothing else: each public name loads its module on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_core.checkpoint import Checkpoint as Checkpoint
    from moe_core.errors import CheckpointError as CheckpointError
    from moe_core.errors import CheckpointWarning as CheckpointWarning
    from moe_core.errors import ConfigError as ConfigError
    from moe_core.errors import ExpertsLeftOutWarning as ExpertsLeftOutWarning
    from moe_core.errors import FallbackWarning as FallbackWarning
    from moe_core.errors import MoEError as MoEError
    from moe_core.errors import PluginWarning as PluginWarning
    from moe_core.errors import ProtocolVersionError as ProtocolVersionError
    from moe_core.errors import RegistryError as RegistryError
    from moe_core.errors import SchemeNotInstalledError as SchemeNotInstalledError
    from moe_core.errors import TensorError as TensorError
    from moe_core.errors import UnsupportedDeviceError as UnsupportedDeviceError
    from moe_core.errors import check_dtype as check_dtype
    from moe_core.errors import check_shape as check_shape
    from moe_core.interface.backend_order import Placement as Placement
    from moe_core.interface.claims import GATED as GATED
    from moe_core.interface.claims import NON_GATED as NON_GATED
    from moe_core.interface.claims import Claims as Claims
    from moe_core.interface.claims import Verified as Verified
    from moe_core.interface.experts import ExpertTokensMetadata as ExpertTokensMetadata
    from moe_core.interface.experts import FusedMoEExperts as FusedMoEExperts
    from moe_core.interface.experts import FusedMoEExpertsModular as FusedMoEExpertsModular
    from moe_core.interface.experts import FusedMoEExpertsMonolithic as FusedMoEExpertsMonolithic
    from moe_core.interface.prepare_finalize import (
        FusedMoEPrepareAndFinalizeModular as FusedMoEPrepareAndFinalizeModular,
    )
    from moe_core.interface.prepare_finalize import Prepared as Prepared
    from moe_core.interface.prepare_finalize import TokenRouting as TokenRouting
    from moe_core.interface.prepare_finalize import TopKWeightAndReduce as TopKWeightAndReduce
    from moe_core.interface.versions import FORMAT_API as FORMAT_API
    from moe_core.interface.versions import INTERFACE_API as INTERFACE_API
    from moe_core.interface.versions import KERNEL_API as KERNEL_API
    from moe_core.kernels.ops.online import OnlineQuantization as OnlineQuantization
    from moe_core.layer.layer import FusedMoELayer as FusedMoELayer
    from moe_core.layer.layer import experts_left_out as experts_left_out
    from moe_core.layer.loading import load_layer as load_layer
    from moe_core.layer.setup import share_workspace as share_workspace
    from moe_core.layer.setup import warm_up as warm_up
    from moe_core.parallel.distributed import ParallelGroups as ParallelGroups
    from moe_core.parallel.placement.placement import ExpertPlacement as ExpertPlacement
    from moe_core.parallel.shard import LayerShard as LayerShard
    from moe_core.parallel.shard import shard_layer as shard_layer
    from moe_core.plugins.backend import Backend as Backend
    from moe_core.plugins.faults import PluginFault as PluginFault
    from moe_core.plugins.scheme import SchemeSpec as SchemeSpec
    from moe_core.plugins.scheme import WeightKind as WeightKind
    from moe_core.reference.fused_moe import fused_moe_reference as fused_moe_reference
    from moe_core.reference.quantization import dequantize_weight as dequantize_weight
    from moe_core.reference.quantization import quantize_moe_weights as quantize_moe_weights
    from moe_core.reference.quantization import quantize_weight as quantize_weight
    from moe_core.reference.torch_experts import TorchExperts as TorchExperts
    from moe_core.reference.torch_experts import local_expert_ids as local_expert_ids
    from moe_core.runtime.kernel import FusedMoEKernel as FusedMoEKernel
    from moe_core.selection.functions import SchemeFunctions as SchemeFunctions
    from moe_core.selection.memory import LayerMemory as LayerMemory
    from moe_core.selection.memory import layer_memory as layer_memory
    from moe_core.selection.oracle import Oracle as Oracle
    from moe_core.selection.registry import Registry as Registry
    from moe_core.selection.registry import oracle as oracle
    from moe_core.selection.registry import registry as registry
    from moe_core.selection.report import Alternative as Alternative
    from moe_core.selection.report import BackendRefusedError as BackendRefusedError
    from moe_core.selection.report import Candidate as Candidate
    from moe_core.selection.report import NoBackendError as NoBackendError
    from moe_core.selection.report import Selection as Selection
    from moe_core.selection.report import SelectionError as SelectionError
    from moe_core.selection.report import SelectionReport as SelectionReport
    from moe_core.selection.report import UnknownBackendError as UnknownBackendError
    from moe_core.spec.activation import ActivationParams as ActivationParams
    from moe_core.spec.activation import MoEActivation as MoEActivation
    from moe_core.spec.activation import apply_moe_activation as apply_moe_activation
    from moe_core.spec.config import FusedMoEActivationFormat as FusedMoEActivationFormat
    from moe_core.spec.config import FusedMoEConfig as FusedMoEConfig
    from moe_core.spec.config import FusedMoEParallelConfig as FusedMoEParallelConfig
    from moe_core.spec.device import DeviceInfo as DeviceInfo
    from moe_core.spec.device import DeviceRange as DeviceRange
    from moe_core.spec.device import any_device as any_device
    from moe_core.spec.device import cpu as cpu
    from moe_core.spec.device import cuda as cuda
    from moe_core.spec.device import hip as hip
    from moe_core.spec.environment import TRITON as TRITON
    from moe_core.spec.environment import Environment as Environment
    from moe_core.spec.environment import Requirement as Requirement
    from moe_core.spec.lora import LoRA as LoRA
    from moe_core.spec.lora import LoRAWeights as LoRAWeights
    from moe_core.spec.numerics import E2M1_VALUES as E2M1_VALUES
    from moe_core.spec.numerics import FP4_E2M1 as FP4_E2M1
    from moe_core.spec.numerics import FP8_E4M3 as FP8_E4M3
    from moe_core.spec.numerics import INT4 as INT4
    from moe_core.spec.numerics import INT4_DTYPE as INT4_DTYPE
    from moe_core.spec.numerics import INT8 as INT8
    from moe_core.spec.numerics import INT8_DTYPE as INT8_DTYPE
    from moe_core.spec.numerics import UINT4 as UINT4
    from moe_core.spec.numerics import UINT4B8 as UINT4B8
    from moe_core.spec.numerics import UINT8 as UINT8
    from moe_core.spec.numerics import UINT8B128 as UINT8B128
    from moe_core.spec.numerics import NumberKind as NumberKind
    from moe_core.spec.numerics import QuantDtype as QuantDtype
    from moe_core.spec.numerics import e8m0_to_float32 as e8m0_to_float32
    from moe_core.spec.numerics import is_e8m0 as is_e8m0
    from moe_core.spec.quant_config import FUSED_MOE_UNQUANTIZED_CONFIG as FUSED_MOE_UNQUANTIZED_CONFIG
    from moe_core.spec.quant_config import FusedMoEQuantConfig as FusedMoEQuantConfig
    from moe_core.spec.quant_config import FusedMoEQuantDesc as FusedMoEQuantDesc
    from moe_core.spec.quant_config import biased_moe_quant_config as biased_moe_quant_config
    from moe_core.spec.quant_config import fp8_w8a8_moe_quant_config as fp8_w8a8_moe_quant_config
    from moe_core.spec.quant_config import fp8_w8a16_moe_quant_config as fp8_w8a16_moe_quant_config
    from moe_core.spec.quant_config import int8_w8a8_moe_quant_config as int8_w8a8_moe_quant_config
    from moe_core.spec.quant_config import int8_w8a16_moe_quant_config as int8_w8a16_moe_quant_config
    from moe_core.spec.quant_config import make_quant_config as make_quant_config
    from moe_core.spec.quant_config import mxfp4_w4a16_moe_quant_config as mxfp4_w4a16_moe_quant_config
    from moe_core.spec.quant_config import mxfp8_moe_quant_config as mxfp8_moe_quant_config
    from moe_core.spec.quant_config import tensor_arguments as tensor_arguments
    from moe_core.spec.quant_config import wna16_moe_quant_config as wna16_moe_quant_config
    from moe_core.spec.quant_key import PER_CHANNEL as PER_CHANNEL
    from moe_core.spec.quant_key import PER_TENSOR as PER_TENSOR
    from moe_core.spec.quant_key import GroupShape as GroupShape
    from moe_core.spec.quant_key import KeyPattern as KeyPattern
    from moe_core.spec.quant_key import Packing as Packing
    from moe_core.spec.quant_key import QuantKey as QuantKey
    from moe_core.spec.quant_key import ScaleDesc as ScaleDesc
    from moe_core.spec.quant_key import as_quant_key as as_quant_key
    from moe_core.spec.quant_key import kFp8Dynamic64Sym as kFp8Dynamic64Sym
    from moe_core.spec.quant_key import kFp8Dynamic128Sym as kFp8Dynamic128Sym
    from moe_core.spec.quant_key import kFp8DynamicTensorSym as kFp8DynamicTensorSym
    from moe_core.spec.quant_key import kFp8DynamicTokenSym as kFp8DynamicTokenSym
    from moe_core.spec.quant_key import kFp8Static128BlockE8M0Sym as kFp8Static128BlockE8M0Sym
    from moe_core.spec.quant_key import kFp8Static128BlockSym as kFp8Static128BlockSym
    from moe_core.spec.quant_key import kFp8StaticChannelSym as kFp8StaticChannelSym
    from moe_core.spec.quant_key import kFp8StaticTensorSym as kFp8StaticTensorSym
    from moe_core.spec.quant_key import kFp8StaticTokenSym as kFp8StaticTokenSym
    from moe_core.spec.quant_key import kInt4Static as kInt4Static
    from moe_core.spec.quant_key import kInt4Static32 as kInt4Static32
    from moe_core.spec.quant_key import kInt4Static32Asym as kInt4Static32Asym
    from moe_core.spec.quant_key import kInt4StaticAsym as kInt4StaticAsym
    from moe_core.spec.quant_key import kInt4StaticGroupScale as kInt4StaticGroupScale
    from moe_core.spec.quant_key import kInt4W4A8StaticChannelSym as kInt4W4A8StaticChannelSym
    from moe_core.spec.quant_key import kInt4W4A8StaticGroup32Sym as kInt4W4A8StaticGroup32Sym
    from moe_core.spec.quant_key import kInt4W4A8StaticGroup64Sym as kInt4W4A8StaticGroup64Sym
    from moe_core.spec.quant_key import kInt4W4A8StaticGroup128Sym as kInt4W4A8StaticGroup128Sym
    from moe_core.spec.quant_key import kInt8DynamicTensorSym as kInt8DynamicTensorSym
    from moe_core.spec.quant_key import kInt8DynamicTokenAsym as kInt8DynamicTokenAsym
    from moe_core.spec.quant_key import kInt8DynamicTokenSym as kInt8DynamicTokenSym
    from moe_core.spec.quant_key import kInt8Static as kInt8Static
    from moe_core.spec.quant_key import kInt8StaticAsym as kInt8StaticAsym
    from moe_core.spec.quant_key import kInt8StaticChannelSym as kInt8StaticChannelSym
    from moe_core.spec.quant_key import kInt8StaticGroupScale as kInt8StaticGroupScale
    from moe_core.spec.quant_key import kInt8StaticTensorAsym as kInt8StaticTensorAsym
    from moe_core.spec.quant_key import kInt8StaticTensorSym as kInt8StaticTensorSym
    from moe_core.spec.quant_key import kMxfp4Dynamic as kMxfp4Dynamic
    from moe_core.spec.quant_key import kMxfp4DynamicDown as kMxfp4DynamicDown
    from moe_core.spec.quant_key import kMxfp4DynamicEven as kMxfp4DynamicEven
    from moe_core.spec.quant_key import kMxfp4Static as kMxfp4Static
    from moe_core.spec.quant_key import kMxfp8Dynamic as kMxfp8Dynamic
    from moe_core.spec.quant_key import kMxfp8DynamicDown as kMxfp8DynamicDown
    from moe_core.spec.quant_key import kMxfp8DynamicEven as kMxfp8DynamicEven
    from moe_core.spec.quant_key import kMxfp8Static as kMxfp8Static
    from moe_core.spec.quant_key import name_quant_keys as name_quant_keys
    from moe_core.spec.roles import scale_shape as scale_shape
    from moe_core.spec.routing import RoutingConfig as RoutingConfig
    from moe_core.spec.routing import RoutingMethodType as RoutingMethodType
    from moe_core.spec.routing import route as route
    from moe_core.spec.weights import KernelWeights as KernelWeights
    from moe_core.spec.weights import MoEWeights as MoEWeights
    from moe_core.spec.workspace import Workspace as Workspace
    from moe_core.spec.workspace import WorkspaceSpec as WorkspaceSpec

__version__ = "0.1.0"

#: Public names, grouped by the module that defines them.
_HOMES = {
    "checkpoint": ("Checkpoint",),
    "errors": (
        "CheckpointError",
        "CheckpointWarning",
        "ConfigError",
        "ExpertsLeftOutWarning",
        "FallbackWarning",
        "MoEError",
        "PluginWarning",
        "ProtocolVersionError",
        "RegistryError",
        "SchemeNotInstalledError",
        "TensorError",
        "UnsupportedDeviceError",
        "check_dtype",
        "check_shape",
    ),
    "interface.backend_order": ("Placement",),
    "interface.claims": (
        "Claims",
        "GATED",
        "NON_GATED",
        "Verified",
    ),
    "interface.experts": (
        "ExpertTokensMetadata",
        "FusedMoEExperts",
        "FusedMoEExpertsModular",
        "FusedMoEExpertsMonolithic",
    ),
    "interface.versions": (
        "FORMAT_API",
        "INTERFACE_API",
        "KERNEL_API",
    ),
    "interface.prepare_finalize": (
        "FusedMoEPrepareAndFinalizeModular",
        "Prepared",
        "TokenRouting",
        "TopKWeightAndReduce",
    ),
    "kernels.ops.online": ("OnlineQuantization",),
    "layer.layer": (
        "FusedMoELayer",
        "experts_left_out",
    ),
    "layer.loading": ("load_layer",),
    "layer.setup": (
        "share_workspace",
        "warm_up",
    ),
    "parallel.distributed": ("ParallelGroups",),
    "parallel.placement.placement": ("ExpertPlacement",),
    "parallel.shard": (
        "LayerShard",
        "shard_layer",
    ),
    "plugins.backend": ("Backend",),
    "plugins.faults": ("PluginFault",),
    "plugins.scheme": (
        "SchemeSpec",
        "WeightKind",
    ),
    "reference.fused_moe": ("fused_moe_reference",),
    "reference.quantization": (
        "dequantize_weight",
        "quantize_moe_weights",
        "quantize_weight",
    ),
    "reference.torch_experts": (
        "TorchExperts",
        "local_expert_ids",
    ),
    "runtime.kernel": ("FusedMoEKernel",),
    "selection.functions": ("SchemeFunctions",),
    "selection.memory": (
        "LayerMemory",
        "layer_memory",
    ),
    "selection.oracle": ("Oracle",),
    "selection.registry": (
        "Registry",
        "oracle",
        "registry",
    ),
    "selection.report": (
        "Alternative",
        "BackendRefusedError",
        "Candidate",
        "NoBackendError",
        "Selection",
        "SelectionError",
        "SelectionReport",
        "UnknownBackendError",
    ),
    "spec.activation": (
        "ActivationParams",
        "MoEActivation",
        "apply_moe_activation",
    ),
    "spec.config": (
        "FusedMoEActivationFormat",
        "FusedMoEConfig",
        "FusedMoEParallelConfig",
    ),
    "spec.device": (
        "DeviceInfo",
        "DeviceRange",
        "any_device",
        "cpu",
        "cuda",
        "hip",
    ),
    "spec.environment": (
        "Environment",
        "Requirement",
        "TRITON",
    ),
    "spec.lora": (
        "LoRA",
        "LoRAWeights",
    ),
    "spec.numerics": (
        "E2M1_VALUES",
        "FP4_E2M1",
        "FP8_E4M3",
        "INT4",
        "INT4_DTYPE",
        "INT8",
        "INT8_DTYPE",
        "NumberKind",
        "QuantDtype",
        "UINT4",
        "UINT4B8",
        "UINT8",
        "UINT8B128",
        "e8m0_to_float32",
        "is_e8m0",
    ),
    "spec.quant_config": (
        "FUSED_MOE_UNQUANTIZED_CONFIG",
        "FusedMoEQuantConfig",
        "FusedMoEQuantDesc",
        "biased_moe_quant_config",
        "fp8_w8a16_moe_quant_config",
        "fp8_w8a8_moe_quant_config",
        "int8_w8a16_moe_quant_config",
        "int8_w8a8_moe_quant_config",
        "make_quant_config",
        "mxfp4_w4a16_moe_quant_config",
        "mxfp8_moe_quant_config",
        "tensor_arguments",
        "wna16_moe_quant_config",
    ),
    "spec.quant_key": (
        "GroupShape",
        "KeyPattern",
        "PER_CHANNEL",
        "PER_TENSOR",
        "Packing",
        "QuantKey",
        "ScaleDesc",
        "as_quant_key",
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
        "name_quant_keys",
    ),
    "spec.roles": ("scale_shape",),
    "spec.routing": (
        "RoutingConfig",
        "RoutingMethodType",
        "route",
    ),
    "spec.weights": (
        "KernelWeights",
        "MoEWeights",
    ),
    "spec.workspace": (
        "Workspace",
        "WorkspaceSpec",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
