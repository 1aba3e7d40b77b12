"""Data sets, registered and users' own, and their partition among clients.

Read in this order: `examples` (the result), `spec` (the description), `load` (what can be read, and how one comes from
the other), `partition` (how it is dealt), `pool` (why a small client needs little memory).
"""

from hyperbloom.common.data.examples import ClientData, Examples, laid_out
from hyperbloom.common.data.load import (
    DATASETS,
    DataSource,
    data_source,
    load_client_data,
    read_reference,
    source_under,
)
from hyperbloom.common.data.partition import PARTITIONERS
from hyperbloom.common.data.spec import DataSpec
