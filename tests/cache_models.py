"""Caches of equal blocks as the papers tell them, one access at a time: what policies equal."""

from collections import OrderedDict
from collections.abc import Container
from typing import Protocol


class Cache(Protocol):
    @property
    def resident(self) -> Container[int]: ...

    def access(self, block: int) -> bool: ...


class LruModel:
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.resident: OrderedDict[int, None] = OrderedDict()

    def access(self, block: int) -> bool:
        hit = block in self.resident
        if not hit and len(self.resident) == self.capacity:
            self.resident.popitem(last=False)
        self.resident[block] = None
        self.resident.move_to_end(block)
        return hit


class ArcModel:
    """The figure of the paper, line by line; lists are oldest first."""

    def __init__(self, capacity: int) -> None:
        self.c, self.p = capacity, 0.0
        self.t1: list[int] = []
        self.t2: list[int] = []
        self.b1: list[int] = []
        self.b2: list[int] = []

    @property
    def resident(self) -> set[int]:
        return {*self.t1, *self.t2}

    def replace(self, block: int) -> None:
        size = len(self.t1)
        if size and ((block in self.b2 and size == self.p) or size > self.p):
            self.b1.append(self.t1.pop(0))
        else:
            self.b2.append(self.t2.pop(0))

    def access(self, block: int) -> bool:
        for hits in (self.t1, self.t2):
            if block in hits:
                hits.remove(block)
                self.t2.append(block)
                return True
        if block in self.b1:
            self.p = min(self.c, self.p + max(1.0, len(self.b2) / len(self.b1)))
            self.replace(block)
            self.b1.remove(block)
            self.t2.append(block)
            return False
        if block in self.b2:
            self.p = max(0.0, self.p - max(1.0, len(self.b1) / len(self.b2)))
            self.replace(block)
            self.b2.remove(block)
            self.t2.append(block)
            return False
        if len(self.t1) + len(self.b1) == self.c:
            if len(self.t1) < self.c:
                self.b1.pop(0)
                self.replace(block)
            else:
                self.t1.pop(0)
        elif sum(map(len, (self.t1, self.t2, self.b1, self.b2))) >= self.c:
            if sum(map(len, (self.t1, self.t2, self.b1, self.b2))) == 2 * self.c:
                self.b2.pop(0)
            self.replace(block)
        self.t1.append(block)
        return False


class S3FifoModel:
    """Small queue of a tenth, promotion after one more use, ghosts as many as the main queue."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.limit = capacity, max(1, capacity // 10)
        self.small: list[int] = []
        self.main: list[int] = []
        self.ghosts: list[int] = []
        self.resident: dict[int, int] = {}

    def evict(self) -> None:
        while True:
            if self.small and (len(self.small) >= self.limit or not self.main):
                block = self.small.pop(0)
                if not self.resident[block]:
                    self.ghosts.append(block)
                    del self.resident[block]
                    del self.ghosts[: max(0, len(self.ghosts) - (self.capacity - self.limit))]
                    return
                self.resident[block] = 0
            else:
                block = self.main.pop(0)
                if not self.resident[block]:
                    del self.resident[block]
                    return
                self.resident[block] -= 1
            self.main.append(block)

    def access(self, block: int) -> bool:
        if block in self.resident:
            self.resident[block] = min(3, self.resident[block] + 1)
            return True
        known = block in self.ghosts
        if known:
            self.ghosts.remove(block)
        if len(self.resident) == self.capacity:
            self.evict()
        self.resident[block] = 0
        (self.main if known else self.small).append(block)
        return False


class BeladyModel:
    """Looks through all that is to come; what is needed last goes, or does not enter."""

    def __init__(self, capacity: int, accesses: list[int]) -> None:
        self.capacity, self.accesses, self.at = capacity, accesses, 0
        self.resident: set[int] = set()

    def access(self, block: int) -> bool:
        self.at += 1
        hit = block in self.resident
        self.resident.add(block)
        if len(self.resident) > self.capacity:
            coming = self.accesses[self.at :]

            def wait(other: int) -> int:
                return coming.index(other) if other in coming else len(coming)

            self.resident.remove(max(self.resident, key=lambda other: (wait(other), other)))
        return hit


class GdsfModel:
    """Equal sizes and one second each; ties go to the longest unused."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.clock, self.now = capacity, 0.0, 0
        self.uses: dict[int, int] = {}
        self.resident: dict[int, tuple[float, int]] = {}

    def access(self, block: int) -> bool:
        hit = block in self.resident
        if not hit and len(self.resident) == self.capacity:
            gone = min(self.resident, key=self.resident.__getitem__)
            self.clock = self.resident.pop(gone)[0]
            del self.uses[gone]
        self.now += 1
        self.uses[block] = self.uses.get(block, 0) + 1
        self.resident[block] = (self.clock + self.uses[block], self.now)
        return hit
