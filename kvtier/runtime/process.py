# SPDX-License-Identifier: Apache-2.0
"""Carrier that runs the service in a child process.

Owns the child, its pidfd and a socket pair. Everything is non-blocking on the owner's thread: what
the socket does not take at once waits in a bounded buffer; a full buffer means overload and is
reported as such. The child gets all it needs as its first message, nothing in its arguments.
It counts its frames in the region's header, so that the owner asks the socket only when there is
something: in a scheduler step each system call finds the caches cold and costs 10 to 20 us.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from kvtier.config import Config
from kvtier.errors import InternalError, TierLostError
from kvtier.host.region import Region
from kvtier.runtime import messages as m
from kvtier.runtime.carrier import Carrier

FRAME = struct.Struct("<I")

RECEIVE_BYTES = 1 << 18
BUFFER_BYTES = 4 << 20
"""What may wait for the child before a send is refused: some 50,000 keys."""

DROPPED_VARIABLES = ("PROMETHEUS_MULTIPROC_DIR", "LD_PRELOAD")
DROPPED_PREFIXES = ("OMP_", "KMP_", "GOMP_")


class Setup(msgspec.Struct, frozen=True, array_like=True):
    """First message to the child."""

    config: Config
    namespace: dict[str, str]
    region_fd: int
    sys_path: list[str]
    log_level: int
    replica: int


class FrameReader:
    """Cuts a byte stream into frames."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes | bytearray | memoryview) -> list[memoryview]:
        """Complete frames, now that `data` has come; valid as long as that does not change."""
        if self._rest:
            self._rest += data
            if len(self._rest) < FRAME.size + self._length(self._rest, 0):
                return []
            data, self._rest = self._rest, bytearray()
        view = memoryview(data)
        frames = []
        start = 0
        while (end := start + FRAME.size + self._length(view, start)) <= len(view):
            frames.append(view[start + FRAME.size : end])
            start = end
        self._rest += view[start:]
        return frames

    @staticmethod
    def _length(data: bytearray | memoryview, start: int) -> int:
        """Of the frame at `start`, or as long as that is not known more than there is of it."""
        if len(data) - start < FRAME.size:
            return len(data)
        (length,) = FRAME.unpack_from(data, start)
        return int(length)


