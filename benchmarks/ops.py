"""Shared kernels on one GPU: checked against torch twins, compared with memory bandwidth.

    python benchmarks/ops.py [--json FILE] [--only TEXT] [--bandwidth TB/S]

Times are medians per call, over replays of a CUDA graph that rotates each op through several buffers (for large batches
larger than the L2 cache in total). ``floor`` is the minimum memory traffic over the bandwidth; a launch alone takes 2
to 3 us. The exit code is 1 if a result differs from its twin.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from graph_time import captured, heat_up, replay_times
from moe_core.kernels.ops.activation import fused_activation
from moe_core.kernels.ops.permute import batch_tokens, gather_rows
from moe_core.kernels.ops.quantize import activate_and_quantize, quantize_activation
from moe_core.kernels.ops.routing import fused_route
from moe_core.spec.activation import MoEActivation
from moe_core.spec.quant_key import (
    kFp8Dynamic128Sym,
    kFp8DynamicTensorSym,
    kFp8DynamicTokenSym,
    kFp8StaticTensorSym,
    kInt8DynamicTokenSym,
    kMxfp8Dynamic,
)
from moe_core.spec.routing import RoutingConfig, RoutingMethodType
from torch import Tensor

TOKENS = (1, 16, 128, 1024, 8192)


@dataclass(frozen=True)
class Case:
    """One op with its inputs.

    Attributes:
        name: name of the op.
        tokens: number of tokens.
        calls: ``call(backend)`` for each of several inputs.
        nbytes: memory traffic of one call.
        exact: results must agree bit for bit.
    """

    name: str
    tokens: int
    calls: list[Callable[[str], object]]
    nbytes: int
    exact: bool = True


@dataclass(frozen=True)
class Row:
    name: str
    tokens: int
    us: float
    us_p90: float
    floor_us: float
    matches: bool
    error: str


def copies(nbytes: int) -> int:
    """Return the number of buffers: more than the 50 MB L2 cache in total, at most 2 GB."""
    return max(2, min(16, 2 * 10**9 // max(nbytes, 1)))


def routing_cases() -> Iterator[Case]:
    methods = RoutingMethodType
    kinds = [
        (
            "dsv3",
            RoutingConfig.from_method(methods.DeepSeekV3, num_expert_group=8, topk_group=4),
            256,
            8,
            torch.float32,
        ),
        ("qwen3", RoutingConfig.from_method(methods.RenormalizeNaive), 128, 8, torch.float32),
        ("qwen3", RoutingConfig.from_method(methods.RenormalizeNaive), 128, 8, torch.bfloat16),
        ("gpt-oss", RoutingConfig.from_method(methods.Renormalize), 128, 4, torch.bfloat16),
        ("v4", RoutingConfig.from_method(methods.DeepseekV4), 384, 6, torch.float32),
        ("1024", RoutingConfig.from_method(methods.MiniMax2), 1024, 8, torch.float32),
    ]
    for name, config, experts, top_k, dtype in kinds:
        bias = torch.randn(experts, device="cuda") if config.has_correction_bias else None
        for tokens in TOKENS:
            nbytes = tokens * (experts * dtype.itemsize + top_k * 8)
            calls = [
                partial(
                    lambda backend, x, **kw: fused_route(x, backend=backend, **kw),
                    x=torch.randn(tokens, experts, device="cuda").to(dtype),
                    top_k=top_k,
                    config=config,
                    correction_bias=bias,
                )
                for _ in range(copies(nbytes))
            ]
            yield Case(f"route {name} E{experts} k{top_k} {str(dtype)[6:]}", tokens, calls, nbytes)


QUANT_KEYS = {
    "e4m3 1x128": kFp8Dynamic128Sym,
    "e4m3 token": kFp8DynamicTokenSym,
    "mxfp8": kMxfp8Dynamic,
    "e4m3 tensor": kFp8DynamicTensorSym,
    "e4m3 static": kFp8StaticTensorSym,
    "int8 token": kInt8DynamicTokenSym,
}


def scale_bytes(key: object, tokens: int, columns: int) -> int:
    rows, groups = key.group_shape.grid(tokens, columns)  # type: ignore[attr-defined]
    return rows * groups * key.scale.dtype.itemsize  # type: ignore[attr-defined]


def quantize_cases() -> Iterator[Case]:
    for name, key in QUANT_KEYS.items():
        static = torch.tensor([0.02], device="cuda") if key.is_static else None
        for columns in (7168, 2048):
            for tokens in TOKENS:
                # a scale for the whole tensor requires a second pass
                reads = 4 if key == kFp8DynamicTensorSym else 2
                nbytes = tokens * columns * (reads + 1) + scale_bytes(key, tokens, columns)
                calls = [
                    partial(
                        lambda backend, x, key, static: quantize_activation(
                            x, key, static_scale=static, backend=backend
                        ),
                        x=torch.randn(tokens, columns, device="cuda", dtype=torch.bfloat16),
                        key=key,
                        static=static,
                    )
                    for _ in range(copies(nbytes))
                ]
                yield Case(f"quantize {name} K{columns}", tokens, calls, nbytes)


def activation_cases() -> Iterator[Case]:
    for name in ("", "e4m3 1x128", "e4m3 token", "mxfp8", "int8 token"):
        for columns in (2048, 768):
            for tokens in TOKENS:
                for activation in (MoEActivation.SILU,) if name else (MoEActivation.SILU, MoEActivation.SWIGLUOAI):
                    key = QUANT_KEYS.get(name)
                    out = 2 * tokens * columns if key is None else tokens * columns + scale_bytes(key, tokens, columns)
                    nbytes = 4 * tokens * columns + out

                    def call(backend, x, key=key, activation=activation):  # type: ignore[no-untyped-def]
                        if key is None:
                            return fused_activation(activation, x, backend=backend)
                        return activate_and_quantize(activation, x, key, backend=backend)

                    calls = [
                        partial(call, x=torch.randn(tokens, 2 * columns, device="cuda", dtype=torch.bfloat16))
                        for _ in range(copies(nbytes))
                    ]
                    label = f"{activation.value}{' ' + name if name else ''} N{columns}"
                    yield Case(label, tokens, calls, nbytes, exact=False)


def permute_cases() -> Iterator[Case]:
    experts, top_k, columns = 128, 8, 2048
    for tokens in TOKENS:
        nbytes = tokens * columns * 2 * (1 + top_k)
        pairs = tokens * top_k
        makers = []
        for _ in range(copies(nbytes)):
            x = torch.randn(tokens, columns, device="cuda", dtype=torch.bfloat16)
            order = torch.randperm(pairs, device="cuda").int()
            makers.append(partial(lambda backend, x, i: gather_rows(x, i, per_row=8, backend=backend)[0], x=x, i=order))
        yield Case(f"gather rows k{top_k} K{columns}", tokens, makers, nbytes)
        if tokens > 1024:
            continue
        makers = []
        for _ in range(copies(nbytes)):
            x = torch.randn(tokens, columns, device="cuda", dtype=torch.bfloat16)
            ids = torch.rand(tokens, experts, device="cuda").topk(top_k).indices.int()
            out = torch.zeros(experts, min(tokens, 256), columns, device="cuda", dtype=torch.bfloat16)

            def batch(backend, x, ids, out):  # type: ignore[no-untyped-def]
                found = batch_tokens(x, ids, num_experts=experts, max_tokens=out.shape[1], out=out, backend=backend)
                return found.hidden_states, found.places, found.expert_num_tokens

            makers.append(partial(batch, x=x, ids=ids, out=out))
        yield Case(f"batch tokens E{experts} k{top_k} K{columns}", tokens, makers, nbytes)


def tensors(result: object) -> list[Tensor]:
    items = result if isinstance(result, tuple) else (result,)
    return [item.clone() for item in items if isinstance(item, Tensor)]


def compare(case: Case) -> tuple[bool, str]:
    """Return whether kernel and twin agree: bit for bit, or after an activation within one step."""
    for call in case.calls[:2]:
        found, want = tensors(call("triton")), tensors(call("torch"))
        for one, two in zip(found, want, strict=True):
            if one.shape != two.shape or one.dtype != two.dtype:
                return False, f"{one.dtype} {list(one.shape)} instead of {two.dtype} {list(two.shape)}"
            if torch.equal(one.view(torch.uint8), two.view(torch.uint8)):
                continue
            different = (one.float() != two.float()).sum().item()
            largest = (one.float() - two.float()).abs().max().item()
            text = f"{different} of {one.numel()} differ, by at most {largest:.3g}"
            if not case.exact and one.dtype is torch.float32 and torch.allclose(one, two, rtol=2**-12, atol=0):
                continue  # scales of values that differ in the last place
            # an activation that differs in the last place sometimes changes a rounding
            if case.exact or different > max(2, 0.02 * one.numel()):
                return False, text
            if one.element_size() == 1 and one.dtype is not torch.uint8:
                codes = (one.view(torch.uint8).int() - two.view(torch.uint8).int()).abs() & 0x7F
                if codes.max() > 1 and (codes[codes > 1] != 127).any():
                    return False, text
    return True, ""


def time_case(case: Case) -> tuple[float, float]:
    """Return (median, 90th percentile) microseconds per call."""
    for call in case.calls:
        call("triton")
    graph, _ = captured([partial(call, "triton") for call in case.calls])
    times = sorted(replay_times(graph, len(case.calls), 20))
    return statistics.median(times), times[-3]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--bandwidth", type=float, default=4.35, help="TB/s that the memory gives (default: H200)")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("needs a GPU", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    torch.cuda.set_stream(torch.cuda.Stream())
    heat_up()
    rows: list[Row] = []
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {options.bandwidth} TB/s")
    print(f"{'op':34} {'tokens':>6} {'us':>8} {'p90':>8} {'floor':>8} {'of floor':>8}  twin")
    for cases in (routing_cases, quantize_cases, activation_cases, permute_cases):
        for case in cases():
            if options.only not in case.name:
                continue
            matches, error = compare(case)
            us, p90 = time_case(case)
            floor = case.nbytes / options.bandwidth * 1e-6
            rows.append(Row(case.name, case.tokens, us, p90, floor, matches, error))
            verdict = "equal" if matches else f"DIFFERS: {error}"
            print(
                f"{case.name:34} {case.tokens:6} {us:8.2f} {p90:8.2f} {floor:8.2f} {floor / us:8.0%}  {verdict}",
                flush=True,
            )
            del case
        torch.cuda.empty_cache()
    wrong = [row for row in rows if not row.matches]
    print(f"{len(rows)} cases, {len(wrong)} differ from their twin")
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
