"""Check SGLang against Transformers on the same device, and its speed with TLT and without."""

import itertools
import random
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from statistics import median
from typing import Any, Literal

import torch

from benchmarks.gpu.machine import MOVED, Machine
from benchmarks.gpu.outcomes import Check, Figures, beside
from benchmarks.random_policy import random_drafter, write_job
from benchmarks.sglang_speculation import CONTEXT, SLOTS, options_for, start_server
from tests.engine.reference import answers, finish, forced_logits, logprobs_of, new_request
from tests.engine.reference import transformers_model as load_policy
from tlt.base.id_types import DrafterVersion, PolicyVersion
from tlt.engine.base import Completion, Request, Sampling
from tlt.engine.sglang.client.engine import SglangEngine
from tlt.memory_plan import Spread
from tlt.memory_plan.engine_memory import engine_items
from tlt.models.config_json import read_config
from tlt.models.drafter_folder import save_drafter
from tlt.protocol.shared_values import SizingFacts
from tlt.ranks.job_sizes_from_spec import describe_job
from tlt.spec.spec_files import load_job_spec

# largest errors of logits and log-probs, and the relative error of states, by type
_TOLERANCE = {torch.float32: (1e-3, 1e-3), torch.bfloat16: (0.15, 0.03)}
# a job that may speculate costs at most 3 % more; on CPUs with 16 layers loops were decoded 2.2
# times as fast at 4 and 8 requests
_NOTHING_TO_GUESS, _LOOPS = 1 / 1.03, 2.2
# how much the next weights differ
_CHANGE = 0.2
_ids = itertools.count()


@contextmanager
def checks(machine: Machine) -> Generator[Mapping[str, Check]]:
    with closing(_start(machine, "off")) as plain, closing(_start(machine, "tlt")) as engine:
        server = _Server(machine, engine)
        yield {
            "greedy tokens": server.check_greedy,
            "log-probs at T = 0.7": server.check_logprobs,
            "tap": server.check_states,
            "weights from the host": partial(server.swap, "cpu"),
            **({"weights by IPC": partial(server.swap, "cuda")} if machine.has_gpu else {}),
            "drafters among 64 requests": server.swap_drafters,
            "memory of graphs": server.read_graph_memory,
            "memory freed for an update": server.free_memory,
            "speed, nothing to guess": partial(server.race, plain, 1.0, _NOTHING_TO_GUESS),
            "speed, loops": partial(server.race, plain, 0.0, _LOOPS),
        }


def _start(machine: Machine, name: Literal["off", "tlt"]) -> SglangEngine:
    """Start SGLang with the machine's policy, and to speculate with a drafter not in use yet."""
    policy, folder, speculation = machine.policy(), machine.folder / f"sglang-{name}", None
    folder.mkdir()
    if name == "tlt":
        save_drafter(random_drafter(read_config(policy), 0), folder / "drafter")
        speculation = options_for(policy, folder / "drafter", trained=False)
    client, tap = start_server(policy, speculation, folder, machine.device, machine.dtype)
    return SglangEngine(client, policy, tap, str, SLOTS, CONTEXT, PolicyVersion(0))


def _make_requests(count: int, tokens: int, temperature: float) -> list[Request]:
    """Return requests with prompts that no others had, or n-grams would know their answers."""
    dice, sampling = random.Random(next(_ids)), Sampling(temperature=temperature)
    prompts = [[dice.randrange(5, 500) for _ in range(16)] for _ in range(count)]
    return [new_request(next(_ids), prompt, sampling, tokens) for prompt in prompts]


