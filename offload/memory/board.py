"""A table of numbers that the processes of one machine publish to each other, and waits for a number.

[Note: epochs] Each peer writes its own row and reads all rows. A cell counts upwards: "the first n of these are done".
After a peer reads a number, it also sees every byte that the publisher wrote to shared memory or passed to the kernel
before. So data needs no locks: write it, then publish; wait until it is published, then read it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import os
import platform
import select
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch

import native
from offload.errors import BudgetError, NativeError, PeerError, StateError, WatchdogError
from offload.memory.shared_host_memory import SharedHostMemory
from offload.sizes import align_up
from offload.system.descriptors import AllGatherBytes, close_received, exchange_descriptors
from offload.system.linux import open_pidfd

CELL_BYTES = 8
ROW_ALIGN_BYTES = 128  # Rows of two peers share no cache line, and no pair of lines: some processors fetch pairs.
POLL_SECONDS = (50e-6, 1e-3)  # Between two reads of an awaited number: the first pause, and the longest.
POLL_GROWTH = 1.5
TFD_NONBLOCK, TFD_CLOEXEC, CLOCK_MONOTONIC = os.O_NONBLOCK, os.O_CLOEXEC, 1
STRONGLY_ORDERED = ("x86_64", "AMD64", "i686")


class NodeBoard:
    """A board is a table in which the processes of one machine publish their progress to each other.

    [peers][columns] int64 in shared memory, all 0 at first.

    Args:
        columns: cells per peer.
        memory: of `nbytes_for(count, columns)`; the board owns it from now on.
        pidfds: pidfds of the peers in peer order, which the board owns from now on; without them a peer's death is
            noticed only when a deadline passes.
    """

    def __init__(
        self, index: int, count: int, columns: int, memory: SharedHostMemory, pidfds: Sequence[int] = ()
    ) -> None:
        self.index, self.count, self.columns = index, count, columns
        self._stride = _row_bytes(columns) // CELL_BYTES
        self._memory, self._pidfds = memory, list(pidfds)
        self._cells = _cells(memory.data)
        self._poll = select.poll()
        for pidfd in self._pidfds:
            self._poll.register(pidfd, select.POLLIN)
        self._cells.publish(index * self._stride + columns, os.getpid())

    @staticmethod
    def nbytes_for(count: int, columns: int) -> int:
        """Bytes of shared memory that a board takes."""
        return count * _row_bytes(columns)

    @classmethod
    def join(cls, index: int, count: int, columns: int, all_gather: AllGatherBytes) -> NodeBoard:
        """Make a board together: every peer calls this, with equal `count` and `columns`. It calls `all_gather` once.

        Raises PeerError: a peer cannot be reached; names it. Raises StateError: the peers requested boards of different
        sizes. Raises BudgetError: the kernel refused the memory.
        """
        nbytes = cls.nbytes_for(count, columns)
        new_memory = _try_make_memory(nbytes) if index == 0 else None
        with contextlib.ExitStack() as undo:
            descriptors = [] if isinstance(new_memory, BudgetError) else _own_pidfd()
            for descriptor in descriptors:
                undo.callback(os.close, descriptor)
            if isinstance(new_memory, SharedHostMemory):
                undo.callback(new_memory.close)
                descriptors.insert(0, new_memory.descriptor)
            received = exchange_descriptors(index, count, all_gather, descriptors)
            undo.pop_all()
        # On every peer, the first descriptor of peer 0 is the board; all others are pidfds, one per peer.
        first, received[0] = received[0][:1], received[0][1:]
        pidfds = _peer_pidfds(received)
        try:
            if isinstance(new_memory, BudgetError):
                raise new_memory
            if not first:
                raise PeerError("the board: peer 0 could not make it; see the error of peer 0", [0])
            memory = new_memory or SharedHostMemory.open(first[0], nbytes, "board", prefault=True)
            return cls(index, count, columns, memory, pidfds)
        except BaseException:
            for descriptor in pidfds:
                os.close(descriptor)
            raise

    def publish(self, column: int, value: int) -> None:
        """Set this peer's cell to `value`; readers of it also see everything that this process wrote before."""
        self._cells.publish(self._cell(self.index, column), value)

    def read(self, peer: int, column: int) -> int:
        """The number that `peer` published last; all data that it wrote before can now be read."""
        return self._cells.read(self._cell(peer, column))

    def read_all(self, column: int) -> list[int]:
        """The numbers of all peers, in peer order."""
        return [self.read(peer, column) for peer in range(self.count)]

    def is_reached_by_all(self, column: int, value: int) -> bool:
        """True if every peer's number is at least `value`."""
        return all(number >= value for number in self.read_all(column))

    async def wait_for_peer(
        self,
        peer: int,
        column: int,
        value: int,
        *,
        what: str = "",
        deadline_seconds: float,
        on_pause: Callable[[], None] | None = None,
    ) -> None:
        """Wait until `peer` has published at least `value`. The loop runs other tasks meanwhile.

        Raises WatchdogError: the deadline has passed; names the peer, the awaited value and the peer's present one.
        Raises PeerError: the peer has ended before; names it.

        Args:
            what: the meaning of the wait; appears in errors.
            deadline_seconds: a longer wait is an error.
            on_pause: called before every pause, so that work that the peer itself waits for proceeds.
        """
        if self.read(peer, column) < value:
            await self._wait([peer], column, value, what, deadline_seconds, on_pause)

    async def wait_for_all(
        self,
        column: int,
        value: int,
        *,
        what: str = "",
        deadline_seconds: float,
        on_pause: Callable[[], None] | None = None,
    ) -> None:
        if not self.is_reached_by_all(column, value):
            await self._wait(range(self.count), column, value, what, deadline_seconds, on_pause)

    def dead_peers(self) -> list[int]:
        if not self._pidfds:
            return []
        readable = {descriptor for descriptor, _ in self._poll.poll(0)}
        return [peer for peer, pidfd in enumerate(self._pidfds) if pidfd in readable]

    def peer_name(self, peer: int) -> str:
        """The name of a peer in errors."""
        return f"peer {peer} (pid {self._cells.read(peer * self._stride + self.columns)})"

    def close(self) -> None:
        """Free the memory and close the descriptors. Idempotent."""
        pidfds, self._pidfds = self._pidfds, []
        for pidfd in pidfds:
            os.close(pidfd)
        self._cells = _ClosedCells()
        self._memory.close()

    async def _wait(
        self,
        peers: Sequence[int],
        column: int,
        value: int,
        what: str,
        deadline_seconds: float,
        on_pause: Callable[[], None] | None,
    ) -> None:
        loop = asyncio.get_running_loop()
        begin, pause = loop.time(), POLL_SECONDS[0]
        with Sleeper() as sleeper:
            while True:
                dead_peers = (
                    self.dead_peers()
                )  # read before the cells: a number that a peer published before it died still counts
                late_peers = [peer for peer in peers if self.read(peer, column) < value]
                if not late_peers:
                    return
                what = what or f"column {column} to reach {value:,}"
                if ended_peers := [peer for peer in late_peers if peer in dead_peers]:
                    names = ", ".join(
                        f"{self.peer_name(peer)} ended at {self.read(peer, column):,}" for peer in ended_peers
                    )
                    raise PeerError(f"waiting for {what}: expected {value:,}, but {names}", ended_peers)
                if loop.time() - begin >= deadline_seconds:
                    names = ", ".join(
                        f"{self.peer_name(peer)} is at {self.read(peer, column):,}" for peer in late_peers
                    )
                    raise WatchdogError(
                        f"waiting for {what}: expected {value:,}, but after {deadline_seconds:g} s {names}"
                    )
                if on_pause is not None:
                    on_pause()
                await sleeper.sleep(pause)
                pause = min(pause * POLL_GROWTH, POLL_SECONDS[1])

    def _cell(self, peer: int, column: int) -> int:
        if not (0 <= peer < self.count and 0 <= column < self.columns):
            raise StateError(
                f"board of {self.count} peers and {self.columns} columns: there is no cell [{peer}][{column}]"
            )
        return peer * self._stride + column


