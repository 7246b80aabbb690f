"""The check of a head accepts that of the model, whatever the model rounds, and refuses others that are near."""

import types

import pytest
import torch
from logprobd.errors import InvalidArgument
from logprobd_adapters import Scores
from logprobd_adapters.head_check import check_head, check_model_head

ROWS, HIDDEN, VOCAB = 8, 64, 2000
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class ExactScorer:
    """Scores in double precision."""

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        scale: float = 1.0,
        softcap: float | None = None,
    ) -> None:
        self.vocab_size, self.hidden_size = weight.shape
        self.weight, self.bias, self.scale, self.softcap = weight, bias, scale, softcap

    def score(self, hidden, targets, *, candidates) -> Scores:
        logits = self.scale * (hidden.double() @ self.weight.double().T)
        if self.bias is not None:
            logits += self.bias.double()
        if self.softcap:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        logprobs = logits.log_softmax(-1).float()
        return Scores(
            {
                "logprob": logprobs.gather(1, targets[:, None])[:, 0],
                "candidate_logprobs": logprobs.gather(1, candidates),
            }
        )


class Case:
    """Hidden states and a head in one dtype, whose logits have this spread and a peak in each row."""

    def __init__(
        self, dtype=torch.float32, spread=3.0, scale=1.0, softcap=None, outliers=False
    ) -> None:
        random = torch.Generator().manual_seed(5)
        hidden = torch.randn(ROWS, HIDDEN, generator=random)
        if outliers:
            hidden[:, :2] *= 30
        weight = torch.randn(VOCAB, HIDDEN, generator=random)
        weight *= spread / scale / (hidden @ weight.T).std()
        weight[:ROWS] += 3 * spread / scale * hidden / hidden.square().sum(-1, keepdim=True)
        self.hidden, self.weight = hidden.to(dtype), weight.to(dtype)
        self.scale, self.softcap = scale, softcap

    def logits(self) -> torch.Tensor:
        """Returns the logits of a model, which rounds each step to its dtype."""
        logits = self.hidden @ self.weight.T
        if self.scale != 1:
            logits = logits * self.scale
        return self.softcap * torch.tanh(logits / self.softcap) if self.softcap else logits

    def scorer(self, weight: torch.Tensor | None = None) -> ExactScorer:
        weight = self.weight if weight is None else weight
        return ExactScorer(weight, scale=self.scale, softcap=self.softcap)

    def noisy(self, noise: float) -> torch.Tensor:
        """Returns the weight with errors of this size, relative to its elements."""
        random = torch.randn(self.weight.shape, generator=torch.Generator().manual_seed(6))
        return self.weight.double() * (1 + noise * random)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spread", [0.1, 3, 10])
@pytest.mark.parametrize(
    "shape",
    [{}, {"scale": 0.0625}, {"softcap": 15.0}, {"outliers": True}],
    ids=["plain", "scale", "cap", "outliers"],
)
def test_the_head_of_the_model_is_accepted(dtype, spread, shape) -> None:
    case = Case(dtype, spread, **shape)

    check_head(case.scorer(), case.hidden, case.logits(), case.weight)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_a_model_that_rounds_weights_of_the_scorer_is_accepted(dtype) -> None:
    case = Case()
    logits = case.hidden.to(dtype) @ case.weight.to(dtype).T

    check_head(case.scorer(), case.hidden, logits.float(), case.weight.to(dtype))
    with pytest.raises(InvalidArgument, match="more than rounding explains"):
        check_head(case.scorer(), case.hidden, logits.float())


ROUNDED = (
    "differ from the model's by up to .* because the scorer's head is {} and the model's {}, whose weights are rounded "
    "there: use a scorer of the head in {}, load the model in {}, or accept this rounding by allow_rounded_head=True"
)


# Regression: the scorer's type counted as rounding of the model, so that a bf16 head was accepted for an fp32 model.
@pytest.mark.parametrize(
    ("of_model", "of_scorer", "names"),
    [
        (torch.float32, torch.bfloat16, ("bf16", "fp32")),
        (torch.float32, torch.float16, ("fp16", "fp32")),
        (torch.float16, torch.bfloat16, ("bf16", "fp16")),
        (torch.float64, torch.bfloat16, ("bf16", "torch.float64")),
    ],
    ids=str,
)
@pytest.mark.parametrize("spread", [0.1, 3])
def test_a_head_that_is_coarser_than_the_models_is_accepted_if_told(
    of_model, of_scorer, names, spread
) -> None:
    case = Case(of_model, spread)
    scorer = case.scorer(case.weight.to(of_scorer))
    scorer.dtype = of_scorer
    coarse, fine = names

    with pytest.raises(InvalidArgument, match=ROUNDED.format(coarse, fine, fine, coarse)):
        check_head(scorer, case.hidden, case.logits(), case.weight)
    check_head(scorer, case.hidden, case.logits(), case.weight, allow_rounded_head=True)
    other = case.scorer(case.weight.flip(0).to(of_scorer))
    other.dtype = of_scorer
    message = f"more than rounding explains .*, and the scorer's head is {coarse} and the model's {fine}: use"
    if spread == 3:
        with pytest.raises(InvalidArgument, match=message):
            check_head(other, case.hidden, case.logits(), case.weight, allow_rounded_head=True)


