"""Tests of the CSV file that the sampler writes."""

import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "soak"))

from sampler import Sampler


def test_every_sample_is_written_with_its_time_since_the_start(tmp_path) -> None:
    samples = tmp_path / "samples.csv"
    sampler = Sampler(os.getpid(), lambda: None)
    sampler.times = [100.0, 101.0]
    sampler.series = {"RSS": [7.0, 8.5]}

    sampler.append_to(samples, "mixed load", begin=99.5)
    sampler.append_to(samples, "with a leak", begin=100)

    assert samples.read_text().splitlines() == [
        "mixed load,0.5,RSS,7.000",
        "mixed load,1.5,RSS,8.500",
        "with a leak,0.0,RSS,7.000",
        "with a leak,1.0,RSS,8.500",
    ]
