"""Log-likelihoods of the models for lm-eval, compared with lm-eval's own model and with double precision."""

import gc
import pathlib
from unittest import mock

import compare
import data
import logprobd
import pytest
import tiny_model
import torch
import transformers
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from logprobd_adapters import LocalScorer
from logprobd_adapters.lm_eval import LogprobdLM, LogprobdLocalLM, ScorerLM
from server_process import ServerProcess

# Both sides sum fp32 products; lm-eval's softmax is in fp32 as well.
FP32_TOLERANCE = 1e-5  # nats per token
# The kernels' tolerance against double precision, tests/README.md.
BF16_TOLERANCE = 1e-4  # nats per token

LONG = "the old boat lay on the sand in the morning sun . " * 8  # 88 words; the model takes 64
PAIRS = {
    "one-token continuations of one context": [
        ("What do bees make ?", f" {word}") for word in ("honey", "iron", "bread", "wind", "honey")
    ],
    "continuations of one to four tokens": [
        ("Where do fish live ?", f" {continuation}")
        for continuation in ("north", "in air", "in the water", "under a roof and", "in the air")
    ],
    "the same words cut at different places": [
        ("the sun is", " red and white"),
        ("the sun", " is red and white"),
        ("the sun is red and", " black"),
    ],
    "no context": [("", "the sea"), ("", "honey"), ("", "<s> honey bread")],
    "a context that is cut": [
        (LONG, " and honey"),
        (LONG + " red", " bread"),
        (LONG, " and bread"),
    ],
    "unknown words": [("What do xyzzy make ?", " plugh honey")],
    "a space at the end of the context": [("What do bees make ? ", "honey and bread")],
}
ALL_PAIRS = sum(PAIRS.values(), [])


# lm-eval's own cache takes the logprobs of the wrong rows for continuations of different lengths that share all tokens
# but the last, so it is switched off where such continuations are compared.
NO_CACHE = {"logits_cache": False}


def requests(kind: str, arguments: list[tuple]) -> list[Instance]:
    return [Instance(kind, {}, each, number) for number, each in enumerate(arguments)]


def tokens_of(lm: HFLM, pairs: list[tuple[str, str]]) -> list[int]:
    """Returns the number of tokens of each continuation."""
    return [len(lm.tok_encode(continuation, add_special_tokens=False)) for _, continuation in pairs]


def assert_near(
    ours: list[float], theirs: list[float], counts: list[int], tolerance: float
) -> None:
    for mine, other, count in zip(ours, theirs, counts, strict=True):
        assert abs(mine - other) <= tolerance * count, (ours, theirs)


@pytest.fixture
def make_model(kind, start_server):
    """Returns a function that makes the model of this test's scorer for a folder."""

    def make(folder: pathlib.Path, **options) -> ScorerLM:
        options = {"pretrained": str(folder), "device": "cpu", "batch_size": 4} | options
        if kind == "local":
            return LogprobdLocalLM(**options)
        return LogprobdLM(address=start_server("--model", str(folder)).grpc, **options)

    return make


@pytest.mark.parametrize("batch_size", (1, 5, "auto"))
def test_fp32_continuations_are_those_of_lm_eval(make_model, folders, batch_size) -> None:
    folder = folders[torch.float32]
    ours = make_model(folder, batch_size=batch_size, max_batch_size=4)
    stock = HFLM(str(folder), device="cpu", batch_size=batch_size, max_batch_size=4, **NO_CACHE)

    mine, theirs = (lm.loglikelihood(requests("loglikelihood", ALL_PAIRS)) for lm in (ours, stock))

    counts = tokens_of(stock, ALL_PAIRS)
    assert_near([a for a, _ in mine], [a for a, _ in theirs], counts, FP32_TOLERANCE)
    assert [is_greedy for _, is_greedy in mine] == [is_greedy for _, is_greedy in theirs]


# Regression: lm-eval's search ran batches of 64 sequences of the model's full length, for minutes.
@pytest.mark.parametrize(("max_batch_size", "expected"), [(64, 8), (4, 4)])
def test_an_automatic_batch_size_runs_no_batch_on_a_cpu(
    make_model, folders, monkeypatch, max_batch_size, expected
) -> None:
    sizes = {"batch_size": "auto", "max_batch_size": max_batch_size}
    lm = make_model(folders[torch.float32], **sizes)
    monkeypatch.setattr(lm, "_model_call", None)

    assert lm._detect_batch_size() == lm._detect_batch_size([(None, [1], [2])], 0) == expected


