"""Log-likelihoods of continuations by the body of a model and a Scorer, for evaluations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from logprobd.errors import InvalidArgument
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from logprobd_adapters.scorer import Scorer

Request = tuple[list[int], list[int]]
"""The tokens of a context and of its continuation, at least one of each."""

Loglikelihood = tuple[float, bool]
"""The sum of the log-probabilities of a continuation's tokens, in nats, and whether it is greedy:
each token is the most likely one."""

CPU_BATCH_SIZE = 8
"""Sequences of a batch on a CPU, where no size is given. A search for the largest batch that fits
into memory, as on a GPU, would run the largest one, and take minutes or the host's memory."""


def group_requests(requests: Sequence[Request], shares: bool = True) -> list[list[int]]:
    """Returns the indices of the requests in groups that share all tokens but the last.

    Long groups come first, so that a batch that is too large fails early. The first request of a
    group has its longest continuation.

    Args:
        shares: False puts each request into a group of its own.

    Raises InvalidArgument for an empty context or continuation.
    """
    groups: dict[Any, list[int]] = defaultdict(list)
    for index, (context, continuation) in enumerate(requests):
        if not context or not continuation:
            raise InvalidArgument(
                f"request {index} has {len(context)} tokens of context and {len(continuation)} of "
                "continuation, expected at least one of each"
            )
        groups[tuple(context + continuation[:-1]) if shares else index].append(index)
    for group in groups.values():
        group.sort(key=lambda index: -len(requests[index][1]))

    def order(group: list[int]) -> tuple[int, list[int]]:
        context, continuation = requests[group[0]]
        return -len(context) - len(continuation), context + continuation

    return sorted(groups.values(), key=order)


def score_continuations(
    scorer: Scorer,
    body: Callable[[Tensor], Tensor],
    requests: Sequence[Request],
    groups: Sequence[list[int]],
    input_max: int,
) -> dict[int, Loglikelihood]:
    """Scores some groups of requests in one batch of sequences, one for each group.

    Only the rows that predict a continuation's tokens are scored. The last tokens of a group's
    further requests are candidates of its last row. Sums are in double precision.

    Args:
        body: returns the hidden states [batch, length, H] of tokens [batch, length] on the CPU.
        groups: some of group_requests(requests).
        input_max: most tokens of a sequence. Contexts are cut from the left to it.

    Returns the log-likelihoods by the index of their request. Raises InvalidArgument for a
    continuation of more than input_max tokens.
    """
    inputs = [_input_of(*requests[group[0]], input_max) for group in groups]
    # Padding is on the right, where no state before it depends on it.
    hidden = body(pad_sequence([torch.tensor(tokens) for tokens in inputs], batch_first=True))
    rows: list[Tensor] = []
    targets: list[int] = []
    candidates: list[int] = []
    offsets = [0]
    for group, tokens, states in zip(groups, inputs, hidden, strict=True):
        length = len(requests[group[0]][1])
        begin = len(tokens) - length
        lasts = [requests[index][1][-1] for index in group]
        rows.append(states[begin : len(tokens)])
        targets += [*tokens[begin + 1 :], lasts[0]]
        candidates += lasts[1:]
        offsets += [offsets[-1]] * (length - 1) + [len(candidates)]
    scores = scorer.score(
        torch.cat(rows),
        torch.tensor(targets, device=hidden.device),
        outputs=("logprob", "argmax"),
        candidates=(
            torch.tensor(candidates, dtype=torch.int64, device=hidden.device),
            torch.tensor(offsets, device=hidden.device),
        ),
    )
    logprobs = scores.logprob.double().tolist()
    argmax = scores.argmax_id.tolist()
    of_candidates = iter(scores.candidate_logprobs.double().tolist())
    found: dict[int, Loglikelihood] = {}
    end = 0
    for states, group in zip(rows, groups, strict=True):
        end += len(states)
        for index in group:
            continuation = requests[index][1]
            begin = end - len(continuation)
            last = logprobs[end - 1] if index == group[0] else next(of_candidates)
            is_greedy = argmax[begin:end] == continuation
            found[index] = (sum(logprobs[begin : end - 1]) + last, is_greedy)
    return found


def _input_of(context: list[int], continuation: list[int], input_max: int) -> list[int]:
    """Returns the tokens whose states predict the continuation, cut from the left to input_max."""
    if len(continuation) > input_max:
        raise InvalidArgument(
            f"a continuation has {len(continuation)} tokens, expected at most {input_max}, which "
            "is all that the model takes"
        )
    return (context + continuation)[-(input_max + 1) : -1]
