"""Mistakes of a newcomer: each is told at once, says what to do, and leaves nothing behind.

A row: what is typed, a part of the error or of its fix. {d} is an empty working directory with the files of `written`.
"""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from finlm import prepare
from finlm.base import language, screen
from finlm.base.errors import UserError
from finlm.cli import main
from finlm.hosts import ssh
from finlm.recipe import reference
from finlm.runs import proofs

from helpers import QUICKSTART

SMALL = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 300}
SMALL |= {"num_attention_heads": 4, "max_position_embeddings": 512, "architectures": ["LlamaForCausalLM"]}
EMPTY_WEIGHTS = (2).to_bytes(8, "little") + b"{}"
FILES: dict[str, bytes] = {
    "tab.yaml": b"name: x\nmodel:\n\thidden_size: 3\n",
    "list.yaml": b"- name: x\n",
    "empty.yaml": b"",
    "binary.yaml": bytes(range(256)),
    "twice.yaml": b"base: once.yaml\nname: twice\n",
    "once.yaml": f"base: {QUICKSTART}\nname: once\n".encode(),
    "wide.yaml": "name：宽\ntrain：{steps: 10}\n".encode(),
    "gbk.yaml": "name: x\ndescription: 中文\n".encode("gbk"),
    "lost.yaml": b"base: gone.yaml\nname: lost\n",
    "file": b"x",
    "hosts": b"worker-a slots\n",
    "twins": b"a slots=1\na slots=2\n",
    "nobody": b"# a slots=2\n",
    "none": b"a slots=0\n",
    "many": b"localhost slots=64\n",
    "huge": b"a slots=99999999\n",
    "text.jsonl": "净利润\n".encode() * 50,
    "empty.jsonl": b"",
    "field.jsonl": '{"content": "营业收入"}\n'.encode() * 50,
    "gbk.jsonl": '{"text": "营业收入增长"}\n'.encode("gbk") * 50,
    "said.jsonl": '{"messages": [{"role": "user", "content": "营业收入？"}]}\n'.encode() * 50,
    "notes.md": "# 公告\n\n营业收入增长。\n".encode() * 50,
    "few.jsonl": '{"text": "营业收入增长。"}\n'.encode() * 3,
    "cut.jsonl.gz": gzip.compress('{"text": "营业收入增长"}\n'.encode() * 500)[:-30],
    "bad.parquet": b"PAR1xxxx",
    "table.csv": "代码,营业收入\n1,2\n".encode(),
    "paper.pdf": b"%PDF-1.7\n",
    "bad.model": b"no model",
    "tiny.gguf": b"GGUF",
    "old/a-1/recipe.yaml": b"name: a\n",
    "folder/config.json": b"{}",
    "folder/model.safetensors": EMPTY_WEIGHTS,
    "folder/tokenizer.json": b"{}",
    "folder/a.yaml": QUICKSTART.read_bytes(),
    "folder/b.yaml": QUICKSTART.read_bytes(),
    "utf16.yaml": QUICKSTART.read_bytes().decode().encode("utf-16"),
    "fork.yaml": b"base: quickstart\nname: fork\n",
    "bases.yaml": b"base: [once.yaml]\nname: bases\n",
    "tagged.yaml": b"name: !include x.yaml\n",
    "mpirun": b"a:2\n",
    "bare": b"a\n",
    "slurm": b"node[1-4] slots=2\n",
    "spaced": b"a slots = 2\n",
    "gpus": b"a gpus=2\n",
    "pretty.jsonl": '{\n  "text": "营业收入增长"\n}\n'.encode() * 50,
    "python.jsonl": "{'text': '营业收入增长'}\n".encode() * 50,
    "commas.jsonl": '{"text": "营业收入增长"},\n'.encode() * 50,
    "many.tar.gz": gzip.compress(b"x" * 1000),
    "texts.jsonl": '{"text": "营业收入增长。"}\n'.encode() * 50,
    "asked.jsonl": '{"question": "营业收入？"}\n'.encode() * 50,
    "renamed.jsonl": '{"问题": "营业收入？", "答案": "增长。"}\n'.encode() * 50,
    "parts.jsonl": b'{"messages": [{"role": "user", "content": [{"type": "text"}]}]}\n' * 50,
    "dataset_info.json": b'{"mine": {"file_name": "mine.json"}}',
    "pickled/config.json": b"{}",
    "pickled/pytorch_model.bin": b"x",
    "pointer/config.json": b"{}",
    "pointer/model.safetensors": b"version https://git-lfs.github.com/spec/v1\n",
    "half/config.json": b"{}",
    "half/model-00001-of-00002.safetensors": EMPTY_WEIGHTS,
    "half/model.safetensors.index.json": b'{"weight_map": {"a": "model-00002-of-00002.safetensors"}}',
    "mute/config.json": b"{}",
    "mute/model.safetensors": EMPTY_WEIGHTS,
    "listed/config.json": b"[]",
    "cut/config.json": b'{"model_type": "lla',
    "adapters/adapter_config.json": b"{}",
    "lfs/config.json": json.dumps(SMALL).encode(),
    "lfs/tokenizer.json": b"version https://git-lfs.github.com/spec/v1\n",
    "judge/config.json": json.dumps({"model_type": "bert", "hidden_size": 4}).encode(),
    "judge/model.safetensors": b"<html>404</html>",
    "two.yaml": b"name: x\n---\nname: y\n",
    "flat.yaml": f"base: {QUICKSTART}\nname: flat\nmodel: 3\n".encode(),
    "factory.yaml": b"model_name_or_path: m\nstage: sft\nfinetuning_type: lora\ndataset: mine\nlearning_rate: 1.0e-4\n",
    "ds_config.json": b'{"train_batch_size": 8, "zero_optimization": {"stage": 2}}',
    "sub/mine.yaml": f"base: {QUICKSTART}\nname: mine\ndata: {{sources: corpus.jsonl}}\n".encode(),
    "sub/corpus.jsonl": '{"text": "营业收入增长。"}\n'.encode() * 50,
    "blank.jsonl": b"\n \r\n\n" * 40,
    "mute.jsonl": b'{"text": ""}\n' * 50,
    "lists.jsonl": '{"text": ["营业收入"]}\n'.encode() * 50,
    "numbers.jsonl": b"5\n" * 50,
}
PASTED = "营业收入同比增长。" * 40  # where a file is named
# A change of the quickstart's text as a file of its own.
EDITS = {
    "misspelt.yaml": ("hidden_size", "hiden_size"),
    "quoted.yaml": ("lr: 2.0e-3", 'lr: "3e-4"'),
    "foreign.yaml": ("lr: 2.0e-3", "learning_rate: 3e-4"),
    "double.yaml": ("zero:", "batch:"),
    "lengths.yaml": ("steps: 250", "steps: 250, tokens: 1M"),
    "endless.yaml": ("steps: 250, ", ""),
    "words.yaml": ("num_proc: 2", "num_proc: many"),
    "hurried.yaml": ("steps: 250", "steps: 12"),
}
DATA = "--set tokenizer.vocab_size=300 --set train.steps=5 --set data.sources="
Q, SFT = "quickstart", "quickstart/sft"
ALONE = "--set data.mixture=[] --set eval.suites=[] --set data.sources="

