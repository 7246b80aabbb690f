"""Grouping of requests, and their scores compared with double precision."""

import random

import pytest
import torch
from logprobd_adapters import LocalScorer
from logprobd_adapters.loglikelihood import group_requests, score_continuations

VOCAB, HIDDEN, INPUT_MAX = 50, 16, 12
TOLERANCE = 1e-5  # nats per token, of fp32 sums


class Model:
    """A model whose state of a token is the sum of the embeddings up to it."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(2)
        self.embedding = torch.randn(VOCAB, HIDDEN, generator=generator) / 2
        self.head = torch.randn(VOCAB, HIDDEN, generator=generator) / 2
        self.lengths: list[tuple[int, ...]] = []

    def body(self, tokens: torch.Tensor) -> torch.Tensor:
        self.lengths.append(tuple(tokens.shape))
        return self.embedding[tokens].cumsum(1)

    def exact(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        tokens = torch.tensor([(context + continuation)[-(INPUT_MAX + 1) : -1]])
        logits = (
            self.embedding.double()[tokens].cumsum(1)[0, -len(continuation) :]
            @ self.head.double().T
        )
        logprobs = logits.log_softmax(-1)
        return (
            logprobs[range(len(continuation)), continuation].sum().item(),
            logits.argmax(-1).tolist() == continuation,
        )


@pytest.fixture
def model(built_operator) -> Model:
    return Model()


def random_requests() -> list[tuple[list[int], list[int]]]:
    """Returns requests of few tokens, many of which share all tokens but the last, cut at different places; and one
    request for each token after one context, of which one is greedy.
    """
    choose = random.Random(4)
    requests = []
    for _ in range(120):
        stem = [choose.randrange(3) for _ in range(choose.choice((2, 3, 4, 14)))]
        cut = choose.randrange(max(1, len(stem) - 6), len(stem) + 1)
        requests.append((stem[:cut], [*stem[cut:], choose.randrange(VOCAB)]))
    return requests + [([0, 1], [token]) for token in range(VOCAB)]


@pytest.mark.parametrize("shares", (True, False))
@pytest.mark.parametrize("batch_size", (1, 7))
def test_loglikelihoods_agree_with_double_precision_however_they_are_grouped(
    model, shares, batch_size
) -> None:
    requests = random_requests()
    scorer = LocalScorer(model.head)

    groups = group_requests(requests, shares)
    loglikelihoods = {}
    for begin in range(0, len(groups), batch_size):
        batch = groups[begin : begin + batch_size]
        loglikelihoods |= score_continuations(scorer, model.body, requests, batch, INPUT_MAX)

    for index, (context, continuation) in enumerate(requests):
        logprob, is_greedy = loglikelihoods[index]
        exact, is_exactly_greedy = model.exact(context, continuation)
        assert abs(logprob - exact) <= TOLERANCE * len(continuation)
        assert is_greedy == is_exactly_greedy
    assert any(is_greedy for _, is_greedy in loglikelihoods.values())
    assert len(groups) < len(requests) / 2 if shares else len(groups) == len(requests)


def test_requests_share_a_group_wherever_they_are_cut() -> None:
    requests = [([1, 2], [3]), ([1, 2, 3], [4]), ([1], [2, 5]), ([1, 2], [9]), ([1, 2], [3, 7])]

    groups = group_requests(requests)

    assert groups == [[4, 1], [2, 0, 3]]
    assert group_requests(requests, shares=False) == [[1], [4], [0], [2], [3]]


def test_contexts_are_cut_from_the_left(model) -> None:
    requests = [(list(range(40)), [1, 2])]

    score_continuations(LocalScorer(model.head), model.body, requests, [[0]], INPUT_MAX)

    assert model.lengths == [(1, INPUT_MAX)]


def test_a_continuation_as_long_as_the_model_takes_is_scored(model) -> None:
    requests = [([1], [3] * INPUT_MAX)]

    found = score_continuations(LocalScorer(model.head), model.body, requests, [[0]], INPUT_MAX)

    assert abs(found[0][0] - model.exact(*requests[0])[0]) <= TOLERANCE * INPUT_MAX


def test_a_request_without_context_or_continuation_is_refused() -> None:
    with pytest.raises(ValueError, match="request 1 has 1 tokens of context and 0 of continuation"):
        group_requests([([1], [2]), ([1], [])])
    with pytest.raises(ValueError, match="request 0 has 0 tokens of context and 1 of continuation"):
        group_requests([([], [2])])


def test_a_continuation_that_the_model_cannot_take_is_refused(model) -> None:
    requests = [([1], [3] * (INPUT_MAX + 1))]

    with pytest.raises(
        ValueError, match=f"has {INPUT_MAX + 1} tokens, expected at most {INPUT_MAX}"
    ):
        score_continuations(LocalScorer(model.head), model.body, requests, [[0]], INPUT_MAX)
