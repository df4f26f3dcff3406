"""Count what an engine takes: weights, cache, buffers, states for the drafter, and the drafter.

The native engine's figures are those of its own allocations. SGLang allocates in a process of its
own; what isn't fixed by the arguments that TLT gives it is an estimate, and says so.
"""

from collections.abc import Iterator

from tlt.memory_plan.graph_captures import graph_bytes, plan_captures
from tlt.memory_plan.job_sizes import JobMemory, Spread
from tlt.memory_plan.memory_items import Item, Phase
from tlt.memory_plan.model_shapes import DrafterShape, ModelShape

# of tlt/engine/native/prompt_prefill.py: tokens of a prefill, and prompts held at once
_CHUNK, _MOST_PROMPTS = 512, 4
# of tlt/engine/native/drafter_proposer.py: tokens of a row that are filled together with others
_NARROW = 16
_WIDE, _COMPLEX, _INTEGER = 4, 8, 8
# the tokens of SGLang's prefill on a device of 60 GB or more
_SGLANG_CHUNK = 8192


def engine_items(job: JobMemory, spread: Spread) -> Iterator[Item]:
    if job.engine == "native":
        yield from _native(job, spread)
    else:
        yield from _sglang(job, spread)


def _native(job: JobMemory, spread: Spread) -> Iterator[Item]:
    policy, width = job.policy, job.engine_width
    rows, positions = job.slots + min(job.slots, _MOST_PROMPTS), job.positions
    decoded = job.slots * (job.drafts + 1)
    yield _weights(width * policy.decoded_weights, spread)
    cache = 2 * rows * positions * policy.layers * policy.pairs * width
    yield _cache(cache, f"{rows} rows of {positions} positions, allocated at once", spread)
    if job.captured:
        yield Item(
            name="hidden states for the drafter",
            bytes=rows * positions * job.captured * policy.hidden * width,
            during=_request_memory(spread),
            note=f"{job.captured} layers of all rows",
        )
    tokens = max(decoded, _CHUNK)
    buffers = _layer_buffers(policy, tokens, positions, width)
    # tokens and log-probs; logits and noise of a step; ranges
    buffers += rows * positions * (_INTEGER + _WIDE)
    buffers += 2 * decoded * policy.vocabulary * _WIDE
    buffers += _INTEGER * (positions + max(positions, tokens) + policy.vocabulary)
    yield Item(name="engine: buffers", bytes=buffers, note=f"{decoded} logits rows, their noise")
    yield Item(
        name="engine: temporaries of a step",
        bytes=_native_temporaries(job, spread),
        during="decoding",
        note="sampling, or the attention of a prompt of max_context",
    )
    if spread.device == "cuda":
        yield Item(name="engine: CUDA graphs", bytes=0, note="the native engine has none yet")
    if job.drafter is not None:
        yield from _native_drafter(job, job.drafter, spread)


def _native_temporaries(job: JobMemory, spread: Spread) -> int:
    policy, width = job.policy, job.engine_width
    numbers = job.slots * (job.drafts + 1) * policy.vocabulary
    at_once = min(numbers, spread.kernel_numbers)
    # noise is made from three 64-bit numbers each; a token is chosen from two scores
    sampling = max(3 * _INTEGER, 2 * _WIDE) * at_once
    if width < _WIDE:
        sampling += numbers * width
    # keys and values are repeated for all heads that share them, and the layer's are copied once
    prefill = 2 * policy.queries * job.max_context * width
    tokens = min(_CHUNK, job.max_context)
    prefill += tokens * (job.max_context + 2 * (policy.queries + policy.pairs) * width)
    return max(sampling, prefill)


def _native_drafter(job: JobMemory, drafter: DrafterShape, spread: Spread) -> Iterator[Item]:
    width, shape = job.engine_width, _as_policy(drafter)
    tokens = max(job.slots * max(job.drafts + 1, _NARROW), _CHUNK)
    buffers = _layer_buffers(shape, tokens, job.positions, width)
    buffers += _INTEGER * (job.positions + max(job.slots, job.positions))
    own = width * (drafter.decoded_weights + drafter.copied_head)
    own += _INTEGER * (drafter.own_head or drafter.hot_tokens)
    yield Item(name="drafter in the engine: weights", bytes=own)
    yield Item(
        name="drafter in the engine: KV cache",
        bytes=2 * job.slots * job.positions * shape.pairs * width,
        during=_request_memory(spread),
        note=f"one layer of {job.slots} rows",
    )
    yield Item(name="drafter in the engine: buffers", bytes=buffers)


