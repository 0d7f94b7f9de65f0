# SPDX-License-Identifier: Apache-2.0
"""LoRA through peft on a paged base, and what fine-tuning scripts do: bitwise as with plain tensors."""

from __future__ import annotations

import copy

import pytest
import torch
from pagers import MIB, open_pager
from stepping import same

import pagert

transformers = pytest.importorskip("transformers", reason="the demo extra is not installed")

VOCABULARY = 512


def llama(tied=False, seed=0):
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        attn_implementation="eager",
    )
    return transformers.LlamaForCausalLM(config)


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, VOCABULARY, (2, 16), generator=generator)


def loss_of(model, step):
    tokens = batch(step)
    return model(input_ids=tokens, labels=tokens).loss


def check(one, other):
    """Both modules have the same names and bytes."""
    ones, others = one.state_dict(), other.state_dict()
    assert list(ones) == list(others)
    for name, value in ones.items():
        assert same(value, others[name]), name


@pytest.fixture
def pager(tmp_path):
    with open_pager("flash", MIB // 2, 4096, tmp_path) as pager:
        yield pager


def evict(model):
    for tensor in model.parameters():
        if isinstance(tensor, pagert.PagedTensor):
            tensor.evict()


# LoRA.


def adapted(pager=None, order="base first", **options):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = llama()
    if pager is not None and order == "base first":
        pager.page_(model, min_bytes=1024)
    torch.manual_seed(1)
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], **options}
    model = peft.get_peft_model(model, peft.LoraConfig(**settings))
    if pager is not None and order == "adapter first":
        pager.page_(model, min_bytes=1024)
    return model


def train(model, steps=3, pager=None):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    written = []
    for step in range(steps):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        if pager is not None:
            for tensor in model.parameters():
                if not tensor.requires_grad and isinstance(tensor, pagert.PagedTensor):
                    tensor.evict()
            written.append(pager.stats().flash_written_bytes)
    return written


@pytest.mark.parametrize("order", ["base first", "adapter first"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_dora": True},
        {"use_rslora": True, "lora_dropout": 0.1},
        {"target_modules": "all-linear", "bias": "all"},
        {"modules_to_save": ["lm_head"]},
        {"target_modules": ["embed_tokens", "q_proj"]},
    ],
    ids=str,
)
def test_lora_on_a_paged_base_is_lora_on_a_plain_one(pager, order, options):
    one, other = adapted(**options), adapted(pager, order, **options)
    for model in (one, other):
        torch.manual_seed(2)
        train(model)
    evict(other)
    check(one, other)
    for model in (one, other):
        model.merge_adapter()
    check(one, other)
    for model in (one, other):
        model.unmerge_adapter()
    check(one, other)
    one, other = one.merge_and_unload(), other.merge_and_unload()
    evict(other)
    check(one, other)


def test_a_frozen_base_is_written_once(pager):
    model = adapted(pager, "base first")
    written = train(model, 4, pager)
    frozen = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    assert frozen > MIB // 2, "the base must not fit the device"
    assert written[0] > 0 and len(set(written)) == 1, written


# Mixed precision, clipping, accumulation, averages.


def scaled(model, optimizer):
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=100)
    for step in range(4):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = loss_of(model, step)
        scaler.scale(loss).backward()
        if step == 2:
            next(model.parameters()).grad[0, 0] = float("inf")  # this step is skipped
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() == 32.0


def mixed(dtype):
    def run(model, optimizer):
        for step in range(3):
            with torch.autocast("cpu", dtype=dtype):
                loss = loss_of(model, step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return run


def clipped(**options):
    def run(model, optimizer):
        for step in range(3):
            loss_of(model, step).backward()
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, **options))
            optimizer.step()
            optimizer.zero_grad()

    return run


def clipped_by_value(model, optimizer):
    for step in range(3):
        loss_of(model, step).backward()
        torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def accumulated(model, optimizer):
    for step in range(6):
        (loss_of(model, step) / 3).backward()
        evict(model)
        for parameter in model.parameters():
            if isinstance(parameter.grad, pagert.PagedTensor):
                parameter.grad.evict()
        if step % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()


def averaged(model, optimizer):
    average = copy.deepcopy(model).requires_grad_(False)
    for step in range(3):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for mean, parameter in zip(average.parameters(), model.parameters()):
                mean.lerp_(parameter, 0.1)
            evict(average)
    model.load_state_dict(average.state_dict())


def scheduled(model, optimizer):
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=5)
    swa = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    for step in range(4):
        loss_of(model, step).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        swa.update_parameters(model)
    model.load_state_dict(swa.module.state_dict())


norms: list[torch.Tensor] = []
LOOPS = {
    "autocast to bfloat16": mixed(torch.bfloat16),
    "autocast to float16": mixed(torch.float16),
    "gradient scaler": scaled,
    "clipped by norm 2": clipped(error_if_nonfinite=True),
    "clipped by norm inf": clipped(norm_type=float("inf")),
    "clipped without foreach": clipped(foreach=False),
    "clipped by value": clipped_by_value,
    "accumulated": accumulated,
    "averaged by deepcopy": averaged,
    "scheduled and averaged": scheduled,
}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_loop_over_a_paged_model_is_that_over_a_plain_one(pager, name, tied):
    models = [llama(tied), pager.page_(llama(tied), min_bytes=1024)]
    for model in models:
        torch.manual_seed(3)
        LOOPS[name](model, torch.optim.AdamW(model.parameters(), lr=0.01))
    evict(models[1])
    check(*models)
    if norms:
        half = len(norms) // 2
        assert all(same(one, other) for one, other in zip(norms[:half], norms[half:]))
        norms.clear()
    assert (models[1].lm_head.weight is models[1].model.embed_tokens.weight) is tied


def test_a_gradient_that_is_not_finite_is_an_error_of_clipping(pager):
    model = pager.page_(llama(), min_bytes=1024)
    loss_of(model, 0).backward()
    model.lm_head.weight.grad[3, 3] = float("nan")
    before = model.lm_head.weight.grad.clone()
    with pytest.raises(RuntimeError, match="non-finite"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    assert same(before, model.lm_head.weight.grad)


# Models.


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("size", [VOCABULARY + 40, VOCABULARY - 100])
def test_an_embedding_that_is_resized_after_paging_trains_on(pager, tied, size):
    models = [llama(tied), pager.page_(llama(tied), min_bytes=1024)]
    for model in models:
        torch.manual_seed(4)
        model.resize_token_embeddings(size, mean_resizing=False)
        assert model.lm_head.weight.shape == (size, 64)
        assert (model.lm_head.weight is model.get_input_embeddings().weight) is tied
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        tokens = batch(0) % size
        for _ in range(2):
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    check(*models)


GENERATIONS = {
    "greedy": {"do_sample": False},
    "greedy without cache": {"do_sample": False, "use_cache": False},
    "sampling": {"do_sample": True, "top_k": 20, "temperature": 0.8},
    "nucleus": {"do_sample": True, "top_p": 0.7},
    "beams": {"num_beams": 3, "do_sample": False},
}


@pytest.mark.parametrize("name", GENERATIONS)
def test_text_generated_by_a_paged_model_is_that_of_a_plain_one(pager, name):
    texts = []
    for model in (llama(), pager.page_(llama(), min_bytes=1024)):
        evict(model)
        torch.manual_seed(5)
        texts.append(
            model.generate(batch(0), max_new_tokens=8, pad_token_id=0, **GENERATIONS[name])
        )
    assert texts[0].shape[1] > 16 and torch.equal(*texts)
