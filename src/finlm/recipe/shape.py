"""Arithmetic of a Llama-shaped model: parameters and FLOPs from the recipe's numbers, without torch."""

from __future__ import annotations

from dataclasses import dataclass

from finlm.base.errors import UserError
from finlm.recipe.schema import Recipe

VOCAB_MULTIPLE = 128  # 39,438 rows instead of 39,552 cost 9 % of XuanYuan-6B's micro-step on one H200


@dataclass(frozen=True)
class ModelShape:
    """Sizes of one decoder."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    tied: bool

    @property
    def padded_vocab(self) -> int:
        """Rows of embedding and head on a GPU: a multiple of 128, without which the head's products are slow."""
        return -(-self.vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the input embedding."""
        return self.vocab * self.hidden

    @property
    def layer_sizes(self) -> list[int]:
        """Elements of a decoder layer's parameters in the model's order: attention, SwiGLU, two RMSNorms."""
        square, kv_width = self.hidden * self.hidden, self.hidden // self.heads * self.kv_heads
        attention = [square, self.hidden * kv_width, self.hidden * kv_width, square]
        return [*attention, *[self.hidden * self.ffn] * 3, self.hidden, self.hidden]

    @property
    def layer_parameters(self) -> int:
        """Parameters of one decoder layer."""
        return sum(self.layer_sizes)

    @property
    def sizes(self) -> list[int]:
        """Elements of every parameter in the model's order: embedding, layers, norm, head."""
        embedding = [self.embedding_parameters]
        return [*embedding, *self.layer_sizes * self.layers, self.hidden, *([] if self.tied else embedding)]

    @property
    def matrix_parameters(self) -> int:
        """Parameters of all layers' matrices, what LoRA leaves alone and QLoRA keeps in 4 bits."""
        return self.layers * (self.layer_parameters - 2 * self.hidden)

    @property
    def parameters(self) -> int:
        """All parameters."""
        head = 0 if self.tied else self.embedding_parameters
        return self.embedding_parameters + head + self.layers * self.layer_parameters + self.hidden

    def flops_per_token(self, sequence: int) -> float:
        """Training FLOPs a token: 6 (N - N_embedding) + 12 layers hidden sequence (PaLM, appendix B)."""
        # A tied head multiplies too, so only the embedding look-up is left out.
        matmul = self.parameters - (0 if self.tied else self.embedding_parameters)
        return 6.0 * matmul + 12.0 * self.layers * self.hidden * sequence


def of(recipe: Recipe, vocab_size: int | None = None) -> ModelShape:
    """The shape of a recipe's model; vocab_size fills in `auto` (else the size that the recipe gives its tokenizer)."""
    model = recipe.model
    vocab = model.vocab_size if model.vocab_size != "auto" else vocab_size or recipe.tokenizer.pieces
    if vocab is None:
        raise UserError(
            "model.vocab_size is auto and the tokenizer is a file that is not read before `prepare`",
            fix="write model.vocab_size, or run `finlm prepare` first",
        )
    return ModelShape(
        hidden=model.hidden_size,
        layers=model.layers,
        heads=model.heads,
        kv_heads=model.kv_heads or model.heads,
        ffn=model.ffn_size,
        vocab=vocab,
        tied=model.tie_embeddings,
    )