@pytest.mark.parametrize("of_scorer", DTYPES[1:])
def test_a_checkpoint_that_is_loaded_in_fp32_accepts_the_checkpoints_own_head(of_scorer) -> None:
    case = Case()
    case.weight = case.weight.to(of_scorer).float()
    scorer = case.scorer()
    scorer.dtype = of_scorer

    check_head(scorer, case.hidden, case.logits(), case.weight)
    case.weight[-1, -1] *= 1 + 2.0**-20
    with pytest.raises(InvalidArgument, match="or accept this rounding by allow_rounded_head"):
        check_head(scorer, case.hidden, case.logits(), case.weight)


@pytest.mark.parametrize(
    ("of_model", "of_scorer"),
    [
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.float16),
        (torch.float16, torch.float32),
        (torch.float64, torch.float32),
    ],
    ids=str,
)
def test_a_head_that_is_finer_than_the_models_is_accepted(of_model, of_scorer) -> None:
    case = Case()
    logits = (case.hidden.to(of_model) @ case.weight.to(of_model).T).to(of_model)
    scorer = case.scorer()
    scorer.dtype = of_scorer

    check_head(scorer, case.hidden.to(of_model), logits, case.weight.to(of_model))


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_the_type_of_autocast_counts(dtype) -> None:
    case = Case()

    with torch.autocast("cpu", dtype):
        logits = torch.nn.functional.linear(case.hidden, case.weight)
        check_head(case.scorer(), case.hidden, logits.float())
    with pytest.raises(InvalidArgument, match="more than rounding explains"):
        check_head(case.scorer(), case.hidden, logits.float())


# Regression: a head in int8 ended in a TypeError of torch.finfo, and with one in float8 nearly any was accepted.
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_a_quantised_head_is_refused_with_advice(dtype) -> None:
    case = Case()
    advice = f"the type of the model's head is {dtype}, .* which is not quantised .in transformers"

    with pytest.raises(InvalidArgument, match=advice):
        check_head(case.scorer(), case.hidden, case.logits(), torch.empty(0, dtype=dtype))


# Regression: the name of a type, which a scorer of a user's own may have, ended in a TypeError.
@pytest.mark.parametrize("dtype", ["bf16", "bfloat16", "torch.bfloat16"])
def test_a_scorer_may_name_its_type(dtype) -> None:
    case = Case()
    scorer = case.scorer()
    logits = case.hidden.bfloat16() @ case.weight.bfloat16().T

    scorer.dtype = dtype
    check_head(scorer, case.hidden, logits.float(), allow_rounded_head=True)
    with pytest.raises(InvalidArgument, match="the scorer's head is bf16 and the model's fp32"):
        check_head(scorer, case.hidden, logits.float())
    scorer.dtype = "4 bits"
    with pytest.raises(InvalidArgument, match="the type of the scorer's head is 4 bits"):
        check_head(scorer, case.hidden, logits.float())


# Regression: heads whose logprobs differed by up to 0.05 nats and 2 % of the largest logit were accepted.
@pytest.mark.parametrize(
    ("dtype", "accepted", "refused"),
    [(torch.float32, 1e-4, 2e-3), (torch.float16, 1e-3, 2e-2), (torch.bfloat16, 5e-3, 0.1)],
)
def test_a_head_that_is_near_is_refused(dtype, accepted, refused) -> None:
    case = Case(dtype)

    check_head(case.scorer(case.noisy(accepted)), case.hidden, case.logits(), case.weight)
    with pytest.raises(InvalidArgument, match="use a scorer of the model's head, and the same"):
        check_head(case.scorer(case.noisy(refused)), case.hidden, case.logits(), case.weight)


# Regression: only the most likely ids were compared.
def test_a_head_that_differs_only_in_unlikely_ids_is_refused() -> None:
    case = Case()
    case.weight[:ROWS] += 20 * case.hidden / case.hidden.square().sum(-1, keepdim=True)
    logits = case.logits()
    other = case.weight.clone()
    other[ROWS:] = other[ROWS:].flip(0)
    scorer = case.scorer(other)
    best = logits.argmax(-1)
    assert best.tolist() == list(range(ROWS))
    scores = scorer.score(case.hidden, best, candidates=best[:, None])
    of_model = logits.log_softmax(-1).gather(1, best[:, None])[:, 0]
    torch.testing.assert_close(scores.logprob, of_model, atol=1e-3, rtol=0)

    with pytest.raises(InvalidArgument, match="more than rounding explains"):
        check_head(scorer, case.hidden, logits)


