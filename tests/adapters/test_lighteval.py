"""The model for lighteval, compared with lighteval's own model and with double precision."""

import json
import math
import pathlib
import re
import subprocess
import sys

import lighteval
import lighteval_tasks
import logprobd
import pytest
import tiny_model
import torch
import transformers
from lighteval.models.custom.custom_model import CustomModelConfig
from lighteval.models.transformers.transformers_model import (
    TransformersModel,
    TransformersModelConfig,
)
from lighteval.tasks.requests import Doc
from logprobd_adapters import lighteval as adapter
from logprobd_adapters.lighteval import LogprobdModel, LogprobdModelConfig

# Both sides sum fp32 products, and lighteval's sums are in fp32 as well.
FP32_TOLERANCE = 1e-5  # nats per token
# The kernels' tolerance against double precision, tests/README.md.
BF16_TOLERANCE = 1e-4  # nats per token

LONG = "the old boat lay on the sand in the morning sun . " * 8  # 88 words; the model takes 64
CASES = {
    "one-token continuations": ("What do bees make ?", ["honey", "iron", "bread", "wind", "honey"]),
    "continuations of one to four tokens": (
        "Where do fish live ?",
        ["north", "in air", "in the water", "under a roof and", "in the air"],
    ),
    "a context that is cut": (LONG, ["and honey", "bread", "and bread"]),
    "unknown words": ("What do xyzzy make ?", ["plugh honey"]),
    "a space at the end of the context": ("What do bees make ? ", ["honey and bread", "iron"]),
    "the same tokens as a continuation before": ("What do bees make ? honey", ["and bread"]),
}


def documents() -> list[Doc]:
    return [
        Doc(query=query, choices=choices, gold_index=0, id=str(number), task_name="cases")
        for number, (query, choices) in enumerate(CASES.values())
    ]


def passages() -> list[Doc]:
    lines = (tiny_model.HERE / "passages" / "test.jsonl").read_text().splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    return [
        Doc(query=text, choices=None, gold_index=None, id=str(number), task_name="texts")
        for number, text in enumerate(["honey", *texts, " ".join(texts)])
    ]


def scored_in_double(
    folder: pathlib.Path, context: list[int], continuation: list[int]
) -> torch.Tensor:
    """Returns the logits [continuation, V] in double precision, of the states of this sequence alone."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        states = model.base_model(torch.tensor([(context + continuation)[:-1]])).last_hidden_state[
            0
        ]
        return tiny_model.DoubleHead(model.lm_head)(states[-len(continuation) :])


def logprob_in_double(folder: pathlib.Path, context: list[int], continuation: list[int]) -> float:
    logprobs = scored_in_double(folder, context, continuation).log_softmax(-1)
    return logprobs[range(len(continuation)), continuation].sum().item()


def rolling_in_double(folder: pathlib.Path, text: str) -> tuple[float, int]:
    """Returns the logprob of a text in windows of the model's length, and the number of its tokens."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer.encode(text)
    before = [tokenizer.bos_token_id, *tokens]
    logprob = 0.0
    for begin in range(0, len(tokens), tiny_model.LENGTH_MAX):
        end = min(begin + tiny_model.LENGTH_MAX, len(tokens))
        context = before[max(0, end - tiny_model.LENGTH_MAX) : begin + 1]
        logprob += logprob_in_double(folder, context, tokens[begin:end])
    return logprob, len(tokens)


def stock_model(folder: pathlib.Path, **settings) -> TransformersModel:
    model = TransformersModel(TransformersModelConfig(model_name=str(folder), **settings))
    model._cache = None
    return model


@pytest.fixture
def make_model(kind, start_server):
    """Returns a function that makes the model of this test's scorer for a folder, without a cache of responses."""

    def make(folder: pathlib.Path, **settings) -> LogprobdModel:
        settings = {"model_name": str(folder), "batch_size": 4} | settings
        if kind == "local":
            settings["local"] = True
        else:
            settings["address"] = start_server("--model", str(folder)).grpc
        model = LogprobdModel(LogprobdModelConfig(**settings))
        model._cache = None
        return model

    return make


