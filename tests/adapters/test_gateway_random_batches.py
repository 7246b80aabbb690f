"""Random requests, of which some fail, are refused or leave: each of the others gets what it gets alone, whatever its
batch, and the account of the queue agrees with a count of what is in progress.

Every draw is the same in each run. A failing one is printed, with a line that repeats it.
"""

import asyncio
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp import ClientSession
from gateway_scenario import HIDDEN, MAX_MODEL_LEN, POISON, VOCAB, FixedTeacher, queued, run
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from logprobd.errors import LogprobdError, Overloaded
from logprobd_adapters.batcher import Batcher, ScorerError
from logprobd_adapters.teacher import CANDIDATES_PER_TOKEN, Prompt, PromptScores, Teacher
from plain_scorer import PlainScorer
from test_gateway_memory import body_of, send_head

REFUSED = 48  # The scorer refuses rows with this target.
SETTLED_TURNS = 12  # more than any step of the batcher takes
REPEATABLE = {
    "derandomize": True,
    "phases": [Phase.generate, Phase.shrink],  # An explanation would take longer than a test may.
    "deadline": None,
    "print_blob": True,
    "suppress_health_check": [HealthCheck.too_slow],
}


def whole_numbers(seed: int, *shape: int) -> torch.Tensor:
    """Returns numbers whose sums of products are exact in any order, so that scores are equal in all bits."""
    return torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(seed)).float()


