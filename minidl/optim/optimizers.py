"""Optimizers: one update task for each layer, so that a layer's update can run as soon as its gradient is ready.

Values that vary from step to step are read from buffers: `lr`, the loss scale, the clip factor, Adam's step and powers.
`step` uses up the gradients: the next backward starts new ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..autograd import tape as tapes
from ..autograd.hints import hint
from ..autograd.initial import constant
from ..autograd.recording import Watched
from ..autograd.tensor import Parameter, Tensor, add_uses, host_storage, new
from ..core.columns import grouped
from ..core.graph import Role
from ..core.machine import is_number
from ..core.tasks import Kind
from ..devices import device as devices
from .grad_scaler import GradScaler

#: the parameters that an optimizer trains, or groups of them
Parameters = Iterable[Parameter] | Iterable[Mapping[str, Any]]


class ParameterGroup:
    """Parameters with a learning rate of their own, in a buffer, and what else differs (`own`). As in torch,
    `group["lr"]` is read and set."""

    def __init__(self, group: Mapping[str, Any], lr: float, first: float, dtype: str, number: int) -> None:
        self.parameters: list[Parameter] = group["params"]
        self.own = {name: group[name] for name in ("weight_decay",) if name in group}
        for value in self.own.values():
            _check("the weight decay", value, dtype)
        self.rate = Tensor(host_storage(np.zeros(1, dtype), Role.SCALAR, f"lr.{number}" if number else "lr"))
        self.lr = given = group.get("lr", lr)
        self.ratio = 1.0 if given == first else given / first if first else np.inf  #: to the first group's

    @property
    def lr(self) -> float:
        return float(self.rate.numpy()[0])

    @lr.setter
    def lr(self, value: float) -> None:
        _check("the learning rate", value, self.rate.dtype)
        if tapes.current().recording:
            raise self.rate.storage.no_value()
        # written without settling a step: late tasks have their own copy of the host's scalars
        device = devices.of(self.rate.storage.data)
        device.write(device.array(self.rate.storage.data, self.rate.view_of(0)), value)

    def __getitem__(self, name: str) -> Any:
        return {"params": self.parameters, "lr": self.lr, **self.own}[name]

    def __setitem__(self, name: str, value: Any) -> None:
        if name != "lr":
            raise TypeError(f"only the lr of a group can change; {name} is part of recorded steps, so give it when the "
                            f"optimizer is made")
        self.lr = value


def groups_of(parameters: Parameters) -> list[Mapping[str, Any]]:
    """The groups that were given, or all parameters as one. Raises ValueError for what a group cannot have."""
    given = _listed(parameters)
    groups = [g for g in given if isinstance(g, Mapping)]
    if groups and len(groups) < len(given):
        raise ValueError("the optimizer takes parameters or groups of them, not both")
    for i, group in enumerate(groups):
        if "params" not in group or group.keys() - {"params", "lr", "weight_decay"}:
            raise ValueError(f"group {i} must have params, and may have lr and weight_decay; it has "
                             f"{', '.join(map(str, group)) or 'nothing'}")
    found: list[Mapping[str, Any]] = [{**group, "params": _listed(group["params"])}
                                      for group in groups or [{"params": given}]]
    for p in (p for group in found for p in group["params"] if not isinstance(p, Parameter)):
        raise ValueError(f"the optimizer takes parameters, such as model.parameters(), not {type(p).__name__}")
    return found


def _listed(given: Any) -> list[Any]:
    """One parameter, which would yield its rows, as a list of it; others as a list."""
    return [given] if isinstance(given, Parameter) else list(given)


class Optimizer(Watched):
    """Holds parameters, their learning rate in a buffer, and named states per parameter.

    Parameters may come in groups: dictionaries with `params`, and if they differ with `lr` and `weight_decay`.

    With `max_norm`, all gradients are scaled down if their global norm is larger. `norm`: the one of the last step.
    With a `scaler`, gradients are first divided by the loss scale, and the step changes nothing if one of them is not
    finite.
    """

    def __init__(self, parameters: Parameters, lr: float, max_norm: float | None = None,
                 scaler: GradScaler | None = None) -> None:
        self.parameters: list[Parameter] = []
        self.param_groups: list[ParameterGroup] = []
        self.states: dict[str, list[Tensor]] = {}
        self._add(groups_of(parameters), lr)
        if max_norm is not None and not max_norm > 0:
            raise ValueError(f"the norm to clip at is {max_norm}; it must be above 0")
        self.max_norm, self.scaler = max_norm, scaler
        self._skip: list[Tensor] = []  #: the flag that makes the present step change nothing, if there is one
        self._norm = Tensor(host_storage(np.zeros(1), Role.SCALAR, "gradient norm"))
        self._factor = Tensor(host_storage(np.ones(1, self.parameters[0].dtype), Role.SCALAR, "clip factor"))

    def add_param_group(self, param_group: Mapping[str, Any]) -> None:
        """Trains the parameters of another group as well, such as layers that were frozen; by default with the first
        group's present learning rate. Record steps again afterwards. Raises ValueError as the optimizer does."""
        self._add(groups_of([param_group]), self.lr)

    def _add(self, groups: Sequence[Mapping[str, Any]], lr: float) -> None:
        every = [*self.parameters, *(p for group in groups for p in group["params"])]
        if not every:
            raise ValueError("the optimizer needs at least one parameter; lists of layers must be nn.ModuleList")
        if len({id(p) for p in every}) < len(every):
            raise ValueError("a parameter is given to the optimizer twice")
        types = {p.dtype for p in every}
        if len(types) > 1:
            raise ValueError(f"the parameters have several types: {', '.join(sorted(types))}")
        first, begin = self.lr if self.param_groups else groups[0].get("lr", lr), len(self.param_groups)
        made = [ParameterGroup(group, lr, first, every[0].dtype, i) for i, group in enumerate(groups, begin)]
        self.parameters, self.param_groups = every, [*self.param_groups, *made]
        self._group_of = [group for group in self.param_groups for _ in group.parameters]
        self.states = {name: [*own, *self._zeros(name, every[len(own) :])] for name, own in self.states.items()}

    @property
    def lr(self) -> float:
        """The learning rate of the first group in the next step. It can be set at any time; recorded steps read
        it as well. Other groups keep the ratio to it that they were made with."""
        return self.param_groups[0].lr

    @lr.setter
    def lr(self, value: float) -> None:
        _check("the learning rate", value, self.parameters[0].dtype)
        if any(group.ratio == np.inf for group in self.param_groups):
            raise ValueError("the first group had the learning rate 0, to which others have no ratio, when they were "
                             "made; set each group's own: optimizer.param_groups[i]['lr']")
        for group in self.param_groups:
            group.lr = value * group.ratio

    @property
    def norm(self) -> float:
        """The global norm of the last step's gradients before they were clipped; 0 without `max_norm`."""
        return float(self._norm.numpy()[0])

    def _checked(self, *names: str, rates: Sequence[str] = ()) -> None:
        """Checks these arguments, of which `rates` are below 1, and makes the states that they ask for."""
        for name in names:
            _check(f"the {name.replace('_', ' ')}", getattr(self, name), self.parameters[0].dtype)
        for name in rates:
            values = getattr(self, name)
            if not all(is_number(value) and 0 <= value < 1 for value in (values if name == "betas" else [values])):
                are = "are" if name == "betas" else "is"
                raise ValueError(f"{name} {are} {values}; it must be at least 0 and below 1")
        self.states_of(0)

    def _zeros(self, name: str, parameters: Sequence[Parameter]) -> list[Tensor]:
        return [Tensor(host_storage(constant(0, p.shape, p.dtype), Role.STATE, f"{name} {p.name}")) for p in parameters]

    def state_names(self) -> Sequence[str]:
        """The states that the present arguments need, in the order of the kernel."""
        return ()

    def states_of(self, i: int) -> list[Tensor]:
        """The states of parameter i that the present arguments need."""
        for name in self.state_names():
            if name not in self.states:
                self.states[name] = self._zeros(name, self.parameters)
        return [self.states[name][i] for name in self.state_names()]

    def constants(self, i: int, *names: str) -> dict[str, Any]:
        """These arguments for parameter i, whose group may have its own."""
        return {name: getattr(self, name) for name in names} | self._group_of[i].own

    def groups(self) -> Iterator[tuple[int, list[int]]]:
        """(unit, indices of the parameters whose gradients it has computed), in the order of the parameters."""
        tape = tapes.current()
        for p in self.parameters:
            if p.dtype != self._factor.dtype:
                raise RuntimeError(f"{p.name} is {p.dtype}, and the optimizer was made for {self._factor.dtype}: make "
                                   f"it after astype")
            tape.remember(p)
        add_uses([p for p in self.parameters if not p.used])
        groups = grouped((p.grad_unit, i) for i, p in enumerate(self.parameters)
                         if p.uses and not p.used and p.grad_unit is not None)
        if not groups:
            raise RuntimeError("no parameter has a gradient; call backward first. A recorded step drops its gradients "
                               "when it ends: update within it, or return them (parameter.grad) and assign them again")
        yield from groups.items()

    if not TYPE_CHECKING:  # a checker shall still know which names there are
        def __getattr__(self, name: str) -> Any:
            """Called for what an optimizer has not."""
            raise AttributeError(f"an optimizer has no {name!r}{hint('opt', name)}")

    def step(self) -> None:
        """Updates every parameter that has a gradient."""
        tape = tapes.current()
        groups = list(self.groups())
        every = sorted(i for _, members in groups for i in members)
        self._skip = [self.scaler.unscale([self.gradient(i) for i in every])] if self.scaler else []
        self.before_updates(every)
        if self.max_norm is not None:
            self._find_factor(every)
        factor = Tensor(self._factor.storage, ())
        for unit, members in groups:
            with tape.task(unit, Kind.U):
                for i in members:
                    if self.max_norm is not None:
                        tape.call("mul", [self.gradient(i), factor], [self.gradient(i)])
                    self.update(i)
        for i in every:
            tape.spend(self.parameters[i])
        tape.rounded.clear()
        tape.end_step()

    def zero_grad(self) -> None:
        """Drops all gradients. After `step` that is not needed: it has used them up."""
        for p in self.parameters:
            p.grad = None

    def gradient(self, i: int) -> Tensor:
        """The gradient of parameter i, which must have one."""
        g = self.parameters[i].grad
        assert g is not None
        return g

    def _find_factor(self, members: list[int]) -> None:
        """One task for the sum of squares of each gradient, and one that adds them in the order of the parameters."""
        tape = tapes.current()
        squares = []
        for i in members:
            squares.append(new(f"square sum {self.parameters[i].name}", [1], "float64", Role.GRADIENT))
            with tape.task(tape.new_unit(f"norm {self.parameters[i].name}"), Kind.U):
                tape.call("square_sum", [self.gradient(i)], squares[-1:])
        with tape.task(tape.new_unit("clip"), Kind.U):
            tape.call("clip_factor", squares, [self._norm, self._factor], limit=self.max_norm)

    def before_updates(self, members: list[int]) -> None:
        """Emits the task on which all updates of a step depend, if there is one. `members` have a gradient."""

    def update(self, i: int) -> None:
        """Calls the kernels that update parameter i."""
        raise NotImplementedError

    def call(self, kernel: str, reads: Sequence[Tensor], writes: Sequence[Tensor], **constants: Any) -> None:
        """A kernel call of an update; it changes nothing if the step is skipped."""
        tapes.current().call(kernel, [*reads, *self._skip], writes, **constants,
                             **({"guarded": True} if self._skip else {}))

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors that a checkpoint must hold, by name: the learning rate and all states."""
        for i, group in enumerate(self.param_groups):
            yield f"lr.{i}" if i else "lr", group.rate
        yield from ((f"{name}.{i}", state) for name, states in self.states.items() for i, state in enumerate(states))
        if self.scaler:
            yield from self.scaler.named_tensors()


class SGD(Optimizer):
    """v = momentum v + g + weight_decay p; p -= lr v (with `nesterov`: p -= lr (g + momentum v)), as in torch."""

    def __init__(self, parameters: Parameters, lr: float, momentum: float = 0.0, *, weight_decay: float = 0.0,
                 nesterov: bool = False, max_norm: float | None = None, scaler: GradScaler | None = None) -> None:
        super().__init__(parameters, lr, max_norm, scaler)
        if nesterov and not momentum:
            raise ValueError("nesterov needs momentum")
        self.momentum, self.weight_decay, self.nesterov = momentum, weight_decay, nesterov
        self._checked("weight_decay", rates=("momentum",))

    def state_names(self) -> Sequence[str]:
        return ["momentum"] * bool(self.momentum)

    def update(self, i: int) -> None:
        p, states = self.parameters[i], self.states_of(i)
        self.call("sgd", [p, self.gradient(i), self._group_of[i].rate, *states], [p, *states],
                  **self.constants(i, "momentum", "weight_decay", "nesterov"))


class Adam(Optimizer):
    """Adam (Kingma, Ba 2015) as in torch; weight decay is added to the gradient. `rule`: its kernel. Each parameter
    counts the steps in which it had a gradient: a row of `powers`, `first` before there are any."""

    rule, decoupled, first = "adam", False, [0.0, 1.0, 1.0]
    arguments: Sequence[str] = ("eps", "weight_decay", "decoupled")  #: of the kernel, besides the betas

    def __init__(self, parameters: Parameters, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
                 eps: float = 1e-8, weight_decay: float = 0.0, *, max_norm: float | None = None,
                 scaler: GradScaler | None = None) -> None:
        super().__init__(parameters, lr, max_norm, scaler)
        if np.shape(np.asarray(betas, object)) != (2,):
            raise ValueError(f"betas are {betas}; they must be two numbers, at least 0 and below 1")
        self.betas, self.eps, self.weight_decay = betas, eps, weight_decay
        self._checked("weight_decay", "eps", rates=("betas",))

    def _add(self, groups: Sequence[Mapping[str, Any]], lr: float) -> None:
        before = [*self.powers.numpy()] if self.parameters else []
        super()._add(groups, lr)
        rows = [*before, *[self.first] * (len(self.parameters) - len(before))]
        self.powers: Tensor = Tensor(host_storage(np.array(rows), Role.SCALAR, f"{self.rule} powers"))

    def state_names(self) -> Sequence[str]:
        return "mean", "square"

    def tick(self) -> dict[str, float]:
        """The constants of the kernel that counts steps."""
        return dict(zip(("beta1", "beta2"), self.betas, strict=True))

    def before_updates(self, members: list[int]) -> None:
        tape = tapes.current()
        with tape.task(tape.new_unit(self.rule), Kind.U):
            for run in np.split(members, np.flatnonzero(np.diff(members) > 1) + 1):  # of rows one below the other
                rows = self._powers(int(run[0]), len(run))
                tape.call(f"{self.rule}_tick", [rows, *self._skip], [rows], **self.tick())

    def _powers(self, i: int, *count: int) -> Tensor:
        """The row of parameter i, or so many rows from it on."""
        return self.powers.seen((*count, len(self.first)), begin=i * len(self.first))

    def update(self, i: int) -> None:
        p, states = self.parameters[i], self.states_of(i)
        self.call(self.rule, [p, self.gradient(i), *states, self._group_of[i].rate, self._powers(i)], [p, *states],
                  **dict(zip(("beta1", "beta2"), self.betas, strict=True)), **self.constants(i, *self.arguments))

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from super().named_tensors()
        yield "powers", self.powers


class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov, Hutter 2019): p -= lr weight_decay p, apart from the gradient."""

    decoupled = True

    def __init__(self, parameters: Parameters, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
                 eps: float = 1e-8, weight_decay: float = 0.01, *, max_norm: float | None = None,
                 scaler: GradScaler | None = None) -> None:
        super().__init__(parameters, lr, betas, eps, weight_decay, max_norm=max_norm, scaler=scaler)


