"""Training computes the same as decoding in any batch."""

from itertools import pairwise

import pytest
import torch

from tests.trainer.drafters import LAYOUTS, decoded, drafter, ends, samples, whole
from tests.trainer.models import CPU, needs_compiler
from tlt.kernels.training_kernels import load_kernels
from tlt.trainer.drafter.micro_batches import Window, build_batch
from tlt.trainer.drafter.samples import DrafterSample
from tlt.trainer.drafter.unrolled_chains import unroll

STEPS = 4
# the drafter rotates its queries and keys in float32
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_step_of_every_chain_equals_decoding(layout: str):
    made, chosen = drafter(layout), samples(layout, 3)
    with torch.no_grad():
        found = list(unroll(made, whole(chosen, STEPS), ends().embedding, None))
        first = 0
        for sample in chosen:
            for row in range(sample.rows):
                for step, readout in enumerate(decoded(made, sample, row, STEPS)):
                    torch.testing.assert_close(found[step][first + row], readout, **CLOSE)
            first += sample.rows


@pytest.mark.parametrize("layout", LAYOUTS)
def test_windows_compute_the_same_as_the_whole_sample(layout: str):
    made = drafter(layout)
    sample = max(samples(layout, 9), key=lambda sample: sample.rows)
    cuts = [0, 5, 6, 13, sample.rows]
    with torch.no_grad():
        expected = torch.stack(list(unroll(made, whole([sample], 3), ends().embedding, None)))
        for first, last in pairwise(cuts):
            window = build_batch([sample], [Window(sample=0, first=first, last=last)], 3, CPU)
            found = torch.stack(list(unroll(made, window, ends().embedding, None)))
            live = (torch.arange(first, last) + torch.arange(3)[:, None]) < sample.rows
            torch.testing.assert_close(found[live], expected[:, first:last][live], **CLOSE)


def test_unrolls_at_the_last_position():
    made = drafter("eagle")
    length = made.config.max_positions
    states = torch.zeros(length - 1, 1, made.config.hidden, dtype=torch.float64)
    sample = DrafterSample(tokens=[1] * length, prompt=1, states=states)
    *_, last = unroll(made, whole([sample], 8), ends().embedding, None)
    assert last.isfinite().all()


@needs_compiler
@pytest.mark.parametrize("layout", LAYOUTS)
def test_kernel_computes_the_same_outputs_and_gradients(layout: str):
    found: list[list[torch.Tensor]] = []
    made = drafter(layout, torch.float32)
    together = whole(samples(layout, 4, dtype=torch.float32), STEPS)
    for native in (load_kernels(), None):
        readouts = torch.stack(list(unroll(made, together, ends(torch.float32).embedding, native)))
        slopes = torch.autograd.grad(
            (readouts * torch.linspace(-1, 1, readouts.numel()).view_as(readouts)).sum(),
            [parameter for parameter in made.parameters() if parameter.requires_grad],
        )
        found.append([readouts, *slopes])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
