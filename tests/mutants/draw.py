"""Draws bugs from the code by a seed, puts them into a copy of the tree, one at a time, and prints
the share that the tests notice, by folder, with the survivors.

    python tests/mutants/draw.py --count 300 --seed 1             from all folders
    python tests/mutants/draw.py --count 20 --folder server       from one folder
    python tests/mutants/draw.py --count 15 --since origin/main   from the lines of a change
    python tests/mutants/draw.py --again RESULT                   those that survived, once more

Folders take turns, and within a folder kinds of bugs (bugs.py) do. A bug that does not compile, and
one of equivalents.toml, is replaced by the next. Exit status: 0 if all were tried, also where bugs
survived; 2 if the tests fail without a bug, or nothing can be drawn.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import datetime
import json
import math
import os
import pathlib
import platform
import queue
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import tomllib

FOLDER = pathlib.Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
sys.path[:0] = [str(FOLDER), str(ROOT / "build" / "site-mutants")]

import run  # noqa: E402
from bugs import Bug, bugs_of  # noqa: E402
from covering_tests import PYTHON_TESTS, CppTests, PythonTests  # noqa: E402

FOLDERS = (
    "server",
    "client/cpp",
    "client/cli",
    "client/python/logprobd",
    "client/adapters/logprobd_adapters",
    "kernels/cpu",
)
EQUIVALENTS = FOLDER / "equivalents.toml"
DRAWS = FOLDER / "draws.json"


@dataclasses.dataclass
class Outcome:
    bug: Bug
    caught_by: str
    """The first test that failed, or "" if the bug survived."""
    seconds: float

    def as_json(self) -> dict[str, object]:
        shown = dataclasses.asdict(self.bug)
        for key in ("begin", "end"):
            del shown[key]
        return shown | {"caught_by": self.caught_by, "seconds": round(self.seconds, 1)}


Key = tuple[str, str, str, str, str]
"""What names a bug also after its line has moved."""


def key_of(bug: dict[str, str]) -> Key:
    place = bug.get("place", "1 of 1")
    return bug["file"], bug["context"], bug["old"], bug["new"], place


def key_of_bug(bug: Bug) -> Key:
    return key_of(dataclasses.asdict(bug))


def equivalents() -> list[Key]:
    """Returns the bugs that make no difference."""
    return list(map(key_of, tomllib.loads(EQUIVALENTS.read_text())["equivalent"]))


def survivors_of(results: list[pathlib.Path]) -> set[Key]:
    """Returns the bugs that no test noticed, of results of --out or of lists of them (draws.json).
    Raises BadList if one does not name them."""
    keys = set()
    for path in results:
        read = json.loads(path.read_text())
        try:
            for result in read if isinstance(read, list) else [read]:
                bugs = result["survivors"] if "survivors" in result else result["bugs"]
                keys |= {key_of(bug) for bug in bugs if not bug.get("caught_by")}
        except KeyError as error:
            raise run.BadList(f"{path} has a result or a bug without {error}") from error
    return keys


def tracked(folder: str) -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", folder], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split()
    return [name for name in listed if name.endswith((".cc", ".h", ".py"))]


def changed_lines(since: str) -> dict[str, set[int]]:
    """Returns the lines of the work tree that differ from a commit, by file."""
    text = subprocess.run(
        ["git", "diff", "--no-ext-diff", "--dst-prefix=b/", "-U0", since, "--", *FOLDERS],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    lines: dict[str, set[int]] = collections.defaultdict(set)
    file = ""
    for line in text.splitlines():
        if line.startswith("+++ "):
            file = line.removeprefix("+++ b/")
        elif found := re.match(r"@@ .*\+(\d+)(?:,(\d+))? @@", line):
            begin, count = int(found[1]), int(found[2] or 1)
            lines[file].update(range(begin, begin + count))
    return lines


def in_turns(found: list[Bug], generator: random.Random) -> Iterator[Bug]:
    """Yields all bugs in a random order in which the kinds take turns, so that the many constants do
    not hide the few wake-ups."""
    by_kind: dict[str, list[Bug]] = collections.defaultdict(list)
    for bug in found:
        by_kind[bug.kind].append(bug)
    for bugs in by_kind.values():
        generator.shuffle(bugs)
    while by_kind:
        for kind in generator.sample(sorted(by_kind), len(by_kind)):
            yield by_kind[kind].pop()
            if not by_kind[kind]:
                del by_kind[kind]


class Draw:
    """The bugs of one folder, in the order of the seed. Threads share it."""

    def __init__(self, folder: str, bugs: list[Bug], seed: int, count: int) -> None:
        self.folder = folder
        self.outcomes: list[Outcome] = []
        self.num_invalid = 0
        self.wanted = count
        self._bugs = in_turns(bugs, random.Random(f"{seed} {folder}"))
        self._lock = threading.Lock()

    def next(self) -> Bug | None:
        with self._lock:
            return next(self._bugs, None)

    @property
    def survivors(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if not outcome.caught_by]

    def row(self) -> str:
        tried, survived = len(self.outcomes), len(self.survivors)
        hung = sum(outcome.caught_by.startswith("no end") for outcome in self.outcomes)
        share = f"{(tried - survived) / tried:.0%}" if tried else ""
        return f"| {self.folder} | {tried} | {tried - survived} | {share} | {hung} | {self.num_invalid} |"


class Trials:
    """Tries bugs in copies of the tree, one a thread."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._seconds = args.seconds
        self._minutes = args.minutes
        self._ends = math.inf
        self._trees: queue.Queue[run.Tree] = queue.Queue()
        for worker in range(args.workers):
            path = args.tree.with_name(f"{args.tree.name}-{worker}" if worker else args.tree.name)
            run.copy_tree(path)
            # The compiler wrapper adds -w, since a bug may leave a variable unused. What it makes is not
            # put into the compiler's cache.
            environment = {
                "CCACHE_PREFIX": str(FOLDER / "without_warnings.sh"),
                "CCACHE_READONLY": "1",
            }
            self._trees.put(run.Tree(path, args.jobs, environment))
        self._python = PythonTests(ROOT, args.tree)
        self._cpp = CppTests(args.tree)
        self._tests = {".py": self._python, ".cc": self._cpp, ".h": self._cpp}

    def prepare(self, files: list[str]) -> None:
        """Makes ready what the drawn files need. Raises BadList."""
        trees = list(self._trees.queue)
        if of_cpp := [file for file in files if not file.endswith(".py")]:
            for tree in trees:
                tree.configure()
            self._cpp.read_graph(trees[0], of_cpp)
        for package in PYTHON_TESTS:
            if any(file.startswith(package) for file in files):
                self._python.measure(trees[0], package)
        self._ends = time.monotonic() + self._minutes * 60

    def can_see(self, bug: Bug) -> bool:
        return self._tests[pathlib.PurePath(bug.file).suffix].can_see(bug)

    def one(self, draw: Draw) -> Outcome | None:
        """Tries the next bug of a folder that compiles. Returns None if there is none, or no time."""
        tree = self._trees.get()
        try:
            while time.monotonic() < self._ends and (bug := draw.next()) is not None:
                began = time.monotonic()
                tests = self._tests[pathlib.PurePath(bug.file).suffix]
                caught_by = tests.first_failed(tree, bug, self._seconds)
                if caught_by is None:
                    draw.num_invalid += 1
                    continue
                outcome = Outcome(bug, caught_by, time.monotonic() - began)
                draw.outcomes.append(outcome)
                return outcome
            return None
        finally:
            self._trees.put(tree)


