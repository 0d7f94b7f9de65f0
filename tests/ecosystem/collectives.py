# SPDX-License-Identifier: Apache-2.0
"""Every collective, on plain and on paged tensors. As a program: one rank of several."""

from __future__ import annotations

import pathlib
import sys
import time
import warnings

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from torch.distributed.distributed_c10d import _coalescing_manager


def coalesced(a, b, size, **options):
    with _coalescing_manager():
        dist.all_reduce(a)
        dist.all_reduce(b)


def exchange(a, b, size):
    """Send to the next rank and receive from the one before."""
    rank = dist.get_rank()
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, a, (rank + 1) % size),
            dist.P2POp(dist.irecv, b, (rank - 1) % size),
        ]
    )
    for work in works:
        work.wait()


def send_and_receive(a, b, size):
    if dist.get_rank() == 0:
        dist.send(a, 1)
        dist.recv(b, 1)
    else:
        dist.recv(b, 0)
        dist.send(a, 0)


def parts(tensor, size):
    return list(tensor.chunk(size))


def scatter(a, b, size, **options):
    # gloo reads what the root scatters by its address, and a list of lists is not shown to tensor subclasses.
    given = [torch.full((64, 8), float(i)) for i in range(size)] if dist.get_rank() == 0 else None
    return dist.scatter(a[:64], given, 0, **options)


def gather(a, b, size, **options):
    return dist.gather(a[:64], parts(b, size) if dist.get_rank() == 0 else None, 0, **options)


# `a` and `b` have `size` parts of (64, 8). What is written, and what is returned, must be that of plain tensors.
SYNC_OR_ASYNC = {
    "all_reduce": lambda a, b, size, **o: dist.all_reduce(a, **o),
    "all_reduce of the largest": lambda a, b, size, **o: dist.all_reduce(a, dist.ReduceOp.MAX, **o),
    "all_reduce of a view": lambda a, b, size, **o: dist.all_reduce(a.view(-1)[64:512], **o),
    "reduce": lambda a, b, size, **o: dist.reduce(a, 0, **o),
    "broadcast": lambda a, b, size, **o: dist.broadcast(a, 0, **o),
    "all_gather": lambda a, b, size, **o: dist.all_gather(parts(b, size), a[:64], **o),
    "all_gather_into_tensor": lambda a, b, size, **o: dist.all_gather_into_tensor(b, a[:64], **o),
    "reduce_scatter": lambda a, b, size, **o: dist.reduce_scatter(a[:64], parts(b, size), **o),
    "reduce_scatter_tensor": lambda a, b, size, **o: dist.reduce_scatter_tensor(a[:64], b, **o),
    "all_to_all_single": lambda a, b, size, **o: dist.all_to_all_single(b, a, **o),
    "all_to_all": lambda a, b, size, **o: dist.all_to_all(parts(b, size), parts(a, size), **o),
    "gather": gather,
    "scatter": scatter,
    "all_reduce_coalesced": lambda a, b, size, **o: dist.all_reduce_coalesced([a, b], **o),
}
RANKS = {
    "functional all_reduce": lambda a, b, size: functional.all_reduce(a, "sum", list(range(size))),
    "functional all_gather": lambda a, b, size: functional.all_gather_tensor(a, 0, list(range(size))),
    "functional reduce_scatter": lambda a, b, size: functional.reduce_scatter_tensor(
        a, "sum", 0, list(range(size))
    ),
    "functional all_to_all": lambda a, b, size: functional.all_to_all_single(
        a, None, None, list(range(size))
    ),
    "functional broadcast": lambda a, b, size: functional.broadcast(a, 0, list(range(size))),
    "functional coalesced": lambda a, b, size: torch.cat(
        functional.all_reduce_coalesced([a, b], "sum", list(range(size)))
    ),
    "differentiable all_reduce": lambda a, b, size: differentiable.all_reduce(a),
    "coalescing": coalesced,
}
SEVERAL = {"exchange": exchange, "send and receive": send_and_receive}


def names(size: int) -> list[str]:
    """The collectives that `size` ranks can do; those that may be waited for stand there twice."""
    several = list(SEVERAL) if size > 1 else []
    return [*SYNC_OR_ASYNC, *(f"{name}, async" for name in SYNC_OR_ASYNC), *RANKS, *several]


def check(name: str, pager, size: int) -> None:
    """Do one collective on plain tensors and on paged ones that are clean and evicted; compare the bytes."""
    torch.manual_seed(dist.get_rank())
    values = [torch.randn(64 * size, 8) for _ in range(2)]
    paged = [pager.tensor(value) for value in values]
    pager.flush()
    results = [_do(name, tensors, pager, size) for tensors in (values, paged)]
    deadline = time.monotonic() + 60
    while pager.stats().held_bytes and time.monotonic() < deadline:
        time.sleep(0.001)  # a thread of the group lets go of work that was waited for
    for tensor in paged:
        tensor.evict()
    for one, other in zip([*values, results[0]], [*paged, results[1]], strict=True):
        if isinstance(one, torch.Tensor):
            assert bytes(one.numpy(force=True)) == bytes(other.numpy(force=True)), name


def _do(name, tensors, pager, size):
    for tensor in tensors:
        if hasattr(tensor, "evict"):
            tensor.evict()
    if not name.endswith(", async"):
        result = {**SYNC_OR_ASYNC, **RANKS, **SEVERAL}[name](*tensors, size)
        return result + 0 if isinstance(result, torch.Tensor) else None  # waits for it
    work = SYNC_OR_ASYNC[name.removesuffix(", async")](*tensors, size, async_op=True)
    other = pager.tensor(torch.ones(3 << 16))
    other[: 3 << 15].add_(1)  # while it works: what is not pinned leaves the device
    other[3 << 15 :].add_(1)
    work.wait()
    return None


def main(rank: int, size: int, store: str) -> None:
    import pagert

    warnings.simplefilter("ignore", (UserWarning, FutureWarning))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=size, init_method=f"file://{store}")
    with pagert.Pager(
        device="cpu", device_bytes=1 << 20, page_bytes=4096, host_bytes=16 << 20
    ) as pager:
        for name in names(size):
            check(name, pager, size)
        dist.barrier()
    dist.destroy_process_group()
    print("all right", len(names(size)))


if __name__ == "__main__":
    sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
