"""The list of all benchmarks, in the order in which `make bench` runs them.

`python -m benchmarks.catalogue` prints their names; docs/benchmarks.md takes the sentences.
"""

BENCHMARKS = {
    "road": (
        "A fresh clone with an empty home runs `make demo`; then Transformers loads the exported"
        " policy and answers the same held-out problems with its own sampler."
    ),
    "engine": (
        "The native engine decodes against Transformers' `generate`, all answers of one length,"
        " log-probs and hidden states included on our side; CPU seconds of one thread."
    ),
    "slots": (
        "One rollout batch of 128 answers with a long tail is decoded with 16 to 128 slots, by the"
        " tiny reasoner, SmolLM2-135M and random weights in the shape of Qwen2.5-0.5B; SGLang"
        " decodes it with 16 and 64 answers at once. CPU seconds, of the chosen number of slots by"
        " those of the best."
    ),
    "learner": (
        "The policy update runs against the same Transformers model as it comes, on the samples of"
        " a real step; tokens per CPU second."
    ),
    "peer_losses": (
        "Losses of the presets, advantages and corrections of the sampler are computed in float64"
        " by the code of TRL and verl, and by TLT's, on answers beyond every bound: differences of"
        " losses and gradients, relative to the largest. TRL adds 1e-4 to a group's deviation, verl"
        " and TLT 1e-6."
    ),
    "peer_step": (
        "A step of SmolLM2-135M by TRL's GRPOTrainer, in the fastest of several settings, against"
        " TLT's: the same prompts, sizes and cores, in turns; seconds of rollouts and updates, and"
        " tokens a second of both, because answers are drawn anew. TLT leaves groups out of its"
        " update whose answers have equal rewards, and TRL may generate in bfloat16."
    ),
    "sglang": (
        "SGLang 0.5.23 starts on this CPU from its unmodified wheel: seconds to start, memory with"
        " its rank."
    ),
    "sglang_speculation": (
        "SGLang decodes with TLT's speculation, without any, in a server that could speculate but"
        " never does, and with SGLang's own adaptive speculation; by turns, tokens a second."
    ),
    "sglang_foreign": (
        "SGLang decodes what nothing can be guessed of, without speculation and with TLT's, with a"
        " useless drafter; then whole jobs, with and without."
    ),
    "ngram": (
        "N-grams propose what followed the same tokens before: accept length from finished"
        " siblings, the cost of the index, and what the engine gains from it without a drafter."
    ),
    "drafter": (
        "A drafter learns from random weights for 60 CPU seconds on answers of the tiny reasoner"
        " and is measured on held-out prompts."
    ),
    "hot_tokens": (
        "SmolLM2-135M, whose vocabulary has 49,152 tokens, gets two drafters, one that can propose"
        " all tokens and one of 4,096: how fast both learn from the same micro-batches, and decode"
        " the same requests, in turns."
    ),
    "lossless": (
        "Answers decoded with every strategy, and with strategies and drafters that change at"
        " random, are compared token by token with answers decoded without speculation."
    ),
    "speculation": (
        "The native engine decodes full batches with adaptive speculation, without any, and with"
        " the best fixed strategies; one thread."
    ),
    "foreign": (
        "Policies of many shapes, tasks and acceptances that nothing was tuned for decode the same"
        " requests without speculation and with its defaults, in turns in one process; then whole"
        " jobs of each."
    ),
    "ledger": (
        "The savings that simulated jobs claim are compared with the truth: how often the interval"
        " covers it, and how wide it is."
    ),
    "simulate": (
        "Simulated workers decode answers with lengths of DAPO-Math's shape, with each cure for"
        " long ones and without; the paper's speed-ups by nodes, of which three are forecast after"
        " a fit to the others; the second halves of real runs, by the costs of the first and the"
        " lengths that they had; a step of 4,096 workers in each mode."
    ),
    "paced": (
        "16 and 64 workers that take as long as GPUs would, on a clock many times as fast,"
        " before a real Redis and a real coordinator: seconds of whole jobs by mode, beside what"
        " `tlt simulate` says, which was fitted to none of it."
    ),
    "data_plane": (
        "A rollout batch of 1,024 answers of 4,000 tokens, simulated but for those, passes"
        " through Redis and the coordinator on its way from 16 workers: CPU, memory, bytes a token."
    ),
    "scaling": (
        "Up to 1,024 simulated workers before a real Redis and a real coordinator, which has a core"
        " of its own: from a worker's event to the command that answers it, events a second, CPU"
        " time of an event."
    ),
    "dashboard": (
        "The dashboard follows a job of 1,000 workers and 200 events a second: CPU, memory, and"
        " delay at its listeners."
    ),
    "sweep": (
        "Each stack of `e2e` is tried with several numbers of slots and micro-batch sizes, to find"
        " the settings that it is fastest with."
    ),
    "presets": (
        "The tiny reasoner is trained for 12 steps with each `algorithm.preset`, the same prompts"
        " and seed; points gained on 320 held-out problems."
    ),
    "dynamic_sampling": (
        "Groups that agree are replaced within their rollout batch, or not: the decode seconds that"
        " it costs, by the share of groups that updates learn from and wouldn't have."
    ),
    "answer_survival": (
        "Answers are forced through the weights of the next version: the share q of positions at"
        " which the answer's own noise selects another token. Of an answer of L tokens the first (1"
        " - (1 - q)^L) / q would stay the same. The control is the version that drew them."
    ),
    "accuracy": (
        "Pairs of jobs with the same seed, one without speculation and one with drafter training"
        " from random weights, are evaluated on the same held-out problems."
    ),
    "e2e": (
        "Whole jobs, two workers of one core each, submitted as `tlt submit` does and taking turns:"
        " no speculation (off), n-grams alone, a frozen drafter, and all of TLT, with 64 answers a"
        " worker and with 16 (tail)."
    ),
    "cold": (
        "The same with 32 answers a worker in jobs that start without a drafter, of 30 steps and of"
        " 8; also with a drafter that idle workers always train."
    ),
    "real_model": (
        "SmolLM2-135M learns sums with short answers, and word problems with answers of up to 200"
        " tokens: whole jobs without speculation, and with a drafter that idle workers train from"
        " random weights."
    ),
    "trained_drafter": (
        "SmolLM2-135M learns sums in its chat template with a drafter that was trained before, on"
        " the policy's own answers to other prompts: rollouts and steps without speculation, with"
        " that drafter frozen, trained on by idle workers, and with n-grams."
    ),
    "by_product": (
        "The drafters that two jobs leave behind, one with the native engine and one with SGLang,"
        " decode in both engines: accept lengths, and how far apart they are."
    ),
    "weights": (
        "A rank publishes 0.6B weights in bfloat16 until two engines of the host have the verified"
        " bytes, alone and with a second one that holds half of them; then a delta of an 8B"
        " policy's drafter. In copies of the same bytes within shared memory by a thread on each"
        " core."
    ),
    "members": (
        "Three workers train one drafter together, against one that trains it alone with as many"
        " micro-batches."
    ),
    "recovery": (
        "Each process of a session is killed in the middle of a job: seconds until all are up again"
        " (after the death of the supervisor: by `tlt up`), the slower of some times, and answers"
        " that were lost or counted twice."
    ),
    "soak": (
        "Jobs of many shapes come and go for half an hour, and once a minute a process is killed:"
        " what processes and the session keep after each job, and how fast it grows. A process's"
        " memory is its anonymous memory; slopes leave out the first eight jobs, and the first"
        " three of a process that was started again."
    ),
    "environments": (
        "256 answers of up to eight turns, 16 slots: environments that wait two seconds a turn"
        " against some that don't, with the same answers; seconds of the rollouts."
    ),
    "early_ends": (
        "Whole jobs of the tiny reasoner whose steps wait for all answers, cut the longest"
        " (`rollout.partial`), put them off (`rollout.defer_long`) or overlap"
        " (`algorithm.staleness`): seconds, and what the policies score in the end."
    ),
    "chaos": (
        "Seeded faults hit live jobs, one after the other: processes killed and stopped, messages"
        " doubled and late, files damaged, disk, memory and clock taken away; answers lost or"
        " counted twice, by the journal and by what updates learned from."
    ),
}

if __name__ == "__main__":
    print(*BENCHMARKS)