def _layer_buffers(shape: ModelShape, tokens: int, positions: int, width: int) -> int:
    """Return the bytes of the buffers that all layers of a pass share."""
    turned = (shape.heads + shape.kv_heads) * shape.head_dim
    numbers = 2 * shape.hidden + turned + shape.pairs + 2 * shape.intermediate
    per_token = width * numbers + _WIDE
    return tokens * per_token + positions * _COMPLEX * shape.head_dim // 2


def _sglang(job: JobMemory, spread: Spread) -> Iterator[Item]:
    policy, width, tokens = job.policy, job.engine_width, job.pool_tokens
    yield _weights(width * policy.weights, spread)
    cache = 2 * tokens * policy.layers * policy.pairs * width
    yield _cache(cache, _pool_note(job), spread)
    yield Item(
        name="engine: buffers",
        bytes=_sglang_buffers(job),
        note=f"an estimate: a prefill of {min(_SGLANG_CHUNK, tokens)} tokens, logits of a step",
    )
    if spread.device == "cuda":
        yield Item(
            name="engine: CUDA graphs",
            bytes=graph_bytes(job, spread),
            note=f"an estimate: {plan_captures(job.slots, job.lengths).total} graphs, and "
            f"workspaces for {len(job.lengths)} draft lengths",
        )
    if job.drafter is not None:
        pairs = job.drafter.kv_heads * job.drafter.head_dim
        weights = width * (job.drafter.weights + job.drafter.copied_head) // spread.tensor_parallel
        yield Item(name="drafter in the engine: weights", bytes=weights)
        yield Item(
            name="drafter in the engine: KV cache",
            bytes=2 * tokens * pairs * width // spread.tensor_parallel,
            during=_request_memory(spread),
            note="one layer of the pool",
        )


def _pool_note(job: JobMemory) -> str:
    tokens, worst = job.pool_tokens, job.slots * job.request_positions
    note = f"SGLang's pool of {tokens} tokens (max_total_tokens)"
    if tokens == worst:
        return note
    share = f"{100 * tokens / worst:.0f} % of {job.slots} answers of max_context"
    return f"{note}, {share}: it retracts answers when it is full"


def _sglang_buffers(job: JobMemory) -> int:
    policy, width = job.policy, job.engine_width
    tokens = min(_SGLANG_CHUNK, job.slots * job.max_context)
    per_token = 4 * policy.hidden + policy.queries + 2 * policy.pairs + 3 * policy.intermediate
    per_token += job.captured * policy.hidden
    logits = 3 * job.slots * (job.drafts + 1) * policy.vocabulary * _WIDE
    return width * tokens * per_token + logits


def _weights(size: int, spread: Spread) -> Item:
    return Item(
        name="engine: policy's weights",
        bytes=size // spread.tensor_parallel,
        note=_division(spread),
    )


def _cache(size: int, note: str, spread: Spread) -> Item:
    over = _division(spread)
    return Item(
        name="engine: KV cache",
        bytes=size // spread.tensor_parallel,
        during=_request_memory(spread),
        note=f"{note}, {over}" if over else note,
    )


def _request_memory(spread: Spread) -> Phase:
    """Return when the memory of requests is held: ranks free it for updates on GPUs."""
    return "always" if spread.device == "cpu" else "between updates"


def _division(spread: Spread) -> str:
    count = spread.tensor_parallel
    return f"divided over {count} devices" if count > 1 else ""


def _as_policy(drafter: DrafterShape) -> ModelShape:
    """Return the drafter's layer as a model of one layer."""
    return ModelShape(
        vocabulary=drafter.vocabulary,
        hidden=drafter.hidden,
        intermediate=drafter.intermediate,
        layers=1,
        heads=drafter.heads,
        kv_heads=drafter.kv_heads,
        head_dim=drafter.head_dim,
        tied=True,
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        head_norms=False,
    )
