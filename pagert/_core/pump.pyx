# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3, boundscheck=False, wraparound=False
"""The pump, its regions and its pins. Decides nothing: it owns handles, waits, and turns codes into errors.

The GIL is held for the core's decisions, which take microseconds, and released for every wait. Finalizers
take no lock: they leave a node for the pump to find.
"""

cimport cython
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset
from cpython.exc cimport PyErr_CheckSignals
from cpython.ref cimport Py_XINCREF, PyObject

from pagert._core.arena cimport count_of_forks
from pagert._core.clock cimport now
from pagert._core.device cimport frames_of
from pagert._core.flash cimport FLASH_READ_BYTES, FLASH_WRITE_BYTES
from pagert._core.state cimport as_dict, usage_of
from pagert._core.users cimport any_is_ready, link, mine_is_among, others_hold, unlink
from pagert._core.core cimport (
    PAGERT_DEVICE, PAGERT_E_FRAMES, PAGERT_E_FULL, PAGERT_E_STATE, PAGERT_E_TRANSFER, PAGERT_FLASH, PAGERT_HOST,
    PAGERT_OVERWRITE, PAGERT_READ, PAGERT_UPDATE, pagert_policy_named,
)

import logging

from pagert._core.core import policy_names
from pagert._core.refusals import LINKS, cannot_open, out_of_frames, refused, tier_full, transfer_failed, waiting
from pagert.errors import ConfigurationError, ForeignTensor, PagerClosed, PagertError, TransferTimeout

__all__ = ["OVERWRITE", "READ", "UPDATE", "Pin", "Pump", "Region"]

READ = <object>PAGERT_READ
UPDATE = <object>PAGERT_UPDATE
OVERWRITE = <object>PAGERT_OVERWRITE

cdef uint64_t SLICE_NS = 50_000_000       # a wait looks for Ctrl-C this often
cdef uint64_t FENCE_NS = 100_000          # and for fences, which nobody signals, this often
CLOSE = "close()"
_log = logging.getLogger("pagert")


# None of these can be part of a cycle of references. The garbage collector must not clear their attributes
# before they are deallocated, which needs them.

@cython.no_gc
cdef class Region:
    """A range of virtual pages that backs one storage. Released when its last owner is collected, without a lock."""

    def share(self):
        """Another owner of the same pages, which does not wait for what is deferred."""
        cdef Region other = Region.__new__(Region)
        self.node.owner_count += 1
        other.node = self.node
        other.handle = self.handle
        other.pump = self.pump
        other.size_bytes = self.size_bytes
        other.serial = self.serial
        return other

    cpdef settle(self):
        """Run what was deferred. Blocks until it is done; on an error it stays deferred."""
        deferred = self.deferred
        if deferred is not None:
            deferred.run()
            if self.deferred is deferred:
                self.deferred = None

    def __dealloc__(self):
        if not self.node:
            return
        self.node.owner_count -= 1
        if self.node.owner_count:
            return
        if self.pump.handle:
            if self.pump.recorder is not None:
                try:
                    self.pump.recorder.append(self.serial)
                except MemoryError:
                    pass  # a trace in which this region never goes
            self.node.later.region = self.handle
            pagert_pump_release_later(self.pump.handle, &self.node.later)
        else:
            free(self.node)


@cython.no_gc
cdef class Pin:
    """Ranges that are held resident until `release()`; idempotent. Also a context manager."""

    cpdef release(self):
        """Let the ranges go. Does not block."""
        cdef held_pin *held = self.held
        if not held:
            return
        self.held = NULL
        self.pump.let_go(held)
        free(held)
        self.regions = None

    def __dealloc__(self):
        if not self.held:
            free(self.node)
            return
        self.pump.forget(self.held)
        if self.pump.handle:
            self.node.pin = &self.held.pin
            pagert_pump_release_later(self.pump.handle, self.node)
        else:
            free(self.held)
            free(self.node)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.release()


