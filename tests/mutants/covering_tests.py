"""Finds and runs the unit tests that can see a bug: for Python by the lines that each test runs, for
C++ by the build's graph and the folders, which tests mirror."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import os
import pathlib
import re
import subprocess
import sys
import threading
import time

import run
from bugs import Bug


@dataclasses.dataclass(frozen=True)
class Suite:
    """The tests of a Python package."""

    environment: str
    """Folder in build."""
    tests: tuple[str, ...]
    elsewhere: tuple[str, ...] = ()
    """Files of the package that these tests import, but whose own tests need another environment."""


PYTHON_TESTS = {
    "client/python/logprobd": Suite("venv-tests", ("tests/unit/client/python",)),
    # Those that need no framework but the gateway's.
    "client/adapters/logprobd_adapters": Suite(
        "venv-adapters-gateway",
        (
            "tests/adapters/test_gateway*.py",
            "tests/adapters/test_head_check.py",
            "tests/adapters/test_loglikelihood.py",
            "tests/adapters/test_push_head.py",
            "tests/adapters/test_scorer.py",
        ),
        elsewhere=("trl.py",),
    ),
}
MEASURE_SECONDS = 1_800.0
TEST_SECONDS = 60.0
"""A Python test that takes longer does not end."""
COMPILED_MAX = 12
"""A header that more files include is not drawn from: each bug would compile for minutes."""
INSTRUCTIONS = {"avx512_bf16": "avx512_bf16", "avx512": "avx512f", "amx": "amx_bf16"}
"""By a part of a file's name, the flag of the processors that can run it."""


