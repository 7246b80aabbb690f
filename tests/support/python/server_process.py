"""Runs the built server for a test, on free ports."""

import os
import pathlib
import re
import signal
import ssl
import subprocess
import threading
import urllib.request

from waiting import becomes_true

# A line of text or of JSON.
READY = re.compile(r'\bready\b.*\bgrpc(?:=|":")(?P<grpc>[^\s"]+).*\bhttp(?:=|":")(?P<http>[^\s"]+)')


class ServerProcess:
    """A logprobd process; `log` holds what it has written. Use it as a context manager, or call start and stop."""

    def __init__(
        self,
        binaries: pathlib.Path,
        *options: str,
        device: str = "cpu",
        wait: bool = True,
        prefix: tuple[str, ...] = (),
        environment: dict[str, str] | None = None,
        ready_seconds: float = 60,
    ) -> None:
        self.command = [*prefix, str(binaries / "logprobd"), "--device", device]
        for name in ("--listen", "--http"):
            if name not in options:
                self.command += [name, "127.0.0.1:0"]
        self.command += options
        self.wait_until_ready = wait
        self.ready_seconds = ready_seconds
        self.environment = {
            key: value for key, value in os.environ.items() if not key.startswith("LOGPROBD_")
        } | (environment or {})
        self.log: list[str] = []
        self.grpc = ""
        self.http = ""
        self.admin = ""
        self.http_token = ""
        """The token that `get` and `metric` present."""
        self.http_ca: pathlib.Path | None = None
        """The CA that must have issued the certificate of HTTPS; None accepts every certificate."""

    def start(self) -> "ServerProcess":
        self.process = subprocess.Popen(
            self.command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="surrogateescape",  # keeps bytes that are no text, which a log must not have
            env=self.environment,
        )
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if self.wait_until_ready:
            is_ready = self._ready.wait(self.ready_seconds)
            assert is_ready, f"not ready in {self.ready_seconds:g} s:\n" + "".join(self.log)
            assert self.grpc, "ended while starting:\n" + "".join(self.log)
        return self

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.log.append(line)
            match = READY.search(line)
            if match:
                self.grpc, self.http = match["grpc"], match["http"]
                admin = re.search(
                    r'\badmin(?:=|":")([^\s"]+)', line
                )  # some servers do not print it
                self.admin = admin[1] if admin else ""
                self._ready.set()
        self._ready.set()

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def wait(self, timeout: float = 30) -> int:
        """Waits until the process ends and returns its exit code."""
        code = self.process.wait(timeout)
        self._reader.join(5)
        return code

    def stop(self) -> None:
        if not hasattr(self, "process"):
            return
        if self.process.poll() is None:
            self.signal()
            try:
                self.wait()
            except subprocess.TimeoutExpired:
                self.process.kill()
        self._reader.join(5)

    def __enter__(self) -> "ServerProcess":
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def get(self, path: str, timeout: float = 5) -> tuple[int, str]:
        """Returns the status and the text of a GET over HTTP or HTTPS, as the server's address says."""
        url, context = f"http://{self.http}{path}", None
        if self.http.startswith("https://"):
            url, context = self.http + path, ssl.create_default_context(cafile=self.http_ca)
            if self.http_ca is None:
                context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        headers = {"Authorization": f"Bearer {self.http_token}"} if self.http_token else {}
        request = urllib.request.Request(url, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=timeout, context=context) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def metric(self, name: str, **labels: str) -> float:
        """Returns the sum of a metric's samples that have these labels."""
        total, found = 0.0, False
        for line in self.get("/metrics")[1].splitlines():
            match = re.match(r"(\w+)(?:\{(.*)\})? (\S+)$", line)
            if not match or match[1] != name:
                continue
            have = dict(re.findall(r'(\w+)="([^"]*)"', match[2] or ""))
            if all(have.get(key) == value for key, value in labels.items()):
                total, found = total + float(match[3]), True
        assert found, f"no sample of {name} with {labels}"
        return total

    def peak_memory_bytes(self) -> int:
        """Returns the peak resident memory of the process."""
        status = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)[1]) * 1024

    def cpu_seconds(self) -> float:
        """Returns the CPU time that the process has used."""
        stat = pathlib.Path(f"/proc/{self.process.pid}/stat").read_text()
        user, system = stat.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def reset_peak_memory(self) -> int:
        """Lowers the peak to the resident memory of now and returns it."""
        pathlib.Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")
        return self.peak_memory_bytes()

    def wait_for_log(self, text: str, seconds: float = 30) -> None:
        """Waits until a line of the log contains `text`."""
        assert self.eventually(lambda: any(text in line for line in list(self.log)), seconds), text

    def eventually(self, condition, seconds: float = 10) -> bool:
        """Returns whether `condition()` becomes true within `seconds`."""
        return becomes_true(condition, seconds)
