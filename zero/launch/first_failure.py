"""What went wrong first: the rank that failed on its own, its host, and its traceback or the signal that ended it."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

# Signals of a rank's own failure. The reaper sends SIGKILL too, but seconds after a failure, which is then the earlier.
CRASHES = frozenset({signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE})
# Words in the errors of a rank whose peer has gone.
PEER_ERROR = re.compile(
    r"Connection (closed|reset|refused)|Broken pipe|Dist(Backend|Network|Store)Error|gloo|NCCL|process group|TCPStore"
)
LOCAL_RANK = "--local_rank"
ARGPARSE_STATUS = 2
"""Exit status with which argparse ends a script, after its own message."""
LAST_LINES = 5
"""The last lines of an error: its message, and the line of the script that raised it."""
RULE = "=" * 72


@dataclass(frozen=True, slots=True)
class Failure:
    rank: int
    host: str
    exitcode: int  # Negative: the number of the signal that ended it.
    seconds: float  # Since the epoch, when it was noticed or raised.
    text: str = ""  # Traceback or message.
    cause: str = ""  # The kernel's information about it.

    @property
    def sort_key(self) -> tuple[bool, float]:
        """Smallest for the first failure: a rank's own failure before one that follows from another's, then by time."""
        crashed = self.exitcode < 0 and -self.exitcode in CRASHES
        last_line = (self.text.strip().splitlines() or [""])[-1]
        follows = not crashed and (self.exitcode == -signal.SIGTERM or bool(PEER_ERROR.search(last_line)))
        return follows, self.seconds

    @property
    def ending(self) -> str:
        if self.exitcode >= 0:
            return f"exit code {self.exitcode}"
        try:
            name = signal.Signals(-self.exitcode).name
        except ValueError:
            name = f"signal {-self.exitcode}"
        return f"killed by {name}"


def from_torch(failures: Mapping[int, ProcessFailure], host: str) -> list[Failure]:
    """The failed ranks of this node, as reported by torchrun."""
    reported = []
    for rank, failure in failures.items():
        message = failure.error_file_data.get("message", "")
        extra = message.get("extraInfo", {}) if isinstance(message, dict) else {}
        text = str(extra.get("py_callstack", "")) or (message.get("message", "") if isinstance(message, dict) else "")
        seconds = extra.get("seconds", failure.timestamp)  # torchrun's own timestamp is in whole seconds, rounded down
        reported.append(Failure(rank, host, failure.exitcode, float(seconds), text))
    return reported


def find_first(failures: Iterable[Failure]) -> Failure:
    return min(failures, key=lambda failure: failure.sort_key)


def describe(failure: Failure, others: int, *, local_rank: bool = True) -> str:
    """The final message of a job that failed.

    Args:
        failure: the first failure.
        others: number of further failed ranks, most likely as a consequence.
        local_rank: the scripts get --local_rank.
    """
    head = f"zero run: rank {failure.rank} on {failure.host} failed first: {failure.ending}"
    if others:
        head += f"; {others} other rank{'s' * (others != 1)} ended after it"
    lines = [RULE, head]
    if failure.text:
        lines.append(failure.text.rstrip())
    if failure.cause:
        lines.append(f"rank {failure.rank} on {failure.host}: {failure.cause}")
    if not failure.text and not failure.cause:
        lines.append("(no traceback: the program exited by itself; see its own output above)")
    if local_rank and _may_be_local_rank(failure):
        lines.append(
            f"zero run passes {LOCAL_RANK} to the script, as DeepSpeed does; use --no_local_rank to leave it out"
        )
    return "\n".join([*lines, RULE])


def _may_be_local_rank(failure: Failure) -> bool:
    """True if the script may have failed because it did not expect --local_rank, for example as argv[1]."""
    if not failure.text and not failure.cause:
        return failure.exitcode == ARGPARSE_STATUS
    return any(LOCAL_RANK in line for line in failure.text.rstrip().splitlines()[-LAST_LINES:])
