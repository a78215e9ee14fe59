"""Generations: the minimum generation of every cleared namespace, in one small file beside the log.

    | magic 8 | count u64 | count x (namespace 16, generation u64) | xxh3-64 of all before |

It is replaced as a whole: written beside, synced, renamed over, directory synced.
"""

import errno
import os
import struct
import threading
from collections.abc import Mapping
from pathlib import Path

import xxhash

FILE_NAME = "tierkv.generations"
MAX_FILE_BYTES = 480 << 10
"""Twice this, for the file and its replacement, is set aside in the tier's size."""

_MAGIC = b"TKVGEN1\n"
_HEAD = struct.Struct("<8sQ")
_ROW = struct.Struct("<16sQ")


class Generations:
    """The minima in memory, and their file.

    Args:
        folder: directory of the file. What an interrupted replacement left there is removed.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE_NAME
        self._beside = folder / f"{FILE_NAME}.new"
        self._lock = threading.Lock()
        self._beside.unlink(missing_ok=True)
        found = self._load()
        self.sound = found is not None
        """Whether the file was there and whole."""
        self._minima = found or {}

    def all(self) -> Mapping[bytes, int]:
        """Return the minimum of every namespace that has one."""
        return dict(self._minima)

    def clear(self) -> None:
        """Start anew, without any minimum. Raises: OSError."""
        with self._lock:
            self._save({})

    def raise_to(self, namespace: bytes, generation: int) -> None:
        """Persist a higher minimum; a lower one changes nothing. Raises: OSError."""
        with self._lock:
            if generation > self._minima.get(namespace, 0):
                self._save({**self._minima, namespace: generation})

    def _save(self, minima: dict[bytes, int]) -> None:
        rows = b"".join(_ROW.pack(*item) for item in sorted(minima.items()))
        data = _HEAD.pack(_MAGIC, len(minima)) + rows
        data += struct.pack("<Q", xxhash.xxh3_64_intdigest(data))
        if len(data) > MAX_FILE_BYTES:
            raise OSError(errno.EFBIG, f"{self._path} would exceed {MAX_FILE_BYTES} bytes")
        fd = os.open(self._beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            os.fsync(fd)
        finally:
            os.close(fd)
        self._beside.replace(self._path)
        folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        self._minima = minima

    def _load(self) -> dict[bytes, int] | None:
        try:
            with self._path.open("rb") as file:
                data = file.read(MAX_FILE_BYTES + 1)
        except OSError:
            return None
        if not _HEAD.size + 8 <= len(data) <= MAX_FILE_BYTES:
            return None
        magic, count = _HEAD.unpack_from(data)
        body, checksum = data[:-8], struct.unpack("<Q", data[-8:])[0]
        if magic != _MAGIC or len(body) != _HEAD.size + count * _ROW.size:
            return None
        if xxhash.xxh3_64_intdigest(body) != checksum:
            return None
        return dict(_ROW.iter_unpack(memoryview(body)[_HEAD.size :]))