@pytest.mark.parametrize("name", PAIRS)
def test_bf16_continuations_agree_with_double_precision(make_model, folders, name) -> None:
    folder = folders[torch.bfloat16]
    # In batches of one, the body computes the same bits for both.
    ours = make_model(folder, batch_size=1)
    exact = compare.exact_model(folder, batch_size=1, **NO_CACHE)

    mine, truth = (lm.loglikelihood(requests("loglikelihood", PAIRS[name])) for lm in (ours, exact))

    counts = tokens_of(exact, PAIRS[name])
    assert_near([a for a, _ in mine], [a for a, _ in truth], counts, BF16_TOLERANCE)


@pytest.mark.parametrize("logits_cache", (True, False))
def test_continuations_that_the_model_would_generate_are_greedy(
    make_model, folders, logits_cache
) -> None:
    folder = folders[torch.float32]
    ours = make_model(folder, logits_cache=logits_cache)
    stock = HFLM(str(folder), device="cpu", batch_size=4, **NO_CACHE)
    context = stock.tok_encode("the sun is")
    generated = ours.model.generate(
        torch.tensor([context]), max_new_tokens=4, do_sample=False, eos_token_id=None
    )[0, len(context) :].tolist()
    wrong = [*generated[:-1], (generated[-1] + 1) % tiny_model.VOCAB_SIZE]
    cases = [(None, context, continuation) for continuation in (generated, wrong, generated[:1])]

    mine, theirs = (lm._loglikelihood_tokens(cases) for lm in (ours, stock))

    assert [is_greedy for _, is_greedy in mine] == [True, False, True]
    assert [is_greedy for _, is_greedy in theirs] == [True, False, True]
    assert_near([a for a, _ in mine], [a for a, _ in theirs], [4, 4, 1], FP32_TOLERANCE)


# Other batches than the reference's would give bf16 states other bits.
@pytest.mark.parametrize(
    "dtype, batch_size", [(torch.float32, 4), (torch.float32, "auto"), (torch.bfloat16, 4)]
)
def test_rolling_log_likelihoods_are_summed_over_windows(
    make_model, folders, dtype, batch_size
) -> None:
    passages = list(data.passages()["test"]["text"])
    texts = [(passages[0],), ("the sun is red",), (" ".join(passages),), ("honey",)]
    folder = folders[dtype]
    ours = make_model(folder, batch_size=batch_size, max_batch_size=4)
    exact = compare.exact_model(folder, batch_size=4)

    mine, truth = (
        lm.loglikelihood_rolling(requests("loglikelihood_rolling", texts)) for lm in (ours, exact)
    )

    counts = [len(exact.tok_encode(text)) for (text,) in texts]
    assert counts[2] > 3 * tiny_model.LENGTH_MAX
    assert_near(mine, truth, counts, FP32_TOLERANCE)


def test_requests_that_share_their_tokens_are_scored_once_without_logits(
    make_model, folders
) -> None:
    ours = make_model(folders[torch.float32])
    counts = compare.count_rows(ours)
    ours.model.lm_head.register_forward_pre_hook(lambda *_: pytest.fail("logits were computed"))
    pairs = [pair for name in list(PAIRS)[:3] for pair in PAIRS[name]]

    ours.loglikelihood(requests("loglikelihood", pairs))

    # The continuations of the first context are one row. Those of the second have 1, 2, 3, 4 and 3 tokens; two of them
    # share all tokens but the last. The third case is one sequence with a continuation of four tokens and one of the
    # last token.
    assert sum(counts) == 1 + (1 + 2 + 3 + 4) + 4


# Regression: each batch kept the keys and values of all layers.
def test_the_body_keeps_no_keys_and_values(make_model, folders) -> None:
    ours = make_model(folders[torch.float32])
    kept = []
    ours.model.base_model.register_forward_hook(lambda *call: kept.append(call[-1].past_key_values))

    ours.loglikelihood(requests("loglikelihood", ALL_PAIRS))

    assert kept and set(kept) == {None}


def test_the_connection_is_closed_with_the_model(folders, start_server) -> None:
    folder = str(folders[torch.float32])
    with mock.patch.object(logprobd.Client, "close", autospec=True) as close:
        model = LogprobdLM(
            pretrained=folder, device="cpu", address=start_server("--model", folder).grpc
        )
        close.assert_not_called()
        del model
        gc.collect()

        close.assert_called_once()


def test_text_is_generated_as_by_lm_eval(make_model, folders) -> None:
    folder = folders[torch.float32]
    asked = requests("generate_until", [("the sun is", {"until": ["\n"], "max_gen_toks": 5})])

    ours, stock = (
        lm.generate_until(asked) for lm in (make_model(folder), HFLM(str(folder), device="cpu"))
    )

    assert ours == stock


