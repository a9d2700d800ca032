"""Recipes: predefined tasks on real data, and the resolution of a command-line argument to a `Task`.

Listing the recipes must be cheap, so importing this package loads neither torch nor the libraries of
any recipe; `resolve` loads those of the requested recipe.
"""

from __future__ import annotations

from anybatch.recipes.registry import file_of as file_of
from anybatch.recipes.registry import names as names
from anybatch.recipes.registry import options_of as options_of
from anybatch.recipes.registry import own_traceback as own_traceback
from anybatch.recipes.registry import resolve as resolve
from anybatch.recipes.registry import sha256_of as sha256_of
