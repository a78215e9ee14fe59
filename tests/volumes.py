"""A real file system of a test's own, which can be made read-only by an error as disks do it."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

SIZE = 96 << 20


def _run(*command: str) -> str:
    """Run a command; returns "" or what it said when it failed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return f"{command[0]} is not installed"
    return "" if done.returncode == 0 else done.stderr.strip() or f"{command[0]} failed"


class Volume:
    """An ext4 file system in a file, mounted at `path`."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "volume"
        self._image = folder / "image"
        self.path.mkdir()
        with self._image.open("wb") as file:
            file.truncate(SIZE)
        self.problem = _run("mkfs.ext4", "-q", "-F", str(self._image)) or self.mount()

    def mount(self) -> str:
        options = "loop,errors=remount-ro"
        return _run("mount", "-o", options, str(self._image), str(self.path))

    def unmount(self) -> str:
        return _run("umount", "-l", str(self.path))

    def mend(self) -> None:
        """Check the file system and mount it again, as an operator does."""
        assert self.unmount() == ""
        subprocess.run(["e2fsck", "-fy", str(self._image)], capture_output=True, check=False)
        assert self.mount() == ""

    def fail(self) -> None:
        """Let the kernel find an error: it writes nothing any more, also for files that are open.

        A plain remount is refused while a file is open for writing.
        """
        device = self.path.stat().st_dev
        name = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve().name
        trigger = Path("/sys/fs/ext4", name, "trigger_fs_error")
        try:
            trigger.write_text("test")
        except OSError as error:
            pytest.skip(f"this kernel takes no test error of ext4: {error}")
        with pytest.raises(OSError, match="Read-only"):
            (self.path / "try").write_bytes(b"x")


@contextlib.contextmanager
def mounted(folder: Path) -> Iterator[Volume]:
    """Make a volume; skips the test, with the reason, where it cannot be had."""
    volume = Volume(folder)
    if volume.problem:
        pytest.skip(f"no file system can be mounted here: {volume.problem}")
    try:
        yield volume
    finally:
        volume.unmount()
