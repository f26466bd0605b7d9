"""`new`: a small working op, kernel, scheduler or network with its test, to start from; or assignments of a course."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from ..system.files import write_atomic
from . import show
from .flags import UsageError
from .values import nearest

TEMPLATES = Path(__file__).with_name("templates")  #: a folder for each kind; its files end in .txt
#: kind -> a command that uses it, from its folder
USES = {
    "op": 'python -c "import numpy as np, minidl as ml; from my_op import my_op; print(my_op(ml.array(np.ones(3))))"',
    "kernel": 'python -c "import numpy as np, minidl as ml, my_kernel; ml.kernelcheck(\'my_kernel\', np.ones(3))"',
    "scheduler": "minidl compare --model mlp --steps 20 --schedulers in_order,my_scheduler.py:my_scheduler",
    "model": "minidl train --model my_model.py:my_model --epochs 4",
    "assignment": "python grade.py",
}


def new(arguments: Any) -> int:
    """Writes the files of a template. Raises UsageError for an unknown kind, or if one of them is there already."""
    folder = Path(arguments.folder)
    if arguments.kind not in USES:
        raise UsageError(f"unknown kind {arguments.kind[:60]!r}; {nearest(arguments.kind, list(USES))}")
    files = {folder / path.name.removesuffix(".txt"): path for path in sorted((TEMPLATES / arguments.kind).iterdir())}
    if there := [path for path in files if path.exists()]:
        raise UsageError(f"{there[0]} is there already; give another folder")
    folder.mkdir(parents=True, exist_ok=True)
    for path, template in files.items():
        write_atomic(str(path), template.read_text(encoding="utf-8"))
    record = {"kind": arguments.kind, "files": [str(path) for path in files], "use": USES[arguments.kind]}
    return show.emit(arguments, record, "\n".join([*record["files"], "", f"cd {shlex.quote(str(folder))}",
                                                   "python -m pytest -q", USES[arguments.kind]]))