@cython.no_gc
cdef class Pump:
    """The core, its lock and its thread, over a device. See include/pagert/pump.h."""

    def __cinit__(self, Device device not None, *, uint64_t page_bytes, uint32_t page_count, FlashFile flash=None,
                  str policy="lru", uint32_t transfer_pages_max=16, double warn_seconds=30.0,
                  double deadline_seconds=600.0):
        cdef pagert_pump_options options
        cdef int code
        memset(&options, 0, sizeof(options))
        options.config.policy = pagert_policy_named(policy.encode())
        if options.config.policy == NULL:
            raise ConfigurationError(f"policy is {policy!r}; allowed: " + ", ".join(map(repr, policy_names())))
        self.page_bytes = page_bytes
        self.device_frames = frames_of(device.arena, page_bytes)
        self.warn_seconds = warn_seconds
        self.deadline_seconds = deadline_seconds
        self.process = count_of_forks()
        self.endings = []
        options.config.page_bytes = page_bytes
        options.config.page_count = page_count
        options.config.frame_count[<int>PAGERT_DEVICE] = self.device_frames
        options.config.frame_count[<int>PAGERT_HOST] = frames_of(device.host_arena, page_bytes)
        options.config.transfer_pages_max = transfer_pages_max
        options.device_arena = <void *><uintptr_t>device.arena.address
        if device.host_arena is not None:
            options.host_arena = <void *><uintptr_t>device.host_arena.address
        options.memory_depth = device.memory_depth
        device.take_engine(&options.memory)
        self.device = device
        self.arena = device.arena
        try:
            if flash is not None:
                options.config.frame_count[<int>PAGERT_FLASH] = <uint32_t>(
                    flash.facts.capacity_bytes // page_bytes)
                flash.take_engine(&options.flash)
                self.flash = flash
                options.flash_depth = flash.facts.depth
                options.flash_read_bytes = FLASH_READ_BYTES
                options.flash_write_bytes = FLASH_WRITE_BYTES
            code = pagert_pump_open(&options, &self.handle)
            if code < 0:
                raise cannot_open(-code, page_bytes, page_count, transfer_pages_max,
                                  [options.config.frame_count[i] for i in range(PAGERT_TIER_COUNT)])
        except BaseException:
            self.handle = NULL
            self.close_tiers()
            raise
        self.arena.set_held(<void **>&self.pins)

    def __dealloc__(self):
        # Nobody can reach it any more, and its regions are gone. In a forked child neither the thread nor
        # the requests exist, and the arenas are not its own.
        if self.process != count_of_forks():
            return
        if self.arena is not None:
            self.arena.set_held(NULL)
        if self.handle and not self.stop_quietly():
            # The kernel may still write to the arenas: they, the engines and the thread stay for good.
            for kept in (self.device, self.flash):
                Py_XINCREF(<PyObject *>kept)
            return
        if self.handle:
            with nogil:
                pagert_pump_close(self.handle)
            self.handle = NULL
        self.close_tiers()

    cdef bint stop_quietly(self):
        """Stop without an exception: within the deadline, or at once where it has passed before."""
        cdef double started = now()
        cdef double limit = 0 if self.hangs else self.deadline_seconds
        cdef int code
        try:
            while True:
                with nogil:
                    code = pagert_pump_stop(self.handle, SLICE_NS)
                if code == 0:
                    return True
                PyErr_CheckSignals()
                if now() - started >= limit:
                    break
        except BaseException:
            pass  # a finalizer has nobody to raise to
        if _log is not None:  # not at the interpreter's very end
            _log.error("a pager was dropped with requests in flight that did not come back within "
                       "deadline_seconds=%g; its memory is not given back", limit)
        return False

    cdef void forget(self, held_pin *held) noexcept:
        unlink(&self.pins, &held.user)
        self.releases += 1

    cdef void let_go(self, held_pin *held) noexcept:
        """End a pin that `hold` granted."""
        self.forget(held)
        if self.handle and self.process == count_of_forks():
            pagert_pump_unpin(self.handle, &held.pin)

    cdef void abandon(self, held_pin *held) noexcept:
        """Let go of a pin from a finalizer, which takes no lock: the pump does it, on a copy."""
        cdef size_t size_bytes = sizeof(held_pin) + (<size_t>held.pin.access_count - 1) * sizeof(pagert_access)
        cdef held_pin *left
        cdef pagert_release_node *node
        self.forget(held)
        if not self.handle or self.process != count_of_forks():
            return
        left = <held_pin *>malloc(size_bytes)
        node = <pagert_release_node *>calloc(1, sizeof(pagert_release_node))
        if not left or not node:
            free(left)  # the pages stay held: there is no memory even to say so
            free(node)
            return
        memcpy(left, held, size_bytes)
        left.pin.accesses = &left.accesses[0]
        node.pin = &left.pin
        pagert_pump_release_later(self.handle, node)

    cdef int end_after(self, operation, held_pin *held, fence) except -1:
        """End an operation's pin when a fence has passed. Its operands stay held, and it alive, until then."""
        self.endings.append((fence, operation))
        held.user.ready = False
        held.user.ending = True
        return 0

    cdef int wait_for_fences(self) except -1:
        """Let a moment pass, and then go of the pins whose fences have passed."""
        cdef uint64_t seen = pagert_pump_changes(self.handle)
        with nogil:
            pagert_pump_wait_change(self.handle, seen, FENCE_NS)
        return self.end_passed()

    cdef int end_passed(self) except -1:
        """Let go of the pins whose fences have passed."""
        for one in list(self.endings):
            if one[0].passed():
                self.endings = [other for other in self.endings if other is not one]
                one[1].end()
        return 0

    cdef int close_tiers(self) except -1:
        if self.device is not None:
            self.device.close()
        if self.flash is not None:
            self.flash.give_engine_back()
            self.flash.close()
        return 0

    @property
    def closed(self):
        return self.handle == NULL or self.closing

    @property
    def flash_info(self):
        """What was found out about the flash file; None without a flash tier."""
        return None if self.flash is None else {**self.flash.info, "folder": self.flash.folder}

    # Calls

    cdef int enter(self) except -1:
        """Refuse a closed pump, and one that belongs to the process before a fork."""
        if self.process != count_of_forks():
            raise PagerClosed("this pager belongs to the parent process; its memory and files are not "
                              "shared: make a pager of its own in the child")
        if not self.handle or self.closing:
            raise PagerClosed("the pager is closed and its tensors have no bytes any more; use them inside "
                              "its `with` block, or unpage_() what must outlive it")
        return 0

    cdef int own(self, Region region) except -1:
        """Refuse a region of another pump, or none."""
        if region is None or region.pump is not self:
            raise ForeignTensor("tensors of two pagers meet in one operator; copy one of them to the "
                                "other's pager first")
        return 0

    cdef int wait(self, str what, double *started, bint *warned) except -1:
        """Between two slices of a wait: Ctrl-C, close(), the warning and the deadline."""
        cdef pagert_pump_state state
        cdef double waited = now() - started[0]
        PyErr_CheckSignals()
        if self.closing and what is not CLOSE:
            self.enter()
        if waited < self.warn_seconds and waited < self.deadline_seconds:
            return 0
        if waited >= self.deadline_seconds or not warned[0]:
            pagert_pump_get_state(self.handle, &state)
            oldest = None
            if state.oldest_link != PAGERT_LINK_COUNT:
                oldest = LINKS[state.oldest_link], state.oldest_bytes, state.oldest_request_ns * 1e-9
            text = waiting(what, waited, state.in_flight, oldest, None if self.flash is None else self.flash.folder)
            if waited >= self.deadline_seconds:
                raise TransferTimeout(f"{text}; the limit is deadline_seconds={self.deadline_seconds:g}")
            warned[0] = True
            _log.warning("%s; it fails after deadline_seconds=%g", text, self.deadline_seconds)
        return 0

    cdef int refuse(self, int code, const pagert_pin *pin, const pagert_failure *failure) except -1:
        """Raise what a code means."""
        cdef pagert_pump_state state
        if code == PAGERT_E_FRAMES:
            raise out_of_frames(pin.frames_needed, pin.frames_unheld, self.device_frames, self.page_bytes)
        pagert_pump_get_state(self.handle, &state)
        usage = usage_of(&state)
        if code == PAGERT_E_FULL:
            raise tier_full(usage, self.page_bytes)
        if code == PAGERT_E_TRANSFER:
            folder = offset_bytes = None
            if self.flash is not None:
                folder = self.flash.folder
                if (state.last_failed.link == failure.link
                        and failure.page - state.last_failed.first_page < state.last_failed.page_count):
                    offset_bytes = state.last_failed_offset
            raise transfer_failed(-failure.result, LINKS[failure.link], offset_bytes, folder, usage,
                                  self.page_bytes)
        raise refused(code, state.reserved_pages)

    def reserve(self, uint64_t size_bytes):
        """Reserve a region of zero pages, which take no frame until they are written. Does not block."""
        cdef Region region = Region.__new__(Region)
        self.enter()
        cdef region_node *node = <region_node *>calloc(1, sizeof(region_node))
        if not node:
            raise MemoryError
        cdef int code = pagert_pump_reserve(self.handle, size_bytes, &region.handle)
        if code < 0:
            free(node)
            self.refuse(code, NULL, NULL)
        node.owner_count = 1
        region.node = node
        region.pump = self
        region.size_bytes = size_bytes
        region.serial = self.region_count
        self.region_count += 1
        if self.recorder is not None:
            self.recorder.append((region.serial, size_bytes))
        return region

    cdef int hold(self, held_pin *held) except -1:
        """Pin, waiting as long as it takes. On an error nothing is held."""
        cdef user call
        cdef uint64_t releases
        self.enter()
        if self.endings:
            self.end_passed()
        releases = self.releases
        cdef int outcome = pagert_pump_pin(self.handle, &held.pin, 0)
        link(&self.pins, &held.user)
        if outcome != 1:
            memset(&call, 0, sizeof(call))
            link(&self.calls, &call)
            try:
                self.wait_for(held, outcome, releases)
            except BaseException:
                self.forget(held)
                raise
            finally:
                unlink(&self.calls, &call)
        held.user.ready = True
        return 0

    cdef int wait_for(self, held_pin *held, int outcome, uint64_t releases) except -1:
        """`outcome` is the first attempt's; `releases` counted the pins let go of before it."""
        cdef double started = now()
        cdef bint warned = False
        cdef uint64_t seen, slice_ns
        cdef pagert_failure failure
        while outcome != 1:
            if outcome == 0:
                with nogil:
                    outcome = pagert_pump_pin_wait(self.handle, &held.pin, SLICE_NS)
                if outcome == 0 or (outcome == 1 and self.closing):
                    try:
                        self.end_passed()
                        self.wait("an operator's operands", &started, &warned)
                    except BaseException:
                        pagert_pump_unpin(self.handle, &held.pin)
                        raise
                continue
            if outcome != PAGERT_E_FRAMES or held.pin.frames_needed > self.device_frames:
                failure = held.pin.failure
                self.refuse(outcome, &held.pin, &failure)
            held.user.for_frames = True
            self.end_passed()
            if releases == self.releases:
                if not others_hold(self.pins):
                    self.refuse(outcome, &held.pin, NULL)
                seen = pagert_pump_changes(self.handle)
                slice_ns = FENCE_NS if self.endings else SLICE_NS
                with nogil:
                    pagert_pump_wait_change(self.handle, seen, slice_ns)
                self.wait("an operator that needs frames held by other threads", &started, &warned)
            held.user.for_frames = False
            releases = self.releases
            outcome = pagert_pump_pin(self.handle, &held.pin, 0)
        return 0

    def pin(self, accesses):
        """Hold (region, offset_bytes, size_bytes, mode) ranges, all at once. Blocks until resident."""
        cdef Py_ssize_t count = len(accesses), i
        cdef Region region
        cdef held_pin *held
        cdef Pin pin
        self.enter()
        if count == 0:
            raise ValueError("a pin needs at least one access")
        pin = Pin.__new__(Pin)
        pin.pump = self
        pin.node = <pagert_release_node *>calloc(1, sizeof(pagert_release_node))
        held = <held_pin *>calloc(1, sizeof(held_pin) + <size_t>(count - 1) * sizeof(pagert_access))
        if not held or not pin.node:
            free(held)
            raise MemoryError
        regions = []
        try:
            held.pin.accesses = held.accesses
            held.pin.access_count = <uint32_t>count
            for i in range(count):
                owner, offset_bytes, size_bytes, mode = accesses[i]
                region = owner
                self.own(region)
                regions.append(region)
                held.accesses[i].region = region.handle
                held.accesses[i].offset_bytes = offset_bytes
                held.accesses[i].size_bytes = size_bytes
                held.accesses[i].mode = mode
            self.hold(held)
        except BaseException:
            free(held)
            raise
        pin.held = held  # from here on its finalizer lets go
        pin.regions = regions
        pin.device_bytes = tuple([held.accesses[i].device_bytes for i in range(count)])
        if self.recorder is not None:
            self.note(regions, held)
        return pin

    cdef int note(self, list regions, held_pin *held) except -1:
        """Append what a pin holds to the recorder's list."""
        cdef Py_ssize_t i
        cdef Region region
        cdef list ranges = []
        for i in range(len(regions)):
            region = regions[i]
            ranges.append((region.serial, region.size_bytes, held.accesses[i].offset_bytes,
                           held.accesses[i].size_bytes, held.accesses[i].mode))
        self.recorder.append(ranges)
        return 0

    def prefetch(self, Region region, uint64_t offset_bytes, uint64_t size_bytes):
        """Start the fetch of a range. A hint: does nothing where there is no room. Does not block."""
        cdef int code
        self.enter()
        self.own(region)
        code = pagert_pump_prefetch(self.handle, region.handle, offset_bytes, size_bytes)
        if code < 0 and code not in (PAGERT_E_FRAMES, PAGERT_E_FULL, PAGERT_E_TRANSFER):
            self.refuse(code, NULL, NULL)

    def evict(self, Region region, uint64_t offset_bytes, uint64_t size_bytes):
        """Bring a range to the tiers below. Blocks until it has left the device."""
        self.enter()
        self.own(region)
        self.write_down(&region.handle, offset_bytes, size_bytes, "evict()")

    def flush(self):
        """Write back every dirty page that no operator holds. Blocks until all are written."""
        self.enter()
        self.write_down(NULL, 0, 0, "flush()")

    cdef int write_down(self, pagert_region *region, uint64_t offset_bytes, uint64_t size_bytes,
                        str what) except -1:
        cdef int outcome
        cdef int again = False
        cdef double started = now()
        cdef bint warned = False
        cdef pagert_failure failure
        cdef user call
        memset(&call, 0, sizeof(call))
        memset(&failure, 0, sizeof(failure))
        link(&self.calls, &call)
        try:
            while True:
                with nogil:
                    if region:
                        outcome = pagert_pump_evict(self.handle, region[0], offset_bytes, size_bytes,
                                                    again, SLICE_NS, &failure)
                    else:
                        outcome = pagert_pump_flush(self.handle, again, SLICE_NS, &failure)
                again = True
                if outcome == 1:
                    return 0
                if outcome == PAGERT_E_STATE and self.endings:
                    self.wait_for_fences()
                elif outcome < 0:
                    self.refuse(outcome, NULL, &failure)
                self.wait(what, &started, &warned)
        finally:
            unlink(&self.calls, &call)

    def locate(self, Region region, uint64_t offset_bytes, uint64_t size_bytes):
        """Pages of the range that are zero, on device, on host, on flash (fastest copy)."""
        cdef pagert_residency found
        cdef int code
        self.enter()
        self.own(region)
        code = pagert_pump_locate(self.handle, region.handle, offset_bytes, size_bytes, &found)
        if code < 0:
            self.refuse(code, NULL, NULL)
        return found.zero, found.pages[<int>PAGERT_DEVICE], found.pages[<int>PAGERT_HOST], \
            found.pages[<int>PAGERT_FLASH]

    def state(self):
        """Counters and usage, in pages and nanoseconds; `pagert.stats` gives them names and units."""
        cdef pagert_pump_state state
        self.enter()
        pagert_pump_get_state(self.handle, &state)
        return as_dict(&state)

    def reset_counters(self):
        self.enter()
        pagert_pump_reset_counters(self.handle)

    def check(self):
        """Verify the core's whole state: 0, or the line of the check that failed."""
        self.enter()
        return pagert_pump_check(self.handle)

    def close(self):
        """Stop the thread, give back the files and the tiers' memory. Blocks until nothing is in flight.

        Idempotent. Calls that wait in other threads end with `PagerClosed`. Raises `PagertError` while an operator or
        a `resident()` block holds tensors, `TransferTimeout` where requests do not come back; nothing has changed then.
        """
        cdef int code
        cdef double started = now()
        cdef bint warned = False
        cdef uint64_t seen
        if not self.handle or self.closing or self.process != count_of_forks():
            return
        if any_is_ready(self.pins):
            raise PagertError("an operator or a resident() block still holds tensors of this pager; "
                              "leave it before close()")
        if mine_is_among(self.calls):
            raise PagertError("close() was called by a signal handler or a finalizer while this thread "
                              "waits inside of the pager; raise an exception instead")
        self.closing = True
        try:
            while self.calls:
                seen = pagert_pump_changes(self.handle)
                with nogil:
                    pagert_pump_wait_change(self.handle, seen, SLICE_NS)
                self.wait(CLOSE, &started, &warned)
            while self.endings:
                self.wait_for_fences()
                self.wait(CLOSE, &started, &warned)
            while True:
                with nogil:
                    code = pagert_pump_stop(self.handle, SLICE_NS)
                if code == 0:
                    break
                self.wait(CLOSE, &started, &warned)
        except BaseException as error:
            self.closing = False
            self.hangs = isinstance(error, TransferTimeout)
            pagert_pump_resume(self.handle)
            raise
        cdef pagert_pump *handle = self.handle
        self.handle = NULL  # from here on regions are not handed back one by one
        with nogil:
            pagert_pump_close(handle)
        self.close_tiers()
