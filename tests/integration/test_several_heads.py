"""Several heads in one server: scores, names, settings and fair sharing of the device."""

import json
import subprocess
import threading
import time

import grpc
import logprobd
import numpy as np
import pytest
from model_folder import ModelFolder
from scoring_rpc import Scoring, request
from server_process import ServerProcess


@pytest.fixture(scope="module")
def other_model(tmp_path_factory) -> ModelFolder:
    """A model of another size."""
    return ModelFolder.write(tmp_path_factory.mktemp("other"), vocab=331, hidden=40, seed=2)


@pytest.fixture(scope="module")
def both(binaries, model, other_model):
    """Runs a server with the heads "policy" and "draft"."""
    options = ("--model", f"policy={model.path}", "--model", f"draft={other_model.path}")
    settings = ("--weights-version", "draft=7", "--shards", "policy=2")
    with ServerProcess(binaries, *options, *settings) as process:
        yield process


def run(binaries, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(binaries / "logprobd"), "--device", "cpu", *options],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": "/usr/bin:/bin"},
    )


def rows_of(hidden: int, vocab: int, rows: int = 50) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(hidden)
    return draw.standard_normal((rows, hidden)).astype(np.float32), draw.integers(0, vocab, rows)


@pytest.mark.parametrize("name", ["policy", "draft"])
def test_each_head_has_the_bits_of_a_server_of_its_own(
    both, start_server, model, other_model, name
) -> None:
    folder = model if name == "policy" else other_model
    hidden, targets = rows_of(folder.weight.shape[1], folder.weight.shape[0])
    outputs = ("logprob", "entropy", "argmax")
    alone = start_server("--model", str(folder.path))
    with logprobd.Client(both.grpc) as client, logprobd.Client(alone.grpc) as single:
        ours = client.score(hidden, targets, head=name, outputs=outputs)
        theirs = single.score(hidden, targets, outputs=outputs)
    assert (ours.logprob == theirs.logprob).all()
    assert (ours.entropy == theirs.entropy).all()
    assert (ours.argmax_id == theirs.argmax_id).all()


def test_heads_are_listed_with_their_own_info(both) -> None:
    with logprobd.Client(both.grpc) as client:
        heads = {head.name: head for head in client.list_heads()}
        assert list(heads) == ["policy", "draft"]
        assert heads["policy"].hidden_size == 64 and heads["draft"].hidden_size == 40
        assert heads["policy"].weights_version == 1 and heads["draft"].weights_version == 7
        assert client.info("draft").vocab_size == 331
        with pytest.raises(logprobd.InvalidArgument, match='"policy", "draft"'):
            client.info()
    assert both.metric("logprobd_ready", head="policy") == 1
    assert both.metric("logprobd_ready", head="draft") == 1
    assert any('head="policy, draft"' in line for line in both.log if " ready " in line)
    page = both.get("/")[1]
    assert page.count("replica 0 shard") == 3  # two shards of policy, one of draft
    assert "all heads    policy, draft" in page


def test_a_request_must_name_one_of_several_heads(both) -> None:
    with Scoring(both.grpc) as scoring:
        with pytest.raises(grpc.RpcError) as unnamed:
            scoring.score(request())
        with pytest.raises(grpc.RpcError) as unknown:
            scoring.score(request(head="other"))
        assert scoring.score(request(head="policy")).logprob
    assert unnamed.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert unknown.value.code() == grpc.StatusCode.NOT_FOUND
    for error in (unnamed, unknown):
        assert "policy, draft" in error.value.details()


def test_rows_are_counted_at_their_head(both) -> None:
    def scored(head: str) -> float:
        return both.metric("logprobd_rows_total", head=head, kind="scored")

    before = scored("policy"), scored("draft")
    with Scoring(both.grpc) as scoring:
        scoring.score(request(rows=5, head="draft", hidden_size=40))
    assert (scored("policy"), scored("draft")) == (before[0], before[1] + 5)


def test_logprobctl_works_on_each_head(binaries, both, tmp_path) -> None:
    def logprobctl(command: str, *options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [binaries / "logprobctl", command, "--address", both.grpc, *options],
            capture_output=True,
            text=True,
            timeout=60,
        )

    info = logprobctl("info").stdout
    assert "policy" in info and "draft" in info
    selftest = json.loads(logprobctl("selftest", "--json").stdout)
    assert [head["head"] for head in selftest["heads"]] == ["policy", "draft"]
    assert selftest["passed"]
    one = json.loads(logprobctl("selftest", "--json", "--head", "draft").stdout)
    assert [head["head"] for head in one["heads"]] == ["draft"]

    hidden, targets = rows_of(40, 331, rows=3)
    np.save(tmp_path / "hidden.npy", hidden)
    np.save(tmp_path / "targets.npy", targets)
    files = ("--hidden", str(tmp_path / "hidden.npy"), "--targets", str(tmp_path / "targets.npy"))
    assert logprobctl("score", "--head", "draft", *files).returncode == 0
    unnamed = logprobctl("score", *files)
    assert unnamed.returncode != 0 and "policy, draft" in unnamed.stderr

    load = ("--requests", "5", "--rows", "4")
    assert logprobctl("bench", "--head", "draft", *load).returncode == 0
    assert "choose a head with --head" in logprobctl("bench", *load).stderr


