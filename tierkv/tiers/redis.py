"""RedisTier: frames in a Redis server that several sidecars share (docs/FORMAT.md, Redis).

Values travel on RESP connections of our own (`resp`, `redis_hash`): some for reads, one for writes,
so that no read waits behind write-behind, and one for lookups, which wait behind neither; rare
commands go through redis-py.

What is cleared is decided in Redis too: every batch opens with the token of the hash of generations
and reads that hash again when the token has changed. So a clear by another sidecar holds for each
call that begins after it. A server that lost the hash gets it back from whoever remembers it.

Two breakers: one for the link, opened by lost connections and by servers that refuse even to look;
one for writes alone, opened by the first refused one (no memory, read only), so that reads go on.
"""

import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

import numpy as np
import numpy.typing as npt

from tierkv.tier import DONE, FOUND, Batch, FrameId, Item, Outcome, Space, Status
from tierkv.tiers import redis_hash
from tierkv.tiers.breaker import Breaker
from tierkv.tiers.endpoint import Endpoint, RedisSettings, tls_context
from tierkv.tiers.redis_control import Control, ServerError
from tierkv.tiers.redis_hash import Job, Meta, key_of
from tierkv.tiers.resp import Connection, LostError, Pool, Refused, request

__all__ = ["RedisSettings", "RedisTier"]

FORMAT_MAJOR = 1
DROP_BATCH = 512
SLOWEST_BYTES_PER_S = 32 << 20
"""A call may take its timeout and the time that its bytes need at this speed."""
LOOKUP_BYTES = 1024
"""What an id of a lookup counts for in its deadline."""
PROBE_S = 0.6
"""For connecting and for each reply of a probe: together within `health.DEADLINE_S`."""
BREAKER_FAILURES = 3
BREAKER_FIRST_S = 0.5
BREAKER_MOST_S = 30.0

CLOSED = Outcome(Status.FAILED, "closed")
OPEN = Outcome(Status.THROTTLED, "Redis failed repeatedly and is left alone for a while")
BUSY = Outcome(Status.THROTTLED, "all connections are in use")
BETTER = Outcome(Status.THROTTLED, "a copy of a higher class is there")
NO_FRAME = Outcome(Status.FAILED, "not a frame of this release, or not of this length")


