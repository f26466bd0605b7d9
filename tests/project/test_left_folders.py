"""Folders that killed runs of the tests leave are removed by the next run."""

import os
import tempfile
from pathlib import Path

import traces


def test_folders_of_killed_runs_go(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    kept = {f"minidl-tests-{os.getpid()}-a", "minidl-tests-b", "minidl-tests-c-d", "other-7-e"}
    for name in kept | {"minidl-tests-7-f"}:
        (tmp_path / name / "deep").mkdir(parents=True)
    monkeypatch.setattr(traces, "_runs", lambda process: process != 7)
    own = Path(traces.own_folder())
    assert own.name.startswith(f"minidl-tests-{os.getpid()}-")
    assert {p.name for p in tmp_path.iterdir()} == kept | {own.name}


def test_which_processes_run(monkeypatch):
    assert traces._runs(os.getpid())
    assert traces._runs(1 << 80), "unknown, so its folder stays"

    def gone(process, number):
        raise ProcessLookupError

    monkeypatch.setattr(os, "kill", gone)
    assert not traces._runs(7)
