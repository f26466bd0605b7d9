"""The instructions of each machine that native lanes need: how a thread sleeps, how it spins, and how it reads the
counter of ticks."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

I32, I64 = ir.IntType(32), ir.IntType(64)


@dataclass(frozen=True)
class Instructions:
    """`futex`: the number of this system call. `pause` and `ticks` build, with a builder of LLVM's code, what tells the
    core that a thread spins, and the value of its counter of ticks. `source`: the name under which the system knows
    that counter, if it is its own clock: only then all cores agree on it."""

    futex: int
    pause: Callable[[Any], object]
    ticks: Callable[[Any], Any]
    source: str


def _intrinsic(b, name, result, *arguments):
    kind = ir.FunctionType(result, [a.type for a in arguments])
    return b.call(b.module.declare_intrinsic(name, (), kind), arguments)


def _virtual_counter(b):
    """The counter that all programs on aarch64 may read; `llvm.readcyclecounter` is another one, which they may not."""
    return _intrinsic(b, "llvm.read_volatile_register.i64", I64, b.module.add_metadata(["cntvct_el0"]))


MACHINES = {"x86_64": Instructions(202, lambda b: _intrinsic(b, "llvm.x86.sse2.pause", ir.VoidType()),
                                   lambda b: _intrinsic(b, "llvm.readcyclecounter", I64), "tsc"),
            "aarch64": Instructions(98, lambda b: _intrinsic(b, "llvm.aarch64.hint", ir.VoidType(), I32(1)),
                                    _virtual_counter, "arch_sys_counter")}
