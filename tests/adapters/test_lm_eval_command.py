"""The command logprobd-lm-eval, lm-eval's caches, several processes, the example and the commands of the README."""

import json
import pathlib
import re
import site
import subprocess
import sys

import compare
import lm_eval
import pytest
import tiny_model
from lm_eval.tasks import TaskManager
from logprobd_adapters.lm_eval import LogprobdLocalLM

ROOT = pathlib.Path(__file__).resolve().parents[2]
TASKS = ["--tasks", ",".join(compare.TASKS), "--include_path", str(tiny_model.HERE)]
MODULE = ["-m", "logprobd_adapters.lm_eval"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model.write_model(folder)
    return folder


def run(
    environment: dict[str, str], *command: str, cwd: pathlib.Path = ROOT
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def results_in(output: pathlib.Path) -> dict[str, float]:
    """Returns the accuracy and the perplexity that lm-eval has written below a folder."""
    (path,) = output.rglob("results_*.json")
    results = json.loads(path.read_text())["results"]
    questions, passages = (results[task] for task in compare.TASKS)
    return {"acc": questions["acc,none"], "word_perplexity": passages["word_perplexity,none"]}


@pytest.fixture(scope="module")
def expected(folder) -> dict[str, float]:
    """Returns the results of the model in double precision."""
    tasks = TaskManager(include_path=str(tiny_model.HERE), include_defaults=False)
    exact = compare.exact_model(folder, batch_size=1)
    results = lm_eval.simple_evaluate(
        exact, tasks=compare.TASKS, task_manager=tasks, bootstrap_iters=0
    )["results"]
    return {
        "acc": results[compare.TASKS[0]]["acc,none"],
        "word_perplexity": results[compare.TASKS[1]]["word_perplexity,none"],
    }


def test_the_command_evaluates_with_a_server(
    environment, start_server, folder, expected, tmp_path
) -> None:
    server = start_server("--model", str(folder))
    arguments = f"pretrained={folder},address={server.grpc}"

    command = [sys.executable, *MODULE, "--model", "logprobd", "--model_args", arguments, *TASKS]
    run(environment, *command, "--device", "cpu", "--output_path", str(tmp_path))

    assert results_in(tmp_path) == pytest.approx(expected, rel=1e-4)


def test_the_command_evaluates_with_a_server_that_demands_a_certificate_and_a_token(
    environment, start_server, security, folder, expected, tmp_path
) -> None:
    server = start_server("--model", str(folder), *security.server_flags())
    options = {"pretrained": folder, "address": server.grpc} | security.client_options()
    arguments = ",".join(f"{name}={value}" for name, value in options.items())

    command = [sys.executable, *MODULE, "--model", "logprobd", "--model_args", arguments, *TASKS]
    run(environment, *command, "--device", "cpu", "--output_path", str(tmp_path))

    assert results_in(tmp_path) == pytest.approx(expected, rel=1e-4)


@pytest.mark.usefixtures("built_operator")
def test_two_processes_share_the_requests_and_cache_them(
    environment, folder, expected, tmp_path
) -> None:
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    arguments = ["--model", "logprobd-local", "--model_args", f"pretrained={folder}"]
    caches = ["--cache_requests", "true", "--use_cache", str(tmp_path / "answers")]
    batches = ["--batch_size", "auto"]
    variables = environment | {
        "ACCELERATE_USE_CPU": "true",
        "LM_HARNESS_CACHE_PATH": str(tmp_path / "requests"),
    }

    command = [sys.executable, *launch, *MODULE, *arguments, *TASKS, *caches, *batches]
    run(variables, *command, "--output_path", str(tmp_path / "out"))

    assert results_in(tmp_path / "out") == pytest.approx(expected, rel=1e-4)
    assert len(list(tmp_path.glob("answers_rank[01].db"))) == 2
    assert list((tmp_path / "requests").iterdir())


@pytest.mark.usefixtures("built_operator")
def test_cached_continuations_are_not_scored_again(folder, tmp_path) -> None:
    tasks = TaskManager(include_path=str(tiny_model.HERE), include_defaults=False)
    rows = []
    results = []
    for _ in range(2):
        model = LogprobdLocalLM(str(folder), device="cpu")
        counts = compare.count_rows(model)
        found = lm_eval.simple_evaluate(
            *(model, None, compare.TASKS),
            task_manager=tasks,
            use_cache=str(tmp_path / "answers"),
            bootstrap_iters=0,
        )
        results.append(found["results"])
        rows.append(sum(counts))

    assert rows[0] > 0 and rows[1] == 0
    assert results[0] == results[1]


@pytest.mark.usefixtures("built_operator")
def test_the_example_shows_smaller_errors_and_fewer_rows(environment, tmp_path) -> None:
    done = run(environment, sys.executable, str(tiny_model.HERE / "compare.py"), cwd=tmp_path)

    assert "it/s" not in done.stderr and "fatal" not in done.stderr
    rows = [
        line for line in done.stdout.splitlines() if line.startswith(("| lm-eval", "| logprobd"))
    ]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    figures = {name: [float(figure) for figure in of_name] for name, *of_name in cells}
    stock, ours = figures["lm-eval"], figures["logprobd"]
    assert stock[0] > 0.05 and stock[1] > 0.5
    assert ours[0] < 4e-4 and ours[1] < 1e-2  # 1e-4 per token, of up to 4 and 100 tokens
    assert figures["logprobd-local"] == ours
    assert ours[2] < stock[2] / 2


@pytest.fixture(scope="module")
def readme_environment(
    environment, packages, operator_packages, tmp_path_factory
) -> dict[str, str]:
    """Returns the variables of an environment into which the packages may be installed."""
    folder = tmp_path_factory.mktemp("readme") / "venv"
    run(environment, sys.executable, "-m", "venv", str(folder))
    (own_site,) = folder.glob("lib/python3*/site-packages")
    seen = [*site.getsitepackages(), *(path for path in sys.path if "site-packages" in path)]
    (own_site / "tests.pth").write_text("\n".join(dict.fromkeys(seen)) + "\n")
    variables = environment | {
        "PATH": f"{folder / 'bin'}:{environment['PATH']}",
        "PIP_FIND_LINKS": f"{packages} {operator_packages}",
    }
    del variables["PYTHONPATH"], variables["LINEAR_LOGPROB_LIBRARY"]
    return variables


# Regression: the command stood alone, and failed without lm_eval.
@pytest.mark.timeout(1800)
def test_the_demonstration_of_the_root_readme_runs(readme_environment) -> None:
    text = (ROOT / "README.md").read_text()
    (block,) = re.findall(r"^```text\n(pip install [^`]*compare\.py)\n```", text, re.MULTILINE)

    # The variables name the folders of this build's packages.
    done = run(readme_environment, "bash", "-euc", block.replace("--find-links build/packages", ""))

    assert "| logprobd-local |" in done.stdout


@pytest.mark.timeout(1800)
def test_the_commands_of_the_readme_run(readme_environment) -> None:
    text = (ROOT / "client" / "adapters" / "README.md").read_text()
    (block,) = re.findall(r"^```sh\n(.*?)^```", text, re.DOTALL | re.MULTILINE)

    done = run(readme_environment, "bash", "-euc", block)

    assert done.stdout.count("logprobd_passages") >= 2
