"""What is kept of cuDNN for a device: a plan for each key, a handle and a workspace for each stream. The
frontend is a stand-in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import cuda_dnn
import cuda_runtime
import numpy as np
import pytest

from minidl.core.graph import View
from minidl.core.tasks import strides_of
from minidl.devices.cuda.dnn import LARGEST, Dnn
from minidl.kernels import cuda


@pytest.fixture
def there(cache, monkeypatch):
    """A device, its library, the frontend behind it, and two streams; nothing has been chosen before."""
    device = cuda_runtime.device()
    library = device._dnn()
    return SimpleNamespace(device=device, dnn=library, frontend=library.cudnn, streams=device.streams((0, 1)),
                           made=made_by(device.driver, monkeypatch))


def timed(monkeypatch: Any, *seconds: float) -> None:
    """Candidates take these times, in their order."""
    monkeypatch.setattr("minidl.devices.cuda.clock.side_by_side",
                        lambda driver, stream, calls: [*seconds[: len(calls)]])


def ran(there: Any) -> list[int]:
    """The plans that have run since this was asked last."""
    plans = [plan for _, plan, *_ in there.frontend.executed]
    there.frontend.executed.clear()
    return plans


def made_by(driver: Any, monkeypatch: Any) -> list[tuple[int, int]]:
    """(bytes, stream) of all that is allocated from now on."""
    made, allocate = [], driver.allocate
    monkeypatch.setattr(driver, "allocate",
                        lambda nbytes, stream: made.append((nbytes, stream.number)) or allocate(nbytes, stream))
    return made


def array(there: Any, *shape: int, dtype: str = "float32") -> Any:
    memory = there.device.allocate(int(np.prod(shape)) * np.dtype(dtype).itemsize)
    found = there.device.array(memory, View(0, shape, tuple(strides_of(shape)), 0, dtype))
    found.memory = memory
    return found


def convolution(there: Any, samples: int = 2, what: str = "forward") -> cuda.Convolution:
    x, w, y = (array(there, *shape) for shape in ((samples, 8, 8, 4), (6, 3, 3, 4), (samples, 8, 8, 6)))
    return cuda.Convolution(what, x, w, y, (1, 1), (1, 1), (1, 1), 1)


def attention(there: Any, what: str, causal: bool = False) -> cuda.Attention:
    q, k, v, y, dy, dq, dk, dv = (array(there, 2, 3, n, 8, dtype="float16") for n in (5, 7, 7, 5, 5, 5, 7, 7))
    more = (dy, dq, dk, dv) if what == "grad" else ()
    return cuda.Attention(what, q, k, v, y, array(there, 2, 3, 5), 0.5, causal, *more)


@pytest.mark.few(2)
@pytest.mark.parametrize(("version", "cudnn", "flash"), [("1.23.0", 91900, True), ("1.24.0", 91900, False),
                                                         ("1.26.0", 92200, True), ("2.0", 92100, False)])
def test_attention_needs_a_frontend_that_fits(there, version, cudnn, flash, monkeypatch):
    there.frontend.__version__ = version
    monkeypatch.setattr(cuda_dnn.Frontend, "backend_version", lambda self: cudnn)
    assert there.dnn.flash == flash


def test_a_plan_for_each_key_a_handle_and_a_workspace_for_each_stream(there):
    main, sub = there.streams
    small = convolution(there)
    first = there.dnn.bind(small, main)
    (graph,) = there.frontend.graphs
    assert graph.largest == LARGEST
    tuned = there.dnn.tuner.stream
    there.made.clear()
    again = [there.dnn.bind(small, stream) for stream in there.streams]
    assert len(there.frontend.graphs) == 1
    assert [stream for _, stream in there.made] == [sub.number], "the main stream has its workspace"
    larger = there.dnn.bind(convolution(there, samples=5), main)
    smaller = there.dnn.bind(attention(there, "forward"), main)
    there.made.clear()
    there.frontend.executed.clear()
    for call in (first, *again, larger, smaller):
        call()
    there.device.synchronize()
    assert there.made == [], "a call allocates nothing"
    on = [there.frontend.streams[handle] for *_, handle in there.frontend.executed]
    assert on == [main.ptr, main.ptr, sub.ptr, main.ptr, main.ptr]
    workspaces = [workspace for _, _, _, workspace, _ in there.frontend.executed]
    assert len(set(workspaces)) == 3, "one that was too small stays with the calls that were bound to it"
    assert workspaces[3] == workspaces[4]
    assert tuned.number not in (main.number, sub.number)


def test_an_image_in_a_slab_has_a_plan_for_its_alignment(there):
    """bf16 DenseNet with growth 12: layers begin at 8 bytes, or at 16, and have the same shapes and strides."""
    slab, w, y = (array(there, *shape, dtype="float16") for shape in ((2, 8, 8, 48), (6, 3, 3, 12), (2, 8, 8, 6)))

    def layer(first: int) -> cuda.Convolution:
        x = slab[..., first : first + 12]
        x.memory = slab.memory
        return cuda.Convolution("forward", x, w, y, (1, 1), (1, 1), (1, 1), 1)

    for first in (24, 36, 24):
        there.dnn.bind(layer(first), there.streams[0])()
    there.device.synchronize()
    found = [graph.tensors["x"].attributes["alignment"] for graph in there.frontend.graphs]
    assert found == [16, 8]


@pytest.mark.parametrize("make", [convolution, lambda there: attention(there, "forward"),
                                  lambda there: attention(there, "grad")], ids=["convolution", "attention", "gradient"])
def test_what_is_allowed_makes_another_plan(there, make):
    call = make(there)
    for how in ({}, {"deterministic": False}, {"deterministic": True}, {}):
        there.dnn.bind(call, there.streams[0], **how)
    graphs = there.frontend.graphs
    assert [("NONDETERMINISTIC" in graph.unwanted) for graph in graphs] == [True, False]
    if call.what == "grad":
        assert [graph.how["use_deterministic_algorithm"] for graph in graphs] == [True, False]
    there.dnn.bind(call, there.streams[0], tf32=True)
    assert len(graphs) == (3 if isinstance(call, cuda.Convolution) else 2)
    strict = ["TENSOR_CORE", "DOWN_CONVERT_INPUTS"]
    assert ([note for note in strict if note in graphs[0].unwanted]
            == (strict if isinstance(call, cuda.Convolution) else []))


@pytest.mark.parametrize("what", ["forward", "grad"])
def test_attention_is_described_by_its_arrays(there, what):
    call = attention(there, what, causal=True)
    thunk = there.dnn.bind(call, there.streams[0])
    there.frontend.executed.clear()
    thunk()
    (graph,) = there.frontend.graphs
    names = ["q", "k", "v", "y", "lse", "dy", "dq", "dk", "dv"][: 5 if what == "forward" else 9]
    ((_, _, pointers, _, _),) = there.frontend.executed
    for uid, name in enumerate(names, 1):
        arrays, told = getattr(call, name), graph.tensors[name].attributes
        shape = [*arrays.shape, *([1] if name == "lse" else [])]
        assert told["uid"] == uid
        assert told["dim"] == shape
        assert told["stride"] == [s // arrays.itemsize for s in arrays.strides] + ([1] if name == "lse" else [])
        assert told.get("data_type") == ("FLOAT" if name == "lse" else None)
        assert told.get("output", False) == (name in (("y", "lse") if what == "forward" else ("dq", "dk", "dv")))
        assert told.get("name", name) == name
        assert pointers[uid] == arrays.ctypes.data
    assert graph.operation == ("sdpa" if what == "forward" else "sdpa_backward")
    assert (graph.how["attn_scale"], graph.how["diagonal_alignment"],
            graph.how["diagonal_band_right_bound"]) == (0.5, "TOP_LEFT", 0)


def test_what_has_no_plan_names_its_key(there, monkeypatch):
    def refuse(self: Any, notes: Any) -> None:
        raise ValueError("no engine")

    monkeypatch.setattr(cuda_dnn.Graph, "deselect_numeric_notes", refuse)
    with pytest.raises(RuntimeError, match=r"cuDNN has no plan for Key\(what='grad'.*: no engine"):
        there.dnn.bind(attention(there, "grad"), there.streams[0])


def test_all_plans_that_can_be_built_are_timed_and_the_fastest_runs(there, monkeypatch):
    timed(monkeypatch, 5.0, 4.0, 3.0)
    call = there.dnn.bind(convolution(there), there.streams[0])
    assert sorted(set(ran(there))) == [0, 2, 3], "one cannot be built"
    call()
    assert ran(there) == [3]


def test_a_plan_that_was_chosen_before_is_the_only_one_that_is_built(there, monkeypatch):
    timed(monkeypatch, 5.0, 4.0, 9.0)
    call = convolution(there)
    there.dnn.bind(call, there.streams[0])
    ran(there)
    monkeypatch.setattr("minidl.devices.cuda.dnn.library", lambda: there.frontend)
    bound = Dnn(there.device.driver).bind(call, there.streams[0])
    assert ran(there) == [], "nothing is timed"
    assert there.frontend.graphs[-1].built == {2}
    bound()
    assert ran(there) == [2]


def test_a_plan_that_was_chosen_and_is_not_there_any_more_is_chosen_again(there, monkeypatch):
    timed(monkeypatch, 5.0, 4.0, 9.0)
    call = convolution(there)
    there.dnn.bind(call, there.streams[0])
    monkeypatch.setattr("minidl.devices.cuda.dnn.library", lambda: there.frontend)
    for gone in ("name", "plan"):
        with monkeypatch.context() as patch:
            if gone == "name":
                patch.setattr(cuda_dnn.Graph, "get_plan_name_at_index", lambda self, index: f"another {index}")
            else:
                patch.setattr(cuda_dnn, "UNBUILDABLE", 2)
            Dnn(there.device.driver).bind(call, there.streams[0])()
            there.device.synchronize()
            assert ran(there)[-1] == (2 if gone == "name" else 1)
