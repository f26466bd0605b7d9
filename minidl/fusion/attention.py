"""The fusion rule for attention: in 16 bits it uses cuDNN's flash kernels, which keep one number for each query in
place of the probabilities. Launches that those kernels do not support stay as they are."""

from __future__ import annotations

from math import prod

from ..core.graph import Launch, Role, View
from .draft import Draft

HALVES = ("bfloat16", "float16")
WIDEST = 128  #: the most elements of a query, key or value
PIECE = 8  #: elements (16 bytes) that are loaded at once


def flash_attention(draft: Draft) -> None:
    """Attention and its gradient by flash kernels, if the device has them."""
    if not draft.device.flash:
        return
    for i, entry in draft.numbered():
        for launch in entry.launches:
            if launch.kernel == "attention" and supported(launch):
                _replace(draft, i, launch)


def supported(launch: Launch) -> bool:
    """Whether flash kernels support this launch of `attention`: its types, sizes and layout, no mask, no offset, a
    positive scale, and more than one score, since cuDNN has no gradient for a single one."""
    (q, k, v, *mask), y = launch.reads, launch.writes[0]
    t, s, d, e = q.shape[2], k.shape[2], q.shape[3], v.shape[3]
    sizes = d % PIECE == e % PIECE == 0 and max(d, e) <= WIDEST and t * s > 1
    constants = dict(launch.constants)
    return (not mask and q.dtype in HALVES and sizes and constants["scale"] > 0 and not constants.get("offset")
            and all(map(_in_pieces, (q, k, v, y))))


def _in_pieces(view: View) -> bool:
    """Whether rows are contiguous and begin at a multiple of PIECE."""
    *outer, along = view.strides
    return (prod(view.shape) > 0 and along == 1 and view.offset % PIECE == 0
            and all(step > 0 and step % PIECE == 0 for step in outer))


def _replace(draft: Draft, i: int, launch: Launch) -> None:
    """Replaces one attention and all its gradients, or nothing."""
    y, p = launch.writes
    output, probabilities = draft.buffer(y), draft.passed_on(p)
    if output is None or probabilities is None or draft.writers(output) != [i]:
        return
    readers = draft.readers(probabilities)
    gradients = [g for t in readers for g in draft[t].launches if p in g.reads]
    if any(g.kernel != "attention_grad" or g.reads[3] != p or not all(map(_in_pieces, (g.reads[4], *g.writes)))
           for g in gradients):
        return
    lse = draft.new(f"{draft.graph.storages[y.storage].name} lse", p.shape[:3], "float32", Role.ACTIVATION)
    flash = draft.launch("flash_attention", launch.reads, (y, lse), **dict(launch.constants))
    draft.merge(i, [flash if other is launch else other for other in draft[i].launches])
    for t in readers:
        draft.merge(t, [draft.launch("flash_attention_grad", (*g.reads[:3], y, lse, g.reads[4]), g.writes,
                                     **dict(launch.constants)) if g in gradients else g for g in draft[t].launches])
