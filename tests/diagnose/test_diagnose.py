"""diagnose on our own logs, on hostile input, as a script, and in a run directory."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from finlm.base.rundir import RunDir
from finlm.diagnose import command, read
from finlm.diagnose import signatures as diagnose_signatures
from finlm.diagnose.findings import DIED, PLACEHOLDER
from finlm.diagnose.findings import diagnose as match
from finlm.diagnose.read import scan
from finlm.doctor import preflight
from finlm.recipe.schema import Recipe
from finlm.record.report import run_page

from helpers import ROOT, finlm

LOGS = sorted((ROOT / "tests/diagnose/logs").glob("*.log"))
SHARED = ROOT.parent / "shared"
SIGNATURES = diagnose_signatures.read_yaml(diagnose_signatures.SIGNATURES)


@pytest.mark.parametrize(
    ("regex", "literals"),
    [
        ("[^]]abcd", ["abcd"]),
        (r"[\]x]abcd", ["abcd"]),
        (r"(abcd[\])]|efgh) i", ["abcd", "efgh"]),
        ("(?:[]abcd]|[^)(])efgh", ["efgh"]),
    ],
)
def test_a_bracket_within_a_set_of_characters_closes_neither_the_set_nor_a_group(
    regex: str, literals: list[str]
) -> None:
    assert diagnose_signatures.literals(regex) == literals


FILE_SUFFIXES = {"txt", "json", "yaml", "py", "sh", "so", "model", "pt", "log"}
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"


def causes(*paths: Path) -> list[str]:
    return [finding.kind or finding.cause for finding in command.of_logs([str(path) for path in paths])]


@pytest.mark.parametrize("log", LOGS, ids=lambda path: path.stem)
def test_our_own_logs_are_diagnosed(log: Path) -> None:
    wanted = log.name.split(".")[0]
    assert causes(log)[:1] == ([] if wanted == "none" else [wanted])


# Lines that programs print, by the cause that they name; "any" must not be silent, "none" is healthy.
ROWS = [row.split("\t") for row in Path(__file__).with_name("wordings.tsv").read_text("utf-8").splitlines()]
RAISED = (
    'Traceback (most recent call last):\n  File "/data/work/train.py", line 7, in main\n    go()\n'
    '  File "/opt/env/lib/python3.10/site-packages/somelib/core.py", line 11, in run\n    self.go()\n'
)


@pytest.mark.parametrize("cause", sorted({row[0] for row in ROWS}))
def test_the_wordings_of_a_cause_are_named(cause: str, tmp_path: Path) -> None:
    wrong, log = [], tmp_path / "x.log"
    for text in (row[1].replace("\\n", "\n") for row in ROWS if row[0] == cause):
        raised = re.match(r"[\w.]*(?:Error|Exception|Interrupt|Exit|Failed|Empty)\b", text) and cause != "none"
        log.write_text(f"loading\n{RAISED if raised else ''}{text}\n", encoding="utf-8")
        first = causes(log)[:1]
        if first != [cause] and not (cause == "any" and first) and (cause != "none" or first):
            wrong.append((text, first))
    assert not wrong


@pytest.mark.parametrize("kept", [read.TAIL_BYTES, 300])
def test_what_follows_a_hit_is_found_by_one_search_of_the_tail(kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "TAIL_BYTES", kept)
    prefilter, seen = diagnose_signatures.Signatures().prefilter, set()
    for path in LOGS:
        with path.open("rb") as file:
            log = scan(file, str(path), prefilter)
        for hit in log.hits:
            follows = DIED.search(log.rest(hit.last).encode()) is not None
            assert log.is_followed_by(DIED, hit.last) == follows, (path.name, hit.line)
            seen.add(follows)
    assert seen == {True, False}


def test_the_last_line_of_a_shape_is_known_though_only_its_first_lines_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read, "BLOCK_BYTES", 1 << 12)
    lines = [f"CUDA out of memory, try {i}\n" if i % 9 == 4 else f"step {i}\n" for i in range(4000)]
    (path := tmp_path / "x.log").write_text("".join(lines))
    with path.open("rb") as file:
        log = scan(file, "x", diagnose_signatures.Signatures().prefilter)
    kept = [hit for hit in log.hits if "memory" in hit.text]
    assert len(kept) < 9 and log.lines == len(lines)
    assert max(hit.last for hit in kept) == len("".join(lines[: max(i for i in range(4000) if i % 9 == 4)]))


def test_every_signature_has_a_log_texts_in_two_languages_and_known_names() -> None:
    assert {entry["id"] for entry in SIGNATURES} <= {log.name.split(".")[0] for log in LOGS}
    signatures = diagnose_signatures.Signatures()  # raises where an expression has no literal to search for
    for entry in SIGNATURES:
        groups: set[str] = set()
        for regex in [p.regex for p in signatures.all[entry["id"]].patterns] + entry.get("facts", []):
            groups |= set(re.compile(regex).groupindex)
        groups |= {name for p in signatures.all[entry["id"]].patterns for name, _ in p.says} | {"foreign"}
        if not entry["patterns"]:  # facts of endings.yaml, and of read.diverged
            groups |= {"error", "why", "place", "package", "lowest", "last"}
        for key in ("title", "explain", "fix", "confirm"):
            assert set(entry[key]) == {"en", "zh"}, (entry["id"], key)
            for text in entry[key].values():
                names = set(PLACEHOLDER.findall("\n".join(text) if isinstance(text, list) else text))
                assert names <= groups, (entry["id"], names - groups)
        assert len(entry["fix"]["en"]) == len(entry["fix"]["zh"]), entry["id"]
        assert entry["threads"] or entry["id"] == "unknown"


def test_doctor_checks_named_by_signatures_exist() -> None:
    checks = {check for names, _ in preflight.COLUMNS.values() for check in names}
    assert not {(entry["id"], entry["doctor"]) for entry in SIGNATURES if entry["doctor"] not in {None, *checks}}


def test_recipe_keys_in_fixes_exist() -> None:
    """`section.name` followed by a colon or the closing backtick is a key of the recipe, or it is a file's name."""
    wrong = []
    for entry in SIGNATURES:
        for step in entry["fix"]["en"] + entry["fix"]["zh"]:
            for section, name in re.findall(r"`([a-z]+)\.([A-Za-z_]+)(?:\.\w+)*(?=[:`])", step):
                field = Recipe.model_fields.get(section)
                keys = getattr(field.annotation, "model_fields", {name}) if field else FILE_SUFFIXES
                if name not in keys:
                    wrong.append((entry["id"], f"{section}.{name}"))
    assert not wrong


