"""Every argument of torch's signatures, of the functions `minidl.name` and the methods of a Tensor that torch has too.

See `helpers/torch_arguments.py`; layers, losses and optimizers are in tests/nn/test_torch_arguments.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch_arguments import Call, Case, Draws, Tables, check, of_function, parameters, signatures, torch

import minidl as ml

DRAWS = Draws()
floats, shares = DRAWS.floats, DRAWS.shares
X, SQUARES, MASK = floats(3, 4), floats(2, 3, 3), DRAWS.rng.random((3, 4)) > 0.5
PAIR = {"input": X, "other": floats(3, 4)}


@dataclass(frozen=True)
class Tensors(Case):
    """`constant`: the result depends on no input. `random`: its numbers are drawn, so that only shapes are compared."""

    constant: bool = False
    random: bool = False


NEW, DRAWN = {"size": (2, 3)}, {"constant": True, "random": True}
FUNCTIONS: dict[str, Tensors] = {
    "arange": Tensors({"start": 2, "end": 7}, constant=True), "eye": Tensors({"n": 3}, constant=True),
    "full": Tensors({**NEW, "fill_value": 0.5}, constant=True), "ones": Tensors(NEW, constant=True),
    "zeros": Tensors(NEW, constant=True), "linspace": Tensors({"start": 0, "end": 1, "steps": 5}, constant=True),
    "ones_like": Tensors({"input": X}, constant=True), "zeros_like": Tensors({"input": X}, constant=True),
    "full_like": Tensors({"input": X, "fill_value": 0.5}, constant=True),
    "rand": Tensors(NEW, **DRAWN), "randn": Tensors(NEW, **DRAWN), "rand_like": Tensors({"input": X}, **DRAWN),
    "randn_like": Tensors({"input": X}, **DRAWN), "randint": Tensors({"low": 1, "high": 5, **NEW}, **DRAWN),
    "randperm": Tensors({"n": 5}, **DRAWN),
    "stack": Tensors({"tensors": (X, floats(3, 4))}), "cat": Tensors({"tensors": (X, floats(3, 4))}),
    "where": Tensors({"condition": MASK, **PAIR}),
    **dict.fromkeys(("add", "div", "ge", "gt", "le", "lt", "maximum", "minimum", "mul", "sub"),
                    Tensors(PAIR)),
    **dict.fromkeys(("eq", "ne"), Tensors({"input": X.round(), "other": X.round().T.reshape(3, 4)})),
    "bmm": Tensors({"input": SQUARES, "mat2": floats(2, 3, 5)}), "chunk": Tensors({"input": X, "chunks": 2}),
    "clamp": Tensors({"input": X, "min": -0.2}), "clip": Tensors({"input": X, "min": -0.2}),
    "cumsum": Tensors({"input": X, "dim": 0}), "expand": Tensors({"input": X, "size": (2, 3, 4)}),
    "expand_as": Tensors({"input": X, "other": floats(2, 3, 4)}),
    "view_as": Tensors({"input": X, "other": floats(4, 3)}),
    "flatten": Tensors({"input": SQUARES}), "flip": Tensors({"input": X, "dims": (0,)}),
    "gather": Tensors({"input": X, "dim": 0, "index": np.array([[0, 1, 2, 0], [2, 2, 0, 1]])}),
    "index_select": Tensors({"input": X, "dim": 0, "index": np.array([2, 0])}),
    "item": Tensors({"input": floats(1)}), "backward": Tensors({"input": floats()}, constant=True),
    "log": Tensors({"input": shares(3, 4)}), "sqrt": Tensors({"input": shares(3, 4)}),
    "rsqrt": Tensors({"input": shares(3, 4)}), "log_softmax": Tensors({"input": X, "dim": -1}),
    "softmax": Tensors({"input": X, "dim": -1}), "logsumexp": Tensors({"input": X, "dim": 0}),
    "masked_fill": Tensors({"input": X, "mask": MASK, "value": 0.5}),
    "matmul": Tensors({"input": X, "other": floats(4, 5)}), "mm": Tensors({"input": X, "mat2": floats(4, 5)}),
    "movedim": Tensors({"input": SQUARES, "source": 0, "destination": 2}),
    "outer": Tensors({"input": floats(3), "vec2": floats(4)}), "permute": Tensors({"input": X, "dims": (1, 0)}),
    "pow": Tensors({"input": X, "exponent": 2}), "repeat_interleave": Tensors({"input": X, "repeats": 2}),
    "reshape": Tensors({"input": X, "shape": (4, 3)}), "view": Tensors({"input": X, "shape": (4, 3)}),
    "roll": Tensors({"input": X, "shifts": 1}), "split": Tensors({"tensor": X, "split_size_or_sections": 2}),
    "squeeze": Tensors({"input": floats(1, 3, 1)}), "std": Tensors({"input": X, "correction": 1}),
    "var": Tensors({"input": X, "correction": 1}), "swapaxes": Tensors({"input": X, "axis0": 0, "axis1": 1}),
    "transpose": Tensors({"input": X, "dim0": 0, "dim1": 1}), "tile": Tensors({"input": X, "dims": (2, 1)}),
    "topk": Tensors({"input": X, "k": 2}), "unsqueeze": Tensors({"input": X, "dim": 0}),
    "bincount": Tensors({"input": np.array([0, 2, 2])}, constant=True),
    "cdist": Tensors({"x1": X, "x2": floats(5, 4)}), "diagonal": Tensors({"input": SQUARES}),
    "index_add": Tensors({"input": X, "dim": 0, "index": np.array([2, 0]), "source": floats(2, 4)}),
    "masked_select": Tensors({"input": X, "mask": MASK}),
    **dict.fromkeys(("scatter", "scatter_add"),
                    Tensors({"input": X, "dim": 0, "index": np.array([[2, 0, 1]]), "src": floats(1, 3)})),
    "isfinite": Tensors({"tensor": X}), "isinf": Tensors({"tensor": X}),
}
#: where torch's documentation has no signature that can be read
MADE = "*, out=None, dtype=None, layout=None, device=None, requires_grad=False, pin_memory=False"
WRITTEN = {"arange": f"start, end, step=1, {MADE}", "randint": f"low, high, size, generator=None, {MADE}",
           **dict.fromkeys(("ones", "zeros"), f"size, {MADE}"),
           **dict.fromkeys(("rand", "randn"), f"size, {MADE}, generator=None"),
           "full_like": f"input, fill_value, {MADE}", "masked_fill": "input, mask, value",
           "expand": "input, size", "view": "input, shape", "reshape": "input, shape", "permute": "input, dims",
           "log_softmax": "input, dim, dtype=None", "relu": "input", "detach": "input",
           "where": "condition, input, other",
           "clip": "input, min=None, max=None", "topk": "input, k, dim=-1, largest=True, sorted=True"}
METHODS_WRITTEN = {"where": "input, condition, other"}
#: not called: ways to run, classes, and functions of any number of tensors
APART = {"autocast", "device", "no_grad", "seed", "set_default_device", "einsum", "Tensor"}
MATTERS: dict[str, list[Any]] = {
    "input": [], "tensor": [], "self": [], "tensors": [], "condition": [], "out": [torch.zeros(3, 4)],
    "other": [floats(4), 2.5], "eq other": [1.0], "ne other": [1.0],
    "expand_as other": [floats(5, 3, 4)], "view_as other": [floats(2, 6)], "mat2": [], "vec2": [],
    "device": ["meta"], "layout": [torch.sparse_coo],
    "requires_grad": [True], "pin_memory": [True], "memory_format": [torch.channels_last],
    "generator": [torch.Generator()], "dtype": [torch.float64, torch.int64], "out_dtype": [torch.float64],
    "dim": [1, -1, 0, None, (0, 1), 7], "keepdim": [True], "correction": [0, 5], "alpha": [2],
    "rounding_mode": ["floor", "wrong"], "dims": [(1,), (0, 1)], "stable": [True], "descending": [True],
    "sorted": [False], "largest": [False], "k": [1, 3, 9], "chunks": [3, 0], "min": [0.3], "max": [0.1],
    "clamp max": [0.1, -1.0], "clip max": [0.1, -1.0], "start_dim": [1, 7], "end_dim": [1], "sparse_grad": [True],
    "index": [np.array([[2, 1, 0, 1]])], "index_select index": [np.array([1])], "mask": [MASK[:1], ~MASK],
    "value": [-2.0], "movedim source": [1, (0, 1)], "destination": [0, (1, 0)], "p": [1, float("inf"), 3, "nuc"],
    "exponent": [3, 0.5, floats(3, 4)], "repeats": [3, np.array([1, 2, 3] * 4)], "output_size": [5],
    "shape": [(12,), (2, -1), (5, 5)], "shifts": [2, (1, 2)], "split_size_or_sections": [(1, 2), 3, (1, 1)],
    "permute dims": [(0, 1), (-1, 0), (0, 0)], "flip dims": [(1,), (0, 1), 1], "roll dims": [0, (0, 1)],
    "axis0": [1], "axis1": [0], "dim0": [1], "dim1": [0], "diagonal": [1, -1], "size": [(4,), 3, (2, 0)],
    "expand size": [(5, 3, 4), (3, -1)], "inplace": [True], "start": [1, 2.5], "end": [4, 6.5], "step": [2, 0, 0.5],
    "linspace start": [-1], "linspace end": [3], "steps": [3, 1, 0], "n": [4, 0, -1], "m": [2], "fill_value": [3, True],
    "low": [4, 7], "high": [9], "squeeze dim": [0, 2, -2, 1, (0, 2), 7], "unsqueeze dim": [1, -1, 7],
    "gradient": [np.float32(3)], "retain_graph": [True], "create_graph": [True], "inputs": [()], "force": [True],
    "requires_grad_ requires_grad": [False], "weights": [np.array([0.5, 2.0, 1.5], "float32"), np.array([1, 2, 3]), X],
    "minlength": [5, 1, -1], "x1": [], "x2": [], "cdist p": [1, float("inf"), 3], "compute_mode": ["wrong"],
    "offset": [1, -2, 5], "diagonal dim1": [2, -1, 1], "dim2": [0, -1, 7], "decimals": [1], "source": [floats(2, 3)],
    "index_add index": [np.array([1, 1]), np.array([1, 4]), np.array([0, 1, 2])], "index_add dim": [1, 7],
    "src": [floats(2, 5), floats(4)], "scatter src": [2.5, floats(1, 2)], "reduce": ["add", "wrong"],
    "scatter index": [np.array([[0, 1, 2]]), np.array([[2, 1, 3]])],
    "masked_select mask": [MASK[:1], ~MASK, X],
}
BESIDE: dict[str, dict[str, Any]] = {"roll dims": {"shifts": 1}, "keepdim": {"dim": 0}}
TABLES = Tables(MATTERS, BESIDE,
                {"stable", "sorted", "sparse_grad", "pin_memory", "generator", "out", "layout", "device",
                 "memory_format", "requires_grad", "output_size", "retain_graph", "create_graph", "inputs", "force"},
                {"dim": ("axis", "axes"), "dims": ("axis", "axes", "shape"), "dtype": ("type",), "k": ("topk",)})


#: taken here beside what torch takes, as NumPy does or as a method does
MORE = {"maximum other", "minimum other", "flip dims", "logsumexp dim", "full size", "randint size",
        "prod dim", "scatter src", "scatter_add src"}


def found(name: str, torchs: Any, method: bool) -> list[inspect.Signature]:
    """Torch's signatures; of a method, the first argument is the tensor."""
    written = METHODS_WRITTEN.get(name) if method else None
    if written := written or WRITTEN.get(name):
        space: dict[str, Any] = {}
        exec(f"def f({written}): pass", space)
        return [inspect.signature(space["f"])]
    if not method or callable(getattr(torch, name, None)):
        return signatures(getattr(torch, name), overrides=False)
    tensor = inspect.Parameter("input", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [s.replace(parameters=[tensor, *(p for p in s.parameters.values() if p.name != "self")])
            for s in signatures(torchs, overrides=False)]


def native(value: Any) -> Any:
    """Torch's types by our names."""
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value


def of_tensor(name: str) -> Callable[..., Any]:
    """The method as a function of the tensor."""
    def call(*args: Any, **named: Any) -> Any:
        key = "tensor" if "tensor" in named else "input"
        tensor, args = (named.pop(key), args) if key in named else (args[0], args[1:])
        if name != "backward":
            return getattr(tensor, name)(*args, **named)
        (tensor * 2).backward(*args, **named)
        return tensor.grad

    return call


def tried(name: str, torchs: Callable[..., Any], ours: Callable[..., Any], method: bool = False) -> list[str]:
    """The faults of all arguments of torch's function `name`, or of its method."""
    case, theirs = FUNCTIONS.get(name, Tensors({"input": X})), of_tensor(name) if method else torchs
    shaped = (lambda t: t * 0) if case.random else lambda t: t

    def mine(*args: Any, **named: Any) -> Any:
        result = ours(*map(native, args), **{k: native(v) for k, v in named.items()})
        return np.zeros_like(result.numpy()) if case.random else result

    def runs(call: Call) -> Any:
        return of_function(lambda *args, **named: shaped(theirs(*args, **named)), mine, case, call, not case.constant)

    known = found(name, torchs, method)
    assert known, f"torch's {name} has no signature that can be read: write it into WRITTEN"
    return [fault for argument, others in parameters(known) for fault in
            check(name, argument, others, case.given, runs, False, TABLES)
            if not (f"{name} {argument}" in MORE and "taken, and torch refuses it" in fault)]


def test_arguments_of_functions() -> None:
    """All in one test, since each takes milliseconds."""
    names = [n for n in (*ml.__all__, *ml._METHODS) if callable(getattr(torch, n, None)) and n not in APART]
    assert len(names) > 90
    faults = [fault for n in names for fault in tried(n, getattr(torch, n), getattr(ml, n))]
    assert not faults, "\n".join(faults)


def test_arguments_of_methods() -> None:
    names = [n for n in dir(ml.Tensor) if not n.startswith("_") and callable(getattr(ml.Tensor, n))
             and callable(getattr(torch.Tensor, n, None))]
    assert len(names) > 90
    faults = [fault for n in names for fault in tried(n, getattr(torch.Tensor, n), of_tensor(n), method=True)]
    assert not faults, "\n".join(faults)
