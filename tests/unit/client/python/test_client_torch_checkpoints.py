"""Tensors are found in the checkpoints that PyTorch and Megatron write, and what is wrong with one is said."""

import argparse
import json
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from logprobd._head_folder import ExportError
from logprobd._torch_checkpoints import open_checkpoint

HIDDEN = 2


def values(rows, begin=0):
    return torch.arange(begin, begin + rows * HIDDEN, dtype=torch.float32).reshape(rows, HIDDEN)


def found(path):
    """Returns all tensors of a checkpoint as lists."""
    checkpoint = open_checkpoint(path)
    return {name: checkpoint.read(name)[0].tolist() for name in checkpoint.names()}


def files_of(path, name):
    checkpoint = open_checkpoint(path)
    return [str(file.relative_to(checkpoint.folder)) for file in checkpoint.read(name)[1]]


# Which kind of checkpoint a folder is


def write_pickle(folder):
    torch.save({"pickle": values(1)}, folder / "pytorch_model.bin")


def write_index(folder):
    torch.save({"index": values(1)}, folder / "part.bin")
    weight_map = {"weight_map": {"index": "part.bin"}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(weight_map))


def write_ranks(folder):
    write_rank(folder, "mp_rank_00", {"ranks": values(1)})


def write_distributed(folder):
    dcp.save({"distributed": values(1)}, checkpoint_id=folder)


def write_rank(folder, name, model, *, file="model_optim_rng.pt", **more):
    (folder / name).mkdir(parents=True)
    torch.save({"model": model, **more}, folder / name / file)


WRITERS = [write_pickle, write_index, write_ranks, write_distributed]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("count", range(1, 5))
def test_a_folder_of_several_kinds_is_read_as_the_most_specific(tmp_path, count):
    for write in WRITERS[:count]:
        write(tmp_path)

    (name,) = found(tmp_path)

    expected = WRITERS[count - 1].__name__.removeprefix("write_")
    assert name.removeprefix("model.") == expected


@pytest.mark.parametrize(
    ("text", "folder"),
    [("7", "iter_0000007"), ("12345678\n", "iter_12345678"), ("release", "release")],
)
def test_megatrons_tracker_file_names_the_folder(tmp_path, text, folder):
    write_pickle(tmp_path)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(text)
    with pytest.raises(
        ExportError, match=f"{folder}, which latest_checkpointed_iteration.txt names"
    ):
        open_checkpoint(tmp_path)

    write_rank(tmp_path / folder, "mp_rank_00", {"head": values(2)})

    assert found(tmp_path) == {"model.head": values(2).tolist()}
    assert open_checkpoint(tmp_path).folder == tmp_path / folder


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth", ".ckpt"])
def test_a_file_of_torch_is_read_by_its_path(tmp_path, suffix):
    path = tmp_path / f"model{suffix}"
    state = {
        "a": values(2),
        "b": {"c": values(1), "d": {"e": values(3)}},
        "step": 3,
        "f": [values(1)],
    }
    torch.save(state, path)

    assert found(path) == {
        "a": values(2).tolist(),
        "b.c": values(1).tolist(),
        "b.d.e": values(3).tolist(),
    }
    assert files_of(path, "b.c") == [path.name]
    with pytest.raises(
        ExportError, match=f"has no pytorch_model.bin; to use {path.name}, give the"
    ):
        open_checkpoint(tmp_path)


def test_a_file_that_holds_no_dictionary_is_refused(tmp_path):
    torch.save([values(1)], tmp_path / "model.pt")

    with pytest.raises(ExportError, match="contains a list, not a dictionary of tensors"):
        open_checkpoint(tmp_path / "model.pt")


def test_a_metadata_file_of_another_format_is_no_checkpoint(tmp_path):
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')

    with pytest.raises(ExportError, match="contains no checkpoint"):
        open_checkpoint(tmp_path)


def test_the_reason_of_a_file_that_cannot_be_read_is_one_line(tmp_path):
    (tmp_path / "model.pt").write_bytes(b"junk")

    with pytest.raises(
        ExportError, match="model.pt cannot be read with weights_only=True: "
    ) as error:
        open_checkpoint(tmp_path / "model.pt")

    assert "\n" not in str(error.value)


