"""A gateway of a small teacher in this process, and requests to it."""

import asyncio
import base64
import gc
import io
import sys
import threading
import time
import types
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import torch
from aiohttp import ClientSession
from logprobd_adapters.gateway import Gateway
from logprobd_adapters.teacher import PromptScores, Teacher

HIDDEN, VOCAB, MAX_MODEL_LEN = 16, 50, 32
POISON = 49


class Backbone:
    """Hidden states that depend on each token. Its calls wait while `release` is not set."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.table = torch.randn(VOCAB, HIDDEN)
        self.shapes: list[tuple[int, ...]] = []
        self.entered = threading.Semaphore(0)
        self.release = threading.Event()
        self.release.set()

    def __call__(self, prompts: list[list[int]]) -> list[torch.Tensor]:
        self.shapes.append((len(prompts), max(map(len, prompts))))
        self.entered.release()
        assert self.release.wait(60)
        if any(POISON in prompt for prompt in prompts):
            raise RuntimeError("poisoned")
        return [self.table[prompt] for prompt in prompts]


class FixedTeacher(Teacher):
    """A teacher without a model, whose scores are zeros. It waits while `release` is not set."""

    def __init__(self, max_model_len: int = MAX_MODEL_LEN) -> None:
        super().__init__(None, types.SimpleNamespace(vocab_size=VOCAB), max_model_len)
        self.release = threading.Event()
        self.release.set()

    def score(self, prompts):
        assert self.release.wait(60)
        return [self._scores_of(prompt) for prompt in prompts]

    def _scores_of(self, prompt) -> PromptScores:
        rows = len(prompt.tokens) - 1 - prompt.start
        ids = np.zeros((rows, 0)) if prompt.candidates is None else prompt.candidates
        return PromptScores(
            np.zeros(rows, np.float32),
            np.ones(rows, np.int64),
            np.zeros((rows, prompt.top_k), np.int64),
            np.zeros((rows, prompt.top_k), np.float32),
            np.zeros(ids.shape, np.float32),
        )


def run(
    teacher: Teacher | None,
    scenario: Callable[[ClientSession, Gateway], Awaitable[None]],
    **options: Any,
) -> None:
    """Runs a scenario against a gateway, which has not loaded its model if there is no teacher.

    The options are those of Gateway.
    """

    async def main() -> None:
        gateway = Gateway("teacher", **options)
        if teacher:
            gateway.start(teacher)
        runner, url = await gateway.listen("127.0.0.1", 0)
        try:
            async with ClientSession(url) as client:
                await scenario(client, gateway)
        finally:
            await runner.cleanup()

    asyncio.run(main())


async def status_of(client: ClientSession, path: str) -> int:
    async with client.get(path) as response:
        return response.status


async def post(client: ClientSession, prompt, **fields) -> tuple[int, dict]:
    body = {"prompt": prompt, "prompt_logprobs": 0, "max_tokens": 1} | fields
    async with client.post("/v1/completions", json=body) as response:
        return response.status, await response.json()


def array_of(result: dict) -> np.ndarray:
    text = result["choices"][0]["prompt_token_id_logprobs"]
    return np.load(io.BytesIO(base64.b64decode(text)))


async def entered(backbone: Backbone) -> None:
    """Waits until the backbone is called."""
    assert await asyncio.to_thread(backbone.entered.acquire, timeout=60)


async def queued(gateway: Gateway, tokens: int) -> None:
    """Waits until so many tokens are in progress."""
    end = time.monotonic() + 60
    while gateway._batcher._tokens != tokens:
        assert time.monotonic() < end, f"{gateway._batcher._tokens} tokens are in progress"
        await asyncio.sleep(0)


if __name__ == "__main__":

    async def serve() -> None:
        gateway = Gateway("teacher")
        gateway.start(FixedTeacher(int(sys.argv[1])))
        gc.collect()
        gc.freeze()  # as the command does
        _, url = await gateway.listen("127.0.0.1", 0)
        print(url, flush=True)
        await asyncio.Event().wait()

    asyncio.run(serve())