def count_rows(model: LogprobdModel) -> list[int]:
    """Returns a list that will have the number of rows of each call of the scorer."""
    counts: list[int] = []
    score = model.scorer.score

    def counted(hidden: torch.Tensor, *arguments, **keywords):
        counts.append(len(hidden))
        return score(hidden, *arguments, **keywords)

    model.scorer.score = counted
    return counts


@pytest.mark.parametrize("batch_size", (1, 5, None))
def test_fp32_continuations_are_those_of_lighteval(make_model, folders, batch_size) -> None:
    folder = folders[torch.float32]
    ours = make_model(folder, batch_size=batch_size)
    stock = stock_model(folder, batch_size=batch_size)

    mine, theirs = (model.loglikelihood(documents()) for model in (ours, stock))

    for doc, one, other in zip(documents(), mine, theirs, strict=True):
        for tokens, ours_sum, stock_sum in zip(
            one.output_tokens, one.logprobs, other.logprobs, strict=True
        ):
            assert abs(ours_sum - stock_sum) <= FP32_TOLERANCE * len(tokens)
        assert one.argmax_logits_eq_gold == other.argmax_logits_eq_gold
        assert one.input_tokens == other.input_tokens.tolist()
        # lighteval pads the choices to one length, and cuts their number to it.
        assert one.output_tokens == stock.tok_encode_pair(doc.query, doc.choices, pairwise=True)[1]


def test_bf16_continuations_agree_with_double_precision(make_model, folders) -> None:
    folder = folders[torch.bfloat16]

    # In batches of one, the body computes the same bits as alone.
    responses = make_model(folder, batch_size=1).loglikelihood(documents())

    for response in responses:
        for continuation, logprob in zip(response.output_tokens, response.logprobs, strict=True):
            context = response.input_tokens[-(tiny_model.LENGTH_MAX - len(continuation)) :]
            exact = logprob_in_double(folder, context, continuation)
            assert abs(logprob - exact) <= BF16_TOLERANCE * len(continuation)


def test_continuations_that_the_model_would_generate_are_greedy(make_model, folders) -> None:
    folder = folders[torch.float32]
    ours, stock = make_model(folder), stock_model(folder, batch_size=4)
    context = ours.tok_encode("the sun is")
    best = scored_in_double(folder, context, [0])[0].argmax().item()
    choices = [ours.tokenizer.decode([token]) for token in (best, best - 1)]
    asked = [Doc(query="the sun is", choices=choices, gold_index=0, id="0", task_name="greedy")]

    mine, theirs = (model.loglikelihood(asked)[0] for model in (ours, stock))

    assert mine.argmax_logits_eq_gold == theirs.argmax_logits_eq_gold == [True, False]


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_rolling_log_likelihoods_are_summed_over_windows(make_model, folders, dtype) -> None:
    folder = folders[dtype]
    ours = make_model(folder, batch_size=1)

    responses = ours.loglikelihood_rolling(passages())

    for doc, response in zip(passages(), responses, strict=True):
        exact, num_tokens = rolling_in_double(folder, doc.query)
        (logprob,) = response.logprobs
        assert abs(logprob - exact) <= FP32_TOLERANCE * num_tokens
    assert num_tokens > 3 * tiny_model.LENGTH_MAX


def test_requests_that_share_their_tokens_are_scored_once_without_logits(
    make_model, folders
) -> None:
    ours = make_model(folders[torch.float32])
    counts = count_rows(ours)
    ours.model.lm_head.register_forward_pre_hook(lambda *_: pytest.fail("logits were computed"))

    ours.loglikelihood(documents()[:2])

    # The choices of the first question are one row. Those of the second have 1, 2, 3, 4 and 3 tokens; two of them share
    # all tokens but the last.
    assert sum(counts) == 1 + (1 + 2 + 3 + 4)


