"""Say what was found in a job's data, and what to do about it."""

from collections.abc import Iterator

from tlt.doctor.data_check.gold_rewards import AS_IT_IS, TESTS_PARSE, GoldFigures
from tlt.doctor.data_check.leakage import HeldOutPrompts
from tlt.doctor.data_check.prompt_sets import SetFold
from tlt.doctor.findings import Finding, Status
from tlt.errors import TltError
from tlt.spec.reward import RewardSpec


def find_in_set(fold: SetFold, refuses_long: bool) -> Iterator[Finding]:
    figures, key = fold.figures(), fold.source.key
    if fold.too_long:
        none_left = figures.too_long == figures.rows
        wrong = none_left or refuses_long
        yield Finding(
            subject=f"length of {key}",
            found=f"{_share(figures.too_long, figures.rows)} prompts have more than {fold.most} "
            f"tokens, such as {fold.too_long[0]}",
            status="wrong" if wrong else "warning",
            advice=f"a job {'is refused' if wrong else 'leaves them out'}: raise "
            "data.max_prompt_tokens or policy.max_context, or shorten them",
        )
    if fold.repeated:
        there, before = fold.repeated[0]
        yield Finding(
            subject=f"repeats in {key}",
            found=f"{_share(figures.repeated, figures.rows)} prompts are repeats: "
            f"{there} of {before}",
            status="warning",
            advice="drop them, unless they are to count more often",
        )
    if fold.without_answer:
        most = 2 * figures.without_answer > figures.rows
        yield Finding(
            subject=f"answers of {key}",
            found=f"{_share(figures.without_answer, figures.rows)} rows have none, "
            f"such as {fold.without_answer[0]}",
            status="wrong" if most else "warning",
            advice="drop these rows, or name another column: answer_key",
        )


def find_leaks(held_out: HeldOutPrompts, rows: int) -> Iterator[Finding]:
    subject = f"leakage of {held_out.key}"
    same, similar = held_out.same(), held_out.similar()
    if same:
        yield Finding(
            subject=subject,
            found=f"training data has {_share(len(same), rows)} prompts: {same[0].held_out} is "
            f"{same[0].trained}",
            status="wrong",
            advice="take them out of the training prompts: evaluations would measure memory",
        )
    if similar:
        yield Finding(
            subject=subject,
            found=f"{_share(len(similar), rows)} prompts share 13 words in a row with a training "
            f"prompt: {similar[0].held_out} with {similar[0].trained}",
            status="warning",
            advice="look at some: a reworded problem leaks as well",
        )
    if not same and not similar:
        yield Finding(subject=subject, found=f"none of {rows} prompts is trained on")


def find_in_gold(reward: RewardSpec, gold: GoldFigures, alone: bool) -> Finding:
    """Judge one reward of one set; `alone` says that no other reward tells right from wrong."""
    subject = f"{gold.reward} of {gold.key}"
    if not gold.rows:
        return Finding(subject=subject, found=f"it applies to none of {gold.sampled} rows")
    # a function without `correct_at` may give less than 1 to all that is right
    is_open = reward.least_correct is None and 2 * gold.right < gold.rows
    satisfied = gold.positive if is_open else gold.right
    status: Status = "ok" if is_open or gold.right == gold.rows else "warning"
    if 2 * satisfied < gold.rows:
        status = "warning" if is_open and not alone else "wrong"
    found = _describe_positive(gold) if is_open else _describe_right(reward, gold)
    return Finding(
        subject=subject,
        found=found + (f"; {gold.failed} failed: {gold.error}" if gold.failed else ""),
        status=status,
        advice=_advice(reward, gold, status),
    )


def refused(subject: str, error: TltError) -> Finding:
    return Finding(subject=subject, found=str(error), status="wrong", advice="a job is refused")


def no_reward(key: str, rows: int) -> Finding:
    return Finding(
        subject=f"rewards of {key}",
        found=f"no reward applies to any of {rows} rows",
        status="wrong",
        advice="name one that does: an answer without a reward is left out",
    )


def not_called(reward: RewardSpec) -> Finding:
    found = "not called; --all-rewards calls it, too"
    if reward.kind == "environment":
        found = "not called: an environment judges what it has answered"
    return Finding(subject=reward.label, found=found)


def no_answers() -> Finding:
    found = "data.answer_key is null, so there is no gold to score"
    return Finding(subject="rewards", found=found)


def _describe_right(reward: RewardSpec, gold: GoldFigures) -> str:
    count = _share(gold.right, gold.rows)
    if reward.kind != "code":
        form = AS_IT_IS if gold.form == AS_IT_IS else f"as {gold.form}"
        return f"the gold of {count} rows is right" + (f" {form}" if gold.right else "")
    if gold.form in (None, TESTS_PARSE):
        return f"the tests of {count} rows parse"
    return f"the programs of {count} rows pass their tests (column {gold.form})"


def _describe_positive(gold: GoldFigures) -> str:
    most = "" if gold.highest is None else f", {gold.highest:g} at most"
    return f"the gold of {_share(gold.positive, gold.rows)} rows gets more than 0{most}"


def _advice(reward: RewardSpec, gold: GoldFigures, status: Status) -> str:
    if status == "ok":
        return ""
    if status == "warning":
        return f"look at the others, such as {gold.less}"
    if reward.kind == "code" and gold.form not in (None, TESTS_PARSE):
        return "the column may hold no Python, or reward.timeout_seconds may be too short"
    if reward.kind == "code":
        return "answer_key names a column of tests: text, a list of it, or inputs and outputs"
    if reward.kind in ("function", "url", "model"):
        return "try single answers by `tlt reward score`: it may expect another form, or column"
    return "name a column of final answers alone (answer_key), or a reward that finds them"


def _share(count: int, rows: int) -> str:
    return f"{count} of {rows}"
