"""Recurrent layers over a whole sequence. The input's part of the gates is given; the kernels compute the recurrence.

T steps, n samples, d hidden values; gates in torch's order. One array holds the initial state and the outputs, (T + 1,
n, d): row t is the state before step t and row t + 1 the state after it; in reverse (from the last step to the first)
row t + 1 is the state before step t and row t the state after it. So the weight gradient is a single product.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np

from .cuda import Call, Grid, Zeros, c_type
from .cuda import steps as strides
from .hints import apart, wide
from .linear import again_work, dense, dense_copies, dense_work, gemm_again, product
from .registry import inlined, kernel, loop, ufunc


def steps(length: int, reverse: bool) -> list[tuple[int, int, int]]:
    """(step, row before, row after) in the order of time."""
    return [(t, t + 1, t) for t in range(length)][::-1] if reverse else [(t, t, t + 1) for t in range(length)]


def _flops(reads: Any, writes: Any) -> float:
    return 2.0 * reads[0].size * reads[1].shape[-1]


def _sigmoid(xp: Any, x: Any) -> Any:
    half = x.dtype.type(0.5)
    return xp.tanh(x * half) * half + half


# tanh(x) = x P(x^2) / Q(x^2), fitted: relative error 3.3e-7, which it also has as 1 beyond +-FAR; a slope that is not
# exactly 0 there would be multiplied by inputs of any size
FAR, ONE = np.float32(7.9), np.float32(1)
P0, P1, P2, P3, P4 = (np.float32(v) for v in (0.999999994, 0.134506323, 0.00357900589, 2.20234723e-5, 1.54282906e-8))
Q0, Q1, Q2, Q3, Q4 = (np.float32(v) for v in (1, 0.467839603, 0.0261922909, 0.000342367316, 8.59890922e-7))


@partial(inlined, double=lambda x: math.tanh(x), fastmath={"contract"})
def _tanh(x):  # type: ignore[no-untyped-def]
    """tanh(x); NaN stays."""
    w = min(max(x, -FAR), FAR)
    u = w * w
    v = u * u
    y = w * ((P0 + P1 * u) + ((P2 + P3 * u) + P4 * v) * v) / ((Q0 + Q1 * u) + ((Q2 + Q3 * u) + Q4 * v) * v)
    return ONE if x > FAR else -ONE if x < -FAR else y


def _bias(given: list[Any], gates: Any) -> Any:
    return given[0] if given else np.zeros(gates.shape[-1], gates.dtype)


# ----------------------------------------------------------------------------------------------------------------- CUDA
def _each_cell(kernel: str, state: Any, *arguments: Any) -> list[Call]:
    """A launch with a thread for each element of a state (n, d), up to a limit along n. The kernel's last arguments
    before its flags are n and d."""
    n, d = state.shape
    across = 1 << min((d - 1).bit_length(), 8) if d else 1
    threads = (across, 256 // across)
    blocks = (-(-d // across), min(-(-n // threads[1]), 65535))
    return [Grid("recurrent.cu", f"{kernel}<{c_type(state)}>", blocks, threads, arguments)] if state.size else []


def _optional(rest: Any) -> tuple[list[Any], Any]:
    """The bias, if there is one, and the other arrays, which have more axes."""
    return ([rest[0]], rest[1:]) if rest[0].ndim == 1 else ([], rest)


def _strided(a: Any) -> tuple[Any, ...]:
    """A kernel's arguments for an array of any strides."""
    return a, *strides(a, a.shape)


def _biased(b: list[Any], gx: Any) -> tuple[Any, ...]:
    """A kernel's arguments for a bias; without a bias they are not read."""
    return (*_strided(b[0]), True) if b else (gx, 0, False)


# ------------------------------------------------------------------------------------------------------------------ rnn
@kernel("rnn", axes="TnD,nD,DD,D->UnD", flops=_flops,
        work=lambda reads, writes, **constants: again_work(reads[0].shape[0], reads[2], True))
