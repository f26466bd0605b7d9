"""Tensor: a view on a storage and the op that made it; and the backward walk over those ops.

Output gradients and weight gradients are separate tasks from the start. The walk emits tasks in the conventional
order (for each layer from the last: its weight gradient, then its output gradient); any other order is a schedule's
business. The order in which several gradients of one tensor are added is fixed here and so is part of the graph.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.columns import grouped
from ..core.graph import Role, View
from ..core.tasks import Kind, strides_of
from ..devices import device as devices
from ..devices.returned import Returned
from . import tape as tapes
from .initial import Initial
from .tape import Storage, StoragePart

if TYPE_CHECKING:
    from .op import Op

FLOATS = ("float32", "float64")
HALVES = ("bfloat16", "float16")
#: types of a tensor's elements
NUMBERS = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16",
           "bfloat16", *FLOATS)
VALUES = (list, tuple, float, int, np.ndarray)  #: types of values, which are no memory yet


class ShapeError(ValueError):
    """Shapes or types do not fit. The message names the op and the shapes."""


class Node:
    """One use of an op, with what the backward walk needs. Uses and backward walks are numbered in their order.
    `wanted`: the inputs that had a gradient then. `walked`: whether a backward walk has used it, and no other may.
    `micro_batch`: the one that its backward tasks belong to; None: they are where the walk begins."""

    __slots__ = ("inputs", "micro_batch", "number", "op", "out", "unit", "walked", "wanted")
    latest = 0

    def __init__(self, op: Op, unit: int, inputs: Sequence[Tensor], out: Tensor, micro_batch: int | None) -> None:
        Node.latest += 1
        self.op, self.unit, self.inputs, self.out, self.micro_batch = op, unit, inputs, out, micro_batch
        self.number, self.walked = Node.latest, False
        self.wanted = [i for i, t in enumerate(inputs) if t.requires_grad]


class Tensor:
    """A strided view on a storage. `weight`: whether the tensor depends on parameters alone, so that gradients toward
    it are weight gradients.

    `backward` fills `uses` for leaves (parameters, and tensors with `requires_grad_`): the gradient of each use, in the
    order of use, added up over all backward passes; `grad` is their sum.
    """

    __slots__ = ("__weakref__", "grad_unit", "node", "offset", "parts", "requires_grad", "shape", "storage", "strides",
                 "total", "used", "uses", "weight")
    __array_priority__ = 100

    def __init__(self, storage: Storage, shape: Sequence[int] | None = None, strides: Sequence[int] | None = None,
                 offset: int = 0, *, parts: tuple[StoragePart, ...] | None = None, requires_grad: bool = False) -> None:
        if isinstance(storage, VALUES):
            raise TypeError(f"a Tensor is a view on memory; minidl.array(values) makes a tensor of a "
                            f"{type(storage).__name__}")
        self.storage = storage
        self.shape = storage.shape if shape is None else tuple(shape)
        self.strides = strides_of(self.shape) if strides is None else tuple(strides)
        self.offset = offset
        self.parts: tuple[StoragePart, ...] = (storage,) if parts is None else parts
        self.requires_grad, self.weight = requires_grad, False
        self.node: Node | None = None
        self.uses: dict[tuple[int, int], Tensor] = {}  # by use and group of micro-batches
        self.total: Tensor | None = None  # the sum of several uses, once somebody has asked for it
        self.grad_unit: int | None = None
        self.used = False  # an update has used the gradient: the next backward starts a new one

    @property
    def grad(self) -> Tensor | None:
        """The gradient since the last update. That of a parameter used more than once is added up when it is asked
        for: once in a step, whatever the number of micro-batches."""
        add_uses([self])
        return self.total if len(self.uses) > 1 else next(iter(self.uses.values()), None)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        tape = tapes.current()
        tape.remember(self, dropped=value is None)
        self.uses, self.total = {}, None
        if value is not None:
            value = value if isinstance(value, Tensor) else array(value)
            if (value.shape, value.dtype) != (self.shape, self.dtype):
                raise ShapeError(f"the gradient of {self.storage.name} must be {self.dtype} {self.shape} as it is, not "
                                 f"{value.dtype} {value.shape}")
            self.grad_unit = tape.new_unit(f"gradient of {self.storage.name}")
            with tape.task(self.grad_unit, Kind.W):
                _accumulate(self, (0, 0), value, own=False)

    # --------------------------------------------------------------------------------------------------- description
    @property
    def dtype(self) -> str:
        return self.storage.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * tapes.itemsize(self.storage.dtype)

    @property
    def contiguous(self) -> bool:
        dense = strides_of(self.shape)
        return self.strides == dense or all(n == 1 or s == t for n, s, t in zip(self.shape, self.strides, dense,
                                                                                strict=True))

    def view_of(self, storage: int) -> View:
        """The tensor as a view on the storage of this number."""
        return View(storage, self.shape, self.strides, self.offset, self.dtype)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a tensor without axes has no length")
        return self.shape[0]

    def __repr__(self) -> str:
        value = ("recorded" if self.storage.recorded or tapes.current().recording else
                 np.array2string(self.numpy(), threshold=20, prefix="Tensor("))
        return f"Tensor({value}, shape={self.shape}, dtype={self.dtype})"

    # --------------------------------------------------------------------------------------------------------- values
    def numpy(self) -> Any:
        """The values as a NumPy array: the tensor's own memory on the CPU, a copy from CUDA. Raises RuntimeError while
        recording, when there are no values."""
        if (returned := self._returned) is not None:
            return returned()
        device, array = self._array()
        return device.read(array)

    def fetch(self) -> Callable[[], Any]:
        """A function that returns the present values as a NumPy array. On CUDA the copy runs while the host goes on, so
        a loss can be read some steps later without waiting for it."""
        if (returned := self._returned) is not None:
            return returned
        device, array = self._array()
        return device.fetch(array)

    @property
    def _returned(self) -> Returned | None:
        """The whole tensor, if a step has brought it to the host and nobody has asked for its memory."""
        initial = self.storage.initial
        return initial[1] if (initial is not None and isinstance(initial[1], Returned) and self.shape
                              == self.storage.shape and self.strides == strides_of(self.shape)) else None

    def assign(self, value: Any) -> None:
        """Copies a NumPy array of the same shape, or one number for all elements, into the tensor's memory. An array
        that lies in a file, a `numpy.memmap`, is read when somebody asks for the values, if nobody has yet. Raises
        ShapeError for another shape or a type that cannot be cast to the tensor's, RuntimeError while recording."""
        if tapes.current().recording:
            raise self.storage.no_value()
        later = isinstance(value, Initial) or (
            isinstance(value, np.memmap) and (value.shape, value.dtype) == (self.storage.shape, self.dtype))
        if not isinstance(value, Initial | np.memmap):
            value = numeric(value)
        if value.shape not in (self.shape, ()) or not np.can_cast(value.dtype, np.dtype(self.dtype), "same_kind"):
            raise ShapeError(f"{self.storage.name} is {self.dtype} {self.shape}; it cannot take "
                             f"{value.dtype} {value.shape}")
        whole = self.size == math.prod(self.storage.shape)
        if whole and later and self.storage.initial is not None:
            self.storage.initial = self.storage.initial[0], value.astype(self.dtype, copy=False)
        else:
            if whole:
                self.storage.overwritten()
            device, array = self._array()
            device.write(array, np.asarray(value))
        self.mark_changed()

    def mark_changed(self) -> None:
        """Notes that the values change: a gradient that needs the old ones raises an error from now on."""
        self.storage.changed = Node.latest

    def _array(self) -> tuple[Any, Any]:
        """The device on which the values are, and its array of them."""
        if tapes.unsettled and self.storage.role.persistent:
            tapes.settle()
        if self.storage.role in (Role.PARAMETER, Role.SCALAR) and tapes.current().recording:
            raise self.storage.no_value()
        device = devices.of(self.storage.data)
        return device, device.array(self.storage.data, self.view_of(0))

    def item(self) -> Any:
        """The one value, as a Python number."""
        return self.numpy().item()

    def __float__(self) -> float:
        return float(self.item())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.array(self.numpy(), dtype=dtype, copy=copy)

    def __array_wrap__(self, array: Any, context: Any = None, scalar: bool = False) -> Any:
        """The result of NumPy's function. Raises RuntimeError if it is floats and a gradient would end there."""
        if (array.dtype.kind == "f" and context is not None and tapes.current().gradients
            and any(isinstance(t, Tensor) and t.requires_grad for t in context[1])):
            raise RuntimeError(f"numpy.{context[0].__name__} of {self.storage.name} {self.shape} would end a gradient: "
                               f"use a function or method of minidl, or x.numpy() for the values")
        return array[()] if scalar else array

    def __dlpack__(self, **options: Any) -> Any:
        return self.numpy().__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.numpy().__dlpack_device__()

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        device, array = self._array()
        if not hasattr(device, "interface"):
            raise AttributeError(f"this tensor is on {device.name}, not on a CUDA device")
        return dict(device.interface(array))

    def requires_grad_(self) -> Tensor:
        """Makes `backward` keep the gradient toward this tensor, which no op has made. Returns the tensor."""
        if self.node is not None or self.dtype not in FLOATS:
            raise RuntimeError(f"only a {' or '.join(FLOATS)} tensor that no op has made can be given a gradient")
        self.requires_grad = True
        tapes.changed(self, "requires_grad")
        return self

    def detach(self) -> Tensor:
        """A tensor on the same memory, through which no gradient flows."""
        return self.seen(self.shape, self.strides)

    def seen(self, shape: Sequence[int], strides: Sequence[int] | None = None, begin: int = 0) -> Tensor:
        """The same memory from element `begin` on, contiguous or with these strides. For ops, which make gradients."""
        return Tensor(self.storage, shape, strides, self.offset + begin, parts=self.parts)

    # ------------------------------------------------------------------------------------------------------- backward
    def backward(self, gradient: Tensor | None = None, retain_graph: bool = False) -> None:
        """Computes the gradients of this scalar toward every parameter on which it depends, and adds them to those that
        no update has used yet. `gradient`: a number, or a scalar of the same type, that multiplies all of them.
        `retain_graph`: whether another backward may go through the same forward pass. Raises ShapeError if this is not
        a scalar, and RuntimeError if it depends on no parameter, or where an earlier backward has gone through a part
        of the forward pass without `retain_graph`."""
        if self.size != 1:
            raise ShapeError(f"backward starts from a scalar, not from shape {self.shape}")
        if not self.requires_grad:
            raise RuntimeError("this value depends on no parameter, so there is nothing to differentiate")
        gradient = gradient if gradient is None or isinstance(gradient, Tensor) else array(gradient, self.dtype)
        if gradient is not None and (gradient.shape, gradient.dtype) != (self.shape, self.dtype):
            raise ShapeError(f"the gradient must be {self.dtype} {self.shape} as the value is, not {gradient.dtype} "
                             f"{gradient.shape}")
        backward(self, gradient, retain_graph)

    # `ops` adds the operators and methods, since it knows the ops; see ops/__init__.py. Here are only their types.
    if TYPE_CHECKING:

        def _of_two(self, other: Any) -> Tensor: ...
        def _of_one(self) -> Tensor: ...
        def __pow__(self, exponent: float) -> Tensor: ...
        def __index__(self) -> int: ...
        def __iter__(self) -> Iterator[Tensor]: ...
        __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __rpow__ = _of_two
        __matmul__ = __rmatmul__ = __lt__ = __le__ = __gt__ = __ge__ = __and__ = __or__ = __xor__ = _of_two
        __eq__ = __ne__ = __getitem__ = _of_two  # type: ignore[assignment]
        __hash__ = object.__hash__
        __neg__ = __invert__ = __abs__ = _of_one
        def __getattr__(self, name: str) -> Any: ...


