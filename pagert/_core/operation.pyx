# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3, boundscheck=False, wraparound=False
"""One operator's use of paged tensors, from the collecting of its operands to its end.

Whoever looks at bytes does it through an `Operation`: collect the operands (what waits for them to be looked at
runs then), pin them together, run on the dense views that it lends, let the results leave, end. It makes no Python
object per page and, where a tensor lies where it lay at its last call, none per operand.
"""

cimport cython
from libc.stdint cimport uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

from pagert._core.core cimport PAGERT_OVERWRITE, PAGERT_UPDATE, pagert_access
from pagert._core.footprint cimport Footprint, footprint_of
from pagert._core.pump cimport Pump, held_pin
from pagert._core.users cimport link, unlink, user

import threading

import torch

from pagert._core.refusals import another_pager, foreign_alias, hidden_alias, operands_do_not_fit
from pagert.errors import OutOfFrames, TierFull
from pagert.geometry import fills_range

__all__ = ["Operation", "Turn"]

# Looked up once: each of them is called for nearly every operator.
cdef object plain_tensor = torch.Tensor
cdef object strided = torch.strided
cdef object base_tensor = torch._C.TensorBase


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


cdef Operation begin(kind, name):
    """A new operation, at a lower price than by calling the class."""
    cdef Operation operation = Operation.__new__(Operation)
    operation.kind = kind
    operation.name = name
    return operation


