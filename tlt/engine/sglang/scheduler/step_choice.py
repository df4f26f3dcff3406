"""Choose how SGLang's ranks compute each pass: the first rank chooses, the others follow it."""

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from time import monotonic
from typing import Any

from tlt.base.id_types import NAMED
from tlt.base.strategies import Draft, Ngram
from tlt.engine.sglang.scheduler.speculation_controller import (
    BatchSpeculation,
    LaunchedStep,
    RunningText,
)
from tlt.engine.sglang.scheduler.step_plan import KnownText, PlanSharing, StepPlan
from tlt.engine.sglang.scheduler.tap_writer import StepKind, TapWriter
from tlt.engine.sglang.shared.speculation_messages import (
    AllowSpeculation,
    ControlPort,
    IndexAnswer,
    NotePolicySwap,
    TalliesTaken,
    UseDrafter,
)

_SECONDS_BETWEEN_REPORTS = 0.25
# a choice without the drafter that holds for so many steps lets its cache lapse: keeping it costs
# more than rebuilding it
_LAPSE_STEPS = 32


class FollowedChoice:
    """Compute passes as another rank chose; only that rank hears what comes of them."""

    def __init__(self, sharing: PlanSharing) -> None:
        self._sharing = sharing

    def begin(self, batch: Any, decodes: bool) -> StepPlan:
        """Return how a pass is computed."""
        return self._sharing.receive()

    def mark_proposed(self) -> None:
        """Note that the step's drafts are known."""

    def timed_extension(self) -> AbstractContextManager[None]:
        """Measure what keeping the drafter's cache up to date takes."""
        return nullcontext()

    def note_verified(self, batch: Any, result: Any) -> None:
        """Note what a verify pass gained, which the device may still compute."""

    def end(self) -> None:
        """Note that the pass was launched."""

    def complete(self, accepted: Sequence[int]) -> None:
        """Note by row how many drafts of the oldest launched step were accepted."""

    def handle_idle(self) -> None:
        """Report what is not reported yet, and read messages, while no request runs."""


