"""Runs the code in the README of client/adapters."""

import pathlib
import re
from typing import Any

README = pathlib.Path(__file__).parents[2] / "client" / "adapters" / "README.md"


def run_example(heading: str) -> dict[str, Any]:
    """Runs the one block of Python below a heading, such as "## Scorers", and returns what it defines."""
    section = re.split(
        r"^##+ ", README.read_text().partition(f"\n{heading}\n")[2], flags=re.MULTILINE
    )[0]
    (example,) = re.findall(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {"__name__": heading}
    exec(compile(example, heading, "exec"), names)
    return names
