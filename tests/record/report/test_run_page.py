"""report.html: every number is the run's own, nothing missing becomes 0, nothing from a file becomes markup."""

from __future__ import annotations

import json
import math
import re
import sys
import time
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from finlm import config, prepare
from finlm.base import files, secrets
from finlm.base.rundir import RunDir
from finlm.plan import planner
from finlm.recipe import cluster, recipe, shape
from finlm.record import history, manifest
from finlm.record.report import run_page
from finlm.rows.shards import Shards

QUICKSTART = Path(__file__).resolve().parents[3] / "recipes/quickstart/pretrain.yaml"
EVIL = "<script>alert('x')</script>"
COUNTS = ("rows", "broken", "kept", "held_out", "too_short", "duplicate", "equals_held_out", "bytes", "held_out_bytes")
Make = Callable[..., RunDir]


@pytest.fixture
def make_run(tmp_path: Path) -> Make:
    """A run directory as the pipeline writes it before launch; start(*overrides)."""

    def make(*overrides: str) -> RunDir:
        run = RunDir(tmp_path / "run")
        loaded = recipe.load(QUICKSTART, overrides)
        wanted = loaded.recipe
        plan = planner.make(wanted, cluster.from_hardware(wanted.hardware), shape.of(wanted))
        files.write_text(run.recipe, recipe.dump(wanted))
        files.write_json(run.origins, dict(loaded.origins))
        files.write_json(run.plan, plan.to_json())
        files.write_json(run.ds_config, config.deepspeed_settings(wanted, plan))
        files.write_json(run.doctor, {"findings": []})
        files.write_json(run.data, prepare.summary(prepared(tmp_path / "shards")))
        files.write_json(
            run.manifest,
            manifest.make(wanted, plan, None, command=["python", "-m", "finlm", "train", "r.yaml"]).to_json(),
        )
        return run

    return make


def prepared(directory: Path) -> Shards:
    """Shards without a token, with what a run's data.json is made of."""
    counts = {
        "news": dict(zip(COUNTS, (1200, 3, 1100, 50, 7, 31, 9, 3_000_000, 100_000), strict=True)),
        "exam": dict(zip(COUNTS, (800, 0, 700, 50, 20, 30, 0, 1_000_000, 50_000), strict=True)),
    }
    tokens = {"news": (900_000, 3_000_000), "exam": (500_000, 1_000_000)}
    train = {name: {"tokens": count, "documents": 1, "text_bytes": size} for name, (count, size) in tokens.items()}
    held_out = {name: {"tokens": 30_000, "documents": 50, "text_bytes": 100_000} for name in tokens}
    about: dict[str, Any] = {
        "key": "k",
        "dtype": "uint16",
        "vocab_size": 4096,
        "tokenizer_sha256": "ab",
        "add_bos": True,
    }
    about |= {"bos_id": 1, "eos_id": 2, "shards": [], "totals": {"train": train, "held_out": held_out}}
    files.write_json(directory / "manifest.json", about)
    files.write_json(directory / "documents.json", {"sources": counts, "total": {}, "files": []})
    return Shards(directory)


def start(run: RunDir, step: int = 0) -> None:
    versions = {"torch": "2.13.0", "deepspeed": "0.19.8", "transformers": "5.23.0"}
    run.append_event("start", step=step, world_size=2, device="cpu", parameters=3_300_000, **versions)


def train(run: RunDir, first: int, last: int, **other: Any) -> None:
    for step in range(first, last + 1):
        row = {
            "step": step,
            "loss": 4 + 4 / step,
            "lr": 1e-3,
            "grad_norm": 0.5,
            "loss_scale": None,
            "tokens": 8192,
            "seconds": 0.5,
            "tokens_per_second": 16_384.0,
            "mfu": None,
            "memory_bytes": 700 * 2**20,
        }
        run.append_event("step", **(row | other))


def evaluate(run: RunDir, step: int, news: float, exam: float) -> None:
    sources = {
        name: {"loss": loss, "perplexity": math.exp(loss), "tokens": 1000, "bits_per_byte": loss / 2}
        for name, loss in (("news", news), ("exam", exam))
    }
    mean = (news + exam) / 2
    run.append_event("eval", step=step, loss=mean, perplexity=math.exp(mean), sources=sources)


def finish(run: RunDir, step: int) -> None:
    run.append_event("end", step=step, status="finished", seconds=10.0, exit_code=0)


