"""What is kept of cuDNN for a device: a plan for each key, a handle and a workspace for each stream. The frontend is a stand-in."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from minidl.cuda.dnn import Dnn
from minidl.kernels import cuda


class Names:
    """Any member is its own name."""

    def __getattr__(self, name: str) -> str:
        return name


class Tensor:
    def __init__(self, **attributes: Any) -> None:
        self.attributes = attributes

    def __getattr__(self, name: str) -> Any:
        def put(value: Any) -> Tensor:
            self.attributes[name.removeprefix("set_")] = value
            return self

        return put


class Graph:
    """A graph of the frontend's, which keeps what it is told. Its workspace has 100 bytes for each sample."""

    def __init__(self, **options: Any) -> None:
        self.options, self.tensors, self.operation, self.unwanted, self.executed = options, [], ("", {}), [], []

    def tensor(self, **attributes: Any) -> Tensor:
        self.tensors.append(Tensor(**attributes))
        return self.tensors[-1]

    def __getattr__(self, name: str) -> Any:
        def call(*operands: Any, **arguments: Any) -> Any:
            if name.startswith(("conv", "sdpa")):
                self.operation = name, arguments
                outs = [Tensor() for _ in range({"sdpa": 2, "sdpa_backward": 3}.get(name, 1))]
                self.tensors += outs
                return outs if name.startswith("sdpa") else outs[0]
            return None

        return call

    def deselect_numeric_notes(self, notes: list[str]) -> None:
        self.unwanted = notes

    def get_workspace_size(self) -> int:
        return 100 * self.tensors[0].attributes["dim"][0]

    def execute(self, pointers: Any, workspace: int, handle: Any) -> None:
        self.executed.append((pointers, workspace, handle))


@pytest.fixture
def frontend(monkeypatch):
    """The graphs that were made, and the stream of each handle."""
    graphs: list[Graph] = []
    streams: dict[int, int] = {}

    def pygraph(**options: Any) -> Graph:
        graphs.append(Graph(**options))
        return graphs[-1]

    module = SimpleNamespace(data_type=Names(), heur_mode=Names(), numerical_note=Names(), diagonal_alignment=Names(), pygraph=pygraph,
                             create_handle=lambda: len(streams) + 7, set_stream=lambda handle, stream: streams.update({handle: stream}))
    monkeypatch.setitem(sys.modules, "cudnn", module)
    return SimpleNamespace(graphs=graphs, streams=streams)


class Driver:
    """Memory with addresses of its own."""

    def __init__(self) -> None:
        self.made: list[tuple[int, int]] = []

    def allocate(self, nbytes: int, stream: Any) -> Any:
        self.made.append((nbytes, stream.number))
        return SimpleNamespace(nbytes=nbytes, data=SimpleNamespace(ptr=4096 * len(self.made)))


STREAMS = [SimpleNamespace(number=n, ptr=50 + n) for n in range(2)]


@pytest.mark.parametrize(("version", "cudnn", "flash"), [("1.23.0", 91900, True), ("1.24.0", 91900, False), ("1.26.0", 92200, True), ("2.0", 92100, False)])
def test_attention_needs_a_frontend_that_fits(frontend, version, cudnn, flash):
    sys.modules["cudnn"].__version__ = version
    sys.modules["cudnn"].backend_version = lambda: cudnn
    assert Dnn(Driver()).flash == flash


def convolution(samples: int = 2, what: str = "forward") -> cuda.Convolution:
    x, w, y = (np.zeros(shape, np.float32) for shape in ((samples, 8, 8, 4), (6, 3, 3, 4), (samples, 8, 8, 6)))
    return cuda.Convolution(what, x, w, y, (1, 1), (1, 1), (1, 1), 1)


def attention(what: str, causal: bool = False) -> cuda.Attention:
    q, k, v, y, dy, dq, dk, dv = (np.zeros((2, 3, n, 8), np.float16) for n in (5, 7, 7, 5, 5, 5, 7, 7))
    more = (dy, dq, dk, dv) if what == "grad" else ()
    return cuda.Attention(what, q, k, v, y, np.zeros((2, 3, 5), np.float32), 0.5, causal, *more)