ROWS: list[tuple[str, str]] = [
    # The recipe's file
    ("plan misspelt.yaml", "write model.hidden_size instead of model.hiden_size"),
    ("plan quoted.yaml", "expected a number, got the string '3e-4'; write it without quotes"),
    ("plan foreign.yaml", "write optim.lr instead of optim.learning_rate"),
    ("plan double.yaml", "write a key once"),
    ("plan tab.yaml", "indent with spaces"),
    ("plan list.yaml", "the file holds a list"),
    ("plan empty.yaml", "the file holds nothing"),
    ("plan binary.yaml", "cannot read the recipe binary.yaml"),
    ("plan twice.yaml", "inheritance is one level deep"),
    ("plan lost.yaml", "lost.yaml:1: base: cannot read gone.yaml"),
    ("plan wide.yaml", "write the ASCII mark instead of ："),
    ("plan gbk.yaml", "save it as UTF-8"),
    ("plan lengths.yaml", "give exactly one of steps, tokens, epochs; found steps, tokens"),
    ("plan endless.yaml", "found none"),
    ("plan words.yaml", "data.num_proc: should be a whole number, got 'many'"),
    ("plan hurried.yaml", "20 is not less than the 12 steps of the run"),
    ("plan two.yaml", "expected a single document"),
    ("plan flat.yaml", "model: should be a section of keys, got 3"),
    ("plan factory.yaml", "write model.init_from instead of model_name_or_path"),
    ("plan ds_config.json", "write batch.tokens_per_step instead of train_batch_size"),
    # Its name
    ("plan", "finlm plan needs a recipe"),
    ("train text.jsonl", "--set data.sources=text.jsonl"),
    ("plan quickstrat", "did you mean recipes/quickstart/pretrain.yaml?"),
    ("train recipes/quickstart/pretrian.yaml", "did you mean recipes/quickstart/pretrain.yaml?"),
    ("plan folder", "folder is a directory with 2 recipes"),
    ("plan llama4", "there are deepscaler-1.5b/grpo"),
    ("plan utf16.yaml", "save it as UTF-8"),
    ("plan fork.yaml", "as seen from the recipe's directory"),
    ("plan bases.yaml", "inheritance is one level deep"),
    ("plan tagged.yaml", "name: should be like"),
    ("plan file/x.yaml", "there is no such file"),
    ("plan /", "/ is a directory with 0 recipes"),
    # --set
    (f"plan {Q} --set model.name_or_path=x", "here it is model.init_from"),
    (f"plan {Q} --set data.mixture={{gone: 1}}", "known here: weights, to, tokens, share"),
    (f"plan {Q} --set data.held_out_fraction=1", "should be less than 1"),
    (f"plan {Q} --set train.seed=-1", "should be greater than or equal to 0"),
    (f"plan {Q} --set train.seed=99999999999", "should be less than 4294967296"),
    (f"plan {Q} --set name={'x' * 200}", "name: should be like"),
    (f"plan {Q} --set model.init_from=latest", "there is no run latest"),
    (f"plan {Q} --set train/steps=20", "did you mean train?"),
    (f"plan {Q} --set train.steps=２０", "write it without quotes"),
    (f"plan {Q} --set model={{hidden_size:128}}", "write a blank after the colon"),
    (f"plan {Q} --set train.steps", "for example --set optim.lr=3e-4"),
    (f"plan {Q} --set model.layers.x=3", "model.layers is 4, with nothing inside"),
    (f"plan {Q} --set data.sources[4].path=x", "the first is data.sources[0]"),
    (f"plan {Q} --set optim.lr=", "should be a number, got None"),
    (f"plan {Q} --set optim.lr=-1", "should be greater than 0, got -1"),
    (f"plan {Q} --set optim.schedule=cosin", "did you mean 'cosine'?"),
    (f"plan {Q} --set optim.betas=[0.9,95]", "optim.betas[1]: should be less than 1"),
    (f"plan {Q} --set optim.min_lr=1", "1 is above lr (0.002)"),
    (f"plan {Q} --set train.steps=0", "train.steps: should be greater than 0"),
    (f"plan {Q} --set train.steps=1.5", "should be a whole number, got 1.5"),
    (f"plan {Q} --set train.tokens=12apples", "expected 4096, 3.9M or 1.5B"),
    (f"plan {Q} --set train.steps=5 --set optim.warmup_steps=9", "9 is not less than the 5 steps"),
    (f"plan {Q} --set batch.sequence_length=1", "should be greater than or equal to 2"),
    (f"plan {Q} --set batch.tokens_per_step=10", "10 is less than one row of 256 tokens"),
    (f"plan {Q} --set batch.micro_batch=0", "batch.micro_batch: should be greater than 0"),
    (f"plan {Q} --set model.heads=5", "5 heads do not divide hidden_size 192"),
    (f"plan {Q} --set model.heads=64", "head size 3 is odd"),
    (f"plan {Q} --set model.vocab_size=100", "100 rows are fewer than the tokenizer's 4096 pieces"),
    (f"plan {Q} --set stage=stf", "did you mean 'sft'?"),
    (f"plan {Q} --set stage=sft", "stage sft starts from a trained model: name it"),
    (f"plan {Q} --set name=Mine", "name: should be like"),
    (f"plan {Q} --set env=OMP", "env: should be a section of keys"),
    (f"plan {Q} --set data.sources=[]", "data.sources: should be a list of at least 1"),
    (f"plan {Q} --set data.held_out_fraction=5%", "should be a number, got '5%'"),
    (f"plan {Q} --set data.dedup=fuzzy", "should be 'none', 'exact' or 'near'"),
    (f"plan {Q} --set eval.suites=[mmlu]", "should be 'exam' or 'recall'"),
    (f"plan {Q} --set record.tracking=[wandbb]", "did you mean 'wandb'?"),
    (f"plan {Q} --set checkpoint.keep_last=0", "checkpoint.keep_last: should be greater than 0"),
    (f"plan {Q} --set tokenizer={{path: x, vocab_size: 300}}", "give either path"),
    (f"plan {Q} --set tokenizer.vocab_size=70000 --set data.token_dtype=uint16", "uint16 holds ids up to 65,535"),
    # Names of other programs
    (f"plan {Q} --set lora.r=8", "write lora.rank instead of lora.r"),
    (f"plan {Q} --set lora.rank=8", "has no effect in stage pretrain"),
    (f"plan {Q} --set bf16=true", "write train.precision instead of bf16"),
    (f"plan {Q} --set per_device_train_batch_size=8", "here it is batch.micro_batch"),
    (f"plan {Q} --set zero_optimization.stage=2", "here it is zero"),
    (f"plan {Q} --set output_dir=out", "leave it out: runs go to runs/NAME-TIME"),
    (f"plan {Q} --set resume_from_checkpoint=true", "leave it out: the same command resumes"),
    (f"plan {Q} --set seed=1", "write train.seed instead of seed"),
    (f"plan {Q} --set data.sources[0].weight=2", "here it is data.mixture"),
    (f"plan {Q} --set stage=rm --set model.init_from=x.yaml", "'rm' is here: reward"),
    (f"plan {Q} --set stage=orpo --set model.init_from=x.yaml", "'orpo' is here: dpo with dpo.loss: orpo"),
    # A value instead of a section
    (f"plan {Q} --set zero=3", "got 3; known here: stage, offload_optimizer"),
    (f"plan {SFT} --set lora.targets=all-linear", "'all-linear' is here: [q_proj, k_proj"),
    (f"plan {SFT} --set lora.quantize=4bit", "'4bit' is here: nf4"),
    (f"plan {Q} --set optim={{lr:1e-3}}", "write a blank after the colon"),
    (f"plan {SFT} --set chat=chatml", "got 'chatml'; known here: template, system"),
    # Hardware
    (f"plan {Q} --set zero.stage=4", "should be 0, 1, 2, 3 or 'auto'"),
    (f"plan {Q} --set zero.offload_param=cpu", "needs stage 3: DeepSpeed ignores it at stage 1"),
    (f"plan {Q} --set zero.offload_optimizer={{device: cpu}}", "should be 'none', 'stream', 'cpu', 'nvme' or 'auto'"),
    (f"plan {Q} --set zero.stage=3 --set zero.offload_param=nvme", "zero.nvme_path: is required"),
    (f"plan {Q} --set train.precision=fp16", "fp16 does not run on CPU ranks"),
    (f"plan {Q} --set train.precision=bfloat16", "did you mean 'bf16'?"),
    (f"plan {Q} --gpu A100", "nearest: A100-40G, A100-80G;"),
    (f"plan {Q} --gpu-memory 48GiB", "add --gpu NAME"),
    (f"plan {Q} --gpu X --gpu-memory lots", "for example --gpu-memory 48GiB"),
    ("plan xuanyuan-70b --gpu V100-32G", "does not fit this cluster"),
    (f"plan {Q} --hostfile gone", "cannot read the hostfile gone"),
    (f"plan {Q} --hostfile hosts", "hosts:1: expected `name slots=N`"),
    (f"plan {Q} --hostfile twins", "a appears twice"),
    (f"plan {Q} --hostfile nobody", "names no host"),
    (f"plan {Q} --hostfile none", "a has 0 slots"),
    (f"plan {Q} --hostfile many", "at most slots=12"),
    (f"plan {Q} --hostfile huge", "a has 99999999 slots; a host has at most 1,024"),
    (f"plan {Q} --set hardware.hosts[0].count=99999999", "should be less than or equal to 1024"),
    (f"plan {Q} --local --set train.cpu_ranks=99999999", "should be less than or equal to 1024"),
    (f"plan {Q} --hostfile mpirun", "did you mean a slots=2?"),
    (f"plan {Q} --hostfile bare", "did you mean a slots=N?"),
    (f"plan {Q} --hostfile gpus", "did you mean a slots=2?"),
    (f"plan {Q} --hostfile spaced", "did you mean a slots=2?"),
    (f"plan {Q} --hostfile slurm", "scontrol show hostnames 'node[1-4]'"),
    (f"plan {Q} --hostfile folder", "cannot read the hostfile folder"),
    (f"doctor {Q} --hostfile mpirun", "did you mean a slots=2?"),
    (f"train {Q} --include a", "there is none"),
    (f"train {Q} --gpu H100-80G", "on this machine CUDA_VISIBLE_DEVICES=0,1 chooses GPUs"),
    ("doctor quickstart --hostfile gone", "cannot read the hostfile gone"),
    # Models
    (f"train {Q} --set model.init_from=models/gone", "there is no model in models/gone"),
    (f"train {SFT} --set model.init_from=gone", "there is no model in gone"),
    (f"plan {Q} --set model.init_from=a/b/c --set model.revision=main", "there is no model in a/b/c"),
    (f"train {SFT} --set model.init_from=judge", "is not a model that finlm trains"),
    (f"train {SFT} --set chat.template=chatmll", "chat.template: there is no template chatmll"),
    (f"train {Q} --continue", "there is no finished run of quickstart to continue"),
    ("eval gone", "gone holds no model"),
    ("eval folder", "folder is a model alone"),
    ("eval folder --suite financeiq", "give the folder with --data DIR"),
    ("eval folder --suite financeiq --data folder", "folder/test holds no CSV files"),
    ("eval folder --shots 3", "only questions have that"),
    ("chat gone", "gone holds no model"),
    ("sample . 净利润", "no config.json in it"),
    (f"chat {Q}", "`finlm train quickstart` makes one"),
    (f"serve {SFT}", "`finlm train quickstart/sft` makes one"),
    ("chat folder --tools gone.json", "there is no file gone.json"),
    ("import-gguf gone.gguf out", "there is no file gone.gguf"),
    (f"train {SFT} --set model.init_from=modelscope:org/name", "needs model.revision"),
    ("new mine --model tiny.gguf", "finlm import-gguf tiny.gguf DIRECTORY"),
    ("sample gone 净利润", "gone holds no model"),
    ("export gone out", "gone holds no model"),
    ("chat pickled", "it has pytorch_model.bin"),
    ("chat pointer", "is none of safetensors"),
    ("chat half", "model-00002-of-00002.safetensors: is not there"),
    ("chat mute", "mute has no tokenizer"),
    ("chat listed", "it is no JSON object"),
    ("chat cut", "cut/config.json is not JSON"),
    ("chat adapters", "these are adapters"),
    ("chat tiny.gguf", "`finlm import-gguf tiny.gguf DIRECTORY` makes one"),
    ("chat org/name", "`hf download org/name --local-dir models/org/name`"),
    ("serve pickled", "it has pytorch_model.bin"),
    ("eval half", "model-00002-of-00002.safetensors: is not there"),
    ("sample mute 净利润", "mute has no tokenizer"),
    ("new mine --model lfs", "a clone without Git LFS"),
    ("new mine.yaml --from quickstart", "is no name of a recipe"),
    # Data
    (f"prepare {Q} {DATA}pretty.jsonl", "write a whole JSON object a line"),
    (f"prepare {Q} {DATA}python.jsonl", "write a whole JSON object a line"),
    (f"prepare {Q} {DATA}commas.jsonl", "write a whole JSON object a line"),
    (f"prepare {Q} {DATA}many.tar.gz", "tar -xf many.tar.gz"),
    (f"prepare {Q} --set data.sources=gone/*.jsonl", "data.sources[0]: no file matches gone/*.jsonl"),
    (f"prepare {Q} {DATA}text.jsonl", "text.jsonl:1: not JSON"),
    (f"prepare {Q} {DATA}empty.jsonl", "source empty has no row"),
    (f"prepare {Q} {DATA}field.jsonl", "no field 'text', only 'content'"),
    (f"prepare {Q} {DATA}gbk.jsonl", "set data.sources[i].encoding, for example gb18030"),
    (f"prepare {Q} {DATA}said.jsonl", "these are dialogues, for a recipe of stage sft"),
    (f"prepare {Q} {DATA}notes.md", "set data.sources[i].format to txt or lines"),
    (f"prepare {Q} {DATA}text.jsonl,few.jsonl", "--set 'data.sources=[text.jsonl, few.jsonl]'"),
    # told before the model to start from is trained
    (f"train {SFT} {ALONE}gone.jsonl", "no file matches gone.jsonl"),
    (f"train {SFT} {ALONE}said.jsonl", "said.jsonl:1: the last turn is the user's"),
    (f"train {SFT} --dry-run {ALONE}text.jsonl", "text.jsonl:1: not JSON"),
    (f"train {SFT} --dry-run {ALONE}table.csv", "pandas.read_csv"),
    (f"train {SFT} --dry-run {ALONE}texts.jsonl", "data.sources has no dialogue"),
    (f"train {SFT} --dry-run {ALONE}asked.jsonl", "no answer beside question"),
    (f"train {SFT} --dry-run {ALONE}renamed.jsonl", "only 答案, 问题"),
    (f"train {SFT} --dry-run {ALONE}parts.jsonl", "the content of a turn is not text"),
    (f"train {SFT} --dry-run {ALONE}dataset_info.json", "only mine"),
    (f"train {SFT} --dry-run {ALONE}folder", "folder is a directory"),
    ("train quickstart/dpo --dry-run --set eval.suites=[] --set data.sources=asked.jsonl", "asked.jsonl:1"),
    (f"prepare {Q} {DATA}few.jsonl", "source few has no document to train on"),
    (f"prepare {Q} {DATA}cut.jsonl.gz", "the archive is cut short"),
    (f"prepare {Q} {DATA}bad.parquet", "bad.parquet is damaged"),
    (f"prepare {Q} {DATA}paper.pdf", "finlm does not read paper.pdf"),
    (f"plan {Q} {DATA}table.csv", "convert it to JSON lines"),
    (f"prepare {Q} {DATA}gs://bucket/a.jsonl", "needs a package"),
    (f"prepare {Q} {DATA}folder", "folder is a directory"),
    (f"prepare {Q} --set tokenizer={{path: gone.model}}", "gone.model"),
    (f"prepare {Q} --set tokenizer={{path: bad.model}}", "bad.model"),
    (f"lint {Q}", "trains on documents, which have no labels"),
    ("self-qa quickstart", "has no self_qa section"),
    # Runs
    ("watch latest", "there is no run latest"),
    ("watch gone", "there is no run gone"),
    (f"watch {Q}", "`finlm train quickstart` makes one"),
    ("watch folder", "folder is not a run directory"),
    ("compare gone other", "`finlm runs` lists them"),
    ("report gone", "there is no run gone"),
    ("reproduce gone", "there is no run gone"),
    ("diagnose gone.log", "cannot read gone.log"),
    ("diagnose old", "old is a directory of runs, not a run"),
    ("runs --runs file", "--runs: file is a file"),
    (f"train {Q} --runs file", "--runs: file is a file"),
    (f"train {Q} --runs file/below", "--runs: file is a file"),
    (f"diagnose {PASTED}", "give the name of a file or directory, not its text"),
    (f"chat {PASTED}", "give the name of a file or directory, not its text"),
    (f"plan {PASTED}", "give the name of a file or directory, not its text"),
    ("board --hostfile gone", "cannot read the hostfile gone"),
    ("board --token-file binary.yaml", "binary.yaml holds no token"),
    # Forks
    (f"new Mine --from {Q}", "is no name of a recipe"),
    ("new mine --from quickstrat", "did you mean recipes/quickstart/pretrain.yaml?"),
    (f"diff {Q}", "does not say what it was made from"),
    (f"diff {Q} {Q} {Q}", "3 recipes or runs were named"),
]

