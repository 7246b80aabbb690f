"""The examples of the package's documents run."""

import re
from pathlib import Path

import pytest
from logprobd.testing import FakeServer

DOCUMENTS = sorted((Path(__file__).resolve().parents[4] / "client" / "python").glob("*.md"))
EXAMPLES = [
    example
    for document in DOCUMENTS
    for example in re.findall(r"```python\n(.*?)```", document.read_text(), re.DOTALL)
]


def test_the_documents_have_examples():
    assert len(EXAMPLES) == 7


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_example_runs(number, monkeypatch):
    with FakeServer(vocab_size=100, hidden_size=16) as server:
        monkeypatch.setenv("LOGPROBD_ADDRESS", server.address)

        exec(compile(EXAMPLES[number], f"example {number}", "exec"), {})
