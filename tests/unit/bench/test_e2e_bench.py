"""The end-to-end benchmark: what it concludes, and that it runs."""

import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest

BENCH = pathlib.Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))

from e2e import load, scene, swap, throughput
from e2e.grpc_load import Answer
from e2e.made_head import write_head


def test_a_made_head_gives_logits_of_the_spread_that_was_asked(tmp_path: pathlib.Path) -> None:
    folder = write_head(tmp_path, vocab=5000, hidden=1000, logit_stddev=3)

    data = (folder / "model.safetensors").read_bytes()
    header_bytes = int.from_bytes(data[:8], "little")
    tensor = json.loads(data[8 : 8 + header_bytes])["lm_head.weight"]
    bits = np.frombuffer(data, np.uint16, offset=8 + header_bytes).astype(np.uint32) << 16
    weight = bits.view(np.float32).reshape(5000, 1000)
    logits = weight @ np.random.default_rng(1).standard_normal(1000)
    assert tensor["shape"] == [5000, 1000]
    # The deviation of a sample of 5,000 is within 3 / sqrt(2 * 5000) = 0.03 of 3, four times that is allowed.
    assert abs(logits.std() - 3) < 0.12
    # More than one block of the writer, and no block is a copy of another.
    assert len(np.unique(weight[:, 0])) > 1000


def answers(*entries: tuple[float, int, int, int]) -> list[Answer]:
    """Of (time of the answer, code, version, crc)."""
    return [Answer(ended - 0.5, ended, code, version, crc) for ended, code, version, crc in entries]


def test_swaps_are_judged_by_failures_bits_and_the_longest_gap() -> None:
    seen = answers(
        (1.0, 0, 1, 11), (1.1, 0, 2, 22), (1.2, 14, 0, 0), (1.5, 0, 3, 11), (1.6, 0, 4, 22)
    )

    verdict = swap.judge(seen, crc_of=[11, 22])

    assert (verdict.failed, verdict.mixed) == (1, 0)
    assert verdict.stall == pytest.approx(0.4)


def test_an_answer_with_the_bits_of_another_version_is_mixed() -> None:
    seen = answers((1.0, 0, 1, 11), (1.1, 0, 2, 11), (1.2, 0, 3, 33))

    assert swap.judge(seen, crc_of=[11, 22]).mixed == 2


def test_contenders_take_turns_and_the_order_turns_over() -> None:
    order: list[str] = []

    def contender(name: str):
        return lambda: order.append(name) or float(len(order))

    figures = scene.in_turn({"a": contender("a"), "b": contender("b")}, iter(range(3)))

    assert order == ["a", "b", "b", "a", "a", "b"]
    assert figures == {"a": [1, 4, 5], "b": [2, 3, 6]}


def test_a_load_with_failed_requests_is_no_figure() -> None:
    result = {
        "rows_per_second": 5.0,
        "requests": 3,
        "errors": 1,
        "first_error": "UNAVAILABLE: gone",
        "latency_p50_seconds": 0.1,
        "latency_p99_seconds": 0.2,
        "latency_max_seconds": 0.3,
    }

    parsed = load.parse(json.dumps({"results": [result]}), "")

    with pytest.raises(RuntimeError, match="1 of 3 failed: UNAVAILABLE: gone"):
        scene.checked(parsed, "bulk")
    with pytest.raises(load.LoadError, match="no such flag"):
        load.parse("", "no such flag")


def test_transports_that_the_client_lacks_are_left_out(binaries: pathlib.Path, monkeypatch) -> None:
    tool = load.LoadTool(binaries)
    monkeypatch.setitem(load.TRANSPORT_FLAGS, "shm", ["--transport", "no-such-word"])

    assert tool.has_transport("tcp")
    assert not tool.has_transport("shm")
    assert set(load.TRANSPORT_FLAGS) == set(throughput.NAMES) == set(throughput.WANTED)


def test_a_dry_run_goes_through_its_sections(
    binaries: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    out = tmp_path / "service.json"
    sections = "tcp,one-row,small-beside-bulk,swap"
    command = [sys.executable, BENCH / "e2e_bench.py", "--quick", "--device", "cpu"]

    done = subprocess.run(
        [*command, "--bin-dir", binaries, "--only", sections, "--out", out, "--commit", "abc"],
        capture_output=True,
        text=True,
    )

    # 1: figures of a dry run miss what is wanted of real ones; 3 would be a section that failed.
    assert done.returncode in (0, 1), done.stderr
    records = json.loads(out.read_text())
    whats = [entry["what"] for entry in records]
    assert any(what.startswith("Service, TCP, 8 connections") for what in whats)
    assert sum("p50 above the engine" in what for what in whats) == 1
    assert sum("small p99" in what for what in whats) == 2
    assert all(entry["commit"] == "abc" for entry in records)
    faults = [entry for entry in records if entry["unit"] == "requests"]
    assert [entry["figure"] for entry in faults] == [0, 0], faults  # none failed, none mixed
    assert all(entry["figure"] > 0 for entry in records if entry not in faults)
    assert "asked" in done.stdout
