"""What other launchers are given: run for real where the launcher is installed, else checked for what it reads."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from finlm.base import processes
from finlm.base.errors import UserError
from finlm.base.rundir import RunDir
from finlm.launch import adapters
from finlm.plan.plan import Plan
from finlm.recipe import recipe as recipes
from finlm.recipe.cluster import Cluster, Host
from finlm.record import manifest

RunMaker = Callable[..., RunDir]
TRAP = "a b;$(touch bitten) \"'"


def made(run: RunDir, name: str, *hosts: Host) -> list[str]:
    recipe = recipes.load(run.recipe).recipe
    return adapters.write_files(name, run, recipe, Plan.read(run.plan), Cluster(hosts))


def settings() -> Sequence[str]:
    port = processes.free_port(0)
    return ("train.steps=6", f"launch.master_port={port}", f"env={{OMP_NUM_THREADS: '1', TRAP: {json.dumps(TRAP)}}}")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["torchrun", "accelerate"])
def test_the_printed_command_trains(make_run: RunMaker, name: str, tmp_path: Path) -> None:
    run = make_run(*settings())
    (command,) = made(run, name, Host("localhost", 2))
    env = os.environ | {"PYTHONPATH": ""}
    done = subprocess.run(["bash", "-c", command], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert [row["status"] for row in run.read_events("end")] == ["finished"]
    assert {path.name for path in run.logs.iterdir()} == {"localhost.0.log", "localhost.1.log"}
    assert not (tmp_path / "bitten").exists()


def test_every_host_gets_a_script_of_its_own(make_run: RunMaker) -> None:
    run = make_run(*settings())
    commands = made(run, "torchrun", Host("a", 1), Host("b", 3, devices=(1, 2, 4)))
    scripts = [Path(shlex.split(command, comments=True)[1]).read_text() for command in commands]
    assert "--node_rank=0" in scripts[0] and "--node_rank=1" in scripts[1]
    assert all("--nnodes=2" in script and "--master_addr=a " in script for script in scripts)
    assert "--nproc_per_node=3" in scripts[1] and "CUDA_VISIBLE_DEVICES=1,2,4" in scripts[1]
    with pytest.raises(UserError, match="same number of ranks"):
        made(run, "slurm", Host("a", 1), Host("b", 3))


@pytest.mark.parametrize("launcher", ["torchrun", "slurm", "ray"])
def test_a_path_of_the_recipe_comes_behind_the_code_of_the_run(make_run: RunMaker, launcher: str) -> None:
    run = make_run("env={PYTHONPATH: /site}")
    (command,) = made(run, launcher, Host("a" if launcher == "torchrun" else "", 1))
    script = next(Path(word) for word in shlex.split(command, comments=True) if Path(word).is_file())
    assert f"PYTHONPATH={shlex.quote(f'{run.code}:/site')}" in script.read_text()


def test_slurm_starts_one_task_a_rank(make_run: RunMaker, tmp_path: Path) -> None:
    """srun and scontrol are played by shell functions; the script around them is real."""
    run = RunDir(make_run(*settings()).path.rename(tmp_path / 'my "90%" runs'))
    (command,) = made(run, "slurm", Host("a", 2), Host("b", 2))
    script = Path(shlex.split(command)[1])
    directives = [line for line in script.read_text().splitlines() if line.startswith("#SBATCH")]
    assert "#SBATCH --nodes=2" in directives and "#SBATCH --ntasks-per-node=2" in directives
    assert script.read_text().splitlines()[1 : 1 + len(directives)] == directives  # later ones are not read
    outputs = [shlex.split(line)[1] for line in directives if "--output" in line]
    assert outputs == [f'--output={tmp_path}/my "90%%" runs/logs/slurm-%j.log']
    (tmp_path / "srun").write_text(
        '#!/bin/bash\nshift\nexport SLURM_PROCID=3 SLURM_LOCALID=1\nexec "${@:1:4}" '
        'sh -c \'echo $RANK $LOCAL_RANK $WORLD_SIZE $MASTER_ADDR; printenv TRAP; echo "$@"\' sh "${@:5}"\n'
    )
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho first; echo second\n")
    for program in ("srun", "scontrol"):
        (tmp_path / program).chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "2"}
    env |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "x"}
    done = subprocess.run(["bash", str(script)], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=20)
    seen = done.stdout.splitlines()
    assert seen[:2] == ["3 1 4 first", TRAP], done.stderr
    assert seen[2].endswith(f"-m finlm.train {run.path}") and not (tmp_path / "bitten").exists()


def test_kubernetes_gets_a_master_and_the_other_hosts_as_workers(make_run: RunMaker) -> None:
    """Field names as in kubeflow.org/v1; the whole document went through kubeflow-training 1.9.3's models unchanged."""
    run = make_run(*settings())
    build, command = made(run, "k8s", *(Host(name, 2) for name in "abc"))
    document = YAML(typ="safe").load(Path(command.removeprefix("kubectl apply -f ")))
    assert (document["apiVersion"], document["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    replicas = document["spec"]["pytorchReplicaSpecs"]
    assert {name: part["replicas"] for name, part in replicas.items()} == {"Master": 1, "Worker": 2}
    assert document["spec"]["nprocPerNode"] == "2"
    (container,) = replicas["Worker"]["template"]["spec"]["containers"]
    assert container["image"] == f"finlm:{manifest.version()}-cpu" and f"docker build -t {container['image']} " in build
    assert container["name"] == "pytorch" and container["command"][-1] == str(run.path)
    assert {"name": "TRAP", "value": TRAP.replace("$(", "$$(")} in container["env"]
