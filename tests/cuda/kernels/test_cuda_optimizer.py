"""Updates, the global norm, loss scaling and dropout: the CUDA forms, run on the CPU, and the forms for
many parameters."""

from __future__ import annotations

import ctypes
import math

import numpy as np
import pytest
from covering import pairs
from cuda_on_cpu import not_finite, run, run_kernel
from cuda_sanitizers import SANITIZERS, record, replay
from forms import on_cpu, reference
from helpers import bits
from hypothesis import given, settings
from hypothesis import strategies as st

from minidl.kernels import KERNELS, cuda, gradients, product_update, update

SIZES = (1, 31, 33, 257, 2049, 0, 5000)
RULES = [("sgd", {"momentum": 0.0, "weight_decay": 0.0}), ("sgd", {"momentum": 0.0, "weight_decay": 0.1}),
         ("sgd", {"momentum": 0.9, "weight_decay": 0.1, "nesterov": False}),
         ("sgd", {"momentum": 0.9, "weight_decay": 0.0, "nesterov": True}),
         ("adam", {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "decoupled": False}),
         ("adam", {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "decoupled": True}),
         ("nadam", {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}),
         ("rmsprop", {"alpha": 0.9, "eps": 1e-8, "momentum": 0.0, "weight_decay": 0.1}),
         ("rmsprop", {"alpha": 0.9, "eps": 1e-8, "momentum": 0.9, "weight_decay": 0.0}),
         ("rmsprop", {"alpha": 0.9, "eps": 1e-8, "momentum": 0.0, "weight_decay": 0.1, "centered": True}),
         ("rmsprop", {"alpha": 0.9, "eps": 1e-8, "momentum": 0.9, "weight_decay": 0.0, "centered": True})]
RTOL = {"float16": 2e-3, "float32": 2e-6, "float64": 1e-13}


def numbers(size, seed=0, low=-2.0, dtype="float64"):
    return np.random.default_rng([seed, size]).uniform(low, 2.0, size).astype(dtype)


def states_of(name, constants):
    return 2 if name in ("adam", "nadam") else (int(constants["momentum"] != 0) + (name == "rmsprop")
                                     + constants.get("centered", False))


def own(name, constants, size, dtype, gradient=None):
    """A parameter, its gradient and its states."""
    states = [numbers(size, 2 + k, low=0.1, dtype=dtype) for k in range(states_of(name, constants))]
    if constants.get("centered"):
        states[0] += 4  # a mean of squares is not below the square of the mean
    return [numbers(size, 0, dtype=dtype), numbers(size, 1, dtype=gradient or dtype), *states]


def shared(name, dtype, clipped=False, guarded=None, step=2.0):
    """Learning rate, powers, factor, flag."""
    return [np.array([0.1], dtype), *([np.array([step, 0.9**step, 0.95**step])] if name == "adam" else []),
            *([np.array([step, 0.3, 0.95**step, 0.5, 0.51])] if name == "nadam" else []),
            *([np.array([0.5], dtype)] if clipped else []),
            *([np.array([guarded], "int32")] if guarded is not None else [])]


def writes_of(groups, copy=None, in_place=False):
    """Parameters, states and copies that an update writes: full of NaN, or where what is read lies."""
    return [a if in_place and kind is None else np.full_like(a, np.nan, kind) for p, _, *states in groups
            for a, kind in (*((a, None) for a in (p, *states)), *([(p, copy)] if copy else []))]


def single(name, constants, own_arrays, common):
    """Arrays in the order of the kernel for one parameter."""
    p, g, *states = own_arrays
    return [p, g, common[0], *states, *common[1:]] if name == "sgd" else [*own_arrays, *common]


def several(name, groups, common):
    """Arrays in the order of the kernel for many. `common`: of each parameter, of which only the powers differ."""
    counts = int(name in ("adam", "nadam"))
    return [a for group, own in zip(groups, common, strict=True) for a in (*group, *own[1 : 1 + counts])] + [
        common[0][0], *common[0][1 + counts :]]


