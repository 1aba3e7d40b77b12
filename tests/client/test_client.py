"""What `flower-client` imports until it says hello: what a client needs, and nothing of what it never calls."""

import signal
import subprocess
import sys
from pathlib import Path

NEEDED = {"torch", "numpy", "flwr", "grpc", "cryptography", "safetensors", "hyperbloom"}
NEVER = {
    *("uvicorn", "flwr.cli", "flwr.simulation", "ray"),
    *("sklearn", "scipy", "torchvision", "PIL", "matplotlib", "onnx", "onnxscript", "dp_accounting", "jinja2"),
    *("torch._dynamo", "torch._inductor", "torch.onnx", "sympy", "hyperbloom.server", "hyperbloom.strategies"),
}


def imported_by_a_client(folder: Path) -> set[str]:
    """Return every module that a real client imports, until it finds nobody at the server's address."""
    words = [sys.executable, "-X", "importtime", "-m", "hyperbloom.client", "--server", "127.0.0.1:1", "--insecure"]
    words += ["--client-id", "one", "--data", "digits", "--partition", "0/6", "--state-dir", str(folder)]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as client:
        assert client.stderr is not None
        lines = []
        for line in client.stderr:
            lines.append(line)
            if "does not answer" in line:
                client.send_signal(signal.SIGINT)
    assert client.returncode == 0, lines[-5:]
    return {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}


def test_a_client_imports_nothing_that_it_never_calls(tmp_path: Path) -> None:
    found = imported_by_a_client(tmp_path)
    packages = {".".join(name.split(".")[:length]) for name in found for length in (1, 2)}
    assert packages >= NEEDED
    assert packages & NEVER == set()
