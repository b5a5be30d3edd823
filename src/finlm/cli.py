"""The command line: `python -m finlm COMMAND`. Exit 0 = done, 1 = ran and found a problem, 2 = a mistake of the user.

Each command imports what it needs when it is chosen, so that --help answers in a tenth of a second and `prepare` never
loads torch. Human text goes to stderr, one JSON document to stdout under --json.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finlm.base import screen
from finlm.base.errors import UserError

if TYPE_CHECKING:
    from finlm.plan.plan import Plan
    from finlm.recipe.recipe import Loaded


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the process's exit code."""
    options = parser().parse_args(argv)
    # DeepSpeed logs to stdout while it is imported, and stdout carries results.
    logging.getLogger("DeepSpeed").disabled = True
    for name in ("torchao", "torch.utils._pytree"):  # transformers imports torchao, which lists GPU code it cannot load
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        return int(options.run(options))
    except UserError as error:
        screen.fail(error)
        return error.exit_code
    except KeyboardInterrupt:
        screen.say("interrupted")
        return 130


def parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    root = argparse.ArgumentParser(prog="finlm", description="Pretraining recipes for financial language models.")
    commands = root.add_subparsers(required=True, metavar="COMMAND")
    add = commands.add_parser

    command = add("prepare", help="documents -> clean -> dedup -> tokenizer -> shards; skips what is unchanged")
    _recipe_options(command)
    command.add_argument("--show", type=int, default=0, metavar="N", help="print the first N rows of the run as text")
    command.set_defaults(run=_prepare)

    command = add("plan", help="what a run would do: memory, ZeRO stage, micro-batch, time; needs no GPU")
    _recipe_options(command)
    _cluster_options(command)
    command.add_argument("--json", action="store_true", help="print the plan as JSON on stdout")
    command.set_defaults(run=_plan)

    command = add("doctor", help="check every host of the hostfile, or this machine, against a recipe's plan")
    _recipe_options(command, nargs="?", default="recipes/quickstart/pretrain.yaml")
    _cluster_options(command)
    command.add_argument("--allreduce", action="store_true", help="also measure every link with real collectives")
    command.add_argument("--runs", type=Path, default=Path("runs"), help="where runs would go (default: %(default)s)")
    command.add_argument("--accept-new", action="store_true", help="record the ssh keys of new hosts")
    command.add_argument("--json", action="store_true", help="print the findings as JSON on stdout")
    command.set_defaults(run=_doctor)

    command = add("diagnose", help="name the cause of a failed run from its logs")
    command.add_argument("logs", nargs="+", metavar="LOG", help="log file, run directory, or - for standard input")
    command.add_argument("--lang", choices=("en", "zh"), default="en", help="language (default: %(default)s)")
    command.add_argument("--json", action="store_true", help="print the findings as JSON on stdout")
    command.set_defaults(run=_diagnose)

    command = add("train", help="prepare, plan, doctor, launch, export, report; resumes an unfinished run")
    _recipe_options(command)
    command.add_argument("--hostfile", help="hosts in DeepSpeed's format; default: hostfile.txt, else this machine")
    some = command.add_mutually_exclusive_group()
    some.add_argument("--include", default="", metavar="a@b:0,2", help="only these hosts (and slots) of the hostfile")
    some.add_argument("--exclude", default="", metavar="a@b:0,2", help="all but these hosts (and slots)")
    command.add_argument("--gpu", metavar="NAME", help="GPU kind of every host, e.g. A100-40G")
    command.add_argument("--accept-new", action="store_true", help="record the ssh keys of new hosts")
    command.add_argument("--runs", default="runs", help="directory of run directories (default: %(default)s)")
    command.add_argument("--new", action="store_true", help="start afresh even if an unfinished run exists")
    command.add_argument(
        "--print",
        choices=("torchrun", "accelerate", "slurm", "k8s", "ray"),
        dest="adapter",
        help="only make the run directory and print what starts it under another launcher",
    )
    command.set_defaults(run=_train)

    command = add("sync", help="copy this repository to every host of the hostfile and prove the copies equal")
    command.add_argument("--hostfile", type=Path, default=Path("hostfile.txt"), help="default: %(default)s")
    command.add_argument("--accept-new", action="store_true", help="record the ssh keys of new hosts")
    command.add_argument("--dry-run", action="store_true", help="say what would be copied")
    command.set_defaults(run=_sync)

    command = add("eval", help="held-out perplexity of a checkpoint, per source")
    command.add_argument("checkpoint", type=Path, help="runs/<run>/checkpoints/step-N")
    command.add_argument("--json", action="store_true", help="print the result as JSON on stdout")
    command.set_defaults(run=_eval)

    command = add("export", help="a checkpoint as a Hugging Face model, proved by reloading it")
    command.add_argument("checkpoint", type=Path, help="runs/<run>/checkpoints/step-N")
    command.add_argument("out", type=Path, help="new directory")
    command.set_defaults(run=_export)

    command = add("sample", help="continue a prompt with an exported model")
    command.add_argument("model", type=Path, help="directory written by export")
    command.add_argument("prompt", help="text to continue")
    command.add_argument("--tokens", type=int, default=64, help="tokens at most (default: %(default)s)")
    command.add_argument("--seed", type=int, default=0, help="sampling seed (default: %(default)s)")
    command.set_defaults(run=_sample)

    command = add("report", help="build a run's report.html")
    command.add_argument("run_dir", help="runs/<run>")
    command.set_defaults(run=_report)
    return root


