"""Recorded calls, with kernels that stand in for compiled ones: they read and write memory by address."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from moe_core.kernels.launch.launch import launch, record
from moe_core.kernels.launch.replay import MOST_BINDINGS, MOST_RECORDS, Replay, _remember
from moe_core.spec.quant_config import FUSED_MOE_UNQUANTIZED_CONFIG
from moe_core.spec.weights import KernelWeights
from moe_core.spec.workspace import Workspace, WorkspaceSpec
from torch import Tensor

SIZE = 64
SPEC = (WorkspaceSpec("unused", (3,), torch.float32), WorkspaceSpec("h", (SIZE,), torch.float32))


def floats(argument: Any) -> Any:
    """The float32 numbers at an address, as a launcher takes one."""
    address = argument if isinstance(argument, int) else argument.data_ptr()
    return (ctypes.c_float * SIZE).from_address(address)


class Kernel:
    """out = scale * a + b, element by element; counts Triton's dispatches and the launcher's starts."""

    arg_names = ("out", "pair", "descriptor", "scale", "PDL", "FLAG")

    def __init__(self, compiles: bool = True) -> None:
        self.fn = SimpleNamespace(__name__="axpy")
        self.dispatched = 0
        self.started = 0
        self.streams: list[int] = []
        self.compiled = SimpleNamespace(run=self.start, function="f", packed_metadata="m") if compiles else None

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def dispatch(*args: Any, **constants: Any) -> Any:
            self.dispatched += 1
            self.compute(*args)
            assert set(constants) == {"PDL", "FLAG", "enable_fp_fusion"}
            return self.compiled

        return dispatch

    def start(self, gx: int, gy: int, gz: int, stream: int, function: str, metadata: str, *rest: Any) -> None:
        assert (gx, gy, gz, function, metadata, rest[:3]) == (2, 1, 1, "f", "m", (None, None, None))
        self.started += 1
        self.streams.append(stream)
        out, pair, descriptor, scale, pdl, flag = rest[3:]
        assert (pdl, flag) == (False, "x")
        self.compute(out, pair, descriptor, scale)

    @staticmethod
    def compute(out: Any, pair: Any, descriptor: Any, scale: float) -> None:
        target, a = floats(out), floats(pair[0])
        b = floats(pair[1] if descriptor is None else getattr(descriptor, "base", descriptor))
        for i in range(SIZE):
            target[i] = scale * a[i] + b[i]


class Launcher:
    """Triton's launcher: it looks for scratch memory and encodes descriptors, then calls a C function."""

    profile_scratch_size = 0

    def __init__(self, launcher: Callable[..., None], scratch: int) -> None:
        self.global_scratch_size = scratch
        self.encodings = encodings = list[int]()

        def inner(*args: Any) -> None:
            encodings.append(len(args))
            launcher(*(arg.base.data_ptr() if hasattr(arg, "base") else arg for arg in args))

        self.launch = inner

    def __call__(self, *args: Any) -> None:
        self.launch(*args)


def numbers(size: int = SIZE) -> Tensor:
    """Small integers, whose sums and products are exact."""
    return torch.randint(-100, 100, (size,)).float()