class Page(HTMLParser):
    """Text of the page by tag, and everything it would load from elsewhere."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.tags: list[str] = []
        self.loads: list[str] = []
        self.words: list[str] = []
        self._is_cell = False
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [value for name, value in attributes if name in ("src", "href") and value]
        if tag == "tr":
            self.rows.append([])
        self._is_cell = tag in ("td", "th") or (self._is_cell and tag not in ("tr", "table"))
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        self._is_cell = self._is_cell and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self._is_cell:
            self.rows[-1][-1] += data
        elif data.strip():
            self.words.append(data.strip())

    def row(self, name: str) -> list[str]:
        """The first table row that begins with name."""
        return next(row for row in self.rows if row and row[0] == name)

    def after(self, name: str) -> str:
        """The text that follows a label."""
        return self.words[self.words.index(name) + 1]


def build(run: RunDir, **options: Any) -> tuple[str, Page]:
    text = run_page.build(run, **options).read_text(encoding="utf-8")
    return text, Page(text)


def chart_data(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="run-data">(.*?)</script>', text)
    assert found
    return {chart["title"]: chart for chart in json.loads(found[1])["charts"]}


def test_a_finished_run_shows_its_own_numbers(make_run: Make) -> None:
    run = make_run()
    start(run)
    evaluate(run, 0, 8.0, 8.4)
    train(run, 1, 40)
    evaluate(run, 40, 4.0, 6.3)
    run.append_event("checkpoint", step=40, path="/r/checkpoints/step-40", bytes=55 * 2**20, seconds=0.5)
    run.append_event("export", path="/r/export", bytes=13 * 2**20)
    finish(run, 40)
    text, page = build(run)
    assert "finished" in page.words
    assert [page.after(name) for name in ("Steps", "Tokens", "Tokens a second", "Peak memory")] == [
        *("40", "328k", "16.4k", "700.0 MiB")
    ]
    assert page.after("Held-out loss") == "8.200 → 5.150"
    assert page.row("news")[:4] == ["news", "8.0000", "4.0000", "50.0 %"]
    assert page.row("exam")[3] == "25.0 %"
    assert page.row("all sources")[1:4] == ["8.2000", "5.1500", "37.2 %"]
    assert page.row("Memory a rank")[2] == "700.0 MiB"
    assert page.row("40")[1:] == ["/r/checkpoints/step-40", "55.0 MiB", "0.5 seconds"]
    data = next(row for row in page.rows if row[:2] == ["news", "1,200"])
    assert data[2:] == ["3", "31", "7", "9", "50", "1,100", "900,000", "3.33"]
    assert page.row("all") == ["all", "2,000", "3", "61", "27", "9", "100", "1,800", "1,400,000", "2.86"]
    charts = chart_data(text)
    assert list(charts) == ["Training loss", "Held-out loss", "Learning rate", "Gradient norm", "Tokens a second"]
    assert charts["Held-out loss"]["series"][0] == {"name": "news", "style": "other", "points": [[0, 40], [8.0, 4.0]]}
    assert "python -m finlm train r.yaml" in text
    assert f"PYTHONPATH={run.code} {sys.executable} -m finlm train {run.recipe} --new" in text
    assert "Nothing wrong." in page.words


def test_the_page_loads_nothing_from_elsewhere(make_run: Make) -> None:
    run = make_run()
    start(run)
    train(run, 1, 5)
    text, page = build(run)
    assert page.loads == ["data:,"]
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|@import|url\((?!#)", text.partition("<body>")[0])


def test_text_from_files_never_becomes_markup(make_run: Make) -> None:
    run = make_run(f'description="{EVIL}"')
    start(run)
    train(run, 1, 2)
    run.append_event("eval", step=2, loss=1.0, perplexity=2.7, sources={EVIL: {"loss": 1.0}})
    run.append_event("sample", step=2, prompt=f"净利润{EVIL}", text=f"同比增长8.3%{EVIL}")
    run.append_event("incident", step=None, what=EVIL, detail=EVIL)
    files.write_json(run.doctor, {"findings": [dict.fromkeys(("check", "host", "level", "evidence", "fix"), EVIL)]})
    text, page = build(run)
    assert page.tags.count("script") == 2
    assert "alert('x')</" not in text
    assert f"净利润{EVIL}" in page.words and f"同比增长8.3%{EVIL}" in page.words


def test_answers_and_the_terms_of_their_reward_are_shown(make_run: Make) -> None:
    run = make_run()
    start(run)
    earned = {"words": 0.25, "format": 1.0}
    for step in (1, 2):
        run.append_event("step", step=step, loss=0.1, reward=0.35, rewards=earned, entropy=0.5, mismatch=1e-6)
        answer = {
            "prompt": f"问{step}",
            "right": "B",
            "said": EVIL,
            "rewards": earned | {"format": None},
            "reward": 0.25,
        }
        files.append_json_line(run.rollouts, {"step": step, **answer, "advantage": 0.0})
    html = run_page.build(run).read_text(encoding="utf-8")
    assert "问2" in html and "问1" not in html and EVIL not in html and "Of step 2;" in html
    charts = {chart.title: chart for chart in history.charts(history.read_history(run))}
    assert [each.name for each in charts["Reward by term, smoothed"].series] == ["words", "format"]
    assert {"Reward of own answers", "Entropy, nats a token", "Rollout against trainer, nats a token"} <= set(charts)


def test_held_out_rewards_are_shown_before_and_after_with_the_interval_of_their_rise(make_run: Make) -> None:
    run = make_run()
    start(run)
    for step, reward, sampled in ((0, 0.7, 0.5), (40, 0.75, 0.625)):
        rise = {"sampled": sampled, "rise": sampled - 0.5, "rise_interval": [sampled - 0.55, sampled - 0.45]}
        row = {"reward": reward, "prompts": 256, **rise}
        run.append_event("eval", step=step, **row, sources={"laws": row})
    text, page = build(run)
    assert page.after("Held-out reward") == "0.500 → 0.625"
    wanted = ["256", "0.700", "0.750", "0.500", "0.625", "0.125", "0.075 to 0.175"]
    assert page.row("laws") == ["laws", *wanted] and page.row("all sources")[1:] == wanted
    series = {each["name"]: each["points"] for each in chart_data(text)["Held-out reward"]["series"]}
    assert series == {"likeliest answers": [[0, 40], [0.7, 0.75]], "drawn as in training": [[0, 40], [0.5, 0.625]]}


def test_missing_values_are_dashes_and_never_zero(make_run: Make) -> None:
    run = make_run()
    start(run)
    train(run, 1, 3, grad_norm=None, memory_bytes=None, tokens_per_second=None, loss=float("nan"))
    text, page = build(run)
    assert [page.after(name) for name in ("Train loss", "Held-out loss", "Tokens a second", "Peak memory")] == ["–"] * 4
    assert page.row("Tokens a second")[1:] == ["–", "–", "–"]
    assert list(chart_data(text)) == ["Learning rate"]
    assert any("3 step(s) have none" in word for word in page.words)
    assert "MFU" not in page.words


def test_a_directory_without_any_file_still_gives_a_page(tmp_path: Path) -> None:
    _, page = build(RunDir(tmp_path))
    assert "not started" in page.words
    assert page.after("Steps") == "–"


@pytest.mark.parametrize("name", ["plan", "manifest", "origins", "doctor", "data", "recipe", "ds_config"])
def test_any_single_file_may_be_missing(make_run: Make, name: str) -> None:
    run = make_run()
    start(run)
    train(run, 1, 3)
    getattr(run, name).unlink()
    _, page = build(run)
    assert page.after("Steps") == "3"


def test_a_run_is_running_until_it_ends_or_falls_silent_and_failed_after_a_crash(make_run: Make) -> None:
    run = make_run()
    start(run)
    train(run, 1, 3)
    assert "running" in build(run)[1].words
    assert "failed" in build(run, ended=True)[1].words
    old = [row | {"time": row["time"] - 7200} for row in run.read_events()]
    files.write_text(run.events, "".join(json.dumps(row) + "\n" for row in old))
    assert "failed" in build(run)[1].words
    start(run, step=3)
    run.append_event("end", step=3, status="failed", seconds=1.0, exit_code=1)
    assert "failed" in build(run)[1].words


def test_steps_repeated_after_a_resume_count_once(make_run: Make) -> None:
    run = make_run()
    start(run)
    train(run, 1, 30, loss=9.0)
    evaluate(run, 30, 9.0, 9.0)
    start(run, step=20)
    train(run, 21, 25, loss=5.0)
    found = history.read_history(run)
    assert found.steps["step"] == list(range(1, 26))
    assert found.steps["loss"][19:21] == [9.0, 5.0]
    assert found.evals == []
    assert "started 2 times" in build(run)[1].words


def test_a_line_cut_by_a_kill_and_continued_is_left_out_and_reported(make_run: Make) -> None:
    run = make_run()
    start(run)
    train(run, 1, 3)
    with run.events.open("a", encoding="utf-8") as file:
        file.write('{"kind":"step","step":4,"lo')
    start(run, step=3)
    train(run, 4, 6)
    _, page = build(run)
    assert page.after("Steps") == "6"
    assert any("1 line(s) could not be read" in word for word in page.words)


def test_the_wall_time_leaves_out_the_time_between_two_attempts(make_run: Make) -> None:
    run = make_run()
    start(run)
    finish(run, 0)
    start(run)
    finish(run, 0)
    run.append_event("export", path="/r/export", bytes=1)
    rows = list(run.read_events())
    times = (1000.0, 1010.0, 5000.0, 5020.0, 5090.0)
    moved = [row | {"time": now} for row, now in zip(rows, times, strict=True)]
    files.write_text(run.events, "".join(json.dumps(row) + "\n" for row in moved))
    assert history.read_history(run).wall_seconds == 30.0


def test_every_value_that_was_written_has_its_origin(make_run: Make) -> None:
    run = make_run("train.steps=50", "env.HF_TOKEN=hf_secret")
    text, page = build(run)
    assert page.row("train.steps") == ["train.steps", "50", "--set"]
    assert re.fullmatch(r"pretrain.yaml:\d+", page.row("optim.lr")[2])
    assert page.row("optim.clip") == ["optim.clip", "1.0"]
    assert page.row("env.HF_TOKEN")[1] == secrets.REDACTED
    assert "hf_secret" not in text


def test_origins_of_lists_and_mappings_reach_their_parts() -> None:
    from finlm.recipe.rules import origin_of

    origins = {"data.sources": "--set", "betas[0]": "x:4", "betas[1]": "x:4"}
    assert origin_of("data.sources[0].path", origins) == "--set"
    assert origin_of("betas", origins) == "x:4"
    assert origin_of("data.num_proc", origins) is None
    assert origin_of("data.sources[0].path", {"data.sources": "x:1", "data.sources[0].path": "--set"}) == "--set"


def test_100_000_steps_are_drawn_from_a_small_page(make_run: Make) -> None:
    run = make_run()
    start(run)
    train(run, 1, 1)
    row = json.loads(run.events.read_text(encoding="utf-8").splitlines()[-1])
    spike = {77_777: 55.5}
    with run.events.open("a", encoding="utf-8") as file:
        for step in range(2, 100_001):
            loss = spike.get(step, 4 + 4 / step + (step * 7919 % 100) / 500)
            file.write(json.dumps(row | {"step": step, "loss": loss, "grad_norm": loss / 9}) + "\n")
    begun = time.process_time()
    text, page = build(run)
    print(
        f"drawn in {time.process_time() - begun:.2f} CPU s"
    )  # seen with pytest -rP; a busy machine's clock proves nothing
    assert len(text.encode()) < 1_000_000
    assert page.after("Steps") == "100,000"
    steps, losses = chart_data(text)["Training loss"]["series"][0]["points"]
    assert len(steps) <= 3000 and steps == sorted(set(steps))
    assert (steps[0], steps[-1]) == (1, 100_000)
    assert losses[steps.index(77_777)] == 55.5


def test_reducing_keeps_the_lowest_and_highest_of_every_bucket() -> None:
    points = [(step, float((step * 37) % 101)) for step in range(1000)]
    reduced = history.thin_out(points, buckets=20)
    assert len(reduced) <= 40
    assert set(reduced) <= set(points)
    assert max(reduced, key=lambda p: p[1])[1] == 100.0
    assert min(reduced, key=lambda p: p[1])[1] == 0.0
    assert history.thin_out(points[:30], buckets=20) == points[:30]


def test_smoothing_starts_at_the_first_value_and_keeps_a_constant() -> None:
    assert history.smooth([(1, 8.0), (2, 8.0), (3, 8.0)]) == [(1, 8.0), (2, 8.0), (3, 8.0)]
    assert history.smooth([(1, 8.0), (2, 2.0)])[0] == (1, 8.0)


def test_data_in_the_script_cannot_end_it() -> None:
    from finlm.record.report import run_page as report

    packed = report.data([history.Chart("</script><b>&中", [], zero=True)])
    assert "<" not in packed and json.loads(packed)["charts"][0]["title"] == "</script><b>&中"


def test_braces_in_values_are_not_filled_again(make_run: Make) -> None:
    run = make_run()
    start(run)
    run.append_event("sample", step=0, prompt="{{style}}", text="{{data}}")
    assert "{{data}}" in build(run)[1].words
