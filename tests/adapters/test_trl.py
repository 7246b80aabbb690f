"""One step of TRL's trainers with a scored reference, compared with the unmodified trainer."""

import contextlib
import functools
import math
import pathlib
import queue
import re
import subprocess
import sys
import types
from unittest import mock

import datasets
import grpo_reference
import logprobd
import numpy as np
import peft
import pytest
import torch
import transformers
import trl
from document_examples import run_example
from linear_logprob_reference import reference
from logprobd_adapters import LocalScorer, RemoteScorer, Scorer, Scores
from logprobd_adapters.head_check import CHECKED_TOKENS
from logprobd_adapters.trl import use_scorer
from server_process import ServerProcess
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, packing
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

# Both sides sum fp32 products.
LOGPROB_TOLERANCE = 1e-5  # nats
GRADIENT_TOLERANCE = 1e-4  # relative to the gradient's largest value
# The kernels' tolerance against double precision, tests/README.md.
BF16_TOLERANCE = 1e-4  # nats

WORDS = ["bacon", "coda", "dune", "fig", "gear", "hello", "iris", "jump"]
ADAPTERS = (False, True)


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> dict[torch.dtype, pathlib.Path]:
    """Returns the folders of a small model in fp32 and bf16."""
    result = {}
    for dtype in (torch.float32, torch.bfloat16):
        result[dtype] = tmp_path_factory.mktemp(str(dtype))
        grpo_reference.write_model(result[dtype], dtype)
    return result


@pytest.fixture(scope="session")
def folder(folders) -> pathlib.Path:
    return folders[torch.float32]


@pytest.fixture(scope="session")
def addresses(folders, binaries):
    """Yields the addresses of servers of both models."""
    with contextlib.ExitStack() as stack:
        yield {
            dtype: stack.enter_context(ServerProcess(binaries, "--model", str(path))).grpc
            for dtype, path in folders.items()
        }


class CountingScorer:
    """A scorer that counts the rows it scores."""

    def __init__(self, scorer: Scorer) -> None:
        self.scorer = scorer
        self.rows = 0
        self.hidden_size, self.vocab_size = scorer.hidden_size, scorer.vocab_size

    def score(self, hidden: torch.Tensor, *arguments, **keywords):
        self.rows += hidden[..., 0].numel()
        return self.scorer.score(hidden, *arguments, **keywords)


@pytest.fixture
def make_scorer(kind, folders, request):
    """Returns a function that makes this test's scorer of the model of a dtype."""

    def make(dtype: torch.dtype = torch.float32) -> CountingScorer:
        if kind == "remote":
            client = logprobd.Client(request.getfixturevalue("addresses")[dtype])
            request.addfinalizer(client.close)
            return CountingScorer(RemoteScorer(client))
        model = transformers.AutoModelForCausalLM.from_pretrained(folders[dtype])
        return CountingScorer(LocalScorer.from_model(model))

    return make


@pytest.fixture
def restored_trl(monkeypatch, built_operator) -> None:
    """Undoes apply_logprobd_kernel after the test."""
    original = trl.trainer.utils._ChunkedLogProbFunction
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "trl":
            for attribute, value in list(vars(module).items()):
                if value is original:
                    monkeypatch.setattr(module, attribute, original)


def switch_policy() -> None:
    from logprobd_ops.compat.trl import apply_logprobd_kernel  # noqa: PLC0415  (loads the library)

    apply_logprobd_kernel()


