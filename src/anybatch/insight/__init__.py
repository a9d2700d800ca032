"""Insight: what a run's own figures tell about how to train: is the batch worth what it costs.

Pure arithmetic on events and plans: no torch, no device. Whoever draws or prints is above or beside it.
"""

from anybatch.insight.batch import Batch as Batch
from anybatch.insight.batch import fastest as fastest
from anybatch.insight.batch import fixed_part as fixed_part
from anybatch.insight.noise import NoiseScale as NoiseScale
from anybatch.insight.noise import latest as latest
from anybatch.insight.noise import mean_over as mean_over
from anybatch.insight.noise import scale_of as scale_of
from anybatch.insight.noise import windows as windows
from anybatch.insight.series import Block as Block
from anybatch.insight.series import Series as Series
from anybatch.insight.series import block_of as block_of
from anybatch.insight.told import ASSUMPTIONS as ASSUMPTIONS
from anybatch.insight.told import lines as lines
from anybatch.insight.told import unmeasured as unmeasured
