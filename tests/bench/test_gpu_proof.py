"""The record of what was shown on a GPU: commands that stand in for its parts, their limits, and merging."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import common
import gpu_proof
import processes
import pytest
from gpu_proof import Part, Section, Step, prove
from helpers import BENCH, PATIENCE, until
from ladder_cases import CASES, OTHERS

import minidl as ml
from minidl.devices import device as devices
from minidl.kernels import cuda

ABOUT = {"gpu": {"name": "none"}, "sources": "s"}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(gpu_proof, "POLL", 0.1)
    for module in (processes, gpu_proof):
        monkeypatch.setattr(module, "GRACE", 0.5)


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def part(*steps: Step, **more: Any) -> Part:
    return Part(lambda folder: list(steps), **more)


def record(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


@pytest.fixture
def proved(tmp_path):
    """`proved(name, part)`: the entry of this part in the record `proof.json`."""
    def run(name: str, of: Part, about: Any = ABOUT, chosen: Any = ()) -> dict[str, Any]:
        return prove(name, of, tmp_path / "proof.json", about, PATIENCE, chosen)

    return run


class Log:
    """Programs that say their letter when they run, and what was said since it was last asked."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "ran"
        self.path.touch()

    def says(self, letter: str, ending: str = "") -> list[str]:
        return python(f"open({str(self.path)!r}, 'a').write({letter!r}); {ending}")

    def ran(self) -> str:
        said = self.path.read_text()
        self.path.write_text("")
        return said


