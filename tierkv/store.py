"""Store: the data that puts, matches and write-behind share, and the few steps they all take.

Every method here is called under `lock` and does no I/O. Tier 0 of the catalog is host RAM; the
lower tiers follow in the order given, fastest first.
"""

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial

import numpy as np
import numpy.typing as npt

from tierkv import frame, lineage, pairs
from tierkv.catalog import MANY, NONE, READY, Catalog, Rows, Unit
from tierkv.clock import Clock
from tierkv.codec import BY_NUMBER
from tierkv.cost import HOST_RATES, Rates
from tierkv.encoder import Encoder
from tierkv.errors import invalid
from tierkv.executor import Executor
from tierkv.gate import Gate
from tierkv.lower import Lower, lower_tier
from tierkv.namespace import Namespaces
from tierkv.offers import Offers
from tierkv.part import PACKED_BYTES, Part
from tierkv.policies.choice import make_policy, open_policy
from tierkv.policy import ServicePolicy
from tierkv.record import Recorder
from tierkv.settings import StoreSettings
from tierkv.store_lock import StoreLock
from tierkv.tier import RAM, DurableTier, FrameId
from tierkv.tiers.host import HostTier

MAX_PARTS = 4096
"""Sets of parts that calls may name; models times ranks, with room to spare."""
READ_FAILURES = 3
OFF_S = 5.0
IO_DEADLINE_S = 5.0

Numbers = npt.NDArray[np.int32]


