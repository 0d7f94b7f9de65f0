# SPDX-License-Identifier: Apache-2.0
"""One fine-tuning job from its settings to its report."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch

from pagert.config import Config, parse_bytes
from pagert.errors import ConfigurationError
from pagert.finetune import memory
from pagert.finetune.comparison import compare_reports, comparison_lines, run_unpaged
from pagert.finetune.errors import SequenceTooLong, UnpagedRunFailed
from pagert.finetune.model import build_empty, fill, stored_tensors
from pagert.finetune.report import MovedBytes, Report, StepReport
from pagert.finetune.saving import check_target, save_model
from pagert.finetune.settings import Settings
from pagert.finetune.source import ModelSource, open_source
from pagert.finetune.text import Windows, tokenise
from pagert.finetune.training import evaluate, make_optimizer, repeatable, train
from pagert.finetune.view import View
from pagert.finetune.weights import digests

__all__ = ["run_job"]

EXIT_DIFFERENT = 1
EXIT_INTERRUPTED = 130


def run_job(settings: Settings) -> int:
    """Fine-tune, report, and compare where asked to. Blocks until done.

    Returns
    -------
    int
        0; 1 where a comparison did not find every bit equal; 130 after Ctrl-C, with the report so
        far.

    Raises
    ------
    PagertError, OSError
        For bad input, before anything is loaded wherever that can be known.
    """
    _check(settings)
    if not settings.unpaged:  # whose figures are those of PyTorch as it comes
        memory.keep_heap_small()
    report = Report(paged=not settings.unpaged, planned_steps=settings.steps)
    title = f"{'unpaged' if settings.unpaged else 'paged'} fine-tuning of {settings.model}"
    status = 0
    with repeatable(settings.seed), View(title, settings.steps, plain=settings.plain) as view:
        try:
            _train(settings, report, view)
            report.ended = "finished"
        except KeyboardInterrupt:
            report.ended, status = "interrupted", EXIT_INTERRUPTED
        except BaseException as error:
            report.ended = type(error).__name__
            if report.steps:
                _show(report, view, settings)
            raise
    _show(report, view, settings)
    if settings.compare and status == 0:
        status = _compare(settings, report, view)
    return status


def _check(settings: Settings) -> None:
    """Refuse what can be known to be wrong before anything is opened."""
    if parse_bytes(settings.text_limit, name="--text-limit") == 0:
        raise ConfigurationError("--text-limit is 0; give the size of the text to read, or more")
    if not settings.unpaged:
        Config.resolve(**_budgets(settings))
    if settings.unpaged and settings.compare:
        raise ConfigurationError("--compare runs the job unpaged as well; leave --unpaged out")
    if settings.json is not None and not settings.json.absolute().parent.is_dir():
        raise FileNotFoundError(f"--json {settings.json}: its folder does not exist; create it")
    if settings.out is not None:
        check_target(settings.out)


def _train(settings: Settings, report: Report, view: View) -> None:
    source = open_source(settings.model)
    report.model = str(source.path.name)
    windows, model = _prepare(settings, source, view)
    weights = [tensor for _, tensor in stored_tensors(model)]
    report.parameters = sum(tensor.numel() for tensor in weights)
    report.weights_bytes = sum(tensor.numel() * tensor.element_size() for tensor in weights)
    if settings.out is not None:
        check_target(settings.out, report.weights_bytes)
    # Whatever happens from here on, the report has the last figures while the pager still has them.
    with contextlib.ExitStack() as stack:
        pager = None
        if not settings.unpaged:
            pager = stack.enter_context(_open_pager(settings))
            view.watch(pager)
            stack.callback(view.watch, None)
            stack.callback(lambda: setattr(report, "stats", pager.stats()))
        stack.callback(lambda: setattr(report, "peak_rss_bytes", memory.peak_rss_bytes()))
        device = _device(settings)
        report.device = str(device)
        view.phase(
            f"loading {report.parameters:,} parameters into {'pages' if pager else 'memory'}"
        )
        fill(model, source, device, pager)
        if unused := source.unused():
            view.line(
                f"not used from {source.path.name}: {len(unused)} tensors, such as {unused[0]}"
            )
        source.close()
        if pager is not None:
            pager.page_(model)
        gc.collect()
        memory.return_free_memory()
        _run_steps(settings, report, view, model, windows, device, pager)
        report.weights = digests(model)
        if settings.out is not None:
            view.phase(f"writing {settings.out}")
            save_model(model, source.tokenizer(), settings.out)
            report.out = str(settings.out)
    del model
    gc.collect()
    memory.return_free_memory()


def _prepare(settings: Settings, source: ModelSource, view: View) -> tuple[Windows, Any]:
    """Read the text and make the empty model: everything that can fail for bad input."""
    config = source.config()
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and settings.seq > positions:
        raise SequenceTooLong(
            f"--seq {settings.seq}: the model has {positions} positions; give at most --seq "
            f"{positions}"
        )
    model = build_empty(config)
    view.phase("reading the text")
    limit_bytes = parse_bytes(settings.text_limit)
    tokens = tokenise(source.tokenizer(), settings.text, limit_bytes, config.vocab_size)
    windows = Windows(tokens, batch=settings.batch, seq=settings.seq, seed=settings.seed)
    view.line(
        f"text: {windows.train_tokens:,} tokens to train on, {windows.held_out_tokens:,} held out"
    )
    return windows, model


def _open_pager(settings: Settings) -> Any:
    import pagert

    return pagert.Pager(**_budgets(settings))


def _budgets(settings: Settings) -> dict[str, Any]:
    names = ("device_bytes", "host_bytes", "flash_path", "flash_bytes", "page_bytes", "policy")
    return {"device": settings.device} | {name: getattr(settings, name) for name in names}


def _device(settings: Settings) -> torch.device:
    if not settings.unpaged:
        return Config.resolve(**_budgets(settings)).device
    if settings.device == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=settings.device).device
    except (RuntimeError, AssertionError) as error:
        raise ConfigurationError(
            f"--device {settings.device}: not usable here: {error}; use cpu"
        ) from error


def _run_steps(
    settings: Settings,
    report: Report,
    view: View,
    model: Any,
    windows: Windows,
    device: torch.device,
    pager: Any | None,
) -> None:
    def held_out_loss() -> float:
        return evaluate(model, windows.held_out(settings.eval_batches), device)

    view.phase("held-out loss before")
    report.held_out_before = held_out_loss()
    view.line(f"held-out loss before: {report.held_out_before:.4f}")
    optimizer = make_optimizer(settings.optimizer, model, settings.lr)
    if pager is not None and not settings.step_after_backward:
        pager.step_in_backward(optimizer, accumulate=settings.accumulate)
    view.phase("training")
    saving: Any = contextlib.nullcontext
    if pager is not None and not settings.plain_activations:
        saving = functools.partial(pager.activations, module=model)
    with _counting(report, pager):
        for loss, seconds, tokens in train(
            model,
            optimizer,
            windows.next_batch,
            device=device,
            steps=settings.steps,
            accumulate=settings.accumulate,
            saving=saving,
        ):
            step = StepReport(loss=loss, seconds=seconds, tokens=tokens)
            report.steps.append(step)
            view.step(step)
    view.phase("held-out loss after")
    report.held_out_after = held_out_loss()


@contextlib.contextmanager
def _counting(report: Report, pager: Any | None) -> Iterator[None]:
    """Note what is moved inside."""
    if pager is None:
        yield
        return
    before = MovedBytes.of(pager.stats())
    try:
        yield
    finally:
        report.moved_in_steps = MovedBytes.of(pager.stats()).since(before)


def _show(report: Report, view: View, settings: Settings) -> None:
    for line in report.lines():
        view.line(line)
    _write_json(report, settings)


def _write_json(report: Report, settings: Settings) -> None:
    if settings.json is not None:
        report.write(settings.json, asdict(settings))


def _compare(settings: Settings, report: Report, view: View) -> int:
    view.line("the same steps unpaged")
    try:
        unpaged = run_unpaged(settings, report.device)
    except UnpagedRunFailed as error:
        view.line(str(error))
        view.line("bitwise equal: unknown")
        return EXIT_DIFFERENT
    except KeyboardInterrupt:
        view.line("the unpaged run was interrupted")
        return EXIT_INTERRUPTED
    report.comparison = compare_reports(json.loads(report.as_json({})), unpaged)
    _write_json(report, settings)
    for line in comparison_lines(report.comparison):
        view.line(line)
    return 0 if report.comparison["bitwise_equal"] else EXIT_DIFFERENT
