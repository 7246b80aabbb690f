"""Tests the start of the server: options, the plan, and every reason to refuse to start.

The tests cover rows C54, C56, C57, E81, E83, E84 and G105 of tests/FAULTS.md.
"""

import fcntl
import json
import os
import pathlib
import signal
import socket
import struct
import subprocess
import tempfile

import ml_dtypes
import numpy as np
import pytest
from model_folder import ModelFolder, write_biased_head
from scoring_rpc import Scoring, request

AT_ANY_PORT = ("--listen", "127.0.0.1:0", "--http", "127.0.0.1:0")


def run(binaries: pathlib.Path, *options: str, environment: dict[str, str] | None = None):
    return subprocess.run(
        [str(binaries / "logprobd"), *options],
        capture_output=True,
        text=True,
        timeout=30,
        env={"PATH": "/usr/bin:/bin"} | (environment or {}),
    )


def assert_one_clear_error(result, *words: str) -> None:
    assert result.returncode in (1, 2), result
    errors = [line for line in result.stderr.splitlines() if "error" in line]
    assert len(errors) == 1, result.stderr
    for word in words:
        assert word in errors[0]


def test_dry_run_prints_the_plan_and_serves_nothing(binaries, model) -> None:
    result = run(binaries, "--model", str(model.path), "--device", "cpu", "--dry-run")
    assert result.returncode == 0, result.stderr
    for word in ("1003", "64", "tied", "bf16", "cpu", "weights", "workspace", "staging", "receive"):
        assert word in result.stdout, word


def test_help_names_every_flag_with_its_default(binaries) -> None:
    text = run(binaries, "--help").stdout
    for flag in (
        "--model",
        "--head-tensor",
        "--device",
        "--gpus",
        "--shards",
        "--replicas",
        "--watchdog-s",
        "--listen",
        "--http",
        "--local",
        "--admin",
        "--valid-vocab",
        "--include-padding",
        "--config",
        "--dry-run",
        "--print-config",
        "--version",
        "--log-level",
        "--log-format",
        "--grace-s",
        "--batch-rows",
    ):
        assert flag in text, flag
    assert "127.0.0.1:8470" in text and "127.0.0.1:9470" in text


def test_flag_beats_environment_beats_file_beats_default(binaries, model, tmp_path) -> None:
    file = tmp_path / "logprobd.toml"
    file.write_text(f'model = "{model.path}"\nbatch-rows = 100\ngrace-s = 7\nqueue-rows = 5000\n')
    result = run(
        binaries,
        "--config",
        str(file),
        "--batch-rows",
        "300",
        "--print-config",
        environment={"LOGPROBD_BATCH_ROWS": "200", "LOGPROBD_GRACE_S": "8"},
    )
    assert result.returncode == 0, result.stderr
    values = dict(
        line.split("#")[0].split("=")
        for line in result.stdout.splitlines()
        if "=" in line.split("#")[0]
    )
    values = {key.strip(): value.strip() for key, value in values.items()}
    assert values["batch-rows"] == "300"
    assert values["grace-s"] == "8"
    assert values["queue-rows"] == "5000"


@pytest.mark.parametrize(
    "text, word",
    [
        ("bach-rows = 5", "bach-rows"),
        ('batch-rows = "many"', "batch-rows"),
        ("batch-rows = -5", "batch-rows"),
        ("batch-rows = 5\nbatch-rows = 6", "batch-rows"),
        ("[[[", "toml"),
    ],
    ids=["unknown key", "wrong type", "negative", "duplicate", "not TOML"],
)
def test_g105_a_bad_configuration_refuses_to_start(binaries, model, tmp_path, text, word) -> None:
    file = tmp_path / "c.toml"
    file.write_text(text)
    assert_one_clear_error(run(binaries, "--config", str(file), "--model", str(model.path)), word)


def test_g105_a_missing_configuration_file_refuses_to_start(binaries, model) -> None:
    result = run(binaries, "--config", "/nowhere/c.toml", "--model", str(model.path))
    assert_one_clear_error(result, "/nowhere/c.toml")


