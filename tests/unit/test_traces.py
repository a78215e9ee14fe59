"""Traces are read as they stand, and what is malformed is named by its line."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.traces import SMALL, trace_path
from tierkv.errors import ErrorKind, TierKVError
from tierkv.simulation.traces import Trace, load


def line(ids: list[int] | None, *, tokens: int = 0, **more: Any) -> str:
    fields = {"timestamp": 0, "input_length": tokens or 16 * len(ids or ()), "output_length": 7}
    if ids is not None:
        fields["hash_ids"] = ids  # type: ignore[assignment]
    return json.dumps(fields | more)


def write(folder: Path, *lines: str, name: str = "some_16tok.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(text + "\n" for text in lines), encoding="utf-8")
    return path


def refused(trace: Path, **how: Any) -> str:
    with pytest.raises(TierKVError) as caught:
        list(Trace(trace, **how))
    return str(caught.value)


def test_a_line_is_a_request(tmp_path: Path) -> None:
    path = write(tmp_path, line([5, 9, 2], timestamp=1500, session=3, tokens=47))
    (request,) = Trace(path)
    assert request.time_s == 1.5
    assert request.blocks.tolist() == [5, 9, 2]
    assert request.blocks.dtype == np.int64
    assert (request.input_tokens, request.output_tokens, request.session) == (47, 7, "3")


def test_runs_are_unrolled_in_prompt_order(tmp_path: Path) -> None:
    path = write(tmp_path, line(None, tokens=96, runs=[[7, 3], [1, 2], [90, 1]]))
    (request,) = Trace(path)
    assert request.blocks.tolist() == [7, 8, 9, 1, 2, 90]


def test_gzip_is_read_whatever_the_name(tmp_path: Path) -> None:
    path = tmp_path / "t_16tok.jsonl"
    path.write_bytes(gzip.compress(line([1, 2]).encode()))
    assert [request.blocks.tolist() for request in Trace(path)] == [[1, 2]]


def test_a_group_is_named_by_its_last_block_and_must_be_full(tmp_path: Path) -> None:
    path = write(tmp_path, line([0, 1, 2, 3, 4, 5, 6, 7, 8]), line([0, 1, 2]))
    trace = Trace(path, tokens=64)
    assert trace.tokens_per_block == 64
    assert [request.blocks.tolist() for request in trace] == [[3, 7], []]
    assert "multiple" in refused(path, tokens=24)


def test_a_prompt_may_have_no_block(tmp_path: Path) -> None:
    accesses = load(Trace(write(tmp_path, line([], tokens=3), line([4]))))
    assert accesses.starts.tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    ("name", "tokens"),
    [("x_512tok.jsonl", 512), ("x_256byte.jsonl.gz", 64), ("a_16tok_b.jsonl", 16)],
)
def test_a_name_tells_the_tokens_of_a_block(tmp_path: Path, name: str, tokens: int) -> None:
    assert Trace(write(tmp_path, line([1]), name=name)).tokens_per_block == tokens


def test_lengths_tell_the_tokens_of_a_block(tmp_path: Path) -> None:
    lines = [line(list(range(-(-tokens // 512))), tokens=tokens) for tokens in (6758, 512, 300)]
    assert Trace(write(tmp_path, *lines, name="x.jsonl")).tokens_per_block == 512
    assert Trace(write(tmp_path, *lines, name="x.jsonl"), file_tokens=1024).file_tokens == 1024


def test_lengths_that_do_not_tell_are_said(tmp_path: Path) -> None:
    assert "say it" in refused(write(tmp_path, line([1], tokens=4), name="x.jsonl"))


def test_ids_are_renumbered_by_first_appearance(tmp_path: Path) -> None:
    accesses = load(Trace(write(tmp_path, line([70, 3, 50]), line([70, 3, 4]))))
    assert accesses.ids.tolist() == [0, 1, 2, 0, 1, 3]
    assert accesses.ids.dtype == np.int32
    assert accesses.starts.tolist() == [0, 3, 6]
    assert accesses.distinct == 4


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ("{", "not JSON"),
        ("", "not JSON"),
        ("[1]", "not a request"),
        (line(None), "either"),
        (line([1], runs=[[1, 1]]), "either"),
        (line([-1]), r"hash_ids"),
        (line([1 << 63]), r"hash_ids"),
        (json.dumps({"timestamp": 0, "input_length": 16, "hash_ids": [1]}), "output_length"),
        (line(["a"]), r"\$.hash_ids\[0\]"),  # type: ignore[list-item]
        (line([1.5]), r"\$.hash_ids\[0\]"),  # type: ignore[list-item]
        (line(None, tokens=99, runs=[[1, 0]]), "runs"),
        (line(None, tokens=99, runs=[[1]]), "runs"),
        (line(None, tokens=99, runs=[[1, 1 << 24]]), "more than its 99 tokens"),
        (line([1], timestamp=-1), "timestamp"),
        (line([1], tokens=1 << 40), "input_length"),
        (line([3, 4, 3]), "block 3 stands twice"),
        (line([1, 2, 3], tokens=32), "3 blocks of 16 tokens are more than its 32"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, bad: str, says: str) -> None:
    path = write(tmp_path, line([1]), bad, line([2]))
    with pytest.raises(TierKVError, match=says) as caught:
        list(Trace(path))
    assert "some_16tok.jsonl, line 2: " in str(caught.value)
    assert caught.value.kind is ErrorKind.INVALID


def test_time_that_goes_back_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, line([1], timestamp=5), line([1], timestamp=4))
    assert "line 2: time goes back" in refused(path)


def test_a_cut_gzip_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "t_16tok.jsonl.gz"
    whole = gzip.compress(b"".join(line([n]).encode() + b"\n" for n in range(5000)))
    path.write_bytes(whole[: len(whole) // 2])
    assert "gzip file is damaged" in refused(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert "gone_16tok.jsonl cannot be read" in refused(tmp_path / "gone_16tok.jsonl")


def test_a_trace_without_blocks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TierKVError, match="no block of 16 tokens"):
        load(Trace(write(tmp_path, line([], tokens=3))))


@pytest.mark.parametrize(
    ("name", "requests", "accesses", "distinct", "longest"),
    [
        ("miniswe", 402, 37_984, 2_766, 567),
        ("taubench", 471, 1_448, 323, 17),
        ("sharegpt300", 300, 15_942, 14_722, 249),
    ],
)
def test_small_traces_are_what_they_are_said_to_be(
    name: str, requests: int, accesses: int, distinct: int, longest: int
) -> None:
    assert name in SMALL
    found = load(Trace(trace_path(name)))
    assert len(found.starts) == requests + 1
    assert (len(found.ids), found.distinct) == (accesses, distinct)
    assert np.diff(found.starts).max() == longest
