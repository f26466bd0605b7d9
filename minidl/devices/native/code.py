"""The machine code of native lanes: the loop that makes a lane's calls, events, stamps, and how each kind of call is
made. Everything here is compiled by numba, once per machine, and runs without the interpreter's lock.

A call is a pair (address, block): the address of a function that takes the address of a block of 64-bit words and
returns a status. Blocks are NumPy arrays that the caller keeps alive. This module knows addresses alone: no arrays, no
tasks.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"

import platform

import numpy as np
from llvmlite import ir
from numba import cfunc, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from ...kernels.kept import kept
from .machines import MACHINES

OK, FAILED, AGAIN = 0, 1, 2  #: results of a call: done; an error; not yet, make it again
#: why `walk` and `step` return: all calls made; a call failed; others gave up; the caller shall look at its signals
DONE, FAULT, STOPPED, LOOK = range(4)

# words of the state that all lanes of a step share
STOP, GENERATION, SECONDS, NANOSECONDS, TURN, TURNS = range(6)
STATE_WORDS = 8
# words of a lane: three events (word, sleepers), each in a cache line of its own; then what the lane is
GO, END, CALLS, COUNT, RESULT, CLOSING, STATE, SPINS = 0, 8, 16, 17, 18, 19, 20, 21
LANE_WORDS = 24
FOREVER = 1 << 62  #: a run after all others
LINE = 64  #: bytes of a cache line, or more

NAP = 10_000_000  #: nanoseconds after which a sleeper looks whether others gave up, and the caller for signals
LONG = 1_000_000  #: nanoseconds: the caller looks at the clock after each call where calls take longer
MOMENT = 4096  #: ticks, in which a clock can be read
OFTEN = 16  #: calls between two looks at the clock if they are short

MACHINE = MACHINES[platform.machine()]
FUTEX = MACHINE.futex
FUTEX_WAIT, FUTEX_WAKE = 128, 129  # of one process
MONOTONIC = 1  #: the clock of `time.perf_counter`

I32, I64, F64 = ir.IntType(32), ir.IntType(64), ir.DoubleType()
STATUS = types.int32(types.int64)


def _at(b, address):
    return b.inttoptr(address, I64.as_pointer())


def _loads(ordering):
    @intrinsic
    def load(context, address):
        def build(context, b, signature, args):
            return b.load_atomic(_at(b, args[0]), ordering, 8) if ordering else b.load(_at(b, args[0]))

        return types.int64(types.int64), build

    return load


def _stores(ordering):
    @intrinsic
    def store(context, address, value):
        def build(context, b, signature, args):
            if ordering:
                b.store_atomic(args[1], _at(b, args[0]), ordering, 8)
            else:
                b.store(args[1], _at(b, args[0]))
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), build

    return store


peek, poke = _loads(""), _stores("")
load, load_in_order, store_in_order = _loads("acquire"), _loads("seq_cst"), _stores("seq_cst")


@intrinsic
def pause(context):
    """Tells the core that this thread spins."""
    def build(context, b, signature, args):
        MACHINE.pause(b)
        return context.get_dummy_value()

    return types.void(), build


@intrinsic
def call(context, address, block):
    """A call of the function at `address`."""
    def build(context, b, signature, args):
        return b.call(b.inttoptr(args[0], ir.FunctionType(I32, [I64]).as_pointer()), [args[1]])

    return types.int32(types.int64, types.int64), build


@intrinsic
def ticks(context):
    """The core's counter of ticks."""
    def build(context, b, signature, args):
        return MACHINE.ticks(b)

    return types.int64(), build


@intrinsic
def clock(context):
    """Nanoseconds of the host's clock."""
    def build(context, b, signature, args):
        time = cgutils.alloca_once(b, ir.ArrayType(I64, 2))
        kind = ir.FunctionType(I32, [I32, time.type])
        b.call(cgutils.get_or_insert_function(b.module, kind, "clock_gettime"), [I32(MONOTONIC), time])
        seconds, rest = (b.load(cgutils.gep_inbounds(b, time, 0, i)) for i in range(2))
        return b.add(b.mul(seconds, I64(1_000_000_000)), rest)

    return types.int64(), build


system_call = types.ExternalFunction("syscall", types.int64(*[types.int64] * 7))
get_cores, set_cores = (types.ExternalFunction(f"sched_{name}affinity", types.int32(types.int32, *[types.int64] * 2))
                        for name in ("get", "set"))
