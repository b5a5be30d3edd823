"""Start a run's ranks as Ray workers: `python -m finlm.launch.ray_job RUN HOSTS SLOTS [--gpu] [--env A,B]`.

Every rank reserves a GPU (or a CPU) of its own in one placement group, SLOTS a host, so that no other Ray job is put
beside it. Ray would show each worker one GPU as number 0; ranks of a host need to see all of the host's, with
LOCAL_RANK as the index, so the reserved ones are made visible together. Ends all ranks when one fails.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

from finlm.base import processes


def main() -> int:
    """Run all ranks to their end; return 0, or the exit code of the first rank that failed, after ending the others."""
    import ray

    parser = argparse.ArgumentParser(description=__doc__)
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
    """A Ray actor that holds one rank's device and runs the rank."""

    def place(self) -> tuple[str, str, str]:
        """Return the Ray node's id, its IP address, and the number of the GPU that Ray reserved ("-" on CPU)."""
        import ray

        context = ray.get_runtime_context()
        devices = context.get_accelerator_ids().get("GPU") or ["-"]
        return context.get_node_id(), ray.util.get_node_ip_address(), devices[0]

    def free_port(self) -> int | str:
        """Return a free port of this node for the rendezvous, else the reason as text."""
        return processes.free_port(0)

    def train(self, run: str, env: dict[str, str]) -> int:
        """Run a rank in a child process with `env` added, which ends with this process; return its exit code."""
        command = [sys.executable, "-u", "-m", "finlm.train", run]
        return subprocess.run(
            command, env=os.environ | env, preexec_fn=processes.die_with_parent, check=False
        ).returncode


if __name__ == "__main__":
    sys.exit(main())
