"""Start one rank of a run: every rank's process is `python -m finlm.train RUN_DIR`."""

from __future__ import annotations

import faulthandler
import functools
import gc
import importlib
import os
import resource
import signal
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from finlm.base.imports import hasten_transformers
from finlm.base.processes import die_with_parent
from finlm.base.rundir import RunDir, host_name
from finlm.base.runs import apply_host_env, hold_lock
from finlm.plan.plan import Plan

if TYPE_CHECKING:
    from finlm.plan.out_of_memory import Taken

STAGES = {"pretrain": "pretrain", "sft": "post.sft", "grpo": "post.grpo"} | dict.fromkeys(
    ("dpo", "reward"), "post.preferences"
)
DEVICES = Path("/sys/bus/pci/devices")
# Of CUDA where torch's allocator is not asked, of its libraries, of torch's allocator on CPU.
OUT_OF_MEMORY = ("out of memory", "STATUS_ALLOC_FAILED", "can't allocate memory")


def main() -> None:
    """Run the recipe's stage on this rank, then end the process; does not return.

    The exit code is the stage's, or 1 after any exception. The run directory is sys.argv[1]. Applies env/<host>.env,
    locks the run's file for this host, and sends stdout and stderr to logs/<host>.<rank>.log. The log also gets the
    traceback of an exception, a report if memory ran out, and all stacks on SIGUSR1. The process also ends when its
    parent does. Stage pretrain writes a missing index of rows. An exception before the log is open passes through.
    """
    die_with_parent()
    run_path = Path(sys.argv[1])
    apply_host_env(run_path)  # before torch is imported, which reads some of it then
    hold_lock(RunDir(run_path))
    _log_to(run_path / "logs" / f"{host_name()}.{os.environ.get('RANK', '0')}.log")
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # the watchdog asks silent ranks where they are
    code = 1
    try:
        os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # trl reports its trainers' names
        gc.disable()  # what imports make stays: looking for garbage among it is a fifth of their seven seconds
        from finlm.recipe.schema import Recipe
        from finlm.rows.dialogues import prepare_rows
        from finlm.rows.shards import Shards

        hasten_transformers()
        _limit_waiting()
        recipe = Recipe.read(run_path / "recipe.yaml")
        if recipe.stage == "pretrain":
            # `finlm train` did so on its own host; data.prepared of another host may never have been read in such rows.
            prepare_rows(Shards(RunDir(run_path).shards), recipe.batch.sequence_length, recipe.data.packing)
        stage = importlib.import_module(f"finlm.train.{STAGES[recipe.stage]}")
        bind_cores(Plan.read(RunDir(run_path).plan))
        gc.freeze()
        gc.enable()
        if recipe.stage == "pretrain":
            code = stage.main(run_path, recipe)
        else:
            from finlm.train.post import trainers

            code = trainers.train(run_path, recipe, stage.make)
    except BaseException as error:  # also SystemExit from a library: the log must say why a rank ended
        traceback.print_exc()
        if "torch" in sys.modules and (cause := _out_of_memory(error)) is not None:
            print(_report(run_path, cause))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # with gloo, 10-20 % of ranks abort in the interpreter's shutdown after all work is done


def _limit_waiting() -> None:
    """Replace distributed.new_group, for the process: groups that name no timeout get DeepSpeed's."""
    # Also ZeRO's: without it, a cut network cable became an error only after 930 s.
    from deepspeed.constants import default_pg_timeout
    from torch import distributed

    distributed.new_group = functools.partial(distributed.new_group, timeout=default_pg_timeout)


