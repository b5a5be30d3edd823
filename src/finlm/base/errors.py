"""The one exception for user mistakes.

A mistake in a recipe, a file or the machine's set-up raises UserError and is printed as problem / evidence / fix with
exit code 2 and no traceback. Every other exception is a bug in finlm and keeps its traceback.
"""

from __future__ import annotations


class UserError(Exception):
    """A mistake the user can mend: what is wrong, what shows it, what to do."""

    exit_code = 2

    def __init__(self, problem: str, *, evidence: str = "", fix: str = "") -> None:
        super().__init__(problem)
        self.problem = problem
        self.evidence = evidence
        self.fix = fix

    def __str__(self) -> str:
        parts = [self.problem]
        if self.evidence:
            parts.append(f"evidence: {self.evidence}")
        if self.fix:
            parts.append(f"fix: {self.fix}")
        return "\n".join(parts)

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword-only arguments do not survive default pickling, and workers hand errors to their parent by pickle.
        return _rebuild, (type(self), self.problem, self.evidence, self.fix)


class RunFailed(UserError):
    """Training ended before its end; exit_code is that of the first rank that failed, 128 + N for signal N.

    host: where, if that is known. is_final: the run ended itself, so starting it again leads to the same end.
    is_certain: the cause was measured; the logs have nothing to add.
    """

    def __init__(
        self,
        problem: str,
        *,
        evidence: str = "",
        fix: str = "",
        exit_code: int = 1,
        host: str = "",
        is_final: bool = False,
        is_certain: bool = False,
    ) -> None:
        super().__init__(problem, evidence=evidence, fix=fix)
        self.exit_code, self.host, self.is_final, self.is_certain = exit_code, host, is_final, is_certain


def _rebuild(cls: type[UserError], problem: str, evidence: str, fix: str) -> UserError:
    return cls(problem, evidence=evidence, fix=fix)
