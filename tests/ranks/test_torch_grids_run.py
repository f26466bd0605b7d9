"""Grids of torch's classes, with receives as late as torch puts them, train here with the bits of one process."""

from __future__ import annotations

from pathlib import Path

from launcher import under_mpi
from rank_runs import command

#: ZBV with 2 micro-batches, as torch 2.13 writes it with defer_pp_recv=True; not free of deadlock under rendezvous
DEFERRED = """0UNSHARD,3UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,3RECV_F0,3F0,3I0,3SEND_B0,3W0,3RECV_F1,3F1,3I1,3SEND_B1,3W1,\
3REDUCE_GRAD,3RESHARD,0RECV_B0,0I0,0W0,0RECV_B1,0I1,0W1,0REDUCE_GRAD,0RESHARD
1UNSHARD,2UNSHARD,1RECV_F0,1F0,2F0,2SEND_F0,1RECV_F1,1F1,2F1,2SEND_F1,2RECV_B0,2I0,2W0,1I0,1SEND_B0,1W0,2RECV_B1,2I1,\
2W1,2REDUCE_GRAD,2RESHARD,1I1,1SEND_B1,1W1,1REDUCE_GRAD,1RESHARD
"""


@under_mpi
def test_large_messages_of_a_deferred_grid_travel_over_mpi(tmp_path: Path) -> None:
    """Of 1 MiB, which MPI sends only when they are received."""
    (file := tmp_path / "grid.csv").write_text(DEFERRED)
    flags = ["--model", "mlp", "--model-arg", "hidden=1024", "--batch-size", "512", "--micro-batches", "2",
             "--steps", "2"]
    _, wanted, _ = command(1, *flags)
    code, found, errors = command(2, *flags, "--parallel", "pipeline", "--scheduler", str(file), "--chunks", "2")
    assert code == 0, errors
    assert found["params_sha256"] == wanted["params_sha256"]
    assert "rendezvous: no, 2SF0>0 waits for 0SF1>1 waits for 2SF0>0" in found["remarks"][0]
