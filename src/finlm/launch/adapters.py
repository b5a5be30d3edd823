"""Compute the environment of a host's ranks, and write the files that start a run under another launcher.

For clusters where Slurm, Kubernetes or Ray starts the ranks, and for those who prefer torchrun or accelerate: files in
<run>/launch/ and the commands to type. The run directory and the prepared data must lie at the same path on all hosts,
on a shared disk or copied (`finlm sync` proves copies). Doctor, the watchdog and the gathering of a checkpoint are part
of `finlm train` only. Ray has no launcher for ranks: its script starts main() here.

A rank's environment is what finlm sets for its host, overridden by the recipe's `env:`.
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from finlm.base import files, processes
from finlm.base.errors import UserError
from finlm.base.rundir import HOST_VARIABLE, RunDir
from finlm.plan.plan import ON_HOST, Plan
from finlm.recipe.cluster import Cluster, Host
from finlm.recipe.schema import Recipe
from finlm.record import manifest

# Read when CUDA and NCCL start. A ring adds in the order of the ranks; trees and the switches of NVLink may not.
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring", "NCCL_NVLS_ENABLE": "0"}

# ZeRO-3 moves weights and gradients while matrix products run. NCCL takes SMs from these, and a product laid out for
# all SMs then takes a second turn: with few, two H200s train 27,806 tokens/s instead of 27,144 (LOGBOOK.md). Few are
# slower too, so only where a layer's arithmetic is long.
FEW_SMS = {"NCCL_MAX_CTAS": "4"}
FEW_SMS_FROM_TOKENS = 16_384  # of a micro-batch


def host_env(
    recipe: Recipe, plan: Plan, host: Host, cores: int | None = None, network: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the environment variables of a host's ranks: timeout, threads, CUDA and NCCL, then `network`.

    The recipe's `env:` and then the host's `env:` override them. `cores` is the number of CPU cores of the host (None:
    1), divided among its CPU ranks. `network` has variables that choose the network card (doctor/preflight.py).
    """
    longest = max(recipe.launch.start_minutes, recipe.launch.stall_minutes)
    env = {
        "DS_SKIP_CUDA_CHECK": "1",  # nvcc may be newer than torch's CUDA within a major version
        "TOKENIZERS_PARALLELISM": "false",
        "DEEPSPEED_TIMEOUT": str(math.ceil(longest) + 1),  # minutes; the watchdog comes first and says more
    }
    if plan.device == "cpu":
        env["OMP_NUM_THREADS"] = str(max(1, (cores or 1) // host.slots))
    else:
        # GPU ranks only feed the GPU; with the optimizer on the host, DeepSpeed's Adam runs on these threads.
        env["OMP_NUM_THREADS"] = "16" if plan.offload_optimizer in ON_HOST else "4"
        env["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
        tokens = plan.micro_batch * plan.sequence_length
        if plan.zero_stage == 3 and len(plan.hosts) == 1 and tokens >= FEW_SMS_FROM_TOKENS:
            env |= FEW_SMS
        if recipe.train.deterministic:
            env |= DETERMINISTIC
    return env | dict(network or {}) | recipe.env | host.access.env


PORT = 29500  # torch's own default; launch.master_port where the recipe gives one


@dataclass(frozen=True)
class Job:
    """A run that is ready to start: its directory, recipe, plan and hosts."""

    run: RunDir
    recipe: Recipe
    plan: Plan
    hosts: Cluster

    @property
    def master(self) -> str:
        """The first host's hosts.<name>.address, or its name when the recipe gives no address."""
        return self.hosts.hosts[0].access.address or self.hosts.hosts[0].name

    @property
    def port(self) -> int:
        """The port of the rendezvous: launch.master_port, or 29500 when it is `auto`."""
        return PORT if self.recipe.launch.master_port == "auto" else self.recipe.launch.master_port

    def env(self, host: Host) -> dict[str, str]:
        """Return the environment of a host's ranks: host_env(), with the run's code first in PYTHONPATH.

        For a host with a name, adds FINLM_HOST (the name that its log files carry). On CPU every rank gets one thread.
        """
        env = host_env(self.recipe, self.plan, host)  # nobody has asked the host for its cores
        env["PYTHONPATH"] = processes.python_path(self.run.code, env)
        return env | ({HOST_VARIABLE: host.name} if host.name else {})

    def slots(self, launcher: str) -> int:
        """Return the ranks per host. Raises UserError, naming `launcher`, when hosts have different numbers."""
        counts = {host.slots for host in self.hosts.hosts}
        if len(counts) > 1:
            raise UserError(
                f"{launcher} starts the same number of ranks on every host",
                evidence=", ".join(f"{host.name} {host.slots}" for host in self.hosts.hosts),
                fix="use --print torchrun, or --include hosts with equal slots",
            )
        return counts.pop()

    def slots_anywhere(self, launcher: str) -> int:
        """Return the number of ranks per host, for a launcher that numbers the hosts itself.

        Raises UserError when hosts have different numbers of ranks, or ranks have different micro-batches.
        """
        if len(set(self.plan.rank_micro_batches)) > 1:
            raise UserError(
                f"{launcher} chooses which host has which ranks, but their micro-batches differ",
                evidence=", ".join(f"{host.name} {host.micro_batch} rows" for host in self.plan.hosts),
                fix="use --print torchrun, or one number for batch.micro_batch",
            )
        return self.slots(launcher)


LaunchFiles = tuple[dict[str, str], list[str]]
"""Texts by file name, and the commands to type, in which `{here}` stands for the directory of the files."""


def torchrun(job: Job) -> LaunchFiles:
    """Return a shell script per host that runs torchrun, and the command that starts each; the first has rank 0."""
    made = {}
    for node, host in enumerate(job.hosts.hosts):
        line = [
            *(sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(job.hosts.hosts)}"),
            *(f"--nproc_per_node={host.slots}", f"--node_rank={node}", f"--master_addr={job.master}"),
            *(f"--master_port={job.port}", "-m", "finlm.train", str(job.run.path)),
        ]
        made[f"torchrun-{host.name}.sh"] = _script(_exports(job.env(host), _devices(host)), f"exec {shlex.join(line)}")
    return made, [f"bash {{here}}/{name}    # on {name[9:-3]}" for name in made]


def accelerate(job: Job) -> LaunchFiles:
    """Return per host a config and a script for accelerate, and the command for each script.

    Raises UserError when hosts have different numbers of ranks.
    """
    made: dict[str, str] = {}
    slots = job.slots("accelerate")
    for node, host in enumerate(job.hosts.hosts):
        name = f"accelerate-{host.name}"
        made[f"{name}.yaml"] = _yaml(
            {
                "compute_environment": "LOCAL_MACHINE",
                "distributed_type": "DEEPSPEED",
                "deepspeed_config": {
                    "deepspeed_config_file": str(job.run.ds_config),
                    "deepspeed_multinode_launcher": "standard",
                    "zero3_init_flag": False,
                },
                "use_cpu": job.plan.device == "cpu",
                "num_machines": len(job.hosts.hosts),
                "num_processes": slots * len(job.hosts.hosts),
                "machine_rank": node,
                "main_process_ip": job.master,
                "main_process_port": job.port,
                "rdzv_backend": "static",
                "same_network": True,
                "main_training_function": "main",
            }
        )
        line = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
        last = ["-m", "finlm.train", str(job.run.path)]
        run = f'exec {shlex.join(line)} "$(dirname "$0")/{name}.yaml" {shlex.join(last)}'
        made[f"{name}.sh"] = _script(_exports(job.env(host), _devices(host)), run)
    return made, [f"bash {{here}}/{name}    # on {name[11:-3]}" for name in made if name.endswith(".sh")]


def slurm(job: Job) -> LaunchFiles:
    """Return an sbatch script with a task per rank, on nodes that Slurm chooses, and its command.

    All tasks end when one fails. Raises UserError as Job.slots_anywhere() does.
    """
    slots, nodes = job.slots_anywhere("Slurm"), len(job.hosts.hosts)
    directory = str(job.run.logs).replace("%", "%%")  # Slurm replaces %j and others, also in directories
    log = f"{directory}/slurm-%j.log".replace("\\", "\\\\").replace('"', '\\"')
    header: dict[str, object] = {
        "job-name": job.recipe.name,
        "nodes": nodes,
        "ntasks-per-node": slots,
        "output": f'"{log}"',
        "open-mode": "append",
        "exclusive": None,
        "signal": "TERM@60",
    }
    if job.plan.device == "cuda":
        header["gpus-per-node"] = slots
    lines = [f"#SBATCH --{key}" + ("" if value is None else f"={value}") for key, value in header.items()]
    port = job.port if job.recipe.launch.master_port != "auto" else "$((20000 + SLURM_JOB_ID % 10000))"
    exports = [
        *_exports(job.env(Host("", slots))),
        'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)',
        f"export MASTER_ADDR MASTER_PORT={port} WORLD_SIZE=$SLURM_NTASKS",
    ]
    rank = "export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID LOCAL_SIZE=$SLURM_NTASKS_PER_NODE; " + 'exec "$@"'
    task = shlex.join([sys.executable, "-u", "-m", "finlm.train", str(job.run.path)])
    run = f"srun --kill-on-bad-exit=1 bash -c {shlex.quote(rank)} rank {task}"
    return {"job.sbatch": _script(exports, run, lines)}, ["sbatch {here}/job.sbatch"]


def k8s(job: Job) -> LaunchFiles:
    """Return a Kubeflow PyTorchJob (kubeflow.org/v1), and the commands docker build and kubectl apply.

    The user must fill in the claim of the volume, which is mounted at the current directory. Raises UserError as
    Job.slots_anywhere() does.
    """
    slots, nodes = job.slots_anywhere("PyTorchJob"), len(job.hosts.hosts)
    env = job.env(Host("", slots))
    image = f"finlm:{manifest.version()}-{job.plan.device}"
    limits = {"resources": {"limits": {"nvidia.com/gpu": slots}}} if job.plan.device == "cuda" else {}
    container = {
        "name": "pytorch",  # the operator looks for this name
        "image": image,
        "workingDir": str(Path.cwd()),
        "command": ["python", "-m", "torch.distributed.run", "-m", "finlm.train", str(job.run.path)],
        # Kubernetes expands $(NAME) in values; $$ stands for a dollar sign.
        "env": [{"name": name, "value": value.replace("$(", "$$(")} for name, value in sorted(env.items())],
        "volumeMounts": [{"name": "work", "mountPath": str(Path.cwd())}, {"name": "shm", "mountPath": "/dev/shm"}],
        **limits,
    }
    volumes = [
        {"name": "work", "persistentVolumeClaim": {"claimName": "CLAIM-OF-THE-WORKING-DIRECTORY"}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},  # a pod's own has 64 MiB, too little for NCCL
    ]
    pod = {"template": {"spec": {"containers": [container], "volumes": volumes}}, "restartPolicy": "Never"}
    replicas = {"Master": {"replicas": 1, **pod}}
    if nodes > 1:
        replicas["Worker"] = {"replicas": nodes - 1, **pod}
    document = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": job.recipe.name.replace("_", "-").replace(".", "-")},
        "spec": {
            "nprocPerNode": str(slots),
            "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": 0},
            "pytorchReplicaSpecs": replicas,
        },
    }
    index = "" if job.plan.device == "cuda" else " --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu"
    build = f"docker build -t {image}{index} .    # once; push it where the cluster pulls from"
    return {"pytorchjob.yaml": _yaml(document)}, [build, "kubectl apply -f {here}/pytorchjob.yaml"]


def ray(job: Job) -> LaunchFiles:
    """Return a script for the head node of a Ray cluster, which starts a worker per rank, and its command.

    Raises UserError as Job.slots_anywhere() does.
    """
    slots = job.slots_anywhere("Ray")
    env = job.env(Host("", slots))
    line = [sys.executable, "-m", "finlm.launch.adapters", str(job.run.path), str(len(job.hosts.hosts)), str(slots)]
    line += ["--gpu"] if job.plan.device == "cuda" else []
    line += [f"--env={','.join(sorted(env))}"]  # names only: a command line is for everyone to read
    return {"ray.sh": _script(_exports(env), f"exec {shlex.join(line)}")}, ["bash {here}/ray.sh    # on the head node"]


ADAPTERS: dict[str, Callable[[Job], LaunchFiles]] = {
    make.__name__: make for make in (torchrun, accelerate, slurm, k8s, ray)
}


def write_files(name: str, run: RunDir, recipe: Recipe, plan: Plan, hosts: Cluster) -> list[str]:
    """Write the files of the launcher `name`, a key of ADAPTERS, to <run>/launch, and return the commands to type.

    Makes <run>/logs and replaces files of the same names. Raises UserError when the launcher cannot express these
    hosts, such as hosts with different numbers of ranks.
    """
    made, commands = ADAPTERS[name](Job(run, recipe, plan, hosts))
    directory = run.path / "launch"
    run.logs.mkdir(exist_ok=True)  # Slurm loses the output of a job whose directory is not there
    for file, text in made.items():
        files.write_text(directory / file, text)
    return [command.format(here=shlex.quote(str(directory))) for command in commands]


def _script(settings: list[str], last: str, directives: Sequence[str] = ()) -> str:
    """Return the text of a bash script: `directives`, then `set -euo pipefail`, `settings` and the command `last`."""
    return "\n".join(["#!/usr/bin/env bash", *directives, "set -euo pipefail", *settings, last, ""])


def _exports(*envs: Mapping[str, str]) -> list[str]:
    """Return a sorted `export NAME=value` line for every variable; a later mapping overrides an earlier mapping."""
    merged = {name: value for env in envs for name, value in env.items()}
    return [f"export {name}={shlex.quote(value)}" for name, value in sorted(merged.items())]


def _devices(host: Host) -> dict[str, str]:
    """Return CUDA_VISIBLE_DEVICES for a host whose devices were chosen, or {} when they were not."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, host.devices))} if host.devices else {}


def _yaml(document: Mapping[str, Any]) -> str:
    """Return the document as YAML text, without anchors; only lines over 1000 characters wrap."""
    stream = StringIO()
    yaml = YAML()
    yaml.representer.ignore_aliases = lambda *_: True  # Master and Worker share a pod
    yaml.width = 1000
    yaml.dump(document, stream)
    return stream.getvalue()


def main() -> int:
    """Start a run's ranks as Ray workers and wait for them: `python -m finlm.launch.adapters RUN HOSTS SLOTS`.

    Every rank reserves a GPU (or a CPU) of its own in one placement group, SLOTS a host, so that no other Ray job is
    put beside it; waits for as long as Ray cannot give them. Return 0; the code of the first rank that failed, after
    ending the others; 1 without a free port. Prints a failure.
    """
    import ray

    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("run")
    parser.add_argument("hosts", type=int)
    parser.add_argument("slots", type=int)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--env", default="", help="names of this process's variables that the ranks get")
    options = parser.parse_args()
    common = {name: os.environ[name] for name in filter(None, options.env.split(","))}
    ray.init(log_to_driver=True)
    kind = "GPU" if options.gpu else "CPU"
    bundles = [{kind: float(options.slots)} for _ in range(options.hosts)]
    group = ray.util.placement_group(bundles, strategy="STRICT_SPREAD" if options.hosts > 1 else "PACK")
    ray.get(group.ready())
    workers = []
    for bundle in range(options.hosts):
        where = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=bundle
        )
        needs = {"num_gpus": 1, "num_cpus": 0} if options.gpu else {"num_cpus": 1}
        actor = ray.remote(**needs, scheduling_strategy=where)(Worker)
        workers += [actor.remote() for _ in range(options.slots)]
    places = ray.get([worker.place.remote() for worker in workers])
    first = workers[0]
    (_, address, _), port = places[0], ray.get(first.free_port.remote())
    if isinstance(port, str):
        print(f"no free port for the rendezvous on {address}: {port}", file=sys.stderr)
        return 1
    pending = {}
    for rank, worker in enumerate(workers):
        node, _, device = places[rank]
        env = common | {
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(len(workers)),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % options.slots),
            "LOCAL_SIZE": str(options.slots),
        }
        if options.gpu:
            # Ray would show each worker its GPU as number 0; ranks need all of their host, with LOCAL_RANK as index.
            devices = sorted(each for its_node, _, each in places if its_node == node)
            env |= {"CUDA_VISIBLE_DEVICES": ",".join(devices), "LOCAL_RANK": str(devices.index(device))}
        pending[worker.train.remote(options.run, env)] = rank
    while pending:
        (done, *_), _ = ray.wait(list(pending))
        rank, code = pending.pop(done), ray.get(done)
        if code:
            print(f"rank {rank} ended with exit code {code}", file=sys.stderr)
            ray.shutdown()  # ends the other workers, and their ranks with them
            return int(code)
    return 0


class Worker:
    """A Ray actor that reserves a rank's device and runs the rank."""

    def place(self) -> tuple[str, str, str]:
        """Return (id of the Ray node, its IP address, index of the GPU that Ray reserved, or "-" on CPU)."""
        import ray

        context = ray.get_runtime_context()
        devices = context.get_accelerator_ids().get("GPU") or ["-"]
        return context.get_node_id(), ray.util.get_node_ip_address(), devices[0]

    def free_port(self) -> int | str:
        """Return a free port of this node for the rendezvous, or, as text, the reason why there is none."""
        return processes.free_port(0)

    def train(self, run: str, env: dict[str, str]) -> int:
        """Run a rank of the run in a child process with `env` added, wait for it, and return its exit code.

        The kernel kills the child when this process ends.
        """
        command = [sys.executable, "-u", "-m", "finlm.train", run]
        return subprocess.run(
            command, env=os.environ | env, preexec_fn=processes.die_with_parent, check=False
        ).returncode


if __name__ == "__main__":
    sys.exit(main())
