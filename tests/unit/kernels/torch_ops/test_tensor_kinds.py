"""Which kinds of tensors the operators and the drop-in functions take, and that following a refusal's advice works."""

import pytest
import torch
import torch.distributed as dist
from logprobd_ops import (
    linear_cross_entropy,
    linear_divergence,
    linear_divergence_loss,
    linear_logprob,
    linear_logprob_loss,
)
from logprobd_ops.compat import areal, liger, skyrl, trl, verl
from score_cases import normal_case
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

ROWS, SIZE, VOCAB = 6, 16, 30


def make_case():
    hidden, weight, target, _ = normal_case(ROWS, SIZE, VOCAB)
    return hidden, weight, target


FUNCTIONS = {
    "linear_logprob": linear_logprob,
    "linear_logprob_loss": lambda h, w, t: linear_logprob_loss(h, w, t, logprob_coef=1.0),
    "linear_cross_entropy": linear_cross_entropy,
    "linear_divergence": lambda h, w, t: linear_divergence(h, w, h, w, mask=t),
    "linear_divergence_loss": lambda h, w, t: linear_divergence_loss(h, w, h, w, row_weights=t),
    "verl": verl.linear_cross_entropy,
    "areal": areal.linear_cross_entropy,
    "areal logprobs": areal.linear_cross_entropy_logprobs,
    "skyrl": lambda h, w, t: skyrl.FusedLinearLogprobTriton.apply(h, w, t, 0, VOCAB, 8, None),
    "trl": lambda h, w, t: trl.ChunkedLogProbFunction.apply(h, w, None, t, 1.0, 8),
    "liger": liger.liger_fused_linear_cross_entropy,
}


def jagged(values):
    return torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 4, 5, ROWS]))


def strided(values):
    return torch.nested.nested_tensor(list(values.tensor_split(3)))


KINDS = {
    "jagged": (jagged, r"a nested tensor.*\.values\(\)"),
    "strided nested": (
        strided,
        r"a nested tensor of the strided layout.*torch\.cat\(.*\.unbind\(\)\)",
    ),
    "sparse": (torch.Tensor.to_sparse, r"of the layout torch\.sparse_coo.*\.to_dense\(\)"),
    "sparse rows": (torch.Tensor.to_sparse_csr, r"of the layout torch\.sparse_csr.*\.to_dense\(\)"),
    "quantized": (
        lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8),
        r"quantized \(torch\.qint8\).*\.dequantize\(\)",
    ),
    "wrapper": (lambda t: TwoTensor(t, t), r"of the type TwoTensor"),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_errors_name_the_argument_its_kind_and_a_remedy(function, kind):
    make, message = KINDS[kind]
    hidden, weight, target = make_case()
    call = FUNCTIONS[function]

    with pytest.raises(ValueError, match=rf"^(student_)?hidden is {message}"):
        call(make(hidden), weight, target)
    with pytest.raises(ValueError, match=rf"^(student_)?weight is {message}"):
        call(hidden, make(weight), target)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("make", [jagged, strided, torch.Tensor.to_sparse])
def test_errors_name_the_rows_arguments(function, make):
    hidden, weight, target = make_case()

    name = r"(target|targets|labels|mask|row_weights)"
    with pytest.raises(ValueError, match=rf"^{name} is (a nested tensor|of the layout)"):
        FUNCTIONS[function](hidden, weight, make(target))


@pytest.mark.parametrize(
    "name", ["bias", "temperature", "mean_logit_weights", "candidate_ids", "weight_grad"]
)
def test_errors_name_the_optional_argument(name):
    hidden, weight, target = make_case()

    with pytest.raises(ValueError, match=rf"^{name} is of the layout torch\.sparse_coo"):
        linear_logprob(hidden, weight, target, **{name: torch.ones(ROWS).to_sparse()})


