"""A model of lighteval whose log-likelihoods come from a Scorer.

    echo "from logprobd_adapters.lighteval import LogprobdModel" >model.py
    lighteval custom "model_name=DIR,address=HOST:PORT" model.py "arc:easy"

The model's body runs in this process as in lighteval's own TransformersModel. Only the rows that
predict a continuation's tokens are scored. No [rows, vocabulary] logits exist, and none are rounded
below fp32. Text is generated as by TransformersModel.
"""

from __future__ import annotations

import weakref

import torch
from accelerate.utils import gather_object
from lighteval.models.custom.custom_model import CustomModelConfig
from lighteval.models.model_output import ModelResponse
from lighteval.models.transformers.transformers_model import (
    STARTING_BATCH_SIZE,
    TransformersModel,
    TransformersModelConfig,
)
from lighteval.tasks.requests import Doc
from lighteval.utils.cache_management import SampleCache
from lighteval.utils.parallelism import find_executable_batch_size
from logprobd import Client
from logprobd.errors import InvalidArgument
from torch import Tensor
from tqdm import tqdm

from logprobd_adapters.head_check import check_model_head
from logprobd_adapters.loglikelihood import (
    CPU_BATCH_SIZE,
    Loglikelihood,
    Request,
    group_requests,
    score_continuations,
)
from logprobd_adapters.model_body import body_of, hidden_states
from logprobd_adapters.scorer import SERVER_OPTIONS, LocalScorer, RemoteScorer, Scorer, connect


class LogprobdModelConfig(TransformersModelConfig):
    """The settings of lighteval's TransformersModelConfig, and those of the scorer."""

    address: str | None = None
    """The server's address. None means LOGPROBD_ADDRESS, else 127.0.0.1:8470."""
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_server_name: str | None = None
    token_file: str | None = None
    """TLS and the token; see connect. None means the variables of logprobd.Client."""
    head: str = ""
    """Name of the server's head; "" means the only head."""
    local: bool = False
    """Whether tokens are scored by the operator in this process instead of a server."""
    allow_rounded_head: bool = False
    """Whether the scorer's head may be the model's, rounded to a coarser type."""


