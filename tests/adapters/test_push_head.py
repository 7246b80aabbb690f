"""push_head sends each rank's rows of a head, and the server stages the bytes of the whole tensor."""

import hashlib
import pathlib
import subprocess
import sys

import ml_dtypes
import pytest
import torch
from logprobd import WeightsClient
from logprobd_adapters.push import next_version, push_head, range_of_shard
from model_folder import ModelFolder
from server_process import ServerProcess

VOCAB, HIDDEN = 1003, 64  # odd, so that two ranks have different numbers of rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return ModelFolder.write(tmp_path_factory.mktemp("head"), vocab=VOCAB, hidden=HIDDEN).path


@pytest.fixture
def server(folder, binaries):
    options = ("--model", str(folder), "--admin", "127.0.0.1:0")
    with ServerProcess(binaries, *options) as server:
        yield server


@pytest.fixture
def client(server):
    with WeightsClient(server.admin, timeout=60, load_timeout=60) as client:
        yield client


def digest(weight: torch.Tensor) -> str:
    return hashlib.sha256(weight.float().numpy().astype(ml_dtypes.bfloat16).tobytes()).hexdigest()


def test_ranks_of_fsdp_push_an_average_of_their_rows(server, client, environment) -> None:
    torch.manual_seed(3)
    first = torch.nn.Linear(HIDDEN, VOCAB, bias=False).weight.detach()
    expected = first.lerp(first + 1, 0.25)
    script = pathlib.Path(__file__).parent / "push_ranks.py"

    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(script)]
    run = subprocess.run(
        [*command, server.admin, str(VOCAB), str(HIDDEN)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert run.returncode == 0, run.stderr
    (state,) = client.list()
    assert (state.live.version, state.live.sha256) == (2, digest(expected))


def test_tensor_parallel_shards_name_their_first_row(client) -> None:
    weight = torch.nn.Parameter(torch.randn(VOCAB, HIDDEN).bfloat16())
    version = next_version(client)

    parts = weight.chunk(2)
    first = push_head(client, parts[1], version=version, row_begin=len(parts[0]))
    staged = push_head(client, parts[0], version=version, row_begin=0)

    assert first is None
    assert (staged.version, staged.sha256) == (2, digest(weight.detach()))
    assert next_version(client) == 3


@pytest.mark.parametrize("rows", [0, 1, 5, 12, 1003])
@pytest.mark.parametrize("shape", [(4,), (2, 3)])
def test_shards_have_the_rows_of_chunks(rows, shape) -> None:
    def split(part: torch.Tensor, sizes: tuple[int, ...]) -> list[torch.Tensor]:
        if not sizes:
            return [part]
        chunks = list(part.chunk(sizes[0]))
        chunks += [part[:0]] * (sizes[0] - len(chunks))
        return [piece for chunk in chunks for piece in split(chunk, sizes[1:])]

    expected = [piece.tolist() for piece in split(torch.arange(rows), shape)]

    places = torch.cartesian_prod(*map(torch.arange, shape)).reshape(-1, len(shape)).tolist()
    ranges = [range_of_shard(rows, list(zip(place, shape, strict=True))) for place in places]

    assert [list(range(*each)) for each in ranges] == expected
