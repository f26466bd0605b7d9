"""The table of kernels, and the decorators that define them. Knows no kernel itself.

    @kernel("relu", flops=lambda reads, writes: writes[0].size)
    def relu(xp, x):                    # the reference: array module and read arrays in, new arrays out
        return xp.maximum(x, 0)

    @relu.cpu
    def _(x, y):                        # read, written and work arrays in; calls without arguments out
        return [ufunc(np.maximum, x, zero(x), y)]

    @relu.cuda()
    def _(x, y):                        # the same, but launches out: see `cuda`
        return each("elementwise.cu", f"relu<{c_type(x)}>", x.size, x, y, x.size)

Both are bound once to fixed arrays and then only called: they may allocate while binding, never in their calls.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache, partial
from typing import Any

import numpy as np

from .cuda import Call
from .hints import know_hints
from .kept import follow, kept

Thunk = Callable[[], Any]
Work = Callable[..., Sequence[tuple[tuple[int, ...], Any]]]


class KernelError(RuntimeError):
    """A kernel is unknown, is defined twice, or has no form for this device. The message names it."""


class _Kernels(dict[str, "Kernel"]):
    def __missing__(self, name: str) -> Kernel:
        near = get_close_matches(name, self, 3)
        hint = f"similar names: {', '.join(near)}" if near else "no similar name"
        raise KernelError(f"unknown kernel {name!r}; {hint}; define your own with @kernel({name!r}) in a module that "
                          f"is imported")


KERNELS = _Kernels()
_AXES = re.compile(r"(S(,S)*->S(,S)*)?".replace("S", r"(=|(\.\.\.)?[A-Za-z]*\*?[A-Za-z]*)"))  # see `kernel`


@dataclass
class Kernel:
    """`reference(xp, *reads, **constants)`; a binder for the CPU and one for CUDA, each with its scratch arrays as
    (shape, dtype); the flops of a launch; `axes`: along which axes the CPU form may be cut; `alike`: with which
    launches one may be joined; `over`: what a result may be written over; see `kernel`."""

    name: str
    reference: Callable[..., Any]
    work: Work | None = None
    flops: Callable[..., float] | None = None
    cuda_work: Work | None = None
    axes: str | Callable[..., str] = ""
    window: Callable[..., tuple[int, int, dict[str, Any]]] | None = None
    alike: Callable[..., str] | None = None
    over: Sequence[tuple[int, int]] = ()
    _cpu: Callable[..., list[Thunk]] | None = field(default=None, repr=False)
    _cuda: Callable[..., Sequence[Call]] | None = field(default=None, repr=False)

    def cut(self, reads: Sequence[Any], constants: dict[str, Any]) -> str:
        """Along which axes a launch may be cut; none if it must stay whole. Raises KernelError for another text."""
        axes = self.axes(reads, **constants) if callable(self.axes) else self.axes
        if not isinstance(axes, str) or not _AXES.fullmatch(axes):
            raise KernelError(f"the axes of kernel {self.name} are {axes!r:.60}; write a label for each axis of each "
                              f"array, such as 'mi,oi,o->mo', or '' if launches must stay whole")
        return axes

    def company(self, reads: Sequence[Any], writes: Sequence[Any], constants: dict[str, Any]) -> str:
        """The text that `alike` gives a launch; none without it."""
        return self.alike(reads, writes, **constants) if self.alike else ""

    def cpu(self, binder: Callable[..., list[Thunk]]) -> Kernel:
        """Registers the CPU form (a decorator)."""
        self._cpu = binder
        return self

    def bind(self, reads: Sequence[Any], writes: Sequence[Any], work: Sequence[Any],
             constants: dict[str, Any]) -> list[Thunk]:
        """Prebuilt calls on these NumPy arrays. Raises KernelError if there is no CPU form, or if it gives no calls."""
        if self._cpu is None:
            raise KernelError(f"kernel {self.name} has no CPU form; define one with @{self.reference.__name__}.cpu, as "
                              f"kernels/registry.py shows")
        made: Any = self._cpu(*reads, *writes, *work, **constants)
        if not isinstance(made, Iterable) or not all(map(callable, calls := [*made])):
            raise KernelError(f"the CPU form of kernel {self.name} gave a {type(made).__name__}; it must return a list "
                              f"of calls without arguments, as kernels/registry.py shows")
        return calls

    def cuda(self, work: Work | None = None) -> Callable[[Callable[..., Sequence[Call]]], Kernel]:
        """Registers the CUDA form (a decorator) and the scratch arrays that it needs, as `work` of `kernel`."""

        def define(binder: Callable[..., Sequence[Call]]) -> Kernel:
            self._cuda, self.cuda_work = binder, work
            return self

        return define

    def cuda_calls(self, reads: Sequence[Any], writes: Sequence[Any], work: Sequence[Any],
                   constants: dict[str, Any]) -> Sequence[Call]:
        """The calls of one launch on these arrays. Raises NotImplementedError if there is no CUDA form."""
        if self._cuda is None:
            raise NotImplementedError(f"kernel {self.name} has no CUDA form")
        return self._cuda(*reads, *writes, *work, **constants)


def kernel(name: str, *, work: Work | None = None, flops: Callable[..., float] | None = None,
           axes: str | Callable[..., str] = "", window: Callable[..., tuple[int, int, dict[str, Any]]] | None = None,
           alike: Callable[..., str] | None = None, over: Sequence[tuple[int, int]] = ()
           ) -> Callable[[Callable[..., Any]], Kernel]:
    """Defines a kernel by its reference (a decorator); a cell or module that runs again defines it anew.

    `work(reads, writes, **constants)` returns its scratch arrays; `flops(reads, writes)` its number of operations.
    Reads and writes have shape and size.

    `axes`: along which axes a launch may be cut into parts that write disjoint elements, one label for each axis of
    each array, as in `mi,oi,o->mo`; or a function `(reads, **constants)` to that. Arrays that a launch lacks at the end
    are left out. A small letter may be cut: each part reads its own elements, or all of an array without this letter or
    with length 1 there. A result without it is the first part's. `s`: samples, which the constant `sample` counts. `r`:
    rows that a window joins; `window(begin, end, reads, **constants)` returns where the rows begin and end that a part
    of the results reads, and its constants. A capital is never cut, `*` stands for any axes that are never cut, `...`
    for any that broadcast and may be cut, and `=` for a dense array, of which the first axis longer than 1 may be cut.
    By default a launch stays whole. `minidl.core.tasks.AXES` has the letters that have names.

    `alike(reads, writes, **constants)`: launches of weight gradients with the same text may be one launch (`group`);
    none with an empty text, or without it.

    `over`: pairs (result, read) of arrays that may be one memory in the CPU form: it reads each element before it
    writes there.
    """

    def define(reference: Callable[..., Any]) -> Kernel:
        if name in KERNELS and not _anew(KERNELS[name].reference, reference):
            raise KernelError(f"kernel {name} is defined twice, the second time by "
                              f"{reference.__module__}.{reference.__qualname__}")
        for what, value in (("work", work), ("flops", flops), ("window", window), ("alike", alike)):
            if value is not None and not callable(value):
                raise KernelError(f"{what} of kernel {name} is {value!r:.60}; it must be a function")
        if not isinstance(over, Sequence) or not all(
                isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(i, int) and i >= 0 for i in pair)
                for pair in over):
            raise KernelError(f"over of kernel {name} is {over!r:.60}; give pairs (result, read), such as [(0, 0)]")
        KERNELS[name] = Kernel(name, reference, work, flops, axes=axes, window=window, alike=alike, over=over)
        return KERNELS[name]

    return define


def _anew(one: Callable[..., Any], other: Callable[..., Any]) -> bool:
    """Whether both are one definition that has run twice: a cell of a notebook, a module under two names."""
    places = [(code.co_filename, code.co_firstlineno) if (code := getattr(function, "__code__", None)) else ("", 0)
              for function in (one, other)]
    return one.__qualname__ == other.__qualname__ and (places[0] == places[1] if places[0][0] == places[1][0] else
                                                       one.__module__ == other.__module__)


def ufunc(function: np.ufunc, *arrays: Any) -> Thunk:
    """A NumPy ufunc on its inputs, written to the last array."""
    *inputs, out = arrays
    return partial(function, *inputs, out=out)


@cache
def jitted(function: Callable[..., Any]) -> Any:
    """A function in the language of numba, compiled when it is called."""
    import numba
    from numba import float64
    from numba.extending import overload

    know_hints()
    while _inlined:
        one, double, options = _inlined.pop()
        overload(one, strict=False, jit_options=options)(
            lambda *types, one=one, double=double: double if getattr(types[0], "dtype", types[0]) == float64 else one)
    free = {"reassoc"} if function in _regrouped else False
    # no wrapper for callers in C, which takes a tenth of the time to compile: lanes call the loop itself
    made = kept(numba.njit, nogil=True, error_model="numpy", fastmath=free, no_cfunc_wrapper=True)(function)
    return follow(made, function)


_regrouped: set[Callable[..., Any]] = set()


def regrouped(function: Callable[..., Any]) -> Callable[..., Any]:
    """Lets the compiler regroup the sums of a loop (a decorator), so that it can vectorise them. The order is then the
    compiler's choice, and the same in every call."""
    _regrouped.add(function)
    return function


