"""Initial values that the ranks of one node share: the first rank writes them, all ranks read them.

Every rank builds the same model, so each rank knows the place of every value: the n-th stored tensor is the same on
all ranks. A rank cannot know which tensors the first rank has stored already. The ledger says this: a table in shared
memory with a row for each tensor.
"""

from __future__ import annotations

import hashlib
import time
import zlib
from bisect import bisect_right
from typing import Any

import numpy as np
import torch

from offload.errors import PeerError, StateError
from offload.io.init_file import InitFile
from offload.memory.shared_host_memory import SharedHostMemory
from offload.sizes import PAGE_BYTES
from offload.system.descriptors import AllGatherBytes, exchange_descriptors

ROWS_MAX = 1 << 22  # Tensors that the ledger can list; pages with only untouched rows take no memory.
WORKS, ENDED = 0, 1
POLL_SECONDS = (0.0005, 0.05)  # Between two reads of the ledger: the first pause, and the longest.
PATIENCE_SECONDS = 300.0  # The first peer may store nothing for so long while another peer waits for it.


class Ledger:
    """The table. `region`: shared memory of `nbytes(count)`, zero at first; it is closed here."""

    def __init__(self, region: SharedHostMemory, count: int) -> None:
        table: Any = region.data.numpy()  # keeps the mapping
        region.close()
        sizes = (PAGE_BYTES, 8 * ROWS_MAX, 4 * ROWS_MAX, count * ROWS_MAX)
        begins = [sum(sizes[:index]) for index in range(len(sizes))]
        columns = [table[begin : begin + size] for begin, size in zip(begins, sizes, strict=True)]
        state, kinds, versions, is_done = columns
        self.state = state.view("int64")  # State of the first peer. [0]: WORKS or ENDED; [1]: its stores so far.
        self.kinds = kinds.view("int64")  # Kind of the tensor, see `_kind_of`; 0: not stored yet. Set after its values.
        self.versions = versions.view("int32")  # How often a tensor has been stored again.
        self.done = is_done.reshape(count, ROWS_MAX)  # [peer, row]: 1 once that peer will not read it again.

    @staticmethod
    def nbytes(count: int) -> int:
        """Size of the shared memory for so many peers."""
        return PAGE_BYTES + (12 + count) * ROWS_MAX


