"""Run the command line: `finlm COMMAND`. Exit 0 = done, 1 = ran and found a problem, 2 = a mistake of the user.

Each command imports what it needs when it is chosen, so that --help answers in a tenth of a second and `prepare` never
loads torch. A command prints its result to stdout, and progress and warnings to stderr; with --json stdout is a single
document. Every command raises UserError for a mistake of the user.
"""

from __future__ import annotations

import argparse
import errno
import gc
import logging
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from finlm.base import files, imports, language, rundir, runs, screen
from finlm.base.errors import UserError
from finlm.cli import command_line, recipes
from finlm.cli import options as cli_options

if TYPE_CHECKING:
    from finlm.dialogues import templates
    from finlm.record.compare import Comparison

# What the system says of a path that somebody gave; any other OSError is a bug, or names no file.
REFUSED = {
    errno.ENOENT: "give a file or directory that is there",
    errno.EEXIST: "give another path: a file is in the way",
    errno.ENOTDIR: "give a directory: a file is in the way",
    errno.EISDIR: "give a file: this is a directory",
    **dict.fromkeys((errno.EACCES, errno.EPERM), runs.PERMISSIONS),
    errno.EROFS: "give a path on a disk that can be written",
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free space there, or give a path on a larger disk"),
    errno.ENAMETOOLONG: "give the name of a file or directory, not its text",
}

# Top-level modules of the packages that the extras of pyproject.toml install; `pip install finlm` brings none of them.
EXTRAS = {
    "data": "gigatoken awkward zstandard opencc pyarrow huggingface_hub tokenizers fsspec",
    "train": "torch transformers torchao deepspeed accelerate trl datasets peft safetensors",
    "report": "tensorboard",
    "board": "starlette uvicorn",
}