_inlined: list[tuple[Callable[..., Any], Callable[..., Any], dict[str, Any]]] = []


def inlined(function: Callable[..., Any], double: Callable[..., Any] | None = None,
            **options: Any) -> Callable[..., Any]:
    """Lets loops call this function, which becomes a part of each (a decorator). `double`: another function for
    arguments, or arrays, in float64. `options` of numba, in place of the loop's: `fastmath={"contract"}`, a product and
    a sum may be rounded once together; `{"reassoc"}`, as `regrouped`; `forceinline`, however long it is."""
    _inlined.append((function, double or function, options))
    return function


def loop(function: Callable[..., Any], *arguments: Any) -> Thunk:
    """A numba loop on fixed arguments, compiled now."""
    _compile(function, kind_of(arguments), arguments)
    return partial(jitted(function), *arguments)


_compiled: set[Any] = set()


def kind_of(value: Any) -> Any:
    """The property of a value on which compiled code depends."""
    if isinstance(value, np.ndarray):
        return value.dtype.char, value.ndim, value.flags.num
    return tuple(map(kind_of, value)) if isinstance(value, tuple) else type(value)


def _compile(function: Callable[..., Any], kinds: Any, arguments: tuple[Any, ...]) -> None:
    """Compiles a loop once for each kind of arguments. (Numba's own check takes longer than a small loop.)"""
    if (function, kinds) not in _compiled:
        from numba import typeof

        types: Any = tuple(map(typeof, arguments))
        jitted(function).compile(types)
        _compiled.add((function, kinds))


