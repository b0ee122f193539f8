"""Command lines, ordinary and hostile, with every scheme installed: exit code, one paragraph, valid JSON, no traceback.

``--moe-fuzz N`` makes N more of them up at random.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_core import registry
from moe_core.cli import _machine, _timing
from moe_core.cli.main import main
from moe_core.interface.claims import expand_key
from moe_core.spec.quant_key import key_by_name, key_name
from safetensors.torch import save_file

SCHEMES = ("fp8", "int8", "mxfp4", "wna16")


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of checkpoints and of files that are none."""
    folder = tmp_path_factory.mktemp("place")
    for scheme in SCHEMES:
        (folder / scheme).mkdir()
        write = registry().scheme(scheme).write_quickstart
        assert write is not None
        write(folder / scheme)
    (folder / "plain").mkdir()
    config = json.loads((folder / "fp8" / "config.json").read_text())
    del config["quantization_config"]
    (folder / "plain" / "config.json").write_text(json.dumps(config))
    experts = [f"model.layers.{layer}.mlp.experts.{expert}" for layer in (0, 1) for expert in range(16)]
    shapes = {"gate_proj": (256, 512), "up_proj": (256, 512), "down_proj": (512, 256)}
    plain = {f"{e}.{name}.weight": torch.zeros(s).bfloat16() for e in experts for name, s in shapes.items()}
    save_file(plain, folder / "plain" / "model.safetensors")
    (folder / "empty").mkdir()
    (folder / "text").write_text("no checkpoint")
    (folder / "no json").mkdir()
    (folder / "no json" / "config.json").write_text("{")
    (folder / "bare").mkdir()
    (folder / "bare" / "config.json").write_text('{"model_type": "qwen3_moe"}')
    shutil.copytree(folder / "fp8", folder / "odd")
    config = json.loads((folder / "odd" / "config.json").read_text())
    config["quantization_config"]["quant_method"] = "fp9"
    (folder / "odd" / "config.json").write_text(json.dumps(config))
    (folder / "dense").mkdir()
    (folder / "dense" / "config.json").write_text('{"model_type": "llama"}')
    save_file({"model.layers.0.mlp.up_proj.weight": torch.zeros(4, 4)}, folder / "dense" / "model.safetensors")
    x = {"hidden_states": torch.randn(3, 512), "router_logits": torch.randn(3, 16)}
    save_file(x, folder / "in.safetensors")
    save_file({"hidden_states": torch.randn(3, 7)}, folder / "narrow.safetensors")
    (folder / "garbage.safetensors").write_bytes(bytes(range(256)))
    return folder


@pytest.fixture
def moe(
    place: Path, no_gpu: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Result]]:
    """``moe("run fp8 --json")`` in the folder of :func:`place`; checks what holds for every command line."""
    monkeypatch.setattr(_machine, "measure_limits", lambda *_: _machine.Limits(1e9, 1e9, "float32"))
    monkeypatch.setattr(_timing, "FEWEST", 2)
    monkeypatch.setattr(_timing, "MOST", 2)

    def run(line: str | list[str]) -> Result:
        arguments = shlex.split(line) if isinstance(line, str) else line
        capsys.readouterr()
        try:
            code = main(arguments)
        except SystemExit as ended:
            code = int(ended.code or 0)
        result = Result(code, *capsys.readouterr())
        check(arguments, result)
        return result

    with contextlib.chdir(place):
        yield run


def check(arguments: list[str], result: Result) -> None:
    """What holds for every command line."""
    what = shlex.join(arguments)[:500]
    assert result.code in (0, 1, 2), what
    for text in (result.out, result.err):
        assert "Traceback" not in text, what
        assert "unexpected " not in text.replace("unexpected argument", ""), f"{what}\n{text}"
    # one paragraph, for people to read
    assert "\n\n" not in result.err, what
    assert len(result.err) < 3000, what
    assert all(line.isprintable() for line in (result.out + result.err).split("\n")), what
    if result.code:
        assert result.err or result.out, what
    if result.out and "--json" in arguments and not {"-h", "--help", "--version"} & set(arguments):
        json.loads(result.out, parse_constant=lambda name: pytest.fail(f"{what}: {name}"))
    elif "-v" not in arguments and "--verbose" not in arguments:
        assert all(len(line) < 600 for line in result.out.split("\n")), what


