"""The records of a run in files: JSON lines, and events for TensorBoard."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import IO, Any

from ..files import FileError


class Metrics:
    """Writes records, a line each, to the file `lines`, and their numbers to the folder `events`. A run that goes on
    appends to them. Raises FileError where they cannot be written, and ValueError without the package tensorboard."""

    def __init__(self, lines: str | None = None, events: str | None = None, *, appends: bool = False) -> None:
        self._name, self._writer = lines or "", None
        self._file: IO[str] | None = None
        if events:
            try:
                from tensorboard.summary import Writer
            except ImportError:
                raise ValueError("--tensorboard needs the package tensorboard: pip install 'minidl[tensorboard]'"
                                 ) from None  # fmt: skip
            try:
                self._writer = Writer(events)
            except OSError as error:
                raise FileError(error.errno, error.strerror, events) from None
        if lines:
            try:
                self._file = open(lines, "a" if appends else "w", encoding="utf-8")  # noqa: SIM115
            except OSError as error:
                raise FileError(error.errno, error.strerror, lines) from None

    def write(self, record: Mapping[str, Any]) -> None:
        if self._file is not None:
            try:
                self._file.write(json.dumps(record, allow_nan=False) + "\n")
                self._file.flush()
            except OSError as error:
                raise FileError(error.errno, error.strerror, self._name) from None
        if self._writer is not None:
            for name, value in record.items():
                if name != "step":
                    self._writer.add_scalar(name.replace("test_", "test/", 1), float(value), int(record["step"]))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._writer is not None:
            self._writer.close()