def one(x: Any, y: Any) -> bool:
    """Whether two arrays of one shape are the same memory; if two arrays of a loop are, numba leaves it without
    vectors."""
    return bool(x.ctypes.data == y.ctypes.data)


def flat(array: Any) -> Any:
    """A contiguous array as one dimension, without a copy. Raises ValueError for a strided one."""
    if not array.flags.c_contiguous:
        raise ValueError(f"a contiguous array is needed here, not strides {array.strides} of shape {array.shape}")
    return array.reshape(-1)


def memory(array: Any) -> Any:
    """The memory of an array from its first element to its last one as one dimension, without a copy. No axis is
    reversed."""
    if array.flags.forc:
        return array.ravel("K")
    reach = sum((n - 1) * step for n, step in zip(array.shape, array.strides, strict=True))
    return np.lib.stride_tricks.as_strided(array, (reach // array.itemsize + 1 if array.size else 0,),
                                           (array.itemsize,))


def like(array: Any, value: float) -> Any:
    """A scalar of the array's type."""
    return array.dtype.type(value)


def check_range(what: str, index: Any, length: int, ignored: int | None = None) -> None:
    """Raises ValueError that names the first element of a NumPy array of whole numbers that is neither in
    0..length - 1 nor `ignored`: with such an index, a kernel would read or write other memory. `what`: label or index.

    Eager ops check an index that they get, executors the inputs of a recorded step before it runs. Indices that a step
    computes itself, such as an argmax, are checked by the loops of the CPU, and not on CUDA.
    """
    if not jitted(any_outside)(index, length):
        return
    bad = (index < 0) | (index >= length)
    if ignored is not None:
        bad &= index != ignored
    if bad.any():
        at = int(bad.argmax())
        value = int(index.flat[at])
        raise ValueError(f"label {value} of sample {at} is out of range: the model has classes 0 to {length - 1}"
                         if what == "label" else
                         f"index {value} (element {at}) is out of range: there are rows 0 to {length - 1}")


def any_outside(index, length):  # type: ignore[no-untyped-def]
    """Whether a number of an array is not in 0..length - 1."""
    for value in index.flat:  # noqa: SIM110
        if value < 0 or value >= length:
            return True
    return False
