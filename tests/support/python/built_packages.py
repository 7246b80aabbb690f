"""Builds the packages of the server, the client and the operator from the binaries of a build."""

import importlib.util
import os
import pathlib
import shutil
import subprocess
import tempfile

SCRIPTS = pathlib.Path(__file__).resolve().parents[3] / "deploy" / "packages"
# The operator's sources lie in a new temporary folder for every build.
CCACHE = {
    "CCACHE_BASEDIR": tempfile.gettempdir(),
    "CCACHE_NOHASHDIR": "1",
    "CCACHE_SLOPPINESS": "time_macros,include_file_ctime,include_file_mtime",
}


def has_newer_grpc(binaries: pathlib.Path) -> bool:
    """Whether the server has the libraries of deploy/newer_grpc inside, instead of loading the distribution's."""
    version = subprocess.run(
        [binaries / "logprobd", "--version"], check=True, capture_output=True, text=True, timeout=60
    ).stdout
    return "gRPC 1.51." not in version


def build_packages(binaries: pathlib.Path, folder: pathlib.Path) -> None:
    """Writes the packages of the server and the client to a folder."""
    subprocess.run(
        ["bash", SCRIPTS / "build_wheels.sh", binaries.parent, folder], check=True, timeout=600
    )


def build_operator_packages(binaries: pathlib.Path, folder: pathlib.Path) -> None:
    """Writes the packages of the operator to a folder. Its wheel is for the torch of the tests."""
    environment = os.environ | CCACHE
    if shutil.which("ccache"):
        environment["CXX"] = f"ccache {os.environ.get('CXX', 'c++')}"
    torch = pathlib.Path(importlib.util.find_spec("torch").origin).resolve().parents[1]
    command = ["bash", SCRIPTS / "build_operator.sh", binaries.parent, folder, torch]
    subprocess.run(command, check=True, timeout=1200, env=environment)