def close(found, expected, dtype):
    for y, e in zip(found, expected, strict=True):
        tolerance = RTOL[str(y.dtype)] if y.dtype.itemsize < np.dtype(dtype).itemsize else RTOL[dtype]
        np.testing.assert_allclose(y.astype("float64"), e.astype("float64"), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize(("name", "constants"), RULES)
def test_one_parameter(name, constants, dtype):
    """In place and elsewhere, on an address for vectors and beside it."""
    for size in SIZES:
        mine = own(name, constants, size, dtype)
        common = shared(name, dtype)
        wide = [a.astype("float64") for a in mine], [a.astype("float64") for a in common]
        expected = reference(name, single(name, constants, *wide), **constants)
        apart = [np.full_like(a, np.nan) for a in (mine[0], *mine[2:])]
        calls = run_kernel(name, single(name, constants, mine, common), apart, **constants)
        close(apart, expected, dtype)
        assert sum(isinstance(c, cuda.Grid) for c in calls) == (size > 0)
        for offset in (0, 1):
            here = ([np.concatenate([a[:1], a])[1:] if offset else a.copy() for a in mine] if size
                    else [a.copy() for a in mine])
            (call,) = run_kernel(name, single(name, constants, here, common), [here[0], *here[2:]], seed=5,
                                 **constants) or (None,)
            assert call is None or isinstance(call, cuda.Grid)
            for a, b in zip((here[0], *here[2:]), apart, strict=True):
                assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize(("name", "constants"), RULES)
def test_a_gradient_that_ends_with_its_update_leaves_the_bits_of_the_two_kernels(name, constants, monkeypatch):
    """On the CPU by parts of a few rows, of which the last one is smaller; the bits of a product are the library's, so
    there is one sample, or the gradient's are close."""
    monkeypatch.setattr(product_update, "SIZE", 40)
    for samples, columns, rows in ((1, 1, 1), (1, 17, 5), (1, 60, 3), (3, 5, 17), (64, 1, 9)):
        x, dy = numbers((samples, columns), dtype="float32"), numbers((samples, rows), 1, dtype="float32")
        w, _, *states = own(name, constants, (rows, columns), "float32")
        for bias in (False, True):
            for runs in (on_cpu, run_kernel):
                g, total = np.full_like(w, np.nan), [np.full(rows, np.nan, "float32")] * bias
                runs("linear_weight_grad", [x, dy], [g, *total], bias=bias)
                two, one = ([a.copy() for a in (w, *states)] for _ in range(2))
                common, sums = shared(name, "float32"), [np.full_like(t, np.nan) for t in total]
                runs(name, single(name, constants, [two[0], g, *two[1:]], common), two, **constants)
                reads = [x, dy, one[0], *single(name, constants, [one[0], g, *one[1:]], common)[2:]]
                runs("linear_weight_update", reads, [*one, *sums], rule=name, bias=bias, **constants)
                assert bits(*sums) == bits(*total)
                if samples == 1 or runs is run_kernel:
                    assert bits(*one) == bits(*two)
                else:
                    close(one, two, "float32")


OPTIONS = [{}, {"clipped": True}, {"guarded": True}, {"copy": "float16"},
           {"clipped": True, "guarded": True, "copy": "float16"}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("name", "constants"), [*RULES[2:5], RULES[-1]])
def test_many_parameters_get_the_bits_of_one_by_one(name, constants, options):
    """More of them than fit in one launch; the factor, the flag, gradients of another type, copies."""
    sizes = [*SIZES, *(1 + k % 6 for k in range(update.AT_ONCE))]
    dtype, copy = "float32", options.get("copy")
    for flag in (0, 1) if options.get("guarded") else (None,):
        groups = [own(name, constants, n, dtype, gradient="float16" if copy and i % 2 else None)
                  for i, n in enumerate(sizes)]
        common = [shared(name, dtype, options.get("clipped", False), flag, 2.0 + i % 3) for i in range(len(groups))]
        one, many = (writes_of(groups, copy) for _ in range(2))
        each = len(one) // len(groups)
        for i, group in enumerate(groups):
            run_kernel(name, single(name, constants, group, common[i]), one[i * each : (i + 1) * each],
                       **constants, **options)
        reads = several(name, groups, common)
        calls = run_kernel(f"{name}_many", reads, many, seed=3, count=len(groups), **constants, **options)
        assert sum(isinstance(c, cuda.Grid) for c in calls) == 2
        assert [a.tobytes() for a in one] == [a.tobytes() for a in many]
        close(many, reference(f"{name}_many", reads, count=len(groups), **constants, **options), dtype)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("name", "constants"), RULES)
