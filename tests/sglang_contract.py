"""Check, without importing SGLang, that its source still has all that our hooks touch.

`python -m tests.sglang_contract` takes a second and says what of ours each missing name breaks.
`RELIED_ON` is what we call, override or set; `READ` is what we merely read. Methods that a class
inherits are looked up in the class that defines them.
"""

import ast
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple


class Name(NamedTuple):
    """A name in SGLang, and what of ours depends on it."""

    file: str
    # Class, Class.method, Class.attribute or function
    name: str
    breaks: str
    # parameters that we pass or override, in any order
    parameters: tuple[str, ...] = ()
    # functions that its body has to call, by their last name
    calls: tuple[str, ...] = ()


_WORKER, _COMMON = "speculative/eagle_worker_v2.py", "speculative/eagle_worker_common.py"
_BASE, _INFO = "speculative/base_spec_worker.py", "speculative/eagle_info.py"
_BATCH, _SCHEDULER = "managers/schedule_batch.py", "managers/scheduler.py"
_MESSAGES, _FORWARD = "managers/io_struct.py", "model_executor/forward_batch_info.py"
_UPDATER = "managers/scheduler_components/weight_updater.py"
_ADAPTIVE = "speculative/adaptive_runtime_state.py"
_RESULTS = "managers/scheduler_components/batch_result_processor.py"
_ENGINE, _MANAGER = "entrypoints/engine.py", "managers/tokenizer_manager.py"
_CONTROL = "managers/tokenizer_control_mixin.py"

_TAP, _CHOICE = "the tap of tokens and states", "the choice of strategies"
_NGRAMS, _REBUILD = "n-gram proposals", "the drafter's cache after an adoption"
_COLD, _UPDATES = "decoding before there is a drafter", "weight updates"
_START, _REQUESTS = "the start of SGLang", "requests"
_TENSOR, _HOT = "tensor parallelism", "the head of a drafter that proposes some tokens"
_CPU, _ROOM = "SGLang on a CPU", "memory that is freed for policy updates"
_RETRACTED = "the count of retracted answers"

_ARGUMENTS = {
    "Model": "model_path dtype context_length",
    "Device": "device base_gpu_id random_seed sleep_on_idle",
    "Parallel": "tp_size pp_size dp_size attn_dp_size",
    "Schedule": "max_running_requests max_total_tokens mem_fraction_static",
    "Serving": "weight_version skip_tokenizer_init",
    "ExecFeatures": "enable_return_hidden_states enable_memory_saver",
    "ExecKernel": "attention_backend sampling_backend",
    "ExecGraph": "disable_cuda_graph disable_prefill_cuda_graph disable_decode_cuda_graph "
    "cuda_graph_bs_decode",
    "Spec": "speculative_algorithm speculative_draft_model_path speculative_num_steps "
    "speculative_eagle_topk speculative_num_draft_tokens speculative_adaptive "
    "speculative_adaptive_config speculative_draft_attention_backend",
}


def _argument_file(place: str) -> str:
    """Return the file of a class of server arguments."""
    return "exec_.py" if place.startswith("Exec") else f"{place.lower()}.py"