def test_the_pages_are_current() -> None:
    assert diagnose_signatures.main(["--check"]) == 0


def test_the_rank_that_died_first_comes_before_its_witnesses(tmp_path: Path) -> None:
    """Host b ran out of memory at 10:00:05; host a, first in the list of files, only lost its connection."""
    witness = "[rank0]:[E611 10:00:06.000001 ProcessGroupNCCL.cpp:1] ncclRemoteError: A call failed possibly due to a "
    (tmp_path / "a.0.log").write_text(witness + "network error or a remote process exiting prematurely.\n")
    (tmp_path / "b.1.log").write_text("2025-06-11 10:00:05,000 step 7\n[rank1]: " + OOM)
    findings = command.of_logs([str(tmp_path / "a.0.log"), str(tmp_path / "b.1.log")])
    assert [finding.cause for finding in findings] == ["cuda_oom", "nccl_peer_died"]
    assert (findings[0].host, findings[0].rank, findings[0].facts["wanted"]) == ("b", 1, "2.00 GiB")


def test_of_two_failures_the_earlier_one_is_the_cause_whatever_the_order_of_files(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("2025-06-11 10:00:09,000 end\nOSError: [Errno 28] No space left on device\n")
    (tmp_path / "b.log").write_text("2025-06-11 10:00:02,000 end\n" + OOM)
    assert causes(tmp_path / "a.log", tmp_path / "b.log") == ["cuda_oom", "disk_full"]


def test_an_unknown_error_of_one_rank_beats_the_echoes_of_the_others(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text(
        "[rank1]: RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:598] Connection closed by peer "
        "[10.0.0.4]:2211\n[rank0]: Traceback (most recent call last):\n[rank0]: PhaseError: phase 3 before phase 2\n"
    )
    (finding, *_) = command.of_logs([str(log)])
    assert finding.cause == "unknown" and "PhaseError: phase 3 before phase 2" in finding.evidence


def test_a_ranks_own_exception_comes_before_the_timeout_of_one_that_waited_for_it(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    timeout = "[rank0]:[E924 10:12:33.123456789 ProcessGroupNCCL.cpp:616] [Rank 0] Watchdog caught collective operation"
    timeout += " timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600012 milliseconds.\n"
    raised = "[rank{}]: Traceback (most recent call last):\n[rank{}]: ValueError: bad sample in shard 17\n"
    log.write_text(timeout + raised.replace("{}", "1"))
    (finding, other) = command.of_logs([str(log)])
    assert (finding.rank, other.cause) == (1, "nccl_collective_timeout")
    assert "ValueError: bad sample in shard 17" in finding.evidence
    log.write_text(timeout + raised.replace("{}", "0"))  # what a rank says after its own timeout follows from that
    assert causes(log)[0] == "nccl_collective_timeout"


def test_colours_prefixes_and_redrawn_bars_hide_nothing(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_bytes(
        b"\r  0%|   | 0/9\r 11%|#  | 1/9 [00:01<00:08,  1.0s/it]\r2025-06-11T10:00:00.1Z stderr F [rank3]: "
    )
    with log.open("ab") as file:
        file.write(b"\x1b[31m" + OOM.encode())
    (finding,) = command.of_logs([str(log)])
    assert (finding.rank, finding.line) == (3, 1) and finding.evidence.startswith("torch.OutOfMemoryError")


@pytest.mark.parametrize(
    "noise",
    [os.urandom(3_000_000), b"ab" * 5_500_000, b"\xff\xfe\xc3\x28" * 100_000 + b"\n", b"\0" * 2_000_000],
    ids=["garbage", "endless line", "broken UTF-8", "zeros"],
)
def test_hostile_bytes_do_no_harm(noise: bytes, tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_bytes(noise + b"\n" + OOM.encode() + noise)
    assert causes(log) == ["cuda_oom"]
    log.write_bytes(noise)
    assert causes(log) == []


def test_memory_does_not_grow_with_the_log(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    block = b"".join(b"{'loss': %d.%d, 'grad_norm': 0.%d, 'epoch': 0.1}\n" % (i % 9, i, i * 7) for i in range(40_000))
    with log.open("wb") as file:
        for _ in range(60):
            file.write(block)
        file.write(OOM.encode())
    code = (
        "import sys; from pathlib import Path; from finlm.diagnose import command\n"
        "code = command.run([sys.argv[1]], 'en', False); "
        # Not ru_maxrss: a child begins with that of the process it was forked from.
        "print(Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0]); sys.exit(code)"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-c", code, str(log)]
    result = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert result.returncode == 1, result.stderr
    assert int(result.stdout.splitlines()[-1]) < 300_000  # kB


def test_the_command_prints_text_or_json_and_its_exit_code_tells(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text(OOM)
    result = finlm("diagnose", log, "--json")
    assert result.returncode == 1
    (finding,) = json.loads(result.stdout)["findings"]
    assert finding["cause"] == "cuda_oom" and finding["fatal"] and finding["line"] == 1
    assert finding["evidence"] in OOM and "batch.micro_batch" in finding["fix"]
    assert "显存不足" in finlm("diagnose", log, "--lang", "zh").stdout
    log.write_text("{'loss': 2.1, 'epoch': 0.1}\n")
    assert finlm("diagnose", log).returncode == 0
    missing = finlm("diagnose", tmp_path / "none.log")
    assert missing.returncode == 2 and "none.log" in missing.stderr and "Traceback" not in missing.stderr


def test_without_a_log_nothing_is_called_healthy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.log").touch()
    (tmp_path / "none").mkdir()
    for path in (tmp_path, tmp_path / "none", tmp_path / "empty.log", "/dev/null"):
        assert command.run([str(path)], "en", False) == 2
        printed = capsys.readouterr()
        assert not printed.out and f"error: no logs in {path}\n" in printed.err
    (tmp_path / "one.log").write_text("loading\nhalf a line")
    assert command.run([str(tmp_path)], "en", False) == 0
    assert capsys.readouterr().out == "2 log(s), 2 line(s), nothing fatal\n"


def test_a_reader_that_stops_early_gets_no_traceback(tmp_path: Path) -> None:
    """`finlm diagnose LOG | head -1`: the pipe is closed before anything is written."""
    (tmp_path / "x.log").write_text(OOM)
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "finlm", "diagnose", tmp_path / "x.log"]
    try:
        result = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False)
    finally:
        os.close(writer)
    assert (result.returncode, result.stderr) == (1, b"")


def test_a_run_directory_gives_its_own_numbers_and_keeps_the_diagnosis(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "env").mkdir()
    (tmp_path / "recipe.yaml").write_text("batch: {micro_batch: 8}\nhosts: {}\n")
    (tmp_path / "plan.json").write_text('{"micro_batch": 8, "recompute": "none"}')
    (tmp_path / "env/b.env").write_text("NCCL_SOCKET_IFNAME=bond0\n")
    (tmp_path / "logs/a.0.log").write_text(OOM)
    (finding,) = command.of_run(tmp_path)
    assert "`batch.micro_batch: 4` (now 8)" in finding.fix.splitlines()[0]
    assert json.loads((tmp_path / "diagnosis.json").read_text())["findings"][0]["cause"] == "cuda_oom"
    assert "Out of GPU memory" in run_page.build(RunDir(tmp_path)).read_text(encoding="utf-8")
    (tmp_path / "logs/a.0.log").unlink()
    (tmp_path / "logs/b.1.log").write_text(
        "b:1:1 [0] misc/socket.cc:1 NCCL WARN Bootstrap : no socket interface found\n"
    )
    (finding,) = command.of_run(tmp_path)
    assert "hosts.b.env.NCCL_SOCKET_IFNAME" in finding.fix and "now bond0" in finding.fix


def test_the_second_failure_of_one_cause_is_diagnosed_too(tmp_path: Path) -> None:
    log = tmp_path / "logs/a.0.log"
    log.parent.mkdir()
    log.write_text(OOM)
    before = OOM.count("\n")
    assert command.of_run(tmp_path, since={str(log): before}) == []
    log.write_text(OOM + OOM)
    (finding,) = command.of_run(tmp_path, since={str(log): before})
    (first,) = command.of_run(tmp_path)
    assert (finding.cause, finding.line) == ("cuda_oom", before + first.line)


def test_the_record_of_failures_is_named() -> None:
    file = SHARED / "failures/dev.jsonl"
    if not file.exists():
        pytest.skip(f"{file} is not here")
    signatures = diagnose_signatures.Signatures()
    wrong = []
    for line in file.read_text(encoding="utf-8").splitlines():
        case = json.loads(line)
        log = scan(io.BytesIO(case["log"].encode()), case["id"], signatures.prefilter)
        found = [finding.cause for finding in match([log], signatures)]
        wanted = [] if case["cause_id"] == "none" else [case["cause_id"], *(case.get("also_ok") or [])]
        if (found[:1] and found[0] not in wanted) or bool(found) != bool(wanted):
            wrong.append((case["id"], found))
    assert not wrong


# The errors of the reports that began this: cause, and words of the fix that its author found.
REPORTS = [
    ("000_*", "Duplicate GPU detected", "nccl_duplicate_gpu", "same number of GPUs"),
    ("000_*", "recomputed metadata", "ds_zero3_recompute_mismatch", "use_reentrant"),
    ("001_*", "Duplicate GPU detected", "nccl_duplicate_gpu", "max_colocate_count=1"),
    ("002_*", "unhandled system error", "nccl_unhandled_system_error", "NCCL_IB_DISABLE"),
    ("002_*", "不再运行", "silent_hang_first_collective", "NCCL_SOCKET_IFNAME"),
    ("003_*", "sm_120 is not compatible", "cuda_arch_unsupported", "whl/cu128"),
    ("004_*", "Too many open files", "too_many_open_files", "ulimit -n 4096"),
    ("004_*", "store->get('0') got error", "rdzv_store_peer_reset", "ssh"),
    ("004_*", "Invalid config blocking attribute", "nccl_library_mismatch", "pip uninstall"),
    ("004_*", "NVIDIA-SMI has failed", "driver_not_working", "dkms install"),
    ("004_*", "Default process group has not been initialized", "process_group_not_initialized", "NCCL_SOCKET_IFNAME"),
    ("004_*", "一直卡死", "silent_hang_first_collective", "torch.cuda.nccl.version()"),
    ("004_*", "OOM", "cuda_oom", "zero.offload_param: cpu"),
    ("004_*", "Current loss scale already at minimum", "ds_loss_scale_min", "optim.lr"),
]


@pytest.mark.parametrize(("report", "words", "cause", "fix"), REPORTS, ids=[f"{r[0][:3]}-{r[2]}" for r in REPORTS])
def test_each_error_of_the_reports_is_named_with_its_fix(
    report: str, words: str, cause: str, fix: str, tmp_path: Path
) -> None:
    found = sorted((SHARED / "seeds").glob(report))
    if not found:
        pytest.skip(f"{SHARED / 'seeds' / report} is not here")
    lines = found[0].read_text(encoding="utf-8").splitlines()
    at = next(i for i, line in enumerate(lines) if words in line)
    # The report says "CUDA OOM" in prose; torch's own words stand for its screenshot.
    excerpt = OOM if cause == "cuda_oom" else "\n".join(lines[max(0, at - 1) : at + 4])
    (tmp_path / "x.log").write_text(excerpt, encoding="utf-8")
    (finding, *_) = command.of_logs([str(tmp_path / "x.log")])
    assert finding.cause == cause and fix in finding.fix


def test_lines_that_all_differ_are_searched_by_numpy_and_lose_nothing() -> None:
    signatures = diagnose_signatures.Signatures()
    prefilter = signatures.prefilter
    words = sorted(signatures.by_literal)
    text = "\n".join(
        f"{'zqj ' * (i % 40)}{words[i % len(words)] if i % 7 == 0 else i * i} 字 {i}" for i in range(20_000)
    )
    block = text.encode() + b"\n"
    lines = block.split(b"\n")
    wanted = {lines[i] for i in prefilter.places(lines)}
    found = {block[start:end] for start, end in zip(*prefilter.near(block), strict=True)}
    assert len(block) > 2 * read.GRAM_BYTES and wanted <= found and len(found) < 0.9 * len(lines)


def test_a_failure_in_prose_of_many_blocks_is_found_on_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "BLOCK_BYTES", 4096)
    letters = "abcdefghijklmnopqrstuvwxyz"
    prose = [f"{letters[i % 26]}{letters[i // 26 % 26]}{letters[i // 676]} went by {i}\n" for i in range(3000)]
    text = "".join([*prose[:2000], OOM, *prose[2000:]]).encode()
    log = scan(io.BytesIO(text), "x", diagnose_signatures.Signatures().prefilter)
    (hit,) = [hit for hit in log.hits if "OutOfMemory" in hit.text]
    assert (hit.line, hit.offset) == (2001, sum(map(len, prose[:2000])))
