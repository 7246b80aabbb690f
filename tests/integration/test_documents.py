"""Checks the documents: every command in a README runs, and every table agrees with the results."""

import json
import os
import pathlib
import re
import site
import subprocess
import sys

import pytest
from scoring_rpc import ROOT
from unused_ports import unused_ports

pytestmark = pytest.mark.timeout(
    1200
)  # the packages of the operator take minutes without a compiler cache

# Commands that are run elsewhere: the test command itself, and commands that need another machine.
ELSEWHERE = (
    "bash tests/run.sh",
    "bash tests/gpu/",
    "python3 tests/gpu/",
    "bash .ci/",
    "cmake --workflow",
    "compute-sanitizer",
    "ctest ",
    "sudo bash tests/bare_debian.sh",
)
# Its commands need frameworks; tests/adapters runs them where these are installed.
README_RUN_ELSEWHERE = "client/adapters/README.md"
RESULTS = ROOT / "tests" / "bench" / "results"
BLOCK = re.compile(r"^```sh\n(.*?)^```", re.DOTALL | re.MULTILINE)


def readmes() -> list[pathlib.Path]:
    return sorted(p for p in ROOT.glob("**/*.md") if "build" not in p.relative_to(ROOT).parts)


def commands() -> list[tuple[str, str]]:
    """Returns the commands of all READMEs, each with its file. One that several have runs once in each environment."""
    found: dict[tuple[str, bool], str] = {}
    for path in readmes():
        if path == ROOT / README_RUN_ELSEWHERE:
            continue
        for block in BLOCK.findall(path.read_text()):
            for line in block.replace("\\\n", " ").splitlines():
                line = re.sub(r"\s+#.*$", "", line).strip()
                if line and not line.startswith(ELSEWHERE):
                    name = path.relative_to(ROOT).as_posix()
                    found.setdefault((line, has_operator_path(name)), name)
    return [(name, line) for (line, _), name in found.items()]


def has_operator_path(readme: str) -> bool:
    """Returns whether the commands of a README run in the environment into which the operator may be installed."""
    return readme.startswith("kernels/torch_ops/")


class Quickstarted:
    """The demo model, served as the READMEs say but on free ports."""

    def __init__(self, *packages: pathlib.Path) -> None:
        # A developer's own server may use the default ones.
        self.port, self.http_port = unused_ports(2)
        # The commands find our packages in folders instead of an index.
        self.environment = os.environ | {
            "PIP_FIND_LINKS": " ".join(map(str, packages)),
            "PATH": f"{ROOT}/build/venv/bin:{os.environ['PATH']}",
            "LOGPROBD_ADDRESS": f"127.0.0.1:{self.port}",
        }
        # Other tests set it; here the operator uses its package's library.
        self.environment.pop("LINEAR_LOGPROB_LIBRARY", None)

    def options(self) -> list[str]:
        return ["--port", str(self.port), "--http-port", str(self.http_port)]

    def here(self, text: str) -> str:
        """Replaces the default ports in a README's text by this server's ports."""
        return text.replace(":8470", f":{self.port}").replace(":9470", f":{self.http_port}")


def link_times(binaries: pathlib.Path) -> dict[str, int]:
    """Returns when each program and library of the build was linked, in nanoseconds."""
    files = [*binaries.iterdir(), *(binaries.parent / "lib").iterdir()]
    return {file.name: file.stat().st_mtime_ns for file in files}


