"""Runs the code in the documents of client/adapters."""

import pathlib
import re
from collections.abc import Mapping
from typing import Any

ADAPTERS = pathlib.Path(__file__).parents[2] / "client" / "adapters"


def run_example(
    document: str, heading: str = "", replaced: Mapping[str, str] = {}, **names: Any
) -> dict[str, Any]:
    """Runs the one block of Python in a section of a document, and returns what it defines.

    Args:
        document: path in client/adapters, such as "docs/RAY.md".
        heading: text of the section's heading; "" is the part before the first section.
        replaced: texts of the block, such as addresses, and what a test has in their place.
        names: what the text before the block says that the reader has.
    """
    top, *sections = re.split(r"^## ", (ADAPTERS / document).read_text(), flags=re.MULTILINE)
    (section,) = (s for s in sections if s.startswith(f"{heading}\n")) if heading else (top,)
    (example,) = re.findall(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    for text, other in replaced.items():
        assert text in example, text
        example = example.replace(text, other)
    names["__name__"] = document
    exec(compile(example, document, "exec"), names)
    return names
