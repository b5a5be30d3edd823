"""A dead run is never without a finding, the last launch counts, what is no statement of the program is no evidence."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from finlm.diagnose import command
from finlm.diagnose.command import mask
from finlm.diagnose.findings import Finding

from helpers import finlm

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
TRACEBACK = 'Traceback (most recent call last):\n  File "/data/work/train.py", line 7, in main\n    go()\n'
STEP = "{{'loss': 1.{0}, 'epoch': 0.{0}}}\n"


Of = Callable[[str | bytes], list[Finding]]


def kind(finding: Finding) -> str:
    """How a run of unknown cause ended if that is known, else the cause."""
    return finding.kind or finding.cause


@pytest.fixture
def findings(tmp_path: Path) -> Of:
    def of(text: str | bytes) -> list[Finding]:
        log = tmp_path / "x.log"
        log.write_bytes(text.encode() if isinstance(text, str) else text)
        return command.of_logs([str(log)])

    return of


ENDINGS = [
    TRACEBACK + "h5py.exceptions.UndefinedError: 'phase' is undefined\n",
    TRACEBACK + "fmt3.exceptions.LocationParseError: Failed to parse: x\n",
    TRACEBACK + "sqlite3.OperationalError: database is locked\n",
    TRACEBACK + "StopIteration\n",
    TRACEBACK + "queue.Empty\n",
    "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:93, unhandled error\nLast error:\nNew words\n",
    "2025-01-01 10:00:00 - worker - ptxas fatal   : Unresolved extern function 'f'\n",
    "/var/spool/job/script: line 3: [: -ge: unary operator expected\nslurmstepd: error: task exited\n",
    "step one\nProcess finished with exit code 3\n",
    "phase one\nSet the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace.\n",
    "[2025-05-04 20:44:05,116] [INFO] [launch.py:319:sigkill_handler] Killing subprocess 28737\n",
    "work\nSubject: Job 21869429: <v32test_0> in cluster <dcc> Exited\n",
    "work\n------------------------------------------------------------\n\nExited with exit code 1.\n",
]


@pytest.mark.parametrize("log", ENDINGS, ids=range(len(ENDINGS)))
def test_a_log_that_ends_in_an_unfamiliar_error_is_never_without_a_finding(log: str, findings: Of) -> None:
    found = findings("loading\n" + log)
    assert found and found[0].fatal and found[0].confidence != "high"


@pytest.mark.parametrize(
    "before",
    [
        "Mar 03 10:00:01 gpu01 python[2211]: ",
        "[2024-03-03, 10:00:01 UTC] {{subprocess.py:93}} INFO - ",
        "[1,0]<stderr>:",
        "0|train  | ",
        "E0303 10:00:01.000000 140000 train.py:55] ",
        "2024/03/03 10:00:01 ",
        "[10:00:01] ",
        "[pod/train-0/pytorch] ",
        '{{"log":{},"stream":"stderr"}}',
        '{{"stream_name":"stderr","time":1.5,"data":{}}}',
    ],
)
def test_what_a_log_collector_writes_before_each_line_hides_nothing(before: str, findings: Of) -> None:
    for end, cause in (("AttributeError: 'A' object has no attribute 'b'\n", "code_error"), ("Killed\n", None)):
        lines = ((TRACEBACK if cause else "loading\n") + end).splitlines()
        packed = "{}" in before
        text = "".join(
            before.format(json.dumps(line + "\n") if packed else "") + ("" if packed else line) + "\n" for line in lines
        )
        assert kind(findings(text)[0]) == (cause or "host_memory_insufficient")


def test_an_unknown_exception_is_shown_with_its_frame_and_message(findings: Of) -> None:
    (found,) = findings(TRACEBACK + "pkg.errors.PhaseMix: phase 3\ncame before phase 2\n")
    assert found.evidence.splitlines() == [
        "pkg.errors.PhaseMix: phase 3",
        'File "/data/work/train.py", line 7, in main',
        "came before phase 2",
    ]


def test_a_log_in_utf_16_is_read(findings: Of) -> None:
    text = "loading\r\n" + OOM
    for encoding in ("utf-16", "utf-16-le", "utf-16-be"):
        assert [f.cause for f in findings(text.encode(encoding))] == ["cuda_oom"]


NOT_SAID = [
    TRACEBACK.replace("go()", "from huggingface_hub.errors import RepositoryNotFoundError") + "KeyError: 'phase'\n",
    "INFO Checkpoint tracker file does not exist: /data/ckpt/latest.txt\n" + TRACEBACK + "NotImplementedError\n",
    "tensorflow 2.16.1 requires protobuf<5.0, but you have protobuf 5.28.2 which is incompatible.\n"
    + TRACEBACK
    + "KeyError: 'phase'\n",
    "Started at Fri Apr 25 11:31:44 2025\nTerminated at Fri Apr 25 11:32:20 2025\n\nExited with exit code 1.\n",
]


@pytest.mark.parametrize("log", NOT_SAID, ids=["source line", "start-up remark", "pip", "scheduler"])
def test_what_the_program_did_not_say_as_an_error_is_no_cause(log: str, findings: Of) -> None:
    assert kind(findings(log)[0]) in ("unknown", "code_error")


def test_a_row_of_data_that_speaks_of_an_error_is_no_cause(findings: Of) -> None:
    served = "Running on local URL:  http://127.0.0.1:7860\n====conversation====\n"
    assert findings(served + "[{'role': 'user', 'content': 'CUDA out of memory 怎么解决？'}]\n") == []
    assert findings(served + "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB\n")[0].cause == "cuda_oom"


def test_a_notebook_that_was_interrupted_says_so(findings: Of) -> None:
    cell = "KeyboardInterrupt                         Traceback (most recent call last)\n----> 1 trainer.train()\n\n"
    assert findings(cell + "KeyboardInterrupt: \n")[0].cause == "sigterm_preempted"


LAUNCH = "[2024-05-26 12:39:38,733] [INFO] [runner.py:568:main] cmd = python -u -m deepspeed.launcher.launch x.py\n"
DEATH = "[2024-05-26 12:40:00,000] [ERROR] [launch.py:322:sigkill_handler] exits with return code = 1\n"
WELL = "{'train_runtime': 212.6}\n[launch.py:348:main] Process 13704 exits successfully.\n"


def test_of_several_launches_in_one_file_the_last_counts_and_the_others_are_listed(tmp_path: Path) -> None:
    log = tmp_path / "nohup.out"
    log.write_text((LAUNCH + OOM + DEATH) * 6 + LAUNCH + TRACEBACK + "KeyError: 'phase'\n" + DEATH)
    result = finlm("diagnose", log, "--json")
    document = json.loads(result.stdout)
    assert result.returncode == 1 and document["findings"][0]["kind"] == "code_error"
    assert [launch["cause"] for launch in document["former"]] == ["cuda_oom"] * 6
    assert f"{log}, line 1-3: cuda_oom: Out of GPU memory" in result.stderr
    log.write_text(LAUNCH + OOM + DEATH + LAUNCH + STEP.format(1) + WELL)
    result = finlm("diagnose", log)
    assert result.returncode == 0 and "nothing fatal" in result.stdout and "cuda_oom" in result.stdout


def test_two_ranks_that_die_one_after_the_other_are_one_launch(findings: Of) -> None:
    banner = "W0921 23:29:26.359 torch/distributed/run.py:779] Setting OMP_NUM_THREADS environment variable for each\n"
    usage = "usage: train.py [-h]\ntrain.py: error: argument --bf16: invalid value\n"
    (found,) = findings(banner + usage * 4 + DEATH)
    assert (found.cause, found.line) == ("bad_arguments", 3)


def test_high_is_said_only_of_what_explains_the_ending(findings: Of) -> None:
    assert findings(TRACEBACK + OOM)[0].confidence == "high"
    (first, *_) = findings(OOM + TRACEBACK + "PhaseError: phase 3 before phase 2\n")
    assert (first.cause, first.confidence) == ("cuda_oom", "medium")


def test_an_error_that_was_worked_around_comes_after_the_exception_that_ended_the_run(findings: Of) -> None:
    log = "/bin/sh: 1: c++: not found\nusing torch's Adam\n" + TRACEBACK + OOM
    assert [f.cause for f in findings(log)] == ["cuda_oom", "ds_op_build_toolchain"]


def test_an_error_that_training_survived_is_not_what_it_died_of_later(findings: Of) -> None:
    steps = "".join(STEP.format(i) for i in range(1, 6))
    assert findings(OOM + steps + TRACEBACK + "KeyError: 'phase'\n")[0].kind == "code_error"


def test_exceptions_that_were_caught_before_lightning_reached_its_last_step_are_no_cause(findings: Of) -> None:
    caught = (
        TRACEBACK + "json.decoder.JSONDecodeError: Expecting value: line 1 column 1\nWARNING: taken as text\n"
    ) * 3
    assert findings(caught)[0].cause == "json_malformed"
    assert not findings(caught + "`Trainer.fit` stopped: `max_steps=30` reached.\n")


def test_a_directory_that_a_finished_process_cannot_remove_is_no_cause_unless_the_log_ends_there(findings: Of) -> None:
    held = (
        'Traceback (most recent call last):\n  File "/x/multiprocess/util.py", line 3, in _remove_temp_dir\n    go()\n'
    )
    held += "OSError: [Errno 16] Device or resource busy: '.nfs0000000031bd1f10'\n"
    assert not findings("saved model\n" + held + "Evaluating ... perplexity 6.83\ndone.\n")
    assert findings("saved model\n" + held)[0].cause == "nfs_stale"


@pytest.mark.parametrize(
    "aside",
    [
        "[TP0] Ignore import error when loading sglang.x. cannot import name 'AutoProcessor' from 'transformers'",
        "WARNING scheduler.py:1299] Sequence group 7f0d is preempted by PreemptionMode.RECOMPUTE mode",
        "warning: failed to mlock 617709568-byte buffer: Cannot allocate memory",
        "WARNING: composer: CUDA out of memory detected. Train microbatch size will be decreased from 16 -> 8.",
    ],
)
def test_what_a_program_works_around_and_says_so_is_no_cause(aside: str, findings: Of) -> None:
    assert not findings(f"starting\n{aside}\nloading\n")


def test_an_exception_of_a_row_that_is_left_out_is_no_cause_unless_the_log_ends_there(findings: Of) -> None:
    raised = TRACEBACK + "PIL.UnidentifiedImageError: cannot identify image file\n"
    assert not findings("WARNING prepare: 41882.jpg skipped\n" + raised + "kept 118202 of 118204 rows, done\n")
    assert findings("WARNING prepare: 41882.jpg skipped\n" + raised)
    assert findings("WARNING prepare: 41882.jpg read\n" + raised + "working\n")
    for before in ("number of skipped iterations:   0", "resume_download is deprecated and ignored", "3 rows skipped"):
        oom = TRACEBACK + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
        assert findings(f"WARNING {before}\n{oom}wandb: Run history saved\n")[0].cause == "cuda_oom"


def test_a_line_repeated_a_thousand_times_is_one_cause_and_no_unknown_one(findings: Of) -> None:
    (found,) = findings("loading\n" + (TRACEBACK + "OSError: [Errno 24] Too many open files\n") * 1000)
    assert found.cause == "too_many_open_files"


def test_an_embedding_of_another_width_is_of_another_model_and_not_of_another_vocabulary(findings: Of) -> None:
    line = "\tsize mismatch for lm_head.weight: copying a param with shape torch.Size([{}]) from checkpoint, the shape"
    line += " in current model is torch.Size([{}]).\n"
    head = TRACEBACK + "RuntimeError: Error(s) in loading state_dict for LlamaForCausalLM:\n"
    assert findings(head + line.format("429, 32", "429, 64"))[0].cause == "state_dict_mismatch"
    assert findings(head + line.format("429, 64", "512, 64"))[0].cause == "vocab_size_mismatch"


def test_an_exception_that_quotes_a_whole_traceback_gives_way_to_the_one_it_quotes(findings: Of) -> None:
    inner = TRACEBACK + "UnicodeDecodeError: 'utf-8' codec can't decode byte 0xf6 in position 6: invalid start byte\n"
    (found,) = findings(TRACEBACK + "RuntimeError: We met the following error " + inner + ".\n")
    assert found.evidence.startswith("UnicodeDecodeError")


def test_the_shells_word_after_an_exception_is_not_its_message(findings: Of) -> None:
    log = (
        TRACEBACK
        + "TypeError: argument of type 'NoneType' is not iterable\n  0%|   | 0/1 [00:00<?, ?it/s]\nTerminated\n"
    )
    assert findings(log)[0].kind == "code_error"
    assert findings("loading\nTerminated\n")[0].cause == "sigterm_preempted"


@pytest.mark.parametrize(
    ("place", "cause"), [("/env/site-packages/pkg", "package_versions"), ("/data/verl", "unknown")]
)
def test_a_class_without_an_attribute_is_of_another_version_only_in_an_installed_package(
    place: str, cause: str, findings: Of
) -> None:
    frame = f'  File "{place}/core.py", line 11, in run\n    self.go()\n'
    assert kind(findings(TRACEBACK + frame + "AttributeError: 'Maker' object has no attribute 'phase'\n")[0]) == cause


WORDS = {
    "llamafactory-cli train x.yaml\n": "per_device_train_batch_size: 1",
    "run sh: `python swift/cli/sft.py --model m`\n": "--per_device_train_batch_size 1",
    "python -m axolotl.cli.train x.yml\n": "micro_batch_size: 1",
    "'actor_rollout_ref': {'actor': {}}\n": "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    'File "/env/trl/trainer/sft_trainer.py", line 4, in f\n': "per_device_train_batch_size=1",
    "torchrun --nproc_per_node 8 x.py\n": "a micro-batch of 1",
    "nothing that names a program\n": "batch.micro_batch: 1",
}


@pytest.mark.parametrize(("log", "words"), WORDS.items(), ids=range(len(WORDS)))
def test_a_fix_is_said_in_the_words_of_the_program(log: str, words: str, findings: Of) -> None:
    (found,) = findings(log + OOM)
    assert words in found.fix
    assert ("finlm" in found.fix) == ("batch.micro_batch" in words)


def test_the_log_of_a_run_of_our_own_speaks_of_its_recipe_whatever_else_it_names(tmp_path: Path, findings: Of) -> None:
    (tmp_path / "recipe.yaml").write_text("batch: {micro_batch: 1}\n")
    (tmp_path / "a.0.log").write_text("torchrun --nproc_per_node 8\n" + OOM)
    assert "batch.micro_batch: 1" in command.of_run(tmp_path)[0].fix
    assert (
        "batch.micro_batch: 1"
        in findings('  File "/env/torch/distributed/x.py"\n  File "/r/finlm/train/x.py"\n' + OOM)[0].fix
    )


def test_memory_that_others_hold_is_computed_from_the_line(findings: Of) -> None:
    (found,) = findings(
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 86.00 MiB (GPU 0; 31.75 GiB total "
        "capacity; 8.04 GiB already allocated; 64.94 MiB free; 8.04 GiB reserved in total by PyTorch)\n"
    )
    assert "23.6 GiB" in found.explanation and "23.6 GiB" in found.fix


def test_the_progress_of_the_late_rank_on_the_line_is_named(findings: Of) -> None:
    (found, *_) = findings(
        "Running tokenizer on dataset:  34%|###  | 17000/50000 [29:58<58:10, 9.45 examples/s][rank1]:[E924 "
        "10:12:33.1 PGNCCL.cpp:616] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, "
        "OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600012 milliseconds.\n"
    )
    assert "Running tokenizer on dataset, 34 % done" in found.explanation


def test_what_leaves_the_machine_has_no_secret_path_address_or_name() -> None:
    text = (
        "WANDB_API_KEY=0123456789abcdef01 token: hf_abcdefghijklmnop http://bob:pw12345678@10.1.2.3:80 mail a.b@c.org\n"
        'File "/home/carol/env/lib/python3.11/site-packages/peft/x.py", line 1, in f\n'
        "open /data/private/project/train.json and C:\\Users\\carol\\x.txt by carol on gpu-a, num_tokens: 123\n"
    )
    masked = mask(text, ["gpu-a"])
    for secret in ("0123456789abcdef01", "hf_abc", "bob", "pw1", "10.1.2.3", "a.b@c", "carol", "private", "gpu-a"):
        assert secret not in masked
    assert "site-packages/peft/x.py" in masked and "train.json" in masked and "num_tokens: 123" in masked


class _Model(BaseHTTPRequestHandler):
    """A small OpenAI-compatible endpoint; keeps what it was asked."""

    asked: ClassVar[list[tuple[str, str]]] = []

    def do_GET(self) -> None:
        self._answer({"data": [{"id": "small"}]})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.asked.append((self.path, body))
        self._answer({"choices": [{"message": {"content": "The phase key is missing."}}]})

    def _answer(self, value: object) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def _serving(endpoint: type[_Model]) -> Iterator[str]:
    """The address of a server of this kind, until the block ends."""
    server = HTTPServer(("127.0.0.1", 0), endpoint)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()


def test_a_model_is_asked_only_about_an_unknown_or_guessed_cause_and_its_answer_is_marked(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    with _serving(_Model) as address:
        log.write_text("password=opensesame1\n" + TRACEBACK + "KeyError: 'phase'\n")
        result = finlm("diagnose", log, "--ask", address, "--json")
        assert json.loads(result.stdout)["answer"]["text"] == "The phase key is missing."
        assert "nobody has checked it" in result.stderr and result.returncode == 1
        ((path, body),) = _Model.asked
        assert path == "/v1/chat/completions" and "KeyError: 'phase'" in body
        assert "opensesame1" not in body and "/data/work" not in body
        log.write_text(OOM)
        assert "answer" not in json.loads(finlm("diagnose", log, "--ask", address, "--json").stdout)
        assert len(_Model.asked) == 1
    log.write_text(TRACEBACK + "KeyError: 'phase'\n")
    result = finlm("diagnose", log, "--ask", address)
    assert result.returncode == 1 and "gave no answer" in result.stderr
    assert finlm("diagnose", log, "--ask", "host:80").returncode == 2


class _Breaks(_Model):
    """An endpoint whose answers end before the length that they announce."""

    def _answer(self, value: object) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        self.wfile.write(b"{")


def test_an_answer_that_breaks_off_is_told(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text(TRACEBACK + "KeyError: 'phase'\n")
    with _serving(_Breaks) as address:
        result = finlm("diagnose", log, "--ask", address)
    assert result.returncode == 1 and "gave no answer" in result.stderr and "Traceback" not in result.stderr


class _Redirects(_Model):
    """An endpoint that sends every request on to another address."""

    def _answer(self, value: object) -> None:
        self.send_response(302)
        self.send_header("Location", "http://localhost:9/v1")
        self.end_headers()


def test_a_redirect_does_not_carry_the_key_to_another_host(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text(TRACEBACK + "KeyError: 'phase'\n")
    with _serving(_Redirects) as address:
        result = finlm("diagnose", log, "--ask", address)
    assert result.returncode == 1 and "HTTP Error 302" in result.stderr


def test_a_log_cut_inside_a_traceback_is_a_dead_run(findings: Of) -> None:
    (found,) = findings("loading\n" + TRACEBACK)
    assert (found.cause, found.line) == ("unknown", 2) and "train.py" in found.evidence


def test_a_killed_rank_among_failed_ones_was_not_preempted(findings: Of) -> None:
    report = "[0]:\n  exitcode  : -15 (pid: 2)\n  traceback : Signal 15 (SIGTERM) received by PID 2\n"
    assert findings(report)[0].cause == "sigterm_preempted"
    assert findings(report + "[1]:\n  exitcode  : 1 (pid: 3)\n")[0].cause == "unknown"


def test_what_the_scheduler_did_afterwards_explains_no_exception(findings: Of) -> None:
    slurm = (
        "srun: error: n1: task 0: Exited with exit code 1\nslurmstepd: error: *** STEP 3.0 ON n1 CANCELLED AT 2024\n"
    )
    assert findings(TRACEBACK + "AssertionError: too slow\n" + slurm)[0].kind == "check_refused"


LAST_WORDS = [
    "terminate called without an active exception",
    "docker: Error response from daemon: OCI runtime create failed: no such device",
    "mpirun detected that one or more processes exited with non-zero status, thus causing the job to be terminated.",
    "  Warning  BackoffLimitExceeded  4s  job-controller  Job has reached the specified backoff limit",
    "LLVM ERROR: Symbol not found",
    "[FATAL] failed to load the model",
    "2025-01-01 10:00:00,000 - train - CRITICAL - giving up",
    "Training failed: no checkpoint",
    "srun: fatal: two limits of memory",
]


@pytest.mark.parametrize("line", LAST_WORDS)
def test_a_log_that_ends_in_words_of_a_shell_a_scheduler_or_a_logger_is_never_silent(line: str, findings: Of) -> None:
    for before in ("loading\n", "".join(STEP.format(i) for i in range(1, 5))):
        assert [found.cause for found in findings(before + line + "\n")] == ["unknown"], before


def test_an_error_that_a_program_goes_on_after_is_not_the_end(findings: Of) -> None:
    line = "ERROR metrics: push failed\n"
    assert findings("loading\n" + line)
    assert not findings("loading\n" + line + "INFO serving\n")
    assert not findings("loading\n" + line + "Saved model.pt\n")
    assert not findings("loading\nERROR metrics: push failed, retrying\n")
    assert not findings(WELL + line)


GENERAL_AND_SPECIFIC = [
    ("ValueError: DeepSpeed Zero-3 is not compatible with `low_cpu_mem_usage=True`", "ds_zero3_device_map"),
    ("ValueError: reward and critic are mutually exclusive", "bad_arguments"),
    ("ImportError: cannot import name 'HybridCache' from 'transformers' (/opt/site-packages/t.py)", "package_versions"),
    ("ImportError: cannot import name 'Old' from 'peft.utils' (/opt/site-packages/p.py)", "package_versions"),
    ("TypeError: LLM.__init__() got an unexpected keyword argument 'worker'", "package_versions"),
    ("ModuleNotFoundError: No module named 'mpi4py'", "mpi4py_missing"),
    ("FileNotFoundError: [Errno 2] No such file or directory: 'pdsh'", "pdsh_missing"),
    ("FileNotFoundError: [Errno 2] No such file or directory: '/d/x.jsonl'", "file_missing"),
]


@pytest.mark.parametrize(("line", "cause"), GENERAL_AND_SPECIFIC, ids=range(len(GENERAL_AND_SPECIFIC)))
def test_a_general_rule_names_what_no_signature_of_its_own_explains(line: str, cause: str, findings: Of) -> None:
    assert kind(findings(TRACEBACK + line + "\n")[0]) == cause


def test_an_exception_that_its_process_caught_and_went_on_after_is_not_the_cause(findings: Of) -> None:
    caught, went_on = TRACEBACK + "ModuleNotFoundError: No module named 'apex'\n", "INFO loading\n" * 12
    last = TRACEBACK + "KeyError: 'phase'\n"
    assert [kind(f) for f in findings(caught + went_on + last)] == ["code_error", "package_missing"]
    chain = "\nDuring handling of the above exception, another exception occurred:\n\n"
    assert findings(caught + chain + went_on + last)[0].cause == "package_missing"
    assert findings(caught + last)[0].cause == "package_missing"  # two ranks that died one after the other


def test_a_keyword_that_a_library_refuses_to_a_library_is_of_versions_and_a_users_own_is_not(findings: Of) -> None:
    line = "TypeError: Steps.run() got an unexpected keyword argument 'phase'\n"
    assert findings(TRACEBACK + line)[0].kind == "code_error"
    library = TRACEBACK.replace("/data/work/train.py", "/opt/env/lib/python3.11/site-packages/tool/loop.py")
    assert findings(library + line)[0].cause == "package_versions"


def test_what_a_wrapper_names_before_a_line_is_no_part_of_it(findings: Of) -> None:
    for prefix in ("[stderr]", "stderr: "):
        assert findings(f"{prefix}ModuleNotFoundError: No module named 'einops'\n")[0].cause == "package_missing"


def test_a_number_in_a_text_is_no_code_of_a_device(findings: Of) -> None:
    assert not findings("0.92175 sample: patent claims other than the 0.507011\n")
    assert findings("E39999: Inner Error! error code is 507011\n")[0].cause == "ascend_error"


WORDINGS = [
    ("'llamafactory-cli' 不是内部或外部命令，也不是可运行的程序", "node_env_differs"),
    ("/var/spool/job/script: line 3: some_tool: command not found", "node_env_differs"),
    ("zsh: command not found: accelerate", "node_env_differs"),
    ("ImportError: No module named swift.llm", "package_missing"),
    ("RuntimeError: No HIP GPUs are available", "cuda_not_available"),
    ("HW Exception by GPU node-5 (Agent handle: 0x55) reason :GPU Hang", "gpu_hw_error"),
    ("RuntimeError: HIP error: hipErrorLaunchFailure", "cuda_kernel_fault"),
    ("AttributeError: 'GRPOEnvTrainer' object has no attribute 'llm'", "trl_api_changed"),
    ("AttributeError: 'generator' object has no attribute 'generate'", "package_versions"),
    ("AttributeError: 'DeepSpeedZeroOptimizer_Stage3' object has no attribute 'train'", "package_versions"),
    ("AttributeError: 'DynamicCache' object has no attribute 'seen_tokens'", "package_versions"),
    ("ValueError: Unknown task: sft.", "bad_arguments"),
    ("ValueError: You selected an invalid strategy name: `strategy='dp'`.", "bad_arguments"),
    ("AssertionError: sequence parallelism needs --tensor-model-parallel-size above 1", "bad_arguments"),
    ("ValueError: eval_steps must be greater than 0", "bad_arguments"),
    ("srun: error: Unable to allocate resources: User's group not permitted to use this partition", "bad_arguments"),
    (
        "pyarrow.lib.ArrowInvalid: Could not convert '-0.2' with type str: tried to convert to double",
        "dataset_columns_mismatch",
    ),
    ("IndexError: piece id is out of range.", "token_id_out_of_range"),
    ("ValueError: optimizer got an empty parameter list", "no_grad_checkpointing"),
    (
        "RuntimeError: source and destination dtypes match, got Half for the destination and Float for the source.",
        "tensors_apart",
    ),
    ("RuntimeError: DataLoader worker (pid(s) 71) exited unexpectedly", "host_memory_insufficient"),
    ("RuntimeError: mat1 and mat2 shapes cannot be multiplied (80x512 and 1x393216)", "quantized_model"),
    ("RuntimeError: mat1 and mat2 shapes cannot be multiplied (80x512 and 0x512)", "ds_zero3_param_not_gathered"),
    ("AssertionError: assert quant_state is not None", "quantized_model"),
    ("TypeError: __init__() got an unexpected keyword argument 'prediction_loss_only'", "transformers_arg_removed"),
    ("libcudart.so.11.0: cannot open shared object file: No such file or directory", "package_versions"),
    ("ImportError: /env/libcudart.so.9.0: version `libcudart.so.9.0' not found (required by x)", "package_versions"),
    ("Fatal Python error: Bus error", "shm_too_small"),
    ("RuntimeError: Cannot find sufficient samples, consider increasing dataset size.", "empty_dataset"),
    ("RuntimeError: CUDA error: unknown error", "driver_not_working"),
    (
        "ValueError: DistributedDataParallel device_ids and output_device arguments only work with",
        "ds_zero3_device_map",
    ),
    ("hydra.errors.InstantiationException: Top level config has to be OmegaConf DictConfig", "bad_arguments"),
    ("ValueError: The model did not return a loss from the inputs, only: logits", "batch_not_padded"),
    ("***    MPI_ERRORS_ARE_FATAL (processes in this communicator will now abort)", "unknown"),
    ("ValueError: 14 attention heads must be divisible by tensor parallel size (4).", "parallel_sizes_mismatch"),
    (
        "RuntimeError: Failed to import a.b because of the following error:\nNo module named 'vllm.lora'",
        "package_versions",
    ),
    ("httpx.ConnectError: [Errno 101] Network is unreachable", "hub_access"),
    ("NameError: name 'phase' is not defined", "name_undefined"),
    ("ValueError: no-op", "code_error"),
    ("TypeError: 'NoneType' object is not subscriptable", "code_error"),
    ("AttributeError: 'NoneType' object has no attribute 'shape'", "code_error"),
]


IPYTHON = "TypeError      Traceback (most recent call last)\nFile ~/env/site-packages/tool/loop.py:2, in run(a)\n"


def test_a_step_that_tells_the_run_time_so_far_is_no_end_of_the_run(findings: Of) -> None:
    step = "{'loss': 0.1, 'epoch': 2.36, 'train_runtime': 37129.489, 'train_tokens_per_second': 15166.552}\n"
    assert findings(3 * step + "ERROR: training failed\n")[0].cause == "unknown"
    assert not findings(3 * step)


def test_a_refusal_is_told_where_the_log_lost_its_frames_and_in_a_users_own_code(findings: Of) -> None:
    line = "NotImplementedError: Iterable datasets are not yet supported in GRPOTrainer.\n"
    assert findings(f"[rank0]: {line}")[0].kind == "check_refused"
    own = 'Traceback (most recent call last):\n  File "/data/work/train.py", line 7, in main\n    go()\n'
    assert findings(own + "NotImplementedError: my loss is not yet supported\n")[0].kind == "check_refused"


def test_a_frame_of_a_notebook_tells_a_library_from_a_users_own_code(findings: Of) -> None:
    line = "---> 2 step(phase=1)\n\nTypeError: step() got an unexpected keyword argument 'phase'\n"
    assert findings(IPYTHON + line)[0].cause == "package_versions"
    assert findings(IPYTHON.replace("site-packages/", "") + line)[0].kind == "code_error"


def test_a_program_run_from_a_clone_of_its_repository_is_no_users_own_code(findings: Of) -> None:
    cloned = TRACEBACK.replace("/data/work/train.py", "/root/LLaMA-Factory/src/llamafactory/hparams/parser.py")
    line = "ValueError: `neat_packing` is only supported in sft.\n"
    assert findings(cloned + line)[0].cause == "bad_arguments"


def test_a_thread_that_loses_its_connection_while_the_process_ends_is_no_failure(findings: Of) -> None:
    thread = "Exception in thread Thread-1 (_pin_memory_loop):\n" + TRACEBACK
    assert not findings(WELL + thread + "ConnectionResetError: [Errno 104] Connection reset by peer\n")


def test_an_exception_of_the_thread_that_answers_is_a_failure_where_nothing_trains(findings: Of) -> None:
    assert findings("loading\nException in thread Thread-2 (generate):\n" + TRACEBACK + "ValueError: no answer fits\n")


def test_what_someone_typed_after_the_end_does_not_hide_the_last_words(findings: Of) -> None:
    last = "main: error: unable to do it\n"
    for prompt in ("$ ", "root@gpu-1:~# ", "(env) anna@box:~/x$ ", "!", "C:\\work>"):
        typed = "".join(f"{prompt}{words}\n" for words in ("ls -l", "pip list", "nvidia-smi"))
        assert findings("loading\n" + last + typed.replace("\n", "\ntotal 8\nsaved 1\n")), prompt


def test_a_title_leaves_out_what_the_log_does_not_give(findings: Of) -> None:
    (found, *_) = findings(TRACEBACK + "FileNotFoundError: [Errno 2] No such file or directory: 'ffmpeg'\n")
    assert (found.cause, found.title) == (
        "package_missing",
        "A Python package is not installed where the run was started",
    )


def test_a_replica_that_its_launcher_names_before_a_line_is_no_part_of_it(findings: Of) -> None:
    lines = [*TRACEBACK.splitlines(), "NameError: name 'phase' is not defined"]
    (found,) = findings("".join(f"trainer/{rank} {line}\n" for line in lines for rank in (0, 1)))
    assert (kind(found), found.rank) == ("name_undefined", 0)


@pytest.mark.parametrize(("line", "cause"), WORDINGS, ids=range(len(WORDINGS)))
def test_a_wording_that_strangers_logs_held_is_named(line: str, cause: str, findings: Of) -> None:
    assert kind(findings((TRACEBACK if "Error: " in line else "") + line + "\n")[0]) == cause


def test_a_readers_end_of_file_is_not_what_its_dead_child_died_of(findings: Of) -> None:
    log = "[12-16 14:27:10] Exit code: -9\n" + TRACEBACK + "EOFError\n"
    assert findings(log)[0].cause == "host_memory_insufficient"
    assert findings(TRACEBACK + "EOFError\n")[0].cause == "unknown"


@pytest.mark.parametrize(
    "said",
    [
        "Engine core initialization failed. See root cause above. Failed core proc(s): {}",
        "One or more workers failed",
        "Ray workers have not started successfully.",
        "Server process terminated unexpectedly during startup",
        "Background loop is not running. If it was running, inspect the output to find the stacktrace of the error",
    ],
)
def test_a_parent_that_only_tells_of_a_dead_child_does_not_hide_what_it_died_of(said: str, findings: Of) -> None:
    library = 'Traceback (most recent call last):\n  File "/opt/site-packages/tool/core.py", line 1, in run\n    go()\n'
    died = "RuntimeError: phase.weight: wanted 4 heads"
    (found,) = findings(library + f"RuntimeError: {said}\nloading\n" + library + died + "\n")
    assert found.evidence.splitlines()[0] == died


def test_a_request_that_failed_is_no_failure_of_the_server_that_answers_the_next(findings: Of) -> None:
    failed = "ERROR 08-14 13:42:42 [serving.py:1] ValueError: The prompt has too many tokens\n"
    answered = 'INFO:     10.0.0.5:41238 - "POST /v1/completions HTTP/1.1" 200 OK\n'
    assert not findings(failed + answered)
    assert findings(answered + failed)[0].cause == "unknown"
    assert findings(OOM + answered)[0].cause == "cuda_oom"
    refused = "ERROR 08-14 13:42:42 [serving.py:1] jinja2.exceptions.TemplateError: After the tools an answer comes\n"
    assert findings(answered + refused)[0].cause == "chat_template_missing"
    assert not findings(refused + "[GIN] 2025/08/02 - 10:22:41 | 200 | 6.1s | 127.0.0.1 | POST /api/chat\n")


PARENTS = [
    "2025-10-31 03:11:02,475 - Tuner - INFO - [rank7]: ",
    "[2025-02-18 18:14:57] [INFO] ",
    "2024-09-26T06:58:55,209 [INFO ] W-9000-model_1.0-stdout MODEL_LOG - ",
]


@pytest.mark.parametrize("parent", PARENTS, ids=range(len(PARENTS)))
def test_what_a_parent_logs_of_its_child_is_read_as_the_childs_own_words(parent: str, findings: Of) -> None:
    lines = [*TRACEBACK.splitlines(), "AssertionError"]
    (found,) = findings("".join(parent + line + "\n" for line in lines))
    assert (kind(found), found.evidence.splitlines()[0]) == ("code_error", "AssertionError")
    assert not findings(parent + "loading the Error: table\n" + parent + "step 1\n")


LIBRARY = "/opt/env/lib/python3.11/site-packages/tool/loop.py"
BY_RULE = [  # the file of the last frame, its line of code, the exception
    ("/data/work/train.py", "phase = plan['phase']", "KeyError: 'phase'", "code_error"),
    ("/data/work/train.py", "text = sample['body']", "KeyError: 'body'", "dataset_columns_mismatch"),
    ("/data/work/collate_rows.py", "ids[0]", "IndexError: list index out of range", "code_error"),
    ("/data/work/train.py", "assert x.shape == y.shape", "AssertionError", "tensor_shapes"),
    ("/data/work/train.py", "assert phase in plan", "AssertionError", "code_error"),
    (
        "/data/work/train.py",
        "rows, width = x.size()",
        "ValueError: too many values to unpack (expected 2)",
        "tensor_shapes",
    ),
    (
        "/data/work/train.py",
        "a, b = s.split('=')",
        "ValueError: not enough values to unpack (expected 2)",
        "code_error",
    ),
    (LIBRARY, "a, b = self.step()", "ValueError: too many values to unpack (expected 2)", "package_versions"),
    ("/data/work/train.py", "history.pop()", "IndexError: pop from empty list", "code_error"),
    (
        LIBRARY,
        "raise ConnectError(",
        "redis.exceptions.ConnectionError: Error 111 connecting to a:1.",
        "download_failed",
    ),
    (LIBRARY, "raise RuntimeError(", "RuntimeError: server launch failed", "unknown"),
    (LIBRARY, "raise LinAlgError(", "numpy.linalg.LinAlgError: SVD did not converge", "unknown"),
    (LIBRARY, "raise Limit(", "math_verify.errors.TimeoutException: Operation timed out!", "unknown"),
    (LIBRARY, "raise ApiError(", "swanlab.error.ApiError: 404 Not Found", "download_failed"),
    (
        LIBRARY,
        "_dlopen(name)",
        "OSError: /opt/libphase.so: cannot open shared object file: No such file",
        "package_versions",
    ),
    (
        LIBRARY,
        "processor.image_processor",
        "AttributeError: 'A' object has no attribute 'image_processor'",
        "processor_missing",
    ),
    (LIBRARY, "assert x.dtype == y.dtype", "AssertionError", "check_refused"),
    (LIBRARY, "assert not p.users, p.summary()", "AssertionError: {'id': 0, 'requires_grad': True}", "check_refused"),
    (LIBRARY, "plan.phase", "AttributeError: 'NoneType' object has no attribute 'phase'", "unknown"),
    (LIBRARY, "plan[key]", "KeyError: 'phase'", "unknown"),
    (LIBRARY, "go()", "RuntimeError: CUDA error: phase not permitted", "unknown"),
    ("/data/work/train.py", "port = os.environ['PEER_PORT']", "KeyError: 'PEER_PORT'", "launch_config_incomplete"),
    (LIBRARY, "go()", "TypeError: 'Plan' object is not callable", "package_versions"),
    (LIBRARY, "raise ValueError(", "ValueError: a draft cannot follow a chunk", "check_refused"),
    (LIBRARY, "assert phase is not None", "AssertionError", "check_refused"),
    (LIBRARY, "raise RuntimeError(", "RuntimeError: phase.0 is not in the checkpoint", "state_dict_mismatch"),
    (LIBRARY, "yaml.parse(it)", "tyro.PhaseError: none", "bad_arguments"),
    (LIBRARY, "next(rows)", "StopIteration", "empty_dataset"),
    (LIBRARY, "get()", "httpx.ProtocolPhase: bad", "download_failed"),
    (LIBRARY, "x + y", "RuntimeError: phase 3 before phase 2", "unknown"),
]


@pytest.mark.parametrize(("file", "source", "error", "cause"), BY_RULE, ids=range(len(BY_RULE)))
def test_an_exception_that_no_signature_knows_is_named_by_class_words_and_place(
    file: str, source: str, error: str, cause: str, findings: Of
) -> None:
    log = f'Traceback (most recent call last):\n  File "{file}", line 7, in step\n    {source}\n{error}\n'
    (found,) = findings(log)
    assert (kind(found), found.confidence) == (cause, "low" if found.cause == "unknown" else "medium")
    assert Path(file).name in found.evidence and found.by_rule is (cause != "unknown")


def test_a_rule_looks_past_frames_that_only_pass_on_what_another_did(findings: Of) -> None:
    place = LIBRARY.replace("tool/loop.py", "torch/nn/modules/module.py")
    passed = f'  File "{place}", line 9, in __getattr__\n    raise AttributeError(\n'
    (found,) = findings(TRACEBACK + passed + "AttributeError: 'int' object has no attribute 'phase'\n")
    assert found.kind == "code_error" and "train.py:7" in found.title


def test_an_error_far_above_an_exception_that_no_signature_knows_comes_after_it(findings: Of) -> None:
    warned, raised = "srun: error: gpu1: task 3: Killed\n", TRACEBACK + "ValueError: phase\n"
    near, far = findings(warned + raised), findings(warned + "working\n" * 60 + raised)
    assert [kind(near[0]), kind(far[0])] == ["host_memory_insufficient", "code_error"]
    assert {f.cause for f in near} == {f.cause for f in far}


def test_what_a_program_lists_as_possible_reasons_is_no_evidence(findings: Of) -> None:
    died = "Worker exit detail: Worker unexpectedly exits with a connection error code 2. End of file. "
    listed = "There are some potential root causes. (1) The process is killed by SIGKILL. (2) SIGSEGV or others.\n"
    assert [f.cause for f in findings(died + listed)] == ["ray_node_lost"]


def test_a_rule_never_hides_a_cause_that_a_signature_knows(findings: Of) -> None:
    first = TRACEBACK + "KeyError: 'phase'\n"
    assert findings(first + OOM)[0].cause == "cuda_oom"


ASIDE = [  # a line that says something of its own, and does not lead to a slip of the program's logic that follows it
    "WARNING: Could not find the bitsandbytes CUDA binary at 'libbitsandbytes_cuda124.so'\n",
    "node1:12:12 [0] misc/ibvwrap.cc:66 NCCL WARN Call to ibv_open_device failed\n",
    "(MaxRetryError('huggingface.co: Network is unreachable')) thrown while requesting HEAD https://huggingface.co/a/b\n",
]


@pytest.mark.parametrize("aside", ASIDE, ids=range(len(ASIDE)))
@pytest.mark.parametrize("slip", ["ZeroDivisionError: division by zero", "NameError: name 'phase' is not defined"])
def test_a_line_aside_is_not_the_cause_of_a_slip_that_follows_it(aside: str, slip: str, findings: Of) -> None:
    found = findings(aside + TRACEBACK + slip + "\n")
    assert kind(found[0]) in ("code_error", "name_undefined")
    assert all(later.confidence != "high" for later in found[1:])


def test_how_a_run_of_unknown_cause_ended_is_said_as_unknown(findings: Of) -> None:
    (found,) = findings(TRACEBACK + "KeyError: 'phase'\n")
    assert (found.cause, found.kind, found.confidence) == ("unknown", "code_error", "low")
    assert "train.py:7" in found.title


LOSSES = [10.8, 9.6, 8.1, 7.0, 6.2, 5.6, 5.1, 4.8]


@pytest.mark.parametrize("form", ["iter {i}: loss {loss:.4f}, time 2ms\n", "{{'loss': {loss:.3f}, 'epoch': 0.1}}\n"])
def test_a_loss_that_went_up_for_good_is_fatal_and_one_that_recovers_or_is_noise_is_not(
    form: str, findings: Of
) -> None:
    def of(losses: list[float]) -> list[str]:
        return [f.cause for f in findings("".join(form.format(i=i, loss=loss) for i, loss in enumerate(losses)))]

    assert of([*LOSSES, 270.4, 182.7, 121.9, 96.7, 68.6]) == ["loss_diverged"]
    assert of([*LOSSES, 270.4, 182.7, 96.7, 30.1, 9.6]) == []
    assert of([loss / 100 for loss in (*LOSSES, 270.4, 182.7, 121.9, 96.7, 68.6)]) == []  # noise of a small loss
    assert of([*LOSSES, *reversed(LOSSES)]) == []


NAN = [
    "Step\tTraining Loss\n5\t2.7142\n10\tnan\n15\tnan\n",
    "Step \t Training Loss \t Validation Loss\n500 \t 0.000000 \t nan\n",
]


@pytest.mark.parametrize("table", NAN)
def test_a_notebooks_table_whose_loss_is_nan_is_fatal_and_one_that_goes_on_is_progress(
    table: str, findings: Of
) -> None:
    assert findings(table)[0].cause == "loss_nan"
    assert not findings("Step\tTraining Loss\tValidation Loss\tWer\n500\t1.2142\t1.1\tnan\n")
    assert findings(table + TRACEBACK + "KeyError: 'phase'\n")[0].kind == "code_error"
    rows = "".join(f"{step}\t1.{step}0000\n" for step in range(10, 60, 10))
    assert not findings(OOM + "Step\tTraining Loss\n" + rows)


def test_of_two_exceptions_of_which_one_follows_from_the_other_the_one_with_a_name_comes_first(findings: Of) -> None:
    first = TRACEBACK.replace("/data/work", "/opt/env/lib/python3.11/site-packages/tool") + "KeyError: 'phase'\n"
    handled = "\nDuring handling of the above exception, another exception occurred:\n\n"
    second = TRACEBACK + "ModuleNotFoundError: No module named 'phase'\n"
    assert findings(first)[0].cause == "unknown"
    assert findings(first + handled + second)[0].cause == "package_missing"
