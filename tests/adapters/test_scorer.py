"""RemoteScorer and LocalScorer give the same scores, which agree with double precision."""

import json
import pathlib
import pickle
import sys
import types

import logprobd
import ml_dtypes
import numpy as np
import pytest
import torch
from document_examples import run_example
from linear_logprob_reference import reference, reference_logits
from logprobd.errors import InvalidArgument
from logprobd_adapters import LocalScorer, RemoteScorer, Scorer
from logprobd_adapters.scorer import connect
from model_folder import write_safetensors

ROWS, HIDDEN, VOCAB, PADDING = 9, 40, 331, 5
SHAPE = {"scale": 0.3, "softcap": 9.0}
OUTPUTS = (
    *("logprob", "entropy", "lse", "argmax", "greedy", "sum_p_squared"),
    *("max_logit", "min_logit", "target_rank"),
)


class Case:
    """A bf16 head with bias, scale, cap and padding, and bf16 rows."""

    def __init__(self) -> None:
        random = np.random.default_rng(3)
        spread = 4 / SHAPE["scale"] / HIDDEN**0.5
        weight = random.standard_normal((VOCAB + PADDING, HIDDEN)) * spread
        self.arrays = {
            "lm_head.weight": weight.astype(ml_dtypes.bfloat16),
            "lm_head.bias": random.standard_normal(VOCAB + PADDING).astype(np.float32),
        }
        weight, bias = (torch.from_numpy(a.astype(np.float32)) for a in self.arrays.values())
        self.weight, self.bias = weight.bfloat16(), bias
        self.hidden = torch.from_numpy(random.standard_normal((ROWS, HIDDEN))).bfloat16()
        self.targets = torch.from_numpy(random.integers(0, VOCAB, ROWS))
        self.targets[2] = self.logits()[2].argmax()
        self.temperature = torch.from_numpy(random.uniform(0.3, 2, ROWS).astype(np.float32))

    def logits(self, temperature: float | torch.Tensor = 1.0) -> torch.Tensor:
        return reference_logits(
            self.hidden,
            self.weight,
            self.bias,
            temperature=temperature,
            vocab_valid=VOCAB,
            **SHAPE,
        )

    def write(self, folder: pathlib.Path) -> None:
        write_safetensors(folder / "model.safetensors", self.arrays)
        config = {
            "model_type": "muse_glimmer",
            "hidden_size": HIDDEN,
            "vocab_size": VOCAB,
            "tie_word_embeddings": False,
            "output_multiplier": SHAPE["scale"],
            "final_logit_softcapping": SHAPE["softcap"],
        }
        (folder / "config.json").write_text(json.dumps(config))

    def local(self) -> LocalScorer:
        return LocalScorer(self.weight, self.bias, vocab_size=VOCAB, **SHAPE)


@pytest.fixture(scope="module")
def case() -> Case:
    return Case()


@pytest.fixture(scope="module")
def client(case, binaries, tmp_path_factory):
    from server_process import ServerProcess  # noqa: PLC0415

    folder = tmp_path_factory.mktemp("head")
    case.write(folder)
    with ServerProcess(binaries, "--model", str(folder)) as server:
        with logprobd.Client(server.grpc) as client:
            yield client


@pytest.fixture
def scorer(kind, case, request) -> Scorer:
    return case.local() if kind == "local" else RemoteScorer(request.getfixturevalue("client"))


@pytest.fixture
def unused_operator(monkeypatch) -> None:
    """Lets a LocalScorer be made, also where the operator is not built. It cannot score."""
    monkeypatch.setitem(sys.modules, "logprobd_ops", types.SimpleNamespace(linear_logprob=None))


def test_sizes_are_those_of_the_head_without_padding(scorer) -> None:
    assert (scorer.hidden_size, scorer.vocab_size) == (HIDDEN, VOCAB)


def test_scores_agree_with_double_precision(scorer, case) -> None:
    expected = reference(
        *(case.hidden, case.weight, case.targets, case.bias),
        temperature=case.temperature,
        vocab_valid=VOCAB,
        **SHAPE,
    )

    scores = scorer.score(case.hidden, case.targets, temperature=case.temperature, outputs=OUTPUTS)

    for name in ("logprob", "entropy", "lse", "sum_p_squared", "max_logit", "min_logit"):
        values = getattr(scores, name)
        assert values.dtype == torch.float32
        torch.testing.assert_close(values.double(), getattr(expected, name), atol=3e-5, rtol=1e-5)
    assert scores.argmax_id.tolist() == expected.argmax.tolist()
    assert scores.target_rank.tolist() == expected.target_rank.tolist()
    assert scores.greedy.tolist() == [row == 2 for row in range(ROWS)]


