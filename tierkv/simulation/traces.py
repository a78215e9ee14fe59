"""Traces: what a service was asked, as block ids that stand for a block and all before it.

A file has one JSON object a line (gzip or plain), as Mooncake publishes them: `timestamp` in
milliseconds, `input_length` and `output_length` in tokens, and the prompt's blocks in order, either
`hash_ids` or `runs` of `[first id, count]`; `session` may name a conversation. Since an id stands
for the whole prefix, it stands once in a prompt, and blocks can be regrouped: a group is named by
its last block. A group that is not full is left out.
"""

import gzip
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from tierkv.errors import invalid, unavailable

Ids = npt.NDArray[np.int64]

SAMPLE = 200
"""Requests that are looked at to infer the tokens of a block from lengths."""
INFERRED = tuple(1 << bits for bits in range(2, 13))
BYTES_PER_TOKEN = 4
"""Traces over text count its bytes; their lengths are bytes over four, rounded up."""

_NAMED = re.compile(r"_(\d+)(tok|byte)")
_Tokens = Annotated[int, msgspec.Meta(ge=0, le=1 << 24)]
_Length = Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]
_Id = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Start = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class Request(NamedTuple):
    """One prompt: seconds since the trace began, block ids int64 in prompt order, tokens."""

    time_s: float
    blocks: Ids
    input_tokens: int
    output_tokens: int
    session: str


class _Line(msgspec.Struct):
    """A line as it stands in the file; fields of other names are passed over."""

    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: _Tokens
    output_length: _Tokens
    hash_ids: list[_Id] | msgspec.UnsetType = msgspec.UNSET
    runs: list[tuple[_Start, _Length]] | msgspec.UnsetType = msgspec.UNSET
    session: str | int = ""

    def blocks(self) -> Ids:
        """Return the ids in prompt order. Raises: ValueError naming what is wrong."""
        if (self.hash_ids is msgspec.UNSET) == (self.runs is msgspec.UNSET):
            raise ValueError("a request has either `hash_ids` or `runs`")
        if self.hash_ids is not msgspec.UNSET:
            return np.array(self.hash_ids, np.int64)
        runs = np.array(self.runs, np.int64).reshape(-1, 2)
        firsts, counts = runs[:, 0], runs[:, 1]
        total = int(counts.sum())
        if total > self.input_length:
            raise ValueError(f"{total} blocks are more than its {self.input_length} tokens")
        before = np.cumsum(counts) - counts
        return np.repeat(firsts - before, counts) + np.arange(total, dtype=np.int64)


