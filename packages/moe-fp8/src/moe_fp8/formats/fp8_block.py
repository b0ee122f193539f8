"""FP8 in blocks: DeepSeek-V3/R1, Qwen3-*-FP8, transformers' FineGrainedFP8.

Per expert and projection: ``weight`` e4m3 [N, K] and ``weight_scale_inv`` [ceil(N/bn), ceil(K/bk)], with which, its
name notwithstanding, the weight is *multiplied*.  Scales are float32, bfloat16 or e8m0 exponents (``scale_fmt:
ue8m0``); all become float32, exactly.  Activations are quantised at run time, in groups of ``bk`` along K.

Newer tools stack the experts: ``gate_up_proj`` [E, 2N, K] with ``gate_up_proj_scale_inv``, ``down_proj`` [E, K, N];
some models store both transposed.  A stacked gate and up that were quantised as one matrix share a block where N is no
multiple of bn; such scales are repeated for blocks of ``gcd(N, bn)`` rows, which is exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from moe_core import CheckpointError, FusedMoEConfig, MoEWeights, TensorError
from moe_core.checkpoint.experts import LayerExperts
from moe_core.checkpoint.format import BadValuesError, CheckpointFormat, Keys, check_expert_tensor, load_stacked
from moe_core.numerics import e8m0_to_float32
from moe_core.quant_key import kFp8Dynamic128Sym, kFp8Static128BlockSym
from moe_core.weights import check_values
from torch import Tensor

#: Suffixes of the scale, the usual one first; the others are those of stacked experts.
SCALE_SUFFIXES = ("weight_scale_inv", "scale_inv", "scales_inv")

_SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
_BIAS_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Fp8BlockFormat(CheckpointFormat):
    """See the module docstring."""

    name = "FP8 in blocks (DeepSeek-V3, Qwen3-FP8, transformers fine-grained FP8)"
    scheme = "fp8"

    def reason_against(self, quantization: Mapping[str, Any], layer: LayerExperts) -> str | None:
        method = quantization.get("quant_method")
        if method != "fp8":
            return f"quant_method is {method!r}, expected 'fp8'"
        if quantization.get("fmt", "e4m3") != "e4m3":
            return f"fmt is {quantization['fmt']!r}, expected 'e4m3'"
        scheme = quantization.get("activation_scheme", "dynamic")
        if scheme != "dynamic":
            return f"activation_scheme is {scheme!r}, expected 'dynamic'"
        if quantization.get("weight_block_size") is None:
            return "weight_block_size is null (one scale per tensor), expected [rows, columns]"
        if "gate_up" in layer.projections and layer.checkpoint.config.get("model_type") == "gpt_oss":
            return "gpt-oss interleaves gate and up rows, expected gate rows first"
        if not any(_scale_suffix(layer, projection) for projection in layer.projections):
            dtypes = sorted({layer.stored_dtype(p, s) for p in layer.projections for s in layer.suffixes(p)})
            return f"{layer.prefix} has no {SCALE_SUFFIXES[0]} (its tensors are {', '.join(dtypes)})"
        return None

    def keys(self, quantization: Mapping[str, Any], layer: LayerExperts) -> Keys:
        layout = _Layout.of(quantization, layer)
        return (
            kFp8Static128BlockSym.with_group(layout.rows, layout.block_cols),
            kFp8Dynamic128Sym.with_group(1, layout.block_cols),
        )

    def load(
        self,
        layer: LayerExperts,
        config: FusedMoEConfig,
        *,
        experts: Sequence[int],
        device: torch.device | str = "cpu",
    ) -> MoEWeights:
        quantization = layer.checkpoint.quantization
        layout = _Layout.of(quantization, layer)
        weight_key, activation_key = self.keys(quantization, layer)
        inter, hidden = config.intermediate_size, config.hidden_size
        sizes = {
            "gate": (inter, hidden),
            "up": (inter, hidden),
            "gate_up": (2 * inter, hidden),
            "down": (hidden, inter),
        }
        first = ("gate_up",) if "gate_up" in layer.projections else ("gate", "up") if layer.is_gated else ("up",)
        for projection in (*first, "down"):
            layout.check(layer, projection, sizes[projection])

        tensors: dict[str, Tensor] = {}
        for name, projections in (("w13", first), ("w2", ("down",))):
            tensors[name] = _checked(layer, projections, "weight", layout.arrange_weight, experts, device)
            suffix = _required_scale(layer, projections[0])
            rows = sizes[projections[0]][0]
            tensors[f"{name}_scale"] = _checked(
                layer, projections, suffix, layout.scale_arranger(projections[0], rows), experts, device
            )
            if any(layer.has(projection, "bias") for projection in projections):
                for projection in projections:
                    check_expert_tensor(layer, projection, "bias", sizes[projection][:1], _BIAS_DTYPES)
                tensors[f"{name}_bias"] = _checked(layer, projections, "bias", torch.Tensor.float, experts, device)
        return MoEWeights(weight_key=weight_key, activation_key=activation_key, **tensors)


@dataclass(frozen=True)
class _Layout:
    """How the layer's matrices and their scale grids lie.

    ``rows``: rows that share a scale in the canonical form, less than ``block_rows`` where ``shared`` (gate and up
    share a block); ``transposed``: matrices are stored [K, rows].
    """

    block_rows: int
    block_cols: int
    rows: int
    shared: bool
    transposed: bool

    @staticmethod
    def of(quantization: Mapping[str, Any], layer: LayerExperts) -> _Layout:
        block_rows, block_cols = _block_size(quantization, layer)
        transposed = _is_transposed(layer)
        if transposed and block_rows != block_cols:
            raise CheckpointError(
                f"{layer.prefix} is stored transposed with blocks of {block_rows}x{block_cols}: "
                "which of the two counts output rows is not known"
            )
        shared = _shares_block(layer, block_rows, transposed)
        rows = math.gcd(_stacked_rows(layer, transposed) // 2, block_rows) if shared else block_rows
        return _Layout(block_rows, block_cols, rows, shared, transposed)

    def check(self, layer: LayerExperts, projection: str, size: tuple[int, int]) -> None:
        """Shapes and dtypes of the projection's weight [rows, cols] and scale grid."""
        rows, cols = size
        sized = f"hidden size and intermediate size of {layer.checkpoint.path / 'config.json'}"
        check_expert_tensor(layer, projection, "weight", self._stored(rows, cols), (torch.float8_e4m3fn,), sized)
        parts = 2 if projection == "gate_up" and not self.shared else 1
        grid = (parts * -(-rows // parts // self.block_rows), -(-cols // self.block_cols))
        check_expert_tensor(
            layer,
            projection,
            _required_scale(layer, projection),
            self._stored(*grid),
            _scale_dtypes(layer.checkpoint.quantization),
            f"one scale per block of {self.block_rows}x{self.block_cols} of the {rows}x{cols} weight",
        )

    def arrange_weight(self, weight: Tensor) -> Tensor:
        return weight.mT if self.transposed else weight

    def scale_arranger(self, projection: str, rows: int) -> Callable[[Tensor], Tensor]:
        """From a stored scale grid to float32 rows of the canonical one."""

        def arrange(scale: Tensor) -> Tensor:
            exact = e8m0_to_float32(scale) if scale.dtype in (torch.uint8, torch.float8_e8m0fnu) else scale.float()
            grid = exact.mT if self.transposed else exact
            if self.rows == self.block_rows:
                return grid
            return grid.repeat_interleave(self.block_rows // self.rows, dim=0)[: -(-rows // self.rows)]

        return arrange

    def _stored(self, rows: int, cols: int) -> tuple[int, int]:
        return (cols, rows) if self.transposed else (rows, cols)


def _block_size(quantization: Mapping[str, Any], layer: LayerExperts) -> tuple[int, int]:
    block = quantization.get("weight_block_size")
    if isinstance(block, list) and len(block) == 2:
        rows, cols = block
        if all(isinstance(n, int) and not isinstance(n, bool) and 0 < n <= 1 << 16 for n in block):
            return rows, cols
    where = layer.checkpoint.path / "config.json"
    raise CheckpointError(f"{where}: weight_block_size is {str(block)[:80]}, expected [rows, columns]")


def _matrix(layer: LayerExperts, projection: str) -> tuple[int, int]:
    shape = layer.shape(projection, "weight")
    if len(shape) != 2:
        raise CheckpointError(
            f"{layer.name(0, projection, 'weight')} has shape {list(shape)}, expected a matrix per expert"
        )
    return shape[0], shape[1]


def _is_transposed(layer: LayerExperts) -> bool:
    """Whether gate and up are columns: [K, 2N] and [N, K].  2N and N cannot both equal K, so the shapes tell."""
    if "gate_up" not in layer.projections:
        return False
    (rows, cols), (down_rows, down_cols) = _matrix(layer, "gate_up"), _matrix(layer, "down")
    return (rows, cols) == (down_cols, 2 * down_rows)


def _stacked_rows(layer: LayerExperts, transposed: bool) -> int:
    return _matrix(layer, "gate_up")[1 if transposed else 0]


def _shares_block(layer: LayerExperts, block_rows: int, transposed: bool) -> bool:
    """Whether a row of blocks holds gate and up rows: where they are one matrix and N is no multiple of the block."""
    suffix = _scale_suffix(layer, "gate_up") if "gate_up" in layer.projections else None
    if suffix is None:
        return False
    rows = _stacked_rows(layer, transposed)
    half = rows // 2
    if rows % 2 or half % block_rows == 0:
        return False
    together, apart = -(-rows // block_rows), 2 * -(-half // block_rows)
    shape = layer.shape("gate_up", suffix)
    found = shape[-1 if transposed else 0] if len(shape) == 2 else 0
    if together == apart == found:
        raise CheckpointError(
            f"{layer.name(0, 'gate_up', suffix)}: {found} rows of {block_rows}-row blocks over {half} gate and "
            f"{half} up rows can mean blocks of gate and up apart or of both together; which one is not known"
        )
    return found == together


def _scale_suffix(layer: LayerExperts, projection: str) -> str | None:
    return next((suffix for suffix in SCALE_SUFFIXES if layer.has(projection, suffix)), None)


def _required_scale(layer: LayerExperts, projection: str) -> str:
    suffix = _scale_suffix(layer, projection)
    if suffix is None:
        weight = layer.name(0, projection, "weight")
        raise CheckpointError(
            f"{weight.removesuffix('.weight')}.{SCALE_SUFFIXES[0]} is missing in {layer.checkpoint.path}"
        )
    return suffix


def _scale_dtypes(quantization: Mapping[str, Any]) -> tuple[torch.dtype, ...]:
    # plain bytes are exponents only where the config says so
    return (*_SCALE_DTYPES, torch.uint8) if quantization.get("scale_fmt") == "ue8m0" else _SCALE_DTYPES


def _checked(
    layer: LayerExperts,
    projections: Sequence[str],
    suffix: str,
    arrange: Callable[[Tensor], Tensor],
    experts: Sequence[int],
    device: torch.device | str,
) -> Tensor:
    """The stacked tensors, refused by name where they hold NaN, Inf or negative scales."""
    is_scale = suffix in SCALE_SUFFIXES

    def refuses(kept: Tensor) -> Tensor:
        if kept.dtype is torch.float8_e4m3fn:
            return ((kept.view(torch.uint8) & 0x7F) == 0x7F).any()
        bad = ~torch.isfinite(kept)
        return (bad | (kept < 0)).any() if is_scale else bad.any()

    try:
        return load_stacked(layer, projections, suffix, experts=experts, device=device, arrange=arrange, check=refuses)
    except BadValuesError as error:
        name = error.tensor.rpartition("[")[0] if layer.stacked_names else error.tensor
        try:
            check_values(name, _readable(layer.checkpoint.tensor(name)), scale=is_scale)
        except TensorError as detail:
            raise CheckpointError(str(detail)) from None
        raise


def _readable(tensor: Tensor) -> Tensor:
    return e8m0_to_float32(tensor) if tensor.dtype is torch.uint8 else tensor
