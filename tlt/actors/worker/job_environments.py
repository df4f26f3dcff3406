"""The environments of the open job, and the rows that they begin with."""

from pathlib import Path

from tlt.actors.worker.endpoint import Endpoint
from tlt.actors.worker.tool_clock import ToolClock
from tlt.base.id_types import PromptIndex, Purpose
from tlt.data.dataset import Prompt, Prompts, prompts_file
from tlt.environments.verifiers_pool import open_pool
from tlt.protocol.commands import OpenJob
from tlt.spec.environment import EnvironmentSpec


class JobEnvironments:
    def __init__(self, command: OpenJob, section: EnvironmentSpec) -> None:
        self.spec = command.spec
        self.section = section
        self._folder = Path(command.folder)
        self.pool = open_pool(section, self._folder / "logs" / "environment.log")
        self.endpoint = Endpoint(self.spec.policy.max_context)
        self.tool_clock = ToolClock()
        self._prompts: dict[Purpose, Prompts] = {}

    def prompt(self, purpose: Purpose, index: PromptIndex) -> Prompt:
        if purpose not in self._prompts:
            self._prompts[purpose] = Prompts(prompts_file(self._folder, purpose))
        return self._prompts[purpose][index]

    def close(self) -> None:
        """End all processes."""
        self.pool.stop()
        self.endpoint.close()
        for prompts in self._prompts.values():
            prompts.close()
