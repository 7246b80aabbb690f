"""Waits for what the threads of fake servers notice late."""

import threading


def wait_until(condition):
    """Waits until `condition` is true, at most 10 s."""
    for _ in range(1000):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("the condition did not become true within 10 s")
