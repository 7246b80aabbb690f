"""Writes the head of a PyTorch checkpoint to a folder that logprobd serves.

    python -m logprobd.export_head SRC OUT [--vocab-size N] [--config FILE]

SRC is a checkpoint of Megatron (torch_dist, or folders mp_rank_XX), of torch.distributed.checkpoint
or a .bin file of torch.save. Its pickles are read with weights_only=True and run no code. The
folder has the format of `logprobctl export-head`, which reads safetensors. Needs PyTorch.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import logprobd
from logprobd._head_folder import (
    CONFIG_FILE,
    Config,
    ExportError,
    Progress,
    Sources,
    Tensor,
    check_replaceable,
    write_head_folder,
)

if TYPE_CHECKING:
    import torch

    from logprobd._torch_checkpoints import Checkpoint

# The names of server/weights/head_names.cc, in order of preference; a test compares them.
HEAD_NAMES = (
    "lm_head.weight",
    "language_model.lm_head.weight",
    "model.language_model.lm_head.weight",
    "thinker.lm_head.weight",
    "output.weight",
    "head.weight",
    "transformer.output_layer.weight",
    "embed_out.weight",
    "output_layer.weight",
)
EMBEDDING_NAMES = (
    "model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
    "thinker.model.embed_tokens.weight",
    "transformer.wte.weight",
    "wte.weight",
    "transformer.word_embeddings.weight",
    "model.tok_embeddings.weight",
    "tok_embeddings.weight",
    "model.decoder.embed_tokens.weight",
    "transformer.embedding.word_embeddings.weight",
    "embedding.word_embeddings.weight",
    "gpt_neox.embed_in.weight",
    "backbone.embeddings.weight",
)
# Names that only a quantised tensor has next to it.
QUANTISED_SUFFIXES = (
    *(".qweight", ".qzeros", ".scales", ".g_idx", ".weight_packed", ".weight_scale"),
    *(".weight_scale_2", ".weight_scale_inv", ".weight_zero_point", ".scale", ".input_scale"),
    *(".SCB", ".weight.absmax", ".weight.quant_map", ".biases", ".weight_shape"),
)
# Names that trainers put before the model's own names. A name of the lists above behind other words
# belongs to something else, such as an optimizer or a layer for multi-token prediction.
_WRAPPERS = re.compile(
    r"((model\d*|module|state_dict|state|app|actor|policy|language_model|thinker|llava_model"
    r"|_fsdp_wrapped_module|_orig_mod|_forward_module)\.)*"
)


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
    force: bool = False,
    progress: Progress = lambda step, done, total: None,
) -> Exported:
    """Writes the head of the checkpoint `src` to the new folder `out`.

    Args:
        src: A .bin file, or the folder of a checkpoint.
        vocab_size: Rows to keep; the others are padding. By default the vocab_size of the config.
        config: The model's config.json. By default the one next to the checkpoint, if there is one.
        head_tensor: Name of the head's tensor in the checkpoint, if it is not found by itself.
        force: Replace `out` if an export has written it.

    Raises ExportError, whose message says what to change.
    """
    src, out = Path(src), Path(out)
    check_replaceable(out, force)
    from logprobd._torch_checkpoints import open_checkpoint  # noqa: PLC0415  (needs PyTorch)

    checkpoint = open_checkpoint(src)
    warnings: list[str] = []
    config_path = _find_config(src, checkpoint.folder) if config is None else Path(config)
    settings = Config()
    if config_path is None:
        warnings.append(
            f"there is no {CONFIG_FILE} next to the checkpoint: if the model scales or caps its "
            "logits, name its file with --config"
        )
    else:
        settings = _read_config(config_path)

    name, is_embedding = _choose(checkpoint, settings, head_tensor)
    weight, weight_files = checkpoint.read(name)
    _check_weight(name, weight, settings)
    bias_name = _choose_bias(checkpoint, settings, name, is_embedding)
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
        if tuple(bias.shape) != (rows,):
            raise ExportError(f"{bias_name} has shape {tuple(bias.shape)}, not [{rows}]")
        tensors.append(_tensor(_base(new_name) + ".bias", bias_name, bias[:vocab_size], bias_files))
    files = {file: None for part in tensors for file in part.source_files}
    if config_path is not None:
        files[config_path] = None
    sha256 = write_head_folder(
        out,
        tensors,
        settings.text_for_head(weight.shape[1], vocab_size),
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


def _read_config(path: Path) -> Config:
    try:
        return Config(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ExportError(f"{path} cannot be read: {error}") from None


def _find(names: Sequence[str], wanted: str) -> str | None:
    """Returns the name in the checkpoint that is `wanted` behind any number of wrappers."""
    if wanted in names:
        return wanted
    found = [
        name
        for name in names
        if name.endswith("." + wanted) and _WRAPPERS.fullmatch(name[: -len(wanted)])
    ]
    if len(found) > 1:
        raise ExportError(f"several tensors may be the head: name one with --head-tensor: {found}")
    return found[0] if found else None


def _first(names: Sequence[str], wanted: Sequence[str]) -> str | None:
    return next((found for each in wanted if (found := _find(names, each)) is not None), None)


def _choose(checkpoint: Checkpoint, config: Config, head_tensor: str) -> tuple[str, bool]:
    """Returns the name of the head's tensor, and whether it is an embedding."""
    names = checkpoint.names()
    if head_tensor:
        if head_tensor not in names:
            raise ExportError(f"the checkpoint has no tensor {head_tensor}; {_similar(names)}")
        return head_tensor, any(_find([head_tensor], each) for each in EMBEDDING_NAMES)
    head = _first(names, HEAD_NAMES)
    embedding = _first(names, EMBEDDING_NAMES)
    _refuse_quantised(names, HEAD_NAMES if head is None else [head])
    # The embedding is correct for a tied model, whether or not a copy of it was stored as a head.
    if embedding is not None and (head is None or config.find("tie_word_embeddings") is True):
        return embedding, True
    if head is None:
        raise ExportError(
            f"the checkpoint has no head under a known name; name it with --head-tensor; "
            f"{_similar(names)}"
        )
    return head, False


def _refuse_quantised(names: Sequence[str], weights: Sequence[str]) -> None:
    suspects = [_base(weight) + suffix for weight in weights for suffix in QUANTISED_SUFFIXES]
    if (found := _first(names, suspects)) is not None:
        raise ExportError(f"the head is quantised (tensor {found}): use the unquantised model")


def _base(weight: str) -> str:
    return weight.removesuffix(".weight")


def _similar(names: Sequence[str]) -> str:
    words = ("head", "embed", "wte", "output")
    found = [name for name in names if name.endswith("weight") and any(w in name for w in words)]
    shown = [name for name in found if "layers." not in name][:8]
    return f"names that look like one: {', '.join(shown) or 'none'}"


def _choose_bias(
    checkpoint: Checkpoint, config: Config, weight: str, is_embedding: bool
) -> str | None:
    wants_bias = config.find("lm_head_bias")
    names = checkpoint.names()
    sibling = _base(weight) + ".bias"
    found = sibling if sibling in names else None
    if found is None and is_embedding:
        heads = [_base(name) + ".bias" for name in HEAD_NAMES]
        found = _first(names, heads)
    if wants_bias is True and found is None:
        raise ExportError(
            f"{CONFIG_FILE} sets lm_head_bias, but the checkpoint has no bias for {weight}"
        )
    return None if wants_bias is False else found


def _check_weight(name: str, weight: torch.Tensor, config: Config) -> None:
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
