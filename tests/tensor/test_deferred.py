# SPDX-License-Identifier: Apache-2.0
"""Updates that wait: whoever looks finds what a plain optimizer would have left, and nothing is lost or kept."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import pickle
import signal
import threading
import time
import weakref

import pytest
import torch
from pagers import MIB, REAL
from stepping import SIZES, Pair, adamw, open_pager, plain, same, waits
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import pagert

pytestmark = pytest.mark.skipif(not REAL, reason="the fake runtime defers nothing")


@pytest.fixture
def pager():
    with open_pager() as pager:
        yield pager


@pytest.fixture
def pair(pager):
    """After a step of which every update waits."""
    pair = Pair(pager, adamw)
    pair.step()
    assert all(waits(parameter) for parameter in pair.paged)
    return pair


def adam(parameters, **options):
    return torch.optim.Adam(parameters, **{"lr": 0.01, "fused": True, **options})


def sgd(parameters, **options):
    return torch.optim.SGD(parameters, **{"lr": 0.05, "fused": True, **options})


# What is deferred, and what is not.

DEFERRED = {
    "adamw": adamw,
    "adamw, amsgrad": lambda p: adamw(p, amsgrad=True),
    "adamw, maximize, no decay": lambda p: adamw(p, maximize=True, weight_decay=0),
    "adamw, tensor lr": lambda p: adamw(p, lr=torch.tensor(0.02)),
    "adam": adam,
    "adam, amsgrad, decay": lambda p: adam(p, amsgrad=True, weight_decay=0.1),
    "adam, maximize": lambda p: adam(p, maximize=True, betas=(0.8, 0.9)),
    "sgd": lambda p: sgd(p),
    "sgd, momentum, decay": lambda p: sgd(p, momentum=0.9, weight_decay=0.1),
    "sgd, nesterov, maximize": lambda p: sgd(p, momentum=0.9, nesterov=True, maximize=True),
    "sgd, dampening": lambda p: sgd(p, momentum=0.9, dampening=0.1),
}
# PyTorch's kernel of SGD with momentum has undefined results in half precision: at its first step it leaves the
# momentum as it was made, not written, and reads it at the second.
UNDEFINED = {
    (name, dtype)
    for name in DEFERRED
    for dtype in (torch.bfloat16, torch.float16)
    if name.startswith("sgd,")
}
CASES = [
    case
    for case in itertools.product(DEFERRED, (torch.float32, torch.float64, torch.bfloat16))
    if case not in UNDEFINED
]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_deferred_updates_are_bitwise_those_of_a_plain_optimizer(pager, name, dtype):
    pair = Pair(pager, DEFERRED[name], dtype=dtype)
    for _ in range(4):
        pair.step()
        assert len(pager.deferred) > 0
        assert any(waits(parameter) for parameter in pair.paged)
    pair.check()
    pair.step()
    pair.check()


@pytest.mark.parametrize("frames", [16, 32, 80, 512])
def test_deferred_updates_are_right_under_every_budget_and_looked_at_in_any_order(frames):
    with open_pager(device_bytes=frames * 4096) as pager:
        pair = Pair(pager, adamw)
        for step in range(4):
            pair.step()
            assert len(pager.deferred) > 0
            for index in (step, -step):
                assert same(pair.plain[index], pair.paged[index])
        pair.check()


@pytest.mark.parametrize(
    "make",
    [
        lambda p: adamw(p, fused=False, foreach=True),
        lambda p: adamw(p, fused=False, foreach=False),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
        lambda p: torch.optim.RMSprop(p, lr=0.01),
        lambda p: torch.optim.Adagrad(
            p, lr=0.01, fused=True
        ),  # says that it writes the step counts
    ],
)
def test_other_optimizers_are_not_deferred(pager, make):
    pair = Pair(pager, make)
    pair.step()
    assert len(pager.deferred) == 0
    pair.check()


def test_lists_within_a_quarter_of_the_device_are_not_deferred():
    with open_pager(device_bytes=8 * MIB) as pager:
        pair = Pair(pager, adamw)
        pair.step()
        assert len(pager.deferred) == 0
        pair.check()


def test_nothing_is_deferred_where_the_setting_says_so():
    with open_pager(defer_updates=False) as pager:
        assert pager.config.defer_updates is False
        pair = Pair(pager, adamw)
        pair.step()
        assert len(pager.deferred) == 0
        pair.check()


@pytest.mark.parametrize("value", [None, 0, 1, "yes", torch.tensor(True)])
def test_setting_that_is_no_bool_is_refused(value):
    with pytest.raises(pagert.ConfigurationError, match="defer_updates") as caught:
        open_pager(defer_updates=value)
    assert isinstance(caught.value, TypeError)


# Whoever looks finds the update. Each look is at a tensor of which it waits.

KINDS = ["parameter", "gradient", "exp_avg", "exp_avg_sq"]


def resident(tensor, mode):
    with tensor.resident(mode) as dense:
        return dense.clone()


def save(tensor):
    stream = io.BytesIO()
    torch.save(tensor, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


def by_another_thread(tensor):
    found = []
    thread = threading.Thread(target=lambda: found.append(plain(tensor)))
    thread.start()
    thread.join()
    return found[0]


def in_inference_mode(tensor):
    with torch.inference_mode():
        return plain(tensor)


class Pass(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Refuse(TorchDispatchMode):
    """No operator of an optimizer gets here: what waits is none of a mode's business."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert "_fused" not in str(func)
        return func(*args, **(kwargs or {}))