class OwnChoice(FollowedChoice):
    """The first rank's choice, from what it measured.

    While there is no drafter, or it hasn't been used for long, nothing of it is computed: its cache
    lapses, and is rebuilt from the tap's states before it proposes again.
    """

    def __init__(
        self,
        speculation: BatchSpeculation,
        port: ControlPort,
        sharing: PlanSharing,
        writer: TapWriter,
        record_verified: Callable[[Any, Any, StepKind], None],
        candidate_steps: Callable[[], Sequence[int]],
        trained: bool,
    ) -> None:
        """Call `record_verified` with a batch, its result, and how that proposed."""
        super().__init__(sharing)
        self._speculation = speculation
        self._port = port
        self._writer = writer
        self._record_verified = record_verified
        self._candidate_steps = candidate_steps
        self._step: LaunchedStep | None = None
        # True if the drafter's cache lacks positions of running requests
        self._lapsed = False
        self._reported = 0.0
        if trained:
            speculation.use_drafter(NAMED)

    def begin(self, batch: Any, decodes: bool) -> StepPlan:
        self._handle_messages()
        plan = self._plan_step(batch) if decodes else StepPlan(extends=self._keeps_cache)
        self._sharing.send(plan)
        return plan

    def mark_proposed(self) -> None:
        assert self._step is not None
        self._step.proposed = self._speculation.clock.mark()

    @contextmanager
    def timed_extension(self) -> Generator[None]:
        assert self._step is not None
        began = self._speculation.clock.mark()
        yield
        self._step.extended.append((began, self._speculation.clock.mark()))

    def note_verified(self, batch: Any, result: Any) -> None:
        step = self._step
        assert step is not None
        kind = StepKind(proposed=step.width > 0, drafter=step.drafter)
        self._record_verified(batch, result, kind)
        step.tokens = partial(_gained_tokens, result)

    def end(self) -> None:
        step, self._step = self._step, None
        if step is None:
            self._speculation.interrupt()
        else:
            self._speculation.launch(step)

    def complete(self, accepted: Sequence[int]) -> None:
        self._speculation.complete(accepted)
        now = monotonic()
        if now >= self._reported + _SECONDS_BETWEEN_REPORTS:
            self._reported = now
            self._report(idle=False)

    def handle_idle(self) -> None:
        self._handle_messages()
        self._speculation.interrupt()
        self._report(idle=True)

    @property
    def _keeps_cache(self) -> bool:
        return self._speculation.drafter is not None and not self._lapsed

    def _plan_step(self, batch: Any) -> StepPlan:
        """Choose a strategy; look n-grams up, or complete the drafter's cache, as it needs."""
        step = self._step = self._speculation.begin_step(list(batch.reqs), _context(batch))
        choice, chains, rebuilt = step.choice, None, list[KnownText]()
        match choice.strategy:
            case Draft():
                if self._lapsed:
                    self._writer.publish_staged()
                    rebuilt = self._rows_to_rebuild(batch)
            case Ngram():
                chains = self._look_up(batch, step, choice.strategy)
            case _:
                pass
        if not isinstance(choice.strategy, Draft) and choice.why != "control":
            self._lapsed = self._lapsed or choice.steps >= _LAPSE_STEPS
        return StepPlan(step.width, self._keeps_cache, chains, rebuilt)

    def _rows_to_rebuild(self, batch: Any) -> list[KnownText]:
        texts, lengths = self._texts(batch), batch.seq_lens.tolist()
        known = [
            KnownText(row, [*text.prompt, *text.answer][1:])
            for row, text in enumerate(texts)
            if len(text.prompt) + len(text.answer) == lengths[row] + 1
        ]
        # with overlap a new request's first token may not be known yet
        self._lapsed = len(known) < len(texts)
        return [
            text
            for text in known
            if self._writer.holds(batch.reqs[text.row].rid, lengths[text.row])
        ]

    def _look_up(self, batch: Any, step: LaunchedStep, strategy: Ngram) -> list[list[int]] | None:
        """Propose n-grams, in rows of one length that SGLang can verify."""
        proposals = self._speculation.propose_ngrams(self._texts(batch), strategy.tokens)
        longest = max(map(len, proposals))
        if longest == 0:
            self.mark_proposed()
            return None
        step.width = min(width for width in self._candidate_steps() if width >= longest)
        return [tokens + [0] * (step.width - len(tokens)) for tokens in proposals]

    def _texts(self, batch: Any) -> Sequence[RunningText]:
        """Return the texts up to the newest tokens, which may not have reached the host yet."""
        return [
            RunningText(
                request.rid,
                request.origin_input_ids,
                self._speculation.answer_so_far(
                    request, length + 1 - len(request.origin_input_ids)
                ),
            )
            for request, length in zip(batch.reqs, batch.seq_lens.tolist(), strict=True)
        ]

    def _handle_messages(self) -> None:
        for message in self._port.receive():
            match message:
                case UseDrafter(version=version):
                    self._speculation.use_drafter(version)
                    self._lapsed = True
                case NotePolicySwap():
                    self._speculation.handle_policy_swap()
                case IndexAnswer(prompt=prompt, tokens=tokens):
                    self._speculation.index_answer(prompt, tokens)
                case AllowSpeculation(allowed=allowed):
                    if self._speculation.allow(allowed):
                        self._lapsed = True

    def _report(self, idle: bool) -> None:
        if tallies := self._speculation.take_tallies(idle):
            self._port.send(TalliesTaken(tallies=tallies))
        else:
            self._port.flush()


def _context(batch: Any) -> int:
    """Count the tokens of all requests, as far as the host knows them."""
    return sum(len(r.origin_input_ids) + len(r.output_ids) for r in batch.reqs)


def _gained_tokens(result: Any) -> Sequence[Sequence[int]]:
    """Return the tokens that each row of a verified batch gained; this waits for the device."""
    if result.copy_done is not None:
        result.copy_done.synchronize()
    rows = result.next_token_ids.view(len(result.accept_lens), -1).tolist()
    return [row[:gained] for row, gained in zip(rows, result.accept_lens.tolist(), strict=True)]
