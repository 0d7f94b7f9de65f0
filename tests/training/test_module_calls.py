# SPDX-License-Identifier: Apache-2.0
"""What code does with modules and parameters, on paged modules beside plain twins: the same results."""

from __future__ import annotations

import copy
import io
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.nn.utils import prune, stateless

from pagert.errors import UnsupportedOperator
from pagert.tensor import PagedTensor

pytestmark = pytest.mark.parametrize("make_pager", ["host-flash"], indirect=True)

X = torch.linspace(-1, 1, 160).reshape(4, 40)


def net():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(40, 40), nn.BatchNorm1d(40), nn.Linear(40, 40))
    module[0].weight.note = [1]
    return module


def tensors(module):
    return dict([*module.named_parameters(), *module.named_buffers()])


def backward(module):
    module(X).square().sum().backward()
    return [p.grad for p in module.parameters()]


def plain_state(module):
    return {name: tensor * 0 + 1 for name, tensor in net().state_dict().items()}


def do(*calls):
    """Run calls on a module one after another; the last one's result counts."""
    return lambda module: [call(module) for call in calls][-1]


def swapping(call):
    def run(module):
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            return call(module)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)

    return run


def hooks(module):
    seen = []
    weight = module[0].weight
    weight.register_hook(lambda g: seen.append(g.sum()) or g * 2)
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.sum()))
    module[0].register_full_backward_hook(lambda *a: seen.append("backward"))
    return [backward(module), seen]


def steps_in_hooks(module):
    def step(p):
        p.data.add_(p.grad, alpha=-0.1)
        p.grad = None

    for p in module.parameters():
        p.register_post_accumulate_grad_hook(step)
    backward(module)
    backward(module)
    return tensors(module)


def buffers(module):
    module.one = nn.Buffer(module[0].weight.detach())
    module.register_buffer("two", module[0].bias.detach())
    module.register_buffer("three", module[0].bias.detach(), persistent=False)
    module.double()
    return [tensors(module), list(module.state_dict())]


def containers(module):
    many = nn.ParameterList([module[0].weight, module[2].weight])
    many.append(module[0].bias)
    many.append(module[0].weight.detach().clone())
    named = nn.ParameterDict({"a": module[0].weight, "b": module[0].weight.detach() * 1})
    return [tensors(many), tensors(named), many[0] is module[0].weight]


def swapped(module):
    other = nn.Parameter(torch.ones(40, 40), requires_grad=False)
    torch.utils.swap_tensors(module[0].weight, other)
    return [module[0].weight, other]


def kept_reference(module):
    reference = weakref.ref(module[0].weight)
    module.double()
    return reference() is module[0].weight


def file(module):
    written = io.BytesIO()
    torch.save(module.state_dict(), written)
    written.seek(0)
    return torch.load(written, weights_only=True)


def pruned(module):
    prune.l1_unstructured(module[0], "weight", 0.3)
    masks = [tensors(module), backward(module)]
    masks = [copy.deepcopy(describe(mask)) for mask in masks]
    prune.remove(module[0], "weight")
    prune.random_structured(module[2], "weight", amount=3, dim=0)
    prune.global_unstructured(
        [(module[0], "weight"), (module[2], "weight")], pruning_method=prune.L1Unstructured, amount=0.2
    )
    return [masks, backward(module), tensors(module)]


def gradient_dtype(module):
    module[0].weight.grad_dtype = torch.float64
    return [copy.deepcopy(module)[0].weight.grad_dtype, copy.copy(module[0].weight).grad_dtype]


