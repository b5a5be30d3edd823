"""Ask CFLUE's application tasks and score the answers as its own code does: `finlm eval MODEL --suite cflue-tasks`.

github.com/aliyun/cflue (arXiv 2405.10542), exec_application_eval.py and utils/compute_score.py, puts each
instruction of application.json to an assistant as it is, decodes greedily without a repetition penalty, and scores

- Fin_TC, classification: the share of right labels;
- Fin_MT, translation, each way: BLEU of sacrebleu over words of jieba (Chinese) or nltk (English);
- Fin_RE, extraction: the mean F1 of (key, value) pairs, read by its rules for each kind of row, misreadings included;
- Fin_RC, reading comprehension, and Fin_TG, generation: the mean ROUGE-L of the package rouge over words of jieba.

All scores are shares from 0 to 1. COMET, beside BLEU in that table, is a model of 3.5 billion parameters and is not
computed here. Heavy modules are imported late: what is missing is told before torch is loaded.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from finlm.base import files, screen
from finlm.base.errors import UserError
from finlm.evals.questions import FETCH, Interval, Question, Suite, bootstrap, digest

if TYPE_CHECKING:
    from finlm.evals.suite import Options
    from finlm.inference.open import Opened

FILE = "application.json"
PACKAGES = ("sacrebleu", "jieba", "rouge", "nltk")
ENGLISH, CHINESE = "Fin_MT en2zh", "Fin_MT zh2en"  # translated from
METRICS = {"Fin_TC": "accuracy", ENGLISH: "BLEU-4", CHINESE: "BLEU-4", "Fin_RE": "F1"}
METRICS |= {"Fin_RC": "ROUGE-L", "Fin_TG": "ROUGE-L"}
_TASKS = {"金融文本分类": "Fin_TC", "金融文本抽取": "Fin_RE", "金融咨询": "Fin_RC", "金融文本生成": "Fin_TG"}
_TRANSLATIONS = {"金融英中翻译": ENGLISH, "金融中英翻译": CHINESE}  # sub-tasks of 金融翻译
_DRAWS = 1_000
_EVENT, _CAUSE, ENTITY, _INDUSTRY = "金融事件抽取", "金融事件因果关系抽取", "金融事件主体抽取", "行业情感信息抽取"
_CAUSES = {
    f"{side}{name}": f"{key}_{kind}"
    for side, key in (("原因", "reason"), ("结果", "result"))
    for name, kind in (("类型", "type"), ("产品", "product"), ("地区", "region"), ("行业", "industry"))
}
_MARKS = (",", "，", "。", ".", "、", ";", "；", ":", "：", " ")


@dataclass(frozen=True)
class Score:
    """A score from 0 to 1 over some rows, with its 95 % interval."""

    metric: str
    rows: int
    value: float
    interval: Interval


@dataclass(frozen=True)
class Contained:
    """How many of a task's instructions the training data contains, and the score of these and of the others."""

    contained: int
    score_contained: float | None
    score_others: float | None


