"""A call uses one version of the weights, has a window for each server, and retries its chunks."""

import time

import numpy as np
import pytest
from logprobd import Client, Overloaded, Unavailable, WeightsVersionMismatch, _wire
from logprobd._policy import RESTARTS_MAX
from logprobd._queue import ChunkQueue
from logprobd._status import from_status
from logprobd.balance import Balance
from logprobd.info import heads_from_wire
from logprobd.plan import Chunk, ScorePlan
from logprobd.score_args import ScoreArgs
from logprobd.versions import CallVersions
from test_client_balance import named


def listed(version):
    head = _wire.Head(name="h", vocab_size=10, hidden_size=4, weights_version=version)
    return heads_from_wire(_wire.ListHeadsResponse(heads=[head]))


def balance_of(**versions):
    """Returns servers by name, with the version that each one is known to hold."""
    balance = Balance(list(versions))
    for server, version in zip(balance.due_checks(), versions.values(), strict=True):
        balance.checked(server, listed(version), "", time.monotonic())
    return balance


def addresses(servers):
    return [server.address for server in servers]


def test_the_first_version_seen_is_kept():
    balance = balance_of(a=1, b=1)
    a, b = balance.all()
    versions = CallVersions(balance, head="")

    assert versions.keeps(a, 1, versions.epoch)
    assert not versions.keeps(b, 2, versions.epoch)

    assert addresses(versions.choose([a, b], time.monotonic())) == ["a"]


def test_servers_believed_to_hold_the_version_are_preferred():
    balance = balance_of(a=1, b=2, c=1)
    a, b, c = balance.all()
    versions = CallVersions(balance, head="")
    now = time.monotonic()

    versions.asked(a, now)

    assert addresses(versions.choose([a, b, c], now)) == ["a", "c"]
    assert addresses(versions.choose([b], now)) == ["b"]  # the known version is outdated
    # After 60 s the known versions are outdated.
    assert addresses(versions.choose([a, b, c], now + 60)) == ["a", "b", "c"]


def test_a_version_that_is_gone_from_all_servers_is_given_up():
    balance = balance_of(a=1, b=1)
    a, b = balance.all()
    versions = CallVersions(balance, head="h")
    assert versions.keeps(a, 1, 0)
    assert not versions.keeps(a, 2, 0)

    assert versions.keeps(b, 2, 0)  # the call continues with version 2

    # This response was sent before the restart, so it says nothing about the server.
    assert not versions.keeps(a, 1, 0)
    assert addresses(versions.choose([a, b], time.monotonic())) == ["a", "b"]
    assert versions.keeps(a, 2, versions.epoch)


def test_a_pinned_version_is_never_given_up():
    balance = balance_of(a=1, b=1)
    a, b = balance.all()
    versions = CallVersions(balance, head="h", pinned=5)

    assert versions.lacks(a)
    assert not versions.lacks(b)

    assert "version 5" in str(versions.mismatch())
    assert "a, b does not hold it" in str(versions.mismatch())


def test_answers_with_other_versions_than_the_pinned_one_are_an_error():
    balance = balance_of(a=5, b=5)
    a, b = balance.all()
    versions = CallVersions(balance, head="h", pinned=5)

    assert not versions.keeps(a, 6, 0)

    with pytest.raises(WeightsVersionMismatch, match="version 6 at a, b"):
        versions.keeps(b, 6, 0)


def test_servers_that_keep_changing_end_in_an_error_that_names_them():
    balance = balance_of(a=1, b=1)
    a, b = balance.all()
    versions = CallVersions(balance, head="h")
    versions.keeps(a, 1, 0)

    with pytest.raises(
        WeightsVersionMismatch, match="version 1 at a; version 2 at a, b; .*mix_versions"
    ):
        for version in range(2, RESTARTS_MAX + 3):
            versions.keeps(a, version, versions.epoch)
            versions.keeps(b, version, versions.epoch)

    assert versions.epoch == RESTARTS_MAX


def test_mixing_takes_every_version():
    balance = balance_of(a=1, b=2)
    a, b = balance.all()
    versions = CallVersions(balance, head="h", mix=True)

    assert versions.keeps(a, 1, 0)
    assert versions.keeps(b, 2, 0)
    assert addresses(versions.choose([a, b], time.monotonic())) == ["a", "b"]


def test_a_call_whose_version_left_with_its_server_begins_again():
    balance = balance_of(a=1, b=2)
    a, b = balance.all()
    versions = CallVersions(balance, head="h")
    versions.keeps(a, 1, 0)
    assert not versions.keeps(b, 2, 0)
    assert not versions.stuck()

    balance.leave(a, "gone")

    assert versions.stuck()
    assert versions.keeps(b, 2, versions.epoch)


def queue_of(balance, chunks, **settings):
    client = Client("host:1", **settings)
    plan = ScorePlan(ScoreArgs(np.ones((chunks, 4), np.float32), [1] * chunks, head="h"))
    deadline = time.monotonic() + 100
    queue = ChunkQueue(client._settings, balance, client._local, deadline=deadline)
    queue.add(plan, [Chunk(row, row, row + 1) for row in range(chunks)])
    return queue


