import torch, copy, io, weakref
import pytest
from pagert.tensor import PagedTensor

def test_smoke(pager):
    x = torch.randn(100, 100)
    p = pager.tensor(x)
    assert torch.equal(p, x)
    print(p, p.tier)
    y = p @ p
    assert type(y) is torch.Tensor
    assert torch.equal(y, x @ x)
    v = p.view(-1)
    assert type(v) is PagedTensor
    v.add_(1); x.view(-1).add_(1)
    assert torch.equal(p, x)
    assert p.add_(1) is p
    x.add_(1)
    assert torch.equal(p.t(), x.t())
    for a, b in zip(p.chunk(3), x.chunk(3)):
        assert torch.equal(a, b)
    z = torch.zeros_like(p); assert z.tier == "zero" and type(z) is PagedTensor
    c = p.clone(); assert torch.equal(c, x); assert type(c) is PagedTensor
    assert type(p.to(torch.bfloat16)) is PagedTensor
    assert torch.equal(p.to(torch.bfloat16), x.to(torch.bfloat16))
    torch.manual_seed(0); a = torch.rand_like(p); torch.manual_seed(0); b = torch.rand_like(x)
    assert torch.equal(a, b)
    d = copy.deepcopy(p); d.zero_(); assert torch.equal(p, x)
    with p.resident() as dense:
        assert type(dense) is torch.Tensor and torch.equal(dense, x)
        dense.add_(1)
    x.add_(1)
    assert torch.equal(p, x) and dense.numel() == 0
    f = io.BytesIO(); torch.save({"p": p}, f); f.seek(0)
    assert torch.equal(torch.load(f, weights_only=True)["p"], x)
    with pytest.raises(NotImplementedError): p.data_ptr()

def test_module(pager):
    torch.manual_seed(0)
    m = torch.nn.Linear(40, 40); ref = copy.deepcopy(m)
    o = torch.optim.AdamW(m.parameters())
    w = weakref.ref(m.weight); wid = m.weight
    pager.page_(m)
    assert m.weight is wid and w() is wid and type(m.weight) is PagedTensor and isinstance(m.weight, torch.nn.Parameter)
    print(m.weight, m.bias)
    ro = torch.optim.AdamW(ref.parameters())
    for _ in range(3):
        x = torch.randn(5, 40)
        m(x).square().sum().backward(); ref(x).square().sum().backward()
        assert type(m.weight.grad) is PagedTensor
        o.step(); ro.step()
        assert torch.equal(m.weight, ref.weight)
    m.to(torch.bfloat16)
    assert torch.equal(m.weight, ref.weight.to(torch.bfloat16))
    m.to(torch.float32)
    pager.unpage_(m)
    assert m.weight is wid and type(m.weight) is torch.nn.Parameter
