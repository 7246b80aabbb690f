"""ScorerPool, ScoreBatch and ScorerHealth on a Ray cluster of two nodes with addresses of their own."""

import json
import os
import pathlib
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
import torch
from document_examples import run_example
from logprobd import Client, RetryPolicy, Tls
from logprobd.errors import InvalidArgument, LogprobdError
from logprobd_adapters import RemoteScorer
from logprobd_adapters.ray import ScoreBatch, ScorerPool
from logprobd_adapters.ray.health import ScorerHealth
from logprobd_adapters.ray.pool import _bundles
from ray import serve
from ray.cluster_utils import Cluster
from ray.data.checkpoint import CheckpointConfig
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.timeout(300)

HOSTS = ("127.0.0.2", "127.0.0.3")
NODE = {"num_cpus": 3, "object_store_memory": 100_000_000}
ROWS = 4096


def servers_of(folder: pathlib.Path) -> list[int]:
    """Returns the ids of the processes that serve a model."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            arguments = path.read_bytes().split(b"\0")
        except OSError:
            continue  # the process has ended
        if os.fsencode(folder) in arguments and arguments[0].endswith(b"/logprobd"):
            found.append(int(path.parent.name))
    return found


def parent_of(process: int) -> int:
    return int(pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def assert_ends(process: int) -> None:
    try:
        descriptor = os.pidfd_open(process)
    except ProcessLookupError:
        return  # it has ended
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    assert poll.poll(30_000)
    os.close(descriptor)


@pytest.fixture(scope="module")
def cluster(environment):
    """Connects to a cluster of two nodes of three CPUs, whose processes find the packages and the server."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("PATH", "PYTHONPATH"):
            patch.setenv(name, environment[name])
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        cluster = Cluster()
        cluster.add_node(node_ip_address=HOSTS[0], include_dashboard=False, **NODE)
        cluster.add_node(node_ip_address=HOSTS[1], **NODE)
        ray.init(cluster.address, log_to_driver=False)
        yield cluster
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture(scope="module")
def folder(folders) -> pathlib.Path:
    return folders[torch.float32]


@pytest.fixture(scope="module")
def model(folder):
    return AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.fixture
def pool(cluster, folder):
    with ScorerPool(folder, insecure=True) as pool:
        yield pool
    for server in servers_of(folder):
        assert_ends(server)


@pytest.fixture(scope="module")
def rows(model) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, model.config.hidden_size, generator=generator)
    return hidden, torch.randint(model.config.vocab_size, (ROWS,), generator=generator)


def test_each_node_has_a_server_at_its_own_address(pool, model, rows) -> None:
    hidden, targets = rows
    with pool.client(chunk_rows=64) as client:
        logprob = client.score(hidden, targets).logprob
        states = client.servers()

    assert sorted(address.rpartition(":")[0] for address in pool.addresses()) == list(HOSTS)
    assert [state.state for state in states] == ["ready", "ready"]
    logits = hidden.double() @ model.lm_head.weight.double().T
    expected = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    torch.testing.assert_close(logprob.double(), expected, atol=1e-5, rtol=0)


def score_until(client: Client, rows: tuple, is_enough: Callable[[set[str]], bool]) -> set[str]:
    """Scores until the addresses of the ready servers satisfy a condition, and returns them."""
    deadline = time.monotonic() + 150
    while True:
        client.score(*rows)
        ready = {state.address for state in client.servers() if state.state == "ready"}
        if is_enough(ready):
            return ready
        assert time.monotonic() < deadline, ready


@pytest.mark.parametrize("victim", ["server", "actor"])
def test_a_kill_in_a_call_loses_nothing_and_the_client_follows(pool, folder, rows, victim) -> None:
    before = set(pool.addresses())
    with pool.client(chunk_rows=16, timeout=60) as client:
        undisturbed = client.score(*rows, outputs=("logprob", "entropy"))
        server = servers_of(folder)[0]
        killed = []

        def kill(*_) -> None:
            if not killed:
                killed.append(server if victim == "server" else parent_of(server))
                os.kill(killed[0], signal.SIGKILL)

        disturbed = client.score(*rows, outputs=("logprob", "entropy"), progress=kill)

        assert killed
        assert torch.equal(disturbed.logprob, undisturbed.logprob)
        assert torch.equal(disturbed.entropy, undisturbed.entropy)
        ready = score_until(client, rows, lambda ready: len(ready) == 2 and ready != before)
        assert ready == set(pool.addresses())


