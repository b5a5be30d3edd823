"""How each suite puts a question: the published prompts, and the exam as it stands in the training text.

FinanceIQ: github.com/Duxiaoman-DI/XuanYuan, FinanceIQ/src; it samples nothing, penalises repetition by 1.1 and stops
after 512 tokens. C-Eval: github.com/hkust-nlp/ceval, its README's prompts for answers without a chain of thought.
"""

from __future__ import annotations

from dataclasses import dataclass

from finlm.data.synthetic_exam import LETTERS


@dataclass(frozen=True)
class Style:
    """The words around a question."""

    header: str  # before everything, with {subject}
    lead: str  # before the question's text
    cue: str  # what the answer's letter follows
    chat_cue: bool  # whether a chat turn ends with the cue
    shown_cue: str  # before the letter in an assistant's turn of an example
    repetition_penalty: float
    max_tokens: int  # of an answer in a chat

    def begin(self, subject: str) -> str:
        """What stands before the first question."""
        return self.header.format(subject=subject)

    def ask(self, text: str, options: tuple[str, ...]) -> str:
        """A question with its options, without the cue."""
        lines = [self.lead + text, *(f"{letter}. {option}" for letter, option in zip(LETTERS, options, strict=True))]
        return "\n".join(lines)


STYLES = {
    "financeiq": Style(
        header="以下是关于{subject}的单项选择题，请直接给出正确答案的选项。\n\n",
        lead="题目：",
        cue="\n答案是：",
        chat_cue=True,
        shown_cue="",
        repetition_penalty=1.1,
        max_tokens=512,
    ),
    "ceval": Style(
        header="以下是中国关于{subject}考试的单项选择题，请选出其中的正确答案。\n\n",
        lead="",
        cue="\n答案：",
        chat_cue=True,
        shown_cue="",
        repetition_penalty=1.0,
        max_tokens=512,
    ),
    "exam": Style(
        header="", lead="", cue="\n答案：", chat_cue=False, shown_cue="答案：", repetition_penalty=1.0, max_tokens=64
    ),
}
STYLES["recall"] = STYLES["exam"]

# C-Eval's files are named in English, its prompts name the subjects in Chinese (its subject_mapping.json).
CEVAL_SUBJECTS = {
    "computer_network": "计算机网络",
    "operating_system": "操作系统",
    "computer_architecture": "计算机组成",
    "college_programming": "大学编程",
    "college_physics": "大学物理",
    "college_chemistry": "大学化学",
    "advanced_mathematics": "高等数学",
    "probability_and_statistics": "概率统计",
    "discrete_mathematics": "离散数学",
    "electrical_engineer": "注册电气工程师",
    "metrology_engineer": "注册计量师",
    "high_school_mathematics": "高中数学",
    "high_school_physics": "高中物理",
    "high_school_chemistry": "高中化学",
    "high_school_biology": "高中生物",
    "middle_school_mathematics": "初中数学",
    "middle_school_biology": "初中生物",
    "middle_school_physics": "初中物理",
    "middle_school_chemistry": "初中化学",
    "veterinary_medicine": "兽医学",
    "college_economics": "大学经济学",
    "business_administration": "工商管理",
    "marxism": "马克思主义基本原理",
    "mao_zedong_thought": "毛泽东思想和中国特色社会主义理论体系概论",
    "education_science": "教育学",
    "teacher_qualification": "教师资格",
    "high_school_politics": "高中政治",
    "high_school_geography": "高中地理",
    "middle_school_politics": "初中政治",
    "middle_school_geography": "初中地理",
    "modern_chinese_history": "近代史纲要",
    "ideological_and_moral_cultivation": "思想道德修养与法律基础",
    "logic": "逻辑学",
    "law": "法学",
    "chinese_language_and_literature": "中国语言文学",
    "art_studies": "艺术学",
    "professional_tour_guide": "导游资格",
    "legal_professional": "法律职业资格",
    "high_school_chinese": "高中语文",
    "high_school_history": "高中历史",
    "middle_school_history": "初中历史",
    "civil_servant": "公务员",
    "sports_science": "体育学",
    "plant_protection": "植物保护",
    "basic_medicine": "基础医学",
    "clinical_medicine": "临床医学",
    "urban_and_rural_planner": "注册城乡规划师",
    "accountant": "注册会计师",
    "fire_engineer": "注册消防工程师",
    "environmental_impact_assessment_engineer": "环境影响评价工程师",
    "tax_accountant": "税务师",
    "physician": "医师资格",
}