class Sleeper:
    """Pauses of an asyncio task. They may be shorter than a millisecond, to which the loop rounds its own pauses up.

    A context manager; one task at a time.
    """

    def __init__(self) -> None:
        self._timer = -1

    def __enter__(self) -> Sleeper:
        library = _timers()
        if library is not None:
            self._timer = library.timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC)
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer >= 0:
            os.close(self._timer)

    async def sleep(self, seconds: float) -> None:
        library, loop = _timers(), asyncio.get_running_loop()
        if library is None or self._timer < 0:
            await asyncio.sleep(seconds)
            return
        nanoseconds = max(round(seconds * 1e9), 1)
        timer_spec = struct.pack("@qqqq", 0, 0, nanoseconds // 10**9, nanoseconds % 10**9)  # struct itimerspec
        alarm = loop.create_future()
        library.timerfd_settime(self._timer, 0, timer_spec, None)
        loop.add_reader(self._timer, _wake, alarm)
        try:
            await alarm
        finally:
            loop.remove_reader(self._timer)


def _wake(alarm: asyncio.Future[None]) -> None:
    if not alarm.done():
        alarm.set_result(None)


@functools.cache
def _timers() -> Any:
    """The C library, if it has timer descriptors and 64-bit times."""
    library = ctypes.CDLL(None)
    return library if hasattr(library, "timerfd_create") and struct.calcsize("@P") == 8 else None


def _row_bytes(columns: int) -> int:
    return align_up((columns + 1) * CELL_BYTES, ROW_ALIGN_BYTES)  # the last cell is the pid


def _try_make_memory(nbytes: int) -> SharedHostMemory | BudgetError:
    """The memory of a board, or the error: it is not raised here, since the other peers wait and must learn of it."""
    try:
        return SharedHostMemory(nbytes, "board")
    except BudgetError as error:
        return error


def _own_pidfd() -> list[int]:
    """A pidfd of this process, if the kernel has them."""
    try:
        return [open_pidfd()]
    except OSError:
        return []


def _peer_pidfds(received: list[list[int]]) -> list[int]:
    """One descriptor per peer, or none at all."""
    if all(received):
        return [descriptors[0] for descriptors in received]
    close_received(-1, received)
    return []


class _NativeCells:
    """Atomic numbers, by the native library."""

    def __init__(self, library: native.Native, data: torch.Tensor) -> None:
        self._lib, self._data = library.lib, data
        self._first = library.ffi.cast("int64_t *", data.data_ptr())

    def publish(self, cell: int, value: int) -> None:
        self._lib.zn_board_publish(self._first + cell, value)

    def read(self, cell: int) -> int:
        return int(self._lib.zn_board_read(self._first + cell))


class _PythonCells:
    """The same without the native library, on x86 only.

    On x86 an aligned 8-byte number is read or written at once, and other cores see stores in the order of the program.
    """

    def __init__(self, data: torch.Tensor) -> None:
        if platform.machine() not in STRONGLY_ORDERED:
            raise NativeError(
                f"sharing memory between processes on {platform.machine()} needs the native library: "
                "run python -m native.build"
            )
        self._cells: Any = memoryview(data.numpy().view("int64"))  # type: ignore[arg-type]

    def publish(self, cell: int, value: int) -> None:
        self._cells[cell] = value

    def read(self, cell: int) -> int:
        return int(self._cells[cell])


class _ClosedCells:
    """The cells of a closed board: every operation raises StateError."""

    def __getattr__(self, operation: str) -> Any:
        raise StateError("the board is closed")


def _cells(data: torch.Tensor) -> _NativeCells | _PythonCells | _ClosedCells:
    try:
        return _NativeCells(native.load(), data)
    except native.NativeUnavailable:
        return _PythonCells(data)
