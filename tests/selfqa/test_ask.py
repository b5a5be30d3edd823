"""Self-QA against a real HTTP server that speaks the chat completions protocol, and fails as such servers do."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import wait
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from finlm.base import files
from finlm.base.errors import UserError
from finlm.base.rundir import RunDir
from finlm.cli import main
from finlm.inference.chat import LocalModel
from finlm.recipe import recipe
from finlm.recipe.schema_data import SelfQA
from finlm.selfqa import ask, endpoint

from helpers import QUICKSTART, ROOT, sets

KEY = "sk-a-secret-that-must-not-be-written"
COMPANIES = [f"虹桥{letter}科技股份有限公司" for letter in "甲乙丙丁戊己庚辛壬癸"]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("What is  EBITDA？", "what is ebitda?", True),
        ("收入１,２３４元是多少？", "收入 1234 元，是多少", True),
        ("2023年1-2月的销售额是多少？", "2023年12月的销售额是多少？", False),
        ("利率升到1.5%时会怎样？", "利率升到15%时会怎样？", False),
    ],
)
def test_questions_are_the_same_in_other_characters_and_not_about_other_numbers(
    one: str, other: str, same: bool
) -> None:
    assert (endpoint.normalise_question(one) == endpoint.normalise_question(other)) is same


class Server:
    """Answers about the passage in the prompt; `faults` are tried first, one a request."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.requests: Counter[str] = Counter()  # by the company asked about, and the kind of request
        self.most_at_once = self.now = 0
        self.pause = 0.0
        self.lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer.lock:
                    outer.now += 1
                    outer.most_at_once = max(outer.most_at_once, outer.now)
                    fault = outer.faults.pop(0) if outer.faults else ""
                try:
                    outer.answer(self, body, fault)
                except (BrokenPipeError, ConnectionResetError):
                    pass  # the client has given up
                finally:
                    with outer.lock:
                        outer.now -= 1

            def log_message(self, *_: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def answer(self, handler: BaseHTTPRequestHandler, body: dict[str, Any], fault: str) -> None:
        if handler.headers.get("Authorization") != f"Bearer {KEY}":
            return self.send(handler, 401, f'{{"error": "bad key {handler.headers.get("Authorization")}"}}')
        if fault == "429":
            return self.send(handler, 429, "{}", {"Retry-After": "0"})
        if fault == "500":
            return self.send(handler, 500, "the backend fell over")
        if fault == "html":
            return self.send(handler, 200, "<html>busy</html>")
        if fault == "slow":
            time.sleep(1.5)
        time.sleep(self.pause)
        prompt = body["messages"][0]["content"]
        company = re.search("虹桥.科技股份有限公司", prompt)[0]  # type: ignore[index]
        asks = "问题：" not in prompt
        with self.lock:
            self.requests[f"{company} {'questions' if asks else 'answer'}"] += 1
        if asks:
            said = (
                f"<think>想一想</think>1. {company}2021年的营业收入是多少？\n2、{company}的注册地在哪里？\n"
                f"3. 根据材料，利润是多少？\n4. 该公司的审计机构是谁？\n5. {company}２０２１年的营业收入，是多少?"
            )
        elif "营业收入" in prompt.rsplit("问题：")[-1]:
            said = f"{company}2021年的营业收入为1,200万元。"
        else:
            said = f"{company}的注册地在南京市，邮政编码为210000。"
        message = {"role": "assistant", "content": said}
        reply = {
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 100, "completion_tokens": 20},
        }
        self.send(handler, 200, json.dumps(reply))

    def send(
        self, handler: BaseHTTPRequestHandler, code: int, text: str, headers: dict[str, str] | None = None
    ) -> None:
        data = text.encode()
        handler.send_response(code)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(data)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("SELF_QA_KEY", KEY)
    one = Server()
    yield one
    one.http.shutdown()


