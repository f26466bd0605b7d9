"""Files that users name: read within a stated size, written whole or not at all, and locks that say who is at work.

It knows nothing of what is in them.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep

#: the largest file of each kind that is read, in bytes; of a packed trace, what it holds. Files of data:
#: data/formats.py
LARGEST = {"plan": 256 << 20, "costs": 16 << 20, "config": 8 << 10, "trace": 256 << 20, "checkpoint header": 16 << 20}
#: reading a file takes at most this many times its bytes of memory, and SPARE; a checkpoint takes the model's on top
MEMORY = {"plan": 10, "costs": 40, "config": 400, "trace": 40, "checkpoint header": 10}
SPARE = 128 << 20
READER_SECONDS = 10.0  #: how long a pipe that is written to may be without a reader
_PART = ".part"  #: how the name of a file ends that is still being written


class FileError(OSError):
    """A file that cannot be read or written; one line names it and says why."""

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


# -------------------------------------------------------------------------------------------------------------- reading
def read(path: str | Path, kind: str) -> bytes:
    """The bytes of a regular file of at most `LARGEST[kind]`. A pipe or a device is refused, not waited for.

    Raises FileError.
    """
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise FileError(errno.EINVAL, "not a regular file", str(path))
            parts, size = list[bytes](), status.st_size
            while size <= LARGEST[kind] and (part := file.read(1 << 20)):
                parts.append(part)
                size = max(size, sum(map(len, parts)))
    except OSError as error:
        raise FileError(error.errno, error.strerror, str(path)) from None
    if size > LARGEST[kind]:
        raise FileError(errno.EFBIG,
                        f"larger than {LARGEST[kind] >> 10:,} KiB, the most that is read of a {kind} file", str(path))
    return b"".join(parts)


def read_text(path: str | Path, kind: str) -> str:
    """As `read`, as text: UTF-8, with or without a byte-order mark; every end of line becomes \\n. Raises FileError,
    and ValueError for what is not text."""
    content = read(path, kind)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not a text file in UTF-8 (byte {error.start})") from None
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


# -------------------------------------------------------------------------------------------------------------- writing
def write_atomic(path: str | Path, content: str | bytes) -> None:
    """Writes `content` to `path`, through links. A file appears whole or not at all, and keeps its mode and owner; on
    any error the old one stays. What is not a regular file, such as a pipe or a device, is written to as it is.

    Raises FileError.
    """
    data = content.encode() if isinstance(content, str) else content
    try:
        status = _status(path)
        if status is not None and not stat.S_ISREG(status.st_mode):
            _pour(_opened(path), data)
        elif status is not None and (stream := _standard(status)):
            _pour(os.dup(stream), data)
        else:
            _replace(Path(os.path.realpath(path)), data, status)
    except OSError as error:
        raise FileError(error.errno, error.strerror, str(path)) from None


def check_writable(path: str | Path) -> None:
    """Finds out before a long run that `path` could not be written after it. Raises FileError."""
    try:
        status = _status(path)
        folder = os.path.dirname(os.path.realpath(path))
        if status is None or stat.S_ISREG(status.st_mode):
            if not os.path.isdir(folder):
                raise FileError(errno.ENOENT, f"the folder {folder} does not exist", str(path))
            if not os.access(folder, os.W_OK | os.X_OK):
                raise FileError(errno.EACCES, f"the folder {folder} cannot be written to", str(path))
    except OSError as error:
        raise FileError(error.errno, error.strerror, str(path)) from None


def _status(path: str | Path) -> os.stat_result | None:
    """Of what is to be written to, at the end of all links; None where nothing is there yet."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(status.st_mode):
        raise FileError(errno.EISDIR, "is a folder, not a file", str(path))
    if not os.access(path, os.W_OK):
        raise FileError(errno.EACCES, "must not be written to", str(path))
    return status


def _standard(status: os.stat_result) -> int | None:
    """Standard output or error, where the file is what they go to: others have it open, so it must not be replaced."""
    for stream in (1, 2):
        with suppress(OSError):
            if os.path.samestat(os.fstat(stream), status):
                return stream
    return None


def _opened(path: str | Path) -> int:
    """A pipe or a device, which is not made, cut or replaced. Waits a while for a pipe's reader."""
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


def _pour(handle: int, data: bytes) -> None:
    sys.stdout.flush()
    with os.fdopen(handle, "wb", buffering=0) as file:
        rest = memoryview(data)
        while rest:
            rest = rest[file.write(rest) :]


def _replace(target: Path, data: bytes, old: os.stat_result | None) -> None:
    """Writes beside the target under another name, then renames. Whoever writes holds a lock on that file: what nobody
    locks was left by a process that was killed, and is removed."""
    begins = f".{target.name[:100]}."
    _sweep(target.parent, begins)
    while True:
        handle, temporary = tempfile.mkstemp(_PART, begins, target.parent)
        _lock(handle)
        # no other process took it for one that was left, in the moment before it was locked
        if os.fstat(handle).st_nlink:
            break
        os.close(handle)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
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
        os.unlink(temporary)
        raise


def _sweep(folder: Path, begins: str) -> None:
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
    """Holds the lock file `path`, which no other process can hold meanwhile and which goes with the process, however it
    ends. Raises FileError where another has it."""
    while True:
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise FileError(error.errno, error.strerror, str(path)) from None
        try:
            _lock(handle, fcntl.LOCK_NB)
        except OSError:
            os.close(handle)
            raise FileError(errno.EBUSY, "another process holds it", str(path)) from None
        with suppress(FileNotFoundError):
            if os.path.samestat(os.stat(path), os.fstat(handle)):
                break
        os.close(handle)  # its holder removed it as it ended
    try:
        yield
    finally:
        with suppress(FileNotFoundError):
            os.unlink(path)
        os.close(handle)


def _lock(handle: int, how: int = 0) -> None:
    """Some network file systems have no locks: there, nobody is kept out."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | how)
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            raise
