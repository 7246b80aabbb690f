"""Scores the reference policy of TRL's trainers by a Scorer.

    trainer = GRPOTrainer(...)
    apply_logprobd_kernel()  # of logprobd_ops.compat.trl, for models below fp32
    use_scorer(trainer, RemoteScorer(client, head="reference"))
    trainer.train()

The body of the reference runs as before, and the scorer takes the place of its head. The policy's
own log-probabilities have gradients, which no scorer has: for those use logprobd_ops.compat.trl.
Below fp32 TRL's own function rounds them, so that the two sides of a KL divergence would differ.
"""

from __future__ import annotations

import functools
import types
import uuid
import warnings
from collections.abc import Callable
from typing import Any

import torch
from logprobd.errors import InvalidArgument
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.utils import is_peft_available
from trl import DPOTrainer, GRPOTrainer, KTOTrainer, RLOOTrainer, SFTTrainer
from trl.trainer import utils as trl_utils
from trl.trainer.utils import FusedCausalLMOutput

from logprobd_adapters.head_check import FLOAT_DTYPES, check_model_head, check_size
from logprobd_adapters.model_body import without_cache
from logprobd_adapters.scorer import Scorer

_IGNORED = -100  # TRL's label of tokens that are not scored
_PRECOMPUTED = ("ref_chosen_logps", "ref_rejected_logps", "ref_logps", "ref_KL_logps")


def use_scorer(trainer: Any, scorer: Scorer, *, allow_rounded_head: bool = False) -> None:
    """Makes a trainer score its reference, or with SFTTrainer its evaluation, by `scorer`.

    Call it after the trainer is made and before it trains. With precompute_ref_log_probs, TRL has
    computed the reference's log-probabilities by then, and they are computed again here.

    Args:
        trainer: GRPOTrainer, RLOOTrainer, DPOTrainer, KTOTrainer or SFTTrainer.
        scorer: scorer of the head of the reference.
        allow_rounded_head: whether the scorer's head may be the reference's, rounded to a coarser
            type.

    Raises InvalidArgument if the trainer calls no head that stays as it is without gradients, or if
    the scorer's head is not the reference's. Weights are compared if the model has its own head,
    unsharded and not quantised; hidden size and vocabulary always.

    Warns if TRL's own function rounds the policy's logits below fp32, which the scorer does not.
    """
    if not isinstance(trainer, GRPOTrainer | RLOOTrainer | DPOTrainer | KTOTrainer | SFTTrainer):
        raise InvalidArgument(
            f"{type(trainer).__name__} does not score a fixed head: it has no reference or takes "
            "full logits; for the log-probabilities of the policy use logprobd_ops.compat.trl"
        )
    if getattr(trainer.args, "sync_ref_model", False):
        raise InvalidArgument(
            "sync_ref_model changes the head of the reference while the scorer's stays: set it to "
            "False"
        )
    unwrap = trainer.accelerator.unwrap_model
    policy = unwrap(trainer.model)
    has_adapter = _is_peft_model(policy)
    model = policy.get_base_model() if has_adapter else policy
    outputs = {"log_probs": "logprob"}
    is_served = _always
    if isinstance(trainer, SFTTrainer):
        _check_evaluation(trainer, model)
        outputs |= {"entropy": "entropy", "is_top1": "greedy"}
    elif isinstance(trainer, GRPOTrainer | RLOOTrainer) and trainer.beta == 0:
        raise InvalidArgument("the trainer has no reference, because its beta is 0")
    elif trainer.ref_model is not None:
        model = unwrap(trainer.ref_model)
    elif has_adapter:
        is_served = functools.partial(_is_reference, policy)
    else:
        is_served = _serve_precomputation(trainer)
    _check_model(trainer, model, scorer, allow_rounded_head)
    if not isinstance(trainer, SFTTrainer):
        _warn_of_rounding(trainer, policy)
    _bind(trainer, model, scorer, outputs, is_served)
    if getattr(trainer, "precompute_ref_logps", False):
        _precompute(trainer)


def _always() -> bool:
    return True


def _is_peft_model(model: Any) -> bool:
    if not is_peft_available():
        return False
    from peft import PeftModel  # noqa: PLC0415  (an optional dependency)

    return isinstance(model, PeftModel)


def _is_reference(policy: Any) -> bool:
    """Returns whether a PEFT model is, for the moment, the reference: without its adapter, or with
    the copy that TRL makes of an adapter whose training goes on."""
    return policy._adapters_disabled or "ref" in policy.active_adapters


def _serve_precomputation(trainer: Any) -> Callable[[], bool]:
    """Returns a function that says whether the policy is, before its training, the reference."""
    compute = trainer.compute_ref_log_probs
    is_computing = False

    def compute_ref_log_probs(model: Any, inputs: Any) -> Any:
        nonlocal is_computing
        is_computing = True
        try:
            return compute(model, inputs)
        finally:
            is_computing = False

    trainer.compute_ref_log_probs = compute_ref_log_probs
    return lambda: is_computing


def _warn_of_rounding(trainer: Any, policy: PreTrainedModel) -> None:
    """Warns if the policy's logits are rounded below fp32, beside a reference whose are not."""
    kind = trainer.accelerator.device.type
    with trainer.accelerator.autocast():
        is_cast = torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind) if is_cast else policy.dtype
    function = trl_utils._ChunkedLogProbFunction
    if (
        dtype.itemsize >= torch.float32.itemsize
        or getattr(trainer.args, "cast_lm_head_to_fp32", False)
        or function.__module__ == "logprobd_ops.compat.trl"
    ):
        return
    warnings.warn(
        f"TRL rounds the policy's logits to {str(dtype).removeprefix('torch.')}, and the scorer "
        "does not round the reference's, so their KL divergence is not zero where both are the "
        "same model: call logprobd_ops.compat.trl.apply_logprobd_kernel() before use_scorer",
        UserWarning,
        stacklevel=3,
    )


