"""Any model to be examined, talked to or exported: a run's checkpoint, a run, an export, a Hugging Face directory.

A run stands for its export, which is proved equal to its last checkpoint, and before there is one for its newest
checkpoint. On CPUs without bf16 instructions half precisions are computed in fp32, ten times faster there.

No name of the Hugging Face Hub is taken and no code of a model directory is executed: what is examined lies here.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from finlm.base import files
from finlm.base.errors import UserError
from finlm.base.rundir import RunDir, newest_checkpoint
from finlm.recipe import parents
from finlm.train import encoding, weights

transformers.utils.logging.disable_progress_bar()  # files of a second; a bar each would bury what the user reads
_SAMPLES, _SAMPLE_BYTES = 64, 65_536  # of each weight file, for the fingerprint


@dataclass(frozen=True)
class Opened:
    """A model on its device, with the tokenizer of transformers that goes with it."""

    model: Any
    tokenizer: Any
    name: str  # for people
    fingerprint: str  # of weights, tokenizer and precision
    context: int  # tokens
    eos_ids: tuple[int, ...]  # any of them ends an answer
    run: RunDir | None
    step: int | None

    @property
    def device(self) -> torch.device:
        """Where inputs go."""
        return torch.device(self.model.device)


def open_model(path: Path, device: torch.device | None = None) -> Opened:
    """The model of a checkpoint, run, export or Hugging Face directory. Raises UserError when there is none."""
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    run = _run_of(path)
    if (path / "plan.json").is_file():
        path = _newest(RunDir(path))
    if path.parent.name == "checkpoints":
        return _checkpoint(path, device)
    if not (path / "config.json").is_file():
        raise UserError(
            f"{path} holds no model",
            evidence=f"{'no config.json in it' if path.is_dir() else 'no such directory'}",
            fix="give runs/<run>, runs/<run>/checkpoints/step-N, or a model directory in Hugging Face format",
        )
    return _directory(path, device, run)


def _run_of(path: Path) -> RunDir | None:
    """The run that a path belongs to: its own directory, its export or one of its checkpoints."""
    for directory in (path, path.parent, path.parent.parent):
        if (directory / "plan.json").is_file() and (directory / "recipe.yaml").is_file():
            return RunDir(directory.resolve())
    return None


def _newest(run: RunDir) -> Path:
    if (run.export / "config.json").is_file():
        return Path(run.export)
    return newest_checkpoint(run)


def _checkpoint(path: Path, device: torch.device) -> Opened:
    from finlm.train import trained  # loads deepspeed, which a model directory does not need

    loaded = trained.load(path)
    if loaded.recipe.stage == "reward":
        raise _judge(path)
    length = loaded.model.config.max_position_embeddings
    tokenizer = encoding.of_run(loaded.shards, loaded.recipe.tokenizer.add_bos, length)
    manifest = files.read_json(path / "manifest.json")
    name = f"{loaded.run.path.name}/{path.name}"
    parts = [manifest, str(loaded.model.dtype)]
    return _opened(loaded.model, tokenizer, device, name, parts, loaded.run, int(manifest["step"]))


def _judge(path: Path) -> UserError:
    return UserError(
        f"{path} is a reward model: it says how good a text is, and writes none",
        fix="give the model that it started from, or one that was trained with its rewards",
    )


def _directory(path: Path, device: torch.device, run: RunDir | None) -> Opened:
    fix = "give a complete directory: config.json, safetensors and the tokenizer's files"
    try:
        if parents.is_judge(files.read_json(path / "config.json")):  # as a writer, its head would be random
            raise _judge(path)
        tokenizer = AutoTokenizer.from_pretrained(path)
        model = weights.load(AutoModelForCausalLM, path, fix, dtype="auto", attn_implementation="sdpa")
    except (OSError, ValueError) as error:
        raise UserError(
            f"transformers cannot load {path}",
            evidence=str(error).strip().splitlines()[0],
            fix=fix,
        ) from None
    name = f"{run.path.name}/{path.name}" if run else path.resolve().name
    step = max((step for step, _ in run.complete_checkpoints()), default=None) if run else None
    return _opened(model, tokenizer, device, name, [_fingerprint(path), str(model.dtype)], run, step)


def _opened(
    model: Any, tokenizer: Any, device: torch.device, name: str, parts: list[Any], run: RunDir | None, step: int | None
) -> Opened:
    slow_halves = device.type == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    model = model.to(device, torch.float32 if slow_halves else model.dtype).eval()
    context = int(getattr(model.config, "max_position_embeddings", None) or tokenizer.model_max_length)
    return Opened(model, tokenizer, name, files.sha256_json(parts), context, _eos(model, tokenizer), run, step)


def _eos(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """What ends an answer: the ids of generation_config.json, and the tokenizer's own end."""
    listed = model.generation_config.eos_token_id
    ids = listed if isinstance(listed, list) else [listed]
    return tuple(dict.fromkeys(number for number in (*ids, tokenizer.eos_token_id) if number is not None))


def _fingerprint(path: Path) -> str:
    """Hex sha256 over names, sizes, small files whole and samples of the large ones: 140 GB in a second."""
    digest = hashlib.sha256()
    for file in sorted(path.iterdir()):
        if not file.is_file() or file.suffix not in (".json", ".safetensors", ".bin", ".model", ".jinja"):
            continue
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as opened:
            for number in range(_SAMPLES if size > _SAMPLES * _SAMPLE_BYTES else 1):
                opened.seek(number * (size // _SAMPLES) if size > _SAMPLES * _SAMPLE_BYTES else 0)
                digest.update(os.read(opened.fileno(), _SAMPLE_BYTES if size > _SAMPLES * _SAMPLE_BYTES else size))
    return digest.hexdigest()
