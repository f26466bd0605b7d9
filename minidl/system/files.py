"""Files that users name: limits on what is read, writes that leave a whole file or the old one, records that are
appended whole, and lock files.

This module does not know what the files contain.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Any

#: the largest file of each kind that is read, in bytes; a packed trace counts unpacked. data/ has the limits
#: for files of data
LARGEST = {"plan": 256 << 20, "costs": 16 << 20, "config": 8 << 10, "trace": 256 << 20, "problems": 1 << 20,
           "checkpoint header": 16 << 20, "index of weights": 16 << 20, "version log": 256 << 20,
           "log of orders": 256 << 20, "standstill": 64 << 20}
READER_SECONDS = 10.0  #: how long to wait for a reader before writing to a pipe
_PART = ".part"  #: the suffix of a file that is still being written


class FileError(OSError):
    """A file cannot be read or written. The message is one line: the file, and why."""

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


@contextmanager
def _naming(path: str | Path) -> Iterator[None]:
    """Raises FileError, with this name, for what the system refuses inside."""
    try:
        yield
    except OSError as error:
        raise FileError(error.errno, error.strerror, str(path)) from None


# -------------------------------------------------------------------------------------------------------------- reading
def read(path: str | Path, kind: str) -> bytes:
    """The bytes of a regular file of at most `LARGEST[kind]`. It rejects a pipe or a device instead of waiting for it.
    Raises FileError."""
    most = LARGEST[kind]
    with _naming(path), open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise FileError(errno.EINVAL, "not a regular file", str(path))
        parts, size = list[bytes](), status.st_size
        while size <= most and (part := file.read(1 << 20)):  # it may grow meanwhile
            parts.append(part)
            size = max(size, sum(map(len, parts)))
        if size > most:
            raise FileError(errno.EFBIG, f"larger than {most >> 10:,} KiB, the limit for a {kind} file", str(path))
        return b"".join(parts)


def read_text(path: str | Path, kind: str) -> str:
    """As `read`, but as text: UTF-8, with or without a byte-order mark; every end of line becomes \\n. Raises
    FileError, and ValueError for bytes that are not UTF-8."""
    content = read(path, kind)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not a text file in UTF-8 (byte {error.start})") from None
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def read_json(path: str | Path, kind: str) -> Any:
    """The JSON in a text file. Raises FileError, and ValueError for any other file, also if a name is there twice."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        for name, count in Counter(name for name, _ in pairs).items():
            if count > 1:
                raise ValueError(f"{name[:40]!r} is there twice; leave one out")
        return dict(pairs)

    text = read_text(path, kind)
    try:
        return json.loads(text, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {'nested too deeply' if isinstance(error, RecursionError) else error}") from None


# -------------------------------------------------------------------------------------------------------------- writing
def write_atomic(path: str | Path, content: str | bytes | Iterable[Any]) -> None:
    """Writes `content`, a text, bytes or pieces of bytes, to `path`, and follows links. The file appears whole or not
    at all, and keeps its mode and owner; on any error the old file stays. A pipe or a device is written to in place.
    Raises FileError."""
    content = content.encode(errors="replace") if isinstance(content, str) else content  # a file's name may be no text
    data = [content] if isinstance(content, bytes) else content
    with _naming(path):
        status = _status(path)
        if status is not None and not stat.S_ISREG(status.st_mode):
            _pour(_opened(path), data)
        elif status is not None and (stream := _standard(status)):
            _pour(os.dup(stream), data)
        else:
            _replace(Path(os.path.realpath(path)), data, status)


class Growing:
    """A file that grows by whole records: of one that cannot be written, nothing is left. A regular file is locked, so
    that no other process writes between the records; `anew` empties it first. Raises FileError, also where another
    process holds the lock."""

    def __init__(self, path: str | Path, *, anew: bool) -> None:
        self._path = str(path)
        with _naming(path):
            status = _status(path)
            if status is not None and not stat.S_ISREG(status.st_mode):
                self._file = os.fdopen(_opened(path), "wb", buffering=0)
                return
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115
        try:
            _lock(self._file.fileno(), fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise FileError(errno.EBUSY, "another run writes to it; wait until it ends, or use another file", self._path
                            ) from None  # fmt: skip
        if anew:
            self._file.truncate(0)

    def write(self, record: bytes) -> None:
        size = os.fstat(self._file.fileno()).st_size
        try:
            with _naming(self._path):
                _written(self._file, record)
        except FileError:
            with suppress(OSError):  # of a pipe, what is written is gone
                self._file.truncate(size)
            raise

    def close(self) -> None:
        self._file.close()


def check_writable(path: str | Path) -> None:
    """Checks before a long run that `path` can be written at its end. Raises FileError if it cannot."""
    with _naming(path):
        status = _status(path)
        folder = os.path.dirname(os.path.realpath(path))
    if status is None or stat.S_ISREG(status.st_mode):
        if not os.path.isdir(folder):
            raise FileError(errno.ENOENT, f"the folder {folder} does not exist", str(path))
        if not os.access(folder, os.W_OK | os.X_OK):
            raise FileError(errno.EACCES, f"the folder {folder} cannot be written to", str(path))


def _status(path: str | Path) -> os.stat_result | None:
    """The status of the file at the end of all links; None if it does not exist. Raises FileError if it is a folder or
    write-protected."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(status.st_mode):
        raise FileError(errno.EISDIR, "is a folder, not a file", str(path))
    if not os.access(path, os.W_OK):
        raise FileError(errno.EACCES, "no permission to write to it", str(path))
    return status


def _standard(status: os.stat_result) -> int | None:
    """1 or 2 where standard output or error goes to this file: others have it open, so it must not be replaced."""
    for stream in (1, 2):
        with suppress(OSError):
            if os.path.samestat(os.fstat(stream), status):
                return stream
    return None


def _opened(path: str | Path) -> int:
    """The handle of a pipe or a device, opened for writing. Waits READER_SECONDS for the reader of a pipe."""
    deadline = monotonic() + READER_SECONDS
    while True:
        try:
            handle = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            if monotonic() > deadline:
                raise FileError(errno.ENXIO, "nobody reads from this pipe", str(path)) from None
            sleep(0.02)
        else:
            os.set_blocking(handle, True)
            return handle


def write_new(path: Path, pieces: Iterable[Any]) -> None:
    """Writes pieces of bytes to a file, and returns when they are on the disk. Raises FileError."""
    with _naming(path), open(path, "wb", buffering=0) as file:
        for piece in pieces:
            _written(file, piece)
        os.fsync(file.fileno())


def put_in_place(part: Path, folder: Path) -> None:
    """Gives a folder its name, when all files in it are on the disk. Raises FileError, also if the name is taken."""
    with _naming(folder):
        _sync(part)
        os.rename(part, folder)
        _sync(folder.parent)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _pour(handle: int, data: Iterable[Any]) -> None:
    sys.stdout.flush()
    with os.fdopen(handle, "wb", buffering=0) as file:
        for piece in data:
            _written(file, piece)


def _written(file: Any, data: Any) -> None:
    """Writes all of the data to a file without a buffer, which may take a part at a time."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def copy_atomic(file: Path, to: Path) -> None:
    """The same file under another name, as a link if that can be; it appears whole or not at all. Raises OSError."""
    part = to.with_name(f".{to.name}{_PART}")
    with open(file, "r+b") as held:
        _lock(held.fileno())  # of the part as well, which is the same file
        part.unlink(missing_ok=True)
        try:
            os.link(file, part)
            os.replace(part, to)
        except OSError:  # a file system without links
            write_atomic(to, iter(lambda: held.read(1 << 24), b""))
        finally:
            part.unlink(missing_ok=True)


def _replace(target: Path, data: Iterable[Any], old: os.stat_result | None) -> None:
    """Writes a temporary file beside the target, then renames it. The writer holds a lock on the temporary file; one
    without a lock was left by a process that was killed, and is removed."""
    begins = f".{target.name[:100]}."
    sweep(target.parent, begins)
    while True:
        handle, temporary = tempfile.mkstemp(_PART, begins, target.parent)
        _lock(handle)
        # still there: another process might have removed it as a leftover before it was locked
        if os.fstat(handle).st_nlink:
            break
        os.close(handle)
    try:
        with os.fdopen(handle, "wb") as file:
            for piece in data:
                file.write(piece)
            file.flush()
            if old is None:
                umask = os.umask(0)
                os.umask(umask)
                os.chmod(temporary, 0o666 & ~umask)
            else:
                with suppress(PermissionError):
                    os.chown(temporary, old.st_uid, old.st_gid)
                os.chmod(temporary, stat.S_IMODE(old.st_mode))
            os.fsync(file.fileno())
            os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)  # an interrupt may come when it is renamed already
        raise


def sweep(folder: Path, begins: str | tuple[str, ...]) -> None:
    """Removes the files whose names begin so and that killed processes left while they wrote: nobody locks them."""
    with os.scandir(folder) as entries:
        left = [e.path for e in entries if e.name.startswith(begins) and e.name.endswith(_PART)
                and e.is_file(follow_symlinks=False)]
    for path in left:
        with suppress(OSError):
            handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(path)
            finally:
                os.close(handle)


# ---------------------------------------------------------------------------------------------------------------- locks
@contextmanager
def claimed(path: Path) -> Iterator[None]:
    """Holds the lock file `path` inside. The system frees the lock when the process ends, however it ends. Raises
    FileError if another process holds it."""
    while True:
        with _naming(path):
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            _lock(handle, fcntl.LOCK_NB)
        except OSError:
            os.close(handle)
            raise FileError(errno.EBUSY, "another process holds it", str(path)) from None
        with suppress(FileNotFoundError):
            if os.path.samestat(os.stat(path), os.fstat(handle)):
                break
        os.close(handle)  # the last holder removed the file in the meantime
    try:
        yield
    finally:
        with suppress(FileNotFoundError):
            os.unlink(path)
        os.close(handle)


def _lock(handle: int, how: int = 0) -> None:
    """Locks an open file. Does nothing on a network file system without locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | how)
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            raise
