# SPDX-License-Identifier: Apache-2.0
"""Memory of other processes and hosts through UCX: register it, get from it, put into it.

Built where UCX's headers are; without it, ``import kvtier._core.ucx`` is an ImportError. One
thread, the service's loop: nothing here is thread safe.

**Trust.** A peer to whom a worker's address is given is inside this process. Access rights of a
registration are kept by network cards only: between processes of one host (process_vm_writev), and
over TCP, where UCX's own code at the target copies to whatever address the message names, a peer
reads and writes all memory, registered or not, and ends the process with a wrong address. The
ranges and rights in remote keys are checked on the side that starts an operation, so they keep
honest peers from mistakes; against others only authentication before the address is given helps.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

WINDOW: int
"""Chunks of an endpoint that are with UCX at the same time."""
TURN_SECONDS: float
"""How long `Worker.progress` goes on while there is something to do."""

def has_rdma() -> bool:
    """Whether a network card of this host reads and writes memory by itself, and the library (once
    it is loaded) knows such cards, as the system's does and the wheel's does not."""

def load() -> str:
    """Load the library, once a process.

    The system's if the machine has an RDMA device, else that of the wheel ``libucx-cu12``, which
    knows no such device but is newer. It is opened by its path and finds its other parts beside it
    and its plugins in ``ucx/`` below (it asks the loader where it lies itself), so neither
    LD_LIBRARY_PATH nor UCX_MODULE_DIR is needed. It stays until the process ends. SIGHUP, which UCX
    would take for itself, is left alone unless UCX_DEBUG_SIGNO says otherwise; its log goes to
    standard error unless UCX_LOG_FILE does.

    Returns
    -------
    str
        Version and path, for logs.

    Raises
    ------
    ConfigError
        There is none, or parts of two installations came together.
    """

def seal(magic: bytes, context: bytes, body: bytes) -> bytes:
    """What `Worker.address` and `Memory.rkey` are packed with: a checksum and the context's id."""

def unseal(magic: bytes, data: bytes) -> tuple[bytes, bytes]:
    """Context and body of what `seal` made; TierLostError for anything else.

    UCX crashes on an address or key that is not one. The checksum finds damage, not malice: take
    addresses and keys from authenticated peers only.
    """

class Context:
    """UCX with its transports, as the UCX_* variables say. Freed when nothing of it is left.

    Raises
    ------
    ConfigError
        See `load`.
    TierLostError
        UCX does not start.
    """

    @property
    def id(self) -> bytes:
        """Names this context in addresses and remote keys; 8 random bytes."""
    def register(self, address: int, length: int, *, writable: bool) -> Memory:
        """Let peers read, or read and write, `length` bytes at `address`.

        The caller keeps the memory mapped until `Memory.close`. `writable` is kept by network cards
        and by honest peers, see the module; over shared memory and TCP a peer that wants to writes
        anyway.

        Raises
        ------
        ValueError
            No address or no length.
        TierLostError
            The memory cannot be registered.
        """

class Memory:
    """A registration. Made by `Context.register`."""

    @property
    def rkey(self) -> bytes:
        """Remote key for peers, with the range and its rights."""
    def close(self) -> None:
        """Take the registration back. Harmless when repeated.

        Only network cards then refuse what peers still send; over shared memory and TCP their gets
        and puts go on, so memory must not be unmapped or used for something else before the peer
        has said that it has ended, or its process has.
        """

class Worker:
    """Connections and their progress; has an event descriptor.

    Operations end, and callbacks are called, in `progress` and `close` only. What a callback raises
    goes to ``sys.unraisablehook``.
    """

    def __init__(self, context: Context) -> None: ...
    @property
    def address(self) -> bytes:
        """Where peers connect to; a few hundred bytes."""
    @property
    def closed(self) -> bool: ...
    def fileno(self) -> int:
        """Descriptor that can be read after `arm` said True and something happened."""
    def arm(self) -> bool:
        """Ask for an event. False: there is something to do already, call `progress`."""
    def progress(self) -> int:
        """Post and move what is to be moved, for `TURN_SECONDS` and one chunk at most, with the
        GIL released; then call callbacks. How much happened, 0 if nothing."""
    def connect(self, address: bytes, on_error: Callable[[str], None]) -> Endpoint:
        """Endpoint to the worker of this address, which needs to do nothing for it.

        Nothing is sent yet. `on_error` is called at most once, when the connection breaks; its
        operations then end with errors, and it is still to be closed. A peer that is killed breaks
        it at once over TCP and shared memory. A peer that hangs does not: have a deadline.

        Raises
        ------
        TierLostError
            The bytes are no address, or no transport leads there.
        """
    def close(self) -> None:
        """Close all endpoints by force, within 2 s, then the worker. Harmless when repeated.

        Operations under way get their callbacks, with an error, before this returns.
        """