def test_an_unknown_flag_and_an_unknown_variable_are_errors(binaries, model) -> None:
    assert_one_clear_error(run(binaries, "--modle", "x"), "--modle")
    assert_one_clear_error(
        run(binaries, "--model", str(model.path), environment={"LOGPROBD_BACH_ROWS": "1"}),
        "LOGPROBD_BACH_ROWS",
    )


def test_e83_a_port_in_use_is_one_clear_line(binaries, model) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        for flag, other in (("--listen", "--http"), ("--http", "--listen")):
            result = run(
                binaries,
                "--model",
                str(model.path),
                "--device",
                "cpu",
                flag,
                address,
                other,
                "127.0.0.1:0",
            )
            assert result.returncode == 1
            assert_one_clear_error(result, address)


def test_a_public_address_needs_insecure(binaries, model) -> None:
    result = run(
        binaries,
        "--model",
        str(model.path),
        "--device",
        "cpu",
        "--listen",
        "0.0.0.0:0",
        "--http",
        "127.0.0.1:0",
    )
    assert_one_clear_error(result, "--insecure")


def test_e84_a_low_limit_of_open_files_refuses_to_start(binaries, model) -> None:
    result = subprocess.run(
        [
            "bash",
            "-c",
            f"ulimit -n 40; exec {binaries}/logprobd --model {model.path} --device cpu "
            "--listen 127.0.0.1:0 --http 127.0.0.1:0",
        ],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert_one_clear_error(result, "40")


def test_e84_too_few_threads_refuse_to_start(binaries, model) -> None:
    # The address space has room for only a few stacks of 1 GiB.
    result = subprocess.run(
        [
            "bash",
            "-c",
            f"ulimit -s 1048576 -v 16777216; exec {binaries}/logprobd --model {model.path} "
            "--device cpu --listen 127.0.0.1:0 --http 127.0.0.1:0",
        ],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert result.returncode == 1
    assert_one_clear_error(result, "threads can be started", "at least 64", "ulimit")


def test_e81_missing_staging_memory_refuses_to_start(binaries, tmp_path) -> None:
    ModelFolder.write(tmp_path, vocab=8, hidden=4096)
    # Staging takes 2 x 8 GiB, but the address space is limited to 8 GiB.
    result = subprocess.run(
        [
            "bash",
            "-c",
            f"ulimit -v 8388608; exec {binaries}/logprobd --model {tmp_path} --device cpu "
            "--batch-rows 1048576 --listen 127.0.0.1:0 --http none --log-level error",
        ],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert result.returncode == 1
    assert_one_clear_error(result, "memory")


def as_another_user() -> list[str]:
    """Returns a command prefix that runs a command as another user, because root may read every file.

    The user= argument of subprocess is not used because it forks: gRPC's client in this process then starts
    its pollers in the child, and one of them wrote "error: Bad file descriptor" before the server's own line.
    """
    nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--keep-groups", "--"]
    return nobody if os.geteuid() == 0 else []


@pytest.mark.parametrize("unreadable", ["config.json", "model.safetensors"])
def test_e83_a_file_that_may_not_be_read_is_one_clear_line(binaries, unreadable) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder)
        path.chmod(0o755)
        ModelFolder.write(path, vocab=8, hidden=8)
        (path / unreadable).chmod(0)
        result = subprocess.run(
            [
                *as_another_user(),
                binaries / "logprobd",
                *("--model", folder, "--listen", "127.0.0.1:0", "--http", "none"),
            ],
            capture_output=True,
            text=True,
            timeout=30,
        )
    assert result.returncode == 1
    assert_one_clear_error(result, unreadable, "cannot open", "Permission denied")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("kind", ["folder", "dangling link", "fifo"])
def test_e83_a_path_that_is_not_a_file_is_one_clear_line(binaries, tmp_path, name, kind) -> None:
    ModelFolder.write(tmp_path, vocab=8, hidden=8)
    path = tmp_path / name
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to(tmp_path / "gone")
    result = run(binaries, "--model", str(tmp_path), "--listen", "127.0.0.1:0", "--http", "none")
    assert result.returncode == (1 if kind == "dangling link" else 2)
    assert_one_clear_error(result, name)


def test_a_sighup_before_the_server_reads_its_signals_ends_nothing(binaries) -> None:
    # Regression: a SIGHUP within 20 ms of the start ended the process.
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)  # --help is longer, so the process waits in main
    with subprocess.Popen([binaries / "logprobd", "--help"], stdout=writer) as process:
        os.close(writer)
        with open(reader, "rb") as output:
            first = output.read(1)
            process.send_signal(signal.SIGHUP)
            text = first + output.read()
    assert process.returncode == 0
    assert b"Exit status" in text


def test_e83_a_configuration_file_that_may_not_be_read_is_one_clear_line(binaries) -> None:
    with tempfile.NamedTemporaryFile(suffix=".toml") as file:
        result = subprocess.run(
            [*as_another_user(), binaries / "logprobd", "--config", file.name],
            capture_output=True,
            text=True,
            timeout=30,
        )
    assert result.returncode == 2
    assert_one_clear_error(result, file.name, "cannot be read")


@pytest.mark.parametrize(
    "options, word",
    [
        (["--listen", "nowhere"], "--listen"),
        (["--http", "0.0.0.0:0"], "--insecure"),
        (["--admin", "127.0.0.1:99999"], "--admin"),
        (["--receive-bytes", "100MiB"], "--receive-bytes"),
        (["--receive-bytes", "1GiB"], "--queue-bytes"),
        (["--copy-threads", "512"], "--copy-threads"),
        (["--gpus", "0,0"], "--gpus"),
        (["--gpus", "0,1", "--shards", "3"], "--shards"),
        (["--head-name", "unknown"], "--head-name"),
        (["--head-name", "a" * 300], "--head-name"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else value,
)
def test_g105_settings_that_would_fail_later_are_bad_settings(
    binaries, model, options, word
) -> None:
    # Regression: these settings passed --dry-run, and the start failed with 1, for some after reading the weight.
    result = run(binaries, "--model", str(model.path), "--dry-run", *options)
    assert result.returncode == 2
    assert_one_clear_error(result, word)


def test_cuda_without_a_gpu_says_why(binaries, model) -> None:
    result = run(
        binaries,
        "--model",
        str(model.path),
        "--device",
        "cuda",
        "--dry-run",
        environment={"CUDA_VISIBLE_DEVICES": ""},
    )
    assert_one_clear_error(result, "--device cpu")


def broken(tmp_path: pathlib.Path, header: bytes, data: bytes = b"", length: int | None = None):
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 4, "vocab_size": 2}))
    size = struct.pack("<Q", len(header) if length is None else length)
    (tmp_path / "model.safetensors").write_bytes(size + header + data)
    return tmp_path


