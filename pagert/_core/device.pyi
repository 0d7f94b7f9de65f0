# SPDX-License-Identifier: Apache-2.0
"""The device that a pump serves: its memory, the host memory that it copies from, what copies, and its fences."""

from pagert._core.arena import Arena

class Fence:
    """A point in the work that a device was given."""

    def passed(self) -> bool:
        """Whether all that was asked of the device before is done. Does not block."""

class Device:
    """Two arenas, the engine between them, and fences. Serves one pump, which closes it."""

    @property
    def arena(self) -> Arena:
        """The device tier's frames. A storage over its bytes has its `address` and `size_bytes`."""
    @property
    def host_arena(self) -> Arena | None:
        """The host tier's frames, in memory of the kind that the engine copies from best; None without a host tier."""
    def fence(self) -> Fence:
        """What passes when all is done that the device was asked to compute until now. Does not block."""
    def close(self) -> None:
        """Give back the engine and the memory. Nothing is in flight any more. Idempotent.

        The addresses of `arena` stay valid, since a storage was made of them; its contents are gone.
        """

class CpuDevice(Device):
    """Ordinary memory, and threads that copy. What it is asked to compute is done at once.

    Parameters
    ----------
    device_bytes, host_bytes : int
        Size of each arena; `host_bytes` of 0: no host tier.
    copy_threads : int
        Threads that copy between them, at least 1.

    Raises
    ------
    MemoryError
        An arena cannot be mapped.
    OSError
        The threads cannot be started.
    """

    def __init__(self, *, device_bytes: int, host_bytes: int = 0, copy_threads: int = 2) -> None: ...
