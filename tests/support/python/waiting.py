"""Waits for what other threads and processes do."""

import time
from collections.abc import Callable


def becomes_true(condition: Callable[[], object], seconds: float = 20) -> bool:
    """Returns whether `condition()` becomes true within `seconds`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.01)
    return bool(condition())


def wait_until(condition: Callable[[], object], what: object = "", seconds: float = 20) -> None:
    """Waits until `condition()` is true; an error after `seconds` shows `what`, such as a log that grows."""
    assert becomes_true(condition, seconds), what or f"not true within {seconds:g} s"
