"""A small model trains with the operator and its drop-in functions as it does with torch's functions."""

import functools

import pytest
import torch
from drop_in_cases import make_case, near, relative_error
from linear_logprob_reference import seeded
from logprobd_ops import linear_cross_entropy
from logprobd_ops.compat import areal, liger, skyrl, trl, verl
from originals import original, small_llama
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

VOCAB, SIZE, LENGTH, BATCH, STEPS = 128, 32, 16, 8, 200


class Model(torch.nn.Module):
    """A causal language model of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCAB, SIZE)
        self.layers = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(
                SIZE, 4, 2 * SIZE, 0.0, batch_first=True, norm_first=True
            )
            for _ in range(2)
        )
        self.norm = torch.nn.LayerNorm(SIZE)
        self.head = torch.nn.Linear(SIZE, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = torch.nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden, mask, is_causal=True)
        return self.norm(hidden)


def torch_loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(torch.nn.functional.linear(hidden, weight).float(), target)


def loss_of_logprobs(function, hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return -function(hidden, weight, target).mean()


LOSSES = {
    "linear_cross_entropy": linear_cross_entropy,
    "liger": liger.liger_fused_linear_cross_entropy,
    "verl": functools.partial(
        loss_of_logprobs, lambda h, w, t: verl.linear_cross_entropy(h, w, t)[0]
    ),
    "areal": functools.partial(loss_of_logprobs, areal.linear_cross_entropy_logprobs),
    "skyrl": functools.partial(
        loss_of_logprobs,
        lambda h, w, t: skyrl.FusedLinearLogprobTriton.apply(
            h.unsqueeze(0), w, t.unsqueeze(0), 0, VOCAB, 64, None
        ),
    ),
    "trl": functools.partial(
        loss_of_logprobs,
        lambda h, w, t: trl.ChunkedLogProbFunction.apply(
            h, w, None, t, 1.0, 64, outputs=("log_probs",)
        )[0],
    ),
}


def loss_curve(loss_of, *, autocast: bool) -> Tensor:
    """Returns the losses of 200 steps. With autocast, parameters are fp32 and products bf16, as in transformers'
    Trainer with bf16=True."""
    device = torch.get_default_device()
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = seeded(3)
    # Each token depends on the one before, so there is something to learn.
    successor = torch.randperm(VOCAB, generator=generator)
    losses = []
    for _ in range(STEPS):
        tokens = torch.randint(VOCAB, (BATCH, LENGTH), generator=generator)
        tokens[:, 1::2] = successor[tokens[:, ::2]]
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            hidden = model(tokens)[:, :-1].reshape(-1, SIZE)
            loss = loss_of(hidden, model.head.weight, tokens[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses, device="cpu")


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Threads would wait for each other longer than these small products take."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def curve_of_torch(one_thread) -> Tensor:  # noqa: ARG001
    """The losses that torch gives in fp32."""
    curve = loss_curve(torch_loss, autocast=False)
    assert curve[-1] < curve[0] - 0.5
    return curve


@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_curve_in_fp32_is_that_of_torch(curve_of_torch, name):
    near(loss_curve(LOSSES[name], autocast=False), curve_of_torch, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_curve_under_autocast_stays_near_that_of_fp32(curve_of_torch, name):
    near(loss_curve(LOSSES[name], autocast=True), curve_of_torch, rtol=0, atol=2e-2)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradients_through_a_checkpoint_are_those_without(name, use_reentrant):
    case = make_case(torch.float32, rows=40, vocab=VOCAB)

    loss = checkpoint(LOSSES[name], *case, use_reentrant=use_reentrant)
    loss.backward()

    truth = torch.autograd.grad(LOSSES[name](*case), case[:2])
    for tensor, true in zip(case[:2], truth, strict=True):
        assert relative_error(tensor.grad, true) <= 1e-6


def losses_of_trainer(folder, has_liger: bool) -> list[float]:
    """Returns the losses of 6 steps of transformers' Trainer with bf16=True: fp32 parameters under autocast."""
    transformers = original("transformers")
    model = small_llama()
    if has_liger:
        original("liger_kernel.transformers.monkey_patch").apply_liger_kernel_to_llama(
            rope=False,
            rms_norm=False,
            swiglu=False,
            cross_entropy=False,
            fused_linear_cross_entropy=True,
            model=model,
        )
    tokens = torch.randint(96, (8, 16), generator=seeded(0)).tolist()
    trainer = transformers.Trainer(
        model,
        transformers.TrainingArguments(
            str(folder),
            bf16=True,
            use_cpu=True,
            max_steps=6,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            learning_rate=1e-2,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=[{"input_ids": row, "labels": row[:5] + [-100] + row[6:]} for row in tokens],
    )
    trainer.train()
    return [step["loss"] for step in trainer.state.log_history if "loss" in step]


def test_transformers_trainer_learns_with_ligers_patch_as_without(monkeypatch, tmp_path):
    functional = original("liger_kernel.transformers.functional")
    calls = []

    class Spy(liger.LigerFusedLinearCrossEntropyFunction):
        @staticmethod
        def apply(*given, **options):
            calls.append(torch.is_autocast_enabled(given[0].device.type))
            return liger.LigerFusedLinearCrossEntropyFunction.apply(*given, **options)

    monkeypatch.setattr(functional, "LigerFusedLinearCrossEntropyFunction", Spy)

    with torch.device("cpu"):  # Trainer's sampler does not support another default device.
        truth = losses_of_trainer(tmp_path, has_liger=False)
        losses = losses_of_trainer(tmp_path, has_liger=True)

    assert calls == [True] * 12  # two batches a step
    assert truth[-1] < truth[0] - 0.5
    near(torch.tensor(losses), torch.tensor(truth), rtol=0, atol=2e-2)
