"""Asking a model: shared prefixes change nothing, a killed evaluation goes on, the command reports."""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from ruamel.yaml import YAML

from finlm.base import files
from finlm.base.errors import UserError
from finlm.base.rundir import RunDir
from finlm.cli import main
from finlm.evals import answering, questions, suite
from finlm.evals.answering import Prompt
from finlm.evals.questions import STYLES, Question, Suite
from finlm.inference.open import Opened, open_model
from finlm.recipe import recipe as recipes
from finlm.record.report import run_page
from finlm.rows.shards import Shards
from finlm.tokens import vocab

from helpers import QUICKSTART

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}Human: {{ message.content }} "
    "{% else %}Assistant: {{ message.content }}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)


def reference(opened: Opened, prompt: Prompt) -> list[float]:
    """The letters' log-likelihoods from one plain forward pass each."""
    begin = prompt.begin or len(answering.common_prefix(prompt.ids))
    found = []
    for ids in prompt.ids:
        with torch.inference_mode():
            logprobs = torch.log_softmax(opened.model(torch.tensor([ids])).logits[0].float(), dim=-1)
        found.append(sum(float(logprobs[at - 1, ids[at]]) for at in range(begin, len(ids))))
    return found


@pytest.mark.parametrize("shots", [0, 3])
def test_batches_behind_a_shared_prefix_score_as_plain_forward_passes(opened: Opened, exam: Suite, shots: int) -> None:
    asked = answering.continuations(opened, exam, exam.questions[:16], shots)
    found = {place: own for batch in answering.score_letters(opened, asked, tokens=700) for place, own in batch.items()}
    assert sorted(found) == list(range(16))
    for place, prompt in enumerate(asked):
        assert found[place] == pytest.approx(reference(opened, prompt), abs=1e-4)


def test_letters_of_several_tokens_are_summed(opened: Opened, exam: Suite) -> None:
    base = answering.continuations(opened, exam, exam.questions[:6], 1)
    tails = ((11, 12), (11, 13, 14), (15,), (16, 17))
    asked = [Prompt(p.question, p.text, p.shots, tuple(p.ids[0][:-1] + tail for tail in tails)) for p in base]
    for batch in answering.score_letters(opened, asked):
        for place, own in batch.items():
            assert own == pytest.approx(reference(opened, asked[place]), abs=1e-4)


def test_examples_that_do_not_fit_are_left_out_one_by_one(run: RunDir, exam: Suite) -> None:
    narrow = open_model(run.path)
    narrow = Opened(**(vars(narrow) | {"context": 350}))
    asked = answering.continuations(narrow, exam, exam.questions[:40], 5)
    assert max(len(ids) for prompt in asked for ids in prompt.ids) <= 350
    assert len({prompt.shots for prompt in asked}) > 1 and min(prompt.shots for prompt in asked) < 5


@pytest.mark.parametrize("shots", [3, 5, 10])
def test_the_shots_counted_are_those_shown(opened: Opened, exam: Suite, shots: int) -> None:
    rich, poor, bare = list(exam.examples)[:3]
    examples = {rich: exam.examples[rich], poor: exam.examples[poor][:2], bare: ()}
    asked = [next(q for q in exam.questions if q.subject == subject) for subject in examples]
    of = dataclasses.replace(exam, examples=examples)
    texts = answering.continuations(opened, of, asked, shots)
    assert [prompt.shots for prompt in texts] == [min(shots, 5), 2, 0]
    assert [prompt.text.count("\n答案：") - 1 for prompt in texts] == [prompt.shots for prompt in texts]
    narrow = Opened(**(vars(opened) | {"context": 300, "tokenizer": copy.deepcopy(opened.tokenizer)}))
    narrow.tokenizer.chat_template = TEMPLATE
    chats = answering.conversations(narrow, of, asked, shots)
    assert [prompt.text.count("Assistant: ") for prompt in chats] == [prompt.shots for prompt in chats]
    assert all(opened.tokenizer.decode(prompt.ids[0]).startswith("<s>") for prompt in chats), "only examples are cut"
    assert chats[0].shots < 3 and max(len(prompt.ids[0]) for prompt in chats) <= 300 - 64


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--suite", "exam", "--shots", "3", "--mode", "cloze"), "shows no examples"),
        (("--suite", "exam", "--mode", "cloze", "--write-lm-eval", "out"), "leave out --mode cloze"),
        (("--suite", "recall", "--data", "questions"), "--data has no meaning for --suite recall"),
        (("--suite", "recall", "--mode", "published"), "is the way of FinanceIQ's own code"),
        (("--limit", "3", "--write-lm-eval", "out"), "--limit, --write-lm-eval: only questions"),
    ],
)
def test_options_that_mean_nothing_are_refused(
    run: RunDir,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    words: str,
) -> None:
    monkeypatch.setattr(suite, "open_model", lambda _: pytest.fail("the model was loaded"))
    assert main.main(["eval", str(run.path), *options]) == 2
    assert words in " ".join(capsys.readouterr().err.split())


