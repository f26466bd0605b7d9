"""The CUDA forms of softmax, losses and embeddings, run on the CPU, against their references in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from covering import pairs
from cuda_agree import DTYPES, agree, draw
from cuda_on_cpu import run_kernel

from minidl.kernels import KERNELS

LAYOUTS = {"dense": lambda x: x, "fortran": np.asfortranarray, "window": lambda x: np.stack([x, x + 9], -1)[..., 0],
           "reversed rows": lambda x: x.T[..., ::-1].copy()[..., ::-1].T}


def with_layout(x: Any, layout: str) -> Any:
    y = LAYOUTS[layout](x)
    np.testing.assert_array_equal(x, y)
    return y


# ------------------------------------------------------------------------------------------------------------ softmax
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (1, 1), (7, 10), (3, 33), (2, 3, 31), (4, 257), (2, 1500), (300, 2),
                                   (2, 2, 3, 2, 5)], ids=str)
def test_softmax(shape: tuple[int, ...], dtype: str) -> None:
    x, dy = draw(shape, 1, dtype, 3) * 3, draw(shape, 2, dtype)
    for name in ("softmax", "log_softmax"):
        y, = agree(name, [x])
        agree(f"{name}_grad", [y, dy], times=3)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_softmax_of_views(layout: str) -> None:
    """What is read may lie in any way, the gradient also the same for all."""
    x = draw((3, 5, 4), 1, "float64")
    for name in ("softmax", "log_softmax"):
        y, = agree(name, [x])
        other, = agree(name, [with_layout(x, layout)])
        assert y.tobytes() == other.tobytes()
        assert (agree(f"{name}_grad", [y, x])[0].tobytes()
                == agree(f"{name}_grad", [y, with_layout(x, layout)])[0].tobytes())
        for dy in (np.broadcast_to(2.0, y.shape), np.broadcast_to(x[:, :1], y.shape),
                   np.broadcast_to(x[..., :1], y.shape)):
            agree(f"{name}_grad", [y, dy], scale=1)


@pytest.mark.parametrize("width", [40, 1300])
def test_softmax_of_what_is_no_number(width: int) -> None:
    """Minus infinity is a probability of zero; a row of it alone, NaN and infinity make NaN, as in the reference."""
    x = draw((7, width), 1, "float32")
    x[0, 3] = x[1, :] = x[2, : width // 2] = x[6, 1:] = -np.inf
    x[3, 5], x[4, 7] = np.nan, np.inf
    for name in ("softmax", "log_softmax"):
        y = np.zeros_like(x)
        run_kernel(name, [x], [y])
        with np.errstate(invalid="ignore", divide="ignore"):
            np.testing.assert_allclose(y, KERNELS[name].reference(np, x), rtol=2e-6, atol=2e-6)
        assert np.isnan(y).all(axis=1).tolist() == [False, True, False, True, True, False, False]


def test_softmax_of_large_numbers() -> None:
    x = np.array([[1e30, 0, -1e30], [-1e38, -1e38, -1e38], [88, 89, 1e4]], np.float32)
    agree("softmax", [x])


# ------------------------------------------------------------------------------------------------------------ losses
@pytest.mark.parametrize(*pairs(shape=[(1, 1), (1, 7), (5, 10), (33, 31), (300, 110), (3, 1200)],
                                every=[0, 1, 2], smoothing=[0.0, 0.1, 1.0], dtype=DTYPES))
def test_cross_entropy(shape: tuple[int, int], every: int, smoothing: float, dtype: str) -> None:
    """And the weights of labels, which may be strided; a label that does not count may be one of the classes. None of
    the labels is ignored, every one, or every other one."""
    x, weight = draw(shape, 1, dtype, 1) * 2, draw((shape[1],), 1, dtype)
    labels = np.random.default_rng(2).integers(shape[1], size=2 * shape[0])[::-2]
    for chosen in (-100, int(labels[0])):
        for w in (weight, np.repeat(weight, 2)[::2]):
            (y,) = agree("label_weights", [w, labels], ignore=chosen)
            assert not y[labels == chosen].any()
    if every:
        labels[::every] = -100
    constants = {"smoothing": smoothing, **({"ignore": -100} if every else {})}
    loss, p = agree("cross_entropy", [x, labels], **constants, times=2)
    dx, = agree("cross_entropy_grad", [p, labels, np.array(0.5, dtype)], **constants, times=2, scale=1 / len(x))
    assert not (every and dx[::every].any())
    assert loss > 0 or not every or not (labels >= 0).any()


def test_cross_entropy_of_views() -> None:
    """Logits and labels may be strided."""
    x, labels = draw((6, 5), 1, "float64"), np.arange(12)[::-2] % 5
    for layout in LAYOUTS:
        for y in (labels, np.broadcast_to(np.int64(3), 6)):
            loss, p = agree("cross_entropy", [with_layout(x, layout), y], smoothing=0.1)
            agree("cross_entropy_grad", [p, y, np.ones(3)[1:2].reshape(())], smoothing=0.1, times=2)


def test_losses_of_many_elements_are_exact() -> None:
    """The mean is summed in float64: a float32 sum of 100 000 such terms would be off by more."""
    x = (np.arange(100_000) % 7).astype("f")
    loss = np.zeros((), "f")
    assert len(run_kernel("mse", [x, x * 0 + 0.3], [loss])) == 2
    assert loss == np.float32(((x.astype(float) - np.float32(0.3)) ** 2).mean())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (31,), (33, 31), (33, 1000)], ids=str)
def test_mse(shape: tuple[int, ...], dtype: str) -> None:
    x, target = draw(shape, 1, dtype), draw(shape, 2, dtype)
    agree("mse", [x, target])
    agree("mse_grad", [x, target, np.array(3, dtype)], times=2, factor=2 / x.size)


def test_launches() -> None:
    """One launch for few elements, two for many; one for every gradient."""
    for rows, launches in ((100, 1), (400, 2)):
        x, labels = np.ones((rows, 100)), np.zeros(rows, np.int64)
        assert len(run_kernel("cross_entropy", [x, labels], [np.array(0.0), x.copy()], smoothing=0.0)) == launches
        assert len(run_kernel("mse", [x, x], [np.array(0.0)])) == launches
        assert len(run_kernel("cross_entropy_grad", [x, labels, np.array(1.0)], [x.copy()], smoothing=0.0)) == 1


# ------------------------------------------------------------------------------------------------------------ embedding
INDICES = {"dense": lambda n: np.random.default_rng(1).integers(9, size=n),
           "matrix": lambda n: np.random.default_rng(2).integers(9, size=(n, 3)),
           "transposed": lambda n: np.random.default_rng(3).integers(9, size=(4, n)).T,
           "backwards": lambda n: np.arange(2 * n)[::-2] % 9,
           "one number": lambda n: np.broadcast_to(np.int64(4), (2, n)), "no axes": lambda n: np.array(5)}


@pytest.mark.parametrize(*pairs(width=[1, 33, 130, 1100], kind=[*INDICES], dtype=DTYPES))
def test_embedding(width: int, kind: str, dtype: str) -> None:
    table, index = draw((9, width), 1, dtype), INDICES[kind](50)
    y, = agree("embedding", [table, index])
    assert y.tobytes() == table[index].tobytes()
    agree("embedding_grad", [index, draw(y.shape, 2, dtype)], rows=9, scale=index.size**0.5)


@pytest.mark.parametrize(*pairs(size=[(1025, 40, 3), (2049, 5000, 1), (6000, 17, 150), (5000, 1, 31)],
                                spread=["even", "skewed", "one"], dtype=["float32", "float64"]))
def test_embedding_grad_of_many_positions(size: tuple[int, int, int], spread: str, dtype: str) -> None:
    """Sorted; rows with none, a few and very many positions."""
    positions, rows, width = size
    rng = np.random.default_rng(5)
    index = {"even": rng.integers(rows, size=positions), "skewed": np.minimum(rng.zipf(1.3, positions) - 1, rows - 1),
             "one": np.full(positions, rows - 1)}[spread]
    assert len(run_kernel("embedding_grad", [index, np.ones((positions, 1), dtype)],
                          [np.empty((rows, 1), dtype)], rows=rows)) == (3)
    agree("embedding_grad", [index, draw((positions, width), 6, dtype)], rows=rows, scale=positions**0.5)


def test_embedding_grad_of_many_positions_of_views() -> None:
    index = np.random.default_rng(7).integers(300, size=(30, 41)).T
    agree("embedding_grad", [index, draw((41, 30, 5), 6, "float64")], rows=300)


@pytest.mark.wide
def test_the_two_ways_of_an_embedding_gradient_meet() -> None:
    """1024 positions are looked through, one more is sorted: up to 64 positions of a row give the same bits."""
    index, dy = np.random.default_rng(8).integers(200, size=1025), draw((1025, 7), 9, "float32")
    dy[-1] = 0
    few, many = np.empty((200, 7), "f"), np.empty((200, 7), "f")
    assert len(run_kernel("embedding_grad", [index[:-1], dy[:-1]], [few], rows=200)) == 1
    assert len(run_kernel("embedding_grad", [index, dy], [many], rows=200)) == 3
    np.testing.assert_array_equal(few, many)


def test_an_embedding_without_positions_has_no_gradient() -> None:
    grad = np.ones((3, 4))
    run_kernel("embedding_grad", [np.ones(0, np.int64), np.ones((0, 4))], [grad], rows=3)
    assert not grad.any()


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", ["float32", "float64", "int64"])
@pytest.mark.parametrize(("kind", "rows", "width"), [("dense", 9, 3), ("transposed", 12, 1), ("one number", 5, 130)])
def test_the_largest_of_the_elements_of_a_row(kind: str, rows: int, width: int, dtype: str) -> None:
    """With ties and NaN, and rows without elements."""
    index = INDICES[kind](50)
    x = np.round(draw((*index.shape, width), 4, "float64") * 2).astype(dtype)
    if dtype != "int64":
        x[x == -2] = np.nan
    for seed in (3, 8):
        found = np.full((rows, width), -1)
        run_kernel("embedding_largest", [index, x], [found], seed=seed, rows=rows)
        np.testing.assert_array_equal(found, KERNELS["embedding_largest"].reference(np, index, x, rows=rows))
    found = np.full((2, 3), -1)
    run_kernel("embedding_largest", [np.ones(0, np.int64), np.ones((0, 3))], [found], rows=2)
    assert found.tolist() == [[0] * 3, [1] * 3]
