"""All proofs that need a GPU, in parts of at most nine minutes, with one record of the results.

    python bench/gpu_proof.py [--call A|B] [--part smoke tests kernels table nccl copies launch shares ladder mpi
                              sanitizer references] [--step TEXT ...] [--limit 540] [--within SECONDS] [--out FILE.json]

| part       | minutes | what |
|---|---|---|
| smoke      | 1       | the libraries; three networks captured and replayed; launches, quickly |
| tests      | 2       | the tests marked `gpu`, except the references' |
| kernels    | 1       | every kernel's tests again, with the real compiler, cuBLAS and cuDNN |
| table      | 2       | every kernel's error, bits, time and share of the hardware's limits: kernel_table.json |
| nccl       | 1       | NCCL with one rank: bits and times: nccl_alone.json |
| copies     | 2       | copies to the host and back, and steps that offload: bits, times, overlap: host_copies.json |
| launch     | 1       | the cost of launches, events and graphs: launch_overhead_cuda.json |
| shares     | 1       | traced steps: the time of each kernel family, and of waiting: shares_cuda.json |
| ladder     | 6       | the networks of the calls against torch: ladder.json |
| mpi        | 2       | two ranks that share the GPU, also with shards: equal bits, no overlap |
| sanitizer  | 6       | training steps under compute-sanitizer: memcheck, then racecheck of our own kernels |
| references | 4       | the kernels' references over CuPy's arrays |

A part runs one or several commands, and ends all their processes at the limit. It can be stopped at any time: new
results are merged into the record at once, the benchmarks' own records are written beside it, and the next call of a
part continues with the steps that have not passed, if the sources are the same.
`--step` repeats the steps whose names contain one of these texts, also those that have passed, and no others. Without
--part all parts run that have not passed yet. If a machine ends every command after ten minutes, repeat the same
command with `--within 570` until the record is complete. `--call` runs the sections of `CALLS`, each a part or some of
its steps with a limit of its own, also without a GPU, and ends with a table of them; one that hangs, dies or misses
something stops no other, nor does a record that cannot be written. The same call goes on after one that was killed.
Ends with 0 if everything that ran has passed, with 1 if not, with 2 without a GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from common import PACKAGE, RESULTS, machine, sources
from ladder import described
from ladder_table import brief
from processes import GRACE, end

import minidl as ml
from minidl.devices import DeviceError
from minidl.system.files import write_atomic

ROOT = Path(__file__).parent.parent
LIMIT = 540.0  #: seconds of a part
POLL = 2.0  #: seconds between two reads of a command's output
LEAST = 5.0  #: a part begins only if at least these seconds are left
#: nothing is measured: the tools below would tune under a sanitizer, or each rank for itself
UNTUNED = {"MINIDL_TUNE": "first"}
LEFT_OUT = ("not asked for", "no time was left")  #: what the ladder says of runs that did not fail
NOT_CHOSEN = "not chosen"
LISTED = 200  #: with at most so many tests, the record has the outcome of each

Found = dict[str, Any]


def nothing(folder: Path, output: str) -> Found:
    return {}


@dataclass(frozen=True)
class Step:
    """A command. `read(folder, output)` returns its results so far, with `passed` if the exit status is not enough;
    `folder` is the record's folder."""

    name: str
    command: list[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    read: Callable[[Path, str], Found] = nothing


@dataclass(frozen=True)
class Part:
    """`steps(folder)` returns the steps, for the record's folder. `missing`: why the part cannot run here. `check`: the
    conclusion from the results of all steps."""

    steps: Callable[[Path], list[Step]]
    missing: Callable[[], str | None] = lambda: None
    check: Callable[[Mapping[str, Found]], Found] = lambda steps: {}


# ---------------------------------------------------------------------------------------------------------------- parts
SAID = "(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)"
OUTCOME = re.compile(rf"^(\S+::.+?) {SAID}\b|^\[gw\d+\] \[ *\d+%\] {SAID} (\S+::.*\S)", re.MULTILINE)


def tests_found(folder: Path, output: str) -> Found:
    """The results in the output of `pytest -v` so far."""
    outcomes = {name or of_worker: outcome or said for name, outcome, said, of_worker in OUTCOME.findall(output)}
    counts = Counter(outcomes.values())
    bad = [name for name, outcome in outcomes.items() if outcome in ("FAILED", "ERROR")]
    return {"counts": dict(counts), "failed": bad, "passed": bool(counts["PASSED"]) and not bad,
            **({"outcomes": outcomes} if len(outcomes) <= LISTED else {})}


def pytest(*arguments: str, workers: int = 1) -> list[str]:
    """A pytest command with its own worker processes. A worker is replaced if a test kills it or breaks the GPU
    (tests/cuda/stand_ins/cuda_on_gpu.py), and the other tests still run. A package's warning is not a failure there."""
    apart = ["-n", str(workers), "--dist", "load", "--max-worker-restart", "40"]
    return [sys.executable, "-m", "pytest", "-v", *apart, "-W", "default", "-p", "no:cacheprovider", "--tb",
            "short", *arguments]


def record_of(name: str) -> Callable[[Path, str], Found]:
    """For a benchmark with its own record: whether its checks have passed, and whether it is complete."""

    def read(folder: Path, output: str) -> Found:
        path = folder / name
        if not path.exists():
            return {"passed": False}
        record = json.loads(path.read_text())
        return {"record": name, **{key: record[key] for key in ("passed", "complete") if key in record}}

    return read


def printed(folder: Path, output: str) -> Found:
    """The JSON object that a command prints."""
    with suppress(ValueError):
        record = json.loads(output)
        digest = record.get("params_sha256")
        return {"record": record, **({"line": f"parameters {digest[:12]}"} if digest else {})}
    return {"passed": False}


#: loads the libraries
LIBRARIES = """
import json
import minidl as ml
device = ml.device.get("cuda")
streams = device.streams((0, 1))
print(json.dumps({"priorities": [device.driver.runtime.streamGetPriority(s.ptr) for s in streams],
                  "flash_attention": device.flash, **device.driver.describe()}))
"""


def smoke(folder: Path) -> list[Step]:
    train = [sys.executable, "-m", "minidl", "train", "--device", "cuda", "--costs", "analytic", "--steps", "10",
             "--batch-size", "8", "--scheduler", "multi_stream", "--json", "--model"]
    name = "launch_quick.json"
    return [Step("libraries", [sys.executable, "-c", LIBRARIES], read=printed),
            Step("train lenet", [*train, "lenet"], read=printed),
            *(Step(f"train {model}", [*train, model, "--model-arg", "preset=tiny"], read=printed)
              for model in ("mobilenet_v3_large", "densenet121")),
            Step("launches, quickly", bench("launch_overhead.py", "--device", "cuda", "--quick", "--out",
                                            str(folder / name)), read=record_of(name))]


def tests(folder: Path) -> list[Step]:
    """The tests marked `gpu`. The free memory depends on other processes, so the memory test runs alone."""
    return [Step("gpu tests", pytest("-m", "gpu", "-k", "not references and not no_more_memory",
                                     "tests/cuda/test_gpu.py", workers=6), read=tests_found),
            Step("memory over many steps",
                 pytest("-m", "gpu", "-k", "no_more_memory", "tests/cuda/test_gpu.py"), read=tests_found)]


def references(folder: Path) -> list[Step]:
    return [Step("references over CuPy",
                 pytest("-m", "gpu", "-k", "references", "tests/cuda/test_gpu.py", workers=4), read=tests_found)]


def kernels(folder: Path) -> list[Step]:
    """The test files that run kernels. Most of the time is the compiler's, not the GPU's."""
    files = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "tests" / "cuda").rglob("test_cuda_*.py")
                   if re.search(r"\b(run_kernel|agree|written)\(", p.read_text()))
    return [Step("kernels' tests", pytest(*files, workers=8), {"MINIDL_TEST_GPU": "1", "MINIDL_TUNE": "first"},
                 tests_found)]


