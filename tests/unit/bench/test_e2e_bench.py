"""Tests the evaluation of measurements in the end-to-end benchmark, and dry runs of it."""

import argparse
import json
import pathlib
import subprocess
import sys
import time

import numpy as np
import pytest

BENCH = pathlib.Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))

import e2e_bench
from e2e import fixture, latency, logprobctl, processes, swap, throughput
from e2e.fixture import OutOfTime, within
from e2e.grpc_load import Answer
from e2e.synthetic_head import write_head
from server_process import ServerProcess


def test_a_synthetic_head_gives_logits_with_the_requested_deviation(tmp_path: pathlib.Path) -> None:
    folder = write_head(tmp_path, vocab=5000, hidden=1000, logit_stddev=3)

    data = (folder / "model.safetensors").read_bytes()
    header_bytes = int.from_bytes(data[:8], "little")
    tensor = json.loads(data[8 : 8 + header_bytes])["lm_head.weight"]
    bits = np.frombuffer(data, np.uint16, offset=8 + header_bytes).astype(np.uint32) << 16
    weight = bits.view(np.float32).reshape(5000, 1000)
    logits = weight @ np.random.default_rng(1).standard_normal(1000)
    assert tensor["shape"] == [5000, 1000]
    # The standard error of the deviation of 5,000 samples is 3 / sqrt(2 * 5000) = 0.03; four times that is allowed.
    assert abs(logits.std() - 3) < 0.12
    # The writer fills several blocks, none of which is a copy of another.
    assert len(np.unique(weight[:, 0])) > 1000


def answers(*entries: tuple[float, int, int, int]) -> list[Answer]:
    """Returns answers made from tuples of time of the answer, code, version and crc."""
    return [Answer(ended - 0.5, ended, code, version, crc) for ended, code, version, crc in entries]


def test_swaps_are_evaluated_by_failures_bits_and_the_longest_gap() -> None:
    seen = answers(
        (1.0, 0, 1, 11), (1.1, 0, 2, 22), (1.2, 14, 0, 0), (1.5, 0, 3, 11), (1.6, 0, 4, 22)
    )

    verdict = swap.judge(seen, crc_of=[11, 22], rows=30)

    assert (verdict.failed, verdict.mixed) == (1, 0)
    assert verdict.stall == pytest.approx(0.4)
    assert verdict.rows_per_second == pytest.approx(30 * 3 / 0.6)


def test_an_answer_with_the_bits_of_another_version_is_mixed() -> None:
    seen = answers((1.0, 0, 1, 11), (1.1, 0, 2, 11), (1.2, 0, 3, 33))

    assert swap.judge(seen, crc_of=[11, 22]).mixed == 2


def test_the_order_of_the_contenders_reverses_each_round() -> None:
    order: list[str] = []

    def contender(name: str):
        return lambda: order.append(name) or float(len(order))

    figures = fixture.in_turn({"a": contender("a"), "b": contender("b")}, iter(range(3)))

    assert order == ["a", "b", "b", "a", "a", "b"]
    assert figures == {"a": [1, 4, 5], "b": [2, 3, 6]}


def test_a_contender_that_fails_is_left_out_of_later_rounds() -> None:
    def fail() -> float:
        raise RuntimeError("gone")

    failures: list[str] = []

    figures = fixture.in_turn({"a": lambda: 1.0, "b": fail}, iter(range(3)), failures)

    assert figures == {"a": [1, 1, 1], "b": []}
    assert failures == ["b: gone"]


def test_a_contender_that_ended_early_is_compared_over_its_own_rounds() -> None:
    assert fixture.same_rounds([9.0, 8.0, 5.0], [1.0, 2.0]) == [9.0, 8.0]


def test_figures_of_rounds_before_the_time_limit_are_kept() -> None:
    left = iter([1.0, 2.0])

    def contender() -> float:
        for figure in left:
            return figure
        raise OutOfTime

    assert fixture.in_turn({"a": contender}, iter(range(9))) == {"a": [1, 2]}
    with pytest.raises(OutOfTime):  # there is no complete round
        fixture.in_turn({"a": contender}, iter(range(9)))


def result(**fields: object) -> dict:
    """Returns the fields of a logprobctl report that the benchmark reads."""
    usual = {
        "rows_per_second": 5.0,
        "requests": 3,
        "errors": 0,
        "latency_p50_seconds": 0.1,
        "latency_p99_seconds": 0.2,
        "latency_max_seconds": 0.3,
        "late_by_generator": None,
        "transport": "tcp",
        "windows": [],
    }
    return usual | fields


def parsed(**fields: object) -> logprobctl.Load:
    return logprobctl.parse(json.dumps({"results": [result(**fields)]}), "", "tcp")


def test_a_load_with_failed_requests_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="3 requests were answered, 1 failed: UNAVAILABLE: gone"):
        fixture.checked(parsed(errors=1, first_error="UNAVAILABLE: gone"), "bulk")
    with pytest.raises(logprobctl.LoadError, match="no such flag"):
        logprobctl.parse("", "no such flag", "tcp")


def test_a_load_over_another_transport_is_an_error() -> None:
    # Regression: a client on the server's host shares memory if it can, and this was reported as TCP.
    with pytest.raises(
        logprobctl.LoadError, match="tcp was requested, but rows were sent over shm[+]tcp"
    ):
        parsed(transport="shm+tcp")