class Trace:
    """A trace file, checked while it is read; every iteration reads it anew.

    Args:
        path: of the file.
        file_tokens: per block in the file; else what its name says (`_512tok`, `_256byte`), else
            what fits the lengths.
        tokens: per block of what is read, a multiple of the file's; else the file's.

    Raises: TierKVError (invalid, unavailable) here and while reading; a line's error names it.
    """

    def __init__(
        self, path: Path, file_tokens: int | None = None, tokens: int | None = None
    ) -> None:
        self.path = path
        self.file_tokens = file_tokens or _named_tokens(path) or _inferred_tokens(path)
        self.tokens_per_block = tokens or self.file_tokens
        self.group = self.tokens_per_block // self.file_tokens
        if self.tokens_per_block % self.file_tokens:
            raise invalid(
                f"{path.name} has blocks of {self.file_tokens} tokens: they can be regrouped to a"
                f" multiple of that, not to {self.tokens_per_block}"
            )

    def __iter__(self) -> Iterator[Request]:
        group, size, last = self.group, self.file_tokens, 0.0
        for number, line in _lines(self.path):
            blocks = _checked(self.path, number, line)
            if len(blocks) > -(-line.input_length // size):
                raise _wrong(
                    self.path,
                    number,
                    f"{len(blocks)} blocks of {size} tokens are more than its"
                    f" {line.input_length} tokens; if the file's blocks are smaller, say how"
                    " many tokens they have",
                )
            if line.timestamp < last:
                raise _wrong(self.path, number, "time goes back; sort the file by `timestamp`")
            last = line.timestamp
            if group > 1:
                blocks = np.ascontiguousarray(blocks[group - 1 :: group])
            yield Request(
                line.timestamp / 1e3,
                blocks,
                line.input_length,
                line.output_length,
                str(line.session),
            )


class Accesses(NamedTuple):
    """A whole trace in columns, ids renumbered 0, 1, ... in the order of first appearance.

    `ids` is int32, all prompts after one another; the prompt of request i is
    `ids[starts[i] : starts[i + 1]]`, and `starts` is int64 with one more than there are requests.
    `times_s` float64 and `tokens` int64 have one for each request; tokens are those in its blocks.
    """

    ids: npt.NDArray[np.int32]
    starts: npt.NDArray[np.int64]
    distinct: int
    times_s: npt.NDArray[np.float64]
    tokens: npt.NDArray[np.int64]
    tokens_per_block: int


def load(trace: Trace) -> Accesses:
    """Read all of a trace's blocks."""
    prompts, times, tokens = [], [], []
    for request in trace:
        prompts.append(request.blocks)
        times.append(request.time_s)
        tokens.append(min(request.input_tokens, len(request.blocks) * trace.tokens_per_block))
    starts = np.zeros(len(prompts) + 1, np.int64)
    starts[1:] = np.cumsum([len(prompt) for prompt in prompts])
    if not starts[-1]:
        raise invalid(f"{trace.path.name} has no block of {trace.tokens_per_block} tokens")
    found, first, inverse = np.unique(
        np.concatenate(prompts), return_index=True, return_inverse=True
    )
    rank = np.empty(len(found), np.int32)
    rank[np.argsort(first)] = np.arange(len(found), dtype=np.int32)
    return Accesses(
        rank[inverse],
        starts,
        len(found),
        np.array(times),
        np.array(tokens),
        trace.tokens_per_block,
    )


def _wrong(path: Path, number: int, what: str) -> Exception:
    return invalid(f"{path.name}, line {number}: {what}")


def _lines(path: Path) -> Iterator[tuple[int, _Line]]:
    decoder = msgspec.json.Decoder(_Line)
    number = 0
    try:
        with path.open("rb") as probe:
            packed = probe.read(2) == b"\x1f\x8b"
        with gzip.open(path) if packed else path.open("rb") as file:
            for number, text in enumerate(file, 1):
                yield number, decoder.decode(text)
    except msgspec.ValidationError as error:
        raise _wrong(path, number, f"not a request of a trace: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _wrong(path, number, f"not JSON: {error}") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise _wrong(path, number + 1, f"the gzip file is damaged: {error}") from None
    except OSError as error:
        raise unavailable(f"the trace {path} cannot be read: {error.strerror}") from None


def _checked(path: Path, number: int, line: _Line) -> Ids:
    try:
        blocks = line.blocks()
    except ValueError as error:
        raise _wrong(path, number, str(error)) from None
    ordered = np.sort(blocks)
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if len(twice):
        raise _wrong(
            path,
            number,
            f"block {twice[0]} stands twice in a prompt; an id must stand for its block and all"
            " before it",
        )
    return blocks


def _named_tokens(path: Path) -> int | None:
    found = _NAMED.search(path.name)
    if not found or not int(found[1]):
        return None
    return int(found[1]) if found[2] == "tok" else -(-int(found[1]) // BYTES_PER_TOKEN)


def _inferred_tokens(path: Path) -> int:
    """Return the one power of two at which the lengths of the first requests fit their blocks."""
    fits = set(INFERRED)
    for number, line in _lines(path):
        count, length = len(_checked(path, number, line)), line.input_length
        fits &= {size for size in fits if count in {length // size, -(-length // size)}}
        if number == SAMPLE:
            break
    if len(fits) != 1:
        raise invalid(
            f"how many tokens a block of {path.name} has stands neither in its name (_512tok) nor"
            " follows from its lengths: say it"
        )
    return fits.pop()
