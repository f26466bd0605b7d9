"""CUDA sources: every kernel compiles for every architecture and type, and launches that do not fit their
kernel are refused."""

from __future__ import annotations

import ctypes
import importlib.metadata
import itertools
import re
from functools import cache

import numpy as np
import pytest
from cuda_on_cpu import run_grid, sources
from helpers import need
from hypothesis import given, settings
from hypothesis import strategies as st

from minidl.kernels import cuda
from minidl.kernels.cuda import Grid, LaunchError, Packed, Struct

SOURCES = sorted(p.name for p in cuda.SOURCES.glob("*.cu"))
FLOATS = ("float", "double", "__half", "__nv_bfloat16")
#: what a template parameter stands for, by its name
TYPES = {"T": FLOATS, "U": FLOATS, "P": ("float", "double"), "G": ("float", "__half"), "L": ("__nv_bfloat16",),
         "Index": ("int", "long long"), "Mask": ("bool", "long long"), "bool WHOLE": ("false", "true")}


def instances(source, first=FLOATS):
    """All kernels of a source with all their types, where the first is one of these."""
    for name, (template, _) in cuda.kernels_of(source).items():
        for types in itertools.product(*(TYPES[p.removeprefix("typename ")] for p in template)):
            if not types or types[0] not in FLOATS or types[0] in first:
                yield f"{name}<{', '.join(types)}>" if types else name


# ------------------------------------------------------------------------------------------------------------ compiling
@pytest.fixture(scope="module")
def compiler():
    """`compiler(code, name, architecture, kernels)` gives NVRTC's messages and the kernels' names in the binary; for a
    virtual architecture like `compute_90` also its code, which is not compiled any further."""
    missing = "CUDA sources are not compiled: {} is missing; install minidl[cuda-check]"
    need("cupy")
    from cupy.cuda import nvrtc

    try:
        nvrtc.getVersion()
    except Exception as error:  # cupy raises what the search for the library raised
        pytest.skip(missing.format(f"libnvrtc ({type(error).__name__})"))
    try:
        header = next(f for f in importlib.metadata.files("nvidia-cuda-runtime") if f.name == "cuda_fp16.h")
    except (importlib.metadata.PackageNotFoundError, StopIteration):
        pytest.skip(missing.format("nvidia-cuda-runtime"))

    def compile(code, name, architecture, kernels=()):
        program = nvrtc.createProgram(code, name, (), ())
        try:
            for kernel in kernels:
                nvrtc.addNameExpression(program, kernel)
            try:
                nvrtc.compileProgram(program, (f"-arch={architecture}", "-std=c++17", "--ptxas-options=-O0",
                                               f"-I{header.locate().parent}"))
            except nvrtc.NVRTCError:
                return nvrtc.getProgramLog(program), []
            said, names = (nvrtc.getProgramLog(program).strip("\0\n"),
                           [nvrtc.getLoweredName(program, k) for k in kernels])
            if architecture.startswith("compute"):
                return said, names, nvrtc.getPTX(program).decode()
            assert nvrtc.getCUBIN(program)
            return said, names
        finally:
            nvrtc.destroyProgram(program)

    return cache(compile)


HOPPER = "compute_90", ("float", "__half")


@pytest.mark.few(4)
@pytest.mark.parametrize(("architecture", "types"), [
    HOPPER, *(pytest.param(*row, marks=pytest.mark.slow) for row in (
        ("sm_75", FLOATS), ("sm_90", FLOATS), *((name, ("float", "__nv_bfloat16")) for name in ("sm_80", "sm_100"))))])
@pytest.mark.parametrize("source", SOURCES)
def test_every_kernel_compiles_without_a_warning(compiler, source, architecture, types):
    """And has the parameters that `signature` says. A type in which sums are made and one in which they are not will do
    for some architectures: sources ask for theirs in their wait alone, and CUDA's headers differ for 16 bits."""
    kernels = tuple(instances(source, types))
    log, found, *_ = compiler(agreement(source, types), source, architecture, kernels)
    assert log == ""
    assert len(set(found)) == len(kernels) > 0


