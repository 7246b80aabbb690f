"""Tests the list of mutants and the script that tries them, without building anything."""

import pathlib
import subprocess
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "mutants"))

import run

ROOT = run.ROOT
MUTANTS = run.read_list()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_each_mutant_changes_one_place_of_its_file(mutant):
    assert mutant.apply(ROOT) != (ROOT / mutant.file).read_text()


def test_each_mutant_names_tests_that_exist():
    unit = ROOT / "tests" / "unit"
    programs = "\n".join(path.read_text() for path in unit.rglob("CMakeLists.txt"))
    for mutant in MUTANTS:
        for test in mutant.tests:
            assert (ROOT / test).is_file(), mutant.name
        for target in mutant.targets:
            # The tests of the transport are defined in a loop over their names.
            assert target in programs or target.removesuffix("_test") in programs, mutant.name


def test_the_list_is_long_enough_to_tell_ninety_percent():
    assert len(MUTANTS) >= 40


LISTED = """
[[mutant]]
name = "a"
file = "f.py"
old = "+ 1"
new = "+ 2"
tests = ["t.py"]
"""


def test_a_list_with_a_mutant_without_tests_or_twice_is_refused(tmp_path):
    path = tmp_path / "mutants.toml"

    path.write_text(LISTED)
    assert [mutant.tests for mutant in run.read_list(path)] == [("t.py",)]
    path.write_text(LISTED.replace("tests =", "targets ="))
    assert [mutant.targets for mutant in run.read_list(path)] == [("t.py",)]
    path.write_text(LISTED.replace('["t.py"]', "[]"))
    with pytest.raises(run.BadList, match="a: it names neither targets nor tests"):
        run.read_list(path)
    path.write_text(LISTED + LISTED)
    with pytest.raises(run.BadList, match="twice: a"):
        run.read_list(path)


class FakeProject:
    """A tree with one file and one test of it, run by pytest."""

    def __init__(self, path, test):
        self.path = path
        (path / "value.py").write_text("VALUE = 1 + 1\n")
        (path / "test_value.py").write_text(f"from value import VALUE\n\n\n{test}\n")

    def run(self, **changes):
        fields = {"name": "a", "file": "value.py", "old": "+ 1", "new": "+ 2"} | changes
        mutant = run.Mutant(**fields, tests=("test_value.py",))
        return run.run(run.Tree(self.path, jobs=1), [mutant])


def test_a_bug_that_a_test_notices_is_caught_and_taken_out_again(tmp_path, capsys):
    project = FakeProject(tmp_path, "def test_value():\n    assert VALUE == 2")

    assert project.run() == 0

    assert "| a | `test_value.py::test_value` |" in capsys.readouterr().out
    assert (tmp_path / "value.py").read_text() == "VALUE = 1 + 1\n"


def test_a_bug_that_no_test_notices_survives(tmp_path, capsys):
    project = FakeProject(tmp_path, "def test_value():\n    assert VALUE >= 2")

    assert project.run() == 1

    assert "| a | **survived** |" in capsys.readouterr().out


def test_a_bug_that_makes_a_test_hang_is_caught(tmp_path, capsys, monkeypatch):
    run_command = run.Tree.run

    def hang_with_bug(tree, command, seconds):
        if "+ 2" in (tree.path / "value.py").read_text():
            raise subprocess.TimeoutExpired(command, seconds)
        return run_command(tree, command, seconds)

    monkeypatch.setattr(run.Tree, "run", hang_with_bug)
    project = FakeProject(tmp_path, "def test_value():\n    assert VALUE == 2")

    assert project.run() == 0

    assert "no end within 90 s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"old": "+ 3"}, "a: its text occurs 0 times in value.py"),
        ({"new": "+"}, "a: pytest failed"),
    ],
)
def test_a_mutant_that_cannot_be_tried_is_an_error(tmp_path, changes, message):
    project = FakeProject(tmp_path, "def test_value():\n    assert VALUE == 2")

    with pytest.raises(run.BadList, match=message):
        project.run(**changes)

    assert (tmp_path / "value.py").read_text() == "VALUE = 1 + 1\n"


def test_a_test_that_fails_without_a_bug_is_an_error(tmp_path):
    project = FakeProject(tmp_path, "def test_value():\n    assert VALUE == 3")

    with pytest.raises(run.BadList, match="fails without a bug: test_value.py::test_value"):
        project.run()


@pytest.mark.parametrize(
    ("output", "name"),
    [
        ("[  FAILED  ] RowQueueTest.Takes (3 ms)\n", "RowQueueTest.Takes"),
        ("[  FAILED  ] Cases/T.Is/Plain, where GetParam() = Plain (0 ms)\n", "Cases/T.Is/Plain"),
        ("FAILED tests/t.py::test_a - assert 1 == 2\n", "tests/t.py::test_a"),
        ("[ RUN      ] T.A\n[       OK ] T.A (0 ms)\n[ RUN      ] T.B\nabort\n", "T.B"),
        ("[ RUN      ] T.A\n[==========] 1 test from 1 test suite ran. (0 ms total)\n", ""),
    ],
)
def test_the_first_failed_test_is_named(output, name):
    assert run.first_failure(output) == name
