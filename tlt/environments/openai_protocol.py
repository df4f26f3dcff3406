"""Read requests of OpenAI's chat protocol and of vLLM's token protocol, and write their answers.

How tokens are drawn is the job's matter: a request's temperature and seed are ignored.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from tlt.environments.environment import Message, Tool
from tlt.environments.tool_calls import MalformedCall, assistant_message

MODEL = "policy"
_Positive = Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]


class Refused(Exception):
    """A request that gets no turn, with the status and the code that clients know."""

    def __init__(self, message: str, status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.status = status
        self.code = code

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": None, "code": self.code}}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Hold what a request wants the policy to go on from: messages, or tokens."""

    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    tokens: tuple[int, ...] | None = None
    most_tokens: int | None = None


@dataclass(frozen=True, kw_only=True)
class Written:
    """A turn of the policy."""

    # of the answer, from 0
    number: int
    text: str
    in_thought: bool
    # of all that came before
    prompt_tokens: Sequence[int]
    tokens: Sequence[int]
    logprobs: Sequence[float]
    is_cut: bool


class _Function(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] = ""


class _Call(msgspec.Struct):
    function: _Function


class _Part(msgspec.Struct):
    type: str
    text: str | None = None


class _Message(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_Part] | None = None
    tool_calls: list[_Call] | None = None
    name: str | None = None


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _ResponseFormat(msgspec.Struct):
    type: str = "text"


class _NotServed(msgspec.Struct):
    """Settings that are refused where they are set."""

    stop: Any = None
    functions: Any = None
    function_call: Any = None
    logit_bias: Any = None
    min_tokens: Any = None
    ignore_eos: Any = None
    structured_outputs: Any = None
    continue_final_message: Any = None


class ChatRequest(_NotServed, kw_only=True):
    """The body of /v1/chat/completions, as far as it matters here."""

    messages: Annotated[list[_Message], msgspec.Meta(min_length=1)]
    model: str = MODEL
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    max_tokens: _Positive | None = None
    max_completion_tokens: _Positive | None = None
    n: int | None = None
    response_format: _ResponseFormat | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    logprobs: bool | None = None
    return_token_ids: bool | None = None


class _SamplingParams(_NotServed, kw_only=True):
    max_tokens: _Positive | None = None
    n: int | None = None


class GenerateRequest(msgspec.Struct):
    """The body of /inference/v1/generate, as far as it matters here."""

    token_ids: Annotated[
        tuple[Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)], ...], msgspec.Meta(min_length=1)
    ]
    model: str = MODEL
    sampling_params: _SamplingParams = msgspec.field(default_factory=_SamplingParams)


_chat = msgspec.json.Decoder(ChatRequest)
_generate = msgspec.json.Decoder(GenerateRequest)


def read_chat(body: bytes) -> tuple[ChatRequest, Asked]:
    """Raise Refused for what can't be read, and for what would silently be left out."""
    request = _decoded(_chat, body)
    _require_served(request)
    if request.response_format is not None and request.response_format.type != "text":
        raise Refused("response_format must be text: a constraint would change what is sampled")
    if request.tool_choice not in (None, "auto", "none"):
        raise Refused("tool_choice must be auto or none: a constraint would change what is sampled")
    limits = [n for n in (request.max_tokens, request.max_completion_tokens) if n is not None]
    messages = [_as_template_has_it(message) for message in request.messages]
    tools = [] if request.tool_choice == "none" else request.tools or []
    try:
        msgspec.msgpack.encode((messages, tools))
    except (OverflowError, ValueError, RecursionError) as error:
        raise Refused(f"the messages can't be passed on: {error}") from error
    return request, Asked(messages=messages, tools=tools, most_tokens=min(limits, default=None))


def read_generate(body: bytes) -> tuple[GenerateRequest, Asked]:
    """Raise Refused for what can't be read."""
    request = _decoded(_generate, body)
    _require_served(request.sampling_params)
    return request, Asked(tokens=request.token_ids, most_tokens=request.sampling_params.max_tokens)


def said(turn: Written, tools: list[Tool] | None) -> Message:
    """Return a turn as the message that its client gets; a call that can't be read stays text."""
    if tools:
        try:
            return assistant_message(turn.text, turn.in_thought)
        except MalformedCall:
            pass
    return {"role": "assistant", "content": turn.text}


