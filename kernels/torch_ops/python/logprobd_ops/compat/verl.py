"""Replaces the function of verl/utils/kernel/linear_cross_entropy.py (verl 0.9), and lets verl's FSDP engine use what
the replacement can do in addition."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import logging
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from logprobd_ops._tensor_kinds import check_tensors
from logprobd_ops.compat._shared import (
    NO_ID,
    flat_temperature,
    reduced,
    replace_in_package,
    shard_start,
)
from logprobd_ops.linear_logprob import linear_logprob

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    from torch.distributed import ProcessGroup

ENGINE = "verl.workers.engine.fsdp.transformer_impl"
HEAD_CALL = "logprobd_head_call"
# A temperature of 0 selects the largest logit, as in verl. verl's bound is 1e-8, which divides logits beyond what the
# operator's exponential function takes.
TEMPERATURE_MIN = 1e-6

logger = logging.getLogger(__name__)


class HeadCall:
    """Takes the place of the temperature among a model's arguments, and the scores beside verl's two back.

    FSDP casts the tensors among these arguments to the model's dtype, which would round temperatures to bf16. It passes
    other objects on.
    """

    def __init__(self, temperature: float | Tensor, *, need_sum_p_squared: bool) -> None:
        self.temperature = temperature
        self.need_sum_p_squared = need_sum_p_squared
        self.sum_p_squared: Tensor | None = None
        """[T] of the call's T rows, without a gradient."""


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float | Tensor | HeadCall = 1.0,
    reduction: str = "none",
    dist_process_group: ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns (logprobs, entropy), fp32, of `hidden` [..., H] flattened to T rows.

    `labels` must already be shifted. entropy is [T]. logprobs is [T] for reduction "none", else the
    sum or the mean over all T rows. With a group, `weight` is the rank's shard, shards have equal
    sizes, and the gradient of `hidden` is the rank's part of the sum. As in verl, the caller's
    gather from the sequence-parallel region sums the parts.

    verl ignores no label: one outside the vocabulary, such as -100, has the log-prob -lse, which is what
    verl computes with a group (without a group, it returns memory that was never written).

    Under autocast, hidden and weight are cast to its dtype, as the products of the model's other layers are. verl's
    function does not follow autocast: it multiplies fp32 tensors in TF32, and fails if hidden and weight have
    different dtypes. Nothing is cast where both have autocast's dtype, as with the mixed precision of verl's FSDP.
    Call this function under torch.autocast(..., enabled=False) to multiply fp32 tensors in fp32 (not TF32), which is
    many times slower on a GPU.

    Unlike verl's function, this one takes any hidden size, inputs that are not contiguous, and a
    temperature per row: a tensor with an element for each label, or one that can be broadcast to labels' shape.
    """
    call = (
        temperature
        if isinstance(temperature, HeadCall)
        else HeadCall(temperature, need_sum_p_squared=False)
    )
    check_tensors(hidden=hidden, weight=weight, labels=labels, temperature=call.temperature)
    temperature = flat_temperature(call.temperature, labels)
    labels = labels.reshape(-1)
    scores = linear_logprob(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        labels,
        temperature=temperature,
        ignore_index=NO_ID,
        vocab_start=shard_start(weight, dist_process_group),
        process_group=dist_process_group,
        hidden_gradient="partial",
        out_of_vocab="zero",
        return_sum_p_squared=call.need_sum_p_squared,
    )
    call.sum_p_squared = scores.sum_p_squared
    num_ranks = 1 if dist_process_group is None else dist.get_world_size(dist_process_group)
    labels = labels.long()  # torch does not compare some unsigned types.
    is_id = (labels >= 0) & (labels < weight.shape[0] * num_ranks)
    # The operator gives other labels the log-prob 0 with the gradient of -lse.
    logprob = scores.logprob - torch.where(is_id, 0.0, scores.lse.detach())
    return reduced(logprob, reduction), scores.entropy


def lift_refusals(engine_module: ModuleType) -> None:
    """Makes FSDPEngineWithLMHead of verl/workers/engine/fsdp/transformer_impl.py accept with fused kernels, if
    impl_backend is "triton":

    * a temperature for each sample, a tensor [batch], as without fused kernels;
    * calculate_sum_pi_squared, whose result has no gradient;
    * sequences that are padded (use_remove_padding=False). verl does not refuse these, but fails: its engine expects
      results [batch, tokens], and its function returns them flattened;
    * FSDP2 with a head that is not tied to the embeddings. verl fails here as well: it shards the head apart from the rest,
      so the whole weight exists only in the head's own forward, which a fused kernel does not call.
    """
    engine = engine_module.FSDPEngineWithLMHead
    prepare_inputs, prepare_outputs = engine.prepare_model_inputs, engine.prepare_model_outputs
    if prepare_inputs.__module__ == __name__:
        return
    tensordict_utils = importlib.import_module("verl.utils.tensordict_utils")
    fsdp_utils: Any = importlib.import_module("verl.utils.fsdp_utils")
    select_modules = fsdp_utils._select_fsdp2_wrap_targets

    def option(batch: Any, name: str, *, default: bool) -> bool:
        return tensordict_utils.get_non_tensor_data(data=batch, key=name, default=default)

    def with_options(batch: Any, **options: bool) -> Any:
        batch = batch.copy()  # shallow
        tensordict_utils.assign_non_tensor(batch, **options)
        return batch

    def is_replaced(self: Any, batch: Any) -> bool:
        """Returns whether the model calls linear_cross_entropy. VeOmni's engine, a subclass, has a kernel of its own."""
        kernel = (self.model_config.fused_kernel_options or {}).get("impl_backend")
        return (
            option(batch, "use_fused_kernels", default=False)
            and self.engine_config.strategy in ("fsdp", "fsdp2")
            and kernel == "triton"
        )

    def prepare_model_inputs(self: Any, micro_batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        if not is_replaced(self, micro_batch):
            return prepare_inputs(self, micro_batch)
        temperature = micro_batch["temperature"]
        if isinstance(temperature, Tensor):
            # Without fused kernels, verl brings the temperatures into the order of the rows of this rank.
            inputs, outputs = prepare_inputs(
                self, with_options(micro_batch, use_fused_kernels=False)
            )
            inputs["return_dict"] = True
            if option(micro_batch, "use_remove_padding", default=True):
                inputs["shift_labels"] = outputs["input_ids_rmpad_rolled"].unsqueeze(0)
                temperature = outputs["temperature_rmpad"]
            else:
                temperature = outputs["temperature"].unsqueeze(-1)
            temperature = temperature.clamp(min=TEMPERATURE_MIN)
        else:
            inputs, outputs = prepare_inputs(self, micro_batch)
        outputs[HEAD_CALL] = inputs["temperature"] = HeadCall(
            temperature,
            need_sum_p_squared=option(micro_batch, "calculate_sum_pi_squared", default=False),
        )
        return inputs, outputs

    def prepare_model_outputs(
        self: Any,
        output: Any,
        output_args: dict[str, Any],
        micro_batch: Any,
        logits_processor_func: Any,
    ) -> dict[str, Any]:
        if HEAD_CALL not in output_args:
            return prepare_outputs(self, output, output_args, micro_batch, logits_processor_func)
        is_padded = not option(micro_batch, "use_remove_padding", default=True)

        def arranged(entropy: Tensor, **options: bool) -> dict[str, Any]:
            log_probs = output.log_probs
            if is_padded:
                log_probs, entropy = (
                    rows.view(micro_batch.batch_size[0], -1) for rows in (log_probs, entropy)
                )
            return prepare_outputs(
                self,
                SimpleNamespace(log_probs=log_probs, entropy=entropy),
                output_args,
                with_options(micro_batch, calculate_sum_pi_squared=False, **options),
                logits_processor_func,
            )

        result = arranged(output.entropy)
        call = output_args[HEAD_CALL]
        if call.need_sum_p_squared:
            # verl arranges a row's other scores as it does entropies.
            result["sum_pi_squared"] = arranged(call.sum_p_squared, calculate_entropy=True)[
                "entropy"
            ]
        return result

    def select_modules_but_the_head(model: Any, classes: list[str]) -> list[torch.nn.Module]:
        modules = select_modules(model, classes)
        if getattr(model, "_verl_fused_kernels_backend", None) != "triton":
            return modules
        head = model.get_output_embeddings()
        return [module for module in modules if module is not head]

    engine.prepare_model_inputs = prepare_model_inputs
    engine.prepare_model_outputs = prepare_model_outputs
    fsdp_utils._select_fsdp2_wrap_targets = select_modules_but_the_head
    logger.warning(
        "logprobd_ops: with fused kernels and impl_backend=triton, verl's FSDP engine accepts a temperature for each "
        "sample, calculate_sum_pi_squared, use_remove_padding=False, and heads of their own under FSDP2"
    )


def lift_refusals_if_known(engine_module: ModuleType) -> None:
    """Calls lift_refusals. Logs an error if the engine or a module that it uses is another one than in verl 0.9: the
    engine then works as before, and verl itself would not show the error."""
    try:
        lift_refusals(engine_module)
    except (AttributeError, ImportError):
        logger.exception("logprobd_ops does not know the FSDP engine of this verl")


class EngineFinder(importlib.abc.MetaPathFinder):
    """Calls lift_refusals_if_known once verl's FSDP engine has been imported. verl loads plugins in all its processes, most
    of which never import the engine, and before it patches the libraries that the engine imports."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if fullname != ENGINE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_lift(module: ModuleType) -> None:
            execute(module)
            lift_refusals_if_known(module)

        spec.loader.exec_module = execute_and_lift  # type: ignore[method-assign]
        return spec


def apply_logprobd_kernel() -> None:
    """Replaces verl's linear_cross_entropy in the modules of verl that are loaded, and in those that are
    loaded later. See lift_refusals for what verl's FSDP engine accepts then."""
    module = importlib.import_module("verl.utils.kernel.linear_cross_entropy")
    replace_in_package("verl", module.linear_cross_entropy, linear_cross_entropy)
    if ENGINE in sys.modules:
        lift_refusals_if_known(sys.modules[ENGINE])
    elif not any(isinstance(finder, EngineFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, EngineFinder())
