"""Runs the command logprobd-gateway for a test, on a free port."""

import re
import signal
import subprocess
import sys
import threading

READY = re.compile(r"ready: (\S+)$")


class GatewayProcess:
    """A logprobd-gateway process on the CPU; `log` holds what it has written. Use it as a context manager."""

    def __init__(self, environment: dict[str, str], *options: str) -> None:
        self._environment = environment
        self._command = [
            sys.executable,
            "-m",
            "logprobd_adapters.gateway_command",
            "--device",
            "cpu",
        ]
        self._command += ["--listen", "127.0.0.1:0", *options]
        self.log: list[str] = []
        self.url = ""

    def __enter__(self) -> "GatewayProcess":
        self.process = subprocess.Popen(
            self._command, env=self._environment, stderr=subprocess.PIPE, text=True
        )
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self._ready.wait(120), "not ready in 120 s:\n" + "".join(self.log)
        assert self.url, "ended while starting:\n" + "".join(self.log)
        return self

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if match := READY.search(line):
                self.url = match[1]
                self._ready.set()
        self._ready.set()

    def stop(self) -> int:
        """Ends the process as an operator does, and returns its exit code."""
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(30)
        self._reader.join(5)
        return code

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.stop()
