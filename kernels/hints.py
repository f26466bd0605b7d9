"""Hints of loops to the compiler, and to the processor. Calls of these functions mean something in compiled loops
alone."""

from __future__ import annotations

import platform
from functools import cache
from typing import Any

X86 = platform.machine().lower() in ("x86_64", "amd64")
ZEROS = 0x8040  #: of the word that controls arithmetic on x86 (MXCSR): subnormal results, and operands, are 0


def wide() -> None:
    """At the start of a loop of arithmetic: it has vectors of 512 bits on a processor that is known to gain from them.

    LLVM prefers 256 on Intel's processors with AVX-512, since the first of them lowered their clock for 512. Those with
    half precision (Sapphire Rapids, 2023, and later) hardly do: GELU and the gradients of norms and scores gain 1.1 to
    1.3x there. Loops that wait for memory, square roots or divisions lose a tenth, and short rows gain nothing."""


def apart() -> None:
    """At the start of a loop: none of its arrays in float32 or float64 shares memory with another. The compiler makes
    only a few checks of that; without them it also vectorises loops over many arrays."""


def flushing() -> int:
    """At the start of a loop: subnormal numbers (in float32 those below 1.2e-38) are 0, as on CUDA, until `restored`
    gets what this returns. On x86 alone; other processors compute with them as fast as with others.

    A mean that decays becomes subnormal and then never 0: .9 times the fourth smallest number is rounded to the fourth
    smallest. On Intel's processors an update takes 20 to 40 times as long with such a momentum."""
    return 0


def restored(before: int) -> None:
    """At the end of a loop: subnormal numbers are what they were before `flushing`, which returned `before`."""


@cache
def know_hints() -> None:
    """Makes these functions known to numba, which keeps compiled loops by the processor's features."""
    from llvmlite import ir
    from numba import types
    from numba.core import cgutils
    from numba.core.registry import cpu_target
    from numba.extending import lower_builtin, type_callable

    gains = "+avx512fp16" in cpu_target.target_context.codegen().magic_tuple()[2]
    word, byte = ir.IntType(32), ir.IntType(8)

    def widen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if gains:
            set.add(builder.function.attributes, '"prefer-vector-width"="512"')  # llvmlite itself knows no such pairs
        return context.get_dummy_value()

    def separate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        for argument in builder.function.args:
            if str(argument.type) in ("float*", "double*"):
                argument.add_attribute("noalias")
        return context.get_dummy_value()

    def control(builder: Any, instruction: str, place: Any) -> None:
        kind = ir.FunctionType(ir.VoidType(), [byte.as_pointer()])
        function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.sse.{instruction}")
        builder.call(function, [builder.bitcast(place, byte.as_pointer())])

    def flush(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = cgutils.alloca_once_value(builder, word(0))
        if X86:
            control(builder, "stmxcsr", place)
        before = builder.load(place)
        if X86:
            builder.store(builder.or_(before, word(ZEROS)), place)
            control(builder, "ldmxcsr", place)
        return before

    def restore(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if X86:
            place = cgutils.alloca_once(builder, word)
            builder.store(arguments[0], place)
            control(builder, "ldmxcsr", place)
        return context.get_dummy_value()

    for hint, result, lower in ((wide, types.none, widen), (apart, types.none, separate),
                                (flushing, types.uint32, flush)):
        type_callable(hint)(lambda context, result=result: lambda: result)
        lower_builtin(hint)(lower)
    type_callable(restored)(lambda context: lambda before: types.none)
    lower_builtin(restored, types.uint32)(restore)
