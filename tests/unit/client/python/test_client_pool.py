"""Tests checks, connections and retry hints with a pool whose calls are answered by hand."""

import types

import grpc
import pytest
from logprobd import Client, RetryPolicy, _wire, addresses
from logprobd._pool import Answer, pushback_seconds
from logprobd._threads import ThreadsPool, finish

SERVING = Answer(grpc.StatusCode.OK, data=_wire.encode(_wire.HealthResponse(status=_wire.SERVING)))
BROKEN = Answer(grpc.StatusCode.UNAVAILABLE, "the connection broke")


class Channel:
    def __init__(self, address, options):
        self.is_closed = False

    def close(self):
        self.is_closed = True


class HandPool(ThreadsPool):
    """Keeps the calls that it is asked to begin, and makes look-ups at once."""

    _library = types.SimpleNamespace(insecure_channel=Channel)

    def __init__(self, address, **settings):
        self.begun = []
        super().__init__(Client(address, **settings)._settings)

    def begin(self, call, done):
        self.begun.append((call, done))

    def _spawn(self, work):
        finish(work)

    def asked(self, address, method):
        """Returns the functions that take the answers to the calls of this method."""
        return [
            done
            for call, done in self.begun
            if (call.server.address, call.method) == (address, method)
        ]


@pytest.mark.parametrize("answers", [(SERVING, BROKEN), (BROKEN, SERVING)])
def test_a_server_with_a_broken_connection_is_out(answers):
    pool = HandPool(["a:1", "b:1"], channels=2)
    pool.refresh()

    for done, answer in zip(pool.asked("a:1", _wire.HEALTH_CHECK), answers, strict=True):
        done(answer)

    state = pool.balance.states()[0]
    assert (state.state, state.reason) == ("out", "UNAVAILABLE: the connection broke")
    assert pool.asked("a:1", _wire.LIST_HEADS) == []


def test_heads_are_asked_for_once_all_connections_are_healthy():
    pool = HandPool(["a:1", "b:1"], channels=3)
    pool.refresh()
    first, second, third = pool.asked("a:1", _wire.HEALTH_CHECK)

    first(SERVING)
    second(SERVING)
    assert pool.asked("a:1", _wire.LIST_HEADS) == []
    third(SERVING)

    assert len(pool.asked("a:1", _wire.LIST_HEADS)) == 1


def test_the_connection_of_a_removed_server_is_closed_when_its_requests_have_ended(monkeypatch):
    monkeypatch.setattr(addresses, "RESOLVE_SECONDS", 0.0)  # each refresh looks up
    known = ["a:1", "b:1"]
    pool = HandPool(lambda: known)
    pool.refresh()
    a = pool.balance.all()[0]
    pool.balance.checked(a, [])
    assert pool.balance.take(1) is a
    channel = pool.channel(a)

    known[:] = ["b:1"]
    pool.refresh()
    assert not channel.is_closed
    pool.balance.give(a, 1)
    pool.refresh()

    assert channel.is_closed


@pytest.mark.parametrize(("text", "seconds"), [("1500", 1.5), ("-1", -0.001)])
def test_a_retry_hint_is_read_in_milliseconds(text, seconds):
    assert pushback_seconds([("other", "7"), ("grpc-retry-pushback-ms", text)]) == seconds


def test_a_retry_hint_that_is_no_number_forbids_a_retry():
    metadata = [("grpc-retry-pushback-ms", "soon")]

    error = Answer(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", metadata).error("a:1")

    assert RetryPolicy().delay(error, 1) is None