# Evidence and fixes that are the same in Chinese: commands and file names.
SAME = (
    "Expecting property name",
    "expected value at",
    "Extra data",
    "Unterminated string",
    "--set ",
    "finlm prepare --show",
    "no gone/config.json",
)

TYPED: list[tuple[str, str]] = [
    (f"trian {Q}", "did you mean train?"),
    ("", "the following arguments are required: COMMAND"),
    (f"plan {Q} --sett a=b", "did you mean --set?"),
    (f"plan {Q} train.steps=20", "write --set train.steps=20"),
    (f"train {Q} text.jsonl", "write --set data.sources=text.jsonl"),
    (f"plan {Q} --set train.steps 20", "write --set train.steps=20"),
    (f"train {Q} --lr 1e-4", "write --set optim.lr=1e-4"),
    (f"train {Q} --learning-rate=1e-4", "write --set optim.lr=1e-4"),
    (f"train {Q} --epochs 3", "write --set train.epochs=3"),
    (f"train {Q} --gpus 2", "a hostfile says it"),
    ("watch latest --seed 3", "unrecognized arguments: --seed 3"),
    (f"train {Q} --resume", "the same command resumes"),
    (f"train {Q} --output_dir out", "`--runs DIR` puts them elsewhere"),
    (f"plan {Q} --price -3", "expected a number at least 0"),
    (f"plan {Q} --hostfile many --local", "not allowed with argument"),
    (f"prepare {Q} --show -1", "expected a whole number of at least 0"),
    ("board --port 80000", "expected at most 65535"),
    (f"train {Q} --continue --new", "not allowed with argument"),
    (f"train {Q} --print slurmm", "did you mean slurm?"),
    ("eval folder --suite mmlu", "invalid choice: 'mmlu'"),
    ("new mine", "one of the arguments --from --model is required"),
    ("compare one", "the following arguments are required: RUN"),
    ("chat folder --top-p 1.5", "at most 1"),
]


