"""Find sources that no reward scores, and names in `reward.sources` that no source has."""

from collections.abc import Collection

from tlt.spec.data_and_algorithm import DataSpec
from tlt.spec.prompt_files import names_in_rows, prompt_files
from tlt.spec.reward import RewardSpec
from tlt.spec.section import suggestion

Rewards = RewardSpec | tuple[RewardSpec, ...]


def complain_of_sources(reward: Rewards, data: DataSpec) -> str | None:
    """Check the names that the spec has itself; those in a column are known once it is read."""
    if names_in_rows(data):
        return None
    complaint = complain_of_unknown_source(reward, {file.name for file in prompt_files(data)})
    if complaint is not None:
        return complaint
    for file in prompt_files(data):
        if (complaint := complain_of_unscored(reward, [file.name])) is not None:
            return f"{file.key}: {complaint}"
    return None


def complain_of_unknown_source(reward: Rewards, known: Collection[str]) -> str | None:
    """Return a complaint of the first name that is none of the known ones."""
    for key, each in _by_key(reward).items():
        unknown = next((name for name in each.sources or () if name not in known), None)
        if unknown is not None:
            advice = suggestion(unknown, sorted(known))
            return f"{key}.sources: no source or set has the name '{unknown}'; {advice}"
    return None


def complain_of_unscored(reward: Rewards, sources: Collection[str]) -> str | None:
    """Return a complaint if no reward applies to what has these names."""
    rewards = _by_key(reward).values()
    if any(each.applies_to(sources) for each in rewards):
        return None
    named = {name for each in rewards for name in each.sources or ()}
    name = list(sources)[-1]
    advice = suggestion(name, sorted(named))
    return f"no reward scores '{name}': it is in no reward's sources; {advice}"


def _by_key(reward: Rewards) -> dict[str, RewardSpec]:
    if isinstance(reward, tuple):
        return {f"reward.{index}": each for index, each in enumerate(reward)}
    return {"reward": reward}
