"""The drop-in function of verl has the arguments, results and gradients of verl's own functions."""

import importlib
import os
import pathlib
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from drop_in_cases import (
    ROWS,
    SIZE,
    VOCAB,
    arguments,
    close,
    gradients,
    make_case,
    near,
    unowned_logprob,
    upstream_of,
    use_device,
)
from linear_logprob_reference import reference
from logprobd_ops.compat import verl
from operator_plugin import PACKAGE, write_entry_points
from originals import original

KERNEL = "verl.utils.kernel.linear_cross_entropy"


def test_arguments_are_those_of_verl():
    assert arguments(verl.linear_cross_entropy) == arguments(
        original(KERNEL).LinearCrossEntropy.forward
    )


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_results_equal_those_of_verls_torch_backend(temperature):
    theirs = original("verl.utils.experimental.torch_functional").FusedLinearForPPOFunction
    hidden, weight, target = case = make_case(torch.float32, rows=600)

    ours = verl.linear_cross_entropy(hidden, weight, target, temperature)
    truth = theirs.apply(hidden, weight, target, temperature)

    upstream = upstream_of(*ours)
    for our, true in zip(ours, truth, strict=True):
        near(our, true, rtol=1e-4, atol=1e-4)
    for our, true in zip(
        gradients(ours, upstream, case), gradients(truth, upstream, case), strict=True
    ):
        near(our, true, rtol=1e-4, atol=1e-2)


def test_results_equal_those_of_verls_functions_of_logits():
    functional = original("verl.utils.torch_functional")
    hidden, weight, target = make_case(torch.float32)
    logits = hidden @ weight.T

    logprobs, entropy = verl.linear_cross_entropy(hidden, weight, target)

    near(logprobs, functional.logprobs_from_logits_v2(logits, target), rtol=1e-5, atol=2e-5)
    near(entropy, functional.entropy_from_logits(logits), rtol=1e-5, atol=2e-5)


def test_rows_are_flattened():
    hidden, weight, target = case = make_case()

    ours = verl.linear_cross_entropy(
        hidden.reshape(2, 3, SIZE), weight, target.reshape(2, 3), 1.5, "none", None
    )

    truth = reference(*case, temperature=1.5)[:2]
    upstream = upstream_of(*truth)
    close(ours, truth)
    close(gradients(ours, upstream, case), gradients(truth, upstream, case))


def test_fp32_tensors_are_scored_in_the_dtype_of_autocast():
    hidden, weight, target = case = make_case(torch.float32)

    with torch.autocast(hidden.device.type, torch.bfloat16):
        ours = verl.linear_cross_entropy(*case)

    truth = verl.linear_cross_entropy(hidden.bfloat16(), weight.bfloat16(), target)
    assert all(map(torch.equal, ours, truth))


def test_logprobs_are_reduced_but_not_the_entropy():
    case = make_case()
    logprob, entropy, *_ = reference(*case)

    for reduction, truth in (("sum", logprob.sum()), ("Mean", logprob.mean())):
        ours = verl.linear_cross_entropy(*case, reduction=reduction)
        close(ours, (truth, entropy))
        close(gradients(ours[0], None, case)[0], gradients(truth, None, case)[0])
    with pytest.raises(ValueError, match="reduction.*'average'"):
        verl.linear_cross_entropy(*case, reduction="average")


@pytest.mark.parametrize("shape", [(2, 3), (6,), (1, 6), (2, 1), (1, 1), ()])
def test_a_temperature_for_each_label_or_one_that_is_broadcast_to_them(shape):
    hidden, weight, target = case = make_case()
    temperature = torch.linspace(0.5, 2, torch.Size(shape).numel()).reshape(shape).double()

    ours = verl.linear_cross_entropy(
        hidden.reshape(2, 3, SIZE), weight, target.reshape(2, 3), temperature
    )

    is_per_label = temperature.numel() == ROWS
    of_rows = temperature if is_per_label else temperature.expand(2, 3)
    truth = reference(*case, temperature=of_rows.reshape(-1))[:2]
    upstream = upstream_of(*truth)
    close(ours, truth)
    close(gradients(ours, upstream, case), gradients(truth, upstream, case))


def test_a_head_call_takes_the_temperature_and_gets_the_sum_of_squared_probabilities():
    case = make_case()
    call = verl.HeadCall(0.7, need_sum_p_squared=True)

    ours = verl.linear_cross_entropy(*case, call)

    truth = reference(*case, temperature=0.7)
    close((*ours, call.sum_p_squared), (*truth[:2], truth.sum_p_squared))


def test_labels_outside_the_vocabulary_have_the_logprob_of_a_logit_of_zero():
    hidden, weight, target = case = make_case()
    target[0], target[2], target[5] = -100, VOCAB, 2**40

    ours = verl.linear_cross_entropy(*case, 0.7)

    truth = (
        unowned_logprob(*case, temperature=0.7),
        reference(hidden, weight, target.clamp(0, VOCAB - 1), temperature=0.7).entropy,
    )
    upstream = upstream_of(*truth)
    close(ours, truth)
    close(gradients(ours, upstream, case), gradients(truth, upstream, case))


@pytest.mark.parametrize("label", [-(2**31), -1, 2**31 - 1])
def test_no_label_of_32_bits_is_ignored(label):
    hidden, weight, target = case = make_case()
    target = target.int()
    target[1] = label

    ours = verl.linear_cross_entropy(hidden, weight, target)

    truth = (
        unowned_logprob(hidden, weight, target.long()),
        reference(hidden, weight, target.long().clamp(0, VOCAB - 1)).entropy,
    )
    upstream = upstream_of(*truth)
    close(ours, truth)
    close(gradients(ours, upstream, case), gradients(truth, upstream, case))