@dataclass(frozen=True)
class Result:
    """The result of `finlm eval --suite cflue-tasks`: scores by task and by sub-task."""

    model: str
    fingerprint: str
    scores: dict[str, Score]
    parts: dict[str, Score]
    empty: int  # answers without a word
    rows: int  # in the whole set
    sha256: str  # of the whole set
    answers: str  # the file they are kept in
    event: ClassVar[str] = "tasks"
    suite: str = "cflue-tasks"
    mode: str = "chat"
    training: str | None = None
    contamination: dict[str, Contained] | None = None

    def to_json(self) -> dict[str, object]:
        """Return the document of --json, which is also the event `tasks`."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def read_tasks(data: Path | None) -> Suite:
    """Return the rows of `data`/application.json as questions without options; subject is "TASK, SUB-TASK".

    Raises UserError when packages of the scores are missing, without the file, and for a row that is no task.
    """
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        evidence = f"missing: {', '.join(missing)}"
        fix = ".venv/bin/pip install -r requirements-cflue.lock"
        raise UserError("answers to CFLUE's tasks are scored by packages of their own", evidence=evidence, fix=fix)
    fix = f"give the folder that holds {FILE} with --data ({FETCH['cflue-tasks']})"
    if data is None:
        evidence = "they are under licences of their own and not part of this repository"
        raise UserError("--suite cflue-tasks needs its files", evidence=evidence, fix=fix)
    path = data / FILE
    if not path.is_file():
        raise UserError(f"there is no {path}", fix=fix)
    rows = files.read_json(path)
    if not isinstance(rows, list) or not rows:
        raise UserError(f"{path} holds no tasks", evidence="it is no list of rows", fix=fix)
    questions = tuple(_read_row(path, number, row) for number, row in enumerate(rows, 1))
    return Suite("cflue-tasks", questions, {}, digest(questions), None)


def _read_row(path: Path, number: int, row: Any) -> Question:
    """Return a row of the file as a Question. Raises UserError when it is no task or its answer cannot be read."""
    try:
        task = _TRANSLATIONS[row["sub_task"]] if row["task"] == "金融翻译" else _TASKS[row["task"]]
        part, text, right = row["sub_task"], row["instruction"], row["output"]
        right = right if isinstance(right, str) else json.dumps(right, ensure_ascii=False)
        if not part or not text.strip() or not right.strip():
            raise ValueError("no sub_task, instruction or output")
        if task == "Fin_RE" and part != ENTITY:
            read_label(part, right)
    except (KeyError, TypeError, ValueError, SyntaxError, AttributeError, IndexError) as error:
        evidence = f"KeyError: {error}" if isinstance(error, KeyError) else repr(error)
        problem, fix = f"{path}: row {number} is no task of CFLUE", "correct the row or take it out"
        raise UserError(problem, evidence=evidence, fix=fix) from None
    return Question(f"{task}, {part}", text, (), right)


def ask(opened: Opened, options: Options) -> Result:
    """Answer the tasks, add answers to the ledger, return scores. UserError without packages, file or chat template."""
    from finlm.evals import answering, suite

    asked = read_tasks(options.data)
    selected = suite.draw_questions(asked.questions, options.limit)
    ledger = options.ledger(opened, "chat")
    said = [answer.text for answer in answering.answer_questions(opened, asked, selected, "chat", 0, ledger)]
    contained = None
    if options.contamination is not None:
        contained = _split_scores(selected, said, suite.find_contained(selected, options.contamination))
    return Result(
        model=opened.name,
        fingerprint=opened.fingerprint,
        scores=score(selected, said),
        parts=score(selected, said, of_parts=True),
        empty=sum(not text.strip() for text in said),
        rows=len(asked.questions),
        sha256=asked.sha256,
        answers=str(ledger),
        training=None if options.contamination is None else str(options.contamination),
        contamination=contained,
    )


def score(questions: Sequence[Question], answers: Sequence[str], *, of_parts: bool = False) -> dict[str, Score]:
    """Return {task: Score} of the answers to the questions in CFLUE's order; of_parts: {"TASK, SUB-TASK": Score}."""
    groups: dict[str, list[tuple[Question, str]]] = {}
    for pair in zip(questions, answers, strict=True):
        groups.setdefault(pair[0].subject if of_parts else _task(pair[0]), []).append(pair)
    names = sorted(groups, key=lambda name: (list(METRICS).index(name.partition(", ")[0]), name))
    return {name: _measure(groups[name]) for name in names}


def _task(question: Question) -> str:
    """Return the question's task, such as "Fin_MT en2zh"."""
    return question.subject.partition(", ")[0]


def _measure(pairs: Sequence[tuple[Question, str]]) -> Score:
    """Return the Score of (question, answer) pairs of a task."""
    task = _task(pairs[0][0])
    if METRICS[task] == "BLEU-4":
        words = cut_english if task == CHINESE else cut_chinese
        return Score("BLEU-4", len(pairs), *_bleu([(words(q.answer), words(text)) for q, text in pairs]))
    values = [score_answer(question, text) for question, text in pairs]
    return Score(METRICS[task], len(pairs), float(np.mean(values)), bootstrap(values))


