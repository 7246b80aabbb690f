"""Tests the choice of servers and the pauses of failed servers, with a fake clock."""

import dataclasses

import pytest
from logprobd import HeadMismatch, _wire
from logprobd.balance import BACKOFF_MAX_SECONDS, CHECK_SECONDS, VERSION_SECONDS, Balance
from logprobd.info import heads_from_wire


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def head(name="h", **facts):
    limits = _wire.Limits(request_rows_max=facts.pop("request_rows_max", 100))
    listed = _wire.Head(name=name, vocab_size=10, hidden_size=4, weights_version=1, limits=limits)
    return heads_from_wire(_wire.ListHeadsResponse(heads=[dataclasses.replace(listed, **facts)]))[0]


def ready(clock, *addresses):
    """Returns a Balance whose servers have all passed their check."""
    balance = Balance(addresses, clock=clock, uniform=lambda least, most: most)
    for server in balance.due_checks():
        balance.checked(server, [head()], "", clock.now)
    return balance


def named(balance, address):
    return next(server for server in balance.all() if server.address == address)


def test_the_server_with_the_fewest_bytes_is_next(clock):
    balance = ready(clock, "a", "b", "c")

    taken = [balance.take(size).address for size in (10, 5, 1, 3, 3, 3)]

    assert taken == ["a", "b", "c", "c", "c", "b"]


def test_equals_take_turns(clock):
    balance = ready(clock, "a", "b", "c")

    taken = []
    for _ in range(7):
        server = balance.take(10)
        taken.append(server.address)
        balance.give(server, 10)

    assert taken == ["a", "b", "c", "a", "b", "c", "a"]


@pytest.mark.parametrize(("out", "others"), [("a", "bcbcb"), ("b", "acaca"), ("c", "ababa")])
def test_the_others_take_turns_while_one_server_is_out(clock, out, others):
    balance = ready(clock, "a", "b", "c")
    balance.leave(named(balance, out), "gone")

    taken = ""
    for _ in range(5):
        server = balance.take(10)
        taken += server.address
        balance.give(server, 10)

    assert taken == others


def test_a_server_is_not_used_before_its_check_has_succeeded(clock):
    balance = Balance(["a", "b"], clock=clock)
    assert balance.take(1) is None

    first, second = balance.due_checks()
    assert balance.due_checks() == []  # both checks are running
    balance.checked(second, [head()], "", clock.now)

    assert balance.take(1) is second
    assert [state.state for state in balance.states()] == ["unknown", "ready"]
    assert first.is_checked


def test_a_server_without_room_is_passed_over(clock):
    balance = ready(clock, "a", "b")

    taken = balance.take(1, has_room=lambda server: server.address == "b")

    assert taken.address == "b"
    assert balance.take(1, has_room=lambda server: False) is None


def test_a_failed_server_is_left_at_once_for_a_pause_that_doubles(clock):
    balance = ready(clock, "a", "b")
    a = named(balance, "a")
    pauses = []

    for _ in range(9):
        balance.leave(a, "gone")
        balance.leave(a, "another request of the same failure")
        assert {balance.take(0).address for _ in range(4)} == {"b"}
        pauses.append(a.check_at - clock.now)
        clock.now = a.check_at
        assert a in balance.due_checks()
        balance.checked(a, [head()], "", clock.now)

    assert pauses == [0.5, 1, 2, 4, 8, 16, BACKOFF_MAX_SECONDS, BACKOFF_MAX_SECONDS] + [30]


def test_a_server_that_has_failed_for_weeks_is_still_asked(clock):
    balance = ready(clock, "a", "b")
    a = named(balance, "a")
    for _ in range(1_200):  # 2 to this power is no float
        balance.checked(a, None, "refused", clock.now)

    assert a.check_at - clock.now == BACKOFF_MAX_SECONDS


