"""Score answers in processes that may be killed: the fork server of a reward."""

import msgspec

from tlt.isolation.fork_server import LoadedCode, Reply, serve
from tlt.rewards.process.request_scorer import load_scorer
from tlt.rewards.reward_messages import BatchScores, LoadedReward, ScoreBatch
from tlt.spec.reward import RewardSpec

_batches = msgspec.json.Decoder(ScoreBatch)


def _load(section: msgspec.Raw) -> LoadedCode:
    scorer = load_scorer(msgspec.json.decode(section, type=RewardSpec))

    def answer(body: bytes) -> Reply:
        batch = _batches.decode(body)
        return Reply(BatchScores(number=batch.number, results=scorer.score(batch.requests)))

    about = LoadedReward(wanted=scorer.wanted, batched=scorer.batched)
    return LoadedCode(answer, msgspec.Raw(msgspec.json.encode(about)))


if __name__ == "__main__":
    serve(_load)
