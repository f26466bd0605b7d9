"""What tests of data share."""

from __future__ import annotations

import io
import tarfile

import numpy as np
import pytest
from command_line import reported

from minidl.data import DataError


def packed(members: dict[str, bytes]) -> bytes:
    """A tar archive of these files."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as opened:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            opened.addfile(info, io.BytesIO(content))
    return stream.getvalue()


def archive(path, members: dict[str, bytes]) -> None:
    path.write_bytes(packed(members))


def everything(loader) -> list[np.ndarray]:
    """x and y of one epoch in order."""
    return [np.concatenate(column) for column in zip(*loader, strict=True)]


TRAIN = ["train", "--costs", "analytic", "--steps", "2"]


def trained(capsys, *argv):
    return reported(capsys, *TRAIN, *argv)


def refused(*culprits: str, act) -> str:
    """The one line that `act` is refused with; it must mention all culprits."""
    with pytest.raises(DataError) as caught:
        act()
    line = str(caught.value)
    assert "\n" not in line
    assert len(line) < 600
    for culprit in culprits:
        assert culprit in line
    return line


def same(a, b) -> bool:
    return all(x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()
               for x, y in zip(a, b, strict=True))
