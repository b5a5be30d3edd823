"""Replace what looks like a credential before it is written: by its name, by its form, or inside a URL.

Rather too much than too little: what is cut out here is only for reading. The code a run carries, its recipe.yaml and
env/ are copied as they are: a run directory is as private as the recipe.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

REDACTED = "[redacted]"
_KEPT_PREFIXES = (
    *("DS_", "DEEPSPEED_", "NCCL_", "GLOO_", "TORCH", "PYTORCH_", "CUDA_", "NVIDIA_", "CUBLAS_", "OMP_", "MKL_"),
    *("ATEN_", "ONEDNN_", "DNNL_", "HF_", "TRANSFORMERS_", "TOKENIZERS_", "SLURM_", "UCX_", "FI_", "PDSH_"),
    *("MASTER_", "FINLM_"),
)
_KEPT_NAMES = (
    *("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "PYTHONHASHSEED", "LOCAL_SIZE", "RANK", "WORLD_SIZE"),
    *("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "NUMEXPR_MAX_THREADS", "KMP_AFFINITY"),
)
_SECRET_NAME = re.compile(r"KEY|TOKEN(?!IZER)|SECRET|PASSW|CREDENTIAL|COOKIE|(^|_)AUTH", re.IGNORECASE)
_NAME_IN_TEXT = r"KEY|TOKEN(?!S|IZER|_ID|_DTYPE)|SECRET|PASSW|CREDENTIAL|COOKIE"  # code speaks of tokens all day
_RECIPE_KEY = re.compile(r"[a-z0-9_]+(\[\d+\]|\.[a-z0-9_]+)*")
_URL_LOGIN = re.compile(r"(?<=://)[^/\s@]+(?=@)")
_URL_QUERY = re.compile(
    r"([?&][\w.-]*(?:key|token|secret|passw|credential|signature|auth|sig)[\w.-]*=)[^&#\s\"']+", re.I
)
# Hugging Face, OpenAI and Anthropic, GitHub, AWS, Slack.
_KNOWN = re.compile(
    r"\b(hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|AKIA[0-9A-Z]{12,}|xox[a-z]-[\w-]{10,})"
)
_ASSIGNED = re.compile(
    rf"""(?P<name>[\w.-]*(?:{_NAME_IN_TEXT})[\w.-]*["']?\s*[:=]\s*)(?P<quote>["']?)(?P<value>[^\s"',;)\]}}]{{6,}})(?P=quote)""",
    re.IGNORECASE,
)


def redact(name: str, value: str) -> str:
    """Return REDACTED if the name looks like a secret's, else value with REDACTED for tokens and URL logins in it."""
    return REDACTED if _SECRET_NAME.search(name) else _without_tokens(value)


def redact_key(key: str, value: Any) -> Any:
    """Return a copy of the recipe's value at a dotted key, with REDACTED for secrets; nested values are searched too.

    Below `env` the last part of the key is a variable's name, and a secret's name hides its whole value.
    """
    if isinstance(value, Mapping):
        return {name: redact_key(f"{key}.{name}", inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(redact_key(key, inner) for inner in value)
    if not isinstance(value, str):
        return value
    *sections, name = key.split(".")
    return redact(name, value) if "env" in sections else _without_tokens(value)


def redact_text(text: str) -> str:
    """Return source code or a diff with REDACTED for tokens, URL logins and values assigned to secret names."""
    return _ASSIGNED.sub(
        lambda match: f"{match['name']}{match['quote']}{REDACTED}{match['quote']}", _without_tokens(text)
    )


def redact_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that can change a training run, sorted by name, with REDACTED for credentials."""
    kept = (name for name in environment if name.startswith(_KEPT_PREFIXES) or name in _KEPT_NAMES)
    return {name: redact(name, environment[name]) for name in sorted(kept)}


def redact_command(command: Sequence[str]) -> list[str]:
    """Return the command's arguments with REDACTED for credentials.

    Hides values of options and env variables with secret names, known forms of tokens, URL logins, and any whole env or
    hosts section that is given as one value (env={A: b}). Values of other recipe keys lose only tokens and logins.
    """
    result: list[str] = []
    for argument in command:
        name, separator, value = argument.partition("=")
        if result and _is_secret_option(result[-1]):
            result.append(REDACTED)
        elif separator and name.split(".")[0] in ("env", "hosts") and value.lstrip().startswith("{"):
            result.append(f"{name}={REDACTED}")
        elif separator and (name.startswith("-") or "env" in name.split(".") or not _RECIPE_KEY.fullmatch(name)):
            result.append(f"{name}={redact(name, value)}")
        else:
            result.append(_without_tokens(argument))
    return result


def _without_tokens(text: str) -> str:
    """Return text with REDACTED for known forms of tokens, and for logins and secret query parameters in URLs."""
    return _KNOWN.sub(REDACTED, _URL_QUERY.sub(rf"\1{REDACTED}", _URL_LOGIN.sub(REDACTED, text)))


def _is_secret_option(argument: str) -> bool:
    """Return whether an argument is an option, such as --api-key, whose value is a secret; --tokens is a count."""
    is_option = argument.startswith("--") and "=" not in argument and argument != "--tokens"
    return is_option and _SECRET_NAME.search(argument) is not None