@pytest.mark.few(1)
@pytest.mark.parametrize("source", ["norm.cu", "norm_eval.cu", "layer_norm.cu"])
def test_four_columns_are_loaded_at_once(compiler, source):
    """Where they are WHOLE, 8 bytes of 16-bit types and 16 of float, and one by one where they are not."""
    kernels = tuple(instances(source, HOPPER[1]))
    _, names, code = compiler(agreement(source, HOPPER[1]), source, HOPPER[0], kernels)
    for kernel, name in ((k, n) for k, n in zip(kernels, names, strict=True) if ", " in k):
        four = re.search(r"ld\.global\S*\.v4\.(?:f32|u16)", code.partition(f".entry {name}(")[2].partition(".entry")[0])
        assert bool(four) == kernel.endswith("true>"), kernel


def test_dependent_kernels_wait_and_let_the_next_one_start(compiler):
    """A kernel waits only from Hopper on, and only if it is asked for; else the source is as before."""
    define, kernels = "#define DEPENDENT\n", ("row_sums<float, float>",)
    for before, architecture, waits in ((define, "compute_90", 1), (define, "compute_80", 0), ("", "compute_90", 0)):
        _, _, code = compiler(before + cuda.text("sums.cu"), "sums.cu", architecture, kernels)
        assert [code.count(f"griddepcontrol.{what}") for what in ("wait", "launch_dependents")] == [waits, waits]


def test_what_does_not_compile_is_noticed(compiler):
    assert "undefined" in compiler("__global__ void k(int* x) { x[0] = nothing; }", "k.cu", "sm_90")[0]
    assert "never referenced" in compiler("__global__ void k(int* x) { int unused; x[0] = 1; }", "k.cu", "sm_90")[0]


# ----------------------------------------------------------------------------------------------------------- signatures
SAME = """
template <typename A, typename B> struct Same { static constexpr bool value = false; };
template <typename A> struct Same<A, A> { static constexpr bool value = true; };
template <typename A> struct Bare { typedef A type; };
template <typename A> struct Bare<const A*> { typedef A* type; };
template <typename... P> struct Types {};
template <typename... P> __device__ Types<typename Bare<P>::type...> of(void (*)(P...));
"""


def agreement(source, types=("float", "__half")):
    """A program that compiles if each kernel has the parameters that `signature` says."""
    checks = (f"static_assert(Same<decltype(of(&{k})), Types<{', '.join(cuda.signature(source, k))}>>::value, \"{k}\");"
              for k in instances(source, types))
    return "\n".join([cuda.text(source), SAME, *checks])


def test_signatures_are_what_the_compiler_sees(odd, compiler):
    assert compiler(agreement("odd.cu"), "odd.cu", "sm_90")[0] == ""


def test_a_wrong_signature_is_noticed(compiler):
    program = agreement("elementwise.cu").replace("Types<float*, float*, long long>", "Types<float*, float*, int>")
    assert "static assertion failed" in compiler(program, "elementwise.cu", "sm_90")[0]


@pytest.mark.parametrize("source", SOURCES)
def test_no_kernel_is_overlooked(source):
    plain = re.sub(r"//[^\n]*|/\*.*?\*/", "", cuda.text(source), flags=re.DOTALL)
    assert len(cuda.kernels_of(source)) == plain.count("__global__") > 0


ODD = """
#include "common.cuh"
// template <typename T> __global__ void commented_out(T* x) {}
/* __global__ void
   this_too(int* x) {} */
template <typename T, typename Index>
__global__ void __launch_bounds__(256, 2) gather(const T* __restrict__ x, T const* y, const Index *i, T *z,
                                                 long   long count, const Strides s /* by value */) {}
template <typename T> __global__ __launch_bounds__(32) void bounds_first(T* x, unsigned int n, bool b) {}
extern "C" __global__ void nothing() {}
__global__ void constants(unsigned char* const x, double const d) {}
"""
ECHO = """
#include "common.cuh"
struct Box { int axes; long long step[4][6]; };
__global__ void echo(float f, double d, int i, unsigned int u, long long l, unsigned long long w, bool b, Box s,
                     double* small, unsigned long long* whole, const __half* half) {
    small[0] = f; small[1] = d; small[2] = i; small[3] = u; small[4] = b; small[5] = s.axes; small[6] = value(half[0]);
    whole[0] = l; whole[1] = w; whole[2] = s.step[2][5];
}
"""