def _check_evaluation(trainer: SFTTrainer, model: PreTrainedModel) -> None:
    """Refuses a trainer whose evaluation calls a head that moves, or another function."""
    if type(trainer).compute_loss is not SFTTrainer.compute_loss:
        raise InvalidArgument(f"{type(trainer).__name__} has a loss of its own: use SFTTrainer")
    if any(parameter.requires_grad for parameter in model.get_output_embeddings().parameters()):
        raise InvalidArgument(
            "SFTTrainer has no reference, and it trains the head, so the scorer's would differ "
            "after a step: train an adapter or freeze the head, or use logprobd_ops.compat.trl"
        )


def _check_model(
    trainer: Any, model: PreTrainedModel, scorer: Scorer, allow_rounded_head: bool
) -> None:
    """Compares the scorer with the model's own head, or with its size if it is not there whole."""
    if model.base_model is model:
        raise InvalidArgument(f"{type(model).__name__} has no separate body")
    weight = getattr(model.get_output_embeddings(), "weight", None)
    if not _is_whole(weight):
        width = getattr(model.get_input_embeddings(), "embedding_dim", None)
        check_size(scorer, width, model.config.get_text_config().vocab_size)
        return
    with trainer.accelerator.autocast():
        check_model_head(scorer, model, allow_rounded_head=allow_rounded_head)


def _is_whole(weight: Tensor | None) -> bool:
    """Returns whether a head is there, neither removed, sharded nor quantised."""
    return (
        weight is not None
        and not isinstance(weight, DTensor)
        and not weight.is_meta
        and weight.dtype in FLOAT_DTYPES
        and weight.dim() == 2  # FSDP's shards are flat
        and weight.numel() > 0
    )


def _bind(
    trainer: Any,
    model: PreTrainedModel,
    scorer: Scorer,
    outputs: dict[str, str],
    is_served: Callable[[], bool],
) -> None:
    """Replaces the forward of a model that TRL has given a fused head.

    Calls with fused_lm_head=True and without gradients are served while `is_served()`. Calls that
    ask for router logits, which the loss of a mixture of experts needs, stay TRL's.

    Args:
        trainer, model, scorer: see use_scorer.
        outputs: fields of TRL's result, [batch, length], and the scorer's outputs that they are;
            they are zero where the label is -100.
        is_served: whether the model is the reference at the time of the call.
    """
    original = model.forward
    temperature = getattr(trainer, "temperature", 1.0)

    @functools.wraps(type(model).forward)
    def forward(self: PreTrainedModel, *arguments: Any, **keywords: Any) -> Any:
        if (
            not keywords.get("fused_lm_head")
            or torch.is_grad_enabled()
            or keywords.get("output_router_logits")
            or not is_served()
        ):
            return original(*arguments, **keywords)
        del keywords["fused_lm_head"]
        labels = keywords.pop("labels", None)
        shift_labels = keywords.pop("shift_labels", None)
        num_items = keywords.pop("num_items_in_batch", None)
        keywords |= without_cache(self.base_model)
        # accelerate's autocast encloses the forward that this one replaces.
        with trainer.accelerator.autocast():
            hidden = self.base_model(*arguments, **keywords).last_hidden_state
        if shift_labels is None:
            hidden, shift_labels = hidden[:, :-1], labels[:, 1:]
        mask = (shift_labels != _IGNORED).to(hidden.device)
        scores = scorer.score(
            hidden[mask],
            shift_labels.to(hidden.device)[mask],
            temperature=temperature,
            outputs=outputs.values(),
        )
        fields = {
            name: (score := getattr(scores, output))
            .new_zeros(mask.shape)
            .masked_scatter(mask, score)
            for name, output in outputs.items()
        }
        count = mask.sum().clamp(min=1) if num_items is None else num_items
        loss = -fields["log_probs"].sum() / count
        return FusedCausalLMOutput(loss=loss, label_mask=mask, **fields)

    model.forward = types.MethodType(forward, model)


def _precompute(trainer: Any) -> None:
    """Computes the columns of the reference's log-probabilities again."""
    # TRL caches columns on disk by this hash; those of the model's own head must not be found.
    trainer._precompute_model_hash = uuid.uuid4().hex
    arguments = trainer.args
    batch_size = arguments.precompute_ref_batch_size

    def precomputed(dataset: Any, name: str, default_batch_size: int) -> Any:
        columns = [column for column in _PRECOMPUTED if column in dataset.column_names]
        return trainer._precompute_ref_logps(
            dataset.remove_columns(columns), name, batch_size or default_batch_size
        )

    trainer.train_dataset = precomputed(
        trainer.train_dataset, "train", arguments.per_device_train_batch_size
    )
    evaluation = trainer.eval_dataset
    if isinstance(evaluation, dict):
        trainer.eval_dataset = {
            name: precomputed(dataset, name, arguments.per_device_eval_batch_size)
            for name, dataset in evaluation.items()
        }
    elif evaluation is not None:
        trainer.eval_dataset = precomputed(evaluation, "eval", arguments.per_device_eval_batch_size)
