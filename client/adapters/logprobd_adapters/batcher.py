"""Batches of the prompts of concurrent requests, and the account that bounds their memory."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from logprobd.errors import InvalidArgument, LogprobdError, Overloaded

from logprobd_adapters.teacher import Prompt, PromptScores, Teacher

QUEUE_TOKENS = 262_144
"""Default of Batcher's queue_tokens. A token stands for at most 2 KiB of memory beside the batch
that runs: its scores with TOP_K_MAX most likely tokens take 1.6 kB, CANDIDATES_PER_TOKEN ids with
their scores 1 KiB, and the objects of a prompt of one token 1.3 kB."""

BODY_BYTES_PER_TOKEN = 1024
"""Bytes of a request's body that count as a token. A body may be in memory twice while it grows."""

_RETRY_SECONDS_MAX = 60


class ScorerError(Exception):
    """The scorer failed on prompts that the teacher had checked, so the request is not to blame.

    Args:
        error: the scorer's error.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class Batcher:
    """Scores prompts of concurrent requests together, in the order in which they came.

    A batch leaves as soon as the one before it is done. Use it from the event loop.

    Args:
        teacher: scores batches in a thread of the batcher.
        queue_tokens: while so many tokens are reserved, no more are. Also tokens_max, if that is
            not max_model_len.
    """

    def __init__(self, teacher: Teacher, queue_tokens: int) -> None:
        self._teacher = teacher
        self._queue_tokens = queue_tokens
        self._tokens = 0
        self._seconds_per_token = 0.0
        self._waiting: dict[asyncio.Future[PromptScores], Prompt] = {}
        self._wake = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "score")
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._thread.shutdown()

    @property
    def tokens_max(self) -> int:
        """Most tokens of a request, without ids to score. Any thread may ask for it."""
        return max(self._queue_tokens, self._teacher.max_model_len)

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Raises InvalidArgument if the prompts of a request cannot be scored. Any thread may call
        it."""
        for prompt in prompts:
            self._teacher.check(prompt)

    @contextlib.contextmanager
    def reserve(self, tokens: int) -> Iterator[None]:
        """Counts tokens of a request, those of `cost_of` or of its body, until the context ends.

        Raises Overloaded if queue_tokens are counted already, so that the account exceeds that by
        less than one request.
        """
        if self._tokens >= self._queue_tokens:
            seconds = math.ceil(self._tokens * self._seconds_per_token)
            raise Overloaded(
                f"{self._tokens} tokens are in progress, of at most {self._queue_tokens}, with ids "
                "to score, bodies and responses that are not read yet: send the request again "
                "later",
                retry_after=min(max(seconds, 1), _RETRY_SECONDS_MAX),
            )
        self._tokens += tokens
        try:
            yield
        finally:
            self._tokens -= tokens

    async def score(self, prompts: Sequence[Prompt]) -> list[PromptScores]:
        """Scores the prompts of a request that `check` has passed, and whose cost is reserved.
        Cancelling it takes those that wait off the queue.

        Raises ScorerError, and what the backbone raises.
        """
        futures = [self._submit(prompt) for prompt in prompts]
        self._wake.set()
        try:
            return await asyncio.gather(*futures)
        finally:
            for future in futures:
                future.cancel()

    def _submit(self, prompt: Prompt) -> asyncio.Future[PromptScores]:
        future: asyncio.Future[PromptScores] = asyncio.get_running_loop().create_future()
        self._waiting[future] = prompt
        future.add_done_callback(lambda done: self._waiting.pop(done, None))
        return future

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._wake.wait()
            self._wake.clear()
            while batch := self._take():
                started = loop.time()
                prompts = list(batch.values())
                results = await loop.run_in_executor(self._thread, self._score, prompts)
                self._seconds_per_token = (loop.time() - started) / cost_of(prompts)
                for future, result in zip(batch, results, strict=True):
                    if future.done():
                        continue
                    if isinstance(result, Exception):
                        future.set_exception(result)
                    else:
                        future.set_result(result)

    def _take(self) -> dict[asyncio.Future[PromptScores], Prompt]:
        """Takes the next batch off the queue; it is empty if nothing waits."""
        count = self._teacher.batch_size(self._waiting.values())
        return {
            future: self._waiting.pop(future)
            for future in list(itertools.islice(self._waiting, count))
        }

    def _score(self, prompts: Sequence[Prompt]) -> list[PromptScores | Exception]:
        """Scores a batch. A prompt that fails, for lack of memory perhaps, fails alone."""
        try:
            return list(self._teacher.score(prompts))
        except Exception as error:
            failure = error
        is_scorers = isinstance(failure, LogprobdError)
        fails_whole_batch = is_scorers and not isinstance(failure, InvalidArgument)
        if fails_whole_batch or len(prompts) == 1:
            return [ScorerError(failure) if is_scorers else failure] * len(prompts)
        failure = failure.with_traceback(None)  # which holds the tensors of the batch
        return list(itertools.chain.from_iterable(self._score([prompt]) for prompt in prompts))


def cost_of(prompts: Sequence[Prompt]) -> int:
    """Returns the tokens to reserve for prompts, from their scores to the end of the response. Ids
    to score count as in a batch (Prompt.candidates_cost)."""
    return sum(len(prompt.tokens) + prompt.candidates_cost for prompt in prompts)