def _split_scores(asked: Sequence[Question], said: Sequence[str], shares: Mapping[int, float]) -> dict[str, Contained]:
    """Return {task: Contained}; the keys of `shares` are the indexes of the questions in the training data."""
    inside, outside = (
        score([asked[place] for place in places], [said[place] for place in places])
        for places in (sorted(shares), [place for place in range(len(asked)) if place not in shares])
    )
    counts = {task: inside[task].rows if task in inside else 0 for task in METRICS if task in inside or task in outside}
    values = {task: [part[task].value if task in part else None for part in (inside, outside)] for task in counts}
    return {task: Contained(count, *values[task]) for task, count in counts.items()}


def score_answer(question: Question, answer: str) -> float:
    """Return the score from 0 to 1 of an answer to a question of any task but translation."""
    task, _, subtask = question.subject.partition(", ")
    if task == "Fin_TC":
        return float(is_right_label(subtask, question.answer, answer))
    return score_extraction(subtask, question.answer, answer) if task == "Fin_RE" else rouge_l(question.answer, answer)


def is_right_label(subtask: str, right: str, answer: str) -> bool:
    """Return whether an answer has the right label: alone in quotes, or in words without comma; 2 sub-tasks differ."""
    if subtask == "ESG情感分类":  # 正, 中 or 负 anywhere
        return right[0] in answer or (right, answer) in (("负向", "Negative"), ("正向", "Positive"))
    if subtask == "合规政策审核":
        return right == ("否" if "不合规" in answer or "不符合" in answer else "是")
    quoted = re.findall("'([^']*)'", answer)
    return quoted == [right] if quoted else right in answer and not any(mark in answer for mark in ",，、")


def score_extraction(subtask: str, right: str, answer: str) -> float:
    """Return an answer's F1 as CFLUE's code reads it; 0 for an unknown sub-task. `right` suits read_label()."""
    if subtask == ENTITY:
        return float(right in answer)
    if subtask == _CAUSE:
        return _score_causes(read_label(subtask, right), answer)
    if subtask == _EVENT:
        return _pair_f1(read_label(subtask, right), _read_events(answer))
    if subtask == _INDUSTRY:
        return _pair_f1(_first_moods(read_label(subtask, right)), _first_moods(_read_industries(answer)))
    return 0.0


def read_label(subtask: str, right: str) -> dict[str, str]:
    """Return the right answer of an extraction as {key: value}; of causes the first, as that code compares it alone.

    Raises KeyError, TypeError, ValueError, SyntaxError or IndexError if it is not of the sub-task's form.
    """
    label = ast.literal_eval(right) if subtask in (_EVENT, _CAUSE, _INDUSTRY) else {}
    if subtask == _EVENT:
        label = {row["role"]: row["argument"] for row in label}
    elif subtask == _CAUSE:
        label = {key: label[0][key] for key in _CAUSES.values()}
    if not all(isinstance(text, str) for pair in label.items() for text in pair):
        raise TypeError("a key or value that is no text")
    return dict(label)


def _score_causes(right: Mapping[str, str], answer: str) -> float:
    """Return the F1 of eight named fields: precision is the share of right ones, recall the share of named ones."""
    # So CFLUE's code counts: a field is right when it rightly says that nothing is there (无, 未提及), or when the text
    # from its name to the end of its line, colon and line end included, is the right value.
    named = hits = 0
    for name, key in _CAUSES.items():
        if match := re.search(f"{name}(.*?)(\n|$)", answer):
            value = "".join(part for part in match.groups() if part not in _MARKS)
            named += 1
            hits += right[key] in value if re.search("未提及|无|None", value) else right[key] == value
    return 2 * hits * named / 8 / (hits + named) if hits + named else 0.0


def _pair_f1(right: Mapping[str, str], said: Mapping[str, str]) -> float:
    """Return the F1 of the pairs of `said` against those of `right`."""
    hits = len(right.items() & said.items())
    return 2 * hits / (len(right) + len(said)) if hits else 0.0


def _first_moods(moods: Mapping[str, str]) -> dict[str, str]:
    """Return {industry: the first of 正, 负, 中, 无 in its text}, without industries that have none."""
    return {name: match[0] for name, text in moods.items() if (match := re.search("[正负中无]", text))}


def _simplify(text: str) -> str:
    """Return the text with narrow punctuation, without spaces and without commas at line ends."""
    return text.translate(str.maketrans("：，；。", ":,;.", " ")).replace(",\n", "\n")


