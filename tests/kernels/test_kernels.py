"""Kernels' CPU forms: updates in place, strided operands, no memory of their own; random bits; wrong names."""

from __future__ import annotations

from contextlib import nullcontext

import numba
import numpy as np
import pytest
from forms import bound, on_cpu, reference
from helpers import bytes_allocated
from hypothesis import given
from hypothesis import strategies as st
from kernel_examples import IN_PLACE, STRIDED, arrays, examples, in_place, strided
from numba.core.registry import cpu_target

import minidl as ml
from minidl.kernels import KERNELS, Kernel, KernelError, kernel, registry
from minidl.kernels.hints import X86, wide
from minidl.kernels.registry import jitted


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("example", [e for e in examples() if e.kernel in IN_PLACE
                                     and len({str(r) for r in e.reads[:2]}) < 3], ids=str)
def test_updates_may_be_in_place(example, dtype):
    for reads, writes in in_place(example, dtype):
        expected = reference(example.kernel, [r.copy() for r in reads], **example.constants)
        for y, e in zip(on_cpu(example.kernel, reads, writes, **example.constants), expected, strict=True):
            np.testing.assert_allclose(y, e, rtol=3e-6 if dtype == "float32" else 1e-13,
                                       atol=1e-7 if dtype == "float32" else 0)


@pytest.mark.skipif(not X86, reason="subnormal numbers are slow on x86 alone, and become 0 there alone")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("example", [e for e in examples(5, 7) if len(e.writes) > 1 and e.kernel in (
    "sgd", "adam", "nadam", "rmsprop", "muon")], ids=str)
def test_momenta_without_gradients_become_0(example, dtype):
    """And not subnormal, which takes long; whoever calls the update still has such numbers."""
    tiny = np.finfo(dtype).smallest_subnormal
    # Muon takes a tenth off, which is 0 if it is subnormal: then a normal momentum stays
    before = 4 * tiny if example.kernel == "muon" else 1.01 * np.finfo(dtype).tiny
    for reads, (p, *states) in in_place(example, dtype):
        p[...] = reads[1][...] = 0
        for i, state in enumerate(states):
            state[...] = 4 * tiny if i % 2 else before
        for thunk in bound(example.kernel, reads, [p, *states], **example.constants):
            thunk()
            assert (2 * tiny * np.ones(64, dtype)).all()
        assert not any(array.any() for array in (p, *states))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_slopes_behind_a_product_are_bit_identical_to_slopes_apart(dtype):
    x, dy = (np.random.default_rng(seed).standard_normal((7, 33)).astype(dtype) * 8 for seed in (0, 1))
    apart = np.empty_like(dy)
    for slope in ("relu_grad", "gelu_tanh_grad"):
        for out in (apart, dy):
            on_cpu(slope, [x, dy], [out])
        assert apart.tobytes() == dy.tobytes(), slope


@pytest.mark.few(10)
@pytest.mark.parametrize("example", list(examples(300, 400)), ids=str)
def test_calls_make_no_array(example):
    """Arrays here have 480 kB; NumPy itself goes through broadcast operands in pieces of 8192 elements."""
    reads, writes = arrays(example, "float32")
    thunks = bound(example.kernel, reads, writes, **example.constants)

    def run():
        with np.errstate(all="ignore"):
            for thunk in thunks:
                thunk()

    assert bytes_allocated(run) < 150_000


@pytest.mark.parametrize("example", [e for e in examples() if e.kernel in STRIDED], ids=str)
def test_strided_operands(example):
    """These kernels are handed views as they are."""
    reads, writes = arrays(example, "float64")
    on_cpu(example.kernel, strided(reads), writes, **example.constants)
    for y, e in zip(writes, reference(example.kernel, reads, **example.constants), strict=True):
        np.testing.assert_allclose(y, np.broadcast_to(e, y.shape), rtol=1e-13, atol=1e-13)


@given(axes=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 2)), max_size=6), width=st.sampled_from([1, 8, 33]),
       dtype=st.sampled_from(["float32", "float64", "int64"]), seed=st.integers(0, 99))
def test_a_copy_of_any_window_in_any_order_of_axes(axes, width, dtype, seed):
    """Rows, which a loop copies, among them."""
    rng = np.random.default_rng(seed)
    axes = [*axes, (width, int(rng.integers(3)))]
    whole = rng.integers(100, size=[n + more for n, more in axes]).astype(dtype)
    window = whole[tuple(slice(more, None) for _, more in axes)]
    order = rng.permutation(len(axes) - 1).tolist()
    x = window.transpose([*order, len(axes) - 1] if seed % 3 else rng.permutation(len(axes)))
    np.testing.assert_array_equal(on_cpu("copy", [x], [np.empty(x.shape, dtype)])[0], x)


@pytest.mark.parametrize("name", ["softmax", "softmax_grad", "log_softmax", "log_softmax_grad"])
@pytest.mark.parametrize("shape", [(3, 0), (0, 3), (2, 0, 0)])
def test_softmax_of_nothing_does_nothing(name, shape):
    on_cpu(name, [np.ones(shape)] * (2 if name.endswith("grad") else 1), [np.ones(shape)])


def test_dropout_depends_on_the_sample_and_not_on_the_batch():
    def dropped(samples=8, step=4, **more):
        constants = {"rate": 0.5, "seed": 3, "draw": 1, "sample": 0, **more}
        return reference("dropout", [np.ones((samples, 6)), np.array([step], np.uint64)], **constants)[0]

    whole = dropped()
    assert np.array_equal(whole[5:], dropped(3, sample=5))
    for change in ({"seed": 4}, {"draw": 2}, {"seed": 3 + (1 << 32)}, {"step": 5}):
        assert not np.array_equal(whole, dropped(**change)), change
    assert np.array_equal(whole, dropped(step=2**64 - 1, draw=6))


