# SPDX-License-Identifier: Apache-2.0
"""Collectives on paged tensors: bitwise those on plain ones, or refused by name in a group that works on."""

from __future__ import annotations

import subprocess
import sys
import time
import warnings

import collectives
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from pagers import open_pager
from stepping import plain, same

from pagert.errors import PagertError, UnsupportedOperator

pytestmark = [
    pytest.mark.skipif(not dist.is_gloo_available(), reason="torch was built without gloo"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{store}")
    yield
    dist.destroy_process_group()


@pytest.fixture
def pager():
    with open_pager("host", 1 << 20, 4096) as pager:
        yield pager


@pytest.mark.parametrize("name", collectives.names(1))
def test_a_collective_on_paged_tensors_is_that_on_plain_ones(group, pager, name):
    collectives.check(name, pager, 1)
    dist.barrier()


def test_collectives_of_two_ranks_are_those_of_plain_tensors(tmp_path):
    command = [sys.executable, collectives.__file__]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), "2", str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            text, _ = rank.communicate(timeout=240)
            assert rank.returncode == 0 and "all right" in text, text
    finally:
        for rank in ranks:
            rank.kill()


def test_pages_stay_pinned_until_the_work_is_gone(group, pager):
    paged = pager.tensor(torch.randn(64, 64))
    work = dist.all_reduce(paged, async_op=True)
    work.wait()
    assert pager.stats().held_bytes > 0
    with pytest.raises(PagertError, match="holds these pages"):
        paged.evict()
    del work
    assert pager.stats().held_bytes == 0
    paged.evict()
    assert paged.tier == "host"


REFUSED = {
    "wait": lambda p: functional.wait_tensor(p),
    "in place": lambda p: torch.ops._c10d_functional.all_reduce_(p, "sum", "0"),
    "symmetric": lambda p: torch.ops.symm_mem.one_shot_all_reduce(p, "sum", "0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_collectives_whose_end_nobody_knows_are_refused_by_name(group, pager, name):
    values = torch.randn(64, 64)
    paged = pager.tensor(values)
    paged.evict()
    with pytest.raises(UnsupportedOperator, match=r"(c10d_functional|symm_mem).*resident\(\)"):
        REFUSED[name](paged)
    dist.barrier()
    assert same(values, paged) and pager.stats().held_bytes == 0


def let_go(pager, seconds=10.0):
    """Wait until a thread of the process group has let go of the work, which it does a moment after its end."""
    limit = time.monotonic() + seconds
    while pager.stats().held_bytes and time.monotonic() < limit:
        time.sleep(0.001)


@pytest.mark.filterwarnings("ignore:a view, an array")  # of that moment
@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_remedy_of_the_refusal_works(group, pager, asynchronous):
    values = torch.randn(64, 64)
    paged = pager.zeros(64, 64)
    paged.evict()
    with paged.resident() as dense:
        work = dist.all_gather_into_tensor(dense, values, async_op=asynchronous)
        if asynchronous:
            work.wait()
        del work
    let_go(pager)
    paged.evict()
    assert same(values, paged)


def test_scatter_of_paged_tensors_is_refused_and_the_group_works_on(group, pager):
    paged = pager.tensor(torch.randn(64, 64))
    with pytest.raises(RuntimeError, match="data pointer"):
        dist.scatter(torch.ones(64, 64), [paged], 0)
    dist.barrier()


def model(pager=None):
    torch.manual_seed(0)
    made = torch.nn.Sequential(
        torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 8)
    )
    return made if pager is None else pager.page_(made, min_bytes=0)


@pytest.mark.parametrize("views", [False, True])
def test_data_parallel_training_of_a_paged_model_is_that_of_a_plain_one(group, pager, views):
    modules = [model(), model(pager)]
    for module in modules:
        parallel = torch.nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=views)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        torch.manual_seed(1)
        for _ in range(3):
            parallel(torch.randn(16, 64)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        del parallel, optimizer
    for one, other in zip(modules[0].state_dict().values(), modules[1].state_dict().values()):
        assert same(plain(one), other)


def test_fully_sharded_training_of_a_model_that_was_paged_is_that_of_a_plain_one(group, pager):
    from torch.distributed.fsdp import fully_shard

    modules = [model(), model(pager)]
    losses = []
    for module in modules:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fully_shard(module)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        torch.manual_seed(1)
        for _ in range(3):
            loss = module(torch.randn(16, 64)).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(plain(loss))
    assert all(same(one, other) for one, other in zip(losses[:3], losses[3:]))