# Regression: each batch kept the keys and values of all layers.
def test_the_body_keeps_no_keys_and_values(make_model, folders) -> None:
    model = make_model(folders[torch.float32])
    kept = []
    model.model.base_model.register_forward_hook(
        lambda *call: kept.append(call[-1].past_key_values)
    )

    model.loglikelihood(documents())

    assert kept and set(kept) == {None}


def test_the_connection_is_closed_by_cleanup(folders, start_server) -> None:
    folder = str(folders[torch.float32])
    settings = {"model_name": folder, "address": start_server("--model", folder).grpc}
    model = LogprobdModel(LogprobdModelConfig(**settings))
    scorer = model.scorer
    assert scorer.score(torch.zeros(1, scorer.hidden_size), torch.tensor([1])).logprob < 0

    model.cleanup()

    with pytest.raises(logprobd.Cancelled):
        scorer.score(torch.zeros(1, scorer.hidden_size), torch.tensor([1]))


def test_text_is_generated_as_by_lighteval(make_model, folders) -> None:
    folder = folders[torch.float32]
    asked = [Doc("the sun is", [], 0, id="0", task_name="generate", generation_size=5)]
    asked[0].stop_sequences = ["."]

    texts = [
        model.greedy_until(asked)[0].text
        for model in (make_model(folder), stock_model(folder, batch_size=4))
    ]

    assert texts[0] == texts[1] != [""]


def test_cached_responses_are_not_scored_again(built_operator, folders, tmp_path) -> None:
    folder = tmp_path / "model"
    folder.symlink_to(folders[torch.float32])
    rows, found = [], []
    for _ in range(2):
        model = LogprobdModel(LogprobdModelConfig(model_name=str(folder), local=True))
        counts = count_rows(model)
        found.append([response.logprobs for response in model.loglikelihood(documents())])
        rows.append(sum(counts))

    assert rows[0] > 0 and rows[1] == 0
    assert found[0] == found[1]


def test_processes_with_different_requests_are_an_error(
    built_operator, folders, monkeypatch
) -> None:
    model = LogprobdModel(
        LogprobdModelConfig(model_name=str(folders[torch.float32]), local=True, batch_size=4)
    )
    monkeypatch.setattr(adapter, "gather_object", lambda parts: [*parts, (0, {})])

    with pytest.raises(logprobd.InvalidArgument, match="set PYTHONHASHSEED=0 for all processes"):
        model.loglikelihood_rolling(passages())


def test_settings_are_read_from_the_arguments_of_the_command(
    built_operator, folders, tmp_path
) -> None:
    text = f"model_name={folders[torch.float32]},local=True,batch_size=3"
    file = tmp_path / "model.yaml"
    lines = [line.replace("=", ": ") for line in text.split(",")]
    file.write_text("\n  ".join(["model_parameters:", *lines]))

    models = [
        LogprobdModel(CustomModelConfig(model_name=name, model_definition_file_path=""))
        for name in (text, str(file))
    ]

    assert models[0].config == models[1].config
    assert models[0].config.local and models[0].config.batch_size == 3


def test_a_certificate_and_a_token_are_settings(folders, start_server, security) -> None:
    folder = folders[torch.float32]
    server = start_server("--model", str(folder), *security.server_flags())
    options = {"model_name": folder, "address": server.grpc} | security.client_options()
    text = ",".join(f"{name}={value}" for name, value in options.items())

    # It compares the server's head with the model's.
    LogprobdModel(CustomModelConfig(model_name=text, model_definition_file_path=""))

    del options["token_file"]
    text = ",".join(f"{name}={value}" for name, value in options.items())
    with pytest.raises(logprobd.LogprobdError, match="needs a token"):
        LogprobdModel(CustomModelConfig(model_name=text, model_definition_file_path=""))


