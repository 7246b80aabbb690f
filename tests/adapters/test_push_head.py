"""push_head sends each rank's rows of a head, and the server stages the bytes of the whole tensor."""

import copy
import re
import types
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from document_examples import run_example
from logprobd import InvalidArgument, Tls, WeightsClient, WeightsConflict
from logprobd_adapters.push import (
    begin_version,
    move_head,
    move_version,
    push_head,
    rows_of_rank,
)
from model_folder import ModelFolder
from pushed_head import HIDDEN, VOCAB, digest, server_of, write_bf16_head
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

RANKS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return ModelFolder.write(tmp_path_factory.mktemp("head"), vocab=VOCAB, hidden=HIDDEN).path


@pytest.fixture(scope="module")
def biased_folder(tmp_path_factory):
    return write_bf16_head(tmp_path_factory.mktemp("biased"), *head())


@pytest.fixture
def server(request, folder, binaries):
    """A server of a head without a bias, or of the folder that the fixture named by the parameter returns."""
    if hasattr(request, "param"):
        folder = request.getfixturevalue(request.param)
    with server_of(folder, binaries) as server:
        yield server


@pytest.fixture
def client(server):
    with WeightsClient(server.admin, timeout=60, load_timeout=60) as client:
        yield client


def head() -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a weight and a bias, the same ones at each call."""
    random = torch.Generator().manual_seed(3)
    return torch.randn(VOCAB, HIDDEN, generator=random), torch.randn(VOCAB, generator=random)


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


def move_copies(
    rank: int, _: int, address: str, seed: int, owners: tuple[int, ...]
) -> tuple[int | str, int]:
    """Moves a head with a bias of which each rank has a copy, as with DDP. Ranks that are not owners pass none of its
    rows. Returns the version or the error, and the number of rows that were passed."""
    weight, bias = (each + seed * rank for each in head())
    if rank not in owners:
        weight, bias = weight[:0], bias[:0]
    with WeightsClient(address, timeout=60, load_timeout=60) as client:
        try:
            return move_head(client, weight, bias=bias, dtype="bf16"), len(weight)
        except Exception as error:
            return f"{type(error).__name__}: {error}", len(weight)


def move_shard(rank: int, size: int, address: str, tls: Tls, token: str) -> int | str:
    """Moves a head of which each rank has a tensor-parallel shard. Returns the version or the error."""
    shards = head()[0].chunk(size)
    begin = sum(len(each) for each in shards[:rank])
    with WeightsClient(address, timeout=60, load_timeout=60, tls=tls, token=token) as client:
        try:
            return move_head(client, shards[rank], row_begin=begin, vocab_rows=VOCAB, dtype="bf16")
        except Exception as error:
            return f"{type(error).__name__}: {error}"


def move_from(rank: int, _: int, address: str, firsts: tuple[int, ...]) -> tuple[int | str, int]:
    """Moves a head whose rows rank 0 has. Returns the version or the error, and how often the rows were asked for."""
    sent = []
    with WeightsClient(address, timeout=60, load_timeout=60) as client:

        def send(version: int, _: list[Exception]) -> bool:
            sent.append(version)
            rows = head()[0] if rank == 0 else head()[0][:0]
            return push_head(client, rows, version=version, dtype="bf16") is not None

        try:
            version = move_version(client, send, advice="", is_first=rank in firsts)
            return version, len(sent)
        except InvalidArgument as error:
            return str(error), len(sent)


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


def fail_twice(rank: int, _: int) -> str:
    """Moves a version while two things fail on rank 1. Returns what it ended with."""
    state = types.SimpleNamespace(staged=None, pushed=None, highest_version=1)
    client = mock.Mock(list=lambda head: [state])

    def send(version: int, errors: list[Exception]) -> bool:
        if rank == 1:
            errors.append(OSError("first"))
            raise OSError("second")
        return True

    try:
        return f"version {move_version(client, send, advice='')}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def begin_by_default(_rank: int, _size: int) -> bool:
    """Moves a version without saying who begins it. Returns whether this rank did."""
    client = mock.Mock(
        list=mock.Mock(
            return_value=[types.SimpleNamespace(staged=None, pushed=None, highest_version=1)]
        )
    )
    move_version(client, lambda version, errors: True, advice="")
    return client.list.called


def test_rank_0_begins_the_version_by_default(ranks) -> None:
    assert ranks.results(begin_by_default) == [True, False]


def test_the_first_of_two_errors_is_raised_and_other_ranks_name_both(ranks) -> None:
    assert ranks.results(fail_twice) == [
        "LogprobdError: rank 1 failed: OSError: first; OSError: second",
        "OSError: first",
    ]


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


@pytest.mark.parametrize("server", ["biased_folder"], indirect=True)
@pytest.mark.parametrize("owners", [(0, 1), (0,), (1,)])
def test_ranks_with_copies_of_a_head_move_it(ranks, server, client, owners) -> None:
    for version in (2, 3):
        moved = ranks.results(move_copies, server.admin, 0, owners)

        assert moved == [(version, VOCAB if rank in owners else 0) for rank in range(RANKS)]
        (state,) = client.list()
        assert (state.live.version, state.live.sha256) == (version, digest(*head()))


@pytest.mark.parametrize("server", ["biased_folder"], indirect=True)
def test_copies_that_differ_are_an_error_on_all_ranks(ranks, server, client) -> None:
    moved = ranks.results(move_copies, server.admin, 1, (0, 1))

    assert any(re.match("Weights(DataLoss|Conflict): ", error) for error, _ in moved)
    assert all(re.search("Weights(DataLoss|Conflict): .*differ", error) for error, _ in moved)
    assert client.list()[0].live.version == 1
    again = ranks.results(move_copies, server.admin, 0, (0, 1))
    assert [type(version) for version, _ in again] == [int, int]


# Regression: all ranks took the number of rank 0, whichever began the version.
def test_any_rank_may_begin_the_version(ranks, server, client) -> None:
    moved = ranks.results(move_from, server.admin, (1,))

    assert moved == [(2, 1), (2, 1)]
    assert client.list()[0].live.sha256 == digest(head()[0])


@pytest.mark.parametrize("firsts", [(), (0, 1)])
def test_a_version_that_not_exactly_one_rank_begins_is_an_error(
    ranks, server, client, firsts
) -> None:
    moved = ranks.results(move_from, server.admin, firsts)

    text = f"the ranks that begin the version are {list(firsts)}, expected one"
    assert all(error.startswith(text) and calls == 0 for error, calls in moved)
    assert client.list()[0].live.version == 1


def test_ranks_move_a_head_over_tls_with_a_token_of_the_scope_admin(
    ranks, secure_server, security
) -> None:
    address, tls = secure_server.admin, Tls(**security.client_tls())
    with WeightsClient(address, timeout=60, tls=tls, token=security.admin_token) as client:
        refused = ranks.results(move_shard, address, tls, security.token)
        assert all(re.search("PERMISSION_DENIED: .*scope admin", error) for error in refused)
        assert client.list()[0].highest_version == 1

        assert ranks.results(move_shard, address, tls, security.admin_token) == [2, 2]

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


def test_a_staged_version_refuses_others_and_takes_its_own_bytes_again(client) -> None:
    weight, other = (torch.randn(VOCAB, HIDDEN).bfloat16() for _ in range(2))
    staged = push_head(client, weight, version=2)

    assert push_head(client, weight, version=2) == staged
    with pytest.raises(WeightsConflict, match="version 2 is staged with other weights"):
        push_head(client, other, version=2)
    with pytest.raises(WeightsConflict, match="version 2 is staged: commit or discard it first"):
        push_head(client, other, version=3)
    assert begin_version(client) == 3
    assert client.list()[0].staged is None
    assert push_head(client, other, version=3).version == 3


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


@pytest.mark.parametrize("place", [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_of_replicas_along_two_dimensions_the_first_of_both_is_told(place) -> None:
    _, _, is_first = rows_of_rank(5, [(coordinate, 2, False) for coordinate in place])

    assert is_first == (place == (0, 0))
