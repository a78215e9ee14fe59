"""The small traces beside the tests (`data/traces/NOTICE.md`)."""

from pathlib import Path

SMALL = {
    "miniswe": "lmcache_miniswe_256byte.jsonl.gz",
    "taubench": "lmcache_taubench_256byte.jsonl.gz",
    "sharegpt300": "sharegpt300_16tok.jsonl.gz",
}


def trace_path(name: str) -> Path:
    """Return the file of a small trace."""
    return Path(__file__).parent / "data" / "traces" / SMALL[name]
