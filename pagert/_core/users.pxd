# SPDX-License-Identifier: Apache-2.0
# Who uses a pump at this moment: lists that are read and changed with the GIL held. No module: all is inline.

from cpython.pythread cimport PyThread_get_thread_ident

# A call that may wait, or a pin from its start to its release.
cdef struct user:
    unsigned long thread
    bint ready         # a pin that is held
    bint for_frames    # waits until other threads let go of frames; holds none by itself
    bint ending        # a pin that is let go of when a fence has passed, whatever its thread does
    user *older
    user *younger


cdef inline void link(user **youngest, user *one) noexcept:
    one.thread = PyThread_get_thread_ident()
    one.younger = NULL
    one.older = youngest[0]
    if one.older:
        one.older.younger = one
    youngest[0] = one


cdef inline void unlink(user **youngest, user *one) noexcept:
    if one.older:
        one.older.younger = one.younger
    if one.younger:
        one.younger.older = one.older
    else:
        youngest[0] = one.older


cdef inline bint others_hold(user *pins) noexcept:
    """Whether waiting for frames can help: a pin ends, or a thread that does not wait for frames itself holds one."""
    cdef unsigned long me = PyThread_get_thread_ident()
    cdef user *one = pins
    cdef user *other
    while one:
        if one.ending:
            return True
        if one.thread != me and not one.for_frames:
            other = pins
            while other and not (other.thread == one.thread and other.for_frames):
                other = other.older
            if not other:
                return True
        one = one.older
    return False


cdef inline bint any_is_ready(user *pins) noexcept:
    """Whether one of the pins is held, by a thread that goes on to use it."""
    cdef user *one = pins
    while one and not one.ready:
        one = one.older
    return one != NULL


cdef inline bint mine_is_among(user *calls) noexcept:
    """Whether one of the calls is of this thread."""
    cdef unsigned long me = PyThread_get_thread_ident()
    cdef user *one = calls
    while one and one.thread != me:
        one = one.older
    return one != NULL