def bench(script: str, *arguments: str) -> list[str]:
    return [sys.executable, str(ROOT / "bench" / script), *arguments]


def table(folder: Path) -> list[Step]:
    name = "kernel_table.json"
    return [Step("kernel table", bench("kernel_table.py", "--out", str(folder / name)), read=record_of(name))]


def nccl(folder: Path) -> list[Step]:
    name = "nccl_alone.json"
    return [Step("nccl", bench("nccl_alone.py", "--out", str(folder / name)), read=record_of(name))]


def copies(folder: Path) -> list[Step]:
    name = "host_copies.json"
    return [Step("copies", bench("host_copies.py", "--out", str(folder / name)), read=record_of(name))]


def launch(folder: Path) -> list[Step]:
    """All rows, within a minute of their own."""
    name = "launch_overhead_cuda.json"
    return [Step("launch", bench("launch_overhead.py", "--device", "cuda", "--out", str(folder / name)),
                 read=record_of(name))]


TRACED = ("a0.25 32px", "gpt", "bert")  #: networks whose bf16 steps call A has tuned


def shares(folder: Path) -> list[Step]:
    name = "shares_cuda.json"
    return [Step("shares", bench("shares.py", "--device", "cuda", "--precision", "bf16", "--only", *TRACED, "--out",
                                 str(folder / name)), read=record_of(name))]


