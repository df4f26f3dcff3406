"""Hidden states are kept only while drafters learn from them or propose with them."""

from pathlib import Path

import torch

from tests.engine.conftest import save_model
from tests.engine.reference import new_request, random_prompts
from tlt.base.id_types import PolicyVersion
from tlt.engine.base import Request, Sampling
from tlt.engine.native import NativeEngine
from tlt.models.decoder_from_folder import load_decoder


def _engine(folder: Path) -> NativeEngine:
    return NativeEngine(
        load_decoder(folder),
        decode_text=lambda tokens: "",
        slots=4,
        max_context=128,
        device=torch.device("cpu"),
        version=PolicyVersion(0),
        captured=(1, 2, 3),
    )


def _answers(engine: NativeEngine, requests: list[Request]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    engine.submit(requests)
    while engine.running:
        found |= {done.id: done.tokens for done in engine.step()}
    return found


def test_engine_keeps_no_states_that_nobody_reads(tmp_path: Path) -> None:
    folder = save_model(tmp_path, seed=5)
    prompts = random_prompts(3, shortest=4)
    requests = [new_request(i, prompt, Sampling(), 6) for i, prompt in enumerate(prompts)]
    capturing, plain = _engine(folder), _engine(folder)
    plain.set_capturing(False)
    answers = _answers(capturing, requests)
    assert _answers(plain, requests) == answers
    (last,) = [id_ for id_ in answers if _has_states(capturing, id_)][-1:]
    assert capturing.hidden_states(last).abs().sum() > 0
    assert plain.hidden_states(last).abs().sum() == 0


def _has_states(engine: NativeEngine, id_: int) -> bool:
    """Return True for an answer that ended in the last step."""
    try:
        engine.hidden_states(id_)
    except KeyError:
        return False
    return True


def test_prefills_for_states_even_so(tmp_path: Path) -> None:
    folder = save_model(tmp_path, seed=5)
    text = random_prompts(1, shortest=20, longest=20)[0]
    capturing, plain = _engine(folder), _engine(folder)
    plain.set_capturing(False)
    states, same = (
        engine.compute_hidden_states(text, lambda: None) for engine in (capturing, plain)
    )
    assert torch.equal(states, same)
    assert states.abs().sum() > 0
    # and keeps no states of what it decodes afterwards
    _answers(plain, [new_request(0, text[:4], Sampling(), 30)])
    assert torch.equal(plain.hidden_states(0)[:19], same)