# Regression: the operator took no tensor of integers, and the server did.
class Model:
    """What from_model needs of a Hugging Face model."""

    def __init__(self, case: Case, **config: object) -> None:
        self._head = torch.nn.Linear(HIDDEN, VOCAB + PADDING, bias=False)
        self._head.weight = torch.nn.Parameter(case.weight)
        self.config = self
        self.settings = {"hidden_size": HIDDEN, "vocab_size": VOCAB} | config

    def get_output_embeddings(self) -> torch.nn.Linear:
        return self._head

    def to_json_string(self, *, use_diff: bool) -> str:
        assert not use_diff
        return json.dumps(self.settings)


@pytest.mark.parametrize(
    ("config", "options", "shape"),
    [
        ({"model_type": "hyperclovax", "logits_scaling": 0.5}, {}, {"scale": 0.5}),
        ({"model_type": "granite", "logits_scaling": 8.0}, {}, {"scale": 0.125}),
        ({"model_type": "recurrent_gemma", "logits_soft_cap": 5.0}, {}, {"softcap": 5.0}),
        ({"model_type": "gemma2", "final_logit_softcapping": 5.0}, {"softcap": 0}, {}),
        # Regression: the missing or wrong key was refused although the caller says the value.
        ({"model_type": "minicpm"}, {"scale": 0.5}, {"scale": 0.5}),
        ({"model_type": "granite", "logits_scaling": -1}, {"scale": 0.5}, {"scale": 0.5}),
        (
            {"model_type": "llama", "my_logit_cap": 5.0},
            {"softcap": 5.0, "ignored_keys": ["my_logit_cap"]},
            {"softcap": 5.0},
        ),
    ],
)
def test_the_head_of_a_model_has_its_transforms(
    case, built_operator, config, options, shape
) -> None:
    scorer = LocalScorer.from_model(Model(case, **config), **options)

    expected = LocalScorer(case.weight, vocab_size=VOCAB, **shape)
    scores = [each.score(case.hidden, case.targets).logprob for each in (scorer, expected)]
    assert torch.equal(*scores)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama", "my_logit_cap": 5.0},
        {"model_type": "minicpm"},
        {"model_type": "bert"},
    ],
)
def test_a_model_with_logits_that_are_not_understood_is_refused(case, config) -> None:
    with pytest.raises(InvalidArgument):
        LocalScorer.from_model(Model(case, **config))


def test_a_model_of_an_unknown_type_is_a_warning(case, unused_operator) -> None:
    with pytest.warns(UserWarning, match="a_new_type is not known"):
        LocalScorer.from_model(Model(case, model_type="a_new_type"))


# Regression: greedy of unsigned ids was torch's own error, or compared 156 with -100 in 8 bits.
@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.int32])
def test_targets_may_be_unsigned(scorer, case, dtype) -> None:
    targets = case.targets % 256
    targets[:2] = torch.tensor([156, int(case.logits()[1].argmax()) % 256])
    expected = scorer.score(case.hidden, targets, outputs=("logprob", "greedy"))

    found = scorer.score(case.hidden, targets.to(dtype), outputs=("logprob", "greedy"))

    assert torch.equal(found.logprob, expected.logprob)
    assert torch.equal(found.greedy, expected.greedy)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_temperatures_may_be_integers(scorer, case, dtype) -> None:
    temperatures = torch.arange(1, ROWS + 1, dtype=dtype)

    scores, expected = (
        scorer.score(case.hidden, case.targets, temperature=each).logprob
        for each in (temperatures, temperatures.float())
    )

    assert torch.equal(scores, expected)


def test_candidates_and_top_k_agree_with_double_precision(scorer, case) -> None:
    logprobs = case.logits().log_softmax(-1)
    ids = torch.arange(2 * ROWS).reshape(ROWS, 2)
    lists = [list(range(row)) for row in range(ROWS)]
    offsets = torch.tensor([0, *np.cumsum([len(each) for each in lists])])
    flat = torch.tensor(sum(lists, []))

    of_array = scorer.score(case.hidden, case.targets, candidates=ids, top_k=3)
    of_lists = scorer.score(case.hidden, case.targets, candidates=(flat, offsets))

    expected = torch.cat([logprobs[row, torch.tensor(lists[row])] for row in range(1, ROWS)])
    close = {"atol": 3e-5, "rtol": 1e-5, "check_dtype": False}
    torch.testing.assert_close(of_array.candidate_logprobs, logprobs.gather(1, ids), **close)
    torch.testing.assert_close(of_lists.candidate_logprobs, expected, **close)
    best = logprobs.topk(3)
    assert of_array.top_k_ids.tolist() == best.indices.tolist()
    torch.testing.assert_close(of_array.top_k_logprobs, best.values, **close)


