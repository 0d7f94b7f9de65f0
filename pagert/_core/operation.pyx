# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3, boundscheck=False, wraparound=False
"""The short way of an operator whose paged operands are few and plain: pin, run, let go, in one function.

It makes no Python object per page and, where a tensor lies where it lay at its last call, none per operand.
Whatever is not simple goes the long way in `pagert.tensor.dispatch`, which this module does not know: what
it needs from above is handed to `Dispatcher`.
"""

from libc.stdint cimport uint32_t, uint64_t, uintptr_t
from libc.string cimport memset

from pagert._core.pager cimport PAGERT_READ, PAGERT_UPDATE, pagert_access
from pagert._core.pump cimport Pump, Region, held_pin

from pagert.errors import OutOfFrames

__all__ = ["Dispatcher", "Footprint"]

cdef enum:
    OPERANDS_MAX = 8

# A pin on the stack, with room for its accesses.
cdef struct small_pin:
    held_pin held
    pagert_access more[OPERANDS_MAX - 1]


cdef class Footprint:
    """The bytes that a tensor touches in its region, and the dense view of its last call.

    The view is used again while the pages lie at the same address. It is looked at only while they are
    pinned, so it is never stale.
    """

    def __cinit__(self, Region region not None, uint64_t offset_bytes, uint64_t size_bytes):
        self.region = region
        self.offset_bytes = offset_bytes
        self.size_bytes = size_bytes


cdef class Dispatcher:
    """Runs operators on tensors of one class.

    Parameters
    ----------
    kind : type
        The paged tensor's class. Its instances have `_footprint`, a `Footprint` or None.
    plans : dict
        Plans by operator: `call`, `simple` and `written` are read here, `route` is the long way.
    make_plan : callable
        operator -> plan, for an operator that is not in `plans`.
    footprint : callable
        tensor -> Footprint, or None for a tensor without bytes; also sets `_footprint`.
    dense_view : callable
        (tensor, address in the arena) -> plain tensor over its bytes.
    leave : callable
        (plan, tensors, byte ranges, addresses, dense views, result) -> what the caller may keep.
    """

    cdef object kind
    cdef dict plans
    cdef object make_plan, footprint, dense_view, leave, tensor_type, strided

    def __init__(self, kind, dict plans, make_plan, footprint, dense_view, leave, tensor_type,
                 strided):
        self.kind = kind
        self.plans = plans
        self.make_plan = make_plan
        self.footprint = footprint
        self.dense_view = dense_view
        self.leave = leave
        self.tensor_type = tensor_type
        self.strided = strided

    def dispatch(self, func, types, tuple args=(), kwargs=None):
        """What `__torch_dispatch__` does."""
        for kind in types:
            if kind is not self.kind:
                return NotImplemented  # another wrapper's turn
        plan = self.plans.get(func)
        if plan is None:
            plan = self.make_plan(func)
        if plan.simple:
            result = self.run(plan, args, kwargs)
            if result is not NotImplemented:
                return result
        return plan.route(self.kind, plan, args, kwargs or {})

    cdef bint mentions(self, object value):
        """Whether a list has a paged tensor in it."""
        for item in value:
            if type(item) is self.kind:
                return True
        return False

    cdef object run(self, plan, tuple args, kwargs):
        """The result, or NotImplemented if the call is not simple after all. Then nothing was done."""
        cdef small_pin small
        cdef Py_ssize_t positions[OPERANDS_MAX]
        cdef Py_ssize_t i, k, count = 0
        cdef Footprint foot
        cdef Pump pump = None
        cdef pagert_access *access
        written = plan.written
        if kwargs:
            for value in (<dict>kwargs).values():
                if type(value) is self.kind or (type(value) in (list, tuple) and self.mentions(value)):
                    return NotImplemented
        memset(&small, 0, sizeof(held_pin))
        cdef list operands = list(args)
        cdef list found = []
        for i in range(len(operands)):
            value = operands[i]
            if type(value) is self.kind:
                foot = value._footprint
                if foot is None:
                    foot = self.footprint(value)
                    if foot is None:
                        return NotImplemented
                if count == OPERANDS_MAX:
                    return NotImplemented
                if pump is None:
                    pump = foot.region.pump
                elif foot.region.pump is not pump:
                    return NotImplemented
                access = &small.held.accesses[0] + count
                memset(access, 0, sizeof(pagert_access))
                access.region = foot.region.handle
                access.offset_bytes = foot.offset_bytes
                access.size_bytes = foot.size_bytes
                access.mode = PAGERT_UPDATE if written and i in written else PAGERT_READ
                found.append(foot)
                positions[count] = i
                count += 1
            elif type(value) is list or type(value) is tuple:
                if self.mentions(value):
                    return NotImplemented
        if count == 0 or pump.recorder is not None:
            return NotImplemented
        small.held.pin.accesses = &small.held.accesses[0]
        small.held.pin.access_count = <uint32_t>count
        try:
            pump.hold(&small.held)
        except OutOfFrames:
            return NotImplemented  # the long way says it with the operands' shapes
        try:
            for k in range(count):
                foot = found[k]
                access = &small.held.accesses[0] + k
                if foot.dense is None or foot.device_bytes != access.device_bytes:
                    foot.dense = self.dense_view(args[positions[k]], access.device_bytes)
                    foot.device_bytes = access.device_bytes
                operands[positions[k]] = foot.dense
            if kwargs:
                result = plan.call(*operands, **kwargs)
            else:
                result = plan.call(*operands)
            for k in range(count):
                foot = found[k]
                if result is foot.dense:
                    return args[positions[k]]
            if result is None or self.is_apart(pump, result):
                return result
            return self.leave(
                plan,
                [args[positions[k]] for k in range(count)],
                [((<Footprint>found[k]).offset_bytes, (<Footprint>found[k]).size_bytes)
                 for k in range(count)],
                [(&small.held.accesses[0] + k).device_bytes for k in range(count)],
                [(<Footprint>found[k]).dense for k in range(count)],
                result)
        finally:
            pump.let_go(&small.held)

    cdef bint is_apart(self, Pump pump, object result):
        """Whether a result is a plain tensor that surely shares nothing with the arena."""
        cdef uintptr_t address
        if type(result) is tuple:
            for item in <tuple>result:
                if item is not None and not self.is_apart(pump, item):
                    return False
            return True
        if type(result) is not self.tensor_type or result.layout is not self.strided:
            return False
        address = result.data_ptr()
        return address < pump.arena.address or address >= pump.arena.address + pump.arena.size_bytes
