"""Launch: starts ranks, finds their membership and joins them, on one machine or several."""

from __future__ import annotations

from anybatch.launch.agent import call as call
from anybatch.launch.agent import parse_nodes as parse_nodes
from anybatch.launch.agent import read_secret as read_secret
from anybatch.launch.agent import run_command as run_command
from anybatch.launch.board import open_board as open_board
from anybatch.launch.exits import leave as leave
from anybatch.launch.membership import Membership as Membership
from anybatch.launch.membership import find as find
from anybatch.launch.membership import join as join
