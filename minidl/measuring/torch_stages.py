"""The costs of a torch network per stage of a pipeline: the tasks of torch's own pipeline runtime, timed one by one.

Input and weight gradients are made as `torch.distributed.pipelining` makes them. Its stage 0 differentiates no input: I
does nothing there, and W is the full backward. The times are for a free device: nine of ten repeats take longer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from time import perf_counter, perf_counter_ns
from typing import Any

from ..pricing.cost import CostError, CostModel

LEAST = 1e-3  #: microseconds of a task that does nothing; a plan needs positive times
ROUNDS, MOST = 5, 200  #: the least and the most rounds over a stage's tasks; the first is a warm-up
#: modules in order, each for the tensor of the one before; a micro-batch's inputs and targets; the loss of both
Network = tuple[Sequence[Any], Any, Any, Callable[[Any, Any], Any]]


def network_of(made: Any, device: str) -> Network:
    """The result of a user's function, on a device. Raises ValueError for anything but a network."""
    import torch

    four: Any = made if isinstance(made, tuple) and len(made) == 4 else [()] * 4
    layers, x, y, loss = four
    if (not isinstance(layers, list | tuple | torch.nn.Sequential | torch.nn.ModuleList) or not layers
        or not callable(loss) or not all(isinstance(given, torch.Tensor) for given in (x, y))):
        raise ValueError("the function must return (layers, x, y, loss): a list of modules, two tensors, and a loss")
    if wrong := [i for i, layer in enumerate(layers) if not isinstance(layer, torch.nn.Module)]:
        raise ValueError(f"layer {wrong[0]} is a {type(layers[wrong[0]]).__name__}, not a torch module")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError("torch finds no CUDA device; leave --device out")
    if any(t.is_meta for t in (x, y, *(p for layer in layers for p in layer.parameters()))):
        raise ValueError("it is on torch's device meta, where tensors have no numbers; make it on cpu")
    return [layer.to(device) for layer in layers], x.detach().to(device), y.to(device), loss


def measure_stages(network: Network, sizes: Sequence[int], optimizer: str, seconds: float,
                   progress: Callable[[float], None]) -> CostModel:
    """Costs with one time in microseconds per block of so many layers, each measured for about `seconds`: kinds F, O
    (torch's I), W, B and U; sizes saved_bytes (for the backward, beside parameters) and message_bytes. `optimizer`: a
    class of `torch.optim`, in any case. Raises CostError if there is none; for a block that fails, whose parameters the
    optimizer does not take, or that does not return one tensor; for a loss without a gradient."""
    import torch

    each, x, y, loss = iter(network[0]), *network[1:]
    layers = [torch.nn.Sequential(*islice(each, size)) for size in sizes]
    known = {name.lower(): c for name, c in vars(torch.optim).items() if isinstance(c, type)}
    if optimizer not in known:
        raise CostError(f"torch {torch.__version__} has no {optimizer}; give another --optimizer, such as adamw")
    rows = list[dict[str, Any]]()
    for i, layer in enumerate(layers):
        last = i == len(layers) - 1
        x.requires_grad_(i > 0 and x.is_floating_point())
        try:
            end = (lambda output: loss(output, y)) if last else lambda output: output
            output, saved, feed = _saved(layer, x, end)
            if not isinstance(output, torch.Tensor):
                raise ValueError(f"it returns a {type(output).__name__}; each layer must return one tensor")
            if last and not (getattr(made := loss(output, y), "requires_grad", False) and made.numel() == 1):
                raise ValueError("its loss must be a tensor of one number that has a gradient; torch makes none after "
                                 "set_grad_enabled(False), or if no parameter requires one")
            grads = None if last else [torch.ones_like(output)]
            times = _times(layer, x, feed, end, grads, known[optimizer], seconds)
        except (RuntimeError, ValueError, TypeError, AttributeError, IndexError) as error:
            raise CostError(f"layer {i}: {' '.join(str(error).split())[:300]}") from error
        rows.append(times | {"saved_bytes": saved, "message_bytes": 0 if last else output.nbytes})
        x = output.detach()
        progress((i + 1) / len(layers))
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    return CostModel(kinds={name: columns.pop(name) for name in "FOWBU"}, sizes={"layers": [*sizes], **columns},
                     source="measured",
                     device=f"{x.device.type}, torch {torch.__version__}, {torch.get_num_threads()} threads")


def _saved(layer: Any, x: Any, end: Callable[[Any], Any]) -> tuple[Any, int, Callable[[], Any]]:
    """The output, the bytes that stay for the backward beside parameters, and a function that gives the input."""
    import torch

    found: Any = []  # they live on, so that no storage is used twice
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: found.append(tensor) or tensor, lambda tensor: tensor):
        end(output := layer(given := x.clone() if x.requires_grad else x))
    own = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
    size = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in found}
    copied = x.requires_grad and (given._version or output is given)  # torch refuses a leaf to what works in place
    return output, sum(size[place] for place in size.keys() - own), x.clone if copied else lambda: x


def _times(layer: Any, x: Any, feed: Any, end: Any, grads: Any, update: Any, seconds: float) -> dict[str, float]:
    """The time of each kind of task, mixed as in a pipeline."""
    import torch
    from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

    seen: dict[str, list[int]] = {name: [] for name in "FOWBU"}
    wait: Callable[[], Any] = torch.cuda.synchronize if x.is_cuda else lambda: None

    def timed(kind: str, call: Callable[..., Any], *arguments: Any) -> Any:
        wait()
        begin = perf_counter_ns()
        found = call(*arguments), wait()
        seen[kind].append(perf_counter_ns() - begin)
        return found[0]

    parameters = [p for p in layer.parameters() if p.requires_grad]
    step = update(parameters, lr=1e-9).step if parameters else lambda: None
    stop = perf_counter() + seconds
    while len(seen["F"]) < ROUNDS or (perf_counter() < stop and len(seen["F"]) < MOST):
        output = timed("F", lambda given: end(layer(given)), feed())
        if not output.requires_grad:  # there is nothing to differentiate
            continue
        if x.requires_grad:
            output = output.clone() if output._is_view() else output  # torch cannot detach a view
            groups = timed("O", stage_backward_input, [output], grads, [x], iter(parameters))[1]
            timed("W", stage_backward_weight, iter(parameters), groups)
            output = end(layer(feed()))
        timed("B", torch.autograd.backward, [output], grads)
        timed("U", step)
        x.grad = None
    found = {name: max(sorted(t[1:] or [0])[len(t) // 10] / 1000, LEAST) for name, t in seen.items()}
    return found if x.requires_grad else found | {"W": found["B"]}
