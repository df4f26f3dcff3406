"""Check SGLang against Transformers on the same device: tokens, log-probs, states, swaps."""

import itertools
import random
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.gpu.machine import Machine
from benchmarks.gpu.parts import Check, Figures, beside, require
from benchmarks.random_policy import write_job
from tlt.base.id_types import DrafterVersion, Member, PolicyVersion, PromptIndex, Step
from tlt.engine.base import Completion, NoiseKey, Request, Sampling
from tlt.engine.sglang.client.engine import SglangEngine
from tlt.engine.sglang.client.sglang_client import SglangClient
from tlt.engine.sglang.client.start_engine_with_tap import start_client
from tlt.engine.sglang.shared.scheduler_options import SpeculationOptions, without_noise
from tlt.engine.sglang.shared.shared_hidden_state_buffer import Tap
from tlt.memory_plan import Spread
from tlt.memory_plan.engine_memory import engine_items
from tlt.models.config_json import read_config
from tlt.models.drafter_folder import save_drafter
from tlt.models.eagle_drafter import Drafter
from tlt.protocol.shared_values import SizingFacts
from tlt.ranks.job_sizes_from_spec import describe_job
from tlt.spec.config import SpeculationSpec
from tlt.spec.spec_files import load_job_spec
from tlt.trainer.drafter.initial_drafter import drafter_config_for, initialise_drafter
from tlt.trainer.drafter.samples import state_layers

SLOTS, CONTEXT = 32, 512
_STUCK_SECONDS = 120.0
# largest errors of logits and log-probs, and the relative error of states, by type
_TOLERANCE = {torch.float32: (1e-3, 1e-3), torch.bfloat16: (0.15, 0.03)}
# bytes of weights that reach SGLang in a second: a third of a copy's in memory
_SWAPPED = 3e9
# how much the next weights differ
_CHANGE = 0.2
_ids = itertools.count()


@contextmanager
def checks(machine: Machine) -> Generator[Mapping[str, Check]]:
    began = time.monotonic()
    server = _Server(machine)
    started = round(time.monotonic() - began, 1)
    yield {
        "start": lambda: {"seconds": started},
        "greedy tokens": server.check_greedy,
        "log-probs at T = 0.7": server.check_logprobs,
        "tap": server.check_states,
        "weights from the host": partial(server.swap, "cpu"),
        **({"weights by IPC": partial(server.swap, "cuda")} if machine.has_gpu else {}),
        "drafters among 64 requests": server.swap_drafters,
        "memory of graphs": server.read_graph_memory,
        "memory freed for an update": server.free_memory,
    }
    server.engine.close()


def start(machine: Machine, folder: Path, speculates: bool) -> tuple[SglangClient, Tap]:
    """Start SGLang with the machine's policy, and with a random drafter if it speculates."""
    policy, speculation, layers = machine.policy(), None, ()
    folder.mkdir()
    if speculates:
        config = read_config(policy)
        drafter = random_drafter(policy, 0)
        save_drafter(drafter, folder / "drafter")
        layers = state_layers(drafter.config, config.layers)
        arms = map(without_noise, SpeculationSpec(mode="adaptive").arms)
        speculation = SpeculationOptions(
            algorithm="EAGLE",
            drafter=str(folder / "drafter"),
            trained=False,
            layers=len(drafter.config.captured),
            arms=tuple(dict.fromkeys(arms)),
        )
    return start_client(
        policy,
        slots=SLOTS,
        max_context=CONTEXT,
        device=machine.device,
        dtype=machine.dtype,
        version=PolicyVersion(0),
        folder=folder,
        stuck_seconds=_STUCK_SECONDS,
        captured=layers,
        speculation=speculation,
    )


def random_drafter(policy: Path, seed: int) -> Drafter:
    config = drafter_config_for(read_config(policy), "eagle")
    return initialise_drafter(config, torch.ones(2 * config.hidden), seed)


def make_requests(count: int, tokens: int, temperature: float) -> list[Request]:
    """Return requests with random prompts, the same for the same number of tokens."""
    dice = random.Random(tokens)
    return [
        Request(
            id=next(_ids),
            prompt=tuple(dice.randrange(5, 500) for _ in range(16)),
            key=NoiseKey(
                seed=1,
                step=Step(0),
                purpose="train",
                prompt=PromptIndex(index),
                member=Member(0),
            ),
            sampling=Sampling(temperature=temperature),
            max_new_tokens=tokens,
            stop_tokens=frozenset(),
        )
        for index in range(count)
    ]


