# SPDX-License-Identifier: Apache-2.0
"""`simulate`: one policy on one trace."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import index as whole
from typing import Any

from pagert.errors import ConfigurationError, ConfigurationTypeError
from pagert.simulation.counts import Counts
from pagert.trace import Trace

__all__ = ["POLICIES", "Simulation", "available_policies", "simulate"]

POLICIES = ("lru", "lookahead", "min")

_FRAMES_MAX = (1 << 32) - 2


@dataclass(frozen=True, kw_only=True)
class Simulation(Counts):
    """What a policy did on a trace. See `Counts` for the rest.

    Attributes
    ----------
    policy : str
        "lru", "lookahead" or "min".
    capacity_pages, host_pages : int
        Frames of the device and of the host tier.
    page_bytes : int
        Size of a page.
    steps : tuple of Counts
        The same counts for each optimizer step that the trace marks; the last one may be unfinished.
        Without marks: one step, the whole trace.
    finished_steps : int
        How many of `steps` the trace marks as finished.
    lower_bound_pages : int or None
        For "min": no policy fetches and writes fewer pages than this, in sum. It is the sum of
        `fetched_pages` and `written_pages` unless the search was cut short.
    """

    policy: str
    capacity_pages: int
    host_pages: int
    page_bytes: int
    steps: tuple[Counts, ...]
    finished_steps: int
    lower_bound_pages: int | None = None

    @property
    def steady_steps(self) -> tuple[Counts, ...]:
        """The steps that stand for all others.

        Finished ones, without the first four, in which optimizer state comes to be and lookahead learns and
        decides, and without the last, after which the optimum need keep nothing; as far as there are enough of
        them.
        """
        finished = self.steps[: self.finished_steps] or self.steps
        return finished[4:-1] or finished[2:-1] or finished[1:-1] or finished[-1:]


def simulate(
    trace: Trace | Iterable[Any],
    *,
    capacity_pages: int,
    policy: str = "lru",
    host_pages: int = 0,
    prefetch: bool = False,
    discard: bool = True,
) -> Simulation:
    """Run a policy over a trace without bytes, and count what it moves.

    Each operator waits until its pages are there: transfers take no time. Below the device lies a host
    tier of `host_pages`, if any, and a flash tier without a limit.

    Parameters
    ----------
    trace : Trace or iterable
        A trace, or what `Trace.from_accesses` takes: `(page, mode)` with mode "r" (read), "w" (update),
        "o" (overwrite) or "f" (released), or lists of such pairs that one operator needs together.
        Pages never written read as zeros, which costs no fetch.
    capacity_pages : int
        Frames of the device tier.
    policy : {"lru", "lookahead", "min"}
        "lru" and "lookahead" run the core. "min" is the offline optimum, which shares no code with it:
        it fetches and writes the fewest pages in sum. Among policies that only read it has the fewest
        faults too (Belady, "A study of replacement algorithms for a virtual-storage computer", 1966).
        Where pages are written, it needs SciPy (the extra 'bench').
    host_pages : int
        Frames of the host tier; 0: none. For "min", what the device moves is the optimum for the
        device alone, and what flash moves that for device and host together: each is a lower bound.
    prefetch : bool
        Whether a policy may fetch what it expects next, as under a pager. Without, `faults` are misses;
        with it, prefetched pages are misses that nobody waited for.
    discard : bool
        For "min": whether dirty pages that are overwritten or released next may be thrown away unwritten,
        which only hindsight allows. Without, it is the optimum for policies that must not lose bytes.

    Returns
    -------
    Simulation
        The counts of the whole trace and of each step.

    Raises
    ------
    ConfigurationError
        There is no such policy; or the capacity is smaller than what one operator needs.
    TraceError
        The trace makes no sense.

    Examples
    --------
    >>> import pagert
    >>> loop = [(page, "r") for _ in range(3) for page in range(4)]
    >>> pagert.simulate(loop, capacity_pages=3, policy="lru").faults
    12
    >>> pagert.simulate(loop, capacity_pages=3, policy="min").faults
    6
    """
    if policy not in POLICIES:
        allowed = ", ".join(repr(name) for name in POLICIES)
        raise ConfigurationError(f"policy is {policy!r}; allowed: {allowed}")
    capacity_pages = _count(capacity_pages, "capacity_pages", 1)
    host_pages = _count(host_pages, "host_pages", 0)
    if not isinstance(trace, Trace):
        trace = Trace.from_accesses(trace)
    operator, needed = trace.largest_operator
    if needed > capacity_pages:
        raise ConfigurationError(
            f"capacity_pages is {capacity_pages}, and operator {operator} of the trace needs {needed} "
            f"pages together; give at least {needed}"
        )
    bound: int | None = None
    steps: Sequence[Counts]
    if policy == "min":
        from pagert.simulation.optimum import find_optimum

        steps, bound = find_optimum(trace, capacity_pages, host_pages, discard)
    else:
        from pagert.simulation.replay import replay

        steps = replay(trace, capacity_pages, host_pages, policy, prefetch)
    total = sum(steps, Counts())
    return Simulation(
        policy=policy,
        capacity_pages=capacity_pages,
        host_pages=host_pages,
        page_bytes=trace.page_bytes,
        steps=tuple(steps),
        finished_steps=trace.step_count,
        lower_bound_pages=bound,
        **vars(total),
    )


def available_policies() -> tuple[str, ...]:
    """Name the policies that this build can simulate."""
    from pagert.simulation.replay import has_policy

    return tuple(name for name in POLICIES if name == "min" or has_policy(name))


def _count(value: int, name: str, least: int) -> int:
    try:
        count = whole(value)
    except TypeError:
        raise ConfigurationTypeError(
            f"{name} is {value!r}; give a whole number of pages, at least {least}"
        ) from None
    if not least <= count <= _FRAMES_MAX:
        raise ConfigurationError(
            f"{name} is {count}; give a number of pages from {least} to {_FRAMES_MAX}"
        )
    return count