@dataclass(frozen=True)
class Section:
    """What a call runs, planned for `seconds`: a part, or its steps whose names contain one of `steps`. It may take up
    to twice as long, if that leaves all later ones their seconds."""

    part: str
    seconds: float
    steps: tuple[str, ...] = ()

    def names(self, folder: Path) -> list[str]:
        """Of the steps that it runs."""
        return [step.name for step in PARTS[self.part].steps(folder)
                if not self.steps or any(text in step.name for text in self.steps)]


WITHIN = 290.0  #: seconds of a call, of which SET_UP go to what comes before its sections, and to what comes after
SET_UP = {"A": 40.0, "B": 25.0}
#: The sections of each call, by value. A compiles and tunes all that B measures. An H100 took, in seconds: for a ladder
#: run of all rungs of an MLP 26, of MobileNetV3 65, of DenseNet-121 more than 150; for each run of mpi 11.
CALLS = {
    "A": (Section("smoke", 12, ("libraries",)), Section("nccl", 12), Section("table", 22),
          Section("ladder", 20, ("tf32 mlp, chip",)), Section("ladder", 14, ("tf32 lenet 28px",)),
          Section("ladder", 40, ("bf16 a0.25 32px, chip",)), Section("ladder", 40, ("bf16 gpt",)),
          Section("ladder", 40, ("bf16 bert",)), Section("ladder", 50, ("tf32 k12 32px b32, no pairs",))),
    "B": (Section("shares", 28), Section("ladder", 65, ("bf16 a0.25 32px, compiled",)), Section("launch", 64),
          Section("copies", 30), Section("sanitizer", 40, ("racecheck, mobilenet_v3_large",)),
          Section("mpi", 36, ("mlp, one process", "mlp, two ranks, shard")))}

#: minidl's graphs and torch's: the rungs of the ladder that a call runs
GRAPHS = ("E1", "E3 in_order", "E3 multi_region", "B2")
#: how a run of the ladder differs: what may help on a chip, torch's compiler with small graphs, no pairs of groups
KINDS = {"": (), "chip": ("--rungs", "E1", "E3", "B2"), "compiled": ("--rungs", *GRAPHS, "B3"),
         "no pairs": ("--pairs", "0")}


def climbed(precision: str, network: str) -> Callable[[Path, str], Found]:
    """The ladder's record, and this network in one line: its times, and why runs failed."""

    def read(folder: Path, output: str) -> Found:
        path = folder / "ladder.json"
        found = record_of(path.name)(folder, output)
        networks = json.loads(path.read_text())["networks"].get(precision, {}) if path.exists() else {}
        entry = next((entry for label, entry in networks.items() if network in label), {})
        lines = [brief(entry), *(f"{name}: {why}" for run in entry.values() for name, why in run["left_out"].items()
                                 if why not in LEFT_OUT)]
        return found | ({"line": "; ".join(filter(None, lines))} if any(lines) else {})

    return read


def climbing(folder: Path) -> list[Step]:
    """The ladder's runs of all calls, named by precision, network and kind."""
    found = []
    for name in (name for call in CALLS.values() for section in call if section.part == "ladder"
                 for name in section.steps):
        run, _, kind = name.partition(", ")
        precision, _, network = run.partition(" ")
        found.append(Step(name, bench("ladder.py", "--resume", "--models", network, "--dtype", precision, "--pairs",
                                      "12", "--seconds", "3", "--rungs", *GRAPHS, *KINDS[kind], "--out",
                                      str(folder / "ladder.json")), read=climbed(precision, network)))
    return found


def mpiexec() -> str | None:
    return shutil.which("mpiexec") or shutil.which("mpiexec", path=str(Path(sys.executable).parent))


