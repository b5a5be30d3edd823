"""The commands that start no training: prepare, lint, self-qa, plan, new, diff, serve; and watch, which reads a run."""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from finlm.base import files, screen
from finlm.base.errors import UserError
from finlm.base.rundir import RunDir, open_run
from finlm.cli import command_line

if TYPE_CHECKING:
    from finlm.plan.advice import Advice
    from finlm.plan.plan import Plan
    from finlm.plan.show import Consequence, Consulted, Difference
    from finlm.recipe.cluster import Cluster
    from finlm.recipe.recipe import Loaded
    from finlm.recipe.schema import Recipe
    from finlm.rows.shards import Shards
    from finlm.tokens.pretrained import Tokenizer


# What `finlm new --model` writes.
_ROW_TOKENS = 4096
_BATCH = {"pretrain": 1048576, "sft": 262144}  # tokens a step
_RATES = {"pretrain": "2.0e-5, min_lr: 2.0e-6", "sft": "1.0e-5"}
_SOURCES = {
    "pretrain": "{synthetic: {size: 20MB, held_out_size: 1MB, seed: 1}}",
    "sft": "{synthetic: {size: 20MB, held_out_size: 1MB, seed: 1, dialogues: true}}",
}
_END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>")  # of documents, where a chat model ends with its turn

# What `transformers serve` imports.
_OF_THE_SERVER = ("fastapi", "uvicorn", "openai")


def load(options: argparse.Namespace) -> Loaded:
    """Return the recipe of the command line with its --set values; print its notices to stderr. Raises UserError."""
    from finlm.recipe import recipe

    loaded = recipe.load(options.recipe, options.set)
    for sentence in loaded.said:
        screen.say(sentence)
    return loaded


def prepare(options: argparse.Namespace) -> int:
    """Run `finlm prepare`: make shards; print rows if --show, and the directory. Return 0. Raises UserError."""
    from finlm import prepare
    from finlm.recipe import weights

    recipe = load(options).recipe
    weights.check_judge(recipe)
    shards = prepare.run(recipe, command_line.to_prepare(options, recipe), accept_new_keys=options.accept_new)
    if options.show > 0:
        prepare.show_rows(recipe, shards, options.show)
    screen.show(str(shards.directory))
    return 0


def lint(options: argparse.Namespace) -> int:
    """Run `finlm lint`: prepare dialogues, print which tokens are learnt and what is wrong with the labels.

    Return 1 if a finding is an error, else 0. Raises UserError for a pretraining recipe.
    """
    from finlm import prepare
    from finlm.dialogues import lint

    recipe = load(options).recipe
    if recipe.stage == "pretrain":
        raise UserError(
            f"{options.recipe} trains on documents, which have no labels to look at", fix="finlm prepare --show 2"
        )
    shards = prepare.run(recipe)
    lint.print_label_rows(recipe, shards, options.rows)
    lint.print_summary(shards, lint.count_labels(recipe, shards))
    findings = lint.check(recipe, shards)
    lint.print_findings(findings, shards)
    if options.json:
        listed = {"findings": [asdict(finding) for finding in findings], "left_out": lint.rows_left_out(shards)}
        screen.print_json(listed)
    return 1 if any(finding.level == "error" for finding in findings) else 0


def self_qa(options: argparse.Namespace) -> int:
    """Run `finlm self-qa`: have a model ask and answer about documents; print the file. Return 0. Raises UserError."""
    from finlm.selfqa import ask

    recipe = load(options).recipe
    if recipe.self_qa is None or recipe.self_qa.endpoint is not None:
        screen.show(str(ask.run(recipe)))
        return 0
    from finlm.inference.chat import LocalModel as Local  # loads torch

    model = Local(Path(recipe.self_qa.model), recipe.self_qa.seed)
    screen.show(str(ask.run(recipe, model, model.fingerprint)))
    return 0