def extra_of(module: str) -> str | None:
    """Return the extra of pyproject.toml that installs a module, or None if no extra does."""
    root = module.partition(".")[0]
    return next((extra for extra, modules in EXTRAS.items() if root in modules.split()), None)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command of argv (default: sys.argv), print a UserError to stderr, and return the process's exit code.

    Raises SystemExit for a bad command line (code 2), --help and --version.
    """
    # Before argparse, which prints help and mistakes in this language.
    language.use(language.choose(sys.argv[1:] if argv is None else argv))
    try:
        options = cli_options.parser().parse_args(argv)
        screen.send_results(to_stderr=getattr(options, "json", False))
        return _run(options)
    except UserError as error:
        screen.print_error(error)
        return error.exit_code
    finally:
        screen.flush()
        screen.send_results(to_stderr=False)
        language.use("en")


def _run(options: argparse.Namespace) -> int:
    """Run the command and return its exit code: 130 for Ctrl-C, 2 after printing that a package or file is missing.

    Raises UserError, and OSError for errors that name no file of the user's.
    """
    gc.set_threshold(20_000, 50, 100)  # else the import of torch and transformers takes a second longer
    imports.hasten_transformers()
    # DeepSpeed logs to stdout while it is imported, and stdout carries results.
    logging.getLogger("DeepSpeed").disabled = True
    for name in ("torchao", "torch.utils._pytree"):  # torchao lists GPU code that it cannot load
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        command_line.resolve(options)
        return COMMANDS[options.command](options)
    except ModuleNotFoundError as error:
        extra = extra_of(error.name or "")
        if extra is None:
            raise
        fix = f"pip install 'finlm[{extra}]'; in a checkout: bash scripts/setup.sh"
        screen.print_error(UserError(f"{options.command} needs the package {error.name}", fix=fix))
        return UserError.exit_code
    except OSError as error:
        if error.filename is None or error.errno not in REFUSED:
            raise
        name = str(error.filename)[:200]  # which may be a pasted log
        screen.print_error(UserError(f"{options.command}: {name}: {error.strerror}", fix=REFUSED[error.errno]))
        return UserError.exit_code
    except KeyboardInterrupt:
        screen.say("interrupted")
        return 130


def _doctor(options: argparse.Namespace) -> int:
    """Run `finlm doctor`: check hosts, print findings (--json too). Return 1 for an error, else 0. Raises UserError."""
    from finlm.doctor import gather, preflight, speed
    from finlm.hosts import file_trees, sync

    recipe = recipes.load(options).recipe
    hosts = command_line.to_examine(options, recipe)
    plan, shards = recipes.check_and_plan(recipe, hosts)
    if command_line.hostfile(options):
        data = shards.directory if shards else None
        trees = file_trees.trees_to_check(recipe, sync.repository_root(), data)
    else:
        hosts, trees = preflight.this_machine(plan), file_trees.trees_to_check(recipe, None, None)
    facts = gather.gather(recipe, plan, hosts, options.runs, trees=trees, accept_new_keys=options.accept_new)
    findings = preflight.judge(recipe, plan, hosts, facts, trees)
    preflight.show_table(plan, hosts, facts, findings)
    document: dict[str, object] = {}
    if options.allreduce:
        slow, links = speed.measure(recipe, plan, hosts, facts, findings)
        findings = sorted(findings + slow, key=lambda finding: finding.level)
        document |= {"links": links} if links else {}
    preflight.show(findings)
    _print_json(options, {"findings": [asdict(finding) for finding in findings]} | document)
    return 1 if any(finding.level == "error" for finding in findings) else 0


def _diagnose(options: argparse.Namespace) -> int:
    """Run `finlm diagnose`: print why a run failed; return 0 if nothing was fatal, 1 for a cause, 2 without logs."""
    from finlm.diagnose import command

    lang = options.lang or ("en" if options.json else language.current())  # the environment changes no JSON
    return command.run(options.logs, lang, options.json, options.ask)


def _train(options: argparse.Namespace) -> int:
    """Run `finlm train`, or print its steps (--dry-run) or another launcher's command (--print); return the exit code.

    Raises UserError for a recipe, model, template, hosts or --runs that cannot be used, before it makes a run.
    """
    from finlm import dry_run, pipeline
    from finlm.recipe import derive, weights
    from finlm.recipe.models import config_json
    from finlm.recipe.recipe import load
    from finlm.runs import lineage

    loaded = derive.load_toy(options.recipe, options.set) if options.toy else recipes.load(options)
    if not options.dry_run:
        weights.fetch_weights(loaded.recipe)
    weights.check_model(loaded.recipe)
    recipes.check_template(loaded.recipe)
    hosts = command_line.to_train(options, loaded.recipe)
    read = derive.load_toy if options.toy else load
    directory = Path(options.runs)
    runs.check_place(directory)
    if options.go_on:
        lineage.check_run_to_extend(loaded.recipe, directory)
    training = pipeline.Training(loaded, hosts, directory, options.new, options.accept_new, read, options.go_on)
    screen.send_results(to_stderr=not options.dry_run)  # findings on the way to a run are no result
    if options.dry_run:
        dry_run.print_steps(training)
        return 0
    if options.adapter:
        commands = dry_run.adapt(training, options.adapter)
        screen.send_results(to_stderr=False)
        screen.write("".join(f"{command}\n" for command in commands))
        return 0
    config_json.check_kernels(loaded.recipe.model.config or {}, "cpu" if hosts.is_cpu else "cuda")
    return pipeline.train(training)


def _drill(options: argparse.Namespace) -> int:
    """Run `finlm drill`: break a run on purpose, print how it recovered (--json too). Return 0. Raises UserError."""
    from finlm.recipe import cluster
    from finlm.runs import drill

    kinds, recipe = drill.check_kinds(options.faults), recipes.load(options).recipe
    path = command_line.hostfile(options)
    given = [*(["--hostfile", str(path)] if path else []), *(["--gpu", options.gpu] if options.gpu else [])]
    given += ["--accept-new"] if options.accept_new else []
    sets = [part for override in (*drill.SETTINGS, *options.set) for part in ("--set", override)]
    train = [sys.executable, "-m", "finlm", "train", options.recipe, "--new", "--runs", options.runs, *given, *sets]
    hosts = cluster.load(path, access=recipe.hosts) if path else cluster.local(recipe.train.cpu_ranks)
    seconds = 60 * options.minutes
    wanted = drill.Drill(train, recipe.name, hosts, Path(options.runs), kinds, seconds, options.every, options.seed)

    def show(injuries: list[drill.Injury], share: float) -> None:
        """Print the table of injuries, and with --json the document; `share` is the time that was training."""
        drill.show(injuries, share)
        _print_json(options, drill.to_json(injuries, share))

    drill.drill(wanted, show)
    return 0


def _admit(options: argparse.Namespace) -> int:
    """Run `finlm admit`: check how a model trains (--json too). Return 0 if admitted, else 1. Raises UserError."""
    from finlm.admit import command

    verdict = command.admit(options.model)
    _print_json(options, asdict(verdict))
    return 0 if verdict.admitted else 1


def _sync(options: argparse.Namespace) -> int:
    """Run `finlm sync`: copy the repository to the hosts, or say there are none. Return 0. Raises UserError."""
    from finlm.hosts import sync

    hosts = command_line.to_sync(options)
    if hosts:
        same_path = dict.fromkeys(hosts, Path)
        sync.sync(sync.repository_root(), same_path, accept_new_keys=options.accept_new, dry_run=options.dry_run)
    else:
        screen.say(f"{options.hostfile} names no host, so runs use this machine: nothing to sync")
    return 0


def _eval(options: argparse.Namespace) -> int:
    """Run `finlm eval`: measure perplexity, or ask a suite's questions, and print the result (--json too). Return 0.

    With --write-lm-eval only writes the task's files and prints their path. Raises UserError for options that do not go
    together.
    """
    keys = ("mode", "shots", "data", "world", "limit", "answers", "contamination")
    if options.suite == "perplexity":
        given = [f"--{key.replace('_', '-')}" for key in (*keys, "write_lm_eval") if getattr(options, key) is not None]
        if given:
            raise UserError(f"{', '.join(given)}: only questions have that", fix="name them, for example --suite exam")
        if (options.checkpoint / "config.json").is_file():
            raise UserError(
                f"{options.checkpoint} is a model alone, without held-out text",
                fix="give a run or one of its checkpoints; any model answers questions: --suite exam",
            )
        checkpoint = runs.complete_checkpoint(options.checkpoint)  # a wrong path is told before torch is loaded
        from finlm.evals import suite

        measured = suite.measure_perplexity(checkpoint)
        suite.show_perplexity(measured)
        _print_json(options, measured)
        return 0
    from finlm.evals import questions

    # What is missing is told before torch and the model are loaded.
    run = rundir.run_of(options.checkpoint)
    if options.suite not in questions.OF_WORLD:
        questions.read_questions(options.suite, options.data, None)
    elif run is not None or (options.checkpoint / "config.json").is_file():
        questions.find_world(options.suite, run, options.world)
    from finlm.evals import suite

    wanted = suite.Options(options.suite, **{key: getattr(options, key) for key in keys})
    if options.write_lm_eval:
        screen.show(str(suite.write_lm_eval_task(options.checkpoint, wanted, options.write_lm_eval)))
        return 0
    result = suite.evaluate(options.checkpoint, wanted)
    suite.show(result)
    _print_json(options, result.to_json())
    return 0


def _print_json(options: argparse.Namespace, document: object) -> None:
    """Print the document to stdout as JSON if --json was given."""
    if options.json:
        screen.print_json(document)


def _attempt(options: argparse.Namespace) -> int:
    """Run `finlm attempt`: sample answers, print pass@k and maj@k (--json too). Return 0. Raises UserError."""
    recipe = recipes.load(options).recipe
    from finlm.evals import attempts
    from finlm.runs import lineage

    names = ("model", "count", "split", "limit", "seed", "best")
    asked = attempts.Options(**{name: getattr(options, name) for name in names})
    attempts.check(recipe, asked)
    result = attempts.run(recipe, replace(asked, start=options.model or lineage.model_directory(recipe, Path("runs"))))
    attempts.show(result)
    _print_json(options, result.to_json())
    return 0


def _export(options: argparse.Namespace) -> int:
    """Run `finlm export`: write a checkpoint in Hugging Face format; print the path. Return 0. Raises UserError."""
    checkpoint = runs.complete_checkpoint(options.checkpoint)
    from finlm.inference import export

    if options.adapter:
        screen.show(str(export.export_adapters(checkpoint, options.out)))
    else:
        screen.show(str(export.export(checkpoint, options.out, options.shard_size)))
    return 0


def _import_gguf(options: argparse.Namespace) -> int:
    """Run `finlm import-gguf`: make a Hugging Face directory of a GGUF file; print it. Return 0. Raises UserError."""
    from finlm.inference.open import import_gguf

    screen.show(str(import_gguf(options.file, options.out)))
    return 0


def _chat(options: argparse.Namespace) -> int:
    """Run `finlm chat`: talk to a model in the terminal; return the exit code. Raises UserError."""
    tools = None if options.tools is None else _read_tools(options.tools)
    from finlm.inference import chat

    sampling = (options.temperature, options.top_p)
    return chat.run(options.checkpoint, options.system, sampling, options.tokens, options.seed, tools)


def _read_tools(path: Path) -> templates.Tools:
    """Return the functions that a JSON file lists. Raises UserError if it lists none or is not JSON; OSError."""
    from finlm.dialogues import templates

    try:
        if tools := templates.read_tools({"tools": files.read_json(path)}):
            return tools
        reason = "it lists no function"
    except templates.Refused as error:
        reason = str(error)
    fix = "write a list of {type: function, function: {name, description, parameters}}, as OpenAI's API has it"
    raise UserError(f"{path} lists no tools", evidence=reason, fix=fix)


def _board(options: argparse.Namespace) -> int:
    """Run `finlm board`: serve pages in the browser until Ctrl-C. Return 0. Raises UserError."""
    from finlm.board import server

    return server.run(options)


def _sample(options: argparse.Namespace) -> int:
    """Run `finlm sample`: print the prompt and the model's continuation. Return 0. Raises UserError."""
    from finlm.inference import export

    text = export.sample_text(options.model, options.prompt, options.tokens, options.seed)
    screen.write(f"{options.prompt}{text}\n")
    return 0