JOBS = {"mlp": ["--model", "mlp"], "resnet20": ["--model", "resnet20", "--model-arg", "preset=tiny"]}
#: on two ranks
RANKS = {"barrier": ["--scheduler", "barrier"], "reverse_first_k": ["--scheduler", "reverse_first_k"],
         **{f"shard {level}": ["--scheduler", "barrier", "--shard", level] for level in ("1", "3")}}


def ranks(folder: Path) -> list[Step]:
    """The same training in one process, and on two ranks in two orders and with shards. Ranks that share a GPU take
    turns on it: this shows equal bits, and never that communication overlaps."""
    steps = []
    for name, model in JOBS.items():
        train = [sys.executable, "-m", "minidl", "train", *model, "--device", "cuda", "--costs", "analytic",
                 "--steps", "20", "--json"]
        steps.append(Step(f"{name}, one process", [*train, "--micro-batches", "2"], UNTUNED, printed))
        steps += [Step(f"{name}, two ranks, {how}", [str(mpiexec()), "-n", "2", *train, "--parallel", "data", *flags],
                       UNTUNED, printed) for how, flags in RANKS.items()]
    return steps


def equal_parameters(steps: Mapping[str, Found]) -> Found:
    """Whether all runs of a network that were chosen gave the same parameters."""
    found = {name: [(s.get("record") or {}).get("params_sha256") for step, s in steps.items()
                    if step.startswith(f"{name},") and s.get("left_out") != NOT_CHOSEN] for name in JOBS}
    equal = {name: len(digests) > 1 and len({*digests}) == 1 and None not in digests
             for name, digests in found.items() if digests}
    return {"equal_bits": equal, "passed": bool(equal) and all(equal.values()),
            "line": f"equal bits of ranks that take turns on one GPU: {equal}"}


#: parts of the names of cuBLAS's, cuDNN's and CuPy's kernels, which none of ours contains
VENDORS = r"cublas|cudnn|cutlass|cupy|xmma|nvjet|gemm|gemv|splitK|fprop|dgrad|wgrad|convolve|sm[0-9]+_"


def sanitized(folder: Path) -> list[Step]:
    """Two steps of the two networks that use most kinds of kernels. Only our own kernels are checked for hazards: those
    of vendors take most of the time, and their hazards are not ours."""
    train = [sys.executable, "-m", "minidl", "train", "--model-arg", "preset=tiny", "--device", "cuda", "--costs",
             "analytic", "--steps", "2", "--batch-size", "4", "--json"]
    tools = {"memcheck": ["--report-api-errors", "no"],  # libraries try optional driver functions
             "racecheck": ["--kernel-name-exclude", f"regex={VENDORS}"]}
    return [Step(f"{tool}, {model}", ["compute-sanitizer", "--tool", tool, *more, "--target-processes", "all",
                                      "--error-exitcode", "3", *train, "--model", model], UNTUNED)
            for tool, more in tools.items() for model in ("mobilenet_v3_large", "densenet121")]


PARTS = {
    "smoke": Part(smoke), "tests": Part(tests), "kernels": Part(kernels), "table": Part(table), "nccl": Part(nccl),
    "copies": Part(copies), "launch": Part(launch), "shares": Part(shares), "ladder": Part(climbing),
    "mpi": Part(ranks, lambda: None if mpiexec() else "mpiexec is missing; install minidl[mpich]", equal_parameters),
    "sanitizer": Part(sanitized, lambda: None if shutil.which("compute-sanitizer")
                      else "compute-sanitizer is not on the PATH"),
    "references": Part(references)}


# -------------------------------------------------------------------------------------------------------------- running
def merge(out: Path, name: str, part: Found) -> Found:
    """Writes a part into the record atomically, and returns the record; if it cannot be written, it says so."""
    record = read(out)
    record["parts"][name] = part
    record["passed"] = all(p.get("passed") is not False for p in record["parts"].values())
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(out, json.dumps(record, indent=1) + "\n")
    except OSError as error:
        print(f"gpu_proof: the record of {name} cannot be written: {error}", file=sys.stderr)
    return record


def read(out: Path) -> Found:
    """The record so far."""
    return json.loads(out.read_text()) if out.exists() else {"name": "gpu_proof", "parts": {}}


