"""Puts the bugs of mutants.toml into a copy of the tree, one at a time, and counts those that tests catch.

    python tests/mutants/run.py                  all mutants
    python tests/mutants/run.py --only balance   those whose name contains the text

The copy is in build/mutants and is kept, so that a later run compiles little. Exit status: 0 if at
least 90 % were caught, 1 if not, 2 if the list or the tree without a bug is at fault.
"""

from __future__ import annotations

import argparse
import dataclasses
import fcntl
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping

import tomllib

FOLDER = pathlib.Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
LIST = FOLDER / "mutants.toml"
CAUGHT_SHARE_MIN = 0.9
BUILD_SECONDS = 1_800.0
TEST_SECONDS = 90.0
"""Time limit of one test program or pytest run. A bug that makes tests hang counts as caught."""
CONFIGURE = "cmake --preset release -DLOGPROBD_TESTS=ON -DLOGPROBD_BENCHMARKS=OFF -DLOGPROBD_CUDA=OFF".split()


class BadList(Exception):
    """A mutant that cannot be applied, or that says nothing."""


@dataclasses.dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    old: str
    """Text of `file`, which must occur once."""
    new: str
    targets: tuple[str, ...] = ()
    """C++ test programs, which are built and run."""
    tests: tuple[str, ...] = ()
    """Arguments of pytest."""

    def apply(self, root: pathlib.Path) -> str:
        """Returns the file with the bug. Raises BadList unless `old` occurs once."""
        text = (root / self.file).read_text()
        if text.count(self.old) != 1:
            raise BadList(
                f"{self.name}: its text occurs {text.count(self.old)} times in {self.file}"
            )
        return text.replace(self.old, self.new)


def read_list(path: pathlib.Path = LIST) -> list[Mutant]:
    """Returns the mutants of a list. Raises BadList."""
    mutants = []
    for entry in tomllib.loads(path.read_text())["mutant"]:
        lists = {key: tuple(entry.pop(key, ())) for key in ("targets", "tests")}
        mutants.append(Mutant(**entry, **lists))
        if not any(lists.values()):
            raise BadList(f"{mutants[-1].name}: it names neither targets nor tests")
    names = [mutant.name for mutant in mutants]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise BadList(f"names that occur twice: {', '.join(twice)}")
    return mutants


def copy_tree(tree: pathlib.Path) -> None:
    """Makes `tree` equal to the files that git tracks here. Files that are equal stay untouched, and
    with them what was built from them. Raises BadList if another process uses it."""
    tree.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(tree.with_name(f"{tree.name}.lock"), os.O_CREAT | os.O_RDWR, 0o644)
    try:  # It is held until this process ends.
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise BadList(f"{tree} is in use by another run") from None
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    names = {name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()}
    for name in names:
        source, copy = ROOT / name, tree / name
        if not copy.is_file() or copy.read_bytes() != source.read_bytes():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, copy)
            shutil.copymode(source, copy)
    for path in tree.rglob("*"):
        name = path.relative_to(tree)
        if path.is_file() and name.parts[0] != "build" and str(name) not in names:
            path.unlink()


def first_failure(output: str) -> str:
    """Returns the first failed test that GoogleTest or pytest names, or the test that ended the
    program. Returns "" if there is none."""
    found = re.search(r"^\[  FAILED  \] (\S+?)(?:,| \(|$)|^FAILED (\S+)", output, re.MULTILINE)
    if found:
        return found[1] or found[2]
    started = re.findall(r"^\[ RUN      \] (\S+)$", output, re.MULTILINE)
    is_whole = re.search(r"^\[==========\] .* ran\.", output, re.MULTILINE)
    return started[-1] if started and not is_whole else ""