def policy_of(folder: pathlib.Path, has_adapter: bool):
    """Returns a policy that differs from its reference, the model of the folder."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(1)
    if has_adapter:
        adapter = peft.LoraConfig(r=4, lora_dropout=0.1, init_lora_weights=False)
        return peft.get_peft_model(model, adapter)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * parameter.std() * torch.randn_like(parameter))
    return model


def common(output: pathlib.Path, **options) -> dict:
    """Returns the arguments of every trainer."""
    return {
        "output_dir": str(output),
        "max_steps": 1,
        "per_device_train_batch_size": 4,
        "max_grad_norm": 0.0,  # gradients are compared as they are
        "logging_steps": 1,
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        **options,
    }


def online(trainer: type, config: type, folder, output, has_adapter, **options):
    def reward(completion_ids: list[list[int]], **_) -> list[float]:
        return [float(sum(ids) % 7) for ids in completion_ids]

    options = {"beta": 0.5, "temperature": 0.7, "num_generations": 4} | options
    policy = options.pop("policy", None)
    return trainer(
        model=policy_of(folder, has_adapter) if policy is None else policy,
        reward_funcs=reward,
        args=config(**common(output, max_completion_length=6, **options)),
        train_dataset=datasets.Dataset.from_dict({"prompt": WORDS}),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder),
    )


def offline(trainer: type, config: type, columns, folder, output, has_adapter, **options):
    """Makes a trainer of a policy, by default that of `policy_of`."""
    policy = options.pop("policy", None)
    return trainer(
        model=policy_of(folder, has_adapter) if policy is None else policy,
        args=config(**common(output, **options)),
        train_dataset=datasets.Dataset.from_dict(columns),
        eval_dataset=datasets.Dataset.from_dict(columns),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder),
    )


PAIRS = {"prompt": WORDS, "chosen": WORDS[1:] + WORDS[:1], "rejected": WORDS[3:] + WORDS[:3]}
LABELLED = {
    "prompt": WORDS,
    "completion": WORDS[1:] + WORDS[:1],
    "label": [number % 2 == 0 for number in range(len(WORDS))],
}
dpo = functools.partial(offline, trl.DPOTrainer, trl.DPOConfig, PAIRS)
kto = functools.partial(offline, trl.KTOTrainer, trl.KTOConfig, LABELLED)
sft = functools.partial(offline, trl.SFTTrainer, trl.SFTConfig, {"text": WORDS})
grpo = functools.partial(online, trl.GRPOTrainer, trl.GRPOConfig)
rloo = functools.partial(online, trl.RLOOTrainer, trl.RLOOConfig)


def varlen_attention(query, key, value, ends_q, ends_k, *_, softmax_scale, causal, window_size):
    """Computes what flash attention computes for packed [tokens, heads, size], on a CPU."""
    assert causal and window_size == (-1, -1)
    outputs = []
    for begin_q, end_q, begin_k, end_k in zip(
        ends_q[:-1], ends_q[1:], ends_k[:-1], ends_k[1:], strict=True
    ):
        scores = torch.einsum("qhd,khd->hqk", query[begin_q:end_q], key[begin_k:end_k])
        length_q, length_k = scores.shape[1:]
        is_future = torch.ones(length_q, length_k).triu(length_k - length_q + 1).bool()
        weights = (scores * softmax_scale).masked_fill(is_future, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, value[begin_k:end_k]))
    return torch.cat(outputs)


class Rollouts:
    """Completions that were written in advance, in the place of a worker with vLLM, and no transfer of weights."""

    def __init__(self) -> None:
        self.rollout_buffer: queue.Queue = queue.Queue()
        self.metrics_queue: queue.Queue = queue.Queue()
        for number in range(8):  # the step takes four, and the next four are fetched ahead
            tokens = np.array([3, 4, 5, *range(6 + number, 10 + 2 * number)])
            self.rollout_buffer.put(
                RolloutSample(
                    **{"prompt": [], "completion": [], "metrics": {}, "enqueued_at": 0.0},
                    input_ids=tokens,
                    completion_mask=(np.arange(len(tokens)) > 2).astype(int),
                    old_log_probs=np.full(len(tokens), -3.3, np.float32),
                    advantage=number - 1.2,
                    model_version=1,
                    group_id=0,
                )
            )

    def send_weights(self, iterator) -> None:
        for _ in iterator:
            pass

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None


@pytest.fixture
def async_grpo_on_a_cpu(monkeypatch) -> None:
    """Replaces what AsyncGRPO needs of a GPU: its name and the kernels of its attention."""
    kernels = types.SimpleNamespace(flash_attn_varlen_func=varlen_attention)
    monkeypatch.setattr(packing, "_flash_attn", lambda: kernels)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "CPU")


def async_grpo(folder, output, *_):
    rollouts = Rollouts()
    return AsyncGRPOTrainer(
        model=str(folder),
        args=AsyncGRPOConfig(**common(output), num_generations=4, token_budget=0),
        train_dataset=datasets.Dataset.from_dict({"prompt": WORDS}),
        rollout_worker=rollouts,
        weight_transfer=rollouts,
    )


def fused_models(trainer) -> list[transformers.PreTrainedModel]:
    """Returns the models that TRL has given a fused head."""
    policy = (
        trainer.model.get_base_model() if hasattr(trainer.model, "peft_config") else trainer.model
    )
    reference = getattr(trainer, "ref_model", None)
    return [policy] if reference is None else [policy, reference]


def record_logprobs(model) -> list[torch.Tensor]:
    """Returns a list that will have the logprobs of each call of the model's fused head."""
    recorded: list[torch.Tensor] = []
    original = model.forward

    @functools.wraps(original)
    def forward(_, *arguments, **keywords):
        output = original(*arguments, **keywords)
        if keywords.get("fused_lm_head"):
            recorded.append(output.log_probs.detach().clone())
        return output

    model.forward = types.MethodType(forward, model)
    return recorded