def compare_shards(rank: int, size: int) -> None:
    """Compares the results of a group of all ranks, and of a group of each rank alone, with those of a whole head."""
    use_device()
    hidden, weight, target = case = make_case()
    target[0], target[2] = -100, VOCAB
    half = VOCAB // size
    mine = slice(rank * half, (rank + 1) * half)
    shard = weight.detach()[mine].clone().requires_grad_()
    entropy = reference(hidden, weight, target.clamp(0, VOCAB - 1)).entropy
    truth = (unowned_logprob(*case), entropy)
    upstream = upstream_of(*truth)
    d_hidden, d_weight = gradients(truth, upstream, case)

    ours = verl.linear_cross_entropy(hidden, shard, target, 1.0, "none", dist.group.WORLD)
    close(ours, truth)
    # Like verl's own function, each rank returns its part of the sum.
    parts = torch.autograd.grad(ours, (hidden, shard), upstream)
    dist.all_reduce(parts[0])
    close(parts, (d_hidden, d_weight[mine]))

    alone = [dist.new_group([each]) for each in range(size)][rank]
    ours = verl.linear_cross_entropy(*case, 1.0, "none", alone)
    close(ours, truth)
    close(gradients(ours, upstream, case), (d_hidden, d_weight))


def test_shards_give_the_results_of_the_whole_head(two_ranks):
    two_ranks.results(compare_shards)


def run_verl(folder: pathlib.Path, code: str, **environment: str) -> subprocess.CompletedProcess:
    """Runs code in an interpreter in which logprobd_ops is installed with the entry points of its pyproject.toml."""
    write_entry_points(folder)
    tests = pathlib.Path(__file__).parent
    code = f"from originals import original\noriginal({KERNEL!r})\n{code}"
    environment = {
        **{name: value for name, value in os.environ.items() if name != "LINEAR_LOGPROB_VERL"},
        "PYTHONPATH": f"{folder}:{PACKAGE}:{tests}",
        **environment,
    }
    return subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )


# verl's function is the method apply of a torch.autograd.Function.
VERLS_MODULE = "torch.autograd.function"
WHOSE = f"""
import sys
print(sys.modules[{KERNEL!r}].linear_cross_entropy.__module__)
"""


def test_verl_loads_the_plugin_if_the_variable_is_set(tmp_path):
    original(KERNEL)  # skips without the package

    done = run_verl(tmp_path, WHOSE, LINEAR_LOGPROB_VERL="1")

    assert done.stdout.split() == ["logprobd_ops.compat.verl"], done.stderr


def test_verl_keeps_its_function_without_the_variable(tmp_path):
    original(KERNEL)

    done = run_verl(tmp_path, WHOSE)

    assert done.stdout.split() == [VERLS_MODULE], done.stderr


@pytest.mark.parametrize(("plugins", "is_loaded"), [("none", False), ("other, logprobd", True)])
def test_verl_may_restrict_its_plugins(tmp_path, plugins, is_loaded):
    original(KERNEL)

    done = run_verl(tmp_path, WHOSE, LINEAR_LOGPROB_VERL="1", VERL_USE_EXTERNAL_PLUGINS=plugins)

    module = "logprobd_ops.compat.verl" if is_loaded else VERLS_MODULE
    assert done.stdout.split() == [module], done.stderr


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        (
            {"LINEAR_LOGPROB_VERL": "1", "LINEAR_LOGPROB_LIBRARY": "/none.so"},
            "cannot load /none.so",
        ),
        ({"LINEAR_LOGPROB_VERL": "yes"}, "LINEAR_LOGPROB_VERL is 'yes'"),
    ],
)
def test_a_plugin_that_fails_says_so_on_stderr(tmp_path, environment, reason):
    original(KERNEL)

    done = run_verl(tmp_path, WHOSE, **environment)

    assert "verl keeps its own linear_cross_entropy" in done.stderr
    assert reason in done.stderr
    assert done.stdout.split() == [VERLS_MODULE]


def test_modules_that_imported_verls_function_before_get_the_new_one(monkeypatch):
    module = original(KERNEL)
    user = original("verl.utils.kernel")
    monkeypatch.setattr(module, "linear_cross_entropy", module.linear_cross_entropy)
    monkeypatch.setattr(user, "imported_before", module.linear_cross_entropy, raising=False)

    verl.apply_logprobd_kernel()
    verl.apply_logprobd_kernel()

    assert module.linear_cross_entropy is verl.linear_cross_entropy
    assert user.imported_before is verl.linear_cross_entropy


# Regression: an engine whose module for tensordicts has moved could not be imported.
@pytest.mark.parametrize("missing", ["FSDPEngineWithLMHead", "verl.utils.tensordict_utils"])
def test_an_engine_of_another_version_of_verl_is_kept_and_logged(
    tmp_path, monkeypatch, caplog, missing
):
    text = "FSDPEngine = 1"
    if missing.startswith("verl."):
        text += "\nclass FSDPEngineWithLMHead:\n    prepare_model_inputs = prepare_model_outputs = print"
        monkeypatch.setitem(sys.modules, missing, None)
    (tmp_path / "other_engine.py").write_text(text)
    monkeypatch.delitem(sys.modules, "other_engine", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(verl, "ENGINE", "other_engine")
    monkeypatch.setattr(sys, "meta_path", [verl.EngineFinder(), *sys.meta_path])

    assert importlib.import_module("other_engine").FSDPEngine == 1

    assert "does not know the FSDP engine of this verl" in caplog.text
    assert missing in caplog.text
