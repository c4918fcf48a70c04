# SPDX-License-Identifier: Apache-2.0
"""The four-method interface of a tier, for people who write one without asyncio.

Owns nothing and imports nothing of vLLM; its names and fields are those of vLLM 0.32's base class,
so that one class can serve both. ``examples/own_tier.py`` is a complete one.
"""

from __future__ import annotations

import abc
import enum
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec
import numpy as np
import numpy.typing as npt


class LookupResult(enum.Enum):
    """Answer of ``SecondaryTierManager.lookup``."""

    MISS = enum.auto()
    HIT = enum.auto()
    HIT_PENDING = enum.auto()
    RETRY = enum.auto()


@dataclass
class JobMetadata:
    """One transfer that a tier is asked for."""

    job_id: int
    keys: Collection[bytes]
    chunk_ids: npt.NDArray[np.int32]
    """Slot of each key: row ``chunk_ids[i]`` of the view holds or receives ``keys[i]``."""
    is_promotion: bool
    """True: from the tier into host memory."""
    req_context: Any
    submit_time: float = field(default_factory=time.monotonic)


@dataclass
class JobResult:
    """How a transfer ended."""

    job_id: int
    success: bool
    successful_keys: Collection[bytes] | None = None
    """Of a load that succeeded in part: the keys that are there."""
    transfer_time: float | None = None
    transfer_bytes: int | None = None


class SecondaryTierManager(abc.ABC):
    """The smallest tier that kvtier runs: four methods, called from one thread.

    Keys are opaque and contain the namespace: the same chunk of another model, or from before a
    reset, has another key. Where there are methods ``drain_jobs`` and ``shutdown``, they are called
    when the tier closes, in this order: wait for all jobs; give everything back.

    Parameters
    ----------
    view : memoryview
        The region itself, shape (slots, slot bytes), writable. Rows of a job may be read (store)
        or written (load) until the job is reported finished, and not after.
    options : dict, or `options_type`
        The tier's own configuration keys.
    """

    medium: ClassVar[Any] = None
    """"CPU" or "STORAGE" (which None means too), for requests' tier filters and events."""
    options_type: ClassVar[type[msgspec.Struct] | None] = None
    """Struct that the configuration keys are decoded to; a key that it lacks is an error then."""

    def __init__(self, view: memoryview, options: Any) -> None:
        self.view = view
        self.options = options

    @abc.abstractmethod
    def lookup(self, key: bytes, req_context: Any) -> Any:
        """HIT, MISS, or RETRY to be asked again."""

    @abc.abstractmethod
    def submit_store(self, job_metadata: Any) -> None:
        """Begin to copy rows out of host memory. A call that raises has begun nothing."""

    @abc.abstractmethod
    def submit_load(self, job_metadata: Any) -> None:
        """Begin to copy chunks into rows of host memory. A call that raises has begun nothing."""

    @abc.abstractmethod
    def get_finished_jobs(self) -> Iterable[Any]:
        """``JobResult`` of each job that has ended since the last call."""
