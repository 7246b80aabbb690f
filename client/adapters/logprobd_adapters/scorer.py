"""The protocol beneath all adapters, and its two implementations."""

from __future__ import annotations

import inspect
import os
import pathlib
import warnings
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from logprobd import Client, Tls
from logprobd.errors import InvalidArgument
from logprobd.head_config import HeadConfig
from logprobd.score_args import DEFAULT_IGNORE_INDEX
from torch import Tensor

Candidates = Tensor | tuple[Tensor, Tensor]
"""Further ids to score: [..., n], the same number for each row; or ids [N] and offsets [rows + 1],
where the candidates of row r are ids[offsets[r] : offsets[r + 1]]."""


class Scores:
    """The scores of one call: tensors on the device of `hidden`, without gradients.

    "[...]" is the shape of the targets. Values are float32, in nats; ids and ranks are int64. Rows
    whose target is ignore_index hold zeros. Reading an output that was not requested raises
    AttributeError.
    """

    # proto/generate.py writes these.
    # [generated: adapter_scores]
    logprob: Tensor
    """[...]: log-probability of the target in nats, at most 0."""
    entropy: Tensor
    """[...]: entropy in nats, in [0, ln vocab_size]."""
    lse: Tensor
    """[...]: log-sum-exp of logits / temperature in nats."""
    argmax_id: Tensor
    """[...] int64: id of the largest logit; the lowest id in case of ties."""
    greedy: Tensor
    """[...] bool: whether the target is argmax_id."""
    sum_p_squared: Tensor
    """[...]: sum of the squared probabilities, in (0, 1]."""
    max_logit: Tensor
    """[...]: largest logit, before the division by the temperature."""
    min_logit: Tensor
    """[...]: smallest logit, before the division by the temperature."""
    top_k_ids: Tensor
    """[..., top_k] int64: ids of the largest logits, best first; ties are ordered by ascending id.
    """
    top_k_logprobs: Tensor
    """[..., top_k]: log-probabilities of top_k_ids in nats."""
    target_rank: Tensor
    """[...] int64: number of ids whose logit is larger than the target's, or equal with a lower id.
    0 means that the target is argmax_id, and k < top_k that it is entry k of top_k_ids.
    """
    # [end]
    candidate_logprobs: Tensor
    """Log-probabilities of the candidates, of the shape of their ids."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.__dict__.update(tensors)

    if not TYPE_CHECKING:  # type checkers would accept any name

        def __getattr__(self, name: str) -> Tensor:
            raise AttributeError(
                f"{name} was not requested: call score with outputs=, top_k= or candidates="
            )


class Scorer(Protocol):
    """Scores rows of hidden states with one head."""

    @property
    def hidden_size(self) -> int:
        """Number of values of a row."""

    @property
    def vocab_size(self) -> int:
        """Number of ids over which probabilities sum to 1. Targets are in [0, vocab_size)."""

    def score(
        self,
        hidden: Tensor,
        targets: Tensor,
        *,
        temperature: float | Tensor = 1.0,
        outputs: Iterable[str] = ("logprob",),
        candidates: Candidates | None = None,
        top_k: int = 0,
        ignore_index: int = DEFAULT_IGNORE_INDEX,
    ) -> Scores:
        """Scores the target of each row. The scores of a row do not depend on the other rows.

        Args:
            hidden: [..., hidden_size], the input of the head after the final norm (Hugging Face's
                last_hidden_state), bf16, fp16 or fp32.
            targets: [...] integers, already shifted: targets[i] is the token that follows row i.
                Rows with ignore_index are not scored.
            temperature: divisor of the logits, a number or a tensor of the shape of targets.
            outputs: names of scores, as Client.score takes them. logprob is always computed.
            candidates: further ids whose log-probabilities are computed.
            top_k: number of best ids to list for each row, at most 128.
            ignore_index: target of rows that are not scored.

        Raises ValueError for arguments that do not fit each other or the head, and IndexError or
        ValueError for an id outside the vocabulary. RemoteScorer also raises the errors of
        logprobd.Client.score.
        """


def connect(
    address: str | None = None,
    *,
    tls_ca: str | os.PathLike[str] | None = None,
    tls_cert: str | os.PathLike[str] | None = None,
    tls_key: str | os.PathLike[str] | None = None,
    tls_server_name: str | None = None,
    token_file: str | os.PathLike[str] | None = None,
) -> Client:
    """Returns a client of one or several servers from the options of commands and of frameworks'
    settings, SERVER_OPTIONS. None stands for a variable of logprobd.Client.

    Args:
        address: default: LOGPROBD_ADDRESS, else 127.0.0.1:8470.
        tls_ca, tls_cert, tls_key, tls_server_name: see logprobd.Tls. LOGPROBD_TLS_* are used if all
            are None.
        token_file: file that holds the token alone. Default: the token in LOGPROBD_TOKEN.

    Raises InvalidArgument if an option is invalid or a file cannot be read.
    """
    token = None if token_file is None else read_token(token_file)
    tls = Tls(tls_ca, tls_cert, tls_key, tls_server_name)
    return Client(address, tls=None if tls == Tls() else tls, token=token)


def read_token(token_file: str | os.PathLike[str]) -> str:
    """Returns the token of a file that holds it alone.

    Raises InvalidArgument, which does not show the token, if there is none or the file cannot be
    read.
    """
    try:
        token = pathlib.Path(token_file).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"token_file: {token_file} cannot be read: {error}") from error
    if not token:
        raise InvalidArgument(f"token_file: {token_file} has no token")
    return token


SERVER_OPTIONS = tuple(inspect.signature(connect).parameters)
"""Names of the arguments of connect."""


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""Types of heads by their names on the wire."""