@pytest.fixture(scope="module")
def odd():
    """Two sources of this test beside common.cuh."""
    with sources({"odd.cu": ODD, "echo.cu": ECHO}):
        yield


def test_sources_may_be_written_in_other_ways(odd):
    assert cuda.kernels_of("odd.cu") == {
        "gather": (("typename T", "typename Index"), ("T*", "T*", "Index*", "T*", "long long", "Strides")),
        "bounds_first": (("typename T",), ("T*", "unsigned int", "bool")),
        "nothing": ((), ()),
        "constants": ((), ("unsigned char*", "double")),
    }
    assert cuda.signature("odd.cu", "gather<__half, int>") == ("__half*", "__half*", "int*", "__half*",
                                                               "long long", "Strides")
    assert cuda.signature("odd.cu", "nothing") == ()


@pytest.mark.parametrize(("kernel", "message"), [("scatter", "odd.cu has no kernel scatter"),
                                                 ("gather", "0 template arguments; gather takes 2"),
                                                 ("gather<float>", "1 template arguments; gather takes 2"),
                                                 ("nothing<float>", "1 template arguments; nothing takes 0")])
def test_unknown_kernels_are_named(odd, kernel, message):
    with pytest.raises(LaunchError, match=re.escape(message)):
        cuda.signature("odd.cu", kernel)


# ------------------------------------------------------------------------------------------------------------- launches
def relu(blocks=(1,), threads=(32,), shared=0, arguments=None):
    x = np.ones(4, np.float32)
    return Grid("elementwise.cu", "relu<float>", blocks, threads, (x, x, 4) if arguments is None else arguments, shared)


@given(blocks=st.lists(st.integers(-1, 2) | st.sampled_from([65535, 65536, 2**31 - 1, 2**31]), min_size=1, max_size=3),
       threads=st.lists(st.integers(-1, 65) | st.sampled_from([128, 1024, 1025]), min_size=1, max_size=3),
       shared=st.integers(-1, 1) | st.sampled_from([49152, 49153]))
def test_geometry_is_that_of_the_hardware(blocks, threads, shared):
    x, y, z = (*blocks, 1, 1)[:3]
    a, b, c = (*threads, 1, 1)[:3]
    fits = [0 < x < 2**31 and 0 < y < 65536 and 0 < z < 65536, a > 0 and b > 0 and 0 < c <= 64 and a * b * c <= 1024,
            0 <= shared <= 49152]
    launch = relu(tuple(blocks), tuple(threads), shared)
    if all(fits):
        cuda.check(launch)
    else:
        with pytest.raises(LaunchError, match="relu<float>: .*" + ("blocks", "threads a block",
                                                                   "bytes of shared memory")[fits.index(False)]):
            cuda.check(launch)


X = np.ones(3, np.float32)
GOOD = {"float*": [X, X[::2], np.ones((), np.float32)], "double*": [X.astype(float)],
        "int*": [np.arange(3, dtype=np.int32)], "unsigned char*": [np.ones(3, np.uint8)], "bool*": [X > 0],
        "__half*": [X.astype(np.float16)], "float": [0.5, 2, float("nan")], "double": [-1e300, 0],
        "int": [-(2**31), 2**31 - 1], "unsigned int": [0, 2**32 - 1], "long long": [-(2**63), 2**63 - 1],
        "unsigned long long": [0, 2**64 - 1], "bool": [True, False], "Strides": [Struct("Strides", b"")]}
