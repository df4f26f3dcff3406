// Values of the journal that the page lists, and texts that say more than a value.

// as in the legend, and one colour each
export const DUTIES = ["rollout", "next_step", "drafter_training", "stopping", "policy_update", "waiting_for_weights", "idle", "restarting", "away"];

export const DECISION_NAMES = {
  train: "idle workers train it",
  wait: "it is not trained now",
  adopt: "a better one is used from now on",
  reject: "the new one is not better",
  restart: "training restarts from the drafter in use",
};

export const ORIGIN_NAMES = {
  accepted: "proposed and accepted",
  corrected: "corrected by the policy",
  environment: "written by the environment",
  plain: "nothing was proposed",
};