SUPERVISOR = """
import sys
from logprobd_adapters.ray.pool import _Supervisor
supervisor = _Supervisor(["--model", sys.argv[1], "--http", "none"], "127.0.0.1", 60)
try:
    print(supervisor.await_address(), flush=True)
except Exception as error:
    print(error, flush=True)
sys.stdin.readline()
with supervisor._changed:
    supervisor._changed.wait_for(supervisor.address)
print(supervisor.address(), flush=True)
sys.stdin.readline()
"""


# The third start of the server's program succeeds.
BROKEN_TWICE = """
import logprobd_adapters.ray.pool as pool
program, failures = pool.server_program, [ValueError("unexpected"), KeyError("other")]
def server_program():
    if failures:
        raise failures.pop(0)
    return program()
pool.server_program = server_program
"""


def supervise(
    environment: dict[str, str], folder: pathlib.Path, before: str = "", **pipes
) -> subprocess.Popen[str]:
    """Runs a supervisor without Ray, which prints the address or the error, and after a line of input the address."""
    command = [sys.executable, "-c", before + SUPERVISOR, str(folder)]
    pipes |= {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen(command, env=environment, text=True, **pipes)


def test_the_server_ends_with_its_owner(environment, folder) -> None:
    # Ray ends the processes of an actor too, but not if the node's raylet has died.
    with supervise(environment, folder) as owner:
        assert owner.stdout.readline().startswith("127.0.0.1:")
        (server,) = (each for each in servers_of(folder) if parent_of(each) == owner.pid)
        owner.kill()

    assert_ends(server)


def test_the_program_of_the_package_comes_before_that_of_the_path(
    environment, folder, binaries, tmp_path
) -> None:
    program = tmp_path / "logprobd"
    program.symlink_to(binaries / "logprobd")
    (tmp_path / "logprobd_server.py").write_text(f"def binary(_): return {str(program)!r}\n")
    path = f"{environment['PYTHONPATH']}{os.pathsep}{tmp_path}"

    with supervise(environment | {"PYTHONPATH": path}, folder) as owner:
        assert owner.stdout.readline().startswith("127.0.0.1:")
        (server,) = (each for each in servers_of(folder) if parent_of(each) == owner.pid)
        command = pathlib.Path(f"/proc/{server}/cmdline").read_text()
        owner.kill()

    assert command.startswith(f"{program}\0")
    assert_ends(server)


def test_a_server_that_does_not_start_is_started_again(environment, folder, tmp_path) -> None:
    with supervise(environment, tmp_path) as owner:
        assert "exited with status 1" in owner.stdout.readline()
        shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
        owner.stdin.write("\n")
        owner.stdin.flush()

        lines = iter(owner.stdout.readline, "")
        assert any(line.startswith("127.0.0.1:") for line in lines)


def test_an_unexpected_error_does_not_end_the_supervision(environment, folder) -> None:
    with supervise(environment, folder, BROKEN_TWICE, stderr=subprocess.PIPE) as owner:
        assert owner.stdout.readline() == "unexpected\n"
        owner.stdin.write("\n\n")
        owner.stdin.flush()

        assert owner.stdout.readline().startswith("127.0.0.1:")
        log = owner.stderr.read()

    assert "Traceback" in log and "ValueError: unexpected" in log and "KeyError: 'other'" in log


def test_close_ends_the_servers_and_frees_the_nodes(cluster, folder) -> None:
    with ScorerPool(folder, insecure=True, cpus_per_server=3) as pool:
        servers = servers_of(folder)
        pool.close()

        with pytest.raises(RuntimeError, match="closed"):
            pool.addresses()
        assert len(servers) == 2
        for server in servers:
            assert_ends(server)
    with ScorerPool(folder, insecure=True, cpus_per_server=3, timeout=60) as pool:
        assert len(pool.addresses()) == 2


def test_metrics_are_served_where_asked_for(cluster, folder) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        http = f"127.0.0.1:{taken.getsockname()[1]}"

    with (
        ScorerPool(folder, num_servers=1, insecure=True, http=http) as pool,
        urllib.request.urlopen(f"http://{http}/readyz") as response,
    ):
        assert len(pool.addresses()) == 1
        assert response.status == 200


def test_a_server_that_does_not_start_is_an_error_with_its_log(cluster, tmp_path) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)exited with status 1:\n.*has neither model.safe"):
        ScorerPool(tmp_path, insecure=True)


def test_a_pool_that_does_not_fit_is_an_error(pool, folder) -> None:
    with pytest.raises(InvalidArgument, match="num_servers is 3, expected 1 to 2"):
        ScorerPool(folder, insecure=True, num_servers=3)
    with pytest.raises(InvalidArgument, match="num_servers is 0, .* with 4 CPUs and 0 GPUs"):
        ScorerPool(folder, insecure=True, cpus_per_server=4)
    with pytest.raises(TimeoutError, match="lower num_servers, gpus_per_server or cpus_per_server"):
        ScorerPool(folder, insecure=True, cpus_per_server=3, timeout=1)  # the other pool has one