SHAPE = "--scheme fp8 --shape 8,2,256,256"

#: (command line, exit code, what is in stdout or stderr)
LINES: list[tuple[str, int, str]] = [
    # what people type
    ("--help", 0, "quickstart"),
    ("--version", 0, "moe-core"),
    ("run --help", 0, "--check"),
    ("explain --help", 0, "--all-layers"),
    ("bench --help", 0, "spread"),
    ("doctor", 0, "schemes"),
    ("doctor --json", 0, '"faults": []'),
    ("backends", 0, "gfx942"),
    ("backends", 0, "On sm90 fp8 asks in another order: marlin, batched_marlin, triton,"),
    ("backends --json", 0, '"devices"'),
    ("backends -v", 0, "MarlinWNA16Experts"),
    ("backends --scheme wna16", 0, "humming"),
    ("backends --scheme mxfp4 --backend marlin", 0, "kMxfp4Static"),
    ("quickstart --scheme int8 --tokens 4", 0, "within the tolerance"),
    ("quickstart --scheme fp8 --tokens 1 --json", 0, '"passed": true'),
    ("run fp8", 0, "fp8 on cpu: torch"),
    ("run fp8 --check --tokens 3", 0, "within the tolerance"),
    ("run int8 --check --tokens 3 --json", 0, '"passed": true'),
    ("run mxfp4 --check --tokens 3", 0, "within the tolerance"),
    ("run wna16 --check --tokens 3", 0, "within the tolerance"),
    ("run fp8 --input in.safetensors --dtype float32", 0, "output [3, 512] float32"),
    ("run fp8 --layer 1 --tokens 0", 0, "0 tokens"),
    ("run fp8 --activation-key none --tokens 2", 0, "torch"),
    ("run fp8 -v --tokens 1", 0, "-> torch [TorchFp8Experts]: fits; tested on cpu"),
    ("explain fp8", 0, "memory"),
    ("explain fp8 --device h200", 0, "fp8 on h200 (sm90): triton"),
    ("explain mxfp4 --device sm_100a --json", 0, '"chosen"'),
    ("explain wna16 --device sm90 --tokens 1", 0, "marlin"),
    ("explain fp8 --all-layers", 0, "total: weights 12.0 MiB"),
    ("explain mxfp4 --all-layers --device sm90 --json", 0, '"total"'),
    ("explain fp8 --all-layers -v", 0, "-> torch [TorchFp8Experts]"),
    (f"explain {SHAPE} --device a100", 0, "fp8 on a100 (sm80): triton"),
    (f"explain {SHAPE} --device a100 --dtype float16", 0, "16-bit activations (--activation-key none): marlin fits"),
    (f"explain {SHAPE} --device a100 --activation-key none", 0, "fp8 on a100 (sm80): marlin"),
    (f"explain {SHAPE} --device mi300x --json", 0, '"fallback"'),
    (f"explain {SHAPE} --device sm90 --activation-format batched", 0, "batched"),
    (f"explain {SHAPE} --dtype bfloat16 --activation swiglu --bias --device cpu", 0, "biases"),
    (f"explain {SHAPE} --device rtx4090", 0, "sm89"),
    (f"explain {SHAPE} --device a100,h100,cpu", 0, "MarlinFp8QdqExperts            no"),
    (f"explain {SHAPE} --device h100,cpu --ep 4 --tokens 8", 0, "low_latency"),
    (f"explain {SHAPE} --device h100,cpu --ep 4 --tokens 8", 0, "4 ranks (tp 1, ep 4, dp 4), 8 tokens each"),
    ("explain fp8 --device sm75,h100", 0, "sm75: no GPU kernel fits; torch is a loop"),
    ("explain fp8 --device a100,h100 --json", 0, '"devices"'),
    (f"explain {SHAPE} --device a100,h100 --backend marlin", 2, "moe explain: nothing fits on a100, h100"),
    (f"explain {SHAPE} --device a100,", 2, "argument --device: expected items"),
    (f"explain {SHAPE} --device a100,a100", 2, "'a100' twice"),
    ("explain fp8 --all-layers --device a100,h100", 2, "--all-layers is of one device"),
    ("explain --scheme wna16 --shape 8,2,256,256 --weight-key 'kInt4Static[1x64,float16,permuted]'", 0, "permuted"),
    (
        "explain --scheme wna16 --shape 8,2,256,256 --weight-key 'kInt8StaticAsym[pre_scaled]' --device sm90",
        0,
        "marlin",
    ),
    # what is meant where nothing is stated
    ("explain --scheme wna16 --shape 8,2,256,256 --device sm90", 0, "kInt4Static (uint4b8, static bfloat16 1x128)"),
    ("explain --scheme wna16 --shape 8,2,256,256 --activation-key kFp8DynamicTokenSym", 0, "bfloat16 1x128)"),
    (f"explain {SHAPE} --activation-key none", 0, "kFp8Static128BlockSym (e4m3, static float32 128x128)"),
    ("explain --scheme int8 --shape 8,2,256,256 --activation-key none", 0, "kInt8StaticChannelSym"),
    ("explain --scheme mxfp4 --shape 8,2,256,256 --activation-key none", 0, "kMxfp4Static"),
    (f"explain {SHAPE} --activation-key kMxfp8Dynamic", 0, "kMxfp8Static"),
    ("explain --quantize fp8_per_channel --shape 8,2,256,256 --device sm90", 0, "kFp8StaticChannelSym"),
    (f"bench {SHAPE} --tokens 1,2 --budget 0.01", 0, "spread"),
    ("bench int8 --tokens 1 --budget 0.01 --json", 0, '"seconds_p10_p90"'),
    (f"bench {SHAPE} --tokens 1 --budget 0.01 --tuning none", 0, "spread"),
    (f"explain {SHAPE} --device sm90 --tuning none", 0, "chosen"),
    # what is not there
    (f"explain {SHAPE} --device sm90 --tuning nowhere/t.json", 2, "nowhere/t.json"),
    (f"tune {SHAPE}", 2, "nothing to tune on cpu"),
    ("", 0, "usage: moe COMMAND"),
    ("rnu fp8", 2, "did you mean 'run'?"),
    ("RUN fp8", 2, "unknown command"),
    ("--nothing", 2, "moe"),
    ("run", 2, "required: DIR"),
    ("run fp8 --tokns 3", 2, "did you mean '--tokens'?"),
    ("run fp8 int8", 2, "unexpected argument 'int8'"),
    ("doctor --tokens 3", 2, "unknown option '--tokens'"),
    ("run nowhere", 2, "nowhere"),
    ("run ''", 2, "moe run: "),
    ("run empty", 2, "no checkpoint"),
    ("run text", 2, "text"),
    ("run 'no json'", 2, "config.json"),
    ("run bare", 2, "safetensors"),
    ("run dense", 2, "moe run: "),
    ("run odd", 2, "w8a8_fp8, w8a8_int8 (-v: details)"),
    ("run odd -v", 2, "GPTQ (wna16): quant_method is 'fp9', expected 'gptq'"),
    ("explain dense --all-layers", 2, "moe explain: "),
    (
        "explain plain",
        2,
        "is not quantized: its weights are BF16 without scales; as 16-bit experts they can be quantized",
    ),
    ("explain plain", 2, "quantize (--quantize) is one of fp8_per_tensor, int8_per_channel, mxfp4, int4"),
    ("explain plain -v", 2, "int4_g64_asym"),
    ("explain plain --all-layers", 2, "layers 0-1: plain: model.layers.0.mlp.experts is not quantized"),
    ("explain plain --quantize int4_g32 --device h100", 0, "kInt4Static32"),
    ("run org/model", 2, "moe run: "),
    ("run fp8/config.json", 2, "moe run: "),
    ("run fp8 --layer 99", 2, "MoE layers: 0-1"),
    ("run fp8 --layer -1", 2, "-1"),
    ("run fp8 --input nowhere.safetensors", 2, "nowhere.safetensors can't be read"),
    ("run fp8 --input garbage.safetensors", 2, "garbage.safetensors"),
    ("run fp8 --input narrow.safetensors", 2, "hidden_states has shape [3, 7]"),
    ("run fp8 --input empty", 2, "not a regular file"),
    ("run fp8 --output nowhere/o.safetensors", 2, "does not exist"),
    ("run fp8 --output empty", 2, "is a folder"),
    ("run fp8 --output /dev/full", 2, "not a regular file"),
    ("run fp8 --output fp8/config.json", 2, "in the checkpoint folder"),
    # what names nothing
    ("run fp8 --backend tritn", 2, "did you mean 'triton'?"),
    (
        "run fp8 --backend triton",
        2,
        "needs sm89 or newer or gfx942 or gfx950, device is cpu; 'torch' fits (-v: details)",
    ),
    ("run fp8 --backend triton -v", 2, "ok torch [TorchFp8Experts]: fits"),
    ("run fp8 --device nonsense", 2, "--device nonsense"),
    ("run fp8 --device cuda:0", 2, "--device cuda:0"),
    ("run fp8 --device sm90", 2, "--device sm90"),
    ("run fp8 --dtype bfloat", 2, "did you mean 'bfloat16'?"),
    ("run fp8 --dtype int8", 2, "expected bf16"),
    ("run fp8 --activation-key kFp8DynamicTokenSyn", 2, "did you mean 'kFp8DynamicTokenSym'?"),
    ("run fp8 --quantize fp8_per_chanel", 2, "did you mean 'fp8_per_channel'?"),
    ("explain --scheme mxpf4 --shape 8,2,256,256", 2, "did you mean 'mxfp4'?"),
    (f"explain {SHAPE} --device nonsense", 2, "unknown device 'nonsense'"),
    (f"explain {SHAPE} --backend maarlin", 2, "did you mean 'marlin'?"),
    (f"explain {SHAPE} --backend deep_gemm --device sm90", 2, "deep_gemm, which is not installed"),
    (f"explain {SHAPE} --weight-key 'kFp8Static128BlockSym[64'", 2, "closing bracket"),
    (f"explain {SHAPE} --weight-key 'kFp8Static128BlockSym[permutd]'", 2, "did you mean 'permuted'?"),
    (f"explain {SHAPE} --activation silo", 2, "did you mean 'silu'?"),
    (f"explain {SHAPE} --activation-format batch", 2, "did you mean 'batched'?"),
    (f"explain {SHAPE} --all-layers", 2, "--all-layers is for a checkpoint folder"),
    (f"explain fp8 {SHAPE}", 2, "cannot be combined with --scheme and --shape"),
    ("explain", 2, "give a checkpoint folder, or --scheme and --shape"),
    ("backends --scheme gptq", 2, "scheme 'gptq' is not installed"),
    ("backends --scheme fp8 --backend humming", 2, "fp8 has no backend 'humming' (wna16 has); known: batched_marlin,"),
    ("backends --backend maarlin", 2, "did you mean 'marlin'?"),
    ("quickstart --scheme nothing", 2, "scheme 'nothing'"),
    ("quickstart --keep fp8", 2, "a new or an empty folder"),
    ("quickstart --keep text", 2, "a new or an empty folder"),
    ("bench --scheme fp8 --backend torch,tritn", 2, "did you mean 'triton'?"),
    # numbers that are none
    ("run fp8 --tokens x", 2, "expected an integer, got 'x'"),
    ("run fp8 --tokens 1e3", 2, "expected an integer"),
    ("run fp8 --tokens -1", 2, "expected 0 or more"),
    (f"run fp8 --tokens {10**30}", 2, "expected 1099511627776 or less"),
    (f"run fp8 --tokens {'9' * 5000}", 2, "expected an integer"),
    (f"run fp8 --seed {2**64}", 2, "--seed"),
    (f"explain {SHAPE} --tokens 0", 2, "expected 1 or more"),
    ("explain --scheme fp8 --shape 8,2", 2, "expected four integers"),
    ("explain --scheme fp8 --shape=-1,2,3,4", 2, "num_experts must be a positive integer"),
    ("explain --scheme fp8 --shape 0,0,0,0", 2, "positive integer"),
    ("explain --scheme fp8 --shape 2,8,256,256", 2, "top_k 8 is larger than num_experts 2"),
    ("explain --scheme fp8 --shape 16777216,1,16777216,16777216 --device cpu", 0, "about"),
    ("explain --scheme fp8 --shape 99999999,1,1,1", 2, "--shape: expected 16777216 or less"),
    (
        "bench --scheme mxfp4 --shape 16777216,1,16777216,1 --tokens 1 --budget 0.01",
        2,
        "--shape: out of memory: the weights take 862017116176384 bytes, cpu has",
    ),
    (f"bench {SHAPE} --budget nan", 2, "expected a number, got 'nan'"),
    (f"bench {SHAPE} --budget inf", 2, "expected a number, got 'inf'"),
    (f"bench {SHAPE} --budget soon", 2, "expected a number, got 'soon'"),
    (f"bench {SHAPE} --tokens 1,,2", 2, "argument --tokens: expected items"),
    (f"bench {SHAPE} --tokens 4,4", 2, "'4' twice in '4,4'"),
    ("run fp8 --input ''", 2, "argument --input: expected a path, got ''"),
    (f"bench {SHAPE} --tokens 0", 2, "argument --tokens: expected 1 or more"),
    # letters that terminals obey
    ("run $'\\x1b[2J'", 2, "moe run: "),
    ("run 'a\x1b[31mb\nc'", 2, "\\x1b[31m"),
    (f"explain {SHAPE} --device 'sm90\x07'", 2, "unknown device"),
    (f"run {'d' * 5000}", 2, "moe run: "),
]