@pytest.fixture
def overrides(server: Server, tmp_path: Path) -> list[str]:
    """The quickstart with ten documents of its own and this server."""
    rows = [{"text": f"{name}2021年营业收入为1200.0万元，净利润为90万元，注册地为南京市。" * 2} for name in COMPANIES]
    (tmp_path / "news.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return [
        f"data.sources={tmp_path / 'news.jsonl'}",
        f"data.cache_dir={tmp_path / 'cache'}",
        "data.held_out_fraction=0",
        "self_qa.model=teller",
        f"self_qa.endpoint={server.url}",
        "self_qa.api_key_env=SELF_QA_KEY",
        f"self_qa.output={tmp_path / 'qa.jsonl'}",
        "self_qa.timeout_seconds=1",
        "self_qa.concurrency=4",
        "self_qa.input_price=10",
        "self_qa.output_price=20",
    ]


class Teacher(Server):
    """Returns its thoughts apart from the answer; some answers are cut off or empty, some requests refused."""

    def answer(self, handler: BaseHTTPRequestHandler, body: dict[str, Any], fault: str) -> None:
        asked = body["messages"][-1]["content"]
        with self.lock:
            self.requests[asked] += 1
        if "拒" in asked:
            return self.send(handler, 400, "not this one")
        said = {"content": "" if "空" in asked else "答案：2", "reasoning_content": "1+1=2"}
        reply = {
            "choices": [{"message": said, "finish_reason": "length" if "长" in asked else "stop"}],
            "usage": {"prompt_tokens": 100, "completion_tokens": 20},
        }
        self.send(handler, 200, json.dumps(reply))


def test_a_teachers_answers_are_paid_once_and_each_fault_is_told(tmp_path: Path) -> None:
    teacher, ledger = Teacher(), tmp_path / "ledger.jsonl"
    settings = SelfQA(model="teller", endpoint=teacher.url, output_price=1000, max_cost=1.0, attempts=1)
    prompts = {
        key: [{"role": "user", "content": said}] for key, said in zip("abcd", ("1+1", "长", "空", "拒"), strict=True)
    }
    rows = ask.answer_prompts(settings, prompts, (0.6, 64), ledger, [])
    assert {key: row["fault"] for key, row in rows.items()} == {"a": "", "b": "cut off", "c": "empty", "d": "refused"}
    assert rows["a"]["text"] == "<think>\n1+1=2\n</think>\n\n答案：2" and rows["a"]["tokens"] == 20
    assert "not this one" in rows["d"]["detail"]
    kept = list(files.read_json_lines(ledger))
    assert {row["key"] for row in kept} == {"a", "b", "c"}, "what failed is tried again"
    spent = settings.model_copy(update={"max_cost": 0.06})  # three answers of 20 tokens
    assert ask.answer_prompts(spent, {"d": prompts["d"]}, (0.6, 64), ledger, kept) == {}
    with pytest.raises(UserError, match="failed 5 times in a row") as down:
        ask.answer_prompts(settings, dict.fromkeys("efghij", prompts["d"]), (0.6, 64), ledger, kept)
    assert "400" in down.value.evidence and sum(teacher.requests.values()) <= 4 + 6
    teacher.http.shutdown()


def run(overrides: list[str], *more: str) -> list[dict[str, Any]]:
    """The rows that a run writes."""
    return list(files.read_json_lines(ask.run(recipe.load(QUICKSTART, [*overrides, *more]).recipe)))