def _trim(text: str) -> str:
    """Return the text without line ends, full stops and semicolons around it, then without spaces around the rest."""
    return text.strip("\n.;").strip()


def _read_events(answer: str) -> dict[str, str]:
    """Return {role: argument} of an answer in lines "role: argument", or "key1: role", "value1: argument"."""
    text = _simplify(answer)
    if "value" in text:
        pairs = re.findall(r"key\d:(.*)\s*value\d?:?\s*(.*)", text)
    else:
        pairs = re.findall("(.*):(.*)", text)
        pairs = pairs[: next((place for place, (role, _) in enumerate(pairs) if "key" in role), None)]
    return {_trim(role): _trim(argument) for role, argument in pairs}


def _separators(text: str) -> list[str]:
    """Return the separators 、 : ; , and line end that the text has, the rarest first."""
    counts = Counter(letter for letter in text if letter in "、:;,\n")
    return sorted((mark for mark in "、:;,\n" if counts[mark]), key=lambda mark: counts[mark])


def _as_pairs(parts: Iterable[str], mark: str) -> dict[str, str]:
    """Return {before: behind} the mark in each part. Raises ValueError unless each part has it exactly once."""
    return dict(tuple(part.split(mark)) for part in parts)  # type: ignore[misc]


def _scan_moods(text: str, between: str = r"[:\s]+", letter: str = r"\w") -> dict[str, str]:
    """Return {name: mood} wherever name (`letter`s), `between`, mood (正 负 中 无 |) and `letter`s are in sequence."""
    return dict(re.findall(f"({letter}+){between}([正|负|中|无]){letter}+", text))


def _read_industries(answer: str) -> dict[str, str]:
    """Return {industry: text of its mood} of an answer, in any of the forms that CFLUE's code reads."""
    text = _simplify(answer)
    if match := re.match("行业:(.*)情感分类:(.*)", text, re.DOTALL):
        moods = _join_industries(*(part.strip("\n.;") for part in match.groups()))
    elif "抽取结果" in text:
        match = re.match("抽取结果.*?:(.*)", text, re.DOTALL)
        moods = _read_announced(_trim(match[1])) if match else _scan_moods(text)
    else:
        match = re.match("^.*结果.*?:(.*)", text, re.DOTALL)
        moods = _split_twice(_trim(match[1]) if match else text)
    return moods or _scan_moods(text, r"[:\s]*")


def _join_industries(names: str, moods: str) -> dict[str, str]:
    """Return {industry: mood} of a list of industries and a list of moods; one mood is for all, 无 where they lack."""
    marks, name_marks = _separators(moods), _separators(names)
    listed = names.split(name_marks[0]) if name_marks else None
    if not marks:
        return dict.fromkeys(listed or [names], moods)
    given = moods.split(marks[0])
    if len(marks) > 1:
        return _or_scan(lambda: _as_pairs(given, ":"), moods)
    if listed is None:
        return _scan_moods(moods)
    for pattern in (".*[为是](.*)", ".*（(.*)）"):
        said = [re.search(pattern, mood, re.DOTALL) for mood in given]
        if all(said):
            return dict(zip(listed, (match[1] for match in said if match), strict=False))
    return dict(zip(listed, [*given, *["无"] * len(listed)], strict=False))


def _read_announced(text: str) -> dict[str, str]:
    """Return {industry: mood} of what follows "抽取结果:": pairs, or a list of industries with or without its moods."""
    if match := re.match("(.*)情感分类结果:(.*)", text, re.DOTALL):
        marks = _separators(match[2])
        names = text[: text.rindex("情感分类结果")].strip()
        return dict(zip_longest(names.split(marks[0]), match[2].split(marks[0]), fillvalue="无")) if marks else {}
    marks = _separators(text)
    parts = text.split(marks[0]) if marks else [text]
    if len(marks) < 2:
        return dict.fromkeys(parts, "无")
    return _or_scan(lambda: _as_pairs(parts, marks[1]), text)