def test_logits_of_minus_infinity_do_not_differ() -> None:
    case = Case()
    bias = torch.zeros(VOCAB)
    bias[ROWS::3] = -torch.inf

    check_head(ExactScorer(case.weight, bias), case.hidden, case.logits() + bias)
    with pytest.raises(InvalidArgument, match="more than rounding explains"):
        check_head(case.scorer(), case.hidden, case.logits() + bias)


def test_scores_that_are_not_numbers_are_refused() -> None:
    case = Case()
    weight = case.weight.clone()
    weight[0] = torch.nan

    with pytest.raises(InvalidArgument, match="by up to nan nats"):
        check_head(case.scorer(weight), case.hidden, case.logits())


def test_the_last_logits_of_the_model_may_be_padding() -> None:
    case = Case()

    check_head(case.scorer(case.weight[:-7]), case.hidden, case.logits())


# Regression: a head of more ids was not compared at all by one adapter, and failed with an IndexError in the others.
def test_a_head_of_another_size_is_refused() -> None:
    case = Case()
    larger = torch.cat([case.weight, case.weight[:1]])

    with pytest.raises(InvalidArgument, match="the model has 2000 logits, .* scorer 2001 ids"):
        check_head(case.scorer(larger), case.hidden, case.logits())
    with pytest.raises(InvalidArgument, match="the model has hidden size 64, .* the scorer 63"):
        check_head(case.scorer(case.weight[:, 1:]), case.hidden, case.logits())


class Model(torch.nn.Module):
    """A model with dropout, whose body embeds tokens."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        super().__init__()
        self.base_model = torch.nn.Module()
        self.base_model.device = self.device
        self.embedding = torch.nn.Embedding(VOCAB, HIDDEN)
        self.head = torch.nn.Linear(HIDDEN, VOCAB, bias=False)
        self.base_model.forward = self.states
        self.lengths: list[int] = []

    def states(self, tokens, use_cache):
        assert use_cache is False
        self.lengths.append(tokens.shape[1])
        states = torch.nn.functional.dropout(self.embedding(tokens), training=True)
        return types.SimpleNamespace(last_hidden_state=states)

    def forward(self, input_ids, use_cache=True):
        states = self.base_model(input_ids, use_cache=use_cache).last_hidden_state
        return types.SimpleNamespace(logits=self.head(states))

    def get_output_embeddings(self):
        return self.head


def test_a_model_with_dropout_is_compared_and_changes_no_random_numbers() -> None:
    model = Model()
    before = torch.random.get_rng_state()

    check_model_head(ExactScorer(model.head.weight.detach()), model)
    check_model_head(ExactScorer(model.head.weight.detach()), model, length=3)
    with pytest.raises(InvalidArgument, match="use a scorer of the model's head"):
        check_model_head(ExactScorer(model.head.weight.detach().flip(0)), model)

    assert torch.equal(torch.random.get_rng_state(), before)
    assert model.lengths == [8, 3, 8]
    assert not model.base_model._forward_hooks


def test_a_model_that_fails_keeps_no_hook() -> None:
    model = Model()
    model.head = None

    with pytest.raises(TypeError):
        check_model_head(ExactScorer(torch.ones(2, HIDDEN)), model)

    assert not model.base_model._forward_hooks


# Regression: OPT's causal model calls a part of the body, so that the hook on the body saw nothing; and with dropout
# the states of the second call differed from those of the first.
@pytest.mark.parametrize("is_training", [False, True])
def test_a_model_that_calls_a_part_of_its_body_is_compared(is_training) -> None:
    transformers = pytest.importorskip("transformers")
    settings = transformers.OPTConfig(
        vocab_size=64,
        hidden_size=16,
        word_embed_proj_dim=16,
        ffn_dim=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=32,
        dropout=0.5,
    )
    model = transformers.OPTForCausalLM(settings).train(is_training)
    model.model.decoder.layers[0].fc1.eval()
    before = [module.training for module in model.modules()]

    check_model_head(ExactScorer(model.lm_head.weight.detach()), model)
    with pytest.raises(InvalidArgument, match="use a scorer of the model's head"):
        check_model_head(ExactScorer(torch.randn(64, 16)), model)

    assert [module.training for module in model.modules()] == before
    assert any(before) == is_training


# Regression: PyTorch raises an error for its older setting once the newer one was used.
def test_the_newer_setting_of_tf32_is_accepted(monkeypatch) -> None:
    def raise_error() -> str:
        raise RuntimeError("a mix of the legacy and new APIs")

    monkeypatch.setattr(torch, "get_float32_matmul_precision", raise_error)
    torch.manual_seed(0)
    weight, hidden = torch.randn(VOCAB, HIDDEN), torch.randn(ROWS, HIDDEN)

    check_head(ExactScorer(weight), hidden, hidden @ weight.T, weight)
