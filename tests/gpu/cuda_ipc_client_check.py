#!/usr/bin/env python3
"""Checks on a machine with a GPU that scores of CUDA tensors have the same bits with every transport.

    python3 tests/gpu/cuda_ipc_client_check.py SERVER_BINARY [--gpus 0] [--output FILE]

Starts a server with a small random head and scores torch tensors through TCP, shared memory and CUDA
IPC. The tensors come from torch's default allocator and from expandable segments, from streams that
are still computing, from memory that is freed and allocated again, and from a second GPU if there is
one. Then pushes a new head from the GPU. Prints a table and exits with 1 if a line is wrong. Needs
torch with CUDA, grpcio and ml_dtypes.
"""

import argparse
import hashlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "client" / "python"), str(ROOT / "tests" / "support" / "python")]

VOCAB, HIDDEN, ROWS = 32_003, 4096, 2048
EXPANDABLE = "expandable_segments:True"


def serve(binary: pathlib.Path, folder: pathlib.Path, gpus: str):
    """Starts a server with a random head and waits until it is ready."""
    from model_folder import ModelFolder
    from server_process import ServerProcess

    model = folder / "model"
    model.mkdir()
    ModelFolder.write(model, vocab=VOCAB, hidden=HIDDEN)
    options = ["--model", str(model), "--local", str(folder / "logprobd.sock"), "--cuda-ipc"]
    options += ["--admin", f"unix:{folder}/admin.sock"]
    options += ["--gpus", gpus]
    process = ServerProcess(binary.parent, *options, device="cuda")
    process.command[0] = str(binary)
    return process.start()


class Table:
    """Collects lines of (allocator, case, transport, verdict)."""

    def __init__(self, allocator: str) -> None:
        self.allocator = allocator
        self.lines: list[dict[str, str]] = []

    def add(self, case: str, got: str, expected: str, same: bool, note: str = "") -> None:
        right = same and got == expected
        verdict = (
            "ok" if right else f"WRONG: expected {expected}, bits {'same' if same else 'differ'}"
        )
        self.lines.append(
            {
                "allocator": self.allocator,
                "case": case,
                "transport": got,
                "verdict": verdict,
                "note": note,
            }
        )


