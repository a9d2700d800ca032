"""Catalogue: what the makers say of devices that need not be here.

rows     the devices: memory, rates, links, and the documents they stand in
names    which of them a person or a driver means
"""

from anybatch.catalogue.names import find as find
from anybatch.catalogue.names import knows as knows
from anybatch.catalogue.names import recognise as recognise
from anybatch.catalogue.rows import MODELS as MODELS
from anybatch.catalogue.rows import Model as Model
