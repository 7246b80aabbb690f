"""Models of lm-eval whose log-likelihoods come from a Scorer, and the command logprobd-lm-eval.

    logprobd-lm-eval --model logprobd --model_args pretrained=DIR,address=HOST:PORT --tasks ...
    logprobd-lm-eval --model logprobd-local --model_args pretrained=DIR --tasks ...

The model's body runs in this process as in lm-eval's own model "hf". Only the rows that predict an
answer's tokens are scored. No [rows, vocabulary] logits exist, and none are rounded below fp32.
Text is generated as by "hf".
"""

from __future__ import annotations

import abc
from collections.abc import Iterator
from typing import Any

import torch
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import Collator
from logprobd import Client
from logprobd.errors import InvalidArgument
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from logprobd_adapters.scorer import LocalScorer, RemoteScorer, Scorer

Request = tuple[Any, list[int], list[int]]
"""The texts (the key of lm-eval's cache, or None), the context's tokens and the answer's tokens."""

# The head is compared with the model's own on this many tokens. The model rounds its logits to its
# dtype, at worst to bf16, so logprobs may differ by some of their roundings.
_CHECKED_TOKENS = 8
_CHECK_TOLERANCE = 0.05
_CHECK_TOLERANCE_PER_LOGIT = 0.02


class ScorerLM(HFLM):
    """A Hugging Face model whose tokens are scored by a Scorer.

    Requests that share all tokens but the last are scored together, each further last token as a
    candidate. Log-probabilities are summed in double precision. `softmax_dtype` has no effect.

    Args:
        arguments, keywords: those of lm-eval's HFLM.

    Raises InvalidArgument if the model is not a decoder with a separate body, or if the scorer's
    head is not that of the model.
    """

    scorer: Scorer

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        if self.backend != "causal":
            raise InvalidArgument(
                f"the backend is {self.backend}: use a causal language model, or --model hf"
            )
        if hasattr(self, "accelerator"):  # HFLM splits requests among GPUs only
            self._rank = self.accelerator.process_index
            self._world_size = self.accelerator.num_processes
        self._body = _body_of(self.model)
        self.scorer = self._make_scorer()
        self._check_head()

    @abc.abstractmethod
    def _make_scorer(self) -> Scorer:
        """Returns the scorer of the loaded model's head."""

    @torch.no_grad()
    def _check_head(self) -> None:
        """Compares the scorer with the model's own logits on a few tokens."""
        tokens = torch.arange(_CHECKED_TOKENS, device=self.device)[None]
        hidden = self._model_call(tokens)[0]
        if hidden.shape[1] != self.scorer.hidden_size:
            raise InvalidArgument(
                f"the model has hidden size {hidden.shape[1]}, but the head of the scorer "
                f"{self.scorer.hidden_size}: serve the head of the model that is evaluated"
            )
        logits = super()._model_call(tokens)[0, :, : self.scorer.vocab_size].float()
        targets = logits.argmax(-1)
        expected = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
        difference = (self.scorer.score(hidden, targets).logprob - expected.to(hidden.device)).abs()
        tolerance = _CHECK_TOLERANCE + _CHECK_TOLERANCE_PER_LOGIT * logits.abs().max().item()
        if not difference.max().item() <= tolerance:
            raise InvalidArgument(
                f"logprobs of the scorer differ from the model's by {difference.max():.2f} nats, "
                f"more than rounding explains ({tolerance:.2f}): serve the head of the model that "
                "is evaluated, and the same version of it"
            )

    def _model_call(self, inps: Tensor, attn_mask: Any = None, labels: Any = None) -> Tensor:
        """Returns the hidden states [batch, length, hidden_size] of tokens [batch, length]."""
        with (
            torch.no_grad(),
            torch.autocast(
                self.device.type,
                dtype=self.mixed_precision_dtype,
                enabled=self.mixed_precision_dtype is not None,
            ),
        ):
            states: Tensor = self._body(inps).last_hidden_state
            return states

    def _loglikelihood_tokens(
        self, requests: list[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """Returns the sum of the logprobs of each answer, in nats, and whether it is greedy."""
        groups = Collator(
            requests,
            sort_fn=lambda request: (
                -len(request[1]) - len(request[2]),
                request[1] + request[2],
            ),
            group_by="contexts" if self.logits_cache else None,
            group_fn=lambda request: request[1] + request[2][:-1],
        )
        is_auto = self.batch_size == "auto"
        detects = is_auto and not override_bs
        if detects:
            self.batch_sizes: dict[int, int] = {}
        batches = groups.get_batched(
            n=(override_bs or 0) if is_auto else self.batch_size,
            batch_fn=self._batch_scheduler if detects else None,
        )
        answers = []
        with tqdm(
            total=len(requests),
            disable=disable_tqdm or self.rank != 0,
            desc="Running loglikelihood requests",
        ) as progress:
            for batch in batches:
                for text, answer in self._score_batch(groups, batch):
                    answers.append(answer)
                    if text is not None:  # rolling requests are cached as a whole
                        self.cache_hook.add_partial("loglikelihood", text, answer)
                    progress.update()
        return groups.get_original(answers)

    def _score_batch(
        self, groups: Collator, batch: list[Request]
    ) -> Iterator[tuple[Any, tuple[float, bool]]]:
        """Scores one sequence per group of requests and yields the texts and the answer of each
        request, in the order of `groups`."""
        inputs = [self._input_of(request) for request in batch]
        # Padding is on the right, where no state before it depends on it.
        hidden = self._model_call(
            pad_sequence([torch.tensor(tokens, device=self.device) for tokens in inputs], True)
        )
        rows: list[Tensor] = []
        targets: list[int] = []
        candidates: list[int] = []
        offsets = [0]
        members: list[list[tuple[Any, list[int]]]] = []
        for (text, context, answer), tokens, states in zip(batch, inputs, hidden, strict=True):
            # The answer of this request is the longest of its group.
            begin = len(tokens) - len(answer)
            group = groups.get_cache(text, context, answer, torch.empty(1, 0, 0))
            members.append([(text, answer) for text, answer, _ in group])
            lasts = [answer[-1] for _, answer in members[-1]]
            rows.append(states[begin : len(tokens)])
            targets += [*tokens[begin + 1 :], lasts[0]]
            candidates += lasts[1:]
            offsets += [offsets[-1]] * (len(answer) - 1) + [len(candidates)]
        device = hidden.device
        scores = self.scorer.score(
            torch.cat(rows),
            torch.tensor(targets, device=device),
            outputs=("logprob", "argmax"),
            candidates=(
                torch.tensor(candidates, dtype=torch.int64, device=device),
                torch.tensor(offsets, device=device),
            ),
        )
        logprobs = scores.logprob.double().tolist()
        argmax = scores.argmax_id.tolist()
        of_candidates = iter(scores.candidate_logprobs.double().tolist())
        end = 0
        for states, group in zip(rows, members, strict=True):
            end += len(states)
            for number, (text, answer) in enumerate(group):
                begin = end - len(answer)
                last = next(of_candidates) if number else logprobs[end - 1]
                yield text, (sum(logprobs[begin : end - 1]) + last, argmax[begin:end] == answer)

    def _input_of(self, request: Request) -> list[int]:
        """Returns the tokens whose states predict the answer, cut from the left to max_length."""
        _, context, answer = request
        if not context or not 0 < len(answer) <= self.max_length:
            raise InvalidArgument(
                f"a request has {len(context)} tokens of context and {len(answer)} of answer: the "
                f"context needs one, and the answer one to max_length, {self.max_length}"
            )
        return (context + answer)[-(self.max_length + 1) : -1]


@register_model("logprobd")
class LogprobdLM(ScorerLM):
    """A model that is scored by a server.

    Args:
        address: the server's address. None means LOGPROBD_ADDRESS, else 127.0.0.1:8470.
        head: name of the head; "" means the only head.
        arguments, keywords: those of lm-eval's HFLM.
    """

    def __init__(
        self, *arguments: Any, address: str | None = None, head: str = "", **keywords: Any
    ) -> None:
        self._server = (address, head)
        super().__init__(*arguments, **keywords)

    def _make_scorer(self) -> Scorer:
        address, head = self._server
        return RemoteScorer(Client(address), head)


@register_model("logprobd-local")
class LogprobdLocalLM(ScorerLM):
    """A model that is scored by the operator in this process."""

    def _make_scorer(self) -> Scorer:
        return LocalScorer.from_model(_unwrapped(self.model))


def _unwrapped(model: Any) -> Any:
    """Returns the Hugging Face model inside a PEFT model, with its adapters, or `model` itself."""
    if not hasattr(model, "peft_config"):
        return model
    if model.active_peft_config.is_prompt_learning:
        raise InvalidArgument("prompt learning of PEFT adds tokens to the input: use --model hf")
    return model.get_base_model()


def _body_of(model: Any) -> Any:
    """Returns the model without its head, whose last_hidden_state is the head's input."""
    model = _unwrapped(model)
    body = model.base_model
    if body is model:
        raise InvalidArgument(f"{type(model).__name__} has no separate body: use --model hf")
    return body


def main() -> None:
    """Runs lm-eval's command line with the models "logprobd" and "logprobd-local"."""
    cli_evaluate()


if __name__ == "__main__":
    main()
