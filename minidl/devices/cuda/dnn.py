"""cuDNN's plans, through its frontend: made, kept and run, for the operations that `convolutions` and `attention`
describe.

For each key (operation, shapes, types, arithmetic) one plan is made and kept: the fastest of the first that cuDNN
suggests (`tuner`). So every executor runs the same one and bits agree. Each stream has its own handle and workspace.
The prebuilt call can be captured.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any

from ...kernels import Thunk, cuda
from . import attention, convolutions
from .tuner import CANDIDATES, Candidate, Tuner

OPERATIONS: dict[type, Any] = {cuda.Convolution: convolutions, cuda.Attention: attention}
Key = convolutions.Key | attention.Key  #: of a plan: an operation on arrays of one type, and the arithmetic allowed
LARGEST = 1 << 28  #: the most bytes of workspace of a plan


def library() -> Any:
    """cuDNN's frontend. The tests replace it."""
    import cudnn

    return cudnn


def described(cudnn: Any, key: Key, **options: Any) -> Any:
    """A graph of the operation, from which plans can be built. `options` go to cuDNN's graph: a handle, or the
    properties of a device that is not present. Raises RuntimeError if cuDNN has no engine that satisfies the key."""
    kind = {"float32": cudnn.data_type.FLOAT, "float16": cudnn.data_type.HALF,
            "bfloat16": cudnn.data_type.BFLOAT16}[key.dtype]
    graph = cudnn.pygraph(io_data_type=kind, intermediate_data_type=cudnn.data_type.FLOAT,
                          compute_data_type=cudnn.data_type.FLOAT, **options)
    try:
        key.describe(cudnn, graph)
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        graph.deselect_numeric_notes([getattr(cudnn.numerical_note, note) for note in key.unwanted])
        graph.deselect_workspace_greater_than(LARGEST)
        graph.check_support()
    except Exception as error:  # the frontend raises several types
        raise RuntimeError(f"cuDNN has no plan for {key}: {error}") from error
    return graph


def plans(cudnn: Any, graph: Any) -> Iterator[tuple[int, str]]:
    """Indices and names of the plans that can be built, in cuDNN's order of preference; each is built when it is
    yielded."""
    for place in range(graph.get_execution_plan_count()):
        try:
            graph.build_plan_at_index(place)
        except (RuntimeError, cudnn.cudnnGraphNotSupportedError):  # an engine that is unwanted, or cannot do this
            continue
        yield place, graph.get_plan_name_at_index(place)


class Dnn:
    """cuDNN on one device."""

    def __init__(self, driver: Any) -> None:
        self.cudnn, self.driver = library(), driver
        self.tuner = Tuner(driver, f"cuDNN {self.cudnn.backend_version()}, frontend {self.cudnn.__version__}",
                           RuntimeError, self.cudnn.cudnnGraphNotSupportedError)
        self._handles: dict[int, Any] = {}
        self._plans: dict[Key, tuple[Any, int]] = {}  #: for each key a graph, and the index of its plan
        self._told: dict[tuple[Key, int], tuple[Any, int]] = {}  #: the same for a part of the GPU
        self._workspaces: dict[int, Any] = {}

    @property
    def flash(self) -> bool:
        """Whether attention has a gradient: frontends from 1.24 on have none with a cuDNN before 9.22."""
        frontend = tuple(int(n) for n in self.cudnn.__version__.split(".")[:2])
        return frontend < (1, 24) or self.cudnn.backend_version() >= 92200

    def _handle(self, stream: Any) -> Any:
        if stream.number not in self._handles:
            handle = self.cudnn.create_handle()
            self.cudnn.set_stream(handle=handle, stream=stream.ptr)
            self._handles[stream.number] = handle
        return self._handles[stream.number]

    def bind(self, call: cuda.Convolution | cuda.Attention, stream: Any, *, tf32: bool = False,
             deterministic: bool = True) -> Thunk:
        """One prebuilt call. `tf32`: as for products; `deterministic`: only engines that repeat their bits. Raises
        RuntimeError if cuDNN has no plan."""
        key = OPERATIONS[type(call)].Key.of(call, tf32, deterministic)
        if key not in self._plans:
            self._plans[key] = self._choose(key, call)
        plan = self._plans[key]
        if stream.sms:
            if (key, stream.sms) not in self._told:
                self._told[key, stream.sms] = self._with_sms(key, stream.sms, *plan)
            plan = self._told[key, stream.sms]
        return self._bound(*plan, call, stream)

    def _with_sms(self, key: Key, sms: int, graph: Any, place: int) -> tuple[Any, int]:
        """The same plan, told that it has so many multiprocessors, so that bits do not depend on them; or, if cuDNN
        does not offer it then, the plan itself."""
        name = graph.get_plan_name_at_index(place)
        told = described(self.cudnn, key, handle=self._handle(self.tuner.stream), sm_count=sms)
        return next(((told, i) for i, other in islice(plans(self.cudnn, told), CANDIDATES) if other == name),
                    (graph, place))

    def _bound(self, graph: Any, place: int, call: cuda.Convolution | cuda.Attention, stream: Any) -> Thunk:
        workspace = self._workspace(stream, max(1, int(graph.get_workspace_size_plan_at_index(place))))
        pointers = OPERATIONS[type(call)].pointers(call)
        thunk: Any = partial(graph.execute_plan_at_index, pointers, workspace.data.ptr, place,
                             handle=self._handle(stream))
        thunk.owners = (call, graph, workspace)
        return thunk

    def _choose(self, key: Key, call: cuda.Convolution | cuda.Attention) -> tuple[Any, int]:
        """The fastest plan for a key, timed on arrays with the layout of the call's."""
        graph = described(self.cudnn, key, handle=self._handle(self.tuner.stream))

        def candidates() -> Iterator[Candidate]:
            copy = self.tuner.copied(call)
            for place, name in plans(self.cudnn, graph):
                yield f"{place} {name}", partial(self._bound, graph, place, copy, self.tuner.stream)

        def usable(choice: str) -> bool:
            """Builds a plan that another process has chosen. Returns whether that is possible here."""
            place, _, name = choice.partition(" ")
            try:
                graph.build_plan_at_index(int(place))
            except (RuntimeError, self.cudnn.cudnnGraphNotSupportedError):
                return False
            return bool(graph.get_plan_name_at_index(int(place)) == name)

        return graph, int(self.tuner.choose(key, candidates, usable).partition(" ")[0])

    def _workspace(self, stream: Any, nbytes: int) -> Any:
        """The workspace of the stream, large enough for all its plans. A call keeps the one to which it was bound."""
        held = self._workspaces.get(stream.number)
        if held is None or held.nbytes < nbytes:
            held = self._workspaces[stream.number] = self.driver.allocate(nbytes, stream)
        return held