def test_three_stages_give_pairs_that_stand_alone_despite_a_bad_server(
    server: Server, overrides: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.faults = ["429", "500", "html", "slow"]
    rows = run(overrides)
    assert len(rows) == 10
    first = rows[0]["messages"]
    assert [message["role"] for message in first] == ["user", "assistant"]
    assert re.fullmatch("虹桥.科技股份有限公司2021年的营业收入是多少？", first[0]["content"])
    assert "1,200万元" in first[1]["content"], "1,200 is the passage's 1200.0"
    account = files.read_json(tmp_path / "qa.jsonl.json")
    assert account["dropped"] == {
        "number not in the passage": 10,
        "question refers to the passage": 10,
        "question points at something unnamed": 10,
        "question asked before": 10,
    }
    assert (account["requests"], account["retries"]) == (30, 4), "what will be dropped is not answered"
    assert account["cost"] == pytest.approx(30 * (100 * 10 + 20 * 20) / 1e6)
    assert server.most_at_once <= 5, "four requests, and the one given up that the server still holds"
    written = "".join(path.read_text() for path in tmp_path.glob("qa.jsonl*")) + capsys.readouterr().err
    assert KEY not in written


def test_what_ended_together_with_a_refused_key_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Model:
        def ask(self, messages: endpoint.Conversation, temperature: float, max_tokens: int) -> endpoint.Reply:
            if "丁" in messages[0]["content"]:
                raise UserError("does not accept the key")
            return endpoint.Reply("没有问题。", "stop", 100, 20)

    monkeypatch.setattr(endpoint, "wait", lambda futures, return_when: wait(futures))  # all end together
    settings = SelfQA(endpoint="http://127.0.0.1:1/v1", model="m", output=str(tmp_path / "out"), concurrency=10)
    missing = [ask.Passage(company, "news", company) for company in COMPANIES]
    with pytest.raises(UserError, match="does not accept the key"):
        list(ask._ask_passages(missing, settings, Model(), tmp_path / "ledger", "key", Counter()))
    kept = {row["document"] for row in files.read_json_lines(tmp_path / "ledger")}
    assert kept == {company for company in COMPANIES if "丁" not in company}


def test_an_answer_that_ended_with_the_fifth_failure_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def reply(_: object, messages: endpoint.Conversation, temperature: float, max_tokens: int) -> endpoint.Reply:
        if messages[0]["content"] == "拒":
            raise endpoint.Refused("not this one")
        return endpoint.Reply("2", "stop", 1, 1)

    monkeypatch.setattr(endpoint.Endpoint, "ask", reply)
    monkeypatch.setattr(endpoint, "wait", lambda futures, return_when: wait(futures))  # all end together
    settings = SelfQA(endpoint="http://127.0.0.1:1/v1", model="m", concurrency=64)
    prompts = {f"{number}": [{"role": "user", "content": "拒"}] for number in range(60)}
    prompts["answered"] = [{"role": "user", "content": "1+1"}]
    with pytest.raises(UserError, match="failed 5 times in a row"):
        ask.answer_prompts(settings, prompts, (0.6, 64), tmp_path / "ledger", [])
    assert [row["key"] for row in files.read_json_lines(tmp_path / "ledger")] == ["answered"]


def test_a_killed_run_goes_on_without_asking_twice(server: Server, overrides: list[str], tmp_path: Path) -> None:
    server.pause = 0.1
    command = [sys.executable, "-m", "finlm", "self-qa", str(QUICKSTART), *sets(overrides)]
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    process = subprocess.Popen([*command, "--set", "self_qa.concurrency=2"], env=env, stderr=subprocess.DEVNULL)
    ledger = tmp_path / "qa.jsonl.ledger"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (ledger.exists() and ledger.read_bytes().count(b"\n") >= 3):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "qa.jsonl").exists(), "published whole or not at all"
    with ledger.open("ab") as file:
        file.write(b'{"key": "cut sho')
    finished = {row["document"] for row in files.read_json_lines(ledger)}
    server.pause = 0.0
    while server.now:
        time.sleep(0.01)
    asked = server.requests.copy()
    rows = run(overrides)
    assert {row["meta"]["document"] for row in rows} >= finished and len(rows) == 10
    again = [name for name, count in (server.requests - asked).items() if count and asked[name]]
    assert len({name.split()[0] for name in again}) <= 2, "at most what was under way is asked again"
    before = sum(server.requests.values())
    assert len(run(overrides, "self_qa.grounded_numbers=false")) == 20, "a rule is changed without a request"
    assert sum(server.requests.values()) == before


def test_what_cannot_work_stops_at_once_and_says_why(
    server: Server, overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="SELF_QA_NONE is not set"):
        run(overrides, "self_qa.api_key_env=SELF_QA_NONE")
    monkeypatch.setenv("SELF_QA_WRONG", "sk-wrong")
    with pytest.raises(UserError, match="does not accept the key") as refused:
        run(overrides, "self_qa.api_key_env=SELF_QA_WRONG")
    assert "sk-wrong" not in str(refused.value) and "***" in refused.value.evidence
    monkeypatch.setattr(endpoint, "_LONGEST_PAUSE", 0.01)
    server.faults = ["500"] * 1000
    with pytest.raises(UserError, match="failed 5 times in a row") as down:
        run(overrides, "self_qa.attempts=2")
    assert "the backend fell over" in down.value.evidence and "the same command goes on" in down.value.fix
    server.faults = []
    few = run(overrides, "self_qa.max_cost=0.012", "self_qa.concurrency=1")
    assert 0 < len(few) < 10, "a budget ends the asking, not the run"