def _report(options: argparse.Namespace) -> int:
    """Run `finlm report`: write a run's page, or a page of several runs; print its path. Return 0. Raises UserError."""
    from finlm.record import compare
    from finlm.record.report import run_page

    runs = [rundir.open_run(directory) for directory in options.run_dir]
    if len(runs) == 1:
        screen.show(str(run_page.build(runs[0], options.out)))
    else:
        screen.show(str(compare.write_page(runs, options.out or runs[0].path.parent / "side-by-side.html")))
    return 0


def _runs(options: argparse.Namespace) -> int:
    """Run `finlm runs`: print a table of runs, with --json as JSON too. Return 0. UserError if --runs is a file."""
    from finlm.record import history

    if options.runs.is_file():
        raise UserError(f"--runs: {options.runs} is a file", fix="give a directory of runs")
    listed = [history.read_listed(run) for run in runs.newest_runs(options.runs)]
    history.show_runs(listed, options.runs)
    _print_json(options, {"runs": [vars(run) for run in listed]})
    return 0


def _track(options: argparse.Namespace) -> int:
    """Run `finlm track`: send a run's metrics to trackers, with --follow until it ends. Return 0. Raises UserError."""
    from finlm.record import trackers

    trackers.track(rundir.open_run(options.run_dir), options.to, options.follow)
    return 0


