"""A file of tests that is skipped as a whole, and so counts as skipped instead of being left out without a word."""

import pathlib

import pytest


class SkippedModule(pytest.Module):
    """The hook pytest_pycollect_makemodule returns it for a file whose imports would fail."""

    reason: str

    @classmethod
    def of(cls, parent: pytest.Collector, path: pathlib.Path, reason: str) -> "SkippedModule":
        module = cls.from_parent(parent, path=path)
        module.reason = reason
        return module

    def collect(self) -> list[pytest.Item]:
        pytest.skip(f"{self.path.name} {self.reason}")
