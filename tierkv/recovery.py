"""Recovery: taking in what a tier found at start."""

from array import array

import numpy as np
import numpy.typing as npt

from tierkv.lower import Lower
from tierkv.namespace import DIGEST_BYTES, distinct
from tierkv.part import Part
from tierkv.store import Store


def recover(store: Store, low: Lower) -> None:
    """Take in what a tier found at start; frames below their namespace's minimum stay out.

    A frame of a higher generation tells of a clear that could not be persisted: it holds too.
    """
    found = low.tier.scan()
    if not len(found):
        return
    numbers = store.namespaces.numbers(found["namespace"].reshape(-1, DIGEST_BYTES))
    for number in np.flatnonzero(np.bincount(numbers)).tolist():
        newest = int(found["generation"][numbers == number].max())
        store.namespaces.raise_to(store.namespaces.digest(number), newest)
    old = found["generation"] < np.array(store.namespaces.minimum)[numbers]
    granule = low.tier.granule
    for row in found[old]:
        low.tier.free(int(row["locator"]), -(-int(row["nbytes"]) // granule) * granule)
    if old.any():
        found, numbers = found[~old], numbers[~old]
    if (np.diff(found["locator"]) < 0).any():
        order = np.argsort(found["locator"])
        found, numbers = found[order], numbers[order]
    rows = _adopt(store, low, found, numbers)
    order = np.lexsort((-found["locator"], found["position"]))  # heads before tails
    store.policy.found(store.catalog, array("i", rows[order].tobytes()))
    store.totals["recovered"] += len(found)


def _adopt(
    store: Store, low: Lower, found: npt.NDArray[np.void], numbers: npt.NDArray[np.int32]
) -> npt.NDArray[np.int32]:
    """Make found frames ready placements; returns their rows.

    Rows are in the order of the log, so those of a chain lie side by side: a match then reads
    few cache lines of each column.
    """
    catalog = store.catalog
    profile_of = np.zeros(1 << 16, np.int8)
    for codec_id, profile in store.offers.readable.items():
        profile_of[codec_id] = profile.number
    granule = low.tier.granule
    every = np.empty(len(found), np.int32)
    parts, inverse = distinct(found["part"])
    for index, part in enumerate(parts.tolist()):
        mine = np.flatnonzero(inverse == index)
        some = found[mine] if len(parts) > 1 else found
        columns = {
            "profile": profile_of[some["codec_id"]],
            "allocated": -(-some["nbytes"] // granule) * granule,
            "namespace": numbers[mine],
        }
        names = ("fidelity", "flags", "nbytes", "locator", "generation", "position")
        columns |= {name: some[name] for name in names}
        number = catalog.part_number(Part(*part))
        every[mine] = catalog.adopt(low.number, number, some["key"].tobytes(), columns)
    return every
