"""Count the weights of a policy and of a drafter from their sizes, as `models` allocates them."""

from typing import Literal

import msgspec


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of a policy, in the words of `DecoderConfig`."""

    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    head_norms: bool

    @property
    def queries(self) -> int:
        """Return the width of all query heads."""
        return self.heads * self.head_dim

    @property
    def pairs(self) -> int:
        """Return the width of all key heads, which is that of all value heads, too."""
        return self.kv_heads * self.head_dim

    @property
    def embedding(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def embedding_and_head(self) -> int:
        return self.embedding * (1 if self.tied else 2)

    @property
    def layer_matrices(self) -> int:
        """Count a layer's weights with its biases, without its norms."""
        attention = self.hidden * (2 * self.queries + 2 * self.pairs)
        biases = self.qkv_bias * (self.queries + 2 * self.pairs) + self.out_bias * self.hidden
        biases += self.mlp_bias * (2 * self.intermediate + self.hidden)
        return attention + 3 * self.hidden * self.intermediate + biases

    @property
    def layer(self) -> int:
        return self.layer_matrices + 2 * self.hidden + self.head_norms * 2 * self.head_dim

    @property
    def weights(self) -> int:
        """Count all weights; a tied head counts once."""
        return self.layers * self.layer + self.embedding_and_head + self.hidden

    @property
    def decoded_weights(self) -> int:
        """Count the native engine's weights, whose norms are folded into the matrices."""
        norms = self.head_norms * (self.heads + self.kv_heads) * self.head_dim
        return self.layers * (self.layer_matrices + norms) + self.embedding_and_head + self.hidden


class LoraShape(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of a LoRA adapter."""

    rank: int
    # by name in a layer: how many layers have an adapter for that matrix, and its two sides
    matrices: dict[str, tuple[int, int, int]]

    @property
    def weights(self) -> int:
        sides = self.matrices.values()
        return self.rank * sum(layers * (outputs + inputs) for layers, outputs, inputs in sides)


class DrafterShape(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of a drafter, in the words of `DrafterConfig`."""

    layout: Literal["eagle", "eagle3"]
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    # layers of the policy that it reads
    captured: int
    own_head: int | None = None
    # rows of the policy's head that it uses a copy of
    hot_tokens: int = 0

    @property
    def copied_head(self) -> int:
        """Count the numbers of its copy of some of the policy's rows."""
        return self.hot_tokens * self.hidden

    @property
    def fusion(self) -> tuple[int, int]:
        """Return outputs and inputs of the matrix that joins what the drafter reads."""
        return self.hidden, (2 if self.layout == "eagle" else self.captured) * self.hidden

    @property
    def layer_inputs(self) -> int:
        return self.hidden if self.layout == "eagle" else 2 * self.hidden

    @property
    def matrices(self) -> tuple[tuple[int, int], ...]:
        """List the shapes of the matrices that are trained."""
        queries, pairs = self.heads * self.head_dim, self.kv_heads * self.head_dim
        wide = (self.intermediate, self.hidden)
        shapes = [
            self.fusion,
            *((width, self.layer_inputs) for width in (queries, pairs, pairs)),
            (self.hidden, queries),
            *(wide, wide, (self.hidden, self.intermediate)),
        ]
        if self.own_head is not None:
            shapes.append((self.own_head, self.hidden))
        return tuple(shapes)

    @property
    def vectors(self) -> int:
        """Count the weights of norms and biases."""
        return (2 if self.layout == "eagle" else 4) * self.hidden

    @property
    def weights(self) -> int:
        return sum(rows * columns for rows, columns in self.matrices) + self.vectors

    @property
    def decoded_weights(self) -> int:
        """Count the native engine's weights of it: norms before a matrix are folded into it."""
        return sum(rows * columns for rows, columns in self.matrices) + self.hidden