@pytest.fixture(scope="module")
def quickstarted(binaries, packages, operator_packages):
    started = Quickstarted(packages, operator_packages)
    started.link_times = link_times(binaries)
    result = subprocess.run(
        ["bash", "deploy/quickstart.sh", "--keep", *started.options()],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    server = next(packages.glob("logprobd_server-*.whl"))
    pip = [ROOT / "build/venv/bin/python", "-m", "pip", "install", "--quiet", "--force-reinstall"]
    subprocess.run([*pip, server], check=True, timeout=120)
    pid = int(re.search(r"process (\d+)", result.stdout)[1])
    started.output = result.stdout
    yield started
    os.kill(pid, 15)


def test_quickstart_prints_rows_with_their_reference(quickstarted) -> None:
    for word in ("row", "target", "logprob", "entropy", "reference", "difference", "/metrics"):
        assert word in quickstarted.output, word


@pytest.fixture(scope="module")
def operator_path(tmp_path_factory) -> str:
    """PATH of a virtual environment that sees the tests' torch, into which the operator may be installed."""
    environment = tmp_path_factory.mktemp("operator") / "venv"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True, timeout=120)
    packages = subprocess.run(
        [environment / "bin" / "python", "-c", "import site; print(site.getsitepackages()[0])"],
        check=True, capture_output=True, text=True, timeout=60,
    ).stdout.strip()  # fmt: skip
    pathlib.Path(packages, "tests.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    return f"{environment}/bin:{os.environ['PATH']}"


@pytest.mark.parametrize("file, command", commands(), ids=lambda value: str(value)[:60])
def test_command_of_a_readme_runs(quickstarted, operator_path, file: str, command: str) -> None:
    if command == "bash deploy/quickstart.sh":
        command += " " + " ".join(Quickstarted().options())
    result = subprocess.run(
        ["bash", "-ec", quickstarted.here(command)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=800,
        env=quickstarted.environment | ({"PATH": operator_path} if has_operator_path(file) else {}),
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_commands_of_readmes_do_not_link_the_build_again(binaries, quickstarted) -> None:
    # Other tests run these programs at the same time, and a library that is being written cannot be loaded.
    assert link_times(binaries) == quickstarted.link_times


def test_the_readme_example_in_python_runs(quickstarted) -> None:
    text = (ROOT / "README.md").read_text()
    program = re.search(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)[1]
    result = subprocess.run(
        [ROOT / "build/venv/bin/python", "-c", quickstarted.here(program)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    assert len(result.stdout) > 100


def test_the_operator_s_example_in_python_runs(binaries) -> None:
    package = ROOT / "kernels" / "torch_ops" / "python"
    program = re.search(
        r"^```python\n(.*?)^```", (package / "README.md").read_text(), re.DOTALL | re.M
    )[1]
    library = binaries.parent / "lib" / "liblogprobd_torch_ops.so"
    result = subprocess.run(
        [sys.executable, "-c", program + "print(hidden.grad.abs().sum(1))"],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": str(package), "LINEAR_LOGPROB_LIBRARY": str(library)},
    )
    assert result.returncode == 0, result.stderr
    assert "0.0000" in result.stdout  # the gradient of the ignored row


@pytest.mark.parametrize("name", ["render_tables.py", "plot_rows.py"])
def test_tables_and_plots_are_rendered_from_the_results(name: str) -> None:
    script = ROOT / "tests" / "bench" / name
    result = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def anchors(path: pathlib.Path) -> set[str]:
    """Returns the anchors of a document, which GitHub derives from its headings."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in headings}


def test_links_between_documents_have_targets() -> None:
    for path in readmes():
        for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
            if "://" in target:
                continue
            name, _, anchor = target.partition("#")
            file = path.parent / name if name else path
            assert file.exists(), f"{path}: {target}"
            assert not anchor or anchor in anchors(file), f"{path}: {target}"


# The faults that the server must be tested for; tests/FAULTS.md describes each one.
REQUIRED_FAULTS = {
    *(f"A{i}" for i in range(1, 23)),
    *(f"B{i}" for i in range(23, 44)),
    *(f"C{i}" for i in range(44, 59)),
    *(f"D{i}" for i in range(59, 76)),
    *(f"E{i}" for i in range(76, 85)),
    *(f"F{i}" for i in range(85, 98)),
    *(f"G{i}" for i in range(98, 109)),
    "C109",  # several heads
    "F110",  # the control socket
    "E111",  # equal sums
    *(f"E{i}" for i in range(112, 116)),  # hung threads, stopped processes, failing files
    *(f"G{i}" for i in range(116, 119)),  # HTTPS and tokens of HTTP
    "E119",  # versions that cannot be released
    *("A130", "A131", "A132", "A134", "A136", "F133"),  # what peers can take
    *("C135", "G120", "G131", "G132", "G133"),  # the log
}
FAULT = re.compile(r"^\| ([A-G]\d+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)


def faults() -> list[tuple[str, ...]]:
    return FAULT.findall((ROOT / "tests" / "FAULTS.md").read_text())


def test_every_required_fault_has_a_row() -> None:
    ids = [fault[0] for fault in faults()]
    assert len(ids) == len(set(ids))
    assert set(ids) >= REQUIRED_FAULTS, REQUIRED_FAULTS - set(ids)


def existing_tests() -> set[str]:
    """Returns test names as the table writes them: test_x, Suite.Name, or the id of a case of bad input."""
    names: set[str] = set()
    for path in (ROOT / "tests" / "integration").glob("test_*.py"):
        names |= set(re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE))
    for path in (ROOT / "tests").glob("**/*_test.cc"):
        found = re.findall(r"^TEST(?:_[FP])?\(\s*(\w+),\s*(\w+)\)", path.read_text(), re.MULTILINE)
        names |= {f"{suite}.{name}" for suite, name in found}
    tables = ROOT / "tests" / "integration"
    cases = (tables / "test_bad_input.py").read_text()
    names |= set(re.findall(r'Case\(\s*f?"([A-G]\d+)', cases))
    names |= set(
        re.findall(r'\{"([A-G]\d\w+)"', (tables / "transport_bad_input_test.cc").read_text())
    )
    return names


def test_every_row_of_the_faults_names_tests_that_exist() -> None:
    existing = existing_tests()
    for fault, _, _, tests in faults():
        names = re.findall(r"`([^`]+)`", tests)
        assert names, fault
        assert set(names) <= existing, f"{fault}: {set(names) - existing}"


def test_every_case_of_bad_input_has_a_row() -> None:
    ids = {fault[0] for fault in faults()}
    cases = {name for name in existing_tests() if re.fullmatch(r"[A-G]\d+[A-Z]?\w*", name)}
    assert {re.match(r"[A-G]\d+", name)[0] for name in cases} <= ids


def promises() -> list[list[str]]:
    rows = re.findall(r"^\| (.+) \|$", (ROOT / "tests" / "PROMISES.md").read_text(), re.MULTILINE)
    return [row.split(" | ") for row in rows[1:]]


def test_every_promise_of_security_has_a_row() -> None:
    section = (ROOT / "SECURITY.md").read_text().split("\n## What is promised\n")[1]
    made = re.findall(r"^\* (.+)$", section.split("\n## ")[0], re.MULTILINE)
    beginnings = tuple(row[0] for row in promises())

    assert made
    assert [text for text in made if not text.startswith(beginnings)] == []
    assert [words for words in beginnings if not any(m.startswith(words) for m in made)] == []


def test_every_row_of_the_promises_names_tests_that_exist() -> None:
    existing = existing_tests()
    for path in (ROOT / "tests").glob("**/test_*.py"):
        existing |= set(re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE))

    for promise, tests, without in promises():
        names = re.findall(r"`([^`]+)`", tests)
        assert names or without != "-", promise
        assert set(names) <= existing, f"{promise}: {set(names) - existing}"


def test_layers_hold() -> None:
    result = subprocess.run(
        [sys.executable, ROOT / ".ci" / "check_layers.py", ROOT], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout


def test_an_include_that_breaks_the_layers_is_found(tmp_path: pathlib.Path) -> None:
    (tmp_path / "ARCHITECTURE.md").write_text((ROOT / "ARCHITECTURE.md").read_text())
    wrong = tmp_path / "server" / "base" / "clock.h"
    wrong.parent.mkdir(parents=True)
    wrong.write_text('#include "server/app/run/run.h"\n')

    result = subprocess.run(
        [sys.executable, ROOT / ".ci" / "check_layers.py", tmp_path], capture_output=True, text=True
    )

    assert result.returncode != 0
    assert "server/base/clock.h" in result.stdout


@pytest.mark.parametrize(
    ("lower", "upper"),
    [("types", "rows"), ("rows", "ranks"), ("ranks", "paths"), ("paths", "ops"), ("types", "ops")],
)
def test_an_include_of_a_layer_above_is_found(
    tmp_path: pathlib.Path, lower: str, upper: str
) -> None:
    operator = pathlib.Path("kernels", "torch_ops")
    for document in ("ARCHITECTURE.md", operator / "README.md"):
        (tmp_path / document).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / document).write_text((ROOT / document).read_text())
    for folder, other in ((lower, upper), (upper, lower)):
        header = tmp_path / operator / folder / "made_up.h"
        header.parent.mkdir(parents=True, exist_ok=True)
        header.write_text(f'#include "kernels/torch_ops/{other}/made_up.h"\n')

    result = subprocess.run(
        [sys.executable, ROOT / ".ci" / "check_layers.py", tmp_path], capture_output=True, text=True
    )

    assert result.returncode == 1
    (problem,) = result.stdout.splitlines()
    assert problem.startswith(f"kernels/torch_ops/{lower}/made_up.h:1: ")


RECORD = {
    "what": str,
    "machine": str,
    "date": str,
    "commit": str,
    "figure": (int, float),
    "unit": str,
    "spread": (list, type(None)),
    "rounds": int,
    "baseline": (dict, type(None)),
    "ratio": (int, float, type(None)),
    "note": str,
}
UNITS = {
    "s",
    "ms",
    "us",
    "kB",
    "MiB",
    "GB/s",
    "s/GB",
    "nats",
    "rows",
    "rows/s",
    "thousand rows/s",
    "of the norm",
} | {
    "MiB/h",
    "files/h",
    "threads/h",
    "batch times",
    "times",
    "requests",
    "swaps",  # units of the service and its soak
}


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_a_result_keeps_the_schema(path: pathlib.Path) -> None:
    for record in json.loads(path.read_text()):
        assert record.keys() == RECORD.keys()
        for name, kind in RECORD.items():
            assert isinstance(record[name], kind), (record["what"], name)
        assert record["unit"] in UNITS, record["what"]
        assert record["rounds"] >= 1
        if record["spread"]:
            low, high = record["spread"]
            assert low <= record["figure"] <= high, record["what"]
        if record["baseline"]:
            ratio = record["figure"] / record["baseline"]["figure"]
            assert record["ratio"] == pytest.approx(ratio, rel=2e-3), record["what"]
