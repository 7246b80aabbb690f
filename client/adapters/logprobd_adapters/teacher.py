"""A teacher for distillation: log-probabilities of the tokens of prompts, of the most likely tokens
and of tokens of the caller's, from the body of a model and a Scorer.

logprobd_adapters.gateway serves a Teacher over HTTP.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from logprobd.errors import InvalidArgument, LogprobdError
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from logprobd_adapters.head_check import check_model_head
from logprobd_adapters.model_body import body_of, hidden_states
from logprobd_adapters.scorer import LocalScorer, Scorer

TOP_K_MAX = 128
"""Largest Prompt.top_k, that of a server by default and of the operator."""

TEMPERATURE_MIN, TEMPERATURE_MAX = 1e-4, 1e4
"""Bounds of Prompt.temperature, those of a server. Within them float32 logits stay finite."""

BATCH_TOKENS = 8192
"""Default of Teacher's batch_tokens."""

CANDIDATES_PER_TOKEN = 64
"""Number of ids to score that count as a token, in batches and queues. While it is scored, such an
id takes about 20 bytes and a token at least a hidden state, some kilobytes."""

Backbone = Callable[[Sequence[Sequence[int]]], Sequence[Tensor]]
"""Returns the hidden states [length, H] of each prompt, after the final norm, from token ids of the
prompts. All states are on one device."""


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A prompt to score. Row i of it predicts token i + 1."""

    tokens: Sequence[int]
    """[length], in [0, vocab_size). The length is from 1 to max_model_len."""
    top_k: int = 0
    """Number of most likely tokens to list for each row, from 0 to TOP_K_MAX, vocab_size and the
    --top-k-max of the scorer's server."""
    temperature: float = 1.0
    """Divisor of the logits, from TEMPERATURE_MIN to TEMPERATURE_MAX."""
    start: int = 0
    """First row that is scored, from 0 to length - 1."""
    candidates: NDArray[np.int64] | None = None
    """[length - 1 - candidates_start, n], ids to score in each row from candidates_start on. -1
    stands for none. A row may have as many ids as the --candidates-max of the scorer's server. A
    list for all rows may be broadcast, as by numpy.broadcast_to."""
    candidates_start: int | None = None
    """First row of the candidates, from start to length - 1. None: start."""

    @property
    def candidates_cost(self) -> int:
        """What the candidates take of batch_tokens and of a queue, in tokens."""
        return 0 if self.candidates is None else self.candidates.size // CANDIDATES_PER_TOKEN


@dataclasses.dataclass(frozen=True)
class PromptScores:
    """The scores of a prompt's rows from Prompt.start on.

    Log-probabilities are float32, in nats. If the logits of a row are not finite, its ranks and ids
    are 0 and -1, and its log-probabilities NaN.
    """

    logprobs: NDArray[np.float32]
    """[rows], of the token that follows the row in the prompt."""
    ranks: NDArray[np.int64]
    """[rows], rank of that token among all ids, from 1. Equal logits are ordered by id."""
    top_ids: NDArray[np.int64]
    """[rows, top_k], the most likely ids, best first."""
    top_logprobs: NDArray[np.float32]
    """[rows, top_k], of top_ids."""
    candidate_logprobs: NDArray[np.float32]
    """[rows from Prompt.candidates_start on, n], of Prompt.candidates; -inf where there is none."""


