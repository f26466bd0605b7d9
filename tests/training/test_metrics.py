"""Records of a run in files."""

from __future__ import annotations

import os
import sys

import pytest

from minidl.system.files import FileError
from minidl.training.metrics import Metrics


def test_numbers_that_json_has_not_are_refused(tmp_path):
    metrics = Metrics(str(tmp_path / "log"))
    with pytest.raises(ValueError, match="not JSON compliant"):
        metrics.write({"step": 1, "loss": float("nan")})
    metrics.close()


def test_events_without_tensorboard_say_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    with pytest.raises(ValueError, match=r"--tensorboard needs the package tensorboard: pip install"):
        Metrics(events=str(tmp_path))


def test_a_file_where_the_folder_of_events_should_be_is_named(tmp_path):
    pytest.importorskip("tensorboard")
    (tmp_path / "taken").write_text("")
    with pytest.raises(FileError, match="taken: a folder is needed, and this is a file"):
        Metrics(events=str(tmp_path / "taken"))


def test_a_log_that_is_taken_leaves_no_file_of_events(tmp_path):
    pytest.importorskip("tensorboard")
    first = Metrics(str(tmp_path / "log"))
    with pytest.raises(FileError, match="another run writes to it"):
        Metrics(str(tmp_path / "log"), str(tmp_path / "events"))
    first.close()
    assert not any((tmp_path / "events").iterdir())


def test_a_folder_that_takes_no_events_leaves_the_log_as_it_was(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    (tmp_path / "log").write_text("of the last run\n")
    monkeypatch.setattr(os, "access", lambda path, mode: "events" not in str(path))
    with pytest.raises(FileError, match="cannot be written to"):
        Metrics(str(tmp_path / "log"), str(tmp_path / "events"))
    assert (tmp_path / "log").read_text() == "of the last run\n"
