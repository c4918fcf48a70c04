# SPDX-License-Identifier: Apache-2.0
"""The accelerator of ``torch.cuda``.

``TorchMemory`` is what does not depend on where a tensor lies; the tests run it on host memory.
Owns no state but the device's number. Streams and events are torch's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class TorchMemory:
    """Buffers are tensors of bytes.

    Whoever made a tensor may have done so in torch's inference mode, which vLLM's worker runs in
    and its threads do not: outside it such a tensor cannot be written.
    """

    def host(self, memory: memoryview) -> torch.Tensor:
        """The tensor keeps the memory's owner alive."""
        return torch.frombuffer(memory, dtype=torch.uint8)

    def array(self, buffer: torch.Tensor) -> npt.NDArray[np.uint8]:
        """Shares the memory."""
        array: npt.NDArray[np.uint8] = buffer.numpy()
        return array

    def address(self, buffer: torch.Tensor) -> int:
        """Of the first byte, wherever it lies."""
        return int(buffer.data_ptr())

    def strided(
        self,
        buffer: torch.Tensor,
        offset: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        width: int,
    ) -> torch.Tensor:
        """Over the storage: a tensor's own view asks for more than its bytes allow."""
        start = buffer.storage_offset() * buffer.element_size() + offset
        view = torch.empty(0, dtype=_DTYPES[width], device=buffer.device)
        return view.set_(
            buffer.untyped_storage(),
            start // width,
            shape,
            tuple(stride // width for stride in strides),
        )

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Asynchronous where one side is pinned host memory."""
        with torch.inference_mode():
            target.copy_(source, non_blocking=True)

    def gather(self, source: torch.Tensor, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """One launch."""
        with torch.inference_mode():
            torch.index_select(source, 0, ids.view(torch.int64), out=rows)

    def scatter(self, target: torch.Tensor, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """One launch."""
        with torch.inference_mode():
            target.index_copy_(0, ids.view(torch.int64), rows)


class CudaDevice(TorchMemory):
    """One GPU.

    Parameters
    ----------
    device : torch.device
        With its index.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def current_stream(self) -> Any:
        """torch's current stream of this device and thread."""
        return torch.cuda.current_stream(self.device)

    def new_stream(self) -> Any:
        """From torch's pool."""
        return torch.cuda.Stream(self.device)

    def new_event(self) -> Any:
        """Without a time stamp; a waiter sleeps instead of polling."""
        return torch.cuda.Event(blocking=True)

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """Device and stream of the calling thread."""
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            yield

    def empty(self, size: int) -> torch.Tensor:
        """From torch's allocator, which keeps memory by stream."""
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def pinned(self, size: int) -> torch.Tensor:
        """From torch's allocator of pinned memory."""
        # By name: vLLM makes the GPU the default while it builds a model.
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)

    def register(self, address: int, size: int) -> None:
        """``cudaHostRegister``. RuntimeError if it is refused."""
        with torch.cuda.device(self.device):
            self._check("cudaHostRegister", torch.cuda.cudart().cudaHostRegister(address, size, 0))

    def unregister(self, address: int) -> None:
        """``cudaHostUnregister``. RuntimeError if it is refused."""
        with torch.cuda.device(self.device):
            self._check("cudaHostUnregister", torch.cuda.cudart().cudaHostUnregister(address))

    def _check(self, call: str, result: Any) -> None:
        if int(getattr(result, "value", result)) == 0:  # an enumeration's member, or its number
            return
        # The runtime keeps the error for this thread's next check, which would be the model's:
        # a launch of our own takes it.
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=self.device)
        raise RuntimeError(f"{call}: {result}")