def test_an_evaluation_that_was_killed_asks_only_what_is_left(opened: Opened, exam: Suite, tmp_path: Path) -> None:
    asked, ledger = exam.questions[:20], tmp_path / "answers.jsonl"
    whole = answering.answer_questions(opened, exam, asked, "likelihood", 2, ledger)
    lines = ledger.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = "".join(lines[:7]) + lines[7][:40]  # a kill cuts a line
    ledger.write_text(kept, encoding="utf-8")
    assert answering.answer_questions(opened, exam, asked, "likelihood", 2, ledger) == whole
    after = ledger.read_text(encoding="utf-8")
    assert after.startswith(kept) and len(list(files.read_json_lines(ledger))) == 20
    answering.answer_questions(opened, exam, asked, "likelihood", 1, ledger)  # other prompts are other questions
    assert len(list(files.read_json_lines(ledger))) == 40


def test_cloze_weighs_the_options_in_full_and_shows_them_to_an_assistant_only(
    opened: Opened, exam: Suite, run: RunDir
) -> None:
    question = exam.questions[0]
    asked = answering.cloze_prompts(opened, exam, exam.questions[:6], 0)
    for option, ids in zip(question.options, asked[0].ids, strict=True):
        assert opened.tokenizer.decode(ids).endswith(f"{option}。")
    assert "A. " not in asked[0].text  # no letters: that is the point
    for batch in answering.score_letters(opened, asked):
        for place, own in batch.items():
            assert own == pytest.approx(reference(opened, asked[place]), abs=1e-4)
    assistant = open_model(run.path)
    assistant.tokenizer.chat_template = TEMPLATE
    (prompt,) = answering.cloze_prompts(assistant, exam, exam.questions[:1], 0)
    first, *_ = prompt.text.split("\n<s>")
    assert first.startswith(f"<s>Human: {question.text}") and f"A. {question.options[0]}" in first
    assert first.endswith(f"Assistant: {question.options[0]}。")


