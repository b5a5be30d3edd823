"""Multiple choice by log-likelihood, side by side with lm-evaluation-harness: same questions, same model, same process.

    pip install lm-eval==0.4.13        # in a copy of the environment
    python benchmarks/eval_choice.py MODEL --suite financeiq --data DIR [--shots 5] [--limit 500] [--batch 16]
    python benchmarks/eval_choice.py MODEL --peer plain --limit 20      # transformers alone, an option at a time

The peer asks the tasks that `finlm eval --write-lm-eval` writes. Prints the accuracy of both, how many questions they
answer alike, the largest difference of a log-likelihood, and seconds (wall and CPU) of asking alone, without loading
the model. Exits 1 when an answer differs by more than rounding can explain. Timings of one machine, not a test.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from finlm.base import screen
from finlm.evals import answering, questions, suite
from finlm.inference.open import Opened, open_model

TOLERANCE = 5e-3  # nats; larger in half precision
Scores = dict[str, list[float]]  # by question


def main() -> int:
    """Ask both and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("model", type=Path, help="Hugging Face model directory")
    parser.add_argument("--suite", choices=("exam", "recall", "financeiq", "ceval"), default="exam")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--world", type=Path, help="recipe of the fictional world, for exam and recall")
    parser.add_argument("--shots", type=int, default=5)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--peer", choices=("lm-eval", "plain"), default="lm-eval", help="default: %(default)s")
    parser.add_argument("--batch", type=int, default=16, help="lm-eval's batch size")
    parser.add_argument("--tolerance", type=float, default=TOLERANCE, help="nats (default: %(default)s)")
    options = parser.parse_args()
    wanted = suite.Options(options.suite, "likelihood", options.shots, options.data, options.world, options.limit)
    opened = open_model(options.model)
    with tempfile.TemporaryDirectory() as directory:
        tasks = suite.write_lm_eval_task(options.model, wanted, Path(directory) / "tasks")
        ours, right, our_seconds = ask_finlm(opened, wanted, Path(directory))
        if options.peer == "plain":
            theirs, their_seconds = ask_plain(opened, tasks)
        else:
            theirs, their_seconds = ask_lm_eval(opened, tasks, f"finlm_{options.suite}", options.batch)
    rows = [
        (name, f"{len(scores):,}", f"{100 * accuracy(scores, right):.2f} %", f"{wall:.1f}", f"{cpu:.1f}")
        for name, scores, (wall, cpu) in (("finlm", ours, our_seconds), (options.peer, theirs, their_seconds))
    ]
    screen.table(("", "questions", "micro accuracy", "seconds", "CPU seconds"), rows)
    if ours.keys() != theirs.keys():
        screen.say("the two were not asked the same questions")
        return 1
    far = max(abs(a - b) for key in ours for a, b in zip(ours[key], theirs[key], strict=True))
    other = [key for key in ours if best(ours[key]) != best(theirs[key])]
    unexplained = [key for key in other if sorted(ours[key])[-1] - sorted(ours[key])[-2] > 2 * options.tolerance]
    result = {
        "questions": len(ours),
        "answered_alike": len(ours) - len(other),
        "largest_difference_nats": far,
        "speedup_wall": their_seconds[0] / our_seconds[0],
        "speedup_cpu": their_seconds[1] / our_seconds[1],
    }
    print(json.dumps(result))
    return 1 if unexplained or far > options.tolerance else 0


def ask_finlm(opened: Opened, wanted: suite.Options, directory: Path) -> tuple[Scores, dict[str, int], Any]:
    """(scores, the right letters' places, (wall, CPU) seconds)."""
    read = questions.read_questions(
        wanted.suite, wanted.data, questions.find_world(wanted.suite, opened.run, wanted.world)
    )
    chosen = suite.draw_questions(read.questions, wanted.limit)
    begun = clock()
    answers = answering.answer_questions(
        opened, read, chosen, "likelihood", wanted.shots or 0, directory / "answers.jsonl"
    )
    seconds = since(begun)
    scores = {question.sha256: list(answer.scores) for question, answer in zip(chosen, answers, strict=True)}
    return scores, {question.sha256: "ABCD".index(question.answer) for question in chosen}, seconds


def ask_lm_eval(opened: Opened, tasks: Path, group: str, batch: int) -> tuple[Scores, Any]:
    """(scores, (wall, CPU) seconds)."""
    try:
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        sys.exit(f"lm-eval cannot be imported: {error}")
    manager = TaskManager(include_path=str(tasks))
    model = HFLM(pretrained=opened.model, tokenizer=opened.tokenizer, batch_size=batch, max_length=opened.context)
    gc.collect()
    begun = clock()
    results = simple_evaluate(model=model, tasks=[group], task_manager=manager, log_samples=True, bootstrap_iters=0)
    seconds = since(begun)
    screen.say(f"lm-eval's own average of the subjects: {results['results'][group]['acc,none']:.6f}")
    rows = (row for rows in results["samples"].values() for row in rows)
    return {row["doc"]["id"]: [float(value[0]) for value in row["filtered_resps"]] for row in rows}, seconds


def ask_plain(opened: Opened, tasks: Path) -> tuple[Scores, Any]:
    """As ask_lm_eval, by one forward pass for every option."""
    import torch

    rows = [json.loads(line) for file in sorted(tasks.glob("*.jsonl")) for line in file.read_text("utf-8").splitlines()]
    begun, scores = clock(), dict[str, list[float]]()
    for row in rows:
        options = [opened.tokenizer(row["prompt"] + letter)["input_ids"] for letter in "ABCD"]
        alike = next(place for place, ids in enumerate(zip(*options, strict=False)) if len(set(ids)) > 1)
        for ids in options:
            with torch.inference_mode():
                logits = opened.model(torch.tensor([ids], device=opened.device)).logits[0, :-1].float()
            chosen = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:], device=opened.device)[:, None])
            scores.setdefault(row["id"], []).append(float(chosen[alike - 1 :].sum()))
    return scores, since(begun)


def clock() -> tuple[float, float]:
    """(wall, CPU) seconds."""
    return time.perf_counter(), time.process_time()


def since(begun: tuple[float, float]) -> tuple[float, float]:
    """(wall, CPU) seconds since a clock."""
    wall, cpu = clock()
    return wall - begun[0], cpu - begun[1]


def best(scores: list[float]) -> int:
    """The place of the largest."""
    return scores.index(max(scores))


def accuracy(scores: Scores, right: dict[str, int]) -> float:
    """The share of questions whose likeliest letter is right."""
    return sum(best(own) == right[key] for key, own in scores.items()) / len(scores)


if __name__ == "__main__":
    sys.exit(main())
