"""Tests of the bounds of the attacks and of the rotations, and of the table of the committed result."""

import json
import pathlib
import sys

import pytest

TESTS = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(TESTS / "soak"), str(TESTS / "bench")]

import hostile_peers
import rotate_certificates

BOUNDED = {
    "declared_mib": 400,
    "peak_mib": 400 + 256,
    "p99_before_ms": 2.0,
    "p99_during_ms": 4.0,
    "failed_calls": 0,
    "health_failed": 0,
    "health_slowest_s": 0.999,
    "admin_failed": 0,
}


def test_a_result_at_its_bounds_breaks_none() -> None:
    assert hostile_peers.broken_bounds(BOUNDED) == []


@pytest.mark.parametrize(
    ("name", "value", "bound"),
    [
        ("peak_mib", 657, "memory"),
        ("p99_during_ms", 4.01, "latency"),
        ("failed_calls", 1, "calls of others"),
        ("health_slowest_s", 1.0, "health"),
        ("health_failed", 1, "health"),
        ("admin_failed", 1, "admin"),
    ],
)
def test_a_result_beyond_a_bound_names_it(name: str, value: float, bound: str) -> None:
    assert hostile_peers.broken_bounds(BOUNDED | {name: value}) == [bound]


def test_only_attacks_that_need_more_than_the_server_may_break_a_bound() -> None:
    broken = {"attack": "an attack", "broken_bounds": ["memory"]}

    assert hostile_peers.problems({"a": broken | {"closed_by": "a newer gRPC"}}) == []
    assert hostile_peers.problems({"a": broken | {"closed_by": ""}}) == ["an attack: memory"]


def test_a_server_with_a_newer_grpc_has_no_excuse_for_what_that_closes() -> None:
    resets, unread = hostile_peers.CASES["resets"], hostile_peers.CASES["unread-answers"]

    assert hostile_peers.closed_by(resets, is_grpc_newer=False) == hostile_peers.NEWER_GRPC
    assert hostile_peers.closed_by(resets, is_grpc_newer=True) == ""
    assert hostile_peers.closed_by(unread, is_grpc_newer=True) == "tokens"


@pytest.mark.parametrize("name", ["hostile_peers.json", "hostile_peers_newer_grpc.json"])
def test_the_document_has_the_table_of_each_committed_result(name: str) -> None:
    record = json.loads((TESTS / "soak" / name).read_text())

    assert hostile_peers.table(record) in (TESTS / "soak" / "README.md").read_text()
    assert set(record["attacks"]) == set(hostile_peers.CASES)


ROTATED = {
    "rotations": 10,
    "served": 10,
    "failed_calls": 0,
    "first_failure": "",
    "resident_mib_before": 50.0,
    "resident_mib_after": 82.0,
    "open_files_before": 20.0,
    "open_files_after": 24.0,
}


def test_rotations_within_their_bounds_have_no_problem() -> None:
    assert rotate_certificates.problems(ROTATED) == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"failed_calls": 1, "first_failure": "why"}, "1 calls failed, first: why"),
        ({"served": 9}, "only 9 of 10 certificates were served"),
        ({"resident_mib_after": 82.1}, "resident_mib grew by 32.1"),
        ({"open_files_after": 25.0}, "open_files grew by 5"),
    ],
)
def test_rotations_beyond_a_bound_have_a_problem(change: dict, problem: str) -> None:
    (found,) = rotate_certificates.problems(ROTATED | change)

    assert problem in found