def test_several_hosts_must_be_asked_for(cluster, folder) -> None:
    with pytest.raises(InvalidArgument, match="the cluster has 2 hosts"):
        ScorerPool(folder)


def test_servers_with_tls_demand_certificates_and_tokens(
    cluster, folder, security, model, rows
) -> None:
    hidden, targets = rows
    files = {"tls_cert": security.server_cert, "tls_key": security.server_key}
    files |= {"tls_client_ca": security.ca, "tokens": security.tokens.path}
    tls = Tls(security.ca, security.client_cert, security.client_key)
    with ScorerPool(folder, **files, tls=tls, token=security.token) as pool:
        with pool.client(chunk_rows=64) as client:
            logprob = client.score(hidden, targets).logprob
            states = client.servers()
        health = ScorerHealth.func_or_class(pool)
        answer = health(None)
        once = RetryPolicy(attempts_max=1)
        strangers = [{"tls": tls, "token": None}, {"tls": Tls(security.ca)}, {"tls": False}]
        for options in strangers:
            with pool.client(**options, retry=once, timeout=20) as client:
                with pytest.raises(LogprobdError):
                    client.list_heads()
        far = ray.remote(lambda: pool.client().score(hidden, targets).logprob)
        assert torch.equal(ray.get(far.remote()), logprob)

    assert [state.state for state in states] == ["ready", "ready"]
    assert sorted(state.address.rpartition(":")[0] for state in states) == list(HOSTS)
    assert answer.status_code == 200
    logits = hidden.double() @ model.lm_head.weight.double().T
    expected = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    torch.testing.assert_close(logprob.double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "arguments",
    [
        {"tls_cert": "cert"},
        {"tls_cert": "cert", "tls_key": "key"},
        {"tokens": "tokens"},
        {"tls_cert": "cert", "tls_key": "key", "tokens": "tokens", "insecure": True},
    ],
)
def test_half_of_the_arguments_of_tls_are_an_error(cluster, folder, arguments) -> None:
    with pytest.raises(InvalidArgument, match="belong together|insecure=True excludes"):
        ScorerPool(folder, **arguments)


def test_servers_take_the_nodes_with_gpus() -> None:
    nodes = [
        {"Alive": True, "Resources": {"CPU": 8.0}},
        {"Alive": True, "Resources": {"CPU": 8.0, "GPU": 4.0}},
        {"Alive": False, "Resources": {"CPU": 8.0, "GPU": 8.0}},
        {"Alive": True, "Resources": {"CPU": 8.0, "GPU": 8.0}},
        {"Alive": True, "Resources": {}},  # a head without work
    ]

    assert _bundles(nodes, None, None, 1) == [{"CPU": 1, "GPU": 8}, {"CPU": 1, "GPU": 4}]
    assert _bundles(nodes, None, 8, 2) == [{"CPU": 2, "GPU": 8}]
    assert _bundles(nodes, None, 0, 1) == [{"CPU": 1, "GPU": 0}] * 3
    assert _bundles(nodes[:1], None, None, 1) == [{"CPU": 1, "GPU": 0}]


@pytest.fixture(scope="module")
def sequences(model) -> pa.Table:
    """Returns 60 sequences of 1 to 20 tokens with ids."""
    generator = np.random.default_rng(0)
    tokens = [generator.integers(model.config.vocab_size, size=n % 20 + 1) for n in range(60)]
    return pa.table({"id": range(60), "input_ids": [each.tolist() for each in tokens]})