def rnn(xp: Any, gx: Any, h0: Any, w: Any, b: Any = None, *, relu: bool, reverse: bool) -> Any:
    """gx (T, n, d), h0 (n, d), w (d, d), b (d,) -> states (T + 1, n, d): h' = tanh or relu of (gx + h w^T + b)."""
    out = xp.empty((len(gx) + 1, *h0.shape), gx.dtype)
    out[-1 if reverse else 0] = h0
    for t, before, after in steps(len(gx), reverse):
        a = gx[t] + xp.matmul(out[before], w.T)
        a = a if b is None else a + b
        out[after] = xp.maximum(a, 0) if relu else xp.tanh(a)
    return out


@rnn.cpu
def _(gx: Any, h0: Any, w: Any, *rest: Any, relu: bool, reverse: bool) -> Any:
    b, (out, *work) = _optional(rest)
    thunks, times = gemm_again(len(h0), w.T, work)
    thunks += [ufunc(np.positive, h0, out[-1 if reverse else 0])]
    for t, before, after in steps(len(gx), reverse):
        h = out[after]
        thunks += [times(out[before], h), loop(_add_gates, gx[t], _bias(b, gx), h),
                   ufunc(np.maximum, h, h.dtype.type(0), h) if relu else ufunc(np.tanh, h, h)]
    return thunks


@rnn.cuda(work=lambda reads, writes, **constants: dense_work(reads[2]))
def _(gx: Any, h0: Any, w: Any, *rest: Any, relu: bool, reverse: bool) -> Any:
    b, (out, *work) = _optional(rest)
    (w,), calls = dense([w], work)
    calls += dense_copies([(h0, out[-1 if reverse else 0])])
    for t, before, after in steps(len(gx), reverse):
        h = out[after]
        calls += [*product(out[before], w.T, h),
                  *_each_cell("rnn_step", h, *_strided(gx[t]), *_biased(b, gx), h, *h.shape, relu)]
    return calls


def _add_gates(gx, b, h):  # type: ignore[no-untyped-def]
    for i in range(h.shape[0]):
        for j in range(h.shape[1]):
            h[i, j] += gx[i, j] + b[j]


@kernel("rnn_grad", axes="TnD,DD,UnD->TnD,nD", flops=_flops,
        work=lambda reads, writes, **constants: again_work(reads[0].shape[0], reads[1]))
def rnn_grad(xp: Any, dy: Any, w: Any, out: Any, *, relu: bool, reverse: bool) -> Any:
    """dy (T, n, d) -> (dgx (T, n, d), dh0 (n, d))."""
    dgx, dh = xp.empty_like(dy), xp.zeros_like(dy[0])
    for t, _, after in steps(len(dy), reverse)[::-1]:
        h = out[after]
        dgx[t] = (dy[t] + dh) * ((h > 0) if relu else 1 - h * h)
        dh = xp.matmul(dgx[t], w)
    return dgx, dh


@rnn_grad.cpu
def _(dy: Any, w: Any, out: Any, dgx: Any, dh: Any, *work: Any, relu: bool, reverse: bool) -> Any:
    thunks, times = gemm_again(len(dh), w, work)
    thunks += [partial(dh.fill, 0)]
    for t, _, after in steps(len(dy), reverse)[::-1]:
        thunks += [loop(_rnn_grad, dy[t], dh, out[after], dgx[t], relu), times(dgx[t], dh)]
    return thunks


@rnn_grad.cuda(work=lambda reads, writes, **constants: dense_work(reads[1]))
def _(dy: Any, w: Any, out: Any, dgx: Any, dh: Any, *work: Any, relu: bool, reverse: bool) -> Any:
    (w,), calls = dense([w], work)
    calls += [Zeros(dh)]
    for t, _, after in steps(len(dy), reverse)[::-1]:
        calls += [*_each_cell("rnn_grad_step", dh, *_strided(dy[t]), dh, out[after], dgx[t], *dh.shape, relu),
                  *product(dgx[t], w, dh)]
    return calls


