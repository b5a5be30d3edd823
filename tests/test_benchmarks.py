"""Every program of benchmarks/ runs at toy size on a CPU and prints its table. Nothing is timed here."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest

from finlm.base.rundir import RunDir
from finlm.world import writer

from dialogues import run, sft
from helpers import QUICKSTART, ROOT
from ranks import Ranks

pytestmark = pytest.mark.slow
BENCHMARKS = ROOT / "benchmarks"
# Arguments, and lines that must be printed. NUMBER is any; {corpus}, {export}, {sft} and {tmp} are made below.
TOYS = {
    "data_dedup.py": ("{corpus} --documents 300", r"signatures +NUMBER documents/s", r"recall +1\.0000"),
    "data_merge.py": ("30_000 --bands 3", r"search +NUMBER CPU s", r"memory +NUMBER MiB"),
    "data_prepare.py": (
        "--toy --workers 1 --work {tmp}",
        "finlm .* NUMBER CPU s",
        "batched .* CPU s",
        "per row .* CPU s",
        *(f"{way} .* CPU s .* encoder alone NUMBER, share NUMBER" for way in ("bare", "near", "xuanyuan")),
    ),
    "data_rows.py": ("--length 256 --tokens 2048 --dialogues 200 --steps 3", "finlm +NUMBER ms", "trl +NUMBER ms"),
    "eval_choice.py": (
        f"{{export}} --world {QUICKSTART} --peer plain --limit 4 --shots 1",
        *("finlm +4 ", "plain +4 ", '"answered_alike": 4'),
    ),
    "gpu_attention.py": ("--toy", "reward, padded +flash", "GRPO, padded on both sides +flash"),
    "gpu_checkpoint.py": ("--toy --where {tmp}", '"stall_seconds": NUMBER', '"same_loss_as_before": true'),
    "gpu_determinism.py": ("--toy --where {tmp}", '"first_differing_step": null', '"same_master_weights_.*": true'),
    "gpu_plan.py": ("--device cpu --gpus 1 --minutes 2 --only 4x2x64 --out {tmp}/rows.jsonl", "17m 1 4x2x64"),
    "gpu_plan_drawn.py": (
        "--device cpu --seed 6 --count 23 --only 6-03-dpo,6-22-grpo --out {tmp}/rows.jsonl",
        "6-03-dpo.* NUMBER GiB",
        "6-22-grpo.* NUMBER GiB.* NUMBER% generation",
    ),
    "gpu_rollouts.py": ("--toy", '"full".* NUMBER', "ratio NUMBER"),
    "gpu_pretrain.py": ("--toy --only reference", "reference +NUMBER"),  # ours runs as gpu_sft's does
    "gpu_sft.py": ("--toy --only ours,trl", "against each alone .* NUMBER", "ours +NUMBER", "trl +NUMBER"),
    "sft_answers.py": ("{sft} --questions 3", "3 held-out questions", r"step-3 +NUMBER +NUMBER"),
}
# Read by the others: their ranks, lists and sums.
PARTS = {"gpu_peers.py", "gpu_plan_cases.py", "gpu_plan_draw.py", "gpu_plan_rank.py", "gpu_plan_summary.py"}


@pytest.fixture(scope="module")
def places(finished: tuple[RunDir, str], ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What stands in TOYS: documents of which some are nearly the same, a model, and a fine-tuned one."""
    made, start = tmp_path_factory.mktemp("benchmarks"), finished[0].export
    texts = [row["text"] for row in itertools.islice(writer.documents("fin_news", 300_000, 3, "train"), 200)]
    texts += [f"{text}（转载）" for text in texts[:20]]
    corpus = made / "corpus.jsonl"
    corpus.write_text(
        "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts), encoding="utf-8"
    )
    dialogues = "data.sources=[{synthetic: {size: 300KB, held_out_size: 100KB, seed: 3, dialogues: true}}]"
    tuned = run(made, sft(made, start, made, dialogues, "batch.sequence_length=256", "train.steps=3"), 1)
    ranks.train(tuned)
    return {"corpus": corpus, "export": start, "sft": tuned.path}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("program", TOYS)
def test_it_runs_at_toy_size_and_prints_its_table(
    program: str, places: dict[str, Path], ranks: Ranks, tmp_path: Path
) -> None:
    arguments, *lines = TOYS[program]
    code, said = ranks.run_program(BENCHMARKS / program, arguments.format(**places, tmp=tmp_path).split(), tmp_path)
    assert code == 0, said[-3000:]
    assert [line for line in lines if not re.search(line.replace("NUMBER", r"[\d.,]+"), said)] == [], said[-3000:]


def test_every_program_has_a_toy() -> None:
    assert {path.name for path in BENCHMARKS.glob("*.py")} == set(TOYS) | PARTS
