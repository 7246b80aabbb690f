"""A rank of test_push_head.py: pushes its rows of a head that FSDP2 shards, and follows it with a mean."""

import copy
import os
import sys

import torch
import torch.distributed as dist
from logprobd import WeightsClient
from logprobd_adapters.push import next_version, push_head
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main(address: str, rows: int, hidden: int) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(3)
    model = torch.nn.Linear(hidden, rows, bias=False)
    teacher = copy.deepcopy(model)
    fully_shard(model, mesh=mesh)
    fully_shard(teacher, mesh=mesh)
    with torch.no_grad():
        model.weight.add_(1)
        teacher.weight.lerp_(model.weight, 0.25)
    with WeightsClient(address, timeout=60, load_timeout=60) as client:
        version = next_version(client)
        push_head(client, teacher.weight, version=version, dtype="bf16")
        dist.barrier()
        if dist.get_rank() == 0:
            client.commit(version=version)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
