"""verl's own workers with fused kernels and the plugin of logprobd_ops, compared with verl without fused kernels.

verl runs in this process, with its own configuration, as one rank of a gloo group. It knows no CPU: a platform that is
CUDA's but for the device stands in, the reference is not offloaded to pinned memory, and FSDP gets a CPU as its device
and does not synchronise the ranks' modules. flash-attn is replaced by the attention of PyTorch, a setting of verl's.
"""

import contextlib
import os
import pathlib
import types
from collections.abc import Iterator
from unittest import mock

import pytest
import tiny_model
import torch
import torch.distributed as dist
from hydra import compose, initialize_config_module
from linear_logprob_reference import reference
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor
from transformers import LlamaForCausalLM

if not pathlib.Path(os.environ["LINEAR_LOGPROB_LIBRARY"]).exists():
    missing = os.environ["LINEAR_LOGPROB_LIBRARY"]
    pytest.skip(f"the operator is not built: no {missing}", allow_module_level=True)

os.environ.update(
    VERL_ENGINE_DEVICE="cuda",  # engines are registered for GPUs only
    **{"WORLD_SIZE": "1", "RANK": "0", "MASTER_ADDR": "", "MASTER_PORT": ""},
)

from logprobd_ops.compat import verl as drop_in  # noqa: E402
from verl.plugin.platform import set_platform  # noqa: E402
from verl.plugin.platform.platform_cuda import PlatformCUDA  # noqa: E402


class CpuPlatform(PlatformCUDA):
    device_name = "cpu"
    # Without a GPU, torch.cuda reports no memory in use, but has neither a name nor free memory.
    device_module = types.SimpleNamespace(
        **vars(torch.cuda) | {"mem_get_info": lambda: (0, 0), "get_device_name": lambda: "CPU"}
    )

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
# The kernels' tolerance against double precision, tests/README.md.
BF16_TOLERANCE = 1e-4  # nats
# verl's names of scores, and ours.
NAMES = {"log_probs": "logprob", "entropy": "entropy", "sum_pi_squared": "sum_p_squared"}
# verl's own settings, beside those of a user's model and of micro-batches.
SETTINGS = (
    "model.fused_kernel_options.impl_backend=triton",
    "actor.optim.lr=0",  # so that a second step begins where the first one did
    "actor.fsdp_config.use_torch_compile=False",
    "ref.fsdp_config.use_torch_compile=False",
    "+model.override_config.attn_implementation=sdpa",
    "actor.ppo_mini_batch_size=4",
    "actor.ppo_micro_batch_size_per_gpu=2",
    "actor.entropy_coeff=0.1",
    "actor.calculate_entropy=True",
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
    "padded, LoRA": ("model.use_remove_padding=False", "model.lora_rank=4"),
}
# First and last token of each sequence of make_batch.
BEGIN, END = (0, 3, 5, 1), (14, 11, 8, 13)
NUM_PROMPT, LENGTH = 6, 14
TEMPERATURES = torch.tensor([0.7, 1.0, 1.3, 0.9])


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


class CpuFsdp(transformer_impl.FSDP):
    def __init__(self, *args: object, sync_module_states: bool, device_id: str, **options: object):
        del sync_module_states
        super().__init__(
            *args, **options | {"device_id": torch.device(device_id), "cpu_offload": None}
        )


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
        mock.patch.multiple(
            transformer_impl,
            CPUOffloadPolicy=lambda pin_memory: CPUOffloadPolicy(pin_memory=False),  # noqa: ARG005
            FSDP=CpuFsdp,
        ),
        # verl replaces the method of the class.
        mock.patch.object(LlamaForCausalLM, "forward", LlamaForCausalLM.forward),
    ):
        torch.manual_seed(0)  # for LoRA's weights
        worker = ActorRolloutRefWorker(config.actor_rollout_ref, role)
        worker.init_model()
        yield worker


