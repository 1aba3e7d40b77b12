"""Data sets, registered and users' own, and their partition among clients.

Read in this order: `examples` (the result), `spec` (the description), `load` (from one to the other), `registry` (what
can be read), `partition` (how it is dealt), `pool` (why a small client needs little memory).
"""

from hyperbloom.common.data.examples import ClientData, Examples, laid_out
from hyperbloom.common.data.load import DataSource, data_source, load_client_data, read_reference, source_under
from hyperbloom.common.data.partition import PARTITIONERS
from hyperbloom.common.data.registry import DATASETS
from hyperbloom.common.data.spec import DataSpec