def test_an_answer_ends_the_growth_of_the_pause(clock):
    balance = ready(clock, "a", "b")
    a = named(balance, "a")
    for _ in range(3):
        balance.leave(a, "gone")
        balance.checked(a, [head()], "", clock.now)

    balance.saw_version(a, "h", 1)
    balance.leave(a, "gone")

    assert a.check_at - clock.now == 0.5


def test_the_pause_is_drawn_from_its_upper_half(clock):
    drawn = []
    balance = Balance(["a", "b"], clock=clock, uniform=lambda *ends: drawn.append(ends) or ends[0])

    balance.leave(balance.all()[0], "gone")

    assert drawn == [(0.25, 0.5)]


def test_a_check_that_began_before_a_failure_does_not_bring_the_server_back(clock):
    balance = ready(clock, "a", "b")
    a = named(balance, "a")
    began = clock.now
    clock.now += 1
    balance.leave(a, "gone")

    balance.checked(a, [head()], "", began)

    assert balance.states()[0].state == "out"
    assert balance.states()[0].reason == "gone"
    assert balance.states()[0].retry_in == 0.5


def test_the_failure_of_another_server_does_not_make_a_check_outdated(clock):
    balance = ready(clock, "a", "b")
    a, b = balance.all()
    balance.leave(a, "gone")
    clock.now += 1
    began = clock.now
    clock.now += 1
    balance.leave(b, "gone")

    balance.checked(a, [head()], "", began)

    assert [state.state for state in balance.states()] == ["ready", "out"]


def test_ready_servers_are_checked_again(clock):
    balance = ready(clock, "a", "b")
    assert balance.due_checks() == []

    clock.now += CHECK_SECONDS
    due = balance.due_checks()
    assert [server.address for server in due] == ["a", "b"]
    balance.checked(due[0], None, "health says NOT_SERVING", clock.now)

    assert [state.state for state in balance.states()] == ["out", "ready"]


def test_with_nobody_ready_the_pauses_are_cut_short(clock):
    balance = ready(clock, "a", "b")
    for server in balance.all():
        balance.leave(server, "gone")

    assert balance.due_checks() == []
    assert len(balance.due_checks(idle=True)) == 2


def test_a_busy_server_is_passed_over_for_its_hint(clock):
    balance = ready(clock, "a", "b")
    a, b = balance.all()
    balance.busy(a, 3.0)

    assert {balance.take(5).address for _ in range(4)} == {"b"}
    assert balance.take(1, has_room=lambda server: server is a) is None
    assert [state.state for state in balance.states()] == ["busy", "ready"]
    assert not balance.has_other(b, lambda servers, now: servers)
    clock.now += 3.0
    assert balance.take(5) is a
    assert balance.has_other(b, lambda servers, now: servers)


def test_a_refusal_without_a_hint_does_not_shorten_the_pause_of_an_earlier_hint(clock):
    balance = ready(clock, "a", "b")
    a = named(balance, "a")
    balance.busy(a, 3.0)

    balance.busy(a, None)

    clock.now += 2.0
    assert {balance.take(5).address for _ in range(4)} == {"b"}
    clock.now += 1.0
    assert balance.take(5) is a


def test_a_server_is_shown_as_busy_only_until_its_hint_ends(clock):
    balance = ready(clock, "a", "b")
    balance.busy(named(balance, "a"), 3.0)
    assert balance.states()[0].state == "busy"

    clock.now += 3.0

    assert balance.states()[0].state == "ready"


def test_with_all_busy_they_are_used_as_before(clock):
    balance = ready(clock, "a", "b")
    for server in balance.all():
        balance.busy(server, None)

    assert {balance.take(5).address for _ in range(2)} == {"a", "b"}


def test_differing_heads_are_an_error_that_names_both(clock):
    balance = ready(clock, "a:1", "b:2")

    balance.checked(named(balance, "b:2"), [head(vocab_size=11)], "", clock.now)

    with pytest.raises(HeadMismatch, match=r'a:1 and b:2 .*vocab_size of "h" is 10 and 11'):
        balance.take(1)
    with pytest.raises(HeadMismatch):
        balance.heads()
    balance.leave(named(balance, "b:2"), "gone")
    assert balance.take(1).address == "a:1"


