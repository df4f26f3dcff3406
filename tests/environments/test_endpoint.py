"""The endpoint answers whatever is sent to it, and opens an answer to its own token alone."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tlt.actors.worker.endpoint import Endpoint
from tlt.environments.openai_protocol import Asked, Refused, Written, read_chat, read_generate

CHAT, GENERATE = "/v1/chat/completions", "/inference/v1/generate"
HELLO = {"messages": [{"role": "user", "content": "hello"}]}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
TOOL = {"type": "function", "function": {"name": "add"}}


class Scripted:
    """Writes given texts."""

    def __init__(self, *texts: str) -> None:
        self.texts = list(texts)
        self.asked: list[Asked] = []

    async def write(self, asked: Asked, is_gone: Callable[[], Awaitable[bool]]) -> Written:
        assert not await is_gone()
        self.asked.append(asked)
        if not self.texts:
            raise Refused("no more", code="max_turns")
        return Written(
            number=len(self.asked) - 1,
            text=self.texts.pop(0),
            in_thought=False,
            prompt_tokens=[1, 2, 3],
            tokens=[4, 5],
            logprobs=[-0.5, -0.25],
            is_cut=False,
        )


@pytest.fixture
async def endpoint() -> AsyncIterator[Endpoint]:
    found = Endpoint(context=4096)
    yield found
    found.close()


def client(endpoint: Endpoint, token: str = "") -> httpx.AsyncClient:
    return httpx.AsyncClient(
        transport=httpx.AsyncHTTPTransport(uds=endpoint.path),
        base_url="http://worker",
        headers={"Authorization": f"Bearer {token}"} if token else {},
        timeout=30,
    )


async def test_it_opens_an_answer_to_its_own_token_alone(endpoint: Endpoint) -> None:
    own, other = Scripted("a"), Scripted("b")
    token, others = endpoint.admit(own), endpoint.admit(other)
    for wrong in ("", "x", token[:-1], token.swapcase()):
        async with client(endpoint, wrong) as http:
            for call in (http.post(CHAT, json=HELLO), http.get("/v1/models")):
                answer = await call
                assert answer.status_code == 401
                assert answer.json()["error"]["code"] == "invalid_api_key"
    async with client(endpoint, token) as http:
        answer = await http.post(CHAT, json=HELLO)
        assert answer.json()["choices"][0]["message"]["content"] == "a"
        assert not other.asked
        endpoint.dismiss(token)
        assert (await http.post(CHAT, json=HELLO)).status_code == 401
    async with client(endpoint, others) as http:
        assert (await http.post(CHAT, json=HELLO)).status_code == 200
        refused = await http.post(CHAT, json=HELLO)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "max_turns")
        for path in ("/", "/v1/files", "/metrics", "/v1/../../etc/passwd"):
            assert (await http.get(path)).status_code == 404
        assert (await http.get(CHAT)).status_code == 405


async def test_a_shared_key_opens_the_answer_that_the_model_names(endpoint: Endpoint) -> None:
    token = endpoint.admit(Scripted("a"))
    body = {**HELLO, "model": token}
    for key, model in (("", token), ("x", token), (endpoint.shared_key, "policy")):
        async with client(endpoint, key) as http:
            assert (await http.post(CHAT, json={**HELLO, "model": model})).status_code == 401
    async with client(endpoint, endpoint.shared_key) as http:
        answer = await http.post(CHAT, json=body)
        assert answer.json()["choices"][0]["message"]["content"] == "a"
        assert (await http.get("/v1/models")).status_code == 401


async def test_a_chat_is_answered_as_openai_does(endpoint: Endpoint) -> None:
    speaker = Scripted("hi", CALL, CALL, "<tool_call>{oops</tool_call>")
    async with client(endpoint, endpoint.admit(speaker)) as http:
        (model,) = (await http.get("/v1/models")).json()["data"]
        assert model["max_model_len"] == 4096
        body = {**HELLO, "logprobs": True, "return_token_ids": True, "max_tokens": 7}
        answer = (await http.post(CHAT, json=body)).json()
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == "stop"
        assert choice["token_ids"] == [4, 5]
        assert answer["prompt_token_ids"] == [1, 2, 3]
        assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
        logprobs = choice["logprobs"]["content"]
        assert [(each["token"], each["logprob"]) for each in logprobs] == [
            ("token_id:4", -0.5),
            ("token_id:5", -0.25),
        ]
        body = {**HELLO, "tools": [TOOL]}
        called = (await http.post(CHAT, json=body)).json()["choices"][0]
        assert called["finish_reason"] == "tool_calls"
        (call,) = called["message"]["tool_calls"]
        assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}
        streamed = await http.post(
            CHAT, json={**body, "stream": True, "stream_options": {"include_usage": True}}
        )
        *chunks, last = [line[6:] for line in streamed.text.splitlines() if line]
        first, end, usage = map(json.loads, chunks)
        assert last == "[DONE]"
        assert first["choices"][0]["delta"]["tool_calls"][0]["index"] == 0
        assert end["choices"][0]["finish_reason"] == "tool_calls"
        assert usage["usage"]["total_tokens"] == 5
        # a call that can't be read stays text
        malformed = (await http.post(CHAT, json=body)).json()["choices"][0]
        assert malformed["message"]["content"] == "<tool_call>{oops</tool_call>"
    # the client's own message is what the policy said
    history = [*HELLO["messages"], called["message"], {"role": "tool", "content": "1"}]
    _, asked = read_chat(json.dumps({"messages": history, "tools": [TOOL]}).encode())
    assert asked.messages is not None
    assert asked.messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert speaker.asked[0].most_tokens == 7


async def test_tokens_are_answered_with_tokens(endpoint: Endpoint) -> None:
    speaker = Scripted("hi")
    async with client(endpoint, endpoint.admit(speaker)) as http:
        body = {"token_ids": [7, 8], "sampling_params": {"max_tokens": 3, "logprobs": 1}}
        (choice,) = (await http.post(GENERATE, json=body)).json()["choices"]
    assert choice["token_ids"] == [4, 5]
    assert len(choice["logprobs"]["content"]) == 2
    assert speaker.asked == [Asked(tokens=(7, 8), most_tokens=3)]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"messages": []}, "length >= 1"),
        ({"messages": [{"role": "god", "content": "x"}]}, "Invalid enum value"),
        ({"n": 2}, "n must be 1"),
        ({"response_format": {"type": "json_object"}}, "response_format must be text"),
        ({"tool_choice": "required"}, "tool_choice must be auto"),
        ({"stop": ["x"]}, "stop isn't served"),
        ({"max_tokens": 1 << 70}, "max_tokens"),
        ({"tools": [{"maximum": 1 << 70}]}, "can't be passed on"),
        ({"max_tokens": 0}, ">= 1"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "the policy reads text alone",
        ),
    ],
)
async def test_what_would_silently_be_left_out_is_refused(
    endpoint: Endpoint, change: dict[str, Any], complaint: str
) -> None:
    async with client(endpoint, endpoint.admit(Scripted("x"))) as http:
        refused = await http.post(CHAT, json={**HELLO, **change})
        assert refused.status_code == 400
        assert complaint in refused.json()["error"]["message"]


def _mangled(data: st.DataObject, body: bytes) -> bytes:
    at = data.draw(st.integers(0, len(body) - 1))
    kind = data.draw(st.sampled_from(("cut", "byte", "deep", "none")))
    match kind:
        case "cut":
            return body[:at]
        case "byte":
            return body[:at] + data.draw(st.binary(min_size=1, max_size=3)) + body[at + 1 :]
        case "deep":
            return b"[" * 5000 + body
        case _:
            return data.draw(st.binary(max_size=40))


@settings(max_examples=1000, deadline=None)
@given(st.data())
def test_a_malformed_body_is_refused_in_words(data: st.DataObject) -> None:
    read: Any = data.draw(st.sampled_from((read_chat, read_generate)))
    body = {
        read_chat: {
            **HELLO,
            "messages": [
                {"role": "assistant", "tool_calls": [{"function": TOOL["function"]}]},
                {"role": "tool", "content": [{"type": "text", "text": "x"}]},
            ],
            "tools": [TOOL],
            "max_tokens": 5,
        },
        read_generate: {"token_ids": [1, 2], "sampling_params": {"max_tokens": 3}},
    }[read]
    with contextlib.suppress(Refused):
        _, asked = read(_mangled(data, json.dumps(body).encode()))
        assert asked.messages or asked.tokens


async def test_nothing_that_is_sent_ends_or_blocks_it(endpoint: Endpoint) -> None:
    token = endpoint.admit(Scripted(*["x"] * 100))
    head = f"POST {CHAT} HTTP/1.1\r\nHost: w\r\nAuthorization: Bearer {token}\r\n"
    sent = [
        b"\x00\xff\x16\x03\x01",
        b"GET\r\n\r\n",
        f"{head}Content-Length: 900\r\n\r\n{{".encode(),
        f"{head}Content-Length: -1\r\n\r\n".encode(),
        f"{head}Transfer-Encoding: chunked\r\n\r\nzz\r\n".encode(),
        f"{head}X: {'y' * 100_000}\r\n\r\n".encode(),
        f"{head}Content-Length: 3\r\n\r\n[1]".encode(),
    ]
    for each in sent:
        reader, writer = await asyncio.open_unix_connection(endpoint.path)
        writer.write(each)
        writer.write_eof()
        async with asyncio.timeout(20):
            await reader.read()
        writer.close()
    async with client(endpoint, token) as http:
        assert (await http.post(CHAT, json=HELLO)).status_code == 200
