"""TRL's own clients and a trainer, unmodified, against the command logprobd-gateway and a server.

TRL's VLLMClient only asks whether the package vllm is installed, which it is not here: that check is replaced.
"""

import asyncio
import logging
import pathlib
import threading
from unittest import mock

import accelerate
import datasets
import distill_teacher
import numpy as np
import pytest
import tiny_model
import torch
import transformers
import trl.generation.vllm_client
from aiohttp import ClientSession
from gateway_process import GatewayProcess
from logprobd_adapters import LocalScorer
from logprobd_adapters.gateway import Gateway
from logprobd_adapters.teacher import Teacher
from server_process import ServerProcess
from trl.experimental.async_distillation import async_rollout_worker, vllm_client
from trl.experimental.iw_opd import IWOPDConfig, IWOPDTrainer
from trl.experimental.server_distillation import (
    ServerDistillationConfig,
    ServerDistillationTrainer,
)

TOLERANCE = 1e-5  # nats
VOCAB = 2048
# Prompts and completions of several lengths.
SEQUENCES = [
    np.random.default_rng(length).integers(0, VOCAB, length).tolist() for length in (64, 7, 30, 41)
]
PROMPT_LENGTHS = [16, 5, 29, 1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("teacher")
    # With the body's usual initial weights, the rounding of another batch is far below TOLERANCE.
    distill_teacher.make_model(seed=0, vocab_size=VOCAB, logit_stddev=3.0).save_pretrained(folder)
    tiny_model.write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def model(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.fixture(scope="module")
def gateway(folder, binaries, environment):
    with ServerProcess(binaries, "--model", str(folder)) as server:
        options = ("--model", str(folder), "--address", server.grpc)
        with GatewayProcess(environment, *options) as process:
            yield process


@pytest.fixture(autouse=True)
def accelerate_state() -> None:
    accelerate.PartialState(cpu=True)  # TRL's logging needs it


@pytest.fixture
def with_vllm():
    with mock.patch.object(trl.generation.vllm_client, "is_vllm_available", return_value=True):
        yield


@pytest.fixture
def client(gateway, with_vllm):
    return trl.generation.vllm_client.VLLMClient(base_url=gateway.url)


class ExactClient:
    """Answers as TRL's client of a server that scores by the model's own fp32 log-softmax."""

    def __init__(self, model) -> None:
        self.model = model

    @torch.no_grad()
    def get_sequence_logprobs(self, sequences, prompt_lengths, top_logprobs=100, temperature=1.0):
        result = {}
        for tokens, begin in zip(sequences, prompt_lengths, strict=True):
            logits = self.model(torch.tensor([tokens])).logits[0, begin - 1 : -1]
            logprobs = (logits.float() / temperature).log_softmax(-1)
            best = logprobs.topk(top_logprobs)
            actual = torch.tensor(tokens[begin:], dtype=torch.int64)[:, None]
            for name, values in (
                ("logprobs", best.values),
                ("logprob_token_ids", best.indices),
                ("actual_logprobs", logprobs.gather(1, actual)),
                ("actual_token_ids", actual),
            ):
                result.setdefault(name, []).append(values.tolist())
        return result


def assert_equal_scores(result: dict, expected: dict) -> None:
    assert result.keys() == expected.keys()
    for name, sequences in expected.items():
        for given, wanted in zip(result[name], sequences, strict=True):
            tolerance = TOLERANCE if name.endswith("logprobs") else 0
            np.testing.assert_allclose(given, wanted, atol=tolerance, rtol=0, err_msg=name)


@pytest.mark.parametrize(("top_logprobs", "temperature"), [(1, 1.0), (8, 0.7), (100, 2.0)])
def test_the_client_gets_the_models_own_logprobs(client, model, top_logprobs, temperature) -> None:
    arguments = (SEQUENCES, PROMPT_LENGTHS, top_logprobs, temperature)

    result = client.get_sequence_logprobs(*arguments)
    in_requests = client.get_sequence_logprobs(*arguments, chunk_size=1)

    expected = ExactClient(model).get_sequence_logprobs(*arguments)
    assert_equal_scores(result, expected)
    assert_equal_scores(in_requests, expected)


def test_a_teacher_in_process_takes_the_clients_place(client, model, built_operator) -> None:
    teacher = Teacher.from_model(model)

    result = teacher.get_sequence_logprobs(SEQUENCES, PROMPT_LENGTHS, 5, 0.7)

    assert_equal_scores(result, client.get_sequence_logprobs(SEQUENCES, PROMPT_LENGTHS, 5, 0.7))


def test_ranks_are_those_of_the_whole_vocabulary(client, model) -> None:
    tokens = SEQUENCES[0]
    payload = {"model": client.model, "prompt": tokens, "max_tokens": 1, "prompt_logprobs": 2}

    response = client._post(f"{client.base_url}/v1/completions", json=payload)

    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0, :-1]
    rows = response["choices"][0]["prompt_logprobs"][1:]
    for row, token, entries in zip(logits, tokens[1:], rows, strict=True):
        assert entries[str(token)]["rank"] == 1 + int((row > row[token]).sum())
        best = sorted(entries, key=lambda text: entries[text]["rank"])[:2]
        assert [int(text) for text in best] == row.topk(2).indices.tolist()


def test_the_client_reports_why_a_prompt_is_refused(client) -> None:
    with pytest.raises(Exception, match=r"400.*65 tokens, expected 1 to max_model_len, 64"):
        client.get_sequence_logprobs([[1] * 65], [3], top_logprobs=1)


def test_the_client_sends_a_request_again_after_429(model, with_vllm, built_operator) -> None:
    backbone_entered, release, refused = threading.Event(), threading.Event(), threading.Event()

    def backbone(prompts: list[list[int]]) -> list[torch.Tensor]:
        backbone_entered.set()
        assert release.wait(60)
        return list(model.base_model(torch.tensor(prompts)).last_hidden_state.detach())

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if " 429, " in record.getMessage():
                refused.set()

    async def main() -> list[dict]:
        gateway = Gateway("teacher", queue_tokens=1)
        gateway.start(Teacher(backbone, LocalScorer.from_model(model), max_model_len=64))
        runner, url = await gateway.listen("127.0.0.1", 0)
        make = trl.generation.vllm_client.VLLMClient
        client = await asyncio.to_thread(make, base_url=url)

        def score(index: int) -> dict:
            return client.get_sequence_logprobs([SEQUENCES[index]], [3], top_logprobs=2)

        first = asyncio.create_task(asyncio.to_thread(score, 0))
        await asyncio.to_thread(backbone_entered.wait, 60)
        second = asyncio.create_task(asyncio.to_thread(score, 1))
        await asyncio.to_thread(refused.wait, 60)
        release.set()
        results = await asyncio.gather(first, second)
        await runner.cleanup()
        return results

    log, handler = logging.getLogger("logprobd-gateway"), Handler()
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    try:
        results = asyncio.run(main())
    finally:
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)

    assert refused.is_set()
    for result, tokens in zip(results, SEQUENCES, strict=False):
        expected = ExactClient(model).get_sequence_logprobs([tokens], [3], 2)
        assert_equal_scores(result, expected)


