"""Sidecar: from settings to a process that serves, and to its end.

`python -m tierkv_service.sidecar` is a private one (`tierkv_connectors.private`): it reads its
order from standard input and ends with the process that started it.
"""

import contextlib
import gc
import logging
import os
import resource
import select
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from tierkv.cache import TierKV
from tierkv.calls import StatCall
from tierkv.control import Control
from tierkv.errors import TierKVError, unavailable
from tierkv.gate import named
from tierkv.record import Recorder
from tierkv.settings import HttpSettings, Settings, SocketSettings, socket_path
from tierkv.stat import from_wire
from tierkv_connectors.private import Order
from tierkv_service import codec_process, http
from tierkv_service.calibrations import calibrations_of
from tierkv_service.codec_process import CodecProcess
from tierkv_service.locks import Locks
from tierkv_service.loop import Loop, on_signals
from tierkv_service.server import Server
from tierkv_service.session import ArenaFile

SWITCH_INTERVAL_S = 0.0002
"""Executor threads hold the interpreter at most this long while an answer waits."""

LIVES_S = 5.0
"""An HTTP process that ends sooner after its start is not started again."""

_log = logging.getLogger("tierkv.sidecar")


def run(settings: Settings, *, parent: int = 0, record: Path | None = None) -> int:
    """Serve until SIGTERM or SIGINT; a second one ends the process at once.

    Args:
        settings: of the store, the socket and the HTTP process.
        parent: end when this process, the one that started us, is gone; 0: whoever it was.
        record: file for all that the policy is told and asked, see `tierkv.record`.

    Returns: the exit code.

    Raises:
        TierKVError: something that the settings ask for cannot be had.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    path = socket_path(settings)
    gate = named(settings.store.gate)  # a broken one ends it before anything starts
    calibrations = calibrations_of(settings, gate)
    if calibrations and not codec_process.possible():
        raise unavailable(
            "[store] artifacts need the codec worker: install tierkv-sidecar[codecs], or take them"
            " out"
        )
    with contextlib.ExitStack() as ends:
        locks = Locks(path, settings.socket)
        ends.callback(locks.close)
        locks.take_arena(settings.socket.arena_wait_s)
        pages = None
        if settings.http.enabled:
            pages = Pages(settings.http, path)
            ends.callback(pages.stop)
        store = TierKV.open(settings, gate, Recorder(record) if record else None)
        ends.callback(store.close, settings.store.grace_s)
        if codec_process.possible() and (settings.nvme or settings.redis):
            codecs = CodecProcess(store.host, path, calibrations)
            ends.callback(codecs.close)
            store.encode_with(codecs)
        serve(store, store.host, locks, settings.socket, parent=parent, pages=pages)
    return 0


class Pages:
    """The HTTP process, started again when it ends by itself.

    Args:
        settings: of the HTTP process.
        path: the sidecar's socket.

    Raises:
        TierKVError: the address or the token file cannot be used.
    """

    def __init__(self, settings: HttpSettings, path: Path) -> None:
        self._settings = settings
        self._path = path
        self._child = http.spawn(settings, path)
        self._started = time.monotonic()

    def watch(self, loop: Loop) -> None:
        """Let the loop see the end of the process."""
        pidfd = os.pidfd_open(self._child.process.pid)

        def ended(_events: int) -> None:
            loop.forget(pidfd)
            os.close(pidfd)
            self._again(loop)

        loop.watch(pidfd, select.EPOLLIN, ended)

    def stop(self) -> None:
        """End the process. Idempotent."""
        self._child.stop()

    def _again(self, loop: Loop) -> None:
        code, lived_s = self._child.process.wait(), time.monotonic() - self._started
        if lived_s < LIVES_S:
            _log.error("the HTTP process ended with %d after %.1f s: not again", code, lived_s)
            return
        _log.warning("the HTTP process ended with %d: starting another", code)
        try:
            self._child = http.spawn(self._settings, self._path)
        except TierKVError as error:
            _log.error("no HTTP process any more: %s", error)
            return
        self._started = time.monotonic()
        self.watch(loop)


def serve(
    control: Control,
    arena: ArenaFile,
    locks: Locks,
    settings: SocketSettings,
    *,
    parent: int = 0,
    pages: Pages | None = None,
) -> None:
    """Answer clients until told to stop; their connections are closed then, `control` is not."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    loop = Loop()
    with contextlib.ExitStack() as ends:
        ends.callback(loop.close)
        # Before anybody can connect: who saw us listen may ask us to end, and that must be clean.
        on_signals(loop, loop.stop)
        uids = {*settings.uids, os.geteuid()} if settings.uids else None
        locks.share_arena()
        server = Server(loop, control, arena, locks.listen(), uids)
        ends.callback(server.close)
        if parent:
            ends.callback(_follow(loop, parent))
        if pages is not None:
            pages.watch(loop)
        gc.collect()
        gc.freeze()
        _log.info("listening at %s, pid %d", locks.path, os.getpid())
        control.stat(StatCall(probe=True), _say_problems)
        loop.run()
        _log.info("stopping")


def _say_problems(stat: dict[str, Any]) -> None:
    """Name every tier that does not answer: whoever reads the log need not ask for it."""
    for tier in from_wire(stat).tiers:
        if tier.problem:
            _log.warning("tier %s is %s: %s", tier.name, tier.state, tier.problem)


def _follow(loop: Loop, parent: int) -> Callable[[], None]:
    """Stop when the process that started us is gone; returns what ends the watch."""
    try:
        pidfd = os.pidfd_open(parent)
    except ProcessLookupError:
        loop.stop()
        return lambda: None
    loop.watch(pidfd, select.EPOLLIN, lambda _events: loop.stop())
    return lambda: os.close(pidfd)


def main() -> int:
    """Serve as the order on standard input says."""
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=Order)
    try:
        if os.getppid() != order.parent:
            raise unavailable("the process that started this sidecar is gone")
        return run(order.settings, parent=order.parent)
    except TierKVError as error:
        sys.stderr.write(f"tierkv: {error}\n")
        return 1
    finally:
        shutil.rmtree(Path(order.settings.socket.path).parent, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
