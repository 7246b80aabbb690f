"""Batches of the prompts of concurrent requests, and the account that bounds their memory."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
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


@dataclasses.dataclass(eq=False)
class _Request:
    """Prompts of a request, and their scores so far. It has one future, since one for each prompt
    would hold up the event loop for seconds when there are many."""

    prompts: Sequence[Prompt]
    done: asyncio.Future[None]
    taken: int = 0
    """How many prompts have left the queue."""
    scores: list[PromptScores] = dataclasses.field(default_factory=list)

    def add(self, results: Sequence[PromptScores | Exception]) -> None:
        """Takes the results of the next prompts. The first failure ends the request."""
        if self.done.done():
            return
        for result in results:
            if isinstance(result, Exception):
                self.done.set_exception(result)
                return
            self.scores.append(result)
        if len(self.scores) == len(self.prompts):
            self.done.set_result(None)


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
        self._waiting: list[_Request] = []
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
        request = _Request(prompts, asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        self._wake.set()
        try:
            await request.done
            return request.scores
        finally:
            self._drop(request)

    def _drop(self, request: _Request) -> None:
        if request in self._waiting:
            self._waiting.remove(request)

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while batch := self._take():
                await self._run_batch(batch)

    async def _run_batch(self, batch: list[tuple[_Request, slice]]) -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        prompts = [prompt for request, part in batch for prompt in request.prompts[part]]
        results = await loop.run_in_executor(self._thread, self._score, prompts)
        self._seconds_per_token = (loop.time() - started) / cost_of(prompts)
        begin = 0
        for request, part in batch:
            end = begin + part.stop - part.start
            request.add(results[begin:end])
            begin = end
            if request.done.done():
                self._drop(request)

    def _take(self) -> list[tuple[_Request, slice]]:
        """Takes the next batch off the queue, as the parts of requests that are in it. It is empty
        if nothing waits."""
        batch = []
        count = self._teacher.batch_size(self._prompts())
        while count:
            request = self._waiting[0]
            part = slice(request.taken, min(request.taken + count, len(request.prompts)))
            batch.append((request, part))
            request.taken = part.stop
            count -= part.stop - part.start
            if request.taken == len(request.prompts):
                self._drop(request)
        return batch

    def _prompts(self) -> Iterator[Prompt]:
        """Yields the prompts that wait."""
        for request in self._waiting:
            for index in range(request.taken, len(request.prompts)):
                yield request.prompts[index]

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