def test_a_plan_for_each_key_a_handle_and_a_workspace_for_each_stream(frontend):
    driver = Driver()
    dnn = Dnn(driver)
    first = dnn.bind(convolution(), STREAMS[0])
    again = [dnn.bind(convolution(), stream) for stream in STREAMS]
    assert len(frontend.graphs) == 1
    assert driver.made == [(200, 0), (200, 1)]
    larger = dnn.bind(convolution(samples=5), STREAMS[0])
    assert driver.made[2:] == [(500, 0)]
    smaller = dnn.bind(attention("forward"), STREAMS[0])
    for call in (first, *again, larger, smaller):
        call()
    assert len(driver.made) == 3, "a call allocates nothing"
    plan, other, flash = frontend.graphs
    assert [(workspace, frontend.streams[handle]) for _, workspace, handle in plan.executed] == [(4096, 50), (4096, 50), (8192, 51)]
    assert [(graph.executed[0][1:]) for graph in (other, flash)] == [(3 * 4096, 7)] * 2


@pytest.mark.parametrize("call", [convolution(), attention("forward"), attention("grad")], ids=["convolution", "attention", "gradient"])
def test_what_is_allowed_makes_another_plan(frontend, call):
    dnn = Dnn(Driver())
    for how in ({}, {"deterministic": False}, {"deterministic": True}, {}):
        dnn.bind(call, STREAMS[0], **how)
    assert [("NONDETERMINISTIC" in graph.unwanted) for graph in frontend.graphs] == [True, False]
    if call.what == "grad":
        assert [graph.operation[1]["use_deterministic_algorithm"] for graph in frontend.graphs] == [True, False]
    dnn.bind(call, STREAMS[0], tf32=True)
    assert len(frontend.graphs) == (3 if isinstance(call, cuda.Convolution) else 2)
    strict = ["TENSOR_CORE", "DOWN_CONVERT_INPUTS"]
    assert [note for note in strict if note in frontend.graphs[0].unwanted] == (strict if isinstance(call, cuda.Convolution) else [])


@pytest.mark.parametrize("what", ["forward", "grad"])
def test_attention_is_described_by_its_arrays(frontend, what):
    call = attention(what, causal=True)
    Dnn(Driver()).bind(call, STREAMS[0])()
    (graph,) = frontend.graphs
    names = ["q", "k", "v", "y", "lse", "dy", "dq", "dk", "dv"]
    found = {tensor.attributes["uid"]: tensor.attributes for tensor in graph.tensors}
    for uid, name in enumerate(names[:5] if what == "forward" else names, 1):
        array = getattr(call, name)
        shape = [*array.shape, *([1] if name == "lse" else [])]
        assert found[uid]["dim"] == shape
        assert found[uid]["stride"] == [s // array.itemsize for s in array.strides] + ([1] if name == "lse" else [])
        assert found[uid].get("data_type") == ("FLOAT" if name == "lse" else None)
        assert found[uid].get("output", False) == (name in (("y", "lse") if what == "forward" else ("dq", "dk", "dv")))
        assert found[uid].get("name", name) == name
        assert graph.executed[0][0][uid] == array.ctypes.data
    operation, how = graph.operation
    assert operation == ("sdpa" if what == "forward" else "sdpa_backward")
    assert (how["attn_scale"], how["diagonal_alignment"], how["diagonal_band_right_bound"]) == (0.5, "TOP_LEFT", 0)


def test_what_has_no_plan_names_its_key(frontend, monkeypatch):
    def refuse(self: Any, notes: Any) -> None:
        raise ValueError("no engine")

    monkeypatch.setattr(Graph, "deselect_numeric_notes", refuse)
    with pytest.raises(RuntimeError, match=r"cuDNN has no plan for Key\(what='grad'.*: no engine"):
        Dnn(Driver()).bind(attention("grad"), STREAMS[0])
