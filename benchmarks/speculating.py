"""Fixtures of speculation benchmarks: the tiny reasoner, its drafter, and real requests."""

import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import msgspec
import torch

from benchmarks.engine import MODEL
from tlt.base.id_types import DrafterVersion, Member, PolicyVersion, PromptIndex, Step
from tlt.base.strategies import Draft, Strategy
from tlt.data.dataset import read_rows
from tlt.engine.base import NoiseKey, Request, Sampling
from tlt.engine.native import NativeEngine
from tlt.models.decoder_from_folder import load_decoder
from tlt.models.drafter_folder import load_drafter
from tlt.models.eagle_drafter import Drafter
from tlt.models.tokenizer import Tokenizer
from tlt.policies.speculation.strategy_policy import StrategyPolicy
from tlt.spec.config import SpeculationSpec
from tlt.spec.spec_files import load_job_spec

_ROOT = Path(__file__).resolve().parent.parent
DRAFTER = _ROOT / "examples" / "tiny_reasoner" / "drafter"
SPEC = _ROOT / "configs" / "tiny-reasoner.yaml"
ARMS = SpeculationSpec(mode="adaptive").arms
GROUP = 16
_PROMPTS = 320
_SLOTS = 32


def held_out_prompts() -> list[list[int]]:
    spec = load_job_spec(SPEC)
    tokenizer = Tokenizer(spec.policy.path)
    table = islice(read_rows(Path(str(spec.data.eval))), _PROMPTS)
    return [list(tokenizer.prompt_tokens(row["prompt"], spec.data, "eval")) for _, row in table]


class Requests:
    """Requests for held-out prompts, group by group as in a job."""

    def __init__(self, seed: int = 0) -> None:
        spec = load_job_spec(SPEC)
        self._prompts = held_out_prompts()
        self._stops = Tokenizer(spec.policy.path).stop_tokens()
        self._most = spec.rollout.max_new_tokens
        self._seed = seed
        self._next = 0

    def take(self, count: int, most: int | None = None) -> list[Request]:
        return [self._one(most or self._most) for _ in range(count)]

    def _one(self, most: int) -> Request:
        prompt, member = divmod(self._next, GROUP)
        self._next += 1
        return Request(
            id=self._next,
            prompt=tuple(self._prompts[prompt % len(self._prompts)]),
            key=NoiseKey(
                seed=self._seed,
                step=Step(0),
                purpose="train",
                prompt=PromptIndex(prompt),
                member=Member(member),
            ),
            sampling=Sampling(),
            max_new_tokens=most,
            stop_tokens=self._stops,
        )


def engine(
    slots: int,
    arms: Sequence[Strategy] = ARMS,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    drafter: Drafter | None = None,
) -> NativeEngine:
    """Make an engine with a drafter (fully trained by default) that captures four layers."""
    decoder = load_decoder(MODEL, dtype)
    layers = decoder.config.layers
    drafter = drafter or load_drafter(DRAFTER, layers)
    captured = dict.fromkeys((2, layers // 2, layers - 3, layers, *drafter.config.captured))
    made = NativeEngine(
        decoder,
        decode_text=lambda tokens: "",
        slots=slots,
        max_context=896,
        device=device or torch.device("cpu"),
        version=PolicyVersion(0),
        captured=tuple(captured),
        arms=arms,
    )
    made.speculation.adopt_drafter(DrafterVersion(0), drafter)
    return made


def decode_by(made: NativeEngine, strategy: Strategy | StrategyPolicy, seed: int = 0) -> None:
    if isinstance(strategy, msgspec.Struct):
        made.speculation.set_strategy(strategy)
    else:
        made.speculation.set_policy(lambda: strategy, seed=seed)


def accept_length(drafter: Drafter, depth: int, answers: int = 64) -> float:
    """Return the tokens per pass of the policy over answers to held-out prompts."""
    chain = Draft(depth=depth, noise=True)
    made = engine(_SLOTS, arms=(chain,), drafter=drafter)
    made.speculation.set_strategy(chain)
    made.submit(Requests().take(answers))
    while made.running:
        made.step()
    tallies = [tally for tally in made.take_strategy_tallies() if tally.strategy == chain]
    made.close()
    return sum(t.tokens for t in tallies) / sum(t.rows for t in tallies)


def cpu_seconds(device: torch.device | None = None) -> float:
    """Return this thread's CPU seconds, so that others don't count; on a GPU, wall seconds."""
    if device is not None and device.type != "cpu":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.thread_time()
