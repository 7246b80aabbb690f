"""The command logprobd-gateway and the example that runs it."""

import asyncio
import json
import pathlib
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from unittest import mock

import distill_teacher
import pytest
from gateway_process import GatewayProcess
from logprobd import Client, Unavailable
from logprobd_adapters import gateway_command

MODULE = [sys.executable, "-m", "logprobd_adapters.gateway_command"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("teacher")
    distill_teacher.make_model(seed=0).save_pretrained(folder)
    return folder


def run(environment: dict[str, str], *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150)


def post(url: str, **fields) -> dict:
    body = json.dumps({"prompt": [1, 2, 3], "prompt_logprobs": 1} | fields).encode()
    with urllib.request.urlopen(f"{url}/v1/completions", body) as response:
        return json.load(response)


def test_help_explains_requests_errors_and_who_may_connect(environment) -> None:
    done = run(environment, *MODULE, "--help")

    assert done.returncode == 0
    text = " ".join(done.stdout.split())
    for word in (
        "prompt_logprob_token_ids",
        "GET /readyz",
        "Retry-After",
        "needs --https-cert",
        "--vllm-arguments JSON",
        "Default: 127.0.0.1",
    ):
        assert word in text


def test_the_gateway_serves_until_it_is_stopped(environment, folder, built_operator) -> None:
    options = (
        "--local",
        "--model",
        str(folder),
        "--served-model-name",
        "big",
        "--max-model-len",
        "4",
    )
    with GatewayProcess(environment, *options) as gateway:
        response = post(gateway.url, model="big")
        with pytest.raises(urllib.error.HTTPError, match="400"):
            post(gateway.url, prompt=[1, 2, 3, 4, 5])
        code = gateway.stop()

    assert response["model"] == "big" and len(response["choices"][0]["prompt_logprobs"]) == 3
    assert code == 0
    log = "".join(gateway.log)
    progress = (
        "listening on ",
        "loading ",
        "loaded in ",
        "max_model_len 4; the head agrees",
        "stopping",
    )
    assert all(text in log for text in progress)
    assert "POST" not in log


def test_the_connection_to_the_server_is_closed_when_the_gateway_ends(monkeypatch) -> None:
    server = mock.create_autospec(Client, instance=True, address="a:1")
    server.wait_ready.side_effect = Unavailable("no server")
    monkeypatch.setattr(gateway_command, "connect", lambda **_: server)
    options = gateway_command._parser().parse_args(["--model", "m", "--listen", "127.0.0.1:0"])

    with pytest.raises(Unavailable, match="no server"):
        asyncio.run(gateway_command._serve(options, None, None))

    server.close.assert_called_once_with()


def test_a_coarser_head_is_accepted_if_told(environment, folder, tmp_path, start_server) -> None:
    model = distill_teacher.make_model(seed=0)
    model.bfloat16().save_pretrained(tmp_path)
    address = start_server("--model", str(tmp_path)).grpc
    options = ("--model", str(folder), "--address", address, "--listen", "127.0.0.1:0")

    refused = run(environment, *MODULE, *options)
    with GatewayProcess(environment, *options[:4], "--allow-rounded-head") as gateway:
        post(gateway.url)

    assert refused.returncode == 1 and "Traceback" not in refused.stderr
    assert "head is bf16 and the model's fp32" in refused.stderr
    assert "--allow-rounded-head" in refused.stderr


def test_verbose_logs_a_line_for_each_request(environment, folder, built_operator) -> None:
    with GatewayProcess(environment, "--local", "--model", str(folder), "--verbose") as gateway:
        post(gateway.url)
        gateway.stop()

    (line,) = [line for line in gateway.log if "POST" in line]
    assert re.search(r"127.0.0.1 POST /v1/completions 200, 3 tokens, [\d.]+ ms$", line)


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--local", "--model", "/nowhere"), 1, "/nowhere"),
        (("--local", "--model", "m", "--address", "127.0.0.1:1"), 2, "--local needs no server"),
        (("--local", "--model", "m", "--listen", "8480"), 2, "'8480' is not HOST:PORT"),
        (("--local", "--model", "m", "--listen", "127.0.0.1:65536"), 2, "a port to 65535"),
        (("--local", "--model", "m", "--listen", "127.0.0.1:²"), 2, "'127.0.0.1:²' is not HOST"),
        (("--local", "--model", "m", "--batch-tokens", "0"), 2, "'0' is not a number above 0"),
        (("--local", "--model", "m", "--max-body-mib", "0"), 2, "'0' is not a number above 0"),
        ((), 2, "--model"),
    ],
)
def test_a_mistake_ends_the_command_with_a_message(environment, options, code, message) -> None:
    listen = () if "--listen" in options else ("--listen", "127.0.0.1:0")

    done = run(environment, *MODULE, *options, *listen)

    assert done.returncode == code and message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_port_in_use_is_reported_before_the_model_is_loaded(environment, folder) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        done = run(environment, *MODULE, "--local", "--model", str(folder), "--listen", listen)

    assert done.returncode == 1 and "address already in use" in done.stderr
    assert "loading" not in done.stderr and "Traceback" not in done.stderr


