"""Processes of one machine pass open files to each other, and find out whether they are on one machine."""

from __future__ import annotations

import array
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from offload.errors import PeerError, StateError
from offload.system.linux import memory_file

# Sends this process's bytes to all peers, and returns all peers' bytes in peer order. All call it equally often.
AllGatherBytes = Callable[[bytes], list[bytes]]
SECONDS_MAX = 30.0
SAME_NODE_SECONDS_MAX = 10.0
DESCRIPTORS_PER_MESSAGE = 64  # The kernel allows 253; fewer at a time keep those in flight below RLIMIT_NOFILE.
TOKEN_BYTES = 16
HELLO = struct.Struct(f"=i{TOKEN_BYTES}s")  # The connecting peer sends its number, and the secret that only peers know.
CREDENTIALS = struct.Struct("=iII")  # struct ucred: pid, uid, gid.
NAMESPACES = ("net", "user", "pid", "ipc")


POLL_SECONDS = 0.2  # Between two checks whether the awaited peers still run.


def exchange_descriptors(
    index: int, count: int, all_gather: AllGatherBytes, descriptors: Sequence[int], *, seconds: float = SECONDS_MAX
) -> list[list[int]]:
    """Send every peer duplicates of these open files, and receive those of every peer.

    A collective call: every peer makes it, and it calls `all_gather` once. Files are sent over sockets in the abstract
    namespace, which leave no file behind. A peer is accepted if it runs as the same user and knows a shared secret.
    Each peer may send any number of descriptors. Returns for each peer its descriptors in the order sent; they are
    close-on-exec, and the caller closes them. This peer's own entry has `descriptors` themselves. Raises PeerError: a
    peer cannot be reached, runs as another user, or gave up; names it. Then no received descriptor stays open.

    Args:
        index: number of this peer, 0 <= index < count.
        all_gather: how the peers exchange bytes without files.
        descriptors: open ones; the caller keeps them.
        seconds: how long to wait for the other peers, once all of them have called.
    """
    exchange = _DescriptorExchange(index, count, descriptors, seconds)
    try:
        exchange.listen(all_gather)
        # Each peer first connects to all peers with lower numbers, then accepts those with higher ones. Peer 0
        # connects to none, so there is always one that answers, and no deadlock.
        for peer in range(index):
            exchange.connect(peer)
        for _ in range(index + 1, count):
            exchange.accept()
    except BaseException:
        exchange.abort()
        raise
    finally:
        exchange.close()
    return exchange.received


def node_identity() -> bytes:
    """Equal for processes that can share memory: they have the same boot of a kernel, namespaces and user.

    Machines that were restored from one image may also have equal values, so `same_node` really tries.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        spaces = [os.readlink(f"/proc/self/ns/{name}") for name in NAMESPACES]
    except OSError:
        boot, spaces = secrets.token_hex(TOKEN_BYTES), []  # differs from all others
    return json.dumps([boot, os.geteuid(), *spaces]).encode()


def same_node(all_gather: AllGatherBytes) -> bool:
    """True if all peers can share memory: on one kernel, in one container, and each peer got a file of each other one.

    A collective call; all peers get the same answer. It calls `all_gather` once, or three times.
    """
    token = secrets.token_hex(TOKEN_BYTES).encode()
    shared = [payload.partition(b"/") for payload in all_gather(token + b"/" + node_identity())]
    if len({identity for _, _, identity in shared}) != 1:
        return False
    tokens = [peer_token for peer_token, _, _ in shared]
    proof = _proof(token)
    try:
        reached = _check_proofs(tokens.index(token), tokens, all_gather, proof)
    finally:
        for descriptor in proof:
            os.close(descriptor)
    return all(answer == b"yes" for answer in all_gather(b"yes" if reached else b"no"))


def _proof(token: bytes) -> list[int]:
    """A file that holds the token; none if it cannot be made."""
    try:
        descriptor = memory_file()
    except OSError:
        return []
    os.write(descriptor, token)
    return [descriptor]


def _check_proofs(index: int, tokens: Sequence[bytes], all_gather: AllGatherBytes, proof: Sequence[int]) -> bool:
    """True if a file of every peer was received, and holds that peer's token."""
    try:
        received = exchange_descriptors(index, len(tokens), all_gather, proof, seconds=SAME_NODE_SECONDS_MAX)
    except PeerError:
        return False
    contents = [
        b"".join(os.pread(descriptor, 2 * TOKEN_BYTES + 1, 0) for descriptor in descriptors) for descriptors in received
    ]
    close_received(index, received)
    return contents == list(tokens)


def close_received(index: int, received: Sequence[Sequence[int]]) -> None:
    """Close the descriptors that `exchange_descriptors` returned on peer `index`, except its own."""
    for peer, descriptors in enumerate(received):
        for descriptor in descriptors if peer != index else ():
            os.close(descriptor)


