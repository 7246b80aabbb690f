"""The processes of a run (the server, the engine alone, the baselines) and the memory of GPUs."""

import contextlib
import json
import pathlib
import select
import subprocess
import sys
from collections.abc import Iterator

from server_process import ServerProcess

BENCH = pathlib.Path(__file__).resolve().parents[1]
LOG_LINES_SHOWN = 20
ENGINE_STARTS_WITHIN_S = 120
ENGINE_ANSWERS_WITHIN_S = 60  # in addition to the measured time


def _nvidia_smi(query: str) -> str | None:
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=30
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def gpu_memory_mib() -> float | None:
    """Returns the memory in use on all GPUs, as the driver reports it, or None without a GPU."""
    text = _nvidia_smi("--query-gpu=memory.used")
    try:
        return None if not text else sum(float(line) for line in text.splitlines())
    except ValueError:  # "[N/A]"
        return None


def gpu_memory_of_mib(pid: int) -> float | None:
    """Returns the memory of one process on all GPUs, or None if the driver does not report it."""
    text = _nvidia_smi("--query-compute-apps=pid,used_memory") or ""
    try:
        rows = [line.split(",") for line in text.splitlines()]
        own = [float(used) for owner, used in rows if int(owner) == pid]
    except ValueError:
        return None
    return sum(own) if own else None


@contextlib.contextmanager
def running(server: ServerProcess, name: str) -> Iterator[ServerProcess]:
    """Starts the server and stops it at the end of the context, even if it does not start. Prints the last
    lines of its log if something fails."""
    try:
        yield server.start()
    except BaseException:
        lines = "".join(f"  {name}: {line}" for line in server.log[-LOG_LINES_SHOWN:])
        print(lines, end="", file=sys.stderr, flush=True)
        raise
    finally:
        server.stop()


class EngineBench:
    """Runs engine_bench with a loaded head, which measures on request. Must be used as a context manager."""

    def __init__(self, binaries: pathlib.Path, *options: str) -> None:
        self.process = subprocess.Popen(
            [binaries / "engine_bench", *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.info = self._read(ENGINE_STARTS_WITHIN_S)

    def _read(self, within_s: float) -> dict:
        """Reads the next line, which is the result of one command."""
        assert self.process.stdout
        if not select.select([self.process.stdout], [], [], within_s)[0]:
            self.process.kill()
            self.process.wait()
            raise RuntimeError(f"engine_bench printed nothing for {within_s:.0f} s")
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"engine_bench ended with exit code {self.process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"engine_bench: {answer['error']}")
        return answer

    def _ask(self, command: str, seconds: float) -> dict:
        assert self.process.stdin
        try:
            self.process.stdin.write(command + "\n")
            self.process.stdin.flush()
        except OSError:
            raise RuntimeError(
                f"engine_bench ended with exit code {self.process.wait(10)}"
            ) from None
        return self._read(seconds + ENGINE_ANSWERS_WITHIN_S)

    def throughput(self, rows: int, seconds: float) -> dict:
        return self._ask(f"throughput {rows} {seconds:g}", seconds)

    def latency(self, rows: int, count: int) -> dict:
        return self._ask(f"latency {rows} {count}", 0)

    def __enter__(self) -> "EngineBench":
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin
        with contextlib.suppress(OSError):  # the process has ended
            self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class BaselineProcess(ServerProcess):
    """Runs baseline_server.py with the Python of this process."""

    def __init__(self, model: pathlib.Path, device: str, *options: str) -> None:
        # torch.compile for several shapes takes minutes on a loaded machine.
        super().__init__(pathlib.Path(), device=device, ready_seconds=240)
        self.command = [sys.executable, str(BENCH / "baseline_server.py")]
        self.command += ["--model", str(model), "--device", device, *options]
