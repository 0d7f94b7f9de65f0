# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3, boundscheck=False, wraparound=False
"""The short way of an operator on paged tensors: pin, run, let go, or another look at the same bytes.

It makes no Python object per page and, where a tensor lies where it lay at its last call, none per operand.
Whatever is not simple goes the long way in `pagert.tensor.dispatch`, which this module does not know: what
it needs from above is handed to `Dispatcher`.
"""

cimport cython
from libc.stdint cimport uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

from pagert._core.pager cimport PAGERT_READ, PAGERT_UPDATE, pagert_access
from pagert._core.pump cimport Pump, Region, held_pin
from pagert._core.users cimport link, unlink, user

import threading

import torch

from pagert.errors import OutOfFrames, TierFull

__all__ = ["Dispatcher", "Footprint", "Turn"]

cdef int DEPTH_MAX = 4  # views of views of ... that are kept; a loop could go on for ever

# Looked up once: each of them is called for nearly every operator.
cdef object plain_tensor = torch.Tensor
cdef object strided = torch.strided
cdef object make_subclass = torch.Tensor._make_subclass
cdef object plain_copy = torch._C.TensorBase.copy_

@cython.final
@cython.no_gc
cdef class Turn:
    """A reentrant lock whose holder may pin, while who waits for it may hold windows: frames that the holder waits for.

    A thread that waits for its turn counts as one that waits for frames, so that nobody waits for its windows.
    """

    def __cinit__(self, Pump pump):
        self.pump = pump
        self.lock = threading.RLock()

    def __enter__(self):
        cdef user waiting
        if self.lock.acquire(False):
            return self
        memset(&waiting, 0, sizeof(waiting))
        waiting.for_frames = True
        link(&self.pump.pins, &waiting)
        try:
            self.lock.acquire()
        finally:
            unlink(&self.pump.pins, &waiting)
        return self

    def __exit__(self, *exception):
        self.lock.release()


@cython.final
@cython.no_gc
cdef class Footprint:
    """A tensor's bytes in its region, and the dense view of its last call.

    The dense view is used again while the pages lie at the same address. It is looked at only while they
    are pinned, so it is never stale. Tensors of one geometry in one region may share a footprint.
    """

    cdef int measure(self, tensor) except -1:
        """Find the range that a tensor of this geometry touches."""
        cdef uint64_t item_bytes = tensor.itemsize
        cdef uint64_t last = 0
        cdef uint64_t length
        if tensor.is_contiguous():
            self.size_bytes = <uint64_t>tensor.numel() * item_bytes
        elif tensor.numel() == 0:
            self.size_bytes = 0
        else:
            for length, step in zip(<tuple>tensor.size(), <tuple>tensor.stride()):
                last += (length - 1) * <uint64_t>step
            self.size_bytes = (last + 1) * item_bytes
        self.offset_bytes = <uint64_t>tensor.storage_offset() * item_bytes
        self.measured = True
        return 0


cdef object view_of(Footprint base, geometry):
    """The footprint of a geometry in the base's region; several for several."""
    cdef Footprint view
    if type(geometry) is not plain_tensor:
        return type(geometry)([view_of(base, one) for one in geometry])
    view = Footprint.__new__(Footprint)
    view.region = base.region
    view.geometry = geometry
    view.depth = base.depth + 1
    return view


cdef bint are_numbers(tuple values):
    """Whether there are only integers, also in lists, and None: what can be compared at no risk."""
    for value in values:
        if type(value) is list:
            for item in <list>value:
                if type(item) is not int:
                    return False
        elif type(value) is not int and value is not None:
            return False
    return True


