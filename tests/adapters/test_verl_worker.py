"""verl's own workers with fused kernels and the plugin of logprobd_ops, compared with verl without fused kernels.

verl runs in this process, with its own configuration, as one rank of a gloo group. It knows no CPU: a platform that is
CUDA's but for the device stands in, and the reference's policy of offloading does not pin memory. flash-attn is
replaced by the attention of PyTorch, a setting of verl's.
"""

import contextlib
import os
import pathlib
import sys
import tempfile
import types
from collections.abc import Iterator
from unittest import mock

import pytest
import tiny_model
import torch
import torch.distributed as dist
from hydra import compose, initialize_config_module
from linear_logprob_reference import reference
from operator_plugin import write_entry_points
from torch.distributed.fsdp import CPUOffloadPolicy
from transformers import LlamaForCausalLM

# verl loads its plugins when it is imported.
SITE = tempfile.TemporaryDirectory()
write_entry_points(pathlib.Path(SITE.name))
sys.path.insert(0, SITE.name)
os.environ.update(
    LINEAR_LOGPROB_VERL="1",
    VERL_ENGINE_DEVICE="cuda",  # engines are registered for GPUs only
    **{"WORLD_SIZE": "1", "RANK": "0", "MASTER_ADDR": "", "MASTER_PORT": ""},
)

from verl.plugin.platform import set_platform  # noqa: E402
from verl.plugin.platform.platform_cuda import PlatformCUDA  # noqa: E402


class CpuPlatform(PlatformCUDA):
    device_name = "cpu"

    def current_device(self) -> str:
        return "cpu"


set_platform(CpuPlatform())

from verl.protocol import DataProto  # noqa: E402
from verl.utils import tensordict_utils  # noqa: E402
from verl.workers.engine.fsdp import transformer_impl  # noqa: E402
from verl.workers.engine_workers import ActorRolloutRefWorker  # noqa: E402
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding  # noqa: E402

TOLERANCE = (
    1e-5  # nats, and relative to the largest element of a gradient. Both sides sum fp32 products.
)
# verl's own settings, beside those of a user's model and of micro-batches.
SETTINGS = (
    "model.fused_kernel_options.impl_backend=triton",
    "+model.override_config.attn_implementation=sdpa",
    "actor.ppo_mini_batch_size=4",
    "actor.ppo_micro_batch_size_per_gpu=2",
    "actor.entropy_coeff=0.1",
    "actor.calculate_entropy=True",
    "actor.use_torch_compile=False",
    "ref.log_prob_micro_batch_size_per_gpu=2",
    "rollout.name=vllm",
    "rollout.log_prob_micro_batch_size_per_gpu=2",
)
FP32 = tuple(
    f"+{role}.fsdp_config.mixed_precision.{kind}_dtype=fp32"
    for role in ("actor", "ref")
    for kind in ("param", "reduce", "buffer")
)
LAYOUTS = {
    "packed": ("model.use_remove_padding=True",),
    "packed and padded to a multiple": (
        "model.use_remove_padding=True",
        "actor.pad_to_length=True",
        "actor.fsdp_config.pad_to_length_bucket=16",
    ),
    "packed, batches by tokens": (
        "model.use_remove_padding=True",
        "actor.use_dynamic_bsz=True",
        "actor.ppo_max_token_len_per_gpu=24",
    ),
    "padded": ("model.use_remove_padding=False",),
}
TEMPERATURES = torch.tensor([0.7, 1.0, 1.3, 0.9])


@pytest.fixture(scope="module", autouse=True)
def one_rank(built_operator) -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


@contextlib.contextmanager
def make_worker(
    folder: pathlib.Path, role: str, settings: tuple[str, ...]
) -> Iterator[ActorRolloutRefWorker]:
    """Makes a worker of verl for the model in `folder`."""
    overrides = [*SETTINGS, f"model.path={folder}", *settings]
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose(
            "ppo_trainer",
            [
                f"+actor_rollout_ref.{setting[1:]}"
                if setting.startswith("+")
                else f"actor_rollout_ref.{setting}"
                for setting in overrides
            ],
        )
    with (
        mock.patch.object(
            transformer_impl,
            "CPUOffloadPolicy",
            lambda pin_memory: CPUOffloadPolicy(pin_memory=False),  # noqa: ARG005
        ),
        # verl replaces the method of the class.
        mock.patch.object(LlamaForCausalLM, "forward", LlamaForCausalLM.forward),
    ):
        worker = ActorRolloutRefWorker(config.actor_rollout_ref, role)
        worker.init_model()
        yield worker


def make_batch(temperature: float | torch.Tensor) -> DataProto:
    """Returns four prompts, padded on the left to 6 tokens, with answers, padded on the right to 8."""
    generator = torch.Generator().manual_seed(0)
    length, num_prompt = 14, 6
    ids = torch.randint(3, tiny_model.VOCAB_SIZE, (4, length), generator=generator)
    column = torch.arange(length)
    begin = torch.tensor([0, 3, 5, 1])[:, None]
    end = torch.tensor([14, 11, 8, 13])[:, None]
    mask = ((column >= begin) & (column < end)).long()
    tensors = {
        "input_ids": ids * mask,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
        "prompts": ids[:, :num_prompt],
        "responses": ids[:, num_prompt:],
        "response_mask": mask[:, num_prompt:],
        "advantages": torch.randn(4, length - num_prompt, generator=generator),
    }
    is_tensor = isinstance(temperature, torch.Tensor)
    return DataProto.from_single_dict(
        tensors | ({"temperature": temperature} if is_tensor else {}),
        meta_info={} if is_tensor else {"temperature": temperature},
    )


def score(
    worker: ActorRolloutRefWorker, batch: DataProto, **options: bool
) -> dict[str, torch.Tensor]:
    """Returns the scores of the answers' tokens, [4, 8], as verl's trainer gets them."""
    data = left_right_2_no_padding(batch.to_tensordict())
    tensordict_utils.assign_non_tensor(data, compute_loss=False, calculate_entropy=True, **options)
    compute = worker.compute_log_prob if worker.role == "actor" else worker.compute_ref_log_prob
    output = compute(data)
    return {
        name: no_padding_2_padding(output[name], data)
        for name in ("log_probs", "entropy", "sum_pi_squared")
        if name in output
    }


def gradients(
    worker: ActorRolloutRefWorker, batch: DataProto, log_probs: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Returns the gradients of a step of PPO, with `log_probs` as those before the step."""
    batch.batch["old_log_probs"] = log_probs
    data = left_right_2_no_padding(batch.to_tensordict())
    tensordict_utils.assign_non_tensor(
        data,
        calculate_entropy=True,
        global_batch_size=4,
        mini_batch_size=4,
        epochs=1,
        seed=0,
        dataloader_kwargs={"shuffle": False},
    )
    found = {}

    def keep(*_: object) -> None:
        for name, parameter in worker.actor.engine.module.named_parameters():
            found[name] = parameter.grad.full_tensor().clone()

    worker.actor.engine.optimizer.register_step_pre_hook(keep)
    worker.update_actor(data)
    return found
