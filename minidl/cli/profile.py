"""`profile`: measures what a torch network costs per stage of a pipeline."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..measuring.torch_stages import measure_stages, network_of
from ..schedulers.pipeline.models import linear_partition
from ..system.loading import function_of, users_code
from . import show
from .flags import UsageError

HEADS = {"F": "forward", "O": "input grad", "W": "weight grad", "B": "both in one", "U": "update"}


def profile(arguments: Any) -> int:
    """Prints the costs of each stage, and writes them with --save-costs."""
    make, asked = function_of(arguments.network), arguments.stages
    with users_code(), show.progress("measuring", 1.0) as done:
        network = network_of(make(), arguments.device)
        sizes = [1] * len(network[0])
        if asked and asked > len(sizes):
            raise UsageError(f"--stages {asked} are more than the {len(sizes)} layers of {arguments.network}")
        if asked and asked < len(sizes):
            each = measure_stages(network, sizes, arguments.optimizer, 0.1, lambda share: done(share / 3))
            sizes = np.bincount(linear_partition(np.add(each.kinds["F"], each.kinds["B"]), asked)).tolist()
        cost = measure_stages(network, sizes, arguments.optimizer, 0.5, lambda share: done((1 + 2 * share) / 3))
    if arguments.save_costs:
        cost.save(arguments.save_costs)
    record = {"stages": len(sizes), "device": cost.device, "kinds": cost.kinds, "sizes": cost.sizes}
    rows = [*zip(range(len(sizes)), *(cost.kinds[kind] for kind in HEADS), *cost.sizes.values(), strict=True)]
    heads = ("stage", *HEADS.values(), *(name.replace("_", " ") for name in cost.sizes))
    return show.emit(arguments, record, lambda: f"microseconds on {cost.device}\n\n{show.table(heads, rows)}")
