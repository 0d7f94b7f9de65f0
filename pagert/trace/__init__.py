# SPDX-License-Identifier: Apache-2.0
"""Traces: what operators need together, in order, with the regions that come and go."""

from __future__ import annotations

from pagert.trace.trace import Access, Event, Operator, Release, Reserve, Step, Trace

__all__ = ["Access", "Event", "Operator", "Release", "Reserve", "Step", "Trace"]
