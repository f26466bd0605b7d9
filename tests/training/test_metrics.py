"""Records of a run in files."""

from __future__ import annotations

import json
import sys

import pytest

from minidl.system.files import FileError
from minidl.training.metrics import Metrics


def written(path, *records, **options):
    metrics = Metrics(str(path), **options)
    for record in records:
        metrics.write(record)
    metrics.close()
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_that_goes_on_appends_and_another_begins_anew(tmp_path):
    path = tmp_path / "log.jsonl"
    one, two = {"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25}
    assert written(path, one) == [one]
    assert written(path, two, appends=True) == [one, two]
    assert written(path, two) == [two]


def test_numbers_that_json_has_not_are_refused(tmp_path):
    metrics = Metrics(str(tmp_path / "log"))
    with pytest.raises(ValueError, match="not JSON compliant"):
        metrics.write({"step": 1, "loss": float("nan")})
    metrics.close()


def test_nothing_is_written_where_no_output_is_named():
    metrics = Metrics()
    metrics.write({"step": 1})
    metrics.close()


def test_two_runs_do_not_write_to_one_file(tmp_path):
    first = Metrics(str(tmp_path / "log"))
    with pytest.raises(FileError, match="log"):
        Metrics(str(tmp_path / "log"), appends=True)
    first.close()


def test_events_without_tensorboard_say_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    with pytest.raises(ValueError, match=r"--tensorboard needs the package tensorboard: pip install"):
        Metrics(events=str(tmp_path))


def test_a_file_where_the_folder_of_events_should_be_is_named(tmp_path):
    pytest.importorskip("tensorboard")
    (tmp_path / "taken").write_text("")
    with pytest.raises(FileError, match="taken: a folder is needed, and this is a file"):
        Metrics(events=str(tmp_path / "taken"))