def check_template(recipe: Recipe) -> None:
    """Raise UserError if the chat template accepts no dialogue or the start model has no tokenizer; needs no data.

    Does not look into a start directory without weights, which `finlm plan` accepts.
    """
    if recipe.chat is None:
        return
    from finlm.dialogues import encode, templates

    if recipe.chat.template != "model":  # the model's own may not be here yet
        templates.read_template(recipe.chat.template, None)
    start = Path(recipe.model.init_from or "")
    if recipe.model.init_from and any(start.glob("*.safetensors")):
        encode.check_start(recipe.chat, recipe.sft, start)


def check_and_plan(recipe: Recipe, hosts: Cluster) -> tuple[Plan, Shards | None]:
    """Check reward model, weights and template; return (the recipe's plan, its prepared data or None).

    With data the plan counts their tokens. Prepares nothing. Raises UserError for what cannot be used, PlanError when
    nothing fits.
    """
    from finlm import prepare
    from finlm.recipe import weights

    weights.check_judge(recipe)
    weights.check_weights(recipe)
    check_template(recipe)
    shards = prepare.locate(recipe)
    return prepare.plan_with_data(recipe, hosts, shards), shards


def consult(recipe: Recipe, where: Cluster, price: float | None = None) -> tuple[Plan, Consulted, list[str]]:
    """Return (plan, advice about it, warnings as sentences) of a recipe on the hosts `where`.

    `price` is that of a GPU-hour; None means the recipe's. Raises UserError, and PlanError when nothing fits.
    """
    from finlm import prepare
    from finlm.corpus.read import sources
    from finlm.plan import show
    from finlm.recipe import weights

    plan, shards = check_and_plan(recipe, where)
    tokens = prepare.epoch_tokens(recipe, shards) if shards else None
    consulted = show.consult(recipe, where, plan, tokens, price)
    missing = [] if shards else list(sources.missing(recipe.data.sources))
    return plan, consulted, [*weights.missing_start(recipe), *missing, *prepare.warnings(recipe, shards)]


def plan(options: argparse.Namespace) -> int:
    """Run `finlm plan`: print plan, advice, warnings and the origins of values; with --json one document. Return 0.

    --calibrate first measures this machine's GPUs and saves the result for later plans; without a recipe it stops
    there. Raises UserError without a recipe, PlanError when nothing fits.
    """
    from finlm import prepare
    from finlm.plan import gpus, show
    from finlm.recipe import recipe

    if options.calibrate:
        show.print_calibrated(gpus.measure(), gpus.user_file())
        if options.recipe is None:
            return 0
    if options.recipe is None:
        raise UserError("finlm plan needs a recipe", fix="give recipes/<family>/<stage>.yaml")
    loaded = load(options)
    prepare.check_sources(loaded.recipe, only_urls=True)  # a path may lie on the hosts alone
    if loaded.recipe.train.epochs is not None and (shards := prepare.locate(loaded.recipe)):
        loaded = recipe.fit_warmup(loaded, prepare.epoch_tokens(loaded.recipe, shards))
    plan, consulted, warnings = consult(loaded.recipe, command_line.to_plan(options, loaded.recipe), options.price)
    show.print_plan(plan, loaded)
    show.print_advice(consulted, plan)
    failing = _print_failure_forecast(options, loaded.recipe, plan, consulted.advice) if options.failures else {}
    for warning in warnings:
        screen.show(f"warning: {warning}")
    show.print_origins(loaded)
    if options.json:
        screen.print_json(plan.to_json() | consulted.to_json() | failing | {"warnings": warnings})
    return 0


