"""Proof: that a plan computes the gradient of the whole batch, on the user's own task.

A sample of the data is run two ways through the same model and loss: in one piece, and in the pieces
and with the recompute of a plan. In float64, where rounding is out of the way, the two gradients agree
to about 1e-15 if the task is exact, and differ by percents if something in it looks across a
micro-batch. Then the causes are tried one at a time: what is taken away when the difference goes
is what made it.
"""

from anybatch.proof.verdict import TOLERANCES as TOLERANCES
from anybatch.proof.verdict import Verdict as Verdict
from anybatch.proof.verdict import verify as verify
