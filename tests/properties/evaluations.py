"""Evaluations of drafters for tests of predictions and of the gate."""

from hypothesis import strategies as st

from tlt.id_types import DrafterVersion
from tlt.policies.drafter.learning_curve import EvaluatedVersion

accept_lengths = st.floats(1.0, 12.0)
evaluated_versions = st.lists(
    st.builds(
        EvaluatedVersion,
        version=st.integers(1, 1000).map(DrafterVersion),
        micro_batches=st.integers(0, 100_000),
        used=st.none() | accept_lengths,
        trained=accept_lengths,
    ),
    max_size=60,
)
# a job of 64 answers a step, evaluated seven times in step 1 and once each in steps 4 and 8
FEW_ANSWERS = [
    EvaluatedVersion(
        version=DrafterVersion(i), micro_batches=micro_batches, used=used, trained=trained
    )
    for i, (micro_batches, used, trained) in enumerate(
        [
            *((54, None, 1.556), (103, 1.556, 1.798), (152, 1.798, 1.956), (202, 1.956, 2.125)),
            *((252, 2.125, 2.276), (301, 2.276, 2.335), (350, 2.335, 2.48)),
            *((402, 2.13, 2.512), (453, 2.442, 2.696)),
        ]
    )
]
