"""Every number of these pages has a source: a measured row, a recipe, another page, the logbook.

claims() gives, for each page, text with the numbers of its sources in it. The page must have it, and no other number.
"""

from __future__ import annotations

import json
import re
import sys
from functools import cache
from typing import Any

import pytest

from finlm.plan import gpus
from finlm.recipe import recipe, shape
from finlm.recipe.models import traits

from helpers import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import gpu_plan_draw

CUT, SUMS, PLAIN, ONE_GPU, SFT = "22-h200-cut", "22-h200-sums", "22-h200", "21-h200-one-gpu", "21-h200-sft"
FIRST = "21-h200"
MODELS, LONGER = "27-h200-models", "27-h200-longer-steps"
VOCABULARY = 39_438  # of benchmarks/gpu_pretrain.py
XUANYUAN = "recipes/xuanyuan-6b/pretrain.yaml"
QUICKSTART = "recipes/quickstart/README.md"


@cache
def row(file: str, number: int) -> dict[str, Any]:
    """A row of benchmarks/results."""
    lines = (ROOT / f"benchmarks/results/2026-11-{file}.jsonl").read_text(encoding="utf-8").splitlines()
    measured: dict[str, Any] = json.loads(lines[number])
    return measured


def speed(file: str, number: int) -> str:
    """Tokens/s."""
    return f"{row(file, number)['tokens_per_second']:,.0f}"


def tokens(file: str, number: int) -> str:
    """Tokens of a step on each GPU."""
    return f"{row(file, number)['tokens'] // row(file, number)['gpus']:,}"


@cache
def flops_per_token(shape_name: str) -> float:
    """Of a published shape, XuanYuan-6B's if the name is empty."""
    wanted = recipe.load(ROOT / XUANYUAN, gpu_plan_draw.published_overrides().get(shape_name, ())).recipe
    return float(shape.of(wanted, VOCABULARY).flops_per_token(wanted.batch.sequence_length))


def mfu(file: str, number: int) -> str:
    """Of the row's model in bf16, XuanYuan-6B where it names none, in %, as gpu_pretrain.py counts it."""
    peak = gpus.find("H200").bf16_flops or 1.0
    flops = flops_per_token(row(file, number).get("shape", ""))
    return f"{100 * flops * row(file, number)['tokens_per_second'] / row(file, number)['gpus'] / peak:.1f}"


def of_model(file: str, number: int, has_mfu: bool = True) -> str:
    """Tokens of a step, speed, MFU and memory of a row, as in the table of other models."""
    share, memory = f"{mfu(file, number)} % " if has_mfu else "", row(file, number)["memory_bytes"] / 2**30
    return f"| {tokens(file, number)} | {speed(file, number)} | {share}| {memory:.1f} |"


def ratio(file: str, ours: int, peer: int) -> str:
    """Of two speeds."""
    return f"{row(file, ours)['tokens_per_second'] / row(file, peer)['tokens_per_second']:.3f}"


def quoted(page: str, pattern: str) -> str:
    """The group of a pattern that must be in a page."""
    found = re.search(pattern, (ROOT / page).read_text(encoding="utf-8"))
    assert found, f"{page} has no {pattern}"
    return found[1]


def size(path: str) -> float:
    """Parameters of a recipe's model."""
    wanted = recipe.load(ROOT / path).recipe
    return float(shape.of(wanted, wanted.tokenizer.vocab_size or VOCABULARY).parameters)


