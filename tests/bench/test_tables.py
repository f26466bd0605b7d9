"""docs/results.md: from the records that are there, and from no others."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import ladder_record
import learning
import plots
import pytest
import tables
from helpers import need
from test_ladder import network

from minidl.cli import main

MACHINE = {"cpu": "a CPU", "cores": 2, "commit": "c0ffee1", "sources": "5ca1ab1e", "date": "2026-01-01",
           "gpu": {"name": "a GPU"}}


def made_up() -> dict[str, dict[str, Any]]:
    """Records as the benchmarks leave them, with numbers that nobody measured."""
    networks = {"tf32": {"mobile": network(3.0, 1.5, 1.25, 1.2)}, "bf16": {"mobile": network(4.0, 1.25, None, 1.1)}}
    for entry in (entry for found in networks.values() for entry in found.values()):
        entry["first"]["step_ms"] = {"E3 multi_region": {"median": 1.5, "p10": 1.4, "p90": 1.6, "n": 10}}
    networks["tf32"]["mobile"]["first"] |= {"sources": "0ther", "date": "2025-12-31"}
    networks["bf16"]["mobile"]["first"] |= {"sources": MACHINE["sources"], "date": MACHINE["date"]}
    times = {"median": 2.0, "p10": 1.0, "p90": 3.0, "n": 40}
    rows = [{"group": "a kernel", "name": "torch op", "words": "", "us": {"host": times, "device": times}},
            {"group": "a kernel", "name": "CuPy RawKernel, 4 arguments", "words": "",
             "missing": "cupy is not installed"},
            {"group": "a kernel", "name": "fill of 4 KiB", "words": "", "us": {"host": times}}]
    tests = {"counts": {"PASSED": 5, "SKIPPED": 1}, "exit": 0, "timed_out": False, "passed": True}
    parts = {"kernels": {"machine": MACHINE,
                         "steps": {"test_cuda_a": tests, "test_cuda_b": {**tests, "counts": {"PASSED": 2, "FAILED": 1}},
                                   "test_cuda_c": {"left_out": "no time was left", "passed": False}}},
             "mpi": {"machine": MACHINE, "steps": {"mlp": {"exit": 0, "timed_out": False, "passed": True}}},
             "sanitizer": {"left_out": "not here"}}
    learned = {"data": "pydoc", "metric": "bits_per_byte", "target": 2.7, "seconds": 431.2, "seconds_target": 600,
               "steps": 1600, "test": {"loss": 1.6, "bits_per_byte": 2.3062}}
    return {"learning": {"machine": MACHINE, "networks": {"gpt": learned}},
            "ladder": {"machine": {**MACHINE, "commit": None}, "networks": networks,
                       "targets": {p: ladder_record.targets(found, 1) for p, found in networks.items()}},
            "launch_overhead_cuda": {"machine": MACHINE, "rows": rows}, "gpu_proof": {"parts": parts}}


@pytest.fixture
def results(call, tmp_path, monkeypatch):
    """A folder for records, and a function that writes their page."""
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    monkeypatch.setattr(tables, "PAGE", tmp_path / "results.md")

    def write() -> str:
        call(tables, "--write")
        return (tmp_path / "results.md").read_text()

    return tmp_path, write


def test_a_gpus_records_get_rows(results):
    folder, write = results
    for name, record in made_up().items():
        (folder / f"{name}.json").write_text(json.dumps({"name": name, **record}))
    text = write()
    for line in ("| one GPU, tf32: torch eager, tuned / minidl | 3.00x, worst 3.00x (1 of 1 networks) | >= 2.5x |",
                 "| one GPU, bf16: torch eager, tuned / minidl | 4.00x, worst 4.00x (1 of 1 networks) | >= 2.5x |",
                 "| one GPU, tf32: host cost of a replayed step, us | launch 10 us, worst 10; with its batch 50 us, "
                 "worst 50 (1 of 1 networks) | one graph launch; reported |",
                 "| mobile, tf32: torch / minidl | B1 tuned 3.00x; B2 graph 1.50x; B3 reduce-overhead 1.25x; B4 "
                 "max-autotune 1.25x; E1 / E2 1.20x; E0a / E0b 0.60x; E3 multi_region 1.50 ms | - |",
                 "| a kernel: torch op | host 2 us (1 to 3), device 2 us (1 to 3) | - |",
                 "| on a GPU: every kernel's tests | 7 passed, 1 failed, 1 skipped, test_cuda_c not finished | all "
                 "pass |",
                 "| on a GPU: two ranks leave the bits of one process | 1 of 1 runs | all pass |",
                 "[ladder](../bench/results/ladder.json): a GPU, a CPU, 2 cores, sources 5ca1ab1e, 2026-01-01; "
                 "1 of 2 runs of other sources, 2025-12-31",
                 "| gpt on pydoc: bits per byte of test data | 2.306 after 1600 steps, 431 s | < 2.7 in 600 s |",
                 "[gpu_proof](../bench/results/gpu_proof.json): a GPU, a CPU, 2 cores, commit c0ffee1, 2026-01-01"):
        assert line in text.splitlines(), line
    assert "| a kernel: CuPy RawKernel, 4 arguments | cupy is not installed | - |" in text
    assert "sanitizer" not in text
    assert write() == text, "written once more it is the same"


@pytest.mark.slow
def test_a_run_that_learns_is_recorded_and_one_that_misses_its_target_fails(call, tmp_path, monkeypatch):
    flags = "--model mlp --model-arg hidden=8 --data digits"
    monkeypatch.setattr(learning, "CASES", {
        "easy": learning.Case(flags, "--epochs 1", "accuracy", 0.0, 600),
        "hard": learning.Case(flags, "--epochs 1", "accuracy", 1.0, 600)})
    for only, code in (("easy", 0), ("hard", 1)):
        assert call(learning, "--only", only, "--steps", 2, "--out", tmp_path / f"{only}.json") == code
        (entry,) = json.loads((tmp_path / f"{only}.json").read_text())["networks"].values()
        assert (entry["steps"], entry["reached"]) == (2, not code)
        assert entry["command"] == f"minidl train {flags} --steps 2 --costs analytic"
        assert 0 <= entry["test"]["accuracy"] < 1


def test_the_runs_that_are_recorded_are_understood():
    for case in learning.CASES.values():
        assert main([*case.command(), "--dry-run", "--json"]) == 0


def test_without_records_there_are_no_rows(results):
    _, write = results
    assert not [line for line in write().splitlines() if line.startswith(("|", "## "))]


def test_the_page_is_what_the_records_say():
    assert tables.PAGE.read_text() == tables.page(), "python bench/tables.py --write"


@pytest.mark.few(2)
@pytest.mark.parametrize("name", plots.PLOTS)
def test_the_pictures_are_what_the_records_say(name, tmp_path):
    need("matplotlib")
    plots.save(name, json.loads((tables.RESULTS / f"{name}.json").read_text()), tmp_path / f"{name}.svg")
    assert shown(tmp_path / f"{name}.svg") == shown(tables.RESULTS / f"{name}.svg"), f"python bench/plots.py {name}"
    assert f"](../bench/results/{name}.svg)" in tables.page()


def shown(svg: Path) -> list[str]:
    """The texts and the number of shapes of a picture; places may differ in their last digit."""
    text = svg.read_text()
    return [*re.findall(r"<text[^>]*>([^<]*)</text>", text), str(text.count("<path")), str(text.count("<use"))]


@pytest.mark.slow
def test_pipelines_have_rows_and_simulated_ones_keep_their_bounds(results, monkeypatch):
    import pipeline_parallel

    monkeypatch.setattr(pipeline_parallel, "SIMULATED", (4, 16))
    folder, write = results
    times = {"median": 1.25, "p10": 1.0, "p90": 1.5, "n": 5}
    arms = {s: {"speed_up_over_gpipe": times, "prediction_error": {"median": e, "worst": e}, "bubble": 0.2,
                "bubble_predicted": 0.19} for s, e in (("gpipe", 0.02), ("zb_h1", -0.04))}
    setting = {"network": "mlp", "computation": "kernels", "ranks": 2, "arms": arms,
               "torch": {"torch, gpipe": {"torch_over_minidl": times}}}
    (folder / "pipeline_parallel_kernels.json").write_text(json.dumps({"name": "pipeline_parallel_kernels",
                                                                       "settings": [setting], **MACHINE}))
    text = write()
    for row in ("| 2 ranks, mlp, kernels: gpipe / others | zb_h1 1.25x |",
                "same stages | gpipe 1.25x (1.00 to 1.50) | > 1x |",
                "| median 3.0%, worst -4.0%; +1.0 points, worst +1.0 | 5 %; 2 points |"):
        assert row in text
    for row in pipeline_parallel.simulated({"F": 1.0, "O": 1.0, "W": 1.0}, 0.0):
        p, m, best = row["ranks"], row["micro_batches"], max(row["speed_up_over_gpipe"].values())
        if m == 1:
            assert best >= 0.95 * row["ceiling"]
        elif 4 < m < p:
            assert best >= 1.9
