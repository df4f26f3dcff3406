"""Check SGLang against Transformers on the same device: tokens, log-probs, states, swaps."""

import itertools
import re
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.gpu.parts import Check, Figures, Machine, Skipped, require
from benchmarks.random_policy import HALF_BILLION, TINY, write_policy
from tlt.base.id_types import DrafterVersion, Member, PolicyVersion, PromptIndex, Step
from tlt.engine.base import Completion, NoiseKey, Request, Sampling
from tlt.engine.sglang.client.engine import SglangEngine
from tlt.engine.sglang.client.start_engine_with_tap import start_client
from tlt.engine.sglang.shared.scheduler_options import SpeculationOptions, without_noise
from tlt.models.config_json import read_config
from tlt.models.drafter_folder import save_drafter
from tlt.models.eagle_drafter import Drafter
from tlt.spec.config import SpeculationSpec
from tlt.trainer.drafter.initial_drafter import drafter_config_for, initialise_drafter
from tlt.trainer.drafter.samples import state_layers

_SLOTS, _CONTEXT = 64, 512
_STUCK_SECONDS = 120.0
# largest errors of logits and log-probs, and the relative error of states, by type
_TOLERANCE = {torch.float32: (1e-3, 1e-3), torch.bfloat16: (0.15, 0.03)}
# how much the next weights differ
_CHANGE = 0.2
_MEGABYTE = 1e6


@contextmanager
def checks(machine: Machine) -> Generator[Mapping[str, Check]]:
    folder = machine.folder / "policy"
    write_policy(folder, HALF_BILLION if machine.has_gpu else TINY)
    began = time.monotonic()
    server = _Server(machine, folder)
    started = round(time.monotonic() - began, 1)
    yield {
        "start": lambda: {"seconds": started},
        "greedy tokens": server.check_greedy,
        "log-probs at T = 0.7": server.check_logprobs,
        "tap": server.check_states,
        "weights from the host": partial(server.swap, "cpu"),
        "weights by IPC": server.swap_by_ipc,
        "drafters among 64 requests": server.swap_drafters,
        "memory of graphs": server.read_graph_memory,
        "memory freed for an update": server.free_memory,
    }
    server.engine.close()


