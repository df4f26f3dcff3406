"""Measure how much of an answer survives new weights, token by token.

`python -m benchmarks.answer_survival --out F.json [--only NAME ...] [--steps N]`

Jobs keep the weights of every version (`algorithm.keep_all`, a checkpoint after each step). Answers
of the first, a middle and the last step are forced through the version that drew them, through the
next one and the one after. At each position the engine's sampler draws again by the answer's own
noise: q is the share of positions at which it selects another token. With the version that drew
them only rounding can do that, which is the control. If positions were independent, an answer of L
tokens would stay the same up to token (1 - (1 - q)^L) / q; `kept` is the share of tokens that
indeed come before their answer's first change. `total_variation` would be the q of rejection
sampling, which needs both distributions. SmolLM2-135M is made in TLT's home if it isn't there.
"""

import argparse
import math
import shutil
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import quantiles
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.result import Claim, save_result, write_result
from benchmarks.stacks import ROOT, run, session
from examples.smollm2.prepare import prepare
from tlt.base.id_types import PolicyVersion, Step
from tlt.base.interrupt_check import never_interrupt
from tlt.blobs.answer_files import AnswerFiles
from tlt.blobs.blob_files import committed_blobs
from tlt.engine.base import NoiseKey, Request, Sampling
from tlt.engine.native import NativeEngine
from tlt.engine.native.few_row_products import multiply_by_head
from tlt.engine.native.gumbel_noise import GumbelNoise
from tlt.engine.native.token_sampler import Sampler
from tlt.models.decoder_from_folder import load_decoder
from tlt.models.safetensors_io import read_weights
from tlt.protocol.events import CheckpointCommitted, RolloutFinished
from tlt.ranks.engine_requirements import context_of
from tlt.runs.run_folder_reader import journal_entries, read_spec

_CPU = torch.device("cpu")
# answers of a step that are forced, at most
_MOST = 128
_CONTROL, _Q = 1e-4, 1e-3
_COMMON = (
    "algorithm.keep_all=true",
    "algorithm.checkpoint_every=1",
    "algorithm.keep_best=false",
    "algorithm.eval_every=0",
)
_WORD_PROBLEMS = (
    "data.train=reasoning_gym:gsm_symbolic?seed=1&size=2000",
    "data.eval=null",
    "policy.max_context=384",
    "rollout.max_new_tokens=128",
    "algorithm.prompts_per_step=4",
)
_REASONER = ROOT / "configs" / "tiny-reasoner.yaml"
_SMOLLM2 = ROOT / "examples" / "smollm2" / "job.yaml"
# spec, steps and changes
_CASES: dict[str, tuple[Path, int, tuple[str, ...]]] = {
    "tiny reasoner": (_REASONER, 5, ()),
    "SmolLM2, word problems": (_SMOLLM2, 3, _WORD_PROBLEMS),
}


class Drawn(NamedTuple):
    """An answer as its version drew it."""

    request: Request
    tokens: Sequence[int]
    logprobs: Sequence[float]


class Forced(NamedTuple):
    """An answer forced through some version."""

    length: int
    # positions at which its noise selects another token
    changed: Sequence[int]
    # summed over positions, each estimated by the token that was drawn there
    total_variation: float

    @property
    def kept(self) -> int:
        """Return how many tokens come before the first change."""
        return self.changed[0] if self.changed else self.length


def force(answer: Drawn, logits: Tensor, noise: GumbelNoise) -> Forced:
    """Compare an answer with what its noise selects from logits [tokens, vocabulary]."""
    request, tokens = answer.request, torch.tensor(answer.tokens)
    sampler = Sampler([request], noise, logits)
    positions = len(request.prompt) + torch.arange(len(tokens))[None]
    selected, _ = sampler.draw(logits[None], sampler.noise(positions))
    changed: list[int] = (selected[0] != tokens).nonzero()[:, 0].tolist()
    logprobs = (logits / (request.sampling.temperature or 1.0)).log_softmax(-1)
    ratios = logprobs.gather(1, tokens[:, None])[:, 0].sub_(torch.tensor(answer.logprobs)).exp_()
    return Forced(len(tokens), changed, (1 - ratios).clamp_(min=0).sum().item())


def share_changed(answers: Sequence[Forced]) -> tuple[float, float]:
    """Return q and its standard error over answers, whose positions aren't independent."""
    count, positions = len(answers), sum(answer.length for answer in answers)
    q = sum(len(answer.changed) for answer in answers) / positions
    squares = math.fsum((len(a.changed) - q * a.length) ** 2 for a in answers)
    return q, math.sqrt(squares * count / max(count - 1, 1)) / positions


def survival(q: float, length: int) -> float:
    """Return the mean number of tokens up to the first change, that one included."""
    return length if q == 0 else (1 - (1 - q) ** length) / q


def _drawn(folder: Path) -> dict[Step, list[Drawn]]:
    """Return the training answers of each step in the order of their prompts."""
    events = (entry.event for entry in journal_entries(folder))
    finished = [e for e in events if isinstance(e, RolloutFinished) and e.purpose == "train"]
    seed, files = read_spec(folder).seed, AnswerFiles(folder)
    drawn: dict[Step, list[Drawn]] = defaultdict(list)
    for event in sorted(finished, key=lambda e: (e.step, e.prompt, e.member)):
        drawn[event.step].append(_read(event, files, seed))
    return drawn


