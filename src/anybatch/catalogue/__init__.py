"""Catalogue: vendor specifications of devices that need not be present.

rows     the devices: memory, rates, links, and the source documents
names    lookup of a device by the name that a user or a driver gives
"""

from anybatch.catalogue.names import find as find
from anybatch.catalogue.names import knows as knows
from anybatch.catalogue.names import recognise as recognise
from anybatch.catalogue.rows import MODELS as MODELS
from anybatch.catalogue.rows import Model as Model