class _Server:
    def __init__(self, machine: Machine, folder: Path) -> None:
        self._machine, self._folder = machine, machine.folder
        self._logits_off, self._states_off = _TOLERANCE[machine.dtype]
        self._policy: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, dtype=machine.dtype
        )
        self._policy = self._policy.to(machine.device).eval()  # pyright: ignore
        self._ids = itertools.count()
        config = read_config(folder)
        self._config = drafter_config_for(config, "eagle")
        layers = state_layers(self._config, config.layers)
        save_drafter(self._drafter(0), self._folder / "drafter")
        client, tap = start_client(
            folder,
            slots=_SLOTS,
            max_context=_CONTEXT,
            device=machine.device,
            dtype=machine.dtype,
            version=PolicyVersion(0),
            folder=self._folder,
            stuck_seconds=_STUCK_SECONDS,
            captured=layers,
            speculation=SpeculationOptions(
                algorithm="EAGLE",
                drafter=str(self._folder / "drafter"),
                trained=False,
                layers=len(self._config.captured),
                arms=tuple(
                    dict.fromkeys(map(without_noise, SpeculationSpec(mode="adaptive").arms))
                ),
            ),
        )
        self.engine = SglangEngine(client, folder, tap, str, _SLOTS, _CONTEXT, PolicyVersion(0))

    def check_greedy(self) -> Figures:
        """Require that each token is the likeliest, within the type's rounding."""
        requests = self._requests(8, 48, 0.0)
        return {"furthest_from_likeliest": self._furthest(requests, self._answers(requests))}

    def check_logprobs(self) -> Figures:
        requests = self._requests(16, 48, 0.7)
        done = self._answers(requests)
        errors: list[float] = []
        for request in requests:
            answer = done[request.id]
            logprobs = (self._logits(request, answer) / 0.7).log_softmax(-1)
            expected = logprobs.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
            errors += (torch.tensor(answer.logprobs) - expected).abs().tolist()
        require(max(errors) <= self._logits_off, f"a log-prob is {max(errors):.4f} off")
        return {"worst": max(errors), "mean": sum(errors) / len(errors)}

    def check_states(self) -> Figures:
        (request,) = self._requests(1, 64, 0.7)
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
        return {"worst_relative_error": worst}

    def swap(self, device: str) -> Figures:
        """Swap weights while requests run; what follows is the next policy's."""
        requests = self._requests(8, 96, 0.7)
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
        requests = self._requests(4, 24, 0.0)
        furthest = self._furthest(requests, self._answers(requests))
        return {
            "seconds": round(took, 3),
            "megabytes": round(size / _MEGABYTE),
            "furthest_from_likeliest": furthest,
        }

    def swap_by_ipc(self) -> Figures:
        if not self._machine.has_gpu:
            raise Skipped("CUDA IPC needs a GPU")
        return self.swap(str(self._machine.device))

    def swap_drafters(self) -> Figures:
        requests = self._requests(64, 160, 0.0)
        self.engine.submit(requests)
        done: dict[int, Completion] = {}
        seconds: list[float] = []
        for number in (1, 2, 3):
            while len(self.engine.partial_answer(requests[-1].id) or ()) < 30 * number:
                done |= {answer.id: answer for answer in self.engine.step()}
            began = self._machine.now()
            self.engine.adopt_drafter(DrafterVersion(number), self._drafter(number))
            seconds.append(round(self._machine.now() - began, 3))
        while self.engine.running:
            done |= {answer.id: answer for answer in self.engine.step()}
        require(len(done) == len(requests), "answers are missing")
        furthest = self._furthest(requests[:8], done)
        return {"seconds": seconds, "furthest_from_likeliest": furthest}

    def read_graph_memory(self) -> Figures:
        if not self._machine.has_gpu:
            raise Skipped("CUDA graphs need a GPU")
        log = (self._folder / "sglang.log").read_text(errors="replace")
        found = [float(size) for size in re.findall(r"[Cc]apture.* end.*mem usage=([\d.]+)", log)]
        require(bool(found), "SGLang's log names no captured graphs")
        return {"gigabytes": found}

    def free_memory(self) -> Figures:
        """Free the cache and allocate it again; on a CPU SGLang goes through both, and keeps it."""
        free = [self._free_megabytes()]
        began = self._machine.now()
        self.engine.release_memory()
        released = self._machine.now()
        free.append(self._free_megabytes())
        requests = self._requests(4, 24, 0.0)
        asked = self._machine.now()
        done = self._answers(requests)
        figures: Figures = {
            "seconds_to_free": round(released - began, 3),
            "seconds_of_the_next_answers": round(self._machine.now() - asked, 3),
            "furthest_from_likeliest": self._furthest(requests, done),
            "megabytes_freed": free[1] - free[0],
        }
        require(not self._machine.has_gpu or free[1] > free[0], "no memory was freed")
        return figures

    def _free_megabytes(self) -> int:
        if not self._machine.has_gpu:
            return 0
        return torch.cuda.mem_get_info(self._machine.device)[0] >> 20

    def _drafter(self, seed: int) -> Drafter:
        sizes = torch.ones(2 * self._config.hidden)
        return initialise_drafter(self._config, sizes, seed)

    def _requests(self, count: int, tokens: int, temperature: float) -> Sequence[Request]:
        generator = torch.Generator().manual_seed(tokens)
        return [
            Request(
                id=next(self._ids),
                prompt=tuple(torch.randint(5, 500, (16,), generator=generator).tolist()),
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

    def _answers(self, requests: Sequence[Request]) -> dict[int, Completion]:
        self.engine.submit(requests)
        done: dict[int, Completion] = {}
        while self.engine.running:
            done |= {answer.id: answer for answer in self.engine.step()}
        return done

    def _furthest(self, requests: Sequence[Request], done: Mapping[int, Completion]) -> float:
        """Return how far the logit of any token is below the likeliest token's."""
        gaps = [0.0]
        for request in requests:
            logits = self._logits(request, done[request.id])
            chosen = logits.gather(1, torch.tensor(done[request.id].tokens)[:, None])
            gaps.append((logits.max(1, keepdim=True).values - chosen).max().item())
        require(max(gaps) <= self._logits_off, f"a token is {max(gaps):.4f} below the likeliest")
        return max(gaps)

    def _logits(self, request: Request, answer: Completion) -> torch.Tensor:
        text = torch.tensor([[*request.prompt, *answer.tokens]], device=self._policy.device)
        with torch.inference_mode():
            logits = self._policy(text).logits[0]
        return logits[len(request.prompt) - 1 : -1].float().cpu()
