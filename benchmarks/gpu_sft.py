"""Fine-tuning speed on this machine's GPUs: ours and stock trl SFTTrainer on the same weights and dialogues.

    python benchmarks/gpu_sft.py                            # XuanYuan-6B's shape on one GPU
    python benchmarks/gpu_sft.py --gpus 4
    python benchmarks/gpu_sft.py --shape 300m --only ours,trl-tuned
    python benchmarks/gpu_sft.py --toy                      # does it run? on CPU ranks where there is no GPU

Random weights are written once and read by all; the dialogues are random tokens, half of them learnt, of 64 tokens to a
row, packed by each contender in its own way. Tokens a second count those of dialogues, not padding; the median step
after the first two counts. "ours" is what `finlm train` launches. "trl" is SFTTrainer with its defaults, packing
and DeepSpeed ZeRO-1; "trl-tuned" with Liger's kernels, without gradient checkpointing, with the micro-batch that then
fits. Before the speeds a proof on the GPU: packed rows give every dialogue the loss it has alone. --json FILE appends
one line a contender.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from finlm import config
from finlm.base import files
from finlm.base.rundir import RunDir
from finlm.recipe import cluster, recipe, shape

sys.path.insert(0, str(Path(__file__).resolve().parent))
import gpu_pretrain as bench  # launching and ending contenders
from gpu_peers import DEVICE, DTYPE, ON_GPU

VOCABULARY, BOS, EOS = 39438, 1, 2
LEARNT = 0.5
MICRO_BATCH = {"trl": 8, "trl-tuned": 1}  # with 2 rows of 4,096 trl-tuned ran out of 140 GiB
LIMIT_SECONDS = 300
TOY = {"shape": "toy", "tokens": 512, "length": 128, "dialogues": 60, "steps": 3}


def dialogues(count: int, longest: int) -> list[np.ndarray]:
    """Random dialogues with log-normal lengths, the same on every call."""
    dice = np.random.default_rng(0)
    lengths = np.clip(dice.lognormal(6.0, 0.8, count), 64, longest).astype(int)
    found = [dice.integers(3, VOCABULARY, length).astype("<u2") for length in lengths]
    for ids in found:
        ids[0], ids[-1] = BOS, EOS
    return found


def learnt(ids: np.ndarray) -> np.ndarray:
    """Mask of the tokens that are learnt: the second half."""
    return (np.arange(len(ids)) >= len(ids) * (1 - LEARNT)).astype(np.uint8)


def write_shards(directory: Path, texts: list[np.ndarray]) -> Path:
    """The dialogues as `finlm prepare` writes them."""
    (directory / "train").mkdir(parents=True)
    np.concatenate(texts).tofile(directory / "train/random-00000.bin")
    np.concatenate([learnt(ids) for ids in texts]).tofile(directory / "train/random-00000.mask")
    np.concatenate(([0], np.cumsum([len(ids) for ids in texts]))).astype("<u8").tofile(
        directory / "train/random-00000.idx"
    )
    tokens = sum(map(len, texts))
    counts = {"tokens": tokens, "documents": len(texts), "text_bytes": 3 * tokens, "learnt": tokens // 2}
    entry = {"source": "random", "split": "train", "file": "train/random-00000.bin", **counts}
    facts = {"stage": "sft", "encoder": "tokenizers", "dtype": "uint16", "vocab_size": VOCABULARY}
    facts |= {"bos_id": BOS, "eos_id": EOS, "add_bos": True}
    files.write_json(directory / "manifest.json", facts | {"totals": {"train": {"random": counts}}, "shards": [entry]})
    write_tokenizer(directory / "tokenizer")
    return directory


def write_tokenizer(directory: Path) -> None:
    """A tokenizer that transformers opens; no text is encoded."""
    from tokenizers import AddedToken, Tokenizer, models

    fast = Tokenizer(models.WordLevel({"<unk>": 0, "<s>": BOS, "</s>": EOS}, unk_token="<unk>"))
    fast.add_special_tokens([AddedToken(name, special=True) for name in ("<unk>", "<s>", "</s>")])
    directory.mkdir(parents=True, exist_ok=True)
    fast.save(str(directory / "tokenizer.json"))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    files.write_json(directory / "tokenizer_config.json", about)


def write_model(directory: Path, overrides: tuple[str, ...]) -> Path:
    """Random bf16 weights of XuanYuan-6B's shape, or of the one that the overrides say."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    model = recipe.load(bench.ROOT / "recipes/xuanyuan-6b/pretrain.yaml", overrides).recipe.model
    settings = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=model.hidden_size,
        intermediate_size=model.ffn_size,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads or model.heads,
        max_position_embeddings=4096,
        rms_norm_eps=model.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": model.rope_theta},
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=None,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    with torch.device(DEVICE.device_name()):
        whole = LlamaForCausalLM._from_config(settings, dtype=DTYPE)
    whole.save_pretrained(directory)
    write_tokenizer(directory)
    return directory


