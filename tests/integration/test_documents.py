"""Documents hold: every command in a README runs, every table is what the results say."""

import os
import pathlib
import re
import subprocess
import sys

import pytest
from scoring_rpc import ROOT

# Run elsewhere: the test command itself, and what needs another machine.
ELSEWHERE = (
    "bash tests/run.sh",
    "bash tests/gpu/run.sh",
    "bash .ci/",
    "sudo bash tests/bare_debian.sh",
)
BLOCK = re.compile(r"^```sh\n(.*?)^```", re.DOTALL | re.MULTILINE)


def readmes() -> list[pathlib.Path]:
    return sorted(p for p in ROOT.glob("**/*.md") if "build" not in p.relative_to(ROOT).parts)


def commands() -> list[tuple[str, str]]:
    found = []
    for path in readmes():
        for block in BLOCK.findall(path.read_text()):
            for line in block.replace("\\\n", " ").splitlines():
                line = re.sub(r"\s+#.*$", "", line).strip()
                if line and not line.startswith(ELSEWHERE):
                    found.append((path.relative_to(ROOT).as_posix(), line))
    return found


@pytest.fixture(scope="module")
def quickstarted(binaries):
    """The demo model, served at the default ports as the READMEs say."""
    result = subprocess.run(
        ["bash", "deploy/quickstart.sh", "--keep"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    pid = int(re.search(r"process (\d+)", result.stdout)[1])
    yield result.stdout
    os.kill(pid, 15)


def test_quickstart_prints_rows_beside_their_reference(quickstarted) -> None:
    for word in ("row", "target", "logprob", "entropy", "reference", "difference", "/metrics"):
        assert word in quickstarted, word


@pytest.mark.parametrize("file, command", commands(), ids=lambda value: str(value)[:60])
@pytest.mark.timeout(900)
def test_command_of_a_readme_runs(quickstarted, file: str, command: str) -> None:
    if command == "bash deploy/quickstart.sh":
        command += " --port 18470 --http-port 19470"  # the fixture's server has the default ports
    folder = ROOT / pathlib.Path(file).parent if file.startswith("client/python") else ROOT
    environment = os.environ | {"PATH": f"{ROOT}/build/venv/bin:{os.environ['PATH']}"}
    result = subprocess.run(
        ["bash", "-ec", command],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=800,
        env=environment,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_readme_example_in_python_runs(quickstarted) -> None:
    text = (ROOT / "README.md").read_text()
    program = re.search(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)[1]
    result = subprocess.run(
        [ROOT / "build/venv/bin/python", "-c", program], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    assert len(result.stdout) > 100


def test_tables_are_rendered_from_the_results() -> None:
    script = ROOT / "tests" / "bench" / "render_tables.py"
    result = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_links_between_documents_lead_somewhere() -> None:
    for path in readmes():
        for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
            if "://" not in target:
                assert (path.parent / target).exists(), f"{path}: {target}"


# The rows that the server must be tested for: tests/README.md says what each is.
REQUIRED_FAULTS = {
    *(f"A{i}" for i in (*range(1, 10), *range(12, 17), 22)),
    *(f"B{i}" for i in range(23, 43)),
    *(f"C{i}" for i in (44, 45, 46, 56, 57)),
    *(f"D{i}" for i in (*range(59, 67), *range(72, 76))),
    *(f"E{i}" for i in (81, 83, 84)),
    *(f"G{i}" for i in range(103, 108)),
}
FAULT = re.compile(r"^\| ([A-G]\d+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)


def faults() -> list[tuple[str, ...]]:
    return FAULT.findall((ROOT / "tests" / "README.md").read_text())


def test_every_required_fault_has_a_row() -> None:
    ids = [fault[0] for fault in faults()]
    assert len(ids) == len(set(ids))
    assert set(ids) >= REQUIRED_FAULTS, REQUIRED_FAULTS - set(ids)


def existing_tests() -> set[str]:
    """As the table names them: test_x, Suite.Name, or the id of a case of the two bad-input tables."""
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


def test_layers_hold() -> None:
    result = subprocess.run(
        [sys.executable, ROOT / ".ci" / "check_layers.py", ROOT], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout
