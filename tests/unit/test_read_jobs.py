"""How what a stage reads is cut into the calls that a tier wants."""

import pytest

from tierkv.stages import read_jobs
from tierkv.tier import Batch

SIZES = [3, 3, 3, 9, 1, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("batch", "counts"),
    [
        (Batch(4, 1000), [4, 4, 1]),
        (Batch(100, 6), [2, 2, 5]),
        (Batch(100, 7), [3, 1, 5]),
        (Batch(2, 9), [2, 2, 2, 2, 1]),
        (Batch(1, 1), [1] * 9),
        (Batch(100, 1000), [9]),
    ],
)
def test_a_job_ends_at_its_frames_or_its_bytes(batch: Batch, counts: list[int]) -> None:
    jobs = list(read_jobs(range(9), SIZES, batch))
    assert [len(job) for job in jobs] == counts
    assert [item for job in jobs for item in job] == list(range(9))


def test_nothing_to_read_is_no_job() -> None:
    assert list(read_jobs([], [], Batch(4, 1000))) == []
