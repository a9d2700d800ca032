"""Ready tasks on real data, and the way from a word on the command line to a `Task`.

To list what there is must cost nothing, so importing this package loads neither torch nor the
libraries of a recipe: `resolve` does, for the one that is asked for.
"""

from __future__ import annotations

from anybatch.recipes.registry import Option as Option
from anybatch.recipes.registry import file_of as file_of
from anybatch.recipes.registry import names as names
from anybatch.recipes.registry import options_of as options_of
from anybatch.recipes.registry import own_traceback as own_traceback
from anybatch.recipes.registry import resolve as resolve
from anybatch.recipes.registry import sha256_of as sha256_of