class Backbone:
    """Hidden states that depend on each token, and their errors."""

    def __init__(self) -> None:
        self.table = whole_numbers(0, VOCAB, HIDDEN)
        self.calls = 0
        self.lacks_memory = False
        """Whether a batch of more than one prompt fails."""

    def __call__(self, prompts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        self.calls += 1
        if self.lacks_memory and len(prompts) > 1:
            raise MemoryError("the batch is too large")
        if any(POISON in prompt for prompt in prompts):
            raise RuntimeError("poisoned")
        return [self.table[prompt] for prompt in prompts]


class Scorer(PlainScorer):
    """A scorer that refuses some targets. While it has an error, all calls raise that."""

    def __init__(self) -> None:
        super().__init__(whole_numbers(1, VOCAB, HIDDEN))
        self.error: LogprobdError | None = None

    def score(self, hidden, targets, **options):
        if self.error:
            raise self.error
        if REFUSED in targets:
            raise IndexError(f"{REFUSED} is not in the vocabulary")
        return super().score(hidden, targets, **options)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Lets Torch use one thread: products of a few rows take less time than threads that wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


ALONE = Teacher(Backbone(), Scorer(), MAX_MODEL_LEN)
TOKENS = st.lists(st.sampled_from([*range(VOCAB - 2), REFUSED, POISON]), min_size=1, max_size=9)
TEMPERATURES = st.sampled_from([1.0, 0.5, 2, 3.7, 1e-4, 1e4])
IDS = st.integers(0, 2**32).map(np.random.default_rng)  # Single draws of so many ids take long.


@st.composite
def prompts(draw: st.DrawFn) -> Prompt:
    """Draws a prompt that `check` passes."""
    tokens = draw(TOKENS)
    start = draw(st.integers(0, len(tokens) - 1))
    top_k = draw(st.sampled_from([0, 1, 3, VOCAB]))
    if not draw(st.booleans()):
        return Prompt(tokens, top_k, draw(TEMPERATURES), start)
    first = draw(st.none() | st.integers(start, len(tokens) - 1))
    rows, width = len(tokens) - 1 - (start if first is None else first), draw(st.integers(0, 90))
    of_all = draw(st.booleans())
    ids = draw(IDS).integers(-1, VOCAB, (1 if of_all else rows, width))
    candidates = np.broadcast_to(ids, (rows, width)) if of_all else ids
    return Prompt(tokens, top_k, draw(TEMPERATURES), start, candidates, first)


def cost(prompt: Prompt) -> int:
    ids = 0 if prompt.candidates is None else prompt.candidates.size
    return len(prompt.tokens) + ids // CANDIDATES_PER_TOKEN


def batch_cost(prompts: Sequence[Prompt]) -> int:
    """Returns what prompts take of a batch, where they are padded."""
    longest = max(len(prompt.tokens) for prompt in prompts)
    return sum(longest + cost(prompt) - len(prompt.tokens) for prompt in prompts)


def outcome_alone(prompt: Prompt) -> PromptScores | Exception:
    try:
        return ALONE.score([prompt])[0]
    except LogprobdError as error:
        return ScorerError(error)
    except Exception as error:
        return error


def assert_equal(found: Any, expected: Any) -> None:
    """Compares scores in all bits, and errors by type and text."""
    if isinstance(expected, Exception):
        assert (type(found), str(found)) == (type(expected), str(expected))
        return
    for name, values in vars(expected).items():
        array = getattr(found, name)
        assert (array.dtype, array.shape) == (values.dtype, values.shape)
        assert array.tobytes() == values.tobytes(), name


class SteppedLoop(asyncio.SelectorEventLoop):
    """A loop whose time and turns go on when a test says so, and whose executor hands its calls to the test."""

    def __init__(self, call: Callable[..., asyncio.Future[Any]]) -> None:
        self.now, self._call = 0.0, call
        super().__init__()

    def time(self) -> float:
        return self.now

    def run_in_executor(self, executor, function, *arguments):
        return self._call(function, *arguments)

    def turn(self) -> None:
        self.call_soon(self.stop)
        self.run_forever()


@dataclasses.dataclass(eq=False)
class Request:
    """A request, and what it should get."""

    prompts: list[Prompt]
    is_read: asyncio.Event
    """Until it is set, a response is still being sent."""
    task: asyncio.Task[list[PromptScores]] | None = None
    is_admitted: bool = False
    hint: int | None = None
    """The Retry-After of its refusal."""
    taken: int = 0
    """How many of its prompts are or were in a batch."""
    outcomes: list[PromptScores | Exception] = dataclasses.field(default_factory=list)
    leaves: bool = False

    @property
    def cost(self) -> int:
        return sum(map(cost, self.prompts))

    @property
    def failure(self) -> Exception | None:
        return next((each for each in self.outcomes if isinstance(each, Exception)), None)

    @property
    def is_in_progress(self) -> bool:
        return self.is_admitted and not self.task.done()


class Queue:
    """A Batcher, the requests to it, and a model of what it does."""

    def __init__(self, batch_tokens: int, queue_tokens: int) -> None:
        self.loop = SteppedLoop(self._begin_batch)
        self.backbone, self.scorer = Backbone(), Scorer()
        self.teacher = Teacher(self.backbone, self.scorer, MAX_MODEL_LEN, batch_tokens)
        self.queue_tokens = queue_tokens
        self.requests: list[Request] = []
        self.arrived: list[Request] = []
        """Those that were admitted, in the order in which their prompts are scored."""
        self.owners: dict[int, Request] = {}
        """By id of a prompt."""
        self.running: tuple[Callable[[], Any], asyncio.Future[Any]] | None = None
        self.batch: list[Prompt] = []
        """The prompts of the batch that runs, or of the latest one."""
        self.outcomes: list[PromptScores | Exception] = []
        """What these prompts get alone."""
        self.unchecked: list[tuple[list[Prompt], list[Request], list[list[Prompt]]]] = []
        self.error: Overloaded | None = None
        """What all calls of the scorer met in the latest batch."""
        self.eighths_of_latest = self.eighths = 0
        """Eighths of a second for each token: of the latest batch, and of that which the batcher knows. Multiples of
        eighths of a second are exact."""

        async def make() -> Batcher:
            return Batcher(self.teacher, queue_tokens)

        self.batcher = self.loop.run_until_complete(make())

    # What a test does.

    def ask(self, prompts: list[Prompt], is_read: bool) -> None:
        request = Request(prompts, asyncio.Event())
        if is_read:
            request.is_read.set()
        self.owners |= {id(prompt): request for prompt in prompts}
        self.requests.append(request)
        request.task = self.loop.create_task(self._ask(request))

    def leave(self, index: int) -> None:
        """Cancels one of the requests, unless it has its answer."""
        if self.requests:
            request = self.requests[index % len(self.requests)]
            request.leaves |= request.task.cancel()

    def read(self) -> None:
        """Lets all responses be read."""
        for request in self.requests:
            request.is_read.set()

    def finish(self, fault: str, eighths: int) -> None:
        """Ends the batch that runs, after so many eighths of a second for each token of it."""
        if self.running is None:
            return
        (score, future), self.running = self.running, None
        self.error = Overloaded("full", retry_after=7.0) if fault == "overloaded" else None
        self.scorer.error, self.backbone.lacks_memory = self.error, fault == "memory"
        calls = self.backbone.calls
        results = score()
        assert self.backbone.calls - calls == self._calls_needed()
        self.scorer.error, self.backbone.lacks_memory = None, False
        self.eighths_of_latest = eighths
        self.loop.now += sum(map(cost, self.batch)) * eighths / 8
        future.set_result(results)

    def turn(self, count: int) -> None:
        for _ in range(count):
            self.loop.turn()
            while self.unchecked:
                self._check_batch(*self.unchecked.pop())
            assert self.batcher._tokens == self._tokens()

    def end(self) -> None:
        """Finishes what is in progress, and checks what each request got."""
        self.read()
        for _ in range(1 + sum(len(request.prompts) for request in self.requests)):
            self.turn(SETTLED_TURNS)
            self.finish("", 1)
        assert self.running is None and self.batcher._tokens == 0 and not self.batcher._waiting
        for request in self.requests:
            self._check_outcome(request)

    def close(self) -> None:
        tasks = [request.task for request in self.requests]
        for task in tasks:
            task.cancel()

        async def join() -> None:
            await self.batcher.close()
            await asyncio.gather(*tasks, return_exceptions=True)

        self.loop.run_until_complete(join())
        self.loop.close()

    # What the batcher does, and should do.

    async def _ask(self, request: Request) -> list[PromptScores]:
        tokens = self._tokens()
        if tokens >= self.queue_tokens:
            request.hint = min(max(-(-tokens * self.eighths // 8), 1), 60)
        with self.batcher.reserve(request.cost):
            request.is_admitted = True
            self.arrived.append(request)
            scores = await self.batcher.score(request.prompts)
            await request.is_read.wait()
            return scores

    def _tokens(self) -> int:
        return sum(request.cost for request in self.requests if request.is_in_progress)

    def _begin_batch(self, score, prompts: list[Prompt]) -> asyncio.Future[Any]:
        waiting = [each for each in self.arrived if each.is_in_progress and not each.failure]
        self.unchecked.append((prompts, waiting, [each.prompts[each.taken :] for each in waiting]))
        for prompt in prompts:
            self.owners[id(prompt)].taken += 1
        self.batch, self.outcomes = prompts, [outcome_alone(prompt) for prompt in prompts]
        future = self.loop.create_future()
        self.running = (lambda: score(prompts), future)
        future.add_done_callback(self._note_results)  # is called before the batcher sees them
        return future

    def _check_batch(
        self, batch: list[Prompt], requests: list[Request], waiting: list[list[Prompt]]
    ) -> None:
        """Checks that a batch has the prompts that waited longest, and as many of them as fit."""
        are_in_batch = {id(prompt) for prompt in batch}
        expected: list[Prompt] = []
        for request, prompts in zip(requests, waiting, strict=True):
            # One that leaves may be taken off the queue now or a turn later.
            if not request.leaves or any(id(prompt) in are_in_batch for prompt in prompts):
                expected += prompts
        size = len(batch)
        assert [*map(id, batch)] == [*map(id, expected[:size])]
        assert size == 1 or batch_cost(batch) <= self.teacher.batch_tokens
        assert size == len(expected) or batch_cost(expected[: size + 1]) > self.teacher.batch_tokens

    def _note_results(self, _: asyncio.Future[Any]) -> None:
        self.eighths = self.eighths_of_latest
        for prompt, outcome in zip(self.batch, self.outcomes, strict=True):
            if self.error and not isinstance(outcome, RuntimeError):  # which precedes the scorer
                outcome = ScorerError(self.error)
            self.owners[id(prompt)].outcomes.append(outcome)

    def _calls_needed(self) -> int:
        """Returns how often the backbone runs for the batch: once, and then for each prompt alone if one of them may be
        at fault."""
        causes = RuntimeError if self.error else (RuntimeError, ScorerError)
        fails = self.backbone.lacks_memory or any(
            isinstance(each, causes) for each in self.outcomes
        )
        return 1 + len(self.batch) if fails and len(self.batch) > 1 else 1

    def _check_outcome(self, request: Request) -> None:
        assert request.task.done()
        if request.hint is not None:
            error = request.task.exception()
            assert isinstance(error, Overloaded) and error.retry_after == request.hint
        elif request.leaves:
            assert request.task.cancelled()
        elif request.failure:
            assert_equal(request.task.exception(), request.failure)
        else:
            assert len(request.outcomes) == len(request.prompts)
            for found, expected in zip(request.task.result(), request.outcomes, strict=True):
                assert_equal(found, expected)


STEPS = st.one_of(
    st.tuples(st.just("ask"), st.lists(prompts(), min_size=1, max_size=4), st.booleans()),
    st.tuples(st.just("ask"), st.lists(prompts(), min_size=1, max_size=1), st.just(True)),
    st.tuples(st.just("leave"), st.integers(0, 20)),
    st.tuples(st.just("finish"), st.sampled_from(["", "overloaded", "memory"]), st.integers(0, 12)),
    st.tuples(st.just("finish"), st.just(""), st.integers(0, 12)),
    st.tuples(st.just("read")),
)


@settings(max_examples=100, **REPEATABLE)
@given(
    batch_tokens=st.integers(1, 60),
    queue_tokens=st.integers(1, 90),
    steps=st.lists(st.tuples(STEPS, st.integers(0, 3)), min_size=10, max_size=40),
)
def test_each_request_that_does_not_leave_gets_what_its_prompts_get_alone(
    batch_tokens, queue_tokens, steps
) -> None:
    queue = Queue(batch_tokens, queue_tokens)
    try:
        for (name, *arguments), turns in steps:
            getattr(queue, name)(*arguments)
            queue.turn(turns)
        queue.end()
    finally:
        queue.close()


@st.composite
def bodies(draw: st.DrawFn) -> dict[str, Any]:
    """Draws the body of a request, which may be a bad one."""
    prompt = draw(TOKENS | st.lists(TOKENS, min_size=1, max_size=4))
    fields = {
        "prompt_logprobs": st.sampled_from([0, 2, VOCAB, None, VOCAB + 1]),
        "temperature": TEMPERATURES | st.sampled_from([None, 0]),
        "prompt_logprob_start": st.integers(0, 3),
        "model": st.sampled_from([None, "teacher", "another"]),
        "stream": st.booleans(),
        "seed": st.integers(),
    }
    names = draw(st.sets(st.sampled_from(sorted(fields))))
    body = {"prompt": prompt, "prompt_logprobs": 1} | {
        name: draw(fields[name]) for name in sorted(names)
    }
    if draw(st.booleans()):
        rows = len(prompt) - 1 - body.get("prompt_logprob_start", 0)
        ids = st.lists(st.integers(0, VOCAB - 1), max_size=6)
        body["prompt_logprob_token_ids"] = draw(
            ids | st.lists(ids, min_size=max(rows, 0), max_size=max(rows, 0))
        )
    return body


Answer = tuple[int, str | None, dict[str, Any]]


async def answer_to(client: ClientSession, body: dict[str, Any]) -> Answer:
    """Returns the status, the Retry-After and what does not change from one response to another."""
    async with client.post("/v1/completions", json=body) as response:
        result = await response.json()
        assert (response.status == 200) == (result.pop("id", "")[:5] == "cmpl-")
        result.pop("created", None)
        return response.status, response.headers.get("Retry-After"), result


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def send_and_leave(
    client: ClientSession, body: dict[str, Any], after: int, part: int
) -> None:
    """Sends a request, or a part of it, and closes the connection after some turns of the loop."""
    data = body_of(body)
    _, writer = await send_head(client, len(data))
    writer.write(data[: len(data) * part // 4])
    await turns(after)
    writer.transport.abort()


LEAVING = st.tuples(bodies(), st.integers(0, 30), st.integers(0, 4))


@settings(max_examples=30, **REPEATABLE)
@given(
    batch_tokens=st.integers(1, 60),
    asked=st.lists(bodies(), min_size=1, max_size=8),
    leaving=st.lists(LEAVING, max_size=4),
    held_turns=st.integers(0, 60),
)
def test_requests_at_once_get_the_answers_that_they_get_one_at_a_time(
    batch_tokens, asked, leaving, held_turns
) -> None:
    gate = threading.Event()

    def backbone(prompts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        assert gate.wait(60)
        return Backbone()(prompts)

    async def scenario(client, gateway) -> None:
        gate.set()
        expected = [await answer_to(client, body) for body in asked]
        gate.clear()
        leavers = [asyncio.ensure_future(send_and_leave(client, *each)) for each in leaving]
        requests = [asyncio.ensure_future(answer_to(client, body)) for body in asked]
        await turns(held_turns)
        gate.set()

        assert await asyncio.wait_for(asyncio.gather(*requests), 60) == expected

        await asyncio.gather(*leavers)
        await queued(gateway, 0)
        assert not gateway._batcher._waiting

    run(Teacher(backbone, Scorer(), MAX_MODEL_LEN, batch_tokens), scenario)


def plain(prompt: list[Any], **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt, "prompt_logprobs": 0} | fields


LIMITS = {
    "bytes of a body": (200, body_of(plain([1]), 1 << 20), 413, body_of(plain([1]), (1 << 20) + 1)),
    "tokens of a prompt": (200, plain([1] * 32), 400, plain([1] * 33)),
    "tokens of a request": (200, plain([[1] * 25] * 4), 400, plain([[1] * 25] * 4 + [[1]])),
    "prompts": (200, plain([[1]] * 100), 400, plain([[1]] * 101)),
    "an id": (200, plain([49]), 400, plain([50])),
    "the lowest id": (200, plain([0]), 400, plain([-1])),
    "listed tokens": (200, plain([1], prompt_logprobs=50), 400, plain([1], prompt_logprobs=51)),
    "the first row": (
        *(200, plain([1, 2], prompt_logprob_start=1)),
        *(400, plain([1, 2], prompt_logprob_start=2)),
    ),
    "the lowest temperature": (
        *(200, plain([1], temperature=1e-4)),
        *(400, plain([1], temperature=np.nextafter(1e-4, 0))),
    ),
    "the highest temperature": (
        *(200, plain([1], temperature=1e4)),
        *(400, plain([1], temperature=np.nextafter(1e4, np.inf))),
    ),
    "tokens to generate": (200, plain([1], max_tokens=1), 400, plain([1], max_tokens=2)),
}


@pytest.mark.parametrize(("status", "body", "refusal", "larger"), LIMITS.values(), ids=LIMITS)
def test_a_request_at_a_limit_is_answered_and_one_beyond_it_is_refused(
    status, body, refusal, larger
) -> None:
    async def scenario(client, gateway) -> None:
        for expected, each in ((status, body), (refusal, larger), (status, body)):
            data = each if isinstance(each, bytes) else body_of(each)
            async with client.post("/v1/completions", data=data) as response:
                assert response.status == expected
        await queued(gateway, 0)

    run(FixedTeacher(), scenario, queue_tokens=100, body_mib_max=1)


@pytest.mark.parametrize(("tokens", "status"), [(99, 200), (100, 429)])
def test_a_queue_takes_a_request_until_it_has_its_tokens(tokens, status) -> None:
    teacher = FixedTeacher(100)

    async def scenario(client, gateway) -> None:
        teacher.release.clear()
        first = asyncio.ensure_future(answer_to(client, plain([1] * tokens)))
        await queued(gateway, tokens)
        second = asyncio.ensure_future(answer_to(client, plain([1])))
        if status == 200:
            await queued(gateway, tokens + 1)
        else:
            assert (await second)[:2] == (status, "1")
        teacher.release.set()

        assert (await first)[0] == 200 and (await second)[0] == status

    run(teacher, scenario, queue_tokens=100)


@pytest.mark.parametrize(("size", "tokens"), [(1, 1), (1024, 1), (1025, 2), (10_240, 10)])
def test_a_body_counts_a_token_for_each_kibibyte_that_it_begins(size, tokens) -> None:
    async def scenario(client, gateway) -> None:
        _, writer = await send_head(client, size)
        await queued(gateway, tokens)
        writer.close()

    run(FixedTeacher(), scenario)
