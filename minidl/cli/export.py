"""`export`: a checkpoint's weights for other programs."""

from __future__ import annotations

from typing import Any

from .. import weights
from ..files import check_writable
from ..training import checkpoint
from . import show


def run(arguments: Any) -> None:
    """Writes the weights and states of a checkpoint's model to a file."""
    check_writable(arguments.file)
    values = checkpoint.weights(arguments.checkpoint_file)
    file = weights.save(arguments.file, values, arguments.style)
    record = {"file": str(file), "tensors": len(values), "values": sum(int(v.size) for v in values.values()),
              "style": arguments.style}
    show.emit(arguments, record, f"{file}: {record['tensors']} tensors with {record['values']:,} values")