own_core = types.ExternalFunction("sched_getcpu", types.int32())
memcpy = types.ExternalFunction("memcpy", types.int64(types.int64, types.int64, types.int64))
memset = types.ExternalFunction("memset", types.int64(types.int64, types.int32, types.int64))


# --------------------------------------------------------------------------------------------------------------- events
# An event is three words: the number of the last run in which it was recorded, whether somebody sleeps on it, and the
# core of the lane that woke the last sleeper.
@kept(njit, nogil=True)
def record(event, generation):
    """Lets the waiter of this run through, and wakes it if it sleeps."""
    store_in_order(event, generation)
    if load_in_order(event + 8):
        poke(event + 16, own_core())
        store_in_order(event + 8, 0)
        system_call(FUTEX, event, FUTEX_WAKE, 1, 0, 0, 0)


@kept(njit, "boolean(int64, int64, int64)", nogil=True)
def look(event, generation, spins):
    """Looks for an event of this run so often. Returns whether it was recorded."""
    for _ in range(spins):
        if load(event) >= generation:
            return True
        pause()
    return False


@kept(njit, "void(int64)", nogil=True)
def leave(core):
    """Moves this thread to another core if it is on that one and may run elsewhere; after that it may run wherever it
    might before."""
    cores = np.zeros(128, np.uint8)  # a bit for each of 1,024 cores; a system with more of them refuses to tell
    if own_core() == core and get_cores(0, cores.nbytes, cores.ctypes.data) == 0:
        cores[core // 8] ^= 1 << core % 8
        if set_cores(0, cores.nbytes, cores.ctypes.data) == 0:  # it fails if no core is left
            cores[core // 8] ^= 1 << core % 8
            set_cores(0, cores.nbytes, cores.ctypes.data)


@kept(njit, nogil=True)
def wait(event, generation, state, spins):
    """Waits for an event of this run: spins, then sleeps for at most a nap. Returns whether it was recorded."""
    if look(event, generation, spins):
        return True
    store_in_order(event + 8, 1)
    seen = load_in_order(event)
    if seen < generation:
        system_call(FUTEX, event, FUTEX_WAIT, seen & 0xFFFFFFFF, state + 8 * SECONDS, 0, 0)
    return load(event) >= generation


@kept(cfunc, STATUS)
def wait_call(block):
    """Block: event, state, spins."""
    state = peek(block + 8)
    return OK if wait(peek(block), peek(state + 8 * GENERATION), state, peek(block + 16)) else AGAIN


@kept(cfunc, STATUS)
def record_call(block):
    """Block: event, state."""
    record(peek(block), peek(peek(block + 8) + 8 * GENERATION))
    return OK


@kept(njit, "void(int64)", nogil=True)
def both(block):
    """Writes the counter of ticks and the time of the host's clock to two words, as of one moment: of some tries the
    one in which the thread was least disturbed between the two looks."""
    least = MOMENT << 32
    for _ in range(8):
        before = ticks()
        now = clock()
        took = ticks() - before
        if took < least:
            least = took
            poke(block, before + took // 2)
            poke(block + 8, now)
        if least < MOMENT:
            return


@kept(cfunc, STATUS)
def ticks_call(block):
    """Writes the counter of ticks to the block."""
    poke(block, ticks())
    return OK


@kept(cfunc, STATUS)
def clock_call(block):
    """Writes the time of the host's clock to the block."""
    poke(block, clock())
    return OK


# ---------------------------------------------------------------------------------------------------------------- lanes
@kept(njit, nogil=True)
def walk(lane, at, patient):
    """Makes the calls of a lane from call `at` on. Returns 4 * (the call at which it stopped) + why. `patient`: comes
    back only when all is over; else now and then, between two calls."""
    calls, count, state = peek(lane + 8 * CALLS), peek(lane + 8 * COUNT), peek(lane + 8 * STATE)
    begun = looked = 0 if patient else clock()
    left = OFTEN
    while at < count:
        if load(state + 8 * STOP):
            return 4 * at + STOPPED
        status = call(peek(calls + 16 * at), peek(calls + 16 * at + 8))
        if status == AGAIN:
            if not patient:
                return 4 * at + LOOK
            continue
        if status != OK:
            return 4 * at + FAULT
        at += 1
        left -= 1
        if left == 0 and not patient:
            now = clock()
            if now - begun > NAP:
                return 4 * at + LOOK
            left = 1 if now - looked > LONG else OFTEN
            looked = now
    return 4 * at + DONE


@kept(njit, "void(int64)", nogil=True)
def serve(lane):
    """A worker's life: makes its calls once for each `go`, until it is closed."""
    generation, state = peek(lane + 8 * END), peek(lane + 8 * STATE)
    while True:
        generation, naps = generation + 1, 0
        while not wait(lane + 8 * GO, generation, state, peek(lane + 8 * SPINS)) and not load(lane + 8 * CLOSING):
            naps += 1
        if load(lane + 8 * CLOSING):
            record(lane + 8 * END, FOREVER)  # nobody waits for it any more
            return
        if naps:  # Linux may wake it on the core of the caller's lane then, and leaves both there for several steps
            leave(load(lane + 8 * GO + 16))
        result = walk(lane, 0, True)
        poke(lane + 8 * RESULT, result)
        if result & 3 == FAULT:
            store_in_order(state + 8 * STOP, 1)
        record(lane + 8 * END, generation)


@kept(njit, "void(int64)", nogil=True)
def close(lane):
    """Ends a worker; if STOP is set, after its present call."""
    store_in_order(lane + 8 * CLOSING, 1)
    record(lane + 8 * GO, FOREVER)


@kept(njit, "boolean(int64, int64, int64)", nogil=True)
def join(workers, count, state):
    """Waits for the workers, for at most a nap. Returns whether all have ended."""
    for i in range(count):
        worker = peek(workers + 8 * i)
        if not wait(worker + 8 * END, peek(state + 8 * GENERATION), state, peek(worker + 8 * SPINS)):
            return False
    return True


@kept(njit, "int64(int64, int64, int64, int64)", nogil=True)
def step(lane, workers, count, at):
    """One run: lets the workers go, makes the calls of the caller's lane, waits for the workers. Returns as `walk`;
    after LOOK, call it again with that `at`, which is -1 for a new run."""
    state = peek(lane + 8 * STATE)
    if at < 0:
        at = 0
        generation = peek(state + 8 * GENERATION) + 1
        poke(state + 8 * GENERATION, generation)
        for i in range(count):
            record(peek(workers + 8 * i) + 8 * GO, generation)
    result = walk(lane, at, False)
    if result & 3 == DONE:
        if not join(workers, count, state):
            return result - DONE + LOOK
        if load(state + 8 * STOP):  # a worker's call has failed
            return result - DONE + STOPPED
    return result


@kept(njit, "void(int64, int64, int64)", nogil=True)
def move(copies, count, turn):
    """Makes copies of this turn. Four words each: from where, by how much the place moves each turn, and the same of
    where to; the number of bytes is the larger of the two moves."""
    for i in range(count):
        source, by, to, on = (peek(copies + 32 * i), peek(copies + 32 * i + 8), peek(copies + 32 * i + 16),
                              peek(copies + 32 * i + 24))
        memcpy(to + on * turn, source + by * turn, max(by, on))


@kept(njit, "int64(int64, int64, int64, int64, int64, int64, int64)", nogil=True)
def steps(lane, workers, count, copies, takes, gives, at):
    """TURNS runs, each between the first `takes` copies and the other `gives`. Returns as `step`; after LOOK, call it
    again. Word TURN of the state counts the runs that are done."""
    state, begun = peek(lane + 8 * STATE), clock()
    while peek(state + 8 * TURN) < peek(state + 8 * TURNS):
        turn = peek(state + 8 * TURN)
        if at < 0:
            move(copies, takes, turn)
        result = step(lane, workers, count, at)
        if result & 3 != DONE:
            return result
        move(copies + 32 * takes, gives, turn)
        poke(state + 8 * TURN, turn + 1)
        at = -1
        if clock() - begun > NAP:
            return 4 * at + LOOK
    return DONE


# ----------------------------------------------------------------------------------------------------- calls of kernels
@kept(cfunc, STATUS)
def several_call(block):
    """Block: how many calls, then the address and the block of each."""
    for i in range(peek(block)):
        status = call(peek(block + 8 + 16 * i), peek(block + 16 + 16 * i))
        if status != OK:
            return status
    return OK


@kept(cfunc, STATUS)
def zeros_call(block):
    """Block: address, bytes."""
    memset(peek(block), 0, peek(block + 8))
    return OK


@intrinsic
def _numpy_loop(context, address, operands, sizes, strides, data):
    def build(context, b, signature, args):
        b.call(b.inttoptr(args[0], ir.FunctionType(ir.VoidType(), [I64] * 4).as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), build


#: words of the block of a loop of NumPy: where it is, its data, how many operands, how many outer axes; then the
#: addresses of its sizes, its strides, the operands as it changes them, the operands, the sizes and strides of the
#: outer axes and their counters
LOOP, DATA, OPERANDS, AXES, SIZES, STRIDES, MOVING, FIRST, OUTER_SIZES, OUTER_STRIDES, COUNTERS = range(11)


@kept(cfunc, STATUS)
def numpy_call(block):
    """Calls an inner loop of NumPy for each index of the outer axes, the last the fastest. Block: as above."""
    loop, data, operands, axes = peek(block), peek(block + 8), peek(block + 16), peek(block + 24)
    sizes, strides, moving, first = (peek(block + 8 * SIZES), peek(block + 8 * STRIDES), peek(block + 8 * MOVING),
                                     peek(block + 8 * FIRST))
    outer, apart, counters = (peek(block + 8 * OUTER_SIZES), peek(block + 8 * OUTER_STRIDES),
                              peek(block + 8 * COUNTERS))
    for axis in range(axes):
        poke(counters + 8 * axis, 0)
    while True:
        for j in range(operands):
            address = peek(first + 8 * j)
            for axis in range(axes):
                address += peek(counters + 8 * axis) * peek(apart + 8 * (axis * operands + j))
            poke(moving + 8 * j, address)
        _numpy_loop(loop, moving, sizes, strides, data)
        axis = axes - 1
        while axis >= 0:
            index = peek(counters + 8 * axis) + 1
            if index < peek(outer + 8 * axis):
                poke(counters + 8 * axis, index)
                break
            poke(counters + 8 * axis, 0)
            axis -= 1
        if axis < 0:
            return OK


#: words of the block of a group's product: a loop of NumPy, its data; the addresses of its sizes, its strides and the
#: operands as it changes them; which size the rows of a group are; the address of the numbers of rows, how many of them
#: come before; the bytes of zeros if there are no rows; for which numbers of rows, from the first on and below the
#: second, another call takes care; then of each operand the first address and the step by row
ROWS, NUMBERS, BEFORE, EMPTY, FROM, BELOW, PLACES = range(5, 12)


@kept(cfunc, STATUS)
def grouped_call(block):
    """Calls an inner loop of NumPy on a group of rows, whose number it reads. Block: as above."""
    loop, data, sizes, strides, moving = (peek(block), peek(block + 8), peek(block + 16), peek(block + 24),
                                          peek(block + 32))
    numbers, before, empty = peek(block + 8 * NUMBERS), peek(block + 8 * BEFORE), peek(block + 8 * EMPTY)
    row = 0
    for i in range(before):
        row += peek(numbers + 8 * i)
    count = peek(numbers + 8 * before)
    if peek(block + 8 * FROM) <= count < peek(block + 8 * BELOW):
        return OK
    for j in range(3):
        place = block + 8 * (PLACES + 2 * j)
        poke(moving + 8 * j, peek(place) + row * peek(place + 8))
    if count > 0:
        poke(sizes + 8 * peek(block + 8 * ROWS), count)
        _numpy_loop(loop, moving, sizes, strides, data)
    elif empty:
        memset(peek(moving + 16), 0, empty)
    return OK


FLOATS = 8  #: registers for floating-point arguments; more arguments of that kind are not supported
WORDS = (16, 32, 64, 128, 256)  #: how many other arguments a block may have room for


def _numba_loop(words):
    """A call of a function that numba has compiled. Block: its address, FLOATS floating-point arguments, `words`
    others.

    Whatever the function's type, its first eight floating-point arguments are in registers of their own, and its other
    arguments in other registers and then one after another on the stack, in eight bytes each. Both the System V ABI for
    x86-64 and the Linux ABI for aarch64 say so. A function does not read arguments that it does not have.
    """
    kind = ir.FunctionType(I32, [*[I64] * words, *[F64] * FLOATS])

    @intrinsic
    def make(context, block):
        def build(context, b, signature, args):
            loaded = [b.load(b.gep(_at(b, args[0]), [I64(i)])) for i in range(1 + FLOATS + words)]
            floats = [b.bitcast(word, F64) for word in loaded[1 : 1 + FLOATS]]
            return b.call(b.inttoptr(loaded[0], kind.as_pointer()), [*loaded[1 + FLOATS :], *floats])

        return types.int32(types.int64), build

    return make


_few, _some, _many, _more, _most = map(_numba_loop, WORDS)


@kept(cfunc, STATUS)
def numba_call(block):
    """Block: the place in WORDS of its room, then as above."""
    room, block = peek(block), block + 8
    if room == 0:
        status = _few(block)
    elif room == 1:
        status = _some(block)
    else:
        status = _many(block) if room == 2 else _more(block) if room == 3 else _most(block)
    return OK if status == 0 else FAILED
