"""The recipes for Megatron, over two tensor-parallel ranks of a gloo group, compared with Megatron's own results.

What Megatron does only on a GPU is replaced: the name of its device, the random numbers of dropout (which is off), and
its norms, by Torch's.
"""

import contextlib
import json
from typing import NamedTuple

import logprobd
import pytest
import torch
from logprobd_adapters import RemoteScorer
from model_folder import write_safetensors
from server_process import ServerProcess
from sharded_model import RANKS, assert_close, assert_gradients, recipe

HIDDEN, VOCAB, LENGTH, BATCH = 32, 96, 8, 3
PADDING = 7  # rows of the head, all on the last rank


class Batch(NamedTuple):
    labels: torch.Tensor
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    attention_mask: torch.Tensor
    """True where a token is hidden."""

    @classmethod
    def make(cls) -> "Batch":
        random = torch.Generator().manual_seed(7)
        labels, ids = torch.randint(VOCAB - PADDING, (2, BATCH, LENGTH), generator=random)
        mask = torch.ones(1, 1, LENGTH, LENGTH).triu(1).bool()
        return cls(labels, ids, torch.arange(LENGTH).expand(BATCH, LENGTH), mask)


class Norm(torch.nn.RMSNorm):
    """Torch's norm. Megatron's own need a GPU, or refuse sequence parallelism."""

    def __init__(self, config, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps)


# The functions below run on each rank.


def make_model(is_sequence_parallel: bool, is_tied: bool):
    """Returns this rank's part of a GPTModel, the same one at each call."""
    from megatron.core import parallel_state  # noqa: PLC0415
    from megatron.core.models.gpt import GPTModel  # noqa: PLC0415
    from megatron.core.models.gpt.gpt_layer_specs import (  # noqa: PLC0415
        get_gpt_layer_local_spec,
    )
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker  # noqa: PLC0415
    from megatron.core.transformer import TransformerConfig  # noqa: PLC0415
    from megatron.core.transformer.transformer_block import (  # noqa: PLC0415
        TransformerBlockSubmodules,
    )

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=RANKS)
        torch.cuda.current_device = lambda: torch.device("cpu")
        get_cuda_rng_tracker().fork = contextlib.nullcontext
    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        ffn_hidden_size=2 * HIDDEN,
        tensor_model_parallel_size=RANKS,
        sequence_parallel=is_sequence_parallel,
        init_method_std=0.2,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        add_bias_linear=False,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
    )
    layer = get_gpt_layer_local_spec()
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    return GPTModel(
        config,
        TransformerBlockSubmodules(layer_specs=[layer] * 2, layer_norm=Norm),
        vocab_size=VOCAB,
        max_sequence_length=LENGTH,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=is_tied,
    )


def gradients_of(model, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: each.grad.clone() for name, each in model.named_parameters()}


def losses_and_gradients(_: int, __: int, is_sequence_parallel: bool, is_tied: bool):
    """Returns Megatron's losses [batch, length] with their gradients, and those of the recipe."""
    model, (labels, *inputs) = make_model(is_sequence_parallel, is_tied), Batch.make()
    theirs = model(*inputs, labels=labels)
    policy_logprobs = recipe("Megatron")["policy_logprobs"]
    ours = -policy_logprobs(model, VOCAB, labels, *inputs)[0]
    return [
        (losses.detach(), gradients_of(model, (losses * losses.detach()).sum()))
        for losses in (theirs, ours)
    ]


def scores_without_padding(_: int, __: int):
    """Returns logits [batch, length, VOCAB] of Megatron, and logprob and entropy of the recipe."""
    model, (labels, *inputs) = make_model(True, False), Batch.make()
    with torch.no_grad():
        logits = model(*inputs, runtime_gather_output=True)
        scores = recipe("Megatron")["policy_logprobs"](model, VOCAB - PADDING, labels, *inputs)
    return logits, *scores


def part_of_the_head(_: int, __: int) -> torch.Tensor:
    return make_model(False, False).output_layer.weight.detach()


def served_logprobs(_: int, __: int, is_sequence_parallel: bool, address: str) -> torch.Tensor:
    model, batch = make_model(is_sequence_parallel, False), Batch.make()
    model.output_layer = None
    with logprobd.Client(address) as client:
        return recipe("Megatron")["reference_logprobs"](model, RemoteScorer(client), *batch)


@pytest.mark.usefixtures("built_operator")
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("is_sequence_parallel", [False, True])
def test_losses_and_gradients_are_those_of_megatron(ranks, is_sequence_parallel, is_tied) -> None:
    for theirs, ours in ranks.results(losses_and_gradients, is_sequence_parallel, is_tied):
        assert_close(ours[0], theirs[0])
        assert_gradients(ours[1], theirs[1])


@pytest.mark.usefixtures("built_operator")
def test_padding_of_the_vocabulary_takes_no_part(ranks) -> None:
    labels = Batch.make().labels
    for logits, logprob, entropy in ranks.results(scores_without_padding):
        logprobs = logits[..., :-PADDING].double().log_softmax(-1)
        expected = logprobs.gather(-1, labels[..., None])[..., 0].float()
        assert_close(logprob, expected)
        expected = -(logprobs.exp() * logprobs).sum(-1).float()
        assert_close(entropy, expected)


@pytest.mark.usefixtures("built_operator")
@pytest.mark.parametrize("is_sequence_parallel", [False, True])
def test_a_served_reference_needs_no_output_layer(
    ranks, binaries, tmp_path, is_sequence_parallel
) -> None:
    head = torch.cat(ranks.results(part_of_the_head))[:-PADDING]
    write_safetensors(tmp_path / "model.safetensors", {"lm_head.weight": head.numpy()})
    config = {"hidden_size": HIDDEN, "vocab_size": VOCAB - PADDING, "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    logits, *_ = ranks.results(scores_without_padding)[0]

    with ServerProcess(binaries, "--model", str(tmp_path)) as server:
        parts = ranks.results(served_logprobs, is_sequence_parallel, server.grpc)

    expected = logits[..., :-PADDING].log_softmax(-1).gather(-1, Batch.make().labels[..., None])
    for logprob in parts:
        assert_close(logprob, expected[..., 0])
