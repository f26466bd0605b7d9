"""A solution of assignment 4."""


def in_turn(rank, micro_batches, ahead, lag):
    """`ahead` forwards, then O, the W of `lag` micro-batches before, F in turn, then the rest; without `lag` B, F."""
    order = [f"{rank}F{i}" for i in range(min(ahead, micro_batches))]
    for i in range(micro_batches):
        order.append(f"{rank}{'B' if lag is None else 'O'}{i}")
        if lag is not None and i >= lag:
            order.append(f"{rank}W{i - lag}")
        if i + ahead < micro_batches:
            order.append(f"{rank}F{i + ahead}")
    return order + ([] if lag is None else [f"{rank}W{i}" for i in range(max(0, micro_batches - lag), micro_batches)])


def one_f_one_b(ranks, micro_batches):
    return [in_turn(rank, micro_batches, ranks - rank, None) for rank in range(ranks)]


def zb_h1(ranks, micro_batches):
    return [in_turn(rank, micro_batches, ranks - rank, rank) for rank in range(ranks)]