def _read(event: RolloutFinished, files: AnswerFiles, seed: int) -> Drawn:
    found = files.read(event.answer)
    request = Request(
        id=0,
        prompt=found.prompt,
        key=NoiseKey(
            seed=seed,
            step=event.step,
            purpose=event.purpose,
            prompt=event.prompt,
            member=event.member,
        ),
        sampling=Sampling(
            temperature=found.temperature, top_k=found.top_k, top_p=found.top_p, min_p=found.min_p
        ),
        max_new_tokens=event.length,
        stop_tokens=frozenset(),
    )
    return Drawn(request, found.tokens, found.logprobs)


# by step, and by how many versions the weights are ahead of it
_Found = dict[tuple[Step, int], list[Forced]]


def _force_answers(folder: Path, drawn: Mapping[Step, Sequence[Drawn]]) -> _Found:
    spec, found = read_spec(folder), _Found()
    decoder = load_decoder(Path(spec.policy.path))
    noise = GumbelNoise(decoder.config.vocabulary, _CPU)
    engine = NativeEngine(
        *(decoder, lambda tokens: "", 1, context_of(spec), _CPU, PolicyVersion(0)),
        captured=(decoder.config.layers,),
    )
    events = (entry.event for entry in journal_entries(folder))
    saved = [event.checkpoint for event in events if isinstance(event, CheckpointCommitted)]
    weights = {checkpoint.version: checkpoint.weights for checkpoint in saved}
    steps = {0, len(drawn) // 2, len(drawn) - 1}
    with committed_blobs(folder) as blobs:
        for version in map(PolicyVersion, range(len(drawn) + 1)):
            if version > 0:
                engine.swap_weights(version, read_weights(blobs, weights[version]))
            for ahead in (0, 1, 2):
                if (step := Step(version - ahead)) in steps:
                    thin = drawn[step][:: math.ceil(len(drawn[step]) / _MOST)]
                    found[step, ahead] = [_force(answer, engine, noise) for answer in thin]
    return found


@torch.inference_mode()
def _force(answer: Drawn, engine: NativeEngine, noise: GumbelNoise) -> Forced:
    text = (*answer.request.prompt, *answer.tokens)
    states = engine.compute_hidden_states(text, never_interrupt)[-len(answer.tokens) :, 0]
    _, head = engine.embedding_and_head
    logits = multiply_by_head(states, head, states.new_empty(len(states), len(head)))
    return force(answer, logits, noise)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="+", choices=list(_CASES), default=list(_CASES))
    parser.add_argument("--steps", type=int)
    arguments = parser.parse_args()
    began = time.monotonic()
    model = prepare(print)
    claims: list[Claim] = []
    details: dict[str, Any] = {}
    with session():
        for name in arguments.only:
            spec, steps, changes = _CASES[name]
            path = (f"policy.path={model}",) if spec == _SMOLLM2 else ()
            count = f"algorithm.steps={arguments.steps or steps}"
            job = run("off", 1, *_COMMON, *path, count, *changes, spec=spec)
            drawn = _drawn(job.folder)
            found = _force_answers(job.folder, drawn)
            shutil.rmtree(job.folder / "blobs")
            claims += _claims(name, found)
            details[name] = _describe(found, [len(each.tokens) for each in chain(*drawn.values())])
            save_result("answer_survival", claims, details, time.monotonic() - began, arguments.out)
            print(name, details[name], flush=True)
    write_result("answer_survival", claims, details, time.monotonic() - began, arguments.out)


def _claims(name: str, found: _Found) -> list[Claim]:
    control, q = (_shares(_ahead(found, ahead))["q"] for ahead in (0, 1))
    unit, begin = "of positions", f"answer_survival.{name}"
    return [
        Claim(name=f"{begin}.control", value=control, unit=unit, bar=_CONTROL, less_is_better=True),
        Claim(name=f"{begin}.q", value=q, unit=unit, bar=_Q),
    ]


def _ahead(found: _Found, ahead: int) -> list[Forced]:
    return [each for (_, versions), some in found.items() if versions == ahead for each in some]


def _describe(found: _Found, lengths: Sequence[int]) -> dict[str, Any]:
    following, cuts = _ahead(found, 1), [round(cut) for cut in quantiles(lengths, n=100)]
    longest = sorted(following, key=lambda answer: answer.length)[-(len(following) // 4) :]
    q, _ = share_changed(following)
    return {
        "control": _shares(_ahead(found, 0)),
        "next": _shares(following),
        "next_by_step": {step: _shares(some) for (step, n), some in found.items() if n == 1},
        "next_of_the_longest_quarter": _shares(longest),
        "second": _shares(_ahead(found, 2)),
        "lengths": {"p50": cuts[49], "p99": cuts[98]},
        "survival_of": {n: _rounded(survival(q, n)) for n in (cuts[49], cuts[98], 2000, 8000)},
    }


def _shares(answers: Sequence[Forced]) -> dict[str, float]:
    (q, error), tokens = share_changed(answers), sum(answer.length for answer in answers)
    expected = ((1 - q) * survival(q, answer.length) for answer in answers)
    return {
        "answers": len(answers),
        "tokens": tokens,
        "q": _rounded(q),
        "standard_error": _rounded(error),
        "total_variation": _rounded(math.fsum(a.total_variation for a in answers) / tokens),
        "kept": _rounded(sum(answer.kept for answer in answers) / tokens),
        "kept_if_independent": _rounded(math.fsum(expected) / tokens),
    }


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


if __name__ == "__main__":
    main()
