"""A solution of assignment 5: the best of all orders. In about half of the cases reverse first-k is one of them."""


def order_of(k, layers):
    """Reverse first-k."""
    order = [f"{i}F0" for i in range(layers)]
    for i in reversed(range(layers)):
        order += [f"{i}W0"] * (i >= k) + [f"{i}O0"] * (i > 0)
    return order + [f"{i}W0" for i in range(k)]


def backwards(chain, waiting):
    """All orders of the O of layers `chain` to 1 and of all W. The W of the layers `waiting` can run at once."""
    if chain == 0 and not waiting:
        yield []
    if chain > 0:
        yield from ([f"{chain}O0", *rest] for rest in backwards(chain - 1, [*waiting, chain - 1]))
    for w in waiting:
        yield from ([f"{w}W0", *rest] for rest in backwards(chain, [x for x in waiting if x != w]))


def period(order, time, transfer):
    """Of a step in the long run, in which transfers go in eight parts, the lowest layer first."""
    now, ended, ends = 0.0, [0.0] * len(transfer), []
    for _ in range(60):
        ready = []
        for name in order:
            layer, kind = int(name[:-2]), name[-2]
            now = max(now, ended[layer] if kind == "F" else 0.0) + time[kind][layer]
            if kind == "W":
                ready.append((now, layer))
        left, link = {layer: 8 for _, layer in ready}, 0.0
        while any(left.values()):
            there = [layer for at, layer in ready if at <= link and left[layer]]
            if not there:
                link = min(at for at, layer in ready if left[layer])
                continue
            layer = min(there)
            left[layer] -= 1
            ended[layer] = link = link + transfer[layer] / 8
        ends.append(now)
    return ends[-1] - ends[19]


def first_k(forward, output_grad, weight_grad, transfer):
    time, layers = {"F": forward, "O": output_grad, "W": weight_grad}, len(forward)
    forwards = [f"{i}F0" for i in range(layers)]
    every = [*(order_of(k, layers) for k in range(layers + 1)),
             *([*forwards, *rest] for rest in backwards(layers - 1, [layers - 1]))]
    return min(every, key=lambda order: period(order, time, transfer))