class Store:
    """Catalog, tiers, policy and counters behind one lock."""

    def __init__(
        self,
        host: HostTier,
        lower: Sequence[DurableTier],
        executor: Executor,
        clock: Clock,
        settings: StoreSettings,
        gate: Gate | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.lock = StoreLock(self.broke)
        self.host = host
        self.host_rates = HOST_RATES
        self.lower = [lower_tier(number, tier, clock) for number, tier in enumerate(lower, 1)]
        names = ["host", *(tier.name for tier in lower)]
        cuts = [RAM, *(low.number for low in self.lower if low.regions is not None)]
        self.recorder = recorder
        self.catalog = recorder.catalog(names, cuts) if recorder else Catalog(names, cuts)
        self.executor = executor
        self.clock = clock
        self.settings = settings
        self.offers = Offers(gate)
        self.encoder: Encoder | None = None
        self.policy = self.new_policy(settings.policy)
        self.namespaces = Namespaces()
        self._parts: dict[bytes, list[int]] = {}
        self.counters: Counter[str] = Counter()
        self.hits: Counter[str] = Counter()
        self.totals: Counter[str] = Counter()
        self.seconds = {"saved": 0.0, "lost": 0.0}
        self.broken = ""

    def new_policy(self, setting: str) -> ServicePolicy:
        """Return the policy that a setting means, told of nothing. Raises: TierKVError."""
        tiers = [self.host, *(low.tier for low in self.lower)]
        sights = self.settings.second_sight
        gate, rates = self.offers.gate, self.rates()
        opening = open_policy(setting, gate, rates, tiers, second_sight=sights)
        return self.recorder.policy(opening) if self.recorder else make_policy(opening)

    def rates(self) -> list[Rates]:
        """Return the rates by tier number."""
        return [self.host_rates, *(lower.io.rates for lower in self.lower)]

    def usable(self, lower: Lower, since: float = float("inf")) -> bool:
        """Return whether reads, and one begun at `since`, are worth waiting for."""
        stuck, now = self.executor.stuck(lower.reads, IO_DEADLINE_S), self.clock()
        if stuck > lower.stuck:  # a while; then the threads that do not hang try again
            self._leave_alone(lower)
        lower.stuck = stuck
        return stuck < 1.0 and now >= lower.off_until and now <= since + IO_DEADLINE_S

    def failed(self, lower: Lower) -> None:
        """Note a failed read; READ_FAILURES of them in a row and the tier is left alone a while."""
        lower.failures += 1
        if lower.failures >= READ_FAILURES:
            lower.failures = 0
            self._leave_alone(lower)

    def _leave_alone(self, lower: Lower) -> None:
        lower.off_until = self.clock() + OFF_S
        self.counters[f"off_{lower.name}"] += 1

    def heads(self, keys: bytes, parts: Sequence[int]) -> Numbers:
        """Return the first placement of every unit, block-major."""
        if len(parts) == 1:
            return self.catalog.find(keys, parts[0])
        return np.stack([self.catalog.find(keys, part) for part in parts], axis=1).reshape(-1)

    def answers(self, row: int, fidelity: int, namespace: int) -> bool:
        """Return whether a placement may answer: namespace, generation, fidelity, a known codec."""
        catalog = self.catalog
        return (
            catalog.fidelity[row] >= fidelity
            and catalog.namespace[row] == namespace
            and catalog.generation[row] >= self.namespaces.minimum[namespace]
            and catalog.profile[row] > 0
        )

    def look(self, heads: Numbers, fidelity: int, namespace: int, start: int = 0) -> "array[int]":
        """Note that a whole chain was used, in every tier that holds any of it.

        Returns: the RAM placements that may answer, from unit `start` to the first gap; of two of a
        unit the plain one, which loads quickest.
        """
        if len(heads) >= MANY:
            return self._look_far(heads, fidelity, namespace, start)
        catalog, tier, state = self.catalog, self.catalog.tier, self.catalog.state
        profile = catalog.profile
        every: list[int] = []
        ready = array("i")
        gap = False
        for unit, head in enumerate(heads.tolist()):
            found, before = NONE, unit < start
            for row in catalog.copies(head):
                every.append(row)
                wanted = tier[row] == RAM and not (gap or before) and state[row] == READY
                if wanted and (found == NONE or profile[row] not in pairs.PROGRESSIVE):
                    found = row if self.answers(row, fidelity, namespace) else found
            gap = gap or (found == NONE and not before)
            if not (gap or before):
                ready.append(found)
        self.policy.touched(catalog, every)
        return ready

    def _look_far(self, heads: Numbers, fidelity: int, namespace: int, start: int) -> "array[int]":
        """As `look`, with fewer steps for each block and more for each call."""
        column = self.catalog.column
        tier, profile, sibling = column("tier"), column("profile"), column("sibling")
        at, found = heads, np.full(len(heads), NONE, np.int32)
        other, levels = found.copy(), list[Numbers]()
        while (known := at != NONE).any():
            ram = known & (tier[at] == RAM)
            if levels:
                other = np.where(ram, found, other)
            levels.append(at)
            np.copyto(found, at, where=ram)
            at = np.where(known, sibling[at], np.int32(NONE))
        if not levels:
            return array("i")
        if len(levels) > 1 and (other != NONE).any():
            small = (other != NONE) & pairs.PROGRESSIVES[profile[found]]
            found, other = np.where(small, other, found), np.where(small, found, other)
            found = np.where(self._may(found, fidelity, namespace), found, other)
        found = found[start:]
        may = self._may(found, fidelity, namespace)
        every = np.stack(levels, axis=1).reshape(-1)
        self.policy.touched(self.catalog, array("i", every[every != NONE].tobytes()))
        return array("i", found[: len(may) if may.all() else int(may.argmin())].tobytes())

    def _may(self, rows: Numbers, fidelity: int, namespace: int) -> npt.NDArray[np.bool_]:
        """Return which of many placements are ready and may answer."""
        column = self.catalog.column
        may: npt.NDArray[np.bool_] = (rows != NONE) & (column("state")[rows] == READY)
        may &= (column("fidelity")[rows] >= fidelity) & (column("namespace")[rows] == namespace)
        may &= column("generation")[rows] >= self.namespaces.minimum[namespace]
        may &= column("profile")[rows] > 0
        return may

    def ready_in(self, tier: int, head: int, fidelity: int, namespace: int) -> int:
        """Return a unit's ready placement in a tier that may answer, NONE where there is none.

        Of two in RAM it is the plain one, which loads quickest.
        """
        catalog, found = self.catalog, NONE
        for row in catalog.copies(head):
            wanted = catalog.tier[row] == tier and catalog.state[row] == READY
            if wanted and (found == NONE or catalog.profile[row] not in pairs.PROGRESSIVE):
                found = row if self.answers(row, fidelity, namespace) else found
        return found

    def drop(self, rows: Rows) -> None:
        """Make ready placements invisible now; held ones keep their space until the unhold."""
        if rows:
            self.catalog.leave(rows)
            self._gone([row for row in rows if not self.catalog.holds[row]])

    def clear_below(self, digest: bytes, generation: int) -> dict[str, int]:
        """Raise a namespace's minimum and drop what is below it; returns counts by tier."""
        catalog, namespace = self.catalog, self.namespaces.number(digest)
        self.namespaces.raise_to(digest, generation)
        removed: dict[str, int] = {}
        for tier, name in enumerate(catalog.tiers):
            rows = [
                row
                for row in catalog.select(tier, READY).tolist()
                if catalog.namespace[row] == namespace and catalog.generation[row] < generation
            ]
            self.drop(rows)
            removed[name] = len(rows)
        self.check()
        return removed

    def persist(self, low: Lower, known: Mapping[bytes, int]) -> None:
        """Tell a tier the minima that it does not know, or knows lower; not under the lock.

        What fails is tried again by a shared tier itself, by the others at the next start.
        """
        with self.lock:
            minima = self.namespaces.minima()
        for digest, generation in minima.items():
            if generation > known.get(digest, 0):
                with suppress(OSError):
                    low.tier.raise_generation(digest, generation)

    def unhold(self, rows: Rows) -> None:
        """End one hold of each row."""
        if not rows:
            return
        self._gone(self.catalog.unhold(rows))

    def abort(self, rows: Rows) -> None:
        """Take back placements in `writing` and their space."""
        if rows:
            self._free(rows)
            self.catalog.abort(rows)
            self.policy.forgot(rows)

    def _gone(self, rows: Rows) -> None:
        if not rows:
            return
        for low in self.lower:
            mine = [row for row in rows if self.catalog.tier[row] == low.number]
            if mine and low.shared is not None:
                ids = [self.frame_id(row) for row in mine]
                self.executor.submit(low.writes, partial(self._drop_shared, low, ids))
        self._free(rows)
        self.catalog.gone(rows)
        self.policy.forgot(rows)

    def _drop_shared(self, low: Lower, ids: Sequence[FrameId]) -> None:
        """Remove frames that nobody here answers from any more; a job of the tier's write thread.

        One that was put there again meanwhile stays. What fails is gone with its TTL.
        """
        assert low.shared is not None
        with self.lock:
            ids = [name for name in ids if not self._placed(low.number, name)]
        low.shared.drop(ids)

    def _placed(self, tier: int, name: FrameId) -> bool:
        catalog = self.catalog
        row = catalog.in_tier(catalog.head(name.key, catalog.part_number(name.part)), tier)
        return row != NONE and catalog.generation[row] == name.generation

    def _free(self, rows: Rows) -> None:
        tier, locator, allocated = self.catalog.tier, self.catalog.locator, self.catalog.allocated
        self.host.free_all([locator[row] for row in rows if tier[row] == RAM])
        for row in rows:
            if tier[row] != RAM:
                self.lower[tier[row] - 1].tier.free(locator[row], allocated[row])

    def frame_id(self, row: int) -> FrameId:
        """Return the name of a placement's frame."""
        catalog = self.catalog
        return FrameId(catalog.key(row), catalog.part_of(row), catalog.generation[row])

    def copy_of(
        self, row: int, tier: int, locator: int, *, profile: int = 0, nbytes: int = 0
    ) -> int:
        """Begin a placement in another tier of the same block, by default of an equal frame."""
        catalog = self.catalog
        place = self.lower[tier - 1].tier if tier else self.host
        nbytes, number = nbytes or catalog.nbytes[row], profile or catalog.profile[row]
        new = BY_NUMBER.get(number)
        lossy = frame.LOSSY if new is not None and new.lossy else 0
        ends = [
            lineage.end(catalog, row, level) if new is not None and level < new.levels else 0
            for level in (1, 2, 3)
        ]
        unit = Unit(
            catalog.key(row), catalog.part[row], number, lineage.fidelity(catalog, row, number),
            catalog.flags[row] | lossy, nbytes, -(-nbytes // place.granule) * place.granule,
            locator, catalog.namespace[row], catalog.generation[row], catalog.position[row],
            catalog.allowance[row], *ends,
        )  # fmt: skip
        return catalog.begin(tier, [unit])[0]

    def trim(self, row: int, nbytes: int) -> None:
        """Keep the first `nbytes` of a frame in RAM and free the pages behind them."""
        catalog, host = self.catalog, self.host
        locator, allocated = catalog.locator[row], -(-nbytes // host.page_bytes) * host.page_bytes
        if allocated < catalog.allocated[row]:
            locator = host.truncate(locator, nbytes)
        catalog.resize(row, nbytes, allocated, locator)

    def decode_bps(self, rows: Rows) -> float:
        """Return the raw bytes per second of the slowest profile among rows."""
        if len(rows) < MANY:
            found = set(map(self.catalog.profile.__getitem__, rows))
        else:
            found = set(self.catalog.column("profile")[np.asarray(rows, np.int32)].tobytes())
        numbers = found & BY_NUMBER.keys()
        return min((BY_NUMBER[number].decode_bps for number in numbers), default=float("inf"))

    def nbytes(self, rows: Rows) -> int:
        """Return the bytes of the frames of placements."""
        if len(rows) < MANY:
            return sum(map(self.catalog.nbytes.__getitem__, rows))
        return int(self.catalog.column("nbytes")[np.asarray(rows, np.int32)].sum(dtype=np.int64))

    def runs_of(self, rows: Rows) -> tuple[bytes, bytes]:
        """Return run counts (uint16) and byte runs (int64 pairs) of RAM placements."""
        return self.host.runs_of([*map(self.catalog.locator.__getitem__, rows)])

    def check(self) -> None:
        """Assert the capacity invariant of every tier with a capacity.

        Broken: only misses from now.
        """
        try:
            self.catalog.check(RAM, self.host.space())
            for lower in self.lower:
                if lower.shared is None:
                    self.catalog.check(lower.number, lower.tier.space(), lower.carrying)
        except AssertionError as error:
            self.broke(error)

    def broke(self, error: BaseException) -> None:
        """Answer only misses from now on."""
        self.broken = self.broken or str(error) or "an assertion failed"
        self.counters["invariant_broken"] += 1

    def parts_of(self, packed: bytes) -> list[int]:
        """Return part numbers of a call. Raises: TierKVError (invalid)."""
        known = self._parts.get(packed)
        if known is None:
            if not packed or len(packed) % PACKED_BYTES:
                raise invalid(f"parts are n x {PACKED_BYTES} bytes, not {len(packed)}")
            cut = [packed[at : at + PACKED_BYTES] for at in range(0, len(packed), PACKED_BYTES)]
            if len(set(cut)) < len(cut) or len(self._parts) >= MAX_PARTS:
                raise invalid(f"a call names each part once, and all at most {MAX_PARTS}")
            known = [self.catalog.part_number(Part.unpack(one)) for one in cut]
            self._parts[packed] = known
        return known