@pytest.mark.parametrize(("line", "code", "part"), LINES, ids=[line[:60] for line, _, _ in LINES])
def test_command_lines(moe: Callable[..., Result], line: str, code: int, part: str) -> None:
    result = moe(line)
    assert result.code == code, result.out + result.err
    assert part in (result.err if code == 2 and not result.out else result.out + result.err)


def test_why_no_format_reads_a_layer_is_one_line(moe: Callable[..., Result]) -> None:
    for folder in ("plain", "odd"):
        result = moe(f"explain {folder}")
        assert result.err.count("\n") == 1
        assert "\\n" not in result.err
        assert len(result.err) < 400
    assert "quant_method is None, expected 'gptq'" in moe("explain plain -v").err


def test_there_are_enough() -> None:
    assert len(LINES) >= 85


def test_every_claimed_key_has_a_name() -> None:
    """--weight-key and --activation-key take whatever a backend claims."""
    for scheme in registry().scheme_names():
        for backend in registry().oracle(scheme).table():
            for experts in backend.load():
                for claim in {claim for pair in experts.claims.keys for claim in pair}:
                    for key in expand_key(claim):
                        assert key is None or key_by_name(key_name(key)) == key


# ------------------------------------------------------------------ made up at random

WORDS = (
    "",
    "x",
    "0",
    "1",
    "-1",
    "3",
    "1,2",
    "1e9",
    str(2**70),
    "nan",
    "fp8",
    "../..",
    "\x1b[2J",
    "é\udcff",
    "None",
    "{}",
)
VALUES: dict[str, tuple[str, ...]] = {
    "--tokens": ("0", "1", "3", "1,2", str(2**40)),
    "--layer": ("0", "1", "7", "-3"),
    "--seed": ("0", "-5", str(2**63)),
    "--scheme": (*SCHEMES, "nothing"),
    "--shape": ("8,2,256,256", "4,1,128,64", "2,8,64,64", "1,1,1,1", "8,2,100,30", "16777216,1,16777216,1"),
    "--device": ("cpu", "sm80", "sm90", "sm100", "gfx950", "cuda", "xpu", "meta", "l40s"),
    "--backend": ("auto", "torch", "triton", "marlin", "deep_gemm", "humming", "torch,triton"),
    "--dtype": ("bf16", "fp16", "float32"),
    "--activation-key": ("none", "kFp8DynamicTokenSym", "kInt8DynamicTokenSym", "kMxfp8Dynamic"),
    "--weight-key": ("kFp8Static128BlockSym", "kInt4Static[1x32]", "kMxfp4Static", "kInt4Static[permuted]", "none"),
    "--activation": ("silu", "swigluoai", "relu2_no_mul", "gelu"),
    "--activation-format": ("standard", "batched"),
    "--quantize": ("fp8_per_channel", "mxfp8"),
    "--input": ("in.safetensors", "narrow.safetensors", "garbage.safetensors", "fp8"),
    "--output": ("out.tmp", "nowhere/o", "fp8/config.json", "empty"),
    "--svg": ("nowhere/p.svg",),
    "--tuning": ("none", "nowhere/t.json", "fp8/config.json"),
    "--compare": ("nowhere/b.json", "fp8/config.json"),
    "--budget": ("0.001", "0", "-1"),
    "--skew": ("0", "1", "-1", "1e300", "nan"),
    "--keep": ("fp8", "text"),
    "--routing": ("softmax", "sigmoid,renormalize", "per_call", "softmax,,"),
    "--stack": ("talker",),
}
FLAGS = ("--json", "-v", "--check", "--all-layers", "--bias", "--assume", "--help")
FOLDERS = (*SCHEMES, "empty", "dense", "bare", "text")
COMMANDS = ("run", "explain", "explain", "backends", "bench", "doctor", "quickstart", "tune")


