"""Runs the code in the README of client/adapters."""

import pathlib
import re
from collections.abc import Mapping
from typing import Any

README = pathlib.Path(__file__).parents[2] / "client" / "adapters" / "README.md"


def run_example(
    heading: str, replaced: Mapping[str, str] = {}, containing: str = "", **names: Any
) -> dict[str, Any]:
    """Runs the one block of Python below a heading, such as "## Scorers", and returns what it defines.

    Args:
        replaced: texts of the block, such as addresses, and what a test has in their place.
        containing: selects the blocks with this text, where there are several.
        names: what the text before the block says that the reader has.
    """
    section = re.split(
        r"^##+ ", README.read_text().partition(f"\n{heading}\n")[2], flags=re.MULTILINE
    )[0]
    blocks = re.findall(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    (example,) = (block for block in blocks if containing in block)
    for text, other in replaced.items():
        assert text in example, text
        example = example.replace(text, other)
    names["__name__"] = heading
    exec(compile(example, heading, "exec"), names)
    return names