class RemoteScorer:
    """Scores rows on a server.

    Args:
        client: a client of one or several servers. It stays the caller's, who closes it.
        head: name of the head; "" means the only head.

    Raises the errors of logprobd.Client.info. Thread-safe, and can be pickled.
    """

    def __init__(self, client: Client, head: str = "") -> None:
        self._client = client
        self._head = head
        info = client.info(head)
        self.hidden_size, self.vocab_size = info.hidden_size, info.vocab_size
        self.dtype = DTYPES.get(info.dtype)
        """Type of the head's weights; None if it is not known."""
        self.limits = info.limits
        """Limits of the server when this was made, the lowest of several servers; 0: not known."""

    def score(
        self,
        hidden: Tensor,
        targets: Tensor,
        *,
        temperature: float | Tensor = 1.0,
        outputs: Iterable[str] = ("logprob",),
        candidates: Candidates | None = None,
        top_k: int = 0,
        ignore_index: int = DEFAULT_IGNORE_INDEX,
    ) -> Scores:
        """See Scorer.score."""
        result = self._client.score(
            hidden,
            targets,
            temperature=temperature,
            outputs={"logprob", *outputs},
            candidates=candidates,
            top_k=top_k,
            ignore_index=ignore_index,
            head=self._head,
        )
        wanted = set(result.outputs) & set(Scores.__annotations__)
        return Scores({name: getattr(result, name) for name in wanted})


_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)

_LISTS = ("top_k_ids", "top_k_logprobs", "candidate_logprobs")
_OUTPUTS = [name.removesuffix("_id") for name in Scores.__annotations__ if name not in _LISTS]
# The operator's arguments for those outputs that return_NAME does not request; "" needs none.
_ARGUMENTS = {"logprob": "", "entropy": "need_entropy", "lse": "", "greedy": "return_argmax"}


