"""DeepSpeed settings: concrete, accepted by DeepSpeed itself, and refused where DeepSpeed would ignore them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from finlm import config
from finlm.base.errors import UserError
from finlm.plan import planner
from finlm.plan.plan import Plan
from finlm.recipe import cluster, recipe, shape
from finlm.recipe.schema import Recipe

ROOT = Path(__file__).resolve().parent.parent
QUICKSTART = ROOT / "recipes/quickstart/pretrain.yaml"
RECORD = ROOT / "recipes/llama2-7b-fincorpus/pretrain.yaml"
TWO_HOSTS = (
    "hardware.hosts=[{name: a, slots: 2, gpu: H200, memory: 1TiB}, {name: b, slots: 2, gpu: H200, memory: 1TiB}]"
)
ONE_HOST = "hardware.hosts=[{name: a, slots: 4, gpu: H200, memory: 1TiB}]"


def planned(path: Path, *overrides: str) -> tuple[Recipe, Plan]:
    wanted = recipe.load(path, overrides).recipe
    return wanted, planner.make(wanted, cluster.from_hardware(wanted.hardware), shape.of(wanted))


def settings(path: Path, *overrides: str) -> dict[str, Any]:
    return config.deepspeed_settings(*planned(path, *overrides))


def refusals(path: Path, *overrides: str) -> dict[str, str]:
    return dict(config.problems(*planned(path, *overrides)))


def leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for inner in value.values() for leaf in leaves(inner)]
    return [leaf for inner in value for leaf in leaves(inner)] if isinstance(value, list) else [value]


def test_every_value_is_concrete_and_the_batch_adds_up() -> None:
    for stage in (0, 1, 2, 3):
        made = settings(QUICKSTART, f"zero.stage={stage}")
        assert "auto" not in leaves(made)
        rows = made["train_micro_batch_size_per_gpu"] * made["gradient_accumulation_steps"] * 2
        assert made["train_batch_size"] == rows


def test_compiled_layers_multiply_without_deepspeeds_own_linear() -> None:
    compiled, eager = (settings(QUICKSTART, "zero.stage=3", f"train.compile={yes}") for yes in ("true", "false"))
    assert compiled["zero_optimization"]["memory_efficient_linear"] is False
    assert "memory_efficient_linear" not in eager["zero_optimization"]


def test_torch_adam_is_fused_without_offload_and_absent_with_it() -> None:
    assert settings(QUICKSTART)["optimizer"]["params"]["fused"] is True
    assert settings(QUICKSTART)["optimizer"]["params"]["torch_adam"] is True
    offloaded = settings(RECORD)["optimizer"]["params"]
    assert not {"torch_adam", "fused"} & set(offloaded)


def test_adam_is_adam_and_not_deepspeeds_adamw() -> None:
    made = settings(QUICKSTART, "optim.optimizer=adam")["optimizer"]
    assert (made["type"], made["params"]["adam_w_mode"]) == ("Adam", False)


def test_the_precision_section_follows_the_plan() -> None:
    assert not {"fp16", "bf16"} & set(settings(QUICKSTART))
    assert settings(QUICKSTART, "train.precision=bf16")["bf16"] == {"enabled": True}
    fp16 = settings(RECORD, "train.fp16.loss_scale_window=500")["fp16"]
    assert fp16["loss_scale_window"] == 500
    assert fp16["min_loss_scale"] == 1


def test_gradients_are_added_up_in_fp32_where_deepspeed_keeps_its_optimizer() -> None:
    given = ("train.precision=bf16", "train.grad_accum_dtype=fp32")
    for auto in ((), ("zero.offload_optimizer=none",), ("zero.offload_optimizer=cpu",)):
        wanted, plan = planned(QUICKSTART, *given, "zero.stage=auto", *auto)
        assert plan.fp32_gradients and plan.zero_stage == (3 if "zero.offload_optimizer=cpu" in auto else 2)
        assert config.deepspeed_settings(wanted, plan)["data_types"] == {"grad_accum_dtype": "fp32"}
    assert "data_types" not in settings(QUICKSTART, given[1], "train.precision=fp32")
    for refused in (("zero.stage=1",), ("zero.stage=2", "zero.offload_optimizer=cpu"), ("zero.stage=0",)):
        with pytest.raises(UserError, match="1 mistake") as caught:
            planned(QUICKSTART, *given, *refused)
        assert "train.grad_accum_dtype: fp32 needs ZeRO stage 2" in caught.value.evidence


def test_zero_plus_plus_and_nvme_keys_appear_only_when_asked() -> None:
    plain = settings(RECORD, TWO_HOSTS)["zero_optimization"]
    assert not any(key.startswith("zero_") for key in plain)
    plus = ["zero.hpz_partition_size=2", "zero.quantized_weights=true", "zero.quantized_gradients=true"]
    made = settings(RECORD, TWO_HOSTS, *plus)["zero_optimization"]
    assert (made["zero_hpz_partition_size"], made["zero_quantized_weights"]) == (2, True)
    nvme = ["zero.offload_optimizer=nvme", "zero.offload_param=nvme", "zero.nvme_path=nvme"]
    made = settings(RECORD, TWO_HOSTS, *nvme)
    param = made["zero_optimization"]["offload_param"]
    assert param["nvme_path"] == "nvme"
    assert param["buffer_size"] * 4 >= 32000 * 4096  # a rank's part of the largest matrix
    assert made["aio"]["queue_depth"] == 8


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ([TWO_HOSTS, "zero.hpz_partition_size=3"], "zero.hpz_partition_size"),
        ([ONE_HOST, "zero.quantized_gradients=true"], "zero.quantized_gradients"),
        (
            [TWO_HOSTS.replace("name: b, slots: 2", "name: b, slots: 1"), "zero.quantized_gradients=true"],
            "zero.quantized_gradients",
        ),
        (["train.fp16.min_loss_scale=0.5"], "train.fp16.min_loss_scale"),
    ],
)
def test_what_deepspeed_refuses_or_ignores_is_refused(overrides: list[str], key: str) -> None:
    assert list(refusals(RECORD, *overrides)) == [key]
    with pytest.raises(UserError, match="refuse or ignore 1"):
        settings(RECORD, *overrides)


def test_quantized_weights_are_refused_on_cpu() -> None:
    overrides = ["zero.stage=3", "zero.quantized_weights=true"]
    assert "not been implemented on CPU" in refusals(QUICKSTART, *overrides)["zero.quantized_weights"]


def test_a_plan_that_contradicts_its_hardware_is_refused_with_every_reason() -> None:
    import dataclasses

    wanted, plan = planned(QUICKSTART)
    wrong = dataclasses.replace(plan, precision="fp16", offload_param="cpu", steps=10)
    assert set(dict(config.problems(wanted, wrong))) == {"zero.offload_param", "optim.warmup_steps", "train.precision"}
    offloaded = dataclasses.replace(plan, zero_stage=0, offload_optimizer="cpu")
    assert set(dict(config.problems(wanted, offloaded))) == {"zero.offload_optimizer"}


@pytest.mark.parametrize("path", sorted((ROOT / "configs/ds").glob("*.json")), ids=lambda path: path.stem)
def test_deepspeed_reads_every_committed_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.runtime import config as theirs
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    made = json.loads(path.read_text(encoding="utf-8"))
    micro = made["train_micro_batch_size_per_gpu"] * made["gradient_accumulation_steps"]
    monkeypatch.setattr(theirs.dist, "get_rank", lambda group=None: 0)
    monkeypatch.setattr(theirs.dist, "get_world_size", lambda group=None: made["train_batch_size"] // micro)
    read = theirs.DeepSpeedConfig(str(path))
    zero = made["zero_optimization"]
    assert read.train_batch_size == made["train_batch_size"]
    assert read.zero_config.stage == zero["stage"]
    assert read.zero_config.overlap_comm == zero["overlap_comm"]
    # DeepSpeed drops unknown top-level keys in silence; its zero section has a schema.
    known = set(DeepSpeedZeroConfig.model_fields)
    known |= {str(field.alias) for field in DeepSpeedZeroConfig.model_fields.values()}
    assert set(zero) <= known


def tree(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "recipes/quickstart", tmp_path / "recipes/quickstart")
    return tmp_path


def test_check_names_missing_stale_and_orphaned_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = str(tree(tmp_path))
    assert config.main(["--check", "--root", root]) == 1
    assert "configs/ds/quickstart-pretrain.json is missing" in capsys.readouterr().out
    assert config.main(["--root", root]) == 0
    assert config.main(["--check", "--root", root]) == 0
    written = tmp_path / "configs/ds/quickstart-pretrain.json"
    written.write_text(written.read_text().replace("0.002", "0.003"))
    (tmp_path / "configs/ds/gone-pretrain.json").write_text("{}")
    capsys.readouterr()
    assert config.main(["--check", "--root", root]) == 1
    out = capsys.readouterr().out
    assert "configs/ds/quickstart-pretrain.json is stale" in out
    assert "configs/ds/gone-pretrain.json has no recipe" in out


def test_writing_never_removes_a_file(tmp_path: Path) -> None:
    root = tree(tmp_path)
    orphan = root / "configs/ds/gone-pretrain.json"
    orphan.parent.mkdir(parents=True)
    orphan.write_text("{}")
    assert config.main(["--root", str(root)]) == 1
    assert orphan.exists()


def test_a_bad_recipe_is_a_user_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tree(tmp_path) / "recipes/quickstart/pretrain.yaml").write_text("name: [")
    assert config.main(["--check", "--root", str(tmp_path)]) == 2
    assert "not valid YAML" in capsys.readouterr().err


def test_help_and_import_need_no_torch() -> None:
    code = "import sys, finlm.config; sys.exit(bool({'torch', 'deepspeed', 'transformers'} & set(sys.modules)))"
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    assert subprocess.run([sys.executable, "-c", code], env=env, check=False).returncode == 0
    shown = subprocess.run([sys.executable, "-m", "finlm.config", "--help"], env=env, capture_output=True, check=True)
    assert b"--check" in shown.stdout


SHORT = ["train.steps=6", "optim.warmup_steps=2"]
CASES: dict[str, list[str]] = {
    "stage 0": ["zero.stage=0"],
    "stage 1": ["zero.stage=1"],
    "stage 2": ["zero.stage=2"],
    "stage 3": ["zero.stage=3"],
    "stage 1 bf16": ["zero.stage=1", "train.precision=bf16"],
    "stage 3 bf16": ["zero.stage=3", "train.precision=bf16"],
    "stage 1 adam": ["zero.stage=1", "optim.optimizer=adam"],
    "stage 1 linear": ["zero.stage=1", "optim.schedule=linear"],
    "stage 1 constant": ["zero.stage=1", "optim.schedule=constant", "optim.min_lr=0"],
    "stage 2 offload": ["zero.stage=2", "zero.offload_optimizer=cpu"],
    "stage 3 offload": ["zero.stage=3", "zero.offload_optimizer=cpu", "zero.offload_param=cpu"],
}


@pytest.mark.slow
def test_deepspeed_trains_with_the_settings_of_every_stage(tmp_path: Path) -> None:
    cases = {name: settings(QUICKSTART, *SHORT, *overrides) for name, overrides in CASES.items()}
    # This CPU has no fp16 units, so the planner refuses it; the child process lets DeepSpeed emulate them.
    fp16 = settings(RECORD)["fp16"]
    cases |= {f"stage {stage} fp16": cases[f"stage {stage}"] | {"fp16": fp16} for stage in (1, 3)}
    file = tmp_path / "cases.json"
    file.write_text(json.dumps(cases))
    # DeepSpeed compiles its CPU Adam with the ninja of this environment; another compiler than that of the other tests'
    # ranks (ranks.py) would have it built anew each time.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = os.environ | {"PATH": path, "CXX": str(ROOT / "tests/g++")}
    command = [sys.executable, str(ROOT / "tests/deepspeed_runs.py"), str(file)]
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=540, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    ran = json.loads(result.stdout.splitlines()[-1])
    for name, case in ran.items():
        assert "error" not in case, (name, case)
        wanted = recipe.load(QUICKSTART, [*SHORT, *CASES.get(name, [])]).recipe.optim
        assert case["lrs"] == pytest.approx([config.lr_at(wanted, 6, step) for step in range(6)]), name
        assert case["losses"][0] == pytest.approx(ran["stage 1"]["losses"][0], rel=1e-2), name
        if "fp16" not in name:
            assert case["optimizer"] == (
                "DeepSpeedCPUAdam" if "offload" in name else "Adam" if "adam" in name else "AdamW"
            )
    assert ran["stage 0"]["losses"] == ran["stage 1"]["losses"]
    assert ran["stage 1 adam"]["losses"] != ran["stage 1"]["losses"]
