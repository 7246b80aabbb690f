"""Starts a server on this host."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections import deque
from collections.abc import Iterator, Sequence

from logprobd import demo_model
from logprobd.client import Client

# Matches a line of the server's log, as text or as JSON.
_READY = re.compile(r"[ \"]ready[ \"].*\bgrpc(?:=|\":)\"?([^\s\",}]+)")
_LINES_OF_ERRORS = 20
_STOP_SECONDS = 60.0


@contextlib.contextmanager
def serve(
    model: str | os.PathLike[str] | None = None,
    *,
    device: str = "auto",
    flags: Sequence[str] = (),
    timeout: float = 600.0,
) -> Iterator[Client]:
    """Runs a server of `model` and yields a client of it. The server ends with the block.

        with logprobd.serve("path/to/model") as client:
            result = client.score(hidden, targets)

    Args:
        model: a Hugging Face model folder or a .safetensors file. None writes and serves a random
            head of 32,003 ids and hidden size 512, for tests and first steps.
        device: "auto", "cpu" or "cuda".
        flags: further flags of the server, such as ["--shards", "2"]; `logprobd --help` lists them.
        timeout: seconds until the server must be ready.

    Raises ModuleNotFoundError if the server is not installed, RuntimeError with the last lines of
    its log if it exits, and TimeoutError if it is not ready in time.
    """
    program = server_program()
    with contextlib.ExitStack() as stack:
        if model is None:
            model = stack.enter_context(tempfile.TemporaryDirectory(prefix="logprobd-demo-"))
            demo_model.write_model(model)
        command = [program, "--model", os.fspath(model), "--device", device]
        command += ["--listen", "127.0.0.1:0", "--http", "none", *flags]
        server = stack.enter_context(ServerProcess(command))
        yield stack.enter_context(Client(server.await_ready(timeout), tls=False))


def server_program() -> str:
    """Returns the path of the server that is installed as a package, or else in the PATH.

    Raises ModuleNotFoundError if there is none.
    """
    try:
        server = importlib.import_module("logprobd_server")
    except ModuleNotFoundError:
        found = shutil.which("logprobd")
        if found is None:
            raise ModuleNotFoundError(
                "the server is not installed: run pip install logprobd-server, or pip install"
                " 'logprobd-server[cuda]' on a host with GPUs"
            ) from None
        return found
    program: str = server.binary("logprobd")
    return program


def _server_environment() -> dict[str, str]:
    """Returns the variables of a server that this process starts.

    LOGPROBD_TLS_* and LOGPROBD_TOKEN are those of this process's clients, so a server has TLS and
    tokens by its flags alone.
    """
    names = [
        name for name in os.environ if name != "LOGPROBD_TOKEN" and "LOGPROBD_TLS_" not in name
    ]
    # The line that says that the server is ready has the level info.
    return {name: os.environ[name] for name in names} | {"LOGPROBD_LOG_LEVEL": "info"}


class ServerProcess:
    """A process of the server, which is stopped at the end of its `with` block.

    Args:
        command: program and flags. OSError is raised if it cannot be run.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            command,
            env=_server_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self._lines: deque[str] = deque(maxlen=_LINES_OF_ERRORS)
        self._address: str | None = None
        # Set when the server is ready or has closed its output.
        self._is_decided = threading.Event()
        self._reader = threading.Thread(target=self._read, name="logprobd-serve", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        """Reads the log to its end, because a full pipe would stop the server."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            text = line.decode(errors="replace").rstrip()
            self._lines.append(text)
            ready = _READY.search(text)
            if ready is not None and self._address is None:
                self._address = ready.group(1)
                self._is_decided.set()
        self._is_decided.set()

    def await_ready(self, timeout: float) -> str:
        """Returns the address of the server once it is ready.

        Raises TimeoutError, or RuntimeError if the server exits, both with the end of its log.
        """
        if not self._is_decided.wait(timeout):
            raise TimeoutError(f"the server was not ready after {timeout:g} s:\n{self._log()}")
        if self._address is None:
            raise self.wait()
        return self._address

    def wait(self) -> RuntimeError:
        """Waits until the server exits, and returns an error with its status and the end of its
        log."""
        self._reader.join()
        status = self._process.wait()
        return RuntimeError(f"the server exited with status {status}:\n{self._log()}")

    def _log(self) -> str:
        return "\n".join(self._lines)

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()