class KeepGradients(transformers.TrainerCallback):
    """Keeps the gradients of a step."""

    def __init__(self) -> None:
        self.gradients: dict[str, torch.Tensor] = {}

    def on_pre_optimizer_step(self, *_, model, **__) -> None:
        self.gradients = {
            name: parameter.grad.clone()
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        }


class Step:
    """Logprobs, gradients and the log of one step of a trainer."""

    def __init__(self, trainer) -> None:
        recorded = [record_logprobs(model) for model in fused_models(trainer)]
        keep = KeepGradients()
        trainer.add_callback(keep)
        transformers.set_seed(2)  # for the completions
        trainer.train()
        self.logprobs = sum(recorded, [])
        self.gradients = keep.gradients
        self.log = trainer.state.log_history[0]


def assert_same_step(ours: Step, stock: Step) -> None:
    assert ours.logprobs and ours.gradients
    for mine, theirs in zip(ours.logprobs, stock.logprobs, strict=True):
        torch.testing.assert_close(mine, theirs, atol=LOGPROB_TOLERANCE, rtol=0)
    assert ours.gradients.keys() == stock.gradients.keys()
    assert max(gradient.abs().max() for gradient in stock.gradients.values()) > 1e-4
    for name, theirs in stock.gradients.items():
        error = (ours.gradients[name] - theirs).abs().max()
        assert error <= GRADIENT_TOLERANCE * theirs.abs().max(), name


def remove_head(model: transformers.PreTrainedModel) -> None:
    hidden = model.get_output_embeddings().weight.shape[1]
    model.get_output_embeddings().weight = torch.nn.Parameter(torch.empty(0, hidden))


def assert_scored_step_is_that_of_trl(ours, stock, scorer) -> None:
    """Compares a step of a trainer that the scorer serves with one of an unmodified trainer."""
    use_scorer(ours, scorer)
    scorer.rows = 0

    steps = Step(ours), Step(stock)

    assert scorer.rows > 0
    assert_same_step(*steps)


@pytest.mark.parametrize("has_adapter", ADAPTERS)
@pytest.mark.parametrize("make", [grpo, rloo, dpo, kto], ids=["grpo", "rloo", "dpo", "kto"])
def test_a_step_is_that_of_trl(make_scorer, folder, tmp_path, make, has_adapter) -> None:
    stock = make(folder, tmp_path, has_adapter)
    ours = make(folder, tmp_path, has_adapter)
    assert_scored_step_is_that_of_trl(ours, stock, make_scorer())


