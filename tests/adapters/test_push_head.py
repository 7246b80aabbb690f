"""push_head sends each rank's rows of a head, and the server stages the bytes of the whole tensor."""

import copy
import hashlib
from contextlib import nullcontext
from unittest import mock

import ml_dtypes
import pytest
import torch
from document_examples import run_example
from logprobd import InvalidArgument, WeightsClient
from logprobd_adapters.push import begin_version, move_head, push_head, rows_of_rank
from model_folder import ModelFolder, write_biased_head
from server_process import ServerProcess
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

VOCAB, HIDDEN = 1003, 64  # odd, so that two ranks have different numbers of rows
RANKS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return ModelFolder.write(tmp_path_factory.mktemp("head"), vocab=VOCAB, hidden=HIDDEN).path


@pytest.fixture(scope="module")
def biased_folder(tmp_path_factory):
    weight, bias = head()
    return write_biased_head(tmp_path_factory.mktemp("biased"), weight.numpy(), bias.numpy())


@pytest.fixture
def server(request, folder, binaries):
    """A server of a head without a bias, or of the folder that the fixture named by the parameter returns."""
    if hasattr(request, "param"):
        folder = request.getfixturevalue(request.param)
    options = ("--model", str(folder), "--admin", "auto")
    with ServerProcess(binaries, *options) as server:
        yield server


@pytest.fixture
def client(server):
    with WeightsClient(server.admin, timeout=60, load_timeout=60) as client:
        yield client


def head() -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a weight and a bias, the same ones at each call."""
    random = torch.Generator().manual_seed(3)
    return torch.randn(VOCAB, HIDDEN, generator=random), torch.randn(VOCAB, generator=random)


def digest(*tensors: torch.Tensor) -> str:
    rounded = [each.float().numpy().astype(ml_dtypes.bfloat16).tobytes() for each in tensors]
    return hashlib.sha256(b"".join(rounded)).hexdigest()


# The functions below run on each rank.


def move_average(_: int, size: int, address: str) -> None:
    mesh = init_device_mesh("cpu", (size,))
    model = torch.nn.Linear(HIDDEN, VOCAB, bias=False)
    with torch.no_grad():
        model.weight.copy_(head()[0])
    teacher = copy.deepcopy(model)
    fully_shard(model, mesh=mesh)
    fully_shard(teacher, mesh=mesh)
    with torch.no_grad():
        model.weight.add_(1)
        teacher.weight.lerp_(model.weight, 0.25)
    with WeightsClient(address, timeout=60, load_timeout=60) as client:
        run_example("docs/PUSH.md", client=client, teacher=teacher)


def push_with_bias(
    _: int, size: int, address: str, of_rows: Placement, of_bias: Placement | None
) -> bool:
    """Pushes a head of these placements; None is a plain tensor. Returns whether this rank's push completed it."""
    mesh = init_device_mesh("cpu", (size,))
    weight, bias = head()
    rows = distribute_tensor(weight, mesh, [of_rows])
    if of_bias is not None:
        bias = distribute_tensor(bias, mesh, [of_bias])
    with WeightsClient(address, timeout=60, load_timeout=60) as client:
        return push_head(client, rows, bias=bias, version=2, dtype="bf16") is not None


def fail_and_recover(rank: int, _: int, address: str, failing: int, place: str) -> list[str]:
    """Moves a head while a call of one rank's client fails, and then another one. Returns what each step ended with."""
    ends = []
    weight = head()[0].chunk(2)[rank]
    arguments = {
        "row_begin": rank * len(head()[0].chunk(2)[0]),
        "vocab_rows": VOCAB,
        "dtype": "bf16",
    }
    with WeightsClient(address, timeout=60, load_timeout=60) as client:
        for seed in (1, 0):
            fault = mock.Mock(side_effect=OSError(f"no {place}"))
            is_faulty = seed == 1 and rank == failing
            with mock.patch.object(client, place, fault) if is_faulty else nullcontext():
                try:
                    ends.append(f"version {move_head(client, weight + seed, **arguments)}")
                except Exception as error:
                    ends.append(f"{type(error).__name__}: {error}")
    return ends


