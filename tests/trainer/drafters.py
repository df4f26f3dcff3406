"""Make random drafters and samples, and decode with them token by token."""

import random
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from safetensors.torch import load
from torch import Tensor

from tests.trainer.models import CPU
from tlt.models.eagle_drafter import Drafter, DrafterConfig, new_drafter
from tlt.models.rope import PlainRope
from tlt.models.weight_leaves import Layout, Piece
from tlt.trainer.drafter.drafter_learner import DrafterLearner
from tlt.trainer.drafter.hyperparameters import DrafterHyperparameters
from tlt.trainer.drafter.micro_batches import DrafterBatch, Window, build_batch
from tlt.trainer.drafter.samples import DrafterSample, EmbeddingAndHead

HIDDEN, VOCABULARY, LAYERS = 16, 24, 5
LAYOUTS = ["eagle", "eagle3"]


def config(
    layout: str, own_head: int | None = None, hot_tokens: int | None = None
) -> DrafterConfig:
    return DrafterConfig(
        layout="eagle" if layout == "eagle" else "eagle3",
        hidden=HIDDEN,
        intermediate=20,
        heads=4,
        kv_heads=2,
        head_dim=8,
        norm_eps=1e-5,
        rope=PlainRope(theta=100.0),
        max_positions=64,
        vocabulary=VOCABULARY,
        captured=(LAYERS,) if layout == "eagle" else (1, 2, 4),
        own_head=own_head,
        hot_tokens=hot_tokens,
    )


def drafter(
    layout: str,
    dtype: torch.dtype = torch.float64,
    own_head: int | None = None,
    hot_tokens: int | None = None,
) -> Drafter:
    torch.manual_seed(3)
    made = new_drafter(config(layout, own_head, hot_tokens))
    for parameter in made.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
        else:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    if made.d2t is not None:
        # every second token follows the policy
        made.d2t.copy_(torch.arange(len(made.d2t)))
    return made.to(dtype)


def ends(dtype: torch.dtype = torch.float64) -> EmbeddingAndHead:
    generator = torch.Generator().manual_seed(4)
    embedding, head = torch.randn(2, VOCABULARY, HIDDEN, generator=generator, dtype=torch.float64)
    return EmbeddingAndHead(embedding=embedding.to(dtype), head=head.to(dtype))


def samples(
    layout: str, count: int, seed: int = 0, dtype: torch.dtype = torch.float64
) -> list[DrafterSample]:
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    kept = 1 if layout == "eagle" else 4
    made: list[DrafterSample] = []
    for _ in range(count):
        length = rng.randint(3, 20)
        made.append(
            DrafterSample(
                tokens=[rng.randrange(VOCABULARY) for _ in range(length)],
                prompt=rng.randint(1, min(5, length - 1)),
                states=torch.randn(
                    length - 1, kept, HIDDEN, generator=generator, dtype=torch.float64
                ).to(dtype),
            )
        )
    return made


def whole(chosen: Sequence[DrafterSample], steps: int) -> DrafterBatch:
    windows = [Window(sample=i, first=0, last=sample.rows) for i, sample in enumerate(chosen)]
    return build_batch(chosen, windows, steps, CPU)


def learner(
    layout: str,
    dtype: torch.dtype = torch.float64,
    own_head: int | None = None,
    hot_tokens: int | None = None,
    **changes: float,
) -> DrafterLearner:
    made = drafter(layout, dtype, own_head, hot_tokens)
    sizes = torch.linspace(0.5, 2.0, made.fc.in_features, dtype=dtype)
    return DrafterLearner(made, ends(dtype), DrafterHyperparameters(**changes), sizes)  # pyright: ignore


def decoded(made: Drafter, sample: DrafterSample, row: int, steps: int) -> list[Tensor]:
    """Compute a chain's readouts from `row` on with a cache; its inputs are the sample's tokens."""
    read = len(made.config.captured)
    features = made.feature(sample.states[: row + 1, :read])
    tokens = torch.tensor(sample.tokens)
    embedding = ends(features.dtype).embedding
    cached: list[tuple[Tensor, Tensor]] = []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cached.append((k, v))
        keys, values = (torch.cat(parts, dim=-2)[None] for parts in zip(*cached, strict=True))
        return F.scaled_dot_product_attention(
            q[None], keys, values, is_causal=len(cached) == 1, enable_gqa=True
        )[0]

    fresh, first = tokens[1 : row + 2], 0
    readouts: list[Tensor] = []
    for _ in range(min(steps, sample.rows - row)):
        positions = torch.arange(first, first + len(fresh))
        guess = made(F.embedding(fresh, embedding), features, positions, attend)
        readouts.append(guess.readout[-1])
        first += len(fresh)
        fresh, features = tokens[first + 1 : first + 2], guess.feature[-1:]
    return readouts


def keep(layout: Layout, pieces: Iterator[Piece]) -> dict[str, Tensor]:
    """Return the tensors of a delta, as those who store it do."""
    return load(b"".join(bytes(leaf.make()) for leaf in layout.leaves(pieces)))
