"""linear_divergence and linear_divergence_loss have the values and gradients of materialised logits in fp64."""

import math

import pytest
import torch
from divergence_cases import KINDS, Case, error_of, make_case, reference
from gradient_cases import SIXTEEN_BIT_ERROR_MAX
from linear_logprob_reference import seeded
from logprobd_ops import linear_divergence, linear_divergence_loss
from originals import original
from torch import Tensor

# Absolute, for divergences and logits of up to 30 in fp32.
FP32_TOLERANCE = 1e-5


def upstream_of(rows: int, seed=1) -> list[Tensor]:
    generator = seeded(seed)
    return [torch.randn(rows, generator=generator, dtype=torch.float64) for _ in range(2)]


def assert_same(ours, truth) -> None:
    for our, true in zip(ours, truth, strict=True):
        assert our.shape == true.shape
        torch.testing.assert_close(our, true, rtol=1e-9, atol=1e-10)


OPTIONS = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "temperature a row": {"temperature": torch.linspace(0.3, 2, 11, dtype=torch.float64)},
    "scales": {"student_scale": -0.5, "teacher_scale": 0.7},
    "caps": {"student_softcap": 7.0, "teacher_softcap": 5.0},
    "one cap": {"teacher_softcap": 9.0},
    "padding": {"vocab_valid": 131},
    "all together": {
        "temperature": torch.linspace(0.3, 2, 11, dtype=torch.float64),
        "student_scale": 1.3,
        "teacher_scale": 0.8,
        "student_softcap": 7.0,
        "teacher_softcap": 5.0,
        "vocab_valid": 195,
    },
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("memory", ("recompute", "cached"))
def test_results_and_gradients_are_those_of_materialised_logits(kind, options, memory):
    case = make_case()
    upstream = upstream_of(11)
    truth = reference(case, kind, beta=0.3, **options)

    ours = linear_divergence(*case, kind=kind, beta=0.3, memory=memory, **options)

    assert_same(ours, truth)
    for one in (slice(0, 1), slice(1, 2), slice(0, 2)):  # the divergence, the entropy, both
        assert_same(
            torch.autograd.grad(ours[one], case.leaves, upstream[one], retain_graph=True),
            torch.autograd.grad(truth[one], case.leaves, upstream[one], retain_graph=True),
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("memory", ("recompute", "cached"))
def test_biases_have_their_gradient(kind, memory):
    case = make_case()
    student_bias, teacher_bias = torch.randn(2, 200, dtype=torch.float64, generator=seeded(3))
    student_bias.requires_grad_()
    options = {"student_bias": student_bias, "teacher_bias": teacher_bias, "student_scale": 1.5}
    leaves = (*case.leaves, student_bias)
    truth = reference(case, kind, **options)[0]

    ours = linear_divergence(*case, kind=kind, memory=memory, **options).divergence

    upstream = upstream_of(11)[0]
    assert_same(
        torch.autograd.grad(ours, leaves, upstream), torch.autograd.grad(truth, leaves, upstream)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck(kind):
    case = make_case(rows=3, vocab=17, spread_max=3)

    def outputs(hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return tuple(linear_divergence(hidden, weight, *case[2:], kind=kind, beta=0.7))

    assert torch.autograd.gradcheck(outputs, case.leaves)


@pytest.mark.parametrize("beta", (1e-6, 1e-3, 0.5, 0.999, 1 - 1e-6))
@pytest.mark.parametrize("gap", (0.0, 1e-3, 1.0, 10.0))
def test_jsd_near_its_limits(beta, gap):
    case = make_case(gap=gap)
    truth = reference(case, "jsd", beta=beta)[0]

    ours = linear_divergence(*case, kind="jsd", beta=beta).divergence

    torch.testing.assert_close(ours, truth.clamp(min=0), rtol=1e-8, atol=1e-12)
    assert_same(
        torch.autograd.grad(ours.sum(), case.leaves), torch.autograd.grad(truth.sum(), case.leaves)
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gap", (1e-3, 0.1, 1.0))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_results_keep_fp32_accuracy_and_gradients_that_of_their_dtype(kind, gap, dtype):
    case = make_case(rows=37, vocab=1001, dtype=dtype, gap=gap)
    exact = Case(*(each.detach().double() for each in case))
    exact = Case(*(each.requires_grad_() for each in exact[:2]), *exact[2:])
    truth = reference(exact, kind, beta=0.3)
    weights = upstream_of(37)[0].float()
    true_gradients = torch.autograd.grad(truth[0], exact.leaves, weights.double())

    for memory in ("recompute", "cached"):
        ours = linear_divergence(*case, kind=kind, beta=0.3, memory=memory)
        for our, true in zip(ours, truth, strict=True):
            assert our.dtype == torch.float32
            tolerance = FP32_TOLERANCE * (1 + true.detach().abs().max().item() / 30)
            torch.testing.assert_close(our.double(), true, rtol=1e-5, atol=tolerance)
        gradients = torch.autograd.grad(ours.divergence, case.leaves, weights)
        for our, true in zip(gradients, true_gradients, strict=True):
            assert our.dtype == dtype
            assert error_of(our, true) < SIXTEEN_BIT_ERROR_MAX


@pytest.mark.parametrize("offset", (-1e4, 1e4))
@pytest.mark.parametrize("kind", KINDS)
def test_a_large_offset_of_the_logits_changes_nothing(kind, offset):
    case = make_case(dtype=torch.float64)
    bias = torch.full((200,), offset, dtype=torch.float64)
    truth = linear_divergence(*case, kind=kind)

    ours = linear_divergence(*case, kind=kind, student_bias=bias, teacher_bias=-bias)

    for our, true in zip(ours, truth, strict=True):
        torch.testing.assert_close(our, true, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_equal_models_have_no_divergence_and_no_gradient(kind):
    case = make_case(dtype=torch.float32)
    case = Case(*case.leaves, *(leaf.detach() for leaf in case.leaves))

    divergence = linear_divergence(*case, kind=kind).divergence

    assert (divergence >= 0).all()
    assert (divergence <= 1e-6).all()
    for gradient in torch.autograd.grad(divergence.sum(), case.leaves):
        assert gradient.abs().max() <= 1e-5


@pytest.mark.parametrize("memory", ("recompute", "cached"))
@pytest.mark.parametrize("dtype", (torch.bool, torch.int64, torch.float32))
def test_masked_rows_have_zeros_and_are_not_read(memory, dtype):
    case = make_case(rows=12)
    mask = torch.arange(12).remainder(3).ne(1).to(dtype)
    kept = mask.bool()
    with torch.no_grad():
        case.student_hidden[~kept] = math.nan
        case.teacher_hidden[~kept] = math.inf
    part = Case(*case)._replace(
        student_hidden=case.student_hidden.detach()[kept].requires_grad_(),
        teacher_hidden=case.teacher_hidden[kept],
    )
    upstream = upstream_of(12)[0]
    truth = linear_divergence(*part)
    true_gradients = torch.autograd.grad(truth.divergence, part.leaves, upstream[kept])

    ours = linear_divergence(*case, mask=mask, memory=memory)
    hidden_gradient, weight_gradient = torch.autograd.grad(ours.divergence, case.leaves, upstream)

    for our, true in zip(ours, truth, strict=True):
        assert (our[~kept] == 0).all()
        assert_same([our[kept]], [true])
    assert (hidden_gradient[~kept] == 0).all()
    assert_same((hidden_gradient[kept], weight_gradient), true_gradients)


def test_rows_without_a_gradient_do_not_affect_others():
    case = make_case()
    upstream = upstream_of(11)[0]
    upstream[[2, 7]] = 0
    truth = torch.autograd.grad(reference(case)[0], case.leaves, upstream)
    for memory in ("recompute", "cached"):
        with torch.no_grad():
            hidden = case.student_hidden.clone()
            hidden[2] = math.nan
        hidden.requires_grad_()

        divergence = linear_divergence(hidden, *case[1:], memory=memory).divergence

        assert divergence[2].isnan()
        gradients = torch.autograd.grad(divergence, (hidden, case.student_weight), upstream)
        assert_same(gradients, truth)


def test_a_row_that_is_not_finite_gives_nan_in_that_row_only():
    case = make_case(rows=4)
    clean = linear_divergence(*case)
    with torch.no_grad():
        case.student_hidden[1, 0] = math.nan
        case.teacher_hidden[2, 0] = math.nan

    ours = linear_divergence(*case)

    assert ours.divergence.isnan().tolist() == [False, True, True, False]
    assert ours.entropy.isnan().tolist() == [False, True, False, False]
    assert_same([ours.divergence[[0, 3]]], [clean.divergence[[0, 3]]])


@pytest.mark.parametrize("kind", KINDS)
def test_ids_that_both_models_exclude_have_no_part(kind):
    case = make_case()
    excluded = torch.arange(200).remainder(5) == 2
    bias = torch.zeros(200, dtype=torch.float64).masked_fill(excluded, -math.inf)
    part = case._replace(
        student_weight=case.student_weight.detach()[~excluded].requires_grad_(),
        teacher_weight=case.teacher_weight[~excluded],
    )
    truth = linear_divergence(*part, kind=kind)
    true_gradients = torch.autograd.grad(truth.divergence.sum(), part.leaves)

    ours = linear_divergence(*case, kind=kind, student_bias=bias, teacher_bias=bias)
    hidden_gradient, weight_gradient = torch.autograd.grad(ours.divergence.sum(), case.leaves)

    assert_same(ours, truth)
    assert_same((hidden_gradient, weight_gradient[~excluded]), true_gradients)
    assert (weight_gradient[excluded] == 0).all()


def test_an_id_that_only_one_model_excludes_makes_a_kl_infinite():
    case = make_case()
    bias = torch.zeros(200, dtype=torch.float64)
    bias[3] = -math.inf

    assert (linear_divergence(*case, student_bias=bias).divergence == math.inf).all()
    assert linear_divergence(*case, teacher_bias=bias).divergence.isfinite().all()
    reverse = linear_divergence(*case, kind="reverse_kl", teacher_bias=bias).divergence
    assert (reverse == math.inf).all()
    jsd = linear_divergence(*case, kind="jsd", student_bias=bias).divergence
    assert (jsd <= math.log(2)).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reduction", ("sum", "mean"))
@pytest.mark.parametrize("has_weights", (False, True))
@pytest.mark.parametrize("memory_budget", (None, 0, 20_000))
def test_a_loss_has_the_gradients_of_the_sum_of_rows(kind, reduction, has_weights, memory_budget):
    case = make_case(rows=12)
    mask = torch.arange(12) != 5
    weights = upstream_of(12)[0]
    weights[2] = 0
    divergence, entropy = reference(case, kind)
    truth = (divergence * mask * (weights if has_weights else 1)).sum()
    if reduction == "mean":
        truth = truth / 11

    ours = linear_divergence_loss(
        *case,
        kind=kind,
        mask=mask,
        row_weights=weights if has_weights else None,
        reduction=reduction,
        memory_budget=memory_budget,
    )

    assert_same((ours.loss, ours.divergence), (truth, divergence * mask))
    assert_same([ours.entropy], [entropy * mask])
    assert not ours.divergence.requires_grad
    assert_same(
        torch.autograd.grad(3 * ours.loss, case.leaves), torch.autograd.grad(3 * truth, case.leaves)
    )


def test_a_loss_ignores_rows_of_weight_zero_even_if_they_are_nan():
    case = make_case(rows=3)
    weights = torch.tensor([1.0, 0.0, 2.0])
    with torch.no_grad():
        case.teacher_hidden[1] = math.nan

    ours = linear_divergence_loss(*case, row_weights=weights)

    assert ours.loss.isfinite()
    for gradient in torch.autograd.grad(ours.loss, case.leaves):
        assert gradient.isfinite().all()


def test_a_loss_without_gradients_computes_values_only():
    case = make_case()
    with torch.no_grad():
        loss = linear_divergence_loss(*case).loss

    assert_same([loss], [reference(case)[0].mean().detach()])


def test_a_second_backward_of_a_loss_says_what_to_call():
    case = make_case()
    loss = linear_divergence_loss(*case).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="use linear_divergence"):
        loss.backward()


@pytest.mark.parametrize("memory", ("recompute", "cached"))
def test_results_may_be_changed_in_place_before_the_backward(memory):
    case = make_case()
    truth = torch.autograd.grad(reference(case, "reverse_kl")[0].sum(), case.leaves)
    divergence, entropy = linear_divergence(*case, kind="reverse_kl", memory=memory)
    loss = divergence.sum()
    entropy.detach().zero_()
    divergence.detach().zero_()

    assert_same(torch.autograd.grad(loss, case.leaves), truth)


def test_only_the_gradients_that_are_needed_are_computed():
    case = make_case()
    truth = torch.autograd.grad(reference(case)[0].sum(), case.leaves)
    for needed in (0, 1):
        leaves = [leaf.detach().requires_grad_(i == needed) for i, leaf in enumerate(case.leaves)]
        for loss in (
            linear_divergence(*leaves, *case[2:]).divergence.sum(),
            linear_divergence_loss(*leaves, *case[2:], reduction="sum").loss,
        ):
            loss.backward()
            assert_same([leaves[needed].grad], [truth[needed]])
            assert leaves[1 - needed].grad is None
            leaves[needed].grad = None


def test_the_teacher_gets_no_gradient():
    case = make_case()
    teacher = [each.requires_grad_() for each in case[2:]]
    linear_divergence(*case.leaves, *teacher).divergence.sum().backward()
    linear_divergence_loss(*case.leaves, *teacher).loss.backward()
    assert [each.grad for each in teacher] == [None, None]


@pytest.mark.parametrize("shape", ((0,), (2, 0), (3, 4), ()))
def test_rows_of_any_shape(shape):
    rows = math.prod(shape)
    flat = make_case(rows=max(rows, 1))
    case = Case(
        flat.student_hidden.detach()[:rows].reshape(*shape, 16).requires_grad_(),
        flat.student_weight,
        flat.teacher_hidden[:rows].reshape(*shape, 24),
        flat.teacher_weight,
    )
    for memory in ("recompute", "cached"):
        ours = linear_divergence(*case, memory=memory)
        assert ours.divergence.shape == ours.entropy.shape == shape
        assert_same(ours, reference(case))
        gradients = torch.autograd.grad(ours.divergence.sum(), case.leaves)
        assert [each.shape for each in gradients] == [each.shape for each in case.leaves]
        assert rows > 0 or (gradients[1] == 0).all()
    loss = linear_divergence_loss(*case).loss
    assert rows > 0 or loss == 0


def test_weights_of_different_size_share_their_first_ids():
    case = make_case()
    teacher_weight = torch.cat((case.teacher_weight, torch.full((7, 24), 9.0)))
    truth = linear_divergence(*case)

    ours = linear_divergence(*case[:3], teacher_weight, vocab_valid=200)

    assert_same(ours, truth)


@pytest.mark.parametrize("memory", ("recompute", "cached", "auto"))
@pytest.mark.parametrize("budget", (0, 10_000, 100_000))
def test_results_do_not_depend_on_the_budget(memory, budget):
    case = make_case()
    upstream = upstream_of(11)[0]
    truth = torch.autograd.grad(reference(case)[0], case.leaves, upstream)

    ours = linear_divergence(*case, memory=memory, memory_budget=budget).divergence

    assert_same(torch.autograd.grad(ours, case.leaves, upstream), truth)


def test_strided_inputs_give_the_results_of_contiguous_ones():
    case = make_case(rows=6)
    strided = [each.detach().T.contiguous().T for each in case]
    assert not strided[0].is_contiguous()
    assert_same(linear_divergence(*strided), linear_divergence(*case))


BAD_ARGUMENTS = {
    "student_hidden": ("student_hidden", lambda case: {"student_hidden": case[0][:, :9]}),
    "teacher rows": ("teacher_hidden", lambda case: {"teacher_hidden": case[2][:5]}),
    "teacher_hidden": ("teacher_hidden", lambda case: {"teacher_hidden": case[2][:, :9]}),
    "dtype": ("teacher_weight is Int", lambda case: {"teacher_weight": case[3].int()}),
    "vocabulary": ("vocab_valid", lambda case: {"teacher_weight": case[3][:50]}),
    "vocab_valid": ("vocab_valid", lambda _: {"vocab_valid": 201}),
    "student_bias": ("student_bias", lambda _: {"student_bias": torch.zeros(3)}),
    "teacher_bias": ("teacher_bias", lambda _: {"teacher_bias": torch.zeros(200).int()}),
    "mask": ("mask", lambda _: {"mask": torch.ones(3)}),
    "temperature": ("temperature", lambda _: {"temperature": 0.0}),
    "temperature gradient": (
        "temperature",
        lambda _: {"temperature": torch.ones(11, requires_grad=True)},
    ),
    "kind": ("kind", lambda _: {"kind": "kl"}),
    "beta": ("beta", lambda _: {"kind": "jsd", "beta": 1.0}),
    "student_scale": ("student_scale", lambda _: {"student_scale": 0.0}),
    "teacher_scale": ("teacher_scale", lambda _: {"teacher_scale": math.inf}),
    "student_softcap": ("student_softcap", lambda _: {"student_softcap": -1.0}),
    "teacher_softcap": ("teacher_softcap", lambda _: {"teacher_softcap": 0.0}),
    "memory_budget": ("memory_budget", lambda _: {"memory_budget": -1}),
}
if torch.get_default_device().type == "cpu":  # The host does not wait for values on a GPU.
    BAD_ARGUMENTS["row temperature"] = (
        "temperature",
        lambda _: {"temperature": torch.zeros(11)},
    )


# Regression: the constants raised although no gradient was recorded.
@torch.no_grad()
def test_constants_may_require_a_gradient_while_none_is_recorded():
    case = make_case()
    ones = torch.ones(11, requires_grad=True)

    scores = linear_divergence(*case, temperature=ones)
    loss = linear_divergence_loss(*case, temperature=ones, row_weights=ones)

    assert torch.equal(scores.divergence, linear_divergence(*case).divergence)
    assert torch.equal(loss.divergence, scores.divergence)


@pytest.mark.parametrize(("message", "change"), BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS)
def test_a_bad_argument_is_named(message, change):
    case = make_case()
    arguments = {**case._asdict(), **change(case)}
    for function in (linear_divergence, linear_divergence_loss):
        with pytest.raises(ValueError, match=message):
            function(**arguments)


@pytest.mark.parametrize(
    "options",
    ({"reduction": "none"}, {"row_weights": torch.ones(3)}, {"row_weights": torch.ones(11).int()}),
    ids=("reduction", "shape", "dtype"),
)
def test_a_bad_argument_of_the_loss_is_named(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        linear_divergence_loss(*make_case(), **options)


@pytest.mark.parametrize("memory", ("recompute", "cached"))
def test_compiled_functions_give_the_bits_of_eager_ones(memory):
    case = make_case(dtype=torch.float32)
    mask = torch.arange(11) != 4

    def step(*leaves: Tensor) -> Tensor:
        rows = linear_divergence(*leaves, *case[2:], kind="jsd", mask=mask, memory=memory)
        loss = linear_divergence_loss(*leaves, *case[2:], mask=mask, vocab_valid=150)
        return rows.divergence.sum() + rows.entropy.mean() + loss.loss

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")

    eager = step(*case.leaves)
    ours = compiled(*case.leaves)

    assert torch.equal(ours, eager)
    for our, true in zip(
        torch.autograd.grad(ours, case.leaves),
        torch.autograd.grad(eager, case.leaves),
        strict=True,
    ):
        assert torch.equal(our, true)


@pytest.mark.parametrize("keep_gradient", (0, 1))
@pytest.mark.parametrize("vocab_valid", (-1, 150))
def test_traced_shapes_are_the_real_ones(keep_gradient, vocab_valid):
    case = [each.detach().float() for each in make_case()]
    options = {
        "kind": 0,
        "beta": 0.5,
        "temperature": 1.0,
        "student_scale": 1.0,
        "student_softcap": 0.0,
        "teacher_scale": 1.0,
        "teacher_softcap": 0.0,
        "vocab_valid": vocab_valid,
        "block_bytes": 1 << 20,
        **dict.fromkeys(("student_bias", "teacher_bias", "mask", "row_temperature")),
    }

    def call(student_hidden, student_weight, teacher_hidden, teacher_weight):
        arguments = {
            "student_hidden": student_hidden,
            "student_weight": student_weight,
            "teacher_hidden": teacher_hidden,
            "teacher_weight": teacher_weight,
            **options,
        }
        rows = torch.ops.logprobd.linear_divergence(**arguments, keep_gradient=keep_gradient)
        loss = torch.ops.logprobd.linear_divergence_loss(
            **arguments,
            keep_gradient=0,
            row_weights=None,
            is_mean=True,
            needs_d_hidden=True,
            needs_d_weight=True,
            needs_d_bias=False,
        )
        return (*rows, *loss)

    real = call(*case)
    traced = call(*(each.to("meta") for each in case))

    assert [(each.shape, each.dtype) for each in traced] == [
        (each.shape, each.dtype) for each in real
    ]


@pytest.mark.parametrize("memory", ("recompute", "cached"))
def test_autocast_computes_what_inputs_of_its_dtype_give(memory):
    case = make_case(dtype=torch.float32)
    narrow = Case(*(each.detach().bfloat16() for each in case))
    narrow = Case(*(each.requires_grad_() for each in narrow[:2]), *narrow[2:])
    truth = linear_divergence(*narrow, memory=memory)

    with torch.autocast(case.student_hidden.device.type, torch.bfloat16):
        ours = linear_divergence(*case, memory=memory)
        loss = linear_divergence_loss(*case).loss

    assert all(torch.equal(our, true) for our, true in zip(ours, truth, strict=True))
    assert torch.equal(loss, linear_divergence_loss(*narrow).loss)
    for our, true in zip(
        torch.autograd.grad(ours.divergence.sum(), case.leaves),
        torch.autograd.grad(truth.divergence.sum(), narrow.leaves),
        strict=True,
    ):
        assert our.dtype == torch.float32
        assert torch.equal(our, true.float())


@pytest.mark.parametrize("beta", (0.0, 0.3, 1.0))
def test_values_and_gradients_are_those_of_trl(beta):
    chunked = original("trl.kernels.chunked_divergence")
    case = make_case(dtype=torch.float32, spread_max=5)
    student_bias, teacher_bias = torch.randn(2, 200, generator=seeded(3))
    student_bias.requires_grad_()
    leaves = (*case.leaves, student_bias)
    upstream = upstream_of(11)[0].float()
    arguments = (
        0.7,
        1.3,
        20.0,
        0.9,
        15.0,
    )  # temperature, then scale and cap of student and teacher
    truth = chunked.ChunkedDivergenceFunction.apply(
        *case.leaves, student_bias, *case[2:], teacher_bias, beta, *arguments
    )

    ours = linear_divergence(
        *case,
        kind={0.0: "forward_kl", 1.0: "reverse_kl"}.get(beta, "jsd"),
        beta=beta,
        temperature=arguments[0],
        student_scale=arguments[1],
        student_softcap=arguments[2],
        teacher_scale=arguments[3],
        teacher_softcap=arguments[4],
        # TRL adds the bias before it scales the logits.
        student_bias=arguments[1] * student_bias,
        teacher_bias=arguments[3] * teacher_bias,
    )

    for our, true in zip(ours, truth, strict=True):
        torch.testing.assert_close(our, true, rtol=1e-5, atol=1e-5)
    for our, true in zip(
        torch.autograd.grad(ours.divergence, leaves, upstream),
        torch.autograd.grad(truth[0], leaves, upstream),
        strict=True,
    ):
        assert error_of(our, true) < 1e-4
