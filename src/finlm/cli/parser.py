"""Read the command line: help and errors in the language of messages, with the nearest word for a mistyped one."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from typing import Any, NoReturn

from finlm.base import language, screen


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

    def error(self, message: str) -> NoReturn:
        """Print the usage and the message, with the nearest known word, and exit with code 2."""
        wrong = re.match(r"(?:argument .*: invalid choice: '|unrecognized arguments: )([^\s'=]+)", message)
        below = (action.choices for action in self._actions if isinstance(action, argparse._SubParsersAction))
        commands = {name: command for choices in below for name, command in choices.items()}
        known = [*commands, *(name for each in (self, *commands.values()) for name in each._option_string_actions)]
        known += re.findall(r"'([^']+)'", message.partition("choose from")[2])
        close = difflib.get_close_matches(wrong[1].strip("'"), known, n=1) if wrong else []
        said = language.translate(f"{message}; did you mean {close[0]}?" if close else message)
        self.print_usage(sys.stderr)
        self.exit(2, f"{self.prog}: {language.translate('error:')} {said}\n")
