# SPDX-License-Identifier: Apache-2.0
"""torch.distributed.checkpoint: paged state is written from its pages, and loading goes into pages."""

from __future__ import annotations

import pathlib

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from pagers import open_pager
from stepping import same
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from pagert import PagedTensor
from pagert.errors import UnsupportedOperator

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


@pytest.fixture(params=["single", "gloo"], autouse=True)
def group(request, tmp_path):
    """One process alone, and a group of one rank."""
    if request.param == "single":
        yield
        return
    if not dist.is_gloo_available():
        pytest.skip("torch was built without gloo")
    dist.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{tmp_path}/store")
    yield
    dist.destroy_process_group()


@pytest.fixture
def pager(tmp_path):
    # The state of a job takes about 1.6 MiB.
    with open_pager("host-flash", 512 << 10, 4096, tmp_path) as pager:
        yield pager


class Job:
    def __init__(self, pager=None, steps=2, seed=0, **options):
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(128, 256),
            torch.nn.Tanh(),
            torch.nn.BatchNorm1d(256),
            torch.nn.Linear(256, 256),
        )
        if pager is not None:
            pager.page_(self.model, min_bytes=1024)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, **options)
        self.train(steps)

    def train(self, steps):
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(torch.randn(8, 128)).square().sum().backward()
            self.optimizer.step()

    def tensors(self):
        state = self.optimizer.state_dict()["state"]
        return [
            *self.model.state_dict().values(),
            *(value for one in state.values() for value in one.values()),
        ]

    def dicts(self):
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state):
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


def check(plain: Job, paged: Job) -> None:
    """Both have the same bytes, take the same steps from there, and the paged one is in pages still."""
    for _ in range(2):
        ones, others = plain.tensors(), paged.tensors()
        assert len(ones) == len(others)
        assert all(same(one, other) for one, other in zip(ones, others))
        assert all(type(t) is PagedTensor for t in others if t.nbytes >= 1024)
        for job in (plain, paged):
            torch.manual_seed(7)
            job.train(1)


@pytest.mark.parametrize("options", [{}, {"fused": True, "amsgrad": True}])
@pytest.mark.parametrize("source", ["plain", "paged"])
def test_saved_state_comes_back_into_pages_bit_for_bit(pager, tmp_path, source, options):
    plain = Job(**options)
    saved = plain if source == "plain" else Job(pager, **options)
    dcp.save(saved.dicts(), checkpoint_id=tmp_path / "saved")
    del saved
    loaded = Job(pager, steps=1, seed=1, **options)
    state = loaded.dicts()
    dcp.load(state, checkpoint_id=tmp_path / "saved")
    loaded.model.load_state_dict(state["model"])
    loaded.optimizer.load_state_dict(state["optimizer"])
    check(plain, loaded)


@pytest.mark.parametrize("steps", [0, 1])
def test_a_stateful_job_is_saved_and_resumed_in_pages(pager, tmp_path, steps):
    dcp.save({"job": Job(pager)}, checkpoint_id=tmp_path / "saved")
    resumed = Job(pager, steps=steps, seed=1)
    dcp.load({"job": resumed}, checkpoint_id=tmp_path / "saved")
    check(Job(), resumed)


def test_what_was_saved_from_pages_is_plain(pager, tmp_path):
    job, plain = Job(pager), Job()
    dcp.save(job.dicts(), checkpoint_id=tmp_path / "saved")
    resumed = Job(steps=1, seed=1)
    state = resumed.dicts()
    dcp.load(state, checkpoint_id=tmp_path / "saved")
    resumed.model.load_state_dict(state["model"])
    resumed.optimizer.load_state_dict(state["optimizer"])
    assert all(same(one, other) for one, other in zip(plain.tensors(), resumed.tensors()))
    dcp_to_torch_save(tmp_path / "saved", tmp_path / "file")
    loaded = torch.load(tmp_path / "file")["model"]
    for name, value in plain.model.state_dict().items():
        assert type(loaded[name]) is torch.Tensor and same(value, loaded[name])


def test_views_empty_ones_and_numbers_are_saved_as_what_they_are(pager, tmp_path):
    base = pager.tensor(torch.randn(256, 64))
    state = {"part": base[3:7], "turned": base.t(), "empty": pager.zeros(0), "one": pager.tensor(2.0)}
    dcp.save(state, checkpoint_id=tmp_path / "saved")
    size = sum(path.stat().st_size for path in pathlib.Path(tmp_path / "saved").iterdir())
    assert size < base.nbytes * 5 // 4  # not the whole region for a part of it
    targets = {name: pager.full(value.shape, 9.0) for name, value in state.items()}
    dcp.load(targets, checkpoint_id=tmp_path / "saved")
    for target in targets.values():
        target.evict()
    assert all(same(state[name], target) for name, target in targets.items())


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [("model.extra", (3,), "Missing key"), ("model.0.weight", (3, 3), "Size mismatch")],
)
def test_a_checkpoint_that_does_not_fit_changes_nothing(pager, tmp_path, name, shape, message):
    job = Job(pager)
    dcp.save(job.dicts(), checkpoint_id=tmp_path / "saved")
    other = Job(pager, steps=1, seed=1)
    before = [value.clone() for value in other.tensors()]
    state = {"model": {**other.model.state_dict(), name.removeprefix("model."): pager.zeros(*shape)}}
    with pytest.raises(CheckpointException, match=message):
        dcp.load(state, checkpoint_id=tmp_path / "saved")
    assert all(same(one, value) for one, value in zip(before, other.tensors()))


def test_an_asynchronous_save_is_refused_by_name(pager, tmp_path, group):
    if not dist.is_initialized():
        with pytest.raises((UnsupportedOperator, AssertionError)):
            dcp.async_save(Job(pager).dicts(), checkpoint_id=tmp_path / "saved")
        return
    with pytest.raises(UnsupportedOperator, match=r"of a paged tensor.*resident"):
        dcp.async_save(Job(pager).dicts(), checkpoint_id=tmp_path / "saved")
    dist.barrier()


def test_the_storage_of_a_paged_tensor_says_whose_it_is_and_gives_no_memory(pager):
    base, other = pager.zeros(64, 64), pager.zeros(64, 64)
    storage = base[3:].untyped_storage()
    assert storage == base.untyped_storage() != other.untyped_storage()
    assert len({storage, base.t().untyped_storage(), other.untyped_storage()}) == 2
    assert storage.nbytes() == storage.size() == len(storage) == base.nbytes
    assert storage.device == base.device and not hasattr(storage, "no_such_thing")
    for ask in (
        lambda: storage.data_ptr(),
        lambda: storage[0],
        lambda: storage.tolist(),
        lambda: storage.clone(),
        lambda: storage.resize_(5),
        lambda: storage.share_memory_(),
    ):
        with pytest.raises(UnsupportedOperator, match=r"storage of a paged tensor.*resident"):
            ask()
    with pytest.raises(TypeError):
        torch.empty(0).set_(storage)