def _split_twice(text: str) -> dict[str, str]:
    """Return {name: mood} of pairs, split by the rarest separator and each by the next rarest, or in reverse."""
    marks = _separators(text)
    if not marks:
        return {}
    parts = [_trim(part) for part in text.split(marks[0])]
    try:
        if len(marks) == 1:
            name, mood = parts[len(parts) % 2 :]
            return {name: mood}
        return _as_pairs(parts, marks[1])
    except ValueError:
        try:
            return _as_pairs((part for part in text.split(marks[1]) if marks[0] in part), marks[0])
        except (ValueError, IndexError):
            lines = "\n".join(_trim(line) for line in text.split("\n") if line)
            return _scan_moods(lines, letter="[\u4e00-\u9fa5]")


def _or_scan(read: Callable[[], dict[str, str]], text: str) -> dict[str, str]:
    """Return what `read` returns, or the moods that a scan of the text finds when it raises ValueError."""
    try:
        return read()
    except ValueError:
        return _scan_moods(text)


def cut_chinese(text: str) -> str:
    """Return the text with spaces between the words that jieba finds."""
    import jieba

    jieba.setLogLevel("WARNING")
    return " ".join(jieba.lcut(text))


def cut_english(text: str) -> str:
    """Return the text with spaces between nltk's words, without its splitter of sentences, which needs a download."""
    import nltk  # BLEU is the same: sacrebleu itself cuts off the full stops at which sentences would be split

    return " ".join(nltk.word_tokenize(text, preserve_line=True))


def _bleu(pairs: Sequence[tuple[str, str]]) -> tuple[float, Interval]:
    """Return (BLEU of (reference, answer) pairs, its bootstrapped 95 % interval), from 0 to 1."""
    from sacrebleu.metrics import BLEU

    each = BLEU(effective_order=True)
    rows = [each.sentence_score(answer, [reference]) for reference, answer in pairs]
    counts = np.array([[*row.counts, *row.totals, row.sys_len, row.ref_len] for row in rows])
    draws = np.random.default_rng(0).multinomial(len(rows), [1 / len(rows)] * len(rows), size=_DRAWS) @ counts
    whole, *drawn = (
        BLEU.compute_bleu(row[:4], row[4:8], row[8], row[9], smooth_method="exp").score / 100
        for row in [counts.sum(axis=0).tolist(), *draws.tolist()]
    )
    low, high = np.quantile(drawn, [0.025, 0.975])
    return whole, (float(low), float(high))


def rouge_l(right: str, answer: str) -> float:
    """Return ROUGE-L's F over words of jieba; raises the recursion limit meanwhile."""
    from rouge import Rouge

    before = sys.getrecursionlimit()
    sys.setrecursionlimit(100_000)  # it walks the longest common subsequence by calls
    try:
        # An empty answer counts as the word None, as in CFLUE's code.
        (scores,) = Rouge(["rouge-l"]).get_scores(cut_chinese(answer or "None"), cut_chinese(right))
        return float(scores["rouge-l"]["f"])
    except ValueError:  # an answer of full stops alone, at which CFLUE's code ends
        return 0.0
    finally:
        sys.setrecursionlimit(before)


def show(result: Result) -> None:
    """Print tables of scores by task and sub-task, and notes on how to read them."""
    screen.heading(f"{result.suite}, {result.mode}, 0 examples: {result.model}")
    rows = [
        (name, f"{row.rows:,}", row.metric, f"{100 * row.value:.2f}", f"{100 * low:.1f} to {100 * high:.1f}")
        for name, row in (result.scores | result.parts).items()
        for low, high in [row.interval]
    ]
    screen.table(("task", "rows", "score", "of 100", "95 % interval"), rows)
    screen.show("as CFLUE's own code scores; its table has COMET too, and an average with it: not computed here")
    if result.empty:
        screen.show(f"{result.empty:,} answers are empty")
    asked = sum(score.rows for score in result.scores.values())
    if asked < result.rows:
        screen.show(f"a random {asked:,} of {result.rows:,} questions (--limit)")
    screen.show(f"what the released set is, is not known here; the hash of this one is {result.sha256[:16]}")
    for task, contained in (result.contamination or {}).items():
        both = contained.score_contained, contained.score_others
        inside, outside = ("none" if value is None else f"{100 * value:.2f}" for value in both)
        known = f"{contained.contained:,} of {result.scores[task].rows:,} stand in the training data"
        screen.show(f"{task}: {known}: {inside}; the others: {outside}")
