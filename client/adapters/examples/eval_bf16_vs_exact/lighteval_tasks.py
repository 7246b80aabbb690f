"""The tasks of this folder for lighteval: --custom-tasks lighteval_tasks.py."""

from pathlib import Path

from lighteval.metrics.metrics import Metrics
from lighteval.tasks.lighteval_task import LightevalTaskConfig
from lighteval.tasks.requests import Doc

HERE = Path(__file__).parent


def question(line: dict, task_name: str) -> Doc:
    return Doc(
        task_name=task_name,
        query=f"Question: {line['question']} Answer:",
        choices=[f" {choice}" for choice in line["choices"]],
        gold_index=line["answer"],
    )


def passage(line: dict, task_name: str) -> Doc:
    return Doc(task_name=task_name, query=line["text"], choices=None, gold_index=None)


def _task(name: str, **settings: object) -> LightevalTaskConfig:
    return LightevalTaskConfig(
        name=f"logprobd_{name}",
        hf_repo=str(HERE / name),
        hf_subset="default",
        hf_avail_splits=["test"],
        evaluation_splits=["test"],
        **settings,
    )


TASKS_TABLE = [
    _task("questions", prompt_function=question, metrics=[Metrics.loglikelihood_acc]),
    _task("passages", prompt_function=passage, metrics=[Metrics.word_perplexity]),
]
