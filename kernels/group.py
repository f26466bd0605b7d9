"""Several launches that need nothing of each other as one, for weight gradients that wait for company
(`minidl.passes.group`). Each keeps its arrays, shapes and constants, and so its bits. On the CPU it is one native call;
on CUDA, grids that have a form for several (`cuda.grouped`) become one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

from .cuda import Call, grouped
from .registry import KERNELS, Thunk, kernel


class Member(NamedTuple):
    """One of the launches: its kernel, how many arrays it reads, writes and uses as scratch, and its constants."""

    kernel: str
    reads: int
    writes: int
    work: int
    constants: tuple[tuple[str, Any], ...]


def in_turn(calls: Sequence[Thunk]) -> None:
    """Makes the calls one after another."""
    for call in calls:
        call()


def shared_out(arrays: Sequence[Any], of: Sequence[Any]) -> Iterator[tuple[Member, list[Any], list[Any], list[Any]]]:
    """Each member with what it reads, writes and uses; `arrays`: what all read, then what all write, then scratch.
    `of`: the members, as tuples."""
    of = [Member(*member) for member in of]
    at = [0, sum(m.reads for m in of), sum(m.reads + m.writes for m in of)]
    for member in of:
        own = []
        for i, count in enumerate(member[1:4]):
            own.append([*arrays[at[i] : at[i] + count]])
            at[i] += count
        yield member, own[0], own[1], own[2]


@kernel("group")
def group(xp: Any, *reads: Any, of: Sequence[Any]) -> Any:
    """What each member writes, in their order."""
    found: list[Any] = []
    for member, own, _, _ in shared_out(reads, of):
        out = KERNELS[member.kernel].reference(xp, *own, **dict(member.constants))
        found += out if isinstance(out, tuple) else [out]
    return tuple(found)


@group.cpu
def _(*arrays: Any, of: Sequence[Any]) -> list[Thunk]:
    return [partial(in_turn, [call for member, *own in shared_out(arrays, of)
                              for call in KERNELS[member.kernel].bind(*own, dict(member.constants))])]


@group.cuda()
def _(*arrays: Any, of: Sequence[Any]) -> list[Call]:
    every = [KERNELS[member.kernel].cuda_calls(*own, dict(member.constants))
             for member, *own in shared_out(arrays, of)]
    return [call for turn in zip_longest(*every) for call in grouped([call for call in turn if call is not None])]