def made_up(rng: random.Random) -> list[str]:
    """A command line: mostly what the command takes, mostly with values that make sense."""
    command = rng.choice(COMMANDS)
    line = [command]
    if command in ("run", "explain", "bench", "tune") and rng.random() < 0.6:
        line.append(rng.choice(FOLDERS if rng.random() < 0.9 else WORDS))
    elif command in ("explain", "bench", "tune") and rng.random() < 0.8:
        line += ["--scheme", rng.choice(SCHEMES), "--shape", rng.choice(VALUES["--shape"][:2])]
    for option in rng.sample(list(VALUES), rng.randrange(4)):
        value = rng.choice(VALUES[option] if rng.random() < 0.8 else WORDS)
        line += [f"{option}={value}"] if rng.random() < 0.5 else [option, value]
    line += rng.sample(FLAGS, rng.randrange(3))
    if command == "bench" and not any("--tokens" in part for part in line):
        line += ["--tokens", "1", "--budget", "0.001"]
    return line


#: tests that share the made-up lines, so that several processes run them
PARTS = 4


def seeds(config: pytest.Config) -> range:
    """As many as ``--moe-fuzz`` says."""
    start: Any = config.getoption("--moe-fuzz-start", 0)
    return range(start, start + config.getoption("--moe-fuzz", 60))


@pytest.mark.parametrize("part", range(PARTS))
def test_made_up_command_lines(
    moe: Callable[..., Result], request: pytest.FixtureRequest, place: Path, part: int
) -> None:
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    codes = set()
    chosen = seeds(request.config)[part::PARTS]
    for seed in chosen:
        line = made_up(random.Random(seed))
        try:
            codes.add(moe(line).code)
        except BaseException as error:
            raise AssertionError(f"seed {seed}: moe {shlex.join(line)}") from error
    assert {0, 2} <= codes or len(chosen) < 10
    # lines write into new files only
    assert all(path.read_bytes() == content for path, content in before.items())


def test_the_generator_makes_lines_that_work() -> None:
    """Not all of them are refused for their grammar, which would test nothing else."""
    lines = [made_up(random.Random(seed)) for seed in range(500)]
    assert len({tuple(line) for line in lines}) > 400
    assert {line[0] for line in lines} == set(COMMANDS)
    ordinary = [line for line in lines if not any(re.search(r"[^\w\-.,/=\[\]]", part) for part in line)]
    assert len(ordinary) > 300