class _Server:
    def __init__(self, machine: Machine) -> None:
        self._machine, self._folder = machine, machine.policy()
        self._logits_off, self._states_off = _TOLERANCE[machine.dtype]
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            self._folder, dtype=machine.dtype
        )
        self._policy = model.to(machine.device).eval()  # pyright: ignore
        self._client, tap = start(machine, machine.folder / "sglang", speculates=True)
        self.engine = SglangEngine(
            self._client, self._folder, tap, str, SLOTS, CONTEXT, PolicyVersion(0)
        )

    def check_greedy(self) -> Figures:
        """Require that each token is the likeliest, within the type's rounding."""
        requests = make_requests(8, 48, 0.0)
        return self._furthest(requests, self._answers(requests))

    def check_logprobs(self) -> Figures:
        requests = make_requests(16, 48, 0.7)
        done = self._answers(requests)
        errors: list[float] = []
        for request in requests:
            answer = done[request.id]
            logprobs = (self._logits(request, answer) / 0.7).log_softmax(-1)
            expected = logprobs.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
            errors += (torch.tensor(answer.logprobs) - expected).abs().tolist()
        require(max(errors) <= self._logits_off, f"a log-prob is {max(errors):.4f} off")
        return {"worst": beside(max(errors), self._logits_off)}

    def check_states(self) -> Figures:
        (request,) = make_requests(1, 64, 0.7)
        self.engine.submit([request])
        worst = 0.0
        while self.engine.running:
            for answer in self.engine.step():
                text = torch.tensor([[*request.prompt, *answer.tokens][:-1]])
                with torch.inference_mode():
                    found = self._policy(text.to(self._policy.device), output_hidden_states=True)
                expected = found.hidden_states[-1][0].float().cpu()
                states = self.engine.hidden_states(request.id)[:, -1].float().cpu()
                worst = ((states - expected).norm(dim=-1) / expected.norm(dim=-1)).max().item()
        require(0 < worst <= self._states_off, f"a state is {worst:.4f} off")
        return {"worst_relative_error": beside(worst, self._states_off)}

    def swap(self, device: str) -> Figures:
        """Swap weights while requests run; what follows is the next policy's."""
        requests = make_requests(8, 96, 0.7)
        self.engine.submit(requests)
        while len(self.engine.partial_answer(requests[-1].id) or ()) < 10:
            self.engine.step()
        with torch.no_grad():
            for parameter in self._policy.parameters():
                noise = torch.randn_like(parameter, dtype=torch.float32) * parameter.float().std()
                parameter += (_CHANGE * noise).to(parameter)
        weights = {name: p.detach().to(device) for name, p in self._policy.named_parameters()}
        size = sum(weight.nbytes for weight in weights.values())
        began = self._machine.now()
        self.engine.swap_weights(PolicyVersion(self.engine.version + 1), weights)
        took = self._machine.now() - began
        while self.engine.running:
            self.engine.step()
        requests = make_requests(4, 24, 0.0)
        return {
            "seconds": beside(took, size / _SWAPPED),
            "megabytes": round(size / 1e6),
            **self._furthest(requests, self._answers(requests)),
        }

    def swap_drafters(self) -> Figures:
        requests = make_requests(64, 160, 0.0)
        self.engine.submit(requests)
        done: dict[int, Completion] = {}
        seconds: list[float] = []
        for number in (1, 2, 3):
            while len(self.engine.partial_answer(requests[-1].id) or ()) < 30 * number:
                done |= {answer.id: answer for answer in self.engine.step()}
            began = self._machine.now()
            self.engine.adopt_drafter(DrafterVersion(number), random_drafter(self._folder, number))
            seconds.append(round(self._machine.now() - began, 3))
        while self.engine.running:
            done |= {answer.id: answer for answer in self.engine.step()}
        require(len(done) == len(requests), "answers are missing")
        return {"seconds": seconds, **self._furthest(requests[:8], done)}

    def read_graph_memory(self) -> Figures:
        """Ask the scheduler, because its log has no such lines at the level that it runs at."""
        manager: Any = self._client._manager  # pyright: ignore[reportPrivateUsage]
        (state,) = self._client.run(manager.get_internal_state())
        held: dict[str, Any] = state["memory_usage"]
        graphs = sum(held["graph"].values())
        require(graphs > 0 or not self._machine.has_gpu, f"no graph was captured: {held}")
        return {"gigabytes": beside(graphs, self._planned_graphs() / 1e9), **held}

    def _planned_graphs(self) -> int:
        """Return what the plan of a job with this engine says on a GPU."""
        spec = write_job(
            self._machine.folder,
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
        free = [self._machine.free_bytes()]
        began = self._machine.now()
        self.engine.release_memory()
        released = self._machine.now()
        free.append(self._machine.free_bytes())
        requests = make_requests(4, 24, 0.0)
        asked = self._machine.now()
        done = self._answers(requests)
        figures: Figures = {
            "seconds_to_free": round(released - began, 3),
            "seconds_of_the_next_answers": round(self._machine.now() - asked, 3),
            **self._furthest(requests, done),
            "megabytes_freed": round((free[1] - free[0]) / 1e6),
        }
        require(not self._machine.has_gpu or free[1] > free[0], "no memory was freed")
        return figures

    def _answers(self, requests: Sequence[Request]) -> dict[int, Completion]:
        self.engine.submit(requests)
        done: dict[int, Completion] = {}
        while self.engine.running:
            done |= {answer.id: answer for answer in self.engine.step()}
        return done

    def _furthest(self, requests: Sequence[Request], done: Mapping[int, Completion]) -> Figures:
        """Say how far the logit of any token is below the likeliest token's."""
        gaps = [0.0]
        for request in requests:
            logits = self._logits(request, done[request.id])
            chosen = logits.gather(1, torch.tensor(done[request.id].tokens)[:, None])
            gaps.append((logits.max(1, keepdim=True).values - chosen).max().item())
        require(max(gaps) <= self._logits_off, f"a token is {max(gaps):.4f} below the likeliest")
        return {"furthest_from_likeliest": beside(max(gaps), self._logits_off)}

    def _logits(self, request: Request, answer: Completion) -> torch.Tensor:
        text = torch.tensor([[*request.prompt, *answer.tokens]], device=self._policy.device)
        with torch.inference_mode():
            logits = self._policy(text).logits[0]
        return logits[len(request.prompt) - 1 : -1].float().cpu()