def _log_to(path: Path) -> None:
    """Make file descriptors 1 and 2 (stdout, stderr, C++ messages too) append to `path`; create its directories."""
    path.parent.mkdir(parents=True, exist_ok=True)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def _out_of_memory(error: BaseException | None) -> BaseException | None:
    """Return the first out-of-memory error in a chain of causes and contexts, or None if there is none.

    It is torch's OutOfMemoryError, or a RuntimeError whose text has a phrase of OUT_OF_MEMORY.
    """
    import torch

    while error is not None:
        says_so = isinstance(error, RuntimeError) and any(word in str(error) for word in OUT_OF_MEMORY)
        if says_so or isinstance(error, torch.OutOfMemoryError):
            return error
        error = error.__cause__ or error.__context__
    return None


def _report(run_path: Path, error: BaseException) -> str:
    """Return the report of an out-of-memory error: the line that `finlm train` parses, then an explanation.

    Raises UserError when the run's recipe or plan, or this machine's calibrated GPU kinds, are damaged.
    """
    from finlm.plan import gpus, out_of_memory
    from finlm.plan.plan import Plan
    from finlm.recipe.schema import Recipe

    run = RunDir(run_path)
    recipe, plan = Recipe.read(run.recipe), Plan.read(run.plan)
    taken = _memory_now(plan)
    gpus.declare_calibrated()  # the kind may be known by measurement only
    return f"{taken.line()}\n{out_of_memory.explain_failure(recipe, plan, {host_name(): taken}, error)}"


def _memory_now(plan: Plan) -> Taken:
    """Return this rank's bytes of device memory (peak, torch's cache, in use, total) and the host's RAM, as Taken.

    On CPU the first three are the peak of the resident set, the total the rank's share of the RAM or that peak.
    """
    import torch

    from finlm.plan import search
    from finlm.plan.out_of_memory import Taken
    from finlm.recipe import cluster

    ram = cluster.total_bytes()
    if plan.device == "cpu":
        held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        slots = next((host.slots for host in plan.hosts if host.name == host_name()), 1)
        return Taken(held, held, held, max(held, int(search.HOST_SHARE * ram) // slots), ram)
    try:
        free, total = torch.cuda.mem_get_info()
        allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved()
    except RuntimeError:  # CUDA answers nothing any more
        return Taken(*(plan.gpu_memory_bytes,) * 4, ram)
    return Taken(allocated, reserved, total - free, total, ram)


def bind_cores(plan: Plan) -> None:
    """Select this rank's GPU and pin the process to the cores of that GPU's NUMA node, if the plan offloads states.

    Does nothing without a GPU or offload. Pins nothing when the NUMA node is not known, or when fewer cores than
    torch's threads would be left.
    """
    if plan.device != "cuda" or plan.offload_optimizer == plan.offload_param == "none":
        return
    import torch

    number = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(number)
    near = near_cores(bus_address(torch.cuda.get_device_properties(number).uuid))
    usable = near & os.sched_getaffinity(0)  # taskset and a container's limits hold
    if len(usable) >= torch.get_num_threads():
        os.sched_setaffinity(0, usable)  # 1.16 times the speed in DeepSpeed's ZenFlow report


def bus_address(uuid: object) -> str | None:
    """Return the PCI address (0000:1b:00.0) of the GPU "GPU-" + uuid from nvidia-smi; None when it is not listed."""
    from finlm.recipe import cluster

    address = {row["uuid"]: row["pci.bus_id"] for row in cluster.ask_gpus("uuid", "pci.bus_id")}.get(f"GPU-{uuid}")
    return None if address is None else address.lower()[-len("0000:1b:00.0") :]


def near_cores(address: str | None) -> set[int]:
    """Return the core indices of the NUMA node of the PCI device at `address`, from sysfs; empty if not known."""
    try:
        if address is None or int((DEVICES / address / "numa_node").read_text()) < 0:
            return set()
        ranges = (DEVICES / address / "local_cpulist").read_text().strip().split(",")
    except (OSError, ValueError):
        return set()
    cores: set[int] = set()
    for first, _, last in (part.partition("-") for part in ranges if part):
        cores.update(range(int(first), int(last or first) + 1))
    return cores


if __name__ == "__main__":
    main()
