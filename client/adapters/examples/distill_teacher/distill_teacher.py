"""Distils a teacher behind logprobd-gateway, by its most likely tokens and by the exact reverse KL.

    python client/adapters/examples/distill_teacher/distill_teacher.py

Writes a small teacher with random weights, runs a server and a gateway of it on the CPU, and trains
two students on tokens that they sample. One gets the teacher's most likely tokens for each row, as
TRL's trainers do. The other gets the teacher's log-probabilities of all ids, so its loss is the
exact reverse KL divergence. Prints a table of the divergence during both trainings.
"""

import argparse
import base64
import collections
import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TextIO

import logprobd
import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

VOCAB_SIZE = 128
LENGTH = 32
SEQUENCES = 16
TOP_K = 8
LOGIT_STDDEV = 2.0


def make_model(
    seed: int,
    hidden_size: int = 64,
    vocab_size: int = VOCAB_SIZE,
    logit_stddev: float = LOGIT_STDDEV,
) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=2 * hidden_size,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=2 * LENGTH,
            tie_word_embeddings=False,
            bos_token_id=1,
            eos_token_id=None,
        )
    )
    with torch.no_grad():
        model.get_output_embeddings().weight.normal_(std=logit_stddev / hidden_size**0.5)
    return model.eval()


@contextlib.contextmanager
def run_gateway(folder: Path, address: str) -> Iterator[str]:
    """Runs the command logprobd-gateway and yields its URL."""
    command = [sys.executable, "-m", "logprobd_adapters.gateway_command", "--model", str(folder)]
    command += ["--address", address, "--device", "cpu", "--listen", "127.0.0.1:0"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr
        try:
            yield await_ready(process.stderr)
        finally:
            process.terminate()
            process.wait()


def await_ready(log: TextIO) -> str:
    """Returns the URL that a gateway logs when it is ready, and reads the rest of its log, since a
    full pipe would stop it. Raises RuntimeError with the log if it ends before."""
    lines = []
    for line in log:
        lines.append(line)
        if ready := re.search(r"ready: (\S+)$", line):
            threading.Thread(target=collections.deque, args=(log, 0), daemon=True).start()
            return ready[1]
    raise RuntimeError("".join(lines))


class Teacher:
    """Asks a gateway for the teacher's scores of sequences [B, T], a request for each sequence."""

    def __init__(self, url: str) -> None:
        self._url = f"{url}/v1/completions"
        self._threads = ThreadPoolExecutor(SEQUENCES)

    def _choices(self, sequences: Tensor, **fields: Any) -> Iterator[dict[str, Any]]:
        def ask(tokens: list[int]) -> dict[str, Any]:
            body = {"prompt": tokens, "max_tokens": 1} | fields
            with urllib.request.urlopen(self._url, json.dumps(body).encode()) as response:
                choice: dict[str, Any] = json.load(response)["choices"][0]
                return choice

        return self._threads.map(ask, sequences.tolist())

    def top(self, sequences: Tensor) -> tuple[Tensor, Tensor]:
        """Returns ids and log-probabilities [B, T - 1, TOP_K] of the most likely tokens."""
        ids, logprobs = [], []
        for choice in self._choices(sequences, prompt_logprobs=TOP_K):
            for entries in choice["prompt_logprobs"][1:]:
                best = sorted(entries.items(), key=lambda item: item[1]["rank"])[:TOP_K]
                ids.append([int(token) for token, _ in best])
                logprobs.append([entry["logprob"] for _, entry in best])
        shape = (len(sequences), -1, TOP_K)
        return torch.tensor(ids).reshape(shape), torch.tensor(logprobs).reshape(shape)

    def logprobs(self, sequences: Tensor) -> Tensor:
        """Returns log-probabilities [B, T - 1, VOCAB_SIZE] of all ids."""
        arrays = [
            np.load(io.BytesIO(base64.b64decode(choice["prompt_token_id_logprobs"])))
            for choice in self._choices(sequences, prompt_logprob_token_ids=list(range(VOCAB_SIZE)))
        ]
        return torch.from_numpy(np.stack(arrays))


def logprobs_of(model: Any, sequences: Tensor) -> Tensor:
    """Returns the log-probabilities [B, T - 1, VOCAB_SIZE] of a model in this process."""
    logprobs: Tensor = model(sequences).logits[:, :-1].log_softmax(-1)
    return logprobs


def reverse_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """Returns the mean over rows of KL(student || teacher), in nats.

    Args:
        student, teacher: log-probabilities [..., n].
    """
    return (student.exp() * (student - teacher)).sum(-1).mean()


def with_rest(logprobs: Tensor) -> Tensor:
    """Appends the log-probability of all other ids: [..., n + 1]."""
    rest = (-torch.expm1(logprobs.logsumexp(-1, keepdim=True))).clamp_min(1e-9).log()
    return torch.cat([logprobs, rest], -1)


@torch.no_grad()
def sample(student: Any) -> Tensor:
    first = torch.randint(VOCAB_SIZE, (SEQUENCES, 1))
    options = {"max_new_tokens": LENGTH - 1, "do_sample": True, "top_k": 0, "pad_token_id": 0}
    sequences: Tensor = student.generate(first, attention_mask=torch.ones_like(first), **options)
    return sequences


def train(teacher: Teacher, is_exact: bool, steps: int, every: int) -> list[tuple[float, float]]:
    """Trains a student and returns, every `every` steps, its exact reverse KL to the teacher, and
    the one that the most likely tokens show, with the rest as one token."""
    student = make_model(seed=1, hidden_size=48)
    optimizer = torch.optim.AdamW(student.parameters(), lr=4e-3)
    history = []
    for step in range(steps + 1):
        sequences = sample(student)
        logprobs = logprobs_of(student, sequences)
        ids, best = teacher.top(sequences)
        of_best = with_rest(logprobs.gather(-1, ids))
        if step % every == 0:
            exact = reverse_kl(logprobs, teacher.logprobs(sequences)).item()
            history.append((exact, reverse_kl(of_best, with_rest(best)).item()))
        # The arguments in turn make it the forward KL, whose expectation is over the teacher's ids.
        loss = (
            reverse_kl(logprobs, teacher.logprobs(sequences))
            if is_exact
            else reverse_kl(with_rest(best), of_best)
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return history


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    every = max(1, options.steps // 5)
    torch.set_num_threads(1)  # the threads of models this small wait for each other
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        make_model(seed=0).save_pretrained(folder)
        client = stack.enter_context(
            logprobd.serve(folder, device="cpu", flags=["--cpu-threads", "1"])
        )
        teacher = Teacher(stack.enter_context(run_gateway(folder, client.address)))

        sequences = torch.randint(VOCAB_SIZE, (SEQUENCES, LENGTH))
        with torch.no_grad():
            own = logprobs_of(AutoModelForCausalLM.from_pretrained(folder), sequences)
        difference = (teacher.logprobs(sequences) - own).abs().max().item()
        print(f"largest difference from the teacher's own log-softmax: {difference:.1e} nats")

        by_top, by_exact = (train(teacher, exact, options.steps, every) for exact in (False, True))
    print("KL(student || teacher), nats a token, of students trained by\n")
    print(f"| step | top {TOP_K}: exact | as the top {TOP_K} show it | exact reverse KL: exact |")
    print("|---|---|---|---|")
    for index, ((exact, shown), (other, _)) in enumerate(zip(by_top, by_exact, strict=True)):
        print(f"| {index * every} | {exact:.3f} | {shown:.3f} | {other:.3f} |")


if __name__ == "__main__":
    main()