class PythonTests:
    """Runs pytest over the tests that run a line."""

    def __init__(self, root: pathlib.Path, tree: pathlib.Path) -> None:
        self._root = root
        self._folder = tree.with_name("mutants-coverage")
        self._pythons: dict[str, pathlib.Path] = {}
        """By package, its interpreter."""
        self._tests: dict[str, dict[int, set[str]]] = {}
        """By file and line, the tests that run it."""
        self._files: dict[str, list[str]] = {}
        """By package, its files of tests."""

    def measure(self, tree: run.Tree, package: str) -> None:
        """Runs the tests of a package once, or reads what the last run on the same code found. Without
        their environment the package is left out. Raises BadList if a test fails."""
        python = self._root / "build" / PYTHON_TESTS[package].environment / "bin" / "python"
        if not python.exists():
            print(f"{package} is left out: no {python} (bash .ci/run-adapters)", file=sys.stderr)
            return
        self._pythons[package] = python
        self._files[package] = files = [
            str(path.relative_to(self._root))
            for pattern in PYTHON_TESTS[package].tests
            for path in sorted(self._root.glob(pattern))
        ]
        self._folder.mkdir(parents=True, exist_ok=True)
        name = package.replace("/", "-")
        database, noted, key = self._folder / name, self._folder / f"{name}.key", self._key()
        if not noted.is_file() or noted.read_text() != key:
            database.unlink(missing_ok=True)
            options = [f"--cov={package}", "--cov-context=test", "--cov-report="]
            ended = self._pytest(package, tree, files, MEASURE_SECONDS, *options, database=database)
            if ended is None or ended.returncode:
                output = ended.stdout if ended else "it took too long"
                raise run.BadList(f"the tests of {package} fail without a bug\n{output[-3000:]}")
            noted.write_text(key)
        self._read(database, tree.path)

    def can_see(self, bug: Bug) -> bool:
        package = next((name for name in self._pythons if bug.file.startswith(name)), None)
        if package is None or bug.file.endswith(PYTHON_TESTS[package].elsewhere):
            return False
        return bug.file in self._tests or bool(self._of_name(bug))

    def first_failed(self, tree: run.Tree, bug: Bug, seconds: float) -> str | None:
        """Returns the first test that fails with the bug, "" if none does."""
        file = tree.path / bug.file
        source = file.read_bytes()
        file.write_bytes(bug.apply(source))
        package = self._package_of(bug)
        tests = self._covering(bug)
        try:
            ended = self._pytest(package, tree, tests, seconds)
            if ended is not None and "ERROR: not found: " in ended.stdout:
                # A test has another name, as names are made from values of the code.
                files = list(dict.fromkeys(test.split("::")[0] for test in tests))
                ended = self._pytest(package, tree, files, seconds)
        finally:
            file.write_bytes(source)
        if ended is None or not ended.returncode:
            return ""
        failed = run.first_failure(ended.stdout) or f"exit status {ended.returncode}"
        hung = re.search(r"from pytest-timeout|\+\+\+ Timeout \+\+\+", ended.stdout)
        return f"no end: {failed}" if hung else failed

    def _covering(self, bug: Bug) -> list[str]:
        """Returns the tests that run the line, and then the files of tests whose name says that they are
        of this file, as some run it in a process of its own. A line that runs at import has the tests
        that run any line of the file."""
        lines = self._tests.get(bug.file, {})
        return sorted(lines.get(bug.line) or set().union(*lines.values())) + self._of_name(bug)

    def _of_name(self, bug: Bug) -> list[str]:
        stem = pathlib.PurePath(bug.file).stem.strip("_")
        subjects = {
            test: re.sub("^test_(client_)?", "", pathlib.PurePath(test).stem)
            for test in self._files[self._package_of(bug)]
        }
        own = [test for test, subject in subjects.items() if f"_{subject}".endswith(f"_{stem}")]
        return own or [test for test, subject in subjects.items() if subject.startswith(f"{stem}_")]

    def _package_of(self, bug: Bug) -> str:
        return next(name for name in self._pythons if bug.file.startswith(name))

    def _key(self) -> str:
        digest = hashlib.sha256()
        for folder in (
            "client/python",
            "client/adapters",
            "tests/unit/client",
            "tests/adapters",
            "tests/support",
        ):
            for path in sorted((self._root / folder).rglob("*.py")):
                digest.update(str(path).encode() + path.read_bytes())
        return digest.hexdigest()

    def _read(self, database: pathlib.Path, tree: pathlib.Path) -> None:
        import coverage

        data = coverage.CoverageData(str(database))
        data.read()
        for file in data.measured_files():
            # pytest names tests from the folder of its configuration.
            lines = {
                line: {f"tests/{name[:-4]}" for name in contexts if name.endswith("|run")}
                for line, contexts in data.contexts_by_lineno(file).items()
            }
            if any(lines.values()):
                self._tests[str(pathlib.Path(file).relative_to(tree))] = lines

    def _pytest(
        self,
        package: str,
        tree: run.Tree,
        tests: list[str],
        seconds: float,
        *options: str,
        database: pathlib.Path | None = None,
    ) -> subprocess.CompletedProcess[str] | None:
        """Returns None if the tests took longer than `seconds` in all."""
        listed = self._folder / f"tests-{tree.path.name}"
        listed.write_text("\n".join(tests))
        folders = [self._root / "build" / "site-mutants"]
        folders += [tree.path / "client" / name for name in ("adapters", "python")]
        environment = {
            "PYTHONPATH": os.pathsep.join(map(str, folders)),
            "COVERAGE_FILE": str(database or os.devnull),
            "TEST_BINARIES": str(self._root / "build" / "release" / "bin"),
        }
        command = [
            str(self._pythons[package]),
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
        ]
        command += ["-o", f"timeout={TEST_SECONDS}", "--tb=no", *options, f"@{listed}"]
        try:
            return tree.run(command, seconds, environment)
        except subprocess.TimeoutExpired:
            return None


def mirror_of(file: str) -> str:
    return "tests/unit/" + os.path.dirname(file)


def nearest(folder: str, folders: set[str]) -> str:
    """Returns the folder, or the nearest one above it, that is one of `folders`; "" if none is."""
    while folder and folder not in folders:
        folder = os.path.dirname(folder)
    return folder