def _print_failure_forecast(
    options: argparse.Namespace, recipe: Recipe, plan: Plan, advised: Advice
) -> dict[str, object]:
    """Print the share of time spent training when hosts fail; return it as the JSON object {"failures": ...}.

    Raises UserError if the plan has no speed.
    """
    from finlm.runs import drill

    if plan.tokens_per_second is None or plan.days is None:
        raise UserError(
            "how much failures cost cannot be planned: the speed of these ranks is not known",
            fix="--gpu NAME, or `finlm plan --calibrate` on this machine",
        )
    steps = recipe.checkpoint.every_steps or plan.steps
    interval = steps * plan.tokens_per_step / plan.tokens_per_second
    failing = drill.Failing(
        len(plan.hosts),
        options.failures,
        interval=min(interval, advised.memory_interval_seconds or interval),
        stall=advised.checkpoint_stall_seconds,
        detection=recipe.launch.outage_seconds,
        restart=options.restart_seconds,
    )
    result = drill.forecast(failing, max(plan.days, 30.0) * drill.DAY)
    screen.show(f"  failures   {drill.sentence(failing, result)}")
    return {"failures": asdict(result)}


def new(options: argparse.Namespace) -> int:
    """Run `finlm new`: write a recipe; print its path and the next commands. Return 0. Raises UserError."""
    from finlm import config
    from finlm.recipe import derive

    if options.model is not None:
        path = write_for_model(options.name, options.model, options.revision, options.stage, options.recipes)
        screen.show(str(path))
        follow = "plan"
    else:
        path = derive.fork(options.name, options.parent, options.recipes, options.copy)
        screen.show(str(path))
        for written in config.write_page(path, options.parent):
            screen.say(f"also written: {written}")
        follow = "diff"
    screen.say("try next:")
    screen.say(f"  edit {path}")
    screen.say_command(f"{screen.program()} {follow} {path}")
    screen.say_command(config.train_command(path))
    return 0


def write_for_model(name: str, model: str, revision: str | None, stage: str, recipes: Path) -> Path:
    """Write a first recipe for a model directory, a run or a model of a hub, and return its path.

    Shape, RoPE and tokenizer are the model's; data, batch, learning rate and hardware are for the author to change.
    Downloads config and tokenizer, and prints notices to stderr. Raises UserError for a name that is taken and a model
    that cannot be read.
    """
    from finlm.recipe import derive, parents, recipe, weights
    from finlm.tokens import pretrained

    path = derive.new_path(name, f"{stage}.yaml", recipes)
    model = parents.export_of("--model", model)
    if Path(model).suffix == ".gguf":
        raise UserError(f"{model} is a GGUF file", fix=f"finlm import-gguf {model} DIRECTORY, then --model DIRECTORY")
    place = weights.fetch_description(model, revision)
    shape = parents.shape_of(place, revision)
    directory = Path(place) if Path(place).is_dir() else pretrained.snapshot(place, revision)
    tokenizer = pretrained.open_tokenizer(directory)
    rows = min(_ROW_TOKENS, parents.context_tokens(directory))
    lines = [
        f"# {'Continued pretraining' if stage == 'pretrain' else 'Fine-tuning'} of {model}, written by `finlm new`.",
        "# The model's part is its own; everything else is a beginning, chosen by us: change it.",
        f"name: {name if stage == 'pretrain' else f'{name}-{stage}'}",
        f"stage: {stage}",
        "",
        "hardware:",
        "  hosts: [{name: node, slots: 8, gpu: A100-80G, memory: 512GiB}]      # what `plan` reckons with",
        "",
        "model:",
        f"  init_from: {model}",
        *([f"  revision: {revision}"] if revision else []),
        *(f"  {k}: {str(v).lower() if isinstance(v, bool) else v}" for k, v in shape.items() if stage == "pretrain"),
        "",
    ]
    if stage == "sft":
        lines += [f"chat: {{template: {template_for(tokenizer)}}}", ""]
    elif (end := _document_end(tokenizer)) is not None:
        lines += ["tokenizer:", f"  document_end: {end}      # its {tokenizer.eos[0]} ends a turn of a dialogue", ""]
    lines += [
        "data:",
        f"  sources: [{_SOURCES[stage]}]      # invented text; yours: path: corpus/*.jsonl.gz",
        *(["  packing: best_fit", "  document_masks: true"] if stage == "pretrain" else []),
        "",
        f"batch: {{sequence_length: {rows}, tokens_per_step: {_BATCH[stage]}}}",
        "",
        f"optim: {{lr: {_RATES[stage]}, schedule: cosine, warmup_steps: 10}}",
        "",
        "train: {steps: 100, seed: 1}",
        "",
        "checkpoint: {every_steps: 50, keep_last: 2}",
        "eval: {every_steps: 50}",
        "",
    ]
    with derive.draft_of(path, "\n".join(lines)) as draft:
        loaded = recipe.load(draft)
        weights.check_weights(loaded.recipe)
    for sentence in (*loaded.said, *weights.missing_start(loaded.recipe)):
        screen.say(sentence)
    return path


