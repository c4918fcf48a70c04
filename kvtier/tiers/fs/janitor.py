# SPDX-License-Identifier: Apache-2.0
"""The tier's housekeeper: walks the directory, sweeps leftovers, evicts, watches the root.

Job: everything of the file tier that is nobody's request. Owns one thread and a descriptor of the
root. The thread talks to the loop through `Report` only. Invariants: it removes chunks only to make
room, and temporary files only when their process is dead (own host) or they are old (others); it
never stops because something is missing, it looks again at the next turn.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import threading
import time
from array import array
from collections.abc import Callable, Iterator

import msgspec

from kvtier._core import fileio
from kvtier.tiers.fs import naming
from kvtier.tiers.fs.capacity import FileId, Usage, units_of
from kvtier.tiers.fs.options import FsOptions, Upkeep
from kvtier.tiers.fs.prepare import write_whole

logger = logging.getLogger(__name__)

TURN_SECONDS = 1.0
"""Time between two looks at free space, other instances and the root."""
BUSY_SECONDS = 0.05
"""Time until the next look while another instance evicts."""
MAX_FAILURES = 64
"""Files of one turn that could not be removed, before the rest waits for the next turn."""
_LOCK_FILE = "lock"


class Report(msgspec.Struct):
    """What one turn of the janitor did; handed to the loop."""

    evicted: list[bytes] = []
    """Keys of this namespace whose files were removed."""
    evicted_files: int = 0
    freed_bytes: int = 0
    swept: int = 0
    """Temporary files of dead writers that were removed."""
    walked: bool = False
    """A walk over the directory has ended."""
    root_lost: bool | None = None
    """Whether the root is another directory than at the start; None is unchanged."""
    made_room: bool = False


class Janitor:
    """Housekeeping of one root for one tier.

    Parameters
    ----------
    name : str
        Name of the thread.
    options : FsOptions
    directory : str
        Name of this instance's namespace directory below the root.
    digest : bytes
    owner : naming.Owner
    usage : Usage
    report : callable
        Called in the janitor's thread; must hand over to the loop.
    ended : callable
        The same, once, as the last thing.
    upkeep : Upkeep
    """

    def __init__(
        self,
        name: str,
        options: FsOptions,
        directory: str,
        digest: bytes,
        owner: naming.Owner,
        usage: Usage,
        report: Callable[[Report], None],
        ended: Callable[[], None],
        upkeep: Upkeep,
        faults: fileio.Faults | None = None,
    ) -> None:
        self.name = name
        self.budget_bytes: int | None = None
        """Free space above the guard at the last look, less what was written since (the loop
        counts it down); None is unknown."""
        self._options = options
        self._upkeep = upkeep
        self._directory = directory
        self._digest = digest
        self._owner = owner
        self._usage = usage
        self._report = report
        self._ended = ended
        self._faults = faults
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._wanted_bytes = 0
        self._crowded = False
        self._walk_wanted = False
        self._again = False
        self._thread: threading.Thread | None = None
        self._root: fileio.Directory | None = None
        self._identity: tuple[int, int] | None = None
        self._device = 0
        self._lost = False
        self._known: dict[str, int] = {}
        self._published: int | None = None
        self._published_at = 0.0
        self._announced = 0

    def start(self, identity: tuple[int, int]) -> None:
        """Begin; `identity` is (device, inode) of the namespace's directory that the tier uses."""
        self._identity = identity
        self._device = identity[0]
        # Daemon for the same reason as the pools' threads: a call that hangs for good.
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Take a turn now."""
        self._wake.set()

    def want(self, bytes_: int) -> None:
        """The filesystem is full: make this much room, whatever its counters say."""
        with self._lock:
            self._wanted_bytes = max(self._wanted_bytes, bytes_)
        self._wake.set()

    def crowd(self) -> None:
        """A chunk did not fit under the limit: evict down to the low watermark now, also when the
        high one is not reached (chunks may be larger than the rest above it)."""
        self._crowded = True
        self._wake.set()

    def walk(self) -> None:
        """Walk over the directory now."""
        self._walk_wanted = True
        self._wake.set()

    def stop(self) -> None:
        """End after the call under way. Idempotent, does not wait."""
        self._stop.set()
        self._wake.set()

    @property
    def alive(self) -> bool:
        """Whether its thread has not ended."""
        return self._thread is not None and self._thread.is_alive()

    def join(self) -> None:
        """Wait for the thread, after it has said that it ended: a moment."""
        if self._thread is not None:
            self._thread.join()

    @property
    def shared(self) -> bool:
        """Whether there are other instances under the same limit, or were."""
        return bool(self._known)

    @property
    def announced_units(self) -> int:
        """``Usage.net_units`` when others were last told of it, and heard."""
        return self._announced

    def adopt(self, identity: tuple[int, int]) -> None:
        """The tier uses another directory now (the root came back)."""
        self._identity = identity
        self._device = identity[0]

    def _run(self) -> None:
        os.sched_setaffinity(0, range(os.sysconf("SC_NPROCESSORS_CONF")))
        next_walk = 0.0
        last_walk = 0
        error = ""
        while not self._stop.is_set():
            report = Report()
            try:
                self._look_at_root(report)
                if self._root is None:
                    fd = os.open(
                        self._options.root_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
                    )
                    self._root = fileio.Directory(
                        fd, self._digest, str(self._owner), faults=self._faults
                    )
                now = time.monotonic()
                if now >= next_walk or self._walk_wanted:
                    self._walk_wanted = False
                    started = int(time.time())
                    self._walk(report, last_walk)
                    last_walk = started
                    next_walk = now + self._upkeep.rescan_seconds
                self._exchange()
                self._look_at_space()
                self._evict(report)
                error = ""
            except OSError as exc:
                # The root may be gone for now, or stale: look again at the next turn.
                self._forget_root()
                if str(exc) != error:
                    logger.warning("%s: %s; trying again", self.name, exc)
                error = str(exc)
            self._report(report)
            self._wake.wait(BUSY_SECONDS if self._again else TURN_SECONDS)
            self._wake.clear()
            self._again = False
        with contextlib.suppress(OSError):
            self._exchange()
        self._forget_root()
        self._ended()

    def _forget_root(self) -> None:
        if self._root is not None:
            self._root.close()
            self._root = None

    def _look_at_root(self, report: Report) -> None:
        """Whether the path still leads to the directory that the tier has open."""
        path = os.path.join(self._options.root_dir, self._directory)
        try:
            stat = os.stat(path)
            there: tuple[int, int] | None = (stat.st_dev, stat.st_ino)
        except FileNotFoundError:
            there = None
        lost = there != self._identity
        if lost or lost != self._lost:
            report.root_lost = lost
            self._forget_root()
        self._lost = lost

    def can_remake(self) -> bool:
        """Whether a root that is gone may be made again: it was emptied, not unmounted.

        Behind an unmounted filesystem there is the mount point, on another device, and writing
        there would fill the wrong disk.
        """
        path = self._options.root_dir
        try:
            if os.path.isdir(os.path.join(path, self._directory)):
                return True
            while not os.path.isdir(path):
                path = os.path.dirname(path) or "."
            return os.stat(path).st_dev == self._device
        except OSError:
            return False

    def _walk(self, report: Report, since: int) -> None:
        """See every file below the root: sizes and last uses; remove what the dead left behind."""
        assert self._root is not None
        self._exchange()
        files: list[FileId] = []
        units: array[int] = array("q")
        used: array[int] = array("q")
        bad: list[tuple[int, str]] = []
        self._usage.begin_walk()
        complete = False
        try:
            for leaf, own in self._leaves():
                for name, is_directory, _, blocks, last, mtime in self._list(leaf):
                    path = f"{leaf}/{name}"
                    if is_directory:
                        continue
                    if (owner := naming.temporary_owner(name)) is not None:
                        if self._is_left_behind(owner, mtime):
                            report.swept += self._root.remove([path]) == [0]
                        continue
                    if name.endswith(".kv.bad"):
                        bad.append((mtime, path))
                        continue
                    key = naming.chunk_key(name)
                    if key is None:
                        continue
                    files.append(key if own else path)
                    units.append(units_of(blocks))
                    used.append(last)
                if self._stop.is_set():
                    return
            complete = True
        finally:
            if not complete:
                self._usage.abandon_walk()
        self._usage.finish_walk(files, units, used, since)
        bad.sort()
        surplus = bad[: max(0, len(bad) - self._upkeep.max_quarantined)]
        self._root.remove([path for _, path in surplus])
        report.walked = True

    def _leaves(self) -> Iterator[tuple[str, bool]]:
        """Paths of the directories that hold chunks, and whether they are of our namespace."""
        for namespace in self._list("."):
            if not namespace[1] or not naming.is_namespace_directory(namespace[0]):
                continue
            for leaf in self._list(namespace[0]):
                if leaf[1] and len(leaf[0]) == 2:
                    yield f"{namespace[0]}/{leaf[0]}", namespace[0] == self._directory

    def _list(self, path: str) -> list[tuple[str, bool, int, int, int, int]]:
        assert self._root is not None
        try:
            return self._root.entries(path)
        except FileNotFoundError:
            return []  # another instance or a cleaner removed it
        except PermissionError as exc:
            logger.warning("%s: cannot read %s, its files are not counted", self.name, exc)
            return []

    def _is_left_behind(self, owner: naming.Owner, mtime: int) -> bool:
        if owner.host == self._owner.host:
            return owner.is_dead(self._owner.host)
        return time.time() - mtime > self._upkeep.stale_seconds

    def _look_at_space(self) -> None:
        space = os.statvfs(self._options.root_dir)
        free = space.f_bavail * space.f_frsize
        guard = self._options.guard_bytes(space.f_blocks * space.f_frsize)
        self.budget_bytes = free - guard

    def _excess(self) -> int:
        """Bytes that should go now."""
        with self._lock:
            excess = self._wanted_bytes
        capacity = self._options.capacity_bytes or 0
        used = self._usage.bytes
        limit = 0 if self._crowded else int(self._options.high_watermark * capacity)
        if capacity and self._usage.complete and used > limit:
            excess = max(excess, used - int(self._options.low_watermark * capacity))
        if self.budget_bytes is not None and self.budget_bytes < 0:
            excess = max(excess, -self.budget_bytes)
        return excess

    def _evict(self, report: Report) -> None:
        if self._excess() <= 0 or self._lost:
            return
        assert self._root is not None
        # One instance at a time, else each of them removes what one alone should.
        with self._exclusive() as mine:
            if not mine:
                self._again = True
                return
            self._exchange()
            left = wanted = self._excess()
            failures = 0
            while left > 0 and failures < MAX_FAILURES and not self._stop.is_set():
                victims = self._usage.victims(left)
                if not victims:
                    break
                paths = [
                    f"{self._directory}/{naming.chunk_path(file)}"
                    if isinstance(file, bytes)
                    else file
                    for file in victims
                ]
                for file, status in zip(victims, self._root.remove(paths), strict=True):
                    if status == 0:
                        freed = self._usage.removed(file)
                        left -= freed
                        report.freed_bytes += freed
                        report.evicted_files += 1
                        if isinstance(file, bytes):
                            report.evicted.append(file)
                    elif status == errno.ENOENT:
                        self._usage.vanished(file)
                    elif status == errno.EROFS:
                        return
                    else:
                        # Another user's file, or a medium in trouble: others first.
                        failures += 1
                        self._usage.renew((file,))
                # Empty directories take space too; one that is in use again refuses.
                for leaf in {os.path.dirname(path) for path in paths}:
                    with contextlib.suppress(OSError):
                        os.rmdir(leaf, dir_fd=self._root.fileno())
            if failures:
                logger.warning("%s: %d files could not be removed", self.name, failures)
            with self._lock:
                self._wanted_bytes = 0
                self._crowded = False
            report.made_room = left < wanted
            self._look_at_space()
            self._exchange()

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[bool]:
        control = self._control()
        fd = os.open(
            os.path.join(control, _LOCK_FILE),
            os.O_RDWR | os.O_CREAT | os.O_CLOEXEC,
            self._options.file_mode,
        )
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            except OSError as exc:
                if exc.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                    raise
                # A filesystem without locks: several instances may evict more than needed.
            yield True
        finally:
            os.close(fd)

    def _control(self) -> str:
        path = os.path.join(self._options.root_dir, naming.CONTROL_DIRECTORY)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, self._options.directory_mode)
        return path

    def _exchange(self) -> None:
        """Tell other instances what this one has added, and take over what they have.

        One small file an instance, in units since its start. So a limit is kept by all together
        without a walk; what is not seen is a small part of it (``UNANNOUNCED_PARTS``).
        """
        if not self._options.capacity_bytes or self._lost:
            return
        control = self._control()
        mine = self._usage.net_units
        now = time.monotonic()
        if mine != self._published or now - self._published_at > self._upkeep.stale_seconds / 4:
            path = os.path.join(control, str(self._owner))
            try:
                write_whole(path, b"%d\n" % mine, self._options.file_mode)
                self._published, self._published_at = mine, now
            except OSError as exc:
                if exc.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
                    raise
        for name in os.listdir(control):
            owner = naming.parse_owner(name)
            if owner is None or owner == self._owner:
                continue
            path = os.path.join(control, name)
            try:
                with open(path, "rb") as file:
                    units = int(file.read())
                    age = time.time() - os.fstat(file.fileno()).st_mtime
            except (FileNotFoundError, ValueError):
                continue
            self._usage.others(units - self._known.get(name, 0))
            self._known[name] = units
            if age > self._upkeep.stale_seconds:
                with contextlib.suppress(OSError):
                    os.unlink(path)
        self._announced = mine