def report(draws: list[Draw]) -> None:
    tried = sum(len(draw.outcomes) for draw in draws)
    survived = sum(len(draw.survivors) for draw in draws)
    print("\n| folder | tried | caught | share | of them by a test that hung | did not compile |")
    print("|---|---|---|---|---|---|")
    for draw in draws:
        print(draw.row())
    if tried:
        print(f"\n{tried - survived} of {tried} caught ({(tried - survived) / tried:.0%})")


def write_result(draws: list[Draw], args: argparse.Namespace) -> None:
    outcomes = [outcome for draw in draws for outcome in draw.outcomes]
    commit = subprocess.run(
        ["git", "rev-parse", "--short=8", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    result = {
        "date": f"{datetime.date.today()}",
        "commit": commit,
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "seed": args.seed,
        "tried": len(outcomes),
        "caught": sum(bool(outcome.caught_by) for outcome in outcomes),
        "folders": {
            draw.folder: {
                "tried": len(draw.outcomes),
                "caught": len(draw.outcomes) - len(draw.survivors),
            }
            for draw in draws
        },
        "bugs": [outcome.as_json() for outcome in outcomes],
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")


def draws_of(args: argparse.Namespace, trials: Trials) -> list[Draw]:
    """Returns the folders' draws. Raises BadList if there is nothing to draw."""
    lines = changed_lines(args.since) if args.since else None
    files = {
        folder: [name for name in tracked(folder) if lines is None or name in lines]
        for folder in args.folder or FOLDERS
    }
    trials.prepare([name for names in files.values() for name in names])
    known = set(equivalents())
    survived = None if args.again is None else survivors_of(args.again)
    gone = {key for key in survived or () if key[0].startswith(tuple(files))}
    found: dict[str, list[Bug]] = {}
    for folder, names in files.items():
        bugs = [bug for name in names for bug in bugs_of(name, (ROOT / name).read_bytes())]
        if lines is not None:
            bugs = [bug for bug in bugs if bug.line in lines[bug.file]]
        if survived is not None:
            bugs = [bug for bug in bugs if key_of_bug(bug) in survived]
            gone -= {key_of_bug(bug) for bug in bugs}
        seen = [bug for bug in bugs if trials.can_see(bug) and key_of_bug(bug) not in known]
        unseen = {bug.file for bug in bugs} - {bug.file for bug in seen}
        if unseen and lines is None and survived is None:
            print(f"{folder}: no unit test runs {', '.join(sorted(unseen))}", file=sys.stderr)
        if seen:
            found[folder] = seen
    for file, context, old, new, _ in sorted(gone):
        print(f"not in the code any more: {file}: {old!r} -> {new!r} in {context}", file=sys.stderr)
    if not found:
        raise run.BadList("there is no line to put a bug into")
    if survived is not None:
        return [Draw(folder, bugs, args.seed, len(bugs)) for folder, bugs in found.items()]
    count, more = divmod(args.count, len(found))
    return [
        Draw(folder, bugs, args.seed, count + (i < more))
        for i, (folder, bugs) in enumerate(found.items())
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=50, help="bugs to try (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="default %(default)s")
    parser.add_argument(
        "--folder",
        action="append",
        help=f"draw only from this folder; may be repeated (default {', '.join(FOLDERS)})",
    )
    parser.add_argument("--since", metavar="COMMIT", help="draw only from lines changed since then")
    parser.add_argument(
        "--again",
        metavar="RESULT",
        type=pathlib.Path,
        nargs="+",
        help="try the survivors of results (JSON), of --out or draws.json",
    )
    parser.add_argument(
        "--seconds", type=float, default=150, help="limit of one bug (default %(default)s)"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=600,
        help="start no bug after this time, which begins when all is built (default %(default)s)",
    )
    parser.add_argument("--workers", type=int, default=2, help="bugs at once (default %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="compilers a bug (default %(default)s)")
    parser.add_argument("--out", type=pathlib.Path, help="file for the result (JSON)")
    parser.add_argument("--tree", type=pathlib.Path, default=ROOT / "build" / "mutants")
    args = parser.parse_args()
    try:
        trials = Trials(args)
        draws = draws_of(args, trials)
        # Folders take turns, so that a draw that ends for want of time is spread over all.
        most = max(draw.wanted for draw in draws)
        turns = [draw for i in range(most) for draw in draws if i < draw.wanted]
        print("| bug | kind | caught by | s |\n|---|---|---|---|")
        with concurrent.futures.ThreadPoolExecutor(args.workers) as pool:
            for outcome in pool.map(trials.one, turns):
                if outcome is None:
                    continue
                bug = outcome.bug
                change = f"{bug.old[:80]!r} -> {bug.new[:80]!r}"
                caught = f"`{outcome.caught_by}`" if outcome.caught_by else "**survived**"
                print(
                    f"| {bug.file}:{bug.line} {change} | {bug.kind} | {caught} | {outcome.seconds:.0f} |",
                    flush=True,
                )
                if args.out:  # after each, since a run takes long
                    write_result(draws, args)
        report(draws)
        wanted, tried = len(turns), sum(len(draw.outcomes) for draw in draws)
        if tried < wanted:
            print(f"draw.py: warning: {tried} of {wanted} bugs were tried", file=sys.stderr)
    except run.BadList as error:
        print(f"draw.py: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
