"""Proves on the user's task that a plan computes the gradient of the whole batch.

A sample of the data runs through the same model and loss in two ways: in one piece, and in the pieces
and with the recompute of a plan. In float64, where rounding errors are negligible, the two gradients
agree to about 1e-15 if the task is exact, and differ by percents if something in it computes across the
samples of a micro-batch. In that case possible causes are removed one at a time: the one whose removal
makes the difference disappear is reported.
"""

from anybatch.proof.verdict import TOLERANCES as TOLERANCES
from anybatch.proof.verdict import Verdict as Verdict
from anybatch.proof.verdict import verify as verify
