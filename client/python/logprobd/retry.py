"""Decides when to send a request again, and reports that a call waits.

Scoring has no side effects, so it is safe to retry after overload and lost connections.
"""

from __future__ import annotations

import logging
import random
from dataclasses import dataclass

from logprobd import _policy
from logprobd.errors import LogprobdError, Overloaded, Unavailable, is_placement_refusal


@dataclass(frozen=True)
class RetryPolicy:
    """Exponential backoff with full jitter, within the call's deadline.

    A server's hint (`grpc-retry-pushback-ms`) is the minimum wait. The random backoff is added to
    it, so that clients that were refused together do not retry together. A negative hint forbids a
    retry.
    """

    attempts_max: int = _policy.ATTEMPTS_MAX
    """Maximum number of attempts while the server is unavailable, >= 1; 1 means no retries. With
    the defaults, a call to a server that is down fails after about 6 s."""
    overloaded_attempts_max: int = _policy.OVERLOADED_ATTEMPTS_MAX
    """Maximum number of attempts while the server is overloaded, >= 1. The default retries until
    the deadline."""
    base_seconds: float = _policy.WAIT_FIRST_SECONDS
    """Upper bound of the first wait; it doubles with each attempt."""
    cap_seconds: float = _policy.WAIT_MAX_SECONDS
    """Upper bound of every wait."""

    def delay(
        self, error: LogprobdError, attempts: int, uniform: random.Random | None = None
    ) -> float | None:
        """Returns the seconds to wait after `attempts` failed attempts, or None to give up."""
        if is_placement_refusal(error):
            return None
        if isinstance(error, Overloaded):
            most = self.overloaded_attempts_max
        elif isinstance(error, Unavailable):
            most = self.attempts_max
        else:
            return None
        if attempts >= most:
            return None
        draw = (uniform or _RANDOM).uniform
        hint = error.retry_after or 0.0
        if hint < 0:
            return None
        bound = min(self.cap_seconds, self.base_seconds * 2 ** min(attempts - 1, 30))
        return hint + draw(0.0, bound)


# This is the operating system's generator, because a seeded one would make forked workers wait
# equally long.
_RANDOM = random.SystemRandom()

NOTICE_SECONDS = _policy.NOTICE_SECONDS
NOTICE_REPEAT_SECONDS = 10.0
"""Seconds between two such warnings of a call."""

_LOG = logging.getLogger("logprobd")


class RetryNotice:
    """Reports the retries of one call, as warnings to the logger "logprobd" and in the error."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._due = 0.0

    def waits(self, reason: object, delay: float, now: float) -> None:
        """Records that the call tries again after `delay` seconds. Logs a warning if one is due."""
        if self._began is None:
            self._began, self._due = now, now + NOTICE_SECONDS
        if now + delay >= self._due:
            self._due = now + delay + NOTICE_REPEAT_SECONDS
            _LOG.warning(
                "no answer for %.1f s, next attempt in %.1f s: %s", now - self._began, delay, reason
            )

    def answered(self) -> None:
        """Records an answer, so that the time without an answer starts again."""
        self._began = None

    def gave_up(self, error: LogprobdError, attempts: int, now: float) -> LogprobdError:
        """Adds the number of attempts and their time to the final error, if there were several."""
        if isinstance(error, (Overloaded, Unavailable)) and self._began is not None:
            seconds = now - self._began
            error.args = (f"{error} (gave up after {attempts} attempts in {seconds:.1f} s)",)
        return error


class Window:
    """Number of chunks that may be in flight. A refusal halves it, and successes increase it."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._size = float(most)

    @property
    def size(self) -> int:
        return int(self._size)

    def limit(self, most: int) -> None:
        """Sets the maximum size. A window that refusals have reduced does not grow at once."""
        self._most = most
        self._size = min(float(most), self._size)

    def succeeded(self) -> None:
        self._size = min(float(self._most), self._size + 1 / self._size)

    def refused(self) -> None:
        self._size = max(1.0, self._size / 2)
