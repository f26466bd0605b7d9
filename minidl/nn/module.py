"""Module: a layer or a network; parameters and states by name, train or eval mode. And the layers of any network:
linear, dropout, flatten."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from .. import ops
from ..autograd import random
from ..autograd import tape as tapes
from ..autograd.arguments import Float, Rate, Size, check_arguments, checked
from ..autograd.hints import hint
from ..autograd.initial import constant
from ..autograd.recording import Watched
from ..autograd.tensor import FLOATS, Parameter, ShapeError, Tensor, array, host_storage
from ..core.graph import Role
from ..core.tasks import strides_of
from ..ops.shape import axis_of

__all__ = ["Dropout", "Flatten", "Identity", "Linear", "Module", "ModuleDict", "ModuleList", "PReLU",
           "Sequential", "Unflatten", "state"]


class Module(Watched):
    """A layer or a network. Its parameters, its states (tensors that a step changes, without a gradient) and other
    modules are attributes."""

    training = True
    input_shape: tuple[int, ...] = ()  #: of a network: the shape of one sample
    input_dtype: str = "float32"  #: of a network: int64 if it reads tokens, else a float
    classes: int = 0  #: of a network: the number of classes; of tokens, the size of the vocabulary
    vocabulary: int = 0  #: of a network that reads tokens and tells classes apart: how many tokens it knows
    objective: str = "classification"  #: of a network: its task in training, see training/objectives.py
    sliceable = False  #: of a network: whether forward(x, past) reads sequences slice by slice, see nn/sequence.py
    time_steps = 1  #: of a network: how often it reads each sample, by forward(x, past), with one `past()` per sample
    at_once = False  #: of such a network: whether no gradient flows between time steps, so each has its own backward
    others: Mapping[str, str] = {}  #: of a network: another objective -> the argument that makes it the objective
    tied: Mapping[str, str] = {}  #: of a network: names that files have for a parameter a second time -> its own name
    config: Mapping[str, Any] = {}  #: of a network: what its config.json of transformers or timm says, if any
    _name = ""

    def past(self) -> Any:
        """The state before the first time step, for a network that has several."""
        raise NotImplementedError(f"{type(self).__name__} has no past")

    def with_backward(self, micro_batch: int) -> Sequence[int]:
        """The time steps that have a backward pass, in this micro-batch of every rank: ranks sum the same gradients."""
        return range(self.time_steps)

    def loss(self, loss: Any, output: Any) -> Any:
        """The loss to train a network with, from the objective's loss of its output."""
        return loss

    def __init_subclass__(cls) -> None:
        """Layers of this package check what they are made with."""
        if cls.__module__.startswith(f"{__package__}.") and "__init__" in vars(cls):
            setattr(cls, "__init__", checked(vars(cls)["__init__"], first=True))  # noqa: B010  (a checker knows no other way)

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, Module) and not value._name:
            object.__setattr__(value, "_name", name)
        if isinstance(value, Parameter) and not value.name:
            value.name = value.storage.name = name
        held = object.__getattribute__(self, "__dict__")  # which no recording notes
        before = held.get(name)
        if isinstance(value, Tensor) and isinstance(before, Tensor) and not isinstance(value, Parameter):
            if isinstance(before, Parameter):
                raise TypeError(f"{name} is a parameter of a {type(self).__name__}, and a tensor in its place would be "
                                f"none: {name}.assign(values) replaces its values; del it first for any tensor")
            if before.storage.role.persistent:
                held["_stay"] = {name, *held.get("_stay", ())}  # states that have been set to results
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        """Called for what a module has not."""
        raise AttributeError(f"a {type(self).__name__} has no {name!r}{hint('model', name)}")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no forward")

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        with tapes.label(self._name or type(self).__name__.lower()):
            try:
                return self.forward(*map(_tensor, inputs), **{name: _tensor(v) for name, v in named.items()})
            except (TypeError, AttributeError, ValueError) as error:
                if error.__traceback__ is None or error.__traceback__.tb_next is not None:  # it arose within forward
                    if self.forward.__module__.startswith(f"{__package__}."):
                        check_arguments(type(self).__name__, self.forward, inputs, named)
                    raise
                takes = inspect.signature(self.forward)
                try:
                    takes.bind(*inputs, **named)
                except TypeError as wrong:
                    raise TypeError(f"{type(self).__name__}: {wrong}; its forward takes "
                                    f"({', '.join(takes.parameters)})") from None
                raise

    def __repr__(self) -> str:
        """The modules below, a line each, with the shapes of their own parameters and states."""
        own = [f"{name} {tuple(t.shape)}" for name, t in vars(self).items() if isinstance(t, Tensor)]
        below = [f"  ({name}): " + repr(child).replace("\n", "\n  ") for name, child in self.named_children()]
        return f"{type(self).__name__}({', '.join(own)}" + ("\n" + "\n".join(below) + "\n)" if below else ")")

    # ----------------------------------------------------------------------------------------------------- inventory
    def named_children(self) -> Iterator[tuple[str, Module]]:
        for name, value in vars(self).items():
            if isinstance(value, Module):
                yield name, value

    def children(self) -> Iterator[Module]:
        return (child for _, child in self.named_children())

    def modules(self) -> Iterator[Module]:
        """This module and all below it."""
        return (module for _, module in self.named_modules())

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        """This module and all below it, with their dotted names; its own is empty."""
        yield prefix, self
        for name, child in self.named_children():
            yield from child.named_modules(f"{prefix}.{name}" if prefix else name)

    def apply(self, function: Callable[[Module], Any]) -> Module:
        """Calls the function on all modules below, then on this one. Returns it."""
        for child in self.children():
            child.apply(function)
        function(self)
        return self

    def _put(self, name: str, module: Module) -> None:
        """Keeps a module under this name. Raises TypeError for anything else, KeyError for the name of a method."""
        if hasattr(type(self), name):
            raise KeyError(f"a {type(self).__name__} has a method {name!r}; give the module another name")
        if not isinstance(module, Module):
            raise TypeError(f"{type(self).__name__}: {name} is a {type(module).__name__}; use a module, like nn.ReLU()")
        setattr(self, name, module)

    def register_buffer(self, name: str, value: Any) -> None:
        """Keeps an array or a tensor as a state of this name: see `state`."""
        setattr(self, name, state(value.numpy() if isinstance(value, Tensor) else value, name))

    def requires_grad_(self, requires_grad: bool = True) -> Module:
        """Sets whether the parameters get gradients. Returns the module."""
        for p in self.parameters():
            p.requires_grad = requires_grad
        return self

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """The states by dotted name."""
        return ((name, t) for name, t in self.named_tensors() if not isinstance(t, Parameter))

    def named_tensors(self, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
        """Parameters and states by dotted name, in the order in which they were assigned; not other results of ops."""
        for name, value in vars(self).items():
            if isinstance(value, Tensor) and (value.storage.role.persistent or name in vars(self).get("_stay", ())):
                yield prefix + name, value
            elif isinstance(value, Module):
                yield from value.named_tensors(f"{prefix}{name}.")

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Each parameter once, under its first name."""
        seen: set[int] = set()
        for name, value in self.named_tensors():
            if isinstance(value, Parameter) and id(value) not in seen:
                seen.add(id(value))
                yield name, value

    def parameters(self) -> list[Parameter]:
        return [p for _, p in self.named_parameters()]

    def zero_grad(self) -> None:
        """Drops the gradients of all parameters."""
        for p in self.parameters():
            p.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Copies of parameters and states as NumPy arrays; a shared parameter appears under each of its names."""
        return {name: state_array(t).copy() for name, t in self.named_tensors()}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Copies these values to parameters and states. Raises ShapeError, before anything is changed, where names,
        shapes or types do not fit, and TypeError for what is no table of arrays."""
        if not isinstance(values, Mapping):
            raise TypeError(f"a state is a table of arrays by name, as state_dict gives, not {type(values).__name__}; "
                            f"minidl.training.weights.load(path, model) reads a file")
        mine = dict(self.named_tensors())
        missing, extra = sorted(mine.keys() - values.keys()), sorted(values.keys() - mine.keys())
        if missing or extra:
            raise ShapeError(f"the state does not fit this model: missing {missing[:3] or 'none'}, "
                             f"unknown {extra[:3] or 'none'}")
        for name, t in mine.items():
            try:
                value, shape = np.asarray(values[name]), state_shape(t)
            except (TypeError, RuntimeError) as error:
                raise TypeError(f"{name} is no array: {error}; torch's t.detach().float() is one") from None
            if value.shape != shape or str(value.dtype) != t.dtype:
                raise ShapeError(f"{name} is {value.dtype} {value.shape} in the state, {t.dtype} {shape} in the model")
        for name, t in mine.items():
            put(t, values[name])

    # ---------------------------------------------------------------------------------------------------------- modes
    def train(self, mode: bool = True) -> Module:
        for module in self.modules():
            module.training = mode
        return self

    def eval(self) -> Module:
        return self.train(False)

    def astype(self, dtype: str) -> Module:
        """Converts parameters and float states in place. Raises ValueError for an unknown type."""
        if dtype not in FLOATS:
            raise ValueError(f"unknown type {dtype!r}; known: {', '.join(FLOATS)}")
        for _, t in self.named_tensors():
            if t.dtype in FLOATS and t.dtype != dtype:
                initial = t.storage.initial
                value = t.numpy().astype(dtype) if initial is None else initial[1].astype(dtype)
                name, role = t.storage.name, t.storage.role
                t.storage = host_storage(value, role, name)
                t.parts, t.strides, t.offset = (t.storage,), strides_of(t.shape), 0
                tapes.changed(t, "storage")
        return self


def _tensor(value: Any) -> Any:
    """An array as a tensor; anything else as it is."""
    return array(value) if isinstance(value, np.ndarray) else value


class ModuleList(Module):
    """A list of modules, whose parameters belong to the network. The network calls them itself."""

    def __init__(self, modules: Iterable[Module] | dict[str, Module] = ()) -> None:
        for name, module in (modules if isinstance(modules, dict) else dict(enumerate(modules))).items():
            self._put(str(name), module)

    def append(self, module: Module) -> None:
        self._put(str(len(self)), module)

    def __len__(self) -> int:
        return sum(1 for _ in self.children())

    __iter__ = Module.children

    def __getitem__(self, index: int) -> Module:
        return list(self)[index]


class Sequential(ModuleList):
    """Modules one after the other, or one dictionary of them, whose names are theirs."""

    def __init__(self, *layers: Any) -> None:
        super().__init__(layers[0] if len(layers) == 1 and isinstance(layers[0], dict) else layers)

    def __getitem__(self, index: int | slice) -> Module:
        """One layer, or for a slice a `Sequential` of the same layers."""
        layers = list(self)[index]
        return Sequential(*layers) if isinstance(layers, list) else layers

    def forward(self, x: Any, *others: Any) -> Any:
        """Each layer reads the result of the one before; `others` go to every layer."""
        for layer in self:
            x = layer(x, *others)
        return x


def _axes(t: Tensor) -> tuple[int, ...]:
    """The published order of a tensor's axes, which is how a state dict has them."""
    return getattr(t, "axes", None) or tuple(range(t.ndim))


def state_array(t: Tensor) -> Any:
    """The array of a tensor as in a state dict: a view."""
    return in_state_order(t, t.numpy())


def in_state_order(t: Tensor, array: Any) -> Any:
    """An array with the axes of a tensor as in a state dict: a view."""
    return array.transpose(_axes(t))


def state_shape(t: Tensor) -> tuple[int, ...]:
    """The shape of a tensor as in a state dict."""
    return tuple(t.shape[a] for a in _axes(t))


def put(t: Tensor, value: Any) -> None:
    """Copies an array to a tensor; its axes are in the published order."""
    t.assign(np.transpose(value, np.argsort(_axes(t))))


class ModuleDict(Module, Mapping[str, Module]):
    """Modules by name, whose parameters belong to the network. The network calls them itself."""

    def __init__(self, modules: Mapping[str, Module] | None = None) -> None:
        for name, module in (modules or {}).items():
            self[name] = module

    __setitem__ = Module._put

    def __getitem__(self, name: str) -> Module:
        return dict(self.named_children())[name]

    __len__ = ModuleList.__len__

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self.named_children())

    __eq__, __hash__ = Module.__eq__, Module.__hash__