class Tree:
    """A copy of the tree, in which tests are built and run."""

    def __init__(
        self, path: pathlib.Path, jobs: int, environment: Mapping[str, str] | None = None
    ) -> None:
        """Commands also get the variables of `environment`."""
        self.path = path
        self._jobs = jobs
        self._environment = os.environ | {
            "CCACHE_BASEDIR": str(path),
            # A .pyc counts as current if the time in seconds and the size are those of the source.
            "PYTHONDONTWRITEBYTECODE": "1",
            "TEST_BINARIES": str(path / "build" / "release" / "bin"),
        }
        self._environment |= environment or {}

    def configure(self) -> None:
        self.run(CONFIGURE, BUILD_SECONDS).check_returncode()

    def build(self, targets: tuple[str, ...]) -> str:
        """Builds the targets. Returns "", or the compiler's output if that fails."""
        if not targets:
            return ""
        command = ["cmake", "--build", "build/release", "-j", str(self._jobs), "--target", *targets]
        ended = self.run(command, BUILD_SECONDS)
        return ended.stdout if ended.returncode else ""

    def first_failed(self, mutant: Mutant) -> str:
        """Runs the tests until one fails. Returns its name, or "" if all pass. Raises BadList."""
        commands = [
            [str(self.path / "build/release/tests" / target), "--gtest_fail_fast"]
            for target in mutant.targets
        ]
        if mutant.tests:
            options = ["-q", "-x", "-p", "no:cacheprovider"]
            commands.append([sys.executable, "-m", "pytest", *options, *mutant.tests])
        for command in commands:
            try:
                ended = self.run(command, TEST_SECONDS)
            except subprocess.TimeoutExpired:
                return f"no end within {TEST_SECONDS:.0f} s"
            if "pytest" in command and ended.returncode > 1:  # no test has run, or not to its end
                raise BadList(f"{mutant.name}: pytest failed\n{ended.stdout[-3000:]}")
            if ended.returncode:
                return first_failure(ended.stdout) or f"exit status {ended.returncode}"
        return ""

    def try_mutant(self, mutant: Mutant) -> str:
        """Returns what catches the bug, or "" if nothing does. Raises BadList if it cannot run."""
        file = self.path / mutant.file
        right = file.read_text()
        file.write_text(mutant.apply(self.path))
        try:
            if output := self.build(mutant.targets):
                raise BadList(f"{mutant.name}: it does not compile\n{output[-3000:]}")
            return self.first_failed(mutant)
        finally:
            file.write_text(right)  # with a new time, so that the next build compiles it again

    def run(
        self, command: list[str], seconds: float, environment: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command in the tree. Raises subprocess.TimeoutExpired."""
        return subprocess.run(
            command,
            cwd=self.path,
            env=self._environment | (environment or {}),
            timeout=seconds,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )


def baseline(tree: Tree, mutants: list[Mutant]) -> None:
    """Raises BadList if a test fails without a bug: it would fail with every bug."""
    everything = Mutant(
        "without a bug",
        file="",
        old="",
        new="",
        targets=tuple(dict.fromkeys(target for mutant in mutants for target in mutant.targets)),
        tests=tuple(dict.fromkeys(test for mutant in mutants for test in mutant.tests)),
    )
    if output := tree.build(everything.targets):
        raise BadList(f"the tree does not compile\n{output[-3000:]}")
    if failed := tree.first_failed(everything):
        raise BadList(f"fails without a bug: {failed}")


def run(tree: Tree, mutants: list[Mutant]) -> int:
    """Tries all mutants and prints a table. Returns the exit status. Raises BadList at the end."""
    baseline(tree, mutants)
    survived, failed = [], []
    print("| mutant | caught by | s |\n|---|---|---|")
    for mutant in mutants:
        began = time.monotonic()
        try:
            caught_by = tree.try_mutant(mutant)
            shown = f"`{caught_by}`" if caught_by else "**survived**"
            survived += [] if caught_by else [mutant.name]
        except BadList as error:
            failed.append(str(error))
            shown = "**not tried**"
        print(f"| {mutant.name} | {shown} | {time.monotonic() - began:.0f} |", flush=True)
    caught = len(mutants) - len(survived) - len(failed)
    print(f"\n{caught} of {len(mutants)} caught ({caught / len(mutants):.0%})")
    if failed:
        raise BadList("\n".join(failed))
    return 0 if caught >= CAUGHT_SHARE_MIN * len(mutants) else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", metavar="TEXT", default="", help="text in the names to try")
    parser.add_argument("--tree", type=pathlib.Path, default=ROOT / "build" / "mutants")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    try:
        mutants = [mutant for mutant in read_list() if args.only in mutant.name]
        if not mutants:
            raise BadList(f'no name contains "{args.only}"')
        for mutant in mutants:
            mutant.apply(ROOT)
        copy_tree(args.tree)
        tree = Tree(args.tree, args.jobs)
        if any(mutant.targets for mutant in mutants):
            tree.configure()
        return run(tree, mutants)
    except BadList as error:
        print(f"run.py: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
