"""Small checkpoints for tests of formats: experts with exact values, in a tool's layout.

experts = Experts((1, 32))                               # random codes, one scale for 32 columns of a row
tensors = experts.tensors(suffix="weight_scale")         # under the names that the tool gives them
check(source(tmp_path, tensors, {"quant_method": "mine"}), experts, weight_key, None)
refused(tmp_path, tensors, {"quant_method": "mine", "bits": 3}, "bits is 3, expected 4 or 8")
"""

from moe_core.testing.checkpoints.changes import truncated, with_config, with_quantization, with_tensor, with_tensors
from moe_core.testing.checkpoints.experts import (
    CONFIG,
    MX,
    NAMES,
    PER_CHANNEL,
    PER_TENSOR,
    PREFIX,
    E,
    Experts,
    Group,
    K,
    N,
    Tensors,
    exponents,
    float8_codes,
    int4_codes,
    int8_codes,
    unchanged,
)
from moe_core.testing.checkpoints.folders import raw_file, write, write_index
from moe_core.testing.checkpoints.reading import check, reason_against, refused, source

__all__ = [
    "CONFIG",
    "E",
    "Experts",
    "Group",
    "K",
    "MX",
    "N",
    "NAMES",
    "PER_CHANNEL",
    "PER_TENSOR",
    "PREFIX",
    "Tensors",
    "check",
    "exponents",
    "float8_codes",
    "int4_codes",
    "int8_codes",
    "raw_file",
    "reason_against",
    "refused",
    "source",
    "truncated",
    "unchanged",
    "with_config",
    "with_quantization",
    "with_tensor",
    "with_tensors",
    "write",
    "write_index",
]
