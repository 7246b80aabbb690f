"""Gradients equal those of the double reference, for any upstream gradient, and nothing else is computed."""

import math
import threading
from typing import NamedTuple

import pytest
import torch
from linear_logprob_reference import reference, reference_logits, seeded
from logprobd_ops.linear_logprob import linear_logprob
from torch import Tensor

IGNORED = -100
OUTPUTS = ("logprob", "entropy", "lse", "mean_logit")
# Relative Frobenius errors.
DOUBLE_ERROR_MAX = 1e-10
SIXTEEN_BIT_ERROR_MAX = 4e-3


class Case(NamedTuple):
    hidden: Tensor
    weight: Tensor
    target: Tensor
    bias: Tensor

    @property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.hidden, self.weight, self.bias

    def to(self, dtype: torch.dtype) -> "Case":
        leaves = [leaf.detach().to(dtype).requires_grad_() for leaf in self.leaves]
        return Case(leaves[0], leaves[1], self.target, leaves[2])


def make_case(rows=11, size=9, vocab=200, dtype=torch.float64, spread_max=10.0, seed=0) -> Case:
    """Logits of standard deviation 1, a flat row, to spread_max, a peaked one."""
    generator = seeded(seed)
    spread = torch.linspace(1, spread_max, rows, dtype=torch.float64).unsqueeze(-1)
    hidden = spread * torch.randn(rows, size, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocab, size, generator=generator, dtype=torch.float64) / size**0.5
    bias = torch.randn(vocab, generator=generator, dtype=torch.float64)
    target = torch.randint(vocab, (rows,), generator=generator)
    leaves = [tensor.to(dtype).requires_grad_() for tensor in (hidden, weight, bias)]
    return Case(leaves[0], leaves[1], target, leaves[2])


def upstream_of(shape, dtype=torch.float64, seed=1) -> list[Tensor]:
    """One for each of OUTPUTS, of any sign."""
    generator = seeded(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in OUTPUTS]


def score(case: Case, **options) -> list[Tensor]:
    """OUTPUTS of the operator."""
    return list(linear_logprob(*case, return_mean_logit=True, **options))


def true_scores(case: Case, **options) -> list[Tensor]:
    scores = reference(*case, **options)
    return [getattr(scores, name) for name in OUTPUTS]


def gradients(scores, case: Case, upstream) -> tuple[Tensor, ...]:
    return torch.autograd.grad(scores, case.leaves, upstream)


def error_of(ours: Tensor, truth: Tensor) -> float:
    return ((ours.double() - truth.double()).norm() / truth.double().norm()).item()


def assert_same_gradients(case: Case, outputs=OUTPUTS, **options) -> None:
    chosen = [OUTPUTS.index(name) for name in outputs]
    upstream = [upstream_of(case.target.shape)[i] for i in chosen]
    ours = gradients([score(case, **options)[i] for i in chosen], case, upstream)
    truth = gradients([true_scores(case, **options)[i] for i in chosen], case, upstream)
    for our, true, leaf in zip(ours, truth, case.leaves, strict=True):
        assert our.dtype == leaf.dtype and our.shape == leaf.shape
        torch.testing.assert_close(our, true, rtol=1e-9, atol=1e-10)


# Against the double reference, in double.