class _DescriptorExchange:
    """One exchange: a socket to which others connect, and the received descriptors."""

    def __init__(self, index: int, count: int, descriptors: Sequence[int], seconds: float) -> None:
        if not 0 <= index < count:
            raise ValueError(f"index: expected 0 to {count - 1}, got {index}")
        self._index = index
        self._count = count
        self._own = list(descriptors)
        self._seconds = seconds
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._listener: socket.socket | None = None
        self._peers: list[dict[str, Any]] = []
        self._served_peers: set[int] = {index}
        self._deadline = 0.0
        self._strangers = 0
        self._running_peers: set[int] = set()  # Peers whose processes were seen running.
        self.received: list[list[int]] = [list(descriptors) if peer == index else [] for peer in range(count)]

    def listen(self, all_gather: AllGatherBytes) -> None:
        """Listen, and share the address with all peers."""
        entry: dict[str, Any] = {"pid": os.getpid(), "given": len(self._own), "token": self._token.hex(), "error": ""}
        try:
            self._listener = _socket()
            entry["name"] = f"zero-infinity-{secrets.token_hex(TOKEN_BYTES)}"
            self._listener.bind(b"\0" + entry["name"].encode())
            self._listener.listen(max(self._count, socket.SOMAXCONN))
        except OSError as error:
            entry["error"] = str(error)  # not raised yet: the others wait in `all_gather` and must learn of it
        self._peers = [json.loads(payload) for payload in all_gather(json.dumps(entry).encode())]
        if len(self._peers) != self._count:
            raise StateError(
                f"all_gather returned {len(self._peers)} payloads, expected one from each of {self._count} peers"
            )
        failed = [peer for peer, peer_entry in enumerate(self._peers) if peer_entry["error"]]
        if failed:
            reasons = "; ".join(f"{self._name(peer)}: {self._peers[peer]['error']}" for peer in failed)
            raise PeerError(f"passing files between processes: these peers could not make a socket: {reasons}", failed)
        self._deadline = time.monotonic() + self._seconds
        self._running_peers = {peer for peer, peer_entry in enumerate(self._peers) if is_running(peer_entry["pid"])}

    def connect(self, peer: int) -> None:
        """Connect to a peer; the peer sends its descriptors first."""
        with _socket() as connection:
            try:
                connection.settimeout(self._seconds_left())
                self._connect(connection, peer)
                user = _user_of(connection)
                if user != os.geteuid():
                    self._raise_peer_error(peer, f"it runs as user {user}, but this process as user {os.geteuid()}")
                connection.send(HELLO.pack(self._index, bytes.fromhex(self._peers[peer]["token"])))
                self._receive_all(connection, peer)
                self._send_all(connection)
            except ConnectionRefusedError:
                self._raise_peer_error(
                    peer, "it does not listen: it has ended, or is in another network namespace or on another machine"
                )
            except OSError as error:
                self._raise_peer_error(peer, _reason(error, self._seconds), is_gone=True)
        self._served_peers.add(peer)

    def accept(self) -> None:
        """Wait for the next peer that connects; connections of other processes are closed."""
        peer = -1
        while peer < 0:
            try:
                connection = self._accept_connection()
            except OSError as error:
                self._raise_no_connection(error)
            with connection:
                try:
                    peer = self._identify_peer(connection)
                    if peer >= 0:
                        self._send_all(connection)
                        self._receive_all(connection, peer)
                except OSError as error:
                    if peer >= 0:
                        self._raise_peer_error(peer, _reason(error, self._seconds), is_gone=True)
        self._served_peers.add(peer)

    def abort(self) -> None:
        close_received(self._index, self.received)

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()

    def _connect(self, connection: socket.socket, peer: int) -> None:
        address = b"\0" + self._peers[peer]["name"].encode()
        while True:
            try:
                connection.connect(address)
                return
            except BlockingIOError:  # too many connections wait, and a socket with a timeout does not join the queue
                if time.monotonic() > self._deadline:
                    raise TimeoutError from None
                time.sleep(1e-3)

    def _accept_connection(self) -> socket.socket:
        if self._listener is None:
            raise StateError("this process does not listen")
        dead: list[int] = []
        while True:
            self._listener.settimeout(min(self._seconds_left(), POLL_SECONDS))
            try:
                connection, _ = self._listener.accept()
                break
            except TimeoutError:
                if time.monotonic() >= self._deadline:
                    raise
                if dead:  # noticed in the last round; since then no connection that it made before has arrived
                    self._raise_peer_error(dead[0], f"its process has ended{self._refused_text}")
                awaited = self._running_peers - self._served_peers - set(range(self._index))
                dead = [peer for peer in sorted(awaited) if not is_running(self._peers[peer]["pid"])]
        connection.settimeout(self._seconds_left())
        return connection

    def _identify_peer(self, connection: socket.socket) -> int:
        """Number of the peer that connected; -1 for another process."""
        if _user_of(connection) == os.geteuid():
            hello = connection.recv(HELLO.size)
            if len(hello) == HELLO.size:
                peer, token = HELLO.unpack(hello)
                if secrets.compare_digest(token, self._token) and self._index < peer < self._count:
                    return int(peer)
        self._strangers += 1
        return -1

    def _send_all(self, connection: socket.socket) -> None:
        for first in range(0, len(self._own), DESCRIPTORS_PER_MESSAGE):
            part = self._own[first : first + DESCRIPTORS_PER_MESSAGE]
            connection.settimeout(self._seconds_left())
            socket.send_fds(connection, [b"f"], part)

    def _receive_all(self, connection: socket.socket, peer: int) -> None:
        received, expected = self.received[peer], self._peers[peer]["given"]
        while len(received) < expected:
            connection.settimeout(self._seconds_left())
            message, descriptors, cut = _receive(connection)
            received += descriptors
            if not message:
                self._raise_peer_error(
                    peer, f"it stopped after {len(received)} of {expected} descriptors", is_gone=True
                )
            if cut:
                self._raise_peer_error(peer, "this process cannot open more files; raise ulimit -n")

    @property
    def _refused_text(self) -> str:
        return f"; {self._strangers} unknown connections were refused" if self._strangers else ""

    def _seconds_left(self) -> float:
        """Seconds until the deadline; never 0, so that data that has arrived already can be received."""
        return max(self._deadline - time.monotonic(), 1e-3)

    def _name(self, peer: int) -> str:
        return f"peer {peer} (pid {self._peers[peer]['pid']})"

    def _raise_peer_error(self, peer: int, why: str, *, is_gone: bool = False) -> NoReturn:
        """Raise PeerError; `is_gone`: the peer does not answer any more."""
        # A peer leaves when it sees another one's death, and may be noticed first: also name the one that died.
        running = sorted(self._running_peers - {peer}) if is_gone else []
        dead = [candidate for candidate in running if not is_running(self._peers[candidate]["pid"])]
        first = f"; {', '.join(map(self._name, dead))} ended" if dead else ""
        raise PeerError(f"passing files between processes: {self._name(peer)}: {why}{first}", [*dead, peer])

    def _raise_no_connection(self, error: OSError) -> NoReturn:
        missing = [peer for peer in range(self._index + 1, self._count) if peer not in self._served_peers]
        names = ", ".join(self._name(peer) for peer in missing)
        raise PeerError(
            f"passing files between processes: no connection from {names}: "
            f"{_reason(error, self._seconds)}{self._refused_text}",
            missing,
        ) from error


