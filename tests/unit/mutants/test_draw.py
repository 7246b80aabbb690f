"""Tests the generator of bugs and what chooses the tests that can see one, on small projects."""

import json
import os
import pathlib
import random
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "tests" / "mutants"), str(ROOT / "build" / "site-mutants")]

import covering_tests
import draw
import run
from bugs import RULES, Bug, bugs_of

CPP = [
    ("compare", "bool F(int a) { return a < 1; }", "a <= 1"),
    ("compare", "bool F(int a) { return a == 1; }", "a != 1"),
    ("logic", "bool F(bool a, bool b) { return a && b; }", "a || b"),
    ("arithmetic", "int F(int a, int b) { a += b; return a; }", "a = b"),
    ("constant", "int F() { return 8; }", "return 9"),
    ("constant", "bool F() { return true; }", "return false"),
    ("jump", "void F() { for (;;) break; }", "for (;;) continue"),
    ("negate", "int F(bool a) { if (a) return 1; return 2; }", "if (!(a))"),
    ("extreme", "int F(int a, int b) { return std::max(a, b); }", "return b"),
    ("extreme", "int F(int a, int b) { return std::max(a, b); }", "std::min(a, b)"),
    ("statement", "void F() { wake.Notify(); }", "{ ; }"),
    ("statement", "void F() { busy_ = false; }", "{ ; }"),
    ("guard", "int F(bool a) { if (a) return 1; return 2; }", "{ ; return 2; }"),
    ("return", "void F() { Close(); }", "{ if (true) return; Close(); }"),
    ("arguments", "void F(int a, int b) { G(a, b); }", "G(b, a)"),
    ("first", "int F(int* a, int i) { return a[i]; }", "a[0]"),
]
PYTHON = [
    ("compare", "f = a is not None", "a is None"),
    ("compare", "f = a in b", "a not in b"),
    ("logic", "f = a or b", "a and b"),
    ("arithmetic", "a -= b", "a = b"),
    ("constant", "f = 8", "f = 7"),
    ("constant", "f = True", "f = False"),
    ("jump", "for a in b:\n    continue", "    break"),
    ("negate", "if a:\n    b()\nelse:\n    c()", "if not (a):"),
    ("extreme", "f = min(a, b)", "f = a"),
    ("extreme", "f = min(a, b)", "max(a, b)"),
    ("statement", "a.close()", "pass"),
    ("statement", "a.b = 1", "pass"),
    ("guard", "if a:\n    raise E()", "pass"),
    ("return", "def f():\n    a()\n    b()", "    return\n    b()"),
    ("arguments", "f(a, b.c)", "f(b.c, a)"),
    ("first", "f = a[i]", "a[0]"),
]


@pytest.mark.parametrize(("kind", "code", "expected"), CPP)
def test_bugs_of_each_kind_are_drawn_from_cpp(kind, code, expected):
    changed = [
        bug.apply(code.encode()).decode()
        for bug in bugs_of("f.cc", code.encode())
        if bug.kind == kind
    ]
    assert any(expected in text for text in changed), changed


@pytest.mark.parametrize(("kind", "code", "expected"), PYTHON)
def test_bugs_of_each_kind_are_drawn_from_python(kind, code, expected):
    changed = [
        bug.apply(code.encode()).decode()
        for bug in bugs_of("f.py", code.encode())
        if bug.kind == kind
    ]
    assert any(expected in text for text in changed), changed


def test_each_kind_has_an_example_in_both_languages():
    assert {kind for kind, *_ in CPP} == {kind for kind, *_ in PYTHON} == set(RULES)


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("f.cc", "log.LogInfo(a);"),
        ("f.cc", "static_assert(sizeof(int) == 4);"),
        ("f.cc", '#include "a.h"'),
        ("f.cc", "std::array<int, 4> a;"),
        ("f.cc", "void F(int a = 3);"),
        ("f.cc", "#if A && B > 1\nint a;\n#endif"),
        ("f.py", "old = sys.version_info < (3, 11)"),
        ("f.py", "Rows = Sequence[int] | Mapping[Name, Any]"),
    ],
)
def test_lines_that_do_nothing_to_a_user_have_no_bugs(file, code):
    assert not [bug for bug in bugs_of(file, code.encode()) if bug.kind != "arguments"]


def test_every_bug_of_python_can_be_compiled():
    for name in (
        "client/python/logprobd/balance.py",
        "client/adapters/logprobd_adapters/batcher.py",
    ):
        source = (ROOT / name).read_bytes()
        for bug in bugs_of(name, source):
            compile(bug.apply(source), name, "exec")


def some_bug(kind: str, line: int) -> Bug:
    return Bug("f.cc", line, kind, 0, 1, "<", "<=", "a < b")