def _rnn_grad(dy, dh, h, da, relu):  # type: ignore[no-untyped-def]
    zero, one = h.dtype.type(0), h.dtype.type(1)
    for i in range(h.shape[0]):
        for j in range(h.shape[1]):
            d = dy[i, j] + dh[i, j]
            if relu:
                da[i, j] = d if h[i, j] > 0 else zero
            else:
                da[i, j] = d * (one - h[i, j] * h[i, j])


# ------------------------------------------------------------------------------------------------------------------ gru
@kernel("gru", axes="TnG,nD,GD,G->UnD,TnK", flops=_flops,
        work=lambda reads, writes, reverse: [(reads[0].shape[1:], reads[0].dtype), *again_work(
            reads[0].shape[0], reads[2], True)])
def gru(xp: Any, gx: Any, h0: Any, w: Any, b: Any = None, *, reverse: bool) -> Any:
    """gx (T, n, 3d), h0 (n, d), w (3d, d), b (3d,) -> (states (T + 1, n, d), kept (T, n, 4d)). Gates r, z, n, of which
    n = tanh(gx + r (h w^T + b)); kept are r, z, n and n's h w^T + b. h' = (1 - z) n + z h."""
    d = h0.shape[1]
    out, kept = xp.empty((len(gx) + 1, *h0.shape), gx.dtype), xp.empty((*gx.shape[:2], 4 * d), gx.dtype)
    out[-1 if reverse else 0] = h0
    for t, before, after in steps(len(gx), reverse):
        gh = xp.matmul(out[before], w.T)
        gh = gh if b is None else gh + b
        rz = _sigmoid(xp, gx[t, :, : 2 * d] + gh[:, : 2 * d])
        r, z = rz[:, :d], rz[:, d:]
        n = xp.tanh(gx[t, :, 2 * d :] + r * gh[:, 2 * d :])
        kept[t] = xp.concatenate([rz, n, gh[:, 2 * d :]], axis=1)
        out[after] = n + z * (out[before] - n)
    return out, kept


@gru.cpu
def _(gx: Any, h0: Any, w: Any, *rest: Any, reverse: bool) -> Any:
    b, (out, kept, gh, *work) = _optional(rest)
    thunks, times = gemm_again(len(h0), w.T, work)
    thunks += [ufunc(np.positive, h0, out[-1 if reverse else 0])]
    for t, before, after in steps(len(gx), reverse):
        thunks += [times(out[before], gh),
                   loop(_gru_step, gx[t], gh, _bias(b, gx), out[before], kept[t], out[after])]
    return thunks


@gru.cuda(work=lambda reads, writes, **constants: dense_work(reads[2]))
def _(gx: Any, h0: Any, w: Any, *rest: Any, reverse: bool) -> Any:
    b, (out, kept, *work) = _optional(rest)
    (w,), calls = dense([w], work)
    calls += dense_copies([(h0, out[-1 if reverse else 0])])
    for t, before, after in steps(len(gx), reverse):
        h = out[after]
        calls += [*product(out[before], w.T, kept[t, :, h.shape[1] :]),
                  *_each_cell("gru_step", h, *_strided(gx[t]), *_biased(b, gx), kept[t], out[before], h, *h.shape)]
    return calls


def _gru_step(gx, gh, b, before, kept, after):  # type: ignore[no-untyped-def]
    wide()
    apart()
    d, half = before.shape[1], gx.dtype.type(0.5)
    for i in range(before.shape[0]):  # loops as in _lstm_step
        x, h, rz = gx[i], gh[i], kept[i]
        for j in range(2 * d):
            rz[j] = _tanh((x[j] + (h[j] + b[j])) * half) * half + half
        x, h, c = gx[i, 2 * d :], gh[i, 2 * d :], b[2 * d :]
        z, n, ghn, past, state = kept[i, d : 2 * d], kept[i, 2 * d : 3 * d], kept[i, 3 * d :], before[i], after[i]
        for j in range(d):
            given = h[j] + c[j]
            new = _tanh(x[j] + rz[j] * given)
            ghn[j] = given
            n[j] = new
            state[j] = new + z[j] * (past[j] - new)


