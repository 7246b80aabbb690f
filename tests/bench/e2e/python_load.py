#!/usr/bin/env python3
"""Loads a server from one process through the Python client, with rows in shared memory or on a GPU.

    python_load.py ADDRESS shm|cuda-ipc ROWS SECONDS IN_FLIGHT

The rows are in this memory before the measurement starts, like a trainer's. `logprobctl bench` does the same with
the C++ client. Prints one line of JSON with rows_per_second, between the first and the last response, and the
transport that was used.
"""

import json
import pathlib
import sys
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "client" / "python"))

import logprobd
import numpy as np


def make_rows(client: logprobd.Client, transport: str, rows: int):
    """Returns standard normal bf16 rows in memory that the transport reads, and the arguments of score for them."""
    hidden_size = client.info().hidden_size
    values = np.random.default_rng(3).standard_normal(
        min(rows * hidden_size, 1 << 22), dtype=np.float32
    )
    bits = np.resize((values.view(np.uint32) >> 16).astype(np.uint16), (rows, hidden_size))
    if transport == "shm":
        shared = client.buffer(rows, hidden_size, "bf16")
        shared[:] = bits
        return shared, {"dtype": "bf16"}
    import torch

    return torch.from_numpy(bits.view(np.int16)).cuda().view(torch.bfloat16), {}


def measure(address: str, transport: str, rows: int, seconds: float, in_flight: int) -> dict:
    # Each call sends one request. Messages that only refer to their rows have no size limit.
    client = logprobd.Client(
        address, channels=in_flight, transport=transport, chunk_rows=rows, chunk_bytes=1 << 30
    )
    vocab = client.info().vocab_size
    targets = np.arange(rows, dtype=np.int32) % vocab
    stop = threading.Event()
    ends: list[float] = []
    failures: list[Exception] = []

    def score_until_stopped() -> None:
        try:
            hidden, options = make_rows(client, transport, rows)
            while not stop.is_set():
                client.score(hidden, targets, **options)
                ends.append(time.monotonic())
        except Exception as error:  # any failure must end the wait of the main thread
            failures.append(error)

    threads = [threading.Thread(target=score_until_stopped) for _ in range(in_flight)]
    for thread in threads:
        thread.start()
    # The first calls open mappings and connections and are not counted.
    while len(ends) < 2 * in_flight and not failures:
        time.sleep(0.001)
    begin = len(ends)
    time.sleep(0 if failures else seconds)
    stop.set()
    for thread in threads:
        thread.join()
    if failures:
        raise SystemExit(f"python_load: {type(failures[0]).__name__}: {failures[0]}")
    counted = sorted(ends)[begin - 1 :]
    used = client.transport
    client.close()
    return {
        "rows_per_second": rows * (len(counted) - 1) / (counted[-1] - counted[0]),
        "transport": used,
    }


if __name__ == "__main__":
    address, transport, rows, seconds, in_flight = sys.argv[1:]
    print(json.dumps(measure(address, transport, int(rows), float(seconds), int(in_flight))))