class Teacher:
    """Scores prompts by a backbone and a scorer of its head.

    The backbone runs on batches of prompts, so its results, and only those, may differ in their
    last bits from one batch to another. Use it from one thread at a time.

    Args:
        backbone: the model without its head.
        scorer: the model's head.
        max_model_len: most tokens of a prompt.
        batch_tokens: most tokens of a batch, padding included, with one more for each
            CANDIDATES_PER_TOKEN candidates. A larger prompt is a batch of its own.
    """

    def __init__(
        self,
        backbone: Backbone,
        scorer: Scorer,
        max_model_len: int,
        batch_tokens: int = BATCH_TOKENS,
    ) -> None:
        self._backbone, self._scorer = backbone, scorer
        self.max_model_len = max_model_len
        self.batch_tokens = batch_tokens

    @classmethod
    def from_model(
        cls,
        model: Any,
        scorer: Scorer | None = None,
        *,
        max_model_len: int | None = None,
        batch_tokens: int = BATCH_TOKENS,
        allow_rounded_head: bool = False,
    ) -> Teacher:
        """Returns a teacher whose backbone is the body of a Hugging Face model.

        The teacher keeps no reference to the model's own head, unless it is that of the scorer.

        Args:
            model: a decoder in evaluation mode.
            scorer: None: a LocalScorer of the model's head.
            max_model_len: None: max_position_embeddings of the model's config.
            allow_rounded_head: whether the scorer's head may be the model's, rounded to a coarser
                type.

        Raises InvalidArgument if the model has no separate body, if the scorer's head is not that
        of the model, or if no max_model_len is known.
        """
        scorer = scorer or LocalScorer.from_model(model)
        if max_model_len is None:
            config = model.config.get_text_config()
            max_model_len = getattr(config, "max_position_embeddings", None)
        if max_model_len is None:
            raise InvalidArgument(
                "the model's config has no max_position_embeddings: give max_model_len"
            )
        body = body_of(model)

        @torch.inference_mode()
        def backbone(prompts: Sequence[Sequence[int]]) -> list[Tensor]:
            # Padding is on the right, where no state before it depends on it.
            tokens = pad_sequence([torch.tensor(prompt) for prompt in prompts], batch_first=True)
            hidden = hidden_states(body, tokens)
            return [states[: len(p)] for states, p in zip(hidden, prompts, strict=True)]

        check_model_head(scorer, model, max_model_len, allow_rounded_head=allow_rounded_head)
        return cls(backbone, scorer, max_model_len, batch_tokens)

    def check(self, prompt: Prompt) -> None:
        """Raises InvalidArgument, which says what to change, if a prompt cannot be scored."""
        length = len(prompt.tokens)
        if not 0 < length <= self.max_model_len:
            raise InvalidArgument(
                f"the prompt has {length} tokens, expected 1 to max_model_len, {self.max_model_len}"
            )
        vocab_size = self._scorer.vocab_size
        if not (min(prompt.tokens) >= 0 and max(prompt.tokens) < vocab_size):
            place = next(i for i, token in enumerate(prompt.tokens) if not 0 <= token < vocab_size)
            raise InvalidArgument(
                f"token {place} of the prompt is {prompt.tokens[place]}, expected an id below "
                f"{vocab_size}"
            )
        top_k_max = min(TOP_K_MAX, vocab_size, self._limit("top_k_max") or TOP_K_MAX)
        if not 0 <= prompt.top_k <= top_k_max:
            raise InvalidArgument(
                f"{prompt.top_k} most likely tokens were asked for, expected 0 to {top_k_max}: for "
                "more, list their ids"
            )
        if not TEMPERATURE_MIN <= prompt.temperature <= TEMPERATURE_MAX:
            raise InvalidArgument(
                f"the temperature is {prompt.temperature}, expected {TEMPERATURE_MIN:g} to "
                f"{TEMPERATURE_MAX:g}: it divides the logits"
            )
        if not 0 <= prompt.start < length:
            raise InvalidArgument(
                f"the first row is {prompt.start}, expected 0 to {length - 1} in a prompt of "
                f"{length} tokens"
            )
        if prompt.candidates is not None:
            self._check_candidates(prompt, prompt.candidates)

    def _check_candidates(self, prompt: Prompt, candidates: NDArray[np.int64]) -> None:
        length = len(prompt.tokens)
        start = prompt.start if prompt.candidates_start is None else prompt.candidates_start
        if not prompt.start <= start < length:
            raise InvalidArgument(
                f"the first row of ids to score is {start}, expected {prompt.start} to {length - 1}"
            )
        rows = length - 1 - start
        if candidates.ndim != 2 or len(candidates) != rows:
            raise InvalidArgument(
                f"the ids to score have shape {list(candidates.shape)}, expected [{rows}, n]: a "
                "list for each row from the first to the one before the last"
            )
        if candidates.strides[0] == 0:  # a list for all rows
            candidates = candidates[:1]
        vocab_size = self._scorer.vocab_size
        if candidates.size and not (candidates.min() >= -1 and candidates.max() < vocab_size):
            wrong = candidates[(candidates < -1) | (candidates >= vocab_size)][0]
            raise InvalidArgument(
                f"an id to score is {wrong}, expected one below {vocab_size}, or -1 for none"
            )
        row_max = self._limit("candidates_max")
        if row_max and rows and candidates.shape[1] > row_max:
            longest = (candidates >= 0).sum(1).max()
            if longest > row_max:
                raise InvalidArgument(
                    f"a row has {longest} ids to score, expected at most {row_max}, the logprobd "
                    "server's --candidates-max: send fewer ids"
                )

    def _limit(self, name: str) -> int:
        """Returns a limit of the scorer's server, or 0 if there is none, as in this process."""
        limit: int = getattr(getattr(self._scorer, "limits", None), name, 0)
        return limit

    def score(self, prompts: Sequence[Prompt]) -> list[PromptScores]:
        """Scores prompts in batches of consecutive ones.

        Raises InvalidArgument for a prompt that cannot be scored, before any is, or that the scorer
        refuses, and the other errors of the scorer.
        """
        for prompt in prompts:
            self.check(prompt)
        scores: list[PromptScores] = []
        while len(scores) < len(prompts):
            left = prompts[len(scores) :]
            scores += self._score_batch(left[: self.batch_size(left)])
        return scores

    def batch_size(self, prompts: Iterable[Prompt]) -> int:
        """Returns how many of the prompts, one at least, are the first batch."""
        count = longest = candidates = 0
        for prompt in prompts:
            longest = max(longest, len(prompt.tokens))
            candidates += prompt.candidates_cost
            if count and (count + 1) * longest + candidates > self.batch_tokens:
                break
            count += 1
        return count

    def _score_batch(self, prompts: Sequence[Prompt]) -> list[PromptScores]:
        hidden = self._backbone([p.tokens for p in prompts])
        counts = [len(p.tokens) - 1 - p.start for p in prompts]
        lists = [
            np.zeros((count, 0), np.int64) if p.candidates is None else p.candidates
            for p, count in zip(prompts, counts, strict=True)
        ]
        masks = [ids >= 0 for ids in lists]
        # Rows before the first with candidates have none.
        sizes = [
            np.pad(mask.sum(1), (n - len(mask), 0)) for mask, n in zip(masks, counts, strict=True)
        ]
        offsets = np.cumsum([0, *np.concatenate(sizes)])
        ids = np.concatenate([ids[mask] for ids, mask in zip(lists, masks, strict=True)])
        temperature = torch.tensor([p.temperature for p in prompts], dtype=torch.float32)
        device = hidden[0].device
        targets = [token for p in prompts for token in p.tokens[p.start + 1 :]]
        rows = torch.cat([states[p.start : -1] for states, p in zip(hidden, prompts, strict=True)])
        try:
            scores = self._scorer.score(
                rows,
                torch.tensor(targets, dtype=torch.int64, device=device),
                temperature=temperature.repeat_interleave(torch.tensor(counts)).to(device),
                outputs=("logprob", "target_rank"),
                candidates=(torch.from_numpy(ids).to(device), torch.from_numpy(offsets).to(device)),
                top_k=max(p.top_k for p in prompts),
            )
        except LogprobdError:
            raise
        except (ValueError, IndexError) as error:
            raise InvalidArgument(f"the scorer refuses the prompt: {error}") from error
        none = scores.logprob.new_zeros(len(scores.logprob), 0)
        by_row = [
            values.numpy(force=True)
            for values in (
                scores.logprob,
                scores.target_rank + 1,
                getattr(scores, "top_k_ids", none.long()),
                getattr(scores, "top_k_logprobs", none),
            )
        ]
        found = scores.candidate_logprobs.numpy(force=True)
        ends = np.cumsum(counts)
        results = []
        for prompt, begin, end, mask in zip(prompts, ends - counts, ends, masks, strict=True):
            logprobs, ranks, top_ids, top_logprobs = (values[begin:end] for values in by_row)
            # Copies, since views would keep the scores of the whole batch in memory.
            candidate_logprobs = np.full(mask.shape, -np.inf, np.float32)
            candidate_logprobs[mask] = found[offsets[begin] : offsets[end]]
            results.append(
                PromptScores(
                    logprobs.copy(),
                    ranks.copy(),
                    top_ids[:, : prompt.top_k].copy(),
                    top_logprobs[:, : prompt.top_k].copy(),
                    candidate_logprobs,
                )
            )
        return results

    def get_sequence_logprobs(
        self,
        sequences: Sequence[Sequence[int]],
        prompt_lengths: Sequence[int],
        top_logprobs: int = 100,
        temperature: float = 1.0,
    ) -> dict[str, list[Any]]:
        """Scores completions, in place of the method of the same name of TRL's VLLMClient.

        Each actual token has its log-probability, also outside of the most likely ones.

        Args:
            sequences: token ids of prompts and completions.
            prompt_lengths: number of tokens of each prompt, 1 at least.
            top_logprobs: number of most likely tokens to list for each token of a completion.

        Returns lists [sequences, completion length, top_logprobs] "logprobs" and
        "logprob_token_ids", and [sequences, completion length, 1] "actual_logprobs" and
        "actual_token_ids".
        """
        prompts = [
            Prompt(sequence, top_logprobs, temperature, length - 1)
            for sequence, length in zip(sequences, prompt_lengths, strict=True)
        ]
        scores = self.score(prompts)
        return {
            "logprobs": [_without_nan(s.top_logprobs) for s in scores],
            "logprob_token_ids": [np.maximum(s.top_ids, 0).tolist() for s in scores],
            "actual_logprobs": [_without_nan(s.logprobs[:, None]) for s in scores],
            "actual_token_ids": [[[token] for token in p.tokens[p.start + 1 :]] for p in prompts],
        }


def _without_nan(logprobs: NDArray[np.float32]) -> list[list[float]]:
    """Returns lists with -inf, as TRL's client does, where a log-probability is NaN."""
    lists: list[list[float]] = np.where(np.isnan(logprobs), -np.inf, logprobs).tolist()
    return lists
