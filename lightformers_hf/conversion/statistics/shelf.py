"""Tensors put aside: in memory while they are few, in a temporary file beyond that."""

from __future__ import annotations

import errno
import math
import os
import tempfile
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from io import FileIO
from threading import Lock, get_ident

import torch
from torch import Tensor

# Bytes that a shelf keeps in memory; on an accelerator, a share of what is free there.
ROOM, FREE_SHARE = 2**26, 0.25


class Shelf:
    """Tensors by key. They come back on `device`; those in memory are the tensors themselves, not copies.

    The file has no name, so that it is gone with the process, however that ends. It lies in the folder for temporary
    files, which `TMPDIR` sets.

    Args:
        device: where the tensors are, and come back to.
        room: bytes kept in memory; unless given 64 MiB, or a quarter of what is free on a GPU.
    """

    def __init__(self, device: torch.device | str = "cpu", room: int | None = None):
        self.device = torch.device(device)
        if room is None:
            on_gpu = self.device.type == "cuda"
            room = int(torch.cuda.mem_get_info(self.device)[0] * FREE_SHARE) if on_gpu else ROOM
        self.room = room
        self._held: dict[Hashable, Tensor] = {}
        self._places: dict[Hashable, tuple[int, torch.dtype, torch.Size]] = {}
        self._file: FileIO | None = None
        self._end, self._lock = 0, Lock()
        self._rooms: dict[int, Tensor] = {}  # of each thread, what `changing` reads the file into

    def __contains__(self, key: Hashable) -> bool:
        return key in self._held or key in self._places

    def __setitem__(self, key: Hashable, tensor: Tensor) -> None:
        """Put a tensor aside. In place of another of the same size it takes no further room.

        Raises:
            OSError: the disk is full.
        """
        try:
            with self._lock:
                if key not in self._places and self._hold(key, tensor):
                    return
                offset = self._find_place(key, tensor)
            _move(self._write, tensor.detach().cpu().contiguous(), offset)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise OSError(
                f"the disk of {tempfile.gettempdir()} is full, where calibration puts what would fill the memory: "
                "set TMPDIR to a folder with more room"
            ) from error

    def _hold(self, key: Hashable, tensor: Tensor) -> bool:
        """Whether there is room in memory for a tensor, which then has it."""
        size = tensor.numel() * tensor.element_size()
        before = self._held.pop(key, tensor[:0])
        room = self.room + before.numel() * before.element_size()
        if fits := size <= room:
            self._held[key] = tensor
        self.room = room - size if fits else room
        return fits

    def _find_place(self, key: Hashable, tensor: Tensor) -> int:
        """Where in the file a tensor is to be: in place of another of the same size, or behind all."""
        offset, dtype, shape = self._places.get(key, (self._end, tensor.dtype, tensor.shape))
        if (dtype, math.prod(shape)) != (tensor.dtype, tensor.numel()):
            offset = self._end
        self._places[key] = offset, tensor.dtype, tensor.shape
        self._end = max(self._end, offset + tensor.nbytes)
        if self._file is None:
            self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115, open as long as the shelf
        return offset

    def _write(self, data: memoryview, offset: int) -> int:
        """Write to a place of the file, threads at once where the system can; how much it was."""
        if hasattr(os, "pwrite"):
            return os.pwrite(self._file.fileno(), data, offset)
        with self._lock:
            self._file.seek(offset)
            return self._file.write(data)

    def _read_into(self, data: memoryview, offset: int) -> int:
        """Likewise read."""
        if hasattr(os, "preadv"):
            return os.preadv(self._file.fileno(), [data], offset)
        with self._lock:
            self._file.seek(offset)
            return self._file.readinto(data)

    def __delitem__(self, key: Hashable) -> None:
        """Forget a tensor; room in memory is free again, that in the file is not."""
        if key in self._held:
            tensor = self._held.pop(key)
            self.room += tensor.numel() * tensor.element_size()
        else:
            del self._places[key]

    def __getitem__(self, key: Hashable) -> Tensor:
        if key in self._held:
            return self._held[key]
        _, dtype, shape = self._places[key]
        return self._read(key, torch.empty(shape, dtype=dtype)).to(self.device)

    def _read(self, key: Hashable, tensor: Tensor) -> Tensor:
        """The tensor, filled with that of the file."""
        _move(self._read_into, tensor, self._places[key][0])
        return tensor

    @contextmanager
    def changing(self, key: Hashable, fresh: Callable[[], Tensor]) -> Iterator[Tensor]:
        """The tensor of a key, or what `fresh` makes where there is none: put aside as what becomes of it in here.

        One at a time in a thread, and no key in two: from the file, all of a thread come into the same room, where
        pages of a new tensor would have to be filled with zeros first. That room stays until `settle`.
        """
        if key in self._places:
            _, dtype, shape = self._places[key]
            size = math.prod(shape) * dtype.itemsize
            room = self._rooms.get(get_ident())
            if room is None or size > len(room):
                room = self._rooms[get_ident()] = torch.empty(size, dtype=torch.uint8)
            tensor = self._read(key, room[:size].view(dtype).view(shape)).to(self.device)
        else:
            tensor = self._held[key] if key in self._held else fresh()
        yield tensor
        self[key] = tensor

    def settle(self) -> None:
        """Give back the room of what was `changing`."""
        self._rooms.clear()


def _move(part: Callable[[memoryview, int], int], tensor: Tensor, offset: int) -> None:
    """A whole tensor, to or from a place, by what moves 2 GiB at most in one call."""
    left = memoryview(tensor.view(-1).view(torch.uint8).numpy())
    while left:
        count = part(left, offset)
        left, offset = left[count:], offset + count