class RedisTier:
    """A SharedTier. Locators only count: a frame is found by its id, wherever it was written.

    Status of an item: FULL for `noeviction` without room (writes then back off by themselves),
    THROTTLED while a breaker is open, FAILED for an error or a deadline.
    """

    name = "redis"
    durable = True
    granule = 1

    def __init__(
        self,
        settings: RedisSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """Connect to nothing yet. Raises: TierKVError when redis-py or a TLS file is missing."""
        self._settings = settings
        # A call costs about a millisecond in which its connection carries nothing. One waits for
        # them; more would wait so long where the network is slow that their deadlines pass.
        connections = settings.connections
        self.batch = Batch(512, (64 << 20) // connections, connections + 1)
        self._endpoint = Endpoint.parse(settings.url)
        self._prefix = f"{settings.prefix}:{FORMAT_MAJOR}:".encode()
        self._control = Control(settings, self._prefix)
        self._context = tls_context(settings) if self._endpoint.tls else None
        self._reads = Pool(self._connect, settings.connections)
        self._writes = Pool(self._connect, 1)
        self._lookups = Pool(self._connect, 1)
        self._clock = clock
        self._lock = threading.Lock()
        self._reserved = self._locator = 0
        self._closed = False
        self._link = _breaker(BREAKER_FAILURES, draw)
        self._room = _breaker(1, draw)
        self._no_room = OPEN

    # --- space ---

    def reserve(self, nbytes: int) -> int | None:
        with self._lock:
            if self._reserved + nbytes > self._settings.max_bytes:
                return None
            self._reserved += nbytes
            self._locator += 1
            return self._locator

    def free(self, locator: int, nbytes: int) -> None:  # noqa: ARG002, bytes have no place here
        with self._lock:
            self._reserved = max(self._reserved - nbytes, 0)

    def space(self) -> Space:
        with self._lock:
            return Space(self._settings.max_bytes, self._settings.max_bytes - self._reserved, 0)

    # --- frames ---

    def write(self, items: Sequence[Item]) -> list[Outcome]:
        """As Tier; a frame that is there already, or a better one, is left alone.

        Equal length, codec and class is the same frame: DONE. Where one of a higher class lies the
        item is THROTTLED. Any other frame under the id is replaced.
        """
        with self._lock:
            if not items or not self._room.allows(self._clock()):
                return [self._no_room] * len(items)
        outcomes: list[Outcome | None] = [None] * len(items)
        metas = [redis_hash.meta_of(item) if redis_hash.holds(item) else None for item in items]
        sound = [number for number, meta in enumerate(metas) if meta is not None]
        refused: list[Refused | None] = []

        def work(link: Connection) -> None:
            keys = [key_of(self._prefix, items[number].id) for number in sound]
            jobs = []
            there = redis_hash.find(link, self._control.opening, self._control.check, keys)
            for number, key, old in zip(sound, keys, there, strict=True):
                new = metas[number]
                assert new is not None
                kept = old if isinstance(old, Meta) and self._control.live(old) else None
                if kept is not None and kept.same(new):
                    outcomes[number] = DONE
                elif kept is not None and kept.fidelity > new.fidelity:
                    outcomes[number] = BETTER
                else:
                    jobs.append(Job(number, key, items[number], new))
            ttl_s = self._settings.ttl_s
            refused.append(redis_hash.store(link, self._prefix, jobs, ttl_s, outcomes))

        failure = self._call(self._writes, sum(item.nbytes for item in items), work)
        self._note_room(refused[-1] if refused else None, failed=failure is not DONE)
        rest = NO_FRAME if failure is DONE else failure
        return [outcome or rest for outcome in outcomes]

    def read(self, items: Sequence[Item]) -> list[Outcome]:
        outcomes: list[Outcome | None] = [None] * len(items)
        jobs = [
            Job(number, key_of(self._prefix, item.id), item)
            for number, item in enumerate(items)
            if redis_hash.holds(item)
        ]
        if not jobs:
            return [NO_FRAME] * len(items)

        def work(link: Connection) -> None:
            redis_hash.load(
                link, self._control.opening, self._control.check, jobs, self._control.live, outcomes
            )

        failure = self._call(self._reads, sum(item.nbytes for item in items), work)
        rest = NO_FRAME if failure is DONE else failure
        return [outcome or rest for outcome in outcomes]

    def find(self, ids: Sequence[FrameId]) -> list[int]:
        """As SharedTier; cleared frames are absent. One round trip for each 4,096 ids."""
        found: list[Meta | Refused | None] = []

        def work(link: Connection) -> None:
            keys = [key_of(self._prefix, id_) for id_ in ids]
            found[:] = redis_hash.find(link, self._control.opening, self._control.check, keys)

        if not ids or self._call(self._lookups, len(ids) * LOOKUP_BYTES, work) is not DONE:
            return [-1] * len(ids)
        return [
            meta.nbytes if isinstance(meta, Meta) and self._control.live(meta) else -1
            for meta in found
        ]

    def drop(self, ids: Sequence[FrameId]) -> list[Outcome]:
        keys = [key_of(self._prefix, id_) for id_ in ids]
        outcomes: list[Outcome] = []
        for start in range(0, len(keys), DROP_BATCH):
            some = keys[start : start + DROP_BATCH]
            try:
                self._command(partial(self._control.unlink, some))
            except OSError as error:
                outcomes += [Outcome(Status.FAILED, str(error))] * len(some)
            else:
                outcomes += [DONE] * len(some)
        return outcomes

    def scan(self) -> npt.NDArray[np.void]:
        """Return nothing: what is stored belongs to all sidecars and is found by `find`."""
        return np.empty(0, FOUND)

    def sync(self, *, power: bool) -> None:
        """Do nothing: the server has what was written, whatever becomes of this process.

        With `power` too: what a power loss takes is the server's `appendonly` and `save` settings'
        matter, and a lost frame is a miss.
        """

    # --- generations ---

    def generations(self) -> Mapping[bytes, int]:
        """As DurableTier; when Redis cannot be reached, what was known last.

        That is safe: no frame is given out before they were read.
        """
        with suppress(OSError):
            self._command(self._control.pull)
        return self._control.known()

    def raise_generation(self, namespace: bytes, generation: int) -> None:
        """As DurableTier; after an OSError this tier still hides the frames, and tries again."""
        self._control.remember(namespace, generation)
        self._command(partial(self._control.push, namespace, generation))

    # --- calls ---

    def _connect(self) -> Connection:
        return Connection(
            self._endpoint,
            timeout_s=self._settings.timeout_s,
            connect_timeout_s=self._settings.connect_timeout_s,
            context=self._context,
        )

    def _call(self, pool: Pool, nbytes: int, work: Callable[[Connection], None]) -> Outcome:
        """Do work on a connection; returns DONE or why it is not. It may run twice."""
        refusal = self._gate()
        if refusal is not DONE:
            return refusal
        deadline = time.monotonic() + self._settings.timeout_s + nbytes / SLOWEST_BYTES_PER_S
        try:
            outcome = self._attempt(pool, deadline, work) or self._attempt(pool, deadline, work)
        except LostError as error:
            outcome = Outcome(Status.FAILED, str(error))
        outcome = outcome or Outcome(Status.FAILED, "connections are lost as soon as they are made")
        if outcome is not BUSY or self._link.is_open:
            self._note_link(failed=outcome is not DONE)
        return outcome

    def _attempt(
        self, pool: Pool, deadline: float, work: Callable[[Connection], None]
    ) -> Outcome | None:
        """Return DONE or BUSY; None when the connection had died of old age. Raises: LostError."""
        link = pool.take(deadline - time.monotonic())
        if link is None:
            return BUSY
        good = False
        try:
            link.begin(deadline)
            work(link)
            good = True
        except LostError as error:
            if not (error.stale and link.used):
                raise
            pool.forget()
            return None
        finally:
            (pool.give if good else pool.lose)(link)
        return DONE

    def _command(self, work: Callable[[], None]) -> None:
        """Run a rare command. Raises: OSError."""
        refusal = self._gate()
        if refusal is not DONE:
            raise OSError(refusal.detail)
        try:
            work()
        except ServerError as error:
            self._note_link(failed=not error.reached)
            raise
        self._note_link(failed=False)

    def _gate(self) -> Outcome:
        if self._closed:
            return CLOSED
        with self._lock:
            return DONE if self._link.allows(self._clock()) else OPEN

    def _note_link(self, *, failed: bool) -> None:
        with self._lock:
            if failed:
                self._link.failed(self._clock())
            else:
                self._link.succeeded()

    def _note_room(self, refused: Refused | None, *, failed: bool) -> None:
        """Let writes rest after a refused one; a trial that could not be made failed."""
        with self._lock:
            if refused is not None:
                full = redis_hash.judged(refused).status is Status.FULL
                self._no_room = Outcome(Status.FULL if full else Status.THROTTLED, refused.text)
            if refused is not None or (failed and self._room.is_open):
                self._room.failed(self._clock())
            elif not failed:
                self._room.succeeded()

    def probe(self) -> str:
        """As Tier; a connection of its own, so that it tries the login too."""
        if self._closed:
            return CLOSED.detail
        try:
            link = Connection(
                self._endpoint,
                timeout_s=PROBE_S,
                connect_timeout_s=PROBE_S,
                context=self._context,
            )
        except LostError as error:
            return str(error)
        try:
            link.begin(time.monotonic() + PROBE_S)
            link.send([request(b"PING")])
            reply = link.reply()
        except LostError as error:
            return str(error)
        finally:
            link.close()
        if isinstance(reply, Refused):
            return reply.text
        return "" if reply == b"PONG" else "PING got a strange reply"

    def close(self) -> None:
        self._closed = True
        self._reads.close()
        self._writes.close()
        self._lookups.close()
        self._control.close()


def _breaker(failures: int, draw: Callable[[], float]) -> Breaker:
    return Breaker(failures=failures, first_s=BREAKER_FIRST_S, most_s=BREAKER_MOST_S, draw=draw)