@pytest.mark.parametrize("make", [dpo, kto], ids=["dpo", "kto"])
@pytest.mark.parametrize("has_adapter", ADAPTERS)
def test_a_step_with_precomputed_logprobs_is_that_of_trl(
    make_scorer, folder, tmp_path, make, has_adapter
) -> None:
    def make_trainer():
        # Without an adapter, the policy before its training is the reference.
        policy = None
        if not has_adapter:
            policy = transformers.AutoModelForCausalLM.from_pretrained(folder)
        return make(folder, tmp_path, has_adapter, policy=policy, precompute_ref_log_probs=True)

    stock, ours = make_trainer(), make_trainer()
    scorer = make_scorer()
    use_scorer(ours, scorer)
    precomputed = scorer.rows

    steps = Step(ours), Step(stock)

    assert CHECKED_TOKENS < precomputed == scorer.rows
    assert_same_step(*steps)
    for mine, theirs in (
        (ours.train_dataset, stock.train_dataset),
        (ours.eval_dataset, stock.eval_dataset),
    ):
        assert mine.column_names == theirs.column_names
        columns = [name for name in theirs.column_names if name.startswith("ref_")]
        assert len(columns) == 2
        for column in columns:
            torch.testing.assert_close(
                *(torch.tensor(each[column]) for each in (mine, theirs)),
                **{"atol": 6 * LOGPROB_TOLERANCE, "rtol": 0},  # sums over at most 6 tokens
            )


def test_precomputed_logprobs_of_another_training_are_not_used(
    make_scorer, folder, tmp_path
) -> None:
    datasets.Dataset.from_dict(PAIRS).to_json(tmp_path / "pairs.jsonl")
    rows = []
    for _ in range(2):
        trainer = trl.DPOTrainer(
            model=transformers.AutoModelForCausalLM.from_pretrained(folder),
            args=trl.DPOConfig(**common(tmp_path, precompute_ref_log_probs=True)),
            train_dataset=datasets.Dataset.from_json(
                str(tmp_path / "pairs.jsonl"), cache_dir=str(tmp_path)
            ),
            processing_class=transformers.AutoTokenizer.from_pretrained(folder),
        )
        scorer = make_scorer()
        use_scorer(trainer, scorer)
        rows.append(scorer.rows)

    assert CHECKED_TOKENS < rows[0] == rows[1]


def test_grpo_needs_no_head_of_the_reference(make_scorer, folder, tmp_path) -> None:
    stock, ours = (grpo(folder, tmp_path, False, max_steps=2) for _ in range(2))
    use_scorer(ours, make_scorer())
    remove_head(ours.ref_model)

    steps = Step(ours), Step(stock)

    assert_same_step(*steps)
    assert stock.state.log_history[1]["kl"] > 1e-3
    for mine, theirs in zip(ours.state.log_history[:2], stock.state.log_history[:2], strict=True):
        assert mine["kl"] == pytest.approx(theirs["kl"], abs=LOGPROB_TOLERANCE)


@pytest.mark.usefixtures("restored_trl")
def test_the_example_of_the_document_trains(addresses, folder, tmp_path) -> None:
    stock, ours = (grpo(folder, tmp_path, False) for _ in range(2))
    torch.manual_seed(2)  # of the completions
    stock.train()
    torch.manual_seed(2)

    run_example("docs/TRL.md", replaced={"127.0.0.1:8470": addresses[torch.float32]}, trainer=ours)

    assert isinstance(ours.ref_model.get_output_embeddings(), torch.nn.Identity)
    assert trl.trainer.utils._ChunkedLogProbFunction.__module__ == "logprobd_ops.compat.trl"
    expected = stock.state.log_history[0]["kl"]
    assert expected > 1e-3
    assert ours.state.log_history[0]["kl"] == pytest.approx(expected, abs=LOGPROB_TOLERANCE)


def test_an_adapter_whose_training_goes_on_is_its_own_reference(
    make_scorer, folder, tmp_path
) -> None:
    policy_of(folder, True).save_pretrained(tmp_path / "adapter")

    def make(output):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        policy = peft.PeftModel.from_pretrained(model, tmp_path / "adapter", is_trainable=True)
        return trl.GRPOTrainer(
            model=policy,
            reward_funcs=grpo_reference.share_of_vowels,
            args=trl.GRPOConfig(
                **common(output, max_completion_length=6, beta=0.5, num_generations=4, max_steps=2),
                learning_rate=1e-2,
            ),
            train_dataset=datasets.Dataset.from_dict({"prompt": WORDS}),
            processing_class=transformers.AutoTokenizer.from_pretrained(folder),
        )

    stock, ours = make(tmp_path), make(tmp_path)
    assert "ref" in ours.model.peft_config
    assert_scored_step_is_that_of_trl(ours, stock, make_scorer())


