"""Tests of the verdict of the soak on samples, calls and swaps."""

import os
import pathlib
import subprocess
import sys
import threading

import pytest

TESTS = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(TESTS / "soak"), str(TESTS / "bench")]

import client_mix
import sampler
import slope
import soak
from server_process import ServerProcess
from waiting import wait_until


def test_a_process_is_sampled_until_the_end() -> None:
    with sampler.Sampler(os.getpid(), lambda: None, interval_s=0.01) as samples:
        wait_until(lambda: len(samples.times) >= 3)
    times, series = samples.after(samples.times[1])

    assert len(times) == len(samples.times) - 1
    assert set(series) == {"RSS", "anonymous memory", "open files", "threads"}
    assert all(len(values) == len(times) for values in series.values())
    assert series["RSS"][0] >= series["anonymous memory"][0] > 1
    assert series["threads"][0] >= 2


def test_a_failed_read_of_the_gpu_memory_keeps_the_last_value() -> None:
    reads = iter([70.0, 70.0, None, 71.0])
    samples = sampler.Sampler(os.getpid(), lambda: next(reads))

    for _ in range(3):
        samples._take()

    assert samples.series["GPU memory"] == [70.0, 70.0, 71.0]


def test_sampling_a_process_that_has_ended_raises_oserror() -> None:
    child = subprocess.Popen(["true"])
    stat = pathlib.Path(f"/proc/{child.pid}/stat")
    wait_until(lambda: stat.read_text().split()[2] == "Z")

    with pytest.raises(OSError):  # a KeyError would end the sampling thread unnoticed
        sampler.memory_of(child.pid)
    child.wait()


def test_a_scrape_that_fails_says_why(binaries: pathlib.Path) -> None:
    server = ServerProcess(binaries)
    server.http = "127.0.0.1:1"

    assert "refused" in soak.scrape_error(server)