class RefuseFunction(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        assert "_fused" not in str(func)
        return func(*args, **(kwargs or {}))


def in_mode(mode, look):
    def looks(tensor):
        with mode():
            return look(tensor)

    return looks


def into_other_pager(tensor):
    with open_pager() as other:
        return plain(other.tensor(tensor))


def loop(tensor):
    return torch.stack([plain(part) for part in tensor])


def written_as_out(tensor):
    target = torch.empty(tensor.shape)
    return torch.add(tensor, 1, out=target)


LOOKS = {
    "clone": torch.clone,
    "detach": torch.detach,
    "data": lambda t: t.data,
    "copy.copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "tolist": lambda t: torch.tensor(t.tolist()),
    "numpy": lambda t: torch.from_numpy(t.numpy(force=True)) if hasattr(t, "_region") else t,
    "pickle": lambda t: pickle.loads(pickle.dumps(t)),
    "torch.save": save,
    "resident, read": lambda t: resident(t, "read") if hasattr(t, "_region") else t,
    "resident, update": lambda t: resident(t, "update") if hasattr(t, "_region") else t,
    "sum": torch.sum,
    "add": lambda t: t + 1,
    "to": lambda t: t.to(torch.float64),
    "copy_ into a plain one": lambda t: torch.empty(t.shape).copy_(t),
    "out": written_as_out,
    "item": lambda t: torch.tensor(t.flatten()[7].item()),
    "slice": lambda t: t.flatten()[5000:5003].clone(),
    "transpose": lambda t: t.T.contiguous(),
    "view": lambda t: t.view(torch.int32).clone(),
    "chunk": lambda t: t.chunk(2)[1].clone(),
    "iterate": loop,
    "cat": lambda t: torch.cat([t, t]),
    "as_strided_copy": lambda t: torch.as_strided_copy(t, (7,), (3,), 11),
    "foreach": lambda t: torch._foreach_mul([t, t], 2.0)[1],
    "norm of lists": lambda t: torch._foreach_norm([t])[0],
    "matmul": lambda t: t @ t.T,
    "another thread": by_another_thread,
    "inference mode": in_inference_mode,
    "dispatch mode": in_mode(Pass, torch.clone),
    "dispatch mode, tolist": in_mode(Refuse, lambda t: torch.tensor(t.tolist())),
    "dispatch mode, sum": in_mode(Refuse, torch.sum),
    "function mode, tolist": in_mode(RefuseFunction, lambda t: torch.tensor(t.tolist())),
    "function mode, sum": in_mode(RefuseFunction, torch.sum),
    "default device": in_mode(lambda: torch.device("meta"), lambda t: t.sum()),
    "vmap": lambda t: torch.func.vmap(lambda x: (t * x).sum(0))(torch.arange(3.0)),
    "grad": lambda t: torch.func.grad(lambda x: (t * x).sum())(torch.tensor(2.0)),
    "autocast": lambda t: (torch.autocast("cpu")(torch.matmul))(t, t.T),
    "other pager": into_other_pager,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LOOKS)
def test_who_looks_finds_the_update(pair, name, kind):
    one, other = pair.tensors(0)[kind]
    one, other = one.detach(), other.detach()
    assert waits(other)
    assert same(LOOKS[name](one), LOOKS[name](other))
    pair.check()


@pytest.mark.parametrize("kind", KINDS)
def test_views_from_before_the_step_find_the_update(pager, kind):
    pair = Pair(pager, adamw)
    pair.step()
    pair.check()
    both = pair.tensors(2)[kind]
    if kind != "gradient":  # the next step's are others
        views = [(t.detach().T, t.detach()[3:9], t.detach().view(torch.int32)) for t in both]
        pair.step()
    else:
        pair.give_gradients()
        both = pair.tensors(2)[kind]
        views = [(t.detach().T, t.detach()[3:9], t.detach().view(torch.int32)) for t in both]
        for optimizer in pair.optimizers:
            optimizer.step()
    assert waits(views[1][0])
    for one, other in zip(*views, strict=True):
        assert same(one, other)
    pair.check()


def overwrite_part(tensor):
    tensor.flatten()[5:5000] = 3.0


def fill_randomly(tensor):
    torch.manual_seed(3)
    tensor.normal_()


def copy_another(tensor):
    tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape))