def test_the_rollout_loop_of_asynchronous_distillation_is_served(gateway, model) -> None:
    prompt, completion = SEQUENCES[3][:9], SEQUENCES[3][9:]

    def make_loop() -> async_rollout_worker._AsyncRolloutLoop:
        names = ("rollout_buffer", "model_version_value", "heartbeat_value", "failed_event")
        queues = (*names, "exception_info_queue", "metrics_queue", "processing_class")
        return async_rollout_worker._AsyncRolloutLoop(
            model_name="student",
            dataset=[],
            eos_token_ids=[2],
            teacher_server_urls={"default": gateway.url},
            teacher_top_k=8,
            teacher_temperature=0.7,
            **dict.fromkeys(queues),
        )

    async def main() -> tuple[list[list[int]], list[list[float]]]:
        loop = make_loop()
        async with ClientSession() as loop.session:
            await loop._resolve_teacher_model_names()
            name = loop.teacher_model_names["default"]
            return await loop._score_with_teacher(prompt, completion, gateway.url, name)

    ids, logprobs = asyncio.run(main())

    expected = ExactClient(model).get_sequence_logprobs([SEQUENCES[3]], [9], 8, 0.7)
    for row, token in enumerate(completion):
        wanted = dict(
            zip(expected["logprob_token_ids"][0][row], expected["logprobs"][0][row], strict=True)
        )
        wanted |= {token: expected["actual_logprobs"][0][row][0]}
        assert ids[row] == list(wanted)
        np.testing.assert_allclose(logprobs[row], list(wanted.values()), atol=TOLERANCE, rtol=0)


def test_the_asynchronous_client_finds_the_gateway_ready(gateway) -> None:
    client = vllm_client.VLLMClient(gateway.url)

    client.wait_for_server_ready()

    assert client.get_max_model_len() == 64


def loss_of_step(trainer: type, config: type, folder, output, client=None, **options):
    """Returns the loss and the norm of the gradient of a step, with the trainer's client or `client`."""
    torch.manual_seed(5)
    student = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        student.lm_head.weight.add_(0.05 * torch.randn_like(student.lm_head.weight))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    words = ["bacon", "coda dune", "fig", "gear"]
    messages = [
        [{"role": "user", "content": word}, {"role": "assistant", "content": "hello iris"}]
        for word in words
    ]
    made = trainer(
        model=student,
        args=config(
            output_dir=str(output),
            temperature=0.7,
            max_completion_length=12,
            max_steps=1,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=1,
            logging_steps=1,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            **options,
        ),
        train_dataset=datasets.Dataset.from_dict({"prompt": words, "messages": messages}),
        processing_class=tokenizer,
    )
    if client:
        made.teacher_client = client
    made.train()
    log = made.state.log_history[0]
    return log["loss"], log["grad_norm"]


TRAINERS = [
    (ServerDistillationTrainer, ServerDistillationConfig, {"beta": 0.0, "loss_top_k": 8}),
    (ServerDistillationTrainer, ServerDistillationConfig, {"beta": 0.5, "loss_top_k": 1}),
    (ServerDistillationTrainer, ServerDistillationConfig, {"beta": 1.0, "loss_top_k": 1}),
    (IWOPDTrainer, IWOPDConfig, {"use_teacher_server": True, "distillation_objective": "iw_opd"}),
]


@pytest.mark.parametrize(("trainer", "config", "options"), TRAINERS)
def test_a_step_of_a_trainer_has_the_loss_of_the_exact_teacher(
    gateway, folder, model, with_vllm, tmp_path, trainer, config, options
) -> None:
    options = {"teacher_model_server_url": gateway.url} | options

    served = loss_of_step(trainer, config, folder, tmp_path, **options)

    exact = loss_of_step(trainer, config, folder, tmp_path, ExactClient(model), **options)
    assert served == pytest.approx(exact, rel=1e-4)
    assert served[1] > 0
