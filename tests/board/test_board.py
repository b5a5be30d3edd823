"""The board over a real socket: what each page shows of real and made-up runs, and what it refuses."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jinja2
import pytest
import uvicorn
from jinja2 import nodes

from finlm.base import files, language, processes
from finlm.base.rundir import RunDir
from finlm.board import pages, server
from finlm.cli import main
from finlm.plan import planner
from finlm.recipe import cluster, recipe, shape
from finlm.record.report import run_page as report

from helpers import QUICKSTART, ROOT, finlm_here

EVIL = "<script>alert('x')</script>"
MARKS = re.compile(r"%(?:s|d|%|\.[0-9]f)")  # of a sentence with values
TOKEN = "a-token-of-many-letters"
PRETRAIN = "recipes/quickstart/pretrain.yaml"


class Client:
    """Asks the board as a browser at this address would."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self.port, self.host = port, f"{host}:{port}"
        self.cookie = ""

    def ask(
        self, path: str, method: str = "GET", body: str | None = None, **headers: str
    ) -> tuple[int, str, http.client.HTTPMessage]:
        """(status, text, headers); `sec_fetch_site` is Sec-Fetch-Site."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        sent = {"Host": self.host, **({"Cookie": self.cookie} if self.cookie else {})}
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body and body.encode(), sent)
        answer = connection.getresponse()
        text = answer.read().decode("utf-8")
        connection.close()
        return answer.status, text, answer.headers

    def page(self, path: str) -> str:
        """The text of a page that is there."""
        status, text, _ = self.ask(path)
        assert status == 200, f"{status} {path}: {text[-1500:]}"
        return text


@contextmanager
def served(runs: Path, **settings: Any) -> Iterator[Client]:
    """A board of these runs, on a port of its own."""
    board = pages.Board(runs, settings.pop("hostfile", None), settings.pop("allow_actions", False))
    with processes.listen("127.0.0.1", 0) as listening:
        running = uvicorn.Server(uvicorn.Config(server.app(server.Settings(board, **settings)), log_level="error"))
        running.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        while not running.started:
            time.sleep(0.01)
        yield Client(listening.getsockname()[1])
        running.should_exit = True
        thread.join(20)


Make = Callable[..., RunDir]


@pytest.fixture(scope="module")
def written() -> dict[str, Any]:
    """The recipe and the plan of made-up runs, made once."""
    loaded = recipe.load(QUICKSTART, ("train.steps=200",)).recipe
    return {"recipe": recipe.dump(loaded), "plan": planner.make(loaded, cluster.local(2), shape.of(loaded)).to_json()}


@pytest.fixture
def make(tmp_path: Path, written: dict[str, Any]) -> Make:
    """A made-up run: make(name, steps, status)."""

    def make_run(name: str, steps: int = 5, status: str | None = "finished") -> RunDir:
        run = RunDir(tmp_path / "runs" / name)
        files.write_text(run.recipe, written["recipe"])
        files.write_json(run.plan, written["plan"])
        files.write_json(run.ds_config, {})
        rows = [{"kind": "start", "time": time.time(), "step": 0, "world_size": 2, "device": "cpu"}]
        rows += [step(number) for number in range(1, steps + 1)]
        rows += [{"kind": "end", "time": time.time(), "step": steps, "status": status}] if status else []
        files.write_text(run.events, "".join(f"{json.dumps(row)}\n" for row in rows))
        return run

    return make_run


def step(number: int, **more: Any) -> dict[str, Any]:
    row = {"kind": "step", "time": time.time() + number, "step": number, "loss": 8.0 - number / 100, "lr": 1e-3}
    return row | {"grad_norm": 1.5, "tokens_per_second": 4321.0, "tokens": 1024, "tokens_read": 1024} | more


def charts(page: str) -> dict[str, list[Any]]:
    """The curves that a page draws: [[steps], [values]] of the first series, by title."""
    (found,) = re.findall(r'<script type="application/json" id="run-data">(.*?)</script>', page, re.DOTALL)
    return {chart["title"]: chart["series"][0]["points"] for chart in json.loads(found)["charts"]}


def test_a_finished_run_is_listed_and_shown_with_all_that_its_report_has(finished: tuple[RunDir, str]) -> None:
    run = finished[0]
    with served(run.path.parent) as client:
        listed, shown = client.page("/"), client.page(f"/runs/{run.path.name}")
        assert run.path.name in listed and ">finished<" in listed and "20<span" in listed
        for words in ("Plan against measured", "Held-out loss", "Peak memory", "Samples", "Checkpoints", "Reproduce"):
            assert words in shown
        assert charts(shown)["Training loss"][0] == list(range(1, 21))
        assert charts(shown)["Training loss"][1] == pytest.approx(
            [row["loss"] for row in run.read_events("step")], rel=1e-5
        )
        assert {"Learning rate", "Gradient norm", "Tokens a second", "Held-out loss"} <= charts(shown).keys()
        status, text, headers = client.ask(f"/runs/{run.path.name}/report")
        assert status == 200 and text == run.report.read_text("utf-8")
        assert headers["Content-Security-Policy"].startswith("sandbox allow-scripts;"), (
            "its scripts reach no page of ours"
        )
        seen = client.page("/hosts")
        assert "localhost" in seen and "Nothing wrong." in seen


def test_every_word_of_ours_is_there_in_chinese(finished: tuple[RunDir, str]) -> None:
    known = language.words("zh")
    same = {"GPUs", "torch", "NCCL", "CPU", "A", "B"}
    places = {"_": (0,), "table": (0,), "rows": (0,), "fold": (0,), "section": (0, 2), "tile": (0, 2)}
    said = set[str]()
    for template in [*pages.FILES.glob("*.html"), *report.FILES.glob("*.html")]:
        for call in jinja2.Environment().parse(template.read_text("utf-8")).find_all(nodes.Call):
            for place in places.get(getattr(call.node, "name", ""), ()):
                said.update(constants(call.args[place]) if len(call.args) > place else ())
    words = {text for text in said if re.search("[A-Za-z]", text)}
    assert len(words) > 150 and words - known.keys() == same
    assert [text for text, zh in known.items() if MARKS.findall(text) != MARKS.findall(zh)] == []
    run = finished[0]
    with served(run.path.parent, lang="zh") as client:
        shown = client.page(f"/runs/{run.path.name}")
        assert '<html lang="zh-CN">' in shown and "已完成" in shown and "计划与实测" in shown
        titles = charts(shown).keys()
        assert {"训练损失", "留出集损失", "学习率", "梯度范数", "每秒词元"} <= titles
        assert all(re.search("[\u4e00-\u9fff]", title) for title in titles)
        status, text, headers = client.ask("/?lang=en")
        assert status == 200 and '<html lang="en">' in text and "finlm-lang=en" in headers["Set-Cookie"]
        client.cookie = "finlm-lang=en"
        assert "All runs" in client.page("/")


def constants(node: nodes.Node) -> Iterator[str]:
    """The texts that a template gives as they stand."""
    if isinstance(node, nodes.Const):
        yield from [node.value] if isinstance(node.value, str) else []
    elif isinstance(node, nodes.CondExpr):
        yield from constants(node.expr1)
        yield from constants(node.expr2) if node.expr2 else ()
    elif not isinstance(node, (nodes.Call, nodes.Filter, nodes.Getattr, nodes.Getitem)):
        for inner in node.iter_child_nodes():
            yield from constants(inner)


def test_a_run_in_progress_is_asked_for_again_and_answers_only_with_news(make: Make) -> None:
    run = make("going-1", steps=5, status=None)
    with served(run.path.parent) as client:
        status, text, headers = client.ask("/runs/going-1")
        assert status == 200 and ">running<" in text and 'data-poll="2"' in text
        mark = headers["ETag"]
        assert client.ask("/runs/going-1", If_None_Match=mark)[0] == 304
        for number in range(6, 9):
            files.append_json_line(run.events, step(number))
        files.append_json_line(
            run.events, {"kind": "incident", "time": time.time(), "step": 8, "what": "loss spike", "detail": "9.0"}
        )
        status, text, headers = client.ask("/runs/going-1", If_None_Match=mark)
        assert status == 200 and headers["ETag"] != mark
        assert charts(text)["Training loss"][0] == list(range(1, 9)) and "loss spike" in text and "left" in text
        files.append_json_line(run.events, {"kind": "end", "time": time.time(), "step": 8, "status": "finished"})
        text = client.page("/runs/going-1")
        assert ">finished<" in text and 'data-poll="0"' in text and ">finished<" in client.page("/")


def test_a_failed_run_has_its_diagnosis_in_both_languages_and_nothing_is_written(make: Make) -> None:
    run = make("broken-1", status="failed")
    (run.path / "logs").mkdir()
    shutil.copy(ROOT / "tests/diagnose/logs/nccl_ifname_missing.log", run.path / "logs/localhost.0.log")
    before = {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}
    with served(run.path.parent) as client:
        english, chinese = client.page("/runs/broken-1"), client.page("/runs/broken-1?lang=zh")
    assert "Why it failed" in english and "NCCL_SOCKET_IFNAME" in english and "失败原因" in chinese
    heading = r'<section id="diagnosis">.*?<h3>(.*?)</h3>'
    assert re.findall(heading, english, re.DOTALL) != re.findall(heading, chinese, re.DOTALL)
    assert {path: path.stat().st_mtime_ns for path in run.path.rglob("*")} == before


def test_two_hundred_runs_are_listed_and_filtered(make: Make) -> None:
    for number in range(200):
        run = make(f"many-{number:03}", steps=250, status="failed" if number % 10 == 0 else "finished")
    with served(run.path.parent) as client:
        for look in ("first", "second"):
            began = time.monotonic()
            text = client.page("/")
            print(f"200 runs of 250 steps, {look} look: {time.monotonic() - began:.2f} s")  # seen with pytest -rP
            assert text.count("<tr data-words=") == 200
        assert client.page("/?q=failed").count("<tr data-words=") == 20
        assert client.page("/?q=many-17+finished").count("<tr data-words=") == 9
        assert "No run has all of these words." in client.page("/?q=nowhere")


def test_nothing_of_a_file_becomes_markup_and_a_damaged_run_hides_no_other(make: Make) -> None:
    run = make(f"evil-{EVIL[:8].replace('/', '')}", status=None)
    for row in (
        {
            "kind": "incident",
            "time": 1.0,
            "step": 5,
            "what": EVIL,
            "detail": EVIL,
            "documents": [{"source": EVIL, "text": EVIL}],
        },
        {"kind": "sample", "time": 1.0, "step": 5, "prompt": EVIL, "text": EVIL},
        {
            "kind": "eval",
            "time": 1.0,
            "step": 5,
            "loss": 1.0,
            "sources": {EVIL: {"loss": 1.0}, "</script>": {"loss": 2.0}},
        },
    ):
        files.append_json_line(run.events, row)
    broken = make("odd-1")
    files.append_json_line(broken.events, {"kind": "step", "step": 3, "time": 1.0, "sources": [5]})
    worse = make("odd-2")
    files.append_json_line(worse.events, {"kind": "eval", "step": 3, "time": 1.0, "loss": "low"})
    make("good-1")
    with served(run.path.parent) as client:
        text = client.page("/")
        assert "damaged" in text and "good-1" in text and "<script>" not in text
        href = re.findall(r'href="(/runs/evil[^"]*)"', text)[0]
        text = client.page(href)
        assert EVIL not in text and text.count("&lt;script&gt;alert") >= 4
        assert text.count("<script") == 3, "two files and the data"
        for path, name in (
            ("/runs/odd-1", "odd-1"),
            ("/runs/odd-2", "odd-2"),
            ("/compare?run=good-1&run=odd-1", "good-1, odd-1"),
        ):
            status, said, _ = client.ask(path)
            assert status == 422 and f"{name} holds files that finlm did not write" in said and "500" not in said
        assert client.ask(f"/?q={'%3Cscript%3E'}")[1].count("<script") == 3
        assert "<script>" not in client.ask("/runs/%3Cscript%3E")[1]


@pytest.mark.parametrize(
    "path",
    [
        "/runs/..",
        "/runs/%2e%2e",
        "/runs/..%2f..%2fetc",
        "/runs/%2fetc",
        "/runs/../../etc/passwd",
        "/runs/away",
        "/runs/away/report",
        "/recipes/view/../../pyproject.toml",
        "/recipes/view/%2fetc%2fpasswd",
        "/recipes/view/recipes/../pyproject.toml",
        "/recipes/plan?recipe=/etc/passwd",
        "/recipes/plan?recipe=recipes/quickstart/../quickstart/pretrain.yaml",
        "/recipes/diff?a=/etc/passwd&b=recipes/quickstart/pretrain.yaml",
        "/static/..%2fserver.py",
        "/static/server.py",
        "/docs/..%2f..%2fREADME",
        "/docs/design",
        "/compare?run=..&run=away",
        "/runs/here/checkpoints",
    ],
)
def test_no_address_leads_out_of_the_listing(path: str, make: Make, tmp_path: Path) -> None:
    run = make("here")
    outside = shutil.copytree(run.path, tmp_path / "outside")
    (run.path.parent / "away").symlink_to(outside)
    with served(run.path.parent) as client:
        assert "away" not in client.page("/")
        status, text, _ = client.ask(path)
    assert status in (400, 404), text[-500:]
    assert "root:" not in text and "build-backend" not in text and "def run(" not in text


def test_a_report_that_is_a_link_elsewhere_is_not_sent(make: Make, tmp_path: Path) -> None:
    run = make("here")
    (tmp_path / "secret.html").write_text("secret")
    Path(run.report).symlink_to(tmp_path / "secret.html")
    with served(run.path.parent) as client:
        assert client.ask("/runs/here/report")[0] == 404


def test_other_names_and_other_sites_are_refused(make: Make) -> None:
    with served(make("here").path.parent) as client:
        assert client.ask("/", Host="evil.example")[0] == 400
        assert client.ask("/", Host="192.0.2.1")[0] == 400, "a local board is asked at this machine only"
        assert client.ask("/", Host=f"localhost:{client.port}")[0] == 200
        assert client.ask("/recipes/plan?recipe=x", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="no-cors")[0] == 403
        assert client.ask("/", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate")[0] == 200, "a link to the board"
        _, text, headers = client.ask("/")
    assert headers["Content-Security-Policy"].startswith("default-src 'none'; script-src 'self'; style-src 'self'")
    assert headers["X-Content-Type-Options"] == "nosniff" and headers["Cache-Control"] == "no-store"
    inline = re.findall(r"<script(?! src| type=.application/json)|\son\w+=|<style|\sstyle=|javascript:|https?://", text)
    assert inline == [], "nothing that the policy would refuse, nothing from elsewhere"


def test_a_token_is_asked_for_once_and_kept_in_a_cookie(make: Make) -> None:
    with served(make("here").path.parent, allow_actions=True, host="0.0.0.0", token=TOKEN) as client:
        for path in ("/", "/runs/here", "/static/board.js", "/?token=wrong", "/?token=", "/?token=%E4%B8%AD"):
            status, text, _ = client.ask(path)
            assert status == 401 and "here" not in text and "csrf" not in text
        status, _, headers = client.ask(f"/?token={TOKEN}&q=a+b")
        assert status == 303 and headers["Location"] == "/?q=a+b"
        cookie = headers["Set-Cookie"]
        assert "HttpOnly" in cookie and "SameSite=strict" in cookie
        client.cookie = cookie.partition(";")[0]
        assert "here" in client.page("/")
        assert client.ask("/", Host="evil.example")[0] == 400, "a name that was made to point here"
        client.cookie = f"finlm-board-{client.port}=wrong"
        assert client.ask("/")[0] == 401


def test_forks_are_saved_only_where_actions_are_allowed_and_the_page_asked(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(ROOT / "recipes/quickstart", tmp_path / "recipes/quickstart")
    monkeypatch.chdir(tmp_path)
    runs = make("here").path.parent
    body = f"recipe={PRETRAIN}&name=wider&set=optim.lr%3D1e-3%0Adata.sources%5B0%5D.name%3Dx%0A"
    body = body.replace("%0Adata.sources%5B0%5D.name%3Dx", "")
    with served(runs) as client:
        assert client.ask("/recipes/fork", "POST", body, Origin=f"http://{client.host}", X_CSRF="")[0] == 403
        assert "fork-form" not in client.page(f"/recipes/view/{PRETRAIN}")
    with served(runs, allow_actions=True) as client:
        page = client.page(f"/recipes/view/{PRETRAIN}")
        csrf = re.findall(r'data-csrf="([^"]+)"', page)[0]
        own = {"Origin": f"http://{client.host}", "X_CSRF": csrf}
        for wrong in (
            {"X_CSRF": csrf},
            {"Origin": "http://evil.example", "X_CSRF": csrf},
            {"Origin": "null", "X_CSRF": csrf},
            {"Origin": own["Origin"]},
            {"Origin": own["Origin"], "X_CSRF": "x"},
            {"Sec_Fetch_Site": "cross-site", "X_CSRF": csrf},
        ):
            assert client.ask("/recipes/fork", "POST", body, **wrong)[0] == 403, wrong
        assert client.ask("/recipes/fork", "POST", "x" * 70_000, **own)[0] == 413
        assert not (tmp_path / "recipes/wider").exists()
        for name, said in (("..%2Fx", "is no name"), ("quickstart", "exists already"), ("", "is no name")):
            status, text, _ = client.ask("/recipes/fork", "POST", body.replace("wider", name), **own)
            assert status == 200 and said in json.loads(text)["problem"]
        status, text, _ = client.ask("/recipes/fork", "POST", body.replace("optim.lr", "optim.lrr"), **own)
        assert "optim.lrr" in json.loads(text)["problem"] and not (tmp_path / "recipes/wider").exists()
        status, text, _ = client.ask("/recipes/fork", "POST", body, **own)
        assert status == 200 and json.loads(text) == {"path": "recipes/wider/pretrain.yaml"}
        assert "recipes/wider/pretrain.yaml" in client.page("/recipes")
    made = recipe.load("recipes/wider/pretrain.yaml").recipe
    assert (made.name, made.optim.lr, made.optim.warmup_steps) == ("wider", 1e-3, 20)


def test_the_form_plans_as_the_command_does_and_words_mistakes_as_it_does(make: Make) -> None:
    with served(make("here").path.parent) as client:
        text = client.page(f"/recipes/plan?recipe={PRETRAIN}&set=train.steps%3D123%0Aoptim.lr%3D1e-3")
        printed = finlm_here("plan", PRETRAIN, "--set", "train.steps=123", "--set", "optim.lr=1e-3").stdout
        (length,) = re.findall(r"length +(123 steps.*)", printed)
        assert f"<dd>{length}</dd>" in text
        assert "A100-40G" in client.page("/recipes/plan?recipe=recipes/llama2-7b-fincorpus/pretrain.yaml")
        wrong = f"/recipes/plan?recipe={PRETRAIN}&set=optim.lrr%3D1"
        status, text, _ = client.ask(wrong)
        assert status == 422 and "optim.lrr: unknown key" in text and "optim.lr" in text
        assert client.ask(f"{wrong}&part=1")[0] == 200, "a browser logs what is no success"
        text = client.page(f"/recipes/diff?a={PRETRAIN}&b=recipes/quickstart/sft.yaml")
        assert '<td class="text">stage</td>' in text
        assert "name: quickstart" in client.page(f"/recipes/view/{PRETRAIN}")


def test_runs_are_compared_side_by_side(make: Make) -> None:
    one = make("pair-a")
    other = make("pair-b")
    files.write_text(other.recipe, other.recipe.read_text().replace("lr: 0.002", "lr: 0.001"))
    files.append_json_line(other.events, step(6))
    with served(one.path.parent) as client:
        text = client.page("/compare?run=pair-a&run=pair-b")
        assert "optim.lr" in text and "loss at step 6" in text
        assert charts(text).keys() >= {"Training loss, smoothed", "Learning rate"}
        for path in ("/compare?run=pair-a", "/compare"):
            status, text, _ = client.ask(path)
            assert status == 422 and "choose two or more" in text


def test_dropped_documents_are_shown_with_their_reasons(make: Make, tmp_path: Path) -> None:
    from finlm import prepare

    rows = [{"text": f"第{number}份公告：公司发布了第{number}号年度报告，净利润同比增长。" * 5} for number in range(60)]
    rows += [rows[0], {"text": "短"}, {"text": f"{EVIL}" + "���" * 200}]
    (tmp_path / "own.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    sets = (
        f"data.sources=[{{path: {tmp_path}/own.jsonl, name: own}}]",
        f"data.cache_dir={tmp_path}/cache",
        "data.num_proc=1",
    )
    loaded = recipe.load(QUICKSTART, (*sets, "tokenizer.vocab_size=300", "data.held_out_documents=5")).recipe
    run = make("dropping-1")
    files.write_text(run.recipe, recipe.dump(loaded))
    prepare.run(loaded)
    found = prepare.dropped_samples(loaded)
    assert {row["reason"] for row in found} >= {"duplicate"}
    with served(run.path.parent) as client:
        text = client.page("/runs/dropping-1")
    assert "Dropped documents" in text and ">duplicate<" in text and "第0份公告" in text and EVIL not in text


def test_hosts_are_those_of_the_hostfile_and_none_is_asked(make: Make, tmp_path: Path) -> None:
    (tmp_path / "hosts.txt").write_text("n1 slots=8\nn2 slots=8 spare\n")
    with served(make("here").path.parent, hostfile=str(tmp_path / "hosts.txt")) as client:
        text = client.page("/hosts")
        assert "n1" in text and "n2" in text and "spare" in text
        (tmp_path / "hosts.txt").write_text("n1 slots=many\n")
        assert "hosts.txt:1" in client.page("/hosts")


def test_a_model_answers_only_where_actions_are_allowed(finished: tuple[RunDir, str]) -> None:
    run = finished[0]
    address = f"/runs/{run.path.name}/chat"
    with served(run.path.parent) as client:
        assert client.ask(address)[0] == 422
        assert client.ask(address, "POST", "{}", Origin=f"http://{client.host}")[0] == 403
    with served(run.path.parent, allow_actions=True) as client:
        csrf = re.findall(r'data-csrf="([^"]+)"', client.page(address))[0]
        own = {"Origin": f"http://{client.host}", "X_CSRF": csrf}
        for body in ("{}", "[", '{"messages": [{"role": "system", "content": "x"}]}', '{"messages": [1]}'):
            assert "no conversation" in json.loads(client.ask(address, "POST", body, **own)[1])["problem"]
        status, text, _ = client.ask(address, "POST", '{"messages": [{"role": "user", "content": "公司"}]}', **own)
        assert status == 200 and json.loads(text)["text"], text


def test_the_command_starts_says_where_and_ends_with_ctrl_c(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "finlm", "board", "--runs", str(tmp_path / "none"), "--port", "0", "--lang", "zh"]
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    board = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert board.stdout is not None
    address = board.stdout.readline().strip()
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", address), "no token on this machine"
    text = Client(int(address.split(":")[2].strip("/"))).page("/")
    assert "还没有运行" in text and "finlm train quickstart" in text
    board.send_signal(2)
    out, err = board.communicate(timeout=30)
    assert board.returncode == 0 and "Traceback" not in out + err and "Ctrl-C" in err


def test_what_cannot_be_had_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main.main(["board", "--port", str(taken.getsockname()[1])]) == 2
    said = capsys.readouterr().err
    assert "cannot listen at 127.0.0.1:" in said and "--port" in said
    (tmp_path / "file").write_text("")
    assert main.main(["board", "--runs", str(tmp_path / "file")]) == 2
    assert main.main(["board", "--host", "nowhere.invalid", "--token-file", str(tmp_path / "file")]) == 2
    assert "holds no token" in capsys.readouterr().err
    assert main.main(["board", "--token-file", str(tmp_path / "missing")]) == 2
    for name in [name for name in sys.modules if name.startswith("finlm.board")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    capsys.readouterr()
    assert main.main(["board"]) == 2
    assert "finlm[board]" in capsys.readouterr().err


def test_elsewhere_and_with_actions_a_token_is_made() -> None:
    from finlm.cli import options

    def token(*given: str) -> str | None:
        return server._token(options.parser().parse_args(["board", *given]))

    assert token() is None and token("--host", "localhost") is None
    assert len(token("--host", "0.0.0.0") or "") > 20 and token("--allow-actions") is not None


def test_the_board_loads_no_torch() -> None:
    code = "import sys, finlm.board.server; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT / "src", check=False).returncode == 0