def test_a_model_on_this_machine_is_asked_in_the_place_of_an_endpoint(
    finished: tuple[RunDir, str], overrides: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assistant = tmp_path / "assistant"
    shutil.copytree(finished[0].export, assistant, ignore=shutil.ignore_patterns("finlm.json"))
    (assistant / "chat_template.jinja").write_text("{{ messages[0].content }}")
    files.write_json(
        assistant / "config.json", files.read_json(assistant / "config.json") | {"max_position_embeddings": 512}
    )
    local = [text for text in overrides if "self_qa." not in text]
    asks = {"documents": 2, "questions": 1, "passage_characters": 100, "max_answer_tokens": 8}
    settings = {"model": str(assistant), "output": str(tmp_path / "qa.jsonl"), **asks}
    command = ["self-qa", str(QUICKSTART), *sets((*local, f"self_qa={json.dumps(settings)}"))]
    assert main.main(command) == 2
    assert "no question and answer is left" in capsys.readouterr().err, "a model of twenty steps asks nothing"
    rows = list(files.read_json_lines(tmp_path / "qa.jsonl.ledger"))
    assert len(rows) == 2 and all(row["prompt_tokens"] > 100 and row["completion_tokens"] > 0 for row in rows)
    for model, said in ((finished[0].export, "has no chat template"), (tmp_path / "none", "self_qa.endpoint")):
        with pytest.raises(UserError) as error:
            LocalModel(Path(model), 0)
        assert said in str(error.value)


def test_a_long_document_gives_a_part_that_ends_with_its_sentences() -> None:
    text = "".join(f"第{number}条，公司应当披露。" for number in range(500))
    parts = {ask.cut_passage(text, 300, draw) for draw in (0, 1_234, 99_999)}
    assert len(parts) == 3
    for part in parts:
        assert 150 < len(part) <= 300 and part.startswith("第") and part.endswith("。")
    assert ask.cut_passage("短文。", 300, 7) == "短文。"


@pytest.mark.parametrize(
    ("question", "reason"),
    [
        ("2021年虹桥甲科技的毛利率是多少？", None),
        ("其他应收款包括哪些项目？", None),
        ("公司债的本金如何计算利息？", None),
        ("该公司的董事长是谁？", "question points at something unnamed"),
        ("文中提到的利润是多少？", "question refers to the passage"),
        ("What does the passage say about revenue?", "question refers to the passage"),
        ("营业收入。营业成本。", "not a question"),
        ("为何？", "question length"),
    ],
)
def test_a_question_must_stand_alone(question: str, reason: str | None) -> None:
    assert endpoint.question_reason(question) == reason


@pytest.mark.parametrize(
    ("answer", "finish", "reason"),
    [
        ("毛利率为12.50%。\n1. 成本上升\n2. 价格下降", "stop", None),
        ("毛利率为13.5%。", "stop", "number not in the passage"),
        ("毛利率为12.5%，因为", "length", "answer cut off"),
        ("无法回答", "stop", "passage does not answer"),
        ("抱歉，我不知道。", "stop", "refusal"),
        ("根据材料，毛利率为12.5%。", "stop", "answer refers to the passage"),
        ("毛利率是多少", "stop", "answer repeats the question"),
        ("高", "stop", "answer length"),
        ("毛利率下降，" * 20, "stop", "answer repeats itself"),
    ],
)
def test_an_answer_must_be_whole_and_grounded(answer: str, finish: str, reason: str | None) -> None:
    settings = SelfQA(model="m", min_answer_characters=2)
    assert settings.grounded_numbers and settings.language == "zh"
    assert endpoint.answer_reason("2021年毛利率为12.5%", "毛利率是多少？", answer, finish, settings) == reason


def test_a_list_of_questions_is_read_however_it_is_written() -> None:
    expected = ["甲是多少？", "2021年乙是多少？"]
    lines = "1. 甲是多少？\n\n2、2021年乙是多少？", "- 甲是多少？\n- 2021年乙是多少？"
    for reply in (*lines, '["甲是多少？", "2021年乙是多少？"]'):
        assert endpoint.split_questions(reply) == expected
