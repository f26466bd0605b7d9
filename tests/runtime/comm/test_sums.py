"""Sums over ranks: few bytes take one exchange, many take two; the bits are the same."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from minidl.core.tasks import Kind
from minidl.runtime.comm import Host
from minidl.runtime.comm.flight import Entry, Flight
from minidl.runtime.comm.loopback import run_ranks
from minidl.runtime.comm.places import AT_ONCE


def told(calls, name, call, *arguments):
    calls.append(name)
    return call(*arguments)


def summed(communicator, count, kinds, lengths=None):
    """This rank's arrays after their sum, the sum as NumPy adds it, and the calls of the transport."""
    rows = [np.random.default_rng(rank).normal(size=count).astype(np.float32) for rank in range(communicator.size)]
    expected = rows[0].copy()
    for row in rows[1:]:
        expected += row
    expected *= np.float32(1 / communicator.size)
    mine, calls = rows[communicator.rank].copy(), []
    for name in ("_exchange", "_collect"):
        setattr(communicator, name, partial(told, calls, name, getattr(communicator, name)))
    place = Host(communicator, np.split(mine, lengths or []))
    for kind in kinds:
        for _ in communicator.bind(kind, place, 0)():
            communicator.check()
    return mine, expected, calls


@pytest.mark.parametrize("kinds", [(Kind.A,), (Kind.AS, Kind.AG)])
@pytest.mark.parametrize("lengths", [None, [3, 4]])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("more", [0, 1])
def test_a_sum_of_few_bytes_takes_one_exchange_and_has_the_same_bits(size, more, lengths, kinds):
    count = AT_ONCE // (4 * size) + more
    for mine, expected, calls in run_ranks(size, lambda c: summed(c, count, kinds, lengths)):
        assert mine.tobytes() == expected.tobytes()
        assert calls == (["_exchange", "_collect"] if more else ["_exchange"])


def test_transfers_in_turn_are_polled_only_when_those_before_them_have_ended():
    """Of twenty messages that a rank awaits, a look polls the first."""
    polls, arrived, told = [], set(), []

    def transfer(i):
        def run():
            polls.append(i)
            while i not in arrived:
                yield
                polls.append(i)

        return run

    def looks(communicator):
        flight = Flight(communicator, lane=True)
        flight.begin([[Entry(i, transfer(i), None, 8, done=[lambda i=i: told.append(i)], in_turn=True)
                       for i in range(3)]])
        assert flight.look()  # all start
        assert polls == [0, 1, 2]
        assert not flight.look()
        assert polls == [0, 1, 2, 0]
        arrived.update((1, 2))
        assert not flight.look()
        assert (polls, told) == ([0, 1, 2, 0, 0], [])
        arrived.add(0)
        assert flight.look()
        assert (polls[5:], told) == ([0, 1, 2], [0, 1, 2])
        assert flight.over()

    run_ranks(1, looks)