def test_the_cpu_form_for_many_is_the_reference(name, constants, options):
    for flag in (0, 1) if options.get("guarded") else (None,):
        gradient = "float16" if options.get("copy") else "float32"
        groups = [own(name, constants, n, "float32", gradient) for n in (5, 0, 33)]
        common = [shared(name, "float32", options.get("clipped", False), flag, step) for step in (1.0, 2.0, 3.0)]
        reads = several(name, groups, common)
        expected = reference(f"{name}_many", reads, count=3, **constants, **options)
        for in_place in (False, True):
            groups = [[a.copy() for a in group] for group in groups]
            reads = several(name, groups, common)
            writes = writes_of(groups, options.get("copy"), in_place)
            close(on_cpu(f"{name}_many", reads, writes, count=3, **constants, **options), expected, "float32")


BAD = [np.nan, np.inf, -np.inf]


def flagged(name, constants, groups, common, seed=0, **options):
    """Whether the flag is set by an update of these parameters, which writes elsewhere; and what is written."""
    writes = writes_of(groups)
    not_finite()
    run_kernel(f"{name}_many", several(name, groups, [common] * len(groups)), writes, seed=seed, count=len(groups),
               **constants, **options)
    return not_finite(), writes


@pytest.mark.parametrize(*pairs(rule=RULES, gradient=["float16", "float32", "float64"], bad=BAD))
def test_one_gradient_that_is_not_finite_sets_the_flag(rule, gradient, bad):
    """Wherever it is: in the last of many shares, between four neighbours and beside them; for one
    parameter and for many."""
    name, constants = rule
    dtype = "float64" if gradient == "float64" else "float32"
    groups, common = [own(name, constants, n, dtype, gradient) for n in (5, 5000, 33)], shared(name, dtype)
    assert not flagged(name, constants, groups, common)[0]
    for tensor, places in ((0, (4,)), (1, (0, 2047, 2049, 4997, 4999)), (2, (32,))):
        for place in places:
            g = groups[tensor][1]
            before, g[place] = g[place], bad
            assert flagged(name, constants, groups, common, seed=place)[0], (tensor, place)
            run_kernel(name, single(name, constants, groups[tensor], common),
                       [a.copy() for a in (groups[tensor][0], *groups[tensor][2:])], **constants)
            assert not_finite(), (tensor, place)
            g[place] = before
    assert not flagged(name, constants, groups, common)[0]


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize(("name", "constants"), RULES[2:5])
def test_a_step_that_is_skipped_sets_no_flag(name, constants, bad):
    groups = [own(name, constants, n, "float32", "float16") for n in (5, 3000)]
    groups[1][1][2999] = bad
    for skip in (1, 0):
        for clipped in (False, True):
            found, writes = flagged(name, constants, groups, shared(name, "float32", clipped, skip),
                                    clipped=clipped, guarded=True)
            assert found == (not skip)
            assert skip == all(np.isfinite(a).all() for a in writes)


@pytest.mark.parametrize(("name", "constants"), RULES[2:5])
def test_the_flag_tells_of_gradients_as_they_are_used(name, constants):
    """So of the clip factor, which makes 0 and NaN of finite and infinite ones; of no parameter, state or rate."""
    (p, g, *states), common = own(name, constants, 33, "float32"), shared(name, "float32", clipped=True)
    common[-1][0] = np.nan
    assert flagged(name, constants, [[p, g, *states]], common, clipped=True)[0]
    common[-1][0] = 2.0
    large = np.full_like(g, 3e38)
    assert flagged(name, constants, [[p, large, *states]], common, clipped=True)[0]
    assert not flagged(name, constants, [[p, large, *states]], common[:-1])[0]
    common[-1][0], common[0][0] = 0.0, np.inf
    assert not flagged(name, constants, [[np.full_like(p, np.nan), large, *(np.full_like(s, np.inf) for s in states)]],
                       common, clipped=True)[0]


