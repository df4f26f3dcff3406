"""Count what the policy's learner takes: state, and the activations of one micro-batch.

Activations are those of Transformers' decoder layers with torch's attention, which stores no
scores. Sharded figures are those of FSDP2: layers are gathered in turn, embedding and head all the
time.
"""

from collections.abc import Iterator

from tlt.memory_plan.job_sizes import JobMemory, Spread
from tlt.memory_plan.memory_items import Item
from tlt.memory_plan.model_shapes import LoraShape, ModelShape

# of tlt/trainer/policy/model/logprobs.py
CHUNK_LOGITS, BLOCK_LOGITS = 2**26, 2**24
# bytes of a float32 number, and those of a number in bfloat16
_FULL, _HALF = 4, 2
# the fields of `MicroBatch` for one token
_SAMPLE_BYTES = 44
# of tlt/engine/sglang/client/weight_parts_and_checksums.py
_PART_BYTES = 1 << 30
# layers that FSDP2 holds whole at once
_GATHERED_LAYERS = 2


def learner_items(job: JobMemory, spread: Spread, chunk: int = CHUNK_LOGITS) -> Iterator[Item]:
    yield from _state(job, spread)
    yield from _activations(job, spread)
    yield Item(
        name="logits and the head's gradient",
        bytes=_scoring(job, spread, chunk),
        during="update: scoring",
        note=f"at most {chunk >> 20} Mi logits at once, in float32",
    )
    yield Item(
        name="a layer's backward pass",
        bytes=_layer_backward(job, spread),
        during="update: backward",
        note="one layer computed again" if job.gradient_checkpointing else "",
    )
    yield from _swap(job, spread)


def _layer_activations(job: JobMemory, sharded: bool) -> float:
    """Return the bytes that one token leaves in one layer, or in the mean of those with LoRA."""
    if job.lora is None:
        return layer_activations(job.policy, job.bfloat16, sharded)
    return lora_activations(job.policy, job.lora, job.bfloat16)


def lora_activations(policy: ModelShape, lora: LoraShape, bfloat16: bool) -> float:
    """Return the mean bytes that one token leaves in a layer whose weights are frozen.

    Norms keep their input, and a matrix keeps its input only for an adapter.
    """
    width = _HALF if bfloat16 else _FULL
    stored = _FULL * (2 * policy.hidden + 2 + policy.heads)
    # queries, keys, values and answers of the attention; gate, its activation, and what it gates
    stored += width * (2 * (policy.queries + policy.pairs) + 3 * policy.intermediate)
    if policy.head_norms:
        heads = policy.queries + policy.pairs
        stored += (_HALF if bfloat16 else _FULL) * heads + _FULL * (policy.heads + policy.kv_heads)
    layers = {name: sides[0] for name, sides in lora.matrices.items()}
    inner = lora.rank * sum(layers.values())
    # autocast copies the input of each matrix; otherwise matrices share it
    for shared in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
        users = [layers.get(name, 0) for name in shared]
        inner += policy.hidden * (sum(users) if bfloat16 else max(users))
    inner += policy.intermediate * layers.get("down_proj", 0)
    return stored + width * inner / policy.layers


def layer_activations(policy: ModelShape, bfloat16: bool, sharded: bool) -> int:
    """Return the bytes that one token leaves in one layer for the backward pass."""
    hidden, heads = policy.hidden, policy.queries + policy.pairs
    if bfloat16:
        # with autocast the residual stream and the norms stay in float32, and each matrix keeps
        # its input in bfloat16; FSDP2 casts the stream, so that matrices share their input
        streams = 16 if sharded else 26
        stored = streams * hidden + 4 * heads + 8 * policy.intermediate
    else:
        stored = _FULL * (6 * hidden + 2 * heads + 4 * policy.intermediate)
    # log-sum-exps of the attention, and the two norms' factors
    stored += _FULL * (policy.heads + 2)
    if policy.head_norms:
        stored += (6 if bfloat16 else 8) * heads + _FULL * (policy.heads + policy.kv_heads)
    return stored