BAD = {"float*": [X.astype(float), 3, None, [1.0]], "double*": [X], "int*": [np.arange(3), X],
       "unsigned char*": [X > 0], "bool*": [np.ones(3, np.uint8)],
       "__half*": [X, X.view(np.uint16)], "float": ["1", True, X, None], "double": [False, X[0], "x"],
       "int": [2**31, -(2**31) - 1, 1.0, True, np.int32(3), None], "unsigned int": [-1, 2**32, False],
       "long long": [2**63, 1.5], "unsigned long long": [-1, 2**64, 2.0], "bool": [0, 1, 1.0],
       "Strides": [Struct("Other", b""), 1, X, b""]}


@given(data=st.data())
def test_arguments_are_checked_one_by_one(data):
    """A kernel with parameters drawn at random takes what fits them; one that does not is named."""
    kinds = data.draw(st.lists(st.sampled_from(sorted(GOOD)), max_size=5))
    values = [data.draw(st.sampled_from(GOOD[k])) for k in kinds]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "signature", lambda source, kernel: tuple(kinds))

        def refused(arguments, message):
            with pytest.raises(LaunchError, match=re.escape(message)):
                cuda.check(relu(arguments=tuple(arguments)))

        cuda.check(relu(arguments=tuple(values)))
        refused([*values, 1], f"relu<float> takes {len(kinds)} arguments, not {len(kinds) + 1}")
        if kinds:
            refused(values[1:], f"relu<float> takes {len(kinds)} arguments, not {len(kinds) - 1}")
            i = data.draw(st.integers(0, len(kinds) - 1))
            bad = data.draw(st.sampled_from(BAD[kinds[i]]))
            given = f"an array of {bad.dtype}" if isinstance(bad, np.ndarray) else ""
            refused([*values[:i], bad, *values[i + 1:]], f"relu<float>: argument {i} is {kinds[i]}, not {given}")


@settings(deadline=None)  # the first call compiles
@given(f=st.floats(width=32, allow_nan=False), d=st.floats(allow_nan=False), i=st.integers(-(2**31), 2**31 - 1),
       u=st.integers(0, 2**32 - 1), l=st.integers(-(2**63), 2**63 - 1), w=st.integers(0, 2**64 - 1), b=st.booleans(),
       step=st.integers(-(2**63), 2**63 - 1), half=st.floats(width=16, allow_nan=False))
def test_arguments_arrive(odd, f, d, i, u, l, w, b, step, half):
    """What is packed as the driver takes it is what a kernel compiled by a C++ compiler reads."""
    fields = np.zeros(1, np.dtype([("axes", np.int32), ("step", np.int64, (4, 6))], align=True))
    fields["axes"], fields["step"][0, 2, 5] = 6, step
    small, whole = np.zeros(7), np.zeros(3, np.uint64)
    run_grid(Grid("echo.cu", "echo", (1,), (1,),
                  (f, d, i, u, l, w, b, Struct("Box", fields.tobytes()), small, whole, np.full(1, half, np.float16))))
    assert small.tolist() == [f, d, i, u, b, 6, half]
    assert whole.tolist() == [n % 2**64 for n in (l, w, step)]


def test_what_is_packed_stays_alive():
    """The driver reads through pointers: the values must live as long as what was packed."""
    packed = Packed(relu(arguments=(X, X, 2**40 + 3)))
    pointers = (ctypes.c_void_p * 3).from_address(packed.address)
    assert [ctypes.c_void_p.from_address(pointers[n]).value for n in (0, 1)] == [X.ctypes.data] * 2
    assert ctypes.c_longlong.from_address(pointers[2]).value == 2**40 + 3


def test_a_thread_for_each_element_up_to_a_limit():
    assert cuda.each("elementwise.cu", "relu<float>", 0, X, X, 0) == []
    for count in (1, 255, 256, 257, 10**6, 2**40):
        (launch,) = cuda.each("elementwise.cu", "relu<float>", count, X, X, count)
        threads = launch.blocks[0] * launch.threads[0]
        assert threads >= min(count, 132 * 2048)
        assert launch.blocks[0] <= max(132 * 16, 1)
        cuda.check(launch)
