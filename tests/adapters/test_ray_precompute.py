"""The example that kills a server while a dataset is scored on a Ray cluster."""

import re
import subprocess
import sys
from unittest import mock

import pytest
import ray_precompute


@pytest.mark.timeout(660)
def test_the_example_keeps_all_sequences_and_bits_when_an_actor_is_killed(environment) -> None:
    command = [sys.executable, ray_precompute.__file__, "--sequences", "100"]

    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)

    assert done.returncode == 0, done.stdout + done.stderr
    pattern = r"^\| (.*) \| (\d+) \| (\d+) \| (\S+) \|$"
    rows = re.findall(pattern, done.stdout, re.MULTILINE)
    assert [row[:3] for row in rows] == [
        ("undisturbed", "100", "0"),
        ("an actor killed", "100", "0"),
    ]
    assert all(float(error) < 1e-5 for *_, error in rows)
    assert "still answer at their first address: 1 of 2" in done.stdout


# Regression: after an error the cluster went on.
def test_the_cluster_of_the_example_ends_after_an_error(monkeypatch) -> None:
    cluster = mock.Mock()
    monkeypatch.setattr(ray_precompute, "Cluster", lambda: cluster)
    monkeypatch.setattr(ray_precompute, "ray", mock.Mock())

    with pytest.raises(KeyError), ray_precompute.run_cluster():
        raise KeyError

    cluster.shutdown.assert_called_once_with()
    ray_precompute.ray.shutdown.assert_called_once_with()