# Regression: by the recipe that the documents had, the other ranks waited for the one that failed.
@pytest.mark.parametrize(
    ("place", "failing"), [("list", 0), ("push", 0), ("push", 1), ("commit", 0)]
)
def test_all_ranks_raise_the_error_of_one_and_the_next_step_succeeds(
    ranks, server, client, place, failing
) -> None:
    ends = ranks.results(fail_and_recover, server.admin, failing, place)

    for rank, (first, second) in enumerate(ends):
        text = f"OSError: no {place}"
        assert first == (
            text if rank == failing else f"LogprobdError: rank {failing} failed: {text}"
        )
        assert second == ("version 3" if place == "commit" else "version 2")  # a staged one counts
    assert client.list()[0].live.sha256 == digest(head()[0])


def test_one_process_moves_a_head_alone(client) -> None:
    assert move_head(client, head()[0], dtype="bf16") == 2

    assert client.list()[0].live.sha256 == digest(head()[0])


def test_rows_that_are_not_a_whole_head_are_an_error_that_says_what_to_pass(client) -> None:
    with pytest.raises(InvalidArgument, match="not a whole head: pass row_begin for the shard"):
        move_head(client, head()[0][:100], vocab_rows=VOCAB, dtype="bf16")


def test_ranks_of_fsdp_push_an_average_of_their_rows(ranks, server, client) -> None:
    weight = head()[0]

    ranks.results(move_average, server.admin)

    (state,) = client.list()
    expected = digest(weight.lerp(weight + 1, 0.25))
    assert (state.live.version, state.live.sha256) == (2, expected)


# Regression: the bias was sent as that of the weight's rows, whatever its placement.
@pytest.mark.parametrize("server", ["biased_folder"], indirect=True)
@pytest.mark.parametrize(
    "placements",
    [(Shard(0), Shard(0)), (Shard(0), Replicate()), (Shard(0), None), (Replicate(), Shard(0))],
)
def test_a_bias_may_be_placed_in_another_way_than_the_rows(
    ranks, server, client, placements
) -> None:
    is_staged = ranks.results(push_with_bias, server.admin, *placements)

    assert sorted(is_staged) == [False, True]
    assert client.list()[0].staged.sha256 == digest(*head())


@pytest.mark.parametrize(
    ("bias", "text"),
    [
        (torch.zeros(VOCAB - 1), "bias is .1002. of torch.float32, but the weight has 1003 rows"),
        (torch.zeros(VOCAB).half(), "of torch.float16, but .* torch.float32"),
    ],
)
def test_a_bias_that_does_not_fit_is_refused(client, bias, text) -> None:
    with pytest.raises(InvalidArgument, match=text):
        push_head(client, head()[0], bias=bias, version=2)


def test_tensor_parallel_shards_name_their_first_row(client) -> None:
    weight = torch.nn.Parameter(torch.randn(VOCAB, HIDDEN).bfloat16())
    version = begin_version(client)

    parts = weight.chunk(2)
    first = push_head(client, parts[1], version=version, row_begin=len(parts[0]))
    staged = push_head(client, parts[0], version=version, row_begin=0)

    assert first is None
    assert (staged.version, staged.sha256) == (2, digest(weight.detach()))


def test_the_next_version_is_none_that_was_ever_used(client) -> None:
    weight = torch.randn(VOCAB, HIDDEN).bfloat16()
    push_head(client, weight, version=5)
    client.commit()
    client.rollback()
    client.discard(previous=True)

    version = begin_version(client)

    assert version == 6
    assert push_head(client, weight + 1, version=version).version == 6


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
    axes = [
        [(position, size, True) for position, size in zip(place, shape, strict=True)]
        for place in places
    ]
    found = [rows_of_rank(rows, each) for each in axes]

    assert [list(range(begin, end)) for begin, end, _ in found] == expected
    assert all(is_first for _, _, is_first in found)


def test_replicas_have_the_same_rows_and_the_first_one_is_told() -> None:
    found = [rows_of_rank(5, [(replica, 2, False), (1, 2, True)]) for replica in (0, 1)]

    assert found == [(3, 5, True), (3, 5, False)]