SMALL = {
    "vocab_size": 1024,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.5,
}
SHAPED = {
    "soft cap": transformers.Gemma2Config(**SMALL, head_dim=16, final_logit_softcapping=4.0),
    "scale": transformers.CohereConfig(**SMALL, logit_scale=0.3),
    "divisor": transformers.GraniteConfig(**SMALL, logits_scaling=3.0),
    "tied": transformers.Qwen3Config(**SMALL, head_dim=16, tie_word_embeddings=True),
    "bias": transformers.PhiConfig(**SMALL),
    "position embeddings": transformers.GPT2Config(
        vocab_size=1024, n_embd=32, n_layer=1, n_head=2, n_positions=64, initializer_range=0.5
    ),
}


@pytest.mark.parametrize("name", SHAPED)
def test_heads_with_scale_cap_bias_or_tie_give_the_scores_of_lm_eval(
    make_model, tmp_path, name
) -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(SHAPED[name])
    if model.get_output_embeddings().bias is not None:
        torch.nn.init.normal_(model.get_output_embeddings().bias)
    model.save_pretrained(tmp_path)
    tiny_model.write_tokenizer(tmp_path)
    asked = requests("loglikelihood", ALL_PAIRS)
    stock = HFLM(str(tmp_path), device="cpu", batch_size=4, max_length=64, **NO_CACHE)

    mine, theirs = (lm.loglikelihood(asked) for lm in (make_model(tmp_path, max_length=64), stock))

    counts = tokens_of(stock, ALL_PAIRS)
    assert_near([a for a, _ in mine], [a for a, _ in theirs], counts, FP32_TOLERANCE)


def test_a_model_with_lora_is_scored_with_its_adapter(make_model, folders, tmp_path) -> None:
    peft = pytest.importorskip("peft")
    folder = folders[torch.float32]
    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    lora = peft.LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    peft.get_peft_model(base, lora).save_pretrained(tmp_path)
    options = {"peft": str(tmp_path)}
    asked = requests("loglikelihood", ALL_PAIRS)
    stock = HFLM(str(folder), device="cpu", batch_size=4, **options, **NO_CACHE)
    plain = HFLM(str(folder), device="cpu", batch_size=4, **NO_CACHE)

    mine, theirs, without = (
        lm.loglikelihood(asked) for lm in (make_model(folder, **options), stock, plain)
    )

    counts = tokens_of(stock, ALL_PAIRS)
    assert_near([a for a, _ in mine], [a for a, _ in theirs], counts, FP32_TOLERANCE)
    assert max(abs(a - b) for (a, _), (b, _) in zip(mine, without, strict=True)) > 0.1


def test_a_server_of_another_head_is_refused(folders, binaries, tmp_path) -> None:
    tiny_model.write_model(tmp_path, torch.float32, seed=1)
    options = {"pretrained": str(folders[torch.float32]), "device": "cpu"}

    with ServerProcess(binaries, "--model", str(tmp_path)) as other:
        with pytest.raises(logprobd.InvalidArgument, match="use a scorer of the model's head"):
            LogprobdLM(address=other.grpc, **options)


def test_a_coarser_head_is_accepted_if_told(folders, start_server) -> None:
    server = start_server("--model", str(folders[torch.bfloat16]))
    options = {"pretrained": str(folders[torch.float32]), "device": "cpu", "address": server.grpc}

    with pytest.raises(logprobd.InvalidArgument, match="head is bf16 and the model's fp32"):
        LogprobdLM(**options)
    LogprobdLM(**options, allow_rounded_head=True)
    # The body is in fp32, and the head's weights are those of the checkpoint.
    LogprobdLM(**options | {"pretrained": str(folders[torch.bfloat16]), "dtype": "float32"})


def test_a_head_of_another_size_is_refused(folders, start_server, tmp_path) -> None:
    narrow = transformers.LlamaConfig(**SMALL)
    transformers.AutoModelForCausalLM.from_config(narrow).save_pretrained(tmp_path)
    server = start_server("--model", str(tmp_path))

    with pytest.raises(logprobd.InvalidArgument, match="hidden size 64, but the head .* 32"):
        LogprobdLM(str(folders[torch.float32]), address=server.grpc, device="cpu")


def test_a_head_that_is_not_a_plain_matrix_is_refused(folders) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folders[torch.float32])
    model.set_output_embeddings(tiny_model.DoubleHead(model.get_output_embeddings()))

    with pytest.raises(logprobd.InvalidArgument, match="is a DoubleHead, expected a torch.nn.Li"):
        LocalScorer.from_model(model)


def test_an_encoder_decoder_is_refused(folders) -> None:
    with pytest.raises(logprobd.InvalidArgument, match="the backend is seq2seq"):
        LogprobdLocalLM(
            transformers.AutoModelForCausalLM.from_pretrained(folders[torch.float32]),
            tokenizer=str(folders[torch.float32]),
            backend="seq2seq",
        )
