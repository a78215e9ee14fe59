"""The files beside a socket: who may connect, and one sidecar at a time."""

import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.sidecars import Served, match_call, served
from tierkv.errors import TierKVError
from tierkv.settings import SocketSettings
from tierkv_connectors import wire
from tierkv_connectors.sidecar import SidecarChannel
from tierkv_service.locks import Locks

KEY = b"k" * 32


@pytest.fixture
def one(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path / "s.sock") as running:
        yield running


def ask(path: Path) -> Any:
    channel = SidecarChannel(path)
    try:
        return channel.call(match_call(KEY))
    finally:
        channel.close()


def test_socket_modes(tmp_path: Path) -> None:
    with served(tmp_path / "a" / "own.sock") as one:
        assert stat.S_IMODE(one.path.stat().st_mode) == 0o600
        assert stat.S_IMODE(wire.arena_path(one.path).stat().st_mode) == 0o600
    assert not one.path.exists()
    with served(tmp_path / "group.sock", group="root") as one:
        assert stat.S_IMODE(one.path.stat().st_mode) == 0o660
    with served(tmp_path / "uids.sock", uids={os.getuid()}) as one:
        assert stat.S_IMODE(one.path.stat().st_mode) == 0o666


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_other_uid_is_refused(tmp_path: Path) -> None:
    program = """
import os, socket, sys
sock = socket.socket(socket.AF_UNIX)
os.setuid(12345)
sock.connect(sys.argv[1])
sys.stdout.buffer.write(sock.recv(1000))
"""
    for folder in (tmp_path, *tmp_path.parents[:-2]):
        folder.chmod(0o755)
    with served(tmp_path / "s.sock", uids={0, 4321}) as one:
        command = [sys.executable, "-c", program, str(one.path)]
        done = subprocess.run(command, check=True, capture_output=True, timeout=30)
        assert b"not one of [socket] uids" in done.stdout
        assert one.server.counters["server_refused_connections"] == 1
        assert ask(one.path) is not None


def test_second_server_names_the_first(one: Served) -> None:
    with pytest.raises(TierKVError, match=rf"pid {os.getpid()}"):
        Locks(one.path, SocketSettings())


def test_live_server_without_a_lock_file_is_noticed(one: Served) -> None:
    wire.lock_path(one.path).unlink()
    locks = Locks(one.path, SocketSettings())
    with pytest.raises(TierKVError, match=rf"pid {os.getpid()} listens"):
        locks.listen()
    assert ask(one.path) is not None
    os.close(locks._arena)
    os.close(locks._lock)


def test_stale_socket_is_replaced_and_other_files_are_not(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    with served(path) as one:
        assert ask(one.path) is not None
    path.write_text("mine")
    locks = Locks(path, SocketSettings())
    with pytest.raises(TierKVError, match="not a socket"):
        locks.listen()
    assert path.read_text() == "mine"
    os.close(locks._arena)
    os.close(locks._lock)


def test_socket_path_too_long(tmp_path: Path) -> None:
    with pytest.raises(TierKVError, match="longer than"):
        Locks(tmp_path / ("x" * 120), SocketSettings())