def test_cloze_compares_likelihoods_per_character_of_the_whole_option(
    opened: Opened, exam: Suite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("净利润", "净利润同比下降，营业收入同比增长", "净利润环比", "净利润率")
    asked = [dataclasses.replace(exam.questions[0], options=options), exam.questions[1]]
    of = dataclasses.replace(exam, questions=tuple(asked))
    (prompt, _) = answering.cloze_prompts(opened, of, asked, 0)
    stem = opened.tokenizer.decode(prompt.ids[0][: prompt.begin])
    assert stem.endswith("答案：") and "净利润" not in stem[-3:], "what the options have in common counts too"
    assert prompt.characters == tuple(len(option) + 1 for option in options)
    for batch in answering.score_letters(opened, [prompt, *answering.cloze_prompts(opened, of, asked[1:], 0)]):
        for own in batch.values():
            assert len(own) == 4
    sums = [-4.0, -9.0, -6.0, -5.0]  # the shortest is the likeliest, the second the likeliest per character
    monkeypatch.setattr(
        answering, "score_letters", lambda opened, asked: iter([dict.fromkeys(range(len(asked)), sums)])
    )
    found = answering.answer_questions(opened, of, asked[:1], "cloze", 0, tmp_path / "cloze.jsonl")
    assert [answer.letter for answer in found] == ["B"] and list(found[0].scores) == sums
    letters = answering.answer_questions(opened, of, asked[:1], "likelihood", 0, tmp_path / "letters.jsonl")
    assert [answer.letter for answer in letters] == ["A"], "letters are as they were"


def test_suites_at_the_end_of_a_run_ask_the_model_it_started_from_too(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suite, "draw_questions", lambda asked, limit: asked[:20])
    before = len(list(run.read_events("suite")))
    suite.evaluate_run(run, ["exam"], "cloze", run.export)
    start, end = list(run.read_events("suite"))[before:]
    assert (start["step"], end["step"]) == (0, run.complete_checkpoints()[-1][0])
    assert start["mode"] == end["mode"] == "cloze" and start["micro"] == end["micro"]  # here they are the same weights
    assert start["likelihood_per"] == "character"


def test_a_run_that_cannot_be_written_still_gives_its_result(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied", str(run.events))

    monkeypatch.setattr(RunDir, "append_event", refuse)
    asked = ["eval", str(run.path), "--suite", "exam", "--limit", "4", "--shots", "0", "--json", "--answers"]
    assert main.main([*asked, str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["questions"] == 4 and "not recorded in the run" in printed.err
    assert main.main([*asked, str(run.recipe)]) == 2  # a file
    assert "answers cannot be kept in" in capsys.readouterr().err


def test_a_chat_answers_in_batches_as_it_does_alone(run: RunDir, exam: Suite, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no chat template"):
        answering.answer_questions(open_model(run.path), exam, exam.questions[:1], "chat", 0, tmp_path / "a.jsonl")
    opened = open_model(run.path)
    opened.tokenizer.chat_template = TEMPLATE
    opened = Opened(**(vars(opened) | {"context": 400}))
    (prompt,) = answering.conversations(opened, exam, exam.questions[:1], 0)
    asked = exam.questions[0]
    turn = "\n".join([asked.text, *(f"{name}. {text}" for name, text in zip("ABCD", asked.options, strict=True))])
    assert prompt.text == f"<s>Human: {turn} Assistant:"  # what the dialogues of SFT look like
    together = answering.answer_questions(opened, exam, exam.questions[:5], "chat", 0, tmp_path / "b.jsonl")
    alone = [
        answering.answer_questions(opened, exam, [q], "chat", 0, tmp_path / "c.jsonl")[0] for q in exam.questions[:5]
    ]
    assert [answer.text for answer in together] == [answer.text for answer in alone]
    assert any(answer.text for answer in together)


def test_padding_is_not_penalised_as_repetition(run: RunDir) -> None:
    opened, rows = open_model(run.path), [(1, 300, 400), tuple(range(200, 230))]
    style = dataclasses.replace(STYLES["exam"], repetition_penalty=9.0, max_tokens=1)
    with torch.inference_mode():
        likeliest = int(opened.model(torch.tensor(rows[:1])).logits[0, -1].argmax())
    opened = Opened(**(vars(opened) | {"eos_ids": (likeliest,)}))
    together = answering._generate(opened, rows, style, questions.decided_letter)
    assert together == [answering._generate(opened, [row], style, questions.decided_letter)[0] for row in rows]
    assert together[0] == opened.tokenizer.decode([likeliest]), "the end of an answer, with which rows are padded"


def test_the_command_reports_on_screen_as_json_and_in_the_run(
    run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["eval", str(run.path), "--suite", "exam", "--limit", "30", "--shots", "0", "--json"]
    assert main.main([*command, "--contamination", str(run.path)]) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert result["questions"] == 30 == sum(row["total"] for row in result["subjects"].values())
    assert result["set"]["questions"] == questions.EXAM_QUESTIONS
    assert "micro (all questions)" in printed.err and "stand in the training data" in printed.err
    *_, row = run.read_events("suite")
    assert row["micro"] == result["micro"] and row["step"] == run.complete_checkpoints()[-1][0]
    assert "Multiple choice" in run_page.build(run).read_text(encoding="utf-8")
    assert main.main(["eval", str(tmp_path), "--suite", "exam"]) == 2
    assert "holds no model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("stage", "words"), [("dpo", "--suite exam"), ("grpo", "--suite exam"), ("reward", "pairs of")]
)
def test_runs_whose_rows_are_pairs_or_prompts_have_no_perplexity(
    run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str], stage: str, words: str
) -> None:
    other = RunDir(tmp_path / stage)
    shutil.copytree(run.path, other.path)
    text = recipes.dump(recipes.load(QUICKSTART.with_name(f"{stage}.yaml")).recipe)
    other.recipe.write_text(text, encoding="utf-8")
    assert main.main(["eval", str(other.path)]) == 2
    printed = capsys.readouterr().err
    assert "have no perplexity" in printed and words in printed and "report.html" in printed
    if stage == "reward":  # nor does it write answers
        config = files.read_json(other.export / "config.json") | {"architectures": ["LlamaForSequenceClassification"]}
        files.write_json(other.export / "config.json", config)
        (other.export / "finlm.json").unlink()
        assert main.main(["eval", str(other.path), "--suite", "exam"]) == 2
        assert "is a reward model" in capsys.readouterr().err


def test_questions_that_were_read_in_training_are_found(run: RunDir, exam: Suite) -> None:
    shards = Shards(run.shards)
    processor = vocab.load(shards.tokenizer)
    (part,) = (part for part in shards.split("train") if part.source == "fin_exam")
    read = []
    for start, end in zip(part.offsets[:20].tolist(), part.offsets[1:21].tolist(), strict=True):
        *stem, a, b, c, d, answer = processor.decode(part.ids[start:end].tolist()).split("\n")
        read.append(Question("", "\n".join(stem), (a[3:], b[3:], c[3:], d[3:]), answer[-1]))
    found = suite.find_contained([*read, *exam.questions[:20]], run.path)
    assert len([place for place in found if place < 20]) >= 18 and len(found) <= 22
    summary = suite.contained_summary(found, [place < 20 for place in range(40)], run.path)
    assert summary.accuracy_contained > 0.8 and summary.accuracy_others < 0.2


def test_lm_eval_gets_the_same_prompts(run: RunDir, exam: Suite, tmp_path: Path) -> None:
    options = suite.Options("exam", shots=1, limit=25)
    tasks = suite.write_lm_eval_task(run.path, options, tmp_path / "tasks")
    group = YAML(typ="safe").load(tasks / "finlm_exam.yaml")
    prompts_written = {}
    for name in group["task"]:
        task = YAML(typ="safe").load(tasks / f"{name.rpartition('_')[2]}.yaml")
        assert task["task"] == name and task["doc_to_choice"] == ["A", "B", "C", "D"]
        for row in files.read_json_lines(Path(task["dataset_kwargs"]["data_files"]["test"])):
            prompts_written[row["id"]] = (row["prompt"], row["answer"])
    asked = answering.continuations(open_model(run.path), exam, suite.draw_questions(exam.questions, 25), 1)
    assert prompts_written == {p.question.sha256: (p.text, "ABCD".index(p.question.answer)) for p in asked}


def test_an_export_has_no_perplexity(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["eval", str(run.export)]) == 2
    assert "is a model alone, without held-out text" in capsys.readouterr().err


def test_the_world_of_a_recipe_is_asked_of_a_model_without_a_run(
    run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lone = shutil.copytree(run.export, tmp_path / "lone")
    asked = ["eval", str(lone), "--suite", "exam", "--limit", "2", "--answers", str(tmp_path / "answers")]
    assert main.main([*asked, "--world", "quickstart"]) == 0, "a recipe's short name"
    assert "a random 2 of 1,000 questions" in capsys.readouterr().out
    monkeypatch.setattr(suite, "open_model", lambda _: pytest.fail("the model was loaded"))
    for options, words in (
        ([], "this model was not trained on one"),
        (["--world", "xuanyuan-6b"], "trains on none"),
        (["--world", "none"], "cannot read the recipe none"),
    ):
        assert main.main([*asked, *options]) == 2
        assert words in capsys.readouterr().err


@pytest.fixture
def financeiq(tmp_path: Path) -> Path:
    """Nine questions of a subject and five solved ones, as FinanceIQ's folder holds them."""
    head = ",Question,A,B,C,D,Answer\n"
    for part, count in (("dev", 5), ("test", 9)):
        (folder := tmp_path / "financeiq" / part).mkdir(parents=True)
        rows = "".join(f"{n},第{n}题{part}？{'长' * 9 * n},甲{n},乙,丙,丁,{'ABCD'[n % 4]}\n" for n in range(count))
        (folder / "保险.csv").write_text(head + rows, encoding="utf-8")
    return tmp_path / "financeiq"


def test_published_asks_as_financeiqs_code_and_draws_the_same_letters_again(
    opened: Opened, run: RunDir, financeiq: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asked = questions.read_questions("financeiq", financeiq, None)
    (first, *_) = answering.published_prompts(opened, asked, asked.questions, 5)
    text = "以下是关于保险的单项选择题，请直接给出正确答案的选项。\n\n"
    shown = [
        f"题目：第{n}题dev？{'长' * 9 * n}\nA. 甲{n}\nB. 乙\nC. 丙\nD. 丁\n答案是：{'ABCD'[n % 4]}\n\n"
        for n in range(5)
    ]
    end = "题目：第0题test？\nA. 甲0\nB. 乙\nC. 丙\nD. 丁\n答案是："
    assert first.text == text + "".join(shown) + end and first.shots == 5
    sizes = [len(opened.tokenizer(part)["input_ids"]) for part in (text, end, *shown)]
    for kept in (4, 0):  # the longest go first, and whatever fills the limit to its last token is too long
        room = sum(sizes[: 3 + kept])
        context = next(size for size in range(room, 2 * room) if size - size // 4 == room)
        narrow = Opened(**(vars(opened) | {"context": context}))
        (prompt, *_) = answering.published_prompts(narrow, asked, asked.questions[:1], 5)
        assert prompt.text == text + "".join(shown[:kept]) + end and prompt.shots == kept
    result = answering.answer_questions(opened, asked, asked.questions, "published", 5, tmp_path / "one.jsonl")
    again = answering.answer_questions(opened, asked, asked.questions, "published", 5, tmp_path / "two.jsonl")
    assert result == again and all(answer.letter in "ABCD" for answer in result)
    style = answering.chat_style(opened, asked)
    assert (style.repetition_penalty, style.max_tokens) == (1.1, 512)
    (whole,) = answering._generate(opened, [first.ids[0]], style, lambda _: None)
    assert questions.read_published(whole) == (None if result[0].drawn else result[0].letter), (
        "to its end, as published"
    )
    command = ["eval", str(run.path), "--suite", "financeiq", "--data", str(financeiq), "--mode", "published", "--json"]
    assert main.main(command) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert found["mode"] == "published" and found["shots"] == 5 and found["unanswered"] == 0
    drawn = [row.get("drawn", False) for row in files.read_json_lines(Path(found["answers"]))]
    assert found["drawn"] == sum(drawn) and (f"{sum(drawn)} answers (" in printed.err) == any(drawn)
    assert main.main(["eval", str(run.path), "--suite", "exam", "--mode", "published"]) == 2
    assert "FinanceIQ's own code" in capsys.readouterr().err


def test_a_published_answer_without_a_letter_is_drawn_by_its_question(exam: Suite) -> None:
    asked = [Prompt(question, "", 5, ((1,),)) for question in exam.questions[:200]]
    drawn = [answering._read_answer(prompt, "不知道", "published") for prompt in asked]
    counts = [sum(answer.letter == letter for answer in drawn) for letter in "ABCD"]
    assert all(answer.drawn for answer in drawn) and min(counts) > 25
    assert [answer.letter for answer in drawn] == [
        answering._read_answer(prompt, "没有", "published").letter for prompt in asked
    ]
    assert answering._read_answer(asked[0], "B", "published") == answering.Answer("B", 5, text="B")


def test_cflue_is_put_and_read_as_its_own_code_does(run: RunDir, tmp_path: Path) -> None:
    opened = open_model(run.path)
    opened.tokenizer.chat_template = TEMPLATE
    market = "{'A': '货币', 'B': '债券', 'C': '商品', 'D': '外汇', 'E': '无'}"
    rows = [
        ("银行从业", "单项选择题", "利率上升，债券价格？", "{'A': '下降', 'B': '上升'}", "A"),
        ("证券从业", "多项选择题", "金融市场包括？", market, "DBA"),
    ]
    rows = [dict(zip(("名称", "task", "question", "choices", "answer"), row, strict=True)) for row in rows]
    (tmp_path / "knowledge.json").write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")
    made = questions.read_questions("cflue", tmp_path, None)
    one, several = made.questions
    assert (one.answer, one.options, several.answer, several.kind) == ("A", ("下降", "上升"), "ABD", "several")
    prompts = answering.conversations(opened, made, made.questions, 0)
    assert "题目是单选题" in prompts[0].text and "题目是多选题" in prompts[1].text
    assert "金融市场包括？\nA. 货币\nB. 债券\nC. 商品\nD. 外汇\nE. 无" in prompts[1].text
    for options in (suite.Options("cflue", "likelihood"), suite.Options("cflue", shots=5)):
        with pytest.raises(UserError, match="CFLUE asks assistants"):
            suite.evaluate(tmp_path, options)
    result = suite._ask_suite(opened, suite.Options("cflue", data=tmp_path, answers=tmp_path / "answers"))
    assert result.mode == "chat" and result.scores.questions == 2 and set(result.letters) == set("ABCDEF")
    assert result.weighted_f1 is not None and 0 <= result.weighted_f1 <= 1


def test_weighted_f1_is_scikit_learns() -> None:
    right, given = ["A", "A", "A", "B", "AB", "C"], ["A", "B", "A", "B", None, "D"]
    # By hand: A 2 of 3 read and 2 given: 2*2/5; B 1 of 1, given twice: 2*1/3; AB 0 of 1; C 0 of 1.
    assert questions.weighted_f1(right, given) == pytest.approx((3 * 0.8 + 1 * 2 / 3) / 6)