def state(value: Any, name: str) -> Tensor:
    """A state: a tensor that a step changes, without a gradient."""
    return Tensor(host_storage(np.asarray(value), Role.STATE, name))


# --------------------------------------------------------------------------------------------------------------- layers
class Linear(Module):
    """x (..., inputs) -> (..., outputs); weight (outputs, inputs), uniform in +-1/sqrt(inputs) as in torch."""

    def __init__(self, in_features: Size, out_features: Size, bias: bool = True, *, dtype: Float = "float32") -> None:
        bound = 1 / math.sqrt(in_features)
        self.weight = Parameter(random.uniform(bound, (out_features, in_features), dtype))
        if bias:
            self.bias = Parameter(random.uniform(bound, out_features, dtype))

    def forward(self, x: Tensor) -> Tensor:
        return ops.linear(x, self.weight, getattr(self, "bias", None))


class Dropout(Module):
    """Drops elements with probability `p` while training."""

    def __init__(self, p: Rate = 0.5) -> None:
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return ops.dropout(x, self.p) if self.training else x


class Flatten(Module):
    """(n, ...) -> (n, the product of the other lengths)."""

    def forward(self, x: Tensor) -> Tensor:
        return ops.flatten(x, 1)


class Identity(Module):
    """x; whatever arguments it is made with."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def forward(self, x: Tensor) -> Tensor:
        return x


class PReLU(Module):
    """x above 0, a parameter times x below: one for all, or one for each of the channels, which are last."""

    def __init__(self, num_parameters: Size = 1, init: float = 0.25, *, dtype: Float = "float32") -> None:
        self.weight = Parameter(constant(init, num_parameters, dtype))

    def forward(self, x: Tensor) -> Tensor:
        return ops.prelu(x, self.weight)


class Unflatten(Module):
    """The axis `dim` as several axes of these lengths, of which one may be -1."""

    def __init__(self, dim: int, unflattened_size: Sequence[int]) -> None:
        self.dim, self.sizes = dim, tuple(unflattened_size)

    def forward(self, x: Tensor) -> Tensor:
        dim = axis_of(x, self.dim, "Unflatten")
        sizes = [x.shape[dim] // max(-math.prod(self.sizes), 1) if n == -1 else n for n in self.sizes]
        return ops.reshape(x, (*x.shape[:dim], *sizes, *x.shape[dim + 1 :]))