class _Server:
    def __init__(self, machine: Machine, engine: SglangEngine) -> None:
        self._machine, self._folder, self._engine = machine, machine.policy(), engine
        self._logits_off, self._states_off = _TOLERANCE[machine.dtype]
        policy: Any = load_policy(self._folder, machine.dtype)
        self._policy = policy.to(machine.device)

    def check_greedy(self) -> Figures:
        """Require that each token is the likeliest, within the type's rounding."""
        requests = _make_requests(8, 48, 0.0)
        return self._furthest(requests, answers(self._engine, requests))

    def check_logprobs(self) -> Figures:
        requests = _make_requests(16, 48, 0.7)
        done = answers(self._engine, requests)
        errors: list[float] = []
        for request in requests:
            answer = done[request.id]
            expected = logprobs_of(self._logits(request, answer), answer.tokens, 0.7)
            errors += (torch.tensor(answer.logprobs) - expected).abs().tolist()
        assert max(errors) <= self._logits_off, f"a log-prob is {max(errors):.4f} off"
        return {"worst": beside(max(errors), self._logits_off)}

    def check_states(self) -> Figures:
        (request,) = _make_requests(1, 64, 0.7)
        answer = answers(self._engine, [request])[request.id]
        states = self._engine.hidden_states(request.id)[:, -1].float().cpu()
        text = torch.tensor([[*request.prompt, *answer.tokens[:-1]]], device=self._policy.device)
        with torch.inference_mode():
            found = self._policy(text, output_hidden_states=True)
        expected = found.hidden_states[-1][0].float().cpu()
        worst = ((states - expected).norm(dim=-1) / expected.norm(dim=-1)).max().item()
        assert worst <= self._states_off, f"a state is {worst:.4f} off"
        return {"worst_relative_error": beside(worst, self._states_off)}

    def swap(self, device: str) -> Figures:
        """Swap weights while requests run; what follows is the next policy's."""
        requests = _make_requests(8, 96, 0.7)
        self._engine.submit(requests)
        self._step_until(requests, 10)
        with torch.no_grad():
            for parameter in self._policy.parameters():
                parameter += _CHANGE * parameter.std() * torch.randn_like(parameter)
        weights = {name: p.detach().to(device) for name, p in self._policy.named_parameters()}
        size = sum(weight.nbytes for weight in weights.values())
        began = self._machine.now()
        self._engine.swap_weights(PolicyVersion(self._engine.version + 1), weights)
        took = self._machine.now() - began
        finish(self._engine)
        return {
            "seconds": beside(took, size / MOVED),
            "megabytes": round(size / 1e6),
            **self.check_greedy(),
        }

    def swap_drafters(self) -> Figures:
        requests = _make_requests(64, 160, 0.0)
        self._engine.submit(requests)
        done: dict[int, Completion] = {}
        seconds: list[float] = []
        for number in (1, 2, 3):
            done |= self._step_until(requests, 30 * number)
            drafter = random_drafter(read_config(self._folder), number)
            began = self._machine.now()
            self._engine.adopt_drafter(DrafterVersion(number), drafter)
            seconds.append(round(self._machine.now() - began, 3))
        done |= finish(self._engine)
        assert len(done) == len(requests), "answers are missing"
        return {"seconds": seconds, **self._furthest(requests[:8], done)}

    def read_graph_memory(self) -> Figures:
        """Ask the scheduler, because its log has no such lines at the level that it runs at."""
        client = self._engine._client  # pyright: ignore[reportPrivateUsage]
        manager: Any = client._manager  # pyright: ignore[reportPrivateUsage]
        (state,) = client.run(manager.get_internal_state())
        held: dict[str, Any] = state["memory_usage"]
        graphs = sum(held["graph"].values())
        assert graphs > 0 or not self._machine.has_gpu, f"no graph was captured: {held}"
        return {"gigabytes": beside(graphs, self._planned_graphs() / 1e9), **held}

    def _planned_graphs(self) -> int:
        """Return what the plan of a job with this engine says on a GPU."""
        spec = write_job(
            self._machine.folder / "graphs",
            "graphs",
            policy={"path": str(self._folder), "max_context": CONTEXT},
            algorithm={"steps": 1, "prompts_per_step": 4, "group_size": SLOTS // 4},
            rollout={"engine": "sglang", "slots": SLOTS, "max_new_tokens": CONTEXT // 2},
            speculation={"mode": "adaptive"},
        )
        job = describe_job(load_job_spec(spec), "cuda", SizingFacts(answers=SLOTS))
        items = engine_items(job, Spread(device="cuda"))
        return sum(item.bytes for item in items if "graphs" in item.name)

    def free_memory(self) -> Figures:
        """Free the cache and allocate it again; on a CPU SGLang goes through both, and keeps it."""
        gpu = self._machine.has_gpu
        before = torch.cuda.mem_get_info()[0] if gpu else 0
        self._engine.release_memory()
        freed = torch.cuda.mem_get_info()[0] - before if gpu else 0
        assert freed > 0 or not gpu, "no memory was freed"
        return {"megabytes_freed": round(freed / 1e6), **self.check_greedy()}

    def race(self, plain: SglangEngine, temperature: float, predicted: float) -> Figures:
        """Decode in turns with speculation and without; the first turn warms up.

        The weights are random. At temperature 1 nothing can be guessed of them, so that the ratio
        is what speculation costs. Greedily they repeat themselves, which n-grams guess.
        """
        turns, tokens = (3, 256) if self._machine.has_gpu else (1, 48)
        figures: Figures = {}
        for running in (1, 8, 32) if self._machine.has_gpu else (2,):
            seconds: dict[SglangEngine, list[float]] = {plain: [], self._engine: []}
            for _ in range(1 + turns):
                for engine, took in seconds.items():
                    began = self._machine.now()
                    answers(engine, _make_requests(running, tokens, temperature))
                    took.append(self._machine.now() - began)
            off, tlt = (median(took[1:]) for took in seconds.values())
            figures[f"{running} running, times the speed of off"] = beside(off / tlt, predicted)
        return figures

    def _step_until(self, requests: Sequence[Request], tokens: int) -> dict[int, Completion]:
        """Decode until the last request has so many tokens; return the answers that ended."""
        done: dict[int, Completion] = {}
        while len(self._engine.partial_answer(requests[-1].id) or ()) < tokens:
            done |= {answer.id: answer for answer in self._engine.step()}
        return done

    def _furthest(self, requests: Sequence[Request], done: Mapping[int, Completion]) -> Figures:
        """Say how far the logit of any token is below the likeliest token's."""
        gap = 0.0
        for request in requests:
            logits = self._logits(request, done[request.id])
            chosen = logits.gather(1, torch.tensor(done[request.id].tokens)[:, None])
            gap = max(gap, (logits.max(1, keepdim=True).values - chosen).max().item())
        assert gap <= self._logits_off, f"a token is {gap:.4f} below the likeliest"
        return {"furthest_from_likeliest": beside(gap, self._logits_off)}

    def _logits(self, request: Request, answer: Completion) -> torch.Tensor:
        return forced_logits(self._policy, request.prompt, answer.tokens).float().cpu()