def _state(job: JobMemory, spread: Spread) -> Iterator[Item]:
    weights, trained, shards = job.policy.weights, job.trained, spread.shards
    over = f"over {shards} shards" if shards > 1 else "not sharded"
    yield Item(name="learner: parameters", bytes=_FULL * weights // shards, note=f"float32, {over}")
    if job.lora is not None:
        note = f"float32, rank {job.lora.rank}"
        yield Item(name="learner: adapter", bytes=_FULL * trained, note=note)
    if trained < weights:
        over = f"of {trained / 1e6:.4g} million weights that are trained"
    yield Item(name="learner: Adam's moments", bytes=2 * _FULL * trained // shards, note=over)
    yield Item(
        name="learner: gradients",
        bytes=_FULL * trained // shards,
        during="policy update",
        note=f"float32, {over}",
    )
    if job.reference:
        yield Item(
            name="learner: first policy",
            bytes=_FULL * weights // shards,
            note="kl_coefficient is above 0",
        )
    answers = -(-job.answers // spread.ranks)
    yield Item(
        name="learner: answers of a step",
        bytes=answers * job.max_context * _SAMPLE_BYTES,
        during="policy update",
        note=f"{answers} answers a rank, each of max_context",
    )


def _activations(job: JobMemory, spread: Spread) -> Iterator[Item]:
    policy, tokens = job.policy, job.update_tokens
    stored, how = policy.layers * layer_input(job, spread), "inputs of layers only"
    if job.offload:
        stored, how = layer_input(job, spread), "one layer's input, the host keeps the others"
    elif not job.gradient_checkpointing:
        stored = policy.layers * _layer_activations(job, spread.shards > 1)
        how = "no gradient checkpointing"
    # cosines and sines of the positions of a row, which all layers share
    rope = 2 * _FULL * policy.head_dim * (job.max_context - 1)
    yield Item(
        name="learner: activations",
        bytes=int(stored * tokens) + rope,
        during="update: backward" if job.offload else "update: passes",
        note=f"a micro-batch of {tokens} tokens, {how}",
    )
    if spread.shards > 1:
        yield from _gathered(job)
    elif job.bfloat16:
        layers = 1 if job.gradient_checkpointing else policy.layers
        yield Item(
            name="learner: weights in bfloat16",
            bytes=_HALF * layers * policy.layer_matrices,
            during="update: backward" if job.gradient_checkpointing else "update: passes",
            note="autocast's copies",
        )


def _gathered(job: JobMemory) -> Iterator[Item]:
    """Yield what FSDP2 gathers, and gradients that it has not reduced yet."""
    policy, width = job.policy, _HALF if job.bfloat16 else _FULL
    root = _FULL * (policy.embedding_and_head + policy.hidden)
    yield Item(
        name="learner: embedding and head, gathered",
        bytes=root,
        during="policy update",
        note="float32, for a whole pass",
    )
    yield Item(
        name="learner: layers, gathered",
        bytes=_GATHERED_LAYERS * width * policy.layer,
        during="update: backward",
        note="the present layer and the next one",
    )
    yield Item(
        name="learner: reducing embedding and head",
        bytes=2 * root,
        during="update: reduction",
        note="their gradients, and a copy to reduce",
    )


def layer_input(job: JobMemory, spread: Spread) -> int:
    """Return the bytes of one token's state in the residual stream."""
    return _stream(job, spread) * job.policy.hidden


def _stream(job: JobMemory, spread: Spread) -> int:
    """Return the bytes of a number in the residual stream."""
    return _HALF if job.bfloat16 and spread.shards > 1 else _FULL


def _scoring(job: JobMemory, spread: Spread, chunk: int) -> int:
    """Return the peak of logits and gradients beside the stored activations."""
    policy, scored = job.policy, job.scored_tokens
    most = max(1, chunk // policy.vocabulary)
    parts = -(-scored // most)
    logits = _FULL * policy.vocabulary * -(-scored // parts)
    block = min(logits, _FULL * max(policy.vocabulary, BLOCK_LOGITS))
    states = _FULL * policy.hidden * job.update_tokens
    predicting = _FULL * policy.hidden * scored
    gradient = 0 if job.lora is not None else _FULL * policy.embedding
    forward = max(states + predicting, predicting + logits + block)
    # of several parts, all but the last are computed beside the gradient of those after them
    beside = block if parts > 1 else 0
    backward = 2 * predicting + max(logits + gradient + beside, states + gradient)
    # input and normalised input of the final norm
    kept = 0 if job.offload else 2 * states
    # autocast keeps the copies of all layers until their forward pass is over
    copies = 0
    cached = job.bfloat16 and spread.shards == 1 and job.lora is None
    if cached and job.gradient_checkpointing:
        copies = _HALF * policy.layers * policy.layer_matrices + 3 * states
    return max(kept + forward, kept + backward, copies)


def _layer_backward(job: JobMemory, spread: Spread) -> int:
    """Return the peak of the last layer's backward pass beside the stored activations."""
    policy, tokens = job.policy, job.update_tokens
    width, stream = _HALF if job.bfloat16 else _FULL, _stream(job, spread)
    sharded = spread.shards > 1
    wide = width * policy.intermediate * tokens
    # the gradients of the gate and of what it is multiplied with, or of the matrix before that
    matrix = policy.intermediate * policy.hidden * (_FULL + (_HALF if job.bfloat16 else 0))
    freed = 1
    if job.lora is not None:
        # no weight has a gradient, and a frozen matrix has kept no input that it could free
        matrix, freed = 0, "down_proj" in job.lora.matrices
    peak = max((3 - freed) * wide, wide + matrix) + stream * policy.hidden * tokens
    inputs, whole = stream * policy.hidden, _layer_activations(job, sharded)
    if job.gradient_checkpointing:
        peak += int((whole - inputs) * tokens)
    if sharded:
        reduced = _FULL * policy.layer
        # the gradients of the layer before are being reduced; when a layer is done, its own are
        before = (inputs if job.gradient_checkpointing else whole) * tokens
        done = width * policy.layer + reduced + inputs * tokens
        peak = max(peak, peak + reduced - before, done)
    # a tied head's gradient waits for the embedding's; FSDP2 reduces both at the end
    waits = (policy.tied or sharded) and job.lora is None
    return int(peak + (_FULL * policy.embedding if waits else 0))


def _swap(job: JobMemory, spread: Spread) -> Iterator[Item]:
    policy = job.policy
    name = "new weights on their way to the engine"
    # the adapter's product, and the sum
    merged = 0 if job.lora is None else 2 * _FULL * policy.intermediate * policy.hidden
    if spread.shards > 1:
        largest = _FULL * max(policy.embedding, policy.intermediate * policy.hidden)
        note = "gathered one by one; the largest, and a copy"
        yield Item(name=name, bytes=2 * largest, during="weight swap", note=note)
    elif job.engine == "native":
        fused = 2 * _FULL * 2 * policy.intermediate * policy.hidden
        note = "one layer's, in float32"
        yield Item(name=name, bytes=fused + merged, during="weight swap", note=note)
    elif job.engine_width < _FULL:
        # a matrix that is larger than a part is one of its own
        largest = max(_PART_BYTES, job.engine_width * policy.embedding)
        part = min(job.engine_width * policy.weights, largest)
        note = "the part that SGLang reads"
        yield Item(name=name, bytes=part + merged, during="weight swap", note=note)
