"""Samples the memory, files and threads of a process once per second."""

import csv
import pathlib
import re
import threading
import time
from collections.abc import Callable


def memory_of(pid: int) -> dict[str, float]:
    """Returns the memory of the process in MiB by kind, from the kernel's totals over all its mappings.

    Raises OSError if the process has ended.
    """
    text = pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text()
    if "Rss" not in text:  # the process has ended, but has not been waited for
        raise ProcessLookupError(pid)
    kib = {
        name: int(value) for name, value in re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE)
    }
    return {"RSS": kib["Rss"] / 1024, "anonymous memory": kib["Anonymous"] / 1024}


def counts_of(pid: int) -> dict[str, float]:
    """Returns the numbers of open descriptors and threads of the process."""
    descriptors = sum(1 for _ in pathlib.Path(f"/proc/{pid}/fd").iterdir())
    threads = sum(1 for _ in pathlib.Path(f"/proc/{pid}/task").iterdir())
    return {"open files": float(descriptors), "threads": float(threads)}


class Sampler:
    """Takes samples of a process in a thread until the context ends. Use as a context manager."""

    def __init__(
        self, pid: int, gpu_memory_mib: Callable[[], float | None], interval_s: float = 1.0
    ) -> None:
        self.pid = pid
        self.times: list[float] = []
        self.series: dict[str, list[float]] = {}
        self._gpu_memory_mib = gpu_memory_mib
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._gpu_mib = gpu_memory_mib()

    def _take(self) -> None:
        sample = memory_of(self.pid) | counts_of(self.pid)
        if self._gpu_mib is not None:
            used = self._gpu_memory_mib()
            # If the read failed, the last value is used again.
            self._gpu_mib = self._gpu_mib if used is None else used
            sample["GPU memory"] = self._gpu_mib
        self.times.append(time.monotonic())
        for name, value in sample.items():
            self.series.setdefault(name, []).append(value)

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            try:
                self._take()
            except OSError:  # the process has ended, which the caller notices
                return

    def __enter__(self) -> "Sampler":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(10)

    def append_to(self, path: pathlib.Path, title: str, begin: float) -> None:
        """Adds a line for each value: the title, seconds since `begin` (monotonic time), the name and the value."""
        with path.open("a", newline="") as file:
            lines = csv.writer(file)
            for name, values in self.series.items():
                # The sampling thread may be adding a sample, so the lists may differ in length.
                for at, value in zip(self.times, values, strict=False):
                    lines.writerow([title, f"{at - begin:.1f}", name, f"{value:.3f}"])

    def after(self, begin: float) -> tuple[list[float], dict[str, list[float]]]:
        """Returns the times and the series of the samples from `begin` (monotonic time) on."""
        first = next((i for i, at in enumerate(self.times) if at >= begin), len(self.times))
        return self.times[first:], {name: values[first:] for name, values in self.series.items()}