class LogprobdModel(TransformersModel):
    """A Hugging Face model whose tokens are scored by a Scorer.

    Requests that share all tokens but the last are scored together, and logprobs are summed in
    double precision. Processes of `accelerate launch` share the requests.

    Args:
        config: settings; or what `lighteval custom` makes of its arguments, with settings as its
            model_name: pairs such as "model_name=DIR,address=HOST:PORT,batch_size=8", or a .yaml
            file, as `lighteval accelerate` reads them.

    Raises InvalidArgument if the model has no separate body, or if the scorer's head is not that of
    the model.
    """

    def __init__(self, config: LogprobdModelConfig | CustomModelConfig) -> None:
        if isinstance(config, CustomModelConfig):
            settings = config.model_name
            is_file = settings.endswith(".yaml")
            read = LogprobdModelConfig.from_path if is_file else LogprobdModelConfig.from_args
            config = read(settings)
        super().__init__(config)
        self._client: Client | None = None
        self.scorer = self._make_scorer(config)
        check_model_head(self.scorer, self.model, allow_rounded_head=config.allow_rounded_head)
        processes = self.accelerator.num_processes
        if processes > 1:  # they would write the same files at once
            folder = f"{config.cache_dir}/{self.accelerator.process_index}-of-{processes}"
            self._cache = SampleCache(config.model_copy(update={"cache_dir": folder}))

    def _make_scorer(self, config: LogprobdModelConfig) -> Scorer:
        if config.local:
            return LocalScorer.from_model(self.model)
        self._client = connect(**{name: getattr(config, name) for name in SERVER_OPTIONS})
        weakref.finalize(self, self._client.close)  # without cleanup, as after an error
        return RemoteScorer(self._client, config.head)

    def cleanup(self) -> None:
        """Frees the models, and closes the connection to the server."""
        del self.scorer
        if self._client:
            self._client.close()
        super().cleanup()

    def loglikelihood_rolling(self, docs: list[Doc]) -> list[ModelResponse]:
        """Returns the sum of the logprobs of all tokens of each query, in nats.

        The first token is predicted from the tokenizer's BOS or EOS token. Each token is scored
        once, in windows of max_length; the last window is filled up with context. TransformersModel
        caches such responses, but its cache does not return them, so these are not cached.
        """
        prefix = self.tokenizer.bos_token_id
        if prefix is None:
            prefix = self.tokenizer.eos_token_id
        length = self.max_length
        texts = [self.tok_encode(doc.query, add_special_tokens=False) for doc in docs]
        windows: list[list[Request]] = []
        for tokens in texts:
            before = [prefix, *tokens]
            windows.append(
                [
                    (before[max(0, begin + 1 - length) : begin + 1], tokens[begin : begin + length])
                    for begin in range(0, len(tokens), length)
                ]
            )
        scored = iter(self._score([window for each in windows for window in each], length))
        responses = []
        for tokens, of_text in zip(texts, windows, strict=True):
            found = [next(scored) for _ in of_text]
            responses.append(
                ModelResponse(
                    input_tokens=[prefix],
                    output_tokens=[tokens],
                    logprobs=[sum(logprob for logprob, _ in found)],
                    argmax_logits_eq_gold=[all(is_greedy for _, is_greedy in found)],
                )
            )
        return responses

    def _loglikelihood_tokens(self, docs: list[Doc]) -> list[ModelResponse]:
        """Returns the logprobs of each document's choices; its callers cache them."""
        # TransformersModel, too, ignores pairwise_tokenization and encodes choices apart.
        pairs = [
            self.tok_encode_pair(
                self.prompt_manager.prepare_prompt(doc), doc.choices, pairwise=True
            )
            for doc in docs
        ]
        requests = [pair for each in pairs for pair in zip(*each, strict=True)]
        # TransformersModel computes the last token's state too, so contexts are cut to one less.
        scored = iter(self._score(requests, self.max_length - 1))
        responses = []
        for contexts, choices in pairs:
            found = [next(scored) for _ in choices]
            responses.append(
                ModelResponse(
                    input_tokens=contexts[0],
                    output_tokens=choices,
                    logprobs=[logprob for logprob, _ in found],
                    argmax_logits_eq_gold=[is_greedy for _, is_greedy in found],
                )
            )
        return responses

    def _score(self, requests: list[Request], input_max: int) -> list[Loglikelihood]:
        """Scores requests, of which each process scores a part."""
        groups = group_requests(requests)
        mine = groups[self.accelerator.process_index :: self.accelerator.num_processes]
        found: dict[int, Loglikelihood] = {}
        if mine:
            context, continuation = requests[mine[0][0]]  # the longest
            size = self._batch_size(min(len(context) + len(continuation) - 1, input_max), len(mine))
            for begin in tqdm(range(0, len(mine), size), disable=self.disable_tqdm):
                batch = mine[begin : begin + size]
                found |= score_continuations(self.scorer, self._states, requests, batch, input_max)
        key = hash(tuple((tuple(context), tuple(tokens)) for context, tokens in requests))
        parts = gather_object([(key, found)])
        if any(other != key for other, _ in parts):
            raise InvalidArgument(
                "the processes have different requests, since lighteval orders tasks by the hashes "
                "of their names: set PYTHONHASHSEED=0 for all processes"
            )
        for _, part in parts:
            found |= part
        return [found[index] for index in range(len(requests))]

    def _batch_size(self, length: int, batch_max: int) -> int:
        """Returns the batch size of the settings, or how many sequences fit into memory."""
        if self.config.batch_size is not None:
            return int(self.config.batch_size)
        if self.model.device.type == "cpu":
            return min(CPU_BATCH_SIZE, batch_max)

        def run(batch_size: int) -> int:
            self._states(torch.zeros(batch_size, length, dtype=torch.int64))
            return batch_size

        start = min(STARTING_BATCH_SIZE, batch_max)
        return int(find_executable_batch_size(run, starting_batch_size=start)())

    @torch.no_grad()
    def _states(self, tokens: Tensor) -> Tensor:
        """Returns the hidden states [batch, length, H] of tokens [batch, length]."""
        return hidden_states(body_of(self.model), tokens)
