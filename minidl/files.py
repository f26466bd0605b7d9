"""Files that are whole or not there: written beside their place under another name, then renamed."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_atomic(path: str | Path, content: str | bytes) -> None:
    """Writes `content` to `path`; on any error the old file stays and nothing half-written is left.

    Raises OSError that names `path`.
    """
    path = Path(path)
    try:
        _write(path, content)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def _write(path: Path, content: str | bytes) -> None:
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
