import os
import signal

# Before Flower is imported anywhere: it reads both when it is.
os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ.setdefault("FLWR_LOG_LEVEL", "ERROR")

import torch

# Small products are many times slower on several threads of a busy machine, and equal to the bit on one.
torch.set_num_threads(1)

# A shell's background jobs ignore Ctrl-C, and so would all that the tests start and stop by it.
signal.signal(signal.SIGINT, signal.default_int_handler)