@pytest.fixture
def mesh(tmp_path):
    """A mesh of one rank on the host, where the test's tensors are, too."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    with torch.device("cpu"):
        yield DeviceMesh("cpu", [0])
    dist.destroy_process_group()


def test_dtensors_are_refused_until_they_are_gathered(mesh):
    hidden, weight, target = make_case()
    expected = linear_logprob(hidden, weight, target).logprob
    spread = distribute_tensor(weight, mesh, [Shard(0)])
    assert isinstance(spread, DTensor)

    for call in FUNCTIONS.values():
        with pytest.raises(ValueError, match=r"weight is a DTensor.*full_tensor\(\).*to_local\(\)"):
            call(hidden, spread, target)
    with pytest.raises(ValueError, match="^hidden is a DTensor"):
        linear_logprob(distribute_tensor(hidden, mesh, [Replicate()]), weight, target)

    for plain in (spread.full_tensor(), spread.to_local()):
        assert torch.equal(linear_logprob(hidden, plain, target).logprob, expected)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_remedies_give_the_scores_of_plain_tensors():
    hidden, weight, target = make_case()
    expected = linear_logprob(hidden, weight, target).logprob

    for packed in (jagged(hidden).values(), torch.cat(strided(hidden).unbind())):
        assert torch.equal(linear_logprob(packed, weight, target).logprob, expected)
    dense = linear_logprob(hidden.to_sparse().to_dense(), weight.to_sparse_csr().to_dense(), target)
    assert torch.equal(dense.logprob, expected)


def test_gradients_reach_the_values_of_a_nested_tensor():
    hidden, weight, target = make_case()
    nested = jagged(hidden).detach().requires_grad_()
    leaf = hidden.clone().requires_grad_()

    linear_logprob(nested.values(), weight, target).logprob.sum().backward()

    linear_logprob(leaf, weight, target).logprob.sum().backward()
    assert torch.equal(nested.grad.values(), leaf.grad)


def test_subclasses_that_compute_as_torch_does_are_taken():
    class Tagged(torch.Tensor):
        pass

    hidden, weight, target = make_case()
    expected = linear_logprob(hidden, weight, target).logprob

    parameter = torch.nn.Parameter(weight)
    assert torch.equal(linear_logprob(hidden, parameter, target).logprob, expected)
    tagged = linear_logprob(hidden.as_subclass(Tagged), torch.nn.Buffer(weight), target)
    assert torch.equal(tagged.logprob.as_subclass(torch.Tensor), expected)


def test_tensors_without_values_give_the_shapes_of_the_results():
    hidden, weight, target = (each.to("meta") for each in make_case())
    fake = FakeTensorMode()

    for arguments in (
        (hidden, weight, target),
        tuple(fake.from_tensor(each) for each in make_case()),
    ):
        assert linear_logprob(*arguments).logprob.shape == (ROWS,)


# 2^64 - 100 as a signed integer is the ignore_index, so the row was silently ignored.
@pytest.mark.parametrize("name", ["target", "candidate_ids", "a list of candidate_ids"])
def test_unsigned_ids_of_64_bits_are_refused(name):
    hidden, weight, target = make_case()
    ids = torch.arange(ROWS).to(torch.uint64)
    calls = {
        "target": lambda: linear_logprob(hidden, weight, ids),
        "candidate_ids": lambda: linear_logprob(
            hidden, weight, target, candidate_ids=ids.reshape(ROWS, 1)
        ),
        "a list of candidate_ids": lambda: linear_logprob(
            hidden, weight, target, candidate_ids=list(ids.reshape(ROWS, 1))
        ),
    }

    with pytest.raises(ValueError, match=rf"{name.split()[-1]}.* is .*(UInt64|uint64)"):
        calls[name]()


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int8, torch.uint16, torch.uint32, torch.int32], ids=str
)
def test_targets_may_have_any_other_integer_type(dtype):
    hidden, weight, target = make_case()
    others = target.to(dtype)

    for options in ({}, {"return_token_accuracy": True, "return_predicted_tokens": True}):
        ours = linear_cross_entropy(hidden, weight, others, **options)
        expected = linear_cross_entropy(hidden, weight, target, **options)
        assert torch.equal(*(each if not options else each.loss for each in (ours, expected)))
    for name in ("verl", "areal", "skyrl", "trl", "liger"):
        rows = hidden.unsqueeze(0) if name == "skyrl" else hidden
        pairs = [
            FUNCTIONS[name](rows, weight, each.unsqueeze(0) if name == "skyrl" else each)
            for each in (others, target)
        ]
        torch.testing.assert_close(*pairs, rtol=0, atol=0)
