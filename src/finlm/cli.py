"""The command line: `python -m finlm COMMAND`. Exit 0 = done, 1 = ran and found a problem, 2 = a mistake of the user.

Each command imports what it needs when it is chosen, so that --help answers in a tenth of a second and `prepare` never
loads torch. Human text goes to stderr, one JSON document to stdout under --json.
"""

from __future__ import annotations

import argparse
import errno
import gc
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finlm import cli_options, cli_recipes
from finlm.base import rundir, screen
from finlm.base.errors import UserError

if TYPE_CHECKING:
    from finlm.record.compare import Comparison


# What the system says of a path that somebody gave; any other OSError is a bug, or names no file.
REFUSED = {
    errno.ENOENT: "give a file or directory that is there",
    errno.EEXIST: "give another path: a file is in the way",
    errno.ENOTDIR: "give a directory: a file is in the way",
    errno.EISDIR: "give a file: this is a directory",
    errno.EACCES: "change its owner or permissions, or give another path",
    errno.EROFS: "give a path on a disk that can be written",
    errno.ENOSPC: "free space there, or give a path on a larger disk",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the process's exit code."""
    options = cli_options.parser().parse_args(argv)
    gc.set_threshold(20_000, 50, 100)  # else the import of torch and transformers takes a second longer
    # DeepSpeed logs to stdout while it is imported, and stdout carries results.
    logging.getLogger("DeepSpeed").disabled = True
    for name in ("torchao", "torch.utils._pytree"):  # transformers imports torchao, which lists GPU code it cannot load
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        return COMMANDS[options.command](options)
    except UserError as error:
        screen.fail(error)
        return error.exit_code
    except OSError as error:
        if error.filename is None or error.errno not in REFUSED:
            raise
        screen.fail(UserError(f"{options.command}: {error.filename}: {error.strerror}", fix=REFUSED[error.errno]))
        return UserError.exit_code
    except KeyboardInterrupt:
        screen.say("interrupted")
        return 130


def _doctor(options: argparse.Namespace) -> int:
    from finlm.data import prepare
    from finlm.ops import doctor, doctor_gather, doctor_kinds, doctor_speed, doctor_trees, sync
    from finlm.recipe import cluster

    recipe = cli_recipes.load(options).recipe
    if not (options.hostfile or options.local):
        options.hostfile = cluster.default_hostfile()
    hosts = cli_recipes.hosts_of(options, recipe)
    if options.hostfile and not options.gpu:
        hosts = doctor_kinds.ask(recipe, hosts, options.accept_new)
    plan = cli_recipes.make_plan(recipe, hosts)
    if options.hostfile:
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
    from finlm.data import start
    from finlm.ops import doctor_gather, doctor_kinds
    from finlm.recipe import cluster, toy
    from finlm.recipe.recipe import load

    loaded = toy.load(options.recipe, options.set) if options.toy else cli_recipes.load(options)
    start.check(loaded.recipe)
    recipe, hostfile = loaded.recipe, options.hostfile or cluster.default_hostfile()
    if hostfile:
        ways = options.include, options.exclude
        hosts = cluster.load(hostfile, recipe.hardware, options.gpu, recipe.hosts, *ways)
        if options.adapter:  # another launcher's hosts may have no ssh
            hosts = cluster.described(hosts, recipe.hardware)
        elif options.gpu:
            doctor_kinds.check_reached(doctor_gather.hardware(recipe, hosts, options.accept_new))
        else:
            hosts = doctor_kinds.ask(recipe, hosts, options.accept_new, to_train=True)
    elif options.include or options.exclude or options.gpu:
        raise UserError(
            "--include, --exclude and --gpu are about a hostfile's hosts, and there is none",
            evidence="neither --hostfile nor a host in hostfile.txt: this machine alone would train",
            fix="give --hostfile; on this machine CUDA_VISIBLE_DEVICES=0,1 chooses GPUs",
        )
    else:
        hosts = cluster.local(recipe.train.cpu_ranks)
    runs = Path(options.runs)
    if options.adapter:
        for command in pipeline.adapt(loaded, hosts, runs, options.new, options.adapter):
            print(command)
        return 0
    read = toy.load if options.toy else load
    return pipeline.train(loaded, hosts, runs, options.new, options.accept_new, read)


def _sync(options: argparse.Namespace) -> int:
    from finlm.ops import sync

    return sync.main(options.hostfile, options.accept_new, options.dry_run)


def _eval(options: argparse.Namespace) -> int:
    keys = ("mode", "shots", "data", "world", "limit", "answers", "contamination")
    if options.suite == "perplexity":
        given = [f"--{key.replace('_', '-')}" for key in (*keys, "write_lm_eval") if getattr(options, key) is not None]
        if given:
            raise UserError(f"{', '.join(given)}: only questions have that", fix="name them, for example --suite exam")
        checkpoint = rundir.complete_checkpoint(options.checkpoint)  # a wrong path is told before torch is loaded
        from finlm.evals import perplexity

        result = perplexity.evaluate(checkpoint)
        perplexity.show(result)
    else:
        from finlm.evals import lm_eval_task, suite

        wanted = suite.Options(options.suite, **{key: getattr(options, key) for key in keys})
        if options.write_lm_eval:
            print(lm_eval_task.write(options.checkpoint, wanted, options.write_lm_eval))
            return 0
        result = suite.evaluate(options.checkpoint, wanted)
        suite.show(result)
    if options.json:
        print(json.dumps(result, ensure_ascii=False))
    return 0


def _export(options: argparse.Namespace) -> int:
    checkpoint = rundir.complete_checkpoint(options.checkpoint)
    from finlm import export

    print(export.export(checkpoint, options.out, options.shard_size))
    return 0


def _import_gguf(options: argparse.Namespace) -> int:
    from finlm import import_gguf

    print(import_gguf.write(options.file, options.out))
    return 0


def _chat(options: argparse.Namespace) -> int:
    from finlm import chat

    return chat.run(
        options.checkpoint, options.system, options.temperature, options.top_p, options.tokens, options.seed
    )


def _sample(options: argparse.Namespace) -> int:
    from finlm import export

    print(options.prompt + export.generate(options.model, options.prompt, options.tokens, options.seed))
    return 0


def _report(options: argparse.Namespace) -> int:
    from finlm.base.rundir import open_run
    from finlm.record import report, side_by_side

    runs = [open_run(directory) for directory in options.run_dir]
    if len(runs) == 1:
        print(report.build(runs[0], options.out))
    else:
        print(side_by_side.build(runs, options.out or runs[0].path.parent / "side-by-side.html"))
    return 0


def _track(options: argparse.Namespace) -> int:
    from finlm.base.rundir import open_run
    from finlm.record import tracking

    tracking.track(open_run(options.run_dir), options.to, options.follow)
    return 0


def _compare(options: argparse.Namespace) -> int:
    from finlm.base.rundir import open_run
    from finlm.record import compare

    one, other = map(open_run, options.run_dirs)
    return _said(compare.runs(one, other, options.tolerance), one.path, other.path, options.json)


def _reproduce(options: argparse.Namespace) -> int:
    from finlm import reproduce
    from finlm.base.rundir import open_run

    run = open_run(options.run_dir)
    return _said(reproduce.reproduce(run, options.runs, options.tolerance), run.path, "again", options.json)


def _verify_resume(options: argparse.Namespace) -> int:
    from finlm import verify_resume
    from finlm.recipe import recipe

    recipe.load(options.recipe, options.set)  # a mistake in the recipe is said before anything is trained
    verdict = verify_resume.run(options.recipe, options.set, options.kills, options.runs, options.seed)
    verify_resume.show(verdict)
    if options.json:
        print(json.dumps(verdict.to_json(), ensure_ascii=False))
    return 0 if verdict.is_equal else 1


def _said(comparison: Comparison, one: Path | str, other: Path | str, as_json: bool) -> int:
    from finlm.record import compare

    for line in compare.show(comparison, (str(one), str(other))):
        screen.say(line)
    if as_json:
        print(json.dumps(comparison.to_json(), ensure_ascii=False))
    return 0 if comparison.equal else 1


COMMANDS = {
    "new": cli_recipes.new,
    "diff": cli_recipes.diff,
    "watch": cli_recipes.watch,
    "prepare": cli_recipes.prepare,
    "lint": cli_recipes.lint,
    "self-qa": cli_recipes.self_qa,
    "plan": cli_recipes.plan,
    "doctor": _doctor,
    "diagnose": _diagnose,
    "train": _train,
    "sync": _sync,
    "eval": _eval,
    "export": _export,
    "import-gguf": _import_gguf,
    "chat": _chat,
    "sample": _sample,
    "report": _report,
    "track": _track,
    "compare": _compare,
    "reproduce": _reproduce,
    "verify-resume": _verify_resume,
}

if __name__ == "__main__":
    sys.exit(main())
