"""Memory that stays: where it lies, when it is given back, and what a system without large pages has."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from weakref import ref

import numpy as np
import pytest

import minidl as ml
from minidl import nn, optim
from minidl.devices import pages
from minidl.devices.device import ALIGNMENT, CPU

large = pytest.mark.skipif(not pages.KNOWN, reason="no large pages")


def begins(array: np.ndarray) -> int:
    return array.ctypes.data


@large
@pytest.mark.parametrize("nbytes", [pages.LARGE // 2, pages.LARGE, 3 * pages.LARGE + 1])
def test_an_arena_has_pages_of_its_own(nbytes: int) -> None:
    arena = CPU().arena(nbytes)
    arena[...] = 7
    assert (arena.dtype, arena.size, begins(arena) % pages.LARGE, arena.flags.writeable) == (np.uint8, nbytes, 0, True)
    assert pages.own(pages.LARGE // 2 - 1, str) == str(pages.LARGE // 2 - 1)
    assert begins(CPU().arena(pages.LARGE // 2 - 1)) % ALIGNMENT == 0


@large
def test_pieces_of_many_threads_do_not_overlap() -> None:
    shared, sizes = pages.Shared(64), [1, 64, 65, 5000, pages.CHUNK // 2, pages.CHUNK // 2 + 1, 3 * pages.CHUNK] * 20
    with ThreadPoolExecutor(4) as pool:
        pieces = [*pool.map(partial(shared.piece, otherwise=CPU().allocate), sizes)]
    assert [p.size for p in pieces] == sizes
    assert not any(begins(p) % 64 for p in pieces)
    order = sorted(pieces, key=begins)
    assert all(begins(a) + a.size <= begins(b) for a, b in zip(order, order[1:], strict=False))


@large
def test_a_chunk_is_given_back_with_its_last_piece() -> None:
    shared = pages.Shared(256)
    first, second = (shared.piece(nbytes, CPU().allocate) for nbytes in (100, pages.LARGE))
    chunk = ref(first.base.obj)
    assert begins(second) == begins(first) + 256
    second[:] = 1
    kept = second[5:10]
    del first, second
    gc.collect()
    assert chunk() is not None
    assert kept.tolist() == [1] * 5
    del kept
    gc.collect()
    assert chunk() is None
    assert begins(shared.piece(1, CPU().allocate)) % pages.LARGE == 0


@large
def test_parameters_and_states_lie_beside_each_other_and_batches_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    lasting = CPU.lasting
    monkeypatch.setattr(CPU, "lasting", lambda self, nbytes: asked.append(nbytes) or lasting(self, nbytes))
    model = nn.Linear(6, 4)
    opt = optim.SGD(model.parameters(), 0.1, momentum=0.9)
    x = np.ones((3, 6), np.float32)

    def step(x: np.ndarray) -> ml.Tensor:
        loss = (model(x) ** 2).mean()
        loss.backward()
        opt.step()
        return loss

    step(x)
    assert sorted(asked) == [16, 16, 96, 96]  # weight and bias, and a momentum of each
    step(x)
    assert len(asked) == 4


@large
def test_a_system_without_room_says_so_and_one_without_large_pages_has_small_ones(monkeypatch: pytest.MonkeyPatch
                                                                                  ) -> None:
    for nbytes in (1 << 52, 1 << 60):
        with pytest.raises(MemoryError, match=str(nbytes)):
            CPU().arena(nbytes)
    monkeypatch.setattr(pages.mmap, "MADV_HUGEPAGE", -1)  # advice that no kernel knows
    arena = CPU().arena(pages.LARGE)
    arena[...] = 1
    assert arena.sum() == pages.LARGE


def test_without_large_pages_memory_comes_from_the_heap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "KNOWN", False)
    for make in (CPU().arena, CPU().lasting):
        memory = make(3 * pages.LARGE)
        memory[...] = 1
        assert (memory.size, begins(memory) % ALIGNMENT) == (3 * pages.LARGE, 0)
