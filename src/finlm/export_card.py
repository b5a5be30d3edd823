"""The model card of an export: what the run directory knows, in the form the Hugging Face Hub reads. No licence is
named: weights inherit terms from data and parent model that only the author knows. No machine and no credential is
named either: a card is made to be published."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from finlm.base import files
from finlm.base.secrets import redact
from finlm.recipe import recipe as recipes
from finlm.recipe.published import published
from finlm.train.trained import Trained

_STAGES = {
    "pretrain": "Pretrained",
    "sft": "Fine-tuned on dialogues",
    "dpo": "Trained on preferences (DPO)",
    "reward": "Trained as a reward model",
    "grpo": "Trained by reinforcement learning (GRPO)",
}


def text(trained: Trained, directory: Path) -> str:
    """README.md of an export whose other files lie in directory already."""
    plan, recipe = trained.plan, trained.recipe
    task = "text-classification" if recipe.stage == "reward" else "text-generation"
    lines = ["---", "library_name: transformers", f"pipeline_tag: {task}", "language: [zh, en]", "tags: [finlm]", "---"]
    lines += [f"# {recipe.name}", ""]
    if recipe.description:
        lines += [recipe.description, ""]
    step, context = int(trained.checkpoint.name.removeprefix("step-")), trained.model.config.max_position_embeddings
    lines += [
        f"{plan.parameters:,} parameters, {context:,} tokens of context, {plan.precision}. "
        f"{_STAGES[recipe.stage]} with finlm: {step:,} steps of {plan.tokens_per_step:,} tokens"
        + (f", starting from `{Path(recipe.model.init_from).name}`." if recipe.model.init_from else "."),
        "",
        "The licence of the weights follows from their training data and parent model and is yours to state.",
        "",
        *_use(directory, recipe.stage),
        *_data(trained),
        *_held_out(trained, step),
        *_suites(trained, step),
        *_origin(trained),
        "## Recipe",
        "",
        "```yaml",
        redact("", recipes.dump(published(recipe))).rstrip(),
        "```",
        "",
    ]
    return "\n".join(lines)


def _use(directory: Path, stage: str) -> Iterator[str]:
    if stage == "reward":
        return
    chats = (directory / "chat_template.jinja").is_file()
    prompt = '[{"role": "user", "content": "什么是净利润？"}]' if chats else '"公司营业收入"'
    yield from ("## Use", "", "```python", "from transformers import pipeline", "")
    yield from (f'pipeline("text-generation", model="DIRECTORY")({prompt}, max_new_tokens=64)', "```", "")


def _data(trained: Trained) -> Iterator[str]:
    shards: dict[str, list[int]] = {}
    for shard in trained.shards.split("train"):
        counts = shards.setdefault(shard.source, [0, 0])
        counts[0] += shard.documents
        counts[1] += shard.tokens
    yield from ("## Training data", "", "| source | documents | tokens |", "| --- | --- | --- |")
    for source, (documents, tokens) in shards.items():
        yield f"| {source} | {documents:,} | {tokens:,} |"
    yield ""


def _held_out(trained: Trained, step: int) -> Iterator[str]:
    """The evaluation nearest before the checkpoint; whatever numbers it has."""
    rows = [row for row in trained.run.read_events("eval") if (row.get("step") or 0) <= step]
    sources = (rows[-1].get("sources") or {}) if rows else {}
    keys = [key for key in next(iter(sources.values()), {}) if key != "tokens"]
    if not keys:
        return
    yield from ("## Held-out text", "", f"| source | {' | '.join(key.replace('_', ' ') for key in keys)} |")
    yield "| --- " * (len(keys) + 1) + "|"
    for name, row in sources.items():
        yield f"| {name} | {' | '.join(_number(row.get(key)) for key in keys)} |"
    yield ""


def _suites(trained: Trained, step: int) -> Iterator[str]:
    rows = [row for row in trained.run.read_events("suite") if row.get("step") == step]
    if not rows:
        return
    yield from ("## Multiple choice", "", "| suite | mode | questions | macro | micro | 95 % interval |")
    yield "| --- | --- | --- | --- | --- | --- |"
    for row in rows:
        low, high = (f"{100 * bound:.1f}" for bound in row["micro_interval"])
        macro, micro = f"{100 * row['macro']:.2f} %", f"{100 * row['micro']:.2f} %"
        mode = f"{row['mode']}, {row['shots']}-shot"
        yield f"| {row['suite']} | {mode} | {row['questions']:,} | {macro} | {micro} | {low} to {high} |"
    yield ""


def _origin(trained: Trained) -> Iterator[str]:
    manifest = files.read_json(trained.run.manifest)
    code, shards = manifest.get("finlm") or {}, manifest.get("shards") or {}
    git = code.get("git") or {}
    facts = {
        "finlm": code.get("version"),
        "git commit": git.get("commit"),
        "code sha256": code.get("code_sha256"),
        "recipe sha256": (manifest.get("recipe") or {}).get("sha256"),
        "shards sha256": shards.get("sha256"),
        "tokenizer sha256": shards.get("tokenizer_sha256"),
        "hardware": ", ".join(f"{host.slots} x {host.gpu or 'CPU rank'}" for host in trained.plan.hosts),
    }
    yield from ("## Origin", "", "| | |", "| --- | --- |")
    for name, value in facts.items():
        if value:
            yield f"| {name} | {value} |"
    yield ""


def _number(value: Any) -> str:
    return f"{value:,.4f}" if isinstance(value, (int, float)) else "–"
