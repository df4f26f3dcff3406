"""What a drafter learns from comes out of the native engine, with the states of its own passes.

Either the policy answers prompts, or it reads what others wrote; nothing is computed twice.
"""

from collections.abc import Iterable, Iterator

from tlt.engine.base import Request
from tlt.engine.native import NativeEngine
from tlt.learn.drafter.sample import DraftSample


def answered(engine: NativeEngine, requests: Iterable[Request]) -> Iterator[DraftSample]:
    """In the order in which they end; an answer of one token teaches nothing."""
    asked = {request.id: request for request in requests}
    engine.submit(list(asked.values()))
    while engine.running:
        for done in engine.step():
            prompt = asked[done.id].prompt
            if len(prompt) + len(done.tokens) > 2:
                yield DraftSample(
                    tokens=(*prompt, *done.tokens),
                    prompt=len(prompt),
                    states=engine.states(done.id).clone(),
                )