def chat_answer(request: ChatRequest, turn: Written, message: Message) -> dict[str, Any]:
    """Return the body that answers a chat request."""
    choice: dict[str, Any] = {
        "index": 0,
        "message": {**message, **_calls(message, turn.number)},
        "finish_reason": _finish(turn, message),
        "logprobs": _logprobs(turn) if request.logprobs else None,
    }
    found = {
        **_head(request.model, turn, "chat.completion"),
        "choices": [choice],
        "usage": _usage(turn),
    }
    if request.return_token_ids:
        choice["token_ids"] = list(turn.tokens)
        found["prompt_token_ids"] = list(turn.prompt_tokens)
    return found


def chat_chunks(request: ChatRequest, turn: Written, message: Message) -> Iterator[dict[str, Any]]:
    """Yield what a streamed answer consists of; the turn comes whole."""
    whole = chat_answer(request, turn, message)
    head = {**_head(request.model, turn, "chat.completion.chunk"), "usage": None}
    choice = whole["choices"][0]
    delta = choice.pop("message")
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": i, **c} for i, c in enumerate(delta["tool_calls"])]
    finish = choice.pop("finish_reason")
    first = {**head, "choices": [{**choice, "delta": delta, "finish_reason": None}]}
    if request.return_token_ids:
        first["prompt_token_ids"] = whole["prompt_token_ids"]
    yield first
    yield {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": finish}]}
    if request.stream_options is not None and request.stream_options.include_usage:
        yield {**head, "choices": [], "usage": whole["usage"]}


def generate_answer(request: GenerateRequest, turn: Written) -> dict[str, Any]:
    """Return the body that answers a request in tokens."""
    return {
        **_head(request.model, turn, "generate"),
        "request_id": f"turn-{turn.number}",
        "choices": [
            {
                "index": 0,
                "token_ids": list(turn.tokens),
                "logprobs": _logprobs(turn),
                "finish_reason": "length" if turn.is_cut else "stop",
            }
        ],
        "usage": _usage(turn),
    }


def _decoded(decoder: "msgspec.json.Decoder[Any]", body: bytes) -> Any:
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(f"the body can't be read: {error}") from error


def _require_served(request: "ChatRequest | _SamplingParams") -> None:
    if request.n not in (None, 1):
        raise Refused("n must be 1: ask again for another turn")
    for name in _NotServed.__struct_fields__:
        if getattr(request, name):
            raise Refused(f"{name} isn't served: it would change what is sampled")


def _as_template_has_it(message: _Message) -> Message:
    content = message.content or ""
    if isinstance(content, list):
        if any(part.text is None for part in content):
            raise Refused("a part of a message is no text: the policy reads text alone")
        content = "".join(str(part.text) for part in content)
    role = "system" if message.role == "developer" else message.role
    found: Message = {"role": role, "content": content}
    if message.tool_calls:
        found["tool_calls"] = [_call(each.function) for each in message.tool_calls]
    if message.name is not None:
        found["name"] = message.name
    return found


def _call(function: _Function) -> dict[str, Any]:
    arguments = function.arguments
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments, type=dict[str, Any]) if arguments else {}
        except (msgspec.MsgspecError, RecursionError) as error:
            raise Refused(f"the arguments of a call of {function.name}: {error}") from error
    return {"type": "function", "function": {"name": function.name, "arguments": arguments}}


def _calls(message: Message, turn: int) -> dict[str, Any]:
    """Return a message's calls as clients read them: with ids, and arguments in JSON."""
    if "tool_calls" not in message:
        return {}
    calls = [call["function"] for call in message["tool_calls"]]
    return {
        "tool_calls": [
            {
                "id": f"call_{turn}_{index}",
                "type": "function",
                "function": {"name": call["name"], "arguments": json.dumps(call["arguments"])},
            }
            for index, call in enumerate(calls)
        ]
    }


def _finish(turn: Written, message: Message) -> str:
    if "tool_calls" in message:
        return "tool_calls"
    return "length" if turn.is_cut else "stop"


def _head(model: str, turn: Written, kind: str) -> dict[str, Any]:
    return {"id": f"turn-{turn.number}", "object": kind, "created": 0, "model": model}


def _logprobs(turn: Written) -> dict[str, Any]:
    """Name tokens by their ids, as vLLM does."""
    return {
        "content": [
            {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
            for token, logprob in zip(turn.tokens, turn.logprobs, strict=True)
        ]
    }


def _usage(turn: Written) -> dict[str, int]:
    before, drawn = len(turn.prompt_tokens), len(turn.tokens)
    return {
        "prompt_tokens": before,
        "completion_tokens": drawn,
        "total_tokens": before + drawn,
    }
