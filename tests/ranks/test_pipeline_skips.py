"""Results that go to several ranks, and several that come to one, over skip connections: their messages. Their bits are
in test_same_bits."""

from __future__ import annotations

from typing import Any

import pytest
from helpers import arrays_left
from rank_runs import prepared

import minidl as ml
from minidl.core.tasks import RECEIVES, SENDS
from minidl.runtime.comm.loopback import LoopBack
from minidl.runtime.runtime import Runtime


def programs(network: str, ranks: int, scheduler: str) -> tuple[Any, ...]:
    return prepared({"network": network, "ranks": ranks, "scheduler": scheduler})[0][1].programs


def messages(graph: ml.TaskGraph) -> set[str]:
    """The sends and receives of the first micro-batch."""
    return {t.name for t in graph if t.kind in SENDS + RECEIVES and t.micro_batch == 0}


def test_every_rank_that_reads_a_result_gets_a_message_of_its_own() -> None:
    sent, _, got = (messages(program.graph) for program in programs("over a stage", 3, "gpipe"))
    assert {"0SF0>1", "0SF0>2"} <= sent, "one result goes to two ranks"
    assert {"0RF0>2", "1RF0>2"} <= got, "two results come to one rank"


@pytest.mark.parametrize("scheduler", ["looped_bfs", "interleaved", "interleaved_zb"])
def test_two_results_of_one_rank_come_to_one_stage(scheduler: str) -> None:
    assert {"0RF0>1", "2RF0>1"} <= messages(programs("within chunks", 2, scheduler)[1].graph)


def test_arrays_of_a_message_travel_from_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is laid end to end in memory that no plan counts; the calls of native lanes are arrays too."""
    monkeypatch.setenv("MINIDL_LANES", "python")
    own = programs("within chunks", 2, "one_f_one_b")
    assert any(launch.kernel == "send" and len(launch.reads) > 1
               for program in own for launches in program.graph.launches for launch in launches)
    planned = sum(part.memory.arena_bytes for program in own for part in program.body)
    left = arrays_left(lambda: [Runtime(program, transport=rank)
                                for program, rank in zip(own, LoopBack.ranks(2), strict=True)])
    assert planned <= left <= planned + 2048