class CppTests:
    """Builds and runs the test programs of the folder that mirrors a file's."""

    def __init__(self, tree: pathlib.Path) -> None:
        self._build = tree / "build" / "release"
        self._objects: dict[str, set[str]] = {}
        """By program, the objects in it, also those of libraries."""
        self._folders: dict[str, str] = {}
        """By program, the folder of its own objects."""
        self._users: dict[str, set[str]] = collections.defaultdict(set)
        """By source file or header, the objects that are compiled from it."""
        self._processor = set(pathlib.Path("/proc/cpuinfo").read_text().split())
        self._baseline: dict[tuple[pathlib.Path, str], float] = {}
        self._lock = threading.Lock()

    def read_graph(self, tree: run.Tree, files: list[str]) -> None:
        """Finds the programs for files, and builds them once, since only a build knows who includes a
        header. Raises BadList if they do not compile."""
        folders: dict[str, str] = {}
        for program in re.findall(
            r"^tests/(\w+_test): ", self._ninja("targets", "all"), re.MULTILINE
        ):
            inputs = self._ninja("inputs", f"tests/{program}").split("\n")
            own = re.compile(rf"(.+)/CMakeFiles/{program}\.dir/")
            folder = next((found[1] for name in inputs if (found := own.match(name))), "")
            if folder.startswith("tests/unit/"):
                folders[program] = folder
                self._objects[program] = {name for name in inputs if name.endswith(".o")}
        near = {nearest(mirror_of(file), set(folders.values())) for file in files}
        self._folders = {name: folder for name, folder in folders.items() if folder in near}
        if output := tree.build(tuple(self._folders)):
            raise run.BadList(f"the tree does not compile\n{output[-3000:]}")
        current = ""
        for line in self._ninja("deps").splitlines():
            if not line.startswith(" "):
                current = line.split(": #deps")[0]
            elif (name := os.path.normpath(self._build / line.strip())).startswith(str(tree.path)):
                self._users[os.path.relpath(name, tree.path)].add(current)

    def can_see(self, bug: Bug) -> bool:
        needed = next((flag for part, flag in INSTRUCTIONS.items() if part in bug.file), None)
        if needed and needed not in self._processor:
            return False
        programs = self.programs(bug.file)
        built = set().union(*(self._objects[program] for program in programs))
        return bool(programs) and len(self._users[bug.file] & built) <= COMPILED_MAX

    def programs(self, file: str) -> list[str]:
        """Returns the programs that have the file in the nearest folder that has any; those that are
        named after the file come first."""
        having = {
            name: folder
            for name, folder in self._folders.items()
            if self._objects[name] & self._users[file]
        }
        near = nearest(mirror_of(file), set(having.values()))
        named = f"{pathlib.PurePath(file).stem}_test"
        programs = [name for name, folder in having.items() if folder == near]
        return sorted(programs, key=lambda name: (name != named, name))

    def first_failed(self, tree: run.Tree, bug: Bug, seconds: float) -> str | None:
        """Returns the first test that fails with the bug, "" if none does, None if it does not
        compile."""
        programs = self.programs(bug.file)
        ends = time.monotonic() + seconds
        for program in programs:
            self._check_without_bug(tree, program)
        file = tree.path / bug.file
        source = file.read_bytes()
        file.write_bytes(bug.apply(source))
        try:
            for program in programs:
                if tree.build((program,)):
                    return None
                if failed := self._run(tree, program, bug):
                    return failed
                if time.monotonic() > ends:
                    break
            return ""
        finally:
            file.write_bytes(source)

    def _check_without_bug(self, tree: run.Tree, program: str) -> None:
        """Notes how long the program takes. Raises BadList if it fails."""
        with self._lock:
            if (tree.path, program) in self._baseline:
                return
        if output := tree.build((program,)):
            raise run.BadList(f"the tree does not compile\n{output[-3000:]}")
        began = time.monotonic()
        ended = tree.run([f"build/release/tests/{program}"], run.BUILD_SECONDS)
        if ended.returncode:
            raise run.BadList(f"fails without a bug: {program}\n{ended.stdout[-3000:]}")
        with self._lock:
            self._baseline[(tree.path, program)] = time.monotonic() - began

    def _run(self, tree: run.Tree, program: str, bug: Bug) -> str:
        """Runs the tests of the file with the mirrored name first, since they fail most often."""
        limit = 30 + 3 * self._baseline[(tree.path, program)]
        stem = pathlib.PurePath(bug.file).stem
        folder = tree.path / self._folders[program]
        near = [path.read_text() for path in folder.rglob(f"{stem}*_test.cc")]
        suites = re.findall(r"^(?:TYPED_)?TEST(?:_F|_P)?\((\w+),", "\n".join(near), re.MULTILINE)
        filters = ":".join(f"{suite}.*:*/{suite}.*:{suite}/*" for suite in sorted(set(suites)))
        for options in [[f"--gtest_filter={filters}"]] * bool(suites) + [[]]:
            command = [f"build/release/tests/{program}", "--gtest_fail_fast", *options]
            try:
                ended = tree.run(command, limit)
            except subprocess.TimeoutExpired as error:
                output = (error.stdout or b"").decode(errors="replace")
                return f"no end: {run.first_failure(output)}"
            if ended.returncode:
                return run.first_failure(ended.stdout) or f"exit status {ended.returncode}"
        return ""

    def _ninja(self, *arguments: str) -> str:
        return subprocess.run(
            ["ninja", "-C", str(self._build), "-t", *arguments],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
