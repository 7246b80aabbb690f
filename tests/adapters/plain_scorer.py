"""A scorer of plain PyTorch, with which tests of its callers need neither the operator nor a server."""

from collections.abc import Iterable

import torch
from linear_logprob_reference import reference, reference_logits
from logprobd_adapters import Scores
from torch import Tensor


class PlainScorer:
    """Scores rows of finite logits in double precision: the logprob, the target_rank, lists of candidates and the most
    likely ids."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight
        self.vocab_size, self.hidden_size = weight.shape
        self.dtype = weight.dtype

    def score(
        self,
        hidden: Tensor,
        targets: Tensor,
        *,
        temperature: float | Tensor = 1.0,
        outputs: Iterable[str] = ("logprob",),
        candidates: tuple[Tensor, Tensor] | None = None,
        top_k: int = 0,
    ) -> Scores:
        scores = reference(hidden, self._weight, targets, temperature=temperature)
        logits = reference_logits(hidden, self._weight, temperature=temperature)
        logprobs = logits.log_softmax(-1).float()
        tensors = {name: getattr(scores, name) for name in outputs}
        tensors["logprob"] = scores.logprob.float()
        if candidates is not None:
            ids, offsets = candidates
            rows = torch.arange(len(hidden)).repeat_interleave(offsets.diff())
            tensors["candidate_logprobs"] = logprobs[rows, ids]
        if top_k:
            best = logits.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
            tensors |= {"top_k_ids": best, "top_k_logprobs": logprobs.gather(-1, best)}
        return Scores(tensors)