def test_without_the_server_of_another_head_the_others_are_used_again(clock):
    balance = ready(clock, "a", "b", "c")
    balance.checked(named(balance, "b"), [head(vocab_size=11)], "", clock.now)

    balance.set_addresses(["a", "c"])

    assert balance.take(1).address in ("a", "c")
    assert balance.heads()[0].vocab_size == 10


@pytest.mark.parametrize(
    "facts", [{"hidden_size": 5}, {"dtype": 3}, {"scale": 2.0}, {"softcap": 1.0}, {"name": "x"}]
)
def test_fields_that_affect_scores_must_agree(clock, facts):
    balance = ready(clock, "a", "b")

    balance.checked(named(balance, "b"), [head(**facts)], "", clock.now)

    with pytest.raises(HeadMismatch, match="hold different heads"):
        balance.take(1)


def test_limits_and_versions_may_differ_and_the_tightest_limit_holds(clock):
    balance = ready(clock, "a", "b")

    other = head(weights_version=7, request_rows_max=30, tensor="x", tied=True)
    balance.checked(named(balance, "b"), [other], "", clock.now)

    assert balance.heads()[0].limits.request_rows_max == 30
    assert [state.weights_versions for state in balance.states()] == [{"h": 1}, {"h": 7}]


def test_a_version_is_known_for_a_while_after_it_was_seen(clock):
    (server,) = ready(clock, "a").all()

    assert server.version("h", clock.now + VERSION_SECONDS - 0.1) == 1
    assert server.version("h", clock.now + VERSION_SECONDS) is None


def test_a_limit_that_one_server_does_not_report_is_that_of_the_others(clock):
    balance = ready(clock, "a", "b")

    balance.checked(named(balance, "a"), [head(request_rows_max=0)], "", clock.now)

    assert balance.heads()[0].limits.request_rows_max == 100


def test_servers_come_and_go_and_those_that_stay_are_remembered(clock):
    balance = ready(clock, "a", "b")
    b = balance.take(1, has_room=lambda server: server.address == "b")

    gone = balance.set_addresses(["b", "c", "b"])

    assert [server.address for server in gone] == ["a"]
    assert [(state.address, state.state, state.bytes) for state in balance.states()] == [
        ("b", "ready", 1),
        ("c", "unknown", 0),
    ]
    assert named(balance, "b") is b
    assert [server.address for server in balance.due_checks()] == ["c"]


def test_a_server_that_is_added_again_has_no_bytes_of_its_earlier_requests(clock):
    balance = ready(clock, "a", "b")
    earlier = balance.take(10, has_room=lambda server: server.address == "a")

    balance.set_addresses(["b"])
    balance.set_addresses(["b", "a"])
    again = named(balance, "a")
    balance.checked(again, [head()], "", clock.now)
    assert (again.requests, again.bytes) == (0, 0)
    assert balance.take(4) is again
    balance.give(earlier, 10)

    assert (again.requests, again.bytes) == (1, 4)
    balance.give(again, 4)
    assert [(state.requests, state.bytes) for state in balance.states()] == [(0, 0), (0, 0)]


def test_a_single_server_is_always_used(clock):
    balance = Balance(["a"], solo=True, clock=clock)
    server = balance.take(1)
    assert server.address == "a"

    balance.leave(server, "gone")

    assert balance.take(1) is server
    assert balance.states()[0].reason == "gone"
    balance.saw_version(server, "", 3)
    assert balance.states()[0].state == "ready"


def test_the_error_of_all_gone_names_each_and_why(clock):
    balance = ready(clock, "a:1", "b:2")
    balance.leave(named(balance, "a:1"), "UNAVAILABLE: refused")
    balance.leave(named(balance, "b:2"), "health says NOT_SERVING")

    error = balance.gone("dns:///x:1: unknown name")

    assert "dns:///x:1: unknown name; a:1 (UNAVAILABLE: refused); b:2 (health says" in str(error)