def test_philox_is_philox():
    """Known answers of the generator's authors."""
    from minidl.kernels.dropout import philox

    for counter, key, answer in (
            ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
            ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
            ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
             (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1))):
        words = philox(np, *(np.array([c], np.uint64) for c in counter), *key)
        assert tuple(int(w[0]) for w in words) == answer


def test_a_kernel_that_is_not_known_is_told_with_those_near_it():
    with pytest.raises(KernelError, match=r"unknown kernel 'reluu'; similar names: relu.*@kernel\('reluu'\)"):
        KERNELS["reluu"]
    tape = ml.autograd.tape.current()
    x = ml.array(np.ones(2))
    with pytest.raises(KernelError, match="unknown kernel 'nothing'"), tape.task(tape.new_unit(), ml.core.graph.Kind.F):
        tape.call("nothing", [x], [x])


def test_a_kernel_without_a_cpu_form_says_how_to_define_one(monkeypatch):
    monkeypatch.setitem(KERNELS, "half", Kernel("half", lambda xp, x: x / 2))
    tape = ml.autograd.tape.current()
    x, y = ml.array(np.ones(2)), ml.array(np.zeros(2))
    with (pytest.raises(KernelError, match=r"kernel half has no CPU form; define one with @"),
          tape.task(tape.new_unit(), ml.core.graph.Kind.F)):
        tape.call("half", [x], [y])


@pytest.mark.parametrize("form", [
    lambda x, y: None, lambda x, y: lambda: np.negative(x, out=y), lambda x, y: [np.negative(x, out=y)]])
def test_a_cpu_form_that_gives_no_calls_is_told(form):
    with pytest.raises(KernelError, match="form of kernel mine gave a .*; it must return a list of calls"):
        Kernel("mine", lambda xp, x: -x).cpu(form).bind([np.ones(2)], [np.ones(2)], [], {})


@pytest.mark.parametrize(("more", "message"), [
    ({"axes": 3}, "the axes of kernel mine are 3; write a label"), ({"axes": "mi"}, "axes of kernel mine are 'mi'"),
    ({"axes": lambda reads: 5}, "the axes of kernel mine are 5"), ({"axes": "m i->m"}, "kernel mine are 'm i->m'"),
    ({"over": 3}, "over of kernel mine is 3; give pairs"), ({"over": [0, 1]}, "over of kernel mine is"),
    ({"work": [(2,)]}, "work of kernel mine is .*; it must be a function"), ({"alike": "x"}, "alike of kernel mine is"),
    ({"flops": 2.0}, "flops of kernel mine is 2.0"), ({"window": 1}, "window of kernel mine is 1")])
def test_what_a_kernel_says_of_itself_is_checked(monkeypatch, more, message):
    monkeypatch.setattr(registry, "KERNELS", {})
    with pytest.raises(KernelError, match=message):
        kernel("mine", **more)(lambda xp, x: -x).cut([], {})


def test_the_texts_of_axes_of_all_kernels_are_known():
    texts = [one for one in KERNELS.values() if isinstance(one.axes, str)]
    assert [one.cut([], {}) for one in texts] == [one.axes for one in texts]


def test_a_kernel_is_defined_once():
    with pytest.raises(KernelError, match="kernel relu is defined twice"):
        kernel("relu")(lambda xp, x: x)


def test_two_functions_of_one_name_in_one_file_are_two_definitions(monkeypatch):
    monkeypatch.setattr(registry, "KERNELS", {})
    text = "@kernel('mine')\ndef _(xp, x):\n    return x\n"
    with pytest.raises(KernelError, match="kernel mine is defined twice"):
        exec(compile(text + text, "ops.py", "exec"), {"__name__": "one", "kernel": kernel})


@pytest.mark.parametrize(("file", "module", "function", "anew"), [  # of the second definition
    ("ops.py", "one", "mine", True), ("cell.py", "one", "mine", True), ("ops.py", "two", "mine", True),
    ("other.py", "two", "mine", False), ("ops.py", "one", "other", False)])
def test_a_cell_or_module_that_runs_again_defines_its_kernels_anew(monkeypatch, file, module, function, anew):
    monkeypatch.setattr(registry, "KERNELS", {})

    def run(file, module, function, factor):
        text = f"@kernel('mine')\ndef {function}(xp, x):\n    return {factor} * x"
        exec(compile(text, file, "exec"), {"__name__": module, "kernel": kernel})

    run("ops.py", "one", "mine", 2)
    with nullcontext() if anew else pytest.raises(KernelError, match="kernel mine is defined twice"):
        run(file, module, function, 3)
    assert registry.KERNELS["mine"].reference(np, 1) == (3 if anew else 2)


def test_a_loop_may_ask_for_longer_vectors():
    """It gets them where the processor is known to gain; elsewhere the same loop is compiled without."""
    def squares(x, y):  # type: ignore[no-untyped-def]
        wide()
        for i in range(x.size):
            y[i] = x[i] * x[i]

    jitted(squares)  # makes `wide` known
    compiled = numba.njit(squares)
    x, y = np.arange(100, dtype=np.float32), np.empty(100, np.float32)
    compiled(x, y)
    np.testing.assert_array_equal(y, x * x)
    code, = compiled.inspect_llvm().values()
    gains = "+avx512fp16" in cpu_target.target_context.codegen().magic_tuple()[2]
    assert ('"prefer-vector-width"="512"' in code) == gains