@pytest.mark.parametrize("has_gradients", (True, False))
def test_the_policy_keeps_its_own_head(make_scorer, folder, tmp_path, has_gradients) -> None:
    trainer = grpo(folder, tmp_path, True)
    scorer = make_scorer()
    use_scorer(trainer, scorer)
    scorer.rows = 0
    tokens = torch.arange(10)[None]

    with torch.set_grad_enabled(has_gradients):
        output = trainer.model(input_ids=tokens, labels=tokens, fused_lm_head=True)

    assert output.entropy is not None
    assert output.log_probs.requires_grad == has_gradients
    assert scorer.rows == 0


def test_random_numbers_of_the_training_stay_the_same(make_scorer, folder, tmp_path) -> None:
    trainer = grpo(folder, tmp_path, True)
    trainer.model.train()  # with the adapter's dropout
    state = torch.get_rng_state()

    use_scorer(trainer, make_scorer())

    assert torch.equal(torch.get_rng_state(), state)


def test_sft_evaluates_an_adapter_by_the_scorer(make_scorer, folder, tmp_path) -> None:
    stock, ours = (sft(folder, tmp_path, True) for _ in range(2))
    scorer = make_scorer()
    use_scorer(ours, scorer)
    scorer.rows = 0

    steps = Step(ours), Step(stock)
    of_training = scorer.rows
    mine, theirs = ours.evaluate(), stock.evaluate()

    assert_same_step(*steps)
    assert of_training == 0
    assert scorer.rows == sum(len(word) - 1 + 1 for word in WORDS)  # the end of the text, too
    for name in ("eval_loss", "eval_entropy", "eval_mean_token_accuracy"):
        assert mine[name] == pytest.approx(theirs[name], abs=LOGPROB_TOLERANCE), name


@pytest.mark.parametrize("num_items", (None, 7))
@pytest.mark.parametrize("is_shifted", (False, True))
def test_a_call_returns_what_trl_returns(
    make_scorer, folder, tmp_path, is_shifted, num_items
) -> None:
    stock, ours = (dpo(folder, tmp_path, False) for _ in range(2))
    use_scorer(ours, make_scorer())
    tokens = torch.randint(3, 29, (2, 10))
    labels = {"shift_labels" if is_shifted else "labels": tokens.masked_fill(tokens < 12, -100)}

    with torch.no_grad():
        mine, theirs = (
            trainer.ref_model(
                input_ids=tokens, num_items_in_batch=num_items, fused_lm_head=True, **labels
            )
            for trainer in (ours, stock)
        )

    assert mine.keys() == theirs.keys()
    for name in theirs:
        torch.testing.assert_close(mine[name], theirs[name], atol=LOGPROB_TOLERANCE, rtol=0)


def test_bf16_logprobs_agree_with_double_precision(make_scorer, folders, tmp_path) -> None:
    stock, ours = (dpo(folders[torch.bfloat16], tmp_path, False) for _ in range(2))
    use_scorer(ours, make_scorer(torch.bfloat16))
    tokens = torch.randint(3, 29, (4, 20))

    with torch.no_grad():
        states = ours.ref_model.base_model(input_ids=tokens).last_hidden_state[:, :-1]
        weight = ours.ref_model.get_output_embeddings().weight
        truth = reference(states.flatten(0, 1), weight, tokens[:, 1:].flatten()).logprob
        logprobs, rounded = (
            trainer.ref_model(input_ids=tokens, labels=tokens, fused_lm_head=True).log_probs
            for trainer in (ours, stock)
        )

    assert (logprobs.flatten() - truth).abs().max() <= BF16_TOLERANCE
    assert (rounded.flatten() - truth).abs().max() > 10 * BF16_TOLERANCE