CALLS = {
    **{
        name: do(lambda m, name=name: getattr(m, name)(), tensors)
        for name in ("half", "double", "bfloat16", "cpu", "float")
    },
    "type": do(lambda m: m.type(torch.float64), tensors),
    "requires_grad_": do(lambda m: m.requires_grad_(False), tensors),
    "swapping double": swapping(do(lambda m: m.double(), tensors)),
    "swapping load": swapping(do(lambda m: m.load_state_dict(plain_state(m)), tensors)),
    "load": do(lambda m: m.load_state_dict(plain_state(m)), tensors),
    "load assign": do(lambda m: m.load_state_dict(plain_state(m), assign=True), tensors),
    "load of another dtype": do(lambda m: m.load_state_dict(net().half().state_dict()), tensors),
    "load of wrong shapes": lambda m: m.load_state_dict({"0.weight": torch.ones(2)}, strict=False),
    "load of nothing": lambda m: m.load_state_dict({}),
    "copy of module": lambda m: tensors(copy.copy(m)),
    "copy of parameter": lambda m: [copy.copy(m[0].weight), copy.copy(m[0].weight).note],
    "gradient dtype of copies": gradient_dtype,
    "pickle": lambda m: [tensors(pickle.loads(pickle.dumps(m))), m[0].weight.note],
    "file": file,
    "prune": pruned,
    "functional_call": lambda m: torch.func.functional_call(
        m, {name: p.detach() * 2 for name, p in m.named_parameters()}, (X,)
    ),
    "gradients of functional_call": lambda m: torch.func.grad(
        lambda ps: torch.func.functional_call(m, ps, (X,)).sum()
    )(dict(m.named_parameters())),
    "stateless": lambda m: stateless._functional_call(
        m, {name: p.detach() * 2 for name, p in m.named_parameters()}, (X,)
    ),
    "fusion": do(
        lambda m: m.eval(),
        lambda m: tensors(nn.utils.fusion.fuse_linear_bn_eval(m[0], m[1])),
    ),
    "apply": do(
        lambda m: m.apply(lambda k: nn.init.ones_(k.weight) if isinstance(k, nn.Linear) else None),
        tensors,
    ),
    "_apply": do(lambda m: m._apply(lambda t: t + 1), tensors),
    "Parameter of parameter": lambda m: [
        nn.Parameter(m[0].weight),
        nn.Parameter(m[0].weight.data, requires_grad=False),
    ],
    "buffers": buffers,
    "containers": containers,
    "register_parameter": do(
        lambda m: m.register_parameter("w", nn.Parameter(m[0].weight.detach().clone())), tensors
    ),
    "tensor as parameter": lambda m: setattr(m[0], "weight", m[0].weight.detach()),
    "hooks": hooks,
    "steps in hooks": steps_in_hooks,
    "weak reference": kept_reference,
    "swap_tensors": swapped,
    "init": lambda m: [
        nn.init.kaiming_uniform_(m[0].weight),
        nn.init.orthogonal_(m[2].weight),
        nn.init.trunc_normal_(m[0].bias),
    ],
    "reset_parameters": do(lambda m: [part.reset_parameters() for part in m], tensors),
    "zero_grad": do(backward, lambda m: m.zero_grad(set_to_none=False), lambda m: m[0].weight.grad),
    "clip_grad_value_": do(
        backward,
        lambda m: nn.utils.clip_grad_value_(m.parameters(), 0.1),
        lambda m: [p.grad for p in m.parameters()],
    ),
    "data of a gradient": do(
        backward,
        lambda m: setattr(m[0].weight.grad, "data", torch.ones(40, 40)),
        lambda m: m[0].weight.grad,
    ),
    "given gradient": do(
        lambda m: setattr(m[0].weight, "grad", torch.ones(40, 40)), backward
    ),
    "averaged model": do(lambda m: tensors(torch.optim.swa_utils.AveragedModel(m))),
    "detach_": do(lambda m: m[0].weight.detach_(), tensors),
    "in place on a leaf": lambda m: m[0].weight.add_(1),
    "kept variables": lambda m: m.state_dict(keep_vars=True)["0.weight"] is m[0].weight,
    "kinds": lambda m: [
        isinstance(t, kind)
        for t in tensors(m).values()
        for kind in (nn.Parameter, nn.Buffer, torch.Tensor, torch.FloatTensor)
    ],
}


def describe(value):
    """What can be compared: shape, dtype, strides, flags and the bytes of each tensor."""
    if isinstance(value, torch.Tensor):
        kept = value.detach()
        kept = torch.empty(kept.shape, dtype=kept.dtype).copy_(kept)
        facts = (tuple(value.shape), value.dtype, value.stride(), value.requires_grad)
        number_bytes = kept.reshape(-1).view(torch.uint8).numpy().tobytes()
        return (*facts, isinstance(value, nn.Parameter), number_bytes)
    if isinstance(value, dict):
        return {name: describe(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [describe(item) for item in value]
    return value


@pytest.mark.parametrize("name", CALLS)
def test_call_on_a_paged_module_does_what_it_does_on_a_plain_one(pager, name):
    results = []
    for module in (net(), pager.page_(net(), min_bytes=0)):
        torch.manual_seed(1)
        try:
            results.append(describe(CALLS[name](module)))
        except (RuntimeError, TypeError, NotImplementedError) as error:
            results.append((type(error), str(error).split("(")[0][:60].replace("PagedTensor", "torch.FloatTensor")))
    assert results[0] == results[1]


def test_parameters_that_go_through_conversions_stay_paged(pager):
    module = pager.page_(net(), min_bytes=0)
    parameters = list(module.parameters())
    for convert in (module.double, module.half, module.float, lambda: module.to_empty(device="cpu")):
        convert()
        assert all(type(t) is PagedTensor for t in tensors(module).values())
    assert all(one is other for one, other in zip(parameters, module.parameters(), strict=True))


def test_what_cannot_be_done_with_pages_is_refused_by_name(pager):
    module = pager.page_(net(), min_bytes=0)
    for call, name in (
        (module.share_memory, "share_memory_"),
        (module[0].weight.untyped_storage().data_ptr, "data_ptr"),
        (module[0].weight.data_ptr, "data_ptr"),
    ):
        with pytest.raises(UnsupportedOperator, match=name):
            call()
