"""Random training steps as Python text: the cases of campaigns.

A step has branches, shared and unused parameters, unused inputs, views, dropout, norms, several losses, backward
passes, optimizers and rounds of micro-batches, and it may return any values. Its text calls functions by name, so it
can be read, run eagerly, recorded, or run with other functions under these names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from minidl import ops, optim
from minidl.autograd.tape import micro_batch, no_grad
from minidl.autograd.tensor import Parameter, array
from minidl.testing.fuzz import Training, nothing

Shape = tuple[int, ...]
#: an expression, its shape, whether it depends on a parameter; and the `with` that it is in, if there is one
Made = tuple[str, Shape, bool] | tuple[str, Shape, bool, str]
OPTIMIZERS: dict[str, Callable[..., optim.Optimizer]] = {"SGD": optim.SGD, "Adam": optim.Adam, "AdamW": optim.AdamW}
CALLS = 3  #: how often a step is called


@dataclass
class StepSource:
    """A step as text: `step` takes the inputs of each micro-batch in turn (x, u, labels y). `parameters`, `constants`:
    by name. `norms`: name -> channels of its running statistics. `optimizers`: class, arguments, parameters."""

    source: str = ""
    dtype: str = "float32"
    samples: int = 1
    width: int = 1
    classes: int = 2
    micro_batches: int = 1
    scaled: bool = False
    rates: bool = False
    parameters: dict[str, Any] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)
    norms: dict[str, int] = field(default_factory=dict)
    optimizers: dict[str, tuple[str, dict[str, Any], list[str]]] = field(default_factory=dict)

    def step(self, names: Mapping[str, Any]) -> Callable[..., Any]:
        """The step, with these functions under the names that it calls."""
        scope = dict(names)
        exec(self.source, scope)
        return scope["step"]

    def inputs(self, seed: int) -> list[tuple[Any, ...]]:
        """The inputs of each call."""
        random = np.random.default_rng([seed, 2])
        shape = (self.samples, self.width)
        return [tuple(a for _ in range(self.micro_batches) for a in (
            random.normal(size=shape).astype(self.dtype), random.normal(size=shape).astype(self.dtype),
            random.integers(0, self.classes, self.samples))) for _ in range(CALLS)]

    def training(self, seed: int) -> Training:
        """A training of this step, with new parameters."""
        parameters = {name: Parameter(value.astype(self.dtype), name) for name, value in self.parameters.items()}
        constants = {name: array(value.astype(self.dtype)) for name, value in self.constants.items()}
        norms = {name: [array(np.zeros(c, self.dtype)), array(np.ones(c, self.dtype)), array(np.array(0))]
                 for name, c in self.norms.items()}
        scaler = optim.GradScaler(8.0, growth_interval=2) if self.scaled else None
        optimizers = {name: OPTIMIZERS[kind]([parameters[p] for p in members], **arguments, scaler=scaler)
                      for name, (kind, arguments, members) in self.optimizers.items()}

        def backward(loss: Any) -> None:
            loss.backward(scaler.scale if scaler else None, retain_graph=True)  # it may walk twice

        def update(optimizer: Any) -> None:
            if any(p.grad is not None and not p.used for p in optimizer.parameters):
                optimizer.step()

        def drop(*dropped: Any) -> None:
            for p in dropped:
                p.grad = None

        names = {**{name: getattr(ops, name) for name in ops.__all__}, **parameters, **constants, **norms, **optimizers,
                 "array": array, "cast": lambda t: ops.astype(ops.astype(t, "float64"), self.dtype),
                 "micro_batch": micro_batch, "no_grad": no_grad, "backward": backward, "drop": drop, "update": update,
                 "detach": lambda t: t.detach(), "grad": lambda p: p if p.grad is None else p.grad}

        def before(call: int) -> None:
            for optimizer in optimizers.values():
                optimizer.lr = 0.1 / (call + 1)

        running = [t for three in norms.values() for t in three]
        return Training(self.step(names), self.inputs(seed), [*parameters.values(), *running, *optimizers.values()],
                        before if self.rates else nothing)


def training(seed: int) -> Training:
    """A training with a random step; everything follows from the seed."""
    return draw(seed).training(seed)


def draw(seed: int) -> StepSource:
    """A random step; everything follows from the seed."""
    return _Writer(np.random.default_rng(seed)).program()


@dataclass
class _Value:
    name: str
    shape: Shape
    trained: bool  #: whether it depends on a parameter


class _Writer:
    """Writes the text of one step, line by line."""

    def __init__(self, random: np.random.Generator) -> None:
        self.random, self.made, self.lines = random, StepSource(), list[str]()
        self.values: list[_Value] = []
        self.beside, self.sides = list[_Value](), random.spawn(1)[0]  # which leaves the other draws as they are
        self.count, self.kind = 0, "linear"

    # ------------------------------------------------------------------------------------------------------- choices
    def chance(self, probability: float) -> bool:
        return bool(self.random.random() < probability)

    def among(self, things: Any) -> Any:
        return things[int(self.random.integers(len(things)))]

    def some(self, things: Any, least: int = 0) -> list[Any]:
        """At least `least` of them, each at most once, in a random order."""
        things = list(things)
        count = int(self.random.integers(least, len(things) + 1))
        return [things[i] for i in self.random.permutation(len(things))[:count]]

    def number(self, least: int, most: int) -> int:
        return int(self.random.integers(least, most + 1))

    def width(self) -> int:
        """The width of a layer: often the inputs' width, so that branches can be added."""
        return self.made.width if self.chance(0.6) else self.number(1, 6)

    # --------------------------------------------------------------------------------------------------------- names
    def parameter(self, shape: Shape, positive: bool = False) -> str:
        """The name of a new parameter, or of an earlier one of this shape."""
        shared = [name for name, value in self.made.parameters.items() if value.shape == shape]
        if shared and self.chance(0.3):
            return str(self.among(shared))
        name = f"p{len(self.made.parameters)}"
        value = self.random.uniform(-0.7, 0.7, shape)
        self.made.parameters[name] = np.abs(value) + 0.5 if positive else value
        return name

    def constant(self, shape: Shape) -> str:
        name = f"k{len(self.made.constants)}"
        self.made.constants[name] = self.random.uniform(-1, 1, shape)
        return name

    def value(self, expression: str, shape: Shape, trained: bool, within: str = "") -> _Value:
        """A new value; adds the line that computes it."""
        self.count += 1
        found = _Value(f"v{self.count}", shape, trained)
        self.lines.append(f"    {within}{found.name} = {expression}")
        self.values.append(found)
        return found

    # ------------------------------------------------------------------------------------------------------- program
    def program(self) -> StepSource:
        made = self.made
        made.dtype = "float32" if self.chance(0.8) else "float64"
        made.samples, made.width, made.classes = self.number(1, 4), self.number(1, 8), self.number(2, 4)
        made.micro_batches = self.among([1, 1, 1, 2, 3])
        made.scaled, made.rates = made.dtype == "float32" and self.chance(0.1), self.chance(0.3)
        rounds = self.among([1, 1, 1, 1, 2])
        bodies = [self.body(f"body{i}") for i in range(rounds if self.chance(0.5) else 1)]
        self.arrange_optimizers()
        text = [line for lines, _ in bodies for line in lines]
        arguments = [f"{name}{m}" for m in range(made.micro_batches) for name in "xuy"]
        text += [f"def step({', '.join(arguments)}):"]
        plain = made.micro_batches == 1 and self.chance(0.5)
        seen: list[str] = [*arguments]
        for i in range(rounds):
            lines, outputs = bodies[i % len(bodies)]
            name = lines[0].split("(")[0].removeprefix("def ")
            if self.chance(0.15):
                text.append("    x0 = x0 * 1.5")
            for m in range(made.micro_batches):
                results = [f"r{i}_{m}_{j}" for j in range(outputs)]
                call = f"{', '.join(results)}, = {name}(x{m}, u{m}, y{m})"
                text += ([f"    {call}"] if plain
                         else [f"    with micro_batch({m}, {m * made.samples}):", f"        {call}"])
                seen += results
                if m and self.chance(0.3):
                    text.append(f"    t{i}_{m} = {results[0]} + r{i}_{m - 1}_0")
                    seen.append(f"t{i}_{m}")
            updating = list(made.optimizers) if i == rounds - 1 and self.chance(0.9) else self.some(made.optimizers)
            text += [f"    update({o})" for o in updating]
            rest = [p for p in made.parameters if not any(p in made.optimizers[o][2] for o in updating)]
            if rest and self.chance(0.9):
                text.append(f"    drop({', '.join(rest)})")
        text.append(self.returned(seen))
        made.source = "\n".join(text) + "\n"
        return made

    def returned(self, seen: list[str]) -> str:
        made = self.made
        others = [*made.parameters, *(f"grad({p})" for p in made.parameters), *made.constants,
                  *(f"{n}[{i}]" for n in made.norms for i in (0, 1, 2))]
        kinds = [*self.some(seen)[:4], *(self.some(others)[:2] if self.chance(0.3) else [])]
        if kinds and self.chance(0.1):
            kinds.append(kinds[0])
        return f"    return {', '.join(kinds)}," if kinds else "    return None"

    def arrange_optimizers(self) -> None:
        """One optimizer for all parameters, or several: weights apart from biases, or a random split."""
        names = list(self.made.parameters)
        way = self.among(["all", "all", "weights", "any", "some", "none"])
        if not names or way == "none":
            return
        if way == "weights":
            groups = [[p for p in names if self.made.parameters[p].ndim > 1],
                      [p for p in names if self.made.parameters[p].ndim < 2]]
        elif way == "any":
            number = self.number(2, 3)
            group_of = {p: self.number(0, number - 1) for p in names}
            groups = [[p for p in names if group_of[p] == i] for i in range(number)]
        else:
            groups = [names if way == "all" else self.some(names, 1)]
        for members in filter(None, groups):
            kind = self.among(["SGD", "SGD", "Adam", "AdamW"])
            arguments: dict[str, Any] = {"lr": 0.05}
            if kind == "SGD" and self.chance(0.6):
                arguments |= {"momentum": 0.9, "nesterov": self.chance(0.5)}
            if self.chance(0.4):
                arguments["weight_decay"] = 0.01
            if self.chance(0.25):
                arguments["max_norm"] = 0.1
            self.made.optimizers[f"opt{len(self.made.optimizers)}"] = kind, arguments, members

    # ---------------------------------------------------------------------------------------------------------- body
    def body(self, name: str) -> tuple[list[str], int]:
        """A function of one micro-batch's inputs: its lines, and how many values it returns."""
        made = self.made
        self.lines = [f"def {name}(x, u, y):"]
        shape = made.samples, made.width
        self.values = [_Value("x", shape, False), *([_Value("u", shape, False)] if self.chance(0.4) else [])]
        self.beside = []
        for _ in range(self.number(0, self.among([8, 16]))):
            self.op()
            self.side()
        trunk = self.values[-1] if self.chance(0.3) else None
        losses = [self.loss(trunk) for _ in range(self.number(2, 3) if trunk else self.among([1, 1, 2]))]
        trained = [loss for loss in losses if loss.trained]
        walked = trained if self.chance(0.9) else self.some(trained)
        if len(walked) > 1 and self.chance(0.3):
            walked = [self.value(f"{walked[0].name} + {walked[1].name} * 0.5", (), True)]
        for i, loss in enumerate(walked):
            if i and self.chance(0.3):
                again = self.loss()
                loss = again if again.trained else loss
            self.lines.append(f"    backward({loss.name})")
            if self.chance(0.2):
                self.lines.append(f"    backward({loss.name}{self.among(['', ' * 2.0'])})")
        told = [side for side in self.beside if self.sides.random() < 0.5]
        self.lines += [f"    backward({side.name})" for side in told if side.trained]  # an auxiliary loss
        results = [losses[0].name, *(v.name for v in (*self.some(self.values)[:3], *told))]
        self.lines.append(f"    return {', '.join(results)},")
        return self.lines, len(results)

    def loss(self, trunk: _Value | None = None) -> _Value:
        """A scalar of the trunk or of any value, most often one that depends on a parameter."""
        made = self.made
        v = trunk or (self.among(self.values) if self.chance(0.5) else self.values[-1])
        if not v.shape or (not v.trained and self.chance(0.95)):
            v = self.value(f"{v.name} * {self.parameter(v.shape[-1:])}", v.shape, True)
        way = self.among(["square", "labels", "target", "total"])
        if way == "labels" and len(v.shape) == 2 and v.shape[0] == made.samples and v.shape[1]:
            w, b = self.parameter((made.classes, v.shape[1])), self.parameter((made.classes,))
            return self.value(f"cross_entropy(linear({v.name}, {w}, {b}), y)", (), True)
        if way == "target" and v.shape:
            return self.value(f"mse({v.name}, {self.constant(v.shape)})", (), v.trained)
        if way == "total":
            return self.value(f"total(tanh({v.name})) * 0.3", (), v.trained)
        return self.value(f"mean({v.name} * {v.name})", (), v.trained)

    def op(self) -> None:
        """Adds a value computed from earlier ones; often from the one before last, or by the same op as before."""
        shaped = [v for v in self.values if v.shape]
        v = self.among([shaped[-1], shaped[-1], shaped[-2 % len(shaped)], self.among(shaped)])
        self.kind = self.kind if self.chance(0.3) else self.among(OPS)
        self.value(*(getattr(self, f"_{self.kind}")(v) or self._linear(v)))

    def side(self) -> None:
        """Sometimes adds a statistic of a value between layers, which nothing reads, or a loss or the caller."""
        if self.sides.random() < 0.3:
            v, apart = self.values[self.sides.integers(len(self.values))], self.sides.random() < 0.7
            self.beside.append(_Value(f"s{len(self.beside)}", (), v.trained and not apart))
            self.lines.append(f"    {self.beside[-1].name} = mean({f'detach({v.name})' if apart else v.name})")

    def _linear(self, v: _Value) -> Made:
        if len(v.shape) < 2:
            return f"{v.name} * {self.parameter(v.shape)}", v.shape, True
        width = self.width()
        bias = f", {self.parameter((width,))}" if self.chance(0.7) else ""
        return f"linear({v.name}, {self.parameter((width, v.shape[-1]))}{bias})", (*v.shape[:-1], width), True

    def _matmul(self, v: _Value) -> Made | None:
        if len(v.shape) != 2:
            return None
        if self.chance(0.5):
            return f"matmul({v.name}, transpose({v.name})) * 0.2", (v.shape[0], v.shape[0]), v.trained
        else:
            width = self.width()
            return f"matmul({v.name}, {self.parameter((v.shape[1], width))})", (v.shape[0], width), True

    def _unary(self, v: _Value) -> Made | None:
        name = self.among(["relu", "tanh", "sigmoid", "gelu", "softmax", "log_softmax", "relu6",
                           "hardswish", "absolute", "neg"])
        return f"{name}({v.name})", v.shape, v.trained

    def _numbers(self, v: _Value) -> Made | None:
        form = self.among(["{0} * 0.7", "{0} + 0.1", "{0} / 1.3", "power({0}, 2.0)", "exp(tanh({0}))",
                           "sqrt({0} * {0} + 0.5)", "log({0} * {0} + 0.5)"])
        return form.format(v.name), v.shape, v.trained

    def _binary(self, v: _Value) -> Made | None:
        others = [w for w in self.values if w.shape in (v.shape, v.shape[1:], (1, *v.shape[1:]), (*v.shape[:-1], 1))]
        w = self.among(others)
        form = self.among(["{0} + {1}", "{0} + {1}", "{0} + {1}", "{0} - {1}", "{0} * {1}", "maximum({0}, {1})",
                           "minimum({1}, {0})", "{0} / ({1} * {1} + 0.5)"])
        return form.format(v.name, w.name), v.shape, v.trained or w.trained

    def _scaled(self, v: _Value) -> Made | None:
        shape = self.among([v.shape, v.shape[-1:], (1,)])
        form = self.among(["{0} * {1}", "{0} + {1}", "{0} + {1}", "maximum({0}, {1})", "{1} - {0}", "{0} * tanh({1})"])
        return form.format(v.name, self.parameter(shape)), v.shape, True

    def _shared(self, v: _Value) -> Made | None:
        """A sum: all its parts share the sum's gradient, and a window of one part adds a second gradient to it."""
        w = self.among([w for w in self.values if w.shape == v.shape])
        window = f"total({v.name}[{self.number(0, v.shape[0] - 1)}:], 0, True)"
        parts = self.some([window, window, w.name, self.parameter(v.shape), self.parameter(v.shape)], 2)
        place = self.number(0, len(parts))
        return (f"({' + '.join([*parts[:place], v.name, *parts[place:]])}) * 0.3", v.shape,
                v.trained or (w.trained and w.name in parts) or any(part in self.made.parameters for part in parts))

    def _constant(self, v: _Value) -> Made | None:
        name = self.constant(v.shape)
        return f"{v.name} * {name}" if self.chance(0.7) else f"{v.name} + array({name}.numpy())", v.shape, v.trained

    def _reduce(self, v: _Value) -> Made | None:
        axis, keep = self.number(0, len(v.shape) - 1), self.chance(0.5)
        name = self.among(["total", "mean", "amax"])
        shape = tuple(1 if a == axis else n for a, n in enumerate(v.shape) if keep or a != axis)
        if shape:
            return f"{name}({v.name}, {axis}, {keep})", shape, v.trained
        return None

    def _view(self, v: _Value) -> Made | None:
        axis = self.number(0, len(v.shape) - 1)
        size = v.shape[axis]
        begin = self.number(0, size - 1)
        end = self.number(begin + 1, size)
        index = ", ".join([":"] * axis)
        before = f"{index}, " if index else ""
        way = self.among(["transpose", "reshape", "cut", "pick", "broadcast"])
        if way == "transpose":
            return f"transpose({v.name})", v.shape[::-1], v.trained
        elif way == "cut":
            step = self.number(1, 2)
            shape = (*v.shape[:axis], len(range(begin, end, step)), *v.shape[axis + 1 :])
            return f"{v.name}[{before}{begin}:{end}:{step}]", shape, v.trained
        elif way == "pick" and len(v.shape) > 1:
            return f"{v.name}[{before}{begin}]", (*v.shape[:axis], *v.shape[axis + 1 :]), v.trained
        elif way == "broadcast" and len(v.shape) < 3:
            return f"broadcast_to({v.name}, {(2, *v.shape)})", (2, *v.shape), v.trained
        else:
            shape = self.among([(int(np.prod(v.shape)),), (1, *v.shape), (*v.shape[1:], v.shape[0])])
            return f"reshape({v.name}, {shape})", shape, v.trained

    def _join(self, v: _Value) -> Made | None:
        axis = self.number(0, len(v.shape) - 1)
        rest = [w for w in self.values if len(w.shape) == len(v.shape)
                and all(a == axis or n == m for a, (n, m) in enumerate(zip(w.shape, v.shape, strict=True)))]
        parts = [v, *(self.among(rest) for _ in range(self.number(1, 2)))]
        length = sum(w.shape[axis] for w in parts)
        room = f", {length + 3}" if self.chance(0.3) else ""
        return (f"concat([{', '.join(w.name for w in parts)}], {axis}{room})",
                (*v.shape[:axis], length, *v.shape[axis + 1 :]), any(w.trained for w in parts))

    def _norm(self, v: _Value) -> Made | None:
        w, b = ((self.constant(v.shape[-1:]) for _ in "wb") if self.chance(0.4)
                else (self.parameter(v.shape[-1:], i == 0) for i in (0, 1)))
        if self.chance(0.4):
            return f"layer_norm({v.name}, {w}, {b})", v.shape, v.trained or w[0] == "p"
        training = self.chance(0.7)
        if training and np.prod(v.shape[:-1]) < 2:
            return None
        known = [n for n, c in self.made.norms.items() if c == v.shape[-1]]
        name = str(self.among(known)) if known and self.chance(0.8) else f"n{len(self.made.norms)}"
        self.made.norms[name] = v.shape[-1]
        return f"batch_norm({v.name}, {w}, {b}, {name}, training={training})", v.shape, v.trained or w[0] == "p"

    def _dropout(self, v: _Value) -> Made | None:
        return f"dropout({v.name}, {self.among([0.2, 0.5])})", v.shape, v.trained

    def _image(self, v: _Value) -> Made | None:
        """A convolution or a pool over the values as images of 2 x 2 pixels."""
        size = int(np.prod(v.shape))
        if size % 4:
            return None
        channels = self.among([c for c in (1, 2, 3) if size % (4 * c) == 0])
        image = f"reshape({v.name}, {(size // 4 // channels, 2, 2, channels)})"
        way, n = self.among(["conv", "depthwise", "max", "average"]), size // 4 // channels
        if way in ("max", "average"):
            return f"{'max' if way == 'max' else 'avg'}_pool2d({image}, 2)", (n, 1, 1, channels), v.trained
        outputs, groups = (channels, channels) if way == "depthwise" else (self.number(1, 3), 1)
        k = self.number(1, 2)
        bias = f", {self.parameter((outputs,))}" if self.chance(0.5) else ", None"
        return (f"conv2d({image}, {self.parameter((outputs, k, k, channels // groups))}{bias}, groups={groups})",
                (n, 3 - k, 3 - k, outputs), True)

    def _attention(self, v: _Value) -> Made | None:
        if len(v.shape) != 2 or v.shape[1] % 2:
            return None
        heads = f"reshape({v.name}, {(1, 1, v.shape[0] * v.shape[1] // 2, 2)})"
        return (f"attention({heads}, {heads}, {heads}, causal={self.chance(0.5)})",
                (1, 1, v.shape[0] * v.shape[1] // 2, 2), v.trained)

    def _embedding(self, v: _Value) -> Made | None:
        width = self.width()
        return f"embedding({self.parameter((self.made.classes, width))}, y)", (self.made.samples, width), True

    def _recurrent(self, v: _Value) -> Made | None:
        if len(v.shape) != 3:
            return None
        h = self.constant(v.shape[1:])
        return f"rnn({v.name}, {h}, {self.parameter((v.shape[2], v.shape[2]))})[0]", v.shape, True

    def _apart(self, v: _Value) -> Made:
        if self.chance(0.5):
            return f"detach({v.name})", v.shape, False
        return f"tanh({v.name})", v.shape, False, "with no_grad(): "

    def _cast(self, v: _Value) -> Made | None:
        return f"cast({v.name})", v.shape, v.trained


OPS = ("linear", "linear", "linear", "matmul", "unary", "unary", "numbers", "binary", "binary", "scaled", "scaled",
       "shared", "shared", "constant", "reduce", "view", "view", "join", "norm", "norm", "norm", "dropout", "image",
       "attention", "embedding", "recurrent", "apart", "cast")
