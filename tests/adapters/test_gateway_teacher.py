"""A Teacher's scores agree with the model's own log-softmax, whatever it is batched with."""

import gc
import pathlib
import types
import weakref
from unittest import mock

import logprobd
import numpy as np
import pytest
import torch
from document_examples import run_example
from logprobd.errors import InvalidArgument
from logprobd_adapters import LocalScorer, RemoteScorer
from logprobd_adapters.teacher import Prompt, PromptScores, Teacher
from plain_scorer import PlainScorer
from server_process import ServerProcess
from transformers import AutoModelForCausalLM

TOLERANCE = 1e-5  # nats, of fp32 sums
BF16_TOLERANCE = 1e-4  # the kernels' against double precision, tests/README.md


def load(folder: pathlib.Path):
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()


@pytest.fixture(scope="module")
def model(folders):
    return load(folders[torch.float32])


@pytest.fixture(scope="module")
def address(folders, binaries):
    with ServerProcess(binaries, "--model", str(folders[torch.float32])) as server:
        yield server.grpc


@pytest.fixture
def remote_scorer(address):
    with logprobd.Client(address) as client:
        yield RemoteScorer(client)


@pytest.fixture
def make_teacher(kind, model, request):
    """Returns a function that makes a teacher with so many tokens of a batch."""
    scorer = None if kind == "local" else request.getfixturevalue("remote_scorer")
    return lambda batch_tokens: Teacher.from_model(model, scorer, batch_tokens=batch_tokens)


@pytest.fixture
def teacher(make_teacher) -> Teacher:
    return make_teacher(100)


def random_tokens(length: int, vocab_size: int = 8192) -> list[int]:
    return np.random.default_rng(length).integers(0, vocab_size, length).tolist()


