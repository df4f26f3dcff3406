"""Score conversations with a reward model: a sequence classifier with one label.

An answer's score is the one that the model gives it alone. Transformers takes it from the last
token that isn't the pad token, so a model without a pad token is padded with a token that none of
the batch's conversations holds. Padding is on the right and masked.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tlt.errors import ConfigError
from tlt.rewards.reward_messages import ScoreRequest, ScoreResult
from tlt.spec.reward import RewardSpec

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# tokenizers without a limit of their own state a number above this
_NO_LIMIT = 1 << 30


class RewardModel:
    def __init__(self, spec: RewardSpec) -> None:
        """Load model and tokenizer; raise ConfigError if the folder or the device won't do."""
        self._spec = spec
        self._folder = spec.path or ""
        self._device = torch.device(spec.device or "cpu")
        self._tokenizer, self._model = self._load()
        self._config = self._model.config.get_text_config()
        self._config.use_cache = False
        self._most = self._most_tokens()
        self._pad = self._known_pad_token()
        self._truncated = 0

    def score(self, requests: Sequence[ScoreRequest]) -> list[ScoreResult]:
        """Return a result for each request; one whose conversation can't be read is an error."""
        results: list[ScoreResult | None] = [None] * len(requests)
        conversations: dict[int, list[int]] = {}
        for index, request in enumerate(requests):
            try:
                conversations[index] = self._tokens(request)
            except Exception as error:  # the template is a program that the model's authors wrote
                text = " ".join(f"{type(error).__name__}: {error}".split())
                results[index] = ScoreResult(error=text)
        for batch in _batches(conversations, self._spec.batch_tokens):
            try:
                scores = self._scores([conversations[index] for index in batch])
            except RuntimeError as error:  # a device without memory for reward.batch_tokens
                for index in batch:
                    results[index] = ScoreResult(error=_line(error))
                continue
            for index, score in zip(batch, scores, strict=True):
                results[index] = _result(score)
        return [result for result in results if result is not None]

    def _load(self) -> tuple[Any, Any]:
        os.environ["HF_HUB_OFFLINE"] = "1"
        from transformers import AutoModelForSequenceClassification, AutoTokenizer
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        folder, dtype = self._folder, self._spec.dtype
        if dtype == "auto":
            dtype = "bfloat16" if self._device.type == "cuda" else "float32"
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                folder, truncation_side="left", trust_remote_code=False
            )
            model, found = AutoModelForSequenceClassification.from_pretrained(
                folder,
                dtype=_DTYPES[dtype],
                output_loading_info=True,
                trust_remote_code=False,
            )
        except Exception as error:  # whatever a folder may lack
            raise ConfigError(f"reward.path: {folder}: cannot be loaded: {_line(error)}") from error
        if lacking := sorted(found["missing_keys"]):
            raise ConfigError(
                f"reward.path: {folder}: its weights lack {lacking[0]}; it was never a reward model"
            )
        try:
            return tokenizer, model.to(self._device).eval()
        except Exception as error:  # no such device, or no memory
            raise ConfigError(f"reward.device: {self._device}: {_line(error)}") from error

    def _most_tokens(self) -> int:
        limits = [
            getattr(self._config, "max_position_embeddings", None),
            self._tokenizer.model_max_length,
        ]
        own = min((limit for limit in limits if limit and limit < _NO_LIMIT), default=_NO_LIMIT)
        wanted = self._spec.max_length
        if wanted is not None and wanted > own:
            raise ConfigError(
                f"reward.max_length: {wanted} tokens, and {self._folder} reads at most {own}"
            )
        return wanted or own

    def _known_pad_token(self) -> int | None:
        pad = getattr(self._config, "pad_token_id", None)
        return pad if pad is not None and 0 <= pad < self._config.vocab_size else None

    def _tokens(self, request: ScoreRequest) -> list[int]:
        """Tokenise the prompt and its answer; a conversation that is too long loses its start."""
        prompt = request.known.get("prompt", request.row.get("prompt"))
        if prompt is None:
            raise ValueError("the row has no column prompt")
        templated = self._tokenizer.chat_template is not None
        if templated:
            said = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
            answer = {"role": "assistant", "content": request.completion}
            text = self._tokenizer.apply_chat_template([*said, answer], tokenize=False)
        elif isinstance(prompt, list):
            raise ValueError(f"{self._folder} has no chat template, and the prompt is messages")
        else:
            text = prompt + request.completion
        tokens = self._tokenizer(text, add_special_tokens=not templated)["input_ids"]
        if len(tokens) <= self._most:
            return tokens
        self._truncated += 1
        if self._truncated == 1:
            print(
                f"a conversation of {len(tokens)} tokens loses its start: {self._most} are read",
                file=sys.stderr,
                flush=True,
            )
        return self._tokenizer(
            text, add_special_tokens=not templated, truncation=True, max_length=self._most
        )["input_ids"]

    def _scores(self, batch: Sequence[list[int]]) -> list[float]:
        pad = self._pad
        if pad is None:
            held = {token for tokens in batch for token in tokens}
            pad = next((t for t in range(self._config.vocab_size) if t not in held), None)
        if pad is None:  # every token of the vocabulary is held
            return [self._pass([tokens], 0)[0] for tokens in batch]
        return self._pass(batch, pad)

    @torch.inference_mode()
    def _pass(self, batch: Sequence[list[int]], pad: int) -> list[float]:
        width = max(map(len, batch))
        rows = [[*tokens, *[pad] * (width - len(tokens))] for tokens in batch]
        mask = [[1] * len(tokens) + [0] * (width - len(tokens)) for tokens in batch]
        if self._pad is None:
            self._config.pad_token_id = pad if len(batch) > 1 else None
        logits: Tensor = self._model(
            input_ids=torch.tensor(rows, device=self._device),
            attention_mask=torch.tensor(mask, device=self._device),
        ).logits
        scores = logits[:, 0].float()
        return (scores.sigmoid() if self._spec.sigmoid else scores).tolist()


def _batches(conversations: dict[int, list[int]], most: int) -> Iterator[list[int]]:
    """Group the indices of conversations of similar length, so that little is padding."""
    batch: list[int] = []
    for index in sorted(conversations, key=lambda index: -len(conversations[index])):
        if batch and (len(batch) + 1) * len(conversations[batch[0]]) > most:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _result(score: float) -> ScoreResult:
    if score != score or abs(score) == float("inf"):
        return ScoreResult(error=f"the reward is {score}")
    return ScoreResult(reward=score)


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
