"""Steps of the set-up scripts end correctly, and quickstart.sh refuses a port that is in use."""

import os
import pathlib
import signal
import socket
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[3]


def test_an_ended_script_ends_the_command_of_its_step(tmp_path: pathlib.Path) -> None:
    # Regression: Ctrl-C left apt-get or ninja running.
    started = tmp_path / "started"
    os.mkfifo(started)
    script = f"""set -euo pipefail
        step_logs={tmp_path}/logs step_count=1
        source deploy/steps.sh
        step "waiting" bash -c 'sleep 600 & echo $! >{started}; wait'"""
    process = subprocess.Popen(["bash", "-c", script], cwd=ROOT, stdout=subprocess.DEVNULL)
    sleeper = int(started.read_text())

    process.send_signal(signal.SIGTERM)

    assert process.wait(timeout=20) == 130
    state = pathlib.Path(f"/proc/{sleeper}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"


def test_a_failed_step_ends_the_script_with_the_logs_end(tmp_path: pathlib.Path) -> None:
    script = f"""set -euo pipefail
        step_logs={tmp_path} step_count=1
        source deploy/steps.sh
        step "failing" bash -c 'echo the reason; exit 3'
        echo "went on" """
    result = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True)

    assert result.returncode == 1
    assert "the reason" in result.stderr
    assert "went on" not in result.stdout


def test_quickstart_goes_on_where_there_is_no_toolkit() -> None:
    # Regression: without nvcc on a bare Debian, asking for its version ended the build step.
    text = (ROOT / "deploy" / "quickstart.sh").read_text()
    function = text[text.index("toolkit_version() {") :].split("\n}\n")[0] + "\n}\n"
    script = "set -euo pipefail\n" + function + "nvcc() { return 127; }\n"
    script += 'wanted="nvcc=$(toolkit_version)"\necho "$wanted and on"'
    result = subprocess.run(["bash", "-c", script], capture_output=True, text=True)

    assert result.stdout == "nvcc= and on\n", result.stderr


def test_quickstart_refuses_a_port_that_another_server_holds() -> None:
    # Regression: the script took that server for its own, scored with it, and reported success.
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        result = subprocess.run(
            ["bash", "deploy/quickstart.sh", "--device", "cpu", "--http-port", str(port)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
        )

    assert result.returncode == 1
    assert f"port {port} is in use" in result.stderr
