"""The log of logprobd-gateway.

No request waits for whoever reads it, and no text of a caller breaks its lines.
"""

import collections
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Iterator

from logprobd_adapters.quoting import one_line

TEXT_MAX = 4096  # characters of a message that a line has
QUEUE_LINES_MAX = 1000
_EXIT_SECONDS = 1.0  # time for the last lines when the process ends


class _Formatter(logging.Formatter):
    """Makes one line of a message, and indented lines of a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        record.message = one_line(record.getMessage(), TEXT_MAX)
        line = f"{self.formatTime(record)} {record.levelname} {record.message}"
        if record.exc_info:
            trace = self.formatException(record.exc_info).split("\n")
            line += "".join(f"\n    {one_line(each, TEXT_MAX)}" for each in trace)
        return line + "\n"


class _QueueHandler(logging.Handler):
    """Hands lines to a thread that writes them to a descriptor, and loses those above its limit.

    The library's handlers would write here, or wait at exit for a lock that a blocked write holds.
    """

    def __init__(self, fd: int) -> None:
        super().__init__()
        self.setFormatter(_Formatter())
        self._fd = fd
        self._lines: collections.deque[str] = collections.deque()
        self._news = threading.Condition()
        self._is_closed = False
        self._num_lost = 0
        self._thread = threading.Thread(target=self._write_lines, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception as error:  # for example, a message does not fit its format
            line = f"a line could not be formatted: {type(error).__name__}\n"
        with self._news:
            if len(self._lines) >= QUEUE_LINES_MAX:
                self._num_lost += 1
                return
            self._lines.append(line)
            self._news.notify()

    def finish(self) -> None:
        """Waits a bounded time until all lines are written."""
        with self._news:
            self._is_closed = True
            self._news.notify()
        self._thread.join(_EXIT_SECONDS)
        with self._news:
            self._lines.clear()

    def _take(self) -> str | None:
        with self._news:
            self._news.wait_for(lambda: self._lines or self._num_lost or self._is_closed)
            if self._lines:
                return self._lines.popleft()
            lost, self._num_lost = self._num_lost, 0
        return f"{lost} lines of the log were lost\n" if lost else None

    def _write_lines(self) -> None:
        while (line := self._take()) is not None:
            data = line.encode(errors="backslashreplace")
            with contextlib.suppress(OSError):  # for example, the disk is full
                while data:
                    data = data[os.write(self._fd, data) :]


@contextlib.contextmanager
def log_thread(fd: int | None = None) -> Iterator[None]:
    """Writes the lines of all loggers to `fd`, or to standard error, from a thread of its own."""
    handler = _QueueHandler(sys.stderr.fileno() if fd is None else fd)
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        handler.finish()