# fmt: off
RELIED_ON = (
    Name("plugins/hook_registry.py", "HookRegistry.register", "every hook",
         ("target", "hook", "hook_type")),
    Name("plugins/hook_registry.py", "HookRegistry.apply_hooks", "every hook"),
    Name("plugins/hook_registry.py", "HookType.AFTER", "every hook"),
    Name("plugins/hook_registry.py", "HookType.BEFORE", "every hook"),
    Name("managers/tp_worker.py", "TpModelWorker.forward_batch_generation", _TAP,
         ("batch", "is_verify")),
    Name("configs/model_config.py", "ModelConfig.hf_eos_token_id", _REQUESTS),
    Name("layers/logits_processor.py", "LogitsProcessor.keep_last_hidden_states", _TAP),
    Name(_SCHEDULER, "Scheduler.on_idle", "reports of tallies"),
    Name(_SCHEDULER, "Scheduler.get_init_info", "the answer of each scheduler's hooks"),
    Name(_UPDATER, "SchedulerWeightUpdaterManager.begin_weight_update", _UPDATES),
    Name(_SCHEDULER, "Scheduler.process_batch_result", _TAP, ("batch", "result")),
    Name(_SCHEDULER, "run_scheduler_process", _START, ("gpu_id", "tp_rank", "pp_rank", "dp_rank")),
    Name(_SCHEDULER, "Scheduler.event_loop_normal", _CHOICE,
         calls=("run_batch", "process_batch_result", "on_idle")),
    Name("speculative/spec_info.py", "SpeculativeAlgorithm.create_worker", _CHOICE),
    # our worker's base
    Name(_WORKER, "EAGLEWorkerV2.forward_batch_generation", _CHOICE,
         ("batch", "on_publish", "grammar_barrier", "pp_proxy_tensors"),
         ("activate_step_by_batch", "draft", "verify", "_draft_extend_for_decode",
          "_build_trivial_verify_input")),
    Name(_WORKER, "EAGLEWorkerV2.activate_step_by_batch", _CHOICE, ("batch_size",)),
    Name(_WORKER, "EAGLEWorkerV2.verify", _TAP, ("batch",), ("run_eagle_verify",)),
    Name(_WORKER, "EAGLEWorkerV2.on_verify_complete_cpu", _CHOICE,
         ("num_correct_drafts_per_req", "batch_size")),
    Name(_RESULTS, "SchedulerBatchResultProcessor._resolve_spec_v2_tokens", _CHOICE,
         calls=("on_verify_complete_cpu",)),
    Name(_WORKER, "EAGLEWorkerV2.init_cuda_graphs", _HOT, calls=("init_states",)),
    Name(_WORKER, "EAGLEWorkerV2._stub_skipped_draft_extend", _COLD, ("batch", "batch_output")),
    Name(_WORKER, "EAGLEWorkerV2._forward_prefill_batch", _COLD,
         calls=("_draft_extend_for_prefill",)),
    Name(_WORKER, "EAGLEWorkerV2._draft_worker", _CHOICE),
    Name(_WORKER, "EAGLEWorkerV2.adaptive_controller", _CHOICE),
    Name(_WORKER, "EAGLEWorkerV2.speculative_num_steps", _CHOICE),
    Name(_WORKER, "EAGLEWorkerV2.speculative_num_draft_tokens", _NGRAMS),
    Name(_WORKER, "EagleDraftWorker.draft", _CHOICE, ("batch",)),
    Name(_WORKER, "EagleDraftWorker._draft_extend_for_decode", _COLD, ("batch", "batch_result")),
    Name(_WORKER, "EagleDraftWorker._draft_extend_for_prefill", _COLD,
         ("batch", "target_hidden_states", "next_token_ids")),
    Name(_WORKER, "EagleDraftWorker.tree_mask_mode", _NGRAMS),
    Name(_WORKER, "EagleDraftWorker.draft_runner", _REBUILD),
    Name(_WORKER, "EagleDraftWorker.req_to_token_pool", _REBUILD),
    Name(_BASE, "EagleDraftWorkerBase._topk1_parents_prealloc", _NGRAMS),
    Name(_BASE, "EagleDraftWorkerBase._topk1_score_indices_prealloc", _NGRAMS),
    Name(_ADAPTIVE, "AdaptiveController._activate", _CHOICE, ("speculative_num_steps",)),
    Name(_ADAPTIVE, "AdaptiveController.candidate_steps", _CHOICE),
    Name(_COMMON, "build_eagle_verify_input", _NGRAMS,
         ("batch", "draft_input", "parent_list", "top_scores_index", "draft_tokens",
          "draft_probs", "target_worker", "topk", "num_steps", "num_draft_tokens",
          "tree_mask_mode", "device")),
    Name("speculative/eagle_utils.py", "get_draft_recurrent_hidden_state_spec", _COLD,
         ("model_runner",)),
    *(Name(_INFO, f"EagleDraftInput.{name}", _COLD)
      for name in ("topk_p", "topk_index", "hidden_states", "bonus_tokens",
                   "num_tokens_per_req", "num_tokens_for_logprob_per_req")),
    *(Name(_INFO, f"EagleDraftExtendInput.{name}", _REBUILD)
      for name in ("hidden_states", "num_tokens_per_req", "num_tokens_for_logprob_per_req")),
    Name(_FORWARD, "ForwardBatch.init_new", _REBUILD,
         ("batch", "model_runner", "capture_hidden_mode", "return_hidden_states_before_norm")),
    Name(_FORWARD, "ForwardMode.EXTEND", _REBUILD),
    Name(_FORWARD, "CaptureHiddenMode.LAST", _REBUILD),
    *(Name(_BATCH, f"ScheduleBatch.{name}", _REBUILD)
      for name in ("reqs", "forward_mode", "input_ids", "req_pool_indices", "seq_lens",
                   "seq_lens_cpu", "seq_lens_sum", "orig_seq_lens", "out_cache_loc",
                   "prefix_lens", "extend_lens", "extend_num_tokens",
                   "extend_logprob_start_lens", "return_logprob", "top_logprobs_nums",
                   "token_ids_logprobs", "sampling_info", "multimodal_inputs", "spec_info")),
    # messages of the client
    *(Name(_MESSAGES, f"GenerateReqInput.{name}", _REQUESTS)
      for name in ("rid", "input_ids", "sampling_params", "return_logprob", "stream",
                   "cache_salt")),
    Name(_MESSAGES, "PauseGenerationReqInput.mode", _UPDATES),
    Name(_MESSAGES, "ContinueGenerationReqInput", _UPDATES),
    *(Name(_MESSAGES, f"{each}MemoryOccupationReqInput.tags", _ROOM)
      for each in ("Release", "Resume")),
    Name(_MESSAGES, "FlushCacheReqOutput.success", _ROOM),
    Name(_CONTROL, "TokenizerControlMixin.flush_cache", _ROOM, ("timeout_s",)),
    *(Name(_CONTROL, f"TokenizerControlMixin.{each}_memory_occupation", _ROOM, ("obj",))
      for each in ("release", "resume")),
    Name(_MESSAGES, "BeginWeightUpdateReqInput.selector", _UPDATES),
    Name(_MESSAGES, "EndWeightUpdateReqInput", _UPDATES),
    *(Name(_MESSAGES, f"UpdateWeightsFromTensorReqInput.{name}", _UPDATES)
      for name in ("serialized_named_tensors", "selector", "flush_cache", "weight_version")),
    *(Name(_MESSAGES, f"CheckWeightsReqInput.{name}", _UPDATES) for name in ("action", "selector")),
    # puts "draft." before the names of a drafter's weights
    Name(_UPDATER, "_merge_checksum_payloads", _UPDATES, ("role_payloads",)),
    # the engine without upstream's processes
    Name(_ENGINE, "Engine._launch_scheduler_processes", _START,
         ("server_args", "port_args", "run_scheduler_process_func")),
    Name(_ENGINE, "Engine._launch_detokenizer_subprocesses", _START),
    Name(_ENGINE, "Engine.shutdown", _START),
    Name(_ENGINE, "SchedulerInitResult", _START),
    Name("managers/load_snapshot.py", "shm_path_for", "no file stays in shared memory"),
    Name(_MANAGER, "TokenizerManager.auto_create_handle_loop", _START),
    Name(_MANAGER, "TokenizerManager.handle_loop", _START),
    Name(_MANAGER, "TokenizerManager.abort_request", _REQUESTS, ("rid",)),
    Name(_MANAGER, "TokenizerManager.generate_request", _REQUESTS),
    *(Name(_MANAGER, f"TokenizerManager.{name}", _UPDATES, ("obj",))
      for name in ("pause_generation", "continue_generation")),
    *(Name(_CONTROL, f"TokenizerControlMixin.{name}", _UPDATES, ("obj",))
      for name in ("begin_weight_update", "end_weight_update", "update_weights_from_tensor",
                   "check_weights")),
    Name("managers/mm_utils.py", "tensor_hash", _UPDATES),
    Name(_MESSAGES, "BatchTokenIDOutput.retraction_counts", _RETRACTED),
    Name(_ENGINE, "SchedulerInitResult.scheduler_infos", _START),
    Name("utils/common.py", "MultiprocessingSerializer.serialize", _UPDATES, ("obj",)),
    Name(_WORKER, "EAGLEWorkerV2.topk", _NGRAMS),
    Name("distributed/parallel_state.py", "get_tp_group", _TENSOR),
    Name("runtime_context.py", "get_parallel", _TENSOR),
    Name(_WORKER, "EagleDraftWorker.hot_token_id", _HOT),
    Name(_WORKER, "EagleDraftWorker.draft_forward", _HOT, ("forward_batch",)),
    Name("models/llama_eagle.py", "LlamaForCausalLMEagle.load_weights", _HOT, ("weights",)),
    Name("models/llama_eagle3.py", "LlamaForCausalLMEagle3.load_weights", _HOT, ("weights",)),
    Name("model_executor/model_runner_components/weight_updater.py",
         "WeightUpdater.update_weights_from_tensor", _HOT, calls=("load_weights",)),
    Name("layers/vocab_parallel_embedding.py", "VocabParallelEmbedding.shard_indices", _HOT),
    Name("distributed/parallel_state.py", "GroupCoordinator.all_reduce", _HOT, ("input_",)),
    # patches for CPUs
    Name("layers/attention/attention_registry.py", "ATTENTION_BACKENDS", _CPU),
    Name("speculative/eagle_utils.py", "_verify_uses_greedy", _CPU, ("is_all_greedy",)),
    *(Name(f"arg_groups/fields/{_argument_file(place)}", f"{place}.{name}", _START)
      for place, names in _ARGUMENTS.items() for name in names.split()),
)