def test_a_leak_library_next_to_the_programs_is_used(tmp_path: pathlib.Path, monkeypatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(SystemExit, match="set CC to a C compiler"):
        soak.build_leak(tmp_path, tmp_path)

    (tmp_path / soak.LEAK_LIBRARY).touch()

    assert soak.build_leak(tmp_path, tmp_path) == tmp_path / soak.LEAK_LIBRARY


def load_with(outcomes: dict[str, dict[str, int]]) -> client_mix.MixedLoad:
    """Returns a load with these counts of calls. Its processes are not started."""
    load = client_mix.MixedLoad(
        pathlib.Path("bin"), "127.0.0.1:1", hidden=8, vocab=9, rows=4, processes=1
    )
    kinds, columns = list(client_mix.CLIENT_KINDS), client_mix.OUTCOMES
    benches = {bench.kind: bench for bench in load._benches}
    for kind, row in outcomes.items():
        for name, count in row.items():
            if kind in benches:
                benches[kind].counts[name] = count
            else:
                load._counts[0][kinds.index(kind) * len(columns) + columns.index(name)] = count
    return load


def usual() -> dict[str, dict[str, int]]:
    return {kind: {sorted(allowed)[0]: 3} for kind, allowed in client_mix.ALLOWED.items()}


def test_calls_with_an_allowed_status_are_no_surprise() -> None:
    load = load_with(usual())

    assert load.surprises() == []
    assert load.calls() == 3 * len(client_mix.ALLOWED)


def test_a_failed_run_of_logprobctl_bench_is_a_surprise() -> None:
    load = load_with(usual())
    load._benches[0].failures.append("logprobctl bench, unary: no report")

    assert load.surprises() == ["logprobctl bench, unary: no report"]


def test_a_wrong_request_that_is_answered_is_a_surprise() -> None:
    load = load_with(usual() | {"wrong": {"OK": 1}})

    assert load.surprises() == ["1 calls of kind wrong ended with OK"]


def test_a_kind_without_any_call_is_a_surprise() -> None:
    load = load_with(usual() | {"stream": {}})

    assert load.surprises() == ["no call of kind stream ended"]


@pytest.mark.parametrize(
    "grows, expects_growth, is_missed",
    [(False, False, False), (True, False, True), (True, True, False), (False, True, True)],
)
def test_growth_is_a_miss_and_so_is_an_undetected_leak(
    grows: bool, expects_growth: bool, is_missed: bool
) -> None:
    fitted = slope.Slope(0.01, 0.005, 0.02, 800, grows, 2.0)
    outcome = soak.Outcome({"RSS": fitted}, {"RSS": 200.0}, [], "9 calls")

    entry = soak.per_hour(outcome, "RSS", "Soak", expects_growth=expects_growth)

    assert entry.get("missed", False) is is_missed
    assert entry["figure"] == pytest.approx(36)
    assert entry["note"].startswith("grows" if grows else "zero within noise")


@pytest.mark.parametrize(
    "slope_max, is_missed, remark",
    [
        (None, False, "9 calls"),
        (1.0, False, "9 calls; the slope is at most 1 MiB/h"),
        (0.7, True, "9 calls; the slope may be above 0.7 MiB/h"),
    ],
)
def test_a_slope_that_may_be_above_its_maximum_is_a_miss(
    slope_max: float | None, is_missed: bool, remark: str
) -> None:
    fitted = slope.Slope(0.0, -0.5 / 3600, 0.8 / 3600, 4800, False, 2.0)
    outcome = soak.Outcome({"RSS": fitted}, {"RSS": 200.0}, [], "9 calls")

    entry = soak.per_hour(outcome, "RSS", "Soak", expects_growth=False, slope_max=slope_max)

    assert entry.get("missed", False) is is_missed
    assert entry["note"].endswith(remark)


@pytest.mark.parametrize("slope_max, has_passed", [("1", True), ("0.7", False)])
def test_a_run_fails_if_memory_but_not_if_another_series_may_exceed_the_maximum(
    binaries: pathlib.Path, tmp_path: pathlib.Path, monkeypatch, slope_max: str, has_passed: bool
) -> None:
    highs = {"RSS": 0.5, "anonymous memory": 0.8, "threads": 1.5}
    slopes = {
        name: slope.Slope(0.0, -high / 3600, high / 3600, 4800, False, 2.0)
        for name, high in highs.items()
    }
    outcome = soak.Outcome(slopes, dict.fromkeys(highs, 1.0), [], "9 calls")
    monkeypatch.setattr(soak, "run", lambda *_: outcome)
    out = ["--out", str(tmp_path / "soak.json"), "--bin-dir", str(binaries)]
    length = ["--control-minutes", "0", "--hidden", "8", "--vocab", "16"]
    monkeypatch.setattr(sys, "argv", ["soak.py", *out, *length, "--slope-max", slope_max])

    passed = soak.soak(soak.arguments(), tmp_path, threading.Event())

    assert passed is has_passed


class FakeWeights:
    """Replaces logprobctl weights of one head; its third load fails."""

    def __init__(self) -> None:
        self.loads: list[tuple[int, str]] = []
        self.commits = 0
        self.rollbacks: list[int] = []

    def load(self, version: int, folder: pathlib.Path) -> None:
        self.loads.append((version, folder.name))
        if len(self.loads) == 3:
            raise RuntimeError("no memory")

    def commit(self) -> None:
        self.commits += 1

    def rollback(self) -> None:
        self.rollbacks.append(self.commits)


def test_each_head_is_swapped_and_rolled_back_and_failures_are_recorded() -> None:
    heads = [FakeWeights(), FakeWeights()]
    changes: list[int] = []
    folders = [pathlib.Path("a"), pathlib.Path("b")]

    with soak.Swapper(heads, folders, 0.001, after_change=lambda: changes.append(1)) as swapper:
        wait_until(lambda: len(heads[1].loads) >= 5)

    for head in heads:
        assert head.loads[:5] == [(2, "b"), (3, "a"), (4, "b"), (4, "b"), (5, "a")]
        assert head.rollbacks[:1] == [soak.ROLLBACK_EVERY]
    assert swapper.failures == ["no memory"] * 2
    assert swapper.swaps == len(changes) == sum(head.commits for head in heads)
    assert swapper.rollbacks == sum(len(head.rollbacks) for head in heads)