def _compare(options: argparse.Namespace) -> int:
    """Run `finlm compare`: print how two runs differ (--json too). Return 0 if equal, else 1. UserError for no run."""
    from finlm.record import compare

    first, second = map(rundir.open_run, options.run_dirs)
    return _print_comparison(compare.compare(first, second, options.tolerance), first.path, second.path, options.json)


def _reproduce(options: argparse.Namespace) -> int:
    """Run `finlm reproduce`: train a run again, compare (--json too). Return 0 if equal, else 1. Raises UserError."""
    from finlm.runs import proofs

    run = rundir.open_run(options.run_dir)
    return _print_comparison(proofs.reproduce(run, options.runs, options.tolerance), run.path, "again", options.json)


def _verify_resume(options: argparse.Namespace) -> int:
    """Run `finlm verify-resume`: train with and without kills. Return 0 if equal, else 1. Raises UserError."""
    from finlm.recipe import recipe
    from finlm.runs import proofs

    recipe.load(options.recipe, options.set)  # a mistake in the recipe is said before anything is trained
    verdict = proofs.verify_resume(options.recipe, options.set, options.kills, options.runs, options.seed)
    proofs.show_verdict(verdict)
    _print_json(options, verdict.to_json())
    return 0 if verdict.is_equal else 1


def _print_comparison(comparison: Comparison, first: Path | str, second: Path | str, as_json: bool) -> int:
    """Print how two runs of these names differ; with as_json print JSON too. Return 0 if they are equal, else 1."""
    from finlm.record import compare

    for line in compare.format_comparison(comparison, (str(first), str(second))):
        screen.show(line)
    if as_json:
        screen.print_json(comparison.to_json())
    return 0 if comparison.equal else 1


COMMANDS = {
    "new": recipes.new,
    "diff": recipes.diff,
    "watch": recipes.watch,
    "prepare": recipes.prepare,
    "lint": recipes.lint,
    "self-qa": recipes.self_qa,
    "plan": recipes.plan,
    "doctor": _doctor,
    "diagnose": _diagnose,
    "admit": _admit,
    "train": _train,
    "drill": _drill,
    "sync": _sync,
    "eval": _eval,
    "attempt": _attempt,
    "export": _export,
    "import-gguf": _import_gguf,
    "chat": _chat,
    "sample": _sample,
    "serve": recipes.serve,
    "report": _report,
    "runs": _runs,
    "track": _track,
    "board": _board,
    "compare": _compare,
    "reproduce": _reproduce,
    "verify-resume": _verify_resume,
}

if __name__ == "__main__":
    sys.exit(main())
