"""Tests which kinds of torch tensors a score call takes, and that following a refusal's advice works."""

import asyncio

import logprobd
import numpy as np
import pytest
import torch
import torch.distributed as dist
from logprobd import InvalidArgument, from_packed, from_padded
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

LENGTHS = (4, 1, 5)
OFFSETS = [0, 4, 5, 10]


def jagged(values, lengths=LENGTHS):
    offsets = torch.tensor([0, *np.cumsum(lengths)])
    return torch.nested.nested_tensor_from_jagged(values, offsets)


@pytest.fixture
def tensors(rows):
    """Returns 10 rows of hidden states and their targets as tensors."""
    return tuple(torch.from_numpy(each) for each in rows)


@pytest.fixture
def mesh(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield DeviceMesh("cpu", [0])
    dist.destroy_process_group()


class Tagged(torch.Tensor):
    """A subclass that only has another name, as those of many libraries."""


# Nested tensors raised "'NestedIntNode' object has no attribute 'int_'".
def test_jagged_nested_tensors_are_scored_as_packed_rows(client, tensors):
    hidden, targets = tensors

    result = client.score(jagged(hidden), jagged(targets), top_k=2)

    plain = client.score(hidden, targets, top_k=2)
    assert result.shape == (10,)
    assert torch.equal(result.logprob, plain.logprob)
    assert torch.equal(result.top_k_ids, plain.top_k_ids)
    rewrapped = torch.nested.nested_tensor_from_jagged(result.logprob, jagged(hidden).offsets())
    assert [len(each) for each in rewrapped.unbind()] == list(LENGTHS)


def test_nested_and_packed_arguments_can_be_mixed(client, tensors):
    hidden, targets = tensors
    temperatures = torch.linspace(0.5, 2, 10)
    ids = torch.arange(30).reshape(10, 3)

    result = client.score(
        jagged(hidden),
        targets.numpy(),
        temperature=jagged(temperatures),
        candidates=jagged(ids),
    )

    plain = client.score(hidden, targets, temperature=temperatures, candidates=ids)
    assert torch.equal(result.logprob, plain.logprob)
    assert torch.equal(result.candidate_logprobs, plain.candidate_logprobs)
    assert torch.equal(
        client.score(hidden, jagged(targets)).logprob,
        client.score(hidden, targets).logprob,
    )


def test_streams_and_the_async_client_take_nested_tensors(server, client, tensors):
    hidden, targets = tensors
    nested = (jagged(hidden), jagged(targets))

    async def score():
        async with logprobd.AsyncClient(server.address, timeout=20) as aio:
            return await aio.score(*nested)

    results = [*client.score_stream([nested]), asyncio.run(score())]

    expected = client.score(hidden, targets).logprob
    assert all(torch.equal(result.logprob, expected) for result in results)


@pytest.mark.parametrize("name", ["targets", "temperature", "candidates"])
def test_nested_tensors_of_other_sequences_are_refused(client, tensors, name):
    hidden, targets = tensors
    given = {
        "targets": targets,
        "temperature": torch.ones(10),
        "candidates": targets[:, None],
    }
    arguments = {"targets": targets, name: jagged(given[name], (5, 4, 1))}

    with pytest.raises(
        InvalidArgument, match=rf"{name} .*\[5, 4, 1\].*hidden.*\[4, 1, 5\]"
    ) as error:
        client.score(jagged(hidden), **arguments)

    assert error.value.field == name


@pytest.mark.parametrize(("count", "shown"), [(8, "1]"), (9, "1, ...]")])
def test_a_refusal_shows_the_lengths_of_at_most_eight_sequences(count, shown):
    values = torch.zeros(count + 1, 4)
    hidden = jagged(values, (1,) * (count - 1) + (2,))
    targets = jagged(values[:, 0].long(), (2,) + (1,) * (count - 1))

    with pytest.raises(InvalidArgument) as error:
        from_packed(hidden, targets)

    assert f"input_ids have the lengths [2, 1, 1, 1, 1, 1, 1, {shown}, but those" in str(
        error.value
    )


def test_nested_sequences_with_gaps_are_refused_until_they_are_contiguous(client, tensors):
    hidden, targets = tensors
    begin, length = torch.tensor([1, 0]), torch.tensor([2, 3])
    with_gaps = torch.nested.narrow(hidden.reshape(2, 5, -1), 1, begin, length, layout=torch.jagged)

    with pytest.raises(InvalidArgument, match=r"hidden .*gaps.*hidden\.contiguous\(\)"):
        client.score(with_gaps, targets[:5])

    some = torch.tensor([1, 2, 5, 6, 7])
    expected = client.score(hidden[some], targets[some]).logprob
    assert torch.equal(client.score(with_gaps.contiguous(), targets[some]).logprob, expected)


def test_nested_tensors_with_another_ragged_axis_are_refused(client, tensors):
    hidden, targets = tensors

    with pytest.raises(InvalidArgument, match=r"hidden .*second axis must be the ragged one"):
        client.score(jagged(hidden).transpose(1, 2), targets)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_strided_nested_tensors_are_refused_with_a_remedy_that_works(client, tensors):
    hidden, targets = tensors
    strided = torch.nested.nested_tensor(list(hidden.split(LENGTHS)))

    with pytest.raises(InvalidArgument, match=r"hidden .*strided.*torch\.nested\.nested_tensor\("):
        client.score(strided, targets)

    remedied = torch.nested.nested_tensor(strided.unbind(), layout=torch.jagged)
    assert torch.equal(client.score(remedied, targets).logprob, client.score(*tensors).logprob)


REFUSED = {
    "meta": (lambda t: t.to("meta"), r"meta device.*compute it on a CPU", None),
    "sparse": (
        torch.Tensor.to_sparse,
        r"sparse_coo.*\.to_dense\(\)",
        torch.Tensor.to_dense,
    ),
    "sparse_csr": (
        torch.Tensor.to_sparse_csr,
        r"sparse_csr.*\.to_dense",
        torch.Tensor.to_dense,
    ),
    "mkldnn": (
        torch.Tensor.to_mkldnn,
        r"mkldnn.*\.to_dense\(\)",
        torch.Tensor.to_dense,
    ),
    "fake": (lambda t: FakeTensorMode().from_tensor(t), r"FakeTensor.*outside", None),
    "wrapper": (lambda t: TwoTensor(t, t), r"TwoTensor.*convert", None),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", REFUSED)
def test_tensors_without_readable_rows_are_refused_by_kind(client, tensors, kind):
    make, message, remedy = REFUSED[kind]
    hidden, targets = tensors
    other = make(hidden)

    with pytest.raises(InvalidArgument, match=f"^hidden is .*{message}") as error:
        client.score(other, targets)

    assert error.value.field == "hidden"
    if remedy is not None:
        assert torch.equal(
            client.score(remedy(other), targets).logprob, client.score(*tensors).logprob
        )


def test_quantized_tensors_are_refused_until_they_are_dequantized(client, tensors):
    hidden, targets = tensors
    quantized = torch.quantize_per_tensor(hidden, 0.1, 0, torch.qint8)

    with pytest.raises(
        InvalidArgument, match=r"hidden is quantized \(torch\.qint8\).*\.dequantize\(\)"
    ):
        client.score(quantized, targets)

    assert torch.isfinite(client.score(quantized.dequantize(), targets).logprob).all()


def test_dtensors_are_refused_until_they_are_gathered(client, tensors, mesh):
    hidden, targets = tensors
    spread = distribute_tensor(hidden, mesh, [Replicate()])
    assert isinstance(spread, DTensor)

    with pytest.raises(
        InvalidArgument, match=r"hidden is a DTensor.*full_tensor\(\).*to_local\(\)"
    ):
        client.score(spread, targets)
    with pytest.raises(InvalidArgument, match=r"targets is a DTensor"):
        client.score(hidden, distribute_tensor(targets, mesh, [Replicate()]))

    expected = client.score(*tensors).logprob
    assert torch.equal(client.score(spread.full_tensor(), targets).logprob, expected)
    assert torch.equal(client.score(spread.to_local(), targets).logprob, expected)


@pytest.mark.parametrize("argument", ["targets", "temperature", "candidates", "segments"])
def test_every_argument_refuses_by_name(client, tensors, argument):
    hidden, targets = tensors
    arguments = {
        "targets": targets,
        argument: torch.ones(10, dtype=torch.int64, device="meta"),
    }

    with pytest.raises(InvalidArgument, match=f"^{argument} is on the meta device"):
        client.score(hidden, **arguments)


def test_subclasses_that_compute_as_torch_does_are_plain_tensors(client, tensors):
    hidden, targets = tensors
    expected = client.score(hidden, targets).logprob

    for other in (
        hidden.as_subclass(Tagged),
        torch.nn.Parameter(hidden, requires_grad=False),
        torch.nn.Buffer(hidden),
        torch.complex(torch.zeros_like(hidden), -hidden).conj().imag,  # has its negative bit set
    ):
        result = client.score(other, targets.as_subclass(Tagged))

        assert type(result.logprob) is torch.Tensor
        assert torch.equal(result.logprob, expected)


def test_packed_nested_tensors_are_shifted_within_their_sequences(client, tensors):
    hidden, ids = tensors

    shifted = from_packed(jagged(hidden), jagged(ids))

    expected = from_packed(hidden, ids, OFFSETS)
    assert shifted.segments.tolist() == OFFSETS
    assert torch.equal(shifted.targets, expected.targets)
    assert torch.equal(shifted.hidden, hidden)
    nested_ids = from_packed(hidden, jagged(ids))
    assert torch.equal(nested_ids.targets, expected.targets)


def test_packing_refuses_nested_tensors_that_do_not_fit(tensors):
    hidden, ids = tensors

    with pytest.raises(InvalidArgument, match=r"cu_seqlens is given with a nested tensor"):
        from_packed(jagged(hidden), jagged(ids), OFFSETS)
    with pytest.raises(InvalidArgument, match=r"cu_seqlens is None: pass the offsets"):
        from_packed(hidden, ids)
    with pytest.raises(InvalidArgument, match=r"input_ids .*\[5, 4, 1\].*\[4, 1, 5\]"):
        from_packed(jagged(hidden), jagged(ids, (5, 4, 1)))
    with pytest.raises(InvalidArgument, match=r"hidden is a nested tensor.*from_packed takes it"):
        from_padded(jagged(hidden), ids.reshape(2, 5))


@pytest.mark.parametrize("argument", ["hidden", "input_ids", "attention_mask"])
def test_packing_refuses_other_kinds_by_name(tensors, argument):
    hidden, ids = tensors
    padded = {
        "hidden": hidden.reshape(2, 5, -1),
        "input_ids": ids.reshape(2, 5),
        "attention_mask": torch.ones(2, 5, dtype=torch.int64),
    }
    padded[argument] = padded[argument].to_sparse()

    with pytest.raises(InvalidArgument, match=rf"^{argument} is of the layout torch.sparse_coo"):
        from_padded(**padded)