def run(step: Step, folder: Path, scratch: Path, limit: float, keep: Callable[[Found], None]) -> Found:
    """Runs a command for at most `limit` seconds. `keep` gets its results again and again; they have an `exit` when it
    has ended."""
    begin, output, errors = time.monotonic(), scratch / "output", scratch / "errors"

    def found(**more: Any) -> Found:
        return {"command": step.command, "seconds": round(time.monotonic() - begin, 1), **more,
                **step.read(folder, output.read_text(errors="replace"))}

    with open(output, "wb") as out, open(errors, "wb") as err:
        # its own group, so that all can be ended, but not its own session, so that they end with this session
        process = subprocess.Popen(step.command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, cwd=ROOT,
                                   process_group=0, env={**os.environ, **step.environment})
        try:
            while process.poll() is None and (left := limit - (time.monotonic() - begin)) > 0:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(min(POLL, left))
                keep(found())
            timed_out = process.poll() is None
            end(process)
        except BaseException:
            end(process)
            keep(found(stopped=True))
            raise
    result = found(exit=process.returncode, timed_out=timed_out)
    result["passed"] = result.get("passed", True) and process.returncode == 0
    said = [path.read_text(errors="replace").splitlines()[-15:] for path in (output, errors)]
    if process.returncode:
        result["said"] = [*said[0], *said[1]]
    lines = [line for lines in (reversed(said) if process.returncode == 0 else said) for line in lines
             if line.strip() and not line.startswith("record: ")]
    return {"line": lines[-1] if lines else "", **result}


def outcome(step: Found) -> str:
    return ("passed" if step["passed"] else "left out" if "left_out" in step else
            "ended at its limit" if step["timed_out"] else "failed")


def prove(name: str, part: Part, out: Path, about: Mapping[str, Any], limit: float,
          chosen: Sequence[str] = ()) -> Found:
    """Runs a part, its steps within one limit, and returns its new entry in the record. With the same sources, steps
    that have passed are not repeated, unless all have passed; steps that began before and have not passed come last.
    `chosen`: only the steps whose names contain one of these texts, also those that have passed."""
    why = part.missing()
    if why:
        return merge(out, name, {"left_out": why})["parts"][name]
    begin, earlier = time.monotonic(), read(out)["parts"].get(name, {})
    before = earlier.get("steps", {}) if earlier.get("machine", {}).get("sources") == about["sources"] else {}
    out.parent.mkdir(parents=True, exist_ok=True)
    steps = part.steps(out.parent)
    done = {step.name: before[step.name] for step in steps if before.get(step.name, {}).get("exit") == 0
            and before[step.name]["passed"]}
    done = {} if len(done) == len(steps) else done
    if chosen:
        others = [step for step in steps if not any(text in step.name for text in chosen)]
        done = {step.name: before.get(step.name, {"command": step.command, "left_out": NOT_CHOSEN, "passed": False})
                for step in others}
    found: Found = {"machine": dict(about), "steps": done, "passed": False}
    with tempfile.TemporaryDirectory() as scratch:
        for step in sorted((step for step in steps if step.name not in done),
                           key=lambda step: "seconds" in before.get(step.name, {})):

            def keep(result: Found, step: Step = step) -> None:
                found["steps"][step.name] = result
                merge(out, name, found)

            left = limit - (time.monotonic() - begin)
            keep(run(step, out.parent, Path(scratch), left, keep) if left > 0
                 else before[step.name] if "exit" in before.get(step.name, {})
                 else {"command": step.command, "left_out": "no time was left", "passed": False})
            print(f"{name}: {step.name}: {outcome(found['steps'][step.name])}", flush=True)
    checked = part.check(found["steps"])
    found |= {**checked, "checked": (agree := checked.get("passed", True)),
              "passed": agree and all(step["passed"] for step in found["steps"].values())}
    found["seconds"] = round(time.monotonic() - begin, 1)
    return merge(out, name, found)["parts"][name]


def state(part: Found, about: Mapping[str, Any]) -> int:
    """0: not yet run with these sources; 1: not finished; 2: finished with a failure; 3: passed."""
    if part.get("machine", {}).get("sources") != about["sources"]:
        return 0
    if any("exit" not in step or step["timed_out"] or step.get("complete") is False for step in part["steps"].values()):
        return 1
    return 3 if part["passed"] else 2