class Parameter(Tensor):
    """A leaf that is trained. `value`: a NumPy array, which is copied, or `Initial` values. `axes`: the order of the
    axes in a state dict, if memory has another, faster order. Raises ShapeError if `value` is not a float array."""

    __slots__ = ("_trained", "axes", "name")

    def _train(self, trained: bool) -> None:
        if getattr(self, "_trained", None) is not trained:
            self._trained = trained
            tapes.changed(self, "requires_grad")

    #: whether it gets a gradient; recorded steps notice a change
    requires_grad = property(attrgetter("_trained"), _train)

    def __init__(self, value: Any, name: str = "", axes: tuple[int, ...] | None = None) -> None:
        if not isinstance(value, Initial):
            value = numeric(value)
        if str(value.dtype) not in FLOATS:
            raise ShapeError(f"a parameter must be {' or '.join(FLOATS)}, not {value.dtype}")
        self.axes = axes
        super().__init__(host_storage(value, Role.PARAMETER, name or "parameter"), requires_grad=True)
        self.weight, self.name = True, name


def host_storage(value: Any, role: Role, name: str) -> Storage:
    """A storage with its own aligned memory, filled from a NumPy array; for `Initial` values, once somebody asks for
    its data. Raises ShapeError as `numeric` does."""
    device = tapes.current().device
    if isinstance(value, Initial):
        return Storage(name, value.shape, value.dtype, role, initial=(device, value))
    value = numeric(value)
    storage = Storage(name, value.shape, str(value.dtype), role)
    storage.allocate(device)
    if value.size:
        device.write(device.array(storage.data, View.of(storage)), value)
    return storage