class RemoteKey:
    """Memory of a peer; good for the endpoint that unpacked it, until that is closed."""

    @property
    def address(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def writable(self) -> bool: ...

class Request:
    """An operation, for `Endpoint.cancel`."""

    @property
    def ended(self) -> bool: ...

class Endpoint:
    """A connection to a peer's worker. Made by `Worker.connect`.

    Operations are given to UCX in the order they were started, by `Worker.progress`, at most
    `WINDOW` chunks at a time. Each calls its callback exactly once, after the call that started it
    has returned: with None, or with an error. By then nothing of it touches local memory any more;
    until then the caller keeps that memory. After `close` they raise ClosedError.
    """

    def unpack(self, rkey: bytes) -> RemoteKey:
        """Take in a key of the peer's; once for each key, it is kept until the endpoint is closed.

        Raises
        ------
        TierLostError
            The bytes are no key, or one of another process, or of a UCX that this one does not
            know: 1.21 and 1.22 know each other, 1.13 and 1.21 do not.
        """
    def get(
        self,
        local_address: int,
        length: int,
        remote_address: int,
        remote_key: RemoteKey,
        callback: Callable[[str | None], None],
    ) -> Request:
        """Read one chunk; as `get_batch`."""
    def put(
        self,
        local_address: int,
        length: int,
        remote_address: int,
        remote_key: RemoteKey,
        callback: Callable[[str | None], None],
    ) -> Request:
        """Write one chunk; as `put_batch`."""
    def get_batch(
        self,
        local: NDArray[np.int64],
        remote: NDArray[np.int64],
        lengths: NDArray[np.int64],
        remote_key: RemoteKey,
        callback: Callable[[str | None], None],
    ) -> Request:
        """Read chunks: `lengths[i]` bytes at the peer's `remote[i]` into `local[i]`.

        After an error no further chunk is begun; which ones were read is not known.

        Raises
        ------
        ValueError
            A chunk is not inside the key's range, or the key is another endpoint's.
        """
    def put_batch(
        self,
        local: NDArray[np.int64],
        remote: NDArray[np.int64],
        lengths: NDArray[np.int64],
        remote_key: RemoteKey,
        callback: Callable[[str | None], None],
    ) -> Request:
        """Write chunks; None means that all of them are seen at the target, which has to run: a
        peer that is stopped confirms nothing, though a get from it may end on the same host.

        An error means neither that they were written nor that they were not, nor that they will
        not be any more: see `close`.

        Raises
        ------
        ValueError
            As `get_batch`, or the memory is for reading only.
        """
    def flush(self, callback: Callable[[str | None], None]) -> Request:
        """Ends when all that was started before is done here and seen at the target."""
    def cancel(self, request: Request) -> None:
        """Begin no further chunk of it. Its callback comes when those with UCX have ended.

        UCX has no cancellation of a get or put: against a peer that hangs, only `close` by force
        ends these. Harmless after the end.
        """
    def close(self, *, force: bool, callback: Callable[[str | None], None]) -> Request:
        """Close the connection; the callback (always None) comes when nothing is under way.

        With `force` now: what is under way ends with an error, what was queued never begins; needs
        nothing of the peer. Without, after the operations that were started before. May be called
        again, so also by force after a close that takes too long.

        After the callback none of this endpoint's operations touches local memory: neither a late
        answer to a get nor a read for a put. It says nothing of what the peer does: puts of its own
        into our memory go through its endpoint, and what of our puts was sent may still arrive
        there. What UCX made at the peer to answer us, and the sockets of that on both sides, go
        when its keepalive finds nobody (20 s; UCX_KEEPALIVE_INTERVAL).

        Raises
        ------
        ClosedError
            The worker is closed, and this with it.
        """