@pytest.mark.sanitizer
@pytest.mark.parametrize("sanitizer", SANITIZERS)
@pytest.mark.parametrize(("name", "constants"), RULES[3:5])
def test_threads_that_set_the_flag_at_once_do_not_race(name, constants, sanitizer):
    mine, common, flag = own(name, constants, 3001, "float32"), shared(name, "float32"), np.zeros(1, np.int32)
    mine[1][:] = np.nan
    (call,) = KERNELS[name].cuda_calls(single(name, constants, mine, common), [mine[0], *mine[2:]], [], constants)
    launch = call.flagged(flag)
    recorded = record(launch, lambda: run(launch), mine)
    assert flag[0] == 1
    replay([recorded], sanitizer)


def test_a_launch_without_its_flag_is_refused():
    p, g, lr = numbers(3, dtype="float32"), numbers(3, dtype="float32"), np.ones(1, "float32")
    (call,) = KERNELS["sgd"].cuda_calls([p, g, lr], [p], [], {})
    assert call.arguments[-1] is cuda.FLAG
    for launch in (call, call.flagged(p)):
        with pytest.raises(cuda.LaunchError, match=r"sgd<.*>: argument 5 is int\*, not"):
            cuda.check(launch)
    cuda.check(call.flagged(np.zeros(1, np.int32)))


def test_bfloat16_copies_and_gradients():
    import ml_dtypes

    p, v = numbers(100, dtype="float32"), numbers(100, 2, dtype="float32")
    g = numbers(100, 1).astype(ml_dtypes.bfloat16)
    constants = {"momentum": 0.9, "copy": "bfloat16"}
    writes = [np.empty_like(p), np.empty_like(v), np.empty_like(g)]
    reads = [p, g, np.array([0.1], "float32"), v]
    run_kernel("sgd", reads, writes, **constants)
    close(writes[:2], reference("sgd", reads, **constants)[:2], "float32")
    assert (writes[2] == writes[0].astype(ml_dtypes.bfloat16)).all()


def test_operands_that_do_not_fit_are_refused():
    p, g, lr = numbers(3, dtype="float32"), numbers(3, dtype="float32"), np.ones(1, "float32")
    for extra, options in ((np.ones(1), {"clipped": True}), (np.ones(1, "int64"), {"guarded": True})):
        with pytest.raises(cuda.LaunchError):
            KERNELS["sgd"].cuda_calls([p, g, lr, extra], [p], [], options)
    with pytest.raises(ValueError, match="contiguous"):
        KERNELS["sgd"].cuda_calls([p[::2], g[::2], lr], [p[::2]], [], {})


def test_arguments_of_a_launch_fit_in_4_kib():
    for table in (update._Tensors, gradients._Squares):
        assert ctypes.sizeof(table) <= 4096 - 128


