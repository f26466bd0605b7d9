"""Files that no one trusts: what readers raise for them, the files of tar archives, and what is packed in one another.
An archive that ends too early is noticed, which Python's reader does not always do; what inflates has a limit."""

from __future__ import annotations

import gzip
import io
import lzma
import re
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from .dataset import DataError

PIECE = 1 << 20  #: how many bytes are read at a time
#: in a name: of a file that a system or an editor has put beside the user's, such as ._a.jpg
HIDDEN = re.compile(r"(^|/)\.[^./]")
DEPTH = 4  #: how often packed files may be in one another: OpenWebText is texts in a .tar in an .xz in a .tar
#: the first bytes of compressed files -> how they are opened
READERS: dict[bytes, Callable[..., Any]] = {b"\xfd7zXZ\0": lzma.open, b"\x1f\x8b": gzip.open}


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns any error that a reader raises for a bad file into a DataError: one line that names the file."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise DataError(f"{path}: not a regular file")
    try:
        yield
    except (DataError, MemoryError):
        raise
    except Exception as error:  # a parser may raise nearly any error on a bad file
        what = " ".join(str(error).split())[:300]
        if type(error) is not ValueError:
            bad = "not a text in UTF-8" if isinstance(error, UnicodeDecodeError) else "damaged or truncated"
            what = f"{bad} ({type(error).__name__}: {what})"
        raise DataError(f"{path}: {what}") from error


def files(archive: tarfile.TarFile, where: object) -> Iterator[tarfile.TarInfo]:
    """The regular files of an archive but hidden ones. Raises DataError after the last one where its end is missing."""
    for member in archive:
        if member.size < 0:
            raise DataError(f"{where}: damaged: {member.name!r} has a size of {member.size}")
        if member.isfile() and not HIDDEN.search(member.name):
            yield member
    assert archive.fileobj is not None
    archive.fileobj.seek(archive.offset)
    if archive.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
        raise DataError(f"{where}: damaged or truncated: the archive has no end")


def unpacked(stream: IO[bytes], where: str, room: int, *, tar: bool = False, depth: int = 0
             ) -> Iterator[tuple[str, bytes]]:
    """(name, content) of the files in a file: of itself, or, if it is packed with tar, xz or gzip, of all files in it,
    at any depth. `room`: the most bytes of all contents, and of whatever is inflated. `tar`: whether it must be an
    archive. Raises DataError for more, and what the readers of damaged files raise."""
    opened = io.BufferedReader(_Limited(stream, where, room))
    start = opened.peek(tarfile.BLOCKSIZE)[: tarfile.BLOCKSIZE]
    reader = next((found for magic, found in READERS.items() if start.startswith(magic)), None)
    archive = reader is None and (tar or start[257:262] == b"ustar")
    if depth == DEPTH and (archive or reader is not None):
        raise DataError(f"{where}: more than {DEPTH} packed files in one another")
    if reader is not None:
        with reader(opened) as inner:
            yield from unpacked(inner, where, room, tar=tar, depth=depth + 1)
    elif archive:
        yield from _members(opened, where, room, depth)
    else:
        # in pieces, so that the limit is noticed before there is memory for more
        yield where, b"".join(iter(lambda: opened.read(PIECE), b""))


def _members(opened: IO[bytes], where: str, room: int, depth: int) -> Iterator[tuple[str, bytes]]:
    seen = None
    with tarfile.open(fileobj=opened, mode="r:") as archive:
        for member in files(archive, where):
            content, seen = archive.extractfile(member), seen or 0
            assert content is not None
            for name, text in unpacked(content, f"{where}, {member.name}", room - seen, depth=depth + 1):
                seen += len(text)
                yield name, text
    if seen is None:
        raise DataError(f"{where}: the archive has no files")


class _Limited(io.RawIOBase):
    """A stream that ends with an error if it has more than `room` bytes."""

    def __init__(self, stream: IO[bytes], where: str, room: int) -> None:
        self._stream, self._where, self._room = stream, where, room

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        part = self._stream.read(min(len(into), PIECE))  # an archive may ask for as much as a header says
        if self._stream.tell() > self._room:
            raise DataError(f"{self._where}: holds more text than is read from a file of this size; unpack it, or save "
                            f"its tokens as uint16 in train.bin and val.bin")
        into[: len(part)] = part
        return len(part)

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._stream.seek(offset, whence)

    def tell(self) -> int:
        return self._stream.tell()
