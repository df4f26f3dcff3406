"""Find the longest prompt of a job before it runs, as its preparation does."""

from tlt.doctor.data_check.prompt_sets import evaluation_sources, read_prompts, training_sources
from tlt.errors import TltError
from tlt.models.tokenizer import Tokenizer
from tlt.ranks.engine_requirements import context_of
from tlt.spec.config import JobSpec
from tlt.spec.data_and_algorithm import HUB


def find_longest_prompt(spec: JobSpec) -> int:
    """Return its tokens; 0 if the prompts or the tokenizer aren't on this machine.

    Data of the Hub isn't fetched for this.
    """
    sources = [*training_sources(spec), *evaluation_sources(spec)]
    if any(str(source.file.path).startswith(HUB) for source in sources):
        return 0
    try:
        most = spec.data.most_prompt_tokens(context_of(spec))
        tokenizer = Tokenizer(spec.policy.path)
        prompts = (each for source in sources for each in read_prompts(source, tokenizer, most))
        lengths = [len(each.prompt.tokens) for each in prompts]
    except (TltError, OSError):
        return 0
    return max((length for length in lengths if length <= most), default=0)