def test_every_share_of_every_tensor_has_one_block():
    """The table alone, with sizes at which 32-bit numbers are too small."""
    sizes = [1, 2048, 2049, 0, 2**31 + 5, 10**10]
    arrays = [np.broadcast_to(np.zeros((), "float32"), n) for n in sizes]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(update, "flat", lambda a: a)
        (call,) = update.over_tensors("gradients.cu", "square_sums<float>", [[a] for a in arrays])
    table = update._Tensors.from_buffer_copy(call.arguments[0].content)
    shares = [-(-n // 2048) for n in sizes if n]
    assert list(table.start[:6]) == [0, *np.cumsum(shares)]
    assert set(table.start[5:]) == {sum(shares)} == {call.blocks[0]}
    assert list(table.size[:5]) == [n for n in sizes if n]


# -------------------------------------------------------------------------------------------------------------- Muon
MUON = {"momentum": 0.9, "coefficients": (3.4445, -4.775, 2.0315), "eps": 1e-7, "steps": 5, "scale": 1.5,
        "weight_decay": 0.1}


def matrices(shape, dtype="float32"):
    """A parameter, its gradient, its momentum, and the learning rate."""
    return [*(numbers(math.prod(shape), k, dtype=dtype).reshape(shape) for k in range(3)), np.array([0.1], dtype)]


def muon(reads, seed=0, in_place=False, **options):
    """Runs the CUDA form, which must not change its other inputs; returns the parameter and its momentum."""
    given = [a.copy() for a in reads]
    writes = [given[0], given[2]] if in_place else [np.full_like(a, np.nan) for a in (reads[0], reads[2])]
    run_kernel("muon", given, writes, seed=seed, **MUON, **options)
    kept = [i for i in range(len(reads)) if not in_place or i not in (0, 2)]
    assert bits(*(given[i] for i in kept)) == bits(*(reads[i] for i in kept))
    return writes


@pytest.mark.parametrize("bad", [None, *BAD])
def test_muon_skips_a_step_and_tells_of_what_is_not_finite(bad):
    reads = matrices((5, 500))
    plain = muon(reads, nesterov=True)
    if bad is not None:
        reads[1][4, 499] = bad
    for skip in (0, 1):
        for in_place in (False, True):
            not_finite()
            found = muon([*reads, np.array([skip], "int32")], 0, in_place, guarded=True, nesterov=True)
            assert not_finite() == (bad is not None and not skip)
            if skip:
                assert bits(*found) == bits(reads[0], reads[2])
            elif bad is None:
                assert bits(*found) == bits(*plain)


# --------------------------------------------------------------------------------------------------- Adam's step, norms
@pytest.mark.parametrize(("name", "more"), [("adam_tick", {}), ("nadam_tick", {"decay": 0.1})])
def test_every_parameter_counts_its_own_steps(name, more):
    first = [1.0, 1.0, 0.0, 0.0][: 2 + 2 * len(more)]
    constants = {"beta1": 0.9, "beta2": 0.99, **more}
    powers = np.array([[0.0, *first], [2.0, *first], [7.0, *first]])
    for skip in (None, 0, 1):
        reads = [powers, *([np.array([skip], "int32")] if skip is not None else [])]
        after = np.zeros_like(powers)
        run_kernel(name, reads, [after], **constants)
        np.testing.assert_allclose(after, reference(name, reads, **constants)[0], rtol=1e-15)
        assert after[:, 0].tolist() == ([0, 2, 7] if skip else [1, 3, 8])
        np.testing.assert_allclose(on_cpu(name, reads, [np.zeros_like(powers)], **constants)[0], after, rtol=1e-15)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("size", [0, 1, 31, 1025, 70001])
def test_square_sum(size, dtype):
    base = numbers(size + 1, dtype=dtype)
    for g in (base[:size], base[1:]):
        found = []
        for seed in (0, 5):
            total = np.full(1, np.nan)
            calls = run_kernel("square_sum", [g], [total], seed)
            found.append(total[0])
        np.testing.assert_allclose(total[0], np.square(g.astype("float64")).sum(), rtol=1e-13)
        assert found[0] == found[1]
        assert len(calls) == (1 if size < 2**16 else 2)


@pytest.mark.parametrize("count", [0, 1, 3, 257, 480, 481, 1100])
def test_clip_factor(count):
    squares = [numbers(1, seed=i, low=0.0) for i in range(count)]
    for limit in (1.0, 100.0):
        norm, factor = np.full(1, np.nan), np.full(1, np.nan, "float32")
        calls = run_kernel("clip_factor", squares, [norm, factor], seed=2, limit=limit)
        expected = reference("clip_factor", squares, limit=limit)
        assert norm[0] == expected[0][0]  # added in the same order
        assert factor[0] == np.float32(expected[1][0])
        assert len(calls) == max(1, -(-count // 480))
    if count:
        squares[0][0] = np.nan
        run_kernel("clip_factor", squares, [norm, factor], limit=1.0)
        assert np.isnan(norm[0])
        assert np.isnan(factor[0])


# --------------------------------------------------------------------------------------------------------- loss scaling
@pytest.mark.parametrize("run", [on_cpu, run_kernel])
@pytest.mark.parametrize("dtypes", [("float32", "float16"), ("float16", "float32"), ("float64", "float32")])
def test_cast_many(dtypes, run):
    before, after = dtypes
    arrays = [numbers(n, i, dtype=before) for i, n in enumerate((5, 2049, 0, 33, 4000))]
    writes = [np.full_like(x, np.nan, after) for x in arrays]
    calls = run("cast_many", arrays, writes, dtype=after)
    assert run is on_cpu or len(calls) == 1
    for y, x in zip(writes, arrays, strict=True):
        np.testing.assert_array_equal(y, x.astype(after))


@pytest.mark.parametrize("run", [on_cpu, run_kernel])
@pytest.mark.parametrize("bad", [None, np.nan, np.inf, -np.inf])
def test_unscale(bad, run):
    scale = np.array([1024.0], "float32")
    gradients = [numbers(n, i, dtype=("float32", "float16")[i % 2]) for i, n in enumerate((5, 2049, 0, 33, 4000))]
    if bad is not None:
        gradients[1][2048] = bad
    *expected, flag_expected = reference("unscale", [*gradients, scale])
    after = [np.full_like(g, np.nan, "float32") for g in gradients]
    for writes in (after, [g.copy() for g in gradients]):
        flag = np.array([7], "int32")
        reads = gradients if writes is after else writes
        run("unscale", [*reads, scale], [*writes, flag])
        assert flag[0] == flag_expected[0] == (bad is not None)
        for y, e in zip(writes, expected, strict=True):
            np.testing.assert_array_equal(y, e.astype(y.dtype))


def test_unscale_is_a_launch_for_each_pair_of_types():
    gradients = [numbers(5, dtype=t) for t in ("float32", "float16", "float32")]
    after, flag = [g.astype("float32") for g in gradients], np.zeros(1, "int32")
    calls = run_kernel("unscale", [*gradients, np.ones(1, "float32")], [*after, flag])
    assert [type(c) for c in calls] == [cuda.Zeros, cuda.Grid, cuda.Grid]


@pytest.mark.parametrize("run", [on_cpu, run_kernel])
@given(scale=st.sampled_from([1.0, 3.0, 65536.0, 2.0**127]), good=st.integers(0, 4), flag=st.integers(0, 1))
@settings(deadline=None)
def test_scale_update(scale, good, flag, run):
    reads = [np.array([scale], "float32"), np.array([good], "int32"), np.array([flag], "int32")]
    constants = {"growth": 2.0, "backoff": 0.5, "interval": 4}
    with np.errstate(over="ignore"):
        expected = reference("scale_update", reads, **constants)
    writes = [np.zeros(1, "float32"), np.zeros(1, "int32")]
    run("scale_update", reads, writes, **constants)
    assert writes[0][0] == expected[0][0]
    assert writes[1][0] == expected[1][0]
    if flag:
        assert (writes[0][0], writes[1][0]) == (scale / 2, 0)
    elif good >= 3:
        assert (writes[0][0], writes[1][0]) == (scale if scale > 1e30 else 2 * scale, 0)
    else:
        assert (writes[0][0], writes[1][0]) == (scale, good + 1)
    run("scale_update", reads, reads[:2], **constants)  # in place
    assert [a.tobytes() for a in reads[:2]] == [a.tobytes() for a in writes]


# -------------------------------------------------------------------------------------------------------------- dropout
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("shape", [(1, 1), (3, 31), (33,), (5, 2, 8), (2, 257), (300, 12), (0, 3), (3, 0)])
def test_dropout_has_the_bits_of_the_cpu(shape, dtype):
    for offset, number, sample, draw in ((0, 7, 11, 2), (1, 2**32 + 5, 2**40 + 3, 2**64 - 1)):
        whole = numbers(int(np.prod(shape)) + offset, low=1.0, dtype=dtype)
        x, y = whole[offset:].reshape(shape), np.full(shape, np.nan, dtype)
        constants = {"rate": 0.4, "seed": 5 + (9 << 32) + (1 << 63), "draw": draw, "sample": sample}
        step = np.array([number], np.uint64)
        run_kernel("dropout", [x, step], [y], 3, constants)
        with np.errstate(over="ignore"):
            expected = KERNELS["dropout"].reference(np, x, step, **constants)
        assert ((y == 0) == (expected == 0)).all()
        if dtype == "float16":
            np.testing.assert_allclose(y, expected, rtol=2e-3)
        else:
            assert y.tobytes() == expected.tobytes()
            (there,) = on_cpu("dropout", [x, step], [np.full(shape, np.nan, dtype)], **constants)
            assert there.tobytes() == y.tobytes()


def test_dropout_and_tick_in_place():
    x, step = numbers(1000, low=1.0), np.array([2**64 - 1], np.uint64)
    expected = KERNELS["dropout"].reference(np, x, step, rate=0.5, seed=3, draw=1, sample=0)
    run_kernel("dropout", [x, step], [x], constants={"rate": 0.5, "seed": 3, "draw": 1, "sample": 0})
    np.testing.assert_array_equal(x, expected)
    assert 300 < (x == 0).sum() < 700
    run_kernel("tick", [step], [step], constants={"draws": 3})
    assert step[0] == 2
