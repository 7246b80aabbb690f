"""Measures what logprobd-gateway adds to a request, beside the teacher's body and head.

    python tests/bench/gateway_bench.py --out gateway_cpu.json

Serves a model with random weights on the CPU, with its head in the same process, and sends one request after another
over one connection from another process. Times of the body and of Teacher.score are taken inside each request, so what
the gateway adds is a difference within a request: reading the request, its way through the queue, writing the response,
and the client's reading of it. The CPU time is that of the gateway's thread of requests, which other load of the
machine changes less. Needs the adapters' extras gateway and local.
"""

import argparse
import asyncio
import functools
import http.client
import json
import multiprocessing
import pathlib
import threading
import time
from collections.abc import Callable
from typing import Any

import bench_records
import torch
from logprobd_adapters.gateway import Gateway
from logprobd_adapters.teacher import Teacher
from transformers import LlamaConfig, LlamaForCausalLM

# Tokens of the prompt, and most likely tokens; 100 is the default of get_sequence_logprobs of TRL's clients.
CASES = ((128, 1), (512, 8), (512, 100), (2048, 8), (2048, 64), (2048, 100))


def make_model(vocab_size: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=4096,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16).eval()


class Stopwatch:
    """Remembers how long the latest call of a method took."""

    def __init__(self, owner: Any, name: str) -> None:
        self.milliseconds = 0.0
        setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*arguments: Any) -> Any:
            started = time.perf_counter()
            result = function(*arguments)
            self.milliseconds = 1e3 * (time.perf_counter() - started)
            return result

        return timed


def serve(teacher: Teacher) -> tuple[int, int]:
    """Serves a teacher in a thread until the process ends. Returns its port and the clock of its CPU time."""
    ports: list[int] = []
    ready = threading.Event()

    async def run() -> None:
        gateway = Gateway("teacher")
        gateway.start(teacher)
        _, url = await gateway.listen("127.0.0.1", 0)
        ports.append(int(url.rpartition(":")[2]))
        ready.set()
        await asyncio.Event().wait()

    thread = threading.Thread(target=asyncio.run, args=(run(),), daemon=True)
    thread.start()
    ready.wait()
    assert thread.ident
    return ports[0], time.pthread_getcpuclockid(thread.ident)


@functools.cache
def connection_to(port: int) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", port)


def request(port: int, text: str) -> tuple[float, int]:
    """Sends a request from the client's process. Returns its milliseconds and the bytes of the response."""
    started = time.perf_counter()
    connection = connection_to(port)
    connection.request("POST", "/v1/completions", text)
    response = connection.getresponse()
    body = response.read()
    milliseconds = 1e3 * (time.perf_counter() - started)
    assert response.status == 200, body
    return milliseconds, len(body)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=100, help="for each row of the table")
    parser.add_argument("--vocab-size", type=int, default=32_000)
    parser.add_argument("--out", type=pathlib.Path, help="file of records; default: print them")
    parser.add_argument(
        "--commit", help="commit of the records; default: HEAD of git, with -dirty if files differ"
    )
    options = parser.parse_args()
    bench_records.ORIGIN.update(
        machine=bench_records.machine(), commit=options.commit or bench_records.commit()
    )
    teacher = Teacher.from_model(make_model(options.vocab_size))
    body, score = Stopwatch(teacher, "_backbone"), Stopwatch(teacher, "score")
    port, clock = serve(teacher)
    records = []
    with multiprocessing.get_context("spawn").Pool(1) as client:
        for length, top_k in CASES:
            tokens = torch.randint(options.vocab_size, (length,)).tolist()
            fields = {"prompt": tokens, "prompt_logprobs": top_k, "max_tokens": 1}
            text = json.dumps(fields)
            rows = []
            for _ in range(options.requests):
                cpu_started = time.clock_gettime(clock)
                total, size = client.apply(request, (port, text))
                cpu = 1e3 * (time.clock_gettime(clock) - cpu_started)
                head = score.milliseconds - body.milliseconds
                rows.append((body.milliseconds, head, total - score.milliseconds, cpu))
            what = f"{length} tokens, prompt_logprobs {top_k}"
            records.append(bench_records.record(f"{what}: response", size / 1e3, "kB"))
            columns = ("body", "head", "added by the gateway", "CPU time added")
            for column, figures in zip(columns, zip(*rows, strict=True), strict=True):
                name = f"{what}: {column}"
                records.append(bench_records.record_of_rounds(name, "ms", list(figures)))
    bench_records.write(records, options.out)


if __name__ == "__main__":
    main()