def unmasked(value: Any) -> Any:
    """`value` as a NumPy array. Raises ShapeError for one with masked elements."""
    if np.ma.is_masked(value):
        raise ShapeError("a tensor holds numbers, and some of these are masked; fill them first: value.filled(0)")
    return np.asarray(value)


def numeric(value: Any) -> Any:
    """`value` as a NumPy array of numbers in this machine's byte order. Raises ShapeError for anything else: objects,
    texts, complex or longer numbers, and arrays with masked elements."""
    array = unmasked(value)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if str(array.dtype) not in NUMBERS:
        raise ShapeError(f"a tensor holds numbers ({', '.join(NUMBERS)}), not {array.dtype}")
    return array


def array(value: Any, dtype: str | None = None, name: str = "tensor") -> Tensor:
    """A tensor with a copy of `value`; Python floats become float32. While recording it is a constant of the graph.
    Raises ShapeError if `value` is not numbers, and for Python floats that are too large for float32."""
    array = numeric(value)
    if dtype is not None:
        array = array.astype(dtype, copy=False)
    elif array.dtype == np.float64 and not isinstance(value, np.ndarray | np.generic):
        with np.errstate(over="ignore"):
            array, wide = array.astype(np.float32), array
        if not (np.isfinite(array) == np.isfinite(wide)).all():
            raise ShapeError(f"{np.abs(wide[np.isfinite(wide)]).max():g} is too large for float32; "
                             f"give dtype='float64'")
    return Tensor(host_storage(array, Role.STATE, name))


