"""Scores the sequences of a dataset of Ray Data."""

from __future__ import annotations

import os

import pyarrow as pa

from logprobd_adapters.scorer import Scorer
from logprobd_adapters.teacher import BATCH_TOKENS, Prompt, Teacher


class ScoreBatch:
    """Adds the log-probabilities of the tokens of each sequence to batches of a dataset.

        dataset.map_batches(
            ScoreBatch,
            fn_constructor_args=(model, RemoteScorer(pool.client())),
            batch_format="pyarrow",
            concurrency=2,
        )

    Added columns: `logprobs`, a list of float32 in nats for each sequence, whose item i is the
    log-probability of token i + 1; with top_k also `top_ids` and `top_logprobs`, whose item i lists
    the most likely tokens at that place, best first. A row whose logits are not finite has NaN and
    ids of -1.

    Args:
        model: folder or id of a Hugging Face causal model, whose body runs here.
        scorer: scores by its head. None: a LocalScorer of the model's own head.
        column: name of the column of sequences, lists of 1 to max_position_embeddings token ids.
        top_k: number of most likely tokens to list, from 0 to 128.
        device: torch device of the body.
        batch_tokens: most tokens that run through the body together, padding included. With 1 each
            sequence runs alone, so its scores do not depend on its neighbours to the last bit.

    Raises InvalidArgument if the scorer's head is not that of the model, or a sequence cannot be
    scored, and the errors of the scorer.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        scorer: Scorer | None = None,
        *,
        column: str = "input_ids",
        top_k: int = 0,
        device: str = "cpu",
        batch_tokens: int = BATCH_TOKENS,
    ) -> None:
        from transformers import AutoModelForCausalLM  # noqa: PLC0415  (actors of servers need none)

        body = AutoModelForCausalLM.from_pretrained(model, dtype="auto").to(device).eval()
        self._teacher = Teacher.from_model(body, scorer, batch_tokens=batch_tokens)
        self._column = column
        self._top_k = top_k

    def __call__(self, batch: pa.Table) -> pa.Table:
        sequences = batch[self._column].to_pylist()
        scores = self._teacher.score([Prompt(tokens, self._top_k) for tokens in sequences])
        values = [s.logprobs for s in scores]
        batch = batch.append_column("logprobs", pa.array(values, pa.list_(pa.float32())))
        if self._top_k:
            for name, dtype in (("top_ids", pa.int64()), ("top_logprobs", pa.float32())):
                lists = [list(getattr(s, name)) for s in scores]
                of_row = pa.list_(dtype, self._top_k)
                batch = batch.append_column(name, pa.array(lists, pa.list_(of_row)))
        return batch
