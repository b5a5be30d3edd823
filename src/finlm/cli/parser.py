"""Read the command line: help and errors in the language of messages, with the nearest word for a mistyped one."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from typing import Any, NoReturn

from finlm.base import language, screen

OF_DATA = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet", ".arrow", ".txt", ".csv")  # how names of data end


class _Help(argparse.HelpFormatter):
    """Help in the language of messages."""

    def _expand_help(self, action: argparse.Action) -> str:
        return language.translate(super()._expand_help(action))

    def _split_lines(self, text: str, width: int) -> list[str]:
        return screen.fold(" ".join(text.split()), width).split("\n")

    def add_text(self, text: str | None) -> None:
        super().add_text(text and language.translate(text))

    def start_section(self, heading: str | None) -> None:
        super().start_section(heading and language.translate(heading))


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors end with the nearest known option or command."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(formatter_class=_Help, **settings)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does, and remember the words for `error`."""
        self._given = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Print the usage and the message, with the nearest known word, and exit with code 2."""
        wrong = re.match(r"(?:argument .*: invalid choice: '|unrecognized arguments: )([^\s'=]+)", message)
        below = (action.choices for action in self._actions if isinstance(action, argparse._SubParsersAction))
        commands = {name: command for choices in below for name, command in choices.items()}
        named = [commands[word] for word in self._given if word in commands][:1]
        known = [*commands, *(name for each in (self, *named) for name in each._option_string_actions)]
        known += re.findall(r"'([^']+)'", message.partition("choose from")[2])
        if any("--set" in each._option_string_actions for each in named) and message.startswith("unrecognized"):
            hint = _suggest_set(message.partition(": ")[2], self._given)
            message, wrong = (f"{message}; {hint}", None) if hint else (message, wrong)
        close = difflib.get_close_matches(wrong[1].strip("'"), known, n=1) if wrong else []
        said = language.translate(f"{message}; did you mean {close[0]}?" if close else message)
        self.print_usage(sys.stderr)
        self.exit(2, f"{self.prog}: {language.translate('error:')} {said}\n")


def _suggest_set(words: str, given: list[str]) -> str:
    """Return the advice how to give unknown words of a command line as --set KEY=VALUE; "" where they name no key.

    given: the whole line.
    """
    from finlm.recipe import reference  # a fifth of a second that only a mistake needs
    from finlm.recipe.schema import Recipe

    first, *rest = words.split()
    place = given.index(first) if first in given else 0
    if place > 1 and given[place - 2] == "--set" and "=" not in given[place - 1]:
        return f"write --set {given[place - 1]}={first}"
    if first.endswith(OF_DATA):
        return f"write --set data.sources={first}"
    if not first.startswith("--"):
        return f"write --set {first}" if re.match(r"[a-z_]+[\w.\[\]]*=", first) else ""
    name, _, value = first.removeprefix("--").partition("=")
    name = name.replace("-", "_")
    if reason := reference.other_programs()["needless"].get(name):
        return str(reason)
    keys = dict(reference.all_keys(Recipe, ()))
    ours = [key for key, last in keys.items() if last == name and key.count(".") == 1]
    key = reference.other_names().get(name) or (ours[0] if len(ours) == 1 else "")
    if key == "hardware.hosts" or name == "gpus":
        return "a hostfile says it, `name slots=N`; without one all GPUs of this machine train"
    return f"write --set {key}={value or next(iter(rest), 'VALUE')}" if key in keys else ""