def new(name: str, shape: Sequence[int], dtype: str, role: Role = Role.ACTIVATION) -> Tensor:
    """A tensor with new, uninitialised memory, on this thread's tape."""
    return Tensor(tapes.current().storage(name, tuple(shape), dtype, role))


def cast(t: Tensor, dtype: str, role: Role = Role.ACTIVATION) -> Tensor:
    """t in another float type; the cast is part of the open task."""
    name = t.storage.name if role == Role.GRADIENT else f"{t.storage.name} {dtype}"
    return tapes.current().call("cast", [t], [new(name, t.shape, dtype, role)], dtype=dtype)


def _reachable(root: Tensor) -> list[Node]:
    """All nodes on which the root depends, latest first."""
    found: dict[int, Node] = {}
    stack = [root.node] if root.node else []
    while stack:
        node = stack.pop()
        if node.number not in found:
            found[node.number] = node
            stack += [t.node for t in node.inputs if t.node is not None and t.requires_grad]
    return [found[number] for number in sorted(found, reverse=True)]


def backward(root: Tensor, gradient: Tensor | None = None, retain_graph: bool = False) -> None:
    """Emits the backward tasks of everything that `root` depends on."""
    tape = tapes.current()
    Node.latest += 1
    nodes = _reachable(root)
    for node in nodes:
        if node.walked:
            raise RuntimeError(f"an earlier backward has gone through {node.op.name} {node.out.shape}, and a second "
                               f"one would add the same gradients again; add the losses and call backward once, or "
                               f"pass retain_graph=True to the earlier one")
        node.walked = not retain_graph
    gradients = {id(root): array(np.ones((), root.dtype), name="one") if gradient is None else gradient}
    count: Counter[tuple[int, int | None]] = Counter()  # of each parameter the uses in a micro-batch still to come
    for node in nodes:
        for t in (node.inputs[i] for i in node.wanted):
            if t.requires_grad and t.node is None:
                count[id(t), node.micro_batch] += 1
                tape.remember(t)
    owned: set[int] = set()  # tensors whose gradient nothing else reads, so it may be added to in place

    for node in nodes:
        dy = gradients.pop(id(node.out), None)
        use = {}  # of each input that is a parameter: the number of this use, and the group of micro-batches
        for i in reversed(range(len(node.inputs))):
            here = id(node.inputs[i]), node.micro_batch
            if here in count:
                count[here] -= 1
                use[i] = count[here], tape.place.group
        if dy is None:
            continue
        dy = tape.dither(node, dy) if tape.dither else dy
        wanted = [i for i in node.wanted if node.inputs[i].requires_grad]
        tasks = [(Kind.W, [i for i in wanted if node.inputs[i].weight]),
                 (Kind.O, [i for i in wanted if not node.inputs[i].weight])]
        for kind, mine in tasks[::-1] if node.op.output_first else tasks:
            if not mine:
                continue
            with tape.task(node.unit, kind, node.micro_batch):
                mine = [i for i in mine if not (id(node.inputs[i]) in owned
                                                and node.op.add_grad(i, dy, gradients[id(node.inputs[i])]))]
                results = (node.op.weight_grad if kind == Kind.W else node.op.output_grad)(dy, mine) if mine else {}
                if not isinstance(results, dict):
                    raise node.op.error(f"{'weight' if kind == Kind.W else 'output'}_grad must return a dict of the "
                                        f"gradients toward inputs {mine}, not a {type(results).__name__}")
                _check_unchanged(node, dy)
                others = {id(t.storage) for t in (dy, *node.inputs, *node.op.kept)}
                for i in mine:
                    t, g = node.inputs[i], results.get(i)
                    if not isinstance(g, Tensor) or g.shape != t.shape:
                        found = f"{type(g).__name__}{getattr(g, 'shape', '')}"
                        raise node.op.error(f"the gradient toward input {i} must be a Tensor{t.shape}, not a {found}")
                    if g.dtype != t.dtype:  # the op has rounded or widened t
                        g = cast(g, t.dtype, Role.GRADIENT)
                    own = id(g.storage) not in others
                    others.add(id(g.storage))
                    if t.node is None:
                        _accumulate(t, use[i], g, own)
                        t.grad_unit = node.unit
                        continue
                    before = gradients.get(id(t))
                    if before is None:
                        gradients[id(t)] = g
                        owned |= {id(t)} if own else set()
                    else:
                        total = g if own else new(f"grad {t.storage.name}", t.shape, t.dtype, Role.GRADIENT)
                        gradients[id(t)] = tape.call("add", [before, g], [total])
                        owned.add(id(t))


