"""Decides whether a series that is sampled at a steady rate grows, from its slope and an interval of the slope.

The samples are grouped into blocks, each represented by its median. Short changes within a block (two versions of
the weights during a swap) then do not count, and the correlation of neighbouring samples is not counted twice. The
slope is the Theil-Sen estimate: the median of the slopes between all pairs of blocks, which a few steps or spikes
do not affect. Its interval comes from a bootstrap of runs of neighbouring residuals.

A process that has only settled can end a little above its start, by an arena or two of the allocator, and slow
noise can look like a slope: the nominal 99 % interval contains the true slope in 91 to 97 of 100 simulated runs of
800 s whose noise lasts for 10 to 30 s. A series therefore grows if the interval of its slope lies above zero and its
growth over the measured time exceeds a given resolution. Leaks below the resolution are not detected, unless a run is
so long that the upper end of the interval can be held below a maximum.
"""

import dataclasses

import numpy as np

BLOCKS = 60  # maximum number; a block has at least one sample
BOOTSTRAPS = 400
CONFIDENCE = 0.99  # two-sided


@dataclasses.dataclass
class Slope:
    per_second: float
    low: float  # lower end of the interval
    high: float  # upper end of the interval
    seconds: float  # from the first sample to the last
    grows: bool
    resolution: float

    @property
    def growth(self) -> float:
        """Growth of the series over the measured time."""
        return self.per_second * self.seconds

    def may_exceed(self, per_second: float) -> bool:
        """Returns whether the interval contains larger slopes: the series grows faster, or noise may hide that."""
        return self.high > per_second


def blocks_of(times: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the mean times and median values of at most BLOCKS runs of samples."""
    count = min(BLOCKS, len(times))
    parts = list(zip(np.array_split(times, count), np.array_split(values, count), strict=True))
    middles = np.array([part.mean() for part, _ in parts])
    return middles, np.array([np.median(part) for _, part in parts])


def theil_sen(times: np.ndarray, values: np.ndarray) -> float:
    first, second = np.triu_indices(len(times), k=1)
    return float(np.median((values[second] - values[first]) / (times[second] - times[first])))


def fit(times, values, *, resolution: float, seed: int = 1) -> Slope:
    """Fits the slope of `values` over `times` in seconds. Needs at least 8 samples."""
    if len(times) < 8:
        raise ValueError(f"at least 8 samples are needed, but there are {len(times)}")
    x, y = blocks_of(np.asarray(times, float), np.asarray(values, float))
    slope = theil_sen(x, y)
    residuals = y - slope * x
    residuals -= np.median(residuals)
    length = max(2, round(len(x) ** (1 / 3)))
    random = np.random.default_rng(seed)
    slopes = []
    for _ in range(BOOTSTRAPS):
        begins = random.integers(0, len(x) - length + 1, -(-len(x) // length))
        picks = (begins[:, None] + np.arange(length)).ravel()[: len(x)]
        slopes.append(theil_sen(x, slope * x + residuals[picks]))
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(slopes, [tail, 1 - tail])
    seconds = float(times[-1] - times[0])
    grows = bool(low > 0 and slope * seconds > resolution)
    return Slope(slope, float(low), float(high), seconds, grows, resolution)
