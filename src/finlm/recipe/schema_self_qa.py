"""What a recipe may say about `finlm self-qa`: who is asked, about how many documents, and what is kept."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from finlm.recipe.section import Int, Positive, Section

# No user:password@, which would be written to every place that the recipe is.
Url = Annotated[str, Field(pattern=r"^https?://[^\s@?#]+$")]
Price = Annotated[float, Field(ge=0)]


class SelfQA(Section):
    """Questions and answers that a model writes about the recipe's documents (arXiv 2305.11952)."""

    output: str = Field("data/self_qa.jsonl", description="File of messages that is written, a source of SFT.")
    endpoint: Url | None = Field(
        None, description="Base URL of an OpenAI-compatible server, e.g. http://host:8000/v1; absent = model is local."
    )
    model: str = Field(description="The model's name at the endpoint; without one an exported directory or step-N.")
    api_key_env: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None = Field(
        None, description="Environment variable that holds the endpoint's key; the key itself is never written."
    )
    documents: Positive = Field(1000, description="Documents drawn from the training documents, one passage of each.")
    passage_characters: Annotated[Int, Field(ge=100)] = Field(
        1500, description="Characters a passage has at most; of a longer document a part is drawn."
    )
    questions: Positive = Field(5, description="Questions asked for about a passage.")
    language: Literal["zh", "en"] = Field("zh", description="Language of the prompts, questions and answers.")
    temperature: Annotated[float, Field(ge=0, le=2)] = Field(
        0.8, description="Sampling temperature of the questions; answers are read off the passage at 0."
    )
    max_answer_tokens: Positive = Field(512, description="Tokens an answer has at most; one that is cut is dropped.")
    min_answer_characters: Positive = Field(2, description="Shorter answers are dropped.")
    grounded_numbers: bool = Field(True, description="Drop an answer with a number that its passage does not have.")
    seed: Int = Field(0, description="Seed of which documents and passages are drawn.")
    concurrency: Positive = Field(8, description="Requests under way at once; 1 for a local model.")
    requests_per_minute: Positive | None = Field(None, description="Requests started a minute at most.")
    timeout_seconds: Annotated[float, Field(gt=0)] = Field(120.0, description="Silence after which a request fails.")
    attempts: Positive = Field(6, description="Tries of a request that meets 429, 5xx, silence or a broken answer.")
    input_price: Price = Field(0.0, description="Price of a million prompt tokens.")
    output_price: Price = Field(0.0, description="Price of a million generated tokens.")
    max_cost: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Cost, of all runs of this output, at which no further document is started."
    )
