"""A model that ranks share in the tests of FSDP2 and ZeRO-3, the whole model's results, recipes and comparisons."""

import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import logprobd
import torch
import transformers
from document_examples import run_example
from logprobd_adapters import RemoteScorer
from rank_pool import RankPool
from server_process import ServerProcess

RANKS = 2
VOCAB_SIZE = 1_003  # odd, so that ranks cannot share it equally
# Both sides sum fp32 products.
TOLERANCE = 1e-5  # nats
GRADIENT_TOLERANCE = 1e-4  # relative to the gradient's largest value
ENTROPY_WEIGHT = 0.3


def write_model(folder: pathlib.Path, is_tied: bool = False) -> pathlib.Path:
    """Writes a small Llama with random weights; `is_tied` makes its embeddings the head. Returns the folder."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=32,
            tie_word_embeddings=is_tied,
            initializer_range=0.2,
        )
    )
    model.save_pretrained(folder)
    return folder


def load(folder: pathlib.Path) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


class Batch(NamedTuple):
    """Sequences, padded on the right."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor

    @classmethod
    def make(cls) -> "Batch":
        """Returns the sequences of all ranks, of different lengths."""
        random = torch.Generator().manual_seed(7)
        lengths = torch.tensor([11, 7, 9, 4])
        mask = (torch.arange(11) < lengths[:, None]).long()
        return cls(torch.randint(VOCAB_SIZE, mask.shape, generator=random) * mask, mask)

    @property
    def targets(self) -> torch.Tensor:
        """[batch, length - 1], the token that follows each one, or -100."""
        return self.input_ids.masked_fill(self.attention_mask == 0, -100)[:, 1:]

    def of_rank(self, rank: int) -> "Batch":
        return Batch(*(tensor.chunk(RANKS)[rank] for tensor in self))


class Results(NamedTuple):
    """Log-probabilities and entropies [batch, length - 1], zero at padding, and gradients of `loss_of`."""

    logprob: torch.Tensor
    entropy: torch.Tensor
    gradients: dict[str, torch.Tensor]


def loss_of(logprob: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
    return -logprob.sum() - ENTROPY_WEIGHT * entropy.sum()


def results_of_the_whole(folder: pathlib.Path) -> Results:
    """Returns the results of the whole model's logits, with the mean over ranks of their losses' gradients."""
    model, batch = load(folder), Batch.make()
    logprobs = model(**batch._asdict()).logits[:, :-1].log_softmax(-1)
    mask = batch.attention_mask[:, 1:]
    logprob = logprobs.gather(-1, batch.input_ids[:, 1:, None])[..., 0] * mask
    entropy = -(logprobs.exp() * logprobs).sum(-1) * mask
    (loss_of(logprob, entropy) / RANKS).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return Results(logprob.detach(), entropy.detach(), gradients)


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)


def assert_gradients(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        error = (ours[name] - expected).abs().max()
        assert error <= GRADIENT_TOLERANCE * expected.abs().max(), name


def assert_results(ours: Results, theirs: Results) -> None:
    assert_close(ours.logprob, theirs.logprob)
    assert_close(ours.entropy, theirs.entropy)
    assert_gradients(ours.gradients, theirs.gradients)


def recipe(heading: str) -> dict[str, Any]:
    """Returns what the code of a section of DISTRIBUTED.md defines."""
    return run_example("docs/DISTRIBUTED.md", heading)


def served_logprobs(rank: int, body: torch.nn.Module, address: str) -> torch.Tensor:
    """Returns the log-probabilities of a rank's sequences by the recipe for a sharded reference."""
    reference_logprobs = recipe("A sharded reference")["reference_logprobs"]
    with logprobd.Client(address) as client:
        return reference_logprobs(body, RemoteScorer(client), *Batch.make().of_rank(rank))


def assert_served_reference(
    ranks: RankPool, reference_logprobs: Callable, folder: pathlib.Path, binaries: pathlib.Path
) -> None:
    """Serves the head, and compares reference_logprobs(rank, size, folder, address) with the whole model."""
    with ServerProcess(binaries, "--model", str(folder)) as server:
        parts = ranks.results(reference_logprobs, folder, server.grpc)

    assert_close(torch.cat(parts), results_of_the_whole(folder).logprob)


def joined(parts: list[Results]) -> Results:
    """Returns the results of all ranks, whose gradients must be the same."""
    first, *others = (part.gradients for part in parts)
    for gradients in others:
        assert all(torch.equal(first[name], gradients[name]) for name in first)
    return Results(
        *(torch.cat(tensors) for tensors in zip(*(part[:2] for part in parts), strict=True)), first
    )
