# SPDX-License-Identifier: Apache-2.0
"""The command `pagert`: one subcommand for each module that `_SUBCOMMANDS` names.

A subcommand's module has `SUMMARY`, `add_arguments(parser)` and `run(options) -> int`, and imports
what it works with inside `run`, so that `pagert --help` and a misspelt option answer at once.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import signal
import sys
import threading
from collections.abc import Iterator, Sequence

__all__ = ["main"]

_SUBCOMMANDS = {
    "finetune": "pagert.cli.finetune",
    "simulate": "pagert.cli.simulate",
}

EXIT_BAD_INPUT = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand and return the exit status.

    Parameters
    ----------
    arguments
        The words after the program's name; `None`: those of this process.

    Returns
    -------
    int
        0 on success; 2 for bad input, with one line on standard error; 130 after Ctrl-C.
    """
    parser = argparse.ArgumentParser(
        prog="pagert", description="Work on tensors that do not fit the device's memory."
    )
    subparsers = parser.add_subparsers(dest="subcommand", required=True, metavar="SUBCOMMAND")
    for name, module_name in _SUBCOMMANDS.items():
        module = importlib.import_module(module_name)
        subparser = subparsers.add_parser(name, help=module.SUMMARY, description=module.SUMMARY)
        module.add_arguments(subparser)
        subparser.set_defaults(run=module.run)
    options = parser.parse_args(arguments)

    from pagert.errors import PagertError

    try:
        with _terminable():
            return int(options.run(options))
    except (PagertError, OSError) as error:
        print(
            f"pagert {options.subcommand}: {type(error).__name__}: {_one_line(error)}",
            file=sys.stderr,
        )
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        print(f"pagert {options.subcommand}: interrupted", file=sys.stderr)
        return 130


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Turn SIGTERM into an exception, so that what is half written is taken away on the way."""

    def leave(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
