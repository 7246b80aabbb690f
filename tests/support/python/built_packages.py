"""Builds the packages of the server and the client from the binaries of a build."""

import pathlib
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[3]


def build_packages(binaries: pathlib.Path, folder: pathlib.Path) -> None:
    """Writes wheels, a source distribution and the list of contents to a folder."""
    script = ROOT / "deploy" / "packages" / "build_wheels.sh"
    subprocess.run(["bash", script, binaries.parent, folder], check=True, timeout=600)
