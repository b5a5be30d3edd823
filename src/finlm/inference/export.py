"""Export a checkpoint as a Hugging Face model, and prove the export by loading it back.

An export has safetensors, tokenizer, chat template and model card, in the run's precision, with adapters merged. The
proof is part of the export: the plain transformers classes give the source model's logits, and AutoTokenizer gives the
ids the model was trained on. vLLM and llama.cpp's convert_hf_to_gguf.py read the layout too: tokenizer.model beside
tokenizer.json, and rope_theta in both places.

Adapters can be written alone, as peft, vLLM (`--enable-lora`) and llama.cpp's convert_lora_to_gguf.py read them. They
go on the whole weights of the start, also after lora.quantize.

The card names no licence, since weights inherit terms from data and parent model that only the author knows, and no
machine and no credential, since a card is made to be published.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from finlm.base import files, runs
from finlm.base.errors import UserError
from finlm.base.rundir import RunDir
from finlm.base.runs import complete_checkpoint, run_of_checkpoint
from finlm.base.secrets import redact
from finlm.base.units import parse_bytes
from finlm.inference.open import Trained, load_trained, open_model, read_weights, step_of
from finlm.plan.plan import Plan
from finlm.recipe import parents
from finlm.recipe import recipe as recipes
from finlm.recipe.derive import for_publication
from finlm.recipe.models import traits
from finlm.recipe.schema import Model, Recipe
from finlm.rows.shards import Shards
from finlm.tokens import encoders, pretrained
from finlm.train.model import causal_lm
from finlm.train.post import start

transformers.utils.logging.disable_progress_bar()  # files of a second; a bar each would bury what the user reads
SHARD_SIZE = "5GB"
# Share of 1 + the loss by which a text may be read otherwise than in training, on other hardware: a few roundings.
READS_ALIKE = {"fp32": 2e-5, "fp16": 1e-2, "bf16": 2e-2, "fp8": 5e-2}
OF_FILES = ("_name_or_path", "architectures", "dtype", "transformers_version")  # keys that saving and loading set


_MARKS = re.compile(r"{% (end)?generation %}(?!\n)")
PROBES = (
    "2023年营业收入同比增长12.5%，净利润为3.6亿元。",
    "Revenue rose 5 % to $1.2bn.\n\n第二段：㎡ ①  空格",
    "</s><s>",
)
_CONVERSATION = [
    {"role": "user", "content": "净利润是什么？"},
    {"role": "assistant", "content": "收入减去成本、费用和税。"},
    {"role": "user", "content": "Thanks!"},
]


def export(checkpoint: Path, out: Path, shard_size: str = SHARD_SIZE) -> Path:
    """Write a checkpoint (runs/<run>/checkpoints/step-N, or the newest of runs/<run>) to the new directory `out`.

    Returns `out`, which exists only if the export succeeds. Weight files have at most `shard_size` bytes, such as 5GB.
    Raises UserError when the checkpoint is incomplete or damaged, `out` exists or shard_size is no size; RuntimeError
    when the export is not the trained model.
    """
    if out.exists():
        raise UserError(f"{out} exists already", fix="give a new directory")
    try:
        most = parse_bytes(shard_size)
    except ValueError as error:
        raise UserError(f"--shard-size: {error}") from None
    trained = load_trained(checkpoint)
    context = trained.model.config.max_position_embeddings
    tokenizer = start.run_tokenizer(trained.shards, trained.recipe.tokenizer.add_bos, context)
    with files.new_directory(out) as directory:
        trained.model.save_pretrained(directory, max_shard_size=most)
        _write_tokenizer(directory, trained.shards, trained.recipe.stage, tokenizer)
        config = files.read_json(directory / "config.json")
        files.write_json(directory / "config.json", _merge_start_config(config, trained.recipe.model))
        files.write_text(directory / "README.md", card_text(trained, directory))
        _prove(directory, trained, tokenizer)
        _seal(directory, trained.run, trained.recipe, trained.checkpoint)
    return out


def _seal(directory: Path, run: RunDir, recipe: Recipe, checkpoint: Path) -> None:
    """Write finlm.json: hashes of the directory's files, with the checkpoint's run, recipe, stage and step."""
    origin = {"run": run.path.name, "recipe": recipe.name, "stage": recipe.stage}
    runs.seal_model(directory, **origin, step=step_of(checkpoint))


def _merge_start_config(config: dict[str, Any], model: Model) -> dict[str, Any]:
    """Return `config` with the fields that only the start's config.json has, and RoPE also as before transformers 5.

    Dropouts are the start's too. Raises UserError for an unknown model type.
    """
    start = dict(model.config or {}) if model.init_from is not None else {}
    if model.former_rope_theta is not None:
        start = {key: value for key, value in start.items() if key not in ("rope_theta", "rope_scaling")}
    if "torch_dtype" in start:
        start["torch_dtype"] = config["dtype"]
    (rope, *others), theta = traits.ropes(config), traits.rope_theta(config)
    former: dict[str, Any] = {} if others else {"rope_theta": theta}
    if not others and rope.get("rope_type", "default") != "default":
        former["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
    return start | former | config | dict(traits.dropouts(start))


def _prove(directory: Path, trained: Trained, tokenizer: Any) -> None:
    """Load the written files; RuntimeError unless tokenizer, config, weights, logits and `proof` are the run's."""
    kind = AutoModelForSequenceClassification if trained.recipe.stage == "reward" else AutoModelForCausalLM
    model = trained.model
    attention = causal_lm.plain_attention(model.config)
    reloaded = kind.from_pretrained(directory, dtype=model.dtype, attn_implementation=attention)
    again = AutoTokenizer.from_pretrained(directory)
    _prove_tokenizer(again, trained, tokenizer)
    ours, theirs = ({k: v for k, v in m.config.to_dict().items() if k not in OF_FILES} for m in (model, reloaded))
    if lost := [f"{key}: {theirs.get(key)!r} for {ours[key]!r}" for key in ours if ours[key] != theirs.get(key)]:
        raise RuntimeError(f"the reloaded configuration differs from the trained one: {', '.join(lost[:3])}")
    weights = model.state_dict()
    changed = [name for name, tensor in reloaded.state_dict().items() if not torch.equal(tensor, weights[name])]
    if changed:
        raise RuntimeError(f"reloaded weights differ from the exported model's: {', '.join(changed[:3])}")
    ids = torch.tensor([again(PROBES[0])["input_ids"]])
    with torch.no_grad():
        if not _is_alike(reloaded(ids).logits, model(ids).logits):
            raise RuntimeError("the reloaded model's logits differ from the exported model's")
    _prove_training(reloaded, trained)
    if getattr(reloaded.config, "vocab_size", 0) != trained.plan.vocab_size:
        raise RuntimeError(f"the exported vocabulary has {reloaded.config.vocab_size} rows")


