"""Compares the policy of both clients with the table that describes it."""

import pkgutil
import re
from importlib import import_module
from pathlib import Path

import logprobd
import pytest

CLIENT = Path(__file__).resolve().parents[4] / "client"
ROW = re.compile(r"^\| .* \| ([\d.]+)(?: s)? \| `([A-Z_]+)` \|$", re.MULTILINE)
# A constant of policy.h: its name, the unit of a duration, and its value.
CONSTANT = re.compile(r"constexpr \S+ k(\w+) = (?:absl::(\w+)\()?(\d+)\)?;")
UNITS = {"": 1.0, "Milliseconds": 0.001}


@pytest.fixture(autouse=True)
def patient_first_look():
    """Replaces the fixture of conftest.py, which changes a value of the policy."""


def table() -> dict[str, float]:
    text = (CLIENT / "README.md").read_text()
    return {name: float(value) for value, name in ROW.findall(text)}


def cpp_constants() -> dict[str, float]:
    text = (CLIENT / "cpp" / "policy.h").read_text()
    found = CONSTANT.findall(text)
    assert len(found) == text.count("constexpr")
    return {name: float(value) * UNITS[unit] for name, unit, value in found}


def cpp_name(name: str) -> str:
    return "".join(word.capitalize() for word in name.removesuffix("_SECONDS").split("_"))


def python_values(name: str) -> set[float]:
    """Returns the values of a constant in all modules of the package that have it."""
    names = [module.name for module in pkgutil.iter_modules(logprobd.__path__)]
    text = {name: (CLIENT / "python" / "logprobd" / f"{name}.py").read_text() for name in names}
    defining = [module for module in names if re.search(rf"^{name}\b", text[module], re.MULTILINE)]
    return {getattr(import_module(f"logprobd.{module}"), name) for module in defining}


@pytest.mark.parametrize("name", table())
def test_both_clients_have_the_values_of_the_table(name):
    value = table()[name]

    assert cpp_constants()[cpp_name(name)] == pytest.approx(value)
    assert python_values(name) == {value}


def test_the_table_has_all_constants_of_the_cpp_client():
    assert {cpp_name(name) for name in table()} == set(cpp_constants())


def test_a_retry_policy_follows_the_table():
    policy = logprobd.RetryPolicy()

    assert policy.attempts_max == table()["ATTEMPTS_MAX"]
    assert policy.overloaded_attempts_max == table()["OVERLOADED_ATTEMPTS_MAX"]
    assert policy.base_seconds == table()["WAIT_FIRST_SECONDS"]
    assert policy.cap_seconds == table()["WAIT_MAX_SECONDS"]