def answer(queue, job):
    """Scores a chunk. Returns whether the call keeps the scores."""
    response = _wire.ScoreResponse(weights_version=1, rows=1, logprob=b"1234", entropy=b"1234")
    return queue.receive(_wire.encode(response), time.monotonic(), job)


def fail(queue, job, error):
    queue.failed(job, error, time.monotonic())


def send_all(queue):
    jobs = []
    while (job := queue.next(time.monotonic())) is not None:
        jobs.append(job)
    return jobs


def test_each_server_has_a_window_of_its_own():
    queue = queue_of(balance_of(a=1, b=1, c=1), chunks=20, max_inflight=4)

    jobs = send_all(queue)

    assert sorted(job.server.address for job in jobs) == ["a"] * 4 + ["b"] * 4 + ["c"] * 4


def test_overload_narrows_how_many_requests_are_under_way():
    # Regression: AsyncClient.score did not send fewer requests after refusals.
    queue = queue_of(Balance(["a"], solo=True), chunks=20, max_inflight=4)
    jobs = send_all(queue)
    assert len(jobs) == 4

    fail(queue, jobs[0], Overloaded("full", retry_after=50))
    assert answer(queue, jobs[1])

    assert send_all(queue) == []  # two are in flight, and two are allowed
    assert answer(queue, jobs[2])
    assert len(send_all(queue)) == 1


def test_a_batch_whose_version_is_gone_does_not_hold_up_the_next():
    balance = balance_of(a=1, b=1)
    client = Client("host:1", max_inflight=1)
    queue = ChunkQueue(client._settings, balance, client._local)
    for version in (9, 0):
        row = np.ones((1, 4), np.float32), [1]
        plan = ScorePlan(ScoreArgs(*row, head="h", weights_version=version))
        queue.add(plan, [Chunk(0, 0, 1)], seconds=100.0)
    pinned = queue.next(time.monotonic())
    fail(queue, pinned, from_status("FAILED_PRECONDITION", "no version 9", address="a"))
    balance.leave(named(balance, "b"), "gone")

    (job,) = send_all(queue)

    assert job.batch is not pinned.batch
    assert isinstance(pinned.batch.result, WeightsVersionMismatch)


def test_a_refused_chunk_goes_elsewhere_without_waiting():
    balance = balance_of(a=1, b=1)
    queue = queue_of(balance, chunks=1)
    (job,) = send_all(queue)
    assert job.server.address == "a"

    fail(queue, job, Overloaded("full", retry_after=50))

    assert [job.server.address for job in send_all(queue)] == ["b"]
    assert job.attempts == 2


def test_a_chunk_waits_where_no_other_server_is_better():
    balance = balance_of(a=1, b=1)
    queue = queue_of(balance, chunks=1)
    for _ in range(2):
        (job,) = send_all(queue)
        fail(queue, job, Overloaded("full", retry_after=50))

    assert send_all(queue) == []
    assert 49 < queue.pause(time.monotonic()) < 63


def test_an_unavailable_server_is_left_and_its_chunks_go_elsewhere():
    balance = balance_of(a=1, b=1)
    queue = queue_of(balance, chunks=4, max_inflight=2)
    jobs = send_all(queue)

    for job in jobs:
        if job.server.address == "a":
            fail(queue, job, Unavailable("gone", details="refused"))
    for job in jobs:
        if job.server is not None:
            answer(queue, job)

    assert [job.server.address for job in send_all(queue)] == ["b", "b"]
    assert balance.states()[0].reason == "refused"


def test_the_end_of_a_stream_leaves_the_chunks_at_other_servers_in_flight():
    balance = balance_of(a=1, b=1)
    queue = queue_of(balance, chunks=4, max_inflight=2)
    jobs = send_all(queue)
    at_b = [job for job in jobs if job.server.address == "b"]

    gone = Unavailable("gone", details="refused")
    queue.disconnected(named(balance, "a"), gone, time.monotonic())

    assert [answer(queue, job) for job in at_b] == [True, True]
    assert len(send_all(queue)) == 2
    assert balance.states()[0].reason == "refused"


def test_a_negative_hint_forbids_another_server_too():
    queue = queue_of(balance_of(a=1, b=1), chunks=1)
    (job,) = send_all(queue)

    fail(queue, job, Overloaded("full", retry_after=-1))

    assert [type(result) for result in queue.finished()] == [Overloaded]


def test_a_call_without_ready_servers_is_stranded_and_counts_attempts():
    balance = balance_of(a=1, b=1)
    for server in balance.all():
        balance.leave(server, "gone")
    queue = queue_of(balance, chunks=1)
    assert send_all(queue) == []
    assert queue.is_stranded

    for _ in range(7):
        queue.nobody_is_ready(Unavailable("all gone"), time.monotonic())
        queue._waiting.append(queue._again.pop()[2])  # the wait of the chunk has passed
    with pytest.raises(Unavailable, match="all gone"):
        queue.nobody_is_ready(Unavailable("all gone"), time.monotonic())