# Files with an index


def test_a_file_of_an_index_may_be_in_a_folder_below(tmp_path):
    (tmp_path / "parts").mkdir()
    torch.save({"a": values(1), "b": values(2)}, tmp_path / "parts" / "1.bin")
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {"b": "parts/1.bin", "c": "absent.bin"}}))

    checkpoint = open_checkpoint(tmp_path)

    assert checkpoint.names() == ["b", "c"]
    assert checkpoint.read("b")[0].tolist() == values(2).tolist()
    assert files_of(tmp_path, "b") == [index.name, "parts/1.bin"]
    with pytest.raises(ExportError, match="absent.bin, in which the index places c, is missing"):
        checkpoint.read("c")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("part.bin", "part.bin has no b, which the index places there"),
        ("../part.bin", "'../part.bin', which is not below its folder"),
        (3, "names the file 3, which is not below its folder"),
    ],
)
def test_an_index_that_does_not_fit_is_explained(tmp_path, name, message):
    torch.save({"a": values(1)}, tmp_path / "part.bin")
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {"b": name}}))

    with pytest.raises(ExportError, match=message):
        open_checkpoint(tmp_path).read("b")


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_a_malformed_index_is_refused(tmp_path, text):
    (tmp_path / "pytorch_model.bin.index.json").write_text(text)

    with pytest.raises(ExportError, match="pytorch_model.bin.index.json is malformed"):
        open_checkpoint(tmp_path)


# Ranks of Megatron


def test_ranks_are_joined_in_the_order_of_their_numbers(tmp_path):
    for rank in range(11):  # "mp_rank_10" sorts before "mp_rank_9"
        write_rank(tmp_path, f"mp_rank_{rank}", {"head": values(1, 10 * rank)})

    expected = [[10.0 * rank, 10 * rank + 1] for rank in range(11)]
    assert found(tmp_path) == {"model.head": expected}
    assert files_of(tmp_path, "model.head")[9:] == [
        f"mp_rank_{rank}/model_optim_rng.pt" for rank in (9, 10)
    ]


def test_a_tensor_is_read_from_the_first_stage_that_has_it(tmp_path):
    for rank in range(2):
        first, last = {"embedding": values(1, rank)}, {"head": values(1, 5 + rank)}
        write_rank(tmp_path, f"mp_rank_0{rank}_000", first, file="model_rng.pt")
        for expert in range(2):  # hold the same copies
            write_rank(tmp_path, f"mp_rank_0{rank}_001_00{expert}", last)
    (tmp_path / "mp_rank_old").mkdir()

    assert found(tmp_path) == {
        "model.embedding": [[0, 1], [1, 2]],
        "model.head": [[5, 6], [6, 7]],
    }
    assert files_of(tmp_path, "model.head") == [
        f"mp_rank_0{rank}_001_000/model_optim_rng.pt" for rank in range(2)
    ]
    assert files_of(tmp_path, "model.embedding")[0] == "mp_rank_00_000/model_rng.pt"


@pytest.mark.parametrize(
    ("ranks", "arguments", "missing"),
    [
        ((0, 2), {}, "rank 1 of 2"),
        ((1,), {}, "rank 0 of 1"),
        ((0, 1), {"tensor_model_parallel_size": 4}, "rank 2 of 4"),
        ((0, 1), {"tensor_model_parallel_size": 2}, None),
        ((0, 1), {"other": 4}, None),
    ],
)
def test_every_rank_must_be_there(tmp_path, ranks, arguments, missing):
    for rank in ranks:
        args = argparse.Namespace(**arguments)
        write_rank(tmp_path, f"mp_rank_0{rank}", {"head": values(1)}, args=args)

    if missing is None:
        assert len(found(tmp_path)["model.head"]) == len(ranks)
    else:
        with pytest.raises(ExportError, match=f"lacks tensor-parallel {missing} "):
            open_checkpoint(tmp_path)


def test_a_tensor_must_be_in_every_rank(tmp_path):
    write_rank(tmp_path, "mp_rank_00", {"head": values(1), "one": values(1)})
    write_rank(tmp_path, "mp_rank_01", {"head": values(1)})

    with pytest.raises(ExportError, match="tensor-parallel rank 1 in .* has no model.one"):
        open_checkpoint(tmp_path).read("model.one")


