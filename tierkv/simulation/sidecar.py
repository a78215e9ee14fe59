"""Sidecar: the real store, with eyes. It audits itself after every step and sums itself up."""

import hashlib
from collections import Counter

from tierkv.cache import TierKV
from tierkv.catalog import ABSENT, LEAVING, NONE, READY, WRITING
from tierkv.namespace import digest_of
from tierkv.pairs import PROGRESSIVE
from tierkv.simulation.media import Name
from tierkv.tier import RAM


class Sidecar(TierKV):
    """A TierKV that can be looked into."""

    def audit(self) -> None:
        """Assert what must hold at any time: accounting, states and holds. Linear in placements."""
        store, catalog = self._store, self._store.catalog
        store.check()
        assert store.broken == "", store.broken
        placed: Counter[tuple[int, int]] = Counter()
        names: set[tuple[int, bool, bytes, int]] = set()
        used = [row for row, state in enumerate(catalog.state) if state != ABSENT]
        for row in used:
            place = (int(catalog.tier[row]), int(catalog.state[row]))
            placed[place] += int(catalog.allocated[row])
            small = place[0] == RAM and catalog.profile[row] in PROGRESSIVE
            name = (place[0], small, catalog.key(row), int(catalog.part[row]))
            assert name not in names, "one unit stands twice in a tier, or in one place of RAM"
            names.add(name)
            assert place[1] in (READY, LEAVING) or not catalog.holds[row], (
                "a hold on what is not ready"
            )
            assert place[1] != LEAVING or catalog.holds[row], "it leaves and nobody holds it"
        for (tier, state), size in placed.items():
            assert int(catalog.bytes[tier][state]) == size, "the sums differ from the placements"
        self._audit_holds()

    def _audit_holds(self) -> None:
        """Assert that each hold of a client is counted, and that what is on its way is in RAM."""
        catalog, matches = self._store.catalog, self._matches
        held: Counter[int] = Counter()
        for match in matches.open.values():
            held.update(int(row) for row in match.rows if row != NONE)
        for _, rows in matches.transfers.values():
            held.update(int(row) for row in rows)
        for row, count in held.items():
            assert catalog.holds[row] >= count, "a lease holds nothing"
            assert catalog.tier[row] == RAM, "a lease on what is not in RAM"
        for row in matches.arriving:
            assert (catalog.tier[row], catalog.state[row]) == (RAM, WRITING), "arriving nowhere"
        for reservation in self._puts.open.values():
            assert all(catalog.state[row] == WRITING for row in reservation.rows)

    def audit_rest(self) -> None:
        """Assert that nothing is left over when nobody wants anything any more."""
        catalog, matches = self._store.catalog, self._matches
        assert not matches.open, "a match is left"
        assert not matches.transfers, "a transfer is left"
        assert not matches.arriving, "something is still on its way"
        assert not self._puts.open, "a reservation is left"
        assert self._write_behind.idle(), "writes are left"
        for row, state in enumerate(catalog.state):
            assert state in (ABSENT, READY), "a placement is left half made"
            assert not catalog.holds[row], "a hold is left"

    def generation(self, namespace: str) -> int:
        """Return the minimum generation that this sidecar knows."""
        return int(self._store.namespaces.generation(digest_of(namespace)))

    def lists(self, tier: str, name: Name) -> bool:
        """Return whether the catalog has a ready copy in a tier."""
        catalog = self._store.catalog
        head = catalog.head(name[0], catalog.part_number(name[1]))
        number = catalog.tiers.index(tier)
        while head != NONE:
            if catalog.tier[head] == number and catalog.state[head] == READY:
                return True
            head = int(catalog.sibling[head])
        return False

    def counters(self) -> Counter[str]:
        """Return what was counted, and hits by tier."""
        store = self._store
        hits = {f"hit_{name}": count for name, count in store.hits.items()}
        return Counter(dict(store.counters)) + Counter(dict(store.totals)) + Counter(hits)

    def digest(self) -> bytes:
        """Return 32 bytes that differ when any decision was another one."""
        catalog = self._store.catalog
        rows = sorted(
            (
                catalog.key(row), catalog.part_of(row), int(catalog.tier[row]), int(state),
                int(catalog.nbytes[row]), int(catalog.locator[row]), int(catalog.generation[row]),
            )
            for row, state in enumerate(catalog.state)
            if state != ABSENT
        )  # fmt: skip
        text = repr((rows, sorted(self.counters().items())))
        return hashlib.sha256(text.encode()).digest()