@kernel("gru_grad", axes="TnD,GD,UnD,TnK->TnG,TnG,nD",
        flops=lambda reads, writes: 6.0 * reads[0].size * reads[0].shape[-1],
        work=lambda reads, writes, reverse: [(reads[0].shape[1:], reads[0].dtype),
                                             *again_work(reads[0].shape[0], reads[1])])
def gru_grad(xp: Any, dy: Any, w: Any, out: Any, kept: Any, *, reverse: bool) -> Any:
    """dy (T, n, d) -> (dgx (T, n, 3d), the same toward h w^T + b, dh0 (n, d))."""
    d = dy.shape[-1]
    dgx, dgh = xp.empty((*dy.shape[:2], 3 * d), dy.dtype), xp.empty((*dy.shape[:2], 3 * d), dy.dtype)
    dh = xp.zeros_like(dy[0])
    for t, before, _ in steps(len(dy), reverse)[::-1]:
        r, z, n, ghn = (kept[t, :, i * d : (i + 1) * d] for i in range(4))
        total = dy[t] + dh
        dn = total * (1 - z) * (1 - n * n)
        dz = total * (out[before] - n) * z * (1 - z)
        dr = dn * ghn * r * (1 - r)
        dgx[t], dgh[t] = xp.concatenate([dr, dz, dn], axis=1), xp.concatenate([dr, dz, dn * r], axis=1)
        dh = total * z + xp.matmul(dgh[t], w)
    return dgx, dgh, dh


@gru_grad.cpu
def _(dy: Any, w: Any, out: Any, kept: Any, dgx: Any, dgh: Any, dh: Any, past: Any, *work: Any, reverse: bool) -> Any:
    thunks, times = gemm_again(len(dh), w, work)
    thunks += [partial(dh.fill, 0), partial(past.fill, 0)]
    for t, before, _ in steps(len(dy), reverse)[::-1]:
        thunks += [loop(_gru_grad, dy[t], dh, past, kept[t], out[before], dgx[t], dgh[t]), times(dgh[t], dh)]
    return [*thunks, ufunc(np.add, dh, past, dh)]


@gru_grad.cuda(work=lambda reads, writes, **constants: dense_work(reads[1]))
def _(dy: Any, w: Any, out: Any, kept: Any, dgx: Any, dgh: Any, dh: Any, *work: Any, reverse: bool) -> Any:
    (w,), calls = dense([w], work)
    calls += [Zeros(dh)]
    for t, before, _ in steps(len(dy), reverse)[::-1]:
        calls += [*_each_cell("gru_grad_step", dh, *_strided(dy[t]), dh, kept[t], out[before], dgx[t], dgh[t],
                              *dh.shape), *product(dgh[t], w, dh, accumulate=True)]
    return calls


def _gru_grad(dy, dh, past, kept, before, dgx, dgh):  # type: ignore[no-untyped-def]
    apart()
    d, one = before.shape[1], dy.dtype.type(1)
    for i in range(before.shape[0]):
        r, z, n, ghn = kept[i, :d], kept[i, d : 2 * d], kept[i, 2 * d : 3 * d], kept[i, 3 * d :]
        dr, dz, dn = dgx[i, :d], dgx[i, d : 2 * d], dgx[i, 2 * d :]
        er, ez, en = dgh[i, :d], dgh[i, d : 2 * d], dgh[i, 2 * d :]
        y, h, p, last = dy[i], dh[i], past[i], before[i]
        for j in range(d):
            total = p[j] + (y[j] + h[j])
            toward = total * (one - z[j]) * (one - n[j] * n[j])
            dn[j] = toward
            en[j] = toward * r[j]
            dr[j] = er[j] = toward * ghn[j] * r[j] * (one - r[j])
            dz[j] = ez[j] = total * (last[j] - n[j]) * z[j] * (one - z[j])
            p[j] = total * z[j]


# ----------------------------------------------------------------------------------------------------------------- lstm
@kernel("lstm", axes="TnG,nD,nD,GD,G->UnD,VnD,TnG", flops=_flops, over=((2, 0),),
        work=lambda reads, writes, reverse: [(reads[0].shape[1:], reads[0].dtype),
                                             *again_work(reads[0].shape[0], reads[3], True)])
