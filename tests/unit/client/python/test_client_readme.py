"""The examples of the package's README run."""

import re
from pathlib import Path

import pytest
from logprobd.testing import FakeServer

README = Path(__file__).resolve().parents[4] / "client" / "python" / "README.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def test_the_readme_has_examples():
    assert len(EXAMPLES) == 6


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_example_runs(number, monkeypatch):
    with FakeServer(vocab_size=100, hidden_size=16) as server:
        monkeypatch.setenv("LOGPROBD_ADDRESS", server.address)

        exec(compile(EXAMPLES[number], f"README.md example {number}", "exec"), {})