def make_batch(temperature: float | torch.Tensor) -> DataProto:
    """Returns four prompts, padded on the left to 6 tokens, with answers, padded on the right to 8."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, tiny_model.VOCAB_SIZE, (4, LENGTH), generator=generator)
    column = torch.arange(LENGTH)
    begin, end = torch.tensor(BEGIN)[:, None], torch.tensor(END)[:, None]
    mask = ((column >= begin) & (column < end)).long()
    tensors = {
        "input_ids": ids * mask,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
        "prompts": ids[:, :NUM_PROMPT],
        "responses": ids[:, NUM_PROMPT:],
        "response_mask": mask[:, NUM_PROMPT:],
        "advantages": torch.randn(4, LENGTH - NUM_PROMPT, generator=generator),
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
    return {name: no_padding_2_padding(output[name], data) for name in NAMES if name in output}


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
            gradient = parameter.grad
            if isinstance(gradient, DTensor):
                gradient = gradient.full_tensor()
            if gradient is not None:
                found[name] = gradient.clone()

    hook = worker.actor.engine.optimizer.register_step_pre_hook(keep)
    worker.update_actor(data)
    hook.remove()
    return found


def close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(
            ours[name],
            value,
            rtol=TOLERANCE,
            atol=TOLERANCE,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def close_gradients(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert (ours[name] - value).abs().max() <= TOLERANCE * value.abs().max(), name


@contextlib.contextmanager
def truth(worker: ActorRolloutRefWorker, batch: DataProto, weight: torch.Tensor) -> Iterator[dict]:
    """Fills the scores of `score` that double precision gives for the worker's hidden states and `weight`."""
    hidden, scores = [], {}
    [norm] = [
        module
        for name, module in worker.actor.engine.module.named_modules()
        if name.endswith("model.norm")
    ]
    hook = norm.register_forward_hook(lambda _module, _args, output: hidden.append(output[0]))
    yield scores
    hook.remove()
    data = left_right_2_no_padding(batch.to_tensordict())
    ids = data["input_ids"]
    temperatures = batch.batch["temperature"].repeat_interleave(ids.offsets().diff())
    targets = ids.values().roll(-1)
    for name, value in (
        reference(torch.cat(hidden), weight, targets, temperature=temperatures)._asdict().items()
    ):
        scores[name] = no_padding_2_padding(value, data)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_an_actor_has_the_scores_and_gradients_of_verl_without_fused_kernels(
    folders, strategy, layout
):
    batches = [make_batch(0.7), make_batch(TEMPERATURES)]
    results = []

    for is_fused in (False, True):
        settings = (
            *(*FP32, *LAYOUTS[layout], f"actor.strategy={strategy}"),
            f"model.use_fused_kernels={is_fused}",
        )
        with make_worker(folders[torch.float32], "actor", settings) as worker:
            scores = [score(worker, batch, calculate_sum_pi_squared=True) for batch in batches]
            steps = [
                gradients(worker, batch, found["log_probs"])
                for batch, found in zip(batches, scores, strict=True)
            ]
        results.append((scores, steps))

    (their_scores, their_steps), (our_scores, our_steps) = results
    for ours, theirs in zip(our_scores, their_scores, strict=True):
        assert len(ours) == 3
        close(ours, theirs)
    for ours, theirs in zip(our_steps, their_steps, strict=True):
        close_gradients(ours, theirs)


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_a_reference_has_the_scores_of_verl_without_fused_kernels(folders, strategy, layout):
    results = []

    for is_fused in (False, True):
        settings = (
            *(*FP32, *LAYOUTS[layout], f"actor.strategy={strategy}"),
            f"model.use_fused_kernels={is_fused}",
        )
        with make_worker(folders[torch.float32], "ref", settings) as worker:
            results.append(score(worker, make_batch(0.7)))

    close(results[1], results[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_equal_those_of_double_precision(folders, dtype):
    settings = FP32 if dtype == torch.float32 else ()  # bf16 by default
    batch = make_batch(TEMPERATURES)
    weight = LlamaForCausalLM.from_pretrained(folders[torch.float32]).lm_head.weight.to(dtype)

    with (
        make_worker(
            folders[torch.float32], "actor", (*settings, "model.use_fused_kernels=True")
        ) as worker,
        truth(worker, batch, weight) as true,
    ):
        ours = score(worker, batch, calculate_sum_pi_squared=True)

    tolerance = TOLERANCE if dtype == torch.float32 else BF16_TOLERANCE
    for name, true_name in NAMES.items():
        assert (ours[name] - true[true_name]).abs().max() < tolerance, name


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_temperatures_of_samples_are_not_rounded_to_the_dtype_of_the_model(folders, strategy):
    settings = ("model.use_fused_kernels=True", f"actor.strategy={strategy}")  # in bf16 by default

    with make_worker(folders[torch.float32], "actor", settings) as worker:
        of_samples = score(worker, make_batch(torch.full([4], 0.7)))
        of_all = score(worker, make_batch(0.7))

    assert all(map(torch.equal, of_samples.values(), of_all.values()))


def test_a_temperature_of_zero_selects_the_largest_logit(folders):
    settings = (*FP32, "model.use_fused_kernels=True")

    with make_worker(folders[torch.float32], "actor", settings) as worker:
        scores = score(worker, make_batch(torch.zeros(4)), calculate_sum_pi_squared=True)

    mask = make_batch(1.0).batch["response_mask"]
    assert scores["entropy"].abs().max() < TOLERANCE
    assert ((scores["sum_pi_squared"] - 1) * mask).abs().max() < TOLERANCE


def test_verl_refuses_with_its_own_kernels(folders):
    settings = ("model.use_fused_kernels=True", "model.fused_kernel_options.impl_backend=torch")

    with make_worker(folders[torch.float32], "actor", settings) as worker:
        with pytest.raises(AssertionError, match="does not support per sample temperature"):
            score(worker, make_batch(TEMPERATURES))
        with pytest.raises(NotImplementedError, match="calculate_sum_pi_squared"):
            score(worker, make_batch(0.7), calculate_sum_pi_squared=True)


def test_the_plugin_logs_what_it_changes_and_changes_it_once(caplog):
    class Engine:
        prepare_model_inputs = prepare_model_outputs = make_batch

    module = types.SimpleNamespace(FSDPEngineWithLMHead=Engine)

    drop_in.lift_refusals(module)
    changed = Engine.prepare_model_inputs
    drop_in.lift_refusals(module)

    assert changed is Engine.prepare_model_inputs is not make_batch
    [record] = caplog.records
    assert "accepts a temperature for each sample" in record.message
