from __future__ import annotations

import copy
import io
import weakref

import pytest
import torch
from moe_core import TensorError, Workspace, WorkspaceSpec
from moe_core.spec.workspace import ALIGNMENT, workspace_nbytes

SPECS = (
    WorkspaceSpec("a", (3, 5), torch.float32),
    WorkspaceSpec("empty", (0, 7), torch.int32),
    WorkspaceSpec("b", (17,), torch.bfloat16),
)


def test_parts_are_aligned_disjoint_and_shaped() -> None:
    workspace = Workspace("cpu")
    parts = workspace.take(SPECS)
    assert {name: tuple(t.shape) for name, t in parts.items()} == {"a": (3, 5), "empty": (0, 7), "b": (17,)}
    base = parts["a"].untyped_storage().data_ptr()
    assert (parts["b"].data_ptr() - base) % ALIGNMENT == 0
    parts["a"].fill_(1.0)
    parts["b"].fill_(2.0)
    assert bool((parts["a"] == 1).all())
    assert workspace.nbytes == workspace_nbytes(SPECS) == 2 * ALIGNMENT


def test_phases_share_memory_behind_what_has_none() -> None:
    specs = (
        WorkspaceSpec("early", (3 * ALIGNMENT,), torch.uint8, 0),
        WorkspaceSpec("always", (ALIGNMENT + 1,), torch.uint8),
        WorkspaceSpec("late", (ALIGNMENT - 1,), torch.uint8, 1),
        WorkspaceSpec("early too", (1,), torch.uint8, 0),
        WorkspaceSpec("late too", (4 * ALIGNMENT,), torch.uint8, 1),
    )
    workspace = Workspace("cpu")
    parts = workspace.take(specs)
    first = parts["always"].data_ptr()
    starts = {name: (part.data_ptr() - first) // ALIGNMENT for name, part in parts.items()}
    assert starts == {"always": 0, "early": 2, "early too": 5, "late": 2, "late too": 3}
    assert workspace.nbytes == workspace_nbytes(specs) == 7 * ALIGNMENT


@pytest.mark.parametrize("larger", range(4))
def test_a_larger_spec_never_needs_less(larger: int) -> None:
    def specs(extra: int) -> list[WorkspaceSpec]:
        sizes = [700, 300, 500, 900]
        sizes[larger] += extra
        return [
            WorkspaceSpec(str(i), (n,), torch.uint8, phase)
            for i, (n, phase) in enumerate(zip(sizes, (0, None, 1, 0), strict=True))
        ]

    found = [workspace_nbytes(specs(extra)) for extra in range(0, 3000, 100)]
    assert found == sorted(found)


def test_it_grows_and_then_stays() -> None:
    workspace = Workspace("cpu")
    workspace.take([WorkspaceSpec("big", (1000,), torch.float32)])
    size = workspace.nbytes
    workspace.take([WorkspaceSpec("small", (1,), torch.float32)])
    assert workspace.nbytes == size


@pytest.mark.gpu
def test_it_grows_on_another_stream_than_it_was_made_on() -> None:
    workspace = Workspace("cuda")
    old = workspace.hold(1 << 20).data_ptr()
    with torch.cuda.stream(torch.cuda.Stream()):
        # memory to grow into, and the kernel that fills: getting either from the driver waits for all that is under way
        torch.empty(1 << 24, dtype=torch.uint8, device="cuda").fill_(1)
        torch.cuda.synchronize()
        torch.cuda._sleep(1 << 28)
        buffer = workspace.hold(1 << 20)
        buffer.fill_(1)
        del buffer
        workspace.reserve(1 << 24)
    # of the first stream, on which nothing is under way
    assert torch.empty(1 << 20, dtype=torch.uint8, device="cuda").data_ptr() != old
    torch.cuda.synchronize()


def test_a_callers_buffer_is_used_or_refused_never_replaced() -> None:
    buffer = torch.empty(2 * ALIGNMENT, dtype=torch.uint8)
    workspace = Workspace("cpu", buffer)
    assert workspace.take(SPECS)["a"].untyped_storage().data_ptr() == buffer.data_ptr()
    with pytest.raises(TensorError, match=f"{2 * ALIGNMENT} bytes"):
        workspace.take([WorkspaceSpec("big", (1024,), torch.float32)])


@pytest.mark.parametrize("captured", [False, True])
def test_only_a_buffer_that_a_graph_uses_outlives_growth(captured: bool) -> None:
    workspace = Workspace("cpu")
    workspace.take(SPECS)
    workspace._captured = captured  # what take() notes during a capture, which needs a GPU
    buffer = weakref.ref(workspace._buffer)
    workspace.reserve(4096)
    assert workspace.nbytes == 4096
    assert (buffer() is not None) is captured


@pytest.mark.gpu
def test_a_replay_writes_its_own_buffer_after_growth() -> None:
    workspace = Workspace("cuda")
    spec = [WorkspaceSpec("a", (64,), torch.float32)]
    workspace.take(spec)["a"].fill_(0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        workspace.take(spec)["a"].add_(1)
    kept = workspace._buffer
    workspace.take([WorkspaceSpec("b", (1 << 20,), torch.float32)])
    others = [torch.zeros(64, device="cuda") for _ in range(64)]
    graph.replay()
    torch.cuda.synchronize()
    assert not any(bool(other.any()) for other in others)
    assert bool((kept[:256].view(torch.float32) == 1).all())


def test_a_buffer_of_another_type_is_refused() -> None:
    with pytest.raises(TensorError, match="uint8"):
        Workspace("cpu", torch.empty(16))


def test_memory_of_another_kind_is_refused() -> None:
    for buffer in ([0] * 8, torch.zeros(8), torch.zeros(2, 4, dtype=torch.uint8)):
        with pytest.raises(TensorError, match="buffer"):
            Workspace("cpu", buffer)  # type: ignore[arg-type]
    with pytest.raises(TensorError, match=r"buffer .*meta"):
        Workspace("cpu", torch.zeros(8, dtype=torch.uint8, device="meta"))


def test_a_copy_has_as_much_memory_of_its_own() -> None:
    workspace = Workspace("cpu")
    workspace.reserve(1 << 20)
    file = io.BytesIO()
    torch.save(workspace, file)
    assert file.tell() < 1 << 16
    file.seek(0)
    for copied in (copy.deepcopy(workspace), torch.load(file, weights_only=False)):
        assert copied.nbytes == workspace.nbytes
        assert copied.hold(0).data_ptr() != workspace.hold(0).data_ptr()


def test_memory_grows_where_a_copy_was_put() -> None:
    workspace = Workspace("cpu")
    workspace.reserve(64)
    file = io.BytesIO()
    torch.save(workspace, file)
    file.seek(0)
    moved = torch.load(file, map_location="meta", weights_only=False)
    moved.reserve(128)
    assert moved.place == torch.device("meta")
    assert moved.nbytes == 128


def test_a_callers_buffer_goes_with_a_copy() -> None:
    workspace = Workspace("cpu", torch.arange(64, dtype=torch.uint8))
    copied = copy.deepcopy(workspace)
    assert torch.equal(copied.hold(64), workspace.hold(64))
    with pytest.raises(TensorError, match="64 bytes"):
        copied.reserve(65)
