# SPDX-License-Identifier: Apache-2.0
# What a pump counted, as Python has it. No module: all is inline.

from pagert._core.core cimport PAGERT_LINK_COUNT, PAGERT_TIER_COUNT
from pagert._core.pump cimport pagert_pump_state


cdef inline list usage_of(const pagert_pump_state *state):
    """(capacity, used, peak) frames of each tier."""
    return [(state.usage[i].capacity_frames, state.usage[i].used_frames, state.usage[i].peak_frames)
            for i in range(PAGERT_TIER_COUNT)]


cdef inline dict as_dict(const pagert_pump_state *state):
    return {
        "counters": {
            "hits": state.counters.hits,
            "faults": state.counters.faults,
            "evictions": state.counters.evictions,
            "prefetches": state.counters.prefetches,
            "transferred": [state.counters.transferred[i] for i in range(PAGERT_LINK_COUNT)],
            "transfers": [state.counters.transfers[i] for i in range(PAGERT_LINK_COUNT)],
            "failed_transfers": state.counters.failed_transfers,
        },
        "usage": usage_of(state),
        "held_frames": state.held_frames,
        "in_flight": state.in_flight,
        "reserved_pages": state.reserved_pages,
        "stall_ns": state.stall_ns,
    }
