"""Callers' texts in answers and in the log: how much of them is shown, and in what form.

Whatever a caller sends, an answer repeats at most QUOTE_MAX characters of it and has a message of
at most MESSAGE_MAX. Otherwise an answer that is not read would keep a body in memory, several times
as long where characters are escaped.
"""

from __future__ import annotations

import itertools
import reprlib
from typing import Any

QUOTE_MAX = 100
"""Most characters that `quote` returns."""

MESSAGE_MAX = 1024
"""Most characters of the message of an answer, as of the server's errors."""


class _Quoting(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 2  # Items of items are as many as the limits below to the power of levels.
        self.maxstring = QUOTE_MAX - 30

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        """Shows the first items, since the base sorts all keys, of which there may be a million."""
        return super().repr_dict(dict(itertools.islice(x.items(), self.maxdict + 1)), level)


_QUOTING = _Quoting()


def quote(value: Any) -> str:
    """Returns a value of a caller's as a message shows it, without a copy of the value."""
    text = _QUOTING.repr(value)
    return text if len(text) <= QUOTE_MAX else text[: QUOTE_MAX - 3] + "..."


def one_line(text: str, length_max: int = MESSAGE_MAX) -> str:
    """Returns a text of at most `length_max` characters, which can all be printed: line ends,
    control characters and lone surrogates are escaped."""
    text = text[: length_max + 1]
    if not text.isprintable():
        text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    return text if len(text) <= length_max else text[: length_max - 3] + "..."