def test_the_bench_measures_every_case(environment, built_operator) -> None:
    bench = str(pathlib.Path(__file__).parents[1] / "bench" / "gateway_bench.py")

    options = ("--requests", "1", "--vocab-size", "200", "--commit", "none")

    done = run(environment, sys.executable, bench, *options)

    assert done.returncode == 0, done.stdout + done.stderr
    figures = {entry["what"]: entry["figure"] for entry in json.loads(done.stdout)}
    cases = [
        f"{tokens} tokens, prompt_logprobs {k}"
        for tokens, k in ((128, 1), (512, 8), (512, 100), (2048, 8), (2048, 64), (2048, 100))
    ]
    columns = ("response", "body", "head", "added by the gateway", "CPU time added")
    assert set(figures) == {f"{case}: {column}" for case in cases for column in columns}
    assert min(figures.values()) > 0


# Regression: the example hung after an error, and once the gateway had filled the pipe of its log.
def test_the_gateway_of_the_example_ends_after_an_error_and_its_log_is_read(
    tmp_path, monkeypatch
) -> None:
    program = tmp_path / "gateway"
    program.write_text(
        f"#!{sys.executable}\n"
        "import pathlib, sys, time\n"
        "print('ready: http://127.0.0.1:1', file=sys.stderr, flush=True)\n"
        "print('x' * (1 << 20), file=sys.stderr, flush=True)\n"
        f"pathlib.Path({str(tmp_path)!r}, 'written').touch()\n"
        "time.sleep(600)\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    started = time.monotonic()

    with pytest.raises(KeyError), distill_teacher.run_gateway(tmp_path, "a:1") as url:
        assert url == "http://127.0.0.1:1"
        while not (tmp_path / "written").exists():
            assert time.monotonic() - started < 60, "the log is not read"
        raise KeyError

    assert time.monotonic() - started < 120


def test_a_gateway_of_the_example_that_does_not_start_is_an_error_with_its_log(
    tmp_path, monkeypatch
) -> None:
    program = tmp_path / "gateway"
    program.write_text("#!/bin/sh\necho 'no such model' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))

    with pytest.raises(RuntimeError, match="no such model"):
        with distill_teacher.run_gateway(tmp_path, "a:1"):
            pass


def test_the_example_shows_that_the_exact_divergence_is_larger_than_the_top_tokens_show(
    environment,
) -> None:
    done = run(environment, sys.executable, distill_teacher.__file__, "--steps", "25")

    assert done.returncode == 0, done.stdout + done.stderr
    (difference,) = re.findall(r"own log-softmax: (\S+)", done.stdout)
    assert float(difference) < 1e-5
    rows = re.findall(r"^\| (\d+) \| (\S+) \| (\S+) \| (\S+) \|$", done.stdout, re.MULTILINE)
    first, last = ([float(cell) for cell in row] for row in (rows[0], rows[-1]))
    assert (first[0], last[0]) == (0, 25)
    assert first[1] == first[3]  # both students begin alike
    assert all(end < 0.5 * begin for begin, end in zip(first[1:], last[1:], strict=True))
    assert all(float(exact) > 2 * float(shown) for _, exact, shown, _ in rows)
