"""On a CPU the bits of a row depend on nothing but the row and the head, for every pair of dtypes."""

import pytest
import torch
import torch.distributed as dist
from linear_logprob_reference import reference, seeded
from logprobd_ops import linear_logprob
from rank_pool import RankPool
from raw_operator import raw_scores
from score_cases import FLOATS, assert_near
from torch import Tensor

pytestmark = pytest.mark.skipif(
    torch.get_default_device().type != "cpu", reason="GPUs have their own kernels"
)

PAIRS = [(hidden, weight) for hidden in FLOATS for weight in FLOATS]
ROWS, SIZE, VOCAB = 40, 515, 1003
TILE = 192
OPTIONS = {"temperature": 0.7, "scale": 0.3, "softcap": 9.0}
SCORES = ("logprob", "entropy", "lse", "argmax", "mean_logit")


def case_of(hidden_dtype: torch.dtype, weight_dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns rows with logits from flat to peaked, and products that are not exact."""
    generator = seeded(7)
    spread = torch.linspace(0.3, 5, ROWS).unsqueeze(1)
    return {
        "hidden": (torch.randn(ROWS, SIZE, generator=generator) * spread).to(hidden_dtype),
        "weight": (torch.randn(VOCAB, SIZE, generator=generator) * 10 / SIZE**0.5).to(weight_dtype),
        "target": torch.randint(VOCAB, (ROWS,), generator=generator),
        "bias": torch.randn(VOCAB, generator=generator),
    }


def score(case: dict, **options) -> dict[str, Tensor]:
    scores = linear_logprob(**case, return_argmax=True, return_mean_logit=True, **options)
    return {name: getattr(scores, name) for name in SCORES}


def assert_same_bits(ours: dict[str, Tensor], truth: dict[str, Tensor]) -> None:
    for name, values in ours.items():
        assert torch.equal(values, truth[name]), name


@pytest.mark.parametrize(("hidden_dtype", "weight_dtype"), PAIRS)
def test_every_pair_of_dtypes_gives_the_reference_values(hidden_dtype, weight_dtype):
    case = case_of(hidden_dtype, weight_dtype)

    scores = score(case, **OPTIONS)

    truth = reference(**case, **OPTIONS)
    for name in ("logprob", "entropy", "lse", "mean_logit"):
        assert_near(scores[name], getattr(truth, name), torch.full((ROWS,), 1e-5), name)


@pytest.mark.parametrize(("hidden_dtype", "weight_dtype"), PAIRS)
def test_a_row_has_the_same_bits_alone_and_among_others(hidden_dtype, weight_dtype):
    case = case_of(hidden_dtype, weight_dtype)
    whole = score(case, **OPTIONS)

    for begin, end in ((0, 1), (17, 18), (5, 14), (24, 40)):
        part = score(
            case | {"hidden": case["hidden"][begin:end], "target": case["target"][begin:end]},
            **OPTIONS,
        )

        assert_same_bits(part, {name: values[begin:end] for name, values in whole.items()})


@pytest.mark.parametrize("weight_dtype", FLOATS)
def test_strides_and_threads_do_not_affect_the_bits(weight_dtype):
    case = case_of(torch.bfloat16, weight_dtype)
    truth = score(case, **OPTIONS)
    apart = torch.zeros(VOCAB, SIZE + 5, dtype=weight_dtype)
    apart[:, 2:-3] = case["weight"]
    strided = case | {
        "weight": apart[:, 2:-3],
        "hidden": case["hidden"].T.contiguous().T,
        "bias": case["bias"].repeat_interleave(2)[::2],
    }
    transposed = case | {"weight": case["weight"].T.contiguous().T}
    threads = torch.get_num_threads()

    for other in (strided, transposed):
        assert_same_bits(score(other, **OPTIONS), truth)
    try:
        torch.set_num_threads(1 if threads > 1 else 3)
        assert_same_bits(score(case, **OPTIONS), truth)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("weight_dtype", FLOATS)
def test_steps_of_the_workspace_do_not_affect_the_bits(weight_dtype):
    """A step has at most 2,048 rows."""
    case = case_of(torch.bfloat16, weight_dtype)
    few = {name: case[name][:, :8] for name in ("hidden", "weight")}
    case |= {"weight": few["weight"] * 8, "hidden": few["hidden"]}
    truth = score(case)

    many = case | {"hidden": case["hidden"].repeat(110, 1), "target": case["target"].repeat(110)}

    assert_same_bits(score(many), {name: values.repeat(110) for name, values in truth.items()})


@pytest.mark.parametrize("weight_dtype", FLOATS)
def test_a_temperature_is_rounded_as_in_a_request_of_the_service(weight_dtype):
    case = case_of(torch.float32, weight_dtype)
    rounded = torch.tensor(0.7).item()

    per_row = torch.full((ROWS,), 0.7, dtype=torch.float64)

    assert_same_bits(score(case, temperature=0.7), score(case, temperature=rounded))
    assert_same_bits(score(case, temperature=per_row), score(case, temperature=rounded))


def peaked_rows_of(case: dict) -> Tensor:
    """Returns which rows have one id with almost all probability."""
    return score(case)["entropy"] < 2e-3


@pytest.mark.parametrize(("hidden_dtype", "weight_dtype"), PAIRS)
def test_scores_that_record_gradients_have_the_same_bits(hidden_dtype, weight_dtype):
    case = case_of(hidden_dtype, weight_dtype)
    with torch.no_grad():
        truth = score(case, **OPTIONS)

    recorded = score(case | {"weight": case["weight"].requires_grad_()}, **OPTIONS)

    assert recorded["lse"].requires_grad
    assert_same_bits(recorded, truth)


# Regression: a forward computed the logits of peaked rows twice although no gradient was recorded.
@pytest.mark.parametrize("is_recorded", (False, True))
def test_peaked_rows_are_refined_only_for_gradients(is_recorded):
    case = case_of(torch.bfloat16, torch.bfloat16)
    is_peaked = peaked_rows_of(case)
    plain = raw_scores(**case)

    given = raw_scores(**case, need_gradients=is_recorded)

    is_refined = given["lse_rest"] != plain["lse_rest"]
    assert is_peaked.sum() >= 3 and not is_refined[~is_peaked].any()
    assert is_refined[is_peaked].any() == is_recorded


# Shards.


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    with RankPool(2, tmp_path_factory.mktemp("ranks")) as pool:
        yield pool


def score_shard(rank: int, _size: int, case: dict, borders: list[int], options: dict) -> dict:
    part = slice(borders[rank], borders[rank + 1])
    own = case | {"weight": case["weight"][part], "bias": case["bias"][part]}
    if rank == 1:
        torch.set_num_threads(3)  # the workspaces then have different sizes
    return score(own, vocab_start=part.start, process_group=dist.group.WORLD, **options)


@pytest.mark.parametrize(("hidden_dtype", "weight_dtype"), PAIRS)
def test_shards_of_whole_tiles_have_the_bits_of_the_whole_head(ranks, hidden_dtype, weight_dtype):
    case = case_of(hidden_dtype, weight_dtype)
    case["target"][3] = -100
    case["hidden"][5, 2] = torch.nan

    for borders in ([0, 2 * TILE, VOCAB], [0, 0, VOCAB]):
        parts = ranks.results(score_shard, case, borders, OPTIONS)

        truth = score(case, **OPTIONS)
        for part in parts:
            for name in ("logprob", "entropy", "lse", "argmax"):
                torch.testing.assert_close(
                    part[name], truth[name], rtol=0, atol=0, equal_nan=True, msg=name
                )


@pytest.mark.parametrize("weight_dtype", FLOATS)
def test_padding_and_unknown_targets_have_the_bits_of_the_whole_head(ranks, weight_dtype):
    case = case_of(torch.bfloat16, weight_dtype)
    options = OPTIONS | {"vocab_valid": 5 * TILE - 7, "out_of_vocab": "zero"}
    case["target"][[1, 2, 3]] = torch.tensor([VOCAB - 1, 2**40, -7])

    parts = ranks.results(score_shard, case, [0, 3 * TILE, VOCAB], options)

    truth = score(case, **options)
    assert not truth["logprob"][1:4].any()
    for part in parts:
        for name in ("logprob", "entropy", "lse", "argmax"):
            assert torch.equal(part[name], truth[name]), name


@pytest.mark.parametrize("weight_dtype", FLOATS)
@pytest.mark.parametrize("memory", ("recompute", "cached"))
def test_shards_inside_tiles_are_near_the_whole_head(ranks, memory, weight_dtype):
    """Sums of tiles that two ranks share are rounded in another way."""
    case = case_of(torch.bfloat16, weight_dtype)

    parts = ranks.results(score_shard, case, [0, 100, VOCAB], OPTIONS | {"memory": memory})

    truth = score(case, **OPTIONS)
    for part in parts:
        for name in SCORES:
            torch.testing.assert_close(part[name], truth[name], rtol=1e-5, atol=1e-5, msg=name)
