"""A limit on the time of a section of a run, so that one that hangs does not cost the others."""

import contextlib
import signal
from collections.abc import Iterator

GRACE_S = 30  # for judging and cleaning up after the limit


class OutOfTime(Exception):
    """The time of what is being done is over."""


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raises OutOfTime in the main thread, which must be this one, once `seconds` have passed."""

    def interrupt(*_: object) -> None:
        # Once more later: whoever keeps what was measured so far must come to an end too.
        signal.setitimer(signal.ITIMER_REAL, GRACE_S)
        raise OutOfTime(f"not done in {seconds:.0f} s")

    handler = signal.signal(signal.SIGALRM, interrupt)
    timer = signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *timer)