def _recipe_options(command: argparse.ArgumentParser, **positional: Any) -> None:
    command.add_argument("recipe", help="recipes/<family>/<stage>.yaml", **positional)
    command.add_argument("--set", action="append", default=[], metavar="a.b=VALUE", help="override a key; repeatable")


def _cluster_options(command: argparse.ArgumentParser) -> None:
    where = command.add_mutually_exclusive_group()
    where.add_argument("--hostfile", help="hosts in DeepSpeed's format; default: the recipe's hardware section")
    where.add_argument("--local", action="store_true", help="this machine instead of the recipe's hardware")
    command.add_argument("--gpu", metavar="NAME", help="GPU kind of every host, e.g. A100-40G")


def _load(options: argparse.Namespace) -> Loaded:
    from finlm.recipe import recipe

    return recipe.load(options.recipe, options.set)


def _prepare(options: argparse.Namespace) -> int:
    from finlm.data import prepare

    recipe = _load(options).recipe
    shards = prepare.run(recipe)
    if options.show > 0:
        prepare.show_rows(recipe, shards, options.show)
    print(shards)
    return 0


def _make_plan(options: argparse.Namespace, loaded: Loaded) -> Plan:
    from finlm.data import prepare
    from finlm.plan import planner
    from finlm.recipe import cluster, shape

    recipe = loaded.recipe
    if options.hostfile:
        hosts = cluster.load(options.hostfile, recipe.hardware, options.gpu, recipe.hosts)
    elif options.local:
        hosts = cluster.local(recipe.train.cpu_ranks)
    else:
        hosts = cluster.from_hardware(recipe.hardware, options.gpu)
    needs_data = recipe.train.epochs is not None or recipe.model.vocab_size == "auto"
    prepared = prepare.locate(recipe) if needs_data else None
    vocab, tokens = prepare.sizes(prepared) if prepared else (None, None)
    return planner.make(recipe, hosts, shape.of(recipe, vocab), tokens)


def _plan(options: argparse.Namespace) -> int:
    from finlm.plan import show

    loaded = _load(options)
    plan = _make_plan(options, loaded)
    show.plan(plan, loaded)
    show.origins(loaded)
    if options.json:
        print(json.dumps(plan.to_json(), ensure_ascii=False))
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from finlm.data import prepare
    from finlm.ops import doctor, doctor_gather, doctor_speed, doctor_trees, sync
    from finlm.recipe import cluster

    loaded = _load(options)
    recipe = loaded.recipe
    if not (options.hostfile or options.local):
        options.hostfile = cluster.default_hostfile()
    plan = _make_plan(options, loaded)
    if options.hostfile:
        hosts = cluster.load(options.hostfile, recipe.hardware, options.gpu, recipe.hosts)
        trees = doctor_trees.wanted(recipe, sync.repository_root(), prepare.locate(recipe))
    else:
        hosts, trees = doctor.this_machine(plan), doctor_trees.wanted(recipe, None, None)
    facts = doctor_gather.gather(recipe, plan, hosts, options.runs, trees=trees, accept_new=options.accept_new)
    findings = doctor.judge(recipe, plan, hosts, facts, trees)
    doctor.show_table(plan, hosts, facts, findings)
    speeds: dict[str, Any] = {}
    if options.allreduce:
        slow, speeds = doctor_speed.measure(recipe, plan, hosts, facts, findings)
        findings = sorted(findings + slow, key=lambda finding: finding.level)
    doctor.show(findings)
    if options.json:
        document = {"findings": [finding.to_json() for finding in findings]} | ({"links": speeds} if speeds else {})
        print(json.dumps(document, ensure_ascii=False))
    return 1 if any(finding.level == "error" for finding in findings) else 0


def _diagnose(options: argparse.Namespace) -> int:
    from finlm.ops import diagnose

    return diagnose.run(options.logs, options.lang, options.json)


def _train(options: argparse.Namespace) -> int:
    from finlm import pipeline
    from finlm.recipe import cluster

    loaded = _load(options)
    recipe, hostfile = loaded.recipe, options.hostfile or cluster.default_hostfile()
    if hostfile:
        ways = options.include, options.exclude
        hosts = cluster.load(hostfile, recipe.hardware, options.gpu, recipe.hosts, *ways)
    else:
        hosts = cluster.local(recipe.train.cpu_ranks)
    runs = Path(options.runs)
    if options.adapter:
        for command in pipeline.adapt(loaded, hosts, runs, options.new, options.adapter):
            print(command)
        return 0
    return pipeline.train(loaded, hosts, runs, options.new, options.accept_new)


def _sync(options: argparse.Namespace) -> int:
    from finlm.ops import sync

    return sync.main(options.hostfile, options.accept_new, options.dry_run)


def _eval(options: argparse.Namespace) -> int:
    from finlm.evals import perplexity

    result = perplexity.evaluate(options.checkpoint)
    perplexity.show(result)
    if options.json:
        print(json.dumps(result, ensure_ascii=False))
    return 0


def _export(options: argparse.Namespace) -> int:
    from finlm import export

    print(export.export(options.checkpoint, options.out))
    return 0


def _sample(options: argparse.Namespace) -> int:
    from finlm import export

    print(options.prompt + export.generate(options.model, options.prompt, options.tokens, options.seed))
    return 0


def _report(options: argparse.Namespace) -> int:
    from finlm.base.rundir import open_run
    from finlm.record import report

    print(report.build(open_run(options.run_dir)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
