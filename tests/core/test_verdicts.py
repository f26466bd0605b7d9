"""The files of a standstill: the reason that the states of all ranks give, and files that are damaged or older."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from command_line import refusal, run_json

from minidl.core import standstill
from minidl.core.standstill import Doing, Found, LaneState, RankState, Waiting, verdict


def state(rank: int, ranks: int, wait: tuple[int, ...] | None = None, what: str = "", *, runs: str = "",
          still: float = 5.0, call: int = 1, seconds: float = 5.0, **more: Any) -> RankState:
    lanes = (LaneState("main", "runs", runs, f"the work of {runs}", 5.0, (), 0, 1),) if runs else ()
    return replace(RankState("now", "minidl train", 1.0, 2.0, call, "", rank, ranks, "here", 1, 1.0, still,
                             None if wait is None else Waiting(wait, what, seconds), Doing(1, lanes), (), "", False),
                   **more)


def found(*states: RankState) -> Found:
    return Found({s.rank: s for s in states}, (), frozenset())


# ------------------------------------------------------------------------------------------------------------- verdicts
def test_ranks_in_a_circle_are_named_with_their_messages() -> None:
    judged = verdict(found(state(0, 3, (1,), "1RO0>0"), state(1, 3, (2,), "2RO0>1"), state(2, 3, (0,), "0RF0>2")))
    assert (judged.kind, sorted(judged.ranks)) == ("cycle", [0, 1, 2])
    assert judged.text == ("the ranks wait for each other: rank 0 waits for 1RO0>0 from rank 1, which waits for 2RO0>1 "
                           "from rank 2, which waits for 0RF0>2 from rank 0")


@pytest.mark.parametrize(("last", "kind", "words"), [
    (state(2, 3, runs="2F0"), "slow", "rank 2 runs 2F0 (the work of 2F0) on lane main, for 5.0 s; rank 0 waits for"),
    (state(2, 3, (1,), "2RO0>1", runs="2F0"), "slow", "rank 2 runs 2F0"),
    (state(2, 3, still=0.2), "slow", "rank 2 makes progress (step 1, 0.2 s ago), and is slower"),
    (state(2, 3, stack=("own.py:3 read",)), "slow", "waits for no other rank, in own.py:3 read, for 5.0 s"),
    (state(2, 3, call=0), "silent", "rank 2 did not answer"),
    (None, "silent", "rank 2 wrote no file"),
    (state(2, 3, error="TaskError: boom", own=True), "failed", "rank 2 failed: TaskError: boom")])
def test_the_rank_that_holds_up_the_others_is_named(last: RankState | None, kind: str, words: str) -> None:
    states = [state(0, 3, (1,), "1RO0>0"), state(1, 3, (2,), "2RO0>1")]
    judged = verdict(found(*states, *([last] if last else [])))
    assert (judged.kind, judged.ranks) == (kind, (2,))
    assert words in judged.text


def test_of_a_sum_the_rank_that_has_not_come_is_named() -> None:
    judged = verdict(found(state(0, 3, (1, 2), "3A0"), state(1, 3, (0, 2), "3A0"), state(2, 3, runs="3W0")))
    assert (judged.kind, judged.ranks) == ("slow", (2,))
    crossed = verdict(found(state(0, 3, (1, 2), "3A0"), state(1, 3, (0, 2), "3A0"), state(2, 3, (0, 1), "4A0")))
    assert crossed.kind == "cycle"
    assert 2 in crossed.ranks
    assert " to rank" not in verdict(found(state(0, 2, (1,), "3AS0"), state(1, 2, (0,), "4AS0"))).text
    same = verdict(found(state(0, 2, (1,), "3A0"), state(1, 2, (0,), "3A0")))
    assert (same.kind, same.ranks) == ("lost", (0, 1))


def test_a_message_that_has_ended_at_its_other_end_is_lost() -> None:
    sent = Doing(1, order={"0/send->1": ("0SF0>1",)})
    judged = verdict(found(state(0, 2, (1,), "1RO0>0", doing=sent, seconds=1.0), state(1, 2, (0,), "0RF0>1")))
    assert (judged.kind, judged.ranks) == ("lost", (1, 0))
    later = verdict(found(state(0, 2, (1,), "1RO0>0", seconds=1.0), state(1, 2, (0,), "0RF0>1")))
    assert later.kind == "cycle"


@pytest.mark.few(20)
@pytest.mark.parametrize("seed", range(200))
def test_random_waits_end_where_following_them_ends(seed: int) -> None:
    draw = random.Random(seed)
    ranks = draw.randint(2, 9)
    states: dict[int, RankState] = {}
    for rank in range(ranks):
        kind = draw.random()
        peer = draw.choice([r for r in range(ranks) if r != rank])
        if kind < 0.75:
            states[rank] = state(rank, ranks, (peer,), f"{rank}RF{rank}>{rank}", seconds=draw.random())
        elif kind < 0.9:
            states[rank] = state(rank, ranks, runs=f"{rank}F0", still=draw.choice([0.1, 5.0]))
    if not states:
        return
    judged, waits = verdict(found(*states.values())), {r: s for r, s in states.items() if s.wait}
    if not waits:
        assert judged.kind in ("silent", "slow", "none")
        return
    at, seen = max(waits, key=lambda r: waits[r].wait.seconds), []  # type: ignore[union-attr]
    while at in waits and at not in seen:
        seen.append(at)
        at = waits[at].wait.peers[0]  # type: ignore[union-attr]
    if at in seen:
        assert (judged.kind, set(judged.ranks)) == ("cycle", set(seen[seen.index(at):]))
    else:
        assert (judged.kind, judged.ranks) == ("slow" if at in states else "silent", (at,))


# ---------------------------------------------------------------------------------------------------------------- files
def put(folder: Path, *states: RankState) -> None:
    for each in states:
        standstill.path_of(folder, each.rank).write_text(json.dumps(asdict(each)))


def test_report_reads_a_folder(capsys: Any, tmp_path: Path) -> None:
    put(tmp_path, state(0, 2, (1,), "1RO0>0"), state(1, 2, runs="1F0"))
    code, record = run_json(capsys, "report", str(tmp_path))
    assert (code, record["verdict"]["kind"], record["verdict"]["ranks"], record["ranks"]) == (0, "slow", [1], 2)
    assert record["states"][0]["wait"] == {"peers": [1], "what": "1RO0>0", "seconds": 5.0}


def test_what_is_wrong_with_a_folder_is_one_line(capsys: Any, tmp_path: Path) -> None:
    assert "no file of a standstill" in refusal(capsys, "report", str(tmp_path))
    assert "is read alone" in refusal(capsys, "report", str(tmp_path), "--against", "x.json")
    (tmp_path / "standstill-0.json").write_text('{"run": 3}')
    assert "is damaged" in refusal(capsys, "report", str(tmp_path))


@pytest.mark.parametrize("content", ["", "[]", "{", '{"rank": 0}', "[" * 10_000, "\x00", "null", '"text"'])
def test_a_damaged_file_is_left_out_with_one_line(capsys: Any, tmp_path: Path, content: str) -> None:
    put(tmp_path, state(0, 2, (1,), "1RO0>0"))
    (tmp_path / "standstill-1.json").write_text(content)
    code, record = run_json(capsys, "report", str(tmp_path))
    assert (code, record["verdict"]["kind"], len(record["notes"])) == (0, "silent", 1)
    assert "damaged" in record["notes"][0]
    assert "whose file is damaged" in record["verdict"]["text"]


@pytest.mark.few(20)
@pytest.mark.parametrize("seed", range(200))
def test_a_file_with_any_value_exchanged_is_read_or_damaged(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    content = asdict(state(0, 2, (1,), "1RO0>0", runs="0F0"))
    place, where = draw.choice(list(content)), content
    if place in ("wait", "doing") and draw.random() < 0.5:
        where = content[place]
        place = draw.choice(list(where))
    where[place] = draw.choice([None, -1, 1e9, "x", [], {}, [1], {"a": 1}, True])
    put_at = tmp_path / "standstill-0.json"
    put_at.write_text(json.dumps(content))
    try:
        found = standstill.read(tmp_path)
    except ValueError as error:
        line = str(error)
    else:
        line = verdict(found).text
        assert standstill.text(found)
    assert line
    assert "\n" not in line


def test_files_of_an_older_run_are_left_out(capsys: Any, tmp_path: Path) -> None:
    put(tmp_path, state(0, 2, (1,), "1RO0>0"), state(1, 2, runs="1F0", run="before", begun=0.5))
    code, record = run_json(capsys, "report", str(tmp_path))
    assert code == 0
    assert record["notes"] == ["rank 1 of another run (before) left out; now is the newest"]
    assert (record["verdict"]["kind"], record["silent"]) == ("silent", [1])


def test_a_folder_that_cannot_be_is_refused_before_the_run(capsys: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    command = ["train", "--model", "mlp", "--model-arg", "preset=tiny", "--costs", "analytic", "--steps", "1"]
    assert str(tmp_path / "file") in refusal(capsys, *command, "--patience", f"5,{tmp_path / 'file'}")
    assert "must be a finite number" in refusal(capsys, *command, "--patience", "soon")
    assert "the name is empty" in refusal(capsys, *command, "--patience", "5,")
