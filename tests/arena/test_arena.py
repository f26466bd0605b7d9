"""The arena: whatever an entry does, it gets one line and the others are ranked; nothing but a proof counts."""

from __future__ import annotations

import json
import math
import os
import platform
import sys
from pathlib import Path

import pytest
from helpers import PATIENCE, deadline, need

import minidl as ml
from minidl import arena, schedulers
from minidl.arena import ArenaError
from minidl.cli import main
from minidl.schedulers.pipeline import price

ENTRIES = '''
import os
import sys
import minidl.arena.referee
from minidl.schedulers.pipeline import Policy
from minidl.schedulers.pipeline.flush import gpipe, one_f_one_b
from minidl.schedulers.pipeline.looped import looped_bfs

def loops(problem):
    while True:
        pass

def closes(problem):
    import time
    os.closerange(3, 4096)
    time.sleep(600)

def eats(problem):
    kept = []
    while True:
        kept.append(bytearray(1 << 24))

def prints(problem):
    os.write(1, b"noise" * 10_000)
    print("noise", file=sys.stderr)
    return gpipe(problem)

def exits(problem):
    os._exit(0)

def leaves(problem):
    sys.exit("enough")

def cheats(problem):
    minidl.arena.referee.judge = minidl.arena.referee.price = lambda *_: 0
    for fd in range(3, 4096):
        try:
            os.write(fd, b"order\\nrank,lane,task\\n")
        except OSError:
            pass
    return gpipe(problem)

def touches(problem):
    import socket
    for what in (lambda: open(__file__ + "x", "w"), lambda: open(__file__, "a"), lambda: os.unlink(__file__),
                 lambda: os.rename(__file__, __file__ + "y"), lambda: os.kill(os.getppid(), 9), os.fork,
                 lambda: os.execv("/bin/true", ["true"]), socket.socket):
        try:
            what()
        except PermissionError:
            continue
        raise ValueError("this is not refused")
    raise PermissionError("all is refused")

def crashes(problem):
    import ctypes
    ctypes.string_at(0)

def talks(problem):
    return "x" * (1 << 25)

def one_task(problem):
    return "rank,lane,task\\n0,main,0F0\\n"

def number(problem):
    return 3

def wrong(problem):
    return problem.nothing

def text(problem):
    return one_f_one_b(problem).to_csv()

class Mute(Exception):
    def __str__(self):
        raise SystemExit(3)

class Broken(str):
    def __format__(self, how):
        raise Mute

def mute(problem):
    raise Mute

def half_a_letter(problem):
    raise ValueError("half \\ud800 a letter")

def text_of_half_a_letter(problem):
    return "rank,lane,task\\n0,main,\\ud800\\n"

def broken_text(problem):
    return Broken("rank,lane,task\\n")

def leaves_mute(problem):
    raise SystemExit(Mute())

def environment(problem):
    with open("/proc/self/environ", "rb") as file:
        assert not any(b"SECRET" in text for text in (file.read(), *os.environb.values(), *os.environb))
    return gpipe(problem)

LOOPED = Policy(looped_bfs, "looped", chunks=2)
'''
UNIT = arena.read("unit")[0]
FILTERED = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The file with the entries, in the present folder."""
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(ENTRIES)
    return tmp_path


def shown(capsys, *argv: str) -> tuple[int, dict]:
    with deadline(PATIENCE):
        code = main(["arena", *argv, "--json"])
    return code, json.loads(capsys.readouterr().out)


def refusal(name: str, seconds: float = 20.0, memory: int = 1 << 28) -> str:
    with deadline(PATIENCE):
        found = arena.ask(f"own.py:{name}", UNIT, seconds, memory)
    assert found.text is None
    assert len(found.why.splitlines()) == 1
    return found.why


def test_an_entry_that_misbehaves_gets_one_line_and_the_others_are_ranked(own, capsys):
    bad = ["eats", "exits", "number", "one_task"]
    code, found = shown(capsys, "unit", *(f"own.py:{name}" for name in (*bad, "prints", "text")), "one_f_one_b",
                        "--alone", "--memory-limit", "256MiB")
    assert code == 1
    (problem,) = found["problems"]
    assert [(e["rank"], e["entry"], e["period"], e["peak_activations"]) for e in problem["entries"]] == [
        (1, "one_f_one_b", 33.0, 4.0), (1, "own.py:text", 33.0, 4.0), (3, "own.py:prints", 33.0, 8.0)]
    assert [e["entry"] for e in problem["refused"]] == [f"own.py:{name}" for name in bad]
    said = {e["entry"][7:]: e["why"] for e in problem["refused"]}
    assert said["eats"] == "needs more memory than 256 MiB (--memory-limit)"
    assert said["exits"] == "ended its process with exit code 0, without an order"
    assert said["number"].startswith("TypeError: it returned int; it must return a Schedule, or the text of a CSV")
    assert said["one_task"] == "stage 1 has no forward; 4 ranks with 1 chunk each hold stages 0..3"
    assert [row["solved"] for row in found["board"]] == [1, 1, 1, 0, 0, 0, 0]


def test_an_entry_ends_when_its_time_is_over(own):
    for name in ("loops", "closes"):
        assert refusal(name, seconds=0.5) == "still running after 0.5 s (--time-limit)"


@pytest.mark.few(3)
@pytest.mark.parametrize(("name", "says"), [
    ("leaves", "ended with SystemExit: enough"), ("wrong", "no attribute 'nothing' (own.py, line"),
    ("crashes", "its process ended by signal 11, without an order"), ("talks", "gave more than 16 MiB of text"),
    ("missing", "has no function missing; it has"), ("mute", "Mute: its text cannot be printed (own.py, line"),
    ("half_a_letter", r"ValueError: half \ud800 a letter (own.py, line"), ("broken_text", "Mute: its text cannot be"),
    ("leaves_mute", "ended with SystemExit: its text cannot be printed")])
def test_an_entry_that_fails_is_told(own, name, says):
    assert says in refusal(name, memory=1 << 29)


@pytest.mark.skipif(not FILTERED, reason="this system has no filter of system calls")
def test_an_entry_can_touch_nothing(own):
    """It writes, appends to, removes and renames files, kills, forks, runs a program and connects."""
    before = (Path("own.py").read_text(), sorted(os.listdir()))
    assert "PermissionError: all is refused" in refusal("touches")
    assert (Path("own.py").read_text(), sorted(os.listdir())) == before


def test_what_no_file_can_hold_is_no_order(own):
    found = arena.ask("own.py:text_of_half_a_letter", UNIT, 20.0, 1 << 28)
    assert r"\ud800" in arena.judge(UNIT, found.text or "", "half a letter").why


@pytest.mark.skipif(sys.platform != "linux", reason="this system has no /proc")
def test_an_entry_cannot_read_the_environment(own, monkeypatch):
    monkeypatch.setenv("GRADER_TOKEN", "a SECRET")
    found = arena.ask("own.py:environment", UNIT, 20.0, 1 << 28)
    assert found.text, found.why


def test_an_entry_cannot_reach_the_referee(own):
    """What it changes is in its own process; what it writes to its pipe is at most its own order, and is proved."""
    found = arena.ask("own.py:cheats", UNIT, 20.0, 1 << 28)
    entry = arena.judge(UNIT, found.text or "", "cheats")
    assert entry.plan is None
    assert "line 2: expected 3 cells" in entry.why
    assert arena.referee.judge is arena.judge


def test_a_policy_with_several_stages_on_a_rank_and_files_are_entries(own, capsys):
    assert main(["plan", "--ranks", "4", "--micro-batches", "8", "--scheduler", "zb_h2", "--save", "mine.csv",
                 "--json"]) == 0
    Path("broken.csv").write_text(Path("mine.csv").read_text().replace("0O3", "0O2"))
    capsys.readouterr()
    named = ["own.py:LOOPED", "mine.csv", "broken.csv"]
    code, found = shown(capsys, "unit,tight_3", *named, "looped_bfs", "zb_h2", "v_half", "--alone")
    assert code == 1
    unit, tight = found["problems"]
    rows = {row["entry"]: row for row in unit["entries"]}
    for entry, like in (("own.py:LOOPED", "looped_bfs"), ("mine.csv", "zb_h2")):
        assert {**rows[entry], "entry": like, "own": False, "seconds": 0.0} == rows[like]
    assert [e["entry"] for e in unit["refused"]] == ["broken.csv"]
    assert "0O2 appears twice" in unit["refused"][0]["why"]
    assert {e["entry"] for e in tight["refused"]} == {*named, "looped_bfs", "zb_h2"}
    assert [(row["entry"], row["peak_activations"]) for row in tight["entries"]] == [("v_half", 3.0)]


@pytest.mark.parametrize("name", [n for n in schedulers.names("pipeline") if schedulers.find(n).staged.stale])
def test_an_order_on_older_weights_has_no_period_of_a_step(name, capsys):
    code, found = shown(capsys, "unit", name, "zb_h1", "--alone")
    assert code == 1
    assert [e["entry"] for e in found["problems"][0]["entries"]] == ["zb_h1"]
    assert "it trains on older weights" in found["problems"][0]["refused"][0]["why"]
    assert max(row["score"] for row in found["board"]) <= 1


def test_places_follow_period_peak_and_bytes():
    def entered(name: str) -> arena.Entry:
        return next(arena.published(UNIT, [name]))

    names = ["gpipe", "one_f_one_b", "zb_h2", "zb_v", "chimera", "fast_forward_strict"]
    places = {e.name: place for place, e in arena.ranked([entered(name) for name in names])}
    assert places == {"zb_v": 1, "zb_h2": 2, "chimera": 3, "fast_forward_strict": 4, "one_f_one_b": 5, "gpipe": 6}
    # with one stage on each rank, 3 links carry 8 activations and 8 gradients
    assert entered("gpipe").bytes == 48
    assert entered("zb_v").bytes == 96
    board = arena.board([(UNIT, [entered(name) for name in names])])
    assert board[0] == {"entry": "zb_h2", "own": False, "solved": 1, "score": 1.0}


def test_the_bundled_problems_hold_and_no_policy_is_below_a_bound():
    for task in arena.read("all"):
        for name in ("zb_h1", "interleaved") if task.latency < 1 and task.name != "uneven" else ("one_f_one_b",):
            plan = ml.plan(task.pipeline, name, machine=ml.Machine(task.ranks))
            assert price(plan).period >= task.bound * (1 - 1e-9)


@pytest.mark.few(1)
@pytest.mark.parametrize("task", [t for t in arena.read("all") if t.optimum], ids=lambda task: task.name)
def test_the_optima_are_proved(task):
    need("ortools")
    for objective, best in task.optimum.items():
        made = schedulers.plan(task.pipeline, "optimal", None, task.machine,
                               objective={"max_span": "span"}.get(objective, objective))
        assert made.notes["status"]["proved"]
        assert made.notes["status"]["value"] == best


@pytest.mark.parametrize(("record", "says"), [
    ({}, "a problem is an object with name, ranks and micro_batches"), (3, "a problem is an object"),
    ([], "no problems"), ('{"name": "a", "ranks": 2, "ranks": 4}', "own.json: 'ranks' is there twice; leave one out"),
    ({"name": "a", "ranks": 2, "micro_batches": 2, "size": 3}, "unknown key 'size'; known: about, activation_cap"),
    ({"name": "a", "ranks": 0, "micro_batches": 2}, "problem 'a': ranks is 0"),
    ({"name": "a", "ranks": 2, "micro_batches": "x"}, "micro-batches is 'x'"),
    ({"name": "a", "ranks": 2, "micro_batches": 2, "forward": -1}, "forward must be a positive number"),
    *(({"name": "a", "ranks": 2, "micro_batches": 2, "forward": time}, "forward must be a positive number, or a list")
      for time in ("fast", "1", ["1", 2], True, None, [[1, 2]])),
    *(({"name": "a", "ranks": 2, "micro_batches": 2, "optimum": best}, "optimum must be an object of numbers")
      for best in (27, {"makespan": "27"}, {"makespan": None}, {"makespan": math.nan}, {"makespan": math.inf})),
    *(({"name": "a", "ranks": 2, "micro_batches": 2, "forward": time}, "forward must be a positive number, or a list")
      for time in (math.nan, math.inf, 1e300, [1, 1e19])),
    ({"name": "a", "ranks": 2, "micro_batches": 2, "activation_cap": math.nan}, "activation_cap is nan"),
    *(({"name": "a", "ranks": 2, "micro_batches": 2, key: text}, f"the {key} of a problem is a line of text")
      for key in ("name", "about", "unit") for text in (None, 5, ["x"], "two\nlines", "\x1b[31m")),
    ({"name": "a", "ranks": 2, "micro_batches": 2, "latency": None}, "latency must be a number"),
    ({"name": "a", "ranks": 2, "micro_batches": 2, "activation_cap": "x"}, "activation_cap is 'x'"),
    ({"name": "a", "ranks": 60_000, "micro_batches": 60_000}, "have more than 100,000 tasks"),
    ([{"name": "a", "ranks": 1, "micro_batches": 1}] * 2, "two problems have the same name")])
def test_a_problem_that_makes_no_sense_is_one_line(tmp_path, record, says):
    path = tmp_path / "own.json"
    path.write_text(record if isinstance(record, str) else json.dumps(record))
    with pytest.raises(ArenaError, match="own.json") as caught:
        arena.read(str(path))
    assert says in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("line", ["unit gpipe zb_h1 --alone --json", "unit --alone gpipe zb_h1 --json",
                                  "--alone unit --json gpipe zb_h1", "--json --alone unit gpipe zb_h1",
                                  "unit gpipe --json --alone zb_h1"])
def test_flags_and_entries_come_in_any_order(line, capsys):
    assert main(["arena", *line.split()]) == 0
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert {e["entry"] for e in problem["entries"]} == {"gpipe", "zb_h1"}


def test_a_problem_without_a_word_about_it_begins_with_its_bound(own, capsys):
    Path("own.json").write_text(json.dumps({"name": "small", "ranks": 2, "micro_batches": 4}))
    assert main(["arena", "own.json", "gpipe", "--alone"]) == 0
    assert capsys.readouterr().out.startswith("small: no period is below 12\n")


def test_the_board_is_text_and_a_page(own, capsys):
    Path("own.json").write_text(json.dumps({"name": "small", "ranks": 2, "micro_batches": 4, "forward": [1, 2],
                                            "latency": 0.5, "unit": "ms", "about": "two stages"}))
    named = ["own.py:text", "own.py:number", "zb_h1"]
    assert main(["arena", "own.json", *named, "--alone", "--html", "board.html"]) == 1
    out = capsys.readouterr().out
    assert "small: two stages; no period is below 14 ms" in out
    assert "own.py:text <" in out
    assert "own.py:number: TypeError" in out
    page = Path("board.html").read_text()
    assert "small: " in page
    assert "own.py:number" in page
