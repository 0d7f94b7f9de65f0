# SPDX-License-Identifier: Apache-2.0
"""Build a model empty and fill it tensor by tensor: it is never whole outside the pages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from pagert.finetune.errors import BadModel, UnsupportedModel
from pagert.finetune.extra import load
from pagert.finetune.source import ModelSource, as_trained

__all__ = ["build_empty", "fill", "stored_tensors"]

# Smaller tensors stay plain until `page_` decides about them: a page each would be mostly empty.
_PAGED_BYTES_MIN = 64 * 1024


def build_empty(config: Any) -> Any:
    """Make the model of a configuration without weights: parameters on the meta device, float32.

    Raises
    ------
    UnsupportedModel
        Where transformers has no causal language model for it.
    """
    transformers = load("transformers")
    for attention in ("sdpa", "eager"):
        try:
            with torch.device("meta"):
                return transformers.AutoModelForCausalLM.from_config(
                    config, dtype=torch.float32, attn_implementation=attention
                )
        except ValueError as error:
            refusal = error
    raise UnsupportedModel(f"model type {config.model_type!r}: {refusal}")


def stored_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what a model's file holds: parameters and persistent buffers, tied ones once."""
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def fill(model: nn.Module, source: ModelSource, device: torch.device, pager: Any | None) -> None:
    """Give every tensor of `model` its bytes from `source`, in pages of `pager` where there is one.

    Raises
    ------
    BadModel
        Where a tensor is missing or has another shape than the configuration says.
    UnsupportedModel
        Where a part of the model cannot be made without its file.
    """
    names = _names_of_tensors(model)
    expected = {all_names[0]: tensor for all_names, tensor in names}
    aliases = {alias: all_names for all_names, _ in names for alias in all_names}
    # A tied tensor may be stored under either of its names; the first one found is taken.
    missing = set(expected)
    for name, tensor in source.tensors(list(aliases), getattr(model, "base_model_prefix", "")):
        all_names = aliases[name]
        if all_names[0] not in missing:
            continue
        empty = expected[all_names[0]]
        if tensor.shape != empty.shape:
            raise BadModel(
                f"{source.path}: {name} has shape {tuple(tensor.shape)}, the configuration asks "
                f"for {tuple(empty.shape)}; "
                "model and configuration do not belong together"
            )
        _place(model, all_names, empty, as_trained(tensor), device, pager)
        missing.discard(all_names[0])
    if missing:
        first = ", ".join(sorted(missing)[:3])
        raise BadModel(
            f"{source.path}: {len(missing)} of {len(expected)} tensors are not in the file under "
            "the names that "
            f"{type(model).__name__} has for them: {first}{', ...' if len(missing) > 3 else ''}; "
            "save the model with save_pretrained of a current transformers"
        )
    _compute_buffers(model, device)


def _names_of_tensors(model: nn.Module) -> list[tuple[list[str], torch.Tensor]]:
    """List the stored tensors, each with all the names that it is tied to."""
    by_tensor: dict[int, tuple[list[str], torch.Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        by_tensor.setdefault(id(tensor), ([], tensor))[0].append(name)
    return list(by_tensor.values())


def _place(
    model: nn.Module,
    names: list[str],
    empty: torch.Tensor,
    tensor: torch.Tensor,
    device: torch.device,
    pager: Any | None,
) -> None:
    if pager is not None and tensor.numel() * tensor.element_size() >= _PAGED_BYTES_MIN:
        placed = pager.tensor(tensor)
    else:
        placed = tensor.to(device)
    if isinstance(empty, nn.Parameter):
        placed = nn.Parameter(placed, requires_grad=empty.requires_grad)
    for name in names:
        owner, _, attribute = name.rpartition(".")
        module = model.get_submodule(owner)
        if attribute in module._parameters:
            module._parameters[attribute] = placed
        else:
            module._buffers[attribute] = placed


def _compute_buffers(model: Any, device: torch.device) -> None:
    """Compute what no file holds, such as rotary frequencies, as the model's own class does."""
    for _, tensor in stored_tensors(model):
        # transformers' mark of a tensor that is to be left alone
        setattr(tensor, "_is_hf_initialized", True)  # noqa: B010 (tensors declare no such name)
    for name, module in model.named_modules():
        loose = [
            key for key, value in module._buffers.items() if value is not None and value.is_meta
        ]
        for key in loose:
            module._buffers[key] = _filled_with_sentinel(module._buffers[key])
        if loose:
            with torch.no_grad():
                model._init_weights(module)
        for key in loose:
            value = module._buffers[key]
            if (
                torch.equal(value.nan_to_num(), _filled_with_sentinel(value).nan_to_num())
                and value.numel()
            ):
                raise UnsupportedModel(
                    f"{type(module).__name__} {name}: transformers does not say how its buffer "
                    f"{key} is computed"
                )
            module._buffers[key] = value.to(device)
        for key, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                raise UnsupportedModel(
                    f"{type(module).__name__} {name}: its tensor {key} is neither a parameter "
                    "nor a buffer, so it stays empty"
                )


def _filled_with_sentinel(like: torch.Tensor) -> torch.Tensor:
    sentinel: Any = float("nan")
    if not like.is_floating_point():
        sentinel = False if like.dtype == torch.bool else torch.iinfo(like.dtype).min
    return torch.full(like.shape, sentinel, dtype=like.dtype, device="cpu")
