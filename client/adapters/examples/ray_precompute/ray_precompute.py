"""Precomputes log-probabilities of a dataset on a Ray cluster, while a server is killed.

    python client/adapters/examples/ray_precompute/ray_precompute.py [--sequences 400]

Writes a model with random weights and a dataset of its tokens, and runs a Ray cluster of two nodes
on this machine with a server on each. Scores the dataset once without disturbance, and once while
an actor is killed and its server ends. Prints a table that compares the two.
"""

import argparse
import contextlib
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray
import torch
from logprobd import Client, RetryPolicy, Unavailable
from logprobd_adapters import RemoteScorer
from logprobd_adapters.ray import ScoreBatch, ScorerPool
from ray.cluster_utils import Cluster
from ray.data.checkpoint import CheckpointConfig
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB_SIZE = 1000
LENGTH_MAX = 64
BLOCK_ROWS = 50


def write_model(folder: Path) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=LENGTH_MAX,
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


def write_sequences(path: Path, count: int) -> None:
    """Writes sequences of 2 to LENGTH_MAX random tokens, with ids."""
    generator = np.random.default_rng(0)
    lengths = generator.integers(2, LENGTH_MAX + 1, count)
    tokens = [generator.integers(VOCAB_SIZE, size=length).tolist() for length in lengths]
    pq.write_table(pa.table({"id": range(count), "input_ids": tokens}), path)


@contextlib.contextmanager
def run_cluster() -> Iterator[None]:
    """Runs two nodes with two CPUs each, whatever this machine has."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    cluster = Cluster()
    try:
        options = {"num_cpus": 2, "object_store_memory": 100_000_000}
        cluster.add_node(include_dashboard=False, **options)
        cluster.add_node(**options)
        ray.init(cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()


def precompute(
    folder: Path, scorer: RemoteScorer, out: Path, victim: Any = None, kill_at: int = 0
) -> pa.Table:
    """Scores what `out` does not have yet, and returns all of it by id.

    Args:
        folder: has the model and sequences.parquet.
        victim: actor that is killed when the block of the sequence with id kill_at is to be scored.
    """

    def kill(batch: pa.Table) -> pa.Table:
        if victim is not None and kill_at in batch["id"].to_pylist():
            ray.kill(victim, no_restart=False)
        return batch

    dataset = ray.data.read_parquet(str(folder / "sequences.parquet"))
    dataset.context.enable_progress_bars = False
    # Ray adds the ids of each file to `done` once the file is complete.
    dataset.context.checkpoint_config = CheckpointConfig(
        "id", str(out / "done"), delete_checkpoint_on_success=False
    )
    dataset.repartition(target_num_rows_per_block=BLOCK_ROWS).map_batches(
        kill, batch_format="pyarrow", batch_size=None
    ).map_batches(
        ScoreBatch,
        fn_constructor_args=(folder, scorer),
        fn_constructor_kwargs={"batch_tokens": 1},  # for the same bits in each run
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(size=1),
    ).write_parquet(str(out / "logprobs"))
    return pq.read_table(out / "logprobs").sort_by("id")


def answers(address: str) -> bool:
    try:
        with Client(address, retry=RetryPolicy(attempts_max=1)) as client:
            return bool(client.list_heads())
    except Unavailable:
        return False


def largest_error(model: LlamaForCausalLM, scored: pa.Table) -> float:
    """Returns the largest difference from the model's own log-softmax, in nats."""
    errors = []
    for row in scored.to_pylist():
        tokens = torch.tensor(row["input_ids"])
        with torch.no_grad():
            logprobs = model(tokens[None]).logits[0, :-1].double().log_softmax(-1)
        own = logprobs.gather(-1, tokens[1:, None])[:, 0]
        errors.append((torch.tensor(row["logprobs"]).double() - own).abs().max().item())
    return max(errors)


def bits_by_id(scored: pa.Table) -> dict[int, bytes]:
    return {row["id"]: np.float32(row["logprobs"]).tobytes() for row in scored.to_pylist()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, default=400)
    count = parser.parse_args().sequences
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as name, run_cluster():
        folder = Path(name)
        model = write_model(folder)
        write_sequences(folder / "sequences.parquet", count)
        with ScorerPool(folder) as pool:
            scorer = RemoteScorer(pool.client())
            whole = precompute(folder, scorer, folder / "whole")
            addresses = pool.addresses()
            killed = precompute(folder, scorer, folder / "killed", pool.actors[0], count // 2)
            left = sum(map(answers, addresses))
    print("| run | sequences | with other bits | largest error, nats |\n|---|---|---|---|")
    for run, scored in (("undisturbed", whole), ("an actor killed", killed)):
        bits = bits_by_id(scored)
        different = sum(bits.get(each) != expected for each, expected in bits_by_id(whole).items())
        print(f"| {run} | {len(scored)} | {different} | {largest_error(model, scored):.1e} |")
    print(f"\nservers that still answer at their first address: {left} of {len(addresses)}")


if __name__ == "__main__":
    main()
