"""The fusion rules for products and convolutions: they can end in relu, write into a slab, and read from one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..core.graph import Launch, View
from ..core.tasks import Kind
from ..kernels.conv_cuda import way
from .draft import Draft

ALIGNED = 16  #: bytes; at other addresses cuDNN offers 1 to 3 engines for a convolution instead of 16 to 22


def epilogue(draft: Draft) -> None:
    """Lets a product do the relu after it: a linear layer, and a 1x1 convolution with bias."""
    for i, entry in list(draft.numbered()):
        first = entry.only
        if first is None or not _is_product(first) or (made := draft.passed_on(first.writes[0])) is None:
            continue
        readers = draft.readers(made)
        second = draft[readers[0]].only if len(readers) == 1 else None
        if (second is None or second.kernel != "relu" or second.reads[0] != first.writes[0]
            or not draft.moves(i, readers[0], readers)):
            continue
        launch, work = draft.launch(first.kernel, first.reads, second.writes, **dict(first.constants), act="relu")
        draft.merge(readers[0], [i], [launch], [made], work, as_task=i)


def _is_product(launch: Launch) -> bool:
    if launch.kernel == "conv2d":
        geometry = dict(launch.constants)["geometry"]
        return (launch.reads[1].shape[1:3] == (1, 1) and geometry.groups == 1 and geometry.stride == (1, 1)
                and geometry.padding == (0, 0))
    return launch.kernel == "linear"


def slabs(draft: Draft) -> None:
    """Lets a convolution write its output directly into the slab that joins it to others, and its gradients read from
    there, without copies. Only for devices whose convolutions take images with gaps between pixels."""
    if not draft.device.captures:
        return
    for i, entry in list(draft.numbered()):
        copy = entry.only
        if copy is None or copy.kernel != "copy" or copy.reads[0].dtype != copy.writes[0].dtype:
            continue
        if draft.kind(i) == Kind.F:
            _write_in_slab(draft, i, copy)
        elif (made := draft.passed_on(copy.writes[0])) is not None and _pixels(copy.reads[0]):
            readers = draft.readers(made)
            if all(draft.moves(i, t, readers)
                   and all(_takes(launch, copy.writes[0]) for launch in draft[t].launches) for t in readers):
                for t in readers:
                    launches = [replace(launch, reads=tuple(copy.reads[0] if v == copy.writes[0] else v
                                                            for v in launch.reads)) for launch in draft[t].launches]
                    draft.merge(t, [], launches, [made], [], reads=entry.reads)
                draft.entries[i] = None


def _write_in_slab(draft: Draft, i: int, copy: Launch) -> None:
    made = draft.passed_on(copy.reads[0])
    if made is None or draft.readers(made) != [i] or not _pixels(copy.writes[0]):
        return
    (source,) = draft.writers(made)
    first = draft[source].only
    if (first is not None and first.kernel == "conv2d" and len(first.reads) == 2 and first.writes[0] == copy.reads[0]
        and _has_gaps(first) and draft.moves(source, i, [i])):
        launch, work = draft.launch("conv2d", first.reads, copy.writes, **dict(first.constants))
        draft.merge(i, [source], [launch], [made], work, as_task=source)


def _takes(launch: Launch, view: View) -> bool:
    """Whether a launch does not read the view, or reads it only as the gradient dy of a convolution's output."""
    if view not in launch.reads:
        return True
    at = {"conv2d_input_grad": 0, "conv2d_weight_grad": 1}.get(launch.kernel)
    return at is not None and launch.reads[at] == view != launch.reads[1 - at] and _has_gaps(launch)


def _has_gaps(launch: Launch) -> bool:
    """Whether the output of this convolution, or its gradient, may have gaps between its pixels."""
    constants = dict(launch.constants)
    x, w = {"conv2d": launch.reads[:2], "conv2d_input_grad": (launch.writes[0], launch.reads[1]),
            "conv2d_weight_grad": (launch.reads[0], launch.writes[0])}[launch.kernel]
    return (way(x, w, constants["geometry"]) in ("pointwise", "library") and not constants.get("bias")
            and not constants.get("act"))


def _pixels(view: View) -> bool:
    """Whether channels are contiguous, pixels equally far apart, and the first one at an aligned address."""
    steps = [(n, s) for n, s in zip(view.shape[:-1], view.strides[:-1], strict=True) if n > 1]
    aligned = view.offset * np.dtype(view.dtype).itemsize % ALIGNED == 0
    regular = all(a == b * n for (_, a), (n, b) in zip(steps, steps[1:], strict=False))
    return aligned and regular and view.strides[-1] == 1
