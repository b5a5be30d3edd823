"""A suite as tasks of lm-evaluation-harness (github.com/EleutherAI/lm-evaluation-harness, 0.4): the same questions.

    finlm eval MODEL --suite financeiq --data DIR --write-lm-eval tasks
    lm_eval --model hf --model_args pretrained=MODEL --include_path tasks --tasks finlm_financeiq

One task a subject and a group over them whose accuracy is the macro average. Prompts are written out, examples and all,
as this model would get them from `finlm eval --mode likelihood`: benchmarks/eval_choice.py holds the answers equal.
"""

from __future__ import annotations

import json
from pathlib import Path

from ruamel.yaml import YAML

from finlm.base import files
from finlm.base.errors import UserError
from finlm.data.synthetic_exam import LETTERS
from finlm.evals import prompts, questions, suite
from finlm.train.opened import open_model


def write(checkpoint: Path, options: suite.Options, out: Path) -> Path:
    """The directory `out` with tasks and questions. Raises UserError for what lm-eval cannot ask."""
    if out.exists():
        raise UserError(f"{out} exists already", fix="give a new directory")
    if options.mode not in (None, "likelihood"):
        raise UserError(
            "only likelihoods of letters are written as lm-eval tasks", fix=f"leave out --mode {options.mode}"
        )
    shots = suite.examples(options, "likelihood")
    opened = open_model(checkpoint)
    asked = questions.read(options.suite, options.data, suite.world(opened, options.world))
    by_subject: dict[str, list[dict[str, object]]] = {}
    for prompt in prompts.continuations(opened, asked, suite.chosen(asked.questions, options.limit), shots):
        row = {"prompt": prompt.text, "answer": LETTERS.index(prompt.question.answer), "id": prompt.question.sha256}
        by_subject.setdefault(prompt.question.subject, []).append(row)
    group = f"finlm_{asked.name}"
    with files.new_directory(out) as directory:
        for number, (subject, rows) in enumerate(sorted(by_subject.items())):
            lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            files.write_text(directory / f"{number:02}.jsonl", lines)
            place = (out / f"{number:02}.jsonl").absolute()
            _yaml(directory / f"{number:02}.yaml", _task(f"{group}_{number:02}", f"{group}: {subject}", place))
        _yaml(directory / f"{group}.yaml", _group(group, len(by_subject)))
    return out


def _task(name: str, alias: str, rows: Path) -> dict[str, object]:
    return {
        "task": name,
        "task_alias": alias,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(rows)}},
        "test_split": "test",
        "num_fewshot": 0,  # the examples stand in the prompt
        "output_type": "multiple_choice",
        "doc_to_text": "{{prompt}}",
        "doc_to_choice": list(LETTERS),
        "doc_to_target": "{{answer}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        "metadata": {"version": 1},
    }


def _group(name: str, subjects: int) -> dict[str, object]:
    return {
        "group": name,
        "task": [f"{name}_{number:02}" for number in range(subjects)],
        "aggregate_metric_list": [{"metric": "acc", "weight_by_size": False}],
        "metadata": {"version": 1},
    }


def _yaml(path: Path, value: dict[str, object]) -> None:
    with path.open("w", encoding="utf-8") as file:
        YAML(typ="safe", pure=True).dump(value, file)
