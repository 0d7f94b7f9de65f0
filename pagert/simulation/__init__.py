# SPDX-License-Identifier: Apache-2.0
"""Policies on traces, without bytes: the core's own, and the offline optimum."""

from __future__ import annotations

from pagert.simulation.counts import Counts
from pagert.simulation.simulate import Simulation, available_policies, simulate

__all__ = ["Counts", "Simulation", "available_policies", "simulate"]