def is_running(pid: int) -> bool:
    """True if a process with that id is visible, and has not ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _user_of(connection: socket.socket) -> int:
    """Effective user of the process at the other end, according to the kernel."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    return int(CREDENTIALS.unpack(packed)[1])


def _receive(connection: socket.socket) -> tuple[bytes, list[int], bool]:
    """One message, its descriptors, and whether some of them could not be received."""
    room = socket.CMSG_SPACE(DESCRIPTORS_PER_MESSAGE * array.array("i").itemsize)
    message, ancillary, flags, _ = connection.recvmsg(1, room, socket.MSG_CMSG_CLOEXEC)
    descriptors = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    return message, descriptors.tolist(), bool(flags & socket.MSG_CTRUNC)


def _reason(error: OSError, seconds: float) -> str:
    if isinstance(error, TimeoutError):
        return f"nothing came within {seconds:g} s; check that the process is alive and got this far"
    return error.strerror or str(error)


# ---- sockets -------------------------------------------------------------------------------------------------------
# Shuts connections that a library has opened and offers no way to close.
#
# gloo waits for a message until its timeout, half an hour by default, and a process cannot end before. If the
# connection is shut down, the wait ends at once, here and at the other end.


class Connection(NamedTuple):
    """One end of a TCP connection of this process."""

    descriptor: int
    inode: int  # Shows whether the descriptor is still this connection.
    ends: tuple[str, str]  # Address and port of this end and of the other end.


def connections() -> set[Connection]:
    """Every TCP connection that this process has now; none if the system has no /proc."""
    ends = set()
    with suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                    ends.add(_describe(int(name)))
    return ends


def _describe(descriptor: int) -> Connection:
    with socket.socket(fileno=os.dup(descriptor)) as end:
        if end.family not in (socket.AF_INET, socket.AF_INET6) or end.type != socket.SOCK_STREAM:
            raise OSError("not TCP")
        ends = (_address(end.getsockname()), _address(end.getpeername()))
        return Connection(descriptor, os.fstat(descriptor).st_ino, ends)


def _address(name: tuple[str, int]) -> str:
    return f"{name[0]} {name[1]}"


def shut_down(ends: Iterable[Connection]) -> None:
    """Shut these connections down, which ends transfers in flight; their owners keep the descriptors."""
    for end in ends:
        with suppress(OSError):
            if os.fstat(end.descriptor).st_ino == end.inode:
                with socket.socket(fileno=os.dup(end.descriptor)) as opened:
                    opened.shutdown(socket.SHUT_RDWR)
