"""The metrics of an update can be encoded even after divergence."""

import math

import msgspec
import pytest
import torch

from tlt.protocol.shared_values import UpdateMetrics
from tlt.trainer.policy.loss.update_metrics import MetricSums


@pytest.mark.parametrize("divergence", [math.inf, math.nan])
def test_reports_a_metric_that_is_not_a_number_as_huge(divergence: float):
    tally = MetricSums(torch.device("cpu"))
    tally.add_comparison(torch.tensor([0.5, divergence]), torch.tensor([0.0, 1.0]))
    tally.add_step(2.0)
    metrics = tally.metrics(1e-3, False, 1, None)
    assert 1e200 < metrics.sampling_kl < math.inf
    assert metrics.importance_truncated == 0.5
    assert msgspec.json.decode(msgspec.json.encode(metrics), type=UpdateMetrics) == metrics
