// Names on the page for values of the journal.

export const DUTY_NAMES = {
  rollout: "rollout",
  draft: "drafter training",
  preempting: "stopping drafter training",
  learn: "policy update",
  waiting: "waiting for weights",
  idle: "idle",
  leaving: "restarting ranks",
  away: "away",
};

export const PHASE_NAMES = {
  starting: "starting",
  evaluating: "evaluating",
  rolling: "rollout",
  drafting: "reserved drafter training",
  learning: "policy update",
  paused: "paused",
  ended: "ended",
};

export const DECISION_NAMES = {
  train: "idle workers train it",
  rest: "training would not pay now",
  buy: "all workers train it for a while",
  adopt: "a better one is used from now on",
  reject: "the new one is not better",
  return: "training restarts from the drafter in use",
};

export const ORIGIN_NAMES = {
  accepted: "proposed and accepted",
  corrected: "corrected by the policy",
  plain: "nothing was proposed",
};
