"""Make a predictable policy, a drafter fitted to it, and the drafter's expected proposals."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from tests.engine.conftest import SHAPE, save_model
from tests.engine.reference import transformers_model
from tlt.models.eagle_drafter import Drafter, DrafterConfig, new_drafter
from tlt.models.rope import PlainRope

Layout = Literal["eagle", "eagle3"]
LAYERS = SHAPE["num_hidden_layers"]
# EAGLE-3's defaults for three layers are 2, 1 and 0, but SGLang cannot capture layer 0's input
CAPTURED = (1, 2)
STEPS = 250


def predictable_policy(folder: Path) -> Path:
    """Save a policy whose next token depends mostly on the last one, and has few candidates."""
    save_model(folder, seed=11, tie_word_embeddings=False)
    file = folder / "model.safetensors"
    weights = load_file(file)
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight *= 0.01
        if name == "lm_head.weight":
            weight *= 4
    save_file(weights, file, metadata={"format": "pt"})
    return folder


def memoryless_policy(folder: Path, logits: torch.Tensor) -> torch.Tensor:
    """Save a policy with these logits after every text, and return its last state.

    All tokens have one embedding, so that no state depends on the text.
    """
    predictable_policy(folder)
    file = folder / "model.safetensors"
    weights = load_file(file)
    embedding = weights["model.embed_tokens.weight"]
    embedding.copy_(embedding[0].clone())
    save_file(weights, file, metadata={"format": "pt"})
    state = policy_states(folder, torch.tensor([[1, 2]]))[0][0, -1, -1]
    weights["lm_head.weight"] = logits[:, None] * state / state.square().sum()
    save_file(weights, file, metadata={"format": "pt"})
    return state


def turned_policy(policy: Path, folder: Path) -> Path:
    """Save the policy with each token's row of the head at the next token."""
    shutil.copytree(policy, folder)
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights["lm_head.weight"] = weights["lm_head.weight"].roll(1, 0).contiguous()
    save_file(weights, file, metadata={"format": "pt"})
    return folder


def constant_drafter(readout: torch.Tensor) -> Drafter:
    """Make an EAGLE drafter that reads out the same state after every text."""
    drafter = new_drafter(config("eagle"))
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            parameter.copy_(readout if name == "fc.bias" else torch.zeros(()))
    return drafter


def captured(layout: Layout) -> tuple[int, ...]:
    """Return the layers that a drafter reads, followed by the last one."""
    return (*CAPTURED, LAYERS) if layout == "eagle3" else (LAYERS,)


def config(layout: Layout, theta: float = 10_000.0) -> DrafterConfig:
    return DrafterConfig(
        layout=layout,
        hidden=SHAPE["hidden_size"],
        intermediate=96,
        heads=4,
        kv_heads=2,
        head_dim=16,
        norm_eps=1e-6,
        rope=PlainRope(theta=theta),
        max_positions=256,
        vocabulary=SHAPE["vocab_size"],
        captured=CAPTURED if layout == "eagle3" else (LAYERS,),
    )


def with_hot_tokens(drafter: Drafter, tokens: Sequence[int]) -> Drafter:
    """Return the same drafter, which proposes these tokens only."""
    hot = new_drafter(msgspec.structs.replace(drafter.config, hot_tokens=len(tokens)))
    hot.load_state_dict(drafter.state_dict(), strict=False)
    hot.set_tokens(torch.tensor(tokens))
    return hot


def random_drafter(layout: Layout, seed: int, theta: float = 10_000.0) -> Drafter:
    torch.manual_seed(seed)
    drafter = new_drafter(config(layout, theta))
    for parameter in drafter.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    return drafter


def fitted_drafter(layout: Layout, policy: Path) -> Drafter:
    """Train a drafter on the policy's states of random text, two tokens ahead."""
    drafter = random_drafter(layout, seed=1)
    embedding, head = policy_ends(policy)
    optimiser = torch.optim.AdamW(drafter.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, STEPS)
    generator = torch.Generator().manual_seed(5)
    for _ in range(STEPS):
        tokens = torch.randint(0, 97, (8, 24), generator=generator)
        states, logits = policy_states(policy, tokens)
        features = drafter.feature(captured_of(drafter, states)[:, :-1])
        loss = torch.zeros(())
        for ahead in range(2):
            inputs = F.embedding(tokens[:, 1 + ahead :], embedding)
            guess = drafter(
                inputs, features[:, : inputs.shape[1]], torch.arange(inputs.shape[1]), _causal
            )
            aims = logits[:, 1 + ahead :].softmax(-1)
            found = drafter.logits(guess.readout, head).log_softmax(-1)
            loss = loss - (aims * found).sum(-1).mean()
            features = guess.feature
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    return drafter


def policy_ends(policy: Path) -> tuple[torch.Tensor, torch.Tensor]:
    weights = load_file(policy / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    return embedding, weights.get("lm_head.weight", embedding)


def policy_states(policy: Path, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return states [..., layers from 1, hidden], the last after the final norm, and logits."""
    model = transformers_model(policy, torch.float32)
    with torch.no_grad():
        out = model(tokens, output_hidden_states=True)
    return torch.stack(out.hidden_states[1:], dim=-2), out.logits


@torch.no_grad()
def proposed(drafter: Drafter, policy: Path, tokens: Sequence[int], steps: int) -> list[int]:
    """Return the proposals after `tokens`; the policy has processed all but the last."""
    embedding, head = policy_ends(policy)
    ids = torch.tensor(tokens)
    states, _ = policy_states(policy, ids[None, :-1])
    features = drafter.feature(captured_of(drafter, states))
    cached: list[tuple[torch.Tensor, torch.Tensor]] = []

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        cached.append((k, v))
        keys, values = (torch.cat(parts, dim=-2) for parts in zip(*cached, strict=True))
        return F.scaled_dot_product_attention(
            q, keys, values, is_causal=len(cached) == 1, enable_gqa=True
        )

    fresh, first = ids[1:], 0
    chain: list[int] = []
    for _ in range(steps):
        positions = torch.arange(first, first + len(fresh))
        guess = drafter(F.embedding(fresh[None], embedding), features, positions, attend)
        best = drafter.token_ids(drafter.logits(guess.readout[:, -1], head).argmax(-1))
        chain.append(int(best))
        features, fresh, first = guess.feature[:, -1:], best, first + len(fresh)
    return chain


def captured_of(drafter: Drafter, states: torch.Tensor) -> torch.Tensor:
    return states[..., [layer - 1 for layer in drafter.config.captured], :]


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