def test_the_first_and_the_last_window_do_not_count() -> None:
    # Filling and draining the pipeline took 2 % of 3 s with 8 requests of 64 MiB in flight.
    windows = [
        {"requests": requests, "rows_per_second": rows, "seconds": seconds}
        for requests, rows, seconds in (
            (1, 10.0, 0.5),
            (10, 100.0, 0.5),
            (11, 70.0, 1.0),
            (9, 9.0, 2.0),
        )
    ]

    assert parsed(windows=windows).rows_per_second == pytest.approx((50 + 70) / 1.5)
    assert (
        parsed(windows=windows[:2]).rows_per_second == 5.0
    )  # there are too few answers in between


def test_a_time_limit_interrupts_and_leaves_an_outer_limit_in_force() -> None:
    begin = time.monotonic()

    with pytest.raises(OutOfTime, match="did not finish within 3 s"), within(3):
        with pytest.raises(OutOfTime), within(0.05):
            time.sleep(20)
        time.sleep(20)

    assert time.monotonic() - begin < 10


def some_fixture(
    binaries: pathlib.Path, tmp_path: pathlib.Path, **fields: object
) -> fixture.Fixture:
    sizes = {"hidden_sizes": [64], "vocab": 100, "batch_rows": 8, "rounds": 1, "seconds": 0.1}
    return fixture.Fixture(binaries=binaries, work=tmp_path, device="cpu", **(sizes | fields))


def test_sections_after_one_that_fails_or_hangs_are_measured(
    binaries: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    written: list[int] = []
    here = some_fixture(binaries, tmp_path)

    def fail(_: fixture.Fixture) -> None:
        raise ValueError("a bug")

    def measure(given: fixture.Fixture) -> None:
        given.records.append(e2e_bench.bench_records.record("it", 1, "s"))

    failed = e2e_bench.run_sections(
        here,
        {
            "one": e2e_bench.Section(fail, 60),
            "two": e2e_bench.Section(lambda _: time.sleep(20), 0.05),
            "three": e2e_bench.Section(measure, 60),
        },
        lambda: written.append(len(here.records)),
    )

    assert failed == {"one": "ValueError: a bug", "two": "OutOfTime: did not finish within 0 s"}
    assert written == [0, 0, 1]


def test_cuda_ipc_is_left_out_on_a_cpu(binaries: pathlib.Path, tmp_path: pathlib.Path) -> None:
    here = some_fixture(binaries, tmp_path)

    assert throughput.measurable(here, ["tcp", "ipc"]) == ["tcp"]
    with pytest.raises(fixture.Skipped):
        throughput.measure(here, ["ipc"], 64)


def test_no_section_starts_after_the_deadline(
    binaries: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    here = some_fixture(binaries, tmp_path, deadline=time.monotonic() - 1)

    failed = e2e_bench.run_sections(
        here, {"late": e2e_bench.Section(lambda _: pytest.fail("started"), 60)}, lambda: None
    )

    assert failed == {"late": "the time limit of the run is reached"}


def test_sections_run_in_the_requested_order() -> None:
    sections = e2e_bench.sections_of(["swap", "shm", "one-row", "tcp"], [4096, 2048])

    assert list(sections) == ["swap", "tcp, shm at H=4096", "tcp, shm at H=2048", "one-row"]
    with pytest.raises(argparse.ArgumentTypeError, match="sections are tcp, shm"):
        e2e_bench.names("tcp,udp")


def test_an_engine_bench_that_prints_nothing_is_killed(tmp_path: pathlib.Path, monkeypatch) -> None:
    program = tmp_path / "engine_bench"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setattr(processes, "ENGINE_STARTS_WITHIN_S", 0.05)

    with pytest.raises(RuntimeError, match="engine_bench printed nothing"):
        processes.EngineBench(tmp_path)


def test_a_server_that_does_not_start_is_stopped_and_its_log_printed(
    binaries: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    server = ServerProcess(binaries, "--model", "/nowhere")

    with pytest.raises(AssertionError, match="ended while starting"):
        with processes.running(server, "logprobd"):
            pytest.fail("it started")

    assert server.process.poll() is not None
    assert "logprobd: " in capfd.readouterr().err


def test_a_dry_run_measures_its_sections(binaries: pathlib.Path, tmp_path: pathlib.Path) -> None:
    out = tmp_path / "service.json"
    sections = "tcp,shm,one-row,small-beside-bulk,swap"
    command = [sys.executable, BENCH / "e2e_bench.py", "--quick", "--device", "cpu"]

    done = subprocess.run(
        [*command, "--bin-dir", binaries, "--only", sections, "--out", out, "--commit", "abc"],
        capture_output=True,
        text=True,
    )

    # Status 1 means that a figure misses its target, which may happen in a dry run. Status 3 means a failed section.
    assert done.returncode in (0, 1), done.stderr
    records = json.loads(out.read_text())
    whats = [entry["what"] for entry in records]
    for transport in (
        "TCP, 8 connections",
        "TCP, 16 connections",
        "shared memory, one client process",
        "shared memory, one Python process",
    ):
        assert sum(what.startswith(f"Service, {transport}") for what in whats) == 1, transport
    assert sum("p50 above the engine" in what for what in whats) == len(latency.CALLERS)
    assert sum("small p99" in what for what in whats) == 2
    assert all(entry["commit"] == "abc" for entry in records)
    faults = [entry for entry in records if entry["unit"] == "requests"]
    assert [entry["figure"] for entry in faults] == [0, 0], (
        faults
    )  # no request failed, no version was mixed
    assert all(entry["figure"] > 0 for entry in records if entry not in faults)
    swaps = [entry for entry in records if entry["unit"] == "swaps"]
    assert [entry["figure"] for entry in swaps] == [swap.SWAPS]
    assert "target" in done.stdout
    assert not list(tmp_path.glob("*.part"))
