"""Models of lm-eval whose log-likelihoods come from a Scorer, and the command logprobd-lm-eval.

    logprobd-lm-eval --model logprobd --model_args pretrained=DIR,address=HOST:PORT --tasks ...
    logprobd-lm-eval --model logprobd-local --model_args pretrained=DIR --tasks ...

The model's body runs in this process as in lm-eval's own model "hf". Only the rows that predict a
continuation's tokens are scored. No [rows, vocabulary] logits exist, and none are rounded below
fp32. Text is generated as by "hf".
"""

from __future__ import annotations

import abc
import weakref
from typing import Any

import torch
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import Collator
from logprobd.errors import InvalidArgument
from torch import Tensor
from tqdm import tqdm

from logprobd_adapters.head_check import check_model_head
from logprobd_adapters.loglikelihood import (
    CPU_BATCH_SIZE,
    Loglikelihood,
    group_requests,
    score_continuations,
)
from logprobd_adapters.model_body import body_of, hidden_states, unwrapped
from logprobd_adapters.scorer import SERVER_OPTIONS, LocalScorer, RemoteScorer, Scorer, connect


class ScorerLM(HFLM):
    """A Hugging Face model whose tokens are scored by a Scorer.

    Requests that share all tokens but the last are scored together, each further last token as a
    candidate. Log-probabilities are summed in double precision. `softmax_dtype` has no effect.

    Args:
        allow_rounded_head: whether the scorer's head may be the model's, rounded to a coarser type.
        arguments, keywords: those of lm-eval's HFLM.

    Raises InvalidArgument if the model is not a decoder with a separate body, or if the scorer's
    head is not that of the model.
    """

    scorer: Scorer

    def __init__(self, *arguments: Any, allow_rounded_head: bool = False, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        if self.backend != "causal":
            raise InvalidArgument(
                f"the backend is {self.backend}: use a causal language model, or --model hf"
            )
        if hasattr(self, "accelerator"):  # HFLM splits requests among GPUs only
            self._rank = self.accelerator.process_index
            self._world_size = self.accelerator.num_processes
        self._body = body_of(self.model)
        self.scorer = self._make_scorer()
        with self._autocast():
            check_model_head(self.scorer, self.model, allow_rounded_head=allow_rounded_head)

    @abc.abstractmethod
    def _make_scorer(self) -> Scorer:
        """Returns the scorer of the loaded model's head."""

    def _model_call(self, inps: Tensor, attn_mask: Any = None, labels: Any = None) -> Tensor:
        """Returns the hidden states [batch, length, hidden_size] of tokens [batch, length]."""
        with torch.no_grad(), self._autocast():
            return hidden_states(self._body, inps)

    def _autocast(self) -> torch.autocast:
        dtype = self.mixed_precision_dtype
        return torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None)

    def _detect_batch_size(self, requests: Any = None, pos: int = 0) -> int:
        """Returns the batch size that "auto" stands for."""
        if self.device.type == "cpu":
            return min(CPU_BATCH_SIZE, self.max_batch_size)
        return super()._detect_batch_size(requests, pos)

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[Loglikelihood]:
        """Scores requests.

        Args:
            requests: the texts, which are the key of lm-eval's cache, or None for windows of a
                rolling request; the context's tokens; and the continuation's tokens.
        """
        pairs = [(context, continuation) for _, context, continuation in requests]
        groups = group_requests(pairs, shares=self.logits_cache)
        firsts = [requests[group[0]] for group in groups]
        is_auto = self.batch_size == "auto"
        detects = is_auto and not override_bs
        if detects:
            self.batch_sizes: dict[int, int] = {}
        batches = Collator.get_chunks(
            groups,
            n=(override_bs or 0) if is_auto else self.batch_size,
            fn=(lambda number, _: self._batch_scheduler(number, firsts)) if detects else None,
        )
        found: dict[int, Loglikelihood] = {}
        with tqdm(
            total=len(requests),
            disable=disable_tqdm or self.rank != 0,
            desc="Running loglikelihood requests",
        ) as progress:
            for batch in batches:
                of_batch = score_continuations(
                    self.scorer, self._states, pairs, batch, self.max_length
                )
                for index, loglikelihood in of_batch.items():
                    text = requests[index][0]
                    if text is not None:  # rolling requests are cached as a whole
                        self.cache_hook.add_partial("loglikelihood", text, loglikelihood)
                found |= of_batch
                progress.update(len(of_batch))
        return [found[index] for index in range(len(requests))]

    def _states(self, tokens: Tensor) -> Tensor:
        return self._model_call(tokens.to(self.device))


@register_model("logprobd")
class LogprobdLM(ScorerLM):
    """A model that is scored by a server.

    Args:
        head: name of the head; "" means the only head.
        arguments, keywords: those of ScorerLM, and SERVER_OPTIONS: address, tls_ca, tls_cert,
            tls_key, tls_server_name and token_file.
    """

    def __init__(self, *arguments: Any, head: str = "", **keywords: Any) -> None:
        self._head = head
        self._server = {name: keywords.pop(name) for name in SERVER_OPTIONS if name in keywords}
        super().__init__(*arguments, **keywords)

    def _make_scorer(self) -> Scorer:
        client = connect(**self._server)
        weakref.finalize(self, client.close)  # lm-eval does not say when it is done
        return RemoteScorer(client, self._head)


@register_model("logprobd-local")
class LogprobdLocalLM(ScorerLM):
    """A model that is scored by the operator in this process."""

    def _make_scorer(self) -> Scorer:
        return LocalScorer.from_model(unwrapped(self.model))


def main() -> None:
    """Runs lm-eval's command line with the models "logprobd" and "logprobd-local"."""
    cli_evaluate()


if __name__ == "__main__":
    main()