class NAdamW(AdamW):
    """AdamW with Nesterov's momentum (Dozat 2016), as torch's NAdam with decoupled weight decay. The defaults are those
    with which pipelines on delayed gradients converge (Ajanthan et al. 2025, "Nesterov method for asynchronous pipeline
    parallel optimization": beta1 0.99, lr 3e-4; there with warm-up, a cosine and clipping at 10 on each stage)."""

    rule, arguments, first = "nadam", ("eps", "weight_decay"), [0.0, 1.0, 1.0, 0.0, 0.0]

    def __init__(self, parameters: Parameters, lr: float = 3e-4, betas: tuple[float, float] = (0.99, 0.999),
                 eps: float = 1e-8, weight_decay: float = 0.01, momentum_decay: float = 4e-3, *,
                 max_norm: float | None = None, scaler: GradScaler | None = None) -> None:
        super().__init__(parameters, lr, betas, eps, weight_decay, max_norm=max_norm, scaler=scaler)
        self.momentum_decay = momentum_decay
        self._checked("momentum_decay")

    def tick(self) -> dict[str, float]:
        return super().tick() | {"decay": float(self.momentum_decay)}


class RMSprop(Optimizer):
    """v = alpha v + (1 - alpha) g^2; u = momentum u + g / (sqrt(v) + eps); p -= lr u (Tieleman, Hinton 2012), as in
    torch; weight decay is added to the gradient. `centered`: sqrt(v - a^2), with a = alpha a + (1 - alpha) g."""

    def __init__(self, parameters: Parameters, lr: float = 1e-2, alpha: float = 0.99, eps: float = 1e-8,
                 weight_decay: float = 0.0, momentum: float = 0.0, centered: bool = False, *,
                 max_norm: float | None = None, scaler: GradScaler | None = None) -> None:
        super().__init__(parameters, lr, max_norm, scaler)
        self.alpha, self.eps, self.momentum, self.weight_decay = alpha, eps, momentum, weight_decay
        self.centered = bool(centered)
        self._checked("weight_decay", "eps", rates=("alpha", "momentum"))

    def state_names(self) -> Sequence[str]:
        return ["square", *["mean"] * bool(self.centered), *["momentum"] * bool(self.momentum)]

    def update(self, i: int) -> None:
        p, states = self.parameters[i], self.states_of(i)
        self.call("rmsprop", [p, self.gradient(i), *states, self._group_of[i].rate], [p, *states],
                  **self.constants(i, "alpha", "eps", "momentum", "weight_decay", "centered"))


def _check(what: str, value: Any, dtype: str) -> None:
    """Raises ValueError unless the value is a number from 0 up to the largest of the parameters' type."""
    if (not isinstance(value, int | float | np.integer | np.floating) or isinstance(value, bool)
        or not 0 <= value <= float(np.finfo(dtype).max)):
        raise ValueError(f"{what} is {value!r}; it must be a finite number >= 0 within the range of {dtype}")