def planned(work: Path, arguments: argparse.Namespace) -> tuple[Any, Any]:
    """XuanYuan-6B's fine-tuning recipe on this machine, its model and data exchanged, and the plan."""
    free = ("zero.stage=auto", "zero.offload_optimizer=auto", "zero.offload_param=auto", "train.recompute=auto")
    wanted = (
        f"model.init_from={work / 'model'}",
        f"data.prepared={work / 'shards'}",
        f"batch.sequence_length={arguments.length}",
        f"batch.tokens_per_step={arguments.tokens}",
        "train.steps=10000",
        f"train.compile={'auto' if arguments.shape != 'toy' else 'false'}",
        "checkpoint.every_steps=null",
        "eval.every_steps=null",
    )
    loaded = recipe.load(bench.ROOT / "recipes/xuanyuan-6b/sft.yaml", (*free, *wanted, *arguments.set)).recipe
    return loaded, bench.planner.make(loaded, cluster.local(arguments.gpus), shape.of(loaded, VOCABULARY))


def ours(work: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Launch the trainer on a run directory, end it after --steps steps, and read its events."""
    from finlm.rows import dialogues
    from finlm.rows.shards import Shards

    loaded, plan = planned(work, arguments)
    run = RunDir(Path(tempfile.mkdtemp(dir=work)))
    files.write_text(run.recipe, recipe.dump(loaded))
    files.write_json(run.plan, plan.to_json())
    files.write_json(run.ds_config, config.deepspeed_settings(loaded, plan))
    files.write_json(run.manifest, {"shards": {"path": str(work / "shards")}})
    rows = dialogues.train_rows(Shards(work / "shards"), loaded)
    filled = float((rows.documents(np.arange(len(rows))) >= 0).mean())
    started = time.monotonic()
    process = bench.ranks(run.path)
    first, steps = None, list[dict[str, Any]]()
    while process.poll() is None and len(steps) < arguments.steps and time.monotonic() - started < LIMIT_SECONDS:
        time.sleep(0.1)
        steps = list(run.read_events("step")) if run.events.exists() else []
        first = first or (time.monotonic() - started if steps else None)
    bench.end(process)
    if len(steps) <= bench.WARMUP:
        return {"error": f"{len(steps)} steps in {time.monotonic() - started:.0f} s\n{bench.last_lines(run.path)}"}
    seconds = statistics.median(step["seconds"] for step in steps[bench.WARMUP :])
    return {
        "tokens_per_second": statistics.median(step["tokens_per_second"] for step in steps[bench.WARMUP :]),
        "step_seconds": seconds,
        "memory_bytes": max(step["memory_bytes"] for step in steps),
        "planned_bytes": plan.gpu_bytes,
        "losses": [step["loss"] for step in steps],
        "first_step_seconds": first,
        "filled": filled,
        "setting": f"ZeRO-{plan.zero_stage}, micro-batch {plan.micro_batch} x {plan.gradient_accumulation_steps}, "
        f"recompute {plan.recompute}, rows {filled:.1%} full",
    }


def peer(name: str, work: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run stock trl to its end and read the JSON it wrote."""
    directory = Path(tempfile.mkdtemp(dir=work))
    task = vars(arguments) | {"peer": name, "work": str(work), "out": str(directory / "result.json"), "json": None}
    files.write_json(directory / "task.json", task)
    process = bench.peer_ranks([str(Path(__file__).resolve()), "--task", str(directory / "task.json")], directory)
    ended = time.monotonic() + LIMIT_SECONDS
    while process.poll() is None and time.monotonic() < ended:
        time.sleep(0.2)
    bench.end(process)
    if not (directory / "result.json").exists():
        return {"error": bench.last_lines(directory)}
    found: dict[str, Any] = files.read_json(directory / "result.json")
    rates = [tokens / seconds for tokens, seconds in zip(found["tokens"], found.pop("seconds"), strict=True)]
    median = statistics.median(rates[bench.WARMUP :])
    return found | {"tokens_per_second": median, "step_seconds": statistics.median(found["tokens"]) / median}


def stock_trl(task: dict[str, Any]) -> None:
    """One rank of stock trl: SFTTrainer on a pre-tokenised data set, packed by trl, under DeepSpeed ZeRO-1."""
    from datasets import Dataset
    from transformers import AutoTokenizer, LlamaForCausalLM, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    tuned, micro_batch = task["peer"] == "trl-tuned", MICRO_BATCH[task["peer"]]
    micro_batch = min(micro_batch, task["tokens"] // task["length"] // task["gpus"])
    accumulation = task["tokens"] // (micro_batch * task["length"] * task["gpus"])
    texts = dialogues(task["dialogues"], task["length"])
    rows = [
        {"input_ids": ids.tolist(), "labels": np.where(learnt(ids), ids.astype(int), -100).tolist()} for ids in texts
    ]
    settings = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": ON_GPU},
        "zero_optimization": {"stage": 1, "overlap_comm": True, "contiguous_gradients": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 5e-5, "weight_decay": 0.01, "torch_adam": True, "fused": True}},
        "steps_per_print": 10**9,
    }
    configuration = SFTConfig(
        output_dir=str(Path(task["out"]).parent / "trainer"),
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=accumulation,
        max_steps=task["steps"],
        learning_rate=5e-5,
        weight_decay=0.01,
        lr_scheduler_type="linear",
        bf16=ON_GPU,
        deepspeed=settings,
        gradient_checkpointing=not tuned,
        use_liger_kernel=tuned and ON_GPU,
        use_cpu=not ON_GPU,
        packing=True,
        max_length=task["length"],
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )

    class Clock(TrainerCallback):
        """Wall time, tokens and loss of every optimizer step."""

        def __init__(self) -> None:
            self.seconds: list[float] = []
            self.tokens: list[int] = []
            self.losses: list[float] = []

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            DEVICE.synchronize()
            self.begun, self.before = time.perf_counter(), trainer._total_train_tokens

        def on_step_end(self, *_: Any, **__: Any) -> None:
            DEVICE.synchronize()
            self.seconds.append(time.perf_counter() - self.begun)
            self.tokens.append(int(trainer._total_train_tokens - self.before))

        def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
            self.losses += [logs["loss"]] if "loss" in logs else []

    clock = Clock()
    trainer = SFTTrainer(
        model=LlamaForCausalLM.from_pretrained(Path(task["work"]) / "model", dtype=DTYPE, attn_implementation="sdpa"),
        args=configuration,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(Path(task["work"]) / "model"),
        callbacks=[clock],
    )
    trainer.train()
    if int(os.environ.get("RANK", "0")) == 0:
        result = {"seconds": clock.seconds, "tokens": clock.tokens, "losses": clock.losses}
        result |= {
            "memory_bytes": DEVICE.max_memory_allocated(),
            "setting": f"micro-batch {micro_batch} x {accumulation}",
        }
        Path(task["out"]).write_text(json.dumps(result))


