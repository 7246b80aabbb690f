"""Defines shared fixtures: the folder of the built binaries, small model folders and running servers."""

import fcntl
import os
import pathlib
import shutil
import sys
from collections.abc import Callable

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support" / "python"))
sys.path.insert(0, str(ROOT / "client" / "python"))

from built_packages import build_operator_packages, build_packages  # noqa: E402
from model_folder import ModelFolder  # noqa: E402
from network_security import NetworkSecurity  # noqa: E402
from server_process import ServerProcess  # noqa: E402


@pytest.fixture(scope="session")
def repository() -> pathlib.Path:
    return ROOT


@pytest.fixture(scope="session")
def binaries() -> pathlib.Path:
    """Returns the folder with logprobd and logprobctl: TEST_BINARIES if it is set, else that of the release build."""
    folder = pathlib.Path(os.environ.get("TEST_BINARIES", ROOT / "build" / "release" / "bin"))
    assert (folder / "logprobd").exists(), f"{folder}/logprobd is missing: build the release preset"
    return folder


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Lists why tests were skipped, without -rs too: what is missing is otherwise a number alone."""
    if not terminalreporter.hasopt("skipped"):
        terminalreporter.reportchars += "s"


def made_once(
    request: pytest.FixtureRequest,
    factory: pytest.TempPathFactory,
    name: str,
    make: Callable[[pathlib.Path], None],
) -> pathlib.Path:
    """Returns a folder that the first process of a run that needs it makes."""
    shared = factory.getbasetemp()
    if hasattr(request.config, "workerinput"):  # one of the processes of pytest-xdist
        shared = shared.parent
    folder = shared / f"shared_{name}"
    with (shared / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            making = shared / f"making_{name}"
            shutil.rmtree(making, ignore_errors=True)
            making.mkdir()
            make(making)
            making.rename(folder)
    return folder


@pytest.fixture(scope="session")
def packages(
    request: pytest.FixtureRequest,
    binaries: pathlib.Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> pathlib.Path:
    """Returns a folder with the packages of the server and the client."""
    return made_once(
        request, tmp_path_factory, "packages", lambda folder: build_packages(binaries, folder)
    )


@pytest.fixture(scope="session")
def operator_packages(
    request: pytest.FixtureRequest,
    binaries: pathlib.Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> pathlib.Path:
    """Returns a folder with the packages of the operator. Without a compiler cache they take minutes, so tests that use
    them need a longer timeout."""
    return made_once(
        request,
        tmp_path_factory,
        "operator_packages",
        lambda folder: build_operator_packages(binaries, folder),
    )


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    """Writes a head of 1,003 ids (not a multiple of the tile) and 64 hidden elements, which is fast to score."""
    return ModelFolder.write(tmp_path_factory.mktemp("model"), vocab=1003, hidden=64)


@pytest.fixture(scope="session")
def slow_model(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    """Writes a head so large that a full batch takes a large part of a second on two cores."""
    return ModelFolder.write(tmp_path_factory.mktemp("slow"), vocab=40_000, hidden=256)


@pytest.fixture(scope="session")
def security(tmp_path_factory: pytest.TempPathFactory) -> NetworkSecurity:
    """Returns certificates and tokens, shared by tests that do not change them."""
    return NetworkSecurity(tmp_path_factory.mktemp("security"))


@pytest.fixture(scope="session")
def server(binaries: pathlib.Path, model: ModelFolder):
    """Runs a server on the CPU with default limits, shared by tests that do not change its state."""
    with ServerProcess(binaries, "--model", str(model.path), "--reflection") as process:
        yield process


@pytest.fixture
def start_server(binaries: pathlib.Path):
    """Yields a function that starts a server with the given options. The servers are stopped after the test."""
    processes: list[ServerProcess] = []

    def start(*options: str, **keywords) -> ServerProcess:
        process = ServerProcess(binaries, *options, **keywords)
        processes.append(process)
        return process.start()

    yield start
    for process in processes:
        process.stop()