def test_dry_run_shows_every_head_and_the_sums(binaries, model, other_model) -> None:
    result = run(binaries, "--dry-run", "--model", f"a={model.path},b={other_model.path}")
    assert result.returncode == 0, result.stderr
    first, second, both = result.stdout.split("\n\n")
    assert first.startswith("head         a\n") and "1003 rows" in first
    assert second.startswith("head         b\n") and "331 rows" in second
    assert both.startswith("all heads    a, b\n")
    assert "receive" in both and "receive" not in first + second
    total = both.splitlines()[-1].split()
    assert total[:3] == ["memory", "host", "total"] and total[-1] == "free"


def test_dry_run_says_what_does_not_fit(binaries, tmp_path) -> None:
    ModelFolder.write(tmp_path, vocab=8, hidden=8192)
    # Each head takes 2 x 16 GiB of staging: 2 TiB in total.
    heads = [option for i in range(64) for option in ("--model", f"h{i}={tmp_path}")]
    result = run(binaries, "--dry-run", "--batch-rows", "1048576", *heads)
    assert result.returncode == 1
    assert "host memory: all heads together reserve" in result.stderr
    assert "but the process can have at most" in result.stderr


@pytest.mark.parametrize(
    "options, words",
    [
        (["--model", "a=/x", "--model", "a=/y"], ["--model", 'twice for head "a"']),
        (["--model", "a=/x", "--model", "/y"], ["--model", "NAME=DIR"]),
        (["--model", "unknown=/x"], ["--model", '"unknown"']),
        (["--model", "a=/x", "--head-name", "b"], ["--head-name"]),
        (["--model", "a=/x,b=/y", "--shards", "c=2"], ["--shards", '"c"', "a, b"]),
        (["--model", "a=/x,b=/y", "--valid-vocab", "b=none"], ["--valid-vocab", '"b"']),
    ],
    ids=["twice", "mixed", "unknown", "head-name", "no such head", "value"],
)
def test_bad_settings_of_heads_name_flag_and_head(binaries, options, words) -> None:
    result = run(binaries, "--dry-run", *options)
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1
    for word in words:
        assert word in result.stderr


def test_a_head_that_cannot_be_opened_is_named(binaries, model) -> None:
    result = run(binaries, "--dry-run", "--model", f"a={model.path},b=/nowhere")
    assert result.returncode == 1
    assert 'head "b"' in result.stderr and "/nowhere" in result.stderr


def test_the_printed_configuration_reads_back(binaries, model, other_model, tmp_path) -> None:
    options = ["--model", f"a={model.path}", "--model", f"b={other_model.path}"]
    options += ["--shards", "a=2", "--weights-version", "3,b=4"]
    printed = run(binaries, "--print-config", *options).stdout
    file = tmp_path / "logprobd.toml"
    file.write_text(printed)

    def settings(text: str) -> list[str]:
        return [line.split("  #")[0] for line in text.splitlines() if line and line[0] != "#"]

    again = run(binaries, "--config", str(file), "--print-config")
    assert settings(again.stdout) == settings(printed)
    assert 'weights-version = ["3", "b=4"]' in printed
    plan = run(binaries, "--config", str(file), "--dry-run").stdout
    assert "version      3\n" in plan and "version      4\n" in plan


def test_a_flood_on_one_head_does_not_starve_the_other(
    start_server, slow_model, other_model
) -> None:
    heads = ("--model", f"slow={slow_model.path}", "--model", f"fast={other_model.path}")
    server = start_server(*heads, "--client-share", "1", "--batch-rows", "512")
    rows = 2000
    flood = request(
        rows=rows, hidden_size=256, targets=np.zeros(rows, np.int32).tobytes(), head="slow"
    ).SerializeToString()
    small = request(rows=2, hidden_size=40, head="fast")
    with Scoring(server.grpc) as heavy, Scoring(server.grpc) as light:
        alone = light.score(small)
        start = time.monotonic()
        futures = [heavy.score_future(flood, timeout=300) for _ in range(8)]
        assert server.eventually(
            lambda: server.metric("logprobd_queue_rows", head="slow") > 4 * rows
        )
        waits = []
        for _ in range(5):
            sent = time.monotonic()
            reply = light.score(small, timeout=120)
            waits.append(time.monotonic() - sent)
            assert reply.logprob == alone.logprob  # the same bits as without the flood
        assert not all(future.done() for future in futures), "the flood ended too early"
        assert {future.code() for future in futures} == {grpc.StatusCode.OK}
        total = time.monotonic() - start
    assert max(waits) < total / 4


