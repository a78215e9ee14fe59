"""What a store says about itself, from its counters (`stat.StoreStat`)."""

from collections.abc import Iterator

import numpy as np

from tierkv import __version__
from tierkv.catalog import LEAVING, NONE, READY, WRITING
from tierkv.codec import PROFILES
from tierkv.gate import Gate
from tierkv.lower import Lower
from tierkv.matches import Matches
from tierkv.puts import Puts
from tierkv.stat import HoldStat, ProfileStat, StoreStat, TierStat, WriteBehindStat
from tierkv.store import Store
from tierkv.tier import RAM
from tierkv.write_behind import WriteBehind

HELD_SHARE = 0.9
"""Of RAM held by clients: above it nothing can be stored or brought up."""


def report(
    store: Store,
    matches: Matches,
    puts: Puts,
    write_behind: WriteBehind,
    started: float,
    problems: dict[str, str],
) -> StoreStat:
    """Return the counters. Under the store's lock.

    Args:
        store: whose tiers and totals.
        matches: open matches and transfers.
        puts: open reservations.
        write_behind: the queues.
        started: clock at the store's start, in seconds.
        problems: what a probe found wrong, by tier name.
    """
    now = store.clock()
    queues = write_behind.queues
    oldest = [queue.waiting[0].at for queue in queues if queue.waiting]
    held = _held_bytes(store, matches)
    return StoreStat(
        version=__version__,
        epoch=store.host.epoch,
        uptime_s=now - started,
        tiers=tuple(_tiers(store, held, problems)),
        enabled=_enabled(store),
        matches=store.totals["matches"],
        asked_blocks=store.totals["asked_blocks"],
        hits_by_tier_blocks=dict(store.hits),
        miss_blocks=store.totals["miss_blocks"],
        put_blocks=store.totals["put_units"],
        known_blocks=store.totals["known_units"],
        refused_blocks=store.counters["put_refused_full"] + store.counters["put_declined"],
        served_bytes=store.totals["served_bytes"],
        stored_bytes=store.totals["stored_bytes"],
        saved_s=store.seconds["saved"],
        lost_s=store.seconds["lost"],
        holds=HoldStat(
            clients=len({match.owner for match in matches.open.values()}),
            matches=len(matches.open),
            transfers=len(matches.transfers),
            reservations=len(puts.open),
            held_bytes=held,
        ),
        write_behind=WriteBehindStat(
            queued_frames=sum(len(queue.waiting) + queue.batch for queue in queues),
            queued_bytes=write_behind.nbytes,
            limit_bytes=store.settings.write_behind_bytes * len(queues),
            oldest_s=now - min(oldest) if oldest else 0.0,
            going_bytes=write_behind.going,
        ),
        profiles=tuple(_profiles(store)),
        profile_refusals=dict(store.offers.refusals),
        counters=_counters(store),
    )


def _held_bytes(store: Store, matches: Matches) -> int:
    """Return the bytes of RAM that clients read or write, each once, and those that wait for it."""
    catalog = store.catalog
    rows = [held for _, held in matches.transfers.values()]
    rows += [match.rows for match in matches.open.values()]
    leased = np.unique(np.concatenate([np.empty(0, np.int32), *rows]))
    leased = leased[leased != NONE]
    ready = leased[catalog.column("state")[leased] == READY]
    moving = sum(catalog.bytes[RAM][state] for state in (WRITING, LEAVING))
    return moving + int(catalog.column("allocated")[ready].sum())


def _tiers(store: Store, held: int, problems: dict[str, str]) -> list[TierStat]:
    catalog, space = store.catalog, store.host.space()
    problem = store.broken or problems.get("host", "")
    if held > HELD_SHARE * space.capacity:
        problem = problem or f"clients hold {held} of {space.capacity} bytes: no room for others"
    used = sum(catalog.bytes[RAM][WRITING:])
    tiers = [
        TierStat(
            name="host",
            state="lost" if store.broken else "degraded" if problem else "ok",
            problem=problem,
            capacity_bytes=space.capacity,
            used_bytes=used,
            free_bytes=space.free,
            placements=catalog.count[RAM][READY],
            read_bytes=store.totals["served_bytes"],
            written_bytes=store.totals["stored_bytes"],
            read_bps=store.host_rates.read_bps,
            write_bps=store.host_rates.write_bps,
            latency_s=store.host_rates.latency_s,
        )
    ]
    return tiers + [_lower(store, low, problems.get(low.name, "")) for low in store.lower]


def _lower(store: Store, low: Lower, problem: str) -> TierStat:
    catalog, space, rates = store.catalog, low.tier.space(), low.io.rates
    off = not store.usable(low)
    problem = problem or ("left alone for some seconds after failures" if off else "")
    return TierStat(
        name=low.name,
        state="lost" if problem else "ok",
        problem=problem,
        durable=low.tier.durable,
        capacity_bytes=space.capacity,
        used_bytes=sum(catalog.bytes[low.number][WRITING:]),
        dead_bytes=space.dead,
        free_bytes=space.free,
        placements=catalog.count[low.number][READY],
        read_bytes=low.io.read_bytes,
        written_bytes=low.io.written_bytes,
        read_bps=rates.read_bps,
        write_bps=rates.write_bps,
        latency_s=rates.latency_s,
        expected_read_s=low.io.expected_s,
        read_s=low.io.taken_s,
        read_error_s=low.io.error_s,
    )


def _enabled(store: Store) -> dict[str, str]:
    return {
        "policy": store.policy.name,
        "profiles": ", ".join(_in_use(store)),
        "sync": store.settings.sync,
        "verify": store.settings.verify,
        "codec worker": store.encoder.state if store.encoder is not None else "none",
        "state": f"misses only: {store.broken}" if store.broken else "serving",
    }


def _in_use(store: Store) -> list[str]:
    """Return the profiles that some put may use; without a gate that is said."""
    gate = store.offers.gate
    if gate is None:
        return [*(name for name, one in PROFILES.items() if not one.lossy), "no gate file"]
    passing = gate.passing()
    return [name for name, one in PROFILES.items() if not one.lossy or name in passing]


def _profiles(store: Store) -> Iterator[ProfileStat]:
    gate = store.offers.gate or Gate()
    for entry in gate.entries:
        fidelity, kl, why = gate.verdict(entry)
        yield ProfileStat(
            profile=entry.profile,
            model=entry.model,
            kv_dtype=entry.kv_dtype,
            artifact=entry.artifact,
            context=entry.context,
            fidelity_class="rejected" if fidelity is None else fidelity.label,
            kl=kl,
            why=why,
        )


def _counters(store: Store) -> dict[str, int]:
    counters = dict(store.counters)
    for low in store.lower:
        for name, count in low.io.outcomes.items():
            if not name.endswith("_done"):
                counters[f"{low.name}_{name}"] = count
    return {name: count for name, count in counters.items() if count}
