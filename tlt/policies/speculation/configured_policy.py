"""Make the strategy policy that a job's spec describes; both engines decode with it."""

from tlt.base.strategies import Strategy
from tlt.policies.speculation.adaptive_strategy import AdaptivePolicy
from tlt.policies.speculation.control_runs import ControlRunPolicy
from tlt.policies.speculation.fixed_strategy import FixedPolicy
from tlt.policies.speculation.strategy_policy import StrategyPolicy


def configured_policy(fixed: Strategy | None, control_share: float) -> StrategyPolicy:
    """Return a policy that always chooses `fixed`, or adapts, with a share of control runs."""
    policy = AdaptivePolicy() if fixed is None else FixedPolicy(fixed)
    return ControlRunPolicy(policy, control_share) if control_share > 0 else policy
