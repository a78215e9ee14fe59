"""kill -9 of a writer, hundreds of times: what was acknowledged is there, and nothing is wrong."""

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.crash.rounds import MIB, key_of, size_of
from tierkv.tiers.nvme import SIDE_BYTES

REPOSITORY = Path(__file__).resolve().parents[2]
START = "from tests.crash.rounds import serve; serve()"
ROUNDS = 300
RECLAIM_ROUNDS = 40
SEED = 20261129
SIZE, REGION = 64 * MIB, 2 * MIB
SMALL_SIZE, SMALL_REGION = 24 * MIB, MIB
ROOM = 8 * MIB
"""Acknowledged bytes in one directory: far enough below the size that nothing is evicted."""


class Zygote:
    """The warm process that forks writers and readers."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, list[int]]] = []
        """What the last child said, in order."""
        self._process = subprocess.Popen(
            [sys.executable, "-c", START], cwd=REPOSITORY, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def ask(self, act: str, folder: Path, **fields: Any) -> dict[str, list[list[int]]]:
        """Return what the child said, by word; each a list of lines."""
        request = {"act": act, "folder": str(folder), "size": SIZE, "region": REGION} | fields
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        self.lines = [
            (word, [int(number) for number in numbers]) for word, *numbers in answer["said"]
        ]
        said: dict[str, list[list[int]]] = {}
        for word, line in self.lines:
            said.setdefault(word, []).append(line)
        assert "timeout" not in said, "the child did not end"
        return said

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        assert self._process.wait(30) == 0


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    made = Zygote()
    yield made
    made.close()


def read(zygote: Zygote, folder: Path, numbers: list[int], **fields: Any) -> list[int]:
    """Open the directory in a fresh process and return the right ones; none may be wrong."""
    said = zygote.ask("read", folder, numbers=numbers, **fields)
    assert "end" in said, "the directory does not open"
    assert said["wrong"] == [[]]
    assert said["broken"] == [[0]]
    (nbytes, files) = said["bytes"][0]
    assert nbytes <= fields.get("size", SIZE) + SIDE_BYTES
    assert files <= 4, "files are left over"
    return said["right"][0]


def kill_of(rng: random.Random) -> dict[str, float]:
    """Return when to kill: after some lines of the ledger and a little more."""
    return {"lines": rng.randint(0, 12), "seconds": rng.random() * 0.012}


@pytest.mark.timeout(300)
def test_what_was_acknowledged_is_found_after_each_of_300_kills(
    zygote: Zygote, tmp_path: Path
) -> None:
    rng = random.Random(SEED)
    folder, first = tmp_path / "0", 0
    promised: set[int] = set()
    ever = 0
    for number in range(ROUNDS):
        if sum(size_of(block) for block in promised) > ROOM:
            shutil.rmtree(folder)
            folder, promised, first = tmp_path / str(number), set(), first + 1000
        kill = kill_of(rng)
        said = zygote.ask("write", folder, seed=rng.random(), first=first, kill=kill)
        durable = {block for line in said.get("durable", []) for block in line}
        promised |= durable
        ever += len(durable)
        first = max([first, *(line[0] for line in said.get("tried", []))])
        # All that was promised, and what was being written when the kill came.
        asked = sorted(promised | set(range(max(first - 6, 0), first + 6)))
        right = read(zygote, folder, asked)
        lost = promised - set(right)
        assert not lost, f"seed {SEED}, round {number}, {kill}: {lost} were acknowledged"
        promised |= set(right)
        first += 6
    assert ever > ROUNDS, f"only {ever} blocks were acknowledged: the kills came too early"


@pytest.mark.timeout(300)
def test_kills_while_regions_are_reclaimed_lose_only_what_was_evicted(
    zygote: Zygote, tmp_path: Path
) -> None:
    rng = random.Random(SEED + 1)
    small = {"size": SMALL_SIZE, "region": SMALL_REGION}
    folder, first, evicted = tmp_path / "small", 0, 0
    holds: dict[int, int] = {}
    promised: set[int] = set()
    for number in range(RECLAIM_ROUNDS):
        kill = {"lines": rng.randint(5, 90), "seconds": rng.random() * 0.01}
        said = zygote.ask("write", folder, seed=rng.random(), first=first, kill=kill, **small)
        tried = max([first, *(line[0] for line in said.get("tried", []))])
        names = {int.from_bytes(key_of(block)[:6], "little"): block for block in range(tried)}
        for word, line in zygote.lines:
            if word == "wrote":
                holds[line[1]] = names[line[0]]
            elif word == "freed":
                evicted += holds.pop(line[0], None) is not None
            elif word == "durable":
                promised |= set(line)
        there = set(holds.values())
        promised &= there
        recent = list(range(max(tried - 150, 0), tried))
        right = set(read(zygote, folder, sorted(promised | set(recent)), **small))
        lost = promised - right
        assert not lost, f"seed {SEED + 1}, round {number}, {kill}: {lost} were not evicted"
        first = tried
    assert evicted > 100, "no region was reclaimed"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", ["before", "torn", "after"])
def test_a_kill_at_every_call_that_changes_the_disk(
    zygote: Zygote, tmp_path: Path, how: str
) -> None:
    whole = zygote.ask("script", tmp_path / "whole", at=0, how=how)
    count = whole["calls"][0][0]
    assert count >= 10
    assert [block for line in whole["durable"] for block in line] == [1, 2, 3, 4, 5, 6, 7]
    for at in range(1, count + 1):
        folder = tmp_path / str(at)
        said = zygote.ask("script", folder, at=at, how=how)
        durable = {block for line in said.get("durable", []) for block in line}
        right = read(zygote, folder, list(range(1, 8)), more=8)
        lost = durable - set(right)
        assert not lost, f"killed {how} call {at} of {count}: {lost} were acknowledged"
        again = read(zygote, folder, [*right, 8])
        assert set(again) == {*right, 8}, f"killed {how} call {at} of {count}: lost by a restart"
        shutil.rmtree(folder)
