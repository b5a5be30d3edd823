"""Define the exceptions for mistakes of the user.

A mistake in a recipe, a file or the machine's set-up raises UserError and is printed as problem / evidence / fix with
exit code 2 and no traceback. Every other exception is a bug in finlm and keeps its traceback.
"""

from __future__ import annotations

import functools
import os


class UserError(Exception):
    """A mistake that the user can correct: the problem, the evidence for it, and the fix; str() gives all three."""

    exit_code = 2

    def __init__(self, problem: str, *, evidence: str = "", fix: str = "") -> None:
        """Keep problem, evidence and fix; "" leaves the last two out."""
        super().__init__(problem)
        self.problem = problem
        self.evidence = evidence
        self.fix = fix

    def __str__(self) -> str:
        """Return the problem, and on further lines "evidence: ..." and "fix: ..." if there are any."""
        parts = [self.problem]
        if self.evidence:
            parts.append(f"evidence: {self.evidence}")
        if self.fix:
            parts.append(f"fix: {self.fix}")
        return "\n".join(parts)

    def __reduce__(self) -> tuple[object, ...]:
        """Return how pickle makes the error again; further attributes of a subclass are lost."""
        # Keyword-only arguments do not survive default pickling, and workers hand errors to their parent by pickle.
        return functools.partial(type(self), evidence=self.evidence, fix=self.fix), (self.problem,)


def reason(error: OSError) -> str:
    """Return in words why the system call failed: strerror, else the text of an errno in the error's arguments.

    Falls back to str(error), then to the name of the error's class.
    """
    number = error.errno or next((each for each in error.args if isinstance(each, int)), 0)
    return error.strerror or (os.strerror(number) if number else str(error)) or type(error).__name__
