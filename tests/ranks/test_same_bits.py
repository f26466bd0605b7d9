"""Training on ranks leaves the bits of one process: losses, parameters, running statistics and the optimizer's states,
whatever the order of tasks, the network, the optimizer and what else is asked for; planned and allocated bytes are
equal. With replicas that process takes one share after the other. Stale policies are in test_stale_pipelines."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import rank_runs
from command_line import reported
from covering import covering
from helpers import need
from launcher import MPIEXEC, under_mpi
from rank_runs import MICRO_BATCHES, alone, check, check_under_mpi, command
from test_torch_grids import as_csv, torch_order

from minidl import schedulers

SOMETIMES, ALWAYS = 0.5, 0.05  #: a norm of gradients that some steps exceed, and one that all do
SYNCHRONOUS = ["gpipe", "one_f_one_b", "zb_h1", "zb_h2", "zb_auto", "fast_forward", "interleaved", "modulo",
               "looped_bfs", "zb_v", "hanayo", "roundpipe"]
BOTH_WAYS = {"chimera": {"groups": 2}, "dualpipe": {"groups": 2}}
SHARDS = ("1", "2,prefetch=0", "3,prefetch=0,keep=none", "3,prefetch=1,keep=1", "3")
MIXED = {"norm": True, "drop": True}
#: places that are of torch's grid: stage 0 is gathered twice, ahead of a message, and its gradients are summed late
PLACED = """0UNSHARD,0F0,0F1,0F2,0F3,0RESHARD,0UNSHARD,0B0,0B1,0B2,0B3,0REDUCE_GRAD,0RESHARD
1UNSHARD,1F0,1B0,1F1,1F2,1B1,1B2,1F3,1RESHARD,1UNSHARD,1B3,1REDUCE_GRAD,1RESHARD
"""


def works(name: str, ranks: int) -> bool:
    """Whether the policy can work with these numbers."""
    return (not (name == "zb_h2" and 2 * ranks > MICRO_BATCHES + 1)
            and not (name == "interleaved" and MICRO_BATCHES % ranks))


def product(**axes: list[Any]) -> list[dict[str, Any]]:
    """All combinations; a value that is a dictionary is several settings."""
    return [dict(kv for name, value in zip(axes, values, strict=True)
                 for kv in (value.items() if isinstance(value, dict) else [(name, value)]))
            for values in itertools.product(*axes.values())]


def of(name: str, **more: Any) -> dict[str, Any]:
    return {"scheduler": name, **BOTH_WAYS.get(name, {}), **more}


#: what is shown -> (how many of its cases the default run has, the cases, of which some that have all pairs of choices)
CASES: dict[str, tuple[int, list[dict[str, Any]]]] = {
    "orders": (1, [of(n, ranks=p) for n in SYNCHRONOUS for p in (2, 3, 4) if works(n, p)]),
    "both ways": (1, [of(name, ranks=ranks, micro_batches=m, **more)
                      for name, ranks, m in (("chimera", 2, 4), ("chimera", 4, 4), ("chimera", 4, 8),
                                             ("dualpipe", 2, 4), ("dualpipe", 4, 8))
                      for more in ({}, {"optimizer": "adam", "clip": ALWAYS}, {"norm": True})]),
    "clipped on all steps, on some, on none": (1, [
        of(n, ranks=p, clip=clip, optimizer=optimizer) for n, p in (
            ("gpipe", 2), ("one_f_one_b", 4), ("zb_h1", 3), ("zb_h1", 4), ("interleaved", 2), ("modulo", 2),
            ("zb_v", 3), ("hanayo", 2)) for optimizer in ("sgd", "adam") for clip in (ALWAYS, SOMETIMES, 1e9)]),
    "steps that one process skips": (1, [
        of(n, ranks=p, scaled=True, bad=bad, optimizer=optimizer, clip=clip) for n, p in (
            ("gpipe", 2), ("zb_h1", 3), ("one_f_one_b", 4), ("interleaved", 2), ("zb_v", 2))
        for bad in ((1,), (), (0,), (0, 2), (1, 2), (2,)) for optimizer in ("adam", "sgd") for clip in (None, ALWAYS)]),
    "steps that replicas skip, since a gradient is not finite on one of them": (1, product(
        scheduler=["barrier", "buckets", "priority", "reverse_first_k", "dear"], ranks=[1], replicas=[2],
        micro_batches=[2], network=["mlp"], scaled=[True], bad=[(1,)], optimizer=["sgd", "adam"],
        clip=[None, ALWAYS])),
    "weights of several stages": (2, [
        *(of(n, ranks=p, network=network, **more) for network in ("transposed", "everywhere") for n, p in (
            ("gpipe", 2), ("gpipe", 4), ("one_f_one_b", 2), ("one_f_one_b", 3), ("zb_h1", 4), ("interleaved", 2),
            ("interleaved", 4), ("fast_forward", 2), ("fast_forward", 3), ("chimera", 2), ("chimera", 4), ("modulo", 2),
            ("zb_v", 4), ("hanayo", 2)) for more in ({"optimizer": "sgd", "clip": ALWAYS}, {"optimizer": "adam"},
                                        {"optimizer": "adamw", "clip": ALWAYS})),
        of("no_overlap", ranks=1, replicas=2, micro_batches=1, network="transposed")]),
    "results that go to several ranks, or come to one": (1, [
        *(of(n, ranks=p, network=network) for network, p in (("over a stage", 3), ("to every stage", 4),
                                                             ("to every stage", 3))
          for n in ("gpipe", "one_f_one_b", "zb_h1", "fast_forward")),
        *(of(n, network="within chunks") for n in ("looped_bfs", "interleaved", "interleaved_zb"))]),
    "forwards and backwards of a layer on two ranks": (1, [
        of("roundpipe", ranks=p, **more) for p in (2, 3, 4) for more in (
            {**MIXED, "optimizer": "adam", "clip": SOMETIMES}, {**MIXED, "recompute": "all", "saved": True},
            {"tied": True, "clip": ALWAYS}, {"network": "everywhere", "optimizer": "adamw", "clip": ALWAYS},
            {"network": "to every stage"}, {"micro_batches": 2}, {"options": {"chunks": 2}, "saved": True},
            {"replicas": 2, **MIXED}, {"replicas": 2, "shard": "2,prefetch=1", "tied": True}, {"split": 2},
            {"scaled": True, "bad": (1,)}, {"offload": "all", "optimizer": "adam"})]),
    "weights that are fetched": (1, [
        of(n, offload="weights", **more) for n, m in (("roundpipe", {"ranks": 3}), ("roundpipe", {"ranks": 2}), (
            "looped_bfs", {"ranks": 2}), ("chimera", {"ranks": 2, "groups": 2})) for more in (
            {**m, "clip": SOMETIMES, "optimizer": "adam", "saved": True}, {**m, **MIXED, "recompute": "all"},
            {**m, "network": "everywhere"}, {**m, "tied": True, "scaled": True, "bad": (1,)},
            {**m, "replicas": 2, "norm": True})]),
    "replicas": (1, [of(n, replicas=2, **more) for n in ("gpipe", "one_f_one_b", "zb_h1", "interleaved", *BOTH_WAYS)
                     for more in ({}, {"optimizer": "adam"}, MIXED, {"clip": ALWAYS})]
                 + [of(n, replicas=2, network="everywhere", clip=clip) for n in ("zb_h1", "zb_v")
                    for clip in (None, ALWAYS)]),
    "sums over replicas in parts and in any order": (1, [
        of(n, ranks=p, replicas=r, optimizer="adam", options={"all_reduces": order, "part_bytes": 300})
        for n, p, r in (("zb_v", 2, 2), ("one_f_one_b", 3, 2), ("hanayo", 2, 3))
        for order in ("fifo", "priority", "reverse_first_k")]),
    "matrices that Muon changes as a whole": (1, [
        *(of(n, ranks=p, optimizer="muon", **more) for n, p in (
            ("zb_h1", 3), ("one_f_one_b", 4), ("roundpipe", 2), ("chimera", 2)) for more in (
            {}, {"clip": SOMETIMES}, {**MIXED, "saved": True}, {"scaled": True, "bad": (1,), "clip": ALWAYS},
            {"network": "everywhere"}, {"replicas": 2, "options": {"part_bytes": 300}} if n != "chimera" else {
                "replicas": 2})),
        *(of(n, ranks=1, replicas=r, micro_batches=1, optimizer="muon", **more)
          for n, r in (("no_overlap", 2), ("barrier", 3), ("priority", 2))
          for more in ({}, {"clip": SOMETIMES}, {"network": "transposed"}))]),
    "shards": (1, [{"shard": SHARDS[2], "replicas": 3}, *product(
        shard=[SHARDS[0], SHARDS[4], *SHARDS[1:4]],
        job=[{}, {"optimizer": "adam", "clip": 0.1}, {**MIXED, "optimizer": "adam"}],
        scheduler=["one_f_one_b", "interleaved", "zb_v", "dualpipe_v"], replicas=[2])]),
    "shards, loss scaling and more": (1, product(
        shard=list(SHARDS[:3]), replicas=[2], scaled=[True],
        more=[{"tied": True}, of("chimera", tied=True), {"clip": ALWAYS}, of("chimera", clip=ALWAYS, saved=True),
              of("dualpipe_v", **MIXED, recompute=(0,))]))}


def cases(theme: str, many: int, every: list[dict[str, Any]]) -> list[Any]:
    """Of a theme, of which those are marked `wide` that the default run leaves out."""
    rows = covering(every)
    chosen = {(2 * i + 1) * len(rows) // (2 * many) for i in range(many)}
    return [pytest.param(row, id=f"{theme}: " + " ".join(f"{key}={value}" for key, value in row.items()),
                         marks=[] if i in chosen else [pytest.mark.wide]) for i, row in enumerate(rows)]


@pytest.mark.parametrize("settings", [case for theme, rows in CASES.items() for case in cases(theme, *rows)])
def test_ranks_leave_the_bits_of_one_process(settings: dict[str, Any]) -> None:
    check(settings)


def test_ranks_sum_a_gradient_of_several_uses_once_if_it_is_clipped() -> None:
    """Its uses are added in place, so two buffers of the task share a storage."""
    check(of("zb_v", replicas=2, network="everywhere", clip=ALWAYS))


def test_what_is_asked_for_changes_bits() -> None:
    """So that the test above would tell a clip, a loss scale or an order of sums that is not there."""
    plain = alone({"loss": True})
    assert alone({"loss": True, "clip": 1e9}) == plain
    clipped = [alone({"loss": True, "clip": limit}).losses[0] for limit in (ALWAYS, SOMETIMES)]
    assert [loss[1] == plain.losses[0][1] for loss in clipped] == [False, True], "the first step"
    assert [loss[2] == plain.losses[0][2] for loss in clipped] == [False, False], "the second one"
    skipped = alone({"loss": True, "scaled": True, "bad": (1, 2)})
    assert skipped.tensors != alone({"loss": True, "scaled": True}).tensors
    assert skipped.tensors["scale"] == np.float32(2).tobytes()
    eight, halves = (alone({"micro_batches": 8, **more}) for more in ({}, {"groups": 2}))
    assert eight.tensors != halves.tensors


@pytest.mark.parametrize("name", ["one_f_one_b", "zb_h1"])
def test_both_kinds_of_lanes_poll_transfers_between_their_calls(name: str, both_lanes: str) -> None:
    check({"scheduler": name})


# -------------------------------------------------------------------------------------------------------- torch's grids
CLASSES = ["ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble", "ScheduleLoopedBFS", "ScheduleZBVZeroBubble",
           "ScheduleDualPipeV"]
#: ZBV with 2 micro-batches, as torch 2.13 writes it with defer_pp_recv=True; not free of deadlock under rendezvous
DEFERRED = """0UNSHARD,3UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,3RECV_F0,3F0,3I0,3SEND_B0,3W0,3RECV_F1,3F1,3I1,3SEND_B1,3W1,\
3REDUCE_GRAD,3RESHARD,0RECV_B0,0I0,0W0,0RECV_B1,0I1,0W1,0REDUCE_GRAD,0RESHARD
1UNSHARD,2UNSHARD,1RECV_F0,1F0,2F0,2SEND_F0,1RECV_F1,1F1,2F1,2SEND_F1,2RECV_B0,2I0,2W0,1I0,1SEND_B0,1W0,2RECV_B1,2I1,\
2W1,2REDUCE_GRAD,2RESHARD,1I1,1SEND_B1,1W1,1REDUCE_GRAD,1RESHARD
"""


@pytest.mark.few(1)
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("more", [{}, MIXED], ids=str)
@pytest.mark.parametrize("name", CLASSES)
def test_a_deferred_grid_leaves_the_bits_of_one_process(name: str, more: dict[str, Any], replicas: int,
                                                        tmp_path: Any) -> None:
    """With receives as late as torch puts them, over threads whose sends end when they are received, also where torch's
    own runtime would mix up messages; replicas share parameters out where the grid says."""
    torch = need("torch.distributed.pipelining.schedules")
    (file := tmp_path / "grid.csv").write_text(as_csv(torch_order(torch, name, 2, 4, 2, deferred=True, lowered=True)))
    settings = {"scheduler": str(file), "options": {"chunks": 2}, "replicas": replicas, "optimizer": "adam",
                "placed": True, **more}
    own = rank_runs.prepared(settings)
    assert any("buffered: yes" in line for line in own[0][1].remarks)
    assert rank_runs.on_ranks(settings, own).tensors == alone(settings).tensors


@pytest.mark.few(1)
@pytest.mark.parametrize("more", [{}, {"optimizer": "adam", "clip": 0.1}, MIXED], ids=str)
@pytest.mark.parametrize("text", [PLACED, "interleaved", "dualpipe_v", "zb_v"], ids=str)
def test_a_placed_grid_leaves_the_bits_of_one_process(text: str, more: dict[str, Any], tmp_path: Any) -> None:
    """A plan that is written by hand, and the plans of our policies."""
    if text == PLACED:
        (file := tmp_path / "grid.csv").write_text(text)
        check({"replicas": 2, "scheduler": str(file), "placed": True, **more})
    else:
        check({"replicas": 2, "scheduler": text, "shard": SHARDS[2], "saved": "torch", **more})


# ------------------------------------------------------------------------------------------------------------------ MPI
EXPERTS = {"scheduler": "barrier", "ranks": 1, "replicas": 3, "network": "experts", "experts_over": "data"}
OVER_MPI = [
    of("zb_h1", network="transposed", optimizer="adamw", clip=ALWAYS),
    *(of(n, network="transposed", every=1, micro_batches=8) for n in ("pipedream", "layerpipe")),
    of("one_f_one_b", network="over a stage"),
    of("roundpipe", optimizer="adam", clip=ALWAYS, recompute="all", **MIXED),
    of("roundpipe", optimizer="adam", offload="weights", tied=True),
    of("zb_h1", options={"order": "hint", "cap": "2p-s"}),
    {**EXPERTS, "micro_batches": 1, "clip": ALWAYS, "told": {"ties": True, "capacity": 2}},
    {**EXPERTS, "micro_batches": 2, "rows": 1, "told": {"top_k": 1}}]


@under_mpi
@pytest.mark.parametrize("settings", [OVER_MPI[::8], pytest.param(OVER_MPI, marks=pytest.mark.slow)], ids=len)
def test_ranks_of_mpi_leave_the_same_bits(settings: list[dict[str, Any]]) -> None:
    """All in one launch, which takes longer than a training."""
    check_under_mpi(3, *settings)


@pytest.mark.slow
@under_mpi
def test_data_parallel_ranks_of_mpi_leave_the_same_bits_under_every_policy() -> None:
    """On more ranks than cores."""
    check_under_mpi(4, *(of(n, ranks=1, replicas=4, micro_batches=1) for n in schedulers.names("data", exact=True)))


ADAM = ["--optimizer", "adam", "--lr", "0.001", "--clip", "0.05"]
RESNET = ["--model", "resnet20", "--model-arg", "preset=tiny"]
HALVES = ["--replicas", "2", "--scheduler", "one_f_one_b"]
#: flags for both, and flags for the pipeline on two ranks; `--replicas 2` makes these two times two
COMMANDS = {
    "adam": ([*ADAM, "--model", "mlp"], ["--scheduler", "zb_h1"]),
    "lenet": (["--model", "lenet", "--lr", "0.01"], ["--scheduler", "zb_h1"]),
    "concatenated": (["--model", "densenet121", "--model-arg", "preset=tiny"], ["--scheduler", "zb_h1"]),
    "normalised, skips": (RESNET, ["--scheduler", "zb_h1"]),
    "replicas": ([*ADAM, "--model", "mlp"], HALVES),
    "replicas of statistics": (RESNET, ["--replicas", "2", "--scheduler", "zb_h1", "--scheduler-arg",
                                        "all_reduces=priority"]),
    "shares of states": ([*ADAM, "--model", "mlp"], [*HALVES, "--shard", "1"]),
    "shares of all": ([*ADAM, "--model", "mlp"], [*HALVES, "--shard", "3,prefetch=0,keep=none"])}
PROCESSES = "concatenated", "replicas of statistics", "shares of all"  #: on ranks of MPI, the others on threads


def commanded(capsys: Any, *flags: str) -> Any:
    return reported(capsys, "train", *flags, "--costs", "analytic")


@pytest.mark.few(2)
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.mpi] if name in PROCESSES else [])
                                  for name in COMMANDS])
def test_commands_on_ranks_leave_the_bits_of_one_process_or_of_data_parallel_ranks(name: str, capsys: Any) -> None:
    flags, more = COMMANDS[name]
    flags = [*flags, "--batch-size", "16", "--micro-batches", "4", "--steps", "3"]
    data = ["--parallel", "data", "--scheduler", "no_overlap", "--ranks", "2"] if "--replicas" in more else []
    wanted, piped = commanded(capsys, *flags, *data), [*flags, "--parallel", "pipeline", *more]
    if name in PROCESSES and MPIEXEC is not None:
        code, found, errors = command(4 if data else 2, *piped)
        assert code == 0, errors
    else:
        found = commanded(capsys, *piped, "--ranks", "2")
    assert found["ranks"] == (4 if data else 2)
    for key in ("params_sha256", "loss_first", "loss_last", "accuracy"):
        assert found[key] == wanted[key], key


@pytest.mark.slow
@under_mpi
def test_large_messages_of_a_deferred_grid_travel_over_mpi(tmp_path: Any, capsys: Any) -> None:
    """Of 1 MiB, which MPI sends only when they are received."""
    (file := tmp_path / "grid.csv").write_text(DEFERRED)
    flags = ["--model", "mlp", "--model-arg", "hidden=1024", "--batch-size", "512", "--micro-batches", "2",
             "--steps", "2"]
    code, found, errors = command(2, *flags, "--parallel", "pipeline", "--scheduler", str(file), "--chunks", "2")
    assert code == 0, errors
    assert found["params_sha256"] == commanded(capsys, *flags)["params_sha256"]
    assert "rendezvous: no, 2SF0>0 waits for 0SF1>1 waits for 2SF0>0" in found["remarks"][0]