def lstm(xp: Any, gx: Any, h0: Any, c0: Any, w: Any, b: Any = None, *, reverse: bool) -> Any:
    """gx (T, n, 4d), h0 and c0 (n, d), w (4d, d), b (4d,) -> (states (T + 2, n, d), cells (T + 1, n, d), gates
    (T, n, 4d)). Gates i, f, g, o; c' = f c + i g; h' = o tanh(c'). The cells lie as the states do, and the states have
    the last cell as one more row at the end that time runs to: row T + 1; in reverse row 0, all others one later."""
    d, shift = h0.shape[1], int(reverse)
    out, cells = xp.empty((len(gx) + 2, *h0.shape), gx.dtype), xp.empty((len(gx) + 1, *h0.shape), gx.dtype)
    gates = xp.empty(gx.shape, gx.dtype)
    out[-1 if reverse else 0], cells[-1 if reverse else 0] = h0, c0
    for t, before, after in steps(len(gx), reverse):
        a = gx[t] + xp.matmul(out[before + shift], w.T)
        a = a if b is None else a + b
        i, f, o = (_sigmoid(xp, a[:, k * d : (k + 1) * d]) for k in (0, 1, 3))
        g = xp.tanh(a[:, 2 * d : 3 * d])
        gates[t] = xp.concatenate([i, f, g, o], axis=1)
        cells[after] = f * cells[before] + i * g
        out[after + shift] = o * xp.tanh(cells[after])
    out[0 if reverse else -1] = cells[0 if reverse else -1]
    return out, cells, gates


@lstm.cpu
def _(gx: Any, h0: Any, c0: Any, w: Any, *rest: Any, reverse: bool) -> Any:
    b, (out, cells, gates, h, *work) = _optional(rest)
    thunks, times = gemm_again(len(h0), w.T, work)
    first, last, shift = (-1, 0, 1) if reverse else (0, -1, 0)
    thunks += [ufunc(np.positive, h0, out[first]), ufunc(np.positive, c0, cells[first])]
    for t, before, after in steps(len(gx), reverse):
        thunks += [times(out[before + shift], h), loop(_lstm_step, gx[t], h, _bias(b, gx), cells[before], gates[t],
                                                       cells[after], out[after + shift])]
    return [*thunks, ufunc(np.positive, cells[last], out[last])]


@lstm.cuda(work=lambda reads, writes, **constants: dense_work(reads[3]))
def _(gx: Any, h0: Any, c0: Any, w: Any, *rest: Any, reverse: bool) -> Any:
    b, (out, cells, gates, *work) = _optional(rest)
    first, last, shift = (-1, 0, 1) if reverse else (0, -1, 0)
    (w,), calls = dense([w], work)
    calls += dense_copies([(h0, out[first]), (c0, cells[first])])
    for t, before, after in steps(len(gx), reverse):
        h = out[after + shift]
        calls += [*product(out[before + shift], w.T, gates[t]),
                  *_each_cell("lstm_step", h, *_strided(gx[t]), *_biased(b, gx), gates[t], cells[before],
                              cells[after], h, *h.shape)]
    return [*calls, *dense_copies([(cells[last], out[last])])]


def _lstm_step(gx, gh, b, before, gates, after, h):  # type: ignore[no-untyped-def]
    wide()
    apart()
    d, half, one = before.shape[1], gx.dtype.type(0.5), gx.dtype.type(1)
    for n in range(before.shape[0]):
        for k in range(4):  # a loop for each gate, on rows that begin at 0: such loops the compiler vectorises
            x, y, c = gx[n, k * d : (k + 1) * d], gh[n, k * d : (k + 1) * d], b[k * d : (k + 1) * d]
            a, scale = gates[n, k * d : (k + 1) * d], one if k == 2 else half
            for j in range(d):
                a[j] = _tanh((x[j] + y[j] + c[j]) * scale) * scale + (one - scale)
        i, f, g, o = gates[n, :d], gates[n, d : 2 * d], gates[n, 2 * d : 3 * d], gates[n, 3 * d :]
        past, cell, state = before[n], after[n], h[n]
        for j in range(d):
            cell[j] = f[j] * past[j] + i[j] * g[j]
            state[j] = o[j] * _tanh(cell[j])


