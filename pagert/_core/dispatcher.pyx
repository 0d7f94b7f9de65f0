# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3, boundscheck=False, wraparound=False
"""What arrives in `__torch_dispatch__`: an operator on paged tensors is run, or looks at the same bytes in another way.

Autograd, autocast, vmap and the decomposition of composite operators happen above; what arrives is what a kernel
would get. Operators of another kind (factories, lists that are cut, what does not fit the device) take their
route in `pagert.tensor`, which this module does not know.
"""

cimport cython
from cpython.ref cimport PyObject
from libc.stdint cimport uint64_t

from pagert._core.footprint cimport Footprint, footprint_of, geometry_of
from pagert._core.operation cimport Operation, begin
from pagert._core.core cimport PAGERT_OVERWRITE, PAGERT_READ, PAGERT_UPDATE

import torch

from pagert.compiling import refuse_tracers

__all__ = ["ROUTE", "RUN", "SMALL", "VIEW", "Dispatcher", "Handling"]

globals().update(RUN=<int>RUN, SMALL=<int>SMALL, VIEW=<int>VIEW, ROUTE=<int>ROUTE)

cdef extern from "Python.h":
    object PyObject_Call(object callable, object arguments, PyObject *options)

cdef int DEPTH_MAX = 4  # views of views of ... that are kept; a loop could go on for ever

cdef object plain_tensor = torch.Tensor
cdef object make_subclass = torch.Tensor._make_subclass
cdef object plain_copy = torch._C.TensorBase.copy_
cdef object count_of_modes = torch._C._len_torch_dispatch_stack


cdef object view_of(Footprint base, geometry):
    """The footprint of a geometry in the base's region; several for several."""
    cdef Footprint view
    if type(geometry) is not plain_tensor:
        return type(geometry)([view_of(base, one) for one in geometry])
    view = Footprint.__new__(Footprint)
    view.owner = base.owner
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


cdef class Handling:
    """How one operator is handled: the part of its traits that every call needs.

    Attributes
    ----------
    name : str
        For messages.
    way : int
        `RUN`, `SMALL`, `VIEW` or `ROUTE`.
    call : callable
        The operator below its Python wrapper.
    written : frozenset
        Arguments that it writes, by position and by name.
    gradients : int or None
        The argument that an optimizer's kernel writes only to unscale it.
    overwrites : callable or None
        (arguments, options) -> whether what it writes is written whole. Raises what the operator would raise.
    whole : bool
        It looks at the whole storage of its first operand.
    product : bool
        Its result, a product of its last two arguments, may be much larger than they are.
    route : callable or None
        (kind, handling, arguments, options) runs it where this module does not: see `way`, and a product whose result
        is larger than the device tier.
    stream : callable or None
        As `route`, with the `OutOfFrames` of operands that are larger than the device tier.
    """