def template_for(tokenizer: Tokenizer) -> str:
    """Return the chat.template for a tokenizer: "model" if its own keeps a sample answer whole.

    The sample has reasoning if the tokenizer has </think>. Else returns the first of deepseek-r1, chatml and llama3
    whose tokens it has, else "xuanyuan". Raises UserError if its own is not valid Jinja.
    """
    from finlm.dialogues import templates

    jinja = tokenizer.chat_template
    reasons = tokenizer.id_of("</think>") is not None
    answer = "<think>\nWhy.\n</think>\n\nThus." if reasons else "Thus."
    if jinja is not None:
        template = templates.Template(jinja, tokenizer.bos[0] if tokenizer.bos else "", tokenizer.eos[0])
        try:
            template.render([{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}])
            return "model"
        except templates.Refused:
            pass
    has = {name for name, tokens in templates.NEEDED.items() if all(map(tokenizer.id_of, tokens))}
    return next((name for name in ("deepseek-r1", "chatml", "llama3") if name in has), "xuanyuan")


def _document_end(tokenizer: Tokenizer) -> str | None:
    """Return the token that ends documents where the tokenizer's eos ends turns; None elsewhere or without one."""
    if tokenizer.eos[0] in _END_OF_TEXT:
        return None
    return next((token for token in _END_OF_TEXT if token in tokenizer.control), None)


def diff(options: argparse.Namespace) -> int:
    """Run `finlm diff`: print how two recipes or runs differ, and how their plans do. Return 0.

    A single recipe is compared with its parent. Raises UserError for another number of them, or one that cannot be
    read.
    """
    from finlm.plan import show
    from finlm.recipe import derive

    paths = [derive.parent_of(options.recipes[0]), *options.recipes] if len(options.recipes) == 1 else options.recipes
    if len(paths) != 2:
        raise UserError(f"{len(paths)} recipes or runs were named", fix="finlm diff A B, or finlm diff FORK")
    values, follows = compare(paths, options)
    show.print_differences((str(paths[0]), str(paths[1])), values, follows)
    if options.json:
        plan = [asdict(row) for row in follows] if isinstance(follows, list) else []
        screen.print_json({"values": [asdict(row) for row in values], "plan": plan})
    return 0


def compare(paths: Sequence[Path], options: argparse.Namespace) -> tuple[list[Difference], list[Consequence] | str]:
    """Return (differing values of two recipes or runs, differing keys of their plans). `options` says the hosts.

    If one of them has no plan, the second part is the reason as a string. Raises UserError when one cannot be read.
    """
    from finlm.plan import show

    a, b = (_load_recipe_or_run(path) for path in paths)
    values = show.compare_recipes(a, b)
    try:
        plans = (_plan_for(path, it, options) for path, it in zip(paths, (a, b), strict=True))
        return values, show.compare_plans(*plans)
    except UserError as error:  # a recipe that fits nowhere has differences too
        return values, error.problem