def add_uses(parameters: Sequence[Tensor]) -> None:
    """Adds up the gradients of each parameter that was used more than once, in the order of use, unless this is done
    already. One task adds them for all parameters of a layer."""
    tape = tapes.current()
    groups = grouped((t.grad_unit, t) for t in parameters
                     if len(t.uses) > 1 and t.total is None and t.grad_unit is not None)
    for unit in sorted(groups, reverse=True):
        own_unit = tape.new_unit(f"sum of uses ({', '.join(t.storage.name for t in groups[unit])})")
        with tape.task(own_unit, Kind.W):
            for t in groups[unit]:
                first, *others = (t.uses[i] for i in sorted(t.uses))
                t.total, t.grad_unit = new(f"grad {t.storage.name}", t.shape, t.dtype, Role.GRADIENT), own_unit
                for g in others:
                    first = tape.call("add", [first, g], [t.total])


def _check_unchanged(node: Node, dy: Tensor) -> None:
    """Raises RuntimeError if the open task reads values that have changed since the forward pass read them."""
    for call in tapes.current().place.calls or ():
        for t in call.reads:
            if t.storage.changed >= node.number and t.storage is not dy.storage:
                raise RuntimeError(f"the gradient of {node.op.name} needs {t.storage.name} {t.storage.shape} as it was "
                                   f"in the forward pass, but an update or assign has changed it since; call backward "
                                   f"before the change, or run the forward pass again")


def _accumulate(parameter: Tensor, use: tuple[int, int], g: Tensor, own: bool) -> None:
    """Sets the gradient of this use and group or adds to it; its memory is contiguous and not shared."""
    tape = tapes.current()
    if parameter.used:
        parameter.grad = None
    parameter.used, parameter.total = False, None
    if (before := parameter.uses.get(use)) is not None:
        tape.call("add", [before, g], [before])
    elif own and g.contiguous:
        parameter.uses[use] = g
    else:
        copy = new(f"grad {parameter.storage.name}", parameter.shape, parameter.dtype, Role.GRADIENT)
        parameter.uses[use] = tape.call("copy", [g], [copy])