@pytest.mark.parametrize(
    "header, data, length, word",
    [
        (b"{}", b"", 1 << 40, "header"),
        (
            b'{"lm_head.weight":{"dtype":"F32","shape":[2,4],"data_offsets":[0,32]}}',
            b"\0" * 30,
            None,
            "32",
        ),
        (
            b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},'
            b'"lm_head.weight":{"dtype":"F32","shape":[2,4],"data_offsets":[8,40]}}',
            b"\0" * 40,
            None,
            "overlap",
        ),
        (
            b'{"lm_head.weight":{"dtype":"I8","shape":[2,4],"data_offsets":[0,8]}}',
            b"\0" * 8,
            None,
            "I8",
        ),
        (
            b'{"lm_head.weight":{"dtype":"F32","shape":[2,5],"data_offsets":[0,40]}}',
            b"\0" * 40,
            None,
            "5",
        ),
    ],
    ids=["length beyond the file", "truncated", "overlap", "integers", "another hidden size"],
)
def test_c57_broken_checkpoints_are_refused(binaries, tmp_path, header, data, length, word) -> None:
    folder = broken(tmp_path, header, data, length)
    assert_one_clear_error(
        run(binaries, "--model", str(folder), "--device", "cpu", "--dry-run"), word
    )


ROWS, COLUMNS = 700, 64