def claims() -> dict[str, list[str]]:
    """Text of each page with the numbers of its sources."""
    before, after, dpo = (quoted(QUICKSTART, rf"\| {stage}.*?\| ([\d.]+) %") for stage in ("pretraining", "SFT", "DPO"))
    world_size, six_b = size("recipes/synthetic-world-100m/pretrain.yaml"), size(XUANYUAN)
    small = size("recipes/quickstart/pretrain.yaml") / 1e6
    figures = "recipes/synthetic-world-100m/README.md"
    (shown, _, _, right), (shown_2, _, _, right_2) = (
        [round(float(each)) for each in re.findall(r"([\d.]+) % \[", quoted(figures, rf"\n\| ({seed} seed \|.*)"))]
        for seed in ("first", "second")
    )
    kill = r"Of the (\d+) to \d+ s: ", r"Of the \d+ to (\d+) s: "
    soonest, latest = (quoted("LOGBOOK.md", pattern) for pattern in kill)
    killed = quoted("LOGBOOK.md", r"\*\*A killed rank\*\*, two H100s of one host, ([\d.]+) B")
    largest = round(size("recipes/xuanyuan3-70b/pretrain.yaml") / 1e10) * 10
    steps = quoted("LOGBOOK.md", r"float8 against bf16, 300M on real text \(.*?, ([\d,]+) steps")
    peak = f"{row(SUMS, 5)['memory_bytes'] / 2**30:.1f}"
    apart = quoted("LOGBOOK.md", r"4.8838 \(([\d.]+) %\)")
    low, high = ratio(CUT, 9, 8), ratio(CUT, 1, 3)
    millions = quoted("LOGBOOK.md", r"Fine-tuning of SmolLM2's shape \((\d+) M")
    admitted = sum(not kind.failing for kind in traits.shipped().values())
    plain = (
        "Python 3.11-3.13",
        "Exit codes: 0 done, 1 found what it looks for (a fault, a mismatch, a cause), 2 a mistake",
    )
    speeds = [
        f"ZeRO-1 | {speed(CUT, 13)} to {speed(SUMS, 3)} on different GPUs | {mfu(CUT, 13)} to {mfu(SUMS, 3)} %",
        f"6 rows, no memory to spare | {speed(SUMS, 1)} | {mfu(SUMS, 1)} %",
        f"float8 layers | {speed(ONE_GPU, 2)}",
        f"from host memory, {peak} GiB, {tokens(SUMS, 5)} tokens per step | {speed(SUMS, 5)}",
        f"four, ZeRO-1 | {speed(FIRST, 7)} | {mfu(FIRST, 7)} %",
        f"four, ZeRO-3 | {speed(PLAIN, 5)} | {mfu(PLAIN, 5)} %",
        f"{tokens(CUT, 9)} tokens per step, tokens/s | {speed(CUT, 9)} | {speed(CUT, 8)} (HF Trainer",
        f"| {speed(ONE_GPU, 5)} (the released",
        f"rows of 4,096 tokens, tokens/s | {speed(SFT, 0)} | {speed(SFT, 2)} (trl with Liger",
        f"| {speed(SFT, 1)} (trl)",
    ]
    speeds_zh = [
        f"ZeRO-1 | {speed(CUT, 13)} 到 {speed(SUMS, 3)}，因卡而异 | {mfu(CUT, 13)} 到 {mfu(SUMS, 3)} %",
        f"每个 micro-batch 6 行，显存没有余量 | {speed(SUMS, 1)} | {mfu(SUMS, 1)} %",
        f"float8 层 | {speed(ONE_GPU, 2)}",
        f"从主机内存流过，{peak} GiB，每步 {tokens(SUMS, 5)} 个 token | {speed(SUMS, 5)}",
        f"四块，ZeRO-1 | {speed(FIRST, 7)} | {mfu(FIRST, 7)} %",
        f"四块，ZeRO-3 | {speed(PLAIN, 5)} | {mfu(PLAIN, 5)} %",
        f"每步 {tokens(CUT, 9)} 个 token，token/s | {speed(CUT, 9)} | {speed(CUT, 8)}（HF Trainer",
        f"| {speed(ONE_GPU, 5)}（公开的",
        f"微调，4,096 个 token 的打包行，token/s | {speed(SFT, 0)} | {speed(SFT, 2)}（trl 加 Liger",
        f"| {speed(SFT, 1)}（trl）",
    ]
    models = [of_model(MODELS, number, number != 6) for number in (0, 1, 2, 3, 5, 6)]
    models += [of_model(LONGER, number) for number in (0, 1, 2)]
    faster, length = ratio(MODELS, 1, 0), "4,096"
    return {
        "README.md": [
            *(*plain, "\n1. `setup", "\n2. `activate", "\n3. `--toy", "\n4. `pretrain"),
            f"answers {after} % of\n1,000 exam questions, {before} % before (chance is 25), and DPO reaches {dpo} %",
            "with 95 % intervals",
            f"{soonest} to {latest} s after the kill of a rank ({killed} B, two H100s",
            f"on one H100, 150 steps of checked rewards take [questions of arithmetic]({figures})\n"
            f"from {shown} and {shown_2} % right (two seeds) to {right} and {right_2} %",
            f"[{admitted} types have](docs/models.md)",
            f"{small:.0f} M to {largest} B parameters",
            f"{low} to {high} times a tuned HF Trainer",
            f"{speed(CUT, 13)} to {speed(SUMS, 3)} tokens/s on one H200, {low} to\n{high} times a tuned HF Trainer",
        ],
        "README.zh-CN.md": [
            *("\n1. `setup", "\n2. `activate", "\n3. `--toy", "\n4. `pretrain"),
            *("Python 3.11-3.13", "附 95 % 区间", "退出码：0 完成；1 找到了要找的东西（故障、不一致、原因）；2 有错误"),
            f"杀死一个进程后 {soonest} 到 {latest} 秒（{10 * float(killed):.1f} 亿参数，两块 H100",
            f"150 步可核对的奖励使[计算题]({figures.replace('.md', '.zh-CN.md')})的答对率"
            f"从 {shown} % 和 {shown_2} %（两组种子）升到 {right} % 和 {right_2} %",
            f"[已通过的 {admitted} 种类型](docs/models.zh-CN.md)",
            f"{100 * round(small)} 万到 {largest}0 亿参数",
            f"调优后 HF Trainer 的 {low} 到 {high} 倍",
            f"1,000 道选择题答对 {after} %，之前为 {before} %（随机 25 %），DPO 之后为\n{dpo} %",
            f"每秒 {speed(CUT, 13)} 到 {speed(SUMS, 3)} 个 token，为调优后的 HF Trainer 的 {low} 到\n{high} 倍",
        ],
        "docs/performance.md": [
            *speeds,
            *models,
            *(f"is {faster} times", f"rows of {length} tokens and"),
            "8 of its 48 layers",
            f"({six_b / 1e9:.1f} B parameters, rows of 4,096 tokens",
            f"{tokens(CUT, 13)} tokens per GPU and step",
            f"within {apart} % over {steps} steps",
            f"was {low} to {high}",
            "in August 2026",
            f"a model of {millions} M parameters",
            f"a model of {world_size / 1e6:.0f} M parameters",
        ],
        "docs/performance.zh-CN.md": [
            *speeds_zh,
            *models,
            *(f"的 {faster} 倍", f"每行 {length} 个 token，权重随机"),
            "48 层中的 8 层",
            f"（{six_b / 1e8:.0f} 亿参数，每行 4,096 个 token",
            f"每卡每步 {tokens(CUT, 13)} 个 token",
            f"训练 {steps} 步，float8 与 bf16 的损失相差不超过 {apart} %",
            f"之比为 {low} 到 {high}",
            "2026 年 8 月",
            f"{float(millions) / 100:.2f} 亿参数的模型",
            f"{world_size / 1e8:.2f} 亿参数的模型",
        ],
        "recipes/README.md": [
            f"[quickstart](quickstart/README.md) | {small:.1f} M",
            f"[xuanyuan-6b](xuanyuan-6b/README.md) | {six_b / 1e9:.1f} B",
            f"(synthetic-world-100m/README.md) | {world_size / 1e6:.0f} M",
            *(
                f"{name}/README.md) | {name.partition('-')[2][:-1]} B"
                for name in ("xuanyuan-13b", "xuanyuan-70b", "xuanyuan3-70b")
            ),
            *("(llama2-7b-fincorpus/README.md) | 7 B", "2 x A100-40G + 2 x V100"),
            *("| 100 x 8 A800", "| 16 A100-80G, then 8 H800", "| 8 x A800"),
            *("16k context", "| 8 x A100-80G", "| 2 + 4 A800-80G", "A100-80G"),
        ],
        "CONTRIBUTING.md": [
            f"({quoted('LOGBOOK.md', r'`.ci/run` in a clone from nothing, two cores: (46) min')} minutes from nothing",
            *("exits with 1 when one is off by more than 0.001 nats", "exit code 2"),
            *("\n1. Read", "\n2. `recipes", "\n3. `python", "\n4. `recipes"),
            f"at most {quoted('tests/test_layers.py', r'splitlines.*?> (450)')} lines a file and",
            f"{quoted('tests/test_layers.py', r'lineno [+] 1[)] > (60)')} a function",
        ],
    }


@pytest.mark.parametrize("page", claims())
def test_every_number_of_a_page_has_a_source_that_says_the_same(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    missing = [claim for claim in claims()[page] if claim not in text]
    assert missing == [], "the page says something else than the sources of its numbers"
    for claim in claims()[page]:
        text = text.replace(claim, re.sub(r"\d", "", claim))
    text = re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)", "", text, flags=re.DOTALL)
    text = re.sub(r"[A-Za-z]+[\w.+-]*\d[\w.+-]*", "", text)  # names: H200, ZeRO-3, XuanYuan-6B
    assert re.findall(r".{,30}\d[\d.,]*.{,20}", text) == [], "numbers without a source: add a claim above"
