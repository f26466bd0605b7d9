"""The records of a run in files: JSON lines, and events for TensorBoard."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from socket import gethostname
from time import time
from typing import Any

from ..system.files import FileError, Growing, check_writable


class Metrics:
    """Writes records, a line each, to the file `lines`, and their numbers to the folder `events`. A run that goes on
    appends to them. `tests`: the records of evaluations. Raises FileError if they cannot be written, or another run
    writes to the same file, and ValueError without the package tensorboard."""

    def __init__(self, lines: str | None = None, events: str | None = None, *, appends: bool = False) -> None:
        self.tests: list[Mapping[str, Any]] = []
        self._events = _Events(events) if events else None
        self._lines = Growing(lines, anew=not appends) if lines else None
        if self._events is not None:
            self._events.open()

    def write(self, record: Mapping[str, Any]) -> None:
        if "loss" not in record:
            self.tests.append(record)
        if self._lines is not None:
            self._lines.write((json.dumps(record, allow_nan=False) + "\n").encode())
        if self._events is not None:
            self._events.write(record)

    def close(self) -> None:
        for output in (self._lines, self._events):
            if output is not None:
                output.close()


def numbers_of(record: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The numbers of a record by name: of each layer with experts `tokens/LAYER/0`, `tokens/LAYER/1`, ..."""
    yield from ((name, value) for name, value in record.items() if name != "experts")
    yield from ((f"{what}/{own['layer']}/{i}", n) for own in record.get("experts", ())
                for what in ("tokens", "dropped") for i, n in enumerate(own[what]))


class _Events:
    """A file of events in a folder. TensorBoard's own writer works in a thread, which prints its errors."""

    def __init__(self, folder: str) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError:
            raise ValueError("--tensorboard needs the package tensorboard: pip install 'minidl[tensorboard]'") from None
        self._event = Event
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            why = "a folder is needed, and this is a file" if isinstance(error, FileExistsError) else error.strerror
            raise FileError(error.errno, why, folder) from None
        self._path = Path(folder) / f"events.out.tfevents.{time():.6f}.{gethostname()}.{os.getpid()}"
        check_writable(self._path)
        self._writer = RecordWriter

    def open(self) -> None:
        self._file = Growing(self._path, anew=True)
        self._records = self._writer(self._file)
        self._records.write(self._event(wall_time=time(), file_version="brain.Event:2").SerializeToString())

    def write(self, record: Mapping[str, Any]) -> None:
        event = self._event(wall_time=time(), step=int(record["step"]))
        for name, value in numbers_of(record):
            if name != "step":
                event.summary.value.add(tag=name.replace("test_", "test/", 1), simple_value=float(value))
        self._records.write(event.SerializeToString())

    def close(self) -> None:
        self._file.close()
