"""Writes the head of a PyTorch checkpoint to a folder that logprobd serves.

    python -m logprobd.export_head SRC OUT [--vocab-size N] [--config FILE]

SRC is a checkpoint of Megatron (torch_dist, or folders mp_rank_XX), of torch.distributed.checkpoint
or a .bin file of torch.save. Its pickles are read with weights_only=True and run no code. The
folder has the format of `logprobctl export-head`, which reads safetensors. Needs PyTorch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import logprobd
from logprobd._head_folder import (
    ExportError,
    Progress,
    Sources,
    Tensor,
    check_replaceable,
    write_head_folder,
)
from logprobd._head_rules import FINAL_LOGITS_BIAS, HEAD_NAMES
from logprobd.errors import InvalidArgument
from logprobd.head_choice import choose_bias, choose_head, stem
from logprobd.head_config import CONFIG_FILE, HeadConfig

if TYPE_CHECKING:
    import torch

ADAPTER_CONFIG_FILE = "adapter_config.json"  # of PEFT
_NO_SETTINGS = (
    " (softcap and scale are settings of the server, --softcap and --logit-scale: an export takes "
    "--ignore-config-key alone, its head has no cap and no factor for that key, and the server of "
    "the export needs the setting)"
)
_HEAD_DTYPES = frozenset(("torch.bfloat16", "torch.float16", "torch.float32"))


@dataclass(frozen=True)
class Exported:
    """A head that was written."""

    tensor: str
    source: str
    """Name of the tensor in the checkpoint."""
    dtype: str
    vocab_size: int
    vocab_rows: int
    """Rows in the checkpoint, including those that were taken off as padding."""
    hidden_size: int
    has_bias: bool
    sha256: str
    """Digest of the head, which `logprobctl weights list` shows."""
    warnings: tuple[str, ...]


def export_head(
    src: Path | str,
    out: Path | str,
    *,
    vocab_size: int | None = None,
    config: Path | str | None = None,
    head_tensor: str = "",
    ignored_keys: Collection[str] = (),
    force: bool = False,
    progress: Progress = lambda step, done, total: None,
) -> Exported:
    """Writes the head of the checkpoint `src` to the new folder `out`.

    Args:
        src: A .bin file, or the folder of a checkpoint.
        vocab_size: Rows to keep; the others are padding. By default the vocab_size of the config.
        config: The model's config.json. By default the one next to the checkpoint, if there is one.
        head_tensor: Name of the head's tensor in the checkpoint, if it is not found by itself.
        ignored_keys: Keys of the config and names of tensors that do not change the logits although
            their names suggest it; with "model_type", the head is a plain one, whatever the model.
            In the exported config they are off.
        force: Replace `out` if an export has written it.

    Raises ExportError, whose message says what to change.
    """
    try:
        return _export(
            Path(src),
            Path(out),
            vocab_size=vocab_size,
            config=config,
            head_tensor=head_tensor,
            ignored_keys=ignored_keys,
            force=force,
            progress=progress,
        )
    except InvalidArgument as error:
        raise ExportError(f"{error}{_NO_SETTINGS if 'softcap' in str(error) else ''}") from None


def _export(
    src: Path,
    out: Path,
    *,
    vocab_size: int | None,
    config: Path | str | None,
    head_tensor: str,
    ignored_keys: Collection[str],
    force: bool,
    progress: Progress,
) -> Exported:
    check_replaceable(out, force)
    from logprobd._torch_checkpoints import open_checkpoint  # noqa: PLC0415  (needs PyTorch)

    checkpoint = open_checkpoint(src)
    warnings: list[str] = []
    config_path = _find_config(src, checkpoint.folder) if config is None else Path(config)
    settings, shape = HeadConfig(), None
    if config_path is None:
        warnings.append(
            f"there is no {CONFIG_FILE} next to the checkpoint: if the model scales or caps its "
            "logits, name its file with --config"
        )
    else:
        settings = _read_config(config_path, ignored_keys)
        shape = settings.logit_shape()  # refuses a model whose logits are not served
        warnings += settings.warnings

    if (checkpoint.folder / ADAPTER_CONFIG_FILE).is_file():
        warnings.append(
            f"{ADAPTER_CONFIG_FILE} lies beside the weights: transformers applies that adapter, "
            "and the head is written without it; if it changes the head, merge it into the model "
            "first"
        )

    def have_equal_rows(head: str, embedding: str) -> bool | None:
        return _have_equal_rows(
            checkpoint.read(head)[0],
            checkpoint.read(embedding)[0],
            settings,
            vocab_size or settings.vocab_size,
        )

    name, is_embedding = choose_head(checkpoint.names(), settings, have_equal_rows, head_tensor)
    weight, weight_files = checkpoint.read(name)
    _check_weight(name, weight, settings)
    bias_name = choose_bias(checkpoint.names(), settings, name, is_embedding)
    if bias_name is None and settings.has_bias is False:
        sibling = stem(name) + ".bias"
        if sibling in checkpoint.names():
            warnings.append(f"{CONFIG_FILE} says that the head has no bias; {sibling} is ignored")
    if vocab_size is None:
        vocab_size = settings.vocab_size
    rows = weight.shape[0]
    if vocab_size is None:
        warnings.append(f"the size of the vocabulary is not known: all {rows} rows are kept")
        vocab_size = rows
    if not 1 <= vocab_size <= rows:
        raise ExportError(f"{name} has {rows} rows, but the vocabulary has {vocab_size} ids")

    new_name = next((known for known in HEAD_NAMES if known == name), HEAD_NAMES[0])
    tensors = [_tensor(new_name, name, weight[:vocab_size], weight_files)]
    if bias_name is not None:
        bias, bias_files = checkpoint.read(bias_name)
        if bias_name.endswith(FINAL_LOGITS_BIAS):
            bias = bias.flatten()  # [1, vocab]
        if tuple(bias.shape) != (rows,):
            raise ExportError(f"{bias_name} has shape {tuple(bias.shape)}, not [{rows}]")
        tensors.append(_tensor(stem(new_name) + ".bias", bias_name, bias[:vocab_size], bias_files))
    text = settings.text_for_head(weight.shape[1], vocab_size)
    if shape is not None and HeadConfig(text).logit_shape() != shape:
        raise ExportError(
            f"the {CONFIG_FILE} of the head alone would describe other logits than {config_path}; "
            "this is a bug of the export, and nothing is written"
        )
    files = {file: None for part in tensors for file in part.source_files}
    if config_path is not None:
        files[config_path] = None
    sha256 = write_head_folder(
        out,
        tensors,
        text,
        Sources(checkpoint.folder, tuple(sorted(files))),
        version=logprobd.__version__,
        force=force,
        progress=progress,
    )
    return Exported(
        tensor=new_name,
        source=name,
        dtype=tensors[0].dtype,
        vocab_size=vocab_size,
        vocab_rows=rows,
        hidden_size=weight.shape[1],
        has_bias=bias_name is not None,
        sha256=sha256,
        warnings=tuple(warnings),
    )


def _find_config(src: Path, folder: Path) -> Path | None:
    """Returns the config.json next to the tensors, or next to the folder that the user named."""
    places = (folder, src if src.is_dir() else src.parent)
    return next((p / CONFIG_FILE for p in places if (p / CONFIG_FILE).is_file()), None)


def _read_config(path: Path, ignored_keys: Collection[str]) -> HeadConfig:
    try:
        return HeadConfig(path.read_text(encoding="utf-8"), str(path), ignored_keys)
    except (OSError, UnicodeDecodeError) as error:
        raise ExportError(f"{path} cannot be read: {error}") from None


def _have_equal_rows(
    a: torch.Tensor, b: torch.Tensor, config: HeadConfig, ids: int | None
) -> bool | None:
    """Returns whether the first `ids` rows have equal values, whatever their types.

    Returns None if they cannot be one tensor and `b` cannot be the head.
    """
    if a.dim() != 2 or b.dim() != 2 or not _HEAD_DTYPES.issuperset((str(a.dtype), str(b.dtype))):
        return None
    if a.shape[1] != b.shape[1]:
        return None if b.shape[1] != (config.hidden_size or b.shape[1]) else False
    rows = max(len(a), len(b)) if ids is None else ids
    if min(len(a), len(b)) < rows:
        return None if ids is not None else False
    return bool((a[:rows] == b[:rows]).logical_or(a[:rows].isnan() & b[:rows].isnan()).all())


def _check_weight(name: str, weight: torch.Tensor, config: HeadConfig) -> None:
    if weight.dim() != 2 or 0 in weight.shape:
        raise ExportError(
            f"{name} has shape {list(weight.shape)}; a head has two dimensions, vocabulary and "
            "hidden"
        )
    expected = config.hidden_size
    if expected is not None and expected != weight.shape[1]:
        raise ExportError(
            f"{name} has rows of {weight.shape[1]} values, but {CONFIG_FILE} says hidden_size "
            f"{expected}"
        )


def _tensor(name: str, source: str, tensor: torch.Tensor, files: Sequence[Path]) -> Tensor:
    import torch  # noqa: PLC0415  (only this tool needs it)

    dtypes = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
    if tensor.dtype not in dtypes:
        raise ExportError(
            f"{source} is {tensor.dtype}; a head must be bfloat16, float16 or float32"
        )
    data: Any = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return Tensor(
        name=name,
        dtype=dtypes[tensor.dtype],
        shape=tuple(tensor.shape),
        data=memoryview(data),
        source=source,
        source_files=tuple(files),
    )


def _show_progress(step: str, done: int, total: int) -> None:
    print(f"\r\033[K{step} {done * 100 // max(total, 1)}%", end="", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m logprobd.export_head",
        description="Write the head of a PyTorch checkpoint to a folder that logprobd serves.",
        epilog="Pickles are read with weights_only=True and run no code. Models in safetensors are "
        "exported by logprobctl export-head.",
    )
    parser.add_argument(
        "src", metavar="SRC", help="checkpoint: Megatron, torch.distributed.checkpoint or .bin"
    )
    parser.add_argument("out", metavar="OUT", help="folder to write; its parent must exist")
    parser.add_argument(
        "--vocab-size",
        type=int,
        metavar="N",
        help="rows to keep, the others are padding (default: vocab_size of config.json)",
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="the model's config.json (default: the one next to the checkpoint)",
    )
    parser.add_argument(
        "--head-tensor",
        default="",
        metavar="NAME",
        help="name of the head's tensor in the checkpoint",
    )
    parser.add_argument(
        "--ignore-config-key",
        action="append",
        default=[],
        metavar="NAME",
        help="key of config.json or name of a tensor that does not change the logits although its "
        "name suggests it; several are separated by colons; model_type exports any model as a "
        "plain head",
    )
    parser.add_argument(
        "--force", action="store_true", help="replace OUT if an earlier export has written it"
    )
    given = parser.parse_args(arguments)
    is_terminal = sys.stderr.isatty()
    try:
        head = export_head(
            given.src,
            given.out,
            vocab_size=given.vocab_size,
            config=given.config,
            head_tensor=given.head_tensor,
            ignored_keys=given.ignore_config_key,
            force=given.force,
            **({"progress": _show_progress} if is_terminal else {}),
        )
    except ExportError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 1
    finally:
        if is_terminal:
            print("\r\033[K", end="", file=sys.stderr)
    for warning in head.warnings:
        print(f"{parser.prog}: warning: {warning}", file=sys.stderr)
    print(
        f"wrote {given.out}: {head.source} as {head.tensor}, vocab {head.vocab_size} of "
        f"{head.vocab_rows} rows, hidden {head.hidden_size}, {head.dtype}, "
        f"{'bias' if head.has_bias else 'no bias'}\nsha256 {head.sha256}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
