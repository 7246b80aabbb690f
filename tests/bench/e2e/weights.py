"""`logprobctl weights` as a tool: the one place that knows its flags."""

import pathlib
import socket
import subprocess

HEAD = "default"
ENDS_WITHIN_S = 120


class WeightsTool:
    """Loads and commits versions of the one head of a server, over its admin listener."""

    def __init__(self, binaries: pathlib.Path, admin: str) -> None:
        self.binary = binaries / "logprobctl"
        self.admin = admin

    def _run(self, *arguments: str) -> str:
        command = [str(self.binary), "weights", *arguments, "--address", self.admin]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"logprobctl weights {arguments[0]} did not end") from None
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


def server_flags(admin: str, root: pathlib.Path) -> list[str]:
    """Flags of a server whose weights can be swapped with folders below `root`."""
    return ["--admin", admin, "--weights-root", str(root)]


def free_port() -> int:
    """A port of the loopback that is free now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