def lives(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def ends(pid: str) -> None:
    until(lambda: not lives(int(pid)), f"process {pid} has ended")


def kill_session(pid: int) -> None:
    """Kills every process of a session, whatever it does."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.getsid(int(process.name)) == pid:
                os.kill(int(process.name), signal.SIGKILL)


def test_parts_are_merged_into_one_record(proved, tmp_path):
    out = tmp_path / "proof.json"
    assert proved("one", part(Step("a", python("print('{\"x\": 1}')"), read=gpu_proof.printed),
                              Step("b", python(""))))["passed"]
    assert not proved("two", part(Step("a", python("import sys; print('far'); sys.exit('not right')")),
                                  Step("b", python(""))))["passed"]
    assert proved("three", part(missing=lambda: "not here")) == {"left_out": "not here"}
    found = record(out)
    assert found["name"] == "gpu_proof"
    assert list(found["parts"]) == ["one", "two", "three"]
    assert found["parts"]["one"]["machine"] == ABOUT
    assert found["parts"]["one"]["steps"]["a"]["record"] == {"x": 1}
    failed = found["parts"]["two"]["steps"]["a"]
    assert (failed["exit"], failed["timed_out"], failed["said"]) == (1, False, ["far", "not right"])
    assert found["parts"]["two"]["steps"]["b"]["passed"], "a step that fails does not end the part"
    assert not found["passed"]
    proved("two", part(Step("a", python(""))))
    assert record(out)["passed"]
    assert list(record(out)["parts"]) == ["one", "two", "three"]


def test_at_the_limit_every_process_is_ended_and_what_was_found_stays(proved, tmp_path, monkeypatch):
    pids = tmp_path / "pids"
    code = (f"import os, signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
            f"child = subprocess.Popen([sys.executable, '-c', 'import signal, time; signal.signal(signal.SIGTERM, "
            f"signal.SIG_IGN); time.sleep(3600)'])\n"
            f"print('tests/test_a.py::test_one PASSED [ 50%]', flush=True)\n"
            f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}'); time.sleep(3600)")
    clock = time.monotonic
    # time runs out when it has spoken
    monkeypatch.setattr(time, "monotonic", lambda: clock() + (1000 if pids.exists() and pids.read_text() else 0))
    slow = proved("slow", part(Step("a", python(code), read=gpu_proof.tests_found), Step("b", python(""))))
    monkeypatch.undo()
    assert (slow["steps"]["a"]["timed_out"], slow["steps"]["a"]["counts"],
            slow["steps"]["a"]["passed"]) == (True, {"PASSED": 1}, False)
    assert slow["steps"]["b"]["left_out"] == "no time was left"
    assert not slow["passed"]
    for pid in pids.read_text().split():
        ends(pid)


def test_a_step_that_ends_leaves_no_process_behind(proved, tmp_path):
    pid = tmp_path / "pid"
    code = (f"import subprocess, sys; open({str(pid)!r}, 'w').write(str(subprocess.Popen([sys.executable, '-c', "
            f"'import time; time.sleep(3600)']).pid))")
    assert proved("one", part(Step("a", python(code))))["passed"]
    ends(pid.read_text())


@pytest.mark.parametrize("how", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.wide)])
def test_what_was_found_is_kept_when_the_proof_itself_is_stopped(tmp_path, how):
    """Or killed, with every process of its session."""
    out, pid = tmp_path / "proof.json", tmp_path / "pid"
    step = (f"import os, time; print('tests/test_a.py::test_one PASSED [ 50%]', flush=True); "
            f"open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(3600)")
    code = (f"import signal, sys; sys.path[:0] = [{str(BENCH)!r}]; import gpu_proof as g; from pathlib import Path\n"
            f"signal.signal(signal.SIGTERM, lambda *_: sys.exit(143)); g.POLL = 0.1\n"
            f"steps = [g.Step('first', [sys.executable, '-c', '']), g.Step('second', [sys.executable, '-c', "
            f"{step!r}], read=g.tests_found)]\n"
            f"g.prove('one', g.Part(lambda folder: steps), Path({str(out)!r}), {{'sources': 's'}}, {PATIENCE})")
    proof = subprocess.Popen(python(code), start_new_session=True)
    try:
        until(lambda: pid.exists() and pid.read_text() and "second" in record(out)["parts"]["one"]["steps"],
              "the second step has begun, and the record says so")
        if how == signal.SIGKILL:
            kill_session(proof.pid)
        proof.send_signal(how)
        assert proof.wait(PATIENCE) == (143 if how == signal.SIGTERM else -how)
    finally:
        proof.kill()
        with suppress(ProcessLookupError):
            os.kill(int(pid.read_text()), signal.SIGKILL) if how == signal.SIGKILL else None
    steps = record(out)["parts"]["one"]["steps"]
    assert steps["first"]["passed"]
    assert not record(out)["passed"]
    if how == signal.SIGKILL:
        assert "exit" not in steps["second"]
    else:
        assert steps["second"]["stopped"]
        assert steps["second"]["counts"] == {"PASSED": 1}
        ends(pid.read_text())


@pytest.mark.slow
def test_a_runs_tests_are_told_apart_and_one_that_loses_its_process_hides_no_other(proved, tmp_path):
    (tmp_path / "test_some.py").write_text(
        "import os, pytest, warnings\ndef test_right(): warnings.warn('never mind')\n"
        "@pytest.mark.parametrize('s', ['a b'])\ndef test_wrong(s): assert 0\ndef test_lost(): os._exit(5)\n"
        "@pytest.mark.skip\ndef test_later(): pass\ndef test_after(): pass\n")
    command = [*gpu_proof.pytest(str(tmp_path / "test_some.py")), "--rootdir", str(tmp_path), "-o", "addopts=", "-o",
               "filterwarnings=error"]
    found = proved("tests", part(Step("t", command, read=gpu_proof.tests_found)))["steps"]["t"]
    assert found["counts"] == {"PASSED": 2, "FAILED": 2, "SKIPPED": 1}
    assert [name.rpartition("/")[2] for name in found["failed"]] == ["test_some.py::test_wrong[a b]",
                                                                     "test_some.py::test_lost"]
    assert not found["passed"]
    assert not gpu_proof.tests_found(tmp_path, "")["passed"], "no test at all shows nothing"


@pytest.mark.slow
def test_steps_that_have_passed_stay_and_what_took_too_long_comes_last(proved, tmp_path, monkeypatch):
    log = Log(tmp_path)

    def run(*endings: str, about: Any = ABOUT) -> dict[str, Any]:
        return proved("p", part(*(Step(name, log.says(name, ending))
                                  for name, ending in zip("abcd", endings, strict=True))), about)

    clock = time.monotonic
    # c takes all there is
    monkeypatch.setattr(time, "monotonic", lambda: clock() + (1000 if "c" in log.path.read_text() else 0))
    first = run("", "exit(1)", "import time; time.sleep(3600)", "")
    monkeypatch.undo()
    assert log.ran() == "abc"
    assert [first["steps"][name]["passed"] for name in "abcd"] == [True, False, False, False]
    assert run("exit(1)", "", "", "")["passed"]
    assert log.ran() == "dbc", "a has passed, d never ran"
    assert run("", "", "", "")["passed"]
    assert log.ran() == "abcd", "all had passed"
    run("", "exit(1)", "", "")
    log.ran()
    run("", "", "", "", about={**ABOUT, "sources": "t"})
    assert log.ran() == "abcd", "of other sources nothing stays"


def test_single_steps_can_be_chosen(proved, tmp_path):
    log = Log(tmp_path)

    def chosen(*texts: str) -> Any:
        return proved("p", part(*(Step(name, log.says(name[0])) for name in ("a one", "b one", "c two"))),
                      chosen=texts)

    first = chosen("b", "two")
    assert log.ran() == "bc"
    assert first["steps"]["a one"]["left_out"] == "not chosen"
    assert not first["passed"], "what has not been run has not passed"
    assert gpu_proof.state(first, ABOUT) == 1, "it is not finished"
    assert chosen("a")["passed"]
    assert log.ran() == "a", "the others stay as they are"
    assert chosen("one")["passed"]
    assert log.ran() == "ab", "what is asked for is run, whether it has passed or not"


def test_what_is_ours_is_looked_at_for_races_after_all_has_been_for_memory(tmp_path):
    names = [step.name.partition(",")[0] for step in gpu_proof.sanitized(tmp_path)]
    assert names == ["memcheck", "memcheck", "racecheck", "racecheck"]
    (filtered,) = {step.command[step.command.index("--kernel-name-exclude") + 1]
                   for step in gpu_proof.sanitized(tmp_path)[2:]}
    excluded = re.compile(filtered.removeprefix("regex="))
    ours = [name for path in cuda.SOURCES.glob("*.cu") for name in cuda.kernels_of(path.name)]
    assert [name for name in ours if excluded.search(name)] == []
    theirs = ["sm90_xmma_fprop_implicit_gemm_tf32f32", "_ZN7cutlass7Kernel2I", "nvjet_tst_128x64",
              "_Z17wgrad_alg0_engineI", "_ZN8cublasLt19splitKreduce_kernelI"]
    assert all(excluded.search(name) for name in theirs)


def test_the_ladder_goes_on_where_it_stopped(proved, tmp_path, monkeypatch):
    name = "bf16 a0.25 32px, compiled"
    times = {"minidl": "E3 in_order", "step_ms": {"E3 in_order": {"median": 2}}, "left_out": {},
             "ratios": {"B1 tuned / E3 in_order": {"median": 3}}}
    networks = {"bf16": {"other": {}, "a0.25 32px b32": {
        "first": times, "B3": {"left_out": {"B3": "not here"}}, "B4": {"left_out": {"B4": "no time was left"}}}}}
    climb = (f"import json, pathlib, sys; path = pathlib.Path(sys.argv[-1]); had = "
             f"json.loads(path.read_text())['climbs'] if path.exists() else []; "
             f"path.write_text(json.dumps({{'climbs': [*had, len(had)], 'networks': {networks}, 'passed': True}}))")
    monkeypatch.setattr(gpu_proof, "bench", lambda script, *arguments: [*python(climb), *arguments])
    for climbs in ([0], [0, 1]):
        step = proved("ladder", gpu_proof.PARTS["ladder"], chosen=[name])["steps"][name]
        assert step["record"] == "ladder.json"
        assert step["passed"]
        assert step["line"] == "B1 tuned 3.00x; E3 in_order 2.00 ms; B3: not here"
        assert record(tmp_path / "ladder.json")["climbs"] == climbs
    assert step["command"][-7:-1] == ["E1", "E3 in_order", "E3 multi_region", "B2", "B3", "--out"]


def test_without_a_choice_what_has_not_passed_is_run_within_the_time(call, tmp_path, monkeypatch, capsys):
    out, ran, clock = tmp_path / "proof.json", [], [1000.0]

    def shown(name: str, made: Any, out: Path, about: Any, limit: float, chosen: Any) -> Any:
        ran.append((name, limit))
        clock[0] += 100
        found = {"machine": about, "steps": {"s": {"exit": 0, "timed_out": False, "passed": name != "b",
                                                   **({"complete": False} if name == "c" else {})}}}
        return gpu_proof.merge(out, name, {**found, "passed": name != "b"})["parts"][name]

    monkeypatch.setattr(gpu_proof, "prove", shown)
    monkeypatch.setattr(gpu_proof, "PARTS", {name: part(Step(f"{name} step", python(""))) for name in "abcd"})
    monkeypatch.setattr(gpu_proof, "described", lambda device: {})
    monkeypatch.setattr(gpu_proof.ml.device, "get", lambda name: None)
    monkeypatch.setattr(gpu_proof.signal, "signal", lambda *_: None)
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])

    def main(*arguments: str) -> int:
        ran.clear()
        return call(gpu_proof, "--out", out, *arguments)

    assert main("--within", "301", "--limit", "240") == 1
    assert [(name, round(limit, 1)) for name, limit in ran] == [("a", 240), ("b", 200.5), ("c", 100.5)]
    assert "d: no time is left" in capsys.readouterr().out
    assert main() == 1
    assert [name for name, _ in ran] == ["d", "c", "b"], "what is new, what is not finished, what has failed"
    assert main("--part", "a") == 0
    assert [name for name, _ in ran] == ["a"]
    main("--step", "c st", "b")
    assert [name for name, _ in ran] == ["b", "c"]
    capsys.readouterr()
    assert main("--step", "nothing", "--part", "a") == 2
    assert capsys.readouterr().err == "gpu_proof: no step's name contains nothing; there are: a step\n"
    monkeypatch.setattr(gpu_proof, "sources", lambda *folders: "others")
    main()
    assert [name for name, _ in ran] == list("abcd")


def test_a_benchmark_that_leaves_no_record_has_not_passed(proved, monkeypatch):
    monkeypatch.setattr(gpu_proof, "bench", lambda script, *arguments: python(""))
    assert not proved("launch", gpu_proof.PARTS["launch"])["passed"]


@pytest.mark.parametrize(("digests", "right"), [("aaaaabbbbb", True), ("aaaacbbbbb", False), ("aaaaabbbb-", False)])
def test_ranks_must_leave_the_parameters_of_one_process(digests, right):
    steps = {step.name: {"record": {"params_sha256": d}} if d != "-" else {"passed": False}
             for step, d in zip(gpu_proof.ranks(Path()), digests, strict=True)}
    assert gpu_proof.equal_parameters(steps)["passed"] is right


def test_every_part_is_a_command_of_this_repository(tmp_path):
    for name, made in gpu_proof.PARTS.items():
        for step in made.steps(tmp_path):
            words = [word for word in step.command if word.endswith(".py")]
            assert all((BENCH.parent / word).exists() for word in words), (name, words)
            assert len(words) >= 10 or name != "kernels", "there are kernels to test"


# ---------------------------------------------------------------------------------------------------------------- calls
@pytest.mark.parametrize("name", gpu_proof.CALLS)
def test_what_a_call_plans_fits_and_each_ladder_has_one_network(name, tmp_path):
    planned = sum(section.seconds for section in gpu_proof.CALLS[name])
    assert planned + gpu_proof.SET_UP[name] <= gpu_proof.WITHIN <= 290
    for section in gpu_proof.CALLS[name]:
        steps = [step for step in gpu_proof.PARTS[section.part].steps(tmp_path)
                 if step.name in section.names(tmp_path)]
        assert all(any(text in step.name for step in steps) for text in section.steps), section
        if section.part in ("sanitizer", "mpi"):
            assert all(step.environment == {"MINIDL_TUNE": "first"} for step in steps), "nothing is timed there"
        if section.part == "ladder":
            (step,) = steps
            network = step.command[step.command.index("--models") + 1]
            assert len([label for label in {**CASES, **OTHERS} if network in label]) == 1, network


def test_what_is_measured_in_b_has_been_tuned_in_a(tmp_path):
    networks = {name: {step.partition(",")[0] for section in sections if section.part == "ladder"
                       for step in section.names(tmp_path)} for name, sections in gpu_proof.CALLS.items()}
    assert networks["B"] | {f"bf16 {name}" for name in gpu_proof.TRACED} <= networks["A"]


def test_sections_that_hang_die_or_break_their_gpu_stop_no_other(tmp_path, monkeypatch, capsys):
    out = tmp_path / "proof.json"
    commands = {"hangs": "import time; time.sleep(3600)", "dies": "import os; os.kill(os.getpid(), 9)",
                "breaks its GPU": "import sys; print('cudaErrorIllegalAddress', file=sys.stderr); sys.exit(3)",
                "works": "print('all is well')"}
    steps = [Step(name, python(code)) for name, code in commands.items()]
    monkeypatch.setattr(gpu_proof, "PARTS", {
        "some": part(*steps), "never": part(Step("b", python(""))), "mpi": part(missing=lambda: "mpiexec is missing"),
        "checked": part(Step("a", python("")), check=lambda steps: {"passed": False, "line": "other bits"})})
    monkeypatch.setattr(gpu_proof, "LEAST", 0.0)

    def called(*sections: Section, within: float = PATIENCE) -> list[list[str]]:
        """The table, without seconds."""
        assert not gpu_proof.called(sections, out, ABOUT, within)
        lines = capsys.readouterr().out.partition("\n\n")[2].splitlines()
        return [[name, outcome, *more] for name, outcome, _, *more in (re.split(" {2,}", line) for line in lines[1:])]

    sections = [Section("some", 0.1, ("hangs",)), Section("some", 20, ("dies",)), Section("mpi", 20),
                Section("some", 20, ("breaks",)), Section("checked", 20), Section("some", 20, ("works",))]
    first = [["some: hangs", "ended at its limit"], ["some: dies", "failed"],
             ["mpi", "left out", "mpiexec is missing"], ["some: breaks its GPU", "failed", "cudaErrorIllegalAddress"],
             ["checked: a", "passed"], ["checked", "failed", "other bits"]]
    assert called(*sections) == [*first, ["some: works", "passed", "all is well"]]
    found = record(out)["parts"]["some"]["steps"]
    assert {name: step["exit"] for name, step in found.items()} == {"hangs": -15, "dies": -9, "breaks its GPU": 3,
                                                                    "works": 0}
    assert called(*sections) == [*first, ["some: works", "passed before", "all is well"]], "it goes on"
    assert called(Section("some", 20, ("works",)), Section("never", 20), within=0) == [
        ["some: works", "passed before", "all is well"], ["never: b", "left out", "no time was left"]]
    assert record(out)["parts"]["some"]["steps"]["works"] == found["works"]


def test_a_section_may_use_what_no_other_needs(tmp_path, monkeypatch, capsys):
    limits, clock = [], [0.0]

    def shown(name: str, made: Any, out: Path, about: Any, limit: float, chosen: Any) -> Any:
        limits.append(limit)
        clock[0] += 10
        return {"left_out": "not here"}

    monkeypatch.setattr(gpu_proof, "PARTS", {"some": part()})
    monkeypatch.setattr(gpu_proof, "GRACE", 0.0)
    monkeypatch.setattr(gpu_proof, "prove", shown)
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    gpu_proof.called([Section("some", seconds) for seconds in (20, 50, 20, 9, 40)], tmp_path / "p", ABOUT, 140)
    assert limits == [21, 61, 40, 18, 80]
    limits.clear()
    gpu_proof.called([Section("some", seconds) for seconds in (20, 50)], tmp_path / "p", ABOUT, 30)
    assert limits == [20, 20], "the call's end holds for all"


def test_a_record_that_cannot_be_written_stops_no_section(tmp_path, monkeypatch, capsys):
    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gpu_proof, "write_atomic", full)
    monkeypatch.setattr(gpu_proof, "PARTS", {"some": part(Step("a", python("print('well')")), Step("b", python("")))})
    assert gpu_proof.called([Section("some", 20, ("a",)), Section("some", 20, ("b",))], tmp_path / "p", ABOUT, PATIENCE)
    said = capsys.readouterr()
    assert [line.split()[:3] for line in said.out.splitlines()[-2:]] == [["some:", "a", "passed"],
                                                                        ["some:", "b", "passed"]]
    assert said.err.splitlines()[0] == ("gpu_proof: the record of some cannot be written: [Errno 28] No space left on "
                                        "device")


@pytest.fixture
def no_gpu(monkeypatch):
    """No GPU is found, for want of a library."""
    def missing(name: str) -> Any:
        raise ml.DeviceError("cuda needs nvmath-python")

    monkeypatch.setattr(devices, "get", missing)
    monkeypatch.setattr(gpu_proof.signal, "signal", lambda *_: None)


def test_a_call_without_what_the_libraries_need_runs_and_says_so(no_gpu, call, tmp_path, monkeypatch, capsys):
    out = tmp_path / "proof.json"
    monkeypatch.setattr(gpu_proof, "PARTS", {"smoke": part(Step("a", python("")))})
    monkeypatch.setattr(gpu_proof, "CALLS", {"A": (Section("smoke", PATIENCE),)})
    assert call(gpu_proof, "--call", "A", "--out", out) == 0
    assert capsys.readouterr().err.splitlines()[0] == "gpu_proof: cuda needs nvmath-python"
    assert record(out)["parts"]["smoke"]["machine"]["missing"] == "cuda needs nvmath-python"


@pytest.mark.parametrize("name", ["gpu_proof", "ladder", "host_copies", "kernel_table", "nccl_alone"])
def test_without_a_gpu_a_benchmark_says_so_in_one_line(no_gpu, call, tmp_path, capsys, name):
    assert call(importlib.import_module(name), "--out", tmp_path / "record.json") == 2
    assert capsys.readouterr().err == f"{name}: cuda needs nvmath-python\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.wide
def test_a_ladder_that_is_ended_ends_its_run(tmp_path):
    pid = tmp_path / "pid"
    run = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(3600)"
    code = (f"import sys; sys.path[:0] = [{str(BENCH)!r}]; import ladder; from types import SimpleNamespace\n"
            f"ladder.ml.device.get = lambda name: SimpleNamespace(captures=True)\n"
            f"ladder.described = lambda device: {{}}\n"
            f"apart = ladder.Apart; ladder.Apart = lambda command: apart([sys.executable, '-c', {run!r}])\n"
            f"sys.argv[1:] = ['--models', 'lenet', '--no-compile', '--out', {str(tmp_path / 'ladder.json')!r}]\n"
            f"ladder.main()")
    climb = subprocess.Popen(python(code))
    try:
        until(lambda: pid.exists() and pid.read_text(), "a run has begun")
        climb.terminate()
        assert climb.wait(PATIENCE) == 128 + signal.SIGTERM
    finally:
        climb.kill()
    ends(pid.read_text())


# ------------------------------------------------------------------------------------------------------- a bare machine
def with_wheels(root: Path) -> None:
    (root / ".wheels").mkdir()
    (root / ".wheels" / "mpich-5.whl").touch()


@pytest.fixture
def bare(tmp_path):
    """`bare(stage, ...)` runs the script in a copy of its folder where every program that it starts only says so."""
    root, tools, said = tmp_path / "root", tmp_path / "tools", tmp_path / "said"
    (root / "bench").mkdir(parents=True)
    tools.mkdir()
    shutil.copy(BENCH / "gpu_machine.sh", root / "bench")
    programs = {"timeout": 'while [ "$1" != python3 ]; do shift; done; exec "$@"',
                "python3": f'echo "$@" >> {said}; [[ $* != *zipfile* ]] || install -D /dev/null '
                           f'"$5/mpich-5.data/data/bin/mpiexec"'}
    for name, body in programs.items():
        (tools / name).write_text(f"#!/bin/bash\n{body}\n")
        (tools / name).chmod(0o755)

    def run(*arguments: str) -> tuple[int, list[str], str]:
        """The exit code, what was started, and what was said; seconds that are left of 100 are told as 80."""
        said.write_text("")
        environment = {"PATH": f"{tools}:/usr/bin:/bin", "OUT": str(tmp_path / "out"),
                       "SITE": str(tmp_path / "site"), "WITHIN": "100"}
        done = subprocess.run([root / "bench" / "gpu_machine.sh", *arguments], capture_output=True, text=True,
                              env=environment, timeout=PATIENCE)
        started = re.sub(r"--within 8\d\b", "--within 80", said.read_text())
        return done.returncode, re.sub(r"--budget (5\d|6\d)\b", "--budget 60", started).splitlines(), done.stderr

    return run, root


def test_a_bare_machine_is_set_up_once_and_runs_a_stage(bare, tmp_path):
    run, root = bare
    site = tmp_path / "site"
    assert run("A") == (0, [f"bench/gpu_proof.py --call A --within 80 --out {site}/work/gpu_proof.json"], (
        "gpu_machine: .wheels has no wheels; run bench/gpu_machine.sh wheels where there is a network\n"))
    (site / "work" / "ladder.json").write_text("what was found without them")
    assert run("wheels", "ml_dtypes")[1][0].endswith("mpich==5.0.2 ml_dtypes")
    (root / ".wheels").mkdir()
    for name in ("mpich-5.0.2-py3-none-any.whl", "nvmath_python-1.0.0-cp312.whl"):
        (root / ".wheels" / name).touch()
    assert (run("mpi", "--step", "lenet") == (0, [
        f"-m zipfile -e .wheels/mpich-5.0.2-py3-none-any.whl {site}/mpi",
        f"-m pip install -q --no-index --no-deps --no-compile --upgrade --target {site}/packages "
        f".wheels/nvmath_python-1.0.0-cp312.whl",
        f"bench/gpu_proof.py --part mpi --within 80 --out {site}/work/gpu_proof.json --step lenet"], ""))
    assert run("ladder", "--models", "k12")[1] == [f"bench/ladder.py --resume --budget 60 --out "
                                                   f"{site}/work/ladder.json --models k12"]
    assert (site / "work" / "ladder.json").read_text() == "what was found without them"


def test_a_stage_continues_the_records_of_an_emptied_output_and_of_an_earlier_machine(bare, tmp_path):
    """A machine may empty the output before every command, and a fresh one has only the files that are carried."""
    run, root = bare
    with_wheels(root)
    (root / ".gpu").mkdir()
    (root / ".gpu" / "ladder.json").write_text("of an earlier machine")
    out, site = tmp_path / "out", tmp_path / "site"
    work = site / "work"
    assert run("ladder")[0] == 0
    assert (work / "ladder.json").read_text() == (out / "ladder.json").read_text() == "of an earlier machine"
    (work / "ladder.json").write_text("of this machine")
    (site / "none" / "choices.sqlite").write_text("kernels")
    (site / "cupy" / "1.cubin").write_text("compiled")
    shutil.rmtree(out)
    assert run("mpi")[0] == 0
    assert sorted(p.name for p in out.iterdir()) == ["choices_none.sqlite", "cupy.tgz", "ladder.json"]
    assert (out / "ladder.json").read_text() == "of this machine", "what is newer there stays"
    shutil.rmtree(site)
    for name in ("choices_none.sqlite", "cupy.tgz"):
        shutil.copy(out / name, root / ".gpu")
    shutil.copy(out / "choices_none.sqlite", root / ".gpu" / "choices_other-card.sqlite")
    assert run("mpi")[0] == 0
    assert (site / "none" / "choices.sqlite").read_text() == "kernels"
    assert (site / "cupy" / "1.cubin").read_text() == "compiled"
    (site / "cupy" / "2.cubin").write_text("another")
    assert run("mpi")[0] == 0
    listed = subprocess.run(["tar", "-tzf", out / "cupy.tgz"], capture_output=True, text=True, check=True).stdout
    assert sorted(listed.split()) == ["./", "./1.cubin", "./2.cubin"]


def test_an_output_that_cannot_be_written_stops_nothing(bare, tmp_path):
    run, root = bare
    with_wheels(root)
    out, work = tmp_path / "out", tmp_path / "site" / "work"
    why = f"gpu_machine: not all records could be copied to {out}; they are in {work}\n"
    out.write_text("no folder can be made here")
    work.mkdir(parents=True)
    (work / "ladder.json").write_text("of this machine")
    code, started, errors = run("A")
    assert (code, started[-1][:27], errors) == (0, "bench/gpu_proof.py --call A", why)
    out.unlink()
    full = tmp_path / "tools" / "cp"  # as on a full disk: a part of the file, and an error
    full.write_text('#!/bin/bash\nhead -c 3 "$2" > "$3"\nexit 1\n')
    full.chmod(0o755)
    assert (run("B")[::2], list(out.iterdir())) == ((0, why), [])
    full.unlink()
    assert run("B")[::2] == (0, "")
    assert (out / "ladder.json").read_text() == "of this machine"


#: runs in place of bench/gpu_proof.py: the same program, but its sections fail in every way
FAULTS = r"""
import pathlib, signal, sys, time
sys.path[:0] = [{bench!r}]
import gpu_proof, processes
from gpu_proof import Part, Section, Step
def device(name):
    time.sleep(3600 if pathlib.Path({stuck!r}).exists() else 0)
    raise gpu_proof.DeviceError("there is no GPU")
gpu_proof.ml.device.get = device
gpu_proof.sources = lambda *folders: "s"
gpu_proof.GRACE = processes.GRACE = 0.2
gpu_proof.POLL, gpu_proof.LEAST = 0.1, 0.0
ignore = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('begun', flush=True); "
codes = {{"works": "print('well')", "hangs": ignore + "time.sleep(3600)", "dies": "import os; os.kill(os.getpid(), 11)",
         "breaks its GPU": "import sys; sys.exit('cudaErrorIllegalAddress')",
         "waits": "import pathlib, time\nwhile not pathlib.Path({go!r}).exists(): time.sleep(0.02)", "ends": ""}}
steps = [Step(name, [sys.executable, "-c", code]) for name, code in codes.items()]
gpu_proof.PARTS = {{"some": Part(lambda folder: steps)}}
seconds = dict.fromkeys(codes, 60.0) | {{"hangs": 0.2}}
gpu_proof.CALLS = {{call: tuple(Section("some", seconds[name], (name,)) for name in codes) for call in "AB"}}
sys.exit(gpu_proof.main())
"""


@pytest.fixture
def faulty(bare, tmp_path):
    """`faulty(call, within)` begins a call, in a session of its own, whose sections have faults."""
    _, root = bare
    program, tools = tmp_path / "faults.py", tmp_path / "tools"
    program.write_text(FAULTS.format(bench=str(BENCH), go=str(tmp_path / "go"), stuck=str(tmp_path / "stuck")))
    (tools / "timeout").unlink()
    (tools / "python3").write_text(f'#!/bin/bash\nshift; exec {sys.executable} {program} "$@"\n')
    environment = {"PATH": f"{tools}:/usr/bin:/bin", "OUT": str(tmp_path / "out"), "SITE": str(tmp_path / "site")}

    def begin(call: str, within: float = PATIENCE) -> subprocess.Popen[str]:
        return subprocess.Popen([root / "bench" / "gpu_machine.sh", call], stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, text=True, start_new_session=True,
                                env={**environment, "WITHIN": f"{within:.0f}"})

    return begin


@pytest.mark.parametrize("call", ["A", pytest.param("B", marks=pytest.mark.wide)])
def test_a_killed_call_leaves_its_records_and_the_next_goes_on_whatever_its_sections_do(faulty, tmp_path, call):
    kept, out = tmp_path / "site" / "work" / "gpu_proof.json", tmp_path / "out"
    out.write_text("no folder can be made here")
    killed = faulty(call)
    try:
        until(lambda: kept.exists() and "left_out" not in record(kept)["parts"]["some"]["steps"]["waits"],
              "five sections have begun")
    finally:
        kill_session(killed.pid)
    killed.communicate(timeout=PATIENCE)
    first = record(kept)["parts"]["some"]["steps"]
    assert {name: step.get("exit") for name, step in first.items()} == {
        "works": 0, "hangs": -9, "dies": -11, "breaks its GPU": 1, "waits": None, "ends": None}
    (tmp_path / "go").touch()
    out.unlink()
    again = faulty(call)
    table, errors = again.communicate(timeout=PATIENCE)
    assert again.returncode == 1
    assert "gpu_proof: there is no GPU" in errors
    assert [re.split(" {2,}", line)[1] for line in table.partition("\n\n")[2].splitlines()[1:]] == [
        "passed before", "ended at its limit", "failed", "failed", "passed", "passed"]
    assert record(out / "gpu_proof.json") == record(kept)


@pytest.mark.slow
def test_a_call_ends_at_its_limit_also_if_the_driver_holds_it(faulty, tmp_path):
    (tmp_path / "stuck").touch()
    begin = time.monotonic()
    held = faulty("A", 10)
    held.communicate(timeout=PATIENCE)
    assert held.returncode == 124, "what limits it has ended it"
    assert time.monotonic() - begin < PATIENCE


def test_every_part_and_call_of_the_proof_is_a_stage(bare):
    run, root = bare
    with_wheels(root)
    for name in (*gpu_proof.PARTS, *gpu_proof.CALLS):
        assert run(name)[0] == 0, name
    code, called, errors = run("nothing")
    assert (code, called) == (2, [])
    assert errors.startswith("Sets up a bare machine with a GPU")


def test_a_machine_without_git_has_a_record(monkeypatch, tmp_path):
    """Of which commit is not known; the sources are told by their digest."""
    monkeypatch.setenv("PATH", str(tmp_path))
    found = common.machine()
    assert found["commit"] is None
    assert found["sources"] == common.sources(*common.PACKAGE)
