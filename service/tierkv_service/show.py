"""Show: a stat of the store as tables for people."""

from collections.abc import Iterator

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from tierkv.stat import COUNTERS, ProfileStat, StoreStat, TierStat

RATES = (
    "asked_blocks",
    "miss_blocks",
    "put_blocks",
    "refused_blocks",
    "served_bytes",
    "stored_bytes",
    "saved_s",
)
"""The totals whose rate over a sample is shown."""

_COLOURS = {"ok": "green", "degraded": "yellow", "lost": "red", "off": "dim"}
_CLASS_COLOURS = {
    "near_lossless": "green",
    "safe": "blue",
    "economy": "yellow",
    "rejected": "red",
}
_STEP = 1024


def rates(before: StoreStat, after: StoreStat) -> dict[str, float]:
    """Return each of `RATES` per second, and `hit_blocks`; empty when the sidecar restarted."""
    seconds = after.uptime_s - before.uptime_s
    if before.epoch != after.epoch or seconds <= 0:
        return {}
    found = {name: (getattr(after, name) - getattr(before, name)) / seconds for name in RATES}
    hits = sum(after.hits_by_tier_blocks.values()) - sum(before.hits_by_tier_blocks.values())
    return {"hit_blocks": hits / seconds, **found}


def show(stat: StoreStat, per_second: dict[str, float], console: Console) -> None:
    """Print everything there is."""
    console.print(Group(*_parts(stat, per_second)))


def size(nbytes: float) -> str:
    """Return bytes for people: `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < _STEP:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= _STEP
    return f"{nbytes:.1f} TiB"


def _parts(stat: StoreStat, per_second: dict[str, float]) -> Iterator[RenderableType]:
    yield Text(f"tierkv {stat.version}, up {_span(stat.uptime_s)}", style="bold")
    yield _tiers(stat.tiers)
    for tier in stat.tiers:
        if tier.problem:
            yield Text(f"{tier.name}: {tier.problem}", style=_COLOURS[tier.state])
    yield _traffic(stat, per_second)
    queue, holds = stat.write_behind, stat.holds
    yield Text(
        f"write-behind: {queue.queued_frames} frames, {size(queue.queued_bytes)} of"
        f" {size(queue.limit_bytes)}, oldest {_span(queue.oldest_s)}"
    )
    yield Text(
        f"held: {size(holds.held_bytes)} by {holds.clients} clients ({holds.matches} matches,"
        f" {holds.transfers} transfers, {holds.reservations} reservations)"
    )
    if stat.enabled:
        shown = "; ".join(f"{name} {value}" for name, value in stat.enabled.items())
        yield Text(f"in effect: {shown}")
    if stat.profiles:
        yield _profiles(stat.profiles)
    for reason, count in stat.profile_refusals.items():
        yield Text(f"not used by {count:,} puts: {reason}")
    if stat.counters:
        yield _counters(stat.counters)


def _tiers(tiers: tuple[TierStat, ...]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("tier", no_wrap=True)
    table.add_column("state", no_wrap=True)
    heads = ("capacity", "used", "free", "dead", "copies", "read", "write", "latency")
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for tier in tiers:
        state = Text(tier.state, style=_COLOURS[tier.state])
        if tier.state == "off":
            table.add_row(tier.name, state)
            continue
        table.add_row(
            tier.name,
            state,
            _short(tier.capacity_bytes) if tier.capacity_bytes else "open",
            _short(tier.used_bytes),
            _short(tier.free_bytes),
            _short(tier.dead_bytes),
            f"{tier.placements:,}",
            _speed(tier.read_bps),
            _speed(tier.write_bps),
            f"{tier.latency_s * 1e3:.2f} ms" if tier.latency_s else "-",
        )
    return table


def _traffic(stat: StoreStat, per_second: dict[str, float]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("traffic")
    table.add_column("total", justify="right")
    table.add_column("per second", justify="right")
    hits = sum(stat.hits_by_tier_blocks.values())
    by_tier = ", ".join(f"{name} {count:,}" for name, count in stat.hits_by_tier_blocks.items())
    rows = {
        "asked_blocks": ("blocks asked for", f"{stat.asked_blocks:,}"),
        "hit_blocks": (f"blocks found{f' ({by_tier})' if by_tier else ''}", f"{hits:,}"),
        "miss_blocks": ("blocks missed", f"{stat.miss_blocks:,}"),
        "put_blocks": ("blocks stored", f"{stat.put_blocks:,}"),
        "known_blocks": ("blocks offered, there already", f"{stat.known_blocks:,}"),
        "refused_blocks": ("blocks refused", f"{stat.refused_blocks:,}"),
        "served_bytes": ("bytes to engines", size(stat.served_bytes)),
        "stored_bytes": ("bytes from engines", size(stat.stored_bytes)),
        "saved_s": ("seconds saved", f"{stat.saved_s:,.1f}"),
        "lost_s": ("seconds lost", f"{stat.lost_s:,.1f}"),
    }
    for name, (label, total) in rows.items():
        rate = per_second.get(name)
        shown = "" if rate is None else size(rate) if name.endswith("bytes") else f"{rate:,.1f}"
        table.add_row(label, total, shown)
    return table


def _profiles(profiles: tuple[ProfileStat, ...]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in ("lossy profile", "model", "context", "class", "KL", "what stands against more"):
        table.add_column(head)
    for one in profiles:
        artifact = f" {one.artifact[:8]}" if one.artifact else ""
        table.add_row(
            one.profile + artifact,
            f"{one.model} {one.kv_dtype}",
            f"{one.context:,}",
            Text(one.fidelity_class.replace("_", " "), style=_CLASS_COLOURS[one.fidelity_class]),
            f"{one.kl:.2g}",
            one.why,
        )
    return table


def _counters(counters: dict[str, int]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("refusals and failures")
    table.add_column("count", justify="right")
    table.add_column("meaning")
    for name, count in sorted(counters.items()):
        table.add_row(name, f"{count:,}", COUNTERS.get(name, ""))
    return table


def _short(nbytes: float) -> str:
    """Return bytes for a narrow column: `1.5G`, by 1024."""
    return size(nbytes).replace(" ", "").removesuffix("iB")


def _speed(bps: float) -> str:
    return f"{_short(bps)}/s" if bps else "-"


def _span(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.1f} s"
