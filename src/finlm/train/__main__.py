"""The process every rank runs: `python -m finlm.train RUN_DIR`.

Applies the host's environment before torch is imported, sends this rank's output to logs/<host>.<rank>.log (stacks on
SIGUSR1 too), dies with its launcher, and leaves through os._exit: with gloo, 10-20 % of ranks otherwise abort in the
interpreter's shutdown after all work is done.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import signal
import sys
import traceback
from pathlib import Path

from finlm.base.processes import die_with_parent
from finlm.base.rundir import RunDir, apply_host_env, hold, host_name


def main() -> None:
    """Run the recipe's stage on this rank and exit with its code."""
    die_with_parent()
    run_path = Path(sys.argv[1])
    apply_host_env(run_path)
    hold(RunDir(run_path))
    _log_to(run_path / "logs" / f"{host_name()}.{os.environ.get('RANK', '0')}.log")
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # the watchdog asks silent ranks where they are
    code = 1
    try:
        os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # trl reports its trainers' names
        gc.disable()  # what imports make stays: looking for garbage among it is a fifth of their seven seconds
        from finlm.recipe import recipe
        from finlm.train import groups

        groups.limit_waiting()
        stage = recipe.load(run_path / "recipe.yaml").recipe.stage
        trainer = importlib.import_module(f"finlm.train.{stage}")
        gc.freeze()
        gc.enable()
        code = trainer.main(run_path)
    except BaseException as error:  # also SystemExit from a library: the log must say why a rank ended
        traceback.print_exc()
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(error, torch.OutOfMemoryError) and torch.cuda.is_available():
            from finlm.train import out_of_memory

            print(out_of_memory.report(run_path, error))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _log_to(path: Path) -> None:
    """Point file descriptors 1 and 2 at path, so that C++ messages land there too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


if __name__ == "__main__":
    main()