def layer() -> KernelWeights:
    return KernelWeights(w13=numbers(), w2=numbers(), quant_config=FUSED_MOE_UNQUANTIZED_CONFIG)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton has neither a stream nor hooks here."""
    monkeypatch.setattr("moe_core.kernels.launch.replay._current_stream", lambda device: 7)
    monkeypatch.setattr("moe_core.kernels.launch.replay._has_hooks", lambda: False)


def product(kernel: Kernel, weights: KernelWeights, x: Tensor, out: Tensor, descriptor: Tensor | None = None) -> Any:
    """out = 3 * (2 x + w13) + w2, by way of scratch memory."""

    def call(workspace: Workspace) -> None:
        h = workspace.take(SPEC)["h"]
        constants = {"FLAG": "x"}
        launch(kernel, (2,), h, (x.view(-1), weights.w13), None, 2.0, **constants)
        base = None if descriptor is None else SimpleNamespace(base=h if descriptor is h else descriptor)
        launch(kernel, (2,), out, (h, weights.w2), base, 3.0, **constants)

    return call


def expected(weights: KernelWeights, x: Tensor) -> Tensor:
    return 3 * (2 * x + weights.w13) + weights.w2


@pytest.fixture(params=["own", "shared"])
def workspace(request: pytest.FixtureRequest) -> Workspace | None:
    return Workspace("cpu") if request.param == "shared" else None


def test_later_calls_start_the_recorded_launches_with_their_own_addresses(workspace: Workspace | None) -> None:
    kernel, weights = Kernel(), layer()
    calls = Replay(weights)
    for number in range(6):
        x, out = numbers(), torch.full((SIZE,), float("nan"))
        calls.run(product(kernel, weights, x, out), (out, x, None), workspace)
        assert torch.equal(out, expected(weights, x)), number
    assert (kernel.dispatched, kernel.started) == (4, 8)
    assert kernel.streams == [7] * 8
    assert calls.reasons() == (None,)


@pytest.mark.parametrize(("scratch", "encodings"), [(0, 2), (16, 8)])
def test_a_launcher_without_scratch_memory_is_run_once_for_a_record(scratch: int, encodings: int) -> None:
    kernel, weights, workspace = Kernel(), layer(), Workspace("cpu")
    launcher = kernel.compiled.run = Launcher(kernel.start, scratch)
    calls = Replay(weights)
    for number in range(6):
        x, out = numbers(), torch.full((SIZE,), float("nan"))
        calls.run(product(kernel, weights, x, out, weights.w2), (out, x), workspace)
        assert torch.equal(out, expected(weights, x)), number
    assert (kernel.dispatched, kernel.started) == (4, 8)
    assert kernel.streams == [7] * 8
    assert len(launcher.encodings) == encodings


def test_launches_that_are_only_looked_at_are_not_remembered() -> None:
    kernel, weights = Kernel(), layer()
    calls = Replay(weights)
    for _ in range(3):
        x, out = numbers(), torch.full((SIZE,), float("nan"))
        with record() as launches:
            calls.run(product(kernel, weights, x, out), (out, x), None)
        assert len(launches) == 2
        assert out.isnan().all()
        calls.run(product(kernel, weights, x, out), (out, x), None)
        assert torch.equal(out, expected(weights, x))
    assert (kernel.dispatched, kernel.started) == (4, 2)


@pytest.mark.parametrize("how", ["resized", "replaced"])
def test_weights_whose_memory_was_given_back_are_found_again(how: str) -> None:
    kernel, weights = Kernel(), layer()
    calls = Replay(weights)
    x, out = numbers(), torch.empty(SIZE)
    for _ in range(3):
        calls.run(product(kernel, weights, x, out), (out, x), None)
    kept, before = weights.w2.clone(), weights.w2.data_ptr()
    if how == "resized":
        storage = weights.w2.untyped_storage()
        nbytes = storage.nbytes()
        storage.resize_(0)
        others = [torch.full((SIZE,), 1e6) for _ in range(64)]
        storage.resize_(nbytes)
        weights.w2.copy_(kept)
    else:
        weights.w2.data = kept
        others = [torch.full((SIZE,), 1e6) for _ in range(64)]
    assert others
    assert weights.w2.data_ptr() != before
    started = kernel.started
    for _ in range(3):
        x, out = numbers(), torch.full((SIZE,), float("nan"))
        calls.run(product(kernel, weights, x, out), (out, x), None)
        assert torch.equal(out, expected(weights, x))
    assert kernel.started == started + 6  # what was recorded holds for the new memory


def test_weights_that_are_overwritten_in_place_are_seen() -> None:
    kernel, weights = Kernel(), layer()
    calls = Replay(weights)
    for _ in range(3):
        x, out = numbers(), torch.empty(SIZE)
        calls.run(product(kernel, weights, x, out), (out, x), None)
        weights.w2.mul_(2)
    x = numbers()
    calls.run(product(kernel, weights, x, out), (out, x), None)
    assert kernel.started == 4
    assert torch.equal(out, expected(weights, x))


@pytest.mark.parametrize("change", ["shape", "stride", "dtype", "alignment", "absent"])
def test_other_kinds_of_calls_have_records_of_their_own(change: str) -> None:
    kernel, weights = Kernel(), layer()
    calls = Replay(weights)
    x, out = numbers(), torch.empty(SIZE)
    for _ in range(3):
        calls.run(product(kernel, weights, x, out), (out, x), None)
    other: Tensor | None = {
        "shape": x.view(2, -1),
        "stride": numbers(2 * SIZE)[::2],
        "dtype": x.view(torch.int32),
        "alignment": numbers(SIZE + 1)[1:],
        "absent": None,
    }[change]
    calls.run(product(kernel, weights, x, out), (out, other), None)
    assert (kernel.dispatched, kernel.started) == (6, 2)


@pytest.mark.parametrize("described", ["pointers", "w2 described", "scratch described"])
def test_layers_that_are_alike_share_what_was_recorded(described: str) -> None:
    """The first is called, the second records, the third starts its own launches at its first call."""
    kernel, key, workspace = Kernel(), object(), Workspace("cpu")
    workspace.reserve(4096)
    layers = [Replay(weights, alike=lambda: key) for weights in (layer(), layer(), layer())]
    for number, calls in enumerate(layers * 2):
        weights = calls.weights
        x, out = numbers(), torch.full((SIZE,), float("nan"))

        def call(space: Workspace, weights: Any = weights, x: Tensor = x, out: Tensor = out) -> None:
            h = space.take(SPEC)["h"]
            launch(kernel, (2,), h, (x, weights.w13), None, 2.0, FLAG="x")
            base = {"pointers": None, "w2 described": weights.w2, "scratch described": h}[described]
            launch(
                kernel, (2,), out, (h, weights.w2), None if base is None else SimpleNamespace(base=base), 3.0, FLAG="x"
            )

        calls.run(call, (out, x), workspace)
        h = 2 * x + weights.w13
        assert torch.equal(out, 3 * h + (h if described == "scratch described" else weights.w2)), number
        assert (kernel.dispatched, kernel.started) == ((2, 0) if number < 2 else (0, 2)), number
        kernel.dispatched = kernel.started = 0


@pytest.mark.parametrize("change", ["key", "none", "stride", "alignment", "storage"])
def test_layers_that_differ_share_nothing(change: str) -> None:
    kernel, key = Kernel(), object()
    for number in range(3):
        weights = layer()
        if number == 2:
            w2 = {
                "stride": numbers(2 * SIZE)[::2],
                "alignment": torch.frombuffer(bytearray(4 * SIZE + 20), dtype=torch.float32, offset=4, count=SIZE),
                "storage": torch.cat((weights.w13, weights.w2))[SIZE:],
            }.get(change, weights.w2)
            weights = KernelWeights(w13=weights.w13, w2=w2, quant_config=FUSED_MOE_UNQUANTIZED_CONFIG)
            key = {"key": object(), "none": None}.get(change, key)
        calls = Replay(weights, alike=lambda key=key: key)
        x, out = numbers(), torch.empty(SIZE)
        calls.run(product(kernel, weights, x, out), (out, x), None)
    assert (kernel.dispatched, kernel.started) == (6, 0)


@pytest.mark.parametrize(
    "work",
    [
        lambda out: out.add_(1),
        lambda out: out.__setitem__(0, 5.0),
        lambda out: torch.add(out, 1, out=out),
        lambda out: torch.nn.functional.relu(out, inplace=True),
        lambda out: out.copy_(out.to(torch.float64)),
        lambda out: torch.ops.aten.add_.Tensor(out, out),
        lambda out: out.view(8, 8).t().contiguous(),
        lambda out: out[torch.tensor([0])],
        lambda out: out[0].item(),
    ],
    ids=["in-place", "item assignment", "out", "inplace", "cast", "operator", "copy", "gather", "read"],
)
def test_work_of_torch_is_never_left_out(work: Callable[[Tensor], object]) -> None:
    kernel, weights = Kernel(), layer()
    calls = Replay(weights)
    for _ in range(4):
        x, out = numbers(), torch.empty(SIZE)
        inner = product(kernel, weights, x, out)

        def call(workspace: Workspace, inner: Any = inner, out: Tensor = out) -> None:
            inner(workspace)
            work(out)

        calls.run(call, (out, x), None)
        wanted = expected(weights, x)
        work(wanted)
        assert torch.equal(out, wanted)
    assert kernel.started == 0
    (reason,) = calls.reasons()
    assert reason is not None
    assert reason.startswith("torch does a part of the work: ")


def test_recording_imports_nothing() -> None:
    """Recording happens while requests are served: a mode that loads torch's compiler would stop them for seconds."""
    code = (
        "import sys, moe_core.kernels.launch.replay, torch\n"
        "x = torch.zeros(4)\n"
        "before = set(sys.modules)\n"
        "with moe_core.kernels.launch.replay._Watch() as watch: x.view(2, 2)[0].stride()\n"
        "assert watch.work is None\n"
        "print(sorted(set(sys.modules) - before))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_memory_of_nobody_known_is_not_replayed() -> None:
    kernel, weights = Kernel(), layer()
    calls = Replay(weights)
    kept = []
    for _ in range(4):
        x, out = numbers(), torch.empty(SIZE)
        kept.append(numbers())
        hidden = kept[-1]

        def call(workspace: Workspace, hidden: Tensor = hidden, out: Tensor = out) -> None:
            launch(kernel, (2,), out, (hidden, weights.w2), None, 1.0, FLAG="x")

        calls.run(call, (out, x), None)
        assert torch.equal(out, hidden + weights.w2)
    assert kernel.started == 0
    assert calls.reasons() == ("memory of 0 owners",)


def test_memory_of_two_owners_is_not_replayed() -> None:
    kernel, weights = Kernel(), layer()
    calls = Replay(weights)
    for _ in range(4):
        x = numbers()
        calls.run(product(kernel, weights, x, x), (x, x), None)
    assert kernel.started == 0
    assert calls.reasons() == ("memory of 2 owners",)


def test_descriptors_of_scratch_memory_follow_the_callers_workspace_alone() -> None:
    """A descriptor holds the address: it stays right while the workspace does, and is made anew once that has grown."""
    kernel, weights = Kernel(), layer()

    def call_of(x: Tensor, out: Tensor) -> Any:
        def call(workspace: Workspace) -> None:
            h = workspace.take(SPEC)["h"]
            launch(kernel, (2,), h, (x, weights.w13), None, 2.0, FLAG="x")
            launch(kernel, (2,), out, (weights.w2, None), SimpleNamespace(base=h), 3.0, FLAG="x")

        return call

    shared = Workspace("cpu")
    calls = Replay(weights)
    for _ in range(3):
        x, out = numbers(), torch.empty(SIZE)
        calls.run(call_of(x, out), (out, x), shared)
    assert kernel.started == 2
    old = shared.hold(0)
    shared.reserve(1 << 20)
    old.fill_(255)  # whoever still wrote there would read NaN
    memory = weakref.ref(old.untyped_storage())
    del old
    for _ in range(2):
        x, out = numbers(), torch.empty(SIZE)
        calls.run(call_of(x, out), (out, x), shared)
        assert torch.equal(out, 3 * weights.w2 + (2 * x + weights.w13))
    assert kernel.started == 6
    assert memory() is None

    # not for ever: who alternates between buffers has calls dispatched
    for _ in range(MOST_BINDINGS + 5):
        other = Workspace("cpu")
        calls.run(call_of(x, out), (out, x), other)
        assert torch.equal(out, 3 * weights.w2 + (2 * x + weights.w13))
    started = 6 + 2 * (MOST_BINDINGS - 1)
    assert started <= kernel.started < started + 2 * 5

    calls, before = Replay(weights), kernel.started
    for _ in range(4):
        calls.run(call_of(x, out), (out, x), None)
    assert kernel.started == before
    assert calls.reasons() == ("a descriptor of scratch memory that belongs to one call",)


def test_a_workspace_may_be_any_part_of_a_buffer() -> None:
    """Engines cut scratch memory out of one buffer, anew for each call; layers that are alike are called with it."""
    kernel, key, buffer = Kernel(), object(), torch.empty(1 << 14, dtype=torch.uint8)
    layers = [Replay(weights, alike=lambda: key) for weights in (layer(), layer(), layer())]
    for number, first in enumerate([4096] * 6 + [8192] * 3 + [0] * 3 + [4096] * 3):
        calls = layers[number % 3]
        weights, x, out = calls.weights, numbers(), torch.empty(SIZE)
        buffer.fill_(255)  # whoever read elsewhere in it would read NaN
        workspace = Workspace("cpu", buffer[first : first + 4096])

        def call(space: Workspace, weights: Any = weights, x: Tensor = x, out: Tensor = out) -> None:
            h = space.take(SPEC)["h"]
            launch(kernel, (2,), h, (x, weights.w13), None, 2.0, FLAG="x")
            launch(kernel, (2,), out, (weights.w2, None), SimpleNamespace(base=h), 3.0, FLAG="x")

        calls.run(call, (out, x), workspace)
        assert torch.equal(out, 3 * weights.w2 + (2 * x + weights.w13)), number
    # the first call and the one that is recorded; records are made anew for a part of the buffer that was not theirs
    assert (kernel.dispatched, kernel.started) == (2 * 2, 2 * 13)


def test_descriptors_of_weights_stay_and_those_of_inputs_are_not_replayed() -> None:
    kernel, weights = Kernel(), layer()
    calls = Replay(weights)
    for _ in range(3):
        x, out = numbers(), torch.empty(SIZE)
        calls.run(product(kernel, weights, x, out, descriptor=weights.w13), (out, x), None)
        assert torch.equal(out, 3 * (2 * x + weights.w13) + weights.w13)
    assert kernel.started == 2
    calls = Replay(weights)
    for _ in range(3):
        x, out = numbers(), torch.empty(SIZE)
        calls.run(product(kernel, weights, x, out, descriptor=x), (out, x), None)
        assert torch.equal(out, 3 * (2 * x + weights.w13) + x)
    assert kernel.started == 2
    assert calls.reasons() == ("a descriptor of one of the call's tensors",)


def test_a_profilers_hooks_see_every_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_core.kernels.launch.replay._has_hooks", lambda: True)
    kernel, weights = Kernel(), layer()
    calls = Replay(weights)
    x, out = numbers(), torch.empty(SIZE)
    for _ in range(4):
        calls.run(product(kernel, weights, x, out), (out, x), None)
    assert (kernel.dispatched, kernel.started) == (8, 0)


def test_interpreted_kernels_are_not_replayed() -> None:
    kernel, weights = Kernel(compiles=False), layer()
    calls = Replay(weights)
    for _ in range(4):
        x, out = numbers(), torch.empty(SIZE)
        calls.run(product(kernel, weights, x, out), (out, x), None)
        assert torch.equal(out, expected(weights, x))
    assert calls.reasons() == ("axpy was not compiled",)


def test_the_number_of_records_is_bounded() -> None:
    kernel, weights = Kernel(), layer()
    calls = Replay(weights)
    for extra in range(MOST_RECORDS + 10):
        x, out = numbers(SIZE + extra)[:SIZE], torch.empty(SIZE)
        padding = torch.empty(extra)
        for _ in range(2):
            calls.run(product(kernel, weights, x, out), (out, x, padding), None)
    assert len(calls.reasons()) == MOST_RECORDS
    assert all(reason is None for reason in calls.reasons())


def test_threads_may_remember_kinds_of_calls_at_the_same_time() -> None:
    class Slow(dict[Any, Any]):
        """Another thread has its turn while the oldest entry is looked for, and between two changes."""

        def __iter__(self) -> Iterator[Any]:
            oldest = super().__iter__()
            time.sleep(1e-4)
            return oldest

        def pop(self, *args: Any) -> Any:
            found = super().pop(*args)
            time.sleep(1e-4)
            return found

    known, most = Slow(), 8
    with ThreadPoolExecutor(2) as threads:
        inserted = [threads.submit(_remember, known, number, None, most) for number in range(200)]
        for one in inserted:
            one.result()
    assert len(known) == most
