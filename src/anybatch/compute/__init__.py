"""Applies a plan to a model and computes a training step on one device."""

from anybatch.compute.along_sequence import find_mlps as find_mlps
from anybatch.compute.blocks import find_blocks as find_blocks
from anybatch.compute.blocks import find_chains as find_chains
from anybatch.compute.blocks import find_recomputable as find_recomputable
from anybatch.compute.ghost_norm import DEFAULT_GHOST_BATCH as DEFAULT_GHOST_BATCH
from anybatch.compute.replica import Replica as Replica