def check(address: str, admin: str) -> list[dict[str, str]]:
    """Runs all cases with the allocator of this process."""
    import torch
    from logprobd import Client

    is_expandable = os.environ.get("PYTORCH_CUDA_ALLOC_CONF") == EXPANDABLE
    expected = "shm" if is_expandable else "cuda_ipc"
    table = Table("expandable" if is_expandable else "default")
    torch.manual_seed(1)
    targets = torch.randint(0, VOCAB, (ROWS,))
    tcp = Client(address, transport="tcp")
    client = Client(address)

    def same(result, hidden, ids=targets, **options) -> bool:
        by_tcp = tcp.score(hidden, ids, **options)
        return torch.equal(result.logprob.cpu(), by_tcp.logprob.cpu()) and torch.equal(
            result.entropy.cpu(), by_tcp.entropy.cpu()
        )

    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        hidden = torch.randn(ROWS, HIDDEN, device="cuda").to(dtype)
        result = client.score(hidden, targets)
        why = client.transport_reason
        table.add(f"rows of {dtype}", result.transport, expected, same(result, hidden), why)
    hidden = torch.randn(ROWS, HIDDEN, device="cuda", dtype=torch.bfloat16)
    shm = Client(address, transport="shm").score(hidden, targets)
    table.add("shared memory, forced", shm.transport, "shm", same(shm, hidden))
    host = client.score(hidden.cpu(), targets)
    table.add("the same rows on the host", host.transport, "shm", same(host, hidden))

    view = torch.randn(8, ROWS // 4, HIDDEN, device="cuda").bfloat16()[:, : ROWS // 8]
    result = client.score(view, targets.view(8, -1))
    table.add("a view", result.transport, expected, same(result, view, targets.view(8, -1)))
    masked = targets.clone()
    masked[::3] = -100
    result = client.score(hidden, masked)
    table.add("ignored rows", result.transport, expected, same(result, hidden, masked))
    result = client.score(hidden[1:2], targets[1:2])
    alone = "cuda_ipc" if expected == "cuda_ipc" else "tcp"  # a small request uses TCP
    table.add("one row", result.transport, alone, same(result, hidden[1:2], targets[1:2]))
    results = list(client.score_stream([(hidden, targets)] * 4))
    is_same = all(same(result, hidden) for result in results)
    table.add("a stream", results[-1].transport, expected, is_same)

    streams(client, tcp, table, expected)
    freed(client, tcp, table, expected)
    if torch.cuda.device_count() > 1:
        with torch.cuda.device(1):
            there = hidden.to("cuda:1")
            result = client.score(there, targets)
            got = result.transport
            # Rows of a GPU that the server's GPU cannot reach go through the host; both are correct.
            okay = got if got in (expected, "shm") else expected
            table.add("a second GPU", got, okay, same(result, hidden), client.transport_reason)
    pushed(address, admin, table)
    return table.lines


def pushed(address: str, admin: str, table: Table) -> None:
    """Pushes a random head in two ranges of rows, and compares its sha256 and its scores."""
    import torch
    from logprobd import Client, WeightsClient

    weight = (torch.randn(VOCAB, HIDDEN, device="cuda") / HIDDEN**0.5).bfloat16()
    hidden = torch.randn(16, HIDDEN, device="cuda", dtype=torch.bfloat16)
    targets = torch.randint(0, VOCAB, (16,))
    digest = hashlib.sha256(weight.cpu().view(torch.uint8).numpy().tobytes()).hexdigest()
    with WeightsClient(admin, scoring_address=address) as weights:
        version = weights.list()[0].highest_version + 1
        weights.push(weight[:9_000], version=version, vocab_rows=VOCAB)
        weights.push(weight[9_000:], version=version, row_begin=9_000, vocab_rows=VOCAB)
        staged = weights.list()[0].staged
        table.add("a pushed head's sha256", "", "", staged is not None and staged.sha256 == digest)
        weights.commit(version=version)
    result = Client(address).score(hidden, targets)
    logits = hidden.double() @ weight.double().T
    exact = torch.log_softmax(logits, -1)[torch.arange(16), targets.cuda()]
    error = (result.logprob.double().cuda() - exact).abs().max().item()
    table.add("a pushed head's scores", "", "", error < 1e-3, f"errors up to {error:.1e} nats")


def streams(client, tcp, table: Table, expected: str) -> None:
    """Scores rows that four streams are still computing, each from its own thread."""
    import torch

    targets = torch.randint(0, VOCAB, (ROWS,))
    weights = torch.randn(HIDDEN, HIDDEN, device="cuda", dtype=torch.bfloat16) / HIDDEN**0.5
    torch.cuda.synchronize()
    given, results = [None] * 4, [None] * 4

    def work(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            states = torch.full((ROWS, HIDDEN), 0.01 * (number + 1), device="cuda")
            states = states.bfloat16()
            for _ in range(200):  # enqueues work that takes tens of milliseconds
                states = torch.tanh(states @ weights)
            given[number] = states
            results[number] = client.score(states, targets)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    for number, (states, result) in enumerate(zip(given, results, strict=True)):
        is_same = torch.equal(result.logprob, tcp.score(states, targets).logprob)
        table.add(f"stream {number}, still computing", result.transport, expected, is_same)


def freed(client, tcp, table: Table, expected: str) -> None:
    """Scores tensors whose memory is freed, returned to CUDA and allocated again."""
    import torch

    targets = torch.randint(0, VOCAB, (ROWS,))
    right, transports = True, set()
    for turn in range(20):
        hidden = torch.randn(ROWS, HIDDEN, device="cuda", dtype=torch.bfloat16)
        result = client.score(hidden, targets)
        right = right and torch.equal(result.logprob, tcp.score(hidden, targets).logprob)
        transports.add(result.transport)
        del hidden
        if turn % 3 == 0:
            torch.cuda.empty_cache()  # the next tensor may get the same address
    table.add("20 tensors, freed between", ",".join(sorted(transports)), expected, right)


def speed(address: str) -> list[str]:
    """Measures rows/s and GB/s of hidden states with each transport on this machine."""
    import torch
    from logprobd import Client, LogprobdError

    hidden = torch.randn(16 * ROWS, HIDDEN, device="cuda", dtype=torch.bfloat16)
    targets = torch.randint(0, VOCAB, (16 * ROWS,))
    lines = []
    for transport in ("tcp", "shm", "cuda-ipc"):
        try:
            client = Client(address, transport=transport)
            client.score(hidden, targets)
            start = time.perf_counter()
            client.score(hidden, targets)
            seconds = time.perf_counter() - start
            rate = hidden.numel() * 2 / seconds / 1e9
            lines.append(f"{transport:9s} {16 * ROWS / seconds:12.0f} rows/s {rate:8.2f} GB/s")
        except LogprobdError as error:
            lines.append(f"{transport:9s} {error}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("server", type=pathlib.Path, help="the built logprobd")
    parser.add_argument("--gpus", default="0", help="GPUs of the server (default: 0)")
    parser.add_argument("--output", type=pathlib.Path, help="also write the lines as JSON")
    parser.add_argument("--check", nargs=2, metavar=("ADDRESS", "ADMIN"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.check:
        print(json.dumps({"lines": check(*options.check), "speed": speed(options.check[0])}))
        return 0

    lines, rates = [], {}
    with tempfile.TemporaryDirectory() as folder:
        server = serve(options.server.resolve(), pathlib.Path(folder), options.gpus)
        try:
            for configuration in ("", EXPANDABLE):
                environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": configuration}
                # Each allocator needs its own process, since torch chooses it when CUDA starts.
                command = [sys.executable, __file__, str(options.server), "--check"]
                command += [server.grpc, server.admin]
                done = subprocess.run(
                    command, env=environment, stdout=subprocess.PIPE, text=True, timeout=600
                )
                if done.returncode != 0:
                    print("".join(server.log[-50:]), file=sys.stderr)
                    return 1
                answer = json.loads(done.stdout.splitlines()[-1])
                lines += answer["lines"]
                rates[configuration or "default allocator"] = answer["speed"]
        finally:
            server.stop()
    for line in lines:
        print("{allocator:10s} {case:28s} {transport:9s} {verdict} {note}".format(**line))
    for configuration, found in rates.items():
        print(configuration, *found, sep="\n  ")
    if options.output:
        options.output.write_text(json.dumps({"lines": lines, "speed": rates}, indent=1) + "\n")
    wrong = sum(line["verdict"] != "ok" for line in lines)
    print(f"{len(lines) - wrong} of {len(lines)} right")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