def _load_recipe_or_run(path: Path) -> Loaded:
    """Return a loaded recipe file, or a run's recipe with the origins that it recorded. UserError if it is unfit."""
    from finlm.recipe import recipe

    if not path.is_dir():
        return recipe.load(path)
    run = open_run(path)
    return recipe.Loaded(recipe.load(run.recipe).recipe, files.read_json(run.origins), str(path))


def _plan_for(path: Path, loaded: Loaded, options: argparse.Namespace) -> Plan:
    """Return the plan stored in a run directory, or a recipe's plan for the options' hosts. Raises UserError."""
    from finlm.plan.plan import Plan

    if path.is_dir():
        return Plan.read(RunDir(path).plan)
    return check_and_plan(loaded.recipe, command_line.to_plan(options, loaded.recipe))[0]


def watch(options: argparse.Namespace) -> int:
    """Run `finlm watch`: show a run's progress until it ends; return the exit code. Raises UserError for no run."""
    from finlm.record import live

    return live.watch(open_run(options.run_dir))


def serve(options: argparse.Namespace) -> int:
    """Run `finlm serve`: print the address and replace this process with an OpenAI-compatible server, until Ctrl-C.

    The server is `vllm serve` if vLLM is installed and there is a GPU, else `transformers serve`, with the exported
    model and the chat template that it was trained with. Does not return. Raises UserError when there is no model that
    writes (a checkpoint has to be exported first), the server's packages are missing, or the port is in use.
    """
    from finlm.base import processes

    directory, host, port = _model_to_serve(options.model), options.host, options.port
    line = server_command(directory, host, port, options.engine)
    processes.listen(host, port).close()  # the server looks at its port only after it has loaded the model
    if not (directory / "chat_template.jinja").is_file():
        screen.say("the model has no chat template: it continues text (/v1/completions) and answers no messages")
    screen.say(f"serving {directory} at http://{host}:{port}/v1 (Ctrl-C ends it); ask for the model")
    screen.say_command(str(directory))
    os.execvp(line[0], line)


def _model_to_serve(path: Path) -> Path:
    """Return the absolute path of a run's export, or of the model `path`. Raises UserError if it cannot write text."""
    from finlm.recipe import parents

    is_run = (path / "plan.json").is_file()
    directory = RunDir(path).export if is_run else path
    if not (directory / "config.json").is_file():
        exported = f"finlm export {path} DIRECTORY, then finlm serve DIRECTORY"
        raise UserError(
            f"{path} is no model that can be served",
            evidence="the run has no export yet" if is_run else "no config.json in it",
            fix=exported if is_run or path.parent.name == "checkpoints" else "give a run or a Hugging Face directory",
        )
    if parents.is_reward_model(files.read_json(directory / "config.json")):
        raise UserError(f"{path} is a reward model, which writes nothing", fix="serve the model that it judges")
    return Path(directory).resolve()


def server_command(directory: Path, host: str, port: int, engine: str) -> list[str]:
    """Return the command line of the server.

    `engine` is vllm, transformers, or auto: vLLM if it is installed and there is a GPU. Raises UserError when the
    server's packages are missing.
    """
    address = ["--host", host, "--port", str(port)]
    vllm = shutil.which("vllm")
    if engine == "vllm" and vllm is None:
        raise UserError("vLLM is not installed", fix="pip install vllm, or --engine transformers")
    if vllm is not None and (engine == "vllm" or (engine == "auto" and Path("/proc/driver/nvidia/version").exists())):
        return [vllm, "serve", str(directory), *address]
    missing = [name for name in _OF_THE_SERVER if importlib.util.find_spec(name) is None]
    if missing:
        python = screen.relative(Path(sys.executable))
        raise UserError(
            f"transformers' server needs {', '.join(missing)}",
            fix=f"{python} -m pip install -r requirements-serve.lock (or 'finlm[serve]')",
        )
    return [sys.executable, "-m", "transformers.cli.transformers", "serve", str(directory), *address]