OPTIONS = {
    "plain": {},
    "softcap": {"softcap": 7.0},
    "scale": {"scale": -0.5},
    "temperature": {"temperature": 0.6},
    "temperature a row": {"temperature": torch.linspace(0.3, 2, 11, dtype=torch.float64)},
    "padding": {"vocab_valid": 195},
    "padding over tiles": {"vocab_valid": 100},
    "column_weights": {"column_weights": torch.linspace(-1, 2, 200, dtype=torch.float64)},
    "all together": {
        "softcap": 7.0,
        "scale": 1.5,
        "temperature": torch.linspace(0.3, 2, 11, dtype=torch.float64),
        "vocab_valid": 195,
        "column_weights": torch.linspace(-1, 2, 200, dtype=torch.float64),
    },
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("outputs", [OUTPUTS, *[(name,) for name in OUTPUTS]])
def test_every_option_and_output_has_the_reference_gradient(name, outputs):
    case = make_case()
    case.target[:] %= OPTIONS[name].get("vocab_valid", 200)
    case.target[[2, 7]] = IGNORED

    assert_same_gradients(case, outputs, **OPTIONS[name])


@pytest.mark.parametrize(
    ("rows", "size", "vocab"),
    [(1, 1, 1), (1, 8, 193), (7, 31, 2), (13, 70, 191), (13, 70, 192), (5, 123, 507), (129, 8, 8)],
)
def test_every_size_has_the_reference_gradient(rows, size, vocab):
    assert_same_gradients(make_case(rows, size, vocab, spread_max=20.0))


@pytest.mark.parametrize("name", ("plain", "softcap", "temperature a row", "all together"))
def test_numeric_derivatives_agree(name):
    rows, vocab = 4, 9
    case = make_case(rows, 3, vocab, spread_max=3.0)
    case.target[1] = IGNORED
    options = dict(OPTIONS[name])
    if "vocab_valid" in options:
        options["vocab_valid"] = 7
        case.target[:] = torch.tensor([0, IGNORED, 6, 3])
    if "temperature" in options:
        options["temperature"] = torch.linspace(0.3, 2, rows, dtype=torch.float64)
    if "column_weights" in options:
        options["column_weights"] = torch.linspace(-1, 2, vocab, dtype=torch.float64)

    def scores(hidden, weight, bias):
        return tuple(score(Case(hidden, weight, case.target, bias), **options))

    assert torch.autograd.gradcheck(scores, case.leaves)


def test_numeric_derivatives_agree_over_several_tiles():
    case = make_case(3, 2, 400, spread_max=3.0)

    def scores(hidden, weight, bias):
        return tuple(score(Case(hidden, weight, case.target, bias)))

    assert torch.autograd.gradcheck(scores, case.leaves, fast_mode=True)


def test_unowned_targets_have_the_gradient_of_minus_lse():
    case = make_case()
    case.target[:] %= 195
    case.target[[0, 5]] = torch.tensor([-1, 2**31])
    case.target[3] = 197  # in the padding
    unowned = [0, 3, 5]
    upstream = upstream_of(11)

    ours = gradients(score(case, unowned_target="zero", vocab_valid=195), case, upstream)

    is_unowned = torch.zeros(11, dtype=torch.bool)
    is_unowned[unowned] = True
    owned = case._replace(target=case.target.masked_fill(is_unowned, 0))
    logprob, entropy, lse, mean_logit = true_scores(owned, vocab_valid=195)
    logprob = torch.where(is_unowned, -lse, logprob)
    truth = gradients([logprob, entropy, lse, mean_logit], case, upstream)
    for our, true in zip(ours, truth, strict=True):
        torch.testing.assert_close(our, true, rtol=1e-9, atol=1e-10)


def test_sequences_of_any_stride_get_gradients_of_their_shape():
    case = make_case(12)
    hidden = case.hidden.view(3, 4, 9).transpose(0, 1)
    target = case.target.view(3, 4).T
    upstream = upstream_of((4, 3))
    tied = Case(hidden, case.weight, target, case.bias)

    ours = gradients(score(tied), case, upstream)

    truth = gradients(true_scores(tied), case, upstream)
    for our, true in zip(ours, truth, strict=True):
        torch.testing.assert_close(our, true, rtol=1e-9, atol=1e-10)


def test_columns_of_minus_infinity_get_no_gradient_and_make_no_nan():
    case = make_case()
    with torch.no_grad():
        case.bias[:150] = -math.inf
    case.target[:] = 150 + case.target % 50
    upstream = upstream_of(11)[:3]
    valid = Case(case.hidden, case.weight[150:], case.target - 150, case.bias[150:])

    ours = gradients(score(case)[:3], case, upstream)

    truth = gradients(true_scores(valid)[:3], case, upstream)
    for our, true in zip(ours, truth, strict=True):
        torch.testing.assert_close(our, true, rtol=1e-9, atol=1e-10)
    assert (ours[1][:150] == 0).all() and (ours[2][:150] == 0).all()


# Upstream gradients.


def test_outputs_that_a_loss_leaves_out_count_as_zero():
    case = make_case()
    upstream = upstream_of(11)
    for i, name in enumerate(OUTPUTS):
        alone = gradients(score(case)[i], case, upstream[i])
        zeros = [torch.zeros(11, dtype=torch.float64) for _ in OUTPUTS]
        zeros[i] = upstream[i]
        explicit = gradients(score(case), case, zeros)
        for ours, same in zip(alone, explicit, strict=True):
            torch.testing.assert_close(ours, same, rtol=1e-12, atol=1e-13, msg=name)


LAYOUTS = {
    "expanded": lambda upstream: torch.tensor(0.75, dtype=upstream.dtype).expand(upstream.shape),
    "zero stride": lambda upstream: upstream[:1].as_strided(upstream.shape, (0,)),
    "every second": lambda upstream: torch.stack([upstream, upstream * 9], 1)[:, 0],
    "tail": lambda upstream: torch.cat([upstream[:1], upstream])[1:],
    "tiny": lambda upstream: upstream * 1e-6,
    "huge": lambda upstream: upstream * 1e4,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_upstream_gradients_of_any_layout_and_size(layout):
    case = make_case()
    upstream = [LAYOUTS[layout](each) for each in upstream_of(11)]

    ours = gradients(score(case), case, upstream)

    truth = gradients(true_scores(case), case, [each.contiguous() for each in upstream])
    for our, true in zip(ours, truth, strict=True):
        assert error_of(our, true) <= DOUBLE_ERROR_MAX


def test_a_sum_over_transposed_sequences():
    case = make_case(12)
    hidden, target = case.hidden.view(3, 4, 9), case.target.view(3, 4)
    weights = upstream_of((4, 3))[0]

    logprob, entropy, _ = linear_logprob(hidden, case.weight, target, case.bias)
    ours = gradients([(logprob.T * weights).sum() + entropy.mean()], case, None)

    truth_scores = reference(hidden, case.weight, target, case.bias)
    truth = gradients(
        [(truth_scores.logprob.T * weights).sum() + truth_scores.entropy.mean()], case, None
    )
    for our, true in zip(ours, truth, strict=True):
        torch.testing.assert_close(our, true, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.bfloat16))
def test_rows_without_an_upstream_gradient_get_exact_zeros_and_give_none(dtype):
    """Ignored ones too, whatever they hold."""
    case = make_case().to(dtype)
    without = [1, 4, 9]
    with torch.no_grad():
        case.hidden[4] = math.nan
        case.hidden[9] = math.inf
    case.target[4] = IGNORED
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    upstream = upstream_of(11, wide)
    for each in upstream:
        each[[1, 9]] = 0
    kept = [row for row in range(11) if row not in without]
    rest = Case(case.hidden[kept], case.weight, case.target[kept], case.bias)

    ours = gradients(score(case), case, upstream)

    assert (ours[0][without] == 0).all()
    alone = gradients(score(rest), case, [each[kept] for each in upstream])
    assert all(torch.equal(our, same) for our, same in zip(ours, alone, strict=True))


def test_only_ignored_rows_give_exact_zeros():
    case = make_case()
    case.target[:] = IGNORED

    ours = gradients(score(case), case, upstream_of(11))

    assert all((each == 0).all() for each in ours)


def test_no_rows_give_exact_zeros():
    case = make_case(0)

    ours = gradients(score(case), case, upstream_of(0))

    assert ours[0].shape == (0, 9)
    assert (ours[1] == 0).all() and (ours[2] == 0).all()


@pytest.mark.parametrize("valid", (1, 100, 192, 199))
def test_padded_rows_of_the_weight_get_exact_zeros(valid):
    case = make_case()
    with torch.no_grad():
        case.weight[valid:] = math.nan
        case.bias[valid:] = math.inf
    case.target[:] %= valid

    d_hidden, d_weight, d_bias = gradients(score(case, vocab_valid=valid), case, upstream_of(11))

    assert (d_weight[valid:] == 0).all() and (d_bias[valid:] == 0).all()
    assert d_hidden.isfinite().all() and d_weight.isfinite().all() and d_bias.isfinite().all()


def test_an_entropy_that_was_not_asked_for_adds_nothing_to_a_loss():
    case = make_case()

    logprob, entropy, _ = linear_logprob(*case, need_entropy=False)
    ours = gradients([logprob.sum() + entropy.sum()], case, None)

    truth = gradients([linear_logprob(*case)[0].sum()], case, None)
    assert all(torch.equal(our, same) for our, same in zip(ours, truth, strict=True))


# What is computed.


@pytest.mark.parametrize("wanted", (0, 1, 2))
def test_a_gradient_of_one_input_alone(wanted):
    case = make_case()
    both = gradients(score(case), case, upstream_of(11))
    for i, leaf in enumerate(case.leaves):
        leaf.requires_grad_(i == wanted)

    torch.autograd.backward(score(case), upstream_of(11))

    for i, leaf in enumerate(case.leaves):
        if i == wanted:
            assert torch.equal(leaf.grad, both[i])
        else:
            assert leaf.grad is None


@pytest.mark.parametrize(
    "needs", [(True, False, False), (False, True, False), (False, False, True)]
)
def test_a_gradient_that_is_not_needed_has_no_elements(needs):
    case = make_case()
    hidden, weight, bias = (leaf.detach() for leaf in case.leaves)
    _, entropy, lse = linear_logprob(hidden, weight, case.target, bias)
    options = (1.0, 1.0, 0.0, IGNORED, 0, -1, "", False, False, True, False, False)

    computed = torch.ops.logprobd.linear_logprob_backward(
        *upstream_of(11),
        lse,
        torch.zeros_like(lse),
        entropy,
        hidden,
        weight,
        case.target,
        bias,
        None,
        None,
        *options,
        needs,
    )

    assert [gradient.numel() > 0 for gradient in computed] == list(needs)


def test_the_argmax_is_not_differentiable_and_nothing_is_without_gradients_of_the_inputs():
    case = make_case()
    *_, argmax, mean_logit = linear_logprob(*case, return_argmax=True, return_mean_logit=True)
    assert not argmax.requires_grad and mean_logit.requires_grad

    detached = [leaf.detach() for leaf in case.leaves]
    scores = linear_logprob(detached[0], detached[1], case.target, detached[2])
    assert not any(each.requires_grad for each in scores)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_a_second_backward_gives_the_same_bits(dtype):
    case = make_case(64, 33, 507).to(dtype)
    scores = score(case)
    upstream = upstream_of(64, torch.float32)

    first = torch.autograd.grad(scores, case.leaves, upstream, retain_graph=True)
    second = torch.autograd.grad(scores, case.leaves, upstream)

    assert all(torch.equal(one, two) for one, two in zip(first, second, strict=True))


@pytest.mark.filterwarnings("ignore:logprobd.*an autograd kernel was not registered")
@pytest.mark.parametrize("leaf", (0, 1, 2))
def test_a_second_derivative_is_refused(leaf):
    case = make_case()
    logprob, entropy, _, _ = score(case)
    wanted = case.leaves[leaf]
    (gradient,) = torch.autograd.grad((logprob * entropy).sum(), wanted, create_graph=True)

    with pytest.raises(RuntimeError, match="derivative .* is not implemented"):
        (gradient.square().sum() + wanted.sum()).backward()


# Accuracy in few bits.


def plain_gradients(case: Case, upstream, logits_dtype=None) -> tuple[Tensor, ...]:
    """torch's own, with logits in the dtype of hidden and weight."""
    logits = torch.nn.functional.linear(case.hidden, case.weight, case.bias)
    logprobs = torch.log_softmax(logits.to(logits_dtype or logits.dtype), -1)
    logprob = logprobs.gather(-1, case.target.unsqueeze(-1)).squeeze(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return gradients([logprob, entropy], case, upstream)


def errors(case: Case, logits_dtype) -> tuple[list[float], list[float]]:
    """Ours and torch's, of each leaf."""
    upstream = upstream_of(case.target.shape, torch.float32)[:2]
    ours = gradients(score(case)[:2], case, upstream)
    plain = plain_gradients(case, upstream, logits_dtype)
    exact = case.to(torch.float64)
    truth = plain_gradients(exact, [each.double() for each in upstream])
    return (
        [error_of(our, true) for our, true in zip(ours, truth, strict=True)],
        [error_of(their, true) for their, true in zip(plain, truth, strict=True)],
    )


@pytest.mark.parametrize(
    ("rows", "size", "vocab", "dtype"),
    [
        (64, 123, 507, torch.bfloat16),
        (64, 123, 507, torch.float16),
        (200, 64, 2000, torch.bfloat16),
        (512, 16, 500, torch.bfloat16),
        (512, 16, 20_000, torch.bfloat16),
    ],
)
def test_sixteen_bit_gradients_are_rounded_once(rows, size, vocab, dtype):
    """Independent of how many blocks of columns the last size is cut into (kBlockLogits)."""
    case = make_case(rows, size, vocab).to(dtype)

    ours, plain = errors(case, torch.float32)

    assert max(ours) <= SIXTEEN_BIT_ERROR_MAX
    assert all(our <= their for our, their in zip(ours, plain, strict=True))


@pytest.mark.parametrize(
    ("rows", "size", "vocab", "spread_max"),
    [
        (64, 123, 507, 1.0),
        (64, 123, 507, 20.0),
        (64, 896, 500, 4.0),
        (512, 16, 500, 4.0),
        (512, 16, 20_000, 4.0),
    ],
)
def test_fp32_gradients_are_about_as_accurate_as_those_of_torch(rows, size, vocab, spread_max):
    case = make_case(rows, size, vocab, spread_max=spread_max).to(torch.float32)

    ours, plain = errors(case, torch.float32)

    assert all(our <= 2 * their for our, their in zip(ours, plain, strict=True)), (ours, plain)


@pytest.mark.parametrize(
    ("level", "factor"), [(0, 1), (0, 8), (0, 32), (1000, 1), (1000, 8), (65_536, 1)]
)
def test_fp32_gradients_of_exact_logits_are_about_as_accurate_as_those_of_torch(level, factor):
    """Only the softmax rounds. At 65,536 the lse has steps of 0.008: the differences of logits are what counts."""
    generator = seeded(0)
    hidden = factor * torch.randint(-4, 5, (64, 16), generator=generator).float()
    weight = torch.randint(-4, 5, (257, 16), generator=generator).float() / 32
    target = torch.randint(257, (64,), generator=generator)
    bias = torch.full((257,), float(level))
    leaves = [leaf.requires_grad_() for leaf in (hidden, weight, bias)]

    ours, plain = errors(Case(leaves[0], leaves[1], target, leaves[2]), torch.float32)

    assert all(our <= 2 * their for our, their in zip(ours, plain, strict=True)), (ours, plain)


@pytest.mark.parametrize("temperature", (0.1, 0.7, 1e-3))
def test_large_logits_keep_the_accuracy_of_their_differences_at_any_temperature(temperature):
    """lse and 1 / temperature, each rounded to fp32, were off by 5e-3 here."""
    generator = seeded(0)
    hidden = 1000.0 * torch.randint(-4, 5, (64, 16), generator=generator)
    weight = torch.randint(-4, 5, (257, 16), generator=generator) / 32.0
    target = torch.randint(257, (64,), generator=generator)
    truth = weight.double().requires_grad_()
    log_p = torch.log_softmax(hidden.double() @ truth.T / temperature, -1)
    log_p.gather(1, target[:, None]).sum().backward()
    weight.requires_grad_()

    linear_logprob(hidden, weight, target, temperature=temperature)[0].sum().backward()

    assert error_of(weight.grad, truth.grad) <= 1e-6


@pytest.mark.parametrize("dtype", (torch.float64, torch.bfloat16))
def test_more_rows_than_a_block_holds(dtype):
    """kBlockRows is 32,768."""
    few = make_case(1000, 8, 20).to(dtype)
    times = 33
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    upstream = upstream_of(1000, wide)
    many = Case(few.hidden.repeat(times, 1), few.weight, few.target.repeat(times), few.bias)

    ours = gradients(score(many), few, [each.repeat(times) for each in upstream])

    exact = few.to(torch.float64)
    truth = gradients(true_scores(exact), exact, [each.double() * times for each in upstream])
    bound = DOUBLE_ERROR_MAX if dtype == torch.float64 else SIXTEEN_BIT_ERROR_MAX
    assert max(error_of(our, true) for our, true in zip(ours, truth, strict=True)) <= bound


@pytest.mark.parametrize("hidden_dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("weight_dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_gradients_have_the_dtypes_of_their_inputs(hidden_dtype, weight_dtype):
    wide = make_case(32, 33, 257)
    leaves = [
        leaf.detach().to(dtype).requires_grad_()
        for leaf, dtype in zip(
            wide.leaves, (hidden_dtype, weight_dtype, torch.float32), strict=True
        )
    ]
    case = Case(leaves[0], leaves[1], wide.target, leaves[2])
    upstream = upstream_of(32, torch.float32)

    ours = gradients(score(case), case, upstream)

    truth = gradients(true_scores(case), case, [each.double() for each in upstream])
    for our, true, leaf in zip(ours, truth, leaves, strict=True):
        assert our.dtype == leaf.dtype
        bound = 2e-5 if leaf.dtype == torch.float32 else SIXTEEN_BIT_ERROR_MAX
        assert error_of(our, true) <= bound


# weight_grad.


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("is_transposed", (False, True))
def test_weight_grad_takes_the_sum_of_two_passes_unrounded(dtype, is_transposed):
    case = make_case(64, 33, 257).to(dtype)
    upstream = upstream_of(64, torch.float32)
    start = torch.linspace(-1, 1, 257 * 33).view(257, 33)
    buffer = start.T.contiguous().T if is_transposed else start.clone()

    for _ in range(2):
        torch.autograd.backward(score(case, weight_grad=buffer), upstream)

    assert case.weight.grad is None
    exact = case.to(torch.float64)
    truth = gradients(true_scores(exact), exact, [each.double() for each in upstream])
    assert error_of(buffer - start, 2 * truth[1]) <= 2e-5
    assert error_of(case.hidden.grad, 2 * truth[0]) <= SIXTEEN_BIT_ERROR_MAX


def test_weight_grad_is_left_alone_where_the_weight_needs_no_gradient():
    case = make_case().to(torch.float32)
    case.weight.requires_grad_(False)
    buffer = torch.zeros(200, 9)

    score(case, weight_grad=buffer)[0].sum().backward()

    assert (buffer == 0).all()
    assert case.hidden.grad is not None


WRONG_BUFFERS = {
    "another shape": torch.zeros(9, 200),
    "fewer rows": torch.zeros(199, 9),
    "bfloat16": torch.zeros(200, 9, dtype=torch.bfloat16),
    "float64": torch.zeros(200, 9, dtype=torch.float64),
    "another device": torch.zeros(200, 9, device="meta"),
}


@pytest.mark.parametrize("buffer", WRONG_BUFFERS)
def test_a_wrong_weight_grad_is_refused(buffer):
    case = make_case().to(torch.float32)

    with pytest.raises(ValueError, match="weight_grad"):
        score(case, weight_grad=WRONG_BUFFERS[buffer])[0].sum().backward()


# Threads.


def test_eight_threads_at_once_get_the_results_of_one():
    cases = [make_case(16, 33, 257, torch.float32, seed=seed) for seed in range(8)]
    upstream = upstream_of(16, torch.float32)
    alone = [gradients(score(case), case, upstream) for case in cases]
    together: list = [None] * 8
    ready = threading.Barrier(8)

    def work(i: int) -> None:
        ready.wait()
        for _ in range(5):
            together[i] = gradients(score(cases[i]), cases[i], upstream)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    for ours, truth in zip(together, alone, strict=True):
        for our, same in zip(ours, truth, strict=True):
            torch.testing.assert_close(our, same, rtol=1e-5, atol=1e-6)


def test_logits_of_the_reference_reach_what_the_tests_claim():
    case = make_case(11, 9, 200, spread_max=20.0)

    spread = reference_logits(case.hidden, case.weight).std(1)

    assert spread.min() < 2 and spread.max() > 10