def test_kinds_take_turns_and_each_bug_comes_once():
    bugs = [some_bug("constant", line) for line in range(50)] + [
        some_bug("jump", line) for line in range(2)
    ]
    drawn = list(draw.in_turns(bugs, random.Random(1)))
    assert sorted(drawn, key=bugs.index) == bugs
    assert (
        {bug.kind for bug in drawn[:2]} == {bug.kind for bug in drawn[2:4]} == {"constant", "jump"}
    )


def test_a_seed_draws_the_same_bugs_again():
    bugs = [some_bug("constant", line) for line in range(50)]
    first, again, other = (
        list(draw.in_turns(bugs, random.Random(seed)))
        for seed in ("1 server", "1 server", "2 server")
    )
    assert first == again != other


def test_each_equivalent_is_one_bug_that_can_be_drawn():
    equivalents = draw.equivalents()
    assert len(set(equivalents)) == len(equivalents)
    for key in equivalents:
        found = [draw.key_of_bug(bug) for bug in bugs_of(key[0], (ROOT / key[0]).read_bytes())]
        assert found.count(key) == 1, key


def test_bugs_of_equal_lines_and_texts_are_told_apart():
    code = b"int F() { return a[i] +\n  b[i] + c[i]; }\nint G() { return\n  b[i] + c[i]; }"
    first = [bug for bug in bugs_of("f.cc", code) if bug.kind == "first"]
    assert sorted((bug.line, bug.place) for bug in first) == [
        (1, "1 of 1"),
        (2, "1 of 4"),
        (2, "2 of 4"),
        (4, "3 of 4"),
        (4, "4 of 4"),
    ]


def test_survivors_are_found_again_where_their_lines_have_moved_to(tmp_path):
    (caught, survived) = (b for b in bugs_of("f.cc", b"int F() { return 1; }") if b.old == "1")
    outcomes = [draw.Outcome(caught, "Test.Of", 1), draw.Outcome(survived, "", 1)]
    result = tmp_path / "result.json"
    result.write_text(json.dumps({"bugs": [outcome.as_json() for outcome in outcomes]}))

    moved = bugs_of("f.cc", b"\n\nint F() { return 1; }")

    again = [bug for bug in moved if draw.key_of_bug(bug) in draw.survivors_of([result])]
    assert [(bug.line, bug.new) for bug in again] == [(3, survived.new)]


def test_a_result_that_does_not_name_its_survivors_is_refused(tmp_path):
    result = tmp_path / "result.json"
    for text in ('{"seed": 1}', '{"bugs": [{"file": "f.cc", "old": "1", "new": "2"}]}'):
        result.write_text(text)
        with pytest.raises(run.BadList, match="without"):
            draw.survivors_of([result])


def test_the_committed_draws_name_their_survivors():
    results = json.loads(draw.DRAWS.read_text())
    survivors = draw.survivors_of([draw.DRAWS])
    assert 0 < len(survivors) <= sum(len(result["survivors"]) for result in results)
    for result in results:
        tried = sum(folder["tried"] for folder in result["folders"].values())
        caught = sum(folder["caught"] for folder in result["folders"].values())
        assert tried - caught == len(result["survivors"]), result["commit"]


def test_changed_lines_are_those_of_the_work_tree(tmp_path, monkeypatch):
    file = tmp_path / "server" / "a.cc"
    file.parent.mkdir()
    file.write_text("one\ntwo\nthree\n")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "a"]):
        subprocess.run([*git, *command], check=True)
    file.write_text("one\nTWO\nthree\nfour\nfive\n")
    monkeypatch.setattr(draw, "ROOT", tmp_path)
    monkeypatch.setattr(draw, "FOLDERS", ("server",))
    assert draw.changed_lines("HEAD") == {"server/a.cc": {2, 4, 5}}


MODULE = "def limited(rows, most):\n    if rows > most:\n        raise ValueError(rows)\n    return rows\n"


