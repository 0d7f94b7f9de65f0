# SPDX-License-Identifier: Apache-2.0
"""A module made in pages is, bit for bit, what its construction followed by page_ gives."""

from __future__ import annotations

import os
import threading

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from pagert.errors import ForeignTensor, PagertError, UnsupportedTensor
from pagert.tensor import PagedTensor, copying

os.environ.setdefault("HF_HUB_OFFLINE", "1")


class Net(nn.Module):
    def __init__(self, **kind):
        super().__init__()
        self.embedding = nn.Embedding(120, 32, padding_idx=3, **kind)
        self.layers = nn.ModuleList([nn.Linear(32, 32, **kind) for _ in range(3)])
        self.head = nn.Linear(32, 120, bias=False, **kind)
        self.head.weight = self.embedding.weight
        self.strided = nn.Parameter(torch.randn(60, 40).t())
        through_another_name = torch.empty(40, 40)
        self.orthogonal = nn.Parameter(through_another_name)
        nn.init.orthogonal_(through_another_name)
        slab = torch.randn(3000)
        self.left, self.right = nn.Parameter(slab[:2000]), nn.Parameter(slab[1000:])
        self.truncated = nn.Parameter(torch.empty(40, 40), requires_grad=False)
        nn.init.trunc_normal_(self.truncated)
        self.register_buffer("mask", torch.tril(torch.ones(50, 50)), persistent=False)
        self.counts = nn.Buffer(torch.arange(900))
        self.recurrent = nn.LSTM(16, 16, 2)
        self.attention = nn.TransformerEncoderLayer(32, 4, 64)
        self.norm = nn.BatchNorm2d(3)
        self.several = nn.ParameterList([torch.randn(40, 30) for _ in range(2)])
        for parameter in self.layers.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, 0, 0.02)


def tensors(module):
    return dict(
        [
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        ]
    )


def plain(tensor):
    if type(tensor) is not PagedTensor:
        return tensor.detach().clone()
    tensor.evict()
    return copying.load(PagedTensor, tensor.detach())


def assert_same(module, expected):
    found = tensors(module)
    assert found.keys() == tensors(expected).keys()
    for name, tensor in tensors(expected).items():
        one = found[name]
        assert one.dtype == tensor.dtype and one.stride() == tensor.stride(), name
        assert torch.equal(plain(one), plain(tensor)), name
        assert one.requires_grad == tensor.requires_grad
        assert isinstance(one, nn.Parameter) == isinstance(tensor, nn.Parameter)


def test_values_random_numbers_ties_and_layouts_are_those_of_page(make_pager):
    torch.manual_seed(0)
    expected, following = Net(), torch.rand(3)
    pager = make_pager(device_bytes=48 << 10)
    torch.manual_seed(0)
    with pager.creating(min_bytes=0):
        model = Net()
    assert torch.equal(torch.rand(3), following)
    assert all(type(tensor) is PagedTensor for tensor in tensors(model).values())
    assert model.head.weight is model.embedding.weight
    assert model.left._region is model.right._region
    assert model.state_dict().keys() == expected.state_dict().keys()
    assert_same(model, expected)


def test_every_size_below_the_default_stays_plain_and_is_counted(pager):
    with pager.creating():
        model = nn.Sequential(nn.Linear(40, 40), nn.Linear(4, 4))
    assert type(model[0].weight) is PagedTensor and type(model[0].bias) is nn.Parameter
    assert pager.plain_bytes == 4 * (40 + 16 + 4)
    with pytest.raises(ValueError, match="min_bytes=-1"):
        pager.creating(min_bytes=-1)


def test_what_is_larger_than_the_device_is_initialised_with_the_same_numbers(make_pager):
    pager = make_pager(device_bytes=32 << 10)
    torch.manual_seed(1)
    expected = nn.Embedding(1000, 20, padding_idx=2)
    torch.manual_seed(1)
    with pager.creating():
        model = nn.Embedding(1000, 20, padding_idx=2)
    assert type(model.weight) is PagedTensor
    assert_same(model, expected)


def test_no_more_than_one_parameter_is_outside_of_pages(pager):
    made, outside = [], []

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            weight = torch.empty(60, 60)
            made.append(StorageWeakRef(weight.untyped_storage()))
            outside.append(sum(not reference.expired() for reference in made))
            self.weight = nn.Parameter(weight)

    with pager.creating(min_bytes=0):
        nn.Sequential(*[Layer() for _ in range(5)])
    # The one before goes to pages when the next one is registered: its maker looked at it.
    assert max(outside) == 2 and all(reference.expired() for reference in made[:-1])


def test_parameters_become_paged_when_nobody_else_looks_at_their_bytes(pager):
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            data = torch.empty(50, 50)
            self.weight = nn.Parameter(data)
            assert type(self.weight) is nn.Parameter
            data.fill_(3)

    with pager.creating():
        first = Layer()
        second = Layer()
        assert type(first.weight) is PagedTensor  # `data` has gone
    assert torch.equal(plain(first.weight), torch.full((50, 50), 3.0))
    assert torch.equal(plain(second.weight), torch.full((50, 50), 3.0))