def test_both_scorers_give_the_same_bits_on_a_cpu(client, case, built_operator) -> None:
    flat, offsets = torch.arange(2 * ROWS), torch.arange(0, 2 * ROWS + 1, 2)
    outputs = ("logprob", "entropy", "lse", "argmax", "greedy", "target_rank")

    remote, local = (
        scorer.score(
            case.hidden, case.targets, outputs=outputs, candidates=(flat, offsets), top_k=4
        )
        for scorer in (RemoteScorer(client), case.local())
    )

    names = ("logprob", "entropy", "lse", "argmax_id", "greedy", "target_rank")
    for name in (*names, "top_k_ids", "top_k_logprobs", "candidate_logprobs"):
        assert torch.equal(getattr(remote, name), getattr(local, name)), name


def test_ignored_rows_hold_zeros(scorer, case) -> None:
    targets = case.targets.clone()
    targets[1] = -7

    scores = scorer.score(case.hidden, targets, outputs=("entropy", "greedy"), ignore_index=-7)

    assert scores.logprob[1] == 0 and scores.entropy[1] == 0 and not scores.greedy[1]
    assert (scores.logprob[2:] < 0).all()


def test_no_rows_give_no_scores(scorer, case) -> None:
    scores = scorer.score(case.hidden[:0], case.targets[:0], outputs=("argmax",))

    assert scores.logprob.shape == scores.argmax_id.shape == (0,)


def test_an_output_that_was_not_requested_cannot_be_read(scorer, case) -> None:
    scores = scorer.score(case.hidden, case.targets)

    with pytest.raises(AttributeError, match="entropy was not requested: call score with outputs="):
        _ = scores.entropy


def test_bad_arguments_are_refused(scorer, case) -> None:
    with pytest.raises(ValueError, match="outputs has .entropies."):
        scorer.score(case.hidden, case.targets, outputs=("entropies",))
    with pytest.raises(ValueError, match="hidden"):
        scorer.score(case.hidden[:, :-1], case.targets)
    with pytest.raises((ValueError, IndexError), match=str(VOCAB)):
        scorer.score(case.hidden, case.targets + VOCAB)


def test_a_client_is_made_from_the_options_of_commands(
    case, client, start_server, security, tmp_path, monkeypatch
) -> None:
    case.write(tmp_path)
    server = start_server("--model", str(tmp_path), *security.server_flags())
    expected = RemoteScorer(client).score(case.hidden, case.targets)

    with connect(server.grpc, **security.client_options()) as secure:
        scores = RemoteScorer(secure).score(case.hidden, case.targets)
    for name, value in security.client_variables().items():
        monkeypatch.setenv(name, value)
    with connect(server.grpc) as secure:
        by_variables = RemoteScorer(secure).score(case.hidden, case.targets)

    assert torch.equal(scores.logprob, expected.logprob)
    assert torch.equal(by_variables.logprob, expected.logprob)


def test_a_bad_file_of_a_token_is_an_error_that_does_not_show_it(tmp_path) -> None:
    path = tmp_path / "token"
    for text, problem in (("\n", "has no token"), ("se\ncret", "has 7 characters")):
        path.write_text(text)
        with pytest.raises(InvalidArgument, match=problem) as error:
            connect(token_file=path)
        assert "cret" not in str(error.value)
    with pytest.raises(InvalidArgument, match="token_file: .*missing cannot be read"):
        connect(token_file=tmp_path / "missing")


def test_a_remote_scorer_can_be_pickled(client, case) -> None:
    scorer = RemoteScorer(client)
    copy = pickle.loads(pickle.dumps(scorer))

    scores = (each.score(case.hidden, case.targets).logprob for each in (scorer, copy))

    assert torch.equal(*scores)


def test_a_local_scorer_refuses_a_head_of_another_shape(case, unused_operator) -> None:
    with pytest.raises(ValueError, match=r"weight has shape \[336, 40, 1\], expected \[V, H\]"):
        LocalScorer(case.weight[..., None])
    with pytest.raises(ValueError, match="vocab_size is 337, expected 1 to 336"):
        LocalScorer(case.weight, vocab_size=337)


def test_the_example_of_the_readme_runs(built_operator, capsys) -> None:
    run_example("README.md", "Scorers")

    assert capsys.readouterr().out.count("tensor(") == 4


# Regression: the error was "No module named 'logprobd_ops'", from which nobody knows what to install.
def test_a_missing_operator_is_an_error_that_names_the_package(case, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "logprobd_ops", None)

    with pytest.raises(ModuleNotFoundError, match="run pip install logprobd-ops, or score by a"):
        LocalScorer(case.weight)


def test_a_module_that_the_operator_lacks_is_named(case, monkeypatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "logprobd_ops"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "logprobd_ops._memory", None)

    with pytest.raises(ModuleNotFoundError, match=r"logprobd_ops\._memory"):
        LocalScorer(case.weight)