# Regression: the policy's logits were rounded and the reference's were not, without a word.
@pytest.mark.usefixtures("restored_trl")
@pytest.mark.parametrize(
    ("make", "tolerance"),
    [(grpo, 1e-9), (dpo, 1e-6)],  # of a loss, TRL logs six decimals
    ids=["grpo", "dpo"],
)
@pytest.mark.parametrize("is_switched", (False, True))
def test_equal_models_in_bf16_differ_unless_the_policy_is_switched(
    make_scorer, folders, tmp_path, recwarn, make, tolerance, is_switched
) -> None:
    folder = folders[torch.bfloat16]
    policy = transformers.AutoModelForCausalLM.from_pretrained(folder)
    trainer = make(folder, tmp_path, False, policy=policy)
    if is_switched:
        switch_policy()
    use_scorer(trainer, make_scorer(torch.bfloat16))

    transformers.set_seed(2)
    trainer.train()

    log = trainer.state.log_history[0]
    divergence = log["kl"] if "kl" in log else abs(log["loss"] - math.log(2))
    assert divergence <= tolerance if is_switched else divergence > 10 * tolerance
    assert is_switched != any("apply_logprobd_kernel" in str(each.message) for each in recwarn)


@pytest.mark.usefixtures("restored_trl")
@pytest.mark.parametrize(
    ("make", "dtype", "options", "warns"),
    [
        (grpo, torch.float32, {}, False),
        (grpo, torch.float32, {"bf16": True}, True),
        (grpo, torch.float32, {"bf16": True, "cast_lm_head_to_fp32": True}, False),
        (grpo, torch.bfloat16, {}, True),
        (rloo, torch.bfloat16, {}, True),
        (kto, torch.bfloat16, {}, True),
        (dpo, torch.bfloat16, {"precompute_ref_log_probs": True}, True),
        (sft, torch.bfloat16, {}, False),
    ],
    ids=lambda value: str(getattr(value, "args", (value,))[0]),
)
def test_a_policy_whose_logits_are_rounded_causes_a_warning_unless_it_is_switched(
    folders, built_operator, tmp_path, recwarn, make, dtype, options, warns
) -> None:
    folder = folders[dtype]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    policy = None if make is sft else transformers.AutoModelForCausalLM.from_pretrained(folder)
    trainer = make(folder, tmp_path, make is sft, policy=policy, **options)

    def is_warned() -> bool:
        recwarn.clear()
        use_scorer(trainer, LocalScorer.from_model(model))
        found = [str(each.message) for each in recwarn if "use_scorer" in str(each.message)]
        assert all("rounds the policy's logits to bfloat16" in message for message in found)
        return bool(found)

    assert is_warned() == warns
    switch_policy()
    assert not is_warned()


def test_a_coarser_head_is_accepted_if_told(folders, built_operator, tmp_path) -> None:
    trainer = grpo(folders[torch.float32], tmp_path, False)
    model = transformers.AutoModelForCausalLM.from_pretrained(folders[torch.bfloat16])
    scorer = LocalScorer.from_model(model)

    with pytest.raises(logprobd.InvalidArgument, match="head is bf16 and the model's fp32"):
        use_scorer(trainer, scorer)
    use_scorer(trainer, scorer, allow_rounded_head=True)


def test_autocast_applies_to_the_body(make_scorer, folder, tmp_path) -> None:
    stock, ours = (dpo(folder, tmp_path, False, bf16=True) for _ in range(2))
    use_scorer(ours, make_scorer())
    dtypes = []
    for trainer in (stock, ours):
        layer = trainer.ref_model.base_model.layers[0].mlp.down_proj
        layer.register_forward_hook(lambda _, __, output: dtypes.append(output.dtype))
    tokens = torch.arange(10)[None]

    with torch.no_grad():
        for trainer in (stock, ours):
            trainer.ref_model(input_ids=tokens, labels=tokens, fused_lm_head=True)

    assert dtypes == [torch.bfloat16] * 2


def test_another_head_is_refused(folder, tmp_path) -> None:
    trainer = grpo(folder, tmp_path, False)
    certain = types.SimpleNamespace(
        hidden_size=64,
        vocab_size=29,
        score=lambda _, targets, candidates: Scores(
            {
                "logprob": torch.zeros(targets.shape),
                "candidate_logprobs": torch.zeros(candidates.shape),
            }
        ),
    )
    narrow = types.SimpleNamespace(hidden_size=32, vocab_size=29)

    with pytest.raises(logprobd.InvalidArgument, match="use a scorer of the model's head"):
        use_scorer(trainer, certain)
    with pytest.raises(logprobd.InvalidArgument, match="size 64, but the head of the scorer 32"):
        use_scorer(trainer, narrow)