def passed_before(section: Section, out: Path, about: Mapping[str, Any]) -> bool:
    """Whether a section's steps, and the conclusion from them, have passed with the same sources."""
    part, names = read(out)["parts"].get(section.part, {}), section.names(out.parent)
    steps = part.get("steps", {})
    return (part.get("machine", {}).get("sources") == about["sources"]
            and all(steps.get(name, {}).get("exit") == 0 and steps[name]["passed"] for name in names)
            and PARTS[section.part].check(steps).get("passed", True))


def called(sections: Sequence[Section], out: Path, about: Mapping[str, Any], within: float) -> bool:
    """Runs the sections, prints a table of them, and returns whether all have passed. One that fails stops no other.
    Those that have passed before are not repeated, unless all have."""
    end, passed = time.monotonic() + within, True
    rows = [("section", "outcome", "seconds", "")]
    record = read(out)["parts"]
    wanted = [section for section in sections if not passed_before(section, out, about)] or [*sections]
    for section in sections:
        names, again = section.names(out.parent), section in wanted
        part = record.get(section.part, {})
        if again:
            wanted.remove(section)
            left = end - time.monotonic() - GRACE
            spare = left - sum(later.seconds for later in wanted)
            limit = min(left, 2 * section.seconds, max(section.seconds, spare))
            part = prove(section.part, PARTS[section.part], out, about, limit if limit >= LEAST else 0.0, names)
        if "left_out" in part:
            rows.append((section.part, "left out", "0", part["left_out"]))
        for name in names if "steps" in part else ():
            step = part["steps"][name]
            passed &= step["passed"]
            rows.append((f"{section.part}: {name}", outcome(step) if again else "passed before",
                         f"{step.get('seconds', 0):.0f}", step.get("left_out") or step["line"]))
        if "line" in part:
            passed &= part["checked"]
            rows.append((section.part, "passed" if part["checked"] else "failed", f"{part['seconds']:.0f}",
                         part["line"]))
    wide = [max(len(row[column]) for row in rows) for column in range(3)]
    print()
    for name, ended, seconds, line in rows:
        print(f"{name:{wide[0]}}  {ended:{wide[1]}}  {seconds:>{wide[2]}}  {line.strip()[:160]}".rstrip())
    return passed


def main() -> int:
    names = list(PARTS)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--call", choices=list(CALLS), help="the sections of a call, and a table of them")
    parser.add_argument("--part", nargs="+", choices=names, metavar="PART",
                        help=f"parts to run, of {', '.join(names)}; default: all that have not passed")
    parser.add_argument("--step", nargs="+", default=[], metavar="TEXT",
                        help="only steps whose names contain one of these texts")
    parser.add_argument("--limit", type=float, default=LIMIT, metavar="SECONDS", help="seconds for each part")
    parser.add_argument("--within", type=float, default=math.inf, metavar="SECONDS", help="seconds for all parts")
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu_proof.json", help="the record")
    arguments = parser.parse_args()
    end = time.monotonic() + arguments.within
    try:
        about = described(ml.device.get("cuda"))
    except DeviceError as error:
        print(f"gpu_proof: {error}", file=sys.stderr)
        if not arguments.call:
            return 2
        about = {**machine(), "missing": str(error)}
    about |= {"sources": sources(*PACKAGE, "tests", "bench")}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that started processes end too
    if arguments.call:
        return 0 if called(CALLS[arguments.call], arguments.out, about, min(arguments.within, WITHIN)) else 1
    states = {name: state(part, about) for name, part in read(arguments.out)["parts"].items()}
    wanted = arguments.part or sorted((name for name in names if states.get(name, 0) < 3),
                                      key=lambda name: states.get(name, 0))
    if arguments.step:
        steps_of = {name: [step.name for step in PARTS[name].steps(arguments.out.parent)]
                    for name in arguments.part or names}
        wanted = [name for name, steps in steps_of.items()
                  if any(text in step for text in arguments.step for step in steps)]
        if not wanted:
            known = "; ".join(step for steps in steps_of.values() for step in steps)
            print(f"gpu_proof: no step's name contains {' or '.join(arguments.step)}; there are: {known}",
                  file=sys.stderr)
            return 2
    passed = True
    for name in wanted:
        limit = min(arguments.limit, end - time.monotonic() - GRACE)
        if limit < LEAST:
            print(f"{name}: no time is left", flush=True)
            continue
        passed &= prove(name, PARTS[name], arguments.out, about, limit,
                        arguments.step).get("passed") is not False
    print(f"record: {arguments.out}", file=sys.stderr)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