def proof(count: int, longest: int) -> str:
    """The loss of dialogues in packed rows against each alone, on this device by training's attention."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from finlm.rows.shards import IGNORED
    from finlm.train import batches
    from finlm.train.model import kernels

    name = batches.NAME if batches.has_document_kernel(DEVICE.device_name(), DTYPE, has_sinks=False) else "sdpa"
    torch.manual_seed(0)
    small = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=4
    )
    with torch.device(DEVICE.device_name()):
        model = LlamaForCausalLM._from_config(small, attn_implementation=name, dtype=DTYPE)
    kernels.swap_loss(model, VOCABULARY)
    texts = dialogues(count, longest)
    together = np.concatenate(texts)[None, :].astype(np.int64)
    numbers = np.concatenate([np.full(len(ids), n, dtype=np.int32) for n, ids in enumerate(texts)])[None, :]

    def loss(ids: np.ndarray, within: np.ndarray, counted: np.ndarray) -> float:
        labels = np.full_like(ids, IGNORED)
        labels[:, :-1] = np.where((within[:, 1:] == within[:, :-1]) & counted[:, 1:], ids[:, 1:], IGNORED)
        tensors = [torch.from_numpy(part).to(model.device) for part in (ids, labels, batches.document_bounds(within))]
        with torch.no_grad():
            return float(model(*tensors))

    worst = 0.0
    for number, ids in enumerate(texts):
        packed = loss(together, numbers, numbers == number)
        alone = loss(
            ids[None, :].astype(np.int64), np.zeros((1, len(ids)), dtype=np.int32), np.ones((1, len(ids)), dtype=bool)
        )
        worst = max(worst, abs(packed - alone) / alone)
    return (
        f"{count} dialogues in one row against each alone ({name}): largest relative difference of the loss {worst:.1e}"
    )


def main() -> None:
    """Run, print the table, append to the JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=bench.SHAPES, default="6b")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=65_536, help="tokens of an optimizer step over all GPUs")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a row")
    parser.add_argument("--dialogues", type=int, default=6000)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--only", default="ours,trl,trl-tuned", help="comma-separated contenders")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="changes for our contender")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append one JSON line a contender")
    parser.add_argument("--toy", action="store_true", help="a tiny shape, to try the program, also without a GPU")
    parser.add_argument("--task", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.toy:
        vars(arguments).update(TOY)
    if arguments.task is not None:
        stock_trl(json.loads(arguments.task.read_text()))
        return
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(arguments.gpus))))
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        write_model(work / "model", bench.SHAPES[arguments.shape])
        write_shards(work / "shards", dialogues(arguments.dialogues, arguments.length))
        print(proof(3, 64) if arguments.toy else proof(24, 512), flush=True)
        _free_gpu()
        print(f"{'':<12}{'tok/s':>9}{'peak GiB':>10}{'step s':>8}  setting, losses", flush=True)
        for name in arguments.only.split(","):
            row = ours(work, arguments) if name == "ours" else peer(name, work, arguments)
            row = {"contender": name, "shape": arguments.shape, "gpus": arguments.gpus} | row
            if arguments.json is not None:
                with arguments.json.open("a") as out:
                    out.write(json.dumps(row) + "\n")
            if "error" in row:
                print(f"{name:<12} failed:\n{row['error']}", flush=True)
                continue
            losses = " ".join(f"{loss:.3f}" for loss in row["losses"])
            print(
                f"{name:<12}{row['tokens_per_second']:>9,.0f}{row['memory_bytes'] / 2**30:>10.1f}"
                f"{row['step_seconds']:>8.3f}  {row['setting']}; {losses}",
                flush=True,
            )


def _free_gpu() -> None:
    import gc

    gc.collect()
    DEVICE.empty_cache()


if __name__ == "__main__":
    main()