@kernel("lstm_grad", axes="UnD,GD,VnD,TnG->TnG,nD,nD",
        flops=lambda reads, writes: 8.0 * reads[0].size * reads[0].shape[-1], over=((0, 3),),
        work=lambda reads, writes, reverse: again_work(reads[3].shape[0], reads[1]))
def lstm_grad(xp: Any, dy: Any, w: Any, cells: Any, gates: Any, *, reverse: bool) -> Any:
    """dy (T + 1, n, d), toward the states and the last cell as they lie -> (dgx (T, n, 4d), dh0, dc0 (n, d))."""
    d = dy.shape[-1]
    dgx, dh, dc = xp.empty_like(gates), xp.zeros_like(dy[0]), dy[0 if reverse else -1]
    for t, before, after in steps(len(gates), reverse)[::-1]:
        i, f, g, o = (gates[t, :, k * d : (k + 1) * d] for k in range(4))
        root = xp.tanh(cells[after])
        total = dy[t + reverse] + dh
        dc = dc + total * o * (1 - root * root)
        dgx[t] = xp.concatenate([dc * g * i * (1 - i), dc * cells[before] * f * (1 - f), dc * i * (1 - g * g),
                                 total * root * o * (1 - o)], axis=1)
        dc = dc * f
        dh = xp.matmul(dgx[t], w)
    return dgx, dh, dc


@lstm_grad.cpu
def _(dy: Any, w: Any, cells: Any, gates: Any, dgx: Any, dh: Any, dc: Any, *work: Any,
      reverse: bool) -> Any:
    thunks, times = gemm_again(len(dh), w, work)
    thunks += [partial(dh.fill, 0), ufunc(np.positive, dy[0 if reverse else -1], dc)]
    for t, before, after in steps(len(gates), reverse)[::-1]:
        thunks += [loop(_lstm_grad, dy[t + reverse], dh, dc, gates[t], cells[before], cells[after], dgx[t]),
                   times(dgx[t], dh)]
    return thunks


@lstm_grad.cuda(work=lambda reads, writes, **constants: dense_work(reads[1]))
def _(dy: Any, w: Any, cells: Any, gates: Any, dgx: Any, dh: Any, dc: Any, *work: Any, reverse: bool) -> Any:
    (w,), calls = dense([w], work)
    calls += [Zeros(dh), *dense_copies([(dy[0 if reverse else -1], dc)])]
    for t, before, after in steps(len(gates), reverse)[::-1]:
        calls += [*_each_cell("lstm_grad_step", dh, *_strided(dy[t + reverse]), dh, dc, gates[t], cells[before],
                              cells[after], dgx[t], *dh.shape), *product(dgx[t], w, dh)]
    return calls


def _lstm_grad(dy, dh, dc, gates, before, after, dgx):  # type: ignore[no-untyped-def]
    apart()
    d, one = before.shape[1], dy.dtype.type(1)
    for n in range(before.shape[0]):
        i, f, g, o = gates[n, :d], gates[n, d : 2 * d], gates[n, 2 * d : 3 * d], gates[n, 3 * d :]
        di, df, dg, do = dgx[n, :d], dgx[n, d : 2 * d], dgx[n, 2 * d : 3 * d], dgx[n, 3 * d :]
        y, h, c, past, cell = dy[n], dh[n], dc[n], before[n], after[n]
        for j in range(d):
            one_i, one_f, one_g, one_o = i[j], f[j], g[j], o[j]  # read before written, should dgx be the gates
            root, total = _tanh(cell[j]), y[j] + h[j]
            toward = c[j] + total * one_o * (one - root * root)
            di[j] = toward * one_g * one_i * (one - one_i)
            df[j] = toward * past[j] * one_f * (one - one_f)
            dg[j] = toward * one_i * (one - one_g * one_g)
            do[j] = total * root * one_o * (one - one_o)
            c[j] = toward * one_f
