# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3, boundscheck=False, wraparound=False
"""A core driven through a whole trace in one call: every transfer is over as soon as it is handed out.

Nothing here decides, and no byte lies behind the pages.
"""

from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from pagert._core.core cimport (
    Core, PAGERT_LINK_COUNT, pagert_access, pagert_complete, pagert_counters, pagert_get_counters,
    pagert_look_ahead, pagert_next_transfer, pagert_core, pagert_pin, pagert_pin_poll, pagert_pin_start,
    pagert_region, pagert_release, pagert_reserve, pagert_transfer, pagert_unpin,
)
from pagert._core.core import CoreError

__all__ = ["ACCESS", "COLUMNS", "OPERATOR", "RELEASE", "RESERVE", "STEP", "replay"]

# Kinds of rows, as in pagert.trace.columns, which is above and may not be imported from here.
cdef enum:
    _RESERVE, _RELEASE, _OPERATOR, _ACCESS, _STEP
RESERVE, RELEASE, OPERATOR, ACCESS, STEP = _RESERVE, _RELEASE, _OPERATOR, _ACCESS, _STEP

cdef enum:
    _COLUMNS = 4 + PAGERT_LINK_COUNT
COLUMNS = <object>_COLUMNS  # of each snapshot: hits, faults, evictions, prefetches, pages moved on each link


cdef int carry_out(pagert_core *core) noexcept nogil:
    cdef pagert_transfer transfer
    while pagert_next_transfer(core, (1 << <int>PAGERT_LINK_COUNT) - 1, &transfer) == 1:
        pagert_complete(core, &transfer, 0)
    return 0


cdef void look_ahead(pagert_core *core, uint32_t backlog_max) noexcept nogil:
    while backlog_max and pagert_look_ahead(core, backlog_max):
        carry_out(core)


cdef int run_pin(pagert_core *core, pagert_pin *pin, uint32_t backlog_max) noexcept nogil:
    cdef int code = pagert_pin_start(core, pin)
    if code < 0:
        return code
    while code == 0:
        carry_out(core)
        code = pagert_pin_poll(core, pin)
    if code == 1:
        look_ahead(core, backlog_max)
    pagert_unpin(core, pin)
    carry_out(core)
    if code == 1:
        look_ahead(core, backlog_max)
    return code


cdef void note(pagert_core *core, uint64_t *snapshot) noexcept nogil:
    cdef pagert_counters counters
    cdef int link
    pagert_get_counters(core, &counters)
    snapshot[0] = counters.hits
    snapshot[1] = counters.faults
    snapshot[2] = counters.evictions
    snapshot[3] = counters.prefetches
    for link in range(PAGERT_LINK_COUNT):
        snapshot[4 + link] = counters.transferred[link]


def replay(Core core not None, uint64_t page_bytes, const uint8_t[::1] kinds, const uint8_t[::1] modes,
           const uint32_t[::1] regions, const uint32_t[::1] firsts, const uint32_t[::1] counts,
           uint32_t[:, ::1] handles, uint64_t[:, ::1] snapshots, uint32_t backlog_max=0):
    """Drive the core through rows of events.

    Parameters
    ----------
    core : Core
    page_bytes : int
        Its size of a page.
    kinds, modes, regions, firsts, counts : buffers of equal length
        The rows: see `pagert.trace.columns`. An operator's accesses follow it.
    handles : buffer of shape (regions, 2)
        First page and generation of each region that was reserved before; a generation of 0 where it is
        reserved on the way. Written to.
    snapshots : buffer of shape (steps + 1, COLUMNS)
        Filled with the counters at the end of each step and of the trace.
    backlog_max : int
        Let the policy fetch ahead while fewer pages than this wait; 0: never.

    Raises
    ------
    CoreError
        The core refused an event.
    """
    cdef pagert_core *driven = core._handle
    cdef Py_ssize_t row = 0, row_count = kinds.shape[0], step = 0
    cdef uint32_t most = 1, k, region
    cdef pagert_pin pin
    cdef pagert_region handle
    cdef int code = 0
    assert modes.shape[0] == regions.shape[0] == firsts.shape[0] == counts.shape[0] == row_count
    assert snapshots.shape[1] == _COLUMNS and handles.shape[1] == 2
    for row in range(row_count):
        if kinds[row] == _OPERATOR:
            most = max(most, counts[row])
            assert counts[row] < row_count - row
        else:
            assert kinds[row] == _STEP or regions[row] < handles.shape[0]
        step += kinds[row] == _STEP
    assert snapshots.shape[0] == step + 1
    cdef pagert_access *accesses = <pagert_access *>calloc(most, sizeof(pagert_access))
    if accesses == NULL:
        raise MemoryError
    memset(&pin, 0, sizeof(pin))
    row = step = 0
    with nogil:
        while row < row_count and code >= 0:
            region = regions[row]
            if kinds[row] == _OPERATOR:
                memset(&pin, 0, sizeof(pin))
                pin.accesses = accesses
                pin.access_count = counts[row]
                for k in range(pin.access_count):
                    row += 1
                    region = regions[row]
                    memset(&accesses[k], 0, sizeof(pagert_access))
                    accesses[k].region.first_page = handles[region, 0]
                    accesses[k].region.generation = handles[region, 1]
                    accesses[k].offset_bytes = firsts[row] * page_bytes
                    accesses[k].size_bytes = counts[row] * page_bytes
                    accesses[k].mode = modes[row]
                if pin.access_count:
                    code = run_pin(driven, &pin, backlog_max)
            elif kinds[row] == _RESERVE:
                if handles[region, 1] == 0:
                    code = pagert_reserve(driven, counts[row] * page_bytes, &handle)
                    if code >= 0:
                        handles[region, 0] = handle.first_page
                        handles[region, 1] = handle.generation
            elif kinds[row] == _RELEASE:
                handle.first_page = handles[region, 0]
                handle.generation = handles[region, 1]
                code = pagert_release(driven, handle)
            elif kinds[row] == _STEP:
                note(driven, &snapshots[step, 0])
                step += 1
            row += 1
        note(driven, &snapshots[step, 0])
    free(accesses)
    if code < 0:
        raise CoreError(code, None, pin.frames_needed, pin.frames_unheld)