# torch.distributed.checkpoint


@pytest.fixture
def saved(tmp_path, recwarn):
    """Returns a folder with two tensors of 3 and 2 rows in one file, and a function that changes its index."""
    dcp.save({"a": values(3), "b": values(2, 6), "step": 3}, checkpoint_id=tmp_path)

    def change(edit):
        index = tmp_path / ".metadata"
        metadata = pickle.loads(index.read_bytes())
        places = {key.fqn: (key, place) for key, place in metadata.storage_data.items()}
        edit(metadata, places)
        index.write_bytes(pickle.dumps(metadata))

    return tmp_path, change


def test_every_tensor_is_read_from_its_place_in_the_file(saved):
    folder, _ = saved

    assert found(folder) == {"a": values(3).tolist(), "b": values(2, 6).tolist()}
    assert files_of(folder, "a") == [".metadata", "__0_0.distcp"]


def as_one_tensor(metadata, places):
    """Makes `b` the last rows of `a`."""
    (_, place) = places["b"]
    key = type(places["b"][0])("a", torch.Size([3, 0]))
    metadata.storage_data = {places["a"][0]: places["a"][1], key: place}
    metadata.state_dict_metadata["a"].size = torch.Size([5, 2])
    del metadata.state_dict_metadata["b"]


def test_chunks_in_one_file_are_put_in_their_places(saved):
    folder, change = saved
    change(as_one_tensor)

    assert found(folder) == {"a": values(5).tolist()}
    assert files_of(folder, "a") == [".metadata", "__0_0.distcp"]


class OwnList(list):
    """A class of the trainer in the index."""


class OwnDict(dict):
    """Another one."""


class OwnArguments:
    """One that is made with arguments and whose state is no dictionary."""

    def __init__(self, first):
        self.first = first

    def __reduce__(self):
        return type(self), (self.first,), [1]

    def __setstate__(self, state):
        pass


def test_objects_of_a_trainer_in_the_index_do_not_matter(saved):
    folder, change = saved

    def edit(metadata, places):
        metadata.planner_data = [
            OwnList([1, 2]),
            OwnDict(a=1, b=2),
            OwnArguments(3),
            {1: OwnList([1])},
        ]

    change(edit)

    assert list(found(folder)) == ["a", "b"]


def beyond_the_size(metadata, places):
    as_one_tensor(metadata, places)
    metadata.state_dict_metadata["a"].size = torch.Size([4, 2])


def a_chunk_is_missing(metadata, places):
    del metadata.storage_data[places["a"][0]]


def a_row_is_missing(metadata, places):
    metadata.state_dict_metadata["a"].size = torch.Size([4, 2])


def compressed(metadata, places):
    places["a"][1].transform_descriptors = ["zstd"]


def outside_the_folder(metadata, places):
    places["a"][1].relative_path = "../x.distcp"


def another_object(metadata, places):
    (step,) = [place for key, place in metadata.storage_data.items() if key.fqn == "step"]
    places["a"][1].offset, places["a"][1].length = step.offset, step.length


def half_a_range(metadata, places):
    places["a"][1].length //= 2


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (beyond_the_size, r"a: a chunk in .*distcp is outside the tensor's size \(4, 2\)"),
        (a_chunk_is_missing, r"has only 0 elements of a, size \(3, 2\)"),
        (a_row_is_missing, r"has only 6 elements of a, size \(4, 2\)"),
        (compressed, "a in .* is compressed, which is not supported"),
        (outside_the_folder, "'../x.distcp', which is not below its folder"),
        (another_object, "contains a int in the place of a tensor"),
        (half_a_range, "__0_0.distcp cannot be read: "),
    ],
)
def test_what_is_wrong_with_a_distributed_checkpoint_is_said(saved, edit, message):
    folder, change = saved
    change(edit)
    checkpoint = open_checkpoint(folder)

    with pytest.raises(ExportError, match=message):
        checkpoint.read("a")
    assert (
        "b" not in checkpoint.names() or checkpoint.read("b")[0].tolist() == values(2, 6).tolist()
    )
