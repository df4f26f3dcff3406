"""Evaluations of drafters for tests of idle training."""

from hypothesis import strategies as st

from tlt.base.id_types import DrafterVersion
from tlt.policies.drafter.training_evidence import EvaluatedVersion

accept_lengths = st.floats(1.0, 12.0)
evaluated_versions = st.lists(
    st.builds(
        EvaluatedVersion,
        version=st.integers(1, 1000).map(DrafterVersion),
        micro_batches=st.integers(0, 100_000),
        accept_length_before=st.none() | accept_lengths,
        accept_length=accept_lengths,
    ),
    max_size=60,
)