def expected_logprobs(model, tokens: list[int], top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the logprobs [length - 1] of tokens and [length - 1, top_k] of the most likely ones, of a double head."""
    with torch.no_grad():
        hidden = model.model(torch.tensor([tokens])).last_hidden_state[0, :-1]
    logprobs = (hidden.double() @ model.lm_head.weight.double().T).log_softmax(-1)
    return logprobs.gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0], logprobs.topk(top_k)[0]


def test_a_batch_gets_the_logprobs_of_the_model(built_operator, folder, model, sequences) -> None:
    score = ScoreBatch(folder, top_k=3)

    scored = score(sequences)

    assert score(sequences[:0]).schema == scored.schema  # a block without rows that are missing
    assert scored.select(["id", "input_ids"]).equals(sequences)
    assert scored.schema.field("logprobs").type == pa.list_(pa.float32())
    assert scored.schema.field("top_ids").type == pa.list_(pa.list_(pa.int64(), 3))
    for row in scored.to_pylist():
        tokens = row["input_ids"]
        expected, top = expected_logprobs(model, tokens, 3)
        actual = torch.tensor(row["logprobs"], dtype=torch.float64)
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)
        listed = torch.tensor(row["top_logprobs"], dtype=torch.float64).reshape(-1, 3)
        torch.testing.assert_close(listed, top, atol=1e-5, rtol=0)


def test_a_second_run_scores_only_what_is_missing(pool, folder, sequences, tmp_path) -> None:
    pq.write_table(sequences, tmp_path / "sequences.parquet")
    scorer = RemoteScorer(pool.client())
    out, done = tmp_path / "logprobs", tmp_path / "done"

    def run(number: int, fail_at: int | None = None) -> set[int]:
        """Scores the sequences that are not done and returns their ids. The block with fail_at fails."""
        notes = tmp_path / f"notes-{number}"
        notes.mkdir()

        def note(batch: pa.Table) -> pa.Table:
            ids = batch["id"].to_pylist()
            assert fail_at not in ids
            for each in ids:
                (notes / str(each)).touch()
            return batch

        dataset = ray.data.read_parquet(str(tmp_path / "sequences.parquet"))
        dataset.context.checkpoint_config = CheckpointConfig(
            "id", str(done), delete_checkpoint_on_success=False
        )
        dataset.context.max_errored_blocks = -1 if fail_at else 0
        dataset.repartition(target_num_rows_per_block=10).map_batches(
            note, batch_format="pyarrow", batch_size=None
        ).map_batches(
            ScoreBatch,
            fn_constructor_args=(folder, scorer),
            fn_constructor_kwargs={"batch_tokens": 1},
            batch_format="pyarrow",
            compute=ray.data.ActorPoolStrategy(size=1),
        ).write_parquet(str(out))
        return {int(path.name) for path in notes.iterdir()}

    missing = set(range(40, 50))
    assert run(1, fail_at=45) == set(range(60)) - missing
    # A cluster that ends while a file is written leaves this: Ray renames its list of ids after that.
    half_done = next(done.iterdir())
    missing |= set(pq.read_table(half_done)["id"].to_pylist())
    half_done.rename(half_done.with_suffix(".pending.parquet"))
    (half_written,) = out.glob(f"{half_done.stem}*")
    half_written.write_bytes(half_written.read_bytes()[:1000])

    assert run(2) == missing

    assert not half_written.exists()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in Ray's workers
    expected = ScoreBatch(folder, scorer, batch_tokens=1)(sequences)
    torch.set_num_threads(threads)
    assert pq.read_table(out).sort_by("id").equals(expected)


def test_the_example_of_the_document_scores(cluster, folder, model, sequences, tmp_path) -> None:
    pq.write_table(sequences, tmp_path / "sequences.parquet")
    replaced = {
        "/models/Qwen3-8B": str(folder),
        "/shared/": f"{tmp_path}/",
        "/sequences": "/sequences.parquet",
        '"cuda"': '"cpu"',
        "size=4": "size=1",
        "num_gpus=1": "num_gpus=0",
    }

    run_example("docs/RAY.md", replaced=replaced)

    scored = pq.read_table(tmp_path / "reference" / "logprobs").sort_by("id")
    assert scored.select(["id", "input_ids"]).equals(sequences)
    for row in scored.to_pylist():
        expected, _ = expected_logprobs(model, row["input_ids"], 1)
        actual = torch.tensor(row["logprobs"], dtype=torch.float64)
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)


def test_a_lost_node_is_replaced_by_a_new_one(cluster, pool, rows) -> None:
    with pool.client(chunk_rows=16, timeout=60) as client:
        undisturbed = client.score(*rows).logprob
        (lost,) = (node for node in cluster.list_all_nodes() if not node.head)
        cluster.remove_node(lost)

        assert torch.equal(client.score(*rows).logprob, undisturbed)
        cluster.add_node(node_ip_address="127.0.0.4", **NODE)
        ready = score_until(client, rows, lambda ready: any("127.0.0.4" in each for each in ready))
        assert len(ready) == 2


def get(url: str) -> tuple[int, dict]:
    try:
        with urllib.request.urlopen(url) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_serve_reports_the_health_of_the_servers(cluster, folder) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    with ScorerPool(folder, insecure=True) as pool:
        serve.run(ScorerHealth.bind(pool), name="logprobd", route_prefix="/logprobd")

        code, health = get(f"http://127.0.0.1:{port}/logprobd")

        assert code == 200
        assert [s["state"] for s in health["servers"]] == ["ready", "ready"]
        assert [s["address"] for s in health["servers"]] == pool.addresses()

    code, health = get(f"http://127.0.0.1:{port}/logprobd")

    assert code == 503
    assert {s["state"] for s in health["servers"]} == {"out"}
    assert "no server is available" in health["error"]
    serve.shutdown()
