"""Random schedules of refusals, failures, checks and changes of addresses, against a model of what they mean.

The model keeps each event and derives the state of a server from all of them, where Balance updates its record.
"""

import dataclasses
import random

import pytest
from logprobd import HeadMismatch
from logprobd._policy import (
    BACKOFF_FIRST_SECONDS,
    BACKOFF_MAX_SECONDS,
    BUSY_SECONDS,
    CHECK_SECONDS,
)
from logprobd.balance import Balance
from test_client_balance import Clock, head

ADDRESSES = ("a", "b", "c", "d")
STEPS = 150


@dataclasses.dataclass
class Past:
    """What has happened to a server since it was added."""

    address: str
    server: object
    checks: list = dataclasses.field(default_factory=list)
    """(time, index of the head, or None for a failure) of all checks that counted."""
    left: list = dataclasses.field(default_factory=list)
    """Times of failures while it was in use, and of failed checks."""
    refusals: list = dataclasses.field(default_factory=list)
    """(time, seconds) of all refusals."""
    requests: list = dataclasses.field(default_factory=list)
    """Bytes of the unanswered requests."""
    is_ready: bool = False
    running: float | None = None
    """When the running check began."""

    def pause_max(self) -> float:
        """Returns the longest pause before the next check of a server that is out."""
        return min(BACKOFF_MAX_SECONDS, BACKOFF_FIRST_SECONDS * 2 ** (len(self.left) - 1))

    def is_busy(self, now: float) -> bool:
        return any(now < at + seconds for at, seconds in self.refusals)


class Schedule:
    """Draws events, and compares a Balance with what must follow from them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.clock = Clock()
        self.heads = [head(), head(vocab_size=11)]
        self.balance = Balance(ADDRESSES[:3], clock=self.clock, uniform=self.random.uniform)
        self.past = [Past(server.address, server) for server in self.balance.all()]
        self.removed: list[Past] = []
        self.events = (
            *(self.take,) * 8,
            *(self.give,) * 6,
            *(self.wait,) * 4,
            *(self.begin_checks,) * 3,
            *(self.end_check,) * 5,
            *(self.refuse,) * 3,
            self.fail,
            self.change_addresses,
        )

    def run(self) -> None:
        for _ in range(STEPS):
            self.random.choice(self.events)()
            self.compare_states()
        for past in self.past + self.removed:
            for size in past.requests:
                self.balance.give(past.server, size)
            assert (past.server.requests, past.server.bytes) == (0, 0)

    def ready(self) -> list[Past]:
        return [past for past in self.past if past.is_ready]

    def take(self) -> None:
        now, size = self.clock(), self.random.choice([1, 5, 10])
        ready = self.ready()
        if len({past.checks[-1][1] for past in ready}) > 1:
            with pytest.raises(HeadMismatch):
                self.balance.take(size)
            return
        free = [past for past in ready if not past.is_busy(now)] or ready
        server = self.balance.take(size)
        if not free:
            assert server is None
            return
        (past,) = (past for past in self.past if past.server is server)
        assert past in free
        assert sum(past.requests) == min(sum(each.requests) for each in free)
        past.requests.append(size)

    def give(self) -> None:
        owing = [past for past in self.past + self.removed if past.requests]
        if owing:
            past = self.random.choice(owing)
            size = past.requests.pop(self.random.randrange(len(past.requests)))
            self.balance.give(past.server, size)

    def wait(self) -> None:
        self.clock.now += self.random.choice([0.01, 0.3, 2.0, CHECK_SECONDS])

    def begin_checks(self) -> None:
        now, is_idle = self.clock(), not self.ready()
        due = self.balance.due_checks(idle=is_idle)
        for past in self.past:
            if past.running is not None:
                assert past.server not in due
            elif past.server in due:
                past.running = now
                if past.left and not past.is_ready and not is_idle:
                    assert now >= past.left[-1] + past.pause_max() / 2
            elif past.is_ready:
                assert now < past.checks[-1][0] + CHECK_SECONDS
            else:
                assert not is_idle
                assert now < past.left[-1] + past.pause_max()

    def end_check(self) -> None:
        running = [past for past in self.past + self.removed if past.running is not None]
        if not running:
            return
        past = self.random.choice(running)
        now, began = self.clock(), past.running
        past.running = None
        if self.random.random() < 0.25:
            self.balance.checked(past.server, None, "no answer", began)
            past.left.append(now)
            past.is_ready = False
            return
        found = 1 if self.random.random() < 0.1 else 0
        self.balance.checked(past.server, [self.heads[found]], "", began)
        if past.is_ready or not any(at > began for at in past.left):
            past.checks.append((now, found))
            past.is_ready = True

    def refuse(self) -> None:
        if self.ready():
            past = self.random.choice(self.ready())
            seconds = self.random.choice([None, 0.0, 0.2, 3.0])
            self.balance.busy(past.server, seconds)
            past.refusals.append((self.clock(), BUSY_SECONDS if seconds is None else seconds))

    def fail(self) -> None:
        if self.ready():
            past = self.random.choice(self.ready())
            self.balance.leave(past.server, "it has ended")
            past.left.append(self.clock())
            past.is_ready = False

    def change_addresses(self) -> None:
        kept = self.random.sample(ADDRESSES, self.random.randint(1, len(ADDRESSES)))
        gone = self.balance.set_addresses(kept)
        assert {server.address for server in gone} == {
            past.address for past in self.past if past.address not in kept
        }
        self.removed += [past for past in self.past if past.address not in kept]
        known = {past.address: past for past in self.past}
        self.past = [
            known.get(server.address) or Past(server.address, server)
            for server in self.balance.all()
        ]

    def compare_states(self) -> None:
        now = self.clock()
        for past, state in zip(self.past, self.balance.states(), strict=True):
            assert state.address == past.address
            assert (state.requests, state.bytes) == (len(past.requests), sum(past.requests))
            if past.is_ready:
                assert state.state == ("busy" if past.is_busy(now) else "ready")
            else:
                assert state.state == ("out" if past.left else "unknown")
        assert self.balance.num_checked == sum(past.running is not None for past in self.past)


@pytest.mark.parametrize("seed", range(100))
def test_every_choice_follows_from_the_events_before_it(seed):
    Schedule(seed).run()
