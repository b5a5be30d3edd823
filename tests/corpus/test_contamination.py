"""Which documents contain a benchmark's questions."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from finlm.base.errors import UserError
from finlm.corpus import contamination, documents
from finlm.corpus.workers import ChunkTask

QUESTIONS = (
    (
        "在海岚自治州的债券登记制度中，下列哪一项不属于登记机构的法定职责？",
        ("办理债券过户", "代发行人兑付利息", "核定票面利率", "保存持有人名册"),
    ),
    ("下列说法正确的是", ("岚币由州立银行发行", "岚币可以自由兑换", "岚币没有辅币", "岚币与黄金挂钩")),
    ("下列说法正确的是（）", ("州债按年付息", "州债免征印花税", "州债不得质押", "州债期限不超过三年")),
    ("岚币的辅币叫什么？", ("分", "毫", "厘", "文")),
)
LAW = "登记机构的法定职责包括：办理债券过户；保存持有人名册；代发行人兑付利息。债券登记制度由自治州另行规定。" * 20


def benchmark(directory: Path) -> Path:
    lines = ["\ufeff,Question,A,B,C,D,Answer"]
    lines += [f'{number},"{stem}",{",".join(options)},A' for number, (stem, options) in enumerate(QUESTIONS)]
    path = directory / "exam.csv"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def exam(number: int) -> str:
    stem, options = QUESTIONS[number]
    return f"{number}. {stem}\n" + "\n".join(f"{name}. {text}" for name, text in zip("ABCD", options, strict=True))


def find(index: contamination.Index, *texts: str) -> set[tuple[int, int]]:
    encoded = [text.encode() for text in texts]
    hits = index.find(b"".join(encoded), np.cumsum([len(text) for text in encoded]))
    return {(hit.document, hit.question) for hit in hits}


def test_a_question_is_found_wherever_it_stands_and_the_law_it_asks_about_is_not(tmp_path: Path) -> None:
    index = contamination.Index.of(list(contamination.read_questions([benchmark(tmp_path)])))
    index.save(tmp_path / "index.npz")
    index = contamination.Index.load(tmp_path / "index.npz")
    texts = [
        LAW,
        exam(0),
        LAW + exam(0).replace("？", "?").replace("\n", " ") + LAW,
        QUESTIONS[0][0] + "答：核定票面利率",  # without the options
        exam(1) + exam(3),
        exam(2),
        "下列说法正确的是：公司应当按期披露年度报告。",  # a stem that says nothing
        "",
    ]
    assert find(index, *texts) == {(1, 0), (2, 0), (3, 0), (4, 1), (4, 3), (5, 2)}


def test_a_shortened_or_reworded_stem_is_found_beside_its_options(tmp_path: Path) -> None:
    index = contamination.Index.of(list(contamination.read_questions([benchmark(tmp_path)])))
    stem, options = QUESTIONS[0][0], "\n".join(exam(0).split("\n")[1:])
    assert find(index, f"{stem[:20]}是？\n{options}") == {(0, 0)}
    assert find(index, f"{stem[:8]}股份{stem[10:20]}有限{stem[22:]}\n{options}") == {(0, 0)}
    assert not find(index, f"{stem[:20]}是？", options, LAW + options)


def test_a_question_over_two_rows_is_found_in_both(tmp_path: Path) -> None:
    index = contamination.Index.of(list(contamination.read_questions([benchmark(tmp_path)])))
    stem, options = QUESTIONS[0][0], "\n".join(exam(0).split("\n")[1:])
    halves = [f"昨日收盘。{stem[:16]}", f"{stem[16:]}\n{options}"]
    assert find(index, LAW, *halves, LAW) == {(1, 0), (2, 0)}
    assert find(index, *halves, LAW) == {(0, 0), (1, 0)}
    assert find(index, LAW, exam(0), "登记制度由登记机构解释", LAW) == {(1, 0)}, "not what stands beside one"


def test_a_hit_shows_the_start_of_its_own_document(tmp_path: Path) -> None:
    texts = [LAW, exam(3), LAW, exam(0) + LAW]
    index = np.zeros(len(texts), dtype=documents.INDEX)
    index["end"] = np.cumsum([len(text.encode()) for text in texts])
    (tmp_path / "0.txt").write_text("".join(texts), encoding="utf-8")
    np.save(tmp_path / "0.npy", index)
    contamination.Index.of(list(contamination.read_questions([benchmark(tmp_path)]))).save(tmp_path / "index.npz")
    kept = contamination.find_hits(ChunkTask(tmp_path / "0.txt", (tmp_path / "index.npz",)))
    hits = json.loads(kept["hits"].tobytes())
    assert [(hit["document"], hit["start"]) for hit in hits] == [
        (1, exam(3)),
        (3, (exam(0) + LAW)[:120]),
    ]


def test_a_file_without_questions_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "prices.csv"
    path.write_text("date,price\n1,2\n", encoding="utf-8")
    with pytest.raises(UserError, match="holds no questions") as caught:
        list(contamination.read_questions([path]))
    assert "date, price" in caught.value.evidence
    path.write_bytes("题目".encode("gb18030"))
    with pytest.raises(UserError, match="cannot read"):
        list(contamination.read_questions([path]))
