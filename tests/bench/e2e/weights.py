"""`logprobctl weights` as a tool: the one place that knows its flags."""

import pathlib
import socket
import subprocess

HEAD = "default"
ROOT_FLAG = "--weights-root"  # of the server, where it has one


class WeightsTool:
    """Loads and commits versions of the one head of a server, over its admin listener."""

    def __init__(self, binaries: pathlib.Path, admin: str) -> None:
        self.binary = binaries / "logprobctl"
        self.admin = admin

    @staticmethod
    def is_there(binaries: pathlib.Path) -> bool:
        """Whether this logprobctl has the command at all."""
        help_text = subprocess.run(
            [str(binaries / "logprobctl"), "--help"], capture_output=True, text=True, check=True
        ).stdout
        return any(line.split()[:1] == ["weights"] for line in help_text.splitlines())

    def _run(self, *arguments: str) -> str:
        command = [str(self.binary), "weights", *arguments, "--address", self.admin]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if done.returncode != 0:
            raise RuntimeError(f"logprobctl weights {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    def load(self, version: int, folder: pathlib.Path) -> None:
        """Reads a version beside the live one; returns when it can be committed."""
        self._run("load", "--head", HEAD, "--version", str(version), str(folder))

    def commit(self) -> None:
        """Makes the loaded version the live one."""
        self._run("commit", "--head", HEAD)

    def rollback(self) -> None:
        """Makes the version before the live one."""
        self._run("rollback", "--head", HEAD)


def server_flags(binaries: pathlib.Path, admin: str, root: pathlib.Path) -> list[str]:
    """Flags of a server whose weights can be swapped with folders below `root`."""
    help_text = subprocess.run(
        [str(binaries / "logprobd"), "--help"], capture_output=True, text=True, check=True
    ).stdout
    roots = [ROOT_FLAG, str(root)] if ROOT_FLAG in help_text else []
    return ["--admin", admin, *roots]


def free_port() -> int:
    """A port of the loopback that is free now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
