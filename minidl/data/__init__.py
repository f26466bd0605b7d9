"""Data as NumPy batches: embedded, generated, or from local files and functions. Nothing is ever downloaded.

It knows nothing of tensors, devices, models or schedules. Every number depends only on the data's name, the seed and
the position in the order, never on how many ranks share a batch.
"""

from .arrays import from_arrays
from .catalogue import NAMES, digits, load, say
from .dataset import IGNORED, DataError, Dataset, LabelError, Scaling, adapt
from .loader import Loader

__all__ = ["IGNORED", "NAMES", "DataError", "Dataset", "LabelError", "Loader", "Scaling", "adapt", "digits",
           "from_arrays", "load", "say"]