def test_a_server_of_another_head_is_refused(folders, start_server, tmp_path) -> None:
    tiny_model.write_model(tmp_path, torch.float32, seed=1)
    address = start_server("--model", str(tmp_path)).grpc
    settings = LogprobdModelConfig(model_name=str(folders[torch.float32]), address=address)

    with pytest.raises(logprobd.InvalidArgument, match="use a scorer of the model's head"):
        LogprobdModel(settings)


# Regression: the search for a size ran 512 sequences of the longest request.
def test_an_automatic_batch_size_runs_no_batch_on_a_cpu(make_model, folders, monkeypatch) -> None:
    model = make_model(folders[torch.float32], batch_size=None)
    monkeypatch.setattr(model, "_states", None)

    assert [model._batch_size(64, requests) for requests in (3, 100)] == [3, 8]


def test_a_coarser_head_is_accepted_if_told(folders, start_server) -> None:
    address = start_server("--model", str(folders[torch.bfloat16])).grpc
    text = f"model_name={folders[torch.float32]},address={address}"

    with pytest.raises(logprobd.InvalidArgument, match="head is bf16 and the model's fp32"):
        LogprobdModel(CustomModelConfig(model_name=text, model_definition_file_path=""))
    text += ",allow_rounded_head=True"
    LogprobdModel(CustomModelConfig(model_name=text, model_definition_file_path=""))


TASKS = ",".join(task.name for task in lighteval_tasks.TASKS_TABLE)


@pytest.fixture
def no_downloads() -> None:
    """Puts an empty file where lighteval would download that of a task that no test uses, when it imports its tasks."""
    folder = pathlib.Path(lighteval.__file__).parent / "tasks" / "tasks"
    (folder / "tinyBenchmarks.pkl").touch()


@pytest.mark.usefixtures("no_downloads")
@pytest.mark.parametrize("processes", (1, 2))
def test_the_command_evaluates_with_a_server(
    environment, start_server, folders, tmp_path, processes
) -> None:
    folder = folders[torch.float32]
    server = start_server("--model", str(folder))
    (tmp_path / "model.py").write_text("from logprobd_adapters.lighteval import LogprobdModel\n")
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2"] if processes == 2 else []
    settings = f"model_name={folder},address={server.grpc},batch_size=4"
    variables = environment | {"ACCELERATE_USE_CPU": "true", "HF_HOME": str(tmp_path / "home")}
    variables["PYTHONHASHSEED"] = "0"

    done = subprocess.run(
        [
            *(sys.executable, *launch, "-m", "lighteval", "custom", settings),
            *(str(tmp_path / "model.py"), TASKS, "--custom-tasks", lighteval_tasks.__file__),
            *("--output-dir", str(tmp_path / "out")),
        ],
        env=variables,
        capture_output=True,
        text=True,
        timeout=150,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    files = list((tmp_path / "out").rglob("results_*.json"))
    assert 1 <= len(files) <= processes
    for file in files:
        results = json.loads(file.read_text())["results"]
        assert results["logprobd_questions|0"]["acc"] == pytest.approx(accuracy(folder))
        perplexity = results["logprobd_passages|0"]["word_perplexity"]
        assert perplexity == pytest.approx(word_perplexity(folder), rel=1e-4)


def accuracy(folder: pathlib.Path) -> float:
    """Returns the share of questions whose right choice has the largest logprob in double precision."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    lines = (tiny_model.HERE / "questions" / "test.jsonl").read_text().splitlines()
    right = 0
    for line in map(json.loads, lines):
        doc = lighteval_tasks.question(line, "")
        logprobs = [
            logprob_in_double(folder, tokenizer.encode(doc.query), tokenizer.encode(choice))
            for choice in doc.choices
        ]
        right += logprobs.index(max(logprobs)) == doc.gold_index
    return right / len(lines)


def word_perplexity(folder: pathlib.Path) -> float:
    """Returns the perplexity of the passages per word in double precision."""
    documents = passages()[1:-1]
    logprob = sum(rolling_in_double(folder, doc.query)[0] for doc in documents)
    words = sum(len(re.split(r"\s+", doc.query)) for doc in documents)
    return math.exp(-logprob / words)
