"""Tests of one head in shards and replicas on the CPU: equal bits, layout and failures.

A server on the CPU runs the same code as one on GPUs, except the code that is for GPUs only. The tests include rows
E78 and E82 of tests/FAULTS.md.
"""

import dataclasses
import json
import re
import subprocess

import grpc
import numpy as np
import pytest
import scoring_rpc
from logprobd import Client
from scoring_rpc import Scoring
from server_process import ServerProcess

VOCAB = 1003  # vocabulary of the model: six tiles, the last one with 43 columns
TILE = 192


def edges_of(shards: int) -> list[int]:
    """Returns the first id of each shard and the end of the vocabulary.

    Shards consist of whole tiles, and the longer shards come first.
    """
    sizes = [6 // shards + (shard < 6 % shards) for shard in range(shards)]
    return [min(int(tiles) * TILE, VOCAB) for tiles in np.cumsum([0, *sizes])]


@dataclasses.dataclass
class Arrangement:
    server: ServerProcess
    replicas: int
    shards: int

    def options(self) -> list[str]:
        return options_of(self.replicas, self.shards)

    def layout(self) -> list[tuple[int, int, int, int]]:
        edges = edges_of(self.shards)
        return [
            (replica, shard, edges[shard], edges[shard + 1])
            for replica in range(self.replicas)
            for shard in range(self.shards)
        ]


def options_of(replicas: int, shards: int) -> list[str]:
    """Returns the flags of an arrangement; the CPU's default of both numbers is 1."""
    flags = {"--replicas": replicas, "--shards": shards}
    return [text for flag, count in flags.items() if count > 1 for text in (flag, str(count))]


@pytest.fixture(
    scope="module",
    params=[(1, 4), (2, 1), (2, 3)],
    ids=lambda numbers: "{} x {}".format(*numbers),
)
def arranged(request: pytest.FixtureRequest, binaries, model):
    """Runs a server for each arrangement of replicas x shards."""
    replicas, shards = request.param
    options = options_of(replicas, shards)
    with ServerProcess(binaries, "--model", str(model.path), *options) as process:
        yield Arrangement(process, replicas, shards)


def full_request(rows: int, seed: int):
    """Requests every output, with targets and candidates at the shards' edges, an ignored row and a row with a NaN."""
    random = np.random.default_rng(seed)
    edges = sorted({id for n in (1, 3, 4) for e in edges_of(n) for id in (e - 1, e)} - {-1, VOCAB})
    hidden = random.standard_normal((rows, 64)).astype(np.float32)
    hidden[1, 5] = np.nan
    targets = random.choice(edges, rows).astype(np.int32)
    targets[0] = -100
    return scoring_rpc.request(
        rows=rows,
        hidden=hidden.tobytes(),
        targets=targets.tobytes(),
        row_temperatures=random.uniform(0.5, 2, rows).astype(np.float32).tobytes(),
        entropy_temperature=1.5,
        outputs=sum(scoring_rpc.messages().Output.values()),
        top_k=20,
        candidate_ids=np.tile(edges, rows).astype(np.int32).tobytes(),
        candidate_offsets=(np.arange(rows + 1) * len(edges)).astype(np.uint32).tobytes(),
        segment_offsets=np.array([0, rows // 2, rows], np.uint32).tobytes(),
    )


def answer_bytes(data: bytes) -> bytes:
    """Returns an answer without its timings."""
    reply = scoring_rpc.messages().ScoreResponse.FromString(data)
    assert len(reply.top_k_ids) == reply.rows * 20 * 4
    reply.ClearField("timings")
    return reply.SerializeToString()


def test_answers_have_the_bytes_of_a_server_with_one_shard(server, arranged) -> None:
    # All requests are sent at once, so that each replica gets some.
    requests = [full_request(rows, rows).SerializeToString() for rows in (2, 3, 40, 190, 700) * 3]

    with Scoring(server.grpc) as one, Scoring(arranged.server.grpc) as several:
        expected = [answer_bytes(one.score_raw(data)) for data in requests]
        futures = [several.score_future(data) for data in requests]
        answers = [answer_bytes(future.result()) for future in futures]

    assert answers == expected


def test_list_heads_says_which_ids_each_shard_has(arranged) -> None:
    with Client(arranged.server.grpc) as client:
        layout = client.info().layout

    shards = [(shard.replica, shard.shard, shard.vocab_begin, shard.vocab_end) for shard in layout]
    assert shards == arranged.layout()
    assert {shard.device for shard in layout} == {"cpu"}


def test_logprobctl_info_shows_the_layout(binaries, arranged) -> None:
    command = [binaries / "logprobctl", "info", "--address", arranged.server.grpc]

    table = subprocess.run(command, capture_output=True, text=True, timeout=30)
    answer = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=30)

    (head,) = json.loads(answer.stdout)["heads"]
    assert len(head["layout"]) == arranged.replicas * arranged.shards
    for _, _, begin, end in arranged.layout():
        assert f"[{begin}, {end})" in table.stdout


def test_metrics_show_replicas_and_shards(arranged) -> None:
    server = arranged.server
    labels = {"replicas": str(arranged.replicas), "shards": str(arranged.shards)}

    assert server.metric("logprobd_head_info", **labels) == 1
    assert server.metric("logprobd_replicas", state="healthy") == arranged.replicas
    assert server.metric("logprobd_replicas", state="failed") == 0


def test_selftest_passes_on_every_arrangement(binaries, arranged) -> None:
    result = subprocess.run(
        [binaries / "logprobctl", "selftest", "--address", arranged.server.grpc, "--rows", "6"],
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert result.returncode == 0, result.stdout + result.stderr


def test_dry_run_and_the_status_page_print_each_shard_with_its_ids_and_tiles(
    binaries, model, arranged
) -> None:
    result = subprocess.run(
        [
            binaries / "logprobd",
            "--model",
            model.path,
            "--device",
            "cpu",
            *arranged.options(),
            "--dry-run",
        ],
        capture_output=True,
        text=True,
        timeout=30,
    )

    assert result.returncode == 0, result.stderr
    for text in (result.stdout, arranged.server.get("/")[1]):
        lines = re.findall(
            r"^layout +replica (\d+) shard (\d+) +cpu +ids (\d+) to (\d+) \((\d+) tiles?\)$",
            text,
            re.MULTILINE,
        )
        shards = [tuple(map(int, line)) for line in lines]
        assert shards == [
            (replica, shard, begin, end, (end - begin + TILE - 1) // TILE)
            for replica, shard, begin, end in arranged.layout()
        ]


@pytest.mark.parametrize(
    "options, status, words",
    [
        (["--device", "cpu", "--shards", "7"], 2, ["1003", "at most 6 shards"]),
        (["--device", "cpu", "--shards", "6", "--replicas", "100"], 2, ["at most 256"]),
        (["--device", "cpu", "--shards", "0"], 2, ["--shards"]),
        (["--device", "cuda", "--gpus", "0,1"], 1, ["--device cuda", "--device cpu"]),
        # A request for shards or GPUs does not fall back to the CPU.
        (["--shards", "2"], 1, ["--device cpu"]),
        (["--gpus", "0,1"], 1, ["--device cpu"]),
        (["--gpus", "0,0"], 2, ["--gpus", "GPU 0 twice"]),
        (["--gpus", "0,1", "--shards", "3"], 2, ["--gpus names 2 GPUs", "--shards 3"]),
        (["--gpus", "0,1,2", "--replicas", "2"], 2, ["--gpus names 3 GPUs", "--replicas 2"]),
        (["--gpus", "0,1,2,3", "--shards", "2", "--replicas", "3"], 2, ["--gpus names 4 GPUs"]),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else str(value),
)
@pytest.mark.parametrize("action", ["--dry-run", "--http=127.0.0.1:0"], ids=["plan", "start"])
def test_e82_an_impossible_layout_is_one_clear_line(
    binaries, model, options, status, words, action
) -> None:
    result = subprocess.run(
        [
            binaries / "logprobd",
            "--model",
            model.path,
            "--listen",
            "127.0.0.1:0",
            "--log-level",
            "error",  # the ready line is written at every level
            action,
            *options,
        ],
        capture_output=True,
        text=True,
        timeout=30,
        env={"PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": ""},
    )

    assert result.returncode == status, result
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("logprobd: error: ")
    for word in words:
        assert word in line


def test_e78_a_hung_replica_is_left_out_and_the_last_one_ends_the_server(
    start_server, slow_model
) -> None:
    # A batch that takes seconds on one thread stands in for a device that hangs.
    server = start_server(
        "--model",
        str(slow_model.path),
        "--replicas",
        "2",
        "--cpu-threads",
        "2",
        "--batch-rows",
        "65536",
        "--watchdog-s",
        "0.3",
    )
    rows = 12_000
    hangs = scoring_rpc.request(
        rows=rows, hidden_size=256, targets=np.zeros(rows, np.int32).tobytes()
    ).SerializeToString()
    small = scoring_rpc.request(hidden_size=256)
    with Scoring(server.grpc) as scoring:
        watch = scoring.channel.unary_stream("/grpc.health.v1.Health/Watch")(b"", timeout=60)
        seen = [next(watch)[1]]

        first = scoring.score_future(hangs).code()
        left = [server.metric("logprobd_replicas", state=s) for s in ("healthy", "failed")]
        status_page = server.get("/")[1]
        answer = scoring.score(small)
        last = scoring.score_future(hangs)
        seen.append(next(watch)[1])  # serving until the last replica is lost
        last_code = last.code()
        watch.cancel()

    assert first == grpc.StatusCode.UNAVAILABLE
    assert left == [1, 1]
    assert "ready, but 1 of 2 replicas has failed" in status_page
    assert answer.rows == 2
    assert seen == [1, 2]
    assert last_code == grpc.StatusCode.UNAVAILABLE
    assert server.wait() == 1
    assert any("2 of 2 replicas have failed: stopping" in line for line in server.log)
