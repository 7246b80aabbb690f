"""Runs a real Prometheus on a free port for a test and sends queries to it."""

import json
import math
import pathlib
import re
import shutil
import subprocess
import threading
import time
import urllib.parse
import urllib.request

LISTENING = re.compile(r'msg="Listening on" address=(\S+)')
READY = "Server is ready to receive web requests"


class PrometheusServer:
    """Scrapes `targets` (host:port, by job) four times a second with these rules. Use as a context manager.

    `scrape` has further settings of each job, such as `scheme`.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        targets: dict[str, list[str]],
        rules: pathlib.Path,
        **scrape: object,
    ) -> None:
        program = shutil.which("prometheus")
        assert program, "prometheus is missing: install the package prometheus"
        jobs = [
            {"job_name": job, "static_configs": [{"targets": addresses}], **scrape}
            for job, addresses in targets.items()
        ]
        interval = {"scrape_interval": "250ms", "evaluation_interval": "250ms"}
        # Valid JSON is also valid YAML.
        config = {"global": interval, "rule_files": [str(rules)], "scrape_configs": jobs}
        (folder / "prometheus.yml").write_text(json.dumps(config))
        self.command = [
            program,
            f"--config.file={folder}/prometheus.yml",
            f"--storage.tsdb.path={folder}/data",
            "--web.listen-address=127.0.0.1:0",
        ]
        self.log: list[str] = []

    def __enter__(self) -> "PrometheusServer":
        self.process = subprocess.Popen(
            self.command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self._ready.wait(30), "Prometheus was not ready within 30 s:\n" + "".join(self.log)
        log = "".join(self.log)
        assert self.process.poll() is None, log
        self.address = LISTENING.search(log)[1]
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(20)
        self._reader.join(5)

    def _read(self) -> None:
        for line in self.process.stderr:
            self.log.append(line)
            if READY in line:
                self._ready.set()
        self._ready.set()

    def get(self, path: str, **parameters: str) -> dict:
        """Returns the data of an API call."""
        query = urllib.parse.urlencode(parameters)
        url = f"http://{self.address}/api/v1/{path}?{query}"
        try:
            with urllib.request.urlopen(url, timeout=10) as reply:
                return json.load(reply)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from error

    def values(self, expr: str) -> list[float]:
        """Returns the current value of each series that `expr` selects."""
        result = self.get("query", query=expr)
        assert result["resultType"] == "vector", (expr, result)
        return [float(series["value"][1]) for series in result["result"]]

    def wait_for_values(self, expr: str, seconds: float, *, above_zero: bool) -> list[float]:
        """Returns the values once there are some, all are finite and, if `above_zero`, one is above zero.

        Returns the latest values after `seconds` at most.
        """
        end = time.monotonic() + seconds
        while True:
            values = self.values(expr)
            is_good = bool(values) and all(map(math.isfinite, values))
            if (is_good and (not above_zero or max(values) > 0)) or time.monotonic() > end:
                return values
            time.sleep(0.1)
