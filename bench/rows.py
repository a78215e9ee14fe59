"""Rows: what one measurement says, for programs and for people."""

from collections.abc import Mapping, Sequence

import msgspec
from rich.console import Console
from rich.table import Table

from bench.timing import Spread, ratios, spread


class Row(msgspec.Struct, kw_only=True, omit_defaults=False):
    """One operation beside the machine's limit and at most one peer. Pairs are quartiles.

    Latency rows have p50_us and p99_us in place of rates.
    """

    name: str
    op: str
    block_bytes: int
    blocks: int = 1
    turns: int = 0
    samples: int = 0
    gbps: float | None = None
    gbps_iqr: tuple[float, float] | None = None
    limit_gbps: float | None = None
    limit_iqr: tuple[float, float] | None = None
    ratio_to_limit: float | None = None
    ratio_to_limit_iqr: tuple[float, float] | None = None
    peer: str | None = None
    peer_gbps: float | None = None
    peer_iqr: tuple[float, float] | None = None
    ratio_to_peer: float | None = None
    ratio_to_peer_iqr: tuple[float, float] | None = None
    p50_us: float | None = None
    p99_us: float | None = None
    copy_p50_us: float | None = None
    remark: str = ""


def rows_of(
    name: str, op: str, block_bytes: int, blocks: int, seconds: Mapping[str, Sequence[float]]
) -> list[Row]:
    """Make the rows of one operation, one for each peer that took its turns, or one without."""
    nbytes = block_bytes * blocks
    mine, limit = seconds["tierkv"], seconds.get("limit")
    peers: list[str | None] = [other for other in seconds if other not in ("tierkv", "limit")]
    rows = []
    for peer in peers or [None]:
        row = Row(name=name, op=op, block_bytes=block_bytes, blocks=blocks, turns=len(mine))
        row.gbps, row.gbps_iqr = _rate(nbytes, mine)
        if limit is not None:
            row.limit_gbps, row.limit_iqr = _rate(nbytes, limit)
            row.ratio_to_limit, row.ratio_to_limit_iqr = _shown(ratios(mine, limit))
            row.remark = _remark(nbytes, blocks, mine, limit)
        if peer is not None:
            row.peer = peer
            row.peer_gbps, row.peer_iqr = _rate(nbytes, seconds[peer])
            row.ratio_to_peer, row.ratio_to_peer_iqr = _shown(ratios(mine, seconds[peer]))
        rows.append(row)
    return rows


def _rate(nbytes: int, seconds: Sequence[float]) -> tuple[float, tuple[float, float]]:
    return _shown(spread([nbytes / value / 1e9 for value in seconds]))


def _shown(found: Spread) -> tuple[float, tuple[float, float]]:
    return round(found.median, 3), (round(found.low, 3), round(found.high, 3))


def _remark(nbytes: int, blocks: int, mine: Sequence[float], limit: Sequence[float]) -> str:
    """Say what the bytes cost at the limit and what is left for us to explain."""
    took, least = spread(mine).median, spread(limit).median
    return (
        f"{nbytes >> 20} MiB at the limit: {least * 1e3:.1f} ms; here {took * 1e3:.1f} ms,"
        f" {(took - least) / blocks * 1e6:+.0f} us a block"
    )


def show(rows: Sequence[Row], absent: Mapping[str, str], console: Console) -> None:
    """Print a table for people: a row each, the spread beside it, and the back of the envelope."""
    table = Table(title="tierkv beside this machine's limit and other stores")
    for column in ("tier", "op", "block", "GB/s (IQR)", "limit", "ratio (IQR)"):
        table.add_column(column, justify="left" if column in ("tier", "op") else "right")
    for column in ("peer", "peer GB/s", "x peer", "back of the envelope"):
        table.add_column(column, overflow="fold")
    for row in rows:
        latency = row.p50_us is not None
        table.add_row(
            row.name,
            row.op,
            f"{row.block_bytes >> 20} MiB",
            f"p50 {row.p50_us:.0f}, p99 {row.p99_us:.0f} us"
            if latency
            else _cell(row.gbps, row.gbps_iqr),
            f"{row.copy_p50_us:.0f} us" if latency else _cell(row.limit_gbps),
            _cell(row.ratio_to_limit, row.ratio_to_limit_iqr),
            row.peer or "-",
            _cell(row.peer_gbps),
            _cell(row.ratio_to_peer),
            row.remark,
        )
    console.print(table)
    for name, why in absent.items():
        console.print(f"not measured: {name}: {why}", highlight=False)


def _cell(value: float | None, iqr: tuple[float, float] | None = None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" + (f" ({iqr[0]:.2f}-{iqr[1]:.2f})" if iqr else "")