def test_floods_on_two_heads_make_equal_progress(start_server, slow_model) -> None:
    heads = ("--model", f"a={slow_model.path}", "--model", f"b={slow_model.path}")
    server = start_server(*heads, "--client-share", "1", "--batch-rows", "256")
    rows = 4000

    def flood(head: str) -> bytes:
        targets = np.zeros(rows, np.int32).tobytes()
        return request(rows=rows, hidden_size=256, targets=targets, head=head).SerializeToString()

    def left(head: str) -> float:
        return server.metric("logprobd_queue_rows", head=head)

    with Scoring(server.grpc) as scoring:
        futures = {head: scoring.score_future(flood(head), timeout=300) for head in "ab"}
        seen = []
        assert server.eventually(lambda: left("a") > 0 and left("b") > 0)
        while left("a") > 0 and left("b") > 0:
            seen.append((left("a"), left("b")))
        assert {future.code() for future in futures.values()} == {grpc.StatusCode.OK}
    # Both heads have the same work, so neither is ever far ahead of the other.
    assert all(abs(a - b) <= rows / 2 for a, b in seen)
    assert max(left("a"), left("b")) == 0


def test_sighup_reloads_limits_and_a_bad_file_changes_nothing(
    start_server, model, other_model, tmp_path
) -> None:
    file = tmp_path / "logprobd.toml"
    base = f'model = ["a={model.path}", "b={other_model.path}"]\n'
    file.write_text(base)
    server = start_server("--config", str(file), "--segments-max", "9")

    def limits() -> list[tuple[int, int]]:
        with logprobd.Client(server.grpc) as client:
            return [(h.limits.request_rows_max, h.limits.segments_max) for h in client.list_heads()]

    def reload(text: str, answer: str) -> str:
        file.write_text(text)
        seen = len(server.log)
        server.signal(1)

        def lines() -> list[str]:
            return [line for line in server.log[seen:] if answer in line]

        assert server.eventually(lambda: bool(lines())), server.log[seen:]
        return lines()[0]

    assert limits() == [(65536, 9)] * 2
    line = reload(base + "request-rows = 3\nsegments-max = 5\n", "SIGHUP applied=")
    assert "applied=request-rows" in line  # the command line keeps its precedence
    assert limits() == [(3, 9)] * 2
    with Scoring(server.grpc) as scoring, pytest.raises(grpc.RpcError) as refused:
        scoring.score(request(rows=4, head="a"))
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT

    for bad in ("request-rows = 0\n", "reqest-rows = 4\n", "[[[\n"):
        line = reload(base + bad, "all settings stay as they are")
        assert " error " in line and str(file) in line
        assert limits() == [(3, 9)] * 2

    line = reload(base + "request-rows = 4\nbatch-rows = 77\n", "need a restart")
    assert " warning " in line and "settings=batch-rows" in line
    assert limits() == [(4, 9)] * 2

    reload(base + 'log-level = "debug"\n', "applied=")
    assert server.eventually(lambda: limits() == [(65536, 9)] * 2)
    with Scoring(server.grpc) as scoring:
        assert scoring.score(request(rows=4, head="a")).logprob
    assert server.process.poll() is None
    server.signal()
    assert server.wait() == 0


def test_sighup_loses_no_request(start_server, model) -> None:
    server = start_server("--model", str(model.path))
    stop = threading.Event()

    def send_sighups() -> None:
        while not stop.is_set():
            server.signal(1)
            time.sleep(0.01)

    thread = threading.Thread(target=send_sighups)
    thread.start()
    try:
        with Scoring(server.grpc) as scoring:
            replies = [scoring.score(request(rows=3)).logprob for _ in range(50)]
    finally:
        stop.set()
        thread.join()
    assert set(replies) == {replies[0]}


def test_sighup_while_starting_does_not_end_the_server(start_server, model) -> None:
    server = start_server("--model", str(model.path), wait=False)
    server.wait_for_log("starting")
    server.signal(1)
    server.wait_for_log(" ready ")
    server.wait_for_log("nothing has changed")
    server.signal()
    assert server.wait() == 0
