"""The page shows the samples of a run, hostile ones included."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from playwright.sync_api import Route, expect

from tests.browser.conftest import RECORDED, Visit, await_run
from tests.browser.served import serve_folder
from tests.dashboard.runs import some_run, write_run
from tests.samples import written_answer
from tests.simulation.world import JOB
from tlt.blobs.answer_files import Answer, AnswerFiles, Turn
from tlt.data.dataset import Prompt, Prompts, prompts_file
from tlt.store.journal import FILE_NAME

pytestmark = pytest.mark.live

_HOSTILE = (
    "<script>document.title='evil'</script><img src=x onerror=\"document.title='evil'\">&lt;b&gt;"
)


@contextmanager
def served(folder: Path, answer: Answer) -> Iterator[str]:
    """Serve a run all of whose answers are this one."""
    folder = write_run(some_run(3), folder)
    written = AnswerFiles(folder).writer("1.0").append(answer)
    lines: list[bytes] = []
    for line in (folder / FILE_NAME).read_bytes().splitlines():
        entry = msgspec.json.decode(line)
        if "answer" in entry["event"]:
            entry["event"]["answer"] = msgspec.to_builtins(written)
        if "reason" in entry["event"]:
            entry["event"]["reason"] = _HOSTILE
        lines.append(msgspec.json.encode(entry))
    (folder / FILE_NAME).write_bytes(b"\n".join([*lines, b""]))
    row = Prompt(tokens=(1,), row={"prompt": _HOSTILE}, answer=_HOSTILE)
    Prompts.write(prompts_file(folder, "train"), [row] * 8)
    with serve_folder(folder) as address:
        yield address


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(tmp_path_factory.mktemp("hostile"), written_answer([7], text=_HOSTILE)) as address:
        yield address


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    def said(*turns: tuple[str, str]) -> Answer:
        turned = tuple(Turn(role=role, text=text) for role, text in turns)
        return msgspec.structs.replace(written_answer([7]), turns=turned)

    first = said(("user", "What is it?"), ("assistant", "A call"), ("tool", _HOSTILE))
    other = said(("user", "Help!"), ("assistant", "Yes"))
    answer = msgspec.structs.replace(first, branches=(other,))
    with served(tmp_path_factory.mktemp("spoken"), answer) as address:
        yield address


def test_shows_who_said_what(visit: Visit, spoken: str) -> None:
    page = visit.open(f"{spoken}#/job/{JOB}/samples")
    await_run(page)
    page.locator("#batch").select_option("train 0")
    turns = page.locator(".answer").first.locator(".turns")
    expect(turns).to_contain_text("conversation 2", timeout=15000)
    expect(turns.locator(".said-tool")).to_contain_text("<script>")
    expect(turns.locator(".said-assistant")).to_have_text(["assistantA call", "assistantYes"])
    opening = turns.locator(".said-user").first
    expect(opening).to_be_hidden()
    turns.locator("summary").first.click()
    expect(opening).to_be_visible()


def test_shows_hostile_prompts_and_answers_as_text(visit: Visit, hostile: str) -> None:
    page = visit.open(f"{hostile}#/job/{JOB}/samples")
    await_run(page)
    page.locator("#batch").select_option("train 0")
    # the server imports tokenizers first
    expect(page.locator(".answer pre").first).to_contain_text("<script>", timeout=15000)
    expect(page.locator(".question")).to_contain_text("onerror")
    assert page.locator("main img, main script").count() == 0
    assert page.title() != "evil"


def test_shows_the_answers_of_each_batch(visit: Visit, recorded: str) -> None:
    page = visit.open(f"{recorded}#/job/{RECORDED}/samples")
    samples = page.locator("#samples")
    expect(samples.locator(".answer").first).to_be_visible(timeout=15000)
    batches = page.locator("#batch option").evaluate_all("all => all.map(each => each.value)")
    for each in batches:
        _, step = each.split()
        page.locator("#batch").select_option(each)
        expect(samples.locator("caption")).to_contain_text(f"step {step}:")
        expect(samples.locator(".answer").first).to_be_visible()
        expect(samples.locator(".error").first).to_be_empty()


def test_shows_the_group_that_was_chosen_last(visit: Visit, recorded: str) -> None:
    page = visit.open(f"{recorded}#/job/{RECORDED}/samples")
    groups = page.locator("#samples .groups button")
    expect(page.locator("#samples caption")).to_contain_text("step 7:", timeout=15000)
    expect(page.locator("#samples .answer").first).to_be_visible()
    delayed: list[Route] = []
    page.route(re.compile("/samples/7/train/"), lambda route: delayed.append(route), times=1)
    groups.nth(1).click()
    groups.nth(2).click()
    expect(page.locator("#samples [aria-current]")).to_have_text(groups.nth(2).inner_text())
    name = groups.nth(2).inner_text().removeprefix("prompt ")
    path = f"/api/jobs/{RECORDED}/samples/7/train/{name}"
    fetch_json = "path => fetch(path).then((response) => response.json())"
    question = page.evaluate(fetch_json, path)["question"]
    expect(page.locator("#samples .question")).to_contain_text(question)
    with page.expect_response(re.compile("/samples/7/train/")):
        delayed[0].continue_()
    expect(page.locator("#samples .question")).to_contain_text(question)
