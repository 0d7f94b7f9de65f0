# SPDX-License-Identifier: Apache-2.0
"""Updates that wait: whoever looks finds what a plain optimizer would have left."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
import threading

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
