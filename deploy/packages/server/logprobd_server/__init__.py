"""The programs of logprobd: the server `logprobd` and its command line client `logprobctl`."""

import os
import pathlib
import sys
from typing import NoReturn

__version__ = "0.2.0"


def binary(name: str) -> str:
    """Returns the path of the program `name`: "logprobd" or "logprobctl"."""
    path = pathlib.Path(__file__).with_name("bin") / name
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: reinstall logprobd-server")
    return str(path)


def _replace_process_by(name: str) -> NoReturn:
    path = binary(name)
    # The name without a folder appears in --help.
    os.execv(path, [name, *sys.argv[1:]])


def run_logprobd() -> NoReturn:
    _replace_process_by("logprobd")


def run_logprobctl() -> NoReturn:
    _replace_process_by("logprobctl")