def _prove_training(reloaded: Any, trained: Trained) -> None:
    """Raise RuntimeError if the reloaded model's loss or reward is not that of the last step's event `proof`."""
    step = step_of(trained.checkpoint)
    rows = [row for row in trained.run.read_events("proof") if row["step"] == step]
    if not rows:
        return
    ids = torch.tensor([rows[-1]["ids"]])
    with torch.no_grad():
        logits = reloaded(ids).logits.float()
    key = "reward" if trained.recipe.stage == "reward" else "loss"
    value = float(logits if key == "reward" else torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:]))
    expected = rows[-1][key]
    if expected is not None and not abs(value - expected) <= READS_ALIKE[trained.plan.precision] * (1 + abs(expected)):
        raise RuntimeError(f"the reloaded model's {key} of a held-out text is {value:.5f}, in training {expected:.5f}")


def _is_alike(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether values agree up to a share of the largest, 1e-4 in fp32, else 2e-2: sums may go in any order."""
    largest = float(expected.abs().max())
    share = 1e-4 if expected.dtype == torch.float32 else 2e-2
    return torch.allclose(actual.float(), expected.float(), rtol=0.0, atol=share * largest)


def _write_tokenizer(directory: Path, shards: Shards, stage: str, tokenizer: Any) -> None:
    """Write tokenizer files: `tokenizer` as saved, without marks of training, or copies of a pretraining start's."""
    source = shards.directory / "tokenizer"
    if stage == "pretrain" and source.is_dir():
        pretrained.copy_files(source, directory)
        return
    tokenizer.save_pretrained(directory)
    if shards.manifest["encoder"] == "tokenizers":  # word for word what encoded the data
        shutil.copyfile(source / "tokenizer.json", directory / "tokenizer.json")
    about = files.read_json(directory / "tokenizer_config.json")
    if about["tokenizer_class"] == "TokenizersBackend":  # the former name of tokenizer.json word for word, known to all
        about["tokenizer_class"] = "PreTrainedTokenizerFast"
        if _begins_with_a_control_token(tokenizer):  # llama.cpp would put a space after it, transformers reads the file
            about["add_prefix_space"] = False
        files.write_json(directory / "tokenizer_config.json", about)
    template = directory / "chat_template.jinja"
    if template.is_file():  # the marks around what the assistant says are for training; plain Jinja refuses them
        files.write_text(template, _MARKS.sub("", template.read_text(encoding="utf-8")))
    model_file = source / "tokenizer.model" if source.is_dir() else shards.tokenizer
    if model_file.is_file():  # none where the tokenizer is of another library
        shutil.copyfile(model_file, directory / "tokenizer.model")


def _begins_with_a_control_token(tokenizer: Any) -> bool:
    """Return whether dialogues begin with a control token and the tokenizer puts a space before a text's first word."""
    scheme = getattr(tokenizer.backend_tokenizer.pre_tokenizer, "prepend_scheme", "")
    if scheme != "first" or not tokenizer.chat_template:
        return False
    said = tokenizer.apply_chat_template(_CONVERSATION, tokenize=False)
    return bool(said.startswith(tuple(tokenizer.all_special_tokens)))


def _prove_tokenizer(reloaded: Any, trained: Trained, tokenizer: Any) -> None:
    """Raise RuntimeError when the ids of probe texts, or outside of pretraining the template, are not the data's."""
    texts = list(PROBES)
    if tokenizer.chat_template and trained.recipe.stage != "pretrain":  # which renders none, and copies the file
        rendered = [each.apply_chat_template(_CONVERSATION, tokenize=False) for each in (tokenizer, reloaded)]
        if rendered[0] != rendered[1]:
            raise RuntimeError(f"exported chat template differs: {rendered[1]!r} instead of {rendered[0]!r}")
        texts.append(rendered[0])
    expect, how = _training_encoder(trained)
    for text in texts:
        ids = reloaded(text, **how)["input_ids"]
        if ids != (expected := expect(text)):
            raise RuntimeError(f"exported tokenizer differs on {text!r}: {ids} instead of {expected}")


def _training_encoder(trained: Trained) -> tuple[Callable[[str], list[int]], dict[str, bool]]:
    """Return (function that encodes as for training, transformers' arguments for equal ids). Raises UserError."""
    directory, library = trained.shards.directory / "tokenizer", trained.shards.manifest["encoder"]
    if trained.recipe.stage != "pretrain":
        dialogues = pretrained.open_tokenizer(directory, library)
        return lambda text: dialogues.encode(text)[0], {"add_special_tokens": False, "split_special_tokens": False}
    # Control tokens in a document are text. A start's tokenizer has rules of its own about <s>.
    encode, add_bos = encoders.reference(trained.shards.tokenizer), not directory.is_dir()
    begin = [trained.shards.bos_id] * (add_bos and trained.recipe.tokenizer.add_bos)
    how = {"add_special_tokens": add_bos, "split_special_tokens": True}
    return lambda text: begin + encode([text.encode()])[0].tolist(), how


def export_adapters(checkpoint: Path, out: Path) -> Path:
    """Write the adapters of a checkpoint (or of a run's newest) to the new directory `out` and return it.

    Adds tokenizer, chat template and finlm.json. Raises UserError when the run trained every weight, `out` exists, or
    the checkpoint is incomplete or damaged.
    """
    if out.exists():
        raise UserError(f"{out} exists already", fix="give a new directory")
    checkpoint = complete_checkpoint(checkpoint)
    run = run_of_checkpoint(checkpoint)
    recipe = recipes.load(run.recipe).recipe
    settings = start.lora_config(recipe)
    if settings is None:
        raise UserError(
            f"{run.path.name} trained every weight and has no adapters", fix="leave --adapter out: that is the model"
        )
    plan, shards = Plan.read(run.plan), Shards(run.shards)
    tensors = {
        name.replace(".default.weight", ".weight"): tensor.contiguous()
        for name, tensor in read_weights(checkpoint, plan).items()
        if ".lora_" in name
    }
    tokenizer = start.run_tokenizer(shards, recipe.tokenizer.add_bos, causal_lm.context_length(recipe, plan))
    settings.base_model_name_or_path, settings.revision = recipe.model.init_from, recipe.model.revision
    settings.inference_mode = True
    with files.new_directory(out) as directory:
        settings.save_pretrained(directory)
        save_file(tensors, directory / "adapter_model.safetensors", {"format": "pt"})
        _write_tokenizer(directory, shards, recipe.stage, tokenizer)
        _seal(directory, run, recipe, checkpoint)
    return out


def sample_text(checkpoint: Path, prompt: str, tokens: int = 64, seed: int = 0) -> str:
    """Return a sampled continuation (temperature 0.8, top-p 0.9) of `prompt` by a run, checkpoint or model directory.

    It has at most `tokens` tokens, as far as the context has room. Seeds torch. Raises UserError when the model cannot
    be opened, or the prompt is empty or fills its context.
    """
    opened = open_model(checkpoint)
    inputs = opened.tokenizer(prompt, return_tensors="pt", verbose=False).to(opened.device)
    length = inputs.input_ids.shape[1]
    if not 0 < length < opened.context:
        raise UserError(
            f"the prompt has {length:,} tokens, the model's context {opened.context:,}",
            fix="give a shorter one" if length else "give a word to begin with",
        )
    tokens = max(1, min(tokens, opened.context - length))
    torch.manual_seed(seed)
    with torch.inference_mode():
        out = opened.model.generate(
            inputs.input_ids,
            attention_mask=inputs.attention_mask,
            max_new_tokens=tokens,
            min_new_tokens=tokens // 4,  # a model of a few steps would often write nothing
            do_sample=True,
            temperature=0.8,
            top_p=0.9,
            eos_token_id=list(opened.eos_ids) or None,
            pad_token_id=next(iter(opened.eos_ids), 0),  # one row is never padded; unset, transformers warns
        )
    text = str(opened.tokenizer.decode(out[0, length:], skip_special_tokens=True))
    return text.rstrip("\ufffd")  # the last character's bytes may be cut off


_STAGES = {
    "pretrain": "Pretrained",
    "sft": "Fine-tuned on dialogues",
    "dpo": "Trained on preferences (DPO)",
    "orpo": "Trained on preferences (ORPO)",
    "reward": "Trained as a reward model",
    "grpo": "Trained by reinforcement learning (GRPO)",
}


def card_text(trained: Trained, directory: Path) -> str:
    """Return the model card of the export in `directory`, from run and events. NotJson for a bad manifest.json."""
    plan, recipe = trained.plan, trained.recipe
    task = "text-classification" if recipe.stage == "reward" else "text-generation"
    lines = ["---", "library_name: transformers", f"pipeline_tag: {task}", "language: [zh, en]", "tags: [finlm]", "---"]
    lines += [f"# {recipe.name}", ""]
    if recipe.description:
        lines += [recipe.description, ""]
    step, context = step_of(trained.checkpoint), trained.model.config.max_position_embeddings
    start = parents.start_recorded(trained.run, recipe)
    is_orpo = recipe.dpo is not None and recipe.dpo.loss == "orpo"
    kind = _STAGES["orpo" if is_orpo else recipe.stage]
    lines += [
        f"{plan.parameters:,} parameters, {context:,} tokens of context, {plan.precision}. "
        f"{kind} with finlm: {step:,} steps of {plan.tokens_per_step:,} tokens"
        + (f", starting from {start}." if start else "."),
        "",
        "The licence of the weights follows from their training data and parent model and is yours to state.",
        "",
        *_use_lines(directory, recipe.stage),
        *_data_section(trained),
        *_held_out_section(trained, step),
        *_suite_section(trained, step),
        *_task_section(trained, step),
        *_origin_section(trained),
        "## Recipe",
        "",
        "```yaml",
        redact("", recipes.dump(for_publication(recipe))).rstrip(),
        "```",
        "",
    ]
    return "\n".join(lines)


def _use_lines(directory: Path, stage: str) -> list[str]:
    """Return the lines of a model card's section on use; [] for a reward model."""
    if stage == "reward":
        return []
    chats = (directory / "chat_template.jinja").is_file()
    prompt = '[{"role": "user", "content": "什么是净利润？"}]' if chats else '"公司营业收入"'
    call = f'pipeline("text-generation", model="DIRECTORY")({prompt}, max_new_tokens=64)'
    return ["## Use", "", "```python", "from transformers import pipeline", "", call, "```", ""]


def _section(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a section of the card with a table of `rows`; [] without rows."""
    table = [f"| {' | '.join(cells)} |" for cells in (columns, ["---"] * len(columns), *rows)]
    return [f"## {title}", "", *table, ""] if rows else []


def _data_section(trained: Trained) -> list[str]:
    """Return the lines of the section on training data: documents and tokens of each source."""
    counts: dict[str, tuple[int, int]] = {}
    for shard in trained.shards.split("train"):
        documents, tokens = counts.get(shard.source, (0, 0))
        counts[shard.source] = documents + shard.documents, tokens + shard.tokens
    rows = [(source, f"{documents:,}", f"{tokens:,}") for source, (documents, tokens) in counts.items()]
    return _section("Training data", ("source", "documents", "tokens"), rows)


def _held_out_section(trained: Trained, step: int) -> list[str]:
    """Return the section on the last evaluation up to `step`, a column for each measure; [] without one by source."""
    events = [row for row in trained.run.read_events("eval") if (row.get("step") or 0) <= step]
    sources = (events[-1].get("sources") or {}) if events else {}
    keys = [key for key in next(iter(sources.values()), {}) if key != "tokens"]
    rows = [(name, *(_format_number(row.get(key)) for key in keys)) for name, row in sources.items() if keys]
    return _section("Held-out text", ("source", *(key.replace("_", " ") for key in keys)), rows)


def _suite_section(trained: Trained, step: int) -> list[str]:
    """Return the lines of the section on multiple-choice results of this step; [] without results."""
    rows = []
    for row in trained.run.read_events("suite"):
        if row.get("step") == step:
            mode, questions = f"{row['mode']}, {row['shots']}-shot", f"{row['questions']:,}"
            means = [f"{100 * row[name]:.2f} %" for name in ("macro", "micro")]
            interval = " to ".join(f"{100 * bound:.1f}" for bound in row["micro_interval"])
            rows.append((row["suite"], mode, questions, *means, interval))
    return _section("Multiple choice", ("suite", "mode", "questions", "macro", "micro", "95 % interval"), rows)


def _task_section(trained: Trained, step: int) -> list[str]:
    """Return the lines of the section on scores of tasks with free answers at this step; [] without scores."""
    rows = []
    for row in trained.run.read_events("tasks"):
        for name, score in row["scores"].items() if row.get("step") == step else ():
            low, high = score["interval"]
            value, interval = f"{score['value']:.4f}", f"{low:.4f} to {high:.4f}"
            rows.append((row["suite"], name, score["metric"], f"{score['rows']:,}", value, interval))
    columns = ("suite", "task", "metric", "questions", "score", "95 % interval")
    return _section("Tasks with free answers", columns, rows)


def _origin_section(trained: Trained) -> list[str]:
    """Return the section on origin: hardware, and what manifest.json knows. Raises NotJson if that is damaged."""
    manifest = files.read_json(trained.run.manifest)
    code, shards = manifest.get("finlm") or {}, manifest.get("shards") or {}
    facts = {
        "finlm": code.get("version"),
        "git commit": (code.get("git") or {}).get("commit"),
        "code sha256": code.get("code_sha256"),
        "recipe sha256": (manifest.get("recipe") or {}).get("sha256"),
        "shards sha256": shards.get("sha256"),
        "tokenizer sha256": shards.get("tokenizer_sha256"),
        "hardware": ", ".join(f"{host.slots} x {host.gpu or 'CPU rank'}" for host in trained.plan.hosts),
    }
    return _section("Origin", ("", ""), [(name, str(value)) for name, value in facts.items() if value])


def _format_number(value: Any) -> str:
    """Return a number with four decimals, "–" for anything else."""
    return f"{value:,.4f}" if isinstance(value, (int, float)) else "–"