@pytest.mark.parametrize(
    "kind", [{"dtype": torch.bfloat16}, {"dtype": torch.float64, "device": "cpu"}]
)
def test_factory_arguments_are_kept(kind, pager):
    torch.manual_seed(0)
    expected = Net(**kind)
    torch.manual_seed(0)
    with pager.creating():
        model = Net(**kind)
    assert_same(model, expected)


def test_training_after_creating_is_bitwise_the_plain_run(make_pager):
    x, results = torch.randn(6, 48), []
    for paged in (False, True):
        torch.manual_seed(0)
        layers = (nn.Linear(48, 48) if number % 2 else nn.LayerNorm(48) for number in range(6))
        if paged:
            with make_pager(device_bytes=64 << 10).creating(min_bytes=0):
                model = nn.Sequential(*layers)
        else:
            model = nn.Sequential(*layers)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(3):
            model(x).square().sum().backward()
            assert all((type(p.grad) is PagedTensor) == paged for p in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
        results.append([plain(parameter) for parameter in model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*results))


def test_meta_tensors_are_left_alone(pager):
    with pager.creating(), torch.device("meta"):
        model = nn.Linear(60, 60)
    assert model.weight.is_meta


def test_after_the_context_or_an_exception_nothing_is_paged_any_more(pager):
    with pytest.raises(ZeroDivisionError):
        with pager.creating():
            inside = nn.Linear(60, 60)
            1 / 0  # noqa: B018
    assert type(inside.weight) is PagedTensor
    with pager.creating():
        pass
    assert type(nn.Linear(60, 60).weight) is nn.Parameter


def test_the_innermost_context_counts(make_pager):
    outer, inner = make_pager(), make_pager()
    with outer.creating():
        first = nn.Linear(60, 60)
        with inner.creating():
            second = nn.Linear(60, 60)
        third = nn.Linear(60, 60)
        with outer.creating(min_bytes=0):
            fourth = nn.Linear(6, 6)
    runtimes = [layer.weight._runtime for layer in (first, second, third, fourth)]
    assert runtimes == [outer, inner, outer, outer]


def test_a_tensor_of_another_pager_is_refused_by_name(make_pager):
    first, second = make_pager(), make_pager()
    with first.creating():
        layer = nn.Linear(60, 60)
    with pytest.raises(ForeignTensor, match=r"Linear\.weight .*another pager"):
        with second.creating():
            nn.Linear(60, 60).weight = layer.weight


def test_what_cannot_be_paged_is_refused_by_name(pager):
    module = nn.Module()
    with pytest.raises(UnsupportedTensor, match=r"Module\.table: .*sparse"):
        with pager.creating():
            module.register_buffer("table", torch.ones(50, 50).to_sparse())
    with pytest.raises(PagertError, match=r"Module\.weight .*graph or a view"):
        with pager.creating():
            weight = nn.Parameter(torch.ones(60, 60))
            view = weight.view(-1)
            module.weight = weight
    del view


def test_lazy_modules_become_paged_when_they_are_concrete(pager):
    with pager.creating():
        model = nn.LazyLinear(50)
        model(torch.ones(2, 60))
    assert type(model.weight) is PagedTensor and model.weight.shape == (50, 60)
    with pager.creating():
        later = nn.Sequential(nn.LazyLinear(50))
    later(torch.ones(2, 60))
    assert type(later[0].weight) is PagedTensor and later[0].weight.shape == (50, 60)


def test_other_threads_make_plain_modules(pager):
    made, go = [], threading.Event()

    def other():
        go.wait(30)
        made.append(nn.Linear(60, 60))

    thread = threading.Thread(target=other)
    thread.start()
    with pager.creating():
        go.set()
        thread.join()
        mine = nn.Linear(60, 60)
    assert type(made[0].weight) is nn.Parameter and type(mine.weight) is PagedTensor


CONFIGS = {
    "llama": {"tie_word_embeddings": True, "num_key_value_heads": 2},
    "gpt2": {},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 16},
    "bert": {},
    "t5": {"d_model": 48, "d_kv": 12, "d_ff": 64, "num_layers": 2, "num_heads": 4},
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_models_of_transformers_are_made_bit_for_bit(kind, make_pager):
    transformers = pytest.importorskip("transformers", reason="the extra 'demo' is not installed")
    config = transformers.AutoConfig.for_model(
        kind,
        **{
            "vocab_size": 200,
            "hidden_size": 48,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            **CONFIGS[kind],
        },
    )
    torch.manual_seed(0)
    expected = transformers.AutoModel.from_config(config)
    pager = make_pager()
    torch.manual_seed(0)
    with pager.creating():
        model = transformers.AutoModel.from_config(config)
    assert sum(type(tensor) is PagedTensor for tensor in tensors(model).values()) > 3
    assert_same(model, expected)