READ = (
    Name(_SCHEDULER, "Scheduler.model_worker", "reports of tallies"),
    *(Name("managers/utils.py", f"GenerationBatchResult.{name}", _TAP)
      for name in ("next_token_ids", "accept_lens", "copy_done", "logits_output",
                   "speculative_num_draft_tokens")),
    *(Name("layers/logits_processor.py", f"LogitsProcessorOutput.{name}", _TAP)
      for name in ("hidden_states", "last_hidden_states", "next_token_logits")),
    *(Name(_BATCH, f"Req.{name}", _CHOICE)
      for name in ("rid", "origin_input_ids", "output_ids", "finished_len", "finished")),
    Name(_BATCH, "ScheduleBatch.is_extend_in_batch", _CHOICE),
    Name(_FORWARD, "ForwardMode.is_decode", _CHOICE),
    Name(_FORWARD, "ForwardMode.is_extend", _TAP),
    Name("runtime_context.py", "get_serving", _TAP),
    *(Name("distributed/parallel_state.py", f"GroupCoordinator.{name}", _TENSOR)
      for name in ("ranks", "rank_in_group", "world_size", "cpu_group")),
)
# fmt: on


class Source:
    """The parsed source of SGLang, one file at a time."""

    def __init__(self, root: Path, changed: Mapping[str, str] | None = None) -> None:
        """Read the package in `root`; `changed` replaces the text of some files."""
        self._root = root
        self._changed = changed or {}
        self._trees: dict[str, ast.Module] = {}

    def complaint(self, wanted: Name) -> str | None:
        """Say what is wrong with a name, or return None."""
        found = self._find(wanted)
        if found is None:
            return f"{wanted.file} has no {wanted.name}, which breaks {wanted.breaks}"
        if wanted.parameters and not isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef):
            return f"{wanted.file}: {wanted.name} is no function, which breaks {wanted.breaks}"
        if isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef):
            known = {arg.arg for arg in (*found.args.posonlyargs, *found.args.args)}
            known |= {arg.arg for arg in found.args.kwonlyargs}
            if lacks := set(wanted.parameters) - known:
                what = f"has no parameter {min(lacks)}"
                return f"{wanted.file}: {wanted.name} {what}, which breaks {wanted.breaks}"
        if lacks := set(wanted.calls) - set(_called(found)):
            what = f"doesn't call {min(lacks)}"
            return f"{wanted.file}: {wanted.name} {what}, which breaks {wanted.breaks}"
        return None

    def _find(self, wanted: Name) -> ast.AST | None:
        first, _, rest = wanted.name.partition(".")
        top = next((node for node in self._tree(wanted.file).body if first in _names(node)), None)
        if top is None or not rest:
            return top
        assert isinstance(top, ast.ClassDef)
        if (direct := next((n for n in top.body if rest in _names(n)), None)) is not None:
            return direct
        return next((node for node in ast.walk(top) if rest in _attributes_set(node)), None)

    def _tree(self, file: str) -> ast.Module:
        if file not in self._trees:
            text = self._changed.get(file) or (self._root / file).read_text()
            self._trees[file] = ast.parse(text)
        return self._trees[file]