def child_environment() -> dict[str, str]:
    """This process's environment without what would harm the child."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in DROPPED_VARIABLES and not name.startswith(DROPPED_PREFIXES)
    }


class ProcessCarrier(Carrier):
    """Service in a child process.

    Parameters
    ----------
    config : Config
    namespace : dict of str
    region : Region
        Stays the caller's.
    log_level : int
    replica : int
        Number of this instance among equally configured ones on this host.
    """

    def __init__(
        self,
        config: Config,
        namespace: dict[str, str],
        region: Region,
        log_level: int,
        replica: int = 0,
    ) -> None:
        self._replica = replica
        self._config = config
        self._namespace = namespace
        self._region = region
        self._log_level = log_level
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._exit: select.poll | None = None  # of the pidfd
        self._socket: socket.socket | None = None
        self._reader = FrameReader()
        self._frames = 0  # received from this child
        self._pending = bytearray()
        self._received = memoryview(bytearray(RECEIVE_BYTES))
        self._wake: Callable[[], None] | None = None
        self._watcher: threading.Thread | None = None
        self._stop_r, self._stop_w = -1, -1

    @property
    def pid(self) -> int:
        """Process id of the child, 0 without one."""
        return self._process.pid if self._process is not None else 0

    def start(self, timeout_seconds: float) -> list[m.ToOwner]:
        try:
            self._spawn()
        except OSError as exc:
            raise TierLostError(f"no process for the tier service: {exc}") from exc
        deadline = time.monotonic() + timeout_seconds
        messages: list[m.ToOwner] = []
        while not any(isinstance(message, m.Ready) for message in messages):
            assert self._socket is not None
            self._flush()
            left = deadline - time.monotonic()
            want_write = [self._socket] if self._pending else []
            if left <= 0 or not self.alive:
                code = self._process.poll() if self._process is not None else None
                self._kill()
                raise TierLostError(
                    f"the tier service's process did not start within {timeout_seconds:g} seconds"
                    if code is None
                    else f"the tier service's process ended with code {code} while it started"
                )
            select.select([self._socket], want_write, [], min(left, 0.2))
            messages += self.receive()
        return messages

    def _spawn(self) -> None:
        with contextlib.ExitStack() as undo, contextlib.ExitStack() as passed:
            ours, theirs = socket.socketpair()
            undo.callback(ours.close)
            passed.callback(theirs.close)
            ours.setblocking(False)
            for end in (ours, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
            region_fd = os.dup(self._region.fileno())
            self._region.service_frames = self._frames = 0
            passed.callback(os.close, region_fd)
            # The child runs this file's package wherever it was imported from.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kvtier.runtime.child", str(theirs.fileno())],
                pass_fds=(theirs.fileno(), region_fd),
                process_group=0,
                stdin=subprocess.DEVNULL,
                env=child_environment() | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
            )
            undo.callback(self._kill)
            self._pidfd = os.pidfd_open(self._process.pid)
            undo.pop_all()
        self._exit = select.poll()
        self._exit.register(self._pidfd, select.POLLIN)
        self._socket = ours
        self._reader = FrameReader()
        self._pending = bytearray()
        # The number that the child knows it by; here it is closed.
        setup = Setup(
            self._config, self._namespace, region_fd, sys.path, self._log_level, self._replica
        )
        data = msgspec.msgpack.encode(setup, enc_hook=str)
        self._pending += FRAME.pack(len(data)) + data
        self._flush()
        self._watch()

    def _flush(self) -> None:
        if self._socket is None:
            return
        while self._pending:
            try:
                sent = self._socket.send(self._pending)
            except BlockingIOError:
                return
            except OSError:
                # The child is gone; ``alive`` says so to the engine, which handles it.
                self._pending.clear()
                return
            del self._pending[:sent]

    def send(self, messages: Sequence[m.ToService]) -> bool:
        if self._socket is None:
            return False
        if self._pending:
            self._flush()
            if len(self._pending) > BUFFER_BYTES:
                return False
        start = len(self._pending)
        self._pending += FRAME.pack(0)
        m.encoder.encode_into(messages, self._pending, -1)
        FRAME.pack_into(self._pending, start, len(self._pending) - start - FRAME.size)
        self._flush()
        return True

    def receive(self) -> list[m.ToOwner]:
        if self._socket is None:
            return []
        if self._pending:
            self._flush()
        messages: list[m.ToOwner] = []
        while self._region.service_frames != self._frames:
            try:
                size = self._socket.recv_into(self._received)
            except OSError:
                break  # announced and not there yet, or the child is gone
            if not size:
                break
            for frame in self._reader.feed(self._received[:size]):
                self._frames += 1
                messages += m.owner_decoder.decode(frame)
        return messages

    @property
    def alive(self) -> bool:
        # Not EOF but the exit counts: until then the child's system calls may still move bytes.
        # Asked of the pidfd: ``Popen.poll`` takes ten times as long.
        return self._exit is not None and not self._exit.poll(0)

    def restart(self, namespace: dict[str, str]) -> None:
        if self.alive:
            raise InternalError("the service still runs")
        self._namespace = namespace
        self._reap()
        self._spawn()

    def on_message(self, wake: Callable[[], None] | None) -> None:
        self._wake = wake
        if wake is not None and self._socket is not None:
            self._watch()

    def _watch(self) -> None:
        """Thread that turns a readable socket into a call of ``wake``; none without one."""
        if self._wake is None or self._watcher is not None:
            return
        self._stop_r, self._stop_w = os.pipe()
        assert self._socket is not None
        self._watcher = threading.Thread(
            target=self._watch_main,
            args=(self._socket.fileno(), self._pidfd, self._stop_r),
            name="kvtier-carrier",
            daemon=True,
        )
        self._watcher.start()

    def _watch_main(self, sock: int, pidfd: int, stop: int) -> None:
        poller = select.epoll()
        try:
            # Edge-triggered: one wake-up for each arrival, not one for each turn until it is read.
            poller.register(sock, select.EPOLLIN | select.EPOLLET)
            poller.register(pidfd, select.EPOLLIN | select.EPOLLONESHOT)
            poller.register(stop, select.EPOLLIN)
            while True:
                for fd, _ in poller.poll():
                    if fd == stop:
                        return
                    wake = self._wake
                    if wake is not None:
                        wake()
        finally:
            poller.close()

    def _unwatch(self) -> None:
        if self._watcher is not None:
            os.write(self._stop_w, b"x")
            self._watcher.join()
            self._watcher = None
            os.close(self._stop_r)
            os.close(self._stop_w)

    def _kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGKILL)
            self._process.wait()
        self._reap()

    def _reap(self) -> None:
        self._unwatch()
        if self._process is not None:
            self._process.wait()
            self._process = None
        self._exit = None
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def close(self, deadline: float) -> str:
        if self._process is None:
            return ""
        error = ""
        self.send([m.Close(deadline)])
        end = deadline + 5.0
        while self.alive and time.monotonic() < end:
            self._flush()
            # Readable once it has exited.
            select.select([self._pidfd], [], [], 0.05)
            error = _closing_error(self.receive()) or error
        if self.alive:
            error = "the tier service's process did not end in time and was killed"
        else:
            # Its last words may have come between the look at the socket and its end.
            error = _closing_error(self.receive()) or error
        self._kill()
        return error


def _closing_error(messages: Sequence[m.ToOwner]) -> str:
    return "; ".join(one.error for one in messages if isinstance(one, m.Closed) and one.error)