@cython.final
@cython.no_gc
@cython.freelist(4)
cdef class Operation:
    """The paged operands of one call. It holds them from `pin` on until `let_go`."""

    def __cinit__(self):
        self.held = &self.small.held
        self.room = OPERANDS_IN_PLACE
        self.tensors = []
        self.footprints = []

    def __dealloc__(self):
        if self.held != &self.small.held:
            free(self.held)

    cdef int grow(self) except -1:
        cdef Py_ssize_t room = self.room * 4
        cdef size_t size_bytes = sizeof(held_pin) + <size_t>(self.room - 1) * sizeof(pagert_access)
        cdef held_pin *larger = <held_pin *>malloc(
            sizeof(held_pin) + <size_t>(room - 1) * sizeof(pagert_access))
        if not larger:
            raise MemoryError
        memcpy(larger, self.held, size_bytes)
        if self.held != &self.small.held:
            free(self.held)
        self.held = larger
        self.room = room
        return 0

    cdef bint pin(self) except -1:
        """Hold the operands on the device. False where there is no room: nothing is held then."""
        self.held.pin.accesses = &self.held.accesses[0]
        self.held.pin.access_count = <uint32_t>self.count
        try:
            self.pump.hold(self.held)
        except (OutOfFrames, TierFull):
            return False
        self.pinned = True
        return True

    cdef void let_go(self) noexcept:
        if self.pinned:
            self.pinned = False
            self.pump.let_go(self.held)

    cdef uint64_t pages_bytes(self):
        """What the operands take on the device, those that share pages counted twice."""
        cdef uint64_t page_bytes = self.pump.page_bytes
        cdef uint64_t page_count = 0
        cdef Py_ssize_t i
        cdef pagert_access *access
        for i in range(self.count):
            access = &self.held.accesses[0] + i
            page_count += ((access.offset_bytes + access.size_bytes - 1) // page_bytes
                           - access.offset_bytes // page_bytes + 1)
        return page_count * page_bytes

    cdef bint is_apart(self, object result) except -1:
        """Whether a result is made of plain tensors that surely share nothing with the arena."""
        cdef uintptr_t address
        if result is None:
            return True
        if type(result) is tuple or type(result) is list:
            for item in result:
                if not self.is_apart(item):
                    return False
            return True
        if type(result) is not plain_tensor or result.layout is not strided:
            return False
        address = result.data_ptr()
        return (address < self.pump.arena.address
                or address >= self.pump.arena.address + self.pump.arena.size_bytes)


cdef class Dispatcher:
    """Runs operators on tensors of one class.

    Parameters
    ----------
    kind : type
        The paged tensor's class. Its instances have `_footprint`, a `Footprint` or None, beside
        `_region` and `_runtime`.
    plans : dict
        Plans by operator: `call`, `short`, `written` and `gradients` are read here, `route` is the
        long way.
    make_plan : callable
        operator -> plan, for an operator that is not in `plans`.
    geometry : callable
        tensor -> plain tensor of the same geometry over the same storage, which has no memory.
    flat : callable
        (runtime, dtype) -> the device tier as one plain tensor.
    leave : callable
        (plan, tensors, byte ranges, addresses, dense views, result) -> what the caller may keep.
    parts : int
        A list of operands, or a copy, runs at once where it takes at most one of so many equal parts
        of the device tier.
    """

    cdef object kind
    cdef dict plans
    cdef object make_plan, geometry, flat, leave
    cdef uint64_t parts

    def __init__(self, kind, dict plans, make_plan, geometry, flat, leave, uint64_t parts):
        self.kind = kind
        self.plans = plans
        self.make_plan = make_plan
        self.geometry = geometry
        self.flat = flat
        self.leave = leave
        self.parts = parts

    def dispatch(self, func, types, tuple args=(), kwargs=None):
        """What `__torch_dispatch__` does."""
        for kind in types:
            if kind is not self.kind:
                return NotImplemented  # another wrapper's turn
        plan = self.plans.get(func)
        if plan is None:
            plan = self.make_plan(func)
        short = plan.short
        if short is not None:
            if short == "view":
                result = self.view(plan, args, kwargs)
            elif short == "product" and plan.outgrows(args):
                result = NotImplemented  # its result is to be paged
            else:
                result = self.run(plan, args, kwargs)
            if result is not NotImplemented:
                return result
        return plan.route(self.kind, plan, args, kwargs or {})

    cdef Footprint footprint(self, object tensor):
        """The footprint of a tensor, or None for one that has no bytes of a pump."""
        cdef Footprint found = tensor._footprint
        if found is None:
            region = tensor._region
            if isinstance(region, Region):  # other runtimes bring regions of their own
                found = Footprint.__new__(Footprint)
                found.region = region
                tensor._footprint = found
        return found

    # Views.

    cdef object view(self, plan, tuple args, kwargs):
        """Another look at the region of the first argument, or NotImplemented."""
        cdef Footprint base
        cdef Py_ssize_t i
        tensor = args[0]
        if type(tensor) is not self.kind:
            return NotImplemented
        for i in range(1, len(args)):
            if type(args[i]) is self.kind:
                return NotImplemented
        base = self.footprint(tensor)
        if base is None:
            return NotImplemented
        numbers = args[1:]
        repeats = not kwargs and base.depth < DEPTH_MAX and are_numbers(numbers)
        if repeats and base.view_plan is plan and base.view_numbers == numbers:
            view = base.view
        else:
            if base.geometry is None:
                base.geometry = self.geometry(tensor)
            view = view_of(base, plan.call(base.geometry, *numbers, **(kwargs or {})))
            if repeats:
                base.view = view
                base.view_plan = plan
                base.view_numbers = numbers
        if type(view) is Footprint:
            return self.wrap(tensor, view)
        return type(view)([self.wrap(tensor, one) for one in view])

    cdef object wrap(self, tensor, Footprint footprint):
        """A paged tensor of this footprint, in the same region as another one."""
        view = make_subclass(self.kind, footprint.geometry)
        view._region = footprint.region
        view._runtime = tensor._runtime
        view._footprint = footprint
        return view

    # Operators that look at bytes.

    cdef bint add(self, Operation call, object tensor, int mode) except -1:
        """Add one operand. False where the call is not simple."""
        cdef Footprint footprint = tensor._footprint
        cdef pagert_access *access
        if footprint is None:
            footprint = self.footprint(tensor)
            if footprint is None:
                return False
        if not footprint.measured:
            footprint.measure(tensor if footprint.geometry is None else footprint.geometry)
        if footprint.size_bytes == 0:
            return False
        if footprint.region.deferred is not None:
            footprint.region.settle()
        if call.pump is None:
            call.pump = footprint.region.pump
        elif footprint.region.pump is not call.pump:
            return False
        if call.count == call.room:
            call.grow()
        access = &call.held.accesses[0] + call.count
        memset(access, 0, sizeof(pagert_access))
        access.region = footprint.region.handle
        access.offset_bytes = footprint.offset_bytes
        access.size_bytes = footprint.size_bytes
        access.mode = mode
        call.count += 1
        call.tensors.append(tensor)
        call.footprints.append(footprint)
        return True

    cdef bint add_all(self, Operation call, object value, int mode) except -1:
        """Add the paged tensors of one argument. False where the call is not simple."""
        kind = type(value)
        if kind is self.kind:
            return self.add(call, value, mode)
        if kind is list:
            for item in <list>value:
                if type(item) is self.kind and not self.add(call, item, mode):
                    return False
        elif kind is tuple:
            for item in <tuple>value:
                if type(item) is self.kind and not self.add(call, item, mode):
                    return False
        return True

    cdef object dense(self, Operation call, object value):
        """An argument with its paged tensors replaced. In the order in which they were added."""
        cdef Py_ssize_t i
        cdef list lent
        kind = type(value)
        if kind is self.kind:
            return self.next_dense(call)
        if kind is not list and kind is not tuple:
            return value
        lent = list(value)
        for i in range(len(lent)):
            if type(lent[i]) is self.kind:
                lent[i] = self.next_dense(call)
        return lent if kind is list else tuple(lent)

    cdef object next_dense(self, Operation call):
        cdef Footprint footprint = call.footprints[call.lent]
        cdef pagert_access *access = &call.held.accesses[0] + call.lent
        if footprint.dense is None or footprint.device_bytes != access.device_bytes:
            self.look(footprint, call.tensors[call.lent], access.device_bytes)
        call.lent += 1
        return footprint.dense

    cdef int look(self, Footprint footprint, object tensor, uint64_t device_bytes) except -1:
        """Make the dense view of a tensor whose bytes are pinned at an address in the arena."""
        geometry = tensor if footprint.geometry is None else footprint.geometry
        runtime = tensor._runtime
        dtype = geometry.dtype
        flat = (<dict>runtime.flat).get(dtype)
        if flat is None:
            flat = self.flat(runtime, dtype)
        cdef uint64_t item_bytes = geometry.itemsize
        dense = flat.as_strided(geometry.size(), geometry.stride(), device_bytes // item_bytes)
        if geometry.is_neg():
            torch._C._set_neg(dense, True)
        if geometry.is_conj():
            torch._C._set_conj(dense, True)
        footprint.dense = dense
        footprint.device_bytes = device_bytes
        return 0

    cdef object run(self, plan, tuple args, kwargs):
        """The result, or NotImplemented if the call is not simple after all. Then nothing was done."""
        cdef Operation call = Operation.__new__(Operation)
        cdef Py_ssize_t i
        cdef bint writes = False
        written = plan.written
        gradients = plan.gradients
        if gradients is not None and kwargs and kwargs.get("grad_scale") is not None:
            gradients = None  # the kernel unscales them in place
        for i in range(len(args)):
            writes = written and i in written and i != gradients
            if not self.add_all(call, args[i], PAGERT_UPDATE if writes else PAGERT_READ):
                return NotImplemented
        if kwargs:
            for name, value in (<dict>kwargs).items():
                writes = written and name in written
                if not self.add_all(call, value, PAGERT_UPDATE if writes else PAGERT_READ):
                    return NotImplemented
        if call.count == 0 or call.pump.recorder is not None:
            return NotImplemented
        if plan.short == "list" and call.pages_bytes() > call.pump.arena.size_bytes // self.parts:
            return NotImplemented  # group by group
        if not call.pin():
            return NotImplemented  # the long way says it with the operands' shapes
        try:
            operands = tuple([self.dense(call, value) for value in args])
            if kwargs:
                dense_options = {name: self.dense(call, value)
                                 for name, value in (<dict>kwargs).items()}
                result = plan.call(*operands, **dense_options)
            else:
                result = plan.call(*operands)
            if result is None:
                return None
            for i in range(call.count):
                if result is (<Footprint>call.footprints[i]).dense:
                    return call.tensors[i]
            if call.is_apart(result):
                return result
            return self.leave(
                plan,
                call.tensors,
                [((<Footprint>one).offset_bytes, (<Footprint>one).size_bytes)
                 for one in call.footprints],
                [(&call.held.accesses[0] + i).device_bytes for i in range(call.count)],
                [(<Footprint>one).dense for one in call.footprints],
                result)
        finally:
            call.let_go()

    def copy(self, target, source, int mode, bint non_blocking):
        """Copy between two tensors, at least one of them paged. `mode` is the target's.

        Returns
        -------
        bool
            False where it is large or otherwise not simple. Then nothing was done.
        """
        cdef Operation call = Operation.__new__(Operation)
        if not (self.add_all(call, target, mode) and self.add_all(call, source, PAGERT_READ)):
            return False
        if call.count == 0 or call.pump.recorder is not None:
            return False
        if call.pages_bytes() > call.pump.arena.size_bytes // self.parts or not call.pin():
            return False
        try:
            plain_copy(self.dense(call, target), self.dense(call, source), non_blocking)
        finally:
            call.let_go()
        return True