@torch.no_grad()
def exact_logprobs(model, tokens: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Returns [length - 1, V] log-probabilities of the model itself, in fp32."""
    logits = model(torch.tensor([tokens])).logits[0, :-1]
    return (logits.float() / temperature).log_softmax(-1)


def assert_scores(scores: PromptScores, prompt: Prompt, exact: torch.Tensor, tolerance: float):
    """Compares the scores with [length - 1, V] log-probabilities."""
    exact = exact[prompt.start :]
    targets = torch.tensor(prompt.tokens[prompt.start + 1 :], dtype=torch.int64)[:, None]
    close = {"atol": tolerance, "rtol": 0, "check_dtype": False}
    of_targets = exact.gather(1, targets)
    torch.testing.assert_close(torch.tensor(scores.logprobs)[:, None], of_targets, **close)
    assert scores.ranks.tolist() == (1 + (exact > of_targets).sum(1)).tolist()
    best = exact.topk(prompt.top_k)
    torch.testing.assert_close(torch.tensor(scores.top_logprobs), best.values, **close)
    assert scores.top_ids.tolist() == best.indices.tolist()
    assert scores.logprobs.dtype == scores.top_logprobs.dtype == np.float32


# Prompts of which no two have the same settings. Two have no row.
MIXED = [
    Prompt(random_tokens(64), top_k=1),
    Prompt(random_tokens(1), top_k=3, temperature=0.5),
    Prompt(random_tokens(17), top_k=128, temperature=2.0, start=11),
    Prompt(random_tokens(40), top_k=7, temperature=0.7, start=5),
    Prompt(random_tokens(9), top_k=2, temperature=3.0, start=8),
    Prompt(random_tokens(2), top_k=0, temperature=4.0),
]


@pytest.mark.parametrize("batch_tokens", [64 * len(MIXED), 130, 64])
def test_prompts_with_settings_of_their_own_agree_with_the_models_log_softmax(
    make_teacher, model, batch_tokens
) -> None:
    teacher = make_teacher(batch_tokens)
    in_first_batch = {64: 1, 130: 2, 64 * len(MIXED): len(MIXED)}
    assert teacher.batch_size(MIXED) == in_first_batch[batch_tokens]

    scores = teacher.score(MIXED)

    for prompt, of_prompt in zip(MIXED, scores, strict=True):
        exact = exact_logprobs(model, prompt.tokens, prompt.temperature)
        assert_scores(of_prompt, prompt, exact, TOLERANCE)


def test_the_example_of_the_document_scores(model, built_operator) -> None:
    trainer = types.SimpleNamespace()
    replaced = {"9707": "970"}  # the vocabulary is smaller

    names = run_example(
        "docs/GATEWAY.md", "In the same process", replaced, model=model, trainer=trainer
    )

    prompt = Prompt([970, 11, 1879], 8)
    assert_scores(names["scores"], prompt, exact_logprobs(model, prompt.tokens), TOLERANCE)
    assert trainer.teacher_client is names["teacher"]


# Regression: a response that was not read kept the scores of the other prompts of its batch in memory.
def test_scores_keep_none_of_another_prompt(teacher) -> None:
    short, long = teacher.score([Prompt(random_tokens(2)), Prompt(random_tokens(40), 128)])

    for scores in (short, long):
        assert all(array.base is None for array in vars(scores).values())


def test_candidates_are_scored_and_absent_ones_are_minus_infinity(teacher, model) -> None:
    tokens = random_tokens(9)
    candidates = np.arange(5 * 4).reshape(5, 4) * 100
    candidates[1, 1:] = candidates[3] = -1

    plain, with_candidates, none = teacher.score(
        [Prompt(tokens), Prompt(tokens, start=3, candidates=candidates), Prompt(tokens, 2)]
    )

    exact = exact_logprobs(model, tokens)[3:].gather(1, torch.tensor(candidates).clamp(0))
    expected = exact.numpy().copy()
    expected[candidates < 0] = -np.inf
    np.testing.assert_allclose(with_candidates.candidate_logprobs, expected, atol=TOLERANCE)
    assert plain.candidate_logprobs.shape == none.candidate_logprobs.shape == (8, 0)


@pytest.mark.parametrize("first", [0, 2, 7, 8])
def test_candidates_may_begin_after_the_first_row_and_be_one_list(teacher, model, first) -> None:
    tokens = random_tokens(9)
    candidates = np.broadcast_to(np.array([[5, 700]]), (8 - first, 2))
    prompts = [Prompt([1, 2]), Prompt(tokens, 1, candidates=candidates, candidates_start=first)]

    scores = teacher.score(prompts)[1]

    exact = exact_logprobs(model, tokens)
    assert_scores(scores, prompts[1], exact, TOLERANCE)
    expected = exact[first:][:, [5, 700]].numpy()
    np.testing.assert_allclose(scores.candidate_logprobs, expected, atol=TOLERANCE)


# Regression: the operator took no tensor of integers, which those of the prompts became.
def test_temperatures_may_be_integers(teacher) -> None:
    tokens = random_tokens(9)

    scores, expected = teacher.score(
        [Prompt(tokens, temperature=2), Prompt(tokens, temperature=2.0)]
    )

    assert np.array_equal(scores.logprobs, expected.logprobs)


def test_bf16_scores_agree_with_double_precision(folders, built_operator) -> None:
    model = load(folders[torch.bfloat16])
    prompt = Prompt(random_tokens(64), 20)

    (scores,) = Teacher.from_model(model).score([prompt])

    with torch.no_grad():
        hidden = model.base_model(torch.tensor([prompt.tokens])).last_hidden_state[0, :-1]
        exact = (hidden.double() @ model.lm_head.weight.double().T).log_softmax(-1)
    assert_scores(scores, prompt, exact, BF16_TOLERANCE)


def test_prompts_are_cut_into_batches_of_padded_tokens() -> None:
    shapes = []

    def backbone(prompts: list[list[int]]) -> list[torch.Tensor]:
        shapes.append((len(prompts), max(map(len, prompts))))
        return [torch.zeros(len(prompt), 64) for prompt in prompts]

    scorer = PlainScorer(torch.zeros(8192, 64))
    teacher = Teacher(backbone, scorer, max_model_len=64, batch_tokens=40)

    teacher.score([Prompt(random_tokens(length)) for length in (3, 10, 20, 20, 64, 1)])

    assert shapes == [(2, 10), (2, 20), (1, 64), (1, 1)]


def test_a_row_that_is_not_finite_has_rank_0_and_changes_no_other(model, built_operator) -> None:
    def backbone(prompts: list[list[int]]) -> list[torch.Tensor]:
        hidden = model.base_model(torch.tensor(prompts)).last_hidden_state.detach().clone()
        hidden[0, 2] = torch.nan
        return list(hidden)

    teacher = Teacher(backbone, LocalScorer.from_model(model), max_model_len=64)
    prompt = Prompt(random_tokens(6), 2)

    scores = teacher.score([prompt])[0]
    result = teacher.get_sequence_logprobs([prompt.tokens], [3], top_logprobs=2)

    assert np.flatnonzero(scores.ranks == 0).tolist() == [2]
    assert np.flatnonzero(np.isnan(scores.logprobs)).tolist() == [2]
    assert result["actual_logprobs"][0][0] == [-np.inf]
    assert result["logprobs"][0][0] == [-np.inf] * 2 and result["logprob_token_ids"][0][0] == [0, 0]
    assert np.isfinite(result["logprobs"][0][1:]).all()


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (Prompt([]), "the prompt has 0 tokens, expected 1 to max_model_len, 64"),
        (Prompt([1] * 65), "the prompt has 65 tokens, expected 1 to max_model_len, 64"),
        (Prompt([1, 8192]), "token 1 of the prompt is 8192, expected an id below 8192"),
        (Prompt([-1, 2]), "token 0 of the prompt is -1"),
        (Prompt([1, 2], 129), "129 most likely tokens were asked for, expected 0 to 128"),
        (Prompt([1, 2], temperature=0.0), "the temperature is 0.0, expected 0.0001 to 10000"),
        (Prompt([1, 2], temperature=float("inf")), "the temperature is inf"),
        (Prompt([1, 2], temperature=float("nan")), "the temperature is nan"),
        (Prompt([1, 2], start=2), "the first row is 2, expected 0 to 1"),
        (
            Prompt([1, 2], candidates=np.zeros((2, 3), int)),
            r"have shape \[2, 3\], expected \[1, n\]",
        ),
        (Prompt([1, 2], candidates=np.array([[3, 8192]])), "an id to score is 8192"),
        (
            Prompt([1, 2, 3], candidates=np.broadcast_to(np.array([[8192]]), (2, 1))),
            "an id to score is 8192",
        ),
        (
            Prompt([1, 2], start=1, candidates=np.zeros((1, 3), int), candidates_start=0),
            "the first row of ids to score is 0, expected 1 to 1",
        ),
        (
            Prompt([1, 2], candidates=np.zeros((0, 3), int), candidates_start=2),
            "the first row of ids to score is 2, expected 0 to 1",
        ),
        (Prompt([1, 2], candidates=np.array([[-2]])), "an id to score is -2"),
    ],
)
def test_a_bad_prompt_is_refused_before_any_is_scored(prompt, message) -> None:
    backbone = mock.Mock()
    teacher = Teacher(backbone, types.SimpleNamespace(vocab_size=8192), max_model_len=64)

    with pytest.raises(InvalidArgument, match=message):
        teacher.score([Prompt([1, 2]), prompt])

    backbone.assert_not_called()


LIMITS = types.SimpleNamespace(top_k_max=20, candidates_max=3)


@pytest.mark.parametrize(
    ("prompt", "limits"),
    [
        (Prompt([0] * 64), None),
        (Prompt([1, 8191]), None),
        (Prompt([1, 2], 128), None),
        (Prompt([1, 2], 20), LIMITS),
        (Prompt([1, 2], temperature=1e-4), None),
        (Prompt([1, 2], temperature=1e4), None),
        (Prompt([1, 2], start=1), None),
        (Prompt([1, 2], candidates=np.array([[-1, 0, 8191]])), LIMITS),
        (Prompt([1, 2], candidates=np.array([[-1, 0, 1, 2]])), LIMITS),  # -1 is no id
        (Prompt([1, 2], candidates=np.zeros((0, 3), int), candidates_start=1), None),
    ],
)
def test_a_prompt_at_a_limit_is_accepted(prompt, limits) -> None:
    scorer = types.SimpleNamespace(vocab_size=8192, limits=limits)

    Teacher(mock.Mock(), scorer, max_model_len=64).check(prompt)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (Prompt([1, 2], 21), "21 most likely tokens were asked for, expected 0 to 20"),
        (Prompt([1, 2], candidates=np.array([[0, 1, 2, 3]])), "a row has 4 ids .* at most 3"),
    ],
)
def test_a_prompt_beyond_a_limit_of_the_server_is_refused(prompt, message) -> None:
    scorer = types.SimpleNamespace(vocab_size=8192, limits=LIMITS)

    with pytest.raises(InvalidArgument, match=message):
        Teacher(mock.Mock(), scorer, max_model_len=64).check(prompt)


def test_the_models_own_head_is_freed_if_a_server_scores(folders, remote_scorer) -> None:
    model = load(folders[torch.float32])
    head = weakref.ref(model.lm_head.weight)

    teacher = Teacher.from_model(model, remote_scorer)
    del model
    gc.collect()

    assert head() is None
    assert teacher.score([Prompt([1, 2])])[0].logprobs.shape == (1,)


def test_another_models_head_is_refused(model, built_operator) -> None:
    with pytest.raises(InvalidArgument, match="logprobs of the scorer differ from the model's"):
        Teacher.from_model(model, LocalScorer(model.lm_head.weight.flip(0)))


def test_a_coarser_head_is_accepted_if_told(model, built_operator) -> None:
    rounded = LocalScorer(model.lm_head.weight.bfloat16())

    with pytest.raises(InvalidArgument, match="head is bf16 and the model's fp32"):
        Teacher.from_model(model, rounded)
    Teacher.from_model(model, rounded, allow_rounded_head=True)
