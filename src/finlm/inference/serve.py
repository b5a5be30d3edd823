"""Serve a model: `finlm serve MODEL` is an OpenAI-compatible endpoint by the server of transformers or vLLM.

Nothing is served here: the process becomes `vllm serve` where vLLM is installed and there is a GPU, else `transformers
serve`, with the exported model and the chat template that it was trained with. A checkpoint has to be exported first.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path

from finlm.base import files, machine, screen
from finlm.base.errors import UserError
from finlm.base.rundir import RunDir
from finlm.recipe import parents

NEEDED = ("fastapi", "uvicorn", "openai")  # what `transformers serve` imports


def run(path: Path, host: str, port: int, engine: str) -> int:
    """Print the address and replace this process by a server of the model, until Ctrl-C. It does not return.

    Raises UserError when there is no model that writes, the server's packages are missing, or the port is in use.
    """
    directory = model_directory(path)
    line = command(directory, host, port, engine)
    machine.listen(host, port).close()  # the server looks at its port only after it has loaded the model
    if not (directory / "chat_template.jinja").is_file():
        screen.say("the model has no chat template: it continues text (/v1/completions) and answers no messages")
    screen.say(f"serving {directory} at http://{host}:{port}/v1 (Ctrl-C ends it); ask for the model")
    screen.say_command(str(directory))
    os.execvp(line[0], line)


def model_directory(path: Path) -> Path:
    """Return a run's export, or `path` itself if it is a model. Raises UserError when there is no model that writes."""
    is_run = (path / "plan.json").is_file()
    directory = RunDir(path).export if is_run else path
    if not (directory / "config.json").is_file():
        exported = f"finlm export {path} DIRECTORY, then finlm serve DIRECTORY"
        raise UserError(
            f"{path} is no model that can be served",
            evidence=f"{'the run has no export yet' if is_run else 'no config.json in it'}",
            fix=exported if is_run or path.parent.name == "checkpoints" else "give a run or a Hugging Face directory",
        )
    if parents.is_reward_model(files.read_json(directory / "config.json")):
        raise UserError(f"{path} is a reward model, which writes nothing", fix="serve the model that it judges")
    return Path(directory).resolve()


def command(directory: Path, host: str, port: int, engine: str) -> list[str]:
    """Return the server's command line.

    engine: vllm, transformers, or auto: vLLM where it is installed and there is a GPU. Raises UserError
    when the server's packages are missing.
    """
    address = ["--host", host, "--port", str(port)]
    vllm = shutil.which("vllm")
    if engine == "vllm" and vllm is None:
        raise UserError("vLLM is not installed", fix="pip install vllm, or --engine transformers")
    if vllm is not None and (engine == "vllm" or (engine == "auto" and _has_gpu())):
        return [vllm, "serve", str(directory), *address]
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        python = screen.relative(Path(sys.executable))
        raise UserError(
            f"transformers' server needs {', '.join(missing)}",
            fix=f"{python} -m pip install -r requirements-serve.lock (or 'finlm[serve]')",
        )
    return [sys.executable, "-m", "transformers.cli.transformers", "serve", str(directory), *address]


def _has_gpu() -> bool:
    return Path("/proc/driver/nvidia/version").exists()