class SharedInitFile:
    """One peer's side; used in place of its `InitFile`.

    Args:
        file: the first peer's file, open in this process.
        ledger: over the first peer's memory.
        all_gather: how the peers exchange bytes.
        patience_seconds: how long the first peer may store nothing.
    """

    def __init__(
        self, file: InitFile, ledger: Ledger, index: int, all_gather: AllGatherBytes, patience_seconds: float
    ) -> None:
        self._file = file
        self._ledger = ledger
        self._index = index
        self._all_gather = all_gather
        self._patience_seconds = patience_seconds
        self._offsets: list[int] = []  # Of each row; a tensor's row is its index in this list.
        self._kinds: list[int] = []
        self._versions: list[int] = []  # How often this peer has edited each row.
        self._unsynced_edits: dict[int, int] = {}  # Row that it has edited since all agreed -> the version then.
        # Row -> digest of the values that were read, to see whether a write changes them; None after `end_edits`.
        self._read_digests: dict[int, bytes] | None = {}

    @classmethod
    def join(
        cls,
        file: InitFile,
        index: int,
        count: int,
        all_gather: AllGatherBytes,
        *,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> SharedInitFile:
        """Use the file of peer 0 instead of `file`, which is closed. A collective call that calls `all_gather` once.

        Raises PeerError: a peer cannot be reached; names it. Raises BudgetError: the kernel has no memory for the
        ledger.
        """
        what = "the list of initial values"
        if index == 0:
            memory = SharedHostMemory(Ledger.nbytes(count), what, prefault=False)
            exchange_descriptors(index, count, all_gather, [file.descriptor, memory.descriptor])
            return cls(file, Ledger(memory, count), index, all_gather, patience_seconds)
        received = exchange_descriptors(index, count, all_gather, [])
        file.close()
        if len(received[0]) != 2:
            raise PeerError(f"{what}: expected two open files of peer 0, got {len(received[0])}", [0])
        descriptor, ledger = received[0]
        common = InitFile(descriptor, file.where, file.can_free_parts)
        memory = SharedHostMemory.open(ledger, Ledger.nbytes(count), what)
        return cls(common, Ledger(memory, count), index, all_gather, patience_seconds)

    @property
    def is_writer(self) -> bool:
        return self._index == 0

    def append(self, values: torch.Tensor) -> int:
        """Store a tensor's values; returns their offset. They are in the file once the first peer has called this.

        Raises StorageError: the file system has no room; StateError: there are too many tensors.
        """
        row, kind = len(self._offsets), _kind_of(values)
        if row == ROWS_MAX:
            raise StateError(f"zero.Init: expected at most {ROWS_MAX:,} parameters, got more")
        offset = self._file.reserve(values.numel() * values.element_size())
        self._offsets.append(offset)
        self._kinds.append(kind)
        self._versions.append(0)
        if self.is_writer:
            self._store(offset, values)
            self._ledger.kinds[row] = kind
        return offset

    def write(self, offset: int, values: torch.Tensor) -> None:
        """Replace the values at `offset`, unless they equal the values that were read there. Raises StorageError."""
        row = self._row_of(offset)
        if self._read_digests is not None and self._read_digests.pop(row, b"") == _digest(values):
            return
        self._unsynced_edits.setdefault(row, self._versions[row])
        self._versions[row] += 1
        if self.is_writer:
            self._store(offset, values)
            self._ledger.versions[row] = self._versions[row]

    def read(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """`numel` elements of `dtype` at `offset`: the first peer's values after this peer's last edit or later.

        Raises StorageError: the transfer failed; StateError: the first peer has built another model, has ended, or
        stores nothing any more.
        """
        row = self._row_of(offset)
        if not self.is_writer:
            self._wait_for(row)
        values = self._file.read(offset, numel, dtype)
        if self._read_digests is not None:
            self._read_digests[row] = _digest(values)
        return values

    def sync_edits(self) -> None:
        """A collective call: afterwards each peer reads the values that the first peer stored before it.

        A peer may have counted fewer edits than the first: the values that it read may already have contained an edit.
        """
        # Not the ledger: the first peer may have edited again by the time that another one reads it. Only the rows
        # edited since the last agreement: clients agree once for each module, and the store keeps all messages.
        edited = [(row, self._versions[row]) for row in self._unsynced_edits] if self.is_writer else []
        payloads = self._all_gather(np.asarray(edited, "int32").tobytes())
        writer_edits = np.frombuffer(payloads[0], "int32").reshape(-1, 2).tolist()
        for row, version in (*self._unsynced_edits.items(), *writer_edits):
            self._versions[row] = version
        self._unsynced_edits.clear()

    def free(self, offset: int, nbytes: int) -> None:
        """This peer does not read these bytes again. When this is true for all peers, their space is freed."""
        row = self._row_of(offset)
        self._ledger.done[self._index, row] = 1
        if self._ledger.done[:, row].all():
            self._file.free(offset, nbytes)

    def end_edits(self) -> bytes:
        """From now on the first peer's values are valid, not this peer's edits; returns a digest of the built model.

        Call it when the first peer stores nothing any more.
        """
        self._read_digests = None
        if not self.is_writer:
            self._versions = [0] * len(self._versions)
        self._unsynced_edits.clear()
        return hashlib.sha256(repr(self._kinds).encode()).digest()

    def close(self) -> None:
        """Close the file; its space is freed when every peer has closed it. Idempotent."""
        if self.is_writer:
            self._ledger.state[0] = ENDED
        self._file.close()

    def _store(self, offset: int, values: torch.Tensor) -> None:
        try:
            self._file.write(offset, values)
        except BaseException:
            self._ledger.state[0] = ENDED
            raise
        self._ledger.state[1] += 1

    def _row_of(self, offset: int) -> int:
        return bisect_right(self._offsets, offset) - 1

    def _wait_for(self, row: int) -> None:
        """Wait until the first peer has stored the row as often as this one."""
        state, pause = self._ledger.state, POLL_SECONDS[0]
        stored, since = -1, time.monotonic()
        while not self._is_stored(row):
            # It may have stored this row just before it ended.
            if state[0] == ENDED and not self._is_stored(row):
                raise StateError(
                    "zero.Init: rank 0 of this node has failed or released the model; see the error of that rank"
                )
            if state[1] != stored:
                stored, since = int(state[1]), time.monotonic()
            if time.monotonic() - since > self._patience_seconds:
                raise StateError(
                    f"zero.Init: rank 0 of this node has stored nothing for {self._patience_seconds:.0f} s, and has "
                    f"not stored parameter {row} as this rank last edited it; build and edit parameters in the same "
                    "way on every rank, or edit them in zero.GatheredParameters(..., modifier_rank=R)"
                )
            time.sleep(pause)
            pause = min(2 * pause, POLL_SECONDS[1])
        if self._ledger.kinds[row] != self._kinds[row]:
            raise StateError(
                f"zero.Init: parameter {row} differs from that of rank 0 of this node; build the same model on every "
                "rank"
            )

    def _is_stored(self, row: int) -> bool:
        return bool(self._ledger.kinds[row]) and self._ledger.versions[row] >= self._versions[row]


def _digest(values: torch.Tensor) -> bytes:
    array: Any = values.detach().reshape(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(array, digest_size=16).digest()


def _kind_of(values: torch.Tensor) -> int:
    """A number for dtype and shape, never 0."""
    return zlib.crc32(f"{values.dtype} {tuple(values.shape)}".encode()) + 1