class LocalScorer:
    """Scores rows in this process by the operator logprobd_ops, without [rows, V] logits.

    On a CPU it gives the bits of a server's CPU engine.

    Args:
        weight: [V, H], bf16, fp16 or fp32, on the device of the rows. It is not copied, so scores
            follow its changes.
        bias: [V].
        scale: factor of the dot products, above 0.
        softcap: above 0; None: no cap.
        vocab_size: ids from this one on are padding. None: all rows of the weight are valid.

    Raises ImportError if logprobd_ops or its library is missing.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        scale: float = 1.0,
        softcap: float | None = None,
        vocab_size: int | None = None,
    ) -> None:
        try:
            import logprobd_ops  # noqa: PLC0415  (loads a library, which a RemoteScorer does not need)
        except ModuleNotFoundError as error:
            if error.name != "logprobd_ops":
                raise
            raise ModuleNotFoundError(
                "scoring in this process needs the operator, which is not installed: run pip "
                "install logprobd-ops, or score by a server",
                name=error.name,
            ) from None

        if weight.dim() != 2:
            raise InvalidArgument(f"weight has shape {list(weight.shape)}, expected [V, H]")
        rows = weight.shape[0]
        if vocab_size is not None and not 0 < vocab_size <= rows:
            raise InvalidArgument(
                f"vocab_size is {vocab_size}, expected 1 to {rows}, the weight's rows"
            )
        self._operator = logprobd_ops.linear_logprob
        self._weight, self._bias = weight, bias
        self.hidden_size, self.vocab_size = weight.shape[1], vocab_size or rows
        self._head: dict[str, Any] = {"scale": scale, "softcap": softcap}

    @classmethod
    def from_model(
        cls,
        model: Any,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        ignored_keys: Collection[str] = (),
    ) -> LocalScorer:
        """Returns a scorer of the head of a Hugging Face model, with the scale, the cap, the bias
        and the vocabulary size that a server finds in its files.

        Args:
            scale: factor of the dot products instead of that of the config.
            softcap: soft cap instead of that of the config; 0: no cap.
            ignored_keys: keys of the config that do not change the logits although their names
                suggest that; with "model_type", the head is a plain one, whatever the model.

        Raises InvalidArgument if the head is not a plain torch.nn.Linear, for example because it is
        quantised or has an adapter, or if the model makes its logits in a way that is not known.
        """
        head = model.get_output_embeddings()
        if type(head) is not torch.nn.Linear:
            raise InvalidArgument(
                f"the head of the model is a {type(head).__name__}, expected a torch.nn.Linear: "
                "load the model without quantisation and without an adapter on its head"
            )
        # With defaults: a class may transform logits where its config leaves the key out.
        text = model.config.to_json_string(use_diff=False)
        config = HeadConfig(text, f"the config of {type(model).__name__}", ignored_keys)
        for warning in config.warnings:
            warnings.warn(warning, stacklevel=2)
        shape = config.logit_shape(scale=scale, softcap=softcap)
        rows = head.weight.shape[0]
        bias = getattr(model, "final_logits_bias", None)  # BART and its relatives
        if bias is not None and head.bias is not None:
            raise InvalidArgument("the model has two biases of its head: pass their sum as bias")
        if bias is not None:
            bias = bias.flatten() if bias.any() else None
        return cls(
            head.weight,
            head.bias if bias is None else bias,
            scale=shape.scale,
            softcap=shape.softcap,
            vocab_size=min(config.vocab_size or rows, rows),
        )

    @property
    def dtype(self) -> torch.dtype:
        """Type of the head's weights."""
        return self._weight.dtype

    @torch.no_grad()
    def score(
        self,
        hidden: Tensor,
        targets: Tensor,
        *,
        temperature: float | Tensor = 1.0,
        outputs: Iterable[str] = ("logprob",),
        candidates: Candidates | None = None,
        top_k: int = 0,
        ignore_index: int = DEFAULT_IGNORE_INDEX,
    ) -> Scores:
        """See Scorer.score."""
        outputs = {"logprob", *outputs}
        if unknown := outputs - set(_OUTPUTS):
            raise InvalidArgument(f"outputs has {min(unknown)!r}: use any of {', '.join(_OUTPUTS)}")
        requests = {_ARGUMENTS.get(name, f"return_{name}") for name in outputs}
        options: dict[str, Any] = {"need_entropy": False} | dict.fromkeys(requests - {""}, True)
        ids, offsets = candidates if isinstance(candidates, tuple) else (candidates, None)
        if isinstance(temperature, Tensor) and temperature.dtype in _INTEGERS:
            temperature = temperature.float()  # as RemoteScorer; the operator takes no integers
        result = self._operator(
            hidden,
            self._weight,
            targets,
            self._bias,
            temperature=temperature,
            ignore_index=ignore_index,
            vocab_valid=self.vocab_size,
            top_k=top_k,
            candidate_ids=ids,
            candidate_offsets=offsets,
            autocast=False,
            **self._head,
            **options,
        )
        tensors = {name: getattr(result, name) for name in outputs - {"argmax", "greedy"}}
        if "argmax" in outputs:
            tensors["argmax_id"] = result.argmax
        if "greedy" in outputs:
            # Torch compares unsigned ids with others of their type only.
            target_ids = targets.long()
            tensors["greedy"] = (result.argmax == target_ids) & (target_ids != ignore_index)
        lists = {name: getattr(result, name) for name in _LISTS}
        tensors |= {name: values for name, values in lists.items() if values is not None}
        return Scores(tensors)
