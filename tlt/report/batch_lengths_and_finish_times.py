"""The answers of one rollout batch: their lengths, when they finished, and unused slots."""

from collections import defaultdict
from collections.abc import Sequence

import msgspec

from tlt.base.id_types import PromptIndex, WorkerId
from tlt.policies.run.chosen_sizes import slots_of
from tlt.policies.run.run_state import RunState
from tlt.protocol.events import AnyEvent, RolloutCut, RolloutDropped, RolloutFinished, RolloutScored
from tlt.report.statistics import quantile


class LengthSummary(msgspec.Struct, frozen=True, kw_only=True):
    mean: float = 0.0
    p50: int = 0
    p90: int = 0
    max: int = 0

    @classmethod
    def of(cls, lengths: Sequence[int]) -> "LengthSummary":
        if not lengths:
            return cls()
        ordered = sorted(lengths)
        return cls(
            mean=sum(ordered) / len(ordered),
            p50=ordered[len(ordered) // 2],
            p90=ordered[int(0.9 * (len(ordered) - 1))],
            max=ordered[-1],
        )


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """Summarise how the training answers of a step finished."""

    # seconds after the first prompt was issued at which 50, 90 and 99 % were done
    done_50: float
    done_90: float
    done_99: float
    # slot-seconds of each worker until the last answer was done: all, and the unused ones
    slot_seconds: dict[WorkerId, float]
    empty_slot_seconds: dict[WorkerId, float]
    # share of the tokens that the update trained on
    trained_share: float


class BatchAnswers:
    def __init__(self, began: float) -> None:
        self.began = began
        self.lengths: list[int] = []
        self.truncated = 0
        self.retractions = 0
        self.dropped = 0
        self.unscored = 0
        # seconds after the batch began, one for each finished answer
        self.done: list[float] = []
        # the prompts issued in place of groups that agree, and what their answers took
        self.extra_prompts: set[PromptIndex] = set()
        self.extra_answers = 0
        self._extra_seconds = 0.0
        self._used: defaultdict[WorkerId, float] = defaultdict(float)
        # slot-seconds that were charged, and how many there were when the last answer finished
        self._charged: defaultdict[WorkerId, float] = defaultdict(float)
        self._slots: dict[WorkerId, float] = {}
        # seconds from the last charge to the last answer, if it is newer
        self._uncharged: float | None = None

    @property
    def extra_share(self) -> float:
        """Return the share of the answers' decode seconds that extra answers took."""
        seconds = sum(self._used.values())
        return self._extra_seconds / seconds if seconds else 0.0

    def begin(self, now: float) -> None:
        """Begin the step, whose first answers may have been finished while another was open."""
        self.began = now
        self.done = [0.0] * len(self.done)
        self._used.clear()
        self._extra_seconds, self._uncharged = 0.0, None

    def use_slot(self, event: RolloutFinished | RolloutCut) -> None:
        """Count the slot of an answer of the next step."""
        self._used[event.worker] += event.decode_seconds

    def pass_time(self, state: RunState, passed: float) -> None:
        if self._uncharged is not None:
            self._slots = dict(self._charged)
        for worker, known in state.workers.items():
            before = self._charged[worker]
            slots = slots_of(state, known)
            if self._uncharged is not None:
                self._slots[worker] = before + self._uncharged * slots
            self._charged[worker] = before + passed * slots
        self._uncharged = None

    def add(self, event: AnyEvent, at: float, uncharged: float) -> None:
        """Add an event that came `uncharged` seconds after the last call of `pass_time`."""
        match event:
            case RolloutFinished():
                self.lengths.append(event.length)
                self.truncated += event.stop == "length"
                self.retractions += event.retractions
                self.done.append(at - self.began)
                self._used[event.worker] += event.decode_seconds
                if event.prompt in self.extra_prompts:
                    self.extra_answers += 1
                    self._extra_seconds += event.decode_seconds
                self._uncharged = uncharged
            case RolloutCut():
                self._used[event.worker] += event.decode_seconds
                if event.prompt in self.extra_prompts:
                    self._extra_seconds += event.decode_seconds
            case RolloutDropped():
                self.dropped += 1
            case RolloutScored():
                self.unscored += event.error is not None
            case _:
                pass

    def rollout(self, trained_tokens: int) -> Rollout:
        """Summarise the batch, once all time up to now has been charged."""
        slots = self._slots if self._uncharged is None else dict(self._charged)
        return Rollout(
            done_50=quantile(self.done, 0.5),
            done_90=quantile(self.done, 0.9),
            done_99=quantile(self.done, 0.99),
            slot_seconds=slots,
            empty_slot_seconds={
                worker: max(0.0, each - self._used[worker]) for worker, each in slots.items()
            },
            # answers of groups that were carried over may have ended before
            trained_share=trained_tokens / max(1, trained_tokens, sum(self.lengths)),
        )