def split(typed: str) -> list[str]:
    """The words of a command; a mapping in YAML is one word."""
    words: list[str] = []
    for word in typed.split():
        if words and words[-1].count("{") > words[-1].count("}"):
            words[-1] += f" {word}"
        else:
            words.append(word)
    return words


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory with the files above; whatever is expensive fails the test."""
    monkeypatch.chdir(tmp_path)
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_bytes(content)
    text = QUICKSTART.read_text(encoding="utf-8")
    for name, (old, new) in EDITS.items():
        assert old in text
        (tmp_path / name).write_text(text.replace(old, new, 1), encoding="utf-8")
    monkeypatch.setattr(ssh, "run", lambda *_, **__: pytest.fail("asked a host"), raising=False)
    monkeypatch.setattr(proofs, "reproduce", lambda *_: pytest.fail("trained"))
    return tmp_path


@pytest.mark.parametrize(("typed", "says"), ROWS, ids=[typed for typed, _ in ROWS])
def test_a_mistake_is_told_at_once_with_what_to_do(
    typed: str, says: str, written: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(written.rglob("*"))
    command = split(typed)
    if command[0] != "prepare":
        monkeypatch.setattr(prepare, "run", lambda _: pytest.fail("prepared"))
    told: list[UserError] = []
    print_error = screen.print_error
    monkeypatch.setattr(screen, "print_error", lambda error: (told.append(error), print_error(error)))
    assert main.main(command) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("error: ") == 1 and says in err, err
    assert "\n  fix:      " in err or "hosts:1" in says or "appears twice" in says or "0 slots" in says, err
    assert len(err) < 3000 and "Traceback" not in err
    left = [path for path in sorted(written.rglob("*")) if path not in before and "cache" not in path.parts]
    assert left == [] and not list(written.glob("cache/shards-*"))
    assert stays_english(told[0]) == []


def test_a_directory_that_cannot_be_written_is_told_before_data_are_prepared(
    written: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prepare, "run", lambda *_, **__: pytest.fail("prepared"))
    monkeypatch.setattr(os, "access", lambda path, _: Path(path) != Path("folder"))  # root may write anywhere
    assert main.main(["train", Q, "--runs", "folder/new", "--lang", "zh"]) == 2
    assert "--runs：folder 不可写" in capsys.readouterr().err


def test_what_a_windows_editor_adds_changes_nothing(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plans = []
    for mark, end in (b"", b"\n"), (b"\xef\xbb\xbf", b"\r\n"):
        (written / "mine.yaml").write_bytes(mark + QUICKSTART.read_bytes().replace(b"\n", end))
        (written / "mine.hosts").write_bytes(mark + b"a slots=1\nb slots=2\n".replace(b"\n", end))
        assert main.main(["plan", "mine.yaml", "--hostfile", "mine.hosts", "--json"]) == 0
        plans.append(capsys.readouterr().out)
    assert plans[0] == plans[1]


def stays_english(error: UserError) -> list[str]:
    """The sentences of an error that have no Chinese form."""
    language.add(reference.meanings())
    language.missed.clear()
    for text in (error.problem, error.evidence, error.fix):
        language.translate(text, "zh")
    return [text for text in sorted(language.missed) if not text.startswith(SAME)]


@pytest.mark.parametrize(("typed", "says"), TYPED, ids=[typed or "nothing" for typed, _ in TYPED])
def test_a_mistyped_command_is_told_with_what_was_meant(
    typed: str, says: str, written: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main(split(typed))
    assert ended.value.code == 2 and says in capsys.readouterr().err
    language.missed.clear()
    with pytest.raises(SystemExit):
        main.main([*split(typed), "--lang", "zh"])
    assert "错误：" in capsys.readouterr().err and not language.missed


def test_the_list_is_long_enough_to_mean_something() -> None:
    assert len(ROWS) + len(TYPED) >= 100 and len({typed for typed, _ in (*ROWS, *TYPED)}) == len(ROWS) + len(TYPED)
