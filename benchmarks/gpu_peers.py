"""One rank of a peer of gpu_pretrain.py: `gpu_peers.py TASK.json`, started by a launcher.

reference   what XuanYuan's released code runs: HF Trainer, DeepSpeed ZeRO-1, micro-batch 6, gradient checkpointing
hf-tuned    what a good engineer makes of it: HF Trainer, ZeRO-1, Liger kernels, no recompute, micro-batch 2
pytorch     no framework: weights and AdamW states in bf16 alone, compiled layers and loss, micro-batch 6. An upper
            bound rather than a peer: without fp32 master weights such a run does not learn at small learning rates
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

DEVICE = get_accelerator()
ON_GPU = DEVICE.device_name() == "cuda"
DTYPE = torch.bfloat16 if ON_GPU else torch.float32  # many CPUs compute bf16 a hundred times slower
if not ON_GPU:  # as finlm does: it would be compiled first, which takes longer than a toy's steps
    deepspeed.ops.__compatible_ops__ = {}
MICRO_BATCH = {"reference": 6, "hf-tuned": 2, "pytorch": 6}


class Clock(TrainerCallback):
    """Wall time of every optimizer step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Trainer calls it before a step."""
        DEVICE.synchronize()
        self.begun = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Trainer calls it after a step."""
        DEVICE.synchronize()
        self.seconds.append(time.perf_counter() - self.begun)


class RandomRows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows of random tokens."""

    def __init__(self, task: dict[str, Any]) -> None:
        self.length, self.vocabulary = task["sequence_length"], task["config"]["vocab_size"]

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = torch.randint(3, self.vocabulary, (self.length,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": row, "labels": row}


def model_of(task: dict[str, Any], rows: int) -> PreTrainedModel:
    """Return the task's decoder in bf16 on this rank's GPU, with so many rows of the embedding."""
    settings = {"vocab_size": rows, "max_position_embeddings": task["sequence_length"], "use_cache": False}
    config = AutoConfig.for_model(**task["config"] | settings)
    with torch.device(DEVICE.device_name()):
        return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=DTYPE)


def hugging_face(task: dict[str, Any], micro_batch: int) -> dict[str, Any]:
    """HF Trainer under DeepSpeed ZeRO-1."""
    accumulation = task["tokens_per_step"] // (micro_batch * task["sequence_length"] * task["gpus"])
    is_tuned = task["peer"] == "hf-tuned"
    settings = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": ON_GPU},
        "zero_optimization": {"stage": 1, "overlap_comm": True, "contiguous_gradients": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True, "fused": True}},
        "steps_per_print": 10**9,
    }
    arguments = TrainingArguments(
        output_dir=str(Path(task["out"]).parent / "trainer"),
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=accumulation,
        max_steps=task["steps"],
        learning_rate=1e-4,
        bf16=ON_GPU,
        deepspeed=settings,
        gradient_checkpointing=not is_tuned,
        use_liger_kernel=is_tuned and ON_GPU,
        use_cpu=not ON_GPU,
        logging_steps=10**9,
        save_strategy="no",
        report_to=[],
        dataloader_num_workers=2,
    )
    clock = Clock()
    trainer = Trainer(
        model=model_of(task, task["config"]["vocab_size"]),
        args=arguments,
        train_dataset=RandomRows(task),
        callbacks=[clock],
    )
    trainer.train()
    return {"seconds": clock.seconds, "setting": f"micro-batch {micro_batch} x {accumulation}"}


def plain_pytorch(task: dict[str, Any], micro_batch: int) -> dict[str, Any]:
    """A training loop of our own with everything in bf16."""
    rows = -(-task["config"]["vocab_size"] // 128) * 128
    model = model_of(task, rows)
    backend = "inductor" if ON_GPU else "eager"  # compiling for a CPU takes longer than a toy's steps
    for layer in model.model.layers:
        layer.compile(backend=backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    @torch.compile(backend=backend)
    def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())

    accumulation = task["tokens_per_step"] // (micro_batch * task["sequence_length"])
    shape = (micro_batch, task["sequence_length"])
    seconds = []
    for _ in range(task["steps"]):
        DEVICE.synchronize()
        begun = time.perf_counter()
        for _ in range(accumulation):
            tokens = torch.randint(3, task["config"]["vocab_size"], shape, device=DEVICE.device_name())
            loss = loss_of(model(input_ids=tokens).logits, tokens)
            (loss / accumulation).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        DEVICE.synchronize()
        seconds.append(time.perf_counter() - begun)
    return {"seconds": seconds, "setting": f"bf16 states, micro-batch {micro_batch} x {accumulation}"}


def main() -> None:
    """Train, then write seconds and peak memory from rank 0."""
    task = json.loads(Path(sys.argv[1]).read_text())
    torch.manual_seed(0)
    run = plain_pytorch if task["peer"] == "pytorch" else hugging_face
    result = run(task, MICRO_BATCH[task["peer"]])
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        result["memory_bytes"] = DEVICE.max_memory_allocated()
        Path(task["out"]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