def complaints(source: Source) -> list[str]:
    """Return what SGLang lacks of both lists."""
    found = (source.complaint(name) for name in (*RELIED_ON, *READ))
    return [complaint for complaint in found if complaint is not None]


def installed() -> Path:
    """Return the folder of SGLang's runtime, found without importing it."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "srt"


def _names(node: ast.AST) -> Sequence[str]:
    """Return the names that a statement of a module or class defines."""
    match node:
        case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            return (name,)
        case ast.AnnAssign(target=ast.Name(id=name)):
            return (name,)
        case ast.Assign(targets=targets):
            return [target.id for target in targets if isinstance(target, ast.Name)]
        case _:
            return ()


def _attributes_set(node: ast.AST) -> Sequence[str]:
    """Return the attributes of `self` that a statement sets."""
    targets = node.targets if isinstance(node, ast.Assign) else ()
    if isinstance(node, ast.AnnAssign):
        targets = (node.target,)
    flat = [e for t in targets for e in (t.elts if isinstance(t, ast.Tuple) else (t,))]
    return [
        target.attr
        for target in flat
        if isinstance(target, ast.Attribute)
        and isinstance(target.value, ast.Name)
        and target.value.id == "self"
    ]


def _called(node: ast.AST) -> Iterator[str]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Call):
            match inner.func:
                case ast.Attribute(attr=name) | ast.Name(id=name):
                    yield name
                case _:
                    pass


def main() -> None:
    found = complaints(Source(installed()))
    for complaint in found:
        print(f"SGLang: {complaint}")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