def write_as_out(tensor):
    torch.mul(torch.ones(tensor.shape), 3, out=tensor)


def rebind(tensor):
    tensor.data = torch.ones(tensor.shape)


WRITES = {
    "add_": lambda t: t.add_(1),
    "mul_": lambda t: t.mul_(3),
    "zero_": torch.zero_,
    "fill_": lambda t: t.fill_(2),
    "copy_": copy_another,
    "copy_ from itself": lambda t: t[:80].copy_(t[80:]),
    "part": overwrite_part,
    "random": fill_randomly,
    "out": write_as_out,
    "foreach_zero_": lambda t: torch._foreach_zero_([t]),
    "foreach_copy_": lambda t: torch._foreach_copy_([t], [torch.ones(t.shape)]),
    "data": rebind,
    "resize_": lambda t: t.resize_(7),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", WRITES)
def test_what_is_written_after_the_step_comes_after_the_update(pair, name, kind):
    for one in pair.tensors(0)[kind]:
        with torch.no_grad():
            WRITES[name](one.detach() if name == "resize_" else one)
    pair.check()
    pair.step()
    pair.check()


def test_state_dicts_hold_the_update(pair):
    dicts = [optimizer.state_dict()["state"] for optimizer in pair.optimizers]
    for index in range(len(SIZES)):
        for name, value in dicts[0][index].items():
            assert same(value, dicts[1][index][name])
    pair.step()
    saved = save(pair.optimizers[1].state_dict())["state"]
    for index in range(len(SIZES)):
        for name, value in pair.optimizers[0].state_dict()["state"][index].items():
            assert type(saved[index][name]) is torch.Tensor and same(value, saved[index][name])


# Ranges.

EDGES = [1, 15, 16, 17, 1023, 1024, 1025, 4097, 65_535, 300_001]


RANGED = ["adamw, amsgrad", "sgd", "sgd, momentum, decay"]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.mark.parametrize(("threads", "page_bytes"), [(1, 4096), (2, 65_536)])
@pytest.mark.parametrize(
    ("name", "dtype"), [c for c in itertools.product(RANGED, DTYPES) if c not in UNDEFINED]
)
def test_kernels_on_ranges_are_bitwise_those_on_whole_tensors(name, dtype, threads, page_bytes):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        # Ranges of a page; the largest tensor takes more than the device.
        with open_pager(device_bytes=MIB // 2, page_bytes=page_bytes) as pager:
            pair = Pair(pager, DEFERRED[name], [(size,) for size in EDGES], dtype)
            for _ in range(2):
                pair.step()
                assert all(waits(parameter) for parameter in pair.paged)
                pair.check()
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("offset", [0, 1, 3, 1024, 1500])
def test_views_of_one_region_that_start_anywhere_are_cut_right(offset):
    with open_pager(device_bytes=64 * 4096) as pager:
        torch.manual_seed(0)
        value = torch.randn(50_000)
        results = []
        for base in (value.clone(), pager.tensor(value)):
            parts = [base[offset : offset + 17_003], base[offset + 17_003 : 45_000]]
            parts = [part.detach().requires_grad_() for part in parts]
            optimizer = adamw(parts)
            for step in range(3):
                torch.manual_seed(step)
                for part in parts:
                    gradient = torch.randn(part.shape)
                    part.grad = (
                        gradient if base.__class__ is torch.Tensor else pager.tensor(gradient)
                    )
                optimizer.step()
            results.append(base)
        assert waits(results[1])
        assert same(*results)


def test_indices_that_overlap_run_in_order(pager):
    torch.manual_seed(0)
    value = torch.randn(200, 200)
    results = []
    for base in (value.clone(), pager.tensor(value)):
        # The first lies otherwise than its gradient and cannot wait; it shares its bytes with the second.
        parts = [base.T.detach().requires_grad_(), base.detach().requires_grad_()]
        optimizer = adamw(parts, lr=0.5)
        for step in range(3):
            torch.manual_seed(step)
            for part in parts:
                gradient = torch.randn(part.shape)
                part.grad = gradient if base.__class__ is torch.Tensor else pager.tensor(gradient)
            optimizer.step()
        results.append(base)
    assert same(*results)


# Lifetimes.


def reserved(pager) -> int:
    pager.tensor([1.0]).sum()
    return pager.stats().reserved_bytes


def test_dropped_training_with_waiting_updates_frees_its_regions(pager):
    gc.collect()
    gc.disable()  # nothing of it may be left to the garbage collector
    try:
        before = reserved(pager)
        pair = Pair(pager, adamw)
        pair.step()
        assert any(waits(parameter) for parameter in pair.paged)
        assert reserved(pager) > before
        updates = [weakref.ref(update) for update in pager.deferred.values()]
        # A stock optimizer and its hooks are cycles; what it holds is not.
        for optimizer in pair.optimizers:
            optimizer.state.clear()
            optimizer.param_groups.clear()
        del pair, optimizer
        assert all(update() is None for update in updates)
        assert len(pager.deferred) == 0
        assert reserved(pager) == before
    finally:
        gc.enable()


def test_gradients_are_freed_by_their_update(pair):
    pager = pair.pager
    with_gradients = reserved(pager)
    gradient_bytes = 0
    for parameter in pair.paged:
        size = parameter.numel() * parameter.itemsize
        gradient_bytes += -(-size // pager.page_bytes) * pager.page_bytes
    for optimizer in pair.optimizers:
        optimizer.zero_grad()
    assert reserved(pager) == with_gradients  # the updates have them
    for parameter in pair.paged:
        parameter.sum()
    assert reserved(pager) == with_gradients - gradient_bytes
    pair.check()


def test_state_is_right_without_its_parameter(pair):
    states = [list(optimizer.state.values()) for optimizer in pair.optimizers]
    for optimizer in pair.optimizers:
        optimizer.state.clear()
        optimizer.param_groups.clear()
    pair.plain.clear()
    pair.paged.clear()
    assert waits(states[1][0]["exp_avg"])
    for one, other in zip(*states, strict=True):
        for name, value in one.items():
            assert same(value, other[name])


def test_parameters_are_right_without_their_optimizer(pair):
    for optimizer in pair.optimizers:
        optimizer.state.clear()
    pair.optimizers.clear()
    for one, other in zip(pair.plain, pair.paged, strict=True):
        assert waits(other)
        one.grad = other.grad = None
        assert same(one, other)


def test_close_with_waiting_updates_ends_and_who_looks_is_told(pair):
    pager, parameter = pair.pager, pair.paged[0]
    pager.close()
    with pytest.raises(pagert.PagerClosed):
        parameter.sum()
    with pytest.raises(pagert.PagerClosed):
        parameter.sum()


def test_copy_of_an_optimizer_has_the_update(pair):
    copies = [copy.deepcopy(optimizer) for optimizer in pair.optimizers]
    for one, other in zip(*(list(c.state.values()) for c in copies), strict=True):
        for name, value in one.items():
            assert same(value, other[name])
    for one, other in zip(*(c.param_groups[0]["params"] for c in copies), strict=True):
        assert same(one, other)
    pair.check()


def test_graph_from_before_the_step_finds_what_it_finds_for_plain_parameters(pair):
    pair.check()
    losses = [parameters[0].square().sum() for parameters in (pair.plain, pair.paged)]
    pair.step()
    assert waits(pair.paged[0])
    for (
        loss
    ) in losses:  # PyTorch does not count a fused step as a change: what was saved has changed
        loss.backward()
    pair.check()


def test_trace_of_updates_that_wait_can_be_replayed(pager):
    pair = Pair(pager, adamw)
    pair.step()
    with pager.trace() as trace:
        pair.step()
        assert waits(pair.paged[0])
        for parameter in pair.paged:
            parameter.sum()
        pair.step()
    assert pagert.simulate(trace, capacity_pages=128).faults > 0
    pair.check()


def test_flush_runs_what_waits(pair):
    pair.pager.flush()
    assert not any(waits(parameter) for parameter in pair.paged)
    pair.check()


# Errors.


def test_windows_that_leave_no_room_are_said_and_nothing_is_lost():
    with open_pager(device_bytes=64 * 4096) as pager:
        pair = Pair(pager, adamw)
        pair.step()
        window = pager.tensor(torch.ones(63 * 1024))
        with window.resident():
            for _ in range(2):
                with pytest.raises(pagert.OutOfFrames):
                    pair.paged[0][:1].sum()
            assert waits(pair.paged[0])
        pair.check()


def test_room_for_ranges_is_enough_to_look_at_a_part():
    with open_pager(device_bytes=64 * 4096) as pager:
        pair = Pair(pager, adamw, [(30 * 1024,), (30 * 1024,)])
        pair.step()
        window = pager.tensor(torch.ones(50 * 1024))
        with window.resident():  # 14 frames are left, and the parameter takes 30
            assert same(pair.plain[0][:5], pair.paged[0][:5])
        pair.check()


def test_interrupted_updates_go_on_where_they_were():
    """Ctrl-C again and again, most of all within kernels: no element is updated twice."""

    def interrupt(*_):
        raise KeyboardInterrupt

    interrupts = 0
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with open_pager(device_bytes=64 * 4096, defer_updates=True) as pager:
            pair = Pair(pager, adamw, [(400_000,), (300_001,)])
            for _ in range(3):
                pair.step()
                for parameter in pair.paged:
                    while waits(parameter):
                        try:
                            signal.setitimer(signal.ITIMER_REAL, 0.002)
                            parameter._region.settle()
                            signal.setitimer(signal.ITIMER_REAL, 0)
                        except KeyboardInterrupt:
                            interrupts += 1
            pair.check()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupts > 0


# Threads.


def test_threads_that_look_at_one_update_run_it_once(pager):
    pair = Pair(pager, adamw, [(120_000,), (60_000,)])
    for _ in range(8):
        pair.step()
        looked_at = list(itertools.chain(*(pair.tensors(index).values() for index in (0, 1))))
        paged = [other for _, other in looked_at if hasattr(other, "_region")]
        barrier = threading.Barrier(len(paged))
        found = {}

        def look(tensor, barrier=barrier, found=found):
            barrier.wait()
            found[id(tensor)] = plain(tensor)

        threads = [threading.Thread(target=look, args=(tensor,)) for tensor in paged]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for one, other in looked_at:
            assert same(one, found.get(id(other), other))
    pair.check()


def test_thread_that_holds_frames_and_looks_does_not_hang_with_one_that_updates():
    with open_pager(device_bytes=64 * 4096, deadline_seconds=20.0) as pager:
        pair = Pair(pager, adamw)
        pair.step()
        window = pager.tensor(torch.ones(63 * 1024))
        parameter = pair.paged[0]
        update = parameter._region.deferred
        found = []

        def look():
            try:
                found.append(plain(parameter))
            except pagert.OutOfFrames as error:
                found.append(error)

        thread = threading.Thread(target=look)
        with window.resident():
            thread.start()
            while update.waits:  # until it runs there, and finds no frames
                time.sleep(0.001)
            with pytest.raises(pagert.OutOfFrames):
                parameter.sum()
        thread.join()
        assert isinstance(found[0], (torch.Tensor, pagert.OutOfFrames))
        pair.check()


def test_flush_waits_for_updates_that_another_thread_runs(pager):
    pair = Pair(pager, adamw, [(200_000,), (100_000,)])
    for _ in range(5):
        pair.step()
        threads = [threading.Thread(target=parameter.sum) for parameter in pair.paged]
        for thread in threads:
            thread.start()
        pager.flush()
        assert not any(update._arguments for update in list(pager.deferred.values()))
        for thread in threads:
            thread.join()
    pair.check()