def head_with(folder: pathlib.Path, dtype, *, weight=None, bias=None, vocab: int = ROWS):
    """Writes a head of ones in which `weight` and `bias`, by index, are other values. Returns the folder."""
    rows = np.ones((ROWS, COLUMNS), dtype)
    biases = np.zeros(ROWS, np.float32)
    for array, values in ((rows, weight), (biases, bias)):
        for index, value in (values or {}).items():
            array[index] = value
    write_biased_head(folder, rows, biases)
    config = json.loads((folder / "config.json").read_text()) | {"vocab_size": vocab}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# Regression: such a server was "ready", and every row was NaN.
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("options", [(), ("--shards", "3"), ("--replicas", "2")])
def test_c54_a_weight_that_is_not_finite_refuses_to_start(
    binaries, tmp_path, dtype, value, options
) -> None:
    folder = head_with(tmp_path, dtype, weight={(617, 21): value})

    result = run(binaries, "--model", str(folder), "--device", "cpu", *AT_ANY_PORT, *options)

    words = (str(folder), "row 617 column 21 is NaN or Inf", "--valid-vocab")
    assert_one_clear_error(result, *words)
    assert "ready" not in result.stderr


def test_c54_a_bias_that_is_not_finite_refuses_to_start(binaries, tmp_path) -> None:
    folder = head_with(tmp_path, np.float32, bias={699: -np.inf})

    result = run(binaries, "--model", str(folder), "--device", "cpu", *AT_ANY_PORT)

    assert_one_clear_error(result, "the bias of row 699 is NaN or Inf")


def test_c54_one_of_several_heads_that_is_not_finite_is_named(binaries, model, tmp_path) -> None:
    folder = head_with(tmp_path, np.float32, weight={(0, 0): np.nan})
    models = ("--model", f"good={model.path}", "--model", f"bad={folder}")

    result = run(binaries, *models, "--device", "cpu", *AT_ANY_PORT)

    assert_one_clear_error(result, 'head "bad"', "row 0 column 0 is NaN or Inf")


@pytest.mark.parametrize("by_flag", [False, True], ids=["config", "--valid-vocab"])
def test_rows_beyond_the_vocabulary_may_be_anything(start_server, tmp_path, by_flag) -> None:
    valid = 650
    padding = {(valid, 0): np.nan, (699, 63): np.inf}
    folder = head_with(
        tmp_path,
        np.float32,
        weight=padding,
        bias={valid: np.nan},
        vocab=ROWS if by_flag else valid,
    )

    server = start_server(
        "--model", str(folder), *(("--valid-vocab", str(valid)) if by_flag else ())
    )

    with Scoring(server.grpc) as scoring:
        response = scoring.score(request(rows=1, hidden_size=COLUMNS))
    logprob = np.frombuffer(response.logprob, np.float32)
    assert logprob == pytest.approx(-np.log(valid), abs=1e-5)


def test_c56_paths_without_a_model_are_refused(binaries, tmp_path) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": 4, "vocab_size": 2}')
    assert_one_clear_error(run(binaries, "--model", "/dev/null", "--dry-run"), "/dev/null")
    assert_one_clear_error(run(binaries, "--model", str(tmp_path / "no"), "--dry-run"), "no")
    assert_one_clear_error(run(binaries, "--model", str(tmp_path), "--dry-run"), "safetensors")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    assert_one_clear_error(
        run(binaries, "--model", str(tmp_path), "--dry-run"), "pytorch_model.bin"
    )
    index = {"weight_map": {"lm_head.weight": "../outside.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_one_clear_error(run(binaries, "--model", str(tmp_path), "--dry-run"), "../outside")


def test_version_is_printed(binaries) -> None:
    assert run(binaries, "--version").stdout.startswith("logprobd 0.")
