"""Several launches that need nothing of each other as one, for weight gradients that wait for company
(`minidl.passes.group`). Each keeps its arrays, shapes and constants, and so its bits. On the CPU it is one native call;
on CUDA, grids that have a form for several (`cuda.grouped`) become one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

from .cuda import Call, grouped
from .registry import KERNELS, Kernel, Thunk, Work, kernel

#: one of the launches: its kernel, how many arrays it reads and writes, and its constants
Member = tuple[str, int, int, tuple[tuple[str, Any], ...]]
Own = tuple[Kernel, list[Any], list[Any], dict[str, Any]]


def in_turn(calls: Sequence[Thunk]) -> None:
    """Makes the calls one after another."""
    for call in calls:
        call()


def shared_out(arrays: Sequence[Any], of: Sequence[Member]) -> Iterator[Own]:
    """Of each member its kernel, what it reads and writes, and its constants. `arrays`: what all read, then what all
    write."""
    read, written = 0, sum(member[1] for member in of)
    for name, reads, writes, constants in of:
        yield (KERNELS[name], [*arrays[read : read + reads]], [*arrays[written : written + writes]], dict(constants))
        read, written = read + reads, written + writes


def _scratch(of_kernel: Callable[[Kernel], Work | None]) -> Work:
    """The scratch arrays of all members, in their order."""
    return lambda reads, writes, of: [spec for own in shared_out([*reads, *writes], of)
                                      for spec in _needs(of_kernel, *own)]


def _needs(of_kernel: Callable[[Kernel], Work | None], kernel: Kernel, reads: Any, writes: Any, constants: Any) -> Any:
    work = of_kernel(kernel)
    return work(reads, writes, **constants) if work else ()


def _with_scratch(of_kernel: Callable[[Kernel], Work | None], arrays: Sequence[Any], of: Sequence[Member]
                  ) -> Iterator[tuple[Own, list[Any]]]:
    """Of each member also its scratch arrays, which come last."""
    at = sum(reads + writes for _, reads, writes, _ in of)
    for own in shared_out(arrays, of):
        end = at + len(_needs(of_kernel, *own))
        yield own, [*arrays[at:end]]
        at = end


def _cpu(kernel: Kernel) -> Work | None:
    return kernel.work


def _cuda(kernel: Kernel) -> Work | None:
    return kernel.cuda_work


@kernel("group", work=_scratch(_cpu))
def group(xp: Any, *reads: Any, of: Sequence[Member]) -> Any:
    """The results of all members, in their order."""
    found: list[Any] = []
    for own, arrays, _, constants in shared_out(reads, of):
        out = own.reference(xp, *arrays, **constants)
        found += out if isinstance(out, tuple) else [out]
    return tuple(found)


@group.cpu
def _(*arrays: Any, of: Sequence[Member]) -> list[Thunk]:
    return [partial(in_turn, [call for (own, reads, writes, constants), work in _with_scratch(_cpu, arrays, of)
                              for call in own.bind(reads, writes, work, constants)])]


@group.cuda(_scratch(_cuda))
def _(*arrays: Any, of: Sequence[Member]) -> list[Call]:
    every = [own.cuda_calls(reads, writes, work, constants)
             for (own, reads, writes, constants), work in _with_scratch(_cuda, arrays, of)]
    return [call for turn in zip_longest(*every) for call in grouped([call for call in turn if call is not None])]
