"""Make a rank's share of the demo's first step: the engine's answers with their scores."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from examples.tiny_reasoner.task import reward
from tlt.base.id_types import Digest, Member, PolicyVersion, PromptIndex, Step
from tlt.engine.base import NoiseKey, Request, Sampling
from tlt.engine.native import NativeEngine
from tlt.models.decoder_from_folder import load_decoder
from tlt.models.tokenizer import Tokenizer
from tlt.policies.algorithm.advantages import Scored, compute_advantages
from tlt.policies.algorithm.sample_sharding import Sample, share_samples
from tlt.protocol.refs import AnswerRef
from tlt.spec.config import JobSpec
from tlt.trainer.policy.model.micro_batches import Minibatch, PolicySample

_RANKS = 2
_UNWRITTEN = AnswerRef(file="", offset=0, bytes=0, digest=Digest(""))


def real_step(job: JobSpec) -> list[Minibatch]:
    """Return the first rank's share, without groups whose rewards are equal, as in a job."""
    tokenizer = Tokenizer(job.policy.path)
    algorithm = job.algorithm
    lines = Path(job.data.sources[0].path).read_text().splitlines()[: algorithm.prompts_per_step]
    rows: list[dict[str, str]] = [json.loads(line) for line in lines]
    requests = [
        Request(
            id=prompt * algorithm.group_size + member,
            prompt=tokenizer.prompt_tokens(row["prompt"], job.data, ""),
            key=NoiseKey(
                seed=job.seed,
                step=Step(0),
                purpose="train",
                prompt=PromptIndex(prompt),
                member=Member(member),
            ),
            sampling=Sampling(),
            max_new_tokens=job.rollout.max_new_tokens,
            stop_tokens=tokenizer.stop_tokens(),
        )
        for prompt, row in enumerate(rows)
        for member in range(algorithm.group_size)
    ]
    engine = NativeEngine(
        load_decoder(Path(job.policy.path), torch.float32),
        decode_text=tokenizer.decode,
        slots=job.rollout.chosen_slots,
        max_context=job.policy.max_context or 0,
        device=torch.device("cpu"),
        version=PolicyVersion(0),
    )
    engine.submit(requests)
    done = {answer.id: answer for _ in iter(lambda: engine.running, 0) for answer in engine.step()}
    engine.close()
    samples: list[Sample] = []
    for prompt, row in enumerate(rows):
        members = range(prompt * algorithm.group_size, (prompt + 1) * algorithm.group_size)
        scored = [
            Scored(reward(done[id_].text, row["answer"]), len(done[id_].tokens)) for id_ in members
        ]
        (found,) = compute_advantages([scored], algorithm.advantage, algorithm.normalise_advantage)
        advantages = found or []
        samples += [
            Sample(PromptIndex(prompt), Member(i), reward, advantage, tokens, _UNWRITTEN)
            for i, ((reward, tokens), advantage) in enumerate(zip(scored, advantages, strict=False))
        ]
    (first, *_) = share_samples(samples, (), [1] * _RANKS, algorithm.minibatches, job.seed, 0)

    def learned(prompt: int, member: int, advantage: float) -> PolicySample:
        answer = done[prompt * algorithm.group_size + member]
        return PolicySample(
            prompt=requests[answer.id].prompt,
            completion=tuple(answer.tokens),
            logprobs=tuple(answer.logprobs),
            temperature=1.0,
            advantage=advantage,
        )

    return [
        Minibatch(
            samples=[learned(ref.prompt, ref.member, ref.advantage) for ref in share.ranks[0]],
            total_tokens=share.total_tokens,
            total_sequences=share.total_sequences,
        )
        for share in first
    ]


def fixed_lengths(real: Sequence[Minibatch], length: int) -> list[Minibatch]:
    """Return 4096 tokens in answers of one length, cut from concatenated real answers."""
    tokens = [token for share in real for sample in share.samples for token in sample.completion]
    samples = [
        PolicySample(
            prompt=tokens[start : start + length // 8],
            completion=tokens[start + length // 8 : start + length + 1],
            logprobs=(-1.0,) * (length + 1 - length // 8),
            temperature=1.0,
            advantage=1.0 if start % (2 * length) else -1.0,
        )
        for start in range(0, 4096, length)
    ]
    scored = sum(len(sample.completion) for sample in samples)
    return [Minibatch(samples=samples, total_tokens=scored, total_sequences=len(samples))]