class PythonProject:
    """A package with a test, and a tree in which bugs are tried."""

    def __init__(self, root: pathlib.Path, monkeypatch: pytest.MonkeyPatch, tests: str) -> None:
        package = root / "client" / "python" / "logprobd"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "limits.py").write_text(MODULE)
        (root / "tests").mkdir()
        (root / "tests" / "pytest.ini").write_text("[pytest]\ntimeout = 60\n")
        (root / "tests" / "test_limits.py").write_text(tests)
        environment = root / "build" / "venv" / "bin"
        environment.mkdir(parents=True)
        (environment / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        (environment / "python").chmod(0o755)
        (root / "build" / "site-mutants").symlink_to(
            os.path.realpath(ROOT / "build" / "site-mutants")
        )
        suite = covering_tests.Suite("venv", ("tests/test_*.py",))
        monkeypatch.setattr(covering_tests, "PYTHON_TESTS", {"client/python/logprobd": suite})
        self._tree = run.Tree(root, 1)
        self._tests = covering_tests.PythonTests(root, root / "build" / "mutants")
        self._tests.measure(self._tree, "client/python/logprobd")

    def first_failed(self, old: str, new: str) -> str | None:
        file = "client/python/logprobd/limits.py"
        begin = MODULE.index(old)
        bug = Bug(
            file, MODULE[:begin].count("\n") + 1, "compare", begin, begin + len(old), old, new, ""
        )
        assert self._tests.can_see(bug)
        return self._tests.first_failed(self._tree, bug, 60)


TESTS = """
import pytest
from logprobd.limits import limited

@pytest.mark.parametrize("rows", [1, 2])
def test_rows_within_the_limit_pass(rows):
    assert limited(rows, 2) == rows

def test_rows_above_the_limit_are_refused():
    with pytest.raises(ValueError):
        limited(4, 2)
"""


def test_a_bug_of_python_is_caught_by_the_tests_that_run_its_line(tmp_path, monkeypatch):
    project = PythonProject(tmp_path, monkeypatch, TESTS)
    assert (
        project.first_failed("> most", ">= most")
        == "tests/test_limits.py::test_rows_within_the_limit_pass[2]"
    )
    assert project.first_failed("raise ValueError(rows)", "pass").endswith(
        "above_the_limit_are_refused"
    )


def test_code_that_only_another_process_runs_has_the_tests_of_its_name(tmp_path, monkeypatch):
    tests = """
import subprocess, sys

def test_rows_above_the_limit_end_the_program():
    code = "from logprobd.limits import limited; limited(4, 2)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 1
"""
    project = PythonProject(tmp_path, monkeypatch, tests)
    assert project.first_failed("raise ValueError(rows)", "pass").endswith("end_the_program")


def test_a_bug_of_python_that_no_test_notices_survives_and_is_taken_out(tmp_path, monkeypatch):
    project = PythonProject(tmp_path, monkeypatch, TESTS)
    assert project.first_failed("> most", "> most + 1") == ""
    assert (tmp_path / "client/python/logprobd/limits.py").read_text() == MODULE


def test_tests_of_python_that_fail_without_a_bug_are_an_error(tmp_path, monkeypatch):
    with pytest.raises(run.BadList, match="fail without a bug"):
        PythonProject(
            tmp_path, monkeypatch, TESTS + "\n\ndef test_more():\n    assert limited(1, 0) == 1\n"
        )


PRESETS = """{
  "version": 6,
  "configurePresets": [{"name": "release", "generator": "Ninja", "binaryDir": "${sourceDir}/build/release"}]
}
"""
CMAKE = """
cmake_minimum_required(VERSION 3.25)
project(limits LANGUAGES CXX)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests)
add_library(limits STATIC server/base/limits.cc)
target_include_directories(limits PUBLIC .)
add_subdirectory(tests/unit/server/base)
add_subdirectory(tests/unit/server/app)
"""
HEADER = "bool IsWithin(int rows, int most);\n"
SOURCE = '#include "server/base/limits.h"\nbool IsWithin(int rows, int most) {\n  return rows <= most;\n}\n'
PROGRAM = """
#include <cstdio>
#include "server/base/limits.h"
int main() {
  if (IsWithin(3, 2)) { std::puts("[  FAILED  ] Limits.Above"); return 1; }
  return 0;
}
"""


class CppProject:
    """A library with a test program in the mirrored folder and one in another."""

    def __init__(self, root: pathlib.Path) -> None:
        texts = {"CMakePresets.json": PRESETS, "CMakeLists.txt": CMAKE}
        texts |= {"server/base/limits.h": HEADER, "server/base/limits.cc": SOURCE}
        for folder, name in (("base", "limits_test"), ("app", "other_test")):
            tests = f"tests/unit/server/{folder}"
            texts[f"{tests}/{name}.cc"] = PROGRAM
            texts[f"{tests}/CMakeLists.txt"] = (
                f"add_executable({name} {name}.cc)\ntarget_link_libraries({name} limits)\n"
            )
        for name, text in texts.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        self._tree = run.Tree(root, 1)
        self._tree.configure()
        self.tests = covering_tests.CppTests(root)
        self.tests.read_graph(self._tree, ["server/base/limits.cc", "server/base/limits.h"])

    def first_failed(self, old: str, new: str) -> str | None:
        begin = SOURCE.index(old)
        bug = Bug("server/base/limits.cc", 3, "compare", begin, begin + len(old), old, new, "")
        assert self.tests.can_see(bug)
        return self.tests.first_failed(self._tree, bug, 60)


def test_a_bug_of_cpp_is_tried_with_the_program_of_the_mirrored_folder(tmp_path):
    project = CppProject(tmp_path)
    assert project.first_failed("<=", ">=") == "Limits.Above"
    assert project.first_failed("<=", "<") == ""  # which no test notices
    assert project.first_failed("<=", "<=>=") is None  # which does not compile
    assert (tmp_path / "server/base/limits.cc").read_text() == SOURCE
    assert project.tests.programs("server/base/limits.cc") == ["limits_test"]
    assert project.tests.programs("server/base/limits.h") == ["limits_test"]
    assert project.tests.programs("server/main.cc") == []
