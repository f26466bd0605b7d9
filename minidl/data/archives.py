"""The files of tar archives. An archive that ends too early is noticed, which Python's reader does not always do."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator

from .dataset import DataError


def files(archive: tarfile.TarFile, where: object) -> Iterator[tarfile.TarInfo]:
    """The regular files of an archive. Raises DataError after the last one where the archive's end is missing."""
    for member in archive:
        if member.isfile():
            yield member
    assert archive.fileobj is not None
    archive.fileobj.seek(archive.offset)
    if archive.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
        raise DataError(f"{where}: damaged or truncated: the archive has no end")
