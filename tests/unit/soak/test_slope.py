"""Tests of the check for growth in the soak. Series are in MiB with one sample per second."""

import pathlib
import sys

import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "soak"))

import slope

SECONDS = 800
RESOLUTION_MIB = 2.0


def judged(values: np.ndarray) -> slope.Slope:
    return slope.fit(np.arange(len(values), dtype=float), values, resolution=RESOLUTION_MIB)


def noise(scale: float = 0.5, seed: int = 2, correlation: float = 0.9) -> np.ndarray:
    """Returns correlated noise in MiB, like that of a memory measurement."""
    random = np.random.default_rng(seed)
    values = np.zeros(SECONDS)
    for i in range(1, SECONDS):
        values[i] = correlation * values[i - 1] + random.normal(0, scale)
    return values


@pytest.mark.parametrize("seed", range(20))
def test_noise_does_not_grow(seed: int) -> None:
    assert not judged(200 + noise(seed=seed)).grows


@pytest.mark.parametrize("seed", range(20))
def test_a_leak_within_noise_grows(seed: int) -> None:
    # The leak is 10 MiB in 800 s; the standard deviation of the noise is above 1 MiB.
    assert judged(200 + noise(seed=seed) + np.linspace(0, 10, SECONDS)).grows


def test_the_interval_nearly_always_contains_the_true_slope() -> None:
    fitted = [judged(200 + noise(seed=seed) + np.linspace(0, 10, SECONDS)) for seed in range(30)]

    # The interval contains the slope in 97 of 100 simulated runs. The probability that it does so in fewer than 26
    # of 30 runs is 1 in 500.
    assert sum(each.low <= 10 / SECONDS <= each.high for each in fitted) >= 26


def test_a_constant_does_not_grow() -> None:
    fitted = judged(np.full(SECONDS, 200.0))

    assert (fitted.per_second, fitted.low, fitted.high, fitted.grows) == (0, 0, 0, False)


def test_one_more_arena_is_no_leak() -> None:
    values = np.full(SECONDS, 200.0)
    values[SECONDS // 2 :] += 1.5

    assert not judged(values).grows


def test_versions_that_come_and_go_are_no_leak() -> None:
    values = 200 + noise(0.1)
    for begin in range(7, SECONDS, 15):
        values[begin : begin + 4] += 1200  # two heads are in memory during a swap

    assert not judged(values).grows


def test_a_leak_behind_versions_that_come_and_go_grows() -> None:
    values = 200 + noise(0.1) + np.linspace(0, 10, SECONDS)
    for begin in range(7, SECONDS, 15):
        values[begin : begin + 4] += 1200

    assert judged(values).grows


def test_a_shrinking_series_does_not_grow() -> None:
    assert not judged(200 - np.linspace(0, 10, SECONDS)).grows


SLOPE_MAX = 1 / 3600  # 1 MiB/h


def test_a_quiet_series_is_below_a_maximum_of_its_slope() -> None:
    assert not judged(200 + noise(0.01)).may_exceed(SLOPE_MAX)


def test_a_leak_below_the_resolution_exceeds_a_maximum_of_its_slope() -> None:
    fitted = judged(200 + noise(0.01) + np.arange(SECONDS) * 2 * SLOPE_MAX)

    assert not fitted.grows
    assert fitted.may_exceed(SLOPE_MAX)


def test_noise_in_which_a_leak_could_hide_exceeds_a_maximum_of_its_slope() -> None:
    fitted = judged(200 + noise(0.5) - np.arange(SECONDS) * SLOPE_MAX)

    assert fitted.per_second < SLOPE_MAX
    assert fitted.may_exceed(SLOPE_MAX)


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="8 samples"):
        slope.fit([0, 1, 2], [1, 1, 1], resolution=1)