# Regression: a scorer with more ids than the model's head was accepted, whatever its head was.
@pytest.mark.parametrize("head", ["whole", "removed", torch.int8, torch.float8_e4m3fn])
def test_the_size_of_the_head_is_always_compared(folder, tmp_path, head) -> None:
    trainer = grpo(folder, tmp_path, False)
    if head == "removed":
        remove_head(trainer.ref_model)
    elif head != "whole":
        weight = trainer.ref_model.lm_head.weight.to(head)
        trainer.ref_model.lm_head.weight = torch.nn.Parameter(weight, requires_grad=False)
    larger = types.SimpleNamespace(hidden_size=64, vocab_size=30)
    narrow = types.SimpleNamespace(hidden_size=32, vocab_size=29)

    with pytest.raises(logprobd.InvalidArgument, match="the model has 29 logits, .* scorer 30 ids"):
        use_scorer(trainer, larger)
    with pytest.raises(logprobd.InvalidArgument, match="size 64, but the head of the scorer 32"):
        use_scorer(trainer, narrow)
    if head != "whole":  # nothing else can be compared
        use_scorer(trainer, types.SimpleNamespace(hidden_size=64, vocab_size=29))


class SquaredLoss(trl.SFTTrainer):
    def compute_loss(self, *arguments, **keywords):
        return super().compute_loss(*arguments, **keywords) ** 2


@pytest.mark.usefixtures("async_grpo_on_a_cpu")
@pytest.mark.parametrize(
    "make, message",
    [
        (functools.partial(grpo, has_adapter=True, beta=0.0), "no reference, because its beta is"),
        (functools.partial(dpo, has_adapter=False, sync_ref_model=True), "sync_ref_model changes"),
        (functools.partial(sft, has_adapter=False), "it trains the head"),
        (
            functools.partial(
                *(offline, SquaredLoss, trl.SFTConfig, {"text": WORDS}), has_adapter=True
            ),
            "SquaredLoss has a loss of its own",
        ),
        (async_grpo, "AsyncGRPOTrainer does not score a fixed head"),
    ],
    ids=["beta", "sync", "sft", "loss", "async_grpo"],
)
def test_a_trainer_without_a_fixed_head_is_refused(folder, tmp_path, make, message) -> None:
    trainer = make(folder, tmp_path)

    with pytest.raises(logprobd.InvalidArgument, match=message):
        use_scorer(trainer, types.SimpleNamespace(hidden_size=64, vocab_size=29))


@pytest.mark.usefixtures("async_grpo_on_a_cpu", "built_operator")
@pytest.mark.parametrize("make", [sft, async_grpo], ids=["sft", "async_grpo"])
def test_a_step_by_the_operator_is_that_of_trl(folder, tmp_path, monkeypatch, make) -> None:
    from logprobd_ops.compat.trl import ChunkedLogProbFunction  # noqa: PLC0415  (loads the library)

    stock, ours = (make(folder, tmp_path, False) for _ in range(2))
    theirs = Step(stock)
    operator = mock.Mock(wraps=ChunkedLogProbFunction)
    monkeypatch.setattr(trl.trainer.utils, "_ChunkedLogProbFunction", operator)

    mine = Step(ours)

    assert operator.apply.called
    assert_same_step(mine, theirs)


def test_the_example_prints_curves_that_lie_on_each_other(environment, built_operator) -> None:
    script = pathlib.Path(grpo_reference.__file__)
    done = subprocess.run(
        [sys.executable, str(script), "--steps", "4"],
        **{"env": environment, "capture_output": True, "text": True, "timeout": 150},
    )

    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", done.stdout, re.MULTILINE)
    cells = [[float(cell) for cell in row.split(" | ")] for _, row in rows]
    assert [int(step) for step, _ in rows] == [1, 2, 3, 4]
    assert cells[-1][2] > 0.01  # the policy has left the reference
    for reward, served_reward, kl, served_kl in cells:
        assert served_reward == pytest.approx(reward, abs=LOGPROB_TOLERANCE)
        assert served_kl == pytest.approx(kl, abs=LOGPROB_TOLERANCE)