cdef class Dispatcher:
    """Runs operators on tensors of one class.

    Parameters
    ----------
    kind : type
        The paged tensor's class; see `Operation`.
    known : dict
        `Handling` by operator.
    analyse : callable
        operator -> handling, for an operator that is not in `known`.
    parts : int
        A list of operands, or a copy, runs at once where it takes at most one of so many equal parts
        of the device tier.
    """

    def __init__(self, kind, dict known, analyse, uint64_t parts):
        self.kind = kind
        self.known = known
        self.analyse = analyse
        self.parts = parts

    def dispatch(self, func, types, tuple args=(), kwargs=None):
        """What `__torch_dispatch__` does."""
        cdef Operation operation
        cdef Handling how
        for kind in types:
            if kind is not self.kind:
                return NotImplemented  # another wrapper's turn
        if count_of_modes():
            refuse_tracers(func)
        how = self.known.get(func)
        if how is None:
            how = self.analyse(func)
        if how.way == RUN:
            return self.run(how, args, kwargs)
        if how.way == VIEW:
            result = self.view(how, args, kwargs)
            if result is not NotImplemented:
                return result
        elif how.way == SMALL:
            operation = self.collect(how, args, kwargs)
            if operation.pages_bytes() <= operation.arena_bytes() // self.parts:
                if operation.attempt() is not None:
                    return how.route(self.kind, how, args, kwargs or {})
                return self.carry_out(operation, args, kwargs, how.call)
        return how.route(self.kind, how, args, kwargs or {})

    # Operators that look at bytes.

    cpdef object run(self, Handling how, args, kwargs=None, call=None):
        """Pin every paged operand, run the operator, or `call` in its place, on dense views, let go."""
        cdef Operation operation = self.collect(how, args, kwargs)
        if how.product and call is None and self.outgrows(operation, args):
            return how.route(self.kind, how, args, kwargs or {})
        error = operation.attempt()
        if error is not None:
            if (how.stream is None or call is not None or error.needed_bytes is None
                    or error.needed_bytes <= error.capacity_bytes):
                raise error  # others hold what it needs
            return how.stream(self.kind, how, args, kwargs or {}, error)
        return self.carry_out(operation, args, kwargs, how.call if call is None else call)

    cdef bint outgrows(self, Operation operation, args) except -1:
        """Whether the product of the last two arguments is larger than the device tier."""
        cdef uint64_t element_count, item_bytes
        cdef int axes
        # A product has at most as many elements as its operands' elements multiplied.
        if (operation.count == 2 and len(args) == 2 and operation.held.accesses[0].size_bytes
                * (&operation.held.accesses[0] + 1).size_bytes <= operation.arena_bytes()):
            return False
        left, right = args[len(args) - 2], args[len(args) - 1]
        item_bytes = left.itemsize
        element_count = <uint64_t>left.numel() * <uint64_t>right.numel()
        if element_count * item_bytes <= operation.arena_bytes():
            return False
        axes = left.dim()
        if axes < 2 or right.dim() != axes:
            return False  # the kernel says what is wrong
        element_count = <uint64_t>left.size(0) * <uint64_t>right.size(-1)
        if axes > 2:
            element_count *= <uint64_t>left.size(1)
        return element_count * item_bytes > operation.arena_bytes()

    cdef Operation collect(self, Handling how, args, kwargs):
        cdef Operation operation
        cdef Py_ssize_t i = 0
        cdef bint writes
        cdef frozenset written = how.written
        if how.overwrites is not None or how.whole or how.gradients is not None:
            return self.collect_rare(how, args, kwargs)
        operation = begin(self.kind, how.name)
        for value in args:
            writes = written and i in written
            operation.collect(value, PAGERT_UPDATE if writes else PAGERT_READ)
            i += 1
        if kwargs:
            for name, value in kwargs.items():
                writes = written and name in written
                operation.collect(value, PAGERT_UPDATE if writes else PAGERT_READ)
        return operation

    cdef Operation collect_rare(self, Handling how, args, kwargs):
        """Operands of which some are written whole, looked at with all around them, or not written after all."""
        cdef Operation operation = begin(self.kind, how.name)
        cdef Py_ssize_t i = 0
        cdef int write = PAGERT_UPDATE
        kwargs = kwargs or {}
        written = how.written
        gradients = how.gradients
        if gradients is not None and kwargs.get("grad_scale") is not None:
            gradients = None  # the kernel unscales them in place
        if how.overwrites is not None and how.overwrites(args, kwargs):
            write = PAGERT_OVERWRITE
        for value in args:
            if how.whole and i == 0 and type(value) is self.kind:
                operation.add(value, PAGERT_READ, False, True)
            elif i in written and (gradients is None or i != gradients):
                operation.collect(value, write)
            else:
                operation.collect(value, PAGERT_READ)
            i += 1
        for name, value in kwargs.items():
            operation.collect(value, write if name in written else PAGERT_READ)
        return operation

    cdef object carry_out(self, Operation operation, args, kwargs, call):
        cdef tuple operands
        try:
            operands = tuple([operation.dense(value) for value in args])
            if kwargs:
                options = {name: operation.dense(value) for name, value in kwargs.items()}
                return operation.leave(call(*operands, **options))
            return operation.leave(PyObject_Call(call, operands, NULL))
        finally:
            operation.end()

    def copy(self, target, source, int mode, bint non_blocking):
        """Copy between two tensors, at least one of them paged. `mode` is the target's.

        Returns
        -------
        bool
            False where it is large, or does not fit beside what is held. Then nothing was done.
        """
        cdef Operation operation = begin(self.kind, "copy")
        operation.collect(target, mode)
        operation.collect(source, PAGERT_READ)
        if operation.pages_bytes() > operation.arena_bytes() // self.parts:
            return False
        if operation.attempt() is not None:
            return False
        try:
            plain_copy(operation.dense(target), operation.dense(source), non_blocking)
        finally:
            operation.end()
        return True

    # Views.

    cdef object view(self, Handling how, args, kwargs):
        """Another look at the region of the first argument, or NotImplemented. Pins nothing and moves nothing."""
        cdef Footprint base
        cdef Py_ssize_t i
        tensor = args[0]
        if type(tensor) is not self.kind:
            return NotImplemented
        for i in range(1, len(<tuple>args)):
            if type((<tuple>args)[i]) is self.kind:
                return NotImplemented
        base = tensor._footprint
        if base is None:
            base = footprint_of(tensor)
        numbers = (<tuple>args)[1:]
        repeats = not kwargs and base.depth < DEPTH_MAX and are_numbers(numbers)
        if repeats and base.view_of_operator is how and base.view_numbers == numbers:
            view = base.view
        else:
            if base.geometry is None:
                base.geometry = geometry_of(tensor)
            view = view_of(base, how.call(base.geometry, *numbers, **(kwargs or {})))
            if repeats:
                base.view = view
                base.view_of_operator = how
                base.view_numbers = numbers
        if type(view) is Footprint:
            return self.wrap(tensor, view)
        return type(view)([self.wrap(tensor, one) for one in view])

    cdef object wrap(self, tensor, Footprint footprint):
        """A paged tensor of this footprint, in the same region as another one."""
        view = make_subclass(self.kind, footprint.geometry)
        view._region = footprint.owner
        view._runtime = tensor._runtime
        view._footprint = footprint
        return view
