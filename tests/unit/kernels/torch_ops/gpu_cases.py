"""Inputs of the tests that need a GPU."""

import contextlib
import gc
from collections.abc import Iterator

import torch
from linear_logprob_reference import seeded
from torch import Tensor

IGNORED = -100


def make_case(
    rows=300, size=64, vocab=2000, device="cuda", seed=0
) -> tuple[Tensor, Tensor, Tensor]:
    with torch.device(device):
        random = seeded(seed)
        hidden = torch.randn(rows, size, generator=random).bfloat16().requires_grad_()
        weight = (torch.randn(vocab, size, generator=random) / size**0.5 * 3).bfloat16()
        target = torch.randint(vocab, (rows,), generator=random)
        target[::7] = IGNORED
    return hidden, weight.requires_grad_(), target


def release_memory() -> None:
    """Returns memory of earlier tests to the GPU, also that of graphs that the garbage collector finds."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


@contextlib.contextmanager
def memory_limited_to(mib: int) -> Iterator[None]:
    """Lets PyTorch allocate `mib` MiB in addition to the memory that is in use."""
    release_memory()
    _, total = torch.cuda.mem_get_info()
    room = torch.cuda.memory_reserved() + (mib << 20)
    torch.cuda.set_per_process_memory_fraction(room / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
