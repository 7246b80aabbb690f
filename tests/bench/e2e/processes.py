"""The processes of a run: the server, the engine alone, the baselines; and the memory of GPUs."""

import json
import pathlib
import subprocess
import sys

from server_process import ServerProcess

BENCH = pathlib.Path(__file__).resolve().parents[1]


def gpu_memory_mib() -> float | None:
    """Memory in use on all GPUs, by the driver's account; None where there is none."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        text = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=30
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return sum(float(line) for line in text.split())


class EngineBench:
    """engine_bench with a head loaded; measures when it is asked. Use as a context."""

    def __init__(self, binaries: pathlib.Path, *options: str) -> None:
        self.process = subprocess.Popen(
            [binaries / "engine_bench", *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.facts = self._read()

    def _read(self) -> dict:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"engine_bench ended with {self.process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"engine_bench: {answer['error']}")
        return answer

    def _ask(self, command: str) -> dict:
        assert self.process.stdin
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self._read()

    def throughput(self, rows: int, seconds: float) -> dict:
        return self._ask(f"throughput {rows} {seconds:g}")

    def latency(self, rows: int, count: int) -> dict:
        return self._ask(f"latency {rows} {count}")

    def __enter__(self) -> "EngineBench":
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()


class BaselineProcess(ServerProcess):
    """baseline_server.py in this Python."""

    def __init__(self, model: pathlib.Path, device: str, *options: str) -> None:
        # torch.compile for several shapes on a loaded machine takes its time.
        super().__init__(pathlib.Path(), device=device, ready_seconds=240)
        self.command = [sys.executable, str(BENCH / "baseline_server.py")]
        self.command += ["--model", str(model), "--device", device, *options]
