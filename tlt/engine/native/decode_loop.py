"""One decode step: propose drafts, verify them in one pass, keep what the policy sampled.

A step decodes a window in each row: its newest token, and the drafts that may follow it. The keyed
noise selects the policy's token at each position; drafts count as far as they are those tokens.
"""

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter

import torch

from tlt.base.id_types import PolicyVersion, StopReason
from tlt.base.strategies import Draft, max_drafts
from tlt.engine.base import Completion
from tlt.engine.native.gumbel_noise import GumbelNoise
from tlt.engine.native.policy_forward import PolicyForward
from tlt.engine.native.row_slot_table import RowTable
from tlt.engine.native.running_batch_tensors import RunningBatch, StepOutcome
from tlt.engine.native.slot_storage import SlotTensors
from tlt.engine.native.speculation_controller import SpeculationController
from tlt.engine.native.token_origins import TokenOrigins
from tlt.engine.request_queue import RequestQueue
from tlt.engine.stop_strings import completes_stop_string


class DecodeLoop:
    def __init__(
        self,
        rows: RowTable,
        slots: SlotTensors,
        forward: PolicyForward,
        noise: GumbelNoise,
        speculation: SpeculationController,
        decode_text: Callable[[Sequence[int]], str],
    ) -> None:
        self._rows = rows
        self._slots = slots
        self._forward = forward
        self._noise = noise
        self._speculation = speculation
        self._decode_text = decode_text
        self._origins = TokenOrigins()

    def decode(self, version: PolicyVersion) -> list[Completion]:
        """Decode one step and return the requests that it ended."""
        if not self._rows.rows:
            return []
        batch = self._rows.batch or self._new_batch()
        timer = self._speculation.start_step(batch)
        choice = self._speculation.choose(batch)
        timer.mark_chosen()
        noise = batch.noise(max_drafts(choice.strategy) + 1)
        drafts = self._speculation.propose(choice.strategy, batch, noise)
        timer.mark_proposed(drafts)
        window = batch.newest[:, None]
        if drafts is not None:
            window = torch.cat([window, drafts], dim=1)
        width = window.shape[1]
        positions = batch.next_positions(width)
        logits = self._forward.decode(window, positions, partial(batch.segments, width))
        tokens, logprobs = batch.sampler.draw(logits, noise.first(width))
        addresses = (batch.starts[:, None] + (positions + 1)).view(-1)
        self._slots.tokens.view(-1).index_copy_(0, addresses, tokens.view(-1))
        self._slots.logprobs.view(-1).index_copy_(0, addresses, logprobs.view(-1))
        drafter = self._speculation.drafter_version if isinstance(choice.strategy, Draft) else None
        proposed, step = drafts is not None, self._rows.step
        self._origins.record(step, version, len(batch.rows), proposed, drafter)
        outcome = batch.check(tokens, drafts)
        self._find_stop_strings(batch, outcome, tokens)
        if proposed:
            for row, kept in zip(batch.rows, outcome.kept, strict=True):
                row.add_accepted(step, kept - 1)
        batch.advance(tokens, outcome.kept)
        self._rows.step += 1
        self._speculation.observe(choice, timer, outcome)
        return self._end_rows(batch, outcome)

    def end_cancelled(self, queue: RequestQueue) -> list[Completion]:
        """Return the cancelled requests: those that run, then those that still wait."""
        if not queue.cancelled:
            return []
        ended = [
            self._end_row(index, "cancelled")
            for index, row in enumerate(self._rows.rows)
            if row is not None and row.request.id in queue.cancelled
        ]
        for completion in ended:
            queue.finish(completion.id)
        return ended + queue.take_cancelled()

    def _new_batch(self) -> RunningBatch:
        rows = [row for row in self._rows.rows if row is not None]
        self._origins.forget(min(row.first_step for row in rows))
        tokens, logprobs = self._slots.tokens, self._slots.logprobs
        self._rows.batch = RunningBatch(rows, self._rows.step, tokens, self._noise, logprobs)
        return self._rows.batch

    def _find_stop_strings(
        self, batch: RunningBatch, outcome: StepOutcome, tokens: torch.Tensor
    ) -> None:
        """Cut the outcome of each row where a stop string is complete."""
        if not batch.watched:
            return
        sampled: list[list[int]] = tokens.tolist()
        for index in batch.watched:
            row = batch.rows[index]
            for count, token in enumerate(sampled[index][: outcome.kept[index]], start=1):
                row.tokens.append(token)
                if completes_stop_string(row.tokens, row.request.stop_strings, self._decode_text):
                    outcome.kept[index] = count
                    outcome.reasons[index] = "stop"
                    break

    def _end_rows(self, batch: RunningBatch, outcome: StepOutcome) -> list[Completion]:
        for index in outcome.reasons:
            row = batch.rows[index]
            row.ends_on_draft = outcome.kept[index] <= outcome.accepted[index]
            self._rows.ended[row.request.id] = index, row.position(self._rows.step)
        return [self._end_row(index, reason) for index, reason in sorted(outcome.reasons.items())]

    def _end_row(self, index: int, reason: StopReason) -> Completion:
        row, step = self._rows.remove(index), self._rows.step
        position = row.position(step)
        answer = slice(len(row.request.prompt), position + 1)
        tokens: list[int] = self._slots.tokens[index, answer].tolist()
        self._speculation.handle_row_end(row, tokens)
        if row.request.goes_on and reason != "cancelled":
            cached = (*row.request.prompt, *tokens)[:position]
            self._rows.kept.add(index, cached, row.first_step)
        logprobs: list[float] = self._slots.logprobs[index, answer].tolist()
        return Completion(
            id=row.request.id,
            tokens=tokens,
            logprobs=logprobs,
            text=self._decode_text(tokens),
            stop=reason,
            policies=self._origins.policies(row, step),
            drafters=self._origins.drafters(row, step),
            origins=self._origins.origins(row, step),
            batches=self._origins.batches(row, step),
            decode_seconds=perf_counter() - row.started,
        )