@cython.final
@cython.no_gc
@cython.freelist(8)
cdef class Operation:
    """The paged operands of one call: `collect` or `add`, `pin`, `dense` and `leave`, `end`.

    Parameters
    ----------
    kind : type
        The paged tensor's class. Its instances have `_region`, `_runtime` and `_footprint`.
    name : str
        The operator's, for messages.

    Also a context manager: it pins when it is entered and ends when it is left.
    """

    def __cinit__(self):
        self.held = &self.small.held
        self.room = OPERANDS_IN_PLACE
        self.tensors = []
        self.footprints = []

    def __init__(self, kind, str name):
        self.kind = kind
        self.name = name

    def __dealloc__(self):
        if self.pinned and self.pump is not None:
            self.pump.abandon(self.held)
        if self.held != &self.small.held:
            free(self.held)

    # Collect.

    cpdef int add(self, tensor, int mode, bint guarded=False, bint whole=False) except -1:
        """Add one paged tensor. Blocks where something waits for it to be looked at: that runs first.

        A `guarded` one gets a dense view that refuses to be resized larger; with `whole`, the view
        lies in a storage that is the tensor's whole region.
        """
        cdef Footprint footprint = tensor._footprint
        cdef pagert_access *access
        if footprint is None:
            footprint = footprint_of(tensor)
        if not footprint.measured:
            footprint.measure(tensor if footprint.geometry is None else footprint.geometry)
        if footprint.size_bytes == 0:
            return self.add_empty(tensor)
        if footprint.region is not None:
            if footprint.region.deferred is not None:
                footprint.region.settle()
            if footprint.region.pump is not self.pump:
                self.meet(tensor, footprint)
        else:
            self.meet(tensor, footprint)
        if self.count == self.room:
            self.grow()
        access = &self.held.accesses[0] + self.count
        memset(access, 0, sizeof(pagert_access))
        if footprint.region is not None:
            access.region = footprint.region.handle
        access.offset_bytes = footprint.offset_bytes
        access.size_bytes = footprint.size_bytes
        if mode == PAGERT_OVERWRITE:
            if fills_range(tensor):
                self.overwrites = True
            else:
                mode = PAGERT_UPDATE
        access.mode = mode
        if guarded or whole:
            if self.special is None:
                self.special = {}
            self.special[self.count] = "whole" if whole else "guarded"
            if guarded and self.find(tensor) >= 0:  # a result that is also an operand: one view for both
                self.special[self.find(tensor)] = "guarded"
            if whole:
                access.offset_bytes = 0
                access.size_bytes = base_tensor.untyped_storage(tensor).nbytes()
        self.count += 1
        self.tensors.append(tensor)
        self.footprints.append(footprint)
        return 0

    cdef int add_empty(self, tensor) except -1:
        """Without elements there are no bytes to pin."""
        runtime = self.runtime_of()
        if runtime is not None and tensor._runtime is not runtime:
            raise another_pager(self.name, self.tensors, tensor)
        if self.empty is None:
            self.empty = []
        self.empty.append([tensor, None])
        return 0

    cdef int meet(self, tensor, Footprint footprint) except -1:
        """The first operand says whose pump it is; another one's is refused."""
        runtime = self.runtime_of()
        if runtime is None:
            if footprint.region is None:
                self.other_pump = footprint.owner.pump
            else:
                self.pump = footprint.region.pump
        elif tensor._runtime is not runtime:
            raise another_pager(self.name, self.tensors, tensor)
        elif self.pump is None and footprint.region is not None:  # the first was without elements
            self.pump = footprint.region.pump
        elif self.other_pump is None and footprint.region is None:
            self.other_pump = footprint.owner.pump
        return 0

    cpdef int collect(self, value, int mode) except -1:
        """Add the paged tensors of one argument: a tensor, a list of tensors or anything else."""
        kind = type(value)
        if kind is self.kind:
            self.add(value, mode)
        elif kind is list:
            for item in <list>value:
                if type(item) is self.kind:
                    self.add(item, mode)
        elif kind is tuple:
            for item in <tuple>value:
                if type(item) is self.kind:
                    self.add(item, mode)
        return 0

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

    @property
    def runtime(self):
        """The runtime of all operands; None before the first one."""
        return self.runtime_of()

    cdef object runtime_of(self):
        if self.tensors:
            return self.tensors[0]._runtime
        if self.empty is not None:
            return self.empty[0][0]._runtime
        return None

    cdef uint64_t pages_bytes(self):
        """What the operands take on the device, those that share pages counted twice."""
        cdef uint64_t page_bytes
        cdef uint64_t page_count = 0
        cdef Py_ssize_t i
        cdef pagert_access *access
        if self.count == 0:
            return 0
        page_bytes = self.tensors[0]._runtime.page_bytes if self.pump is None else self.pump.page_bytes
        for i in range(self.count):
            access = &self.held.accesses[0] + i
            page_count += ((access.offset_bytes + access.size_bytes - 1) // page_bytes
                           - access.offset_bytes // page_bytes + 1)
        return page_count * page_bytes

    cdef uint64_t arena_bytes(self):
        if self.count == 0:
            return 0
        return self.tensors[0]._runtime.storage.nbytes() if self.pump is None else self.pump.arena.size_bytes

    # Pin.

    cpdef int pin(self) except -1:
        """Bring every operand to the device and hold it there. Blocks until all are resident.

        Raises `OutOfFrames` where they do not fit together beside what is held; nothing is held then.
        """
        error = self.attempt()
        if error is not None:
            raise error
        return 0

    cdef object attempt(self):
        """Pin, and return None, or the `OutOfFrames` that `pin` would raise."""
        if self.count == 0:
            return None
        if self.overwrites and self.count > 1:
            self.keep_shared_bytes()
        try:
            if self.pump is None:
                self.pin_elsewhere()
            else:
                self.prepare()
                self.pump.hold(self.held)
        except OutOfFrames as error:
            return self.explain(error)
        except TierFull:
            if not self.runtime_of().settle():  # what is deferred may hold gradients that nobody else does
                raise
            try:
                self.prepare()
                self.pump.hold(self.held)
            except OutOfFrames as error:
                return self.explain(error)
        if self.pump is not None and self.pump.recorder is not None:
            self.pump.note([(<Footprint>one).region for one in self.footprints], self.held)
        self.pinned = True
        self.lent = 0
        return None

    cdef object explain(self, error):
        explained = operands_do_not_fit(
            self.name, self.tensors, [(&self.held.accesses[0] + i).mode for i in range(self.count)], error)
        explained.__cause__ = error
        return explained

    cdef void prepare(self) noexcept:
        memset(&self.held.pin, 0, sizeof(self.held.pin))
        memset(&self.held.user, 0, sizeof(self.held.user))
        self.held.pin.accesses = &self.held.accesses[0]
        self.held.pin.access_count = <uint32_t>self.count

    cdef int pin_elsewhere(self) except -1:
        """Pin at the pump of another runtime, which takes what a list can say."""
        cdef pagert_access *access
        cdef Py_ssize_t i
        cdef list accesses = []
        for i in range(self.count):
            access = &self.held.accesses[0] + i
            accesses.append(((<Footprint>self.footprints[i]).owner, access.offset_bytes, access.size_bytes,
                             access.mode))
        self.other_pin = self.other_pump.pin(accesses)
        for i in range(self.count):
            (&self.held.accesses[0] + i).device_bytes = self.other_pin.device_bytes[i]
        return 0

    cdef int keep_shared_bytes(self) except -1:
        """Make overwrites updates where the same call also uses the region in another way."""
        cdef Py_ssize_t i
        cdef dict count = {}
        for one in self.footprints:
            count[id((<Footprint>one).owner)] = count.get(id((<Footprint>one).owner), 0) + 1
        for i in range(self.count):
            if (&self.held.accesses[0] + i).mode == PAGERT_OVERWRITE:
                if count[id((<Footprint>self.footprints[i]).owner)] > 1:
                    (&self.held.accesses[0] + i).mode = PAGERT_UPDATE
        return 0

    # Lend.

    cpdef object dense(self, value):
        """One argument with its paged tensors replaced by their dense views, valid until the end.

        Cheapest in the order in which they were added.
        """
        cdef list lent
        cdef Py_ssize_t i
        kind = type(value)
        if kind is self.kind:
            return self.lend(value)
        if kind is not list and kind is not tuple:
            return value
        lent = list(value)
        for i in range(len(lent)):
            if type(lent[i]) is self.kind:
                lent[i] = self.lend(lent[i])
        return lent if kind is list else tuple(lent)

    cdef object lend(self, tensor):
        cdef Py_ssize_t index = self.lent
        if index < self.count and self.tensors[index] is tensor:
            self.lent = index + 1
            return self.look(index)
        index = self.find(tensor)
        if index >= 0:
            self.lent = index + 1
            return self.look(index)
        for one in self.empty or ():
            if one[0] is tensor:
                if one[1] is None:
                    one[1] = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype,
                                                 device=tensor.device)
                return one[1]
        raise RuntimeError(f"{self.name}: a dense view of a tensor that was not collected")

    cdef Py_ssize_t find(self, tensor) except -2:
        cdef Py_ssize_t i
        for i in range(self.count):
            if self.tensors[i] is tensor:
                return i
        return -1

    cdef object look(self, Py_ssize_t index):
        """The dense view of an operand whose bytes are pinned at an address in the arena."""
        cdef Footprint footprint = self.footprints[index]
        cdef uint64_t device_bytes = (&self.held.accesses[0] + index).device_bytes
        cdef uint64_t item_bytes
        if self.special is not None and index in self.special:
            return self.look_specially(index)
        if footprint.dense is not None and footprint.device_bytes == device_bytes:
            return footprint.dense
        tensor = self.tensors[index]
        geometry = tensor if footprint.geometry is None else footprint.geometry
        dtype = geometry.dtype
        runtime = tensor._runtime
        flat = (<dict>runtime.flat).get(dtype)
        if flat is None:
            flat = flat_arena(runtime, dtype)
        item_bytes = geometry.itemsize
        dense = flat.as_strided(geometry.size(), geometry.stride(), device_bytes // item_bytes)
        set_signs(dense, geometry)
        footprint.dense = dense
        footprint.device_bytes = device_bytes
        return dense

    cdef object look_specially(self, Py_ssize_t index):
        """A dense view on a storage of its own: it cannot grow beyond it, and has nothing around it."""
        cdef pagert_access *access = &self.held.accesses[0] + index
        found = self.special[index]
        if type(found) is not str:
            return found
        tensor = self.tensors[index]
        first = self.find(tensor)
        if first != index and first in self.special:
            return self.look_specially(first)
        storage = tensor._runtime.storage[access.device_bytes:access.device_bytes + access.size_bytes]
        dense = torch.empty(0, dtype=tensor.dtype, device=storage.device)
        dense.set_(storage, int(tensor.storage_offset()) if found == "whole" else 0, tensor.size(),
                   tensor.stride())
        set_signs(dense, tensor)
        self.special[index] = dense
        return dense

    # Leave.

    cpdef object leave(self, result):
        """What the operator returned, as its caller may keep it.

        An operand's dense view leaves as the operand, another alias of its bytes as a paged view. Raises
        `UnsupportedOperator` for what would keep an alias in another layout.
        """
        cdef Py_ssize_t i
        if result is None:
            return None
        for i in range(self.count):
            if result is (<Footprint>self.footprints[i]).dense:
                return self.tensors[i]
        if self.special is None and self.empty is None and self.is_apart(result):
            return result
        return self.leave_alias(result)

    cdef bint is_apart(self, result) except -1:
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
        if self.pump is None:
            return self.find_alias(result) < 0
        address = result.data_ptr()
        return (address < self.pump.arena.address
                or address >= self.pump.arena.address + self.pump.arena.size_bytes)

    cdef object leave_alias(self, result):
        cdef Py_ssize_t index
        cdef pagert_access *access
        if type(result) is list or type(result) is tuple:
            return type(result)([self.leave_alias(item) for item in result])
        if not isinstance(result, plain_tensor):
            return result
        for one in self.empty or ():
            if result is one[1]:
                return one[0]
        for index in range(self.count):
            if result is self.look(index):
                return self.tensors[index]
        if result.layout is not strided:
            for part in strided_parts(result):
                if self.find_alias(part) >= 0:
                    raise hidden_alias(self.name, result)
            return result
        index = self.find_alias(result)
        if index < 0:
            return result
        if result.is_nested or result.is_quantized:
            raise hidden_alias(self.name, result)
        owner = self.tensors[index]
        access = &self.held.accesses[0] + index
        start_bytes = result.data_ptr() - owner._runtime.storage.data_ptr()
        offset_bytes = access.offset_bytes + start_bytes - access.device_bytes
        return self.kind._view(owner, result, offset_bytes // result.itemsize)

    cdef Py_ssize_t find_alias(self, result) except -2:
        """The index of the access whose bytes `result` shares, or -1."""
        cdef Py_ssize_t i
        cdef pagert_access *access
        if self.count == 0:
            return -1
        storage = self.tensors[0]._runtime.storage
        start = result.data_ptr() - storage.data_ptr()
        if not 0 <= start < storage.nbytes():
            return -1
        for i in range(self.count):
            access = &self.held.accesses[0] + i
            if 0 <= start - access.device_bytes < access.size_bytes:
                return i
        raise foreign_alias(self.name)

    # End.

    cpdef int end(self, fence=None) except -1:
        """Let every operand go; the dense views must not be used any more. Idempotent. Does not block.

        Parameters
        ----------
        fence : object, optional
            With a method `passed()`: whether the work that uses the operands is done. They are held until it has
            passed, beyond this call; whoever needs their frames waits for that. Without: they are let go now.
        """
        if not self.pinned:
            return 0
        if fence is not None and not fence.passed():
            if self.pump is None:
                raise RuntimeError("another runtime's pump holds nothing beyond a call")
            self.pump.end_after(self, self.held, fence)
        else:
            self.let_go()
        return 0

    cdef void let_go(self) noexcept:
        if not self.pinned:
            return
        self.pinned = False
        if self.pump is None:
            self.other_pin.release()
            self.other_pin = None
        else:
            self.pump.let_go(self.held)

    def __enter__(self):
        self.pin()
        return self

    def __exit__(self, *exception):
        self.end()


cdef object flat_arena(runtime, dtype):
    """The device tier as one plain tensor; dense views are cut out of it."""
    storage = runtime.storage
    with torch.inference_mode(False):  # or it would be good for nothing else
        found = torch.empty(0, dtype=dtype, device=storage.device)
        found.set_(storage, 0, (storage.nbytes() // found.itemsize,), (1,))
    runtime.flat[dtype] = found
    return found


cdef int set_signs(dense, geometry) except -1:
    if geometry.is_neg():
        torch._C._set_neg(dense, True)
    if geometry.is_conj():
        torch._C._set_conj(dense, True)
    return 0


cdef list strided_parts(tensor):
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []
